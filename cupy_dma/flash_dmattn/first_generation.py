"""The functions of the original's first generation: ``apply_dynamic_mask_attention`` and the CUDA extension's ``fwd``.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.api import key_scores
from cupy_dma.arrays import describe
from cupy_dma.flash_dmattn.argument_names import any_names
from cupy_dma.flash_dmattn.arguments import added, operand_of, rows, visible
from cupy_dma.flash_dmattn.choice import choose_backend
from cupy_dma.flash_dmattn.flash_dmattn_interface import attend, bool_or, flash_dmattn_func
from cupy_dma.flash_dmattn.utils.mask import topk_mask
from cupy_dma.flash_dmattn.windows import best_keys
from cupy_dma.masks.interval import IntervalMask


@any_names
def apply_dynamic_mask_attention(query: Any, key: Any, value: Any, dt_proj: Any, A: Any, causal_mask: Any = None,
                                 keep_window_size: int = 2048, is_causal: bool | None = True, *,
                                 softmax_scale: float | None = None, softcap: float | None = None,
                                 deterministic: bool | None = None, return_attn_probs: bool | None = None,
                                 backend: str | None = None) -> Any:
    """Every query attends to its best keys, by scores computed from the values. Arrays are ``(B, heads, length, D)``.

    Parameters
    ----------
    query : float array ``(B, H, Lq, D)``
    key, value : float array ``(B, Hkv, Lk, D)``
    dt_proj : float array ``(Hkv, Hkv * D)``
    A : float array ``(Hkv,)``
        ``exp(A * softplus(value @ dt_proj^T))`` ranks the keys and is added to their logits.
    causal_mask : array ``(1|B, 1|Hkv|H, 1|Lq, Lk)`` or ``(1|B, 1|Hkv|H, Lk)``, optional
        bool, or 1 and 0: True or 1 = visible. An additive mask raises; write ``causal_mask == 0``. Hidden keys do not
        count towards the window. If the mask is only causality and padding, work stays linear; its values are read to
        find that out.
    keep_window_size : int
        Keys per query; 0 keeps all.
    is_causal
        A query ranks and sees no later keys. False: all queries share the best keys of the whole sequence.

    Returns
    -------
    out : array ``(B, H, Lq, D)``, a view of contiguous ``(B, Lq, H, D)``; or ``(out, softmax_lse, S_dmask)``
    """
    for array, name in ((query, "query"), (key, "key"), (value, "value")):
        if operand_of(array, name).ndim != 4:
            raise ValueError(f"{name} must have shape (B, heads, length, D), got {tuple(array.shape)}")
    window = checks.whole(keep_window_size, "keep_window_size", 0)
    query, key, value = (rows(array, name).swapaxes(1, 2) for array, name in (
        (query, "query"), (key, "key"), (value, "value")))
    backend = choose_backend(backend, query)
    scores = key_scores(value, dt_proj, A, backend=backend)
    seen = visible(causal_mask, key.shape[1], "causal_mask")
    mask = best_keys(scores, window, seen, bool_or(is_causal, "is_causal"), query.shape[1], backend)
    found = flash_dmattn_func(query, key, value, mask, scores, softmax_scale, False, softcap, deterministic,
                              return_attn_probs, backend=backend)
    if not isinstance(found, tuple):
        return found.swapaxes(1, 2)
    return (found[0].swapaxes(1, 2), *found[1:])


@any_names
def fwd(q: Any, k: Any, v: Any, zoh: Any = None, active_mask: Any = None, out: Any = None, p_dropout: float = 0.0,
        softmax_scale: float | None = None, is_causal: bool | None = False, keep_window_size: int = 2048,
        softcap: float | None = 0.0, return_softmax: bool | None = False, gen: Any = None, *,
        backend: str | None = None) -> list[Any]:
    """The forward pass of the first CUDA extension.

    Parameters
    ----------
    q : float array ``(B, Lq, H, D)``
    k, v : float array ``(B, Lk, Hkv, D)``
    zoh : float array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` or ``(B, Hkv, Lk)``, optional
        Bias, added to the logits.
    active_mask : array of such a shape, optional
        1 = visible, 0 = hidden. None with ``zoh``: every query sees the ``keep_window_size`` keys with the highest
        bias (0: all); for a bias per key this is an interval mask, without a dense one.
    out : array ``(B, Lq, H, D)``, optional
        Where to write the result, which is also returned.
    p_dropout, gen
        Dropout is not supported: ``p_dropout`` must be 0, ``gen`` is ignored.
    keep_window_size
        Ignored if ``active_mask`` is given, which is applied as it is.
    return_softmax
        Also compute the probabilities.

    Returns
    -------
    [out, softmax_lse, probabilities or None, None]; the original returned its random number state as the last one
    """
    if checks.real(p_dropout, "p_dropout", 0.0) != 0:
        raise NotImplementedError(f"p_dropout must be 0, got {p_dropout}: dropout is not supported")
    window = checks.whole(keep_window_size, "keep_window_size", 0)
    causal, length = bool_or(is_causal, "is_causal"), (0, 0, *operand_of(k, "k").shape)[-3]
    zoh, mask = added(zoh, length, "zoh"), visible(active_mask, length, "active_mask")
    if mask is None and zoh is not None and window:
        mask = _window_of(zoh, window, causal, q.shape[1], choose_backend(backend, q))
    results = 3 if bool_or(return_softmax, "return_softmax") else 2
    found, lse, *p = attend(q, k, v, mask, zoh, softmax_scale, causal, softcap, None, backend, results)
    if out is not None:
        if tuple(out.shape) != tuple(found.shape):
            raise ValueError(f"out must have shape (B, Lq, H, D) = {tuple(found.shape)}, got {tuple(out.shape)}")
        out[...] = found
        found = out
    return [found, lse, p[0] if p else None, None]


def _window_of(zoh: Any, window: int, causal: bool, query_length: int, backend: str | None) -> Any:
    """The mask that selects the keys with the highest bias."""
    if zoh.ndim == 4 and zoh.shape[2] == 1:
        zoh = zoh[:, :, 0]
    if zoh.ndim == 3:
        return best_keys(rows(zoh, "zoh"), window, None, causal, query_length, backend)
    operand = describe(zoh, "zoh")
    seen = None
    if causal:
        seen = IntervalMask.causal(operand.shape[3], like=zoh).to_dense(query_length)
    return topk_mask(zoh, seen, window)
