"""Whole sequences of a cache: creation, copies, reordering and saving. Call within ``library.on(device)``.

Whoever changes a cache computes new arrays first and then copies them into place (``copy_rows``), which allocates
nothing: a call that runs out of memory has changed nothing.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Device, Library, Operand, describe
from cupy_dma.cache.segments import contents, owners, segments_of
from cupy_dma.cache.slots import flagged_first, index, needed, refreshed
from cupy_dma.cache.state import CODES, SCALES, CacheState, Segments
from cupy_dma.calls.head_dims import movable
from cupy_dma.masks.windows import Window, widest

NUMBERS = ("window", "sinks", "recent", "threshold")
SIZES = "rows"  # in a saved state: how many rows each sequence and kv head has, where they differ
OCCUPIED = "occupied"  # in the workspace: how many slots of each head may be occupied, the first ones


def empty_state(library: Library, device: Device, dtype: str, batch: int, kv_heads: int,
                numbers: tuple[Window, int, int, float], head_dim: int, value_dim: int,
                segments: Segments | None = None, storage: str | None = None) -> CacheState:
    """A cache without tokens; ``numbers`` are window, sinks, recent and threshold. Windows that differ, or segments
    that are given, make arrays flat."""
    window, sinks, recent, _ = numbers
    scores = "float64" if dtype == "float64" else "float32"
    if isinstance(window, tuple) and segments is None:
        sizes = tuple([size + sinks + recent for size in window]) * batch
        segments = segments_of(library, device, sizes, batch, kv_heads)
    rows = (batch, kv_heads, widest(window) + sinks + recent) if segments is None else (sum(segments.sizes),)

    def make(name: str, kind: str, *shape: int, value: int = 0) -> Operand:
        return library.operand(library.full(shape, value, kind, device), name)

    kind = dtype if storage is None else CODES[storage]
    found = CacheState(
        make("key", kind, *rows, head_dim), make("value", kind, *rows, value_dim), make("scores", scores, *rows),
        make("positions", "int64", *rows, value=-1), make("in_top", "uint8", *rows), make("lengths", "int64", batch),
        make("lowest", "int32", batch, kv_heads), make("lowest_score", scores, batch, kv_heads),
        make("free", "int32", batch, kv_heads), *numbers, make("tickets", "int32", batch * kv_heads + batch), segments)
    if storage is not None:
        scales = {name: make(name, "float32", *rows) for name in SCALES}
        found = replace(found, computed=dtype, **scales)  # type: ignore[arg-type]
    found.lowest.array[...] = -found.each_window
    return found


def with_segments(state: CacheState, segments: Segments | None, batch: int) -> CacheState:
    """A cache like this one, of ``batch`` sequences without tokens, with these segments."""
    window = state.window
    if segments is not None and isinstance(window, int):  # it grows
        window = max(segments.sizes, default=window + state.sinks + state.recent) - state.sinks - state.recent
    return empty_state(state.library, state.device, state.dtype, batch, state.kv_heads,
                       (window, state.sinks, state.recent, state.threshold), state.head_dim, state.value_dim, segments,
                       state.storage)


def resized(state: CacheState, segments: Segments) -> CacheState:
    """The same contents in larger segments."""
    found = with_segments(state, segments, state.batch)
    copy_rows(state, found, names=state.saved)
    return refreshed(found)


def forget(state: CacheState, sequences: Any = None) -> None:
    """Remove all tokens, in place, or those of ``sequences``, bool ``(B,)``."""
    xp, writes = state.library.xp, []
    for operand, value in ((state.positions, -1), (state.in_top, 0), (state.lengths, 0), (state.free, 0),
                           (state.lowest, -state.each_window)):
        if sequences is not None:
            is_flat = operand.name in state.per_row and state.segments is not None
            chosen = sequences[owners(state)] if is_flat else sequences
            chosen = chosen.reshape(-1, *(1,) * (operand.ndim - 1))
            value = xp.where(chosen, value, operand.array)
        writes.append((operand.array, value))
    for array, value in writes:  # all of them were allocated before anything changes
        array[...] = value
    state.workspace.pop(OCCUPIED, None)


def copy_rows(source: CacheState, target: CacheState, rows: Any = None, names: Iterable[str] | None = None) -> None:
    """Copy the sequences ``rows (n,)`` of ``source``, by default all, into ``target``, which may be ``source``.
    Without ``rows`` and into the same segments nothing is allocated."""
    names = source.arrays if names is None else names
    arrays: Iterable[Any] = contents(source, target, rows, names)
    if source is target or target.segments is not None:
        arrays = list(arrays)  # all of them before the first is overwritten
    for name, array in zip(names, arrays):
        bits(getattr(target, name))[...] = array
    target.workspace.pop(OCCUPIED, None)


def copied(state: CacheState, names: Iterable[str] | None = None) -> CacheState:
    """The state with copies of these arrays."""
    def copy(operand: Operand) -> Operand:
        array = state.library.empty(operand.shape, operand.dtype, state.device)
        made = state.library.operand(array, operand.name)
        bits(made)[...] = bits(operand)
        return made

    return state.having({name: copy(getattr(state, name)) for name in (state.arrays if names is None else names)})


def numbers_of(state: CacheState) -> dict[str, Any]:
    """Those that define what is kept; no threshold where none is set."""
    return {name: getattr(state, name) for name in NUMBERS if name != "threshold" or state.threshold > -inf}


def saved_state(state: CacheState) -> dict[str, Any]:
    """Copies of the arrays, and the numbers that define their meaning."""
    copies, found = copied(state, state.saved), numbers_of(state)
    if state.segments is not None:
        found[SIZES] = [[*state.segments.sizes[b * state.kv_heads:][:state.kv_heads]] for b in range(state.batch)]
    return found | {name: getattr(copies, name).array for name in state.saved}


def load(state: CacheState, saved: dict[str, Any]) -> None:
    """The reverse of ``saved_state``. Raises what ``DynamicCache.load_state_dict`` documents."""
    numbers = numbers_of(state)
    wanted = (*state.saved, *numbers)
    if missing := [name for name in wanted if name not in saved]:
        raise KeyError(f"saved must contain {', '.join(wanted)}; missing: {', '.join(missing)}")
    for name, own in numbers.items():
        number = tuple(saved[name]) if isinstance(saved[name], list) else saved[name]  # windows that JSON has kept
        if number != own:
            raise ValueError(f"saved must be of a cache with {name}={own}, got {saved[name]}")
    lead: tuple[int, ...] = ()
    if state.segments is not None and SIZES not in saved:  # every head has the rows of the widest
        lead = state.batch, state.kv_heads, state.rows
    elif state.segments is not None and tuple(chain(*saved[SIZES])) != state.segments.sizes:
        raise ValueError(f"saved must be of a cache with as many rows per sequence and kv head, "
                         f"{state.segments.sizes[:16]}, got {saved[SIZES]}")
    arrays = {name: _as_here(getattr(state, name), saved[name], f"saved[{name!r}]",
                             lead if name in state.per_row else ()) for name in state.saved}
    found = state.having(arrays)
    copy_rows(refreshed(_needed_first(found) if lead else found), state)


def _needed_first(state: CacheState) -> CacheState:
    """Rows that are needed in the first slots, which all heads have."""
    order = flagged_first(state, needed(state, state.lengths.array - 1))
    batch, head = index(state, state.batch)[:, None, None], index(state, state.kv_heads)[:, None]
    found = copied(state, state.per_row)
    for name in state.per_row:
        bits(getattr(found, name))[...] = bits(getattr(state, name))[batch, head, order]
    return found


def _as_here(here: Operand, array: Any, name: str, lead: tuple[int, ...]) -> Operand:
    """The same, of ``here``'s shape, too, or with ``lead`` in place of its first axis."""
    shape = (*lead, *here.shape[1:]) if lead else here.shape
    checks.has_shape(describe(array, name), "of this cache", tuple((size,) for size in shape))
    return same_kind(here, array, name)


def same_kind(here: Operand, array: Any, name: str) -> Operand:
    """A saved array of ``here``'s type, in its library and on its device."""
    given = describe(array, name)
    if given.dtype != here.dtype:
        raise TypeError(f"{name} must be {here.dtype}, got {given.dtype}")
    if (given.library.name, given.device) == (here.library.name, here.device):
        return given
    values = given.library.to_numpy(given.array).copy()
    return here.library.operand(here.library.from_numpy(values, here.device), name)


def bits(operand: Operand) -> Any:
    return movable(operand.library, operand.array, operand.dtype)
