"""The only module that knows array libraries.

Every array that enters the package becomes an ``Operand``: its shape, strides, type, device and address, plus the
``Library`` it came from. Results are allocated by the library of the first argument, so callers get back arrays of the
library they passed in, from their own allocator and on their current stream.

Libraries: NumPy, CuPy, torch (CPU and CUDA), and anything with ``__dlpack__`` (viewed as NumPy or CuPy, and returned
through the producer's own ``from_dlpack``). None but NumPy is imported before an array of that library is seen.
"""
from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Device(NamedTuple):
    kind: str  # "cpu" or "cuda"
    index: int  # type: ignore[assignment]  # CUDA ordinal, 0 for the CPU

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


CPU = Device("cpu", 0)
_NO_CONTEXT = nullcontext()


@dataclass(slots=True, eq=False)  # never changed, but not frozen: a frozen one takes three times as long to construct
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

    def to_numpy(self, array: Any) -> np.ndarray:
        """A NumPy array with the same values: a view of a CPU array, a (synchronizing) copy of a CUDA array."""
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray, device: Device) -> Any:
        raise NotImplementedError

    def astype(self, array: Any, dtype: str) -> Any:
        raise NotImplementedError

    def on(self, device: Device) -> AbstractContextManager:
        """The context in which to run elementwise operations on arrays of ``device``."""
        return _NO_CONTEXT

    def contiguous(self, array: Any) -> Any:
        """The array in C order: itself if it is C-contiguous already, otherwise a copy."""
        raise NotImplementedError

    def requires_grad(self, array: Any) -> bool:
        """Whether a result computed from ``array`` is expected to carry a gradient."""
        return False

    def stream(self, device: Device) -> int:
        """The caller's current CUDA stream on ``device``, as a raw handle."""
        return 0

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


class NumpyLibrary(Library):
    name = "numpy"
    xp = np

    def describe(self, array, name):
        size = array.itemsize
        return Operand(name, array, self, array.shape, tuple([s // size for s in array.strides]), array.dtype.name, CPU,
                       array.ctypes.data)

    def pointer(self, array):
        return array.ctypes.data

    def empty(self, shape, dtype, device):
        with self.on(device):
            return self.xp.empty(shape, numpy_dtype(dtype))

    def to_numpy(self, array):
        return np.asarray(array)

    def from_numpy(self, array, device):
        return array

    def astype(self, array, dtype):
        return array.astype(numpy_dtype(dtype), copy=False)

    def contiguous(self, array):
        return np.ascontiguousarray(array)

    def arange(self, start, stop, device):
        with self.on(device):
            return self.xp.arange(start, stop, dtype=np.int32)

    def full(self, shape, value, dtype, device):
        with self.on(device):
            return self.xp.full(shape, value, numpy_dtype(dtype))

    def cumsum(self, array):
        return self.xp.cumsum(array, axis=-1, dtype=np.int32)

    def search_right(self, boundaries, values):
        return self.xp.searchsorted(boundaries, values, side="right").astype(np.int32)


class CupyLibrary(NumpyLibrary):
    """NumPy's functions on CUDA arrays; ``cumsum`` and ``search_right`` must be called within ``on``."""

    name = "cupy"

    def __init__(self):
        import cupy

        self.xp = cupy

    def on(self, device):
        current = self.xp.cuda.runtime.getDevice()  # a query costs less than entering a context
        return _NO_CONTEXT if current == device.index else self.xp.cuda.Device(device.index)

    def describe(self, array, name):
        size = array.itemsize
        return Operand(name, array, self, array.shape, tuple([s // size for s in array.strides]), array.dtype.name,
                       Device("cuda", array.device.id), array.data.ptr)

    def pointer(self, array):
        return array.data.ptr

    def to_numpy(self, array):
        with self.on(Device("cuda", array.device.id)):
            return self.xp.asnumpy(array)

    def from_numpy(self, array, device):
        with self.on(device):
            return self.xp.asarray(array)

    def astype(self, array, dtype):
        with self.on(Device("cuda", array.device.id)):
            return array.astype(numpy_dtype(dtype), copy=False)

    def contiguous(self, array):
        with self.on(Device("cuda", array.device.id)):
            return self.xp.ascontiguousarray(array)

    def stream(self, device):
        return self.xp.cuda.get_current_stream(device.index).ptr


class TorchLibrary(Library):
    name = "torch"

    def __init__(self):
        import torch

        self.xp = torch
        names = ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
        self._type_of = {name: getattr(torch, name) for name in names}
        self._name_of = {kind: name for name, kind in self._type_of.items()}
        self._torch_devices: dict[Device, Any] = {CPU: torch.device("cpu")}
        self._cuda: dict[int, Device] = {}

    def _torch_device(self, device):
        found = self._torch_devices.get(device)
        if found is None:
            found = self._torch_devices[device] = self.xp.device(*device)
        return found

    def _device_of(self, array, name):
        if array.is_cuda:
            index = array.get_device()
            found = self._cuda.get(index)
            if found is None:
                found = self._cuda[index] = Device("cuda", index)
            return found
        if not array.is_cpu:
            raise TypeError(f"{name} is on the torch device {array.device}; allowed are cpu and cuda")
        return CPU

    def describe(self, array, name):
        return Operand(name, array, self, tuple(array.shape), array.stride(),
                       self._name_of.get(array.dtype) or str(array.dtype), self._device_of(array, name),
                       array.data_ptr())

    def pointer(self, array):
        return array.data_ptr()

    def empty(self, shape, dtype, device):
        return self.xp.empty(shape, dtype=self._type_of[dtype], device=self._torch_device(device))

    def to_numpy(self, array):
        array = array.detach().cpu()
        if array.dtype == self.xp.bfloat16:
            return array.view(self.xp.int16).numpy().view(numpy_dtype("bfloat16"))
        return array.numpy()

    def from_numpy(self, array, device):
        if array.dtype.name == "bfloat16":  # torch does not accept this dtype in NumPy arrays
            return self.xp.from_numpy(array.view(np.int16)).view(self.xp.bfloat16).to(self._torch_device(device))
        return self.xp.from_numpy(array).to(self._torch_device(device))

    def astype(self, array, dtype):
        return array.to(self._type_of[dtype])

    def contiguous(self, array):
        return array.contiguous()

    def requires_grad(self, array):
        return array.requires_grad and self.xp.is_grad_enabled()

    def stream(self, device):
        return 0 if device.kind == "cpu" else self.xp._C._cuda_getCurrentRawStream(device.index)

    def arange(self, start, stop, device):
        return self.xp.arange(start, stop, dtype=self.xp.int32, device=self._torch_device(device))

    def full(self, shape, value, dtype, device):
        return self.xp.full(shape, value, dtype=self._type_of[dtype], device=self._torch_device(device))

    def cumsum(self, array):
        return self.xp.cumsum(array, -1, dtype=self.xp.int32)

    def search_right(self, boundaries, values):
        return self.xp.searchsorted(boundaries.contiguous(), values.contiguous(), right=True, out_int32=True)


class DlpackLibrary(Library):
    """A producer of ``__dlpack__`` that is none of the above: viewed as NumPy or CuPy, and returned through its own
    ``from_dlpack`` where it has one (found through ``__array_namespace__``, as in the array API standard)."""

    def __init__(self, base: Library, namespace: Any):
        self.base, self.namespace = base, namespace
        self.name, self.xp = base.name, base.xp
        for method in ("describe", "pointer", "empty", "to_numpy", "from_numpy", "astype", "contiguous", "on",
                       "stream", "arange", "full", "cumsum", "search_right"):
            setattr(self, method, getattr(base, method))

    def export(self, array):
        return self.namespace.from_dlpack(array) if hasattr(self.namespace, "from_dlpack") else array


_libraries: dict[str, Library] = {}
_library_of_type: dict[type, Library | None] = {}
_makers = {"numpy": NumpyLibrary, "cupy": CupyLibrary, "torch": TorchLibrary}


def library_named(name: str) -> Library:
    """The library "numpy", "cupy" or "torch", imported if necessary."""
    if name not in _libraries:
        _libraries[name] = _makers[name]()
    return _libraries[name]


def _find_library(kind: type) -> Library | None:
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _makers and base.__name__ in ("ndarray", "Tensor"):
            return library_named(root)
    return None


def library_of(array: Any, name: str) -> Library:
    """The library that ``array`` belongs to. TypeError if it is not an array."""
    kind = type(array)
    if kind not in _library_of_type:
        _library_of_type[kind] = _find_library(kind)
    if (found := _library_of_type[kind]) is not None:
        return found
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        raise TypeError(f"{name} must be a numpy.ndarray, cupy.ndarray, torch.Tensor or an object with __dlpack__, "
                        f"got {kind.__module__}.{kind.__qualname__}")
    on_cpu = int(array.__dlpack_device__()[0]) == 1
    namespace = getattr(array, "__array_namespace__", lambda: sys.modules.get(kind.__module__.partition(".")[0]))()
    return DlpackLibrary(library_named("numpy" if on_cpu else "cupy"), namespace)


def describe(array: Any, name: str) -> Operand:
    """The ``Operand`` of an argument. TypeError if it is not an array."""
    owner = library_of(array, name)
    if isinstance(owner, DlpackLibrary):
        view = owner.base.xp.from_dlpack(array)
        seen = owner.base.describe(view, name)
        return Operand(name, view, owner, seen.shape, seen.strides, seen.dtype, seen.device, seen.pointer)
    return owner.describe(array, name)
