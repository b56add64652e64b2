"""Building programs: a ``Builder`` stands for the device and the array library in this backend's functions."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_dma.arrays import ALIGNMENT, Device, Operand, numpy_dtype, packed_strides, strides_of
from cupy_dma.arrays.library import NO_CONTEXT
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import RESERVED
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.backends.cuda.runtime.overrides import NONE, Overrides
from cupy_dma.backends.cuda.runtime.params import Packed, Ref
from cupy_dma.masks.interval import IntervalMask

if TYPE_CHECKING:
    from cupy_dma.backends.cuda.runtime.program import Program


class NotBuildable(Exception):
    """A builder cannot do this: it needs the caller's array library."""


# ---- the arguments of a call ----------------------------------------------------------------------------------------

_PLAIN = {bool, int, float, str, frozenset, tuple}
_fields: dict[type, tuple[str, ...]] = {}


def argument_type(kind: type, *, without: Collection[str] = ()) -> type:
    """A type that functions may take: a dataclass, all of whose fields they may use except those in ``without``, which
    programs do not depend on; any other type is hashed."""
    if dataclasses.is_dataclass(kind):
        _fields[kind] = tuple([field.name for field in dataclasses.fields(kind) if field.name not in without])
    else:
        _PLAIN.add(kind)
    return kind


class Arguments:
    """Of a call: the key of its program; addresses, rounded down to ``ALIGNMENT``; and masks."""

    __slots__ = ("addresses", "device", "key", "library", "masks")

    def __init__(self, function: Any, arguments: tuple[Any, ...]):
        self.key: Any = [function]
        self.addresses: list[Any] = []
        self.masks: list[IntervalMask] = []
        self.library: Any = None
        self.device: Any = None
        for argument in arguments:
            self._add(argument)
        assert self.library is not None  # every function takes an array
        self.key = (*self.key, self.library.name, self.device)

    def _add(self, x: Any) -> None:
        kind = type(x)
        if kind is Operand:
            odd = x.pointer % ALIGNMENT
            self.key.append((x.shape, strides_of(x.shape, x.strides), x.dtype, odd))
            self.addresses.append(x.pointer + -odd)
            if self.library is None:
                self.library, self.device = x.library, x.device
        elif x is None or kind in _PLAIN:
            self.key.append(x)
        elif isinstance(x, IntervalMask):
            self.key.append(x._hints)
            self.masks.append(x)
            self._add(x._start)
            self._add(x._stop)
        elif kind in _fields:
            for name in _fields[kind]:
                self._add(getattr(x, name))
        else:
            raise TypeError(f"no program takes an argument of type {kind.__name__}")


# ---- building -------------------------------------------------------------------------------------------------------


class Array:
    """An array of a program; ``packed``: contiguous."""

    __slots__ = ("dtype", "packed", "ref", "shape")

    def __init__(self, ref: Ref, shape: tuple[int, ...], dtype: str, packed: bool = True):
        self.ref, self.shape, self.dtype, self.packed = ref, tuple(shape), dtype, packed

    def reshape(self, *shape: Any) -> Array:
        if not self.packed:
            raise NotBuildable("another shape of an array with gaps")
        return Array(self.ref, shape[0] if isinstance(shape[0], tuple) else shape, self.dtype)

    def __getitem__(self, axes: Any) -> Array:
        """With more axes of size 1 in front, or without the one that is there (``x[0]``)."""
        if type(axes) is int and axes == 0 and self.shape[:1] == (1,):
            return self.reshape(self.shape[1:])
        added = axes if isinstance(axes, tuple) else (axes,)
        if any(axis is not None for axis in added):
            raise NotBuildable("a view of an array")
        return self.reshape((1,) * len(added) + self.shape)


class GivenMask(IntervalMask):
    """The ``index``-th mask among the arguments of a program."""

    __slots__ = ("index",)
    index: int


class Launch(NamedTuple):
    kernel: LoadedKernel
    grid: int
    threads: int
    pdl: bool
    params: Packed


class Clear(NamedTuple):
    """Memory set to zero."""

    ref: Ref
    size: int


class Request(NamedTuple):
    """Lists of a mask among the arguments: results of ``program``, kept on the mask."""

    mask: int  # which
    program: Program
    buffer: int


class Buffer(NamedTuple):
    """Memory that a program allocates; without a shape, memory that it is given."""

    shape: tuple[int, ...] | None
    dtype: str = ""


class Builder:
    """Builds a program. Stands for the device and for the call's array library, with the parts that this backend and
    the checked call need."""

    def __init__(self, runtime: Runtime, name: str, device: Device, program_of: Callable[..., Program],
                 grad: bool = False, overrides: Overrides = NONE):
        """``name``: of the call's library. ``program_of``: as in program.py. ``grad``: a backward follows, which reuses
        what this builds."""
        self.runtime, self.name, self.device, self.grad, self._program_of = runtime, name, device, grad, program_of
        self.overrides = overrides
        self.notes: list[str] = []  # why kernels are not used
        self.buffers: list[Buffer] = []
        self.given: list[int] = []  # buffers of the arguments, in order
        self.masks = 0
        self.unwritten: set[int] = set()
        self.steps: list[Launch | Clear] = []
        self.requests: list[Request] = []
        self._derived: dict[int, tuple[IntervalMask, dict[Any, Any]]] = {}  # by a mask's id

    # ---- the device ----
    def load(self, config: jit.Config, entry: str, shared_bytes: int = 0) -> LoadedKernel:
        if shared_bytes and self.overrides.shared_memory is not None:  # no more blocks per SM than on that card
            own = self.runtime.shared_memory_limit(self.device.index) + RESERVED
            blocks = max(1, (self.shared_memory_limit + RESERVED) // (shared_bytes + RESERVED))
            shared_bytes = max(shared_bytes, own // blocks // 128 * 128 - RESERVED)
        return self.runtime.load(config, entry, self.device.index, shared_bytes)

    @property
    def num_sms(self) -> int:
        return self.runtime.num_sms(self.device.index)

    @property
    def shared_memory_limit(self) -> int:
        own, other = self.runtime.shared_memory_limit(self.device.index), self.overrides.shared_memory
        return own if other is None else min(own, other)

    @property
    def is_hopper(self) -> bool:
        return self.runtime.hopper(self.device.index)

    def takes(self, kernel: str, reasons: list[str]) -> bool:
        """Whether there are no reasons against a kernel; reasons are noted."""
        self.notes += [f"{kernel}: {reason}" for reason in reasons]
        return not reasons

    def check_layout(self) -> None:
        self.runtime.check_layout(self.device.index)

    def launch(self, kernel: LoadedKernel, grid: int, threads: int, params: Packed | bytes, pdl: bool = True) -> None:
        """``grid`` blocks of ``threads`` threads; see ``jit.Kernel.launch``."""
        packed = params if isinstance(params, Packed) else Packed(params)
        if any(ref.buffer in self.unwritten for _, ref in packed.refs):
            raise NotBuildable("an array that no kernel writes")
        self.steps.append(Launch(kernel, grid, threads, pdl, packed))

    # ---- arguments ----
    def argument(self, x: Any) -> Any:
        """The argument in the form that functions get; call in the order of ``Arguments``."""
        kind = type(x)
        if kind is Operand:
            self.given.append(len(self.buffers))
            ref = Ref(self._add(None), (x.pointer or 0) % ALIGNMENT)  # None while a compiler traces
            array = Array(ref, x.array.shape, x.dtype, is_packed(x))
            return Operand(x.name, array, self, x.shape, x.strides, x.dtype, x.device, ref)  # type: ignore[arg-type]
        if isinstance(x, IntervalMask):
            mask = GivenMask.__new__(GivenMask)
            mask.index, self.masks = self.masks, self.masks + 1
            mask._start, mask._stop = self.argument(x._start), self.argument(x._stop)
            mask.shape, mask.key_length, mask.device = x.shape, x.key_length, x.device
            mask.library = mask._start.library
            mask._hints, mask._starts, mask._bound, mask._causal_only = x._hints, x._starts, x._bound, x._causal_only
            return mask
        if kind in _fields:
            return dataclasses.replace(x, **{name: self.argument(getattr(x, name)) for name in _fields[kind]})
        return x

    def lists_of(self, mask: GivenMask, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``function(build, mask, *arguments)`` for a caller's mask: an object with a ``workspace`` and
        ``fields`` of numbers and addresses in it."""
        given = mask, *arguments
        program = self._program_of(self.runtime, function, Arguments(function, given), given)
        own, buffer = program.value.workspace.ref.buffer, self._add(None)
        self.requests.append(Request(mask.index, program, buffer))
        fields = {name: Ref(buffer, x.offset) if isinstance(x, Ref) and x.buffer == own else x
                  for name, x in program.value.fields.items()}
        return dataclasses.replace(program.value, fields=fields, workspace=None)

    def following(self) -> Builder:
        """A builder of a program that follows this one and can reuse what this one has made."""
        build = Builder(self.runtime, self.name, self.device, self._program_of, overrides=self.overrides)
        build.buffers, build.masks, build.unwritten = list(self.buffers), self.masks, set(self.unwritten)
        build._derived = {key: (mask, dict(known)) for key, (mask, known) in self._derived.items()}
        return build

    def derived(self, mask: IntervalMask) -> dict[Any, Any]:
        """What the program has derived from a mask that it made itself."""
        return self._derived.setdefault(id(mask), (mask, {}))[1]

    # ---- the array library ----
    def _add(self, shape: tuple[int, ...] | None, dtype: str = "") -> int:
        self.buffers.append(Buffer(shape, dtype))
        return len(self.buffers) - 1

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device | None = None) -> Array:
        return Array(Ref(self._add(tuple(shape), dtype)), tuple(shape), dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        array = self.empty(shape, dtype)
        if size := bytes_of(shape, dtype):
            self.steps.append(Clear(array.ref, size))
        return array

    def full(self, shape: tuple[int, ...], value: Any, dtype: str, device: Device) -> Array:
        """An array that no kernel writes, so none may read it (the interval mask of plain causality)."""
        array = self.empty(shape, dtype)
        self.unwritten.add(array.ref.buffer)
        return array

    def arange(self, start: int, stop: int, device: Device) -> Array:
        return self.full((stop - start,), None, "int32", device)

    def astype(self, array: Array, dtype: str) -> Array:
        if array.dtype != dtype:
            raise NotBuildable("the library's astype")
        return array

    def contiguous(self, array: Array) -> Array:
        if not array.packed:
            raise NotBuildable("a copy of an array with gaps")
        return array

    def describe(self, array: Array, name: str) -> Operand:
        self.contiguous(array)
        return Operand(name, array, self, array.shape, packed_strides(array.shape),  # type: ignore[arg-type]
                       array.dtype, self.device, array.ref)  # type: ignore[arg-type]

    operand = describe

    def on(self, device: Device) -> AbstractContextManager:
        return NO_CONTEXT

    def is_traced(self) -> bool:
        return True  # no values yet

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotBuildable(f"the library's {name}")


def is_packed(x: Operand) -> bool:
    """Whether the operand is in C order."""
    return all(size == 1 or stride == packed
               for size, stride, packed in zip(x.shape, x.strides, packed_strides(x.shape)))


def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape)) * numpy_dtype(dtype).itemsize
