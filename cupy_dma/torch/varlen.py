"""Packed sequences in torch.

    varlen_attention -> out, lse            varlen_attention_backward -> the gradients named in ``needs``, in that order
    varlen_dynamic_attention -> out, lse, made, and varlen_dynamic_attention_backward as well

As ``attention.py`` and ``dynamic.py``, with the tensors that describe the sequences after the options.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma import backends, checks
from cupy_dma.calls.gradients import INPUTS, chain_gradients
from cupy_dma.calls.options import Options, Packing, Selection
from cupy_dma.calls.run import attend as run_attend
from cupy_dma.calls.run import attention_of
from cupy_dma.calls.scores import Recipe, recipe_of
from cupy_dma.calls.types import AttentionCall, DynamicCall
from cupy_dma.calls.varlen import varlen_call, varlen_dynamic_call
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.selection import selection_hints
from cupy_dma.masks.windows import window_of
from cupy_dma.torch import entry
from cupy_dma.torch.attention import MASK, OPTIONS, attend, gradients_of, upstream_of
from cupy_dma.torch.dynamic import SELECTED, attend_dynamic, packed_up, size_of_parts, unpacked
from cupy_dma.torch.gradients import MaskArguments
from cupy_dma.torch.registration import (
    as_key_bias,
    as_tensor,
    cast,
    empty_like,
    from_list,
    in_rows,
    is_deterministic,
    listed,
    needs_grad,
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
    bias, sequences = in_rows(as_key_bias(bias)), (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    inputs = query, key, value, bias
    known = _call_key("varlen", inputs, mask, sequences, (max_seqlen_q, max_seqlen_k), tail_padding,
                      (causal, scale, softcap, deterministic, bias_delay, backend))
    if known is not None and known.entry is not None:
        return delivered(*entry.run(known, mask, inputs, sequences), return_lse, sink_logits)
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
        module = backends.choose(backend, (call.query,))
        known = entry.recorded(known, call, module, backend, inputs)
        if known is not None and known.entry is not None:
            out, lse = entry.run(known, mask, inputs, sequences)
        else:
            out, lse, _ = attend(call, module, backend, inputs, (mask,))
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
        out, lse, _ = operators.varlen_dynamic_attention(
            *inputs, listed(window), form, keys,
            *options_of(causal, scale, softcap, deterministic, bias_delay, backend), needs_grad(*inputs), *sequences)
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


class _Dynamic(NamedTuple):
    """The arguments of the dynamic operators, behind the results and their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor | None
    dt_proj: Tensor | None
    A: Tensor | None
    dt_bias: Tensor | None
    window: Sequence[int]  # as from ``listed``
    form: str
    keys: str
    causal: bool
    scale: float | None
    softcap: float
    deterministic: bool
    bias_delay: int
    backend: str | None
    keep: bool
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None

    @property
    def selection(self) -> Selection:
        return Selection(self.scores, from_list(self.window), *self[4:7], self.form, self.keys)

    def forward(self) -> DynamicCall:
        """The checked call."""
        return varlen_dynamic_call(*self[:3], Packing(*self[17:21]), self.selection, Options(*self[10:15]))

    @property
    def sizes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of start and stop."""
        length, heads = self.key.shape[0], self.key.shape[-2] if self.scores is None else self.scores.shape[-2]
        if self.block_table is not None:
            length = self.block_table.shape[0] * self.block_table.shape[1] * self.key.shape[1]
        return (1, 1, length), (1, heads, length)

    def backward(self, made: Tensor) -> tuple[AttentionCall, Recipe | None]:
        """The call that has made this, and the recipe of its scores."""
        mask, scores = unpacked(made, self.sizes, wide(self.value), self.scores is None, selection_hints(
            from_list(self.window), self.sizes[0][2], self.keys, self.keys == "global", False))
        _, causal = self.selection.checked(self.causal)
        call = varlen_call(*self[:3], Packing(*self[17:21]), mask, self.scores if scores is None else scores[0],
                           Options(causal, *self[11:15]))
        return call, None if scores is None else recipe_of(self.value[None], *self[4:7], self.form)


def _dynamic_attention(*arguments):
    given = _Dynamic(*arguments)
    with torch.no_grad():
        call = given.forward()
        module = backends.choose(given.backend, (call.attention.query,))
        own = attention_of(call, module)
        out, lse = run_attend(own, module)
        return out[0], lse[0], packed_up(own, call.recipe is not None) if given.keep else entry.nothing_made(out)


def _dynamic_attention_backward(dout, dlse, out, lse, made, *arguments):
    given, needs = _Dynamic(*arguments[:-1]), arguments[-1]
    with torch.no_grad():
        call, recipe = given.backward(made)
        found = chain_gradients(call, recipe, upstream_of(dout, out, lse, dlse), frozenset(needs),
                                backends.choose(given.backend, (call.query,)))
    return [found[name] for name in needs]


def _fake_attention(query, key, value, *rest):
    total, heads, _ = query.shape
    return query.new_empty((total, heads, value.shape[-1])), query.new_empty((heads, total), dtype=wide(query))


def _fake_attention_backward(dout, dlse, out, lse, query, key, value, *rest):
    return empty_like({"query": query, "key": key, "value": value, "bias": rest[5]}, rest[-1])


def _fake_dynamic_attention(*arguments):
    given = _Dynamic(*arguments)
    size = size_of_parts(given.sizes, None if given.scores is not None else given.value) if given.keep else 0
    return *_fake_attention(*arguments), given.query.new_empty((size,), dtype=torch.int32)


def _fake_dynamic_attention_backward(dout, dlse, out, lse, made, *arguments):
    return empty_like(dict(zip(INPUTS, arguments[:7])), arguments[-1])


_SEQUENCES = "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? block_table"
_ARGUMENTS = f"Tensor query, Tensor key, Tensor value, {MASK}, Tensor? bias, {OPTIONS}, {_SEQUENCES}"
register(f"varlen_attention({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _attention, _fake_attention)
register(f"varlen_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_ARGUMENTS}, str[] needs) "
         "-> Tensor[]", _attention_backward, _fake_attention_backward)
register_derivative("varlen_attention", {0: "query", 1: "key", 2: "value", 8: "bias"}, keeps_outputs=True)
_DYNAMIC = f"{SELECTED}, {OPTIONS}, bool keep, {_SEQUENCES}"
register(f"varlen_dynamic_attention({_DYNAMIC}) -> (Tensor out, Tensor lse, Tensor made)", _dynamic_attention,
         _fake_dynamic_attention)
register("varlen_dynamic_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor made, "
         f"{_DYNAMIC}, str[] needs) -> Tensor[]", _dynamic_attention_backward, _fake_dynamic_attention_backward)
register_derivative("varlen_dynamic_attention", dict(enumerate(INPUTS)), keeps_outputs=True)
