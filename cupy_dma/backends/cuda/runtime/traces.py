"""A run of a backend function on stand-ins of its arrays, whose addresses are made up: what it launches is recorded."""
from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from cupy_dma.arrays import Device, Library, Operand, numpy_dtype, strides_of
from cupy_dma.arrays.library import NO_CONTEXT
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.masks.derived import moved
from cupy_dma.masks.interval import IntervalMask

ALIGNMENT = 16  # nothing asks for more: an argument's address modulo this is part of its kind
SPAN = 2**36  # between made-up addresses: no array is as long
FIRST, LAST = 2**8, 2**11 - 1  # made-up addresses, in units of SPAN: below 2^47, as the driver wants them


class Stream(int):
    """Stands for the caller's stream."""


STREAM = Stream()


class Untraceable(Exception):
    """A function cannot be planned for these arguments."""


# ---- the arguments of a call ----------------------------------------------------------------------------------------

_PLAIN = {bool, int, float, str, frozenset, tuple}
_fields: dict[type, tuple[str, ...]] = {}


def plannable(*kinds: type) -> None:
    """Arguments of these types may be planned: dataclasses if their fields may, and tuples of plain values."""
    for kind in kinds:
        if dataclasses.is_dataclass(kind):
            _fields[kind] = tuple(field.name for field in dataclasses.fields(kind))
        else:
            _PLAIN.add(kind)


class Arguments:
    """The kind of a call's arguments, and the addresses, rounded down to ``ALIGNMENT``, and masks among them."""

    __slots__ = ("addresses", "device", "kind", "library", "masks")

    def __init__(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]):
        self.kind: list[Any] = [name, *named]
        self.addresses: list[int] = []
        self.masks: list[IntervalMask] = []
        self.library: Any = None
        self.device: Any = None
        for argument in (*arguments, *named.values()):
            self._add(argument)
        assert self.library is not None  # every backend function takes an array
        self.kind += (self.library.name, self.device)

    def _add(self, x: Any) -> None:
        kind = type(x)
        if kind is Operand:
            odd = x.pointer % ALIGNMENT
            self.kind.append((x.shape, strides_of(x.shape, x.strides), x.dtype, odd))
            self.addresses.append(x.pointer - odd)
            if self.library is None:
                self.library, self.device = x.library, x.device
        elif x is None or kind in _PLAIN:
            self.kind.append(x)
        elif kind is IntervalMask:
            self.kind.append(x._hints)
            self.masks.append(x)
            self._add(x._start)
            self._add(x._stop)
        elif kind in _fields:
            for name in _fields[kind]:
                self._add(getattr(x, name))
        else:
            raise Untraceable(f"an argument of type {kind.__name__}")


# ---- a run on stand-ins ---------------------------------------------------------------------------------------------


class TracedArray:
    """An array that is nowhere: the ``base``-th of a trace. ``packed``: it is contiguous."""

    def __init__(self, base: int, pointer: int, shape: tuple[int, ...], dtype: str, packed: bool = True):
        self.base, self.pointer, self.shape, self.dtype, self.packed = base, pointer, shape, dtype, packed

    def reshape(self, shape: tuple[int, ...]) -> TracedArray:
        if not self.packed:
            raise Untraceable("another shape of an array with gaps")
        return TracedArray(self.base, self.pointer, tuple(shape), self.dtype)

    def __getitem__(self, axes: tuple[None, ...]) -> TracedArray:
        """With more axes of size 1 in front."""
        if any(axis is not None for axis in axes):
            raise Untraceable("a view of an array")
        return self.reshape((1,) * len(axes) + self.shape)


class TracedMask(IntervalMask):
    """An interval mask of such arrays; its lists are those of the ``real`` one."""

    __slots__ = ("real", "trace")
    real: IntervalMask
    trace: Trace


class TracedLibrary:
    """Allocates in a trace."""

    def __init__(self, trace: Trace, name: str):
        self._trace, self.name = trace, name

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> TracedArray:
        base = self._trace.add(bytes_of(shape, dtype))
        return TracedArray(base, self._trace.address(base), tuple(shape), dtype)

    def full(self, shape: tuple[int, ...], value: Any, dtype: str, device: Device) -> TracedArray:
        array, size = self.empty(shape, dtype, device), bytes_of(shape, dtype)
        if value != 0:
            self._trace.unfilled.add(array.base)
        elif size:
            self._trace.steps.append(Clear(array.pointer, size))
        return array

    def arange(self, start: int, stop: int, device: Device) -> TracedArray:
        array = self.empty((stop - start,), "int32", device)
        self._trace.unfilled.add(array.base)
        return array

    def astype(self, array: TracedArray, dtype: str) -> TracedArray:
        if array.dtype != dtype:
            raise Untraceable("the library's astype")
        return array

    def contiguous(self, array: TracedArray) -> TracedArray:
        if not array.packed:
            raise Untraceable("a copy of an array with gaps")
        return array

    def describe(self, array: TracedArray, name: str) -> Operand:
        strides = packed_strides(array.shape)
        return Operand(name, array, self, array.shape, strides,  # type: ignore[arg-type]
                       array.dtype, self._trace.device, array.pointer)

    operand = describe

    def on(self, device: Device) -> AbstractContextManager:
        return NO_CONTEXT

    def pointer(self, array: TracedArray) -> int:
        return array.pointer

    def stream(self, device: Device) -> int:
        return STREAM

    def __getattr__(self, name: str) -> Any:
        raise Untraceable(f"the library's {name}")


class Launch(NamedTuple):
    kernel: LoadedKernel
    grid: int
    threads: int
    pdl: bool
    params: bytes


class Clear(NamedTuple):
    """Memory set to zero."""

    pointer: int
    size: int


class Request(NamedTuple):
    """``function(runtime, mask, *arguments)`` gives an object with a ``workspace``: lists that a mask keeps."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    base: int


class Trace:
    """One run on stand-ins. ``ascending``: how their addresses are made up. ``before_backward``: a backward follows in
    the same trace, which finds what this run leaves."""

    def __init__(self, runtime: Runtime, owner: Library, device: Device, ascending: bool,
                 before_backward: bool = False):
        """Of a call with arrays of ``owner`` on ``device``."""
        self.runtime, self.owner, self.device, self.ascending = runtime, owner, device, ascending
        self.before_backward = before_backward
        self.library = TracedLibrary(self, owner.name)
        self.sizes: list[int] = []  # of the arrays that the function makes, in bytes; of others 0
        self.given: list[int] = []  # bases of the arguments
        self.unfilled: set[int] = set()  # arrays whose values nothing writes here: no kernel may read them
        self.steps: list[Launch | Clear] = []
        self.requests: list[Request] = []

    def add(self, size: int) -> int:
        """The base of another array."""
        self.sizes.append(size)
        if len(self.sizes) > LAST - FIRST:
            raise Untraceable("too many arrays")
        return len(self.sizes) - 1

    def address(self, base: int) -> int:
        return address_of(base, self.ascending)

    def stand_in(self, x: Any) -> Any:
        """The argument in this trace; in the order of ``Arguments``."""
        kind = type(x)
        if kind is Operand:
            base = self.add(0)
            self.given.append(base)
            pointer = self.address(base) + x.pointer % ALIGNMENT
            array = TracedArray(base, pointer, tuple(x.array.shape), x.dtype, is_packed(x))
            return dataclasses.replace(x, array=array, library=self.library, pointer=pointer)
        if kind is IntervalMask:
            mask = TracedMask.__new__(TracedMask)
            mask.real, mask.trace = x, self
            mask._start, mask._stop = self.stand_in(x._start), self.stand_in(x._stop)
            mask.shape, mask.key_length, mask.device = x.shape, x.key_length, x.device
            mask.library, mask._cache = mask._start.library, {}
            mask._hints, mask._starts, mask._bound, mask._causal_only = x._hints, x._starts, x._bound, x._causal_only
            return mask
        if kind in _fields:
            return dataclasses.replace(x, **{name: self.stand_in(getattr(x, name)) for name in _fields[kind]})
        return x

    def lists(self, function: Callable[..., Any], mask: TracedMask, arguments: tuple[Any, ...]) -> Any:
        """What ``function`` gives for the real mask, at a made-up address."""
        real = function(self.runtime, mask.real, *on_stream(arguments, self.owner.stream(self.device)))
        if real is None:
            return None
        space = self.owner.describe(real.workspace, "lists")
        base, end = self.add(0), space.pointer + bytes_of(space.shape, space.dtype)
        self.requests.append(Request(function, arguments, base))
        array = TracedArray(base, self.address(base), space.shape, space.dtype)
        return moved(real, space.pointer, end, array, array.pointer)


def address_of(base: int, ascending: bool) -> int:
    return (FIRST + base if ascending else LAST - base) * SPAN + ALIGNMENT  # and not aligned better


def packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of an array in C order, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def is_packed(x: Operand) -> bool:
    """Whether it is in C order."""
    return all(size == 1 or stride == packed
               for size, stride, packed in zip(x.shape, x.strides, packed_strides(x.shape)))


def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape)) * numpy_dtype(dtype).itemsize


def on_stream(arguments: tuple[Any, ...], stream: int) -> tuple[Any, ...]:
    return tuple([stream if x is STREAM else x for x in arguments])


class _RecordedKernel:
    def __init__(self, recorder: Recorder, kernel: LoadedKernel):
        self._recorder, self._kernel = recorder, kernel

    def launch(self, grid: int, threads: int, params: bytes, stream: int, pdl: bool = True) -> None:
        assert stream is STREAM
        self._recorder.trace.steps.append(Launch(self._kernel, grid, threads, pdl, params))


class Recorder:
    """The ``Runtime`` of traces: one for each real one, for kernels are cached by it."""

    def __init__(self, runtime: Runtime):
        self._runtime, self._local, self._lock = runtime, threading.local(), threading.Lock()
        self._kernels: dict[Any, _RecordedKernel] = {}

    @property
    def trace(self) -> Trace:
        return self._local.trace

    @contextmanager
    def recording(self, trace: Trace) -> Iterator[None]:
        """Launches are those of this trace, for a while."""
        outer, self._local.trace = getattr(self._local, "trace", None), trace
        try:
            yield
        finally:
            self._local.trace = outer

    def record(self, trace: Trace, function: Callable[..., Any], arguments: tuple[Any, ...],
               named: dict[str, Any]) -> Any:
        """What the function returns for stand-ins of these arguments."""
        stand_ins = [trace.stand_in(x) for x in (*arguments, *named.values())]
        count = len(arguments)
        with self.recording(trace):
            return function(self, *stand_ins[:count], **dict(zip(named, stand_ins[count:])))

    def load(self, config: jit.Config, entry: str, index: int, shared_bytes: int = 0) -> LoadedKernel:
        """The same for all threads: launches are compared by their kernels."""
        key = config, entry, index, shared_bytes
        if key not in self._kernels:
            kernel = _RecordedKernel(self, self._runtime.load(*key))
            with self._lock:
                self._kernels.setdefault(key, kernel)
        return self._kernels[key]

    def __getattr__(self, name: str) -> Any:  # facts about the device
        return getattr(self._runtime, name)
