"""Packed sequences in torch.

    varlen_attention -> out, lse            varlen_attention_backward -> the gradients named in ``needs``, in that order
    varlen_top_w -> start, stop             (no gradient)

As ``attention.py``, with the tensors that describe the sequences after the options.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cupy_dma import backends, checks
from cupy_dma.calls.options import Options, Packing, Selection
from cupy_dma.calls.run import attend as run_attend
from cupy_dma.calls.varlen import candidates_of, scores_of_keys, varlen_call, varlen_dynamic_call
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.selection import selection_hints
from cupy_dma.masks.windows import window_of
from cupy_dma.torch.attention import MASK, OPTIONS, attend, gradients_of
from cupy_dma.torch.dynamic import attend_dynamic
from cupy_dma.torch.gradients import MaskArguments
from cupy_dma.torch.registration import (
    as_tensor,
    cast,
    empty_like,
    from_list,
    in_rows,
    is_deterministic,
    listed,
    operators,
    options_of,
    register,
    register_derivative,
    takes_operators,
    wide,
)
from cupy_dma.torch.sinks import check_sinks, delivered


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, *,
                     mask: IntervalMask | None = None, bias: Tensor | None = None, bias_delay: int = 0,
                     causal: bool = False, scale: float | None = None, softcap: float = 0.0,
                     sink_logits: Tensor | None = None, deterministic: bool = False, return_lse: bool = False,
                     block_table: Tensor | None = None, seqused_k: Tensor | None = None,
                     max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, tail_padding: bool = False,
                     backend: str | None = None) -> Any:
    """``cupy_dma.varlen_attention`` with gradients for ``query, key, value``, ``bias`` and ``sink_logits``, through
    ``out`` and ``lse``."""
    if sink_logits is not None:
        check_sinks(sink_logits, query)
    query, key, value = cast(query, key, value)
    bias, sequences = in_rows(bias), (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    if takes_operators(query, key, value, bias, *sequences):
        sequences = _as_tensors(query, sequences)
        _check_lengths(max_seqlen_q, max_seqlen_k)
        out, lse = operators.varlen_attention(query, key, value, *MaskArguments.of(mask), bias,
                                              *options_of(causal, scale, softcap, deterministic, bias_delay, backend),
                                              *sequences)
    else:
        packing = Packing(*sequences, max_seqlen_q, max_seqlen_k, tail_padding)
        call = varlen_call(query, key, value, packing, mask, bias,
                           Options(causal, scale, softcap, is_deterministic(deterministic), bias_delay))
        out, lse, _ = attend(call, backends.choose(backend, (call.query,)), backend, (query, key, value, bias),
                             (mask,))
    return delivered(out, lse, return_lse, sink_logits)


def varlen_dynamic_mask_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
                                  cu_seqlens_k: Tensor | None, scores: Tensor | None = None, *,
                                  window: int | Sequence[int],
                                  dt_proj: Tensor | None = None, A: Tensor | None = None,
                                  dt_bias: Tensor | None = None, form: str = "exp", keys: str = "prefix",
                                  bias_delay: int = 0, causal: bool = True, scale: float | None = None,
                                  softcap: float = 0.0, sink_logits: Tensor | None = None,
                                  deterministic: bool = False, return_lse: bool = False,
                                  block_table: Tensor | None = None, seqused_k: Tensor | None = None,
                                  max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                                  tail_padding: bool = False, backend: str | None = None) -> Any:
    """``cupy_dma.varlen_dynamic_mask_attention`` with gradients for ``query, key, value``, ``scores`` and
    ``sink_logits``, or through the scores for ``value`` (both terms), ``dt_proj``, ``A`` and ``dt_bias``."""
    if sink_logits is not None:
        check_sinks(sink_logits, query)
    query, key, value = cast(query, key, value)
    scores, sequences = in_rows(scores), (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    selection = Selection(scores, window, dt_proj, A, dt_bias, form, keys)
    if takes_operators(query, key, value, scores, dt_proj, A, dt_bias, *sequences):
        sequences = _as_tensors(query, sequences)
        window, cut = selection.checked(causal)
        _check_lengths(max_seqlen_q, max_seqlen_k)
        if scores is None:
            scores = operators.key_scores(value[None], dt_proj, A, dt_bias, form, backend)[0]
        start, stop = operators.varlen_top_w(query.detach(), key.detach(), scores.detach(), listed(window), keys,
                                             backend, *sequences)
        hints = selection_hints(window, scores.shape[-1], keys, keys == "global", False)
        out, lse = operators.varlen_attention(query, key, value, start, stop, *hints, scores,
                                              *options_of(cut, scale, softcap, deterministic, bias_delay, backend),
                                              *sequences)
    else:
        packing = Packing(*sequences, max_seqlen_q, max_seqlen_k, tail_padding)
        call = varlen_dynamic_call(query, key, value, packing, selection,
                                   Options(causal, scale, softcap, is_deterministic(deterministic), bias_delay))
        module = backends.choose(backend, (call.attention.query,))
        out, lse, _ = attend_dynamic(call, module, backend, query, key, value, scores)
    return delivered(out, lse, return_lse, sink_logits)


def _as_tensors(like: Tensor, sequences: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists as int32 tensors on ``like``'s device."""
    return tuple([as_tensor(x, like) for x in sequences])


def _check_lengths(*lengths: int | None) -> None:
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), lengths):
        if length is not None and not torch.compiler.is_compiling():
            checks.whole(length, name, 0)


# ---- operators ------------------------------------------------------------------------------------------------------


def _call(query, key, value, start, stop, starts, bound, causal_only, bias, causal, scale, softcap, deterministic,
          bias_delay, *sequences):
    mask = MaskArguments(start, stop, starts, bound, causal_only).mask()
    return varlen_call(query, key, value, Packing(*sequences), mask, bias,
                       Options(causal, scale, softcap, deterministic, bias_delay))


def _attention(query, key, value, start, stop, starts, bound, causal_only, bias, causal, scale, softcap,
               deterministic, bias_delay, backend, *sequences):
    call = _call(query, key, value, start, stop, starts, bound, causal_only, bias, causal, scale, softcap,
                 deterministic, bias_delay, *sequences)
    out, lse = run_attend(call, backends.choose(backend, (call.query,)))
    return out[0], lse[0]


def _attention_backward(dout, dlse, out, lse, query, key, value, start, stop, starts, bound, causal_only, bias, causal,
                        scale, softcap, deterministic, bias_delay, backend, *sequences_and_needs):
    *sequences, needs = sequences_and_needs
    with torch.no_grad():
        call = _call(query, key, value, start, stop, starts, bound, causal_only, bias, causal, scale, softcap,
                     deterministic, bias_delay, *sequences)
        return gradients_of(call, dout, dlse, out, lse, backends.choose(backend, (call.query,)), needs)


def _top_w(query, key, scores, window, keys, backend, *sequences):
    call = varlen_call(query, key, key, Packing(*sequences), None, None, Options())
    ranked, _ = scores_of_keys(scores, call)
    window = window_of(from_list(window), ranked.shape[1])
    mask = IntervalMask._selected(ranked, window, keys, candidates_of(call, keys),
                                  backends.choose(backend, (call.query,)))
    return mask._start.array, mask._stop.array


def _fake_attention(query, key, value, *rest):
    total, heads, _ = query.shape
    return query.new_empty((total, heads, value.shape[-1])), query.new_empty((heads, total), dtype=wide(query))


def _fake_attention_backward(dout, dlse, out, lse, query, key, value, *rest):
    return empty_like({"query": query, "key": key, "value": value, "bias": rest[5]}, rest[-1])


def _fake_top_w(query, key, scores, *rest):
    n, shape = scores.shape[-1], (1, *scores.shape)[-3:]
    return scores.new_empty((1, 1, n), dtype=torch.int32), scores.new_empty(shape, dtype=torch.int32)


_SEQUENCES = "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? block_table"
_ARGUMENTS = f"Tensor query, Tensor key, Tensor value, {MASK}, Tensor? bias, {OPTIONS}, {_SEQUENCES}"
register(f"varlen_attention({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _attention, _fake_attention)
register(f"varlen_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_ARGUMENTS}, str[] needs) "
         "-> Tensor[]", _attention_backward, _fake_attention_backward)
register("varlen_top_w(Tensor query, Tensor key, Tensor scores, SymInt[] window, str keys, str? backend, "
         f"{_SEQUENCES}) -> (Tensor start, Tensor stop)", _top_w, _fake_top_w)
register_derivative("varlen_attention", {0: "query", 1: "key", 2: "value", 8: "bias"}, keeps_outputs=True)
