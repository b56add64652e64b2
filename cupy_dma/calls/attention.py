"""Checked arguments of the attention functions: what the public functions pass to a backend.

Checks look at shapes and types only: they cost a few microseconds and never touch array data.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.calls.layout import hint, warn_if_bhnd
from cupy_dma.calls.mask import check_mask
from cupy_dma.calls.options import Options, Selection
from cupy_dma.calls.scores import recipe_of
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias
from cupy_dma.masks.selection import check_candidates
from cupy_dma.masks.windows import window_of


def attention_call(query: Any, key: Any, value: Any, mask: Any, bias: Any, options: Options,
                   layout: str | None = "bnhd") -> AttentionCall:
    """The checked arguments of ``cupy_dma.attention``, as ``(B, L, H, D)``. Raises what it documents. Warns about a
    probable ``"bhnd"`` call only if ``layout`` is None."""
    q, k, v = describe_qkv(query, key, value)
    if layout is None:
        warn_if_bhnd(q, k, 4)
    checked = options.checked(q)
    added = None if bias is None else _bias(bias, q, k)
    checks.require_key_bias(options.bias_delay, added)
    seen, dense = (None, None) if mask is None else check_mask(mask, q, k, lambda array: _dense(array, q, k))
    return AttentionCall(q, k, v, seen, dense, added, *checked)


def dynamic_call(query: Any, key: Any, value: Any, selection: Selection, options: Options,
                 layout: str | None = "bnhd") -> DynamicCall:
    """The checked arguments of ``cupy_dma.dynamic_mask_attention``. Raises and warns as ``attention_call``."""
    q, k, v = describe_qkv(query, key, value)
    if layout is None:
        warn_if_bhnd(q, k, 4)
    window, causal = selection.checked(options.causal)
    checked = replace(options, causal=causal).checked(q)
    recipe = ranked = None
    if selection.scores is None:
        recipe = recipe_of(value, selection.dt_proj, selection.A, selection.dt_bias, selection.form)
        checks.require_same_device((q, recipe[1]))
    else:
        ranked = describe(selection.scores, "scores")
        checks.one_of_types(ranked)
        checks.has_shape(ranked, "(B, Hkv, Lk)", ((k.shape[0],), (k.shape[2], q.shape[2]), (k.shape[1],)))
        ranked = checks.in_rows(ranked)
        checks.require_same_device((q, ranked))
    candidates = check_candidates(selection.padding, selection.documents, q, k.shape[0], k.shape[1])
    call = AttentionCall(q, k, v, None, None, None if ranked is None else key_bias(ranked), *checked)
    window = window_of(window, k.shape[2] if ranked is None else ranked.shape[1])
    return DynamicCall(call, ranked, recipe, window, selection.keys, candidates)


class Layout(NamedTuple):
    """The axes of query, and of key and value, as error messages show them."""

    query: str
    keys: str


PADDED = Layout("(B, Lq, H, D)", "(B, Lk, Hkv, D)")
PACKED = Layout("(total_q, H, D)", "(total_k, Hkv, D)")
PAGED = Layout("(total_q, H, D)", "(num_pages, page_size, Hkv, D)")


def describe_qkv(query: Any, key: Any, value: Any, layout: Layout = PADDED) -> tuple[Operand, Operand, Operand]:
    """query, key and value with four axes: packed ones have B = 1, a paged KV cache keeps its own axes."""
    q, k, v = describe(query, "query"), describe(key, "key"), describe(value, "value")
    for operand, meaning in ((q, layout.query), (k, layout.keys), (v, layout.keys)):
        if len(operand.shape) != meaning.count(",") + 1:
            raise ValueError(f"{operand.name} must have shape {meaning}, got {operand.shape}")
        if operand.strides[-1] != 1:
            checks.rows_contiguous(operand)
    checks.one_of_types(q)
    for operand in (k, v):
        if operand.dtype != q.dtype:
            raise TypeError(f"{operand.name} must have query's type {q.dtype}, got {operand.dtype}")
    heads, size = q.shape[-2:]
    if not 1 <= size <= 256:
        raise ValueError(f"query must have a head dim D (last axis) of 1 to 256, got shape {q.shape}")
    if layout is PADDED and (k.shape[0] != q.shape[0] or k.shape[3] != size):
        raise ValueError(f"key must have query's batch and head dim, (B, Lk, Hkv, D) = ({q.shape[0]}, any, any, "
                         f"{size}), got {k.shape}")
    if k.shape[-1] != size:
        raise ValueError(f"key must have query's head dim, {layout.keys} with D={size}, got {k.shape}")
    if v.shape != k.shape and (v.shape[:-1] != k.shape[:-1] or not 1 <= v.shape[-1] <= 256):
        raise ValueError(f"value must have key's shape {k.shape}, or another head dim Dv (last axis) of 1 to 256, got "
                         f"{v.shape}")
    kv_heads = k.shape[-2]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"query must have a multiple of key's heads (H % Hkv == 0), got {heads} query heads and "
                         f"{kv_heads} kv heads{hint(q, k) if layout is PADDED else ''}")
    if layout is PAGED and k.shape[1] < 1:
        raise ValueError(f"key must have pages of at least one row, {layout.keys}, got {k.shape}")
    checks.require_same_device((q, k, v))
    if layout is PADDED:
        return q, k, v
    q = checks.with_axes(q, 4)
    return (q, k, v) if layout is PAGED else (q, checks.with_axes(k, 4), checks.with_axes(v, 4))


def _allowed(q: Operand, k: Operand) -> tuple[tuple[int, ...], ...]:
    """Allowed sizes of the axes of a mask or bias."""
    return (1, q.shape[0]), (1, k.shape[2], q.shape[2]), (1, q.shape[1]), (1, k.shape[1])


def not_padding(shape: tuple[int, ...], batch: int, queries: int, keys: int) -> None:
    """ValueError for a mask of two axes that is, or could be, a padding mask ``(B, Lk)`` instead of ``(Lq, Lk)``."""
    if shape[0] == batch > 1 and shape[1] in (1, keys):
        fits = "fits (Lq, Lk) and (B, Lk): write mask[None, None] for the first and, for the second," \
            if batch == queries else f"is (B, Lk) instead of (Lq, Lk) = ({queries}, {keys}): write"
        raise ValueError(f"mask must have four axes here, got {tuple(shape)}, which {fits} mask[:, None, None] or "
                         f"IntervalMask.padding(mask), or pass it as padding to dynamic_mask_attention")


def _dense(mask: Any, q: Operand, k: Operand) -> Operand:
    dense = describe(mask, "mask")
    checks.boolean(dense)
    if len(dense.shape) == 2:
        not_padding(dense.shape, q.shape[0], q.shape[1], k.shape[1])
        dense = checks.with_axes(dense, 4)
    checks.has_shape(dense, "(1|B, 1|Hkv|H, 1|Lq, 1|Lk)", _allowed(q, k))
    checks.rows_contiguous(dense)
    checks.require_same_device((q, dense))
    return checks.with_axes(dense, 4)


def _bias(bias: Any, q: Operand, k: Operand) -> Operand:
    operand = describe(bias, "bias")
    checks.one_of_types(operand)
    batch, heads, queries, keys = _allowed(q, k)
    is_key_bias = len(operand.shape) == 3
    if is_key_bias:
        checks.has_shape(operand, "(1|B, 1|Hkv|H, 1|Lk)", (batch, heads, keys))
    else:
        checks.has_shape(operand, "(1|B, 1|Hkv|H, 1|Lk) or (1|B, 1|Hkv|H, 1|Lq, 1|Lk)", (batch, heads, queries, keys))
    if operand.strides[-1] != 1:
        if is_key_bias:
            operand = checks.in_rows(operand)
        checks.rows_contiguous(operand)
    checks.require_same_device((q, operand))
    return key_bias(operand) if is_key_bias else checks.with_axes(operand, 4)
