"""Plans: what a backend function launches for arguments of one kind, recorded once and repeated at other addresses.

The functions of this backend look at shapes, strides, types, alignment and options, never at values. So the second call
with arguments of one kind runs the function twice on stand-ins of its arrays, whose addresses are made up, and keeps
what it launches. A word of a kernel's parameters that differs between the two runs is an address, and both together
tell of which array; if they do not, the function is not planned. Further calls allocate the results and one workspace,
fill in the addresses and launch.

``CUPY_DMA_PLANS=0`` does without.

Key lists belong to their mask, not to the call: a plan asks for them (``kept_on_mask``), and they are made, by a plan
of their own, if the mask has none yet.
"""
from __future__ import annotations

import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cupy_dma.arrays import Device, Library
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.runtime.launches import Launches
from cupy_dma.backends.cuda.runtime.traces import (
    FIRST,
    SPAN,
    Arguments,
    Recorder,
    Trace,
    TracedArray,
    TracedMask,
    Untraceable,
    address_of,
    on_stream,
    plannable,
)
from cupy_dma.masks.derived import forget_oldest, kept
from cupy_dma.masks.interval import IntervalMask

__all__ = ["Plan", "enabled", "kept_on_mask", "plannable", "planned", "recorder_of", "switched"]

SPACING = 256  # of the arrays in a workspace
MAX_PLANS = 1024  # of a device; then the oldest are forgotten

_enabled = os.environ.get("CUPY_DMA_PLANS", "1") not in ("", "0")


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Whether calls are planned, for a while: off for what changes which kernels a call takes."""
    global _enabled
    before, _enabled = _enabled, on
    try:
        yield
    finally:
        _enabled = before


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


class Addresses(list[int]):
    """Addresses of lists, which it keeps alive."""

    def __init__(self, lists: list[Any], library: Library):
        super().__init__([library.pointer(x.workspace) for x in lists])
        self.lists = lists


class Plan:
    """The launches of one kind of call."""

    def __init__(self, first: Trace, second: Trace, results: tuple[Any, Any],
                 places: dict[int, tuple[int, int]] | None = None, kept: Collection[int] = (), begin: int = 0):
        """Of two traces, ascending and not, and what the function returned in them.

        ``places``: where the addresses of arrays from outside are found, by base: at which place in the list of a
        call's addresses, and how far behind that one; by default the arguments, in order. ``kept``: bases of arrays
        that the caller keeps, in one allocation. Bases before ``begin`` that have no place are gone."""
        self._places = {base: (i, 0) for i, base in enumerate(first.given)} if places is None else dict(places)
        self._requests, self._unfilled = first.requests, first.unfilled
        self._outputs: list[tuple[tuple[int, ...], str]] = []  # shapes and types of what is allocated
        self._indices: dict[int, int] = {}  # of the outputs, by base
        self._find_outputs(results[0])
        count = len({place for place, _ in self._places.values()})
        for base in (*(request.base for request in first.requests), *self._indices):
            self._places[base] = count, 0
            count += 1
        self._count = len(self._outputs)  # results; behind them are what is kept and the workspace
        rest = [base for base in range(begin, len(first.sizes)) if base not in self._places]
        self.keeps = self._allocate(first, count, [base for base in rest if base in kept])
        self._allocate(first, count + self.keeps, [base for base in rest if base not in kept])
        self._result = self._template(*results)
        self._launches = Launches(first.steps, second.steps, self._located, count + len(self._outputs) - self._count,
                                  SPACING)
        self._allocators: tuple[Any, list[Callable[[], Any]]] = None, []

    def _allocate(self, trace: Trace, place: int, bases: list[int]) -> bool:
        """Lays arrays out in one allocation. Whether there is any."""
        end = 0
        for base in bases:
            self._places[base] = place, end
            end += -(-trace.sizes[base] // SPACING) * SPACING
        if end:
            self._outputs.append(((end // 4,), "int32"))
        return end > 0

    def place(self, base: int) -> tuple[int, int]:
        """Where the address of an array is found: at which place in the list of addresses, and how far behind it."""
        return self._places[base]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and types of what a call allocates: the results in their order, what is kept, the workspace."""
        return self._outputs

    def order(self, results: tuple[Any, ...]) -> list[int | None]:
        """Which of what ``launch`` gives is each of these results of the first trace."""
        return [None if x is None else self._indices[x.base] for x in results]

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
        base = (x + SPAN // 2) // SPAN - FIRST
        offset = x - address_of(base, True)
        if base not in self._places or base in self._unfilled or y != address_of(base, False) + offset:
            raise Untraceable("a number that depends on addresses")
        place, begin = self._places[base]
        return _Address(place, begin + offset)

    def run(self, runtime: Runtime, arguments: Arguments) -> Any:
        """The call with these arguments."""
        addresses = list(arguments.addresses)
        mask = arguments.masks[0] if arguments.masks else None
        outputs = self.launch(runtime, arguments.library, arguments.device, addresses, mask)
        return _filled(self._result, outputs, addresses)

    def launch(self, runtime: Runtime, library: Library, device: Device, addresses: list[int],
               mask: IntervalMask | None) -> list[Any]:
        """The call at these addresses, to which those of all other arrays are added: the results in their order, and
        if there is any what is kept, which has the place behind them."""
        stream = library.stream(device)
        if self._requests:
            assert mask is not None
            lists = self._lists(runtime, library, mask, stream)  # held until the launch: a capture keeps them nowhere
            addresses += lists
        known, allocators = self._allocators
        if known is not library:
            allocators = [library.allocator(shape, dtype, device) for shape, dtype in self._outputs]
            self._allocators = library, allocators
        outputs = [allocate() for allocate in allocators]
        addresses += [library.pointer(x) for x in outputs]
        with runtime.on(device):
            self._launches.run(runtime, addresses, stream)
        return outputs

    def launch_at(self, runtime: Runtime, device: Device, addresses: list[int], stream: int) -> None:
        """The call at the addresses of its arguments and of all that ``outputs`` names, on the raw ``stream``; for a
        plan that asks for no lists."""
        with runtime.on(device):
            self._launches.run(runtime, addresses, stream)

    def _lists(self, runtime: Runtime, library: Library, mask: IntervalMask, stream: int) -> list[int]:
        """Addresses of the lists that the plan asks of its mask; they are kept on it."""
        def make() -> Addresses:
            lists = [function(runtime, mask, *on_stream(more, stream)) for function, more, _ in self._requests]
            return Addresses(lists, library)

        return kept(mask, (self,), stream, make)


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


def recorder_of(runtime: Runtime) -> Recorder:
    """One for each device, for kernels are kept by it."""
    return _of(runtime)[1]


def enabled() -> bool:
    """Whether calls are planned."""
    return _enabled


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """A backend function ``(runtime, ...)`` that plans its calls."""

    @functools.wraps(function)
    def run(runtime: Runtime, *arguments: Any, **named: Any) -> Any:
        if not _enabled or type(runtime) is Recorder:
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
            plans[kind] = _SEEN
            if len(plans) > MAX_PLANS:
                forget_oldest(plans, MAX_PLANS)
        return function(runtime, *arguments, **named)

    return run


def _made(function: Callable[..., Any], runtime: Runtime, recorder: Recorder, found: Arguments,
          arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The plan of calls with such arguments."""
    first, second = (Trace(runtime, found.library, found.device, ascending) for ascending in (True, False))
    try:
        results = [recorder.record(trace, function, arguments, named) for trace in (first, second)]
        return Plan(first, second, (results[0], results[1]))
    except Untraceable as reason:
        if jit.DEBUG:
            print(f"cupy_dma: {function.__name__} is not planned: {reason}", file=sys.stderr)
        return _UNPLANNED
    except Exception as error:
        warn_not_recorded(error)
        return _SEEN


def warn_not_recorded(error: Exception) -> None:
    """A plan could not be recorded, which the call itself does not need. The next call of its kind tries again."""
    warnings.warn(f"a call could not be recorded and takes the slower path: {error!r}", RuntimeWarning, stacklevel=2)


def kept_on_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(runtime, mask, *arguments)``, whose result is kept on the mask, or None where the mask needs none: a
    plan asks for it in each call."""

    @functools.wraps(function)
    def run(runtime: Runtime, mask: IntervalMask, *arguments: Any) -> Any:
        if type(mask) is TracedMask:
            return mask.trace.lists(run, mask, arguments)
        return function(runtime, mask, *arguments)

    return run
