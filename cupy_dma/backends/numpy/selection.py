"""Prefix top-w selection with a heap (SPEC section 3)."""
from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from cupy_dma.arrays import Operand
from cupy_dma.backends.numpy.host import deliver, host
from cupy_dma.masks.interval import NEVER
from cupy_dma.masks.windows import Window, each_head


def _ordered(scores: np.ndarray) -> np.ndarray:
    """Unsigned integers that sort like the scores: -0 equals +0, and all NaN are equal and above everything."""
    bits = np.uint64 if scores.dtype == np.float64 else np.uint32
    top = bits(1 << (8 * scores.itemsize - 1))
    raw = (scores + scores.dtype.type(0)).view(bits)  # -0 + 0 is +0
    ordered = np.where(raw & top, ~raw, raw | top)
    return np.where(np.isnan(scores), ~bits(0), ordered)


def prefix_stop(scores: Operand, window: Window, padding: Operand | None, document: Operand | None) -> Any:
    """int32 ``(B, Hkv, Lk)``: the first position at which ``window`` better keys exist.

    ``padding`` bool ``(1|B, Lk)``, True = a real key; ``document`` int32 ``(1|B, Lk)``: first key of its document. Keys
    are ranked by ``(document, score, j)``, highest first: any key of a later document evicts keys of earlier ones, so
    the result is exact within the key's own document. ``NEVER`` if that position does not exist, ``j`` if the key is
    padding or outranked from the start.
    """
    values = host(scores)
    batch, heads, length = values.shape
    real = np.ones((1, length), bool) if padding is None else host(padding)
    group = np.zeros((1, length), np.int32) if document is None else host(document)
    stop = np.full(values.shape, NEVER, np.int32)
    for b in range(batch):
        candidates = np.flatnonzero(real[b if real.shape[0] > 1 else 0])
        groups = group[b if group.shape[0] > 1 else 0][candidates]
        for h, size in enumerate(each_head(window, heads)):
            row = np.arange(length, dtype=np.int32)
            row[candidates] = _row_stop(_ordered(values[b, h, candidates]), groups, candidates, size, NEVER)
            stop[b, h] = row
    return deliver(stop, scores)


def _row_stop(ordered: np.ndarray, group: np.ndarray, position: np.ndarray, window: int, never: int) -> np.ndarray:
    """``stop`` of one row of candidates: keep the ``window`` best in a heap; an evicted key stops there."""
    by_rank = np.lexsort((ordered, group))  # stable: of equal scores the newest ranks highest
    rank = np.empty(len(by_rank), np.int64)
    rank[by_rank] = np.arange(len(by_rank))
    ranks, stop = rank.tolist(), np.full(len(by_rank), never, np.int32)
    heap = ranks[:window]
    heapq.heapify(heap)
    evicted = [heapq.heappushpop(heap, newcomer) for newcomer in ranks[window:]]
    stop[by_rank[evicted]] = position[window:]
    return stop
