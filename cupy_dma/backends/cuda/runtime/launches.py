"""The launches of a plan: parameters with holes for addresses, and with the driver all else that a launch reads, made
once.

The driver reads a launch's configuration and the address of its parameters from memory. Both stand behind the
parameters in one array of words, so that filling the holes of that array is all that a call has to do.
"""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupy_dma.backends.cuda.runtime import jit, launch
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.runtime.traces import Clear, Launch, Untraceable

_Call = tuple[Callable[..., None], Any, Any]
Place = tuple[int, int]  # where an address is found: at which place in the list of them, and how far behind that one


class _Clear(NamedTuple):
    place: int
    offset: int
    size: int
    words: int = 0  # where its address and the stream stand, in bytes


class _Launch(NamedTuple):
    kernel: Any
    grid: int
    threads: int
    pdl: bool
    params: int  # where they begin, in bytes
    end: int
    config: int  # likewise, of what the driver reads


class _Words(NamedTuple):
    """One copy of all words; a call has it for itself."""

    array: np.ndarray
    base: int  # its address
    calls: list[_Call]


class Launches:
    """What is launched at the addresses of a call."""

    def __init__(self, first: list[Launch | Clear], second: list[Launch | Clear], located: Callable[[int, int], Place],
                 count: int, spacing: int):
        """Of two traces. ``located``: the place of an address that is this in the first and that in the second.
        ``count``: addresses; ``spacing``: what lies that close in one allocation is cleared together."""
        self._steps: list[_Clear | _Launch] = []
        words, holes, size = [np.zeros(0, np.uint64)], [], 0
        if len(first) != len(second):
            raise Untraceable("launches that depend on addresses")
        for a, b in zip(first, second):
            if isinstance(a, Clear) or isinstance(b, Clear):
                self._add_clear(_Clear(*located(a[0], b[0]), a[1]), spacing)  # type: ignore[arg-type]
                continue
            x, y = (np.frombuffer(step.params + bytes(-len(step.params) % 8), np.uint64) for step in (a, b))
            if a[:4] != b[:4] or x.shape != y.shape:
                raise Untraceable("launches that depend on addresses")
            holes += [(size + int(i), *located(int(x[i]), int(y[i]))) for i in np.flatnonzero(x != y)]
            config = size + len(x)
            self._steps.append(_Launch(a.kernel, a.grid, a.threads, a.pdl, 8 * size, 8 * size + len(a.params),
                                       8 * config))
            words.append(x)
            function = _function_of(a.kernel)
            if function is not None:  # behind all addresses come the stream and the address of the words
                fixed = np.frombuffer(function.config(a.grid, a.threads, a.pdl), np.uint64)
                holes += [(config + launch.STREAM_WORD, count, 0), (config + len(fixed), count + 1, 8 * size)]
                words += [fixed, np.zeros(1, np.uint64)]
            size = sum(map(len, words))
        for i, step in enumerate(self._steps):
            if isinstance(step, _Clear):
                self._steps[i] = step._replace(words=8 * size)
                holes += [(size, step.place, step.offset), (size + 1, count, 0)]
                words.append(np.zeros(2, np.uint64))
                size += 2
        self._words = np.concatenate(words)
        at, which, offsets = zip(*holes) if holes else ((), (), ())
        self._at, self._which = np.array(at, np.intp), np.array(which, np.intp)
        self._offsets = np.array([offset % 2**64 for offset in offsets], np.uint64)
        self._free: list[_Words] = []
        self._count = count

    def _add_clear(self, new: _Clear, spacing: int) -> None:
        last = self._steps[-1] if self._steps else None
        if isinstance(last, _Clear) and last.place == new.place and (
                0 <= new.offset - last.offset - last.size < spacing):
            self._steps[-1] = last._replace(size=new.offset + new.size - last.offset)
        else:
            self._steps.append(new)

    def _copy(self, runtime: Runtime) -> _Words:
        bind = getattr(runtime, "bind", None)
        array = self._words.copy()
        base, calls = array.ctypes.data, list[_Call]()
        for step in self._steps:
            if isinstance(step, _Clear) and bind is not None:
                at = base + step.words
                call = functools.partial(launch.clear_at, size=ctypes.c_size_t(step.size), bind=bind)
                calls.append((call, ctypes.c_uint64.from_address(at), ctypes.c_void_p.from_address(at + 8)))
            elif isinstance(step, _Clear):
                calls.append((_clear, step, None))
            elif (function := _function_of(step.kernel)) is not None:
                config = base + step.config
                calls.append((function.launch_at, ctypes.c_void_p(config),
                              ctypes.c_void_p(config + launch.CONFIG_BYTES)))
            else:
                calls.append((_launch, step, None))
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
                call(a, runtime, array, addresses, stream)
        self._free.append(words)


def _function_of(kernel: Any) -> launch.Function | None:
    """What the driver launches; None for other kernels, and where launches are to be printed."""
    return None if jit.DEBUG else getattr(kernel, "function", None)


def _clear(step: _Clear, runtime: Runtime, array: np.ndarray, addresses: list[int], stream: int) -> None:
    runtime.clear(addresses[step.place] + step.offset, step.size, stream)


def _launch(step: _Launch, runtime: Runtime, array: np.ndarray, addresses: list[int], stream: int) -> None:
    params = array.view(np.uint8)[step.params:step.end].tobytes()
    step.kernel.launch(step.grid, step.threads, params, stream, step.pdl)
