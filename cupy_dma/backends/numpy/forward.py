"""Attention over gathered keys with an online softmax (SPEC section 5)."""
from __future__ import annotations

from typing import Any

import numpy as np

from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.numpy.host import deliver, host, widened
from cupy_dma.backends.numpy.tiles import Row, Scratch, Tile, chunks, entry, for_each_tile, hide, logits, weighted_sum
from cupy_dma.calls.types import AttentionCall


def attention(call: AttentionCall) -> tuple[Any, Any]:
    """``out (B, Lq, H, D)`` of query's type and ``lse (B, H, Lq)``; see ``cupy_dma.attention``."""
    kind = widened(call.query.dtype)
    query, bias = host(call.query), None if call.bias is None else host(call.bias)
    out = np.zeros(call.query.shape, numpy_dtype(call.query.dtype))
    lse = np.full((call.batch, call.heads, call.query_length), -np.inf, kind)

    def attend(row: Row, tile: Tile, scratch: Scratch, _: Scratch) -> None:
        queries = slice(tile.begin, tile.end)
        q = query[row.batch, queries, row.heads].swapaxes(0, 1).astype(kind, order="C")
        q *= kind.type(call.scale)
        added = None if bias is None else entry(bias, row, call)
        o, lse[row.batch, row.heads, queries] = _attend(q, row, tile, added, call.softcap, scratch)
        out[row.batch, queries, row.heads] = o.swapaxes(0, 1)

    for_each_tile(call, attend)
    return deliver(out, call.query), deliver(lse, call.query)


def _attend(q: np.ndarray, row: Row, tile: Tile, bias: np.ndarray | None,
            softcap: float, scratch: Scratch) -> tuple[np.ndarray, np.ndarray]:
    """``out`` and ``lse`` of the scaled queries ``q (heads, queries, D)`` over the tile's keys, by online softmax."""
    kind = q.dtype.type
    m, total, out = np.full(q.shape[:2], -np.inf, kind), np.zeros(q.shape[:2], kind), np.zeros(q.shape, kind)
    for keys, full in chunks(tile):
        s, visible, _ = logits(q, row, tile, keys, full, bias, softcap, scratch)
        if visible is not None:
            hide(s, visible, -np.inf)
        m_new = np.maximum(m, s.max(axis=2))
        shift = np.where(m_new == -np.inf, kind(0), m_new)
        s -= shift[..., None]
        p = np.exp(s, out=s)
        rescale = np.exp(m - shift)
        total = total * rescale + p.sum(axis=2)
        out = out * rescale[..., None] + weighted_sum(p, row.keys.v[keys], row.keys.nonfinite_v[keys], visible)
        m = m_new
    seen = total != 0  # a sum of NaN is "seen": NaN stays NaN
    out = np.where(seen[..., None], out / total[..., None], kind(0))
    return out, np.where(seen, m + np.log(total), kind(-np.inf))
