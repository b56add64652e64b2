"""Attention in torch.

    attention -> out, lse, made     attention_backward -> the gradients named in ``needs``, in that order

``cupy_dma.attention`` and the other public functions delegate to these for torch tensors; calling these directly is
equivalent. Autocast casts query, key and value to its type, except float64; scores, biases and score parameters keep
theirs. ``torch.use_deterministic_algorithms`` is respected. Operators take an interval mask as its two tensors and its
hints. ``made`` is what the call has made for its backward: the key lists of the mask.
"""
from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma import backends
from cupy_dma.arrays import library_named
from cupy_dma.calls.attention import attention_call, not_padding
from cupy_dma.calls.gradients import INPUTS, Upstream, attention_gradients
from cupy_dma.calls.layout import in_bhnd, is_bnhd
from cupy_dma.calls.mask import intersect, masks_in
from cupy_dma.calls.options import Options, Packing
from cupy_dma.calls.run import attend as run_attend
from cupy_dma.calls.run import attended, attention_of
from cupy_dma.calls.types import AttentionCall, DynamicCall
from cupy_dma.calls.varlen import varlen_call
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.torch import entry
from cupy_dma.torch.gradients import CallContext, MadeMask, MaskArguments, Saved, check_saved, described, gradients
from cupy_dma.torch.registration import (
    as_key_bias,
    cast,
    empty_like,
    in_rows,
    is_deterministic,
    needs_grad,
    operators,
    options_of,
    register,
    register_derivative,
    takes_operators,
    wide,
)
from cupy_dma.torch.sinks import check_sinks, delivered


def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Any = None,
              bias: Tensor | None = None, bias_delay: int = 0, causal: bool = False, scale: float | None = None,
              softcap: float = 0.0, sink_logits: Tensor | None = None, deterministic: bool = False,
              return_lse: bool = False, layout: str | None = None, backend: str | None = None) -> Any:
    """``cupy_dma.attention`` of tensors ``(B, L, H, D)``, or ``(B, H, L, D)`` with ``layout="bhnd"``, with gradients
    for ``query, key, value``, ``bias`` and ``sink_logits``, through ``out`` and ``lse``."""
    if not is_bnhd(layout):
        return in_bhnd(attention, (("query", query), ("key", key), ("value", value)), mask=mask, bias=bias,
                       bias_delay=bias_delay, causal=causal, scale=scale, softcap=softcap, sink_logits=sink_logits,
                       deterministic=deterministic, return_lse=return_lse, backend=backend)
    if sink_logits is not None:
        check_sinks(sink_logits, query)
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        query, key, value = cast(query, key, value)
    bias = in_rows(as_key_bias(bias))
    # Programs take a dense mask as an argument; an interval mask has its own key lists.
    interval, dense = (None, mask) if isinstance(mask, Tensor) else (mask, None)
    inputs = (query, key, value, bias) if dense is None else (query, key, value, bias, None, None, None, dense)
    known = entry.call_key((query, key, value, bias, dense), interval,
                           ("attention", causal, scale, softcap, deterministic, bias_delay, layout, backend))
    if known is not None and known.entry is not None:
        return delivered(*entry.run(known, interval, inputs), return_lse, sink_logits)
    if takes_operators(query, key, value, bias):
        given = masks_in(mask)
        if len(given) == 1:
            interval, dense = (given[0], None) if isinstance(given[0], IntervalMask) else (None, given[0])
        else:
            for item in given:
                if not isinstance(item, IntervalMask) and item.ndim == 2:
                    not_padding(item.shape, query.shape[0], query.shape[1], key.shape[1])
            interval, dense = intersect(given, key.shape[1], key.shape[2], query.shape[2])
        out, lse, _ = operators.attention(query, key, value, *MaskArguments.of(interval), dense, bias, *NOT_PACKED,
                                          *options_of(causal, scale, softcap, deterministic, bias_delay, backend),
                                          needs_grad(query, key, value, bias))
    else:
        call = attention_call(query, key, value, mask, bias,
                              Options(causal, scale, softcap, is_deterministic(deterministic), bias_delay), layout)
        module = backends.choose(backend, (call.query,))
        if (None if call.dense is None else call.dense.array) is dense:  # not if it became an interval mask
            known = entry.recorded(known, call, module, backend, inputs)
        if known is not None and known.entry is not None:
            out, lse = entry.run(known, interval, inputs)
        else:
            out, lse, _ = attend(call, module, backend, (query, key, value, bias), masks_in(mask))
    return delivered(out, lse, return_lse, sink_logits)


def attend(call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None,
           inputs: tuple[Tensor | None, ...], given: tuple[Any, ...] = ()) -> tuple[Tensor, Tensor, bool]:
    """``out, lse`` of a checked call on ``module``, the backend of that name, and whether a mask was used. Gradients go
    to ``inputs``: query, key, value and bias or scores, and the parameters of scores to be computed. ``given``: the
    caller's masks."""
    if needs_grad(*inputs):
        return *_Attention.apply(call, module, backend, given, *inputs), True
    if isinstance(call, DynamicCall):
        out, lse, by_mask = attended(call, module)
        return *results_of(call.attention, out, lse), by_mask
    return *results_of(call, *run_attend(call, module)), True


def results_of(call: AttentionCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Results in the caller's shape."""
    return (out, lse) if call.sequences is None else (out[0], lse[0])


class _Attention(torch.autograd.Function):
    """Attention of a checked call. All tensors that the backward needs are saved through autograd, so that it frees
    them and saved-tensor hooks (checkpointing, offloading) see them: arguments, results, and what the call has made,
    that is its mask, the key lists of that mask and its scores. A mask of the caller keeps its own key lists."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None,
                given: tuple[Any, ...], *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        own = attention_of(call, module) if isinstance(call, DynamicCall) else call
        out, lse = results_of(own, *run_attend(own, module))
        recipe = call.recipe if isinstance(call, DynamicCall) else None
        mask, made = own.mask, list[Tensor]()
        ctx.made_mask = None
        if mask is not None and not any(mask is x for x in given):
            ctx.made_mask, made = MadeMask.taken_apart(mask)
            mask = None
        saved = (out, lse, *inputs, *[None] * (len(INPUTS) - len(inputs)),
                 None if own.dense is None else own.dense.array,
                 None if recipe is None or own.bias is None else own.bias.array, *made)
        ctx.save_for_backward(*saved)
        ctx.saved = described(saved)
        ctx.facts = CallContext(mask, own.options, None if recipe is None else recipe[4], module, backend,
                                own.sequences)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        tensors, facts, count = ctx.saved_tensors, ctx.facts, len(Saved._fields)
        check_saved(tensors, ctx.saved)
        if ctx.made_mask is not None:
            facts = facts._replace(mask=ctx.made_mask.mask(*tensors[count:]))
        return None, None, None, None, *gradients(facts, Saved(*tensors[:count]), dout, dlse, ctx.needs_input_grad[4:])


def upstream_of(*tensors: Tensor | None) -> Upstream:
    """``dout, out, lse, dlse`` as operands."""
    operand = library_named("torch").operand
    return tuple([None if x is None else operand(x, name)  # type: ignore[return-value]
                  for x, name in zip(tensors, ("dout", "out", "lse", "dlse"))])


def gradients_of(call: AttentionCall, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
                 module: ModuleType, needs: Sequence[str]) -> list[Tensor]:
    """The gradients named in ``needs``."""
    found = attention_gradients(call, upstream_of(dout, out, lse, dlse), frozenset(needs), module)
    return [gradient for name, gradient in zip(INPUTS, found) if name in needs]


# ---- operators ------------------------------------------------------------------------------------------------------


class _Arguments(NamedTuple):
    """The last arguments of the operators and of their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    start: Tensor | None
    stop: Tensor | None
    starts: str | None
    bound: Sequence[int] | None
    causal_only: bool
    dense: Tensor | None
    bias: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
    causal: bool
    scale: float | None
    softcap: float
    deterministic: bool
    bias_delay: int
    backend: str | None
    keep: bool

    @classmethod
    def of(cls, *arguments: Any) -> _Arguments:
        found = cls(*arguments)
        if found.start is None or found.stop is None:
            return found
        return found._replace(start=found.start.contiguous(), stop=found.stop.contiguous())

    @property
    def mask(self) -> IntervalMask | None:
        return MaskArguments(*self[3:8]).mask()

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return self.query, self.key, self.value, self.bias, self.dense, self.start, self.stop

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self.inputs, *self[10:14]

    def call(self) -> AttentionCall:
        """The checked call."""
        options = Options(*self[14:19])
        if self.cu_seqlens_q is not None:
            return varlen_call(self.query, self.key, self.value, Packing(*self[10:14]), self.mask, self.bias, options)
        masks = tuple([mask for mask in (self.mask, self.dense) if mask is not None])
        return attention_call(self.query, self.key, self.value, masks, self.bias, options)

    def call_key(self) -> entry.CallKey | None:
        if self.dense is not None and self.dense.shape[-2:-1] in ((), (1,)):  # invalid, or becomes an interval mask
            return None
        bound = None if self.bound is None else tuple(self.bound)
        return entry.operator_key(self.tensors, (self.starts, bound, self.causal_only, *self[14:20]), self.keep)


def _attention(*arguments):
    given = _Arguments.of(*arguments)
    found = entry.found_entry(given)
    if found is None:
        with torch.no_grad():
            call = given.call()
            module = backends.choose(given.backend, (call.query,))
            found = entry.made_entry(given, call, module)
            if found is None:
                return *results_of(call, *run_attend(call, module)), entry.nothing_made(given.query)
    return entry.run_operator(found, given.tensors)


def _attention_backward(dout, dlse, out, lse, made, *arguments):
    given, needs = _Arguments.of(*arguments[:-1]), arguments[-1]
    known, found = entry.found_entry(given), None
    if known is not None and made.numel() == known.chain.kept_words:
        needed = tuple([name in needs for name in INPUTS[:4]])
        found = entry.backward_operator(known, given.inputs, out, lse, made, dout, dlse, needed)
    if found is not None:
        return [found[INPUTS.index(name)] for name in needs]
    with torch.no_grad():
        call = given.call()
        return gradients_of(call, dout, dlse, out, lse, backends.choose(given.backend, (call.query,)), needs)


def _fake_attention(*arguments):
    given = _Arguments.of(*arguments)
    size = entry.size_of_made(given, given.tensors, 0) if given.keep else 0
    return *fake_results(given.query, given.value), given.query.new_empty((size,), dtype=torch.int32)


def fake_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    *batch, length, heads, _ = query.shape
    return (query.new_empty((*batch, length, heads, value.shape[-1])),
            query.new_empty((*batch, heads, length), dtype=wide(query)))


def _fake_attention_backward(dout, dlse, out, lse, made, query, key, value, *rest):
    return empty_like({"query": query, "key": key, "value": value, "bias": rest[6]}, rest[-1])


_MASK = "Tensor? start, Tensor? stop, str? starts, SymInt[]? bound, bool causal_only"
OPTIONS = "bool causal, float? scale, float softcap, bool deterministic, int bias_delay, str? backend"
SEQUENCES = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? block_table"
NOT_PACKED = (None,) * 4
_ARGUMENTS = (f"Tensor query, Tensor key, Tensor value, {_MASK}, Tensor? dense, Tensor? bias, {SEQUENCES}, {OPTIONS}, "
              "bool keep")
register(f"attention({_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor made)", _attention, _fake_attention)
register(f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor made, {_ARGUMENTS}, "
         "str[] needs) -> Tensor[]", _attention_backward, _fake_attention_backward)
register_derivative("attention", {0: "query", 1: "key", 2: "value", 9: "bias"}, keeps_outputs=True)
