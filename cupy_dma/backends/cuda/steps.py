"""Steps: a whole differentiable call, scores to gradients, as two plans (``runtime/plans.py``).

    forward     key scores, selection, key lists, attention        arguments -> out, lse, kept
    backward    gradients of attention and scores                  arguments, out, lse, kept, dout, dlse -> gradients

Both are recorded as one run on stand-ins: the backward finds the mask and the lists that the forward has made. They lie
in ``kept``, one array, as do scores that were computed. There is a backward plan for each kind of upstream gradients,
recorded when the first of that kind arrives.
"""
from __future__ import annotations

import dataclasses
import threading
from typing import Any, NamedTuple

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention.backward_chunks import attention_backward
from cupy_dma.backends.cuda.attention.forward import attention
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.runtime.plans import Plan, recorder_of
from cupy_dma.backends.cuda.runtime.traces import Recorder, Trace, TracedArray, TracedMask, Untraceable
from cupy_dma.backends.cuda.select.prefix import prefix_run, prefix_stop
from cupy_dma.backends.cuda.select.scores import key_scores, key_scores_backward
from cupy_dma.calls.gradients import INPUTS, chain_gradients
from cupy_dma.calls.run import attention_of
from cupy_dma.calls.scores import Recipe
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias
from cupy_dma.masks.interval import Hints, IntervalMask
from cupy_dma.masks.selection import Candidates

_UNKNOWN = object()
MAX_BACKWARDS = 16  # kinds of upstream gradients of a step; then all are forgotten


class Place(NamedTuple):
    """Where an array lies in ``kept``."""

    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: str


class Made(NamedTuple):
    """What a call makes and keeps: its mask, and its scores unless they are given."""

    start: Place
    stop: Place
    hints: Hints
    scores: Place | None


class Step:
    """The plans of one kind of call.

    Arguments are given as the addresses, all multiples of 16, of those of ``INPUTS`` that the call has, in that order,
    and of its padding; an interval mask that is given comes as itself. ``arrays``: the same arguments, for who watches
    memory.
    """

    def __init__(self, runtime: Runtime, call: AttentionCall | DynamicCall, grad: bool):
        """``grad``: a backward follows. Raises ``Untraceable`` for a call that cannot be planned."""
        own = call.attention if isinstance(call, DynamicCall) else call
        self.runtime, self.library, self.device = runtime, own.query.library, own.query.device
        self._sides = [_Side(runtime, call, ascending, grad) for ascending in (True, False)]
        self._backward: dict[Any, Any] = {}  # by kind: a plan and the order of its results, or None
        self._recording = threading.Lock()
        first, second = self._sides
        try:
            for side in self._sides:
                side.forward()
            self._forward = Plan(first.trace, second.trace, (first.results, second.results), kept=first.kept())
        finally:
            for side in self._sides:
                side.forget()
        self.made = self._find_made() if isinstance(call, DynamicCall) else None

    def _find_made(self) -> Made:
        side = self._sides[0]
        mask, bias = side.attention.mask, side.attention.bias
        assert mask is not None and bias is not None
        start, stop, scores = (Place(self._forward.place(x.array.base)[1], x.array.shape, x.array.dtype)
                               for x in (mask._start, mask._stop, bias))
        return Made(start, stop, mask._hints, None if side.recipe is None else scores)

    def forward(self, addresses: list[int], mask: IntervalMask | None, arrays: tuple[Any, ...]) -> list[Any]:
        """out, lse and what is to be kept for the backward, if there is any."""
        if mask is not None:
            addresses = [*addresses, mask._start.pointer, mask._stop.pointer]
        return self._forward.launch(self.runtime, self.library, self.device, addresses, mask)[:2 + self._forward.keeps]

    def backward(self, addresses: list[int], mask: IntervalMask | None, kind: Any, upstream: tuple[Any, Any],
                 arrays: tuple[Any, ...]) -> list[Any] | None:
        """The gradients of ``INPUTS``, None for what is not needed; None if this is not planned.

        ``addresses``: of the arguments, out, lse, what was kept, dout and dlse if there is one. ``upstream``: dout and
        dlse, alike in calls of a ``kind``, which ends with which gradients are needed."""
        known = self._backward.get(kind, _UNKNOWN)
        if known is _UNKNOWN:
            with self._recording:
                known = self._recorded(mask, upstream, kind[-1])
                if len(self._backward) >= MAX_BACKWARDS:
                    self._backward.clear()
                self._backward[kind] = known
        if known is None:
            return None
        plan, order = known
        if mask is not None:
            addresses = [*addresses, mask._start.pointer, mask._stop.pointer]
        found = plan.launch(self.runtime, self.library, self.device, addresses, mask)
        return [None if i is None else found[i] for i in order]

    def _recorded(self, mask: IntervalMask | None, upstream: tuple[Any, Any],
                  needed: tuple[bool, ...]) -> tuple[Plan, list[int | None]] | None:
        """The plan of such a backward, and which of its results is the gradient of each input."""
        needs = frozenset([name for name, wanted in zip(INPUTS, needed) if wanted])
        described = [None if x is None else self.library.describe(x, name)
                     for x, name in zip(upstream, ("dout", "dlse"))]
        first, second = self._sides
        given, masks = first.given[:first.last], first.mask_bases()
        begin = len(first.trace.sizes)
        try:
            results = [side.backward(described, mask, needs) for side in self._sides]
            outside = [*given, first.out.base, first.lse.base]
            places = {base: (i, 0) for i, base in enumerate(outside)}
            count = len(places)
            if self._forward.keeps:
                places.update({base: (count, self._forward.place(base)[1]) for base in first.kept()})
                count += 1
            for base in (*first.trace.given, *masks):
                places[base] = count, 0
                count += 1
            plan = Plan(first.trace, second.trace, (results[0], results[1]), places, begin=begin)
        except Untraceable:
            return None
        finally:
            for side in self._sides:
                side.restore()
        return plan, plan.order(results[0][:len(needed)])


class _Side:
    """One of the two runs of a step: what its forward leaves to its backward."""

    def __init__(self, runtime: Runtime, call: AttentionCall | DynamicCall, ascending: bool, grad: bool):
        own = call.attention if isinstance(call, DynamicCall) else call
        self.recorder = recorder_of(runtime)
        self.trace = Trace(runtime, own.query.library, own.query.device, ascending, before_backward=grad)
        self._call, self.recipe = self._stand_in(call)
        self.functions: Any = Functions(self.recorder)

    def _stand_in(self, call: AttentionCall | DynamicCall) -> tuple[AttentionCall | DynamicCall, Recipe | None]:
        """The call of arrays that are nowhere, in the order of a step's arguments."""
        new = self.trace.stand_in
        own = call.attention if isinstance(call, DynamicCall) else call
        if own.sequences is not None or own.dense is not None:
            raise Untraceable("packed sequences and dense masks")
        own = dataclasses.replace(own, **{name: new(getattr(own, name)) for name in ("query", "key", "value")})
        if not isinstance(call, DynamicCall):
            own = dataclasses.replace(own, bias=new(own.bias))
            self.last = len(self.trace.given)
            return dataclasses.replace(own, mask=new(own.mask)), None
        padding, runs, apart = call.candidates
        if runs is not None or call.keys != "prefix":
            raise Untraceable("documents and global keys")
        scores, recipe = new(call.scores), None
        if call.recipe is not None:
            recipe = own.value, *(new(x) for x in call.recipe[1:4]), call.recipe[4]
        if scores is not None:
            own = dataclasses.replace(own, bias=key_bias(scores))
        self.last = len(self.trace.given)  # arguments of the backward; padding is none
        candidates = Candidates(new(padding), None, apart)
        return dataclasses.replace(call, attention=own, scores=scores, recipe=recipe, candidates=candidates), recipe

    def forward(self) -> None:
        self.given = list(self.trace.given)
        with self.recorder.recording(self.trace):
            call = self._call
            self.attention = attention_of(call, self.functions) if isinstance(call, DynamicCall) else call
            self.results = self.functions.attention(self.attention)
        self.out, self.lse = self.results
        if self.attention.mask is not None:
            self._lists = dict(self.attention.mask._cache)
        self._size = len(self.trace.sizes)

    def backward(self, upstream: list[Operand | None], mask: IntervalMask | None, needs: frozenset[str]) -> tuple:
        """The gradients of ``INPUTS``; ``dout`` and ``dlse`` are the given arrays of the trace then."""
        trace, library = self.trace, self.trace.library
        trace.steps, trace.requests, trace.given = [], [], []
        if type(self.attention.mask) is TracedMask:
            assert mask is not None
            self.attention.mask.real = mask
        dout, dlse = (trace.stand_in(x) for x in upstream)
        out, lse = library.describe(self.out, "out"), library.describe(self.lse, "lse")
        with self.recorder.recording(trace):
            found = chain_gradients(self.attention, self.recipe, (dout, out, lse, dlse), needs, self.functions)
        return tuple([found.get(name) if name in needs else None for name in INPUTS])

    def mask_bases(self) -> list[int]:
        """Of a mask that is given."""
        mask = self.attention.mask
        return [mask._start.array.base, mask._stop.array.base] if type(mask) is TracedMask else []

    def kept(self) -> set[int]:
        """Bases of what the forward has made and the backward may need: the scores, the mask and its lists."""
        mask, bias = self.attention.mask, self.attention.bias
        made = {bias.array.base} if bias is not None else set()
        if mask is not None and type(mask) is not TracedMask:
            made |= {mask._start.array.base, mask._stop.array.base}
            made |= {lists.workspace.base for lists in self._lists.values() if isinstance(lists.workspace, TracedArray)}
        return made - set(self.given)

    def restore(self) -> None:
        """To how the forward left it."""
        del self.trace.sizes[self._size:]
        self.trace.unfilled = {base for base in self.trace.unfilled if base < self._size}
        if self.attention.mask is not None:
            cache = self.attention.mask._cache
            cache.clear()
            cache.update(self._lists)
        self.forget()

    def forget(self) -> None:
        """What belongs to a call that was recorded."""
        self.trace.steps, self.trace.requests = [], []
        self._call = None  # type: ignore[assignment]
        mask = getattr(self, "attention", None) and self.attention.mask
        if type(mask) is TracedMask:
            mask.real = None  # type: ignore[assignment]


class Functions:
    """The backend of a trace."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def key_scores(self, *arguments: Any) -> Any:
        return key_scores(self._recorder, *arguments)

    def prefix_stop(self, *arguments: Any) -> Any:
        return prefix_stop(self._recorder, *arguments)

    def prefix_run(self, *arguments: Any) -> Any:
        return prefix_run(self._recorder, *arguments)

    def attention(self, call: AttentionCall) -> Any:
        return attention(self._recorder, call)

    def attention_backward(self, call: Any) -> Any:
        return attention_backward(self._recorder, call)

    def key_scores_backward(self, *arguments: Any) -> Any:
        return key_scores_backward(self._recorder, *arguments)


def make_step(runtime: Runtime, call: AttentionCall | DynamicCall, grad: bool) -> Step | None:
    """The step of such calls, with a backward or without; None if they cannot be planned."""
    try:
        return Step(runtime, call, grad)
    except Untraceable:
        return None
