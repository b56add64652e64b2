"""Attention for jax arrays: the arguments are checked and the task is fixed when a function is traced."""
from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from cupy_dma import checks
from cupy_dma.arrays import Windows
from cupy_dma.calls.attention import attention_call, dynamic_call
from cupy_dma.calls.mask import masks_in
from cupy_dma.calls.options import Options, Selection
from cupy_dma.calls.types import AttentionCall
from cupy_dma.jax.arguments import (
    Array,
    as_array,
    check_backend,
    in_bhnd,
    optional_array,
    require_static,
    rows,
    stand_in,
)
from cupy_dma.jax.batching import alike
from cupy_dma.jax.derivatives import add_sinks, attend
from cupy_dma.jax.masks import IntervalMask, Mask, intersect
from cupy_dma.jax.scores import candidates, keeps_all, key_scores, widened
from cupy_dma.jax.tasks import Task
from cupy_dma.masks import interval
from cupy_dma.masks.selection import selection_hints


def attention(query: Array, key: Array, value: Array, *, mask: Mask | None = None, bias: Array | None = None,
              bias_delay: int = 0, causal: bool = False, scale: float | None = None, softcap: float = 0.0,
              sink_logits: Array | None = None, deterministic: bool = False, return_lse: bool = False,
              layout: str | None = None, backend: str | None = None) -> Any:
    """``cupy_dma.attention`` of jax arrays, with gradients for ``query``, ``key``, ``value``, ``bias`` and
    ``sink_logits``.

    Parameters
    ----------
    query : float array ``(B, Lq, H, D)``, or ``(B, H, Lq, D)`` with ``layout="bhnd"``
    key, value : float array ``(B, Lk, Hkv, D)``, or ``(B, Hkv, Lk, D)``; the value with a head dim ``Dv`` of its own
    mask : IntervalMask, or bool array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` or ``(Lq, Lk)``, or several in a tuple, optional
        An ``IntervalMask`` of this module, a pytree, or of ``cupy_dma``.
    bias : float array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` or ``(1|B, 1|Hkv|H, Lk)``, optional
    sink_logits : float array ``(H,)``, optional
    bias_delay, causal, scale, softcap, deterministic, return_lse, layout, backend
        As for ``cupy_dma.attention``; static.

    Returns
    -------
    out : array ``(B, Lq, H, Dv)`` of query's type
    lse : float32 array ``(B, H, Lq)``, natural log (float64 for float64), with ``return_lse``

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or value; raised when the function is traced.
    NotImplementedError
        A gradient is differentiated again.
    """
    require_static(bias_delay=bias_delay, causal=causal, scale=scale, softcap=softcap, deterministic=deterministic,
                   return_lse=return_lse, layout=layout, backend=backend)
    turned = in_bhnd(attention, layout, {"query": query, "key": key, "value": value}, {
        "mask": mask, "bias": bias, "bias_delay": bias_delay, "causal": causal, "scale": scale, "softcap": softcap,
        "sink_logits": sink_logits, "deterministic": deterministic, "return_lse": return_lse, "backend": backend})
    if turned is not NotImplemented:
        return turned
    floats = {"query": rows(query, "query"), "key": rows(key, "key"), "value": rows(value, "value")}
    if bias is not None:
        floats["bias"] = as_array(bias, "bias")
    shapes = stand_in(floats["query"]), stand_in(floats["key"]), stand_in(floats["value"])
    sinks = optional_array(sink_logits, "sink_logits")
    options = Options(causal, scale, softcap, deterministic, bias_delay, stand_in(sinks))
    call = attention_call(*shapes, None, stand_in(floats.get("bias")), options, layout)
    checks.flag(return_lse, "return_lse")
    check_backend(backend, floats["query"])
    masks = [_checked_mask(item, shapes, call) for item in masks_in(mask)]
    runs, dense = intersect(masks, call.key_length, call.kv_heads, call.heads)
    others = {} if dense is None else {"dense": dense}
    if runs is not None:
        others.update(start=runs.start, stop=runs.stop)
    task = Task("attention", backend, options=call.options, hints=None if runs is None else runs._hints)
    return _attended(task, floats, others, call, sinks, return_lse)


def dynamic_mask_attention(query: Array, key: Array, value: Array, scores: Array | None = None, *, window: Windows,
                           dt_proj: Array | None = None, A: Array | None = None, dt_bias: Array | None = None,
                           form: str = "exp", keys: str = "prefix", padding: Array | None = None,
                           documents: Array | None = None, bias_delay: int = 0, causal: bool = True,
                           scale: float | None = None, softcap: float = 0.0, sink_logits: Array | None = None,
                           deterministic: bool = False, return_lse: bool = False, layout: str | None = None,
                           backend: str | None = None) -> Any:
    """``cupy_dma.dynamic_mask_attention`` of jax arrays, with gradients for ``query``, ``key``, ``value``, ``scores``
    and ``sink_logits``, or through the scores for ``value`` (both terms), ``dt_proj``, ``A`` and ``dt_bias``.

    Parameters
    ----------
    query, key, value, bias_delay, scale, softcap, sink_logits, deterministic, return_lse, layout, backend
        As for ``attention``; the selection is not delayed.
    scores : float array ``(B, Hkv, Lk)``
        Instead of scores you can pass ``dt_proj``, ``A`` and optionally ``dt_bias`` and ``form``, as for
        ``key_scores``.
    window : int, or one int per kv head
        Keys kept per query, at least 1; static, as are ``form``, ``keys`` and ``causal``.
    keys, padding, documents
        As for ``top_w``.
    causal
        Prefix masks are always causal; False is allowed only with ``keys="global"``.

    Returns
    -------
    As ``attention``.

    Raises
    ------
    As ``attention`` and ``top_w``; also ValueError if both or neither of scores and dt_proj are given.
    """
    require_static(window=window, form=form, keys=keys, bias_delay=bias_delay, causal=causal, scale=scale,
                   softcap=softcap, deterministic=deterministic, return_lse=return_lse, layout=layout, backend=backend)
    turned = in_bhnd(dynamic_mask_attention, layout, {"query": query, "key": key, "value": value}, {
        "scores": scores, "window": window, "dt_proj": dt_proj, "A": A, "dt_bias": dt_bias, "form": form, "keys": keys,
        "padding": padding, "documents": documents, "bias_delay": bias_delay, "causal": causal, "scale": scale,
        "softcap": softcap, "sink_logits": sink_logits, "deterministic": deterministic, "return_lse": return_lse,
        "backend": backend})
    if turned is not NotImplemented:
        return turned
    q, k, v = rows(query, "query"), rows(key, "key"), rows(value, "value")
    ranked, sinks = optional_array(scores, "scores"), optional_array(sink_logits, "sink_logits")
    parameters = {name: optional_array(x, name) for name, x in (("dt_proj", dt_proj), ("A", A), ("dt_bias", dt_bias))}
    selection = Selection(stand_in(ranked), window, form=form, keys=keys,
                          **{name: stand_in(x) for name, x in parameters.items()})
    call = dynamic_call(stand_in(q), stand_in(k), stand_in(v), selection,
                        Options(causal, scale, softcap, deterministic, bias_delay, stand_in(sinks)), layout)
    checks.flag(return_lse, "return_lse")
    check_backend(backend, q)
    own = call.attention
    if own.value_dim != own.head_dim and ranked is None:  # scores are computed from the unpadded value
        ranked, parameters = key_scores(v, **parameters, form=form, backend=backend), {}
    others = candidates(padding, documents, own.batch, own.key_length)
    floats = {"query": q, "key": k, "value": v, "bias": None if ranked is None else widened(ranked), **parameters}
    everything = keeps_all(call.window, keys, others, own.key_length)
    task = Task("dynamic", backend, form, (own.causal or everything, *own.options[1:]),
                None if everything else selection_hints(call.window, own.key_length, keys, "padding" in others,
                                                        "documents" in others),
                None if everything else (call.window, keys))
    return _attended(task, {name: x for name, x in floats.items() if x is not None}, others, own, sinks, return_lse)


def _attended(task: Task, floats: dict[str, Any], others: dict[str, Any], call: AttentionCall, sinks: Any,
              return_lse: bool) -> Any:
    """The results of a task "attention" or "dynamic", for any head dim of the value, with sinks."""
    size = max(call.head_dim, call.value_dim)
    for name in ("query", "key", "value"):
        missing = size - floats[name].shape[3]
        if missing:  # zero columns change neither logits nor outputs
            floats[name] = jnp.pad(floats[name], ((0, 0), (0, 0), (0, 0), (0, missing)))
    out, lse = attend(task, *alike(floats, others))
    out = out[..., :call.value_dim]
    if sinks is not None:
        (found,) = alike({"out": out, "lse": lse, "sink_logits": sinks})
        out, lse = add_sinks(**found)
    return (out, lse) if return_lse else out


def _checked_mask(mask: Any, shapes: tuple[Any, Any, Any], call: AttentionCall) -> Any:
    """One of the masks, as a jax array or an ``IntervalMask`` of jax arrays."""
    if isinstance(mask, (IntervalMask, interval.IntervalMask)):
        found = IntervalMask.of(mask)
        allowed = (1, call.batch), (1, call.kv_heads, call.heads), (call.key_length,)
        if any(size not in sizes for size, sizes in zip(found.shape, allowed)):
            raise checks.wrong_shape("mask", "(1|B, 1|Hkv|H, Lk)", allowed, found.shape)
        return found
    dense = as_array(mask, "mask")
    attention_call(*shapes, stand_in(dense), None, Options())
    return dense
