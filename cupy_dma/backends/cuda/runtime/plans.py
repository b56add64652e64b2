"""Plans: what a backend function launches for arguments of one kind, recorded once and repeated at other addresses.

The functions of this backend look at shapes, strides, types, alignment and options, never at values. So the second call
with arguments of one kind runs the function twice on stand-ins of its arrays, whose addresses are made up, and keeps
what it launches. A word of a kernel's parameters that differs between the two runs is an address, and both together
tell of which array; if they do not, the function is not planned. Further calls allocate the results and one workspace,
fill in the addresses and launch.

Key lists belong to their mask, not to the call: a plan asks for them (``kept_on_mask``), and they are made, by a plan
of their own, if the mask has none yet.
"""
from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from cupy_dma.arrays import Device, Operand, numpy_dtype
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.masks.interval import IntervalMask

ALIGNMENT = 16  # nothing asks for more: an argument's address modulo this is part of its kind
SPACING = 256  # of the arrays in a workspace
MOST_PLANS = 4096  # of a device; then all are forgotten
_SPAN = 2**36  # between made-up addresses: no array is as long
_FIRST, _LAST = 2**8, 2**11 - 1  # made-up addresses, in units of _SPAN: below 2^47, as the driver wants them


# Off by default until every GPU test has run with them: docs/lab/host.md.
_enabled = os.environ.get("CUPY_DMA_PLANS", "") not in ("", "0")


class _Stream(int):
    """Stands for the caller's stream."""


_STREAM = _Stream()


class Untraceable(Exception):
    """A function cannot be planned for these arguments."""


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Whether calls are planned, for a while: off for what changes which kernels a call takes."""
    global _enabled
    before, _enabled = _enabled, on
    try:
        yield
    finally:
        _enabled = before


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
            self.kind.append((x.shape, x.strides, x.dtype, odd))
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
    """An array that is nowhere: the ``base``-th of a trace, contiguous."""

    def __init__(self, base: int, pointer: int, shape: tuple[int, ...], dtype: str):
        self.base, self.pointer, self.shape, self.dtype = base, pointer, shape, dtype

    def reshape(self, shape: tuple[int, ...]) -> TracedArray:
        return TracedArray(self.base, self.pointer, tuple(shape), self.dtype)


class TracedMask(IntervalMask):
    """An interval mask of such arrays; its lists are those of the ``real`` one, the ``index``-th of a call."""

    __slots__ = ("index", "real", "trace")
    index: int
    real: IntervalMask
    trace: Trace


class TracedLibrary:
    """Allocates in a trace."""

    def __init__(self, trace: Trace, name: str):
        self._trace, self.name = trace, name

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> TracedArray:
        base = self._trace.add(_bytes(shape, dtype))
        return TracedArray(base, self._trace.address(base), tuple(shape), dtype)

    def full(self, shape: tuple[int, ...], value: Any, dtype: str, device: Device) -> TracedArray:
        if value != 0:
            raise Untraceable(f"an array filled with {value}")
        array = self.empty(shape, dtype, device)
        self._trace.steps.append(Clear(array.pointer, _bytes(shape, dtype)))
        return array

    def astype(self, array: TracedArray, dtype: str) -> TracedArray:
        if array.dtype != dtype:
            raise Untraceable("the library's astype")
        return array

    def pointer(self, array: TracedArray) -> int:
        return array.pointer

    def stream(self, device: Device) -> int:
        return _STREAM

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
    mask: int
    arguments: tuple[Any, ...]
    base: int


class Trace:
    """One run on stand-ins. ``ascending``: how their addresses are made up."""

    def __init__(self, runtime: Runtime, arguments: Arguments, ascending: bool):
        self.runtime, self.arguments, self.ascending = runtime, arguments, ascending
        self.library = TracedLibrary(self, arguments.library.name)
        self.sizes: list[int] = []  # of the arrays that the function makes, in bytes; of others 0
        self.given: list[int] = []  # bases of the arguments
        self.steps: list[Launch | Clear] = []
        self.requests: list[Request] = []
        self.masks = 0

    def add(self, size: int) -> int:
        """The base of another array."""
        self.sizes.append(size)
        if len(self.sizes) > _LAST - _FIRST:
            raise Untraceable("too many arrays")
        return len(self.sizes) - 1

    def address(self, base: int) -> int:
        return _address(base, self.ascending)

    def stand_in(self, x: Any) -> Any:
        """The argument in this trace; in the order of ``Arguments``."""
        kind = type(x)
        if kind is Operand:
            base = self.add(0)
            self.given.append(base)
            pointer = self.address(base) + x.pointer % ALIGNMENT
            array = TracedArray(base, pointer, x.shape, x.dtype)
            return dataclasses.replace(x, array=array, library=self.library, pointer=pointer)
        if kind is IntervalMask:
            mask = TracedMask.__new__(TracedMask)
            mask.real, mask.trace, mask.index = x, self, self.masks
            self.masks += 1
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
        library, device = self.arguments.library, self.arguments.device
        real = function(self.runtime, mask.real, *_on_stream(arguments, library.stream(device)))
        if real is None:
            return None
        space = library.describe(real.workspace, "lists")
        base = self.add(0)
        moved, end = self.address(base) - space.pointer, _bytes(space.shape, space.dtype)
        self.requests.append(Request(function, mask.index, arguments, base))
        return dataclasses.replace(
            real, workspace=TracedArray(base, self.address(base), space.shape, space.dtype),
            fields={name: value + moved if 0 <= value - space.pointer <= end else value
                    for name, value in real.fields.items()})


def _address(base: int, ascending: bool) -> int:
    return (_FIRST + base if ascending else _LAST - base) * _SPAN + ALIGNMENT  # and not aligned better


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape)) * numpy_dtype(dtype).itemsize


def _on_stream(arguments: tuple[Any, ...], stream: int) -> tuple[Any, ...]:
    return tuple([stream if x is _STREAM else x for x in arguments])


class _RecordedKernel:
    def __init__(self, recorder: Recorder, kernel: LoadedKernel):
        self._recorder, self._kernel = recorder, kernel

    def launch(self, grid: int, threads: int, params: bytes, stream: int, pdl: bool = True) -> None:
        assert stream is _STREAM
        self._recorder.trace.steps.append(Launch(self._kernel, grid, threads, pdl, params))


class Recorder:
    """The ``Runtime`` of traces: one for each real one, for kernels are cached by it."""

    def __init__(self, runtime: Runtime):
        self._runtime, self._local = runtime, threading.local()

    @property
    def trace(self) -> Trace:
        return self._local.trace

    def record(self, trace: Trace, function: Callable[..., Any], arguments: tuple[Any, ...],
               named: dict[str, Any]) -> Any:
        """What the function returns for stand-ins of these arguments."""
        outer, self._local.trace = getattr(self._local, "trace", None), trace
        stand_ins = [trace.stand_in(x) for x in (*arguments, *named.values())]
        count = len(arguments)
        try:
            return function(self, *stand_ins[:count], **dict(zip(named, stand_ins[count:])))
        finally:
            self._local.trace = outer

    @functools.cache  # noqa: B019 - one recorder for the life of a runtime
    def load(self, config: jit.Config, entry: str, index: int, shared_bytes: int = 0) -> LoadedKernel:
        return _RecordedKernel(self, self._runtime.load(config, entry, index, shared_bytes))

    def __getattr__(self, name: str) -> Any:  # facts about the device
        return getattr(self._runtime, name)


# ---- plans ----------------------------------------------------------------------------------------------------------


class _Output(NamedTuple):
    """A result, or the array under an address in one: the ``number``-th that a plan allocates."""

    number: int


class _Address(NamedTuple):
    place: int  # in the list of a call's addresses: arguments, lists, outputs, the workspace
    offset: int


class _Dataclass(NamedTuple):
    kind: type
    fields: list[Any]


class Plan:
    """The launches of one kind of call."""

    def __init__(self, first: Trace, second: Trace, results: tuple[Any, Any]):
        """Of two traces, ascending and not, and what the function returned in them."""
        self._requests = first.requests
        self._outputs: list[tuple[tuple[int, ...], str]] = []
        self._indices: dict[int, int] = {}  # of the outputs, by base
        self._find_outputs(results[0])
        outside = [*first.given, *(request.base for request in first.requests)]
        self._places = {base: (place, 0) for place, base in enumerate([*outside, *self._indices])}
        end = 0
        for base, size in enumerate(first.sizes):
            if base not in self._places:
                self._places[base] = len(outside) + len(self._indices), end
                end += -(-size // SPACING) * SPACING
        self._workspace = end // 4  # in int32
        self._result = self._template(*results)
        self._record(first.steps, second.steps)

    def _find_outputs(self, x: Any) -> None:
        if isinstance(x, TracedArray):
            if x.base not in self._indices:
                self._indices[x.base] = len(self._outputs)
                self._outputs.append((x.shape, x.dtype))
        elif isinstance(x, tuple):
            for y in x:
                self._find_outputs(y)
        elif dataclasses.is_dataclass(x):
            for field in dataclasses.fields(x):
                self._find_outputs(getattr(x, field.name))

    def _template(self, x: Any, y: Any) -> Any:
        """A result with ``_Output`` and ``_Address`` in place of arrays and addresses."""
        if isinstance(x, TracedArray):
            return _Output(self._indices[x.base])
        if isinstance(x, tuple):
            return tuple([self._template(*pair) for pair in zip(x, y)])
        if isinstance(x, dict):
            return {name: self._template(value, y[name]) for name, value in x.items()}
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return _Dataclass(type(x), [self._template(getattr(x, field.name), getattr(y, field.name))
                                        for field in dataclasses.fields(x)])
        return x if x == y else self._located(x, y)

    def _located(self, x: int, y: int) -> _Address:
        """Of an address that is ``x`` in one trace and ``y`` in the other."""
        base = (x + _SPAN // 2) // _SPAN - _FIRST
        offset = x - _address(base, True)
        if base not in self._places or y != _address(base, False) + offset:
            raise Untraceable("a number that depends on addresses")
        place, begin = self._places[base]
        return _Address(place, begin + offset)

    def _record(self, first: list[Launch | Clear], second: list[Launch | Clear]) -> None:
        """Sets ``_steps``, and ``_words``, the parameters of all kernels, of which words ``_at`` are
        ``addresses[_which] + _offsets``."""
        self._steps: list[tuple[Any, ...]] = []
        words, holes, size = [np.zeros(0, np.uint64)], [], 0
        if len(first) != len(second):
            raise Untraceable("launches that depend on addresses")
        for a, b in zip(first, second):
            if isinstance(a, Clear) or isinstance(b, Clear):
                self._steps.append((None, *self._located(a[0], b[0]), a[1]))  # type: ignore[arg-type]
                continue
            x, y = (np.frombuffer(step.params + bytes(-len(step.params) % 8), np.uint64) for step in (a, b))
            if a[:4] != b[:4] or x.shape != y.shape:
                raise Untraceable("launches that depend on addresses")
            holes += [(size + int(i), *self._located(int(x[i]), int(y[i]))) for i in np.flatnonzero(x != y)]
            self._steps.append((a.kernel, a.grid, a.threads, 8 * size, 8 * size + len(a.params), a.pdl))
            words.append(x)
            size += len(x)
        self._words = np.concatenate(words)
        at, which, offsets = zip(*holes) if holes else ((), (), ())
        self._at, self._which = np.array(at, np.intp), np.array(which, np.intp)
        self._offsets = np.array([offset % 2**64 for offset in offsets], np.uint64)

    def run(self, runtime: Runtime, arguments: Arguments) -> Any:
        """The call with these arguments."""
        library, device, addresses = arguments.library, arguments.device, list(arguments.addresses)
        stream, pointer, empty = library.stream(device), library.pointer, library.empty
        for function, mask, more, _ in self._requests:
            addresses.append(pointer(function(runtime, arguments.masks[mask], *_on_stream(more, stream)).workspace))
        outputs = [empty(shape, dtype, device) for shape, dtype in self._outputs]
        addresses += [pointer(x) for x in outputs]
        if self._workspace:
            workspace = empty((self._workspace,), "int32", device)
            addresses.append(pointer(workspace))
        words = self._words.copy()
        words[self._at] = np.array(addresses, np.uint64)[self._which] + self._offsets
        params = words.tobytes()
        with runtime.on(device):
            for kernel, a, b, *last in self._steps:
                if kernel is None:
                    runtime.clear(addresses[a] + b, last[0], stream)
                else:
                    kernel.launch(a, b, params[last[0]:last[1]], stream, last[2])
        return _filled(self._result, outputs, addresses)


def _filled(template: Any, outputs: list[Any], addresses: list[int]) -> Any:
    kind = type(template)
    if kind is _Output:
        return outputs[template.number]
    if kind is tuple:
        return tuple([_filled(x, outputs, addresses) for x in template])
    if kind is _Address:
        return addresses[template.place] + template.offset
    if kind is dict:
        return {name: _filled(x, outputs, addresses) for name, x in template.items()}
    if kind is _Dataclass:
        return template.kind(*[_filled(x, outputs, addresses) for x in template.fields])
    return template


# ---- planned functions ----------------------------------------------------------------------------------------------

_SEEN, _UNPLANNED = object(), object()  # in place of a plan: the first call of its kind was made; there is none


@functools.cache
def _of(runtime: Runtime) -> tuple[dict[Any, Any], Recorder]:
    """The plans of a device."""
    return {}, Recorder(runtime)


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """A backend function ``(runtime, ...)`` that plans its calls."""

    @functools.wraps(function)
    def run(runtime: Runtime, *arguments: Any, **named: Any) -> Any:
        if not _enabled:
            return function(runtime, *arguments, **named)
        try:
            found = Arguments(function.__qualname__, arguments, named)
        except Untraceable:
            return function(runtime, *arguments, **named)
        plans, recorder = _of(runtime)
        kind = tuple(found.kind)
        plan = plans.get(kind)
        if plan is _SEEN:
            plan = plans[kind] = _made(function, runtime, recorder, found, arguments, named)
        if type(plan) is Plan:
            return plan.run(runtime, found)
        if plan is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            plans[kind] = _SEEN
        return function(runtime, *arguments, **named)

    return run


def _made(function: Callable[..., Any], runtime: Runtime, recorder: Recorder, found: Arguments,
          arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The plan of calls with such arguments."""
    traces = Trace(runtime, found, True), Trace(runtime, found, False)
    try:
        first, second = (recorder.record(trace, function, arguments, named) for trace in traces)
        return Plan(*traces, (first, second))
    except Untraceable as reason:
        if jit.DEBUG:
            print(f"cupy_dma: {function.__name__} is not planned: {reason}", file=sys.stderr)
        return _UNPLANNED


def kept_on_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(runtime, mask, *arguments)``, whose result is kept on the mask, or None where the mask needs none: a
    plan asks for it in each call."""

    @functools.wraps(function)
    def run(runtime: Runtime, mask: IntervalMask, *arguments: Any) -> Any:
        if type(mask) is TracedMask:
            return mask.trace.lists(run, mask, arguments)
        return function(runtime, mask, *arguments)

    return run
