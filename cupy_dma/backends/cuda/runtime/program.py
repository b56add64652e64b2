"""Programs: what a call launches, built once from shapes, strides, types and options, and run at any addresses.

The functions of this backend never see memory. They get a ``Builder`` and arguments whose pointers are ``Ref``s, choose
kernels and launch them into the builder; the ``Program`` that it becomes is kept by all that the functions look at
(``Arguments``), and serves every later call that differs in addresses and values alone. A call fills the addresses into
the packed parameters and launches.

Key lists belong to the mask of the caller, not to the call: a program asks for them (``Request``), and another program
makes them where the mask has none yet. Everything else that a call makes is a result or lies in one workspace.
"""
from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from cupy_dma.arrays import Device, Library, Operand, numpy_dtype, strides_of
from cupy_dma.arrays.library import NO_CONTEXT
from cupy_dma.backends.cuda.runtime import jit, launch
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.backends.cuda.runtime.params import ALIGNMENT, Packed, Ref
from cupy_dma.masks.derived import kept
from cupy_dma.masks.interval import IntervalMask

SPACING = 256  # bytes: of the arrays in a workspace
MAX_PROGRAMS = 1024  # of a device; then the least recently used go


class NotBuildable(Exception):
    """A builder cannot do this: it takes the caller's array library."""


# ---- the arguments of a call ----------------------------------------------------------------------------------------

_PLAIN = {bool, int, float, str, frozenset, tuple}
_fields: dict[type, tuple[str, ...]] = {}


def argument_type(kind: type, *, without: Collection[str] = ()) -> type:
    """A type that functions may take: a dataclass whose fields they may take, but those ``without`` which programs do;
    any other is hashed."""
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
        """With more axes of size 1 in front."""
        if not isinstance(axes, tuple) or any(axis is not None for axis in axes):
            raise NotBuildable("a view of an array")
        return self.reshape((1,) * len(axes) + self.shape)


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
    """What a program makes, or with no shape is given."""

    shape: tuple[int, ...] | None
    dtype: str = ""


class Builder:
    """Builds a program. It stands for the device and for the array library of the call, of which it has what this
    backend and the checked call need."""

    def __init__(self, runtime: Runtime, name: str, device: Device, grad: bool = False):
        """``name``: of the call's library. ``grad``: a backward follows, which finds what this builds."""
        self.runtime, self.name, self.device, self.grad = runtime, name, device, grad
        self.buffers: list[Buffer] = []
        self.given: list[int] = []  # buffers of the arguments, in order
        self.masks = 0
        self.unwritten: set[int] = set()
        self.steps: list[Launch | Clear] = []
        self.requests: list[Request] = []
        self._derived: dict[int, tuple[IntervalMask, dict[Any, Any]]] = {}  # by a mask's id

    # ---- the device ----
    def load(self, config: jit.Config, entry: str, shared_bytes: int = 0) -> LoadedKernel:
        return self.runtime.load(config, entry, self.device.index, shared_bytes)

    @property
    def num_sms(self) -> int:
        return self.runtime.num_sms(self.device.index)

    @property
    def shared_memory_limit(self) -> int:
        return self.runtime.shared_memory_limit(self.device.index)

    @property
    def is_hopper(self) -> bool:
        return self.runtime.hopper(self.device.index)

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
        """The argument as functions get it; in the order of ``Arguments``."""
        kind = type(x)
        if kind is Operand:
            self.given.append(len(self.buffers))
            ref = Ref(self._add(None), x.pointer % ALIGNMENT)
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
        """What ``function(build, mask, *arguments)`` makes of a mask that is given: an object with a ``workspace`` and
        ``fields`` of numbers and addresses in it."""
        program = program_of(self.runtime, function, Arguments(function, (mask, *arguments)), (mask, *arguments))
        own, buffer = program.value.workspace.ref.buffer, self._add(None)
        self.requests.append(Request(mask.index, program, buffer))
        fields = {name: Ref(buffer, x.offset) if isinstance(x, Ref) and x.buffer == own else x
                  for name, x in program.value.fields.items()}
        return dataclasses.replace(program.value, fields=fields, workspace=None)

    def following(self) -> Builder:
        """A builder of a program behind this one, which finds what this one has made."""
        build = Builder(self.runtime, self.name, self.device)
        build.buffers, build.masks, build.unwritten = list(self.buffers), self.masks, set(self.unwritten)
        build._derived = {key: (mask, dict(known)) for key, (mask, known) in self._derived.items()}
        return build

    def derived(self, mask: IntervalMask) -> dict[Any, Any]:
        """What the program has derived of a mask of its own."""
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
        """Of a value that no kernel writes: none may read it (the interval mask of plain causality)."""
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
        return Operand(name, array, self, array.shape, packed_strides(array.shape),  # type: ignore[arg-type]
                       array.dtype, self.device, array.ref)  # type: ignore[arg-type]

    operand = describe

    def on(self, device: Device) -> AbstractContextManager:
        return NO_CONTEXT

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotBuildable(f"the library's {name}")


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


# ---- programs -------------------------------------------------------------------------------------------------------

_clock = itertools.count()


class Place(NamedTuple):
    """Where a buffer lies: ``offset`` bytes into the memory at address number ``at`` of a call."""

    at: int
    offset: int


class KeptLists(NamedTuple):
    """The lists of a program's requests."""

    arrays: list[Any]
    addresses: list[int]


class Program:
    """The launches of one kind of call, at the addresses of

        arguments, lists of masks, results, what is kept for a backward if anything is, the workspace if there is one
    """

    def __init__(self, build: Builder, value: Any, keep: Collection[int] = (), places: dict[int, Place] | None = None,
                 first: int = 0, one_workspace: bool = False):
        """``value``: what the function has returned. ``keep``: buffers that a backward may read, in one allocation.
        ``places``: of buffers that the caller passes, by default the arguments; buffers before ``first`` that have none
        are gone. ``one_workspace``: even where the runtime wants arrays apart, to watch them."""
        self.value, self.last_used = value, next(_clock)
        self._runtime, self.device, self._requests = build.runtime, build.device, build.requests
        places = {buffer: Place(i, 0) for i, buffer in enumerate(build.given)} if places is None else dict(places)
        results = {x.ref.buffer: (x.shape, x.dtype) for x in _arrays_in(value) if x.ref.buffer not in places}
        #: shapes and types of what a call allocates
        self.allocations: list[tuple[tuple[int, ...], str]] = list(results.values())
        self.results = len(results)
        for buffer in (*(request.buffer for request in build.requests), *results):
            places[buffer] = Place(self._next(places), 0)
        made = [buffer for buffer in range(first, len(build.buffers)) if buffer not in places]
        self.keeps = self._allocate(build, places, [buffer for buffer in made if buffer in keep])
        rest = [buffer for buffer in made if buffer not in keep]
        if getattr(build.runtime, "separate_arrays", False) and not one_workspace:
            for buffer in rest:
                shape, dtype = build.buffers[buffer]
                assert shape is not None
                places[buffer] = Place(self._next(places), 0)
                self.allocations.append((shape, dtype))
        else:
            self._allocate(build, places, rest)
        self.places, self._indices = places, {buffer: i for i, buffer in enumerate(results)}
        if build.unwritten.intersection(self._indices):
            raise NotBuildable("a result that no kernel writes")
        self._template = _template(value, self._indices)
        self._launches = _Launches(build.steps, places, self._next(places))
        self._allocators: tuple[Any, list[Callable[[], Any]]] = None, []

    @staticmethod
    def _next(places: dict[int, Place]) -> int:
        return 1 + max((place.at for place in places.values()), default=-1)

    def _allocate(self, build: Builder, places: dict[int, Place], buffers: list[int]) -> bool:
        """Lay buffers out in one allocation. Whether there is any."""
        index, end = self._next(places), 0
        for buffer in buffers:
            places[buffer] = Place(index, end)
            shape, dtype = build.buffers[buffer]
            assert shape is not None, "memory of an earlier program"
            end += -(-bytes_of(shape, dtype) // SPACING) * SPACING
        if end:
            self.allocations.append(((end // 4,), "int32"))
        return end > 0

    @property
    def workspace(self) -> int:
        """Bytes besides the results."""
        return sum(bytes_of(*allocation) for allocation in self.allocations[self.results:])

    def order(self, arrays: tuple[Array | None, ...]) -> list[int | None]:
        """Which of what ``run`` gives is each of these results."""
        return [None if x is None else self._indices[x.ref.buffer] for x in arrays]

    def call(self, arguments: Arguments) -> Any:
        """What the function returns, for these arguments."""
        made = self.run(arguments.library, list(arguments.addresses), arguments.masks)
        return _filled(self._template, made)

    def run(self, library: Library, addresses: list[int], masks: list[IntervalMask]) -> list[Any]:
        """The call at these addresses, on the library's current stream: its results, and what is kept."""
        stream = library.stream(self.device)
        lists = self._lists(library, masks, stream) if self._requests else None  # alive until the launch
        if lists is not None:
            addresses += lists.addresses
        known, allocators = self._allocators
        if known is not library:
            allocators = [library.allocator(shape, dtype, self.device) for shape, dtype in self.allocations]
            self._allocators = library, allocators
        made = [allocate() for allocate in allocators]
        addresses += [library.pointer(x) for x in made]
        self.run_at(addresses, stream)
        return made[:self.results + self.keeps]

    def run_at(self, addresses: list[int], stream: int) -> None:
        """The call at the addresses of all that it needs, on the raw ``stream``."""
        self.last_used = next(_clock)
        with self._runtime.on(self.device):
            self._launches.run(self._runtime, addresses, stream)

    def _lists(self, library: Library, masks: list[IntervalMask], stream: int) -> KeptLists:
        def make(request: Request) -> KeptLists:
            mask = masks[request.mask]
            pointers = [x.pointer // ALIGNMENT * ALIGNMENT for x in (mask._start, mask._stop)]
            made = request.program.run(library, pointers, [mask])
            return KeptLists(made, [library.pointer(made[0])])

        def make_all() -> KeptLists:
            found = [kept(masks[x.mask], (x.program,), stream, functools.partial(make, x)) for x in self._requests]
            return KeptLists([x.arrays[0] for x in found], [x.addresses[0] for x in found])

        return kept(masks[0], (self,), stream, make_all)


def _arrays_in(x: Any) -> Iterator[Array]:
    if isinstance(x, Array):
        yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from _arrays_in(y)
    elif dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            yield from _arrays_in(getattr(x, field.name))


def _template(x: Any, results: dict[int, int]) -> Any:
    """What a function returned, with the number of a result in place of an array."""
    if isinstance(x, Array):
        if x.ref.buffer not in results or x.ref.offset:
            raise NotBuildable("a result that no kernel writes")
        return results[x.ref.buffer]
    return tuple([_template(y, results) for y in x]) if isinstance(x, tuple) else None


def _filled(template: Any, made: list[Any]) -> Any:
    if isinstance(template, tuple):
        return tuple([_filled(x, made) for x in template])
    return None if template is None else made[template]


class _Words(NamedTuple):
    """One copy of all words that the driver reads; a call has it for itself."""

    array: np.ndarray
    base: int  # its address
    calls: list[tuple[Callable[..., None], Any, Any]]


class _Launches:
    """The steps of a program. With the driver, all that it reads of a launch, its configuration and the address of its
    parameters, stands behind the parameters in one array of words, so that filling the holes of that array is all that
    a call has to do."""

    def __init__(self, steps: list[Launch | Clear], places: dict[int, Place], count: int):
        """``count``: addresses of a call."""
        self._steps: list[tuple[Launch | _ClearAt, int, int]] = []  # where its words begin, and its configuration's
        self._count = count
        words: list[np.ndarray] = [np.zeros(0, np.uint64)]
        holes: list[tuple[int, int, int]] = []  # which word is which address, and how far behind it
        for step in _merged(steps, places):
            begin = sum(map(len, words))
            if isinstance(step, _ClearAt):
                holes += [(begin, step.place.at, step.place.offset), (begin + 1, count, 0)]
                words.append(np.zeros(2, np.uint64))
                self._steps.append((step, begin, 0))
                continue
            params = step.params.padded(8)
            words.append(np.frombuffer(params.data, np.uint64))
            for at, ref in params.refs:
                assert at % 8 == 0
                place = places[ref.buffer]
                holes.append((begin + at // 8, place.at, place.offset + ref.offset))
            config = begin + len(params.data) // 8
            self._steps.append((step, begin, config))
            function = _function_of(step.kernel)
            if function is not None:  # behind all addresses come the stream and the address of the words
                fixed = np.frombuffer(function.config(step.grid, step.threads, step.pdl), np.uint64)
                holes += [(config + launch.STREAM_WORD, count, 0), (config + len(fixed), count + 1, 8 * begin)]
                words += [fixed, np.zeros(1, np.uint64)]
        self._words = np.concatenate(words)
        self._at, self._which = (np.array([hole[i] for hole in holes], np.intp) for i in (0, 1))
        self._offsets = np.array([offset % 2**64 for *_, offset in holes], np.uint64)
        self._free: list[_Words] = []

    def _copy(self, runtime: Runtime) -> _Words:
        bind = getattr(runtime, "bind", None)
        array = self._words.copy()
        base, calls = array.ctypes.data, list[Any]()
        for step, begin, config in self._steps:
            at = base + 8 * begin
            if isinstance(step, _ClearAt) and bind is not None:
                call = functools.partial(launch.clear_at, size=ctypes.c_size_t(step.size), bind=bind)
                calls.append((call, ctypes.c_uint64.from_address(at), ctypes.c_void_p.from_address(at + 8)))
            elif isinstance(step, _ClearAt):
                calls.append((functools.partial(_clear, runtime, step, begin), array, None))
            elif (function := _function_of(step.kernel)) is not None:
                at = base + 8 * config
                calls.append((function.launch_at, ctypes.c_void_p(at), ctypes.c_void_p(at + launch.CONFIG_BYTES)))
            else:
                calls.append((functools.partial(_launch, step, begin), array, None))
        return _Words(array, base, calls)

    def run(self, runtime: Runtime, addresses: list[int], stream: int) -> None:
        """Launch all on the raw ``stream`` of the current device."""
        try:
            words = self._free.pop()
        except IndexError:
            words = self._copy(runtime)
        array, base, calls = words
        assert len(addresses) == self._count
        array[self._at] = np.array([*addresses, stream, base], np.uint64).take(self._which) + self._offsets
        for call, a, b in calls:
            if b is not None:
                call(a, b)
            else:
                call(a, stream)
        self._free.append(words)


class _ClearAt(NamedTuple):
    place: Place
    size: int


def _merged(steps: list[Launch | Clear], places: dict[int, Place]) -> Iterator[Launch | _ClearAt]:
    """The steps; memory that lies close in one allocation is cleared together."""
    pending: _ClearAt | None = None
    for step in steps:
        if isinstance(step, Launch):
            if pending is not None:
                yield pending
            pending = None
            yield step
            continue
        place = places[step.ref.buffer]
        new = _ClearAt(Place(place.at, place.offset + step.ref.offset), step.size)
        if pending is not None:
            gap = new.place.offset - pending.place.offset - pending.size
            if new.place.at == pending.place.at and 0 <= gap < SPACING:
                pending = pending._replace(size=pending.size + gap + new.size)
                continue
            yield pending
        pending = new
    if pending is not None:
        yield pending


def _function_of(kernel: Any) -> launch.Function | None:
    """What the driver launches; None for other kernels, and where launches are to be printed."""
    return None if jit.DEBUG else getattr(kernel, "function", None)


def _clear(runtime: Runtime, step: _ClearAt, begin: int, array: np.ndarray, stream: int) -> None:
    runtime.clear(int(array[begin]), step.size, stream)


def _launch(step: Launch, begin: int, array: np.ndarray, stream: int) -> None:
    data = array.view(np.uint8)[8 * begin:8 * begin + len(step.params.data)].tobytes()
    step.kernel.launch(step.grid, step.threads, data, stream, step.pdl)


# ---- the programs of a device ---------------------------------------------------------------------------------------

_kept = True


@contextmanager
def fresh() -> Iterator[None]:
    """Programs are built anew for every call, for a while: for what changes which kernels a call takes."""
    global _kept
    before, _kept = _kept, False
    try:
        yield
    finally:
        _kept = before


def keeps_programs() -> bool:
    """Whether calls run programs of earlier ones."""
    return _kept


@functools.cache
def _programs(runtime: Runtime) -> dict[Any, Program]:
    return {}


def run(runtime: Runtime, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(build, *arguments)`` by its program."""
    found = Arguments(function, arguments)
    return program_of(runtime, function, found, arguments).call(found)


def program_of(runtime: Runtime, function: Callable[..., Any], found: Arguments, arguments: tuple[Any, ...]) -> Program:
    """The program of a function for such arguments."""
    programs = _programs(runtime)
    program = programs.get(found.key) if _kept else None
    if program is None:
        build = Builder(runtime, found.library.name, found.device)
        program = Program(build, function(build, *[build.argument(x) for x in arguments]))
        if _kept:
            program = programs.setdefault(found.key, program)
            forget_least_used(programs, MAX_PROGRAMS)
    return program


def forget_least_used(programs: dict[Any, Any], most: int) -> None:
    """An eighth of them, where there are more than ``most``."""
    if len(programs) > most:
        for key in sorted(list(programs), key=lambda key: programs[key].last_used)[:max(1, most // 8)]:
            programs.pop(key, None)
