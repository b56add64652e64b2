"""The kernels on a CPU: ``backend="emulator"``, registered when this package is imported. For tests only.

The host code is that of the CUDA backend; the kernels are compiled with g++ (build.py) and run by a driver that
emulates blocks, warps and shared memory (driver/), on NumPy arrays and CPU tensors. See docs/emulator.md.
"""
import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_dma import backends
from cupy_dma.arrays import Operand, describe, library_named, numpy_dtype
from cupy_dma.backends.cuda import backend as cuda_backend
from cupy_dma.backends.cuda.chain import Chain
from cupy_dma.backends.cuda.decode.step import step
from cupy_dma.backends.cuda.runtime.builder import NotBuildable
from cupy_dma.backends.cuda.runtime.user_kernel import Launch
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.masks.interval import IntervalMask
from tests.emulator import build
from tests.emulator.memory import Session
from tests.emulator.runtime import EmulatorError, EmulatorRuntime, Order
from tests.emulator.tma_descriptors import encode

__all__ = ["BACKEND", "Backend", "EmulatorError", "EmulatorRuntime", "Order", "hopper_gpu", "using"]


RESULTS = {"key_scores": ("score",), "prefix_stop": ("stop",), "selected_run": ("start", "stop"),
           "document_runs": ("first", "end"),
           "attention": ("out", "lse"), "_attend_last": ("out", "lse"), "last_keys": ("keys",),
           "attention_backward": ("dquery", "dkey", "dvalue", "dbias"),
           "key_scores_backward": ("dvalue", "ddt_proj", "dA", "ddt_bias"), "step": ("out", "lse"),
           "extend": ("out", "lse")}


class Backend(cuda_backend.Backend):
    """The CUDA backend on an emulated device, whose memory is watched."""

    runtime: EmulatorRuntime

    def unavailable(self) -> str | None:
        return build.unavailable()

    def _step(self, state: Any, call: Any) -> Any:
        return self._watched(step, lambda *announced: step(self.runtime, *announced), (state, call))

    def _run(self, function: Any, *arguments: Any) -> Any:
        return self._watched(function, functools.partial(super()._run, function), arguments)

    def _watched(self, function: Any, run: Any, arguments: tuple[Any, ...]) -> Any:
        names = RESULTS[function.__name__]
        with self.runtime.memory.session() as session:
            results = run(*(_announced(argument, session) for argument in arguments))
            if self.runtime.build == "watched":
                for result, name in zip(results if len(names) > 1 else (results,), names):
                    if result is None:
                        continue
                    operand = describe(result, name)
                    session.check_written(operand.pointer, name, numpy_dtype(operand.dtype).itemsize,
                                          self.runtime.most_writes)
            return results

    def make_chain(self, call: Any, grad: bool, own_mask: bool = False) -> Any:
        try:
            return WatchedChain(self.runtime, call, grad, own_mask)
        except NotBuildable:
            return None

    def launch(self, program: Any, addresses: Any, stream: int, arrays: Any) -> None:
        """Run a program. Operands are read-only; results and workspace must be written before they are read."""
        count = len(arrays()) - len(program.allocations)
        with self.runtime.memory.session() as session:
            regions = []
            for i, array in enumerate(arrays()):
                if array.size and i < count:
                    session.readable(np.ascontiguousarray(array), f"operand {i}")
                elif array.size:
                    regions.append((i - count, array.itemsize, session.writable(array, f"result {i}")))
            super().launch(program, addresses, stream, arrays)
            for i, size, region in regions:
                never, _ = build.driver().written(region, self.runtime.most_writes)
                if self.runtime.build == "watched" and i < program.results and never >= 0:
                    raise AssertionError(f"element {never // size} of result {i} was not written")

    def run_kernel(self, launch: Launch) -> None:
        """Run a user's kernel. Its outputs hold values already."""
        with self.runtime.memory.session() as session:
            for operand in launch.operands:
                session.operand(operand, writable=operand.name in launch.writable)
            self.runtime.load(launch.config, launch.entry, 0, launch.shared_bytes).launch(
                launch.grid, launch.threads, launch.params, alone=True)


class WatchedChain(Chain):
    """A chain that announces its arrays to the session; arrays that it keeps stay announced."""

    def forward(self, addresses: Any, mask: Any, arrays: Any) -> Any:
        with self._announcing(mask, arrays) as mask:
            return super().forward(addresses, mask, arrays)

    def backward(self, addresses: Any, mask: Any, kind: Any, upstream: Any, arrays: Any) -> Any:
        with self._announcing(mask, arrays) as mask:
            return super().backward(addresses, mask, kind, upstream, arrays)

    @contextmanager
    def _announcing(self, mask: Any, arrays: Any) -> Iterator[Any]:
        inner = library_named("torch")
        with self.runtime.memory.session() as session:
            for i, array in enumerate(arrays):
                if array is not None:
                    self.library = session.operand(inner.describe(array, f"argument {i}")).library
            yield None if mask is None else _announced(mask, session)


def _announced(argument: Any, session: Session) -> Any:
    """Announce all arrays in the argument of a backend function to the session, and return it."""
    if isinstance(argument, Operand):
        return session.operand(argument)
    if isinstance(argument, IntervalMask):
        mask = copy.copy(argument)
        mask._start, mask._stop = session.operand(argument._start), session.operand(argument._stop)
        mask.library = mask._start.library
        return mask
    if isinstance(argument, CacheState):
        for kept in list(argument.workspace.values()):
            if isinstance(kept, Operand):
                session.operand(kept, writable=True)
        names = (*argument.arrays, "tickets")
        changed = {name: session.operand(getattr(argument, name), writable=True) for name in names}
        segments = argument.segments and replace(argument.segments, count=session.operand(argument.segments.count),
                                                 start=session.operand(argument.segments.start))
        return argument.having({**changed, "segments": segments})
    if isinstance(argument, ExtendCall):
        results = {name: x and session.operand(x, writable=True) for name, x in
                   (("out", argument.out), ("lse", argument.lse))}
        return replace(argument, **{name: results[name] if name in results else
                                    _announced(getattr(argument, name), session)
                                    for name in argument.__dataclass_fields__})
    if hasattr(argument, "__dataclass_fields__"):  # an AttentionCall
        return replace(argument, **{name: _announced(getattr(argument, name), session)
                                    for name in argument.__dataclass_fields__})
    return argument


BACKEND = Backend(EmulatorRuntime())


@contextmanager
def using(kind: type[EmulatorRuntime] = EmulatorRuntime, **options: Any) -> Iterator[EmulatorRuntime]:
    """Inside the context, ``backend="emulator"`` is another device, ``kind(**options)``."""
    before, BACKEND.runtime = BACKEND.runtime, kind(**options)
    try:
        yield BACKEND.runtime
    finally:
        BACKEND.runtime = before


@contextmanager
def hopper_gpu(kind: type[EmulatorRuntime] = EmulatorRuntime, **options: Any) -> Iterator[EmulatorRuntime]:
    """Like ``using``, with a Hopper GPU and a driver that makes TMA descriptors."""
    with using(kind, is_hopper=True, **options) as runtime:
        runtime.encoder = encode
        yield runtime


backends.register("emulator", BACKEND)
