"""The argument ``mask`` of the attention functions: interval masks, dense bool arrays, or several of both.

The intersection of several masks (a key is visible where all of them show it) becomes at most one IntervalMask and one
dense array. A dense mask that is the same for every query is converted to an IntervalMask: two integers per key, so
work and memory are linear in the keys instead of the pairs.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from cupy_dma import checks
from cupy_dma.arrays import Array, Operand, library_of
from cupy_dma.masks.interval import EVER, NEVER, Hints, IntervalMask

Mask: TypeAlias = IntervalMask | Array | Sequence[IntervalMask | Array]


def masks_in(mask: Any) -> tuple[Any, ...]:
    """The masks in the argument: none, one, or the items of a tuple or list."""
    if mask is None:
        return ()
    if not isinstance(mask, (tuple, list)):
        return (mask,)
    for item in mask:
        if item is None or isinstance(item, (tuple, list)):
            raise TypeError(f"mask must hold IntervalMask and bool arrays when it is a {type(mask).__name__}, got "
                            f"{type(item).__name__} in it")
    return tuple(mask)


def intersect(masks: Sequence[Any], key_length: int, kv_heads: int, heads: int) -> tuple[IntervalMask | None, Any]:
    """The intersection of ``masks`` as one IntervalMask or None, and one dense array (of two or four axes) or None.

    ``masks``: checked masks, all of one library and device. Looks at shapes only, so that it can be traced.
    """
    interval: IntervalMask | None = None
    dense: Any = None
    for mask in masks:
        if isinstance(mask, IntervalMask):
            new = mask
        elif mask.shape[-2] == 1:
            new = _key_mask(mask, key_length)
        else:
            dense = mask if dense is None else _intersect_dense(dense, mask, kv_heads, heads)
            continue
        interval = new if interval is None else _intersect_intervals(interval, new, kv_heads, heads)
    return interval, dense


def _key_mask(array: Any, key_length: int) -> IntervalMask:
    """A dense mask ``(..., 1, 1|Lk)`` as intervals: each key is visible at every position or at none."""
    library = library_of(array, "mask")
    device = library.describe(array, "mask").device
    rows = array[(None,) * (4 - len(array.shape))][:, :, 0]
    with library.on(device):
        start = library.full((key_length,), EVER, "int32", device)
        stop = library.xp.where(rows, library.full((key_length,), NEVER, "int32", device), start)
    return IntervalMask._make(library, start, stop, Hints("open"))


def _intersect_intervals(a: IntervalMask, b: IntervalMask, kv_heads: int, heads: int) -> IntervalMask:
    """``a & b``, where one may be per kv head and the other per query head."""
    if {a.shape[1], b.shape[1]} == {kv_heads, heads} and 1 < kv_heads < heads:
        a, b = (_per_query_head(mask, heads) if mask.shape[1] == kv_heads else mask for mask in (a, b))
    return a & b


def _per_query_head(mask: IntervalMask, heads: int) -> IntervalMask:
    library = mask.library
    with library.on(mask.device):
        start, stop = (_repeat_kv(library.xp, run.array, heads) if run.array.shape[-2:-1] == (mask.shape[1],)
                       else run.array for run in (mask._start, mask._stop))
    return IntervalMask._make(library, start, stop, mask._hints)


def _repeat_kv(xp: Any, array: Any, heads: int) -> Any:
    """``(B, Hkv, ...)`` as ``(B, H, ...)``: each kv head repeated for the query heads of its GQA group."""
    if len(array.shape) < 3:
        array = array[None]
    batch, kv_heads, *rest = array.shape
    return xp.broadcast_to(array[:, :, None], (batch, kv_heads, heads // kv_heads, *rest)).reshape(batch, heads, *rest)


def _intersect_dense(a: Any, b: Any, kv_heads: int, heads: int) -> Any:
    """``a & b`` of dense masks that broadcast, where one may be per kv head and the other per query head."""
    library = library_of(a, "mask")
    a, b = (x[(None,) * (4 - len(x.shape))] for x in (a, b))
    with library.on(library.describe(a, "mask").device):
        if {a.shape[1], b.shape[1]} == {kv_heads, heads} and 1 < kv_heads < heads:
            a, b = (_repeat_kv(library.xp, x, heads) if x.shape[1] == kv_heads else x for x in (a, b))
        return a & b


def check_mask(mask: Any, q: Operand, k: Operand, describe_dense: Any) -> tuple[IntervalMask | None, Operand | None]:
    """The interval mask and the dense mask of a call with this query and key. ``describe_dense`` checks an array."""
    masks = [item if isinstance(item, IntervalMask) else describe_dense(item) for item in masks_in(mask)]
    for item in masks:
        if isinstance(item, IntervalMask):
            check_interval(item, q, "(1|B, 1|Hkv|H, Lk)", ((1, q.shape[0]), (1, k.shape[2], q.shape[2]), (k.shape[1],)))
    if len(masks) == 1 and isinstance(masks[0], Operand) and masks[0].shape[2] != 1:
        return None, masks[0]
    arrays = [item.array if isinstance(item, Operand) else item for item in masks]
    interval, dense = intersect(arrays, k.shape[1], k.shape[2], q.shape[2])
    if dense is None:
        return interval, None
    return interval, checks.with_axes(q.library.describe(dense, "mask"), 4)


def check_interval(mask: IntervalMask, q: Operand, meaning: str, allowed: tuple[tuple[int, ...], ...]) -> None:
    """Check the mask's size in every axis, its library and its device."""
    for size, sizes in zip(mask.shape, allowed):
        if size not in sizes:
            raise checks.wrong_shape("mask", meaning, allowed, mask.shape)
    if mask.device != q.device or mask.library.name != q.library.name:
        raise ValueError(f"mask must be of query's library and device, {q.library.name} on {q.device}, got "
                         f"{mask!r}; move it with mask.to(query)")
