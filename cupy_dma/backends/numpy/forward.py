"""Attention over gathered keys with an online softmax (SPEC section 5).

Logits that are small by the norms of queries and keys need no running max. Without it, and with pairs hidden after the
exponential, a tile takes a seventh less time.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.numpy import small
from cupy_dma.backends.numpy.host import deliver, host, widened
from cupy_dma.backends.numpy.tiles import (
    Row,
    Scratch,
    Tile,
    are_small,
    chunks,
    for_each_tile,
    hide,
    logits,
    normalized,
    norms,
    weighted_sum,
    with_columns,
)
from cupy_dma.calls.types import AttentionCall


def attention(call: AttentionCall) -> tuple[Any, Any]:
    """``out (B, Lq, H, Dv)`` of query's type and ``lse (B, H, Lq)``; see ``cupy_dma.attention``."""
    kind = widened(call.query.dtype)
    query = host(call.query)
    out = np.zeros((*call.query.shape[:3], call.value_dim), numpy_dtype(call.query.dtype))
    lse = np.full((call.batch, call.heads, call.query_length), -np.inf, kind)

    def attend(row: Row, tile: Tile, scratch: Scratch, _: Scratch) -> None:
        queries = slice(tile.begin, tile.end)
        q = with_columns(query[row.batch, queries, row.heads].swapaxes(0, 1).astype(kind), 1, 0)
        q[..., :-2] *= kind.type(call.scale)
        o, lse[row.batch, row.heads, queries] = _attend(q, row, tile, call.softcap, scratch)
        out[row.batch, queries, row.heads] = o.swapaxes(0, 1)

    for_each_tile(call, attend, pairs=small.attend(call, out, lse) if small.serves(call) else None)
    return deliver(out, call.query), deliver(lse, call.query)


def _attend(q: np.ndarray, row: Row, tile: Tile, softcap: float, scratch: Scratch) -> tuple[np.ndarray, np.ndarray]:
    """``out`` and ``lse`` of the queries ``q``, as ``logits`` takes them, over the tile's keys, by online softmax."""
    kind = q.dtype.type
    if softcap == 0 and row.bias is None:
        keys, of_queries = np.concatenate((tile.full, tile.partial)), norms(q[..., :-2])
        sizes = row.keys.sizes[:, keys].max(axis=1, initial=0)
        if are_small(of_queries.max(initial=0), *sizes) or are_small(
                of_queries[:, _seeing(row, tile, keys)].max(initial=0), *sizes):
            return _attend_small(q, row, tile, scratch)
    m, sums = np.full(q.shape[:2], -np.inf, kind), np.zeros((*q.shape[:2], row.keys.v.shape[1]), kind)
    for keys, full in chunks(tile):
        s, visible, _ = logits(q, row, tile, keys, full, softcap, scratch)
        if visible is not None:
            hide(s, visible, -np.inf)
        m_new = np.maximum(m, s.max(axis=2))
        shift = np.where(m_new == -np.inf, kind(0), m_new)
        s -= shift[..., None]
        p = np.exp(s, out=s)
        sums *= np.exp(m - shift)[..., None]
        sums += weighted_sum(p, row.keys.v[keys], row.keys.nonfinite_v[keys], visible)
        m = m_new
    return normalized(sums, m)


def _seeing(row: Row, tile: Tile, keys: np.ndarray) -> np.ndarray:
    """Which queries of the tile see one of its ``keys``: what others hold must change nothing."""
    keys = keys if row.keys.hidden is None else keys[~row.keys.hidden[keys]]
    return np.logical_or.reduce(tile.visible(keys), axis=1)


def _attend_small(q: np.ndarray, row: Row, tile: Tile, scratch: Scratch) -> tuple[np.ndarray, np.ndarray]:
    """``_attend`` without a running max."""
    sums = np.zeros((*q.shape[:2], row.keys.v.shape[1]), q.dtype)
    for keys, full in chunks(tile):
        s, visible, _ = logits(q, row, tile, keys, full, 0.0, scratch)
        p = np.exp(s, out=s)
        if visible is not None:
            hide(p, visible)
        sums += weighted_sum(p, row.keys.v[keys], row.keys.nonfinite_v[keys], visible)
    return normalized(sums, q.dtype.type(0))
