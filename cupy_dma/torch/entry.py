"""The one way of torch calls to programs (``backends/cuda/chain.py``): looked up by what is known of their tensors
without reading them, then run.

The first call of a kind is checked as any other, and builds its programs. From then on a call is a look-up,
allocations, addresses and launches: a call of the same kind has been checked. What checks decide is part of the key:
shapes, strides, types, devices and alignment, options and their types, and of an interval mask its shape, strides and
hints. Eager calls on plain tensors save what they make themselves, their mask, key lists and scores, as one tensor
beside their arguments; the operators of a compiled graph return it. Traced or intercepted calls have no key, nor have
arguments of other types.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from cupy_dma import backends
from cupy_dma.arrays import ALIGNMENT, CPU, Device, Operand, library_named, strides_of
from cupy_dma.calls.layout import looks_like_bhnd
from cupy_dma.calls.sequences import sequences_in
from cupy_dma.calls.types import AttentionCall, DynamicCall
from cupy_dma.masks.derived import forget_oldest
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.torch.gradients import CallContext, MaskArguments, Saved, check_saved, described, gradients
from cupy_dma.torch.registration import is_plain_gradient

MAX_ENTRIES = 1024  # then the oldest are forgotten
_PLAIN = {bool, int, float, str, tuple, type(None)}  # types of options
_functorch, _dispatch = torch._C._functorch, torch._C._len_torch_dispatch_stack
_is_deterministic = torch._C._get_deterministic_algorithms
Tensors = Sequence[Tensor | None]


class Entry(NamedTuple):
    """What is known of calls with one key."""

    chain: Any  # None: they have no programs
    facts: CallContext  # without a mask
    runtime: Any  # of the backend then
    saved: list[Any]  # ``described`` of the tensors that the backward gets: out, lse, the inputs
    places: list[Any]  # and ``_place_of`` the inputs


class CallKey(NamedTuple):
    """Of a call: what its programs depend on, and the entry if it has any."""

    facts: Any
    addresses: list[int]  # of its tensors; empty for operators
    grad: bool  # whether a backward follows
    entry: Entry | None


_known: dict[Any, Entry] = {}


def _intercepted() -> bool:
    """Whether a transform, a dispatch mode or forward-mode AD sees what is called."""
    return _functorch.peek_interpreter_stack() is not None or _dispatch() > 0 or forward_ad._current_level >= 0


def call_key(tensors: tuple[Any, ...], mask: Any, options: tuple[Any, ...]) -> CallKey | None:
    """The key of an eager call with these arguments; None for one that has no programs."""
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
            if address == 0:  # nothing, or known to be zero
                return None
            addresses.append(address)
            bits |= address
            wanted |= needs
            facts += x.shape, None if x.is_contiguous() else layout_of(x), x.dtype, x.device, needs
        if mask is not None:
            if type(mask) is not IntervalMask:
                return None
            facts.append(_facts_of(mask))
        if bits % ALIGNMENT:
            facts += [address % ALIGNMENT for address in addresses]
            addresses = [address - address % ALIGNMENT for address in addresses]
        key = tuple(facts)
        return CallKey(key, addresses, grad and wanted, _entry(key))
    except (RuntimeError, TypeError):  # sparse and nested tensors, and options of any type
        return None


def operator_key(tensors: Tensors, options: tuple[Any, ...], grad: bool) -> CallKey:
    """The key of an operator's call, on tensors with memory or without, as a compiler traces them: their sizes are
    numbers."""
    key = (options, grad, *[None if x is None else (tuple(x.shape), layout_of(x), x.dtype, x.device) for x in tensors])
    return CallKey(key, [], grad, _entry(key))


def _entry(key: Any) -> Entry | None:
    found = _known.get(key)
    if found is None or found.chain is None:
        return None
    module = found.facts.module
    return found if module.runtime is found.runtime and module.keeps_programs() else None


def layout_of(x: Tensor) -> tuple[int, ...] | None:
    """Strides of a tensor, 0 for axes of length 1; None if it is contiguous."""
    return None if x.is_contiguous() else strides_of(x.shape, x.stride())


def _place_of(x: Tensor) -> tuple[Any, int]:
    """Its layout, and its address as far as that matters."""
    return layout_of(x), x.data_ptr() % ALIGNMENT


def _facts_of(mask: IntervalMask) -> Any:
    if mask._facts is None:
        start, stop = mask._start, mask._stop
        mask._facts = (mask.shape, start.strides, stop.strides, start.pointer % ALIGNMENT, stop.pointer % ALIGNMENT,
                       mask._hints, mask.device, mask.library.name)
    return mask._facts


# ---- the first call -------------------------------------------------------------------------------------------------


def recorded(key: CallKey | None, call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None,
             inputs: Tensors, own_mask: bool = False) -> CallKey | None:
    """The key of a checked call with these inputs, with its entry if it has programs. ``own_mask``: as for a chain."""
    own = call.attention if isinstance(call, DynamicCall) else call
    if key is None or own.value_dim != own.head_dim or not _has_chains(module):
        return key
    # An eager call's options must be plain values, and what warns does so each time.
    if not own_mask and (not _PLAIN.issuperset(key.facts[1])
                         or own.sequences is None and looks_like_bhnd(own.query, own.key)):
        return key
    known = _known.get(key.facts)
    if known is None or known.runtime is not module.runtime:
        known = _known[key.facts] = _built(key, call, module, backend, inputs, own_mask)
        if len(_known) > MAX_ENTRIES:
            forget_oldest(_known, MAX_ENTRIES)
    return key._replace(entry=None if known.chain is None else known)


def may_do_without_mask(key: CallKey | None, call: DynamicCall) -> bool:
    """Whether a backend may find the keys of a call from its scores alone, which it decides when it has them."""
    own = call.attention
    return (key is None or not key.grad) and own.sequences is None and own.query_length < own.key_length


def _has_chains(module: ModuleType) -> bool:
    return getattr(module, "make_chain", None) is not None and module.keeps_programs()


def _built(key: CallKey, call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None, inputs: Tensors,
           own_mask: bool) -> Entry:
    own, form = (call.attention, call.recipe and call.recipe[4]) if isinstance(call, DynamicCall) else (call, None)
    chain = module.make_chain(call, key.grad, own_mask)
    query, (*batch, length, heads, _) = own.query.array, own.query.array.shape
    results = [(query.shape, query.dtype, query.device),
               (torch.Size((*batch, heads, length)), torch.float32, query.device)]
    facts = CallContext(None, own.options, form, module, backend)
    # Operators take copies of what a compiler has placed elsewhere.
    places = [(layout_of(x), 0) if own_mask else _place_of(x) for x in inputs if x is not None]
    return Entry(chain, facts, module.runtime, results + described(inputs), places)


# ---- eager calls ----------------------------------------------------------------------------------------------------


def run(key: CallKey, mask: IntervalMask | None, inputs: Tensors, others: Tensors = ()) -> tuple[Tensor, Tensor]:
    """``out, lse`` of a call that has an entry, with their gradients. ``others``: tensors that have none."""
    assert key.entry is not None
    if key.grad:
        return _Chain.apply(key.entry, key.addresses, mask, others, *inputs)
    out, lse = key.entry.chain.forward(key.addresses, mask, (*inputs, *others))[:2]
    return out, lse


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entry: Entry, addresses: list[int], mask: IntervalMask | None, others: Tensors,
                *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse, *made = entry.chain.forward(addresses, mask, (*inputs, *others))
        ctx.save_for_backward(out, lse, *inputs, *made)
        ctx.call = entry, mask
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        entry, mask = ctx.call
        tensors, needed, count = ctx.saved_tensors, ctx.needs_input_grad[4:], len(entry.saved)
        (out, lse, *inputs), made = tensors[:count], tensors[count:]
        check_saved(tensors[:count], entry.saved)
        found = None
        if (dout is not None and entry.runtime is entry.facts.module.runtime and is_plain_gradient(dout)
                and not _intercepted() and not dout.is_neg() and not (dlse is not None and dlse.is_neg())):
            found = backward(entry, mask, inputs, out, lse, made, dout, dlse, needed)
        if found is None:
            facts, scores = without_programs(entry, mask, made, inputs)
            found = gradients(facts, Saved(*tensors[:count])._replace(scores=scores), dout, dlse, needed)
        return None, None, None, None, *found


def backward(entry: Entry, mask: IntervalMask | None, inputs: Tensors, out: Tensor, lse: Tensor, made: Tensors,
             dout: Tensor, dlse: Tensor | None, needed: tuple[bool, ...]) -> list[Tensor | None] | None:
    """The gradients of the inputs, None for what is not needed; None where that takes the array library, or a hook has
    given back inputs with other strides or at odd addresses."""
    given = [x for x in inputs if x is not None]
    addresses = [x.data_ptr() for x in given]
    places = [(None if x.is_contiguous() else layout_of(x), at % ALIGNMENT) for x, at in zip(given, addresses)]
    if places != entry.places or dout.data_ptr() == 0:
        return None
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    last = [] if dlse is None else [dlse]
    others, more = _usable([x.contiguous() for x in (out, lse, *made, *last) if x is not None])
    dlse = others.pop() if last else None
    count, (layout, odd) = len(others), _place_of(dout)
    addresses = [at // ALIGNMENT * ALIGNMENT for at in addresses]
    addresses += [*more[:count], dout.data_ptr() - odd, *more[count:]]
    return entry.chain.backward(addresses, mask, (layout, odd, dlse is None, needed), (dout, dlse),
                                [*given, *others, dout, *([] if dlse is None else [dlse])])


def _usable(tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Tensors at multiples of ``ALIGNMENT``, themselves or copies with the same strides, and where."""
    addresses, bits = [x.data_ptr() for x in tensors], 0
    for address in addresses:
        bits |= address
    if bits % ALIGNMENT:
        tensors = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
                   if address % ALIGNMENT else x for x, address in zip(tensors, addresses)]
        addresses = [x.data_ptr() for x in tensors]
    return tensors, addresses


def without_programs(entry: Entry, mask: IntervalMask | None, made: Tensors,
                     inputs: Tensors) -> tuple[CallContext, Tensor | None]:
    """What a backward without programs needs of the call: facts, and the scores that it has made."""
    def array(view: Any) -> Any:
        if view is None:
            return None
        kept = made[0]
        assert kept is not None
        begin = view.offset // 4
        return kept[begin:begin + math.prod(view.shape)].view(getattr(torch, view.dtype)).view(view.shape)

    views, key = entry.chain.made, inputs[1]
    assert key is not None
    if views.hints is not None:
        mask = MaskArguments(array(views.start), array(views.stop), *views.hints).mask()
    bounds = array(views.bounds)
    sequences = None if bounds is None else sequences_in(library_named("torch").operand(bounds, "bounds"), key.shape[0])
    return entry.facts._replace(mask=mask, sequences=sequences), array(views.scores)


# ---- operators ------------------------------------------------------------------------------------------------------


class OperatorCall(Protocol):
    """The arguments of an operator."""

    @property
    def query(self) -> Tensor: ...

    @property
    def backend(self) -> str | None: ...

    @property
    def inputs(self) -> Tensors:
        """What the backward needs, in the order of a chain's arguments."""

    def call_key(self) -> CallKey | None:
        """None for calls that have no programs."""

    def call(self) -> AttentionCall | DynamicCall:
        """The checked call."""


def found_entry(given: OperatorCall) -> Entry | None:
    """The entry of calls with these arguments that have been made."""
    key = given.call_key()
    return None if key is None else key.entry


def made_entry(given: OperatorCall, call: AttentionCall | DynamicCall, module: ModuleType) -> Entry | None:
    """The entry of the checked call; None where it has no programs."""
    key = recorded(given.call_key(), call, module, given.backend, given.inputs, own_mask=True)
    return None if key is None else key.entry


def size_of_made(given: OperatorCall, tensors: Tensors, without: int) -> Any:
    """Number of int32 values that an operator saves for its backward; ``without`` if the call has no programs. Unknown
    if a tensor size is unknown; 0 for invalid arguments, which raise when the operator runs."""
    if not all(type(n) is int for x in tensors if x is not None for n in x.shape):
        return torch.library.get_ctx().new_dynamic_size()
    device = CPU if given.query.device.type == "cpu" else Device("cuda", given.query.device.index or 0)
    query = Operand("query", given.query, library_named("torch"), (), (), "", device, ALIGNMENT)  # without memory yet
    found, module = found_entry(given), backends.choose(given.backend, [query])
    if found is None and _has_chains(module):
        try:
            found = made_entry(given, given.call(), module)
        except (TypeError, ValueError):
            return 0
    return without if found is None else found.chain.kept_words


def run_operator(entry: Entry, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and what the call has made, nothing where no backward follows."""
    given, addresses = _usable([x for x in tensors if x is not None])
    out, lse, *made = entry.chain.forward(addresses, None, given)
    return out, lse, made[0] if made else nothing_made(out)


def nothing_made(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.int32)


def backward_operator(entry: Entry, inputs: Tensors, out: Tensor, lse: Tensor, made: Tensor, dout: Tensor,
                      dlse: Tensor | None, needed: tuple[bool, ...]) -> list[Tensor | None] | None:
    """``backward`` of a call whose key has its inputs' strides."""
    given, _ = _usable([x for x in inputs if x is not None])
    return backward(entry, None, given, out, lse, [made] if made.numel() else [], dout, dlse, needed)
