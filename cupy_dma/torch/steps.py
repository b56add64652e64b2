"""Eager calls on plain tensors that have been made before: looked up by what is known of their tensors without reading
them, then run as programs (``backends/cuda/chain.py``).

The first call of a kind is checked as any other, and builds its programs. From then on a call is a look-up,
allocations, addresses and launches: a call of the same kind has been checked. What checks decide is part of the kind:
shapes, strides, types, devices and alignment, options and their types, and of an interval mask its shape, strides and
hints. Traced or intercepted calls have no kind, nor have arguments of other types.
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

from cupy_dma.arrays import strides_of
from cupy_dma.calls.layout import looks_turned
from cupy_dma.calls.types import AttentionCall, DynamicCall
from cupy_dma.masks.derived import forget_oldest
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.torch.gradients import Facts, MaskArguments, Saved, check_saved, described, gradients
from cupy_dma.torch.registration import is_plain_gradient

MAX_KINDS = 1024  # then the oldest are forgotten
_PLAIN = {bool, int, float, str, type(None)}  # types of options
_functorch, _dispatch = torch._C._functorch, torch._C._len_torch_dispatch_stack
_is_deterministic = torch._C._get_deterministic_algorithms


class _Plans(NamedTuple):
    """What is known of a kind whose calls have been made."""

    step: Any  # None until there is one, and where there can be none
    facts: Facts  # without a mask
    runtime: Any  # of the backend then
    saved: list[Any]  # ``described`` of the tensors that the backward gets: out, lse, the inputs
    layouts: list[Any]  # and ``layout_of`` them


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
            facts += x.shape, None if x.is_contiguous() else layout_of(x), x.dtype, x.device, needs
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
        if plans.step is None or module.runtime is not plans.runtime or not module.keeps_programs():
            plans = None
    return Kind(found, addresses, grad and wanted, plans)


def layout_of(x: Tensor) -> tuple[int, ...] | None:
    """Strides of a tensor, 0 for axes of length 1; None if it is contiguous."""
    return None if x.is_contiguous() else strides_of(x.shape, x.stride())


def _facts_of(mask: IntervalMask) -> Any:
    if mask._facts is None:
        mask._facts = mask.shape, mask._start.strides, mask._stop.strides, mask._hints, mask.device, mask.library.name
    return mask._facts


def recorded(kind: Kind | None, call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None,
             inputs: tuple[Tensor | None, ...]) -> Kind | None:
    """The kind of a checked call with these inputs, with programs if there are any. Not where a backend may do without
    a mask, which it decides when it has the scores."""
    if kind is None or not _can_be_planned(kind, call, module):
        return kind
    if not kind.grad and isinstance(call, DynamicCall) and call.attention.query_length < call.attention.key_length:
        return kind
    return kind._replace(plans=_record(kind, call, module, backend, inputs))


def learn(kind: Kind | None, call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None,
          inputs: tuple[Tensor | None, ...]) -> None:
    """A checked call without gradients has been made, with these inputs."""
    if kind is not None and not kind.grad and _can_be_planned(kind, call, module):
        _record(kind, call, module, backend, inputs)


def _can_be_planned(kind: Kind, call: AttentionCall | DynamicCall, module: ModuleType) -> bool:
    own = call.attention if isinstance(call, DynamicCall) else call
    return (getattr(module, "make_chain", None) is not None and module.keeps_programs()
            and _PLAIN.issuperset(kind.facts[1]) and not looks_turned(own.query, own.key))  # which warns each time


def _facts(call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None) -> Facts:
    own, form = (call.attention, call.recipe and call.recipe[4]) if isinstance(call, DynamicCall) else (call, None)
    return Facts(None, (own.causal, own.scale, own.softcap, own.deterministic), form, module, backend)


def _record(kind: Kind, call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None,
            inputs: tuple[Tensor | None, ...]) -> _Plans | None:
    """The programs of such calls, to be run from now on; None if there are none."""
    known = _known.get(kind.facts)
    if known is not None and known.runtime is module.runtime:
        return None  # they take the array library
    own = call.attention if isinstance(call, DynamicCall) else call
    step = module.make_chain(call, kind.grad)
    shape, device = own.query.shape, own.query.array.device
    results = [(torch.Size(shape), own.query.array.dtype, device),
               (torch.Size((shape[0], shape[2], shape[1])), torch.float32, device)]
    found = _Plans(step, _facts(call, module, backend), module.runtime, results + described(inputs),
                   [None, None, *[layout_of(x) for x in inputs if x is not None]])
    _keep(kind, found)
    return None if step is None else found


def _keep(kind: Kind, plans: _Plans) -> None:
    _known[kind.facts] = plans
    if len(_known) > MAX_KINDS:
        forget_oldest(_known, MAX_KINDS)


def run(kind: Kind, mask: IntervalMask | None, inputs: tuple[Tensor | None, ...],
        padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``out, lse`` of a call of a kind that has plans, with their gradients."""
    if kind.grad:
        return _Step.apply(kind.plans, kind.addresses, mask, padding, *inputs)
    assert kind.plans is not None
    out, lse = kind.plans.step.forward(kind.addresses, mask, (*inputs, padding))[:2]
    return out, lse


class _Step(torch.autograd.Function):
    """What a call makes itself, its mask, key lists and scores, is one tensor and saved as the arguments are."""

    @staticmethod
    def forward(ctx: Any, plans: _Plans, addresses: list[int], mask: IntervalMask | None, padding: Tensor | None,
                *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse, *made = plans.step.forward(addresses, mask, (*inputs, padding))
        ctx.save_for_backward(out, lse, *inputs, *made)
        ctx.call = plans, mask
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        plans, mask = ctx.call
        tensors, needed, count = ctx.saved_tensors, ctx.needs_input_grad[4:], len(plans.saved)
        saved, made = tensors[:count], [x if x.is_contiguous() else x.contiguous() for x in tensors[count:]]
        check_saved(saved, plans.saved)
        found = None
        if dout is not None and plans.runtime is plans.facts.module.runtime:
            found = _planned(plans, mask, made, saved, dout, dlse, needed)
        if found is None:
            facts, scores = _unplanned(plans, mask, made)
            found = gradients(facts, Saved(*saved)._replace(scores=scores), dout, dlse, needed)
        return None, None, None, None, *found


def _planned(plans: _Plans, mask: IntervalMask | None, made: list[Tensor], saved: tuple[Any, ...], dout: Tensor,
             dlse: Tensor | None, needed: tuple[bool, ...]) -> list[Tensor | None] | None:
    """The gradients by plans; None where there are none."""
    if (not is_plain_gradient(dout) or _intercepted() or dout.is_neg()
            or (dlse is not None and dlse.is_neg())):
        return None
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    layouts = [None if x.is_contiguous() else layout_of(x) for x in saved if x is not None]
    if layouts != plans.layouts:  # a hook has made other ones of them
        return None
    tensors = [x for x in (*saved[2:], saved[0], saved[1]) if x is not None]
    tensors += (*made, dout) if dlse is None else (*made, dout, dlse)
    addresses, bits = [x.data_ptr() for x in tensors], 0
    for address in addresses:
        bits |= address or 1
    if bits & 15:
        return None
    return plans.step.backward(addresses, mask, (layout_of(dout), dlse is None, needed), (dout, dlse), tensors)


def _unplanned(plans: _Plans, mask: IntervalMask | None, made: list[Tensor]) -> tuple[Facts, Tensor | None]:
    """What a backward without plans needs of the call: facts, and the scores that it has made."""
    places, scores = plans.step.made, None
    if places is not None:
        def array(place: Any) -> Tensor:
            begin = place.offset // 4
            flat = made[0][begin:begin + math.prod(place.shape)]
            return flat.view(getattr(torch, place.dtype)).view(place.shape)

        mask = MaskArguments(array(places.start), array(places.stop), *places.hints).mask()
        scores = None if places.scores is None else array(places.scores)
    return plans.facts._replace(mask=mask), scores
