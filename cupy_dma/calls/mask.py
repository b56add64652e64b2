"""The argument ``mask`` of the attention functions: interval masks, dense bool arrays, or several of both.

What several masks have in common (a key is visible where all of them show it) becomes at most one IntervalMask and one
dense array. A dense mask that is the same for every query is two integers per key like any interval mask, and is made
one: work and memory then follow the keys, not the pairs.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, library_of
from cupy_dma.masks.interval import EVER, NEVER, Hints, IntervalMask


def parts_of(mask: Any) -> tuple[Any, ...]:
    """The masks that the argument stands for: none, one, or the items of a tuple or list."""
    if mask is None:
        return ()
    if not isinstance(mask, (tuple, list)):
        return (mask,)
    for item in mask:
        if item is None or isinstance(item, (tuple, list)):
            raise TypeError(f"mask must hold IntervalMask and bool arrays when it is a {type(mask).__name__}, got "
                            f"{type(item).__name__} in it")
    return tuple(mask)


def intersect(parts: Sequence[Any], key_length: int, kv_heads: int, heads: int) -> tuple[IntervalMask | None, Any]:
    """One IntervalMask or None, and one dense array (of two or four axes) or None, that together say what ``parts`` do.

    ``parts``: masks that have been checked, all of one library and device. Looks at shapes only, so that it can be
    traced.
    """
    interval: IntervalMask | None = None
    dense: Any = None
    for part in parts:
        if isinstance(part, IntervalMask):
            mask = part
        elif part.shape[-2] == 1:
            mask = _key_mask(part, key_length)
        else:
            dense = part if dense is None else _both(dense, part, kv_heads, heads)
            continue
        interval = mask if interval is None else _meet(interval, mask, kv_heads, heads)
    return interval, dense


def _key_mask(array: Any, key_length: int) -> IntervalMask:
    """A dense mask ``(..., 1, 1|Lk)``: keys seen at every position, or at none."""
    library = library_of(array, "mask")
    device = library.describe(array, "mask").device
    rows = array[(None,) * (4 - len(array.shape))][:, :, 0]
    with library.on(device):
        start = library.full((key_length,), EVER, "int32", device)
        stop = library.xp.where(rows, library.full((key_length,), NEVER, "int32", device), start)
    return IntervalMask._make(library, start, stop, Hints("open"))


def _meet(a: IntervalMask, b: IntervalMask, kv_heads: int, heads: int) -> IntervalMask:
    """``a & b``, also of masks per kv head and per query head."""
    if {a.shape[1], b.shape[1]} == {kv_heads, heads} and 1 < kv_heads < heads:
        a, b = (_per_query_head(mask, heads) if mask.shape[1] == kv_heads else mask for mask in (a, b))
    return a & b


def _per_query_head(mask: IntervalMask, heads: int) -> IntervalMask:
    library = mask.library
    with library.on(mask.device):
        start, stop = (_repeated(library.xp, run.array, heads) if run.array.shape[-2:-1] == (mask.shape[1],)
                       else run.array for run in (mask._start, mask._stop))
    return IntervalMask._make(library, start, stop, mask._hints)


def _repeated(xp: Any, array: Any, heads: int) -> Any:
    """``(B, Hkv, ...)`` as ``(B, H, ...)``, each head as often as query heads share it."""
    if len(array.shape) < 3:
        array = array[None]
    batch, kv_heads, *rest = array.shape
    return xp.broadcast_to(array[:, :, None], (batch, kv_heads, heads // kv_heads, *rest)).reshape(batch, heads, *rest)


def _both(a: Any, b: Any, kv_heads: int, heads: int) -> Any:
    """Dense masks that broadcast to each other, or are of kv heads and of query heads."""
    library = library_of(a, "mask")
    a, b = (x[(None,) * (4 - len(x.shape))] for x in (a, b))
    with library.on(library.describe(a, "mask").device):
        if {a.shape[1], b.shape[1]} == {kv_heads, heads} and 1 < kv_heads < heads:
            a, b = (_repeated(library.xp, x, heads) if x.shape[1] == kv_heads else x for x in (a, b))
        return a & b


def check_mask(mask: Any, q: Operand, k: Operand, describe_dense: Any) -> tuple[IntervalMask | None, Operand | None]:
    """The two parts of the argument ``mask`` of a call with this query and key. ``describe_dense`` checks an array."""
    parts = [part if isinstance(part, IntervalMask) else describe_dense(part) for part in parts_of(mask)]
    for part in parts:
        if isinstance(part, IntervalMask):
            _check_interval(part, q, k)
    if len(parts) == 1 and isinstance(parts[0], Operand) and parts[0].shape[2] != 1:
        return None, parts[0]
    arrays = [part.array if isinstance(part, Operand) else part for part in parts]
    interval, dense = intersect(arrays, k.shape[1], k.shape[2], q.shape[2])
    if dense is None:
        return interval, None
    return interval, checks.with_axes(q.library.describe(dense, "mask"), 4)


def _check_interval(mask: IntervalMask, q: Operand, k: Operand) -> None:
    if mask.shape[0] not in (1, q.shape[0]) or mask.shape[1] not in (1, k.shape[2], q.shape[2]) or (
            mask.key_length != k.shape[1]):
        raise ValueError(f"mask must have shape (1|B, 1|Hkv|H, Lk) with B={q.shape[0]}, Hkv={k.shape[2]}, "
                         f"H={q.shape[2]}, Lk={k.shape[1]}, got {mask.shape}")
    if mask.device != q.device or mask.library.name != q.library.name:
        raise ValueError(f"mask must be of query's library and device, {q.library.name} on {q.device}, got "
                         f"{mask!r}; move it with mask.to(query)")
