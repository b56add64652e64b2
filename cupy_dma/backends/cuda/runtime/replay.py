"""The launches of a program: packed parameters with holes for addresses and, with the driver, everything else that a
launch reads, made once."""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cupy_dma.backends.cuda.runtime import jit, launch
from cupy_dma.backends.cuda.runtime.builder import Clear, Launch
from cupy_dma.backends.cuda.runtime.device import Runtime

SPACING = 256  # bytes: of the arrays in a workspace


class Place(NamedTuple):
    """Where a buffer lies: ``offset`` bytes into the memory at address number ``at`` of a call."""

    at: int
    offset: int


class _Words(NamedTuple):
    """One copy of all words that the driver reads, owned by a single call."""

    array: np.ndarray
    base: int  # its address
    calls: list[tuple[Callable[..., None], Any, Any]]


class Launches:
    """The steps of a program. With the driver, everything it reads of a launch (its configuration and the address of
    its parameters) lies behind the parameters in one array of words, so a call only fills the holes of that array."""

    def __init__(self, steps: list[Launch | Clear], places: dict[int, Place], count: int):
        """``count``: addresses of a call."""
        self._steps: list[tuple[Launch | _ClearAt, int, int]] = []  # where its words begin, and its configuration's
        self._count = count
        words: list[np.ndarray] = [np.zeros(0, np.uint64)]
        holes: list[tuple[int, int, int]] = []  # word, number of the address, offset from it
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
            if function is not None:  # the stream and the address of the words follow all addresses
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
    """The steps; neighbouring memory of one allocation is cleared together."""
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
    """The kernel's function for the driver; None for other kernels, and if launches are to be printed."""
    return None if jit.DEBUG else getattr(kernel, "function", None)


def _clear(runtime: Runtime, step: _ClearAt, begin: int, array: np.ndarray, stream: int) -> None:
    runtime.clear(int(array[begin]), step.size, stream)


def _launch(step: Launch, begin: int, array: np.ndarray, stream: int) -> None:
    data = array.view(np.uint8)[8 * begin:8 * begin + len(step.params.data)].tobytes()
    step.kernel.launch(step.grid, step.threads, data, stream, step.pdl)
