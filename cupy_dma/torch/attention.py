"""Attention in torch.

    attention -> out, lse           attention_backward -> the gradients named in ``needs``, in that order

``cupy_dma.attention`` and the other public functions delegate to these for torch tensors; calling these directly is
equivalent. Under autocast query, key and value are cast to its type, except float64; scores, biases and score
parameters keep theirs. ``torch.use_deterministic_algorithms`` is respected. An interval mask is passed to an operator
as its two tensors and its hints.
"""
from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cupy_dma import backends, checks
from cupy_dma.arrays import library_named
from cupy_dma.calls.attention import attention_call, dynamic_call, not_padding
from cupy_dma.calls.gradients import INPUTS, attention_gradients
from cupy_dma.calls.layout import in_bhnd, is_ours
from cupy_dma.calls.mask import intersect, masks_in
from cupy_dma.calls.run import attend as run_attend
from cupy_dma.calls.run import attended, attention_of, masked
from cupy_dma.calls.types import AttentionCall, DynamicCall
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.selection import selection_hints
from cupy_dma.torch import steps
from cupy_dma.torch.gradients import Facts, MadeMask, MaskArguments, Saved, check_saved, described, gradients
from cupy_dma.torch.registration import (
    Options,
    as_tensor,
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
from cupy_dma.torch.scores import scores_by
from cupy_dma.torch.sinks import check_sinks, delivered


def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Any = None,
              bias: Tensor | None = None, causal: bool = False, scale: float | None = None, softcap: float = 0.0,
              sink_logits: Tensor | None = None, deterministic: bool = False, return_lse: bool = False,
              layout: str | None = None, backend: str | None = None) -> Any:
    """``cupy_dma.attention`` of tensors ``(B, L, H, D)``, or ``(B, H, L, D)`` with ``layout="bhnd"``, with gradients
    for ``query, key, value``, ``bias`` and ``sink_logits``, through ``out`` and ``lse``."""
    if not is_ours(layout):
        return in_bhnd(attention, (("query", query), ("key", key), ("value", value)), mask=mask, bias=bias,
                       causal=causal, scale=scale, softcap=softcap, sink_logits=sink_logits,
                       deterministic=deterministic, return_lse=return_lse, backend=backend)
    if sink_logits is not None:
        check_sinks(sink_logits, query)
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        query, key, value = cast(query, key, value)
    inputs = query, key, value, bias
    kind = steps.kind_of(inputs, mask, ("attention", causal, scale, softcap, deterministic, layout, backend))
    if kind is not None and kind.plans is not None:
        return delivered(*steps.run(kind, mask, inputs), return_lse, sink_logits)
    bias = in_rows(bias)
    if takes_operators(query, key, value, bias):
        given = masks_in(mask)
        if len(given) == 1:
            interval, dense = (given[0], None) if isinstance(given[0], IntervalMask) else (None, given[0])
        else:
            for item in given:
                if not isinstance(item, IntervalMask) and item.ndim == 2:
                    not_padding(item.shape, query.shape[0], query.shape[1], key.shape[1])
            interval, dense = intersect(given, key.shape[1], key.shape[2], query.shape[2])
        out, lse = operators.attention(query, key, value, *MaskArguments.of(interval), dense, bias,
                                       *options_of(causal, scale, softcap, deterministic, backend))
    else:
        call = attention_call(query, key, value, mask, bias, causal, scale, softcap, is_deterministic(deterministic),
                              layout)
        module = backends.choose(backend, (call.query,))
        known = bias is inputs[3] and call.value_dim == call.head_dim
        kind = steps.recorded(kind if known else None, call, module, backend, inputs)
        if kind is not None and kind.plans is not None:
            out, lse = steps.run(kind, mask, inputs)
        else:
            out, lse, _ = attend(call, module, backend, (query, key, value, bias), masks_in(mask))
            steps.learn(kind, call, module, backend, inputs)
    return delivered(out, lse, return_lse, sink_logits)


def dynamic_mask_attention(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None, *, window: int,
                           dt_proj: Tensor | None = None, A: Tensor | None = None, dt_bias: Tensor | None = None,
                           form: str = "exp", keys: str = "prefix", padding: Tensor | None = None,
                           documents: Tensor | None = None, causal: bool = True, scale: float | None = None,
                           softcap: float = 0.0, sink_logits: Tensor | None = None, deterministic: bool = False,
                           return_lse: bool = False, layout: str | None = None, backend: str | None = None) -> Any:
    """``cupy_dma.dynamic_mask_attention`` of tensors ``(B, L, H, D)``, or ``(B, H, L, D)`` with ``layout="bhnd"``, with
    gradients for ``query, key, value``, ``scores`` and ``sink_logits``, or through the scores for ``value`` (both
    terms), ``dt_proj``, ``A`` and ``dt_bias``."""
    if not is_ours(layout):
        return in_bhnd(dynamic_mask_attention, (("query", query), ("key", key), ("value", value)), scores,
                       window=window, dt_proj=dt_proj, A=A, dt_bias=dt_bias, form=form, keys=keys, padding=padding,
                       documents=documents, causal=causal, scale=scale, softcap=softcap, sink_logits=sink_logits,
                       deterministic=deterministic, return_lse=return_lse, backend=backend)
    if sink_logits is not None:
        check_sinks(sink_logits, query)
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        query, key, value = cast(query, key, value)
    inputs, kind = (query, key, value, scores, dt_proj, A, dt_bias), None
    if documents is None and (padding is None or getattr(padding, "dtype", None) is torch.bool):
        options = ("dynamic", window, form, keys, causal, scale, softcap, deterministic, layout, backend)
        kind = steps.kind_of((*inputs, padding), None, options)
        if kind is not None and kind.plans is not None and not checks.wants_values_checked():
            return delivered(*steps.run(kind, None, inputs, padding), return_lse, sink_logits)
    scores = in_rows(scores)
    if takes_operators(query, key, value, scores, dt_proj, A, dt_bias, padding, documents):
        documents = as_tensor(documents, query)
        if scores is None:
            scores = operators.key_scores(value, dt_proj, A, dt_bias, form, backend)
        start, stop = operators.top_w(scores.detach(), window, keys, padding, documents, backend)
        hints = selection_hints(window, key.shape[1], keys, padding is not None, documents is not None)
        out, lse = operators.attention(
            query, key, value, start, stop, *hints, None, scores,
            *options_of(causal and keys == "global", scale, softcap, deterministic, backend))
    else:
        call = dynamic_call(query, key, value, scores, window, dt_proj, A, dt_bias, form, keys, padding, documents,
                            causal, scale, softcap, is_deterministic(deterministic), layout)
        module = backends.choose(backend, (call.attention.query,))
        known = (scores is inputs[3] and not checks.wants_values_checked()
                 and call.attention.value_dim == call.attention.head_dim)
        kind = steps.recorded(kind if known else None, call, module, backend, inputs)
        if kind is not None and kind.plans is not None:
            out, lse = steps.run(kind, None, inputs, padding)
        else:
            out, lse, plannable = attend_dynamic(call, module, backend, query, key, value, scores)
            steps.learn(kind if plannable else None, call, module, backend, inputs)
    return delivered(out, lse, return_lse, sink_logits)


def attend_dynamic(call: DynamicCall, module: ModuleType, backend: str | None, query: Tensor, key: Tensor,
                   value: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """``attend`` for a checked dynamic call on these tensors."""
    if call.attention.sequences is None:
        parameters = [None if x is None else x.array for x in (call.recipe or (None,) * 4)[1:4]]
        return attend(call, module, backend, (query, key, value, scores, *parameters))
    ranked = call.scores
    if ranked is None:
        assert call.recipe is not None
        made = scores_by(call.recipe, module, backend)
        scores, ranked = made[0], library_named("torch").operand(made, "scores")
    with torch.no_grad():
        attention = masked(call, ranked, module)
    return attend(attention, module, backend, (query, key, value, scores))


def attend(call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None,
           inputs: tuple[Tensor | None, ...], given: tuple[Any, ...] = ()) -> tuple[Tensor, Tensor, bool]:
    """``out, lse`` of a checked call on ``module``, the backend of that name, with gradients for ``inputs``: its query,
    key, value and bias, or scores, and the parameters of scores to be computed. And whether such calls can be planned
    (``steps.py``): not if the backend did without a mask. ``given``: the caller's masks."""
    if needs_grad(*inputs):
        return *_Attention.apply(call, module, backend, given, *inputs), True
    if isinstance(call, DynamicCall):
        return attended(call, module)
    return *_results(call, module), True


def _results(call: AttentionCall, module: ModuleType) -> tuple[Tensor, Tensor]:
    out, lse = run_attend(call, module)
    return (out, lse) if call.sequences is None else (out[0], lse[0])


class _Attention(torch.autograd.Function):
    """Attention of a checked call. All tensors that the backward needs are saved through autograd, so that it frees
    them and saved-tensor hooks (checkpointing, offloading) see them: arguments, results, and what the call has made,
    which are its mask, the key lists of that mask and its scores. A mask of the caller's keeps its own key lists."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall | DynamicCall, module: ModuleType, backend: str | None,
                given: tuple[Any, ...], *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        own = attention_of(call, module) if isinstance(call, DynamicCall) else call
        out, lse = _results(own, module)
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
        ctx.facts = Facts(mask, (own.causal, own.scale, own.softcap, own.deterministic),
                          None if recipe is None else recipe[4], module, backend, own.sequences)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        tensors, facts, count = ctx.saved_tensors, ctx.facts, len(Saved._fields)
        check_saved(tensors, ctx.saved)
        if ctx.made_mask is not None:
            facts = facts._replace(mask=ctx.made_mask.mask(*tensors[count:]))
        return None, None, None, None, *gradients(facts, Saved(*tensors[:count]), dout, dlse, ctx.needs_input_grad[4:])


def gradients_of(call: AttentionCall, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
                 module: ModuleType, needs: Sequence[str]) -> list[Tensor]:
    """The gradients named in ``needs``."""
    operand = library_named("torch").operand
    upstream = (operand(dout, "dout"), operand(out, "out"), operand(lse, "lse"),
                None if dlse is None else operand(dlse, "dlse"))
    found = attention_gradients(call, upstream, frozenset(needs), module)
    return [gradient for name, gradient in zip(INPUTS, found) if name in needs]


# ---- operators ------------------------------------------------------------------------------------------------------


def _masks(interval: MaskArguments, dense: Tensor | None) -> tuple[Any, ...]:
    return tuple(mask for mask in (interval.mask(), dense) if mask is not None)


def _attention(query, key, value, start, stop, starts, bound, causal_only, dense, bias, *options):
    masks, options = _masks(MaskArguments(start, stop, starts, bound, causal_only), dense), Options(*options)
    call = attention_call(query, key, value, masks, bias, *options[:4])
    return run_attend(call, backends.choose(options.backend, (call.query,)))


def _attention_backward(dout, dlse, out, lse, query, key, value, start, stop, starts, bound, causal_only, dense, bias,
                        causal, scale, softcap, deterministic, backend, needs):
    masks = _masks(MaskArguments(start, stop, starts, bound, causal_only), dense)
    with torch.no_grad():
        call = attention_call(query, key, value, masks, bias, causal, scale, softcap, deterministic)
        return gradients_of(call, dout, dlse, out, lse, backends.choose(backend, (call.query,)), needs)


def _fake_attention(query, key, value, *rest):
    batch, length, heads, _ = query.shape
    lse = query.new_empty((batch, heads, length), dtype=wide(query))
    return query.new_empty((batch, length, heads, value.shape[3])), lse


def _fake_attention_backward(dout, dlse, out, lse, query, key, value, *rest):
    return empty_like({"query": query, "key": key, "value": value, "bias": rest[6]}, rest[-1])


MASK = "Tensor? start, Tensor? stop, str? starts, SymInt[]? bound, bool causal_only"
OPTIONS = "bool causal, float? scale, float softcap, bool deterministic, str? backend"
_ARGUMENTS = f"Tensor query, Tensor key, Tensor value, {MASK}, Tensor? dense, Tensor? bias, {OPTIONS}"
register(f"attention({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _attention, _fake_attention)
register(f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_ARGUMENTS}, str[] needs) "
         "-> Tensor[]", _attention_backward, _fake_attention_backward)
register_derivative("attention", {0: "query", 1: "key", 2: "value", 9: "bias"}, keeps_outputs=True)
