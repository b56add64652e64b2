"""What pictures show of a mask: one of its rows, (batch entry, head), in NumPy on the host."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe


def attention(mask: Any, query: Any, key: Any, bias: Any, rows: Sequence[int] | None, scale: float | None,
              softcap: float, batch: int, head: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The queries to show, and for each its attention weights float64 and its visible keys bool, ``(rows, Lk)``."""
    q, k = _query_and_key(mask, query, key, batch, head)
    chosen = _rows(rows, len(q))
    heads = query.shape[2], key.shape[2], head
    added = 0.0 if bias is None else of_row(bias, mask, (batch, _head_among("bias", bias.shape, *heads)), "bias")
    logits = q[chosen] @ k.T * (q.shape[1] ** -0.5 if scale is None else checks.real(scale, "scale"))
    if checks.real(softcap, "softcap", 0) > 0:
        logits = softcap * np.tanh(logits / softcap)
    start, stop = (run[row(mask, batch, _head_among("mask", mask.shape, *heads))] for run in runs(mask))
    position = np.asarray(chosen)[:, None] + len(k) - len(q)
    visible = (start <= position) & (position < stop)
    return chosen, _softmax(np.where(visible, logits + added, -math.inf)), visible


def _head_among(name: str, shape: tuple[int, ...], heads: int, kv_heads: int, head: int) -> int:
    """The index of query head ``head`` on the head axis of ``shape``, which may stand for all, kv or query heads."""
    size = 1 if len(shape) < 3 else shape[1]
    if size not in (1, kv_heads, heads):
        raise ValueError(f"{name} must have 1, {kv_heads} or {heads} heads, got shape {tuple(shape)}")
    return 0 if size == 1 else head if size == heads else head * kv_heads // heads


def density(mask: Any, query_length: int, batch: int, head: int, max_size: int) -> np.ndarray:
    """float64 ``(rows, columns)``, each at most ``max_size``: the visible fraction of each cell's (query, key) pairs.

    Key ``j`` is visible to the queries ``[begin_j, end_j)``. ``clip(x, begin_j, end_j) - begin_j`` of them come before
    query ``x``, so the visible pairs of a cell are the difference of that count at its two edges, summed over its keys.
    """
    n, offset = mask.key_length, mask.key_length - query_length
    start, stop = (run[batch, head].astype(np.int64) for run in runs(mask))
    begin = np.clip(start - offset, 0, query_length)
    end = np.maximum(np.clip(stop - offset, 0, query_length), begin)
    query_edges, key_edges = (np.linspace(0, size, min(size, max_size) + 1).astype(np.int64)
                              for size in (query_length, n))
    before = [np.add.reduceat(np.clip(edge, begin, end) - begin, key_edges[:-1]) for edge in query_edges]
    return np.diff(before, axis=0) / (np.diff(query_edges)[:, None] * np.diff(key_edges))


def runs(mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """``start`` and ``stop`` on the host, in the mask's full shape."""
    start, stop = (np.broadcast_to(mask.library.to_numpy(run.array), mask.shape) for run in (mask._start, mask._stop))
    return start, stop


def lifetimes(mask: Any, row: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """``start`` and ``stop`` of a row, cut to the positions of the keys, int64; ``stop <= start``: never visible."""
    start, stop = (run[row].astype(np.int64) for run in runs(mask))
    return np.maximum(start, 0), np.minimum(stop, mask.key_length)


def row(mask: Any, batch: int, head: int) -> tuple[int, int]:
    """The row of the mask for a batch entry and head: 0 where it broadcasts."""
    if mask.key_length < 1:
        raise ValueError(f"mask must have at least one key to draw, got shape {mask.shape}")
    return index("batch", batch, mask.shape[0]), index("head", head, mask.shape[1])


def index(name: str, index: int, size: int) -> int:
    index = checks.whole(index, name, 0)
    if size == 1:
        return 0
    if index >= size:
        raise ValueError(f"{name} must be below {size}, got {index}")
    return index


def of_row(array: Any, mask: Any, row: tuple[int, int], name: str = "scores") -> np.ndarray:
    """float64 ``(Lk,)``: one row of numbers per key, with one axis or three."""
    operand = describe(array, name)
    checks.one_of_types(operand)
    if operand.ndim not in (1, 3) or operand.shape[-1] != mask.key_length:
        raise ValueError(f"{name} must have shape (Lk,) or (B, H, Lk) with Lk = {mask.key_length}, got {operand.shape}")
    host = _host(operand)
    if host.ndim == 3:
        host = host[index("batch", row[0], host.shape[0]), index("head", row[1], host.shape[1])]
    return host


def _host(operand: Operand) -> np.ndarray:
    array = operand.array.detach() if hasattr(operand.array, "detach") else operand.array
    return operand.library.to_numpy(array).astype(np.float64)


def _query_and_key(mask: Any, query: Any, key: Any, batch: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 ``(Lq, D)`` and ``(Lk, D)`` of one batch entry and query head."""
    operands = describe(query, "query"), describe(key, "key")
    for operand in operands:
        checks.one_of_types(operand)
        if operand.ndim != 4 or 0 in operand.shape:
            raise ValueError(f"{operand.name} must have shape (B, length, heads, D), none of them 0, got "
                             f"{operand.shape}")
    (b, _, h, d), (b_key, n, h_kv, d_key) = (operand.shape for operand in operands)
    if (b, d) != (b_key, d_key) or n != mask.key_length or h % h_kv:
        raise ValueError(f"key must have shape (B, Lk, Hkv, D) = ({b}, {mask.key_length}, a divisor of {h}, {d}), got "
                         f"{operands[1].shape}")
    if checks.whole(batch, "batch", 0) >= b:
        raise ValueError(f"batch must be below {b}, got {batch}")
    if checks.whole(head, "head", 0) >= h:
        raise ValueError(f"head must be below {h}, got {head}")
    q, k = (_host(operand) for operand in operands)
    return q[batch, :, head], k[batch, :, head * h_kv // h]


def _rows(rows: Sequence[int] | None, count: int) -> list[int]:
    if rows is None:
        return sorted({(i + 1) * count // 8 - 1 for i in range(8)} - {-1})
    chosen = [checks.whole(row, "rows", 0) for row in rows]
    if not chosen or max(chosen) >= count:
        raise ValueError(f"rows must name at least one query below {count}, got {list(rows)}")
    return chosen


def _softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis; 0 in a row of -inf."""
    top = logits.max(-1, keepdims=True)
    p = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    return p / np.where(total > 0, total, 1)
