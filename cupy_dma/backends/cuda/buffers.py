"""Functions of arrays as plans that fill arrays of the caller's, for those who own all memory, as XLA does.

    results = function(backend, *operands)        recorded on stand-ins, as in ``steps.py``
    launch(addresses of operands and results, and of the workspace, stream)

A launch allocates nothing, so that it may be captured in a CUDA graph, whose replays find the same memory.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.runtime.plans import Plan, recorder_of
from cupy_dma.backends.cuda.runtime.traces import Trace, TracedArray, Untraceable, bytes_of
from cupy_dma.backends.cuda.steps import Functions

Function = Callable[..., Sequence[Any]]


class BufferPlan:
    """A function of these operands, whose addresses are multiples of 16; those that are None are left out.

    Attributes
    ----------
    results : int
        How many arrays a launch fills.
    workspace : int
        Bytes that it needs besides.
    """

    def __init__(self, runtime: Runtime, function: Function, operands: Sequence[Operand | None]):
        """Raises ``Untraceable`` for a function that cannot be planned."""
        first = next(operand for operand in operands if operand is not None)
        self.runtime, self.device = runtime, first.device
        recorder = recorder_of(runtime)
        functions = Functions(recorder)
        traces = [Trace(runtime, first.library, first.device, ascending) for ascending in (True, False)]
        found = []
        for trace in traces:
            stand_ins = [trace.stand_in(operand) for operand in operands]
            with recorder.recording(trace):
                found.append(tuple(function(functions, *stand_ins)))
        bases = [result.base for result in found[0] if isinstance(result, TracedArray)]
        if len(set(bases)) < len(bases) or traces[0].unfilled.intersection(bases) or (
                set(bases).intersection(traces[0].given)):
            raise Untraceable("a result that no kernel writes")
        self._plan = Plan(traces[0], traces[1], (found[0], found[1]))
        self.results = len(bases)
        self.workspace = sum(bytes_of(*output) for output in self._plan.outputs[self.results:])

    def launch(self, addresses: list[int], stream: int, arrays: Callable[[], Sequence[Any]]) -> None:
        """``addresses``: of the operands, the results and, where one is needed, the workspace. ``arrays()``: what lies
        there, for who watches memory."""
        self._plan.launch_at(self.runtime, self.device, addresses, stream)


def plan_buffers(runtime: Runtime, function: Function, operands: Sequence[Operand | None]) -> BufferPlan | None:
    """The plan of a function; None if it cannot be planned."""
    try:
        return BufferPlan(runtime, function, operands)
    except Untraceable:
        return None
