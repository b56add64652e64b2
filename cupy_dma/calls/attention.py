"""Arguments that have passed every check: what the public functions hand to a backend.

Checks look at shapes and types only: they cost a few microseconds and never touch array data.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.calls import scores as scores_module
from cupy_dma.calls.mask import check_mask
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias
from cupy_dma.masks.selection import check_candidates


def attention_call(query: Any, key: Any, value: Any, mask: Any, bias: Any, causal: bool, scale: float | None,
                   softcap: float, deterministic: bool) -> AttentionCall:
    """The arguments of ``cupy_dma.attention``, checked. Raises what it documents."""
    q, k, v = describe_qkv(query, key, value)
    scale, softcap, causal, deterministic = options(q, scale, softcap, causal, deterministic)
    added = None if bias is None else _added(bias, q, k)
    seen, dense = (None, None) if mask is None else check_mask(mask, q, k, lambda array: _dense(array, q, k))
    return AttentionCall(q, k, v, seen, dense, added, causal, scale, softcap, deterministic)


def dynamic_call(query: Any, key: Any, value: Any, scores: Any, window: int, dt_proj: Any, A: Any, dt_bias: Any,
                 form: str, keys: str, padding: Any, documents: Any, causal: bool, scale: float | None, softcap: float,
                 deterministic: bool) -> DynamicCall:
    """The arguments of ``cupy_dma.dynamic_mask_attention``, checked. Raises what it documents."""
    q, k, v = describe_qkv(query, key, value)
    scale, softcap, causal, deterministic = options(q, scale, softcap, causal, deterministic)
    window = checks.whole(window, "window", 1)
    checks.choice(keys, "keys", ("prefix", "global"))
    if keys == "prefix" and not causal:
        raise ValueError("causal=False needs keys='global', got keys='prefix', which is causal by construction")
    if (scores is None) == (dt_proj is None):
        raise ValueError(f"give either scores or dt_proj and A, got {'neither' if scores is None else 'both'}")
    recipe = ranked = None
    if scores is None:
        if A is None:
            raise ValueError("A must be given with dt_proj, got None")
        recipe = scores_module.prepare(value, dt_proj, A, dt_bias, form)
        checks.require_same_device((q, recipe[1]))
    else:
        extra = [name for name, argument in (("A", A), ("dt_bias", dt_bias)) if argument is not None]
        if extra:
            raise ValueError(f"{' and '.join(extra)} must come with dt_proj, got scores")
        ranked = describe(scores, "scores")
        checks.one_of_types(ranked)
        checks.has_shape(ranked, "(B, Hkv, Lk)", ((k.shape[0],), (k.shape[2], q.shape[2]), (k.shape[1],)))
        checks.rows_contiguous(ranked)
        checks.require_same_device((q, ranked))
    candidates = check_candidates(padding, documents, q, k.shape[0], k.shape[1])
    return DynamicCall(q, k, v, ranked, recipe, window, keys, candidates, causal, scale, softcap, deterministic)


def describe_qkv(query: Any, key: Any, value: Any) -> tuple[Operand, Operand, Operand]:
    q, k, v = describe(query, "query"), describe(key, "key"), describe(value, "value")
    for operand, meaning in ((q, "(B, Lq, H, D)"), (k, "(B, Lk, Hkv, D)"), (v, "(B, Lk, Hkv, D)")):
        if len(operand.shape) != 4:
            raise ValueError(f"{operand.name} must have shape {meaning}, got {operand.shape}")
        if operand.strides[3] != 1:
            checks.rows_contiguous(operand)
    checks.one_of_types(q)
    for operand in (k, v):
        if operand.dtype != q.dtype:
            raise TypeError(f"{operand.name} must have query's type {q.dtype}, got {operand.dtype}")
    batch, _, heads, size = q.shape
    if not 1 <= size <= 256:
        raise ValueError(f"query must have a head dim D (last axis) of 1 to 256, got shape {q.shape}")
    if k.shape[0] != batch or k.shape[3] != size:
        raise ValueError(f"key must have query's batch and head dim, (B, Lk, Hkv, D) = ({batch}, any, any, {size}), "
                         f"got {k.shape}")
    if v.shape != k.shape:
        raise ValueError(f"value must have key's shape {k.shape}, got {v.shape}")
    if k.shape[2] < 1 or heads < 1 or heads % k.shape[2]:
        raise ValueError(f"query must have a multiple of key's heads (H % Hkv == 0), got {heads} query heads and "
                         f"{k.shape[2]} kv heads")
    checks.require_same_device((q, k, v))
    return q, k, v


def options(q: Operand, scale: float | None, softcap: float, causal: bool,
             deterministic: bool) -> tuple[float, float, bool, bool]:
    return (q.shape[3] ** -0.5 if scale is None else checks.real(scale, "scale"),
            checks.real(softcap, "softcap", 0.0), checks.flag(causal, "causal"),
            checks.flag(deterministic, "deterministic"))


def _allowed(q: Operand, k: Operand) -> tuple[tuple[int, ...], ...]:
    """Sizes that the axes of a mask or bias may have."""
    return (1, q.shape[0]), (1, k.shape[2], q.shape[2]), (1, q.shape[1]), (1, k.shape[1])


def _dense(mask: Any, q: Operand, k: Operand) -> Operand:
    dense = describe(mask, "mask")
    checks.one_of_types(dense, ("bool",))
    if len(dense.shape) == 2:
        dense = checks.with_axes(dense, 4)
    checks.has_shape(dense, "(1|B, 1|Hkv|H, 1|Lq, 1|Lk)", _allowed(q, k))
    checks.rows_contiguous(dense)
    checks.require_same_device((q, dense))
    return checks.with_axes(dense, 4)


def _added(bias: Any, q: Operand, k: Operand) -> Operand:
    operand = describe(bias, "bias")
    checks.one_of_types(operand)
    batch, heads, queries, keys = _allowed(q, k)
    iskey_bias = len(operand.shape) == 3
    if iskey_bias:
        checks.has_shape(operand, "(1|B, 1|Hkv|H, 1|Lk)", (batch, heads, keys))
    else:
        checks.has_shape(operand, "(1|B, 1|Hkv|H, 1|Lk) or (1|B, 1|Hkv|H, 1|Lq, 1|Lk)", (batch, heads, queries, keys))
    if operand.strides[-1] != 1:
        checks.rows_contiguous(operand)
    checks.require_same_device((q, operand))
    return key_bias(operand) if iskey_bias else checks.with_axes(operand, 4)
