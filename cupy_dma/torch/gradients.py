"""The gradients of a call from what its forward has saved: on its backend, or where they are traced by operators."""
from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma import checks
from cupy_dma.arrays import Operand, library_named
from cupy_dma.calls.gradients import INPUTS, chain_gradients
from cupy_dma.calls.sequences import Sequences
from cupy_dma.calls.types import AttentionCall, key_bias
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.runs import Hints
from cupy_dma.torch.registration import is_plain_gradient, operators


class MaskArguments(NamedTuple):
    """An interval mask as arguments of an operator."""

    start: Tensor | None = None
    stop: Tensor | None = None
    starts: str | None = None
    bound: Sequence[int] | None = None
    causal_only: bool = False

    @classmethod
    def of(cls, mask: IntervalMask | None) -> MaskArguments:
        return cls() if mask is None else cls(mask._start.array, mask._stop.array, *mask._hints)

    def mask(self) -> IntervalMask | None:
        if self.start is None or self.stop is None:
            return None
        bound = None if self.bound is None else (self.bound[0], self.bound[1])
        return IntervalMask._make(library_named("torch"), self.start, self.stop,
                                  Hints(self.starts, bound, self.causal_only))


class MadeMask(NamedTuple):
    """A mask that a call has made, and its key lists, without their tensors: those autograd saves."""

    hints: Hints
    lists: list[tuple[Any, type, list[int]]]  # key and type of an entry, and which of the tensors it has

    @classmethod
    def taken_apart(cls, mask: IntervalMask) -> tuple[MadeMask, list[Tensor]]:
        found = [(key, x) for key, x in mask._cache.items() if hasattr(x, "addresses")]
        tensors = {id(array): array for _, x in found for array in x.arrays}
        numbers = {identity: i for i, identity in enumerate(tensors)}
        lists = [(key, type(x), [numbers[id(array)] for array in x.arrays]) for key, x in found]
        return cls(mask._hints, lists), [mask._start.array, mask._stop.array, *tensors.values()]

    def mask(self, start: Tensor, stop: Tensor, *tensors: Tensor) -> IntervalMask:
        mask = IntervalMask._make(library_named("torch"), start, stop, self.hints)
        for key, kind, numbers in self.lists:
            arrays = [tensors[i] for i in numbers]
            mask._cache[key] = kind(arrays, [x.data_ptr() for x in arrays])
        return mask


class CallContext(NamedTuple):
    """What a backward needs of a call besides tensors."""

    mask: IntervalMask | None
    options: tuple[bool, float, float, bool, int]  # causal, scale, softcap, deterministic, bias_delay
    form: str | None  # of the scores, if they are computed
    module: ModuleType
    backend: str | None
    sequences: Sequences | None = None


class Saved(NamedTuple):
    """The tensors of a call: the results, ``INPUTS``, a dense mask, and the scores if they are computed."""

    out: Tensor
    lse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    dt_proj: Tensor | None = None
    A: Tensor | None = None
    dt_bias: Tensor | None = None
    dense: Tensor | None = None
    scores: Tensor | None = None


def described(tensors: Sequence[Tensor | None]) -> list[Any]:
    """What a saved-tensor hook must not change."""
    return [None if x is None else (x.shape, x.dtype, x.device) for x in tensors]


def check_saved(tensors: Sequence[Tensor | None], expected: list[Any]) -> None:
    """RuntimeError if a saved-tensor hook has returned another kind of tensor than was ``described``."""
    found = described(tensors)
    if found == expected:
        return
    i = next(i for i, pair in enumerate(zip(found, expected)) if pair[0] != pair[1])
    name = Saved._fields[i] if i < len(Saved._fields) else "an internal array"
    given, wanted = ("None" if x is None else f"shape {tuple(x[0])}, {x[1]}, {x[2]}" for x in (found[i], expected[i]))
    raise RuntimeError(f"a saved-tensor hook returned {name} with {given}; the backward of attention needs it as "
                       f"it was saved: {wanted}")


def gradients(facts: CallContext, saved: Saved, dout: Tensor | None, dlse: Tensor | None,
              needed: Sequence[bool]) -> list[Tensor | None]:
    """Those of ``INPUTS``, as many as there are in ``needed``."""
    needs = [name for name, wanted in zip(INPUTS, needed) if wanted]
    if dout is None:
        if dlse is None:
            return [None] * len(needed)
        dout = torch.zeros_like(saved.out)
    find = _by_backend if is_plain_gradient(dout) else _by_operators
    found = find(facts, saved, dout, dlse, needs)
    return [found[name] if wanted else None for name, wanted in zip(INPUTS, needed)]


def _by_backend(facts: CallContext, saved: Saved, dout: Tensor, dlse: Tensor | None,
                needs: list[str]) -> dict[str, Any]:
    """For tensors that the forward has checked."""
    operand = library_named("torch").operand

    def of(tensor: Tensor, name: str) -> Operand:
        return operand(tensor, name) if tensor.ndim == 4 else checks.with_axes(operand(tensor, name), 4)

    added, bias = None, saved.scores if saved.bias is None else saved.bias
    if bias is not None:
        added = operand(bias, "bias")
        added = checks.with_axes(added, 4) if bias.ndim == 4 else key_bias(checks.with_axes(added, 3))
    shown = None if saved.dense is None else checks.with_axes(operand(saved.dense, "mask"), 4)
    call = AttentionCall(of(saved.query, "query"), of(saved.key, "key"), of(saved.value, "value"), facts.mask, shown,
                         added, *facts.options, sequences=facts.sequences)
    recipe = None
    if facts.form is not None:
        parameters = [None if x is None else operand(x, name) for x, name in zip(saved[6:9], INPUTS[4:])]
        recipe = call.value, *parameters, facts.form
    upstream = (operand(dout, "dout"), operand(saved.out, "out"), operand(saved.lse, "lse"),
                None if dlse is None else operand(dlse, "dlse"))
    return chain_gradients(call, recipe, upstream, frozenset(needs), facts.module)  # type: ignore[arg-type]


def _by_operators(facts: CallContext, saved: Saved, dout: Tensor, dlse: Tensor | None,
                  needs: list[str]) -> dict[str, Any]:
    through_scores = [] if facts.form is None else [name for name in needs if name in ("value", *INPUTS[4:])]
    direct = [name for name in INPUTS[:4] if name in needs or name == "bias" and through_scores]
    arguments = (dout, dlse, saved.out, saved.lse)
    inputs = saved.query, saved.key, saved.value, *MaskArguments.of(facts.mask)
    bias, value = saved.scores if saved.bias is None else saved.bias, saved.value
    packed: tuple[Tensor | None, ...] = (None,) * 4
    if facts.sequences is not None:
        packed = tuple([x and x.array for x in facts.sequences.given])
        bias = bias[0] if bias is not None and bias.ndim == 3 else bias  # computed scores
    nothing = dout.new_empty(0, dtype=torch.int32)  # made by the forward
    made = operators.attention_backward(*arguments, nothing, *inputs, saved.dense, bias, *packed, *facts.options,
                                        facts.backend, True, direct)
    found = dict(zip(direct, made))
    if through_scores:
        dscores = found["bias"]
        if facts.sequences is not None:
            dscores, value = dscores[None], value[None]
        made = operators.key_scores_backward(dscores, value, *saved[6:9], facts.form, facts.backend, through_scores)
        for name, gradient in zip(through_scores, made):
            gradient = gradient[0] if name == "value" and facts.sequences is not None else gradient
            found[name] = gradient if name not in found else found[name] + gradient
    return found
