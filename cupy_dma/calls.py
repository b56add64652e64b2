"""Arguments that have passed every check: what the public functions hand to a backend.

Checks look at shapes and types only: they cost a few microseconds and never touch array data.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma import checks
from cupy_dma import scores as scores_module
from cupy_dma.arrays import Operand, describe
from cupy_dma.mask_argument import check_mask
from cupy_dma.masks import IntervalMask
from cupy_dma.selection import Candidates, check_candidates
from cupy_dma.sequences import Sequences


@dataclass(slots=True, eq=False)  # not frozen for speed, but never changed
class AttentionCall:
    """What a backend's ``attention`` gets: arguments that have passed every check."""

    query: Operand  # (B, Lq, H, D)
    key: Operand  # (B, Lk, Hkv, D)
    value: Operand  # (B, Lk, Hkv, D)
    # Bias and dense mask are (1|B, 1|Hkv|H, 1|Lq, 1|Lk) with stride 0 on every axis of size 1; their ``array`` is the
    # caller's, which may have fewer axes.
    mask: IntervalMask | None
    dense: Operand | None  # a key must be visible in both
    bias: Operand | None
    causal: bool  # cut at j <= p_i, in addition to the mask
    scale: float
    softcap: float  # 0 = none
    deterministic: bool
    sequences: Sequences | None = None  # varlen: packed in arrays of B = 1; key and value may be pages (see there)

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def query_length(self) -> int:
        return self.query.shape[1]

    @property
    def heads(self) -> int:
        return self.query.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def key_length(self) -> int:
        return self.key.shape[1] if self.sequences is None else self.sequences.key_length

    @property
    def kv_heads(self) -> int:
        return self.key.shape[2]


@dataclass(slots=True, eq=False)  # not frozen for speed, but never changed
class AttentionBackwardCall:
    """What a backend's ``attention_backward`` gets. ``dout`` and ``out`` have contiguous rows and any strides of B, L
    and head (0 among them); ``lse`` and ``dlse`` are contiguous."""

    forward: AttentionCall
    dout: Operand  # (B, Lq, H, D), query's type
    out: Operand  # (B, Lq, H, D), query's type: what the forward returned
    lse: Operand  # (B, H, Lq) float32, float64 for float64
    dlse: Operand | None  # as lse
    needs: frozenset[str]  # of "query", "key", "value", "bias"; not empty, "bias" only if there is one


@dataclass(slots=True, eq=False)  # not frozen for speed, but never changed
class DynamicCall:
    """Arguments of ``dynamic_mask_attention``: the scores, or the recipe that makes them."""

    query: Operand
    key: Operand
    value: Operand
    scores: Operand | None  # (B, Hkv|H, Lk)
    recipe: scores_module.Recipe | None
    window: int
    keys: str
    candidates: Candidates
    causal: bool
    scale: float
    softcap: float
    deterministic: bool

    def attention(self, scores: Operand, mask: IntervalMask) -> AttentionCall:
        """The attention under ``mask`` with the scores as key bias. A prefix mask is causal by itself."""
        return AttentionCall(self.query, self.key, self.value, mask, None, key_bias(scores),
                             self.causal and self.keys == "global", self.scale, self.softcap, self.deterministic)


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
        checks.require_same_place((q, recipe[1]))
    else:
        extra = [name for name, argument in (("A", A), ("dt_bias", dt_bias)) if argument is not None]
        if extra:
            raise ValueError(f"{' and '.join(extra)} must come with dt_proj, got scores")
        ranked = describe(scores, "scores")
        checks.one_of_types(ranked)
        checks.has_shape(ranked, "(B, Hkv, Lk)", ((k.shape[0],), (k.shape[2], q.shape[2]), (k.shape[1],)))
        checks.rows_contiguous(ranked)
        checks.require_same_place((q, ranked))
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
    checks.require_same_place((q, k, v))
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
    checks.require_same_place((q, dense))
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
    checks.require_same_place((q, operand))
    return key_bias(operand) if iskey_bias else checks.with_axes(operand, 4)


def key_bias(scores: Operand) -> Operand:
    """(B, H, Lk) as (B, H, 1, Lk): a query axis of size 1 and stride 0, the same memory."""
    (b, h, n), (sb, sh, sn) = scores.shape, scores.strides
    strides = (0 if b == 1 else sb, 0 if h == 1 else sh, 0, 0 if n == 1 else sn)
    return Operand("bias", scores.array, scores.library, (b, h, 1, n), strides, scores.dtype, scores.device,
                   scores.pointer)
