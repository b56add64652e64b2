"""Packed sequences in torch: the operators of ``attention.py`` and ``dynamic.py``, with tensors that describe the
sequences."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupy_dma import backends, checks
from cupy_dma.arrays import Windows
from cupy_dma.calls.options import Options, Packing, Selection
from cupy_dma.calls.varlen import varlen_call, varlen_dynamic_call
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.windows import window_of
from cupy_dma.torch import entry
from cupy_dma.torch.attention import attend
from cupy_dma.torch.dynamic import attend_dynamic
from cupy_dma.torch.gradients import MaskArguments
from cupy_dma.torch.registration import (
    as_key_bias,
    as_tensor,
    cast,
    in_rows,
    is_deterministic,
    listed,
    needs_grad,
    operators,
    options_of,
    takes_operators,
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
    bias, sequences = in_rows(as_key_bias(bias)), (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    inputs = query, key, value, bias
    known = _call_key("varlen", inputs, mask, sequences, (max_seqlen_q, max_seqlen_k), tail_padding,
                      (causal, scale, softcap, deterministic, bias_delay, backend))
    if known is not None and known.entry is not None:
        return delivered(*entry.run(known, mask, inputs, sequences), return_lse, sink_logits)
    if takes_operators(query, key, value, bias, *sequences):
        sequences = _as_tensors(query, sequences)
        _check_lengths(max_seqlen_q, max_seqlen_k)
        out, lse, _ = operators.attention(query, key, value, *MaskArguments.of(mask), None, bias, *sequences,
                                          *options_of(causal, scale, softcap, deterministic, bias_delay, backend),
                                          needs_grad(*inputs))
    else:
        packing = Packing(*sequences, max_seqlen_q, max_seqlen_k, tail_padding)
        call = varlen_call(query, key, value, packing, mask, bias,
                           Options(causal, scale, softcap, is_deterministic(deterministic), bias_delay))
        module = backends.choose(backend, (call.query,))
        known = entry.recorded(known, call, module, backend, inputs)
        if known is not None and known.entry is not None:
            out, lse = entry.run(known, mask, inputs, sequences)
        else:
            out, lse, _ = attend(call, module, backend, inputs, (mask,))
    return delivered(out, lse, return_lse, sink_logits)


def varlen_dynamic_mask_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
                                  cu_seqlens_k: Tensor | None, scores: Tensor | None = None, *, window: Windows,
                                  dt_proj: Tensor | None = None, A: Tensor | None = None, dt_bias: Tensor | None = None,
                                  form: str = "exp", keys: str = "prefix", bias_delay: int = 0, causal: bool = True,
                                  scale: float | None = None, softcap: float = 0.0, sink_logits: Tensor | None = None,
                                  deterministic: bool = False, return_lse: bool = False,
                                  block_table: Tensor | None = None, seqused_k: Tensor | None = None,
                                  max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                                  tail_padding: bool = False, backend: str | None = None) -> Any:
    """``cupy_dma.varlen_dynamic_mask_attention`` with gradients for ``query, key, value``, ``scores`` and
    ``sink_logits``, or through the scores for ``value`` (both terms), ``dt_proj``, ``A`` and ``dt_bias``."""
    if sink_logits is not None:
        check_sinks(sink_logits, query)
    query, key, value = cast(query, key, value)
    scores, sequences = in_rows(as_key_bias(scores)), (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    selection = Selection(scores, window, dt_proj, A, dt_bias, form, keys)
    inputs = query, key, value, scores, dt_proj, A, dt_bias
    windows = window if type(window) is int else window_of(window)
    known = _call_key("varlen dynamic", inputs, None, sequences, (max_seqlen_q, max_seqlen_k), tail_padding,
                      (windows, form, keys, causal, scale, softcap, deterministic, bias_delay, backend))
    if known is not None and known.entry is not None:
        return delivered(*entry.run(known, None, inputs, sequences), return_lse, sink_logits)
    if takes_operators(*inputs, *sequences):
        sequences = _as_tensors(query, sequences)
        window, _ = selection.checked(causal)
        _check_lengths(max_seqlen_q, max_seqlen_k)
        out, lse, _ = operators.dynamic_attention(
            *inputs, None, None, *sequences, listed(window), form, keys,
            *options_of(causal, scale, softcap, deterministic, bias_delay, backend), needs_grad(*inputs))
    else:
        packing = Packing(*sequences, max_seqlen_q, max_seqlen_k, tail_padding)
        call = varlen_dynamic_call(query, key, value, packing, selection,
                                   Options(causal, scale, softcap, is_deterministic(deterministic), bias_delay))
        module = backends.choose(backend, (call.attention.query,))
        known = entry.recorded(known, call, module, backend, inputs)
        if known is not None and known.entry is not None:
            out, lse = entry.run(known, None, inputs, sequences)
        else:
            out, lse, _ = attend_dynamic(call, module, backend, query, key, value, scores)
    return delivered(out, lse, return_lse, sink_logits)


def _call_key(kind: str, inputs: entry.Tensors, mask: Any, sequences: tuple[Any, ...], longest: tuple[Any, ...],
              tail_padding: bool, options: tuple[Any, ...]) -> entry.CallKey | None:
    """The key of an eager call; None where the lengths of the longest sequences are to be checked or are wrong."""
    query_bounds, key_bounds, _, pages = sequences
    if checks.wants_values_checked() or not isinstance(query_bounds, Tensor) or query_bounds.ndim != 1:
        return None
    for length, x, in_pages in zip(longest, inputs, (False, pages is not None)):
        if length is None:
            continue
        if type(length) is not int or length < 0 or not isinstance(x, Tensor):
            return None
        if not in_pages and tail_padding is not True and length * (len(query_bounds) - 1) < len(x):
            return None
    return entry.call_key((*inputs, *sequences), mask, (kind, *options, tail_padding, key_bounds is query_bounds))


def _as_tensors(like: Tensor, sequences: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists as int32 tensors on ``like``'s device."""
    return tuple([as_tensor(x, like) for x in sequences])


def _check_lengths(*lengths: int | None) -> None:
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), lengths):
        if length is not None and not torch.compiler.is_compiling():
            checks.whole(length, name, 0)
