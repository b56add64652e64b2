"""The NumPy backend: what runs where there is no GPU, and a reference of every feature.

16-bit types are computed in float32, float32 in float32, float64 in float64. Memory and work follow the visible
pairs: attention walks over tiles of consecutive queries, gathers only the keys that some query of the tile sees, and
works through long key lists in chunks with an online softmax. No ``Lq x Lk`` array is ever made for interval masks,
and dense masks and biases are read in slices.

Invisible keys are never multiplied in: a logit of an invisible key is replaced by -inf, and value rows that are not
finite are added only to the queries that see them (in a matrix product even a weight of 0 would spread a NaN).
"""
from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cupy_dma.arrays import Operand, numpy_dtype
from cupy_dma.masks import EVER, NEVER, IntervalMask

KEY_CHUNK = 2048  # keys per matrix product
TILE_ROWS = 512  # about as many (query, head) rows per matrix product
SCORE_CHUNK = 4096  # keys whose values are widened at a time


def unavailable() -> str | None:
    return None


def _widened(dtype: str) -> np.dtype:
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def _host(operand: Operand) -> np.ndarray:
    """The operand as a NumPy array of its (possibly extended) shape; a view if it lies on the host."""
    return operand.library.to_numpy(operand.array).reshape(operand.shape)


def _deliver(result: np.ndarray, like: Operand) -> Any:
    return like.library.from_numpy(result, like.device)


# ---- key scores ---------------------------------------------------------------------------------------------------


def key_scores(value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None, form: str) -> Any:
    """Scores ``(B, Hkv, Lk)`` of ``value (B, Lk, Hkv, D)``; float32, or float64 if value is."""
    kind = _widened(value.dtype)
    values, projection, a = _host(value), _host(dt_proj).astype(kind).T, _host(A).astype(kind)
    offset = 0 if dt_bias is None else _host(dt_bias).astype(kind)
    batch, length, heads, size = value.shape
    scores = np.empty((batch, heads, length), kind)
    with np.errstate(all="ignore"):
        for b in range(batch):
            for begin in range(0, length, SCORE_CHUNK):
                rows = values[b, begin:begin + SCORE_CHUNK].astype(kind).reshape(-1, heads * size)
                state = a * np.logaddexp(0, rows @ projection + offset).astype(kind)
                scores[b, :, begin:begin + SCORE_CHUNK] = (np.exp(state) if form == "exp" else state).T
    return _deliver(scores, value)


# ---- selection ----------------------------------------------------------------------------------------------------


def _ordered(scores: np.ndarray) -> np.ndarray:
    """Unsigned integers in the order of the scores: -0 equals +0, and all NaN are equal and above everything."""
    bits = np.uint64 if scores.dtype == np.float64 else np.uint32
    top = bits(1 << (8 * scores.itemsize - 1))
    raw = (scores + scores.dtype.type(0)).view(bits)  # -0 + 0 is +0
    ordered = np.where(raw & top, ~raw, raw | top)
    return np.where(np.isnan(scores), ~bits(0), ordered)


def prefix_stop(scores: Operand, window: int, padding: Operand | None, document: Operand | None) -> Any:
    """int32 ``(B, Hkv, Lk)``: the first position at which ``window`` better keys exist.

    ``padding`` bool ``(1|B, Lk)``, True = a real key; ``document`` int32 ``(1|B, Lk)``: first key of its document. The
    rank is ``(document, score, j)``, highest first: keys of older documents are pushed out by any newer one, so the
    result is exact while the key's own document lasts. ``NEVER`` if that position does not exist, ``j`` if the key is
    hidden or at once outranked.
    """
    values = _host(scores)
    batch, heads, length = values.shape
    real = np.ones((1, length), bool) if padding is None else _host(padding)
    group = np.zeros((1, length), np.int32) if document is None else _host(document)
    stop = np.full(values.shape, NEVER, np.int32)
    for b in range(batch):
        candidates = np.flatnonzero(real[b if real.shape[0] > 1 else 0])
        groups = group[b if group.shape[0] > 1 else 0][candidates]
        for h in range(heads):
            row = np.arange(length, dtype=np.int32)
            row[candidates] = _row_stop(_ordered(values[b, h, candidates]), groups, candidates, window, NEVER)
            stop[b, h] = row
    return _deliver(stop, scores)


def _row_stop(ordered: np.ndarray, group: np.ndarray, position: np.ndarray, window: int, never: int) -> np.ndarray:
    """``stop`` of one row of candidates: keep the ``window`` best in a heap; whoever is pushed out stops there."""
    by_rank = np.lexsort((ordered, group))  # stable: of equal scores the newest ranks highest
    rank = np.empty(len(by_rank), np.int64)
    rank[by_rank] = np.arange(len(by_rank))
    ranks, stop = rank.tolist(), np.full(len(by_rank), never, np.int32)
    heap = ranks[:window]
    heapq.heapify(heap)
    pushed_out = [heapq.heappushpop(heap, newcomer) for newcomer in ranks[window:]]
    stop[by_rank[pushed_out]] = position[window:]
    return stop


# ---- attention ----------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Consecutive queries ``begin <= i < end`` and the keys that some of them see."""

    begin: int
    end: int
    full: np.ndarray  # keys that every query of the tile sees
    partial: np.ndarray  # keys that some see
    visible: Callable[[np.ndarray], np.ndarray]  # keys (n,) -> bool (queries, n)


def attention(call: Any) -> tuple[Any, Any]:
    """``out (B, Lq, H, D)`` of query's type and ``lse (B, H, Lq)``; see ``cupy_dma.attention``."""
    kind = _widened(call.query.dtype)
    query, key, value = _host(call.query), _host(call.key), _host(call.value)
    bias = None if call.bias is None else _host(call.bias)
    group = call.heads // call.kv_heads
    mask_heads = 1 if call.mask is None else call.mask.shape[1]
    bias_heads = 1 if bias is None else bias.shape[1]
    # Heads that share keys, mask and bias are rows of one matrix product.
    together = group if {mask_heads, bias_heads} <= {1, call.kv_heads} else 1
    step = min(max(TILE_ROWS // together, 32), 256)

    out = np.zeros(call.query.shape, numpy_dtype(call.query.dtype))
    lse = np.full((call.batch, call.heads, call.query_length), -np.inf, kind)
    tiles_of = _TileMaker(call, step)
    with np.errstate(all="ignore"):
        for b in range(call.batch):
            for g in range(call.kv_heads):
                k, v = (np.ascontiguousarray(x[b, :, g], kind) for x in (key, value))
                spoiled = ~np.isfinite(v).all(axis=1)
                for h in range(g * group, (g + 1) * group, together):
                    heads = slice(h, h + together)
                    added = None if bias is None else _row(bias, b, h, call)
                    for tile in tiles_of(b, h):
                        q = np.moveaxis(query[b, tile.begin:tile.end, heads], 1, 0).astype(kind)
                        o, e = _attend(q, k, v, spoiled, tile, added, call)
                        out[b, tile.begin:tile.end, heads] = np.moveaxis(o, 0, 1)
                        lse[b, heads, tile.begin:tile.end] = e
    return _deliver(out, call.query), _deliver(lse, call.query)


def _row(array: np.ndarray, b: int, h: int, call: Any) -> np.ndarray:
    """The entry of batch ``b`` and query head ``h`` of something with axes (1|B, 1|Hkv|H, ...)."""
    heads = array.shape[1]
    if heads != call.heads and heads > 1:
        h //= call.heads // call.kv_heads
    return array[b if array.shape[0] > 1 else 0, h if heads > 1 else 0]


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, spoiled: np.ndarray, tile: Tile, bias: np.ndarray | None,
            call: Any) -> tuple[np.ndarray, np.ndarray]:
    """Online softmax of the rows ``q (heads, queries, D)`` over the tile's keys -> out, lse."""
    kind = q.dtype.type
    q = q * kind(call.scale)
    rows = q.shape[:2]
    m, total, out = np.full(rows, -np.inf, kind), np.zeros(rows, kind), np.zeros(q.shape, kind)
    for keys, whole in _chunks(tile):
        s = (q.reshape(-1, q.shape[2]) @ k[keys].T).reshape(*rows, len(keys))
        if call.softcap > 0:
            s = kind(call.softcap) * np.tanh(s / kind(call.softcap))
        if bias is not None:
            part = bias if bias.shape[0] == 1 else bias[tile.begin:tile.end]
            s += (part if bias.shape[1] == 1 else part[:, keys]).astype(kind)
        visible = None if whole else tile.visible(keys)
        if visible is not None:
            s = np.where(visible, s, kind(-np.inf))
        m_new = np.maximum(m, s.max(axis=2))
        shift = np.where(m_new == -np.inf, kind(0), m_new)
        p = np.exp(s - shift[..., None])
        shrink = np.exp(m - shift)
        total = total * shrink + p.sum(axis=2)
        out = out * shrink[..., None] + _weighted_sum(p, v[keys], spoiled[keys], visible)
        m = m_new
    seen = total != 0  # a sum of NaN is "seen": NaN stays NaN
    out = np.where(seen[..., None], out / total[..., None], kind(0))
    return out, np.where(seen, m + np.log(total), kind(-np.inf))


def _weighted_sum(p: np.ndarray, v: np.ndarray, spoiled: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """``p @ v``; rows of ``v`` that are not finite reach only the queries that see them."""
    if not spoiled.any():
        return (p.reshape(-1, p.shape[2]) @ v).reshape(*p.shape[:2], -1)
    clean = np.where(spoiled[:, None], 0, v).astype(v.dtype)
    total = (p.reshape(-1, p.shape[2]) @ clean).reshape(*p.shape[:2], -1)
    for t in np.flatnonzero(spoiled):
        sees = slice(None) if visible is None else visible[:, t]
        total[:, sees] += p[:, sees, t, None] * v[t]
    return total


def _chunks(tile: Tile) -> Iterator[tuple[np.ndarray, bool]]:
    for keys, whole in ((tile.full, True), (tile.partial, False)):
        for begin in range(0, len(keys), KEY_CHUNK):
            yield keys[begin:begin + KEY_CHUNK], whole


class _TileMaker:
    """Cuts the queries of one (batch, head) into tiles and finds the keys of each."""

    def __init__(self, call: Any, step: int):
        self.call, self.step = call, step
        self.dense = self.runs = None
        if isinstance(call.mask, IntervalMask):
            mask = call.mask
            self.runs = [np.broadcast_to(mask.library.to_numpy(run.array), mask.shape)
                         for run in (mask._start, mask._stop)]
        elif call.mask is not None:
            self.dense = _host(call.mask)

    def __call__(self, b: int, h: int) -> Iterator[Tile]:
        if self.dense is not None:
            return self._from_dense(_row(self.dense, b, h, self.call))
        return self._from_runs(b, h)

    def _spans(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.call.query_length, self.step):
            yield begin, min(begin + self.step, self.call.query_length)

    def _from_runs(self, b: int, h: int) -> Iterator[Tile]:
        call, n = self.call, self.call.key_length
        offset = n - call.query_length
        if self.runs is None:
            start, stop = np.full(n, EVER, np.int64), np.full(n, n, np.int64)
        else:
            start, stop = (_row(run, b, h, call).astype(np.int64) for run in self.runs)
        if call.causal:
            start = np.maximum(start, np.arange(n))

        # Keys enter in the order of their starts and leave at their stops: work follows what is visible.
        ever = np.flatnonzero((start < stop) & (stop > offset))
        entering = ever[np.argsort(start[ever], kind="stable")]
        starts = start[entering]
        active, entered = entering[:0], 0
        for begin, end in self._spans():
            first, last = begin + offset, end - 1 + offset
            until = int(np.searchsorted(starts, last, side="right"))
            active = np.concatenate((active, entering[entered:until]))
            active, entered = active[stop[active] > first], until
            full = (start[active] <= first) & (stop[active] > last)
            position = np.arange(first, last + 1)[:, None]
            visible = partial(_within, start, stop, position)
            yield Tile(begin, end, active[full], active[~full], visible)

    def _from_dense(self, dense: np.ndarray) -> Iterator[Tile]:
        n = self.call.key_length
        offset = n - self.call.query_length
        for begin, end in self._spans():
            seen = np.broadcast_to(dense if dense.shape[0] == 1 else dense[begin:end], (end - begin, n))
            if self.call.causal:
                seen = seen & (np.arange(n) <= np.arange(begin + offset, end + offset)[:, None])
            some, every = seen.any(axis=0), seen.all(axis=0)
            yield Tile(begin, end, np.flatnonzero(every), np.flatnonzero(some & ~every), partial(_columns, seen))


def _within(start: np.ndarray, stop: np.ndarray, position: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return (start[keys] <= position) & (position < stop[keys])


def _columns(seen: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return seen[:, keys]
