"""``Operand``: an argument as backends see it. ``Library``: the interface to one array library."""
from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupy_dma.arrays import driver


class Device(NamedTuple):
    kind: str  # "cpu" or "cuda"
    index: int  # type: ignore[assignment]  # CUDA ordinal, 0 for the CPU

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


CPU = Device("cpu", 0)
ALIGNMENT = 16  # bytes: programs are specialised in an address modulo this
NO_CONTEXT = nullcontext()


@dataclass(slots=True, eq=False)  # immutable by convention: frozen=True takes three times as long to construct
class Operand:
    """What a backend needs to know about one argument."""

    name: str  # the argument's name, for error messages
    array: Any  # the array itself, in its own library
    library: Library
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str  # "float16", "bfloat16", "float32", "float64", "bool", "int32", ...
    device: Device
    pointer: int  # address of the first element, on the device

    @property
    def ndim(self) -> int:
        return len(self.shape)


def strides_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, with 0 for axes of length 1, where they do not matter."""
    return tuple([0 if n == 1 else stride for n, stride in zip(shape, strides)]) if 1 in shape else strides


def packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an array in C order, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of this name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class Library:
    """One array library: describe, allocate, convert, and the few operations that mask constructors need."""

    name = ""
    xp: Any  # the module

    def describe(self, array: Any, name: str) -> Operand:
        raise NotImplementedError

    def operand(self, array: Any, name: str) -> Operand:
        """The Operand of an array allocated by this library, which owns it even if it stands for a DLPack producer."""
        operand = self.describe(array, name)
        operand.library = self
        return operand

    def pointer(self, array: Any) -> int:
        """Address of the first element of an array allocated by this library."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        raise NotImplementedError

    def allocator(self, shape: tuple[int, ...], dtype: str, device: Device) -> Callable[[], Any]:
        """A function that allocates an array like ``empty``, for repeated use."""
        return functools.partial(self.empty, shape, dtype, device)

    def to_numpy(self, array: Any) -> np.ndarray:
        """A NumPy array with the same values: a view of a CPU array, a (synchronizing) copy of a CUDA array."""
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray, device: Device) -> Any:
        raise NotImplementedError

    def astype(self, array: Any, dtype: str) -> Any:
        raise NotImplementedError

    def on(self, device: Device) -> AbstractContextManager:
        """The context in which to run elementwise operations on arrays of ``device``."""
        return NO_CONTEXT

    def contiguous(self, array: Any) -> Any:
        """The array in C order: itself if it is C-contiguous already, otherwise a copy."""
        raise NotImplementedError

    def is_traced(self) -> bool:
        """Whether a compiler is tracing this call, so that arrays have no values yet."""
        return False

    def is_exported(self) -> bool:
        """Whether the traced program is to work for all lengths (``torch.export``)."""
        return False

    def requires_grad(self, array: Any) -> bool:
        """Whether a result computed from ``array`` is expected to carry a gradient."""
        return False

    def stream(self, device: Device) -> int:
        """The caller's current CUDA stream on ``device``, as a raw handle."""
        return 0

    def is_capturing(self, device: Device) -> bool:
        """Whether the caller's current stream on ``device`` is being captured into a CUDA graph."""
        return device.kind == "cuda" and driver.is_capturing(self.stream(device), device.index)

    def arange(self, start: int, stop: int, device: Device) -> Any:
        """int32 start, ..., stop - 1."""

    def full(self, shape: tuple[int, ...], value: Any, dtype: str, device: Device) -> Any:
        raise NotImplementedError

    def cumsum(self, array: Any) -> Any:
        """int32 running sum along the last axis."""

    def search_right(self, boundaries: Any, values: Any) -> Any:
        """int32 number of entries of the sorted 1-D ``boundaries`` that are <= each value."""

    def export(self, array: Any) -> Any:
        """A result as the caller gets it (only DLPack producers need a conversion)."""
        return array
