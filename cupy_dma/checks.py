"""Argument checks. Each error names the argument, what was given and what is allowed.

TypeError for types, ValueError for shapes and values. All compare Python objects: each costs well under a microsecond
and never touches array data.
"""
from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_dma.arrays import Operand, describe

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64")
ZERO_ONE = ("uint8", "int8", "int16", "int32", "int64")  # integer types allowed for masks of 0 and 1
LONGEST_DELAY = 2**30  # of a key bias, in positions: its sum with a position fits int32
LARGEST = 2.0**127  # of scale and softcap: times log2(e) it still fits float32


def one_of_types(operand: Operand, allowed: Sequence[str] = FLOATS) -> None:
    if operand.dtype not in allowed:
        raise TypeError(f"{operand.name} must be {' or '.join(allowed)}, got {operand.dtype}")


def boolean(operand: Operand) -> None:
    """A mask where True means visible."""
    if operand.dtype != "bool":
        raise not_a_mask(operand, "bool")


def not_a_mask(operand: Operand, allowed: str) -> TypeError:
    """The error for a mask of another type. A float mask is ambiguous: it may be 0 and -inf, or 1 and 0."""
    hint = ""
    if operand.dtype in FLOATS:
        hint = (f"; write a mask of 0 and -inf as {operand.name} == 0, one of 1 and 0 as {operand.name} != 0, and "
                f"pass values to be added to the logits as bias")
    return TypeError(f"{operand.name} must be {allowed}, got {operand.dtype}{hint}")


def real_keys(operand: Operand) -> Operand:
    """A padding mask as booleans, True = a real key, from booleans or integers 0 and 1. Integers in GPU memory are
    validated only with ``CUPY_DMA_CHECK=1``; otherwise any nonzero value there is a real key."""
    if operand.dtype == "bool":
        return operand
    if operand.dtype not in ZERO_ONE:
        raise not_a_mask(operand, "bool, or integers 1 (a real key) and 0")
    library, array = operand.library, operand.array
    with library.on(operand.device):
        if values_known(operand) and bool(((array != 0) & (array != 1)).any()):
            raise ValueError(f"{operand.name} must be 1 for real keys and 0 for padding, got other integers")
        return library.operand(array != 0, operand.name)


def per_key(operand: Operand) -> None:
    """Numbers per key: 1 to 3 axes, which broadcast to (B, H, Lk)."""
    if not 1 <= operand.ndim <= 3:
        raise ValueError(f"{operand.name} must have 1 to 3 axes (B, H, Lk), got shape {operand.shape}")


def values_known(operand: Operand) -> bool:
    """Whether values may be read: in host memory, or on request, and not while a compiler traces the call."""
    return (operand.device.kind == "cpu" or wants_values_checked()) and not operand.library.is_traced()


def has_memory(operand: Operand) -> None:
    """Raise unless the operand has an address: tensors traced by ``torch.export`` have none."""
    if operand.pointer is None:
        raise TypeError(f"{operand.name} must be a tensor with readable memory, got one traced by torch.export, which "
                        f"supports only attention, key_scores, masks and layers without a cache")


def integers(value: Any, name: str, like: Operand) -> Operand:
    """An int32 or int64 array of ``like``'s library and device; a list of ints is copied there."""
    if isinstance(value, (list, tuple)):
        value = like.library.from_numpy(integer_list(value, name), like.device)
        operand = like.library.operand(value, name)
    else:
        operand = describe(value, name)
    one_of_types(operand, INTEGERS)
    require_same_device((like, operand))
    return operand


def integer_list(value: list | tuple, name: str) -> np.ndarray:
    """A (nested) list of ints as an array: int32, or int64 if one of them needs it."""
    try:
        array = np.array(value)
    except ValueError:  # rows of different lengths
        array = np.empty(0)
    if array.dtype.kind != "i" and value:
        raise TypeError(f"{name} must be an integer array or a list of ints, got {value!r:.100}")
    return array.astype(np.int32 if not array.size or abs(array).max() < 2**31 else np.int64)


def in_rows(operand: Operand) -> Operand:
    """The operand with a contiguous last axis: itself, or a copy. For one number per key, where a copy is cheap."""
    if operand.strides[-1:] in ((1,), ()) or operand.shape[-1] == 1 or 0 in operand.shape:
        return operand
    return operand.library.operand(operand.library.contiguous(operand.array), operand.name)


def rows_contiguous(operand: Operand) -> None:
    """Raise unless the last axis has stride 1: kernels load whole rows. Other axes may have any stride."""
    if operand.strides[-1] != 1 and operand.shape[-1] != 1 and 0 not in operand.shape:
        raise ValueError(f"{operand.name} must be contiguous in its last axis (stride 1), got stride "
                         f"{operand.strides[-1]} with shape {operand.shape}; use ascontiguousarray() "
                         f"or .contiguous()")


def has_shape(operand: Operand, meaning: str, allowed: Sequence[Sequence[int]]) -> None:
    """Raise unless every axis has one of the allowed sizes; ``meaning`` is the shape in the SPEC's symbols."""
    shape = operand.shape
    if len(shape) == len(allowed):
        for size, sizes in zip(shape, allowed):
            if size not in sizes:
                break
        else:
            return
    raise wrong_shape(operand.name, meaning, allowed, shape)


def wrong_shape(name: str, meaning: str, allowed: Sequence[Sequence[int]], shape: tuple[int, ...]) -> ValueError:
    """The error for a shape that is not allowed."""
    wanted = ", ".join(" or ".join(map(str, dict.fromkeys(sizes))) for sizes in allowed)
    return ValueError(f"{name} must have shape {meaning} = ({wanted}), got {shape}")


def with_axes(operand: Operand, ndim: int) -> Operand:
    """The operand with leading axes of size 1 up to ``ndim``, over the same memory; axes of size 1 have stride 0."""
    missing = ndim - len(operand.shape)
    shape = (1,) * missing + tuple(operand.shape)
    strides = (0,) * missing + tuple([0 if size == 1 else stride
                                      for size, stride in zip(operand.shape, operand.strides)])
    return replace(operand, shape=shape, strides=strides)


def whole(value, name: str, minimum: int) -> int:
    """An integer argument that is at least ``minimum``."""
    if type(value) is int or type(value).__name__ == "SymInt":  # a length that torch.export leaves open
        number = value
    else:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def delay(value) -> int:
    """The checked ``bias_delay``."""
    number = whole(value, "bias_delay", 0)
    if number > LONGEST_DELAY:
        raise ValueError(f"bias_delay must be at most 2**30, got {number}")
    return number


def require_key_bias(bias_delay: int, bias: Operand | None) -> None:
    """ValueError if a delay is given without a key bias (four axes, ``Lq`` axis 1)."""
    if bias_delay and (bias is None or bias.shape[2] != 1):
        what = "no bias" if bias is None else f"one per query and key, {bias.shape}"
        raise ValueError(f"bias_delay needs a key bias, (1|B, 1|Hkv|H, 1|Lk), got bias_delay={bias_delay} and {what}")


def real(value, name: str, minimum: float = -math.inf) -> float:
    """A finite real number that is at least ``minimum``."""
    if type(value) is not float:
        if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__") or getattr(value, "shape", None):
            raise TypeError(f"{name} must be a real number, got {type(value).__name__} {value!r}")
        value = float(value)
    if not minimum <= value < math.inf or value == -math.inf:
        bound = "" if minimum == -math.inf else f" of at least {minimum:g}"
        raise ValueError(f"{name} must be a finite number{bound}, got {value!r}")
    return value


def factor(value, name: str, dtype: str, minimum: float = -math.inf) -> float:
    """``real``, within the range of float32 unless ``dtype`` is float64."""
    number = real(value, name, minimum)
    if abs(number) > LARGEST and dtype != "float64":
        raise ValueError(f"{name} must be at most 2**127 = 1.7e38, as {dtype} arrays are computed in float32, "
                         f"got {number!r}")
    return number


def softcap_of(value, dtype: str) -> float:
    """The checked softcap; 0 for none. It is also a divisor, so it must not be tiny."""
    number = factor(value, "softcap", dtype, 0.0)
    if 0 < number < 2.0**-126 and dtype != "float64":
        raise ValueError(f"softcap must be 0 (none) or at least 2**-126 = 1.2e-38, as {dtype} arrays are computed "
                         f"in float32, got {number!r}")
    return number


def flag(value, name: str) -> bool:
    if value is True or value is False:
        return value
    if type(value).__name__ in ("bool", "bool_"):  # NumPy's booleans
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {type(value).__name__} {value!r}")


def choice(value, name: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")


def wants_values_checked() -> bool:
    """``CUPY_DMA_CHECK=1``: also validate values in GPU memory, at the cost of a synchronization."""
    return os.environ.get("CUPY_DMA_CHECK", "0") not in ("", "0")


def require_same_device(operands: Iterable[Operand | None]) -> None:
    """Raise unless all are on one device and from one library; the error names the first that differs."""
    first: Operand | None = None
    for operand in operands:
        if operand is None:
            continue
        if first is None:
            first = operand
        elif operand.device != first.device:
            raise ValueError(f"all arrays must be on one device: {first.name} is on {first.device}, "
                             f"{operand.name} is on {operand.device}")
        elif operand.library.name != first.library.name:
            raise TypeError(f"all arrays must be of one library: {first.name} is a {first.library.name} array, "
                            f"{operand.name} is a {operand.library.name} array (convert it, for example with "
                            f"from_dlpack)")


def require_no_grad(operands: Iterable[Operand | None]) -> None:
    """NotImplementedError if autograd expects a gradient through any of them: silently cutting the graph is worse."""
    for operand in operands:
        if operand is not None and operand.library.requires_grad(operand.array):
            raise NotImplementedError(f"{operand.name} requires grad, but gradients are not differentiable (there is "
                                      f"no second derivative); call under torch.no_grad() or pass "
                                      f"{operand.name}.detach()")
