"""Attention over the keys that a mask keeps (SPEC section 5): check the arguments, choose a backend, hand back arrays.

    s[i, j] = softcap(scale * q_i . k_j) + bias[i, j]        softcap(x) = c * tanh(x / c) for c > 0, otherwise x
    out_i   = sum over visible j of softmax_j(s[i, j]) * v_j
    lse_i   = log(sum over visible j of exp(s[i, j]))

Query ``i`` stands at key position ``p_i = i + Lk - Lq``. A query that sees nothing gets ``out = 0, lse = -inf``.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupy_dma import backends
from cupy_dma.arrays import Operand, belongs_to_torch, describe
from cupy_dma.calls import AttentionCall, DynamicCall, attention_call, dynamic_call
from cupy_dma.selection import select


def attention(query: Any, key: Any, value: Any, *, mask: Any = None, bias: Any = None, causal: bool = False,
              scale: float | None = None, softcap: float = 0.0, deterministic: bool = False, return_lse: bool = False,
              backend: str | None = None) -> Any:
    """Attention over the visible keys.

    Parameters
    ----------
    query : float array ``(B, Lq, H, D)``
    key, value : float array ``(B, Lk, Hkv, D)``
        ``H`` a multiple of ``Hkv``, ``D`` from 1 to 256, lengths from 0, any strides of B, L and head (a BHSD tensor is
        a view), the last axis contiguous. float16, bfloat16 or float32 everywhere, float64 on numpy and, of
        CPU arrays, on flex. For the precision of float32 see the notes.
    mask : IntervalMask, or bool array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` or ``(Lq, Lk)``, or several in a tuple, optional
        True = visible. Of several masks, what all of them show. A dense mask may be anything, at the cost of reading
        it; one that is the same for every query (``1`` in place of ``Lq``) costs no more than an interval mask.
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
        The backend does not serve this combination.

    Notes
    -----
    Torch tensors that require grad get it (``cupy_dma.torch``). For other libraries see ``cupy_dma.backward``.

    Sums, the softmax and ``lse`` are float32 for every type (float64 for float64). float32 arrays are multiplied in
    full float32 by ``backend="numpy"``. The cuda backend multiplies them on TF32 tensor cores, forward and backward:
    every factor of a product (query and key, probabilities and value, and those of the gradients) is rounded to 10 bits
    of mantissa first, to nearest, so that results have about three decimal digits. The triton backend makes a product
    of three TF32 products, which have about the precision of float32. Key scores and selection stay float32.
    """
    if belongs_to_torch(query, key, value, bias):
        from cupy_dma.torch import functions

        return functions.attention(query, key, value, mask=mask, bias=bias, causal=causal, scale=scale,
                                   softcap=softcap, deterministic=deterministic, return_lse=return_lse,
                                   backend=backend)
    call = attention_call(query, key, value, mask, bias, causal, scale, softcap, deterministic)
    return run(call, return_lse, backends.choose(backend, (call.query,)))


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
    if belongs_to_torch(query, key, value, scores, dt_proj, A, dt_bias):
        from cupy_dma.torch import functions

        return functions.dynamic_mask_attention(
            query, key, value, scores, window=window, dt_proj=dt_proj, A=A, dt_bias=dt_bias, form=form, keys=keys,
            padding=padding, documents=documents, causal=causal, scale=scale, softcap=softcap,
            deterministic=deterministic, return_lse=return_lse, backend=backend)
    call = dynamic_call(query, key, value, scores, window, dt_proj, A, dt_bias, form, keys, padding, documents, causal,
                        scale, softcap, deterministic)
    module = backends.choose(backend, (call.query,))
    ranked = scores_of(call, module)
    attend_last = getattr(module, "attend_last", None)  # of a backend that needs no mask for few queries
    results = None if attend_last is None else attend_last(call, ranked)
    if results is not None:
        return delivered(call, results, return_lse)
    mask = select(ranked, call.window, call.keys, call.candidates, module)
    return run(call.attention(ranked, mask), return_lse, module)


def scores_of(call: DynamicCall, module: Any) -> Operand:
    """The scores of a call: those given, or made on the backend ``module`` by the call's recipe."""
    if call.recipe is None:
        assert call.scores is not None
        return call.scores
    return replace(describe(module.key_scores(*call.recipe), "scores"), library=call.value.library)


def run(call: AttentionCall, return_lse: bool, module: Any) -> Any:
    """``out``, or ``(out, lse)``, of a checked call on the backend ``module``."""
    return delivered(call, module.attention(call), return_lse)


def delivered(call: AttentionCall | DynamicCall, results: tuple[Any, Any], return_lse: bool) -> Any:
    """``out``, or ``(out, lse)``, as the caller gets them."""
    export, (out, lse) = call.query.library.export, results
    return (export(out), export(lse)) if return_lse else export(out)
