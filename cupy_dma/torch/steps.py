"""Eager calls on plain tensors that have been made before: looked up by what is known of their tensors without reading
them, then run as plans (``backends/cuda/steps.py``).

The first call of a kind is checked and run as any other, and so is the second, which records the plans. From then on a
call is a look-up, allocations, addresses and launches: a call of the same kind has been checked. What checks decide is
part of the kind: shapes, strides, types, devices and alignment, options and their types, and of an interval mask its
shape, strides and hints. What something traces or intercepts has no kind, nor have arguments of other types.
"""
from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from cupy_dma.calls.layout import looks_turned
from cupy_dma.calls.types import AttentionCall, DynamicCall
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.torch.gradients import Facts, MaskArguments, Saved, gradients
from cupy_dma.torch.registration import is_plain_gradient

MOST_KINDS = 4096  # then all are forgotten
_PLAIN = {bool, int, float, str, type(None)}  # types of options
_functorch, _dispatch = torch._C._functorch, torch._C._len_torch_dispatch_stack
_is_deterministic = torch._C._get_deterministic_algorithms


class _Plans(NamedTuple):
    """What is known of a kind whose calls have been made."""

    step: Any  # None until there is one, and where there can be none
    calls: int  # that have been made
    facts: Facts  # without a mask
    runtime: Any  # of the backend then
    strides: list[tuple[int, ...]]  # of the tensors that the backward gets: those of the inputs, out, lse


class Kind(NamedTuple):
    """Of a call: what its plans depend on, and what is known of it."""

    facts: Any
    addresses: list[int]  # of its tensors
    grad: bool  # whether autograd wants a gradient
    plans: _Plans | None  # to be run


_known: dict[Any, _Plans] = {}


def _intercepted() -> bool:
    """Whether a transform, a dispatch mode or forward-mode AD sees what is called."""
    return _functorch.peek_interpreter_stack() is not None or _dispatch() > 0 or forward_ad._current_level >= 0


def kind_of(tensors: tuple[Any, ...], mask: Any, options: tuple[Any, ...]) -> Kind | None:
    """The kind of a call with these arguments; None for one that cannot be planned."""
    if is_compiling() or _intercepted():
        return None
    facts: list[Any] = [options, tuple(map(type, options)), _is_deterministic(), grad := torch.is_grad_enabled()]
    addresses, bits, wanted = [], 0, False
    try:
        for x in tensors:
            if x is None:
                facts.append(None)
                continue
            kind = type(x)
            if (kind is not Tensor and kind is not Parameter) or x.is_neg():
                return None
            address, needs = x.data_ptr(), x.requires_grad
            addresses.append(address)
            bits |= address or 1
            wanted |= needs
            facts += x.shape, x.stride(), x.dtype, x.device, needs
        if mask is not None:
            if type(mask) is not IntervalMask:
                return None
            facts.append(_facts_of(mask))
            bits |= mask._start.pointer | mask._stop.pointer
        found = tuple(facts)
        plans = _known.get(found)
    except (RuntimeError, TypeError):  # sparse and nested tensors, and options of any type
        return None
    if bits & 15:
        return None
    if plans is not None:
        module = plans.facts.module
        if plans.step is None or module.runtime is not plans.runtime or not module.plans.enabled():
            plans = None
    return Kind(found, addresses, grad and wanted, plans)


def _facts_of(mask: IntervalMask) -> Any:
    found = mask._cache.get("facts")
    if found is None:
        found = mask._cache["facts"] = (mask.shape, mask._start.strides, mask._stop.strides, mask._hints, mask.device,
                                        mask.library.name)
    return found


def learn(kind: Kind | None, call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None,
          inputs: tuple[Tensor | None, ...]) -> None:
    """A checked call of this kind has been made, with these inputs."""
    make = getattr(module, "make_step", None)
    if kind is None or make is None or not module.plans.enabled() or not _PLAIN.issuperset(
            kind.facts[1]):
        return
    own, form = (call.attention, call.recipe and call.recipe[4]) if isinstance(call, DynamicCall) else (call, None)
    found = _known.get(kind.facts)
    if found is not None and found.runtime is module.runtime:
        capturing = own.query.device.kind == "cuda" and torch.cuda.is_current_stream_capturing()
        if found.calls == 1 and not capturing:  # graphs must not load kernels
            _known[kind.facts] = found._replace(step=make(call, kind.grad), calls=2)
        return
    if len(_known) >= MOST_KINDS:
        _known.clear()
    if not looks_turned(own.query, own.key):  # which warns each time
        facts = Facts(None, (own.causal, own.scale, own.softcap, own.deterministic), form, module, backend)
        _, length, heads, size = own.query.shape
        strides = [x.stride() for x in inputs if x is not None]
        strides += [(length * heads * size, heads * size, size, 1), (heads * length, length, 1)]
        _known[kind.facts] = _Plans(None, 1, facts, module.runtime, strides)


def run(kind: Kind, mask: IntervalMask | None, inputs: tuple[Tensor | None, ...],
        padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``out, lse`` of a call of a kind that has plans, with their gradients."""
    if kind.grad:
        return _Step.apply(kind.plans, kind.addresses, mask, padding, *inputs)
    assert kind.plans is not None
    out, lse = kind.plans.step.forward(kind.addresses, mask, (*inputs, padding))[:2]
    return out, lse


class _Step(torch.autograd.Function):
    """The context keeps the mask, or what the call has made itself: its mask, key lists and scores."""

    @staticmethod
    def forward(ctx: Any, plans: _Plans, addresses: list[int], mask: IntervalMask | None, padding: Tensor | None,
                *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse, *kept = plans.step.forward(addresses, mask, (*inputs, padding))
        ctx.save_for_backward(out, lse, *inputs)
        ctx.kept = plans, mask, kept
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        plans, mask, kept = ctx.kept
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[4:]
        found = None
        if dout is not None and plans.runtime is plans.facts.module.runtime:
            found = _planned(plans, mask, kept, saved, dout, dlse, needed)
        if found is None:
            facts, scores = _unplanned(plans, mask, kept)
            found = gradients(facts, Saved(*saved)._replace(scores=scores), dout, dlse, needed)
        return None, None, None, None, *found


def _planned(plans: _Plans, mask: IntervalMask | None, kept: list[Tensor], saved: tuple[Any, ...], dout: Tensor,
             dlse: Tensor | None, needed: tuple[bool, ...]) -> list[Tensor | None] | None:
    """The gradients by plans; None where there are none."""
    if (not is_plain_gradient(dout) or _intercepted() or not plans.facts.module.plans.enabled() or dout.is_neg()
            or (dlse is not None and dlse.is_neg())):
        return None
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    tensors = [x for x in (*saved[2:], saved[0], saved[1]) if x is not None]
    if [x.stride() for x in tensors] != plans.strides:  # a hook has made other ones of them
        return None
    tensors += (*kept, dout) if dlse is None else (*kept, dout, dlse)
    addresses, bits = [x.data_ptr() for x in tensors], 0
    for address in addresses:
        bits |= address or 1
    if bits & 15:
        return None
    return plans.step.backward(addresses, mask, (dout.stride(), dlse is None, needed), (dout, dlse), tensors)


def _unplanned(plans: _Plans, mask: IntervalMask | None, kept: list[Tensor]) -> tuple[Facts, Tensor | None]:
    """What a backward without plans needs of the call: facts, and the scores that it has made."""
    made, scores = plans.step.made, None
    if made is not None:
        def array(place: Any) -> Tensor:
            begin = place.offset // 4
            flat = kept[0][begin:begin + math.prod(place.shape)]
            return flat.view(getattr(torch, place.dtype)).view(place.shape)

        mask = MaskArguments(array(made.start), array(made.stop), *made.hints).mask()
        scores = None if made.scores is None else array(made.scores)
    return plans.facts._replace(mask=mask), scores
