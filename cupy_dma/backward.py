"""Explicit gradient functions, for CuPy and NumPy users who have no autograd (SPEC section 6).

With ``p = exp(s - lse)``, the probabilities of the forward pass, and ``x = scale * q . k``, the logits before the
softcap:

    delta_i = sum_d dout[i, d] * out[i, d] - dlse[i]
    ds[i, j] = p[i, j] * (dout_i . v_j - delta_i)            visible pairs only, 0 elsewhere
    dx[i, j] = ds[i, j] * (1 - tanh(x / c)^2)                ds without a softcap
    dv_j = sum_i p[i, j] dout_i        dq_i = scale * sum_j dx[i, j] k_j        dk_j = scale * sum_i dx[i, j] q_i
    dbias = ds, summed over the axes along which the bias broadcasts and over the heads that share it; with a
            bias_delay over the pairs with p_i - j >= bias_delay only
    dsink = sum_i exp(sink - lse_i) * (-delta_i)             sink_logits: out and lse count the sink in

Everything is accumulated and reduced in float32 (float64 for float64) and rounded once, to the type of the argument.
The selection of keys is piecewise constant and has no gradient: the scores get theirs as a bias. Queries with no
visible keys and keys that no query sees get exact zeros, and a NaN or infinity in them propagates to no other gradient.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from cupy_dma import backends, checks
from cupy_dma.arrays import Array, Ints, Library, PageTable, Windows
from cupy_dma.calls.attention import attention_call, dynamic_call
from cupy_dma.calls.gradients import (
    Upstream,
    attention_gradients,
    chain_gradients,
    check_floats,
    check_needs,
    check_upstream,
    contiguous_floats,
)
from cupy_dma.calls.mask import Mask
from cupy_dma.calls.options import Options, Packing, Selection
from cupy_dma.calls.run import attention_of
from cupy_dma.calls.scores import recipe_of
from cupy_dma.calls.sinks import sink_gradient
from cupy_dma.calls.types import AttentionCall
from cupy_dma.calls.varlen import varlen_call
from cupy_dma.masks import IntervalMask


class _AttentionGradients(NamedTuple):
    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None


class AttentionGradients(_AttentionGradients):
    """Each has its argument's shape and type; None if not requested. ``sink_logits`` is an attribute, not an item of
    the tuple."""

    sink_logits: Any = None


class ScoreGradients(NamedTuple):
    """Each has its argument's shape and type; None for what was not asked for."""

    value: Any = None
    dt_proj: Any = None
    A: Any = None
    dt_bias: Any = None


class _DynamicGradients(NamedTuple):
    query: Any = None
    key: Any = None
    value: Any = None
    scores: Any = None
    dt_proj: Any = None
    A: Any = None
    dt_bias: Any = None


class DynamicGradients(_DynamicGradients):
    """Each has its argument's shape and type; None if not requested or not given. ``sink_logits`` is an attribute, not
    an item of the tuple."""

    sink_logits: Any = None


_ATTENTION_NEEDS = (*AttentionGradients._fields, "sink_logits")
_DYNAMIC_NEEDS = (*DynamicGradients._fields, "sink_logits")


def attention_backward(dout: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, *,
                       mask: Mask | None = None, bias: Array | None = None, bias_delay: int = 0, causal: bool = False,
                       scale: float | None = None, softcap: float = 0.0, sink_logits: Array | None = None,
                       deterministic: bool = False, dlse: Array | None = None, needs: Iterable[str] = _ATTENTION_NEEDS,
                       backend: str | None = None) -> AttentionGradients:
    """Gradients of ``cupy_dma.attention``, for arrays ``(B, L, H, D)``.

    Parameters
    ----------
    dout : float array ``(B, Lq, H, Dv)`` of query's type
        Gradient with respect to ``out``. Any strides; copied if its last axis is not contiguous.
    query, key, value, mask, bias, bias_delay, causal, scale, softcap, sink_logits, backend
        As passed to ``attention``.
    out, lse
        What ``attention(..., return_lse=True)`` returned.
    deterministic
        Bitwise reproducible results. If False, a backend may sum in any order: ``flex`` does, and on Hopper ``cuda``
        does for the gradient of the queries if few keys are hidden (no mask, or one of short sequences), which takes
        10 to 40 % less time.
    dlse : float array ``(B, H, Lq)``, optional
        Gradient with respect to ``lse``, if the loss depends on it.
    needs
        Any of ``"query"``, ``"key"``, ``"value"``, ``"bias"``, ``"sink_logits"``: gradients left out are not computed.
        All by default; ``"bias"`` and ``"sink_logits"`` are ignored if they were not given.

    Returns
    -------
    AttentionGradients
        ``(query, key, value, bias)``, each of the shape and type of its argument; None if not requested.
        ``sink_logits`` is an attribute.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or device, or ``needs`` an unknown name; nothing has been launched.
    NotImplementedError
        The backend does not support this combination, or a torch argument requires grad: there is no second derivative.

    Examples
    --------
    >>> x = np.ones((1, 4, 2, 8), np.float32)
    >>> out, lse = dma.attention(x, x, x, causal=True, return_lse=True)
    >>> grads = dma.backward.attention_backward(x, x, x, x, out, lse, causal=True)
    >>> grads.value[0, :, 0, 0].round(2)
    array([2.08, 1.08, 0.58, 0.25], dtype=float32)
    """
    wanted = check_needs(needs, _ATTENTION_NEEDS)
    options = Options(causal, scale, softcap, deterministic, bias_delay, sink_logits)
    call = attention_call(query, key, value, mask, bias, options)
    return _gradients(call, check_upstream(call, dout, out, lse, dlse), wanted, backend)


def varlen_attention_backward(dout: Array, query: Array, key: Array, value: Array, out: Array, lse: Array,
                              cu_seqlens_q: Ints, cu_seqlens_k: Ints | None, *, mask: IntervalMask | None = None,
                              bias: Array | None = None, bias_delay: int = 0, causal: bool = False,
                              scale: float | None = None, softcap: float = 0.0, sink_logits: Array | None = None,
                              deterministic: bool = False, dlse: Array | None = None,
                              block_table: PageTable | None = None, seqused_k: Ints | None = None,
                              max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                              needs: Iterable[str] = _ATTENTION_NEEDS,
                              backend: str | None = None) -> AttentionGradients:
    """Gradients of ``cupy_dma.varlen_attention``, for arrays ``(total, H, D)``.

    Parameters
    ----------
    dout : float array ``(total_q, H, Dv)`` of query's type
        Gradient with respect to ``out``. Any strides; copied if its last axis is not contiguous.
    query, key, value, cu_seqlens_q, cu_seqlens_k, mask, bias, bias_delay, causal, scale, softcap, sink_logits, \
seqused_k, max_seqlen_q, max_seqlen_k, backend
        As passed to ``varlen_attention``.
    out, lse
        What ``varlen_attention(..., return_lse=True)`` returned.
    dlse : float array ``(H, total_q)``, optional
        Gradient with respect to ``lse``, if the loss depends on it.
    deterministic, needs
        As for ``attention_backward``.
    block_table
        Must be None: a paged KV cache gets no gradient.

    Returns
    -------
    AttentionGradients
        ``(query, key, value, bias)``, each of the shape and type of its argument; None if not requested. Keys that
        belong to no sequence, or lie past ``seqused_k``, get zeros. ``sink_logits`` is an attribute.

    Raises
    ------
    As ``attention_backward`` and ``varlen_attention``; NotImplementedError for a ``block_table``.

    Examples
    --------
    Two sequences of 3 and 5 tokens:

    >>> x, lengths = np.ones((8, 2, 4)), [0, 3, 8]
    >>> out, lse = dma.varlen_attention(x, x, x, lengths, lengths, causal=True, return_lse=True)
    >>> grads = dma.backward.varlen_attention_backward(out, x, x, x, out, lse, lengths, lengths, causal=True)
    >>> grads.value[:, 0, 0].round(2)  # how much of the attention each key gets
    array([1.83, 0.83, 0.33, 2.28, 1.28, 0.78, 0.45, 0.2 ])
    """
    wanted = check_needs(needs, _ATTENTION_NEEDS)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, max_seqlen_q, max_seqlen_k)
    options = Options(causal, scale, softcap, deterministic, bias_delay, sink_logits)
    call = varlen_call(query, key, value, packing, mask, bias, options)
    return _gradients(call, check_upstream(call, dout, out, lse, dlse), wanted, backend)


def _gradients(call: AttentionCall, upstream: Upstream, wanted: frozenset[str],
               backend: str | None) -> AttentionGradients:
    """The wanted gradients of a checked call."""
    checks.require_no_grad((call.query, call.key, call.value, call.bias, call.sinks))
    wanted -= {name for name, given in (("bias", call.bias), ("sink_logits", call.sinks)) if given is None}
    module = backends.choose(backend, (call.query,))
    found = AttentionGradients()
    if wanted - {"sink_logits"}:
        made = attention_gradients(call, upstream, wanted - {"sink_logits"}, module)
        found = AttentionGradients(*_exported(call.query.library, made))
    if "sink_logits" in wanted:
        found.sink_logits = _sink_gradient(call, upstream)
    return found


def _sink_gradient(call: AttentionCall, upstream: Upstream) -> Any:
    library, (dout, out, lse, dlse) = call.query.library, upstream
    assert call.sinks is not None
    with library.on(call.query.device), np.errstate(all="ignore"):
        return library.export(sink_gradient(library, dout.array, out.array, lse.array,
                                            None if dlse is None else dlse.array, call.sinks, call.query.dtype))


def key_scores_backward(dscores: Array, value: Array, dt_proj: Array, A: Array, *, dt_bias: Array | None = None,
                        form: str = "exp", needs: Iterable[str] = ScoreGradients._fields,
                        backend: str | None = None) -> ScoreGradients:
    """Gradients of ``cupy_dma.key_scores``, for a value ``(B, Lk, Hkv, D)``.

    Parameters
    ----------
    dscores : float array ``(B, Hkv, Lk)``
        Gradient with respect to the scores. Copied if it is not contiguous or not float32 (float64 for a float64
        ``value``).
    value, dt_proj, A, dt_bias, form, backend
        As passed to ``key_scores``.
    needs
        Any of ``"value"``, ``"dt_proj"``, ``"A"``, ``"dt_bias"``: gradients left out are not computed. All by default;
        ``"dt_bias"`` is ignored if none was given.

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
    wanted = check_needs(needs, ScoreGradients._fields)
    recipe = recipe_of(value, dt_proj, A, dt_bias, form)
    v = recipe[0]
    upstream = check_floats(dscores, "dscores", "(B, Hkv, Lk)", (v.shape[0], v.shape[2], v.shape[1]), v)
    checks.require_no_grad(recipe[:4])
    module = backends.choose(backend, (v,))
    if dt_bias is None:
        wanted -= {"dt_bias"}
    if not wanted:
        return ScoreGradients()
    found = module.key_scores_backward(contiguous_floats(upstream, v), *recipe, wanted)
    return ScoreGradients(*_exported(v.library, found))


def dynamic_mask_attention_backward(
        dout: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, scores: Array | None = None, *,
        window: Windows, dt_proj: Array | None = None, A: Array | None = None, dt_bias: Array | None = None,
        form: str = "exp", keys: str = "prefix", padding: Array | None = None, documents: Array | None = None,
        bias_delay: int = 0, causal: bool = True, scale: float | None = None, softcap: float = 0.0,
        sink_logits: Array | None = None, deterministic: bool = False, dlse: Array | None = None,
        needs: Iterable[str] = _DYNAMIC_NEEDS, backend: str | None = None) -> DynamicGradients:
    """Gradients of ``cupy_dma.dynamic_mask_attention``, for arrays ``(B, L, H, D)``: scores and mask are recomputed.

    Parameters
    ----------
    dout, out, lse, dlse, deterministic
        As for ``attention_backward``.
    query, key, value, scores, window, dt_proj, A, dt_bias, form, keys, padding, documents, bias_delay, causal, \
scale, softcap, sink_logits, backend
        As passed to ``dynamic_mask_attention``.
    needs
        Any of ``"query"``, ``"key"``, ``"value"``, ``"scores"``, ``"dt_proj"``, ``"A"``, ``"dt_bias"``,
        ``"sink_logits"``. All by default; names of arguments that were not given are ignored.

    Returns
    -------
    DynamicGradients
        Where the scores are computed from ``value``, its gradient is the sum of both terms, added before the last
        rounding. ``sink_logits`` is an attribute, as in ``attention_backward``.

    Raises
    ------
    As ``attention_backward`` and ``dynamic_mask_attention``.

    Examples
    --------
    >>> x, scores = np.ones((1, 6, 2, 4)), np.zeros((1, 2, 6))
    >>> out, lse = dma.dynamic_mask_attention(x, x, x, scores, window=2, return_lse=True)
    >>> grads = dma.backward.dynamic_mask_attention_backward(out, x, x, x, out, lse, scores, window=2)
    >>> grads.value[0, :, 0, 0]  # equal scores: every query sees itself and the key before
    array([1.5, 1. , 1. , 1. , 1. , 0.5])
    """
    wanted = check_needs(needs, _DYNAMIC_NEEDS)
    selection = Selection(scores, window, dt_proj, A, dt_bias, form, keys, padding, documents)
    options = Options(causal, scale, softcap, deterministic, bias_delay, sink_logits)
    call = dynamic_call(query, key, value, selection, options)
    attention, recipe = call.attention, call.recipe
    checks.require_no_grad((attention.query, attention.key, attention.value, call.scores, attention.sinks,
                            *(recipe or ())[1:4]))
    upstream = check_upstream(attention, dout, out, lse, dlse)
    given = {"scores": scores, "dt_proj": dt_proj, "A": A, "dt_bias": dt_bias, "sink_logits": sink_logits}
    wanted -= {name for name, argument in given.items() if argument is None}
    module, gradients = backends.choose(backend, (attention.query,)), DynamicGradients()
    if wanted - {"sink_logits"}:
        needed = frozenset("bias" if name == "scores" else name for name in wanted - {"sink_logits"})
        found = chain_gradients(attention_of(call, module), recipe, upstream, needed, module)
        if recipe is None:
            found["scores"] = found["bias"]
        gradients = DynamicGradients(*_exported(attention.query.library, [
            found.get(name) for name in DynamicGradients._fields]))
    if "sink_logits" in wanted:
        gradients.sink_logits = _sink_gradient(attention, upstream)
    return gradients


def _exported(library: Library, arrays: Iterable[Any]) -> list[Any]:
    return [None if array is None else library.export(array) for array in arrays]
