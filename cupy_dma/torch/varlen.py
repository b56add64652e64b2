"""Packed sequences in torch: differentiable functions, the operators under them and their derivatives.

    varlen_attention -> out, lse            varlen_attention_backward -> the gradients named in ``needs``, in that order
    varlen_top_w -> start, stop             (no gradient)

As in ``functions.py``, ``operators.py`` and ``autograd.py``, with the sequences as tensors behind the options.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cupy_dma import backends, backward, checks
from cupy_dma.arrays import library_named
from cupy_dma.backward import AttentionGradients
from cupy_dma.calls import varlen as public
from cupy_dma.calls.run import run_varlen
from cupy_dma.masks.interval import Hints, IntervalMask
from cupy_dma.masks.selection import selection_hints
from cupy_dma.torch.autograd import _autograd_kernel, _below, _is_plain, _refusing
from cupy_dma.torch.functions import _are_tensors, _cast, _options
from cupy_dma.torch.operators import _STRIDES, LIBRARY, _new_like, _wide

_SEQUENCES = "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? block_table"
_VARLEN = (f"Tensor query, Tensor key, Tensor value, Tensor? start, Tensor? stop, str? starts, SymInt[]? bound, "
           f"bool causal_only, Tensor? bias, bool causal, float? scale, float softcap, bool deterministic, "
           f"str? backend, {_SEQUENCES}")
for _schema in (
        f"varlen_attention({_VARLEN}) -> (Tensor out, Tensor lse)",
        f"varlen_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_VARLEN}, str[] needs) "
        f"-> Tensor[]",
        f"varlen_top_w(Tensor query, Tensor key, Tensor scores, SymInt window, str keys, str? backend, {_SEQUENCES}) "
        f"-> (Tensor start, Tensor stop)"):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag, _STRIDES))
_operators = torch.ops.cupy_dma
_BIAS = 8  # its place among the arguments of varlen_attention; query, key and value are the first three


# ---- functions ------------------------------------------------------------------------------------------------------


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, *,
                     mask: IntervalMask | None = None, bias: Tensor | None = None, causal: bool = False,
                     scale: float | None = None, softcap: float = 0.0, deterministic: bool = False,
                     return_lse: bool = False, block_table: Tensor | None = None, seqused_k: Tensor | None = None,
                     max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                     backend: str | None = None) -> Any:
    """``cupy_dma.varlen_attention`` with gradients for ``query, key, value`` and ``bias``, through ``out`` and
    ``lse``."""
    query, key, value = _cast(query, key, value)
    sequences = cu_seqlens_q, cu_seqlens_k, seqused_k, block_table
    is_known = mask is None or (isinstance(mask, IntervalMask) and mask.library.name == "torch")
    if not (is_known and _are_tensors(query, key, value, bias, *sequences)):  # all else the operator checks
        public.varlen_call(query, key, value, cu_seqlens_q, cu_seqlens_k, mask, bias, causal, scale, softcap,
                           deterministic, block_table, seqused_k)
    _check_lengths(max_seqlen_q, max_seqlen_k)
    parts = (None,) * 4 + (False,) if mask is None else (mask._start.array, mask._stop.array, *mask._hints)
    out, lse = _operators.varlen_attention(query, key, value, *parts, bias,
                                           *_options(causal, scale, softcap, deterministic, backend), *sequences)
    return (out, lse) if return_lse else out


def varlen_dynamic_mask_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
                                  cu_seqlens_k: Tensor | None, scores: Tensor | None = None, *, window: int,
                                  dt_proj: Tensor | None = None, A: Tensor | None = None,
                                  dt_bias: Tensor | None = None, form: str = "exp", keys: str = "prefix",
                                  causal: bool = True, scale: float | None = None, softcap: float = 0.0,
                                  deterministic: bool = False, return_lse: bool = False,
                                  block_table: Tensor | None = None, seqused_k: Tensor | None = None,
                                  max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                                  backend: str | None = None) -> Any:
    """``cupy_dma.varlen_dynamic_mask_attention`` with gradients for ``query, key, value`` and ``scores``, or through
    the scores for ``value`` (both parts), ``dt_proj``, ``A`` and ``dt_bias``."""
    query, key, value = _cast(query, key, value)
    sequences = cu_seqlens_q, cu_seqlens_k, seqused_k, block_table
    cut = public.check_dynamic(window, keys, causal, scores, dt_proj, A, dt_bias, block_table)
    if not _are_tensors(query, key, value, scores, dt_proj, A, dt_bias, *sequences):
        call = public.varlen_call(query, key, value, cu_seqlens_q, cu_seqlens_k, None, None, cut, scale, softcap,
                                  deterministic, block_table, seqused_k)
        if scores is not None:
            public.scores_and_bias(scores, call)
    _check_lengths(max_seqlen_q, max_seqlen_k)
    if scores is None:
        scores = _operators.key_scores(value[None], dt_proj, A, dt_bias, form, backend)[0]
    start, stop = _operators.varlen_top_w(query.detach(), key.detach(), scores.detach(), window, keys, backend,
                                          *sequences)
    hints = selection_hints(window, scores.shape[-1], keys, keys == "global", False)
    out, lse = _operators.varlen_attention(
        query, key, value, start, stop, *hints, scores,
        *_options(cut and keys == "global", scale, softcap, deterministic, backend), *sequences)
    return (out, lse) if return_lse else out


def _check_lengths(*lengths: int | None) -> None:
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), lengths):
        if length is not None and not torch.compiler.is_compiling():
            checks.whole(length, name, 0)


# ---- operators ------------------------------------------------------------------------------------------------------


def _mask(start: Tensor | None, stop: Tensor | None, starts: str | None, bound: Sequence[int] | None,
          causal_only: bool) -> IntervalMask | None:
    if start is None or stop is None:
        return None
    limit = None if bound is None else (bound[0], bound[1])
    return IntervalMask._make(library_named("torch"), start, stop, Hints(starts, limit, causal_only))


def _attention(query, key, value, start, stop, starts, bound, causal_only, bias, causal, scale, softcap,
               deterministic, backend, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table):
    call = public.varlen_call(query, key, value, cu_seqlens_q, cu_seqlens_k,
                              _mask(start, stop, starts, bound, causal_only), bias, causal, scale, softcap,
                              deterministic, block_table, seqused_k)
    return run_varlen(call, True, backends.choose(backend, (call.query,)))


def _attention_backward(dout, dlse, out, lse, query, key, value, start, stop, starts, bound, causal_only, bias, causal,
                        scale, softcap, deterministic, backend, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table,
                        needs):
    with torch.no_grad():
        found = backward.varlen_attention_backward(
            dout, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k,
            mask=_mask(start, stop, starts, bound, causal_only), bias=bias, causal=causal, scale=scale,
            softcap=softcap, deterministic=deterministic, dlse=dlse, block_table=block_table, seqused_k=seqused_k,
            needs=needs, backend=backend)
    return [getattr(found, name) for name in needs]


def _top_w(query, key, scores, window, keys, backend, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table):
    call = public.varlen_call(query, key, key, cu_seqlens_q, cu_seqlens_k, None, None, False, None, 0.0, False,
                              block_table, seqused_k)
    ranked, _ = public.scores_and_bias(scores, call)
    mask = public.select_keys(ranked, window, keys, call, backends.choose(backend, (call.query,)))
    return mask._start.array, mask._stop.array


def _fake_attention(query, *rest):
    total, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, total), dtype=_wide(query))


def _fake_attention_backward(dout, dlse, out, lse, query, key, value, *rest):
    return _new_like({"query": query, "key": key, "value": value, "bias": rest[5]}, rest[-1])


def _fake_top_w(query, key, scores, *rest):
    n, shape = scores.shape[-1], (1, *scores.shape)[-3:]
    return scores.new_empty((1, 1, n), dtype=torch.int32), scores.new_empty(shape, dtype=torch.int32)


for _name, _kernel, _fake in (("varlen_attention", _attention, _fake_attention),
                              ("varlen_attention_backward", _attention_backward, _fake_attention_backward),
                              ("varlen_top_w", _top_w, _fake_top_w)):
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)
    torch.library.register_fake(f"cupy_dma::{_name}", _fake, lib=LIBRARY)


# ---- derivatives ----------------------------------------------------------------------------------------------------


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = _below(_operators.varlen_attention.default, keys, arguments)
        ctx.save_for_backward(out, lse, *arguments[:5], arguments[_BIAS], *arguments[-4:])
        ctx.hints, ctx.options = arguments[5:_BIAS], arguments[_BIAS + 1:-4]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        out, lse, query, key, value, start, stop, bias, *sequences = ctx.saved_tensors
        found: list[Tensor | None] = [None] * (1 + _BIAS + 1 + len(ctx.options) + len(sequences))
        if dout is None and dlse is None:
            return tuple(found)
        dout = torch.zeros_like(out) if dout is None else dout
        places = [place for place in (0, 1, 2, _BIAS) if ctx.needs_input_grad[place + 1]]
        names = [AttentionGradients._fields[min(place, 3)] for place in places]
        run: Any = _attention_backward if _is_plain(dout) else _operators.varlen_attention_backward
        gradients = run(dout, dlse, out, lse, query, key, value, start, stop, *ctx.hints, bias, *ctx.options,
                        *sequences, names)
        for place, gradient in zip(places, gradients):
            found[place + 1] = gradient
        return tuple(found)


for _name, _apply in (("varlen_attention", _VarlenAttention.apply),
                      ("varlen_attention_backward", _refusing(_operators.varlen_attention_backward.default))):
    LIBRARY.impl(_name, _autograd_kernel(getattr(_operators, _name).default, _apply), "Autograd", with_keyset=True)
