"""Dynamic mask attention in torch: key scores, selection and attention as one operator, its gradients as another.

    dynamic_attention -> out, lse, made        dynamic_attention_backward -> the gradients named in ``needs``

``made`` is what the call has made and its backward needs: its mask, the key lists of that mask and its scores, in one
array of int32, whose length is known where all shapes are; nothing without ``keep``. Eager calls on plain tensors go
past the operators; both run the programs that ``entry.py`` knows.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma import backends, checks
from cupy_dma.arrays import Windows, library_named
from cupy_dma.calls.attention import dynamic_call
from cupy_dma.calls.gradients import INPUTS
from cupy_dma.calls.layout import in_bhnd, is_bnhd
from cupy_dma.calls.options import Options, Packing, Selection
from cupy_dma.calls.run import attend as run_attend
from cupy_dma.calls.run import attended, attention_of
from cupy_dma.calls.types import AttentionCall, DynamicCall
from cupy_dma.calls.varlen import varlen_dynamic_call
from cupy_dma.masks.interval import Hints, IntervalMask
from cupy_dma.masks.selection import selection_hints
from cupy_dma.masks.windows import window_of
from cupy_dma.torch import entry
from cupy_dma.torch.attention import NOT_PACKED, OPTIONS, SEQUENCES, attend, fake_results, results_of
from cupy_dma.torch.gradients import CallContext, Saved, gradients
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


def dynamic_mask_attention(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None, *, window: Windows,
                           dt_proj: Tensor | None = None, A: Tensor | None = None, dt_bias: Tensor | None = None,
                           form: str = "exp", keys: str = "prefix", padding: Tensor | None = None,
                           documents: Tensor | None = None, bias_delay: int = 0, causal: bool = True,
                           scale: float | None = None, softcap: float = 0.0, sink_logits: Tensor | None = None,
                           deterministic: bool = False, return_lse: bool = False, layout: str | None = None,
                           backend: str | None = None) -> Any:
    """``cupy_dma.dynamic_mask_attention`` of tensors ``(B, L, H, D)``, or ``(B, H, L, D)`` with ``layout="bhnd"``, with
    gradients for ``query, key, value``, ``scores`` and ``sink_logits``, or through the scores for ``value`` (both
    terms), ``dt_proj``, ``A`` and ``dt_bias``."""
    if not is_bnhd(layout):
        return in_bhnd(dynamic_mask_attention, (("query", query), ("key", key), ("value", value)), scores,
                       window=window, dt_proj=dt_proj, A=A, dt_bias=dt_bias, form=form, keys=keys, padding=padding,
                       documents=documents, bias_delay=bias_delay, causal=causal, scale=scale, softcap=softcap,
                       sink_logits=sink_logits, deterministic=deterministic, return_lse=return_lse, backend=backend)
    if sink_logits is not None:
        check_sinks(sink_logits, query)
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        query, key, value = cast(query, key, value)
    scores = in_rows(as_key_bias(scores))
    inputs, others, known = (query, key, value, scores, dt_proj, A, dt_bias), (padding, documents), None
    windows = window if type(window) is int else window_of(window)
    if padding is None or getattr(padding, "dtype", None) is torch.bool:
        options = ("dynamic", windows, form, keys, causal, scale, softcap, deterministic, bias_delay, layout, backend)
        known = entry.call_key((*inputs, *others), None, options)
        if known is not None and known.entry is not None and not checks.wants_values_checked():
            return delivered(*entry.run(known, None, inputs, others), return_lse, sink_logits)
    if takes_operators(*inputs, *others):
        out, lse, _ = operators.dynamic_attention(
            *inputs, padding, as_tensor(documents, query), *NOT_PACKED, listed(windows), form, keys,
            *options_of(causal, scale, softcap, deterministic, bias_delay, backend), needs_grad(*inputs))
    else:
        selection = Selection(scores, windows, dt_proj, A, dt_bias, form, keys, padding, documents)
        call = dynamic_call(query, key, value, selection,
                            Options(causal, scale, softcap, is_deterministic(deterministic), bias_delay), layout)
        module = backends.choose(backend, (call.attention.query,))
        if checks.wants_values_checked():
            known = None
        if not entry.may_do_without_mask(known, call):
            known = entry.recorded(known, call, module, backend, inputs)
        if known is not None and known.entry is not None:
            out, lse = entry.run(known, None, inputs, others)
        else:
            out, lse, by_mask = attend_dynamic(call, module, backend, query, key, value, scores)
            if by_mask:
                entry.recorded(known, call, module, backend, inputs)  # for the next one
    return delivered(out, lse, return_lse, sink_logits)


def attend_dynamic(call: DynamicCall, module: ModuleType, backend: str | None, query: Tensor, key: Tensor,
                   value: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """``attend`` for a checked dynamic call on these tensors."""
    parameters = [None if x is None else x.array for x in (call.recipe or (None,) * 4)[1:4]]
    return attend(call, module, backend, (query, key, value, scores, *parameters))


# ---- operators ------------------------------------------------------------------------------------------------------


class _Arguments(NamedTuple):
    """Of the operators, behind the results and their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor | None
    dt_proj: Tensor | None
    A: Tensor | None
    dt_bias: Tensor | None
    padding: Tensor | None
    documents: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
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

    def call(self) -> DynamicCall:
        """The checked call."""
        selection = Selection(self.scores, from_list(self.window), *self[4:7], self.form, self.keys, self.padding,
                              self.documents)
        options = Options(*self[16:21])
        if self.cu_seqlens_q is not None:
            return varlen_dynamic_call(*self[:3], Packing(*self[9:13]), selection, options)
        return dynamic_call(*self[:3], selection, options)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return self[:7]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:13]

    def call_key(self) -> entry.CallKey | None:
        if checks.wants_values_checked() or (self.padding is not None and self.padding.dtype != torch.bool):
            return None
        return entry.operator_key(self.tensors, (tuple(self.window), *self[14:22]), self.keep)


def _dynamic_attention(*arguments):
    given = _Arguments(*arguments)
    found = entry.found_entry(given)
    if found is not None:
        return entry.run_operator(found, given.tensors)
    with torch.no_grad():
        call = given.call()
        module = backends.choose(given.backend, (call.attention.query,))
        if not given.keep and entry.may_do_without_mask(None, call):
            return *results_of(call.attention, *attended(call, module)[:2]), entry.nothing_made(given.query)
        found = entry.made_entry(given, call, module)
        if found is not None:
            return entry.run_operator(found, given.tensors)
        own = attention_of(call, module)
        out, lse = results_of(own, *run_attend(own, module))
        if not given.keep:
            return out, lse, entry.nothing_made(out)
        return out, lse, packed_up(own, call.recipe is not None)


def _dynamic_attention_backward(dout, dlse, out, lse, made, *arguments):
    given, needs = _Arguments(*arguments[:-1]), arguments[-1]
    needed, known, found = tuple([name in needs for name in INPUTS]), entry.found_entry(given), None
    if known is not None:
        found = entry.backward_operator(known, given.inputs, out, lse, made, dout, dlse, needed)
    if found is None:
        with torch.no_grad():
            call = given.call()
            own, module = call.attention, backends.choose(given.backend, (call.attention.query,))
            if known is not None:
                facts, scores = entry.without_programs(known, None, [made], given.inputs)
            else:
                in_use = given.padding is not None or own.sequences is not None and given.keys == "global"
                hints = selection_hints(from_list(given.window), own.key_length, given.keys, in_use,
                                        given.documents is not None)
                mask, scores = unpacked(made, _sizes(given), wide(given.value), given.scores is None, hints)
                facts = CallContext(mask, own.options, call.recipe and call.recipe[4], module, given.backend,
                                    own.sequences)
            found = gradients(facts, Saved(out, lse, *given[:7], scores=scores), dout, dlse, needed)
    return [found[INPUTS.index(name)] for name in needs]


def _sizes(given: _Arguments) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The shapes of start and stop of a call without programs."""
    *batches, length, heads, _ = given.key.shape
    batch = batches[0] if batches and given.block_table is None else 1
    if given.block_table is not None:
        length *= given.block_table.shape[0] * given.block_table.shape[1]
    if given.scores is not None:
        heads = given.scores.shape[-2]
    by_rows = given.keys == "global" and given.documents is not None and given.documents.ndim == 2
    rows = given.documents.shape[0] if by_rows and given.documents is not None else 1
    return (rows, 1, length), (batch, heads, length)


def packed_up(call: AttentionCall, computed: bool) -> Tensor:
    """What a call without programs has made: its mask and, if they are ``computed``, its scores."""
    mask, bias = call.mask, call.bias
    assert mask is not None and bias is not None
    made = [*([bias.array] if computed else []), mask._start.array, mask._stop.array]  # the largest numbers first
    return torch.cat([x.contiguous().view(torch.int32).flatten() for x in made])


def unpacked(made: Tensor, shapes: Sequence[tuple[int, int, int]], kind: torch.dtype, computed: bool,
             hints: Hints) -> tuple[IntervalMask, Tensor | None]:
    """The mask of these ``shapes`` and the computed scores, of this ``kind``, in what ``packed_up`` gave."""
    counts = [math.prod(shape) for shape in shapes]
    scores, start, stop = made.split([made.numel() - sum(counts), *counts])
    mask = IntervalMask._make(library_named("torch"), start.view(shapes[0]), stop.view(shapes[1]), hints)
    return mask, scores.view(kind).view(shapes[1]) if computed else None


def size_of_parts(shapes: Sequence[tuple[int, int, int]], value: Tensor | None) -> int:
    """The numbers in it; ``value``: what scores are computed from."""
    start, stop = map(math.prod, shapes)
    return start + stop * (1 if value is None else 3 if value.dtype == torch.float64 else 2)


def _fake_dynamic_attention(*arguments):
    given = _Arguments(*arguments)
    size = 0
    if given.keep:
        parts = size_of_parts(_sizes(given), given.value if given.scores is None else None)
        size = entry.size_of_made(given, given.tensors, parts)
    return *fake_results(given.query, given.value), given.query.new_empty((size,), dtype=torch.int32)


def _fake_dynamic_attention_backward(dout, dlse, out, lse, made, *arguments):
    return empty_like(dict(zip(INPUTS, arguments[:7])), arguments[-1])


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? scores, Tensor? dt_proj, Tensor? A, Tensor? dt_bias"
_DYNAMIC = (f"{_INPUTS}, Tensor? padding, Tensor? documents, {SEQUENCES}, SymInt[] window, str form, str keys, "
            f"{OPTIONS}, bool keep")
register(f"dynamic_attention({_DYNAMIC}) -> (Tensor out, Tensor lse, Tensor made)", _dynamic_attention,
         _fake_dynamic_attention)
register(f"dynamic_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor made, {_DYNAMIC}, "
         "str[] needs) -> Tensor[]", _dynamic_attention_backward, _fake_dynamic_attention_backward)
register_derivative("dynamic_attention", dict(enumerate(INPUTS)), keeps_outputs=True)
