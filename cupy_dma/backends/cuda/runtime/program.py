"""Programs: the launches of a call, built once from shapes, strides, types and options, and run at any addresses.

The functions of this backend never see memory. They get a ``Builder`` and arguments whose pointers are ``Ref``s, choose
kernels and launch them into the builder. The resulting ``Program`` is cached by everything the functions look at
(``Arguments``) and serves every later call that differs in addresses and values only. A call fills its addresses into
the packed parameters and launches.

Key lists belong to the caller's mask, not to the call: a program requests them (``Request``), and another program makes
them if the mask has none yet. Everything else that a call makes is a result or lies in one workspace.
"""
from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cupy_dma.arrays import ALIGNMENT, Device, Library
from cupy_dma.backends.cuda.runtime.builder import Arguments, Array, Builder, NotBuildable, Request, bytes_of
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.runtime.overrides import NONE
from cupy_dma.backends.cuda.runtime.replay import SPACING, Launches, Place
from cupy_dma.masks.derived import kept
from cupy_dma.masks.interval import IntervalMask

MAX_PROGRAMS = 1024  # per device; then the least recently used are dropped

_clock = itertools.count()


class KeptLists(NamedTuple):
    """The lists of a program's requests."""

    arrays: list[Any]
    addresses: list[int]


class Program:
    """The launches of one kind of call. They run at the addresses of

        arguments, lists of masks, results, data kept for a backward (if any), the workspace (if any)
    """

    def __init__(self, build: Builder, value: Any, keep: Collection[int] = (), places: dict[int, Place] | None = None,
                 first: int = 0, one_workspace: bool = False):
        """``value``: the function's return value. ``keep``: buffers that a backward may read, in one allocation.
        ``places``: of buffers passed by the caller, by default the arguments; buffers before ``first`` without a place
        no longer exist. ``one_workspace``: even if the runtime wants separate arrays, to watch them."""
        self.value, self.last_used = value, next(_clock)
        self._runtime, self.device, self._requests = build.runtime, build.device, build.requests
        places = {buffer: Place(i, 0) for i, buffer in enumerate(build.given)} if places is None else dict(places)
        results = {x.ref.buffer: (x.shape, x.dtype) for x in _arrays_in(value) if x.ref.buffer not in places}
        #: shapes and types of a call's allocations
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
        self._launches = Launches(build.steps, places, self._next(places))
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
            end += max(1, -(-bytes_of(shape, dtype) // SPACING)) * SPACING
        if end:
            self.allocations.append(((end // 4,), "int32"))
        return end > 0

    @property
    def workspace(self) -> int:
        """Bytes besides the results."""
        return sum(bytes_of(*allocation) for allocation in self.allocations[self.results:])

    def order(self, arrays: Iterable[Array | None]) -> list[int | None]:
        """The indices of these results among those that ``run`` returns."""
        return [None if x is None else self._indices[x.ref.buffer] for x in arrays]

    def call(self, arguments: Arguments) -> Any:
        """The function's return value for these arguments."""
        made = self.run(arguments.library, list(arguments.addresses), arguments.masks)
        return _filled(self._template, made)

    def run(self, library: Library, addresses: list[int], masks: list[IntervalMask]) -> list[Any]:
        """Run the call at these addresses, on the library's current stream. Returns its results and what it keeps."""
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
        """Run the call at all its addresses, on the raw ``stream``."""
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
    """A function's return value, with numbers of results in place of arrays."""
    if isinstance(x, Array):
        if x.ref.buffer not in results or x.ref.offset:
            raise NotBuildable("a result that no kernel writes")
        return results[x.ref.buffer]
    return tuple([_template(y, results) for y in x]) if isinstance(x, tuple) else None


def _filled(template: Any, made: list[Any]) -> Any:
    if isinstance(template, tuple):
        return tuple([_filled(x, made) for x in template])
    return None if template is None else made[template]


_kept = True
_overrides = NONE


@contextmanager
def overridden(**overrides: Any) -> Iterator[None]:
    """Within this context calls use programs with these ``Overrides``."""
    global _overrides
    before, _overrides = _overrides, dataclasses.replace(_overrides, **overrides)
    try:
        yield
    finally:
        _overrides = before


@contextmanager
def fresh(**overrides: Any) -> Iterator[None]:
    """Like ``overridden``, but every call in this context builds its programs again."""
    global _kept
    before, _kept = _kept, False
    try:
        with overridden(**overrides):
            yield
    finally:
        _kept = before


def keeps_programs() -> bool:
    """Whether calls reuse programs, without any overrides."""
    return _kept and _overrides == NONE


@functools.cache
def _programs(runtime: Runtime) -> dict[Any, Program]:
    return {}


def run(runtime: Runtime, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``function(build, *arguments)`` as a program."""
    found = Arguments(function, arguments)
    return program_of(runtime, function, found, arguments).call(found)


def builder(runtime: Runtime, library: str, device: Device, grad: bool = False) -> Builder:
    """A builder for calls with arrays of this library; ``grad``: a backward follows."""
    return Builder(runtime, library, device, program_of, grad, _overrides)


def program_of(runtime: Runtime, function: Callable[..., Any], found: Arguments, arguments: tuple[Any, ...]) -> Program:
    """The program of a function for such arguments."""
    programs, key = _programs(runtime), found.key if _overrides is NONE else (found.key, _overrides)
    program = programs.get(key) if _kept else None
    if program is None:
        build = builder(runtime, found.library.name, found.device)
        program = Program(build, function(build, *[build.argument(x) for x in arguments]))
        if _kept:
            program = programs.setdefault(key, program)
            forget_least_used(programs, MAX_PROGRAMS)
    return program


def forget_least_used(programs: dict[Any, Any], most: int) -> None:
    """Drop an eighth of the programs if there are more than ``most``."""
    if len(programs) > most:
        for key in sorted(list(programs), key=lambda key: programs[key].last_used)[:max(1, most // 8)]:
            programs.pop(key, None)
