"""Gradients, by hand: for CuPy and NumPy users who have no autograd (SPEC section 6).

With ``p = exp(s - lse)`` the probabilities of the forward pass and ``x = scale * q . k`` before the softcap:

    delta_i = sum_d dout[i, d] * out[i, d] - dlse[i]
    ds[i, j] = p[i, j] * (dout_i . v_j - delta_i)            visible pairs only, 0 elsewhere
    dx[i, j] = ds[i, j] * (1 - tanh(x / c)^2)                ds itself without a softcap
    dv_j = sum_i p[i, j] dout_i        dq_i = scale * sum_j dx[i, j] k_j        dk_j = scale * sum_i dx[i, j] q_i
    dbias = ds, summed over the axes along which the bias broadcasts and over the heads that share it

Everything is accumulated and reduced in float32 (float64 for float64) and rounded once, to the type of the argument.
The selection of keys is piecewise constant and has no gradient: the scores get theirs as the bias. Rows that see
nothing and keys that nobody sees get exact zeros, and what they hold, NaN or infinity, reaches no other gradient.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from cupy_dma import backends, checks
from cupy_dma.arrays import Library, Operand, describe
from cupy_dma.calls import scores as scores_module
from cupy_dma.calls.attention import attention_call, dynamic_call
from cupy_dma.calls.run import scores_of
from cupy_dma.calls.types import AttentionBackwardCall, AttentionCall
from cupy_dma.calls.varlen import varlen_call
from cupy_dma.masks.selection import select


class AttentionGradients(NamedTuple):
    """Each of its argument's shape and type; None for what was not asked for."""

    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None


class ScoreGradients(NamedTuple):
    """Each of its argument's shape and type; None for what was not asked for."""

    value: Any = None
    dt_proj: Any = None
    A: Any = None
    dt_bias: Any = None


class DynamicGradients(NamedTuple):
    """Each of its argument's shape and type; None for what was not asked for or not given."""

    query: Any = None
    key: Any = None
    value: Any = None
    scores: Any = None
    dt_proj: Any = None
    A: Any = None
    dt_bias: Any = None


def attention_backward(dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, *, mask: Any = None,
                       bias: Any = None, causal: bool = False, scale: float | None = None, softcap: float = 0.0,
                       deterministic: bool = False, dlse: Any = None,
                       needs: Iterable[str] = AttentionGradients._fields,
                       backend: str | None = None) -> AttentionGradients:
    """Gradients of ``cupy_dma.attention``.

    Parameters
    ----------
    dout : float array ``(B, Lq, H, D)`` of query's type
        Gradient of ``out``. Any strides; copied if its last axis is not contiguous.
    query, key, value, mask, bias, causal, scale, softcap, backend
        As they were given to ``attention``.
    out, lse
        What ``attention(..., return_lse=True)`` returned.
    deterministic
        The same bits on every run. False leaves a backend free to sum in any order.
    dlse : float array ``(B, H, Lq)``, optional
        Gradient of ``lse``, where the caller has used it too.
    needs
        Any of ``"query"``, ``"key"``, ``"value"``, ``"bias"``: what is left out is not computed. All by default; a
        ``"bias"`` that was not given is ignored.

    Returns
    -------
    AttentionGradients
        ``(query, key, value, bias)``, each of the shape and type of its argument; None where not asked for.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, shape or place, or ``needs`` an unknown name; nothing has been launched.
    NotImplementedError
        The backend does not serve this combination, or a torch argument requires grad: there is no second derivative.
    """
    wanted = _wanted(needs, AttentionGradients._fields)
    call = attention_call(query, key, value, mask, bias, causal, scale, softcap, deterministic)
    upstream = _upstreams(call.query, dout, out, lse, dlse)
    return _gradients(call, upstream, wanted, backend)


def varlen_attention_backward(dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, cu_seqlens_q: Any,
                              cu_seqlens_k: Any, *, mask: Any = None, bias: Any = None, causal: bool = False,
                              scale: float | None = None, softcap: float = 0.0, deterministic: bool = False,
                              dlse: Any = None, block_table: Any = None, seqused_k: Any = None,
                              max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                              needs: Iterable[str] = AttentionGradients._fields,
                              backend: str | None = None) -> AttentionGradients:
    """Gradients of ``cupy_dma.varlen_attention``.

    Parameters
    ----------
    dout : float array ``(total_q, H, D)`` of query's type
        Gradient of ``out``. Any strides; copied if its last axis is not contiguous.
    query, key, value, cu_seqlens_q, cu_seqlens_k, mask, bias, causal, scale, softcap, seqused_k, max_seqlen_q, \
max_seqlen_k, backend
        As they were given to ``varlen_attention``.
    out, lse
        What ``varlen_attention(..., return_lse=True)`` returned.
    dlse : float array ``(H, total_q)``, optional
        Gradient of ``lse``, where the caller has used it too.
    deterministic, needs
        As for ``attention_backward``.
    block_table
        None: there is no gradient through pages.

    Returns
    -------
    AttentionGradients
        ``(query, key, value, bias)``, each of the shape and type of its argument; None where not asked for. Keys that
        belong to no sequence, or lie behind ``seqused_k``, get zeros.

    Raises
    ------
    As ``attention_backward`` and ``varlen_attention``; NotImplementedError for a ``block_table``.
    """
    wanted = _wanted(needs, AttentionGradients._fields)
    if block_table is not None:
        raise NotImplementedError("block_table must be None: paged attention has no backward pass (the pages of a "
                                  "cache are shared); gather the keys and give them as (total_k, Hkv, D)")
    call = varlen_call(query, key, value, cu_seqlens_q, cu_seqlens_k, mask, bias, causal, scale, softcap, deterministic,
                       None, seqused_k, max_seqlen_q, max_seqlen_k)
    upstream = _upstreams(call.query, dout, out, lse, dlse, packed=True)
    found = _gradients(call, upstream, wanted, backend)
    return AttentionGradients(*[None if array is None else array[0] for array in found])


def _gradients(call: AttentionCall, upstream: tuple[Operand, Operand, Operand, Operand | None], wanted: frozenset[str],
               backend: str | None) -> AttentionGradients:
    """The wanted gradients of a checked call."""
    checks.require_no_grad((call.query, call.key, call.value, call.bias))
    if call.bias is None:
        wanted -= {"bias"}
    module = backends.choose(backend, (call.query,))
    if not wanted:
        return AttentionGradients()
    dq, dk, dv, dbias = module.attention_backward(AttentionBackwardCall(call, *upstream, wanted))
    if dbias is not None and call.bias is not None:
        dbias = dbias.reshape(tuple(call.bias.array.shape))
    return AttentionGradients(*_exported(call.query.library, (dq, dk, dv, dbias)))


def key_scores_backward(dscores: Any, value: Any, dt_proj: Any, A: Any, *, dt_bias: Any = None, form: str = "exp",
                        needs: Iterable[str] = ScoreGradients._fields, backend: str | None = None) -> ScoreGradients:
    """Gradients of ``cupy_dma.key_scores``.

    Parameters
    ----------
    dscores : float array ``(B, Hkv, Lk)``
        Gradient of the scores. Copied if it is not contiguous or not float32 (float64 for a float64 ``value``).
    value, dt_proj, A, dt_bias, form, backend
        As they were given to ``key_scores``.
    needs
        Any of ``"value"``, ``"dt_proj"``, ``"A"``, ``"dt_bias"``: what is left out is not computed. All by default; a
        ``"dt_bias"`` that was not given is ignored.

    Returns
    -------
    ScoreGradients
        ``(value, dt_proj, A, dt_bias)``, each of the shape and type of its argument; None where not asked for. With
        ``dt = value @ dt_proj + dt_bias`` and ``ddt = dscores * A * sigmoid(dt)`` (times ``score`` for ``"exp"``):
        ``dvalue = ddt @ dt_proj``, ``ddt_proj = ddt^T @ value``, ``ddt_bias = sum of ddt``, and ``dA`` is the sum of
        ``dscores * softplus(dt)`` (times ``score``).

    Raises
    ------
    As ``attention_backward``.
    """
    wanted = _wanted(needs, ScoreGradients._fields)
    recipe = scores_module.prepare(value, dt_proj, A, dt_bias, form)
    v = recipe[0]
    upstream = _described(dscores, "dscores", "(B, Hkv, Lk)", (v.shape[0], v.shape[2], v.shape[1]), v)
    checks.require_no_grad(recipe[:4])
    module = backends.choose(backend, (v,))
    if dt_bias is None:
        wanted -= {"dt_bias"}
    if not wanted:
        return ScoreGradients()
    return ScoreGradients(*_exported(v.library, module.key_scores_backward(_packed(upstream, v), *recipe, wanted)))


def dynamic_mask_attention_backward(
        dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, scores: Any = None, *, window: int,
        dt_proj: Any = None, A: Any = None, dt_bias: Any = None, form: str = "exp", keys: str = "prefix",
        padding: Any = None, documents: Any = None, causal: bool = True, scale: float | None = None,
        softcap: float = 0.0, deterministic: bool = False, dlse: Any = None,
        needs: Iterable[str] = DynamicGradients._fields, backend: str | None = None) -> DynamicGradients:
    """Gradients of ``cupy_dma.dynamic_mask_attention``: scores and selection are computed again.

    Parameters
    ----------
    dout, out, lse, dlse, deterministic
        As for ``attention_backward``.
    query, key, value, scores, window, dt_proj, A, dt_bias, form, keys, padding, documents : as the forward has them
    causal, scale, softcap, backend
        As they were given to ``dynamic_mask_attention``.
    needs
        Any of ``"query"``, ``"key"``, ``"value"``, ``"scores"``, ``"dt_proj"``, ``"A"``, ``"dt_bias"``. All by default;
        what was not given is ignored.

    Returns
    -------
    DynamicGradients
        Where the scores are made from ``value``, its gradient has both parts, added before the last rounding.

    Raises
    ------
    As ``attention_backward`` and ``dynamic_mask_attention``.
    """
    wanted = _wanted(needs, DynamicGradients._fields)
    call = dynamic_call(query, key, value, scores, window, dt_proj, A, dt_bias, form, keys, padding, documents, causal,
                        scale, softcap, deterministic)
    recipe = call.recipe
    checks.require_no_grad((call.query, call.key, call.value, call.scores, *(recipe or ())[1:4]))
    upstream = _upstreams(call.query, dout, out, lse, dlse)
    given = {"scores": scores, "dt_proj": dt_proj, "A": A, "dt_bias": dt_bias}
    wanted -= {name for name, argument in given.items() if argument is None}
    through_scores = wanted - {"query", "key", "scores"} if recipe is not None else frozenset[str]()
    direct = wanted & {"query", "key", "value"} | ({"bias"} if through_scores or "scores" in wanted else set())
    module = backends.choose(backend, (call.query,))
    if not direct:
        return DynamicGradients()

    ranked = scores_of(call, module)
    mask = select(ranked, call.window, call.keys, call.candidates, module)
    dq, dk, dv, dbias = module.attention_backward(
        AttentionBackwardCall(call.attention(ranked, mask), *upstream, frozenset(direct)))
    found = {"query": dq, "key": dk, "value": dv}
    if dbias is not None:
        found["scores"] = dbias.reshape(ranked.shape)
    if recipe is not None and through_scores:
        dscores, added = (None if array is None else _operand(array, name, call.value.library)
                          for array, name in ((found.pop("scores"), "dscores"), (dv, "dvalue")))
        parts = module.key_scores_backward(dscores, *recipe, through_scores, added)
        found.update((name, part) for name, part in zip(ScoreGradients._fields, parts) if name in through_scores)
    return DynamicGradients(*_exported(call.query.library, [found.get(name) for name in DynamicGradients._fields]))


def _wanted(needs: Iterable[str], allowed: tuple[str, ...]) -> frozenset[str]:
    names = (needs,) if isinstance(needs, str) else tuple(needs)
    for name in names:
        if name not in allowed:
            raise ValueError(f"needs must be some of {', '.join(map(repr, allowed))}, got {name!r}")
    return frozenset(names)


def _exported(library: Library, arrays: Iterable[Any]) -> list[Any]:
    return [None if array is None else library.export(array) for array in arrays]


def _upstreams(q: Operand, dout: Any, out: Any, lse: Any, dlse: Any,
               packed: bool = False) -> tuple[Operand, Operand, Operand, Operand | None]:
    """``dout, out, lse, dlse`` of a call with this query, as ``AttentionBackwardCall`` promises them. ``packed``: they
    have no batch axis."""
    rows = describe(dout, "dout"), describe(out, "out")
    given = q.shape[1:] if packed else q.shape
    for operand in rows:
        if operand.dtype != q.dtype:
            raise TypeError(f"{operand.name} must have query's type {q.dtype}, got {operand.dtype}")
        if operand.shape != given:
            raise ValueError(f"{operand.name} must have query's shape {given}, got {operand.shape}")
        checks.require_same_device((q, operand))
    shape = (q.shape[2], q.shape[1]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    numbers = [None if array is None else _described(array, name, "(H, total_q)" if packed else "(B, H, Lq)", shape, q)
               for array, name in ((lse, "lse"), (dlse, "dlse"))]
    if numbers[0] is None:
        raise TypeError("lse must be an array, got None: it is what attention(..., return_lse=True) returned")
    do, o = (operand if operand.strides[-1] == 1 else _contiguous(operand) for operand in rows)
    l, dl = _packed(numbers[0], q), None if numbers[1] is None else _packed(numbers[1], q)
    if packed:
        do, o, l = checks.with_axes(do, 4), checks.with_axes(o, 4), checks.with_axes(l, 3)
        dl = None if dl is None else checks.with_axes(dl, 3)
    return do, o, l, dl


def _described(array: Any, name: str, meaning: str, shape: tuple[int, ...], like: Operand) -> Operand:
    """A checked float operand of this shape."""
    operand = describe(array, name)
    checks.one_of_types(operand)
    checks.has_shape(operand, meaning, [(size,) for size in shape])
    checks.require_same_device((like, operand))
    return operand


def _packed(operand: Operand, like: Operand) -> Operand:
    """Contiguous, in the type of numbers per row or key: float32, float64 for float64."""
    kind = "float64" if like.dtype == "float64" else "float32"
    if operand.dtype != kind:
        operand = _operand(operand.library.astype(operand.array, kind), operand.name, operand.library)
    return _contiguous(operand)


def _contiguous(operand: Operand) -> Operand:
    packed = operand.library.contiguous(operand.array)
    return operand if packed is operand.array else _operand(packed, operand.name, operand.library)


def _operand(array: Any, name: str, library: Library) -> Operand:
    """The Operand of an array made here; it belongs to the caller's library also where that is a DLPack producer."""
    return replace(library.describe(array, name), library=library)
