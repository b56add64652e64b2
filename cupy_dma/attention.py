"""Attention over the keys that a mask keeps (SPEC section 5): check the arguments, choose a backend, hand back arrays.

    s[i, j] = softcap(scale * q_i . k_j) + bias[i, j]        softcap(x) = c * tanh(x / c) for c > 0, otherwise x
    out_i   = sum over visible j of softmax_j(s[i, j]) * v_j
    lse_i   = log(sum over visible j of exp(s[i, j]))

Query ``i`` stands at key position ``p_i = i + Lk - Lq``. A query that sees nothing gets ``out = 0, lse = -inf``.
Everything here is checks on shapes and types: it costs a few microseconds and never touches array data.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cupy_dma import backends, checks
from cupy_dma import scores as scores_module
from cupy_dma.arrays import Operand, describe
from cupy_dma.masks import IntervalMask
from cupy_dma.selection import check_candidates, select


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """What a backend's ``attention`` gets: arguments that have passed every check."""

    query: Operand  # (B, Lq, H, D)
    key: Operand  # (B, Lk, Hkv, D)
    value: Operand  # (B, Lk, Hkv, D)
    # Bias and dense mask are (1|B, 1|Hkv|H, 1|Lq, 1|Lk) with stride 0 on every axis of size 1; their ``array`` is the
    # caller's, which may have fewer axes.
    mask: IntervalMask | Operand | None
    bias: Operand | None
    causal: bool  # cut at j <= p_i, in addition to the mask
    scale: float
    softcap: float  # 0 = none
    deterministic: bool

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
        return self.key.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[2]


def attention(query: Any, key: Any, value: Any, *, mask: Any = None, bias: Any = None, causal: bool = False,
              scale: float | None = None, softcap: float = 0.0, deterministic: bool = False, return_lse: bool = False,
              backend: str | None = None) -> Any:
    """Attention over the visible keys.

    Parameters
    ----------
    query : float array ``(B, Lq, H, D)``
    key, value : float array ``(B, Lk, Hkv, D)``
        ``H`` a multiple of ``Hkv``, ``D`` from 1 to 256, lengths from 0, any strides of B, L and head (a BHSD tensor is
        a view), the last axis contiguous. float16 or bfloat16 everywhere; float32 in full on numpy and through TF32
        tensor cores where the cuda backend offers it; float64 on numpy.
    mask : IntervalMask, or bool array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` or ``(Lq, Lk)``, optional
        True = visible. A dense mask may be anything, at the cost of reading it.
    bias : float array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)``, optional
        Added after scale and softcap, in natural-log units. ``(1|B, 1|Hkv|H, Lk)`` is a key bias, such as the scores.
    causal
        Query ``i`` sees only keys ``j <= p_i``, in addition to the mask.
    scale
        Default ``1 / sqrt(D)``.
    softcap
        0 means none.
    deterministic
        The same bits on every run also in the backward pass; the forward is always deterministic.
    return_lse
        Return ``(out, lse)``.
    backend
        See ``cupy_dma.get_available_backends``. ``"numpy"`` with CUDA arrays copies to the host and back.

    Returns
    -------
    out : array ``(B, Lq, H, D)`` of query's library and type, contiguous
    lse : float32 array ``(B, H, Lq)``, natural log (float64 for float64), with ``return_lse``

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, shape or place; nothing has been launched.
    NotImplementedError
        The backend does not serve this combination, or a torch argument requires grad (the backward pass arrives with
        a later version).
    """
    q, k, v = _describe_qkv(query, key, value)
    scale, softcap, causal, deterministic = _options(q, scale, softcap, causal, deterministic)
    seen = None if mask is None else _mask(mask, q, k)
    added = None if bias is None else _bias(bias, q, k)
    checks.require_no_grad((q, k, v, added))
    call = AttentionCall(q, k, v, seen, added, causal, scale, softcap, deterministic)
    return _run(call, return_lse, backends.choose(backend, (q,)))


def dynamic_mask_attention(query: Any, key: Any, value: Any, scores: Any = None, *, window: int, dt_proj: Any = None,
                           A: Any = None, dt_bias: Any = None, form: str = "exp", keys: str = "prefix",
                           padding: Any = None, documents: Any = None, causal: bool = True,
                           scale: float | None = None, softcap: float = 0.0, deterministic: bool = False,
                           return_lse: bool = False, backend: str | None = None) -> Any:
    """Every query attends to its ``window`` highest-scored keys, with the scores as key bias.

    The same as ``attention(query, key, value, mask=IntervalMask.top_w(scores, window), bias=scores)``.

    Parameters
    ----------
    query, key, value, scale, softcap, deterministic, return_lse, backend
        As for ``attention``.
    scores : float array ``(B, Hkv, Lk)``
        Or instead ``dt_proj``, ``A`` and maybe ``dt_bias`` and ``form``, from which ``key_scores`` makes them.
    window : int
        Keys kept per query, at least 1.
    keys, padding, documents
        As for ``IntervalMask.top_w``.
    causal
        Prefix masks are causal by construction, so False is only allowed with ``keys="global"``.

    Returns
    -------
    As ``attention``.

    Raises
    ------
    As ``attention`` and ``IntervalMask.top_w``; ValueError also if both or neither of scores and dt_proj are given.
    """
    q, k, v = _describe_qkv(query, key, value)
    scale, softcap, causal, deterministic = _options(q, scale, softcap, causal, deterministic)
    window = checks.whole(window, "window", 1)
    checks.choice(keys, "keys", ("prefix", "global"))
    if keys == "prefix" and not causal:
        raise ValueError("causal=False needs keys='global', got keys='prefix', which is causal by construction")
    if (scores is None) == (dt_proj is None):
        raise ValueError(f"give either scores or dt_proj and A, got {'neither' if scores is None else 'both'}")
    module = backends.choose(backend, (q,))
    if scores is None:
        if A is None:
            raise ValueError("A must be given with dt_proj, got None")
        recipe = scores_module.prepare(value, dt_proj, A, dt_bias, form)
        checks.require_same_place((q, recipe[1]))
        checks.require_no_grad((q, k, v))
        candidates = check_candidates(padding, documents, q, k.shape[0], k.shape[1])
        ranked = replace(describe(module.key_scores(*recipe), "scores"), library=k.library)
    else:
        extra = [name for name, argument in (("A", A), ("dt_bias", dt_bias)) if argument is not None]
        if extra:
            raise ValueError(f"{' and '.join(extra)} must come with dt_proj, got scores")
        ranked = describe(scores, "scores")
        checks.one_of_types(ranked)
        checks.has_shape(ranked, "(B, Hkv, Lk)", ((k.shape[0],), (k.shape[2], q.shape[2]), (k.shape[1],)))
        checks.rows_contiguous(ranked)
        checks.require_same_place((q, ranked))
        checks.require_no_grad((q, k, v, ranked))
        candidates = check_candidates(padding, documents, q, k.shape[0], k.shape[1])
    mask = select(ranked, window, keys, candidates, module)
    call = AttentionCall(q, k, v, mask, _key_bias(ranked), causal and keys == "global", scale, softcap, deterministic)
    return _run(call, return_lse, module)


def _run(call: AttentionCall, return_lse: bool, module: Any) -> Any:
    out, lse = module.attention(call)
    export = call.query.library.export
    return (export(out), export(lse)) if return_lse else export(out)


def _describe_qkv(query: Any, key: Any, value: Any) -> tuple[Operand, Operand, Operand]:
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


def _options(q: Operand, scale: float | None, softcap: float, causal: bool,
             deterministic: bool) -> tuple[float, float, bool, bool]:
    return (q.shape[3] ** -0.5 if scale is None else checks.real(scale, "scale"),
            checks.real(softcap, "softcap", 0.0), checks.flag(causal, "causal"),
            checks.flag(deterministic, "deterministic"))


def _allowed(q: Operand, k: Operand) -> tuple[tuple[int, ...], ...]:
    """Sizes that the axes of a mask or bias may have."""
    return (1, q.shape[0]), (1, k.shape[2], q.shape[2]), (1, q.shape[1]), (1, k.shape[1])


def _mask(mask: Any, q: Operand, k: Operand) -> IntervalMask | Operand:
    if isinstance(mask, IntervalMask):
        allowed = _allowed(q, k)
        if mask.shape[0] not in allowed[0] or mask.shape[1] not in allowed[1] or mask.key_length != k.shape[1]:
            raise ValueError(f"mask must have shape (1|B, 1|Hkv|H, Lk) with B={q.shape[0]}, Hkv={k.shape[2]}, "
                             f"H={q.shape[2]}, Lk={k.shape[1]}, got {mask.shape}")
        if mask.device != q.device or mask.library.name != q.library.name:
            raise ValueError(f"mask must be of query's library and device, {q.library.name} on {q.device}, got "
                             f"{mask!r}; move it with mask.to(query)")
        return mask
    dense = describe(mask, "mask")
    checks.one_of_types(dense, ("bool",))
    if len(dense.shape) == 2:
        dense = checks.with_axes(dense, 4)
    checks.has_shape(dense, "(1|B, 1|Hkv|H, 1|Lq, 1|Lk)", _allowed(q, k))
    checks.rows_contiguous(dense)
    checks.require_same_place((q, dense))
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
        checks.rows_contiguous(operand)
    checks.require_same_place((q, operand))
    return _key_bias(operand) if is_key_bias else checks.with_axes(operand, 4)


def _key_bias(scores: Operand) -> Operand:
    """(B, H, Lk) as (B, H, 1, Lk): a query axis of size 1 and stride 0, the same memory."""
    (b, h, n), (sb, sh, sn) = scores.shape, scores.strides
    strides = (0 if b == 1 else sb, 0 if h == 1 else sh, 0, 0 if n == 1 else sn)
    return Operand("bias", scores.array, scores.library, (b, h, 1, n), strides, scores.dtype, scores.device,
                   scores.pointer)
