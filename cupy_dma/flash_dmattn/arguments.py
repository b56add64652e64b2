"""Conversion of the original's masks and biases to those of ``cupy_dma.attention``.

A mask may be boolean (True = visible) or numeric with 1 = visible and 0 = hidden. Additive masks (0 = visible, -inf or
a type's lowest number = hidden) raise, because a bias in them would be lost. To tell them apart, values of float masks
are read, which synchronizes with a GPU; nothing else here does. Shapes are ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)``, or without
the query axis; the key axis may be padded to the next multiple of 128, as the original padded it.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Device, DlpackLibrary, Operand, describe, library_named
from cupy_dma.backends import is_traced
from cupy_dma.masks.interval import IntervalMask

_PADDED_TO = 128
_NUMBERS = (*checks.FLOATS, "uint8", "int8", "int16", "int32", "int64")


def operand_of(array: Any, name: str) -> Operand:
    """``describe`` that works under ``torch.compile`` too, whose tensors have no address. TypeError if not an array."""
    if not is_traced(array):
        return describe(array, name)
    device = Device(array.device.type, array.device.index or 0)
    return Operand(name, array, library_named("torch"), tuple(array.shape), array.stride(),
                   str(array.dtype).removeprefix("torch."), device, 0)


def rows(array: Any, name: str) -> Any:
    """The array with a contiguous last axis: itself, or a copy."""
    operand = operand_of(array, name)
    if not operand.shape or operand.strides[-1] == 1 or operand.shape[-1] == 1:
        return array
    return array if isinstance(operand.library, DlpackLibrary) else operand.library.contiguous(array)


def visible(mask: Any, key_length: int, name: str = "attn_mask") -> Any:
    """An IntervalMask, a bool array with four axes, a tuple of these, or None."""
    if mask is None or isinstance(mask, IntervalMask):
        return mask
    if isinstance(mask, (tuple, list)):
        return tuple(visible(item, key_length, name) for item in mask)
    operand = operand_of(mask, name)
    if operand.ndim not in (3, 4):
        raise ValueError(f"{name} must have shape (1|B, 1|Hkv|H, 1|Lq, 1|Lk) or (1|B, 1|Hkv|H, 1|Lk), got "
                         f"{operand.shape}; write a padding mask (B, Lk) as mask[:, None], and (Lq, Lk) as "
                         f"mask[None, None]")
    seen = truth(_cut(mask, operand, key_length), name)
    return seen[:, :, None] if operand.ndim == 3 else seen


def added(bias: Any, key_length: int, name: str = "attn_bias") -> Any:
    """A bias with three or four axes, or None."""
    if bias is None:
        return None
    return rows(_cut(bias, operand_of(bias, name), key_length), name)


def _cut(array: Any, operand: Operand, key_length: int) -> Any:
    """The array without padding keys, with every axis of stride 0 cut to size 1: an expanded key bias becomes a plain
    key bias again, whose work and memory are linear in the length."""
    if operand.shape and operand.shape[-1] == -(-key_length // _PADDED_TO) * _PADDED_TO > key_length:
        array = array[..., :key_length]
    if getattr(array, "requires_grad", False) and array.is_leaf:
        return array  # its gradient has an entry for every element
    for axis, (size, stride) in enumerate(zip(operand.shape, operand.strides)):
        if stride == 0 and size > 1:
            array = array[(slice(None),) * axis + (slice(0, 1),)]
    return array


def truth(mask: Any, name: str) -> Any:
    """A mask in either form as a boolean array that is contiguous in its last axis."""
    operand = operand_of(mask, name)
    if operand.dtype == "bool":
        return rows(mask, name)
    checks.one_of_types(operand, ("bool", *_NUMBERS))
    library, array, traced = operand.library, operand.array, is_traced(mask)
    if operand.dtype in checks.FLOATS and traced:
        raise TypeError(f"{name} must be boolean under torch.compile, where values cannot be read, got "
                        f"{operand.dtype}: {_INSTEAD.format(name)}")
    if library.name == "torch":
        array = array.detach()
    elif operand.dtype == "bfloat16":  # which other libraries barely support
        array = library.astype(array, "float32")
    with library.on(operand.device):
        if operand.dtype in checks.FLOATS or (not traced and checks.values_known(operand)):
            _check_values(array, operand)
        return library.export(array > 0)


_INSTEAD = "write 0 and -inf as {0} == 0, 1 and 0 as {0} != 0, and pass what is to be added to the logits as attn_bias"


def _check_values(array: Any, operand: Operand) -> None:
    """ValueError unless all are 0 or 1. Floats must not all be 0: that may be an additive mask that hides nothing."""
    one = array == 1
    if not bool(((array == 0) | one).all()):
        found = "other values"
    elif operand.dtype in checks.FLOATS and 0 not in operand.shape and not bool(one.any()):
        found = "zeros only (hidden, or an additive mask that hides nothing?)"
    else:
        return
    raise ValueError(f"{operand.name} must be boolean, or 1 and 0 for visible and hidden, got {operand.dtype} with "
                     f"{found}: {_INSTEAD.format(operand.name)}")
