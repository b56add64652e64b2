"""Rows of each (sequence, kv head), where heads need different numbers of them (SPEC section 17).

A cache whose heads are alike has arrays ``(B, Hkv, R, ...)``. Otherwise they are flat, ``(T, ...)``: a segment of
``count[b, h]`` rows from ``start[b, h]`` on for every sequence and kv head, one after the other. So memory is the
sum of what heads need. The host knows all sizes, which change only where a cache grows.

Why segments and not pages of a fixed size: slots have no order, so a head that grows can be copied as it is; a kernel's
block reads its segment once, where a table of pages would be one more load, and its latency, ahead of every step.

Kernels read segments where they are. Array code works on a ``rectangular`` copy, in which slots from ``count`` on are
empty and stay so, and puts it back with ``contents``. Call within ``state.library.on(state.device)``.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from cupy_dma.arrays import Device, Library
from cupy_dma.cache.state import CacheState, Segments
from cupy_dma.calls.head_dims import movable

EMPTY = {"positions": -1, "in_top": 0}


def segments_of(library: Library, device: Device, sizes: tuple[int, ...], batch: int, kv_heads: int) -> Segments:
    """Segments of these sizes, of all kv heads of the first sequence, then of the next."""
    if sum(sizes) >= 2**31:
        raise ValueError(f"a cache must have less than 2**31 rows of all sequences and kv heads, got {sum(sizes)}")
    own = sizes[:kv_heads]
    if own * batch == sizes:
        count = library.full((batch, kv_heads), 0, "int32", device)
        order = library.full((kv_heads, batch), 0, "int64", device)
        first = library.arange(0, batch, device) * kv_heads
        for place, head in enumerate(np.argsort([-size for size in own], kind="stable").tolist()):
            count[:, head] = own[head]  # numbers of the host, also while a graph is captured
            order[place] = first + head
    else:
        count = library.from_numpy(np.array(sizes, np.int32).reshape(batch, kv_heads), device)
        order = library.from_numpy(np.argsort([-size for size in sizes], kind="stable"), device)
    end = library.cumsum(count.reshape(-1)).reshape(batch, kv_heads)
    return Segments(sizes, library.operand(count, "count"),
                    library.operand(library.astype(end - count, "int64"), "start"),
                    library.operand(order.reshape(-1), "order"))


def selected(state: CacheState, rows: Any) -> Segments | None:
    """Segments for the sequences ``rows (n,)``, the same object if sizes are. Reads these numbers where sequences
    differ."""
    if state.segments is None:
        return None
    library, sizes, heads = state.library, state.segments.sizes, state.kv_heads
    each, n = [sizes[i:i + heads] for i in range(0, len(sizes), heads)], int(rows.shape[0])
    chosen = library.to_numpy(rows).tolist() if len(set(each)) > 1 else [0] * n
    found = tuple(chain(*(each[b] for b in chosen)))
    return state.segments if found == sizes else segments_of(library, state.device, found, n, heads)


def rectangular(state: CacheState, names: Iterable[str] | None = None, slots: int | None = None) -> CacheState:
    """The state with arrays ``(B, Hkv, R, ...)`` of these names: itself, or with copies, of ``slots`` only."""
    if state.segments is None or state.key.ndim == 4:
        return state
    library, xp, count = state.library, state.library.xp, state.segments.count.array[..., None]
    slot = library.astype(library.arange(0, state.rows if slots is None else slots, state.device), "int64")
    exists = slot < count
    place = xp.where(exists, state.segments.start.array[..., None] + slot, 0)
    made = {}
    for name in state.per_row if names is None else names:
        old = getattr(state, name)
        array = library.empty((*exists.shape, *old.shape[1:]), old.dtype, state.device)
        found = movable(library, old.array, old.dtype)[place]
        movable(library, array, old.dtype)[...] = xp.where(exists, found, EMPTY[name]) if name in EMPTY else found
        made[name] = library.operand(array, name)
    return state.having(made)


def contents(source: CacheState, target: CacheState, rows: Any, names: Iterable[str]) -> Iterator[Any]:
    """The arrays ``names`` of the sequences ``rows (n,)`` of ``source``, by default all, laid out as ``target``'s."""
    alike = target.segments is None
    if target.segments is not None and source.segments is not None and rows is None and source.positions.ndim == 1:
        alike = source.segments.sizes == target.segments.sizes
    place = None
    for name in names:
        operand = getattr(source, name)
        array = movable(source.library, operand.array, operand.dtype)
        if alike or name not in source.per_row:
            yield array if rows is None else array[rows]
            continue
        place = place or _places(source, target, rows)
        index, exists = place
        found = array[index]
        yield source.library.xp.where(exists, found, EMPTY[name]) if name in EMPTY else found


def owners(state: CacheState) -> Any:
    """int64 ``(T,)``: the sequence of each row."""
    return _pairs(state)[1] // state.kv_heads


def _pairs(state: CacheState) -> tuple[Any, Any]:
    """int64 ``(T,)`` each: the rows of flat arrays, and the number of the (sequence, kv head) of each."""
    assert state.segments is not None
    library = state.library
    row = library.astype(library.arange(0, sum(state.segments.sizes), state.device), "int64")
    start = state.segments.start.array.reshape(-1)
    return row, library.astype(library.search_right(start, row) - 1, "int64")


def _places(source: CacheState, target: CacheState, rows: Any) -> tuple[Any, Any]:
    """For each of the target's rows: its index in the source's arrays, and whether it has one."""
    assert target.segments is not None and source.segments is not None
    xp, (row, pair) = source.library.xp, _pairs(target)
    start = target.segments.start.array.reshape(-1)
    slot, sequence, head = row - start[pair], pair // source.kv_heads, pair % source.kv_heads
    sequence = sequence if rows is None else rows[sequence]
    if source.positions.ndim == 3:
        exists = slot < source.positions.shape[2]
        return (sequence, head, xp.where(exists, slot, 0)), exists
    exists = slot < source.segments.count.array[sequence, head]
    return xp.where(exists, source.segments.start.array[sequence, head] + slot, 0), exists
