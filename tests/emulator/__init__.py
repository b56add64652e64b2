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

from cupy_dma import backends
from cupy_dma.arrays import Operand, describe, numpy_dtype
from cupy_dma.backends.cuda.backward import attention_backward as _attention_backward
from cupy_dma.backends.cuda.dynamic_cache import cache_extend as _cache_extend
from cupy_dma.backends.cuda.forward import attention as _attention
from cupy_dma.backends.cuda.scores import key_scores as _key_scores
from cupy_dma.backends.cuda.scores import key_scores_backward as _key_scores_backward
from cupy_dma.backends.cuda.selection import prefix_stop as _prefix_stop
from cupy_dma.masks import IntervalMask
from tests.emulator import build
from tests.emulator.memory import Session
from tests.emulator.runtime import EmulatorError, EmulatorRuntime, Order

__all__ = ["BACKEND", "Backend", "EmulatorError", "EmulatorRuntime", "Order", "using"]


class Backend:
    """What ``cupy_dma.backends`` asks of a backend, on one emulated device."""

    def __init__(self, runtime: EmulatorRuntime):
        self.runtime = runtime

    def unavailable(self) -> str | None:
        return build.unavailable()

    def key_scores(self, *arguments: Any) -> Any:
        return self._run(_key_scores, arguments, ("score",))

    def prefix_stop(self, *arguments: Any) -> Any:
        return self._run(_prefix_stop, arguments, ("stop",))

    def attention(self, call: Any) -> Any:
        return self._run(_attention, (call,), ("out", "lse"))

    def attention_backward(self, call: Any) -> Any:
        return self._run(_attention_backward, (call,), ("dquery", "dkey", "dvalue", "dbias"))

    def key_scores_backward(self, *arguments: Any, **more: Any) -> Any:
        return self._run(_key_scores_backward, arguments, ("dvalue", "ddt_proj", "dA", "ddt_bias"), more)

    def cache_extend(self, state: Any, call: Any) -> Any:
        return _cache_extend(self.prefix_stop, self.attention, state, call)

    def _run(self, function: Any, arguments: tuple, names: tuple[str, ...], more: dict[str, Any] | None = None) -> Any:
        with self.runtime.memory.session() as session:
            more = {name: _announced(argument, session) for name, argument in (more or {}).items()}
            results = function(self.runtime, *(_announced(argument, session) for argument in arguments), **more)
            if self.runtime.build == "watched":
                for result, name in zip(results if len(names) > 1 else (results,), names):
                    if result is None:
                        continue
                    operand = describe(result, name)
                    session.check_written(operand.pointer, name, numpy_dtype(operand.dtype).itemsize)
            return results


def _announced(argument: Any, session: Session) -> Any:
    """The argument of a backend function with all its arrays announced to the session."""
    if isinstance(argument, Operand):
        return session.operand(argument)
    if isinstance(argument, IntervalMask):
        mask = copy.copy(argument)
        mask._start, mask._stop = session.operand(argument._start), session.operand(argument._stop)
        mask.library = mask._start.library
        return mask
    if hasattr(argument, "__dataclass_fields__"):  # an AttentionCall
        return replace(argument, **{name: _announced(getattr(argument, name), session)
                                    for name in argument.__dataclass_fields__})
    return argument


BACKEND = Backend(EmulatorRuntime())


@contextmanager
def using(**options: Any) -> Iterator[EmulatorRuntime]:
    """Let ``backend="emulator"`` be another device, ``EmulatorRuntime(**options)``, for a while."""
    before, BACKEND.runtime = BACKEND.runtime, EmulatorRuntime(**options)
    try:
        yield BACKEND.runtime
    finally:
        BACKEND.runtime = before


backends.register("emulator", BACKEND)
