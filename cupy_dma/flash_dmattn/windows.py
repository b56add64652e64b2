"""Selection of the best keys under the masks that the original combined it with.

Only keys that a query may see are ranked. With no mask, a padding mask, or a dense mask that is only causality and
padding, the result is an interval mask: two integers per key. Whether a dense mask is that simple depends on its
values, which are read, synchronizing with the GPU. Under any other dense mask every query has a kept set of its own,
and the result is dense, like the mask.
"""
from __future__ import annotations

from typing import Any

from cupy_dma.arrays import Operand, describe
from cupy_dma.flash_dmattn.utils.mask import topk_mask
from cupy_dma.masks.interval import IntervalMask


def best_keys(scores: Any, window: int | None, visible: Any, causal: bool, query_length: int,
              backend: str | None = None) -> Any:
    """The mask under which every query sees the ``window`` best of its keys.

    Parameters
    ----------
    scores : float array ``(1|B, Hkv, Lk)``
    window
        0 or None: all keys.
    visible : bool array ``(B, Lk)`` or ``(1|B, 1|Hkv|H, 1|Lq, Lk)``, or None
        True = a query may see the key.
    causal
        A query sees no later keys, in addition to ``visible``.

    Returns
    -------
    IntervalMask, or bool array ``(B, Hkv|H, Lq, Lk)``; both include ``visible`` and ``causal``.
    """
    ranked = describe(scores, "scores")
    keys = "prefix" if causal else "global"
    if visible is not None and visible.ndim == 4:
        padding = plain_padding(visible, causal, query_length)
        if padding is None:
            return _dense(ranked, window, visible, causal, query_length)
        if query_length > 1 and visible.shape[2] > 1:
            keys = "prefix"
        visible = padding
    plain = scores.detach() if ranked.library.name == "torch" else scores
    if window:
        if visible is not None and scores.shape[0] == 1:  # every batch entry ranks its own keys
            plain = ranked.library.xp.broadcast_to(plain, (visible.shape[0], *plain.shape[1:]))
        return IntervalMask.top_w(plain, window, keys=keys, padding=visible, backend=backend)
    mask = IntervalMask.causal(ranked.shape[2], like=scores) if keys == "prefix" else None
    if visible is not None:
        real = IntervalMask.padding(visible)
        return real if mask is None else mask & real
    return mask


def plain_padding(visible: Any, causal: bool, query_length: int) -> Any:
    """The padding mask (1|B, Lk), contiguous, of a dense mask (1|B, 1, 1|Lq, Lk) that is only causality and padding;
    None if it is more than that."""
    operand = describe(visible, "mask")
    library, device, length = operand.library, operand.device, operand.shape[3]
    if operand.shape[1] != 1 or operand.shape[2] == 0:
        return None
    with library.on(device):
        last = library.contiguous(operand.array[:, 0, -1])
        if operand.shape[2] > 1:
            expected = last[:, None, None] & _seen_causally(operand, query_length)
            seen = operand.array & _seen_causally(operand, query_length) if causal else operand.array
            if not bool((seen == expected).all()):
                return None
    return last if length else None


def _seen_causally(operand: Operand, query_length: int) -> Any:
    """The causal mask, bool (Lq, Lk)."""
    length, library = operand.shape[3], operand.library
    position = library.arange(length - query_length, length, operand.device)
    return library.arange(0, length, operand.device) <= position[:, None]


def _dense(scores: Operand, window: int | None, visible: Any, causal: bool, query_length: int) -> Any:
    operand = describe(visible, "mask")
    library, array, seen = operand.library, scores.array[:, :, None], operand.array
    with library.on(operand.device):
        if causal:
            seen = seen & _seen_causally(operand, query_length)
        if not window:
            return seen
        group_size = seen.shape[1] // scores.shape[1] if seen.shape[1] > scores.shape[1] else 1
        if group_size > 1:  # a mask per query head ranks the scores of its GQA group's kv head
            array = array[:, [head // group_size for head in range(seen.shape[1])]]
        return topk_mask(array, seen, window)
