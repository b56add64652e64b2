"""Attention over gathered keys with an online softmax (SPEC section 5)."""
from __future__ import annotations

from typing import Any

import numpy as np

from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.numpy.host import deliver, host, widened
from cupy_dma.backends.numpy.tiles import (
    Row,
    Scratch,
    Tile,
    chunks,
    for_each_tile,
    hide,
    logits,
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

    for_each_tile(call, attend)
    return deliver(out, call.query), deliver(lse, call.query)


def _attend(q: np.ndarray, row: Row, tile: Tile, softcap: float, scratch: Scratch) -> tuple[np.ndarray, np.ndarray]:
    """``out`` and ``lse`` of the queries ``q``, as ``logits`` takes them, over the tile's keys, by online softmax."""
    kind = q.dtype.type
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
    out, total = sums[..., :-1], sums[..., -1]
    seen = total != 0  # a sum of NaN is "seen": NaN stays NaN
    out = np.where(seen[..., None], out / total[..., None], kind(0))
    return out, np.where(seen, m + np.log(total), kind(-np.inf))
