"""The gradients of long calls, batch entry by batch entry and kv heads by kv heads.

Keys that are gathered have float32 sums of their gradients for each of the two super-tiles that most of them are in
(``backward.py``): twice what all 16-bit gradients of a call take together, and the calls that have no room for it are
those of millions of tokens, of which a few heads keep a GPU busy. Their chunks are calls of their own, on the same
arrays, whose results are copied into place. Lists of fewer tiles may be in another order, which is that of the sums in
dq, so its last bits may be others than those of the whole.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cupy_dma.arrays import Operand, numpy_dtype
from cupy_dma.backends.cuda.attention import backward, sm90_backward
from cupy_dma.backends.cuda.lists.intervals import super_entries_of
from cupy_dma.calls.gradients import INPUTS
from cupy_dma.calls.types import AttentionBackwardCall
from cupy_dma.masks.interval import IntervalMask

MAX_SUMS = 12 << 30  # bytes of such sums


def attention_backward(run: Callable[..., Any], call: AttentionBackwardCall) -> tuple[Any, Any, Any, Any]:
    """The gradients, of the whole call or of chunks where there are more than ``MAX_SUMS`` bytes of sums; ``run``
    runs a program. Biases are as ``with_known_bias`` gives them."""
    size = chunk_size(call)
    if size is None:
        return run(backward.attention_backward, call)
    own = call.forward
    library, device, axis = own.query.library, own.query.device, 0 if own.batch > 1 else 2
    operands = own.query, own.key, own.value, own.bias
    results = [None if operand is None or name not in call.needs
               else library.empty(operand.shape, operand.dtype, device) for name, operand in zip(INPUTS, operands)]
    among = own.key.shape[axis]
    for first in range(0, among, size):
        chunk = _chunk(call, axis, first, min(first + size, among))
        for name, whole, operand, found in zip(INPUTS, results, operands, attention_backward(run, chunk)):
            if whole is not None and operand is not None:
                along = 1 if name == "bias" and axis == 2 else axis
                ratio = operand.shape[along] // among  # heads of a kv head
                where = slice(first * ratio, first * ratio + found.shape[along])
                whole[(slice(None),) * along + (where,)] = found
    return tuple(results)  # type: ignore[return-value]


def chunk_size(call: AttentionBackwardCall) -> int | None:
    """Batch entries, or of one batch entry kv heads, of a chunk; None for a call that is made as a whole."""
    own = call.forward
    mask, (batch, _, kv_heads, head_dim) = own.mask, own.key.shape
    among, axis = (batch, 0) if batch > 1 else (kv_heads, 1)
    if mask is None or own.dense is not None or own.sequences is not None or among < 2:
        return None
    if mask.shape[1] not in (1, kv_heads):  # there are no such sums
        return None
    if "bias" in call.needs and own.bias is not None and own.bias.shape[axis] == 1:  # its gradient is a sum over chunks
        return None
    numbers = head_dim * sum(name in call.needs for name in ("key", "value"))
    numbers += own.heads // kv_heads if "bias" in call.needs else 0
    entries = super_entries_of(mask, own.query_length, sm90_backward.block_n(head_dim))
    sums = 4 * numbers * entries * batch * kv_heads
    return max(1, MAX_SUMS * among // sums) if sums > MAX_SUMS else None


def _chunk(call: AttentionBackwardCall, axis: int, first: int, last: int) -> AttentionBackwardCall:
    """Of the batch entries (``axis`` 0) or the kv heads (2) from ``first`` to ``last``."""
    own, among = call.forward, call.forward.key.shape[axis]
    numbers = min(axis, 1)  # the same axis of (B, H, ...)

    def cut(x: Operand | None, along: int) -> Any:
        if x is None or x.shape[along] == 1 < among:
            return x
        ratio = x.shape[along] // among
        shape = (*x.shape[:along], ratio * (last - first), *x.shape[along + 1:])
        at = x.pointer + ratio * first * x.strides[along] * numpy_dtype(x.dtype).itemsize
        return dataclasses.replace(x, shape=shape, pointer=at)

    forward = dataclasses.replace(own, query=cut(own.query, axis), key=cut(own.key, axis), value=cut(own.value, axis),
                                  mask=_mask_chunk(own.mask, numbers, among, first, last), bias=cut(own.bias, numbers))
    return AttentionBackwardCall(forward, cut(call.dout, axis), cut(call.out, axis), cut(call.lse, numbers),
                                 cut(call.dlse, numbers), call.needs)


def _mask_chunk(mask: IntervalMask | None, axis: int, among: int, first: int, last: int) -> IntervalMask | None:
    """Of an ``axis`` of ``(B, H, Lk)`` that has ``among`` entries or kv heads."""
    if mask is None or mask.shape[axis] == 1:
        return mask

    def cut(x: Any) -> Any:
        ratio = x.shape[axis] // among
        return x[(slice(None),) * axis + (slice(ratio * first, ratio * last),)] if x.shape[axis] > 1 else x

    start, stop, hints = mask._runs
    return IntervalMask._make(mask.library, cut(start), cut(stop), hints)
