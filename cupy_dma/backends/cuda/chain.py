"""Chains: a whole differentiable call, scores to gradients, as two programs.

    forward     key scores, selection, key lists, attention        arguments -> out, lse, kept
    backward    gradients of attention and scores                  arguments, out, lse, kept, dout, dlse -> gradients

The backward is built where the forward ended: it finds the mask and the lists that the forward has made. They lie in
``kept``, one array, as do scores that were computed. There is a backward for each kind of upstream gradients, built
when the first of that kind arrives.
"""
from __future__ import annotations

import dataclasses
import threading
from typing import Any, NamedTuple

from cupy_dma.arrays import ALIGNMENT, Operand
from cupy_dma.backends.cuda.attention.backward import attention_backward
from cupy_dma.backends.cuda.attention.backward_chunks import chunk_size
from cupy_dma.backends.cuda.attention.forward import attention
from cupy_dma.backends.cuda.attention.problem import with_known_bias
from cupy_dma.backends.cuda.lists.varlen import first_keys, with_own_bounds
from cupy_dma.backends.cuda.runtime.builder import Array, Builder, GivenMask, NotBuildable
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.runtime.program import Program, builder
from cupy_dma.backends.cuda.runtime.replay import Place
from cupy_dma.backends.cuda.select.documents import selected_run
from cupy_dma.backends.cuda.select.prefix import prefix_stop
from cupy_dma.backends.cuda.select.scores import key_scores, key_scores_backward, with_known_types
from cupy_dma.calls.gradients import INPUTS, chain_gradients
from cupy_dma.calls.run import attention_of
from cupy_dma.calls.scores import Recipe
from cupy_dma.calls.sequences import Sequences
from cupy_dma.calls.types import AttentionBackwardCall, AttentionCall, DynamicCall, key_bias
from cupy_dma.masks.interval import Hints, IntervalMask
from cupy_dma.masks.selection import Candidates

MAX_BACKWARDS = 16  # kinds of upstream gradients of a chain; then all are forgotten


class View(NamedTuple):
    """Where an array lies in ``kept``."""

    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: str


class Made(NamedTuple):
    """What a call makes and keeps: its mask and its scores unless they are given, the bounds of packed sequences."""

    start: View | None = None
    stop: View | None = None
    hints: Hints | None = None
    scores: View | None = None
    bounds: View | None = None


class Chain:
    """The programs of one kind of call.

    Arguments are given as the addresses, rounded down to ``ALIGNMENT``, of those of ``INPUTS`` that the call has, in
    that order, of a dense mask, of padding and of documents, of what describes packed sequences; an interval mask that
    is given comes as itself.
    ``arrays``: the same arguments, for who watches memory.
    """

    def __init__(self, runtime: Runtime, call: AttentionCall | DynamicCall, grad: bool, own_mask: bool = False):
        """``grad``: a backward follows. ``own_mask``: an interval mask is two more arguments, its contiguous start and
        stop, and its lists belong to the call. Raises ``NotBuildable`` for a call that takes the array library."""
        own = call.attention if isinstance(call, DynamicCall) else call
        self.runtime, self.library, self._grad = runtime, own.query.library, grad
        self._build = build = builder(runtime, self.library.name, own.query.device, grad)
        spec, self._recipe, self._last = arguments(build, call, own_mask)
        module: Any = Building(build)
        self._attention = attention_of(spec, module) if isinstance(spec, DynamicCall) else spec
        results = module.attention(self._attention)
        self._results = results if own.sequences is None else tuple([x[0] for x in results])
        self._forward = Program(build, self._results, keep=self._kept())
        self._backward: dict[Any, tuple[Program, list[int | None]] | None] = {}
        self._lock = threading.Lock()
        self.made = self._find_made(isinstance(call, DynamicCall)) if grad else None

    def _kept(self) -> set[int]:
        """What the forward has made and the backward may need: scores, bounds, masks and their lists."""
        if not self._grad:
            return set()
        own = self._attention
        arrays: list[Any] = [] if own.bias is None else [own.bias.array]
        arrays += [] if own.sequences is None else [own.sequences.bounds.array]
        masks = [] if own.mask is None else [own.mask]
        for mask in masks:  # grows
            if not isinstance(mask, GivenMask):
                arrays += [mask._start.array, mask._stop.array]
            for found in self._build.derived(mask).values():
                if isinstance(found, IntervalMask):
                    masks.append(found)
                else:
                    arrays.append(found.workspace)
        return {x.ref.buffer for x in arrays} - set(self._build.given)

    def _find_made(self, selected: bool) -> Made | None:
        def view(x: Any) -> View:
            return View(self._forward.places[x.array.ref.buffer].offset, x.array.shape, x.array.dtype)

        own, made = self._attention, Made()
        if selected:
            assert own.mask is not None
            made = Made(view(own.mask._start), view(own.mask._stop), own.mask._hints,
                        None if self._recipe is None else view(own.bias))
        return made if own.sequences is None else made._replace(bounds=view(own.sequences.bounds))

    @property
    def kept_words(self) -> int:
        """int32 numbers that are kept for the backward."""
        return self._forward.allocations[self._forward.results][0][0] if self._forward.keeps else 0

    def forward(self, addresses: list[int], mask: IntervalMask | None, arrays: tuple[Any, ...]) -> list[Any]:
        """out, lse and what is to be kept for the backward, if there is any."""
        return self._forward.run(self.library, [*addresses, *_pointers(mask)], _masks(mask))

    def backward(self, addresses: list[int], mask: IntervalMask | None, key: Any, upstream: tuple[Any, Any],
                 arrays: tuple[Any, ...]) -> list[Any] | None:
        """The gradients of ``INPUTS``, None for what is not needed; None if that takes the array library.

        ``addresses``: of the arguments, out, lse, what was kept, dout and dlse if there is one. ``upstream``: dout and
        dlse, alike in calls of a ``key``, which ends with which gradients are needed."""
        if key not in self._backward:
            with self._lock:
                found = self._built(upstream, key[-1])
                if len(self._backward) >= MAX_BACKWARDS:
                    self._backward.clear()
                self._backward[key] = found
        found = self._backward.get(key)
        if found is None:
            return None
        program, order = found
        made = program.run(self.library, [*addresses, *_pointers(mask)], _masks(mask))
        return [None if i is None else made[i] for i in order]

    def _built(self, upstream: tuple[Any, Any],
               needed: tuple[bool, ...]) -> tuple[Program, list[int | None]] | None:
        """The program of such a backward, and which of its results is the gradient of each input."""
        needs = frozenset([name for name, wanted in zip(INPUTS, needed) if wanted])
        build, forward = self._build.following(), self._forward
        given, first = self._build.given, len(self._build.buffers)
        out, lse = (build.describe(x, name) for x, name in zip(self._results, ("out", "lse")))
        outside = [*given[:self._last], *(x.array.ref.buffer for x in (out, lse))]
        places = {buffer: Place(i, 0) for i, buffer in enumerate(outside)}
        count = len(places)
        if forward.keeps:
            places |= {buffer: Place(count, forward.places[buffer].offset) for buffer in self._kept()}
            count += 1
        mask = self._attention.mask
        of_mask = [mask._start, mask._stop] if isinstance(mask, GivenMask) else []
        try:
            dout, dlse = (None if x is None else build.argument(self.library.describe(x, name))
                          for x, name in zip(upstream, ("dout", "dlse")))
            assert dout is not None
            for buffer in (*build.given, *(x.array.ref.buffer for x in of_mask)):
                places[buffer], count = Place(count, 0), count + 1
            found = chain_gradients(self._attention, self._recipe, (dout, out, lse, dlse), needs, Building(build))  # type: ignore[arg-type]
            results = [found.get(name) if name in needs else None for name in INPUTS[:len(needed)]]
            results += [None] * (len(needed) - len(results))
            program = Program(build, tuple(results), places=places, first=first)
        except NotBuildable:
            return None
        return program, program.order(results)


def _pointers(mask: IntervalMask | None) -> list[int]:
    return [] if mask is None else [x.pointer // ALIGNMENT * ALIGNMENT for x in (mask._start, mask._stop)]


def _masks(mask: IntervalMask | None) -> list[IntervalMask]:
    return [] if mask is None else [mask]


def arguments(build: Builder, call: AttentionCall | DynamicCall, own_mask: bool) -> (
        tuple[AttentionCall | DynamicCall, Recipe | None, int]):
    """The call in a program, in the order of a chain's arguments; its recipe; and how many of them a backward has."""
    new = build.argument
    own = call.attention if isinstance(call, DynamicCall) else call
    packed = own.sequences
    if packed is not None:
        if packed.page_size and (isinstance(call, DynamicCall) or own.mask is not None or own.bias is not None):
            raise NotBuildable("a mask or a bias of a paged KV cache")
        if isinstance(call, DynamicCall) and call.keys != "prefix":
            raise NotBuildable("one selection for all queries of packed sequences")

    def sequences() -> Sequences:
        assert packed is not None
        return with_own_bounds(build, packed, [new(x) for x in packed.given], own.query_length)

    own = dataclasses.replace(own, **{name: new(getattr(own, name)) for name in ("query", "key", "value")})
    if not isinstance(call, DynamicCall):
        own = dataclasses.replace(own, bias=new(own.bias), dense=new(own.dense))
        mask = own.mask
        if mask is not None and own_mask:
            start, stop = (Array(x.ref, x.shape, x.dtype) for x in (new(mask._start).array, new(mask._stop).array))
            mask = IntervalMask._make(build, start, stop, mask._hints)  # type: ignore[arg-type]
        last = len(build.given)
        if packed is not None:
            own = dataclasses.replace(own, sequences=sequences())
        return dataclasses.replace(own, mask=mask if own_mask else new(mask)), None, last
    scores, recipe = new(call.scores), None
    if call.recipe is not None:
        recipe = own.value, *(new(x) for x in call.recipe[1:4]), call.recipe[4]
    if scores is not None:
        own = dataclasses.replace(own, bias=key_bias(scores))
    last = len(build.given)  # padding, documents and cumulative lengths are no arguments of the backward
    if packed is None:
        padding, documents, apart = call.candidates
        candidates = Candidates(new(padding), new(documents), apart)
    else:
        own = dataclasses.replace(own, sequences=(made := sequences()))
        candidates = Candidates(None, first_keys(build, made), apart=True)
    return dataclasses.replace(call, attention=own, scores=scores, recipe=recipe, candidates=candidates), recipe, last


class Building:
    """The backend of a program that is being built."""

    def __init__(self, build: Builder):
        self._build = build

    def key_scores(self, value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None, form: str) -> Any:
        return key_scores(self._build, value, *with_known_types(value, dt_proj, A, dt_bias), form)

    def prefix_stop(self, *arguments: Any) -> Any:
        return prefix_stop(self._build, *arguments)

    def selected_run(self, *arguments: Any) -> Any:
        return selected_run(self._build, *arguments)

    def attention(self, call: AttentionCall) -> Any:
        return attention(self._build, with_known_bias(call))

    def attention_backward(self, call: AttentionBackwardCall) -> Any:
        if chunk_size(call) is not None:
            raise NotBuildable("a call in chunks")
        return attention_backward(self._build, dataclasses.replace(call, forward=with_known_bias(call.forward)))

    def key_scores_backward(self, dscores: Operand, value: Operand, dt_proj: Operand, A: Operand,
                            dt_bias: Operand | None, form: str, *more: Any) -> Any:
        return key_scores_backward(self._build, dscores, value, *with_known_types(value, dt_proj, A, dt_bias), form,
                                   *more)
