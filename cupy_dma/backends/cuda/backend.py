"""The functions that ``cupy_dma.backends`` asks of a backend, for one device: each runs checked calls as programs."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention import flash_decode, forward, last_queries
from cupy_dma.backends.cuda.attention.backward_chunks import attention_backward as _attention_backward
from cupy_dma.backends.cuda.attention.problem import with_known_bias
from cupy_dma.backends.cuda.chain import Building, Chain
from cupy_dma.backends.cuda.decode.cache import cache_extend
from cupy_dma.backends.cuda.decode.step import step
from cupy_dma.backends.cuda.runtime.builder import NotBuildable, argument_type
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.runtime.program import Program, builder, keeps_programs, run
from cupy_dma.backends.cuda.runtime.user_kernel import Launch, run_kernel
from cupy_dma.backends.cuda.select.documents import selected_run
from cupy_dma.backends.cuda.select.last_queries import last_keys
from cupy_dma.backends.cuda.select.prefix import prefix_stop
from cupy_dma.backends.cuda.select.scores import key_scores, key_scores_backward, with_known_types
from cupy_dma.calls.sequences import Sequences
from cupy_dma.calls.types import AttentionBackwardCall, AttentionCall
from cupy_dma.masks.windows import Window

argument_type(AttentionCall)
argument_type(AttentionBackwardCall)
argument_type(Sequences, without=("given",))


class Backend:
    """See ``cupy_dma.backends`` for what its functions take and return."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return run(self.runtime, function, *arguments)

    def key_scores(self, value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None, form: str) -> Any:
        return self._run(key_scores, value, *with_known_types(value, dt_proj, A, dt_bias), form)

    def prefix_stop(self, scores: Operand, window: Window, padding: Operand | None, document: Operand | None) -> Any:
        return self._run(prefix_stop, scores, window, padding, document)

    def selected_run(self, scores: Operand, window: Window | None, keys: str, padding: Operand | None,
                     documents: Operand | None, apart: bool) -> Any:
        return self._run(selected_run, scores, window, keys, padding, documents, apart)

    def attention(self, call: AttentionCall) -> Any:
        return self._run(forward.attention, with_known_bias(call))

    def attention_backward(self, call: AttentionBackwardCall) -> Any:
        known = with_known_bias(call.forward)
        *found, dbias = _attention_backward(self._run, replace(call, forward=known))
        return *found, _in_type_of(call.forward.bias, dbias)

    def key_scores_backward(self, dscores: Operand, value: Operand, dt_proj: Operand, A: Operand,
                            dt_bias: Operand | None, form: str, needs: frozenset[str],
                            dvalue: Operand | None = None) -> Any:
        found = self._run(key_scores_backward, dscores, value, *with_known_types(value, dt_proj, A, dt_bias), form,
                          needs, dvalue)
        return tuple([_in_type_of(x, gradient) for x, gradient in zip((value, dt_proj, A, dt_bias), found)])

    def attend_last(self, call: Any, scores: Operand) -> Any:
        return last_queries.attend_last(self._run, self.runtime, call, scores)

    def last_keys(self, scores: Operand, window: int) -> Any:
        return self._run(last_keys, scores, window)

    def takes_value_dim(self, call: Any) -> bool:
        return flash_decode.takes_value_dim(self.runtime, call)

    def cache_extend(self, state: Any, call: Any) -> Any:
        return cache_extend(self._step, self._run, self.prefix_stop, self.attention, state, call)

    def _step(self, state: Any, call: Any) -> Any:
        return step(self.runtime, state, call)

    def run_kernel(self, launch: Launch) -> None:
        run_kernel(self.runtime, launch)

    def keeps_programs(self) -> bool:
        """Whether calls reuse the programs of earlier calls."""
        return keeps_programs()

    def make_chain(self, call: Any, grad: bool, own_mask: bool = False) -> Chain | None:
        """The chain of such calls, with or without a backward; None if it needs the array library."""
        try:
            return Chain(self.runtime, call, grad, own_mask)
        except NotBuildable:
            return None

    def build_program(self, function: Callable[..., Sequence[Any]], operands: Sequence[Operand | None]) -> (
            Program | None):
        """The program of ``results = function(backend, *operands)``; None if it needs the array library. ``launch``
        takes the addresses of operands, results and workspace, all multiples of 16; operands that are None are left
        out."""
        first = next(operand for operand in operands if operand is not None)
        build = builder(self.runtime, first.library.name, first.device)
        try:
            given = [build.argument(operand) for operand in operands]
            return Program(build, tuple(function(Building(build), *given)), one_workspace=True)
        except NotBuildable:
            return None

    def launch(self, program: Program, addresses: list[int], stream: int,
               arrays: Callable[[], Sequence[Any]]) -> None:
        """``arrays()``: the arrays at the addresses, for a runtime that watches memory."""
        program.run_at(addresses, stream)


def _in_type_of(argument: Operand | None, gradient: Any) -> Any:
    """The gradient in the type of a parameter that was converted."""
    if argument is None or gradient is None:
        return gradient
    with np.errstate(all="ignore"):  # infinite beyond the range of a 16-bit type
        return argument.library.astype(gradient, argument.dtype)
