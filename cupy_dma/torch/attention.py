"""Attention in torch.

    attention -> out, lse           attention_backward -> the gradients named in ``needs``, in that order

``cupy_dma.attention`` and the other public functions delegate to these when a tensor requires grad, under autocast and
under ``torch.compile``; calling these directly is equivalent. Under autocast query, key and value are cast to its type,
except float64; scores, biases and score parameters keep theirs. ``torch.use_deterministic_algorithms`` is respected. An
interval mask is passed to an operator as its two tensors and its hints.
"""
from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma import backends, checks
from cupy_dma.arrays import Operand, library_named
from cupy_dma.calls.attention import attention_call, dynamic_call, not_padding
from cupy_dma.calls.gradients import attention_gradients
from cupy_dma.calls.layout import in_bhnd, is_ours
from cupy_dma.calls.mask import intersect, masks_in
from cupy_dma.calls.run import masked
from cupy_dma.calls.sequences import Sequences
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.runs import Hints
from cupy_dma.masks.selection import selection_hints
from cupy_dma.torch.registration import (
    Options,
    as_tensor,
    cast,
    empty_like,
    in_rows,
    is_deterministic,
    is_plain_gradient,
    needs_grad,
    operators,
    options_of,
    register,
    register_derivative,
    takes_operators,
    wide,
)
from cupy_dma.torch.scores import scores_by

INPUTS = ("query", "key", "value", "bias")


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


def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Any = None,
              bias: Tensor | None = None, causal: bool = False, scale: float | None = None, softcap: float = 0.0,
              deterministic: bool = False, return_lse: bool = False, layout: str | None = None,
              backend: str | None = None) -> Any:
    """``cupy_dma.attention`` of tensors ``(B, L, H, D)``, or ``(B, H, L, D)`` with ``layout="bhnd"``, with gradients
    for ``query, key, value`` and ``bias``, through ``out`` and ``lse``."""
    if not is_ours(layout):
        return in_bhnd(attention, (("query", query), ("key", key), ("value", value)), mask=mask, bias=bias,
                       causal=causal, scale=scale, softcap=softcap, deterministic=deterministic,
                       return_lse=return_lse, backend=backend)
    query, key, value = cast(query, key, value)
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
        out, lse = attend(call, backends.choose(backend, (call.query,)), backend, (query, key, value, bias))
    return (out, lse) if return_lse else out


def dynamic_mask_attention(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None, *, window: int,
                           dt_proj: Tensor | None = None, A: Tensor | None = None, dt_bias: Tensor | None = None,
                           form: str = "exp", keys: str = "prefix", padding: Tensor | None = None,
                           documents: Tensor | None = None, causal: bool = True, scale: float | None = None,
                           softcap: float = 0.0, deterministic: bool = False, return_lse: bool = False,
                           layout: str | None = None, backend: str | None = None) -> Any:
    """``cupy_dma.dynamic_mask_attention`` of tensors ``(B, L, H, D)``, or ``(B, H, L, D)`` with ``layout="bhnd"``, with
    gradients for ``query, key, value`` and ``scores``, or through the scores for ``value`` (both terms), ``dt_proj``,
    ``A`` and ``dt_bias``."""
    if not is_ours(layout):
        return in_bhnd(dynamic_mask_attention, (("query", query), ("key", key), ("value", value)), scores,
                       window=window, dt_proj=dt_proj, A=A, dt_bias=dt_bias, form=form, keys=keys, padding=padding,
                       documents=documents, causal=causal, scale=scale, softcap=softcap, deterministic=deterministic,
                       return_lse=return_lse, backend=backend)
    query, key, value = cast(query, key, value)
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
        out, lse = attend_dynamic(call, backend, query, key, value, scores)
    return (out, lse) if return_lse else out


def attend_dynamic(call: DynamicCall, backend: str | None, query: Tensor, key: Tensor, value: Tensor,
                   scores: Tensor | None) -> tuple[Tensor, Tensor]:
    """``out, lse`` of a checked dynamic call on these tensors, with their gradients."""
    module = backends.choose(backend, (call.attention.query,))
    ranked = call.scores
    if ranked is None:
        assert call.recipe is not None
        made = scores_by(call.recipe, module, backend)
        scores, ranked = made if call.attention.sequences is None else made[0], library_named("torch").operand(
            made, "scores")
    with torch.no_grad():
        attention = masked(call, ranked, module)
    return attend(attention, module, backend, (query, key, value, scores))


def attend(call: AttentionCall, module: ModuleType, backend: str | None,
           inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    """``out, lse`` of a checked call on ``module``, the backend of that name, with gradients for its query, key, value
    and bias, ``inputs``."""
    if needs_grad(*inputs):
        return _Attention.apply(call, module, backend, *inputs)
    return _attended(call, module)


def _attended(call: AttentionCall, module: ModuleType) -> tuple[Tensor, Tensor]:
    out, lse = module.attention(call)
    return (out, lse) if call.sequences is None else (out[0], lse[0])


class _Attention(torch.autograd.Function):
    """Attention of a checked call. The context keeps the call's options and its mask, including the key lists that
    backends have cached on it; tensors are saved through autograd only, so that saved-tensor hooks (checkpointing,
    offloading) see all of them."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, module: ModuleType, backend: str | None,
                *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = _attended(call, module)
        ctx.save_for_backward(out, lse, *inputs, None if call.dense is None else call.dense.array)
        ctx.mask, ctx.sequences, ctx.module, ctx.backend = call.mask, call.sequences, module, backend
        ctx.options = call.causal, call.scale, call.softcap, call.deterministic
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        found: dict[str, Tensor] = {}
        if dout is not None or dlse is not None:
            out, lse, query, key, value, bias, dense = ctx.saved_tensors
            upstream = torch.zeros_like(out) if dout is None else dout, dlse, out, lse
            needs = [name for name, needed in zip(INPUTS, ctx.needs_input_grad[3:]) if needed]
            if is_plain_gradient(upstream[0]):
                call = _call_of(query, key, value, ctx.mask, dense, bias, ctx.options, ctx.sequences)
                found = dict(zip(needs, gradients_of(call, *upstream, ctx.module, needs)))
            else:
                arguments = (*upstream, query, key, value, *MaskArguments.of(ctx.mask))
                options = (bias, *ctx.options, ctx.backend)
                if ctx.sequences is None:
                    made = operators.attention_backward(*arguments, dense, *options, needs)
                else:
                    made = operators.varlen_attention_backward(*arguments, *options, *ctx.sequences.given, needs)
                found = dict(zip(needs, made))
        return None, None, None, *(found.get(name) for name in INPUTS)


def _call_of(query: Tensor, key: Tensor, value: Tensor, mask: IntervalMask | None, dense: Tensor | None,
             bias: Tensor | None, options: tuple[bool, float, float, bool],
             sequences: Sequences | None = None) -> AttentionCall:
    """The call for tensors that the forward has checked."""
    operand = library_named("torch").operand

    def of(tensor: Tensor, name: str) -> Operand:
        return operand(tensor, name) if tensor.ndim == 4 else checks.with_axes(operand(tensor, name), 4)

    added = None
    if bias is not None:
        added = operand(bias, "bias")
        added = checks.with_axes(added, 4) if bias.ndim == 4 else key_bias(checks.with_axes(added, 3))
    shown = None if dense is None else checks.with_axes(operand(dense, "mask"), 4)
    return AttentionCall(of(query, "query"), of(key, "key"), of(value, "value"), mask, shown, added, *options,
                         sequences)


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
    return backends.choose(options.backend, (call.query,)).attention(call)


def _attention_backward(dout, dlse, out, lse, query, key, value, start, stop, starts, bound, causal_only, dense, bias,
                        causal, scale, softcap, deterministic, backend, needs):
    masks = _masks(MaskArguments(start, stop, starts, bound, causal_only), dense)
    with torch.no_grad():
        call = attention_call(query, key, value, masks, bias, causal, scale, softcap, deterministic)
        return gradients_of(call, dout, dlse, out, lse, backends.choose(backend, (call.query,)), needs)


def _fake_attention(query, *rest):
    batch, length, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((batch, heads, length), dtype=wide(query))


def _fake_attention_backward(dout, dlse, out, lse, query, key, value, *rest):
    return empty_like({"query": query, "key": key, "value": value, "bias": rest[6]}, rest[-1])


MASK = "Tensor? start, Tensor? stop, str? starts, SymInt[]? bound, bool causal_only"
OPTIONS = "bool causal, float? scale, float softcap, bool deterministic, str? backend"
_ARGUMENTS = f"Tensor query, Tensor key, Tensor value, {MASK}, Tensor? dense, Tensor? bias, {OPTIONS}"
register(f"attention({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _attention, _fake_attention)
register(f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_ARGUMENTS}, str[] needs) "
         "-> Tensor[]", _attention_backward, _fake_attention_backward)
register_derivative("attention", {0: "query", 1: "key", 2: "value", 9: "bias"}, keeps_outputs=True)
