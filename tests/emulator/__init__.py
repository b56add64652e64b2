"""The kernels on a CPU: ``backend="emulator"``, registered when this package is imported. For tests only.

The host code is that of the CUDA backend; the kernels are compiled with g++ (build.py) and run by a driver that
emulates blocks, warps and shared memory (driver/), on NumPy arrays and CPU tensors. See docs/emulator.md.
"""
from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from cupy_dma import backends
from cupy_dma.arrays import Operand, describe, library_named, numpy_dtype
from cupy_dma.backends.cuda.attention import tma
from cupy_dma.backends.cuda.attention.backward_chunks import attention_backward as _attention_backward
from cupy_dma.backends.cuda.attention.flash_decode import takes_value_dim as _takes_value_dim
from cupy_dma.backends.cuda.attention.forward import attention as _attention
from cupy_dma.backends.cuda.attention.last_queries import attend_last as _attend_last
from cupy_dma.backends.cuda.buffers import BufferPlan
from cupy_dma.backends.cuda.decode.cache import cache_extend as _cache_extend
from cupy_dma.backends.cuda.decode.step import step as _decode_step
from cupy_dma.backends.cuda.runtime import plans
from cupy_dma.backends.cuda.runtime.traces import Untraceable
from cupy_dma.backends.cuda.runtime.user_kernel import Launch
from cupy_dma.backends.cuda.select.last_queries import last_keys as _last_keys
from cupy_dma.backends.cuda.select.prefix import prefix_run as _prefix_run
from cupy_dma.backends.cuda.select.prefix import prefix_stop as _prefix_stop
from cupy_dma.backends.cuda.select.scores import key_scores as _key_scores
from cupy_dma.backends.cuda.select.scores import key_scores_backward as _key_scores_backward
from cupy_dma.backends.cuda.steps import Step
from cupy_dma.cache.snapshot import ARRAYS
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.masks.interval import IntervalMask
from tests.emulator import build
from tests.emulator.memory import Session
from tests.emulator.runtime import EmulatorError, EmulatorRuntime, Order
from tests.emulator.tma_descriptors import encode

__all__ = ["BACKEND", "Backend", "EmulatorError", "EmulatorRuntime", "Order", "hopper_gpu", "using"]


class Backend:
    """What ``cupy_dma.backends`` asks of a backend, on one emulated device."""

    plans = plans

    def __init__(self, runtime: EmulatorRuntime):
        self.runtime = runtime

    def unavailable(self) -> str | None:
        return build.unavailable()

    def key_scores(self, *arguments: Any) -> Any:
        return self._run(_key_scores, arguments, ("score",))

    def prefix_stop(self, *arguments: Any) -> Any:
        return self._run(_prefix_stop, arguments, ("stop",))

    def prefix_run(self, *arguments: Any) -> Any:
        return self._run(_prefix_run, arguments, ("start", "stop"))

    def attention(self, call: Any) -> Any:
        return self._run(_attention, (call,), ("out", "lse"))

    def takes_value_dim(self, call: Any) -> bool:
        return _takes_value_dim(self.runtime, call)

    def last_keys(self, *arguments: Any) -> Any:
        return self._run(_last_keys, arguments, ("keys",))

    def attend_last(self, call: Any, scores: Any) -> Any:
        return self._run(_attend_last, (call, scores), ("out", "lse"))

    def attention_backward(self, call: Any) -> Any:
        return self._run(_attention_backward, (call,), ("dquery", "dkey", "dvalue", "dbias"))

    def key_scores_backward(self, *arguments: Any, **more: Any) -> Any:
        return self._run(_key_scores_backward, arguments, ("dvalue", "ddt_proj", "dA", "ddt_bias"), more)

    def cache_extend(self, state: Any, call: Any) -> Any:
        return _cache_extend(self._step, self.prefix_stop, self.attention, state, call)

    def _step(self, state: Any, call: Any) -> Any:
        return self._run(_decode_step, (state, call), ("out", "lse"))

    def make_step(self, call: Any, grad: bool) -> Any:
        try:
            return WatchedStep(self.runtime, call, grad)
        except Untraceable:
            return None

    def plan_buffers(self, function: Any, operands: Any) -> Any:
        try:
            return WatchedBufferPlan(self.runtime, function, operands)
        except Untraceable:
            return None

    def run_kernel(self, launch: Launch) -> None:
        """A kernel of the user's own. What it may write holds values already."""
        with self.runtime.memory.session() as session:
            for operand in launch.operands:
                session.operand(operand, writable=operand.name in launch.writable)
            self.runtime.load(launch.config, launch.entry, 0, launch.shared_bytes).launch(
                launch.grid, launch.threads, launch.params, alone=True)

    def _run(self, function: Any, arguments: tuple, names: tuple[str, ...], more: dict[str, Any] | None = None) -> Any:
        with self.runtime.memory.session() as session:
            more = {name: _announced(argument, session) for name, argument in (more or {}).items()}
            results = function(self.runtime, *(_announced(argument, session) for argument in arguments), **more)
            if self.runtime.build == "watched" and results is not None:
                for result, name in zip(results if len(names) > 1 else (results,), names):
                    if result is None:
                        continue
                    operand = describe(result, name)
                    session.check_written(operand.pointer, name, numpy_dtype(operand.dtype).itemsize,
                                          self.runtime.most_writes)
            return results


class WatchedStep(Step):
    """A step whose arrays are announced; those that it keeps stay announced."""

    def __init__(self, runtime: EmulatorRuntime, call: Any, grad: bool):
        with runtime.memory.session() as session:
            super().__init__(runtime, _announced(call, session), grad)

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


class WatchedBufferPlan(BufferPlan):
    """A plan whose operands may be read, and whose results and workspace are written before they are read."""

    def __init__(self, runtime: EmulatorRuntime, function: Any, operands: Any):
        super().__init__(runtime, function, operands)
        self._operands = sum(operand is not None for operand in operands)

    def launch(self, addresses: Any, stream: int, arrays: Any) -> None:
        with self.runtime.memory.session() as session:
            regions = []
            for i, array in enumerate(arrays()):
                if array.size and i < self._operands:
                    session.readable(np.ascontiguousarray(array), f"operand {i}")
                elif array.size:
                    regions.append((i - self._operands, array.itemsize, session.writable(array, f"result {i}")))
            super().launch(addresses, stream, arrays)
            for i, size, region in regions:
                never, _ = build.driver().written(region, self.runtime.most_writes)
                if self.runtime.build == "watched" and i < self.results and never >= 0:
                    raise AssertionError(f"element {never // size} of result {i} was not written")


def _announced(argument: Any, session: Session) -> Any:
    """The argument of a backend function with all its arrays announced to the session."""
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
        return argument.having({name: session.operand(getattr(argument, name), writable=True)
                                for name in (*ARRAYS, "tickets")})
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
    """Let ``backend="emulator"`` be another device, ``kind(**options)``, for a while."""
    before, BACKEND.runtime = BACKEND.runtime, kind(**options)
    try:
        yield BACKEND.runtime
    finally:
        BACKEND.runtime = before


@contextmanager
def hopper_gpu(kind: type[EmulatorRuntime] = EmulatorRuntime, **options: Any) -> Iterator[EmulatorRuntime]:
    """The same with a Hopper GPU, and a driver that describes tensors to its TMA."""
    forget_maps()
    try:
        with (using(kind, is_hopper=True, **options) as runtime,
              mock.patch.object(tma, "_driver_function", lambda: encode)):
            yield runtime
    finally:
        forget_maps()


def forget_maps() -> None:
    """Maps are kept by the address of what they describe, with the driver that made them."""
    tma._map.cache_clear()
    tma._runs.cache_clear()


backends.register("emulator", BACKEND)
