"""The only package that knows array libraries.

Every array that enters the package becomes an ``Operand``: its shape, strides, type, device and address, plus the
``Library`` it came from. Results are allocated by the library of the first argument, so callers get back arrays of the
library they passed in, from their own allocator and on their current stream.

Libraries: NumPy, CuPy, torch (CPU and CUDA), and anything with ``__dlpack__`` (viewed as NumPy or CuPy, and returned
through the producer's own ``from_dlpack``). All but NumPy are imported when the first array of theirs arrives.
"""
from __future__ import annotations

import sys
from typing import Any

from cupy_dma.arrays.library import (
    ALIGNMENT,
    CPU,
    Device,
    Library,
    Operand,
    numpy_dtype,
    packed_strides,
    strides_of,
)
from cupy_dma.arrays.numpy_cupy import CupyLibrary, NumpyLibrary
from cupy_dma.arrays.torch_library import TorchLibrary
from cupy_dma.arrays.types import Array, Ints, PageTable, Windows

__all__ = ["ALIGNMENT", "CPU", "Array", "Device", "DlpackLibrary", "Ints", "Library", "Operand", "PageTable", "Windows",
           "describe", "is_exported", "is_tensor", "library_named", "library_of", "numpy_dtype", "packed_strides",
           "strides_of"]


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


def is_tensor(array: Any) -> bool:
    """Whether ``array`` is a torch tensor, without importing torch. Looks only at the type, because ``torch.compile``
    guards on everything that is read here."""
    return hasattr(type(array), "__torch_function__")


_libraries: dict[str, Library] = {}
_library_of_type: dict[type, Library | None] = {}
_makers = {"numpy": NumpyLibrary, "cupy": CupyLibrary, "torch": TorchLibrary}


def library_named(name: str) -> Library:
    """The library "numpy", "cupy" or "torch", imported if necessary."""
    if name not in _libraries:
        _libraries[name] = _makers[name]()
    return _libraries[name]


def is_exported() -> bool:
    """Whether ``torch.export`` traces this call."""
    return "torch" in _libraries and _libraries["torch"].is_exported()


def _find_library(kind: type) -> Library | None:
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if base.__name__ == "MaskedArray":  # an ndarray, whose mask would be lost
            return None
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
    if hasattr(array, "filled") and hasattr(array, "mask"):
        raise TypeError(f"{name} must not be a masked array, got {kind.__module__}.{kind.__qualname__}: pass "
                        f"{name}.filled(...), or {name}.data to include masked elements")
    if any(base.__name__ == "Tracer" and base.__module__.startswith("jax") for base in kind.__mro__):
        raise TypeError(f"{name} must be an array with values, got one that jax traces ({kind.__qualname__}): under "
                        f"jax.jit, grad and vmap use the functions and masks of cupy_dma.jax")
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
