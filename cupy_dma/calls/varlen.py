"""Checked arguments of attention over packed sequences (varlen) and over a paged KV cache (SPEC section 8).

Sequence ``b`` has the queries ``cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1]`` and the keys ``cu_seqlens_k[b] <= j <
cu_seqlens_k[b + 1]`` (with ``seqused_k`` the first ``seqused_k[b]`` of them). It is bottom-right aligned: its last
query stands at its last key. Everything else is as in ``cupy_dma.attention``, sequence by sequence.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.calls.attention import PACKED, PAGED, describe_qkv
from cupy_dma.calls.mask import check_interval
from cupy_dma.calls.options import Options, Packing, Selection
from cupy_dma.calls.scores import recipe_of
from cupy_dma.calls.sequences import Sequences, packed_mask, packed_rows, sequences_of
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias, with_mask
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.selection import Candidates
from cupy_dma.masks.windows import window_of


def varlen_call(query: Any, key: Any, value: Any, packing: Packing, mask: Any, bias: Any,
                options: Options) -> AttentionCall:
    """The checked arguments of ``varlen_attention``, as a call of B = 1. Raises what it documents."""
    call = _without_mask(query, key, value, packing, options)
    if mask is None and bias is None and not call.bias_delay:
        return call
    assert call.sequences is not None
    added = None if bias is None else packed_bias(_per_key(bias, "bias", call), call.sequences)
    checks.require_key_bias(call.bias_delay, added)
    return with_mask(call, None if mask is None else visible_keys(mask, call), added)


def _without_mask(query: Any, key: Any, value: Any, packing: Packing, options: Options) -> AttentionCall:
    q, k, v = describe_qkv(query, key, value, PACKED if packing.block_table is None else PAGED)
    checked = options.checked(q)
    tail_padding = checks.flag(packing.tail_padding, "tail_padding")
    sequences = sequences_of(q, k, packing.cu_seqlens_q, packing.cu_seqlens_k, packing.seqused_k, packing.block_table,
                             tail_padding)
    for name, longest, total in (("max_seqlen_q", packing.max_seqlen_q, q.shape[1]),
                                 ("max_seqlen_k", packing.max_seqlen_k, 0 if sequences.page_size else k.shape[1])):
        if longest is not None and checks.whole(longest, name, 0) * sequences.batch < total and not tail_padding:
            raise ValueError(f"{name} must be at least the longest sequence, got {longest} for {sequences.batch} "
                             f"sequences in {total} rows (tail_padding=True allows rows after the last sequence)")
    return AttentionCall(q, k, v, None, None, None, *checked, sequences)


def varlen_dynamic_call(query: Any, key: Any, value: Any, packing: Packing, selection: Selection,
                        options: Options) -> DynamicCall:
    """The checked arguments of ``varlen_dynamic_mask_attention``. Raises what it documents."""
    window, causal = selection.checked(options.causal)
    if selection.scores is None and packing.block_table is not None:
        raise ValueError("scores (B, Hkv, max_pages * page_size) must be given with block_table, got dt_proj")
    call = _without_mask(query, key, value, packing, replace(options, causal=causal))
    recipe = ranked = None
    if selection.scores is None:
        recipe = recipe_of(call.value.array[None], selection.dt_proj, selection.A, selection.dt_bias, selection.form)
        checks.require_same_device((call.query, recipe[1]))
    else:
        ranked, call = scores_of_keys(selection.scores, call)
    window = window_of(window, call.kv_heads if ranked is None else ranked.shape[1])
    return DynamicCall(call, ranked, recipe, window, selection.keys, candidates_of(call, selection.keys))


def scores_of_keys(scores: Any, call: AttentionCall) -> tuple[Operand, AttentionCall]:
    """The checked ``scores`` for the selection, and the call with them as its bias."""
    ranked = _per_key(scores, "scores", call)
    assert call.sequences is not None
    return ranked, with_mask(call, None, packed_bias(ranked, call.sequences))


def candidates_of(call: AttentionCall, keys: str) -> Candidates:
    """Every sequence selects among its own keys: with a page table each is a batch entry, otherwise a document.

    Only keys in use are candidates. Prefix selection needs no check for that: no query stands after them. A paged KV
    cache may hold anything in memory that no query sees."""
    sequences, library, device = call.sequences, call.query.library, call.query.device
    assert sequences is not None
    with library.on(device):
        bounds = sequences.bounds.array
        if sequences.page_table is not None:
            if keys == "prefix":
                return Candidates()
            used = (bounds[3] - bounds[2])[:-1]
            capacity = sequences.page_table.shape[1] * sequences.page_size
            real = library.arange(0, capacity, device)[None] < used[:, None]
            return Candidates(library.operand(real, "seqused_k"))
        documents = library.operand(bounds[2], "documents")
        if keys == "prefix":
            return Candidates(None, documents, apart=True)
        key = library.arange(0, sequences.key_length, device)
        real = (key < bounds[3][library.search_right(bounds[2], key) - 1])[None]
        return Candidates(checks.with_axes(library.operand(real, "seqused_k"), 2), documents, apart=True)


def _shape_of_keys(call: AttentionCall) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The allowed shapes of a mask: as error messages show them, and the sizes of each axis."""
    sequences, heads = call.sequences, (1, call.kv_heads, call.heads)
    assert sequences is not None
    if sequences.page_table is None:
        return "(1, 1|Hkv|H, total_k)", ((1,), heads, (sequences.key_length,))
    capacity = sequences.page_table.shape[1] * sequences.page_size
    return "(1|B, 1|Hkv|H, max_pages * page_size)", ((1, sequences.batch), heads, (capacity,))


def visible_keys(mask: Any, call: AttentionCall) -> IntervalMask:
    """The mask in packed positions."""
    q, sequences = call.query, call.sequences
    assert sequences is not None
    if not isinstance(mask, IntervalMask):
        describe(mask, "mask")
        raise NotImplementedError("mask must be an IntervalMask or None, got a dense array: packed sequences have no "
                                  "(Lq, Lk) matrix; call attention() for each sequence instead")
    check_interval(mask, q, *_shape_of_keys(call))
    return mask if sequences.page_table is None else packed_mask(mask, sequences.batch)


def _per_key(array: Any, name: str, call: AttentionCall) -> Operand:
    """One checked number per key, as an operand with three axes."""
    sequences, operand = call.sequences, describe(array, name)
    assert sequences is not None
    checks.one_of_types(operand)
    meaning, allowed = _shape_of_keys(call)
    if sequences.page_table is None:
        meaning, allowed = "(1|Hkv|H, total_k)", allowed[1:]
    if name == "scores":
        meaning = meaning.replace("1|", "")
        allowed = (*((sizes[-1],) for sizes in allowed[:-2]), allowed[-2][1:], allowed[-1])
    if len(operand.shape) == 4 or (len(operand.shape) == 3 and sequences.page_table is None):
        raise NotImplementedError(f"{name} must be one number per key, {meaning}, got shape {operand.shape}: packed "
                                  f"sequences have no (Lq, Lk) matrix")
    checks.has_shape(operand, meaning, allowed)
    operand = checks.in_rows(operand)
    checks.require_same_device((call.query, operand))
    if sequences.page_table is None:
        operand = call.query.library.operand(operand.array[None], name)
    return checks.with_axes(operand, 3)


def packed_bias(operand: Operand, sequences: Sequences) -> Operand:
    """One number per key, with three axes, as a bias ``(1, heads, 1, packed keys)``."""
    if sequences.page_table is None:
        return key_bias(operand)
    library = operand.library
    with library.on(operand.device):
        rows = packed_rows(operand.array, sequences.batch, library.xp)
        return key_bias(library.operand(library.contiguous(rows), operand.name))
