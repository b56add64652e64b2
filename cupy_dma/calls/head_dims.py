"""Values with another head dim ``Dv`` than the ``D`` of queries and keys, on backends that need them equal.

The narrower arrays get zero columns, which change neither logits nor outputs; the gradients of these are cut off again.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Device, Library, Operand, numpy_dtype
from cupy_dma.calls.types import AttentionBackwardCall, AttentionCall


def with_equal_dims(call: AttentionCall) -> AttentionCall:
    """The call with query, key and value padded to the larger head dim."""
    size, library = max(call.head_dim, call.value_dim), call.query.library
    with library.on(call.query.device):
        query, key, value = (widened(x, size) for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)


def backward_with_equal_dims(call: AttentionBackwardCall) -> AttentionBackwardCall:
    """The backward call, padded likewise."""
    own = with_equal_dims(call.forward)
    with own.query.library.on(own.query.device):
        dout, out = (widened(x, own.head_dim) for x in (call.dout, call.out))
    return replace(call, forward=own, dout=dout, out=out)


def movable(library: Library, array: Any, dtype: str) -> Any:
    """The array in a type that every library can copy: bfloat16 is viewed as 16-bit integers."""
    return array.view(library.xp.int16) if dtype == "bfloat16" else array


def unmoved(library: Library, array: Any, dtype: str) -> Any:
    """The inverse of ``movable``: the array in its own type."""
    if dtype != "bfloat16":
        return array
    return array.view(library.xp.bfloat16 if library.name == "torch" else numpy_dtype(dtype))


def widened(operand: Operand, size: int) -> Operand:
    """``operand (..., d)`` with zero columns up to ``size``. Call within ``library.on``."""
    d, library, array = operand.shape[-1], operand.library, operand.array
    if d == size:
        return operand
    wide = library.full((*array.shape[:-1], size), 0, operand.dtype, operand.device)
    movable(library, wide, operand.dtype)[..., :d] = movable(library, array, operand.dtype)
    return checks.with_axes(library.operand(wide, operand.name), operand.ndim)


def narrowed(library: Library, array: Any, size: int, dtype: str, device: Device) -> Any:
    """The first ``size`` columns of ``array (..., d)``, contiguous; None stays None."""
    if array is None or array.shape[-1] == size:
        return array
    narrow = library.empty((*array.shape[:-1], size), dtype, device)
    with library.on(device):
        movable(library, narrow, dtype)[...] = movable(library, array, dtype)[..., :size]
    return narrow
