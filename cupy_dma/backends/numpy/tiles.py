"""Query tiles, the keys that each tile sees, and their logits: shared by forward and backward.

Query heads that share keys, mask and bias are batched into one matrix product, with ``heads * queries`` rows.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from cupy_dma.backends.numpy.host import host, widened
from cupy_dma.backends.numpy.threads import one_blas_thread, parallel_for
from cupy_dma.calls.types import AttentionCall
from cupy_dma.masks.interval import EVER

KEY_CHUNK = 2048  # keys per matrix product
FEW_KEYS = 64  # fewer keys seen by all queries of a tile get no products of their own
SMALL_LOGIT, SMALL_VALUE = 30.0, 2.0 ** 60
TILE_ROWS = 512  # approximate (query, head) rows per matrix product


class Tile(NamedTuple):
    """Consecutive queries ``begin <= i < end`` and the keys that some of them see."""

    begin: int
    end: int
    full: np.ndarray  # keys that every query of the tile sees
    partial: np.ndarray  # keys that some but not all see
    visible: Callable[[np.ndarray], np.ndarray]  # keys (n,) -> bool (queries, n)


@dataclass
class Keys:
    """Keys and values of one (batch, kv head) in the compute type, and which rows contain a NaN or infinity.

    Extra columns make sums part of the products: the logits of ``with_columns(q, 1, -shift)`` with ``k`` include the
    bias of each key and subtract the shift of each query, and the last column of ``p @ v`` is the sum of ``p``.
    """

    k: np.ndarray  # (Lk, D + 2): keys, their bias (0 with a softcap or a delay, or if it is not a key bias), 1
    v: np.ndarray  # (Lk, D + 1): values, 1
    nonfinite_k: np.ndarray  # bool (Lk,), of the keys themselves
    nonfinite_v: np.ndarray
    hidden: np.ndarray | None  # bool (Lk,): where the key bias among the columns is -inf; None: nowhere

    @cached_property
    def sizes(self) -> np.ndarray:
        """``(3, Lk)``: norm of each key, size of its bias, norm of its value; 0 where hidden."""
        sizes = np.stack((norms(self.k[:, :-2]), np.abs(self.k[:, -2]), norms(self.v[:, :-1])))
        return sizes if self.hidden is None else np.where(self.hidden, 0, sizes)


class Row(NamedTuple):
    """Query heads that are computed together: they share keys, mask and bias."""

    batch: int
    kv_head: int
    heads: slice
    keys: Keys
    bias: np.ndarray | None  # (1|Lq, 1|Lk), None if there is none or ``keys`` has it
    lag: int | None  # the bias is added where i - j >= lag; None: for every pair
    tiles: Iterator[Tile]

    def far(self, tile: Tile, keys: np.ndarray) -> np.ndarray | None:
        """The pairs to which the bias is added, bool ``(queries, keys)``; None: all."""
        return None if self.lag is None else np.arange(tile.begin, tile.end)[:, None] - keys >= self.lag


def for_each_tile(call: AttentionCall, work: Callable[[Row, Tile, Scratch, Scratch], Any], alone: bool = False,
                  pairs: Sequence[tuple[int, int]] | None = None) -> None:
    """``work`` on all tiles of a call, or of these ``pairs`` of batch entry and kv head, with memory for two products,
    without NumPy's warnings. Long sequences use threads, each on other pairs, unless these share an accumulator
    (``alone``)."""
    def share(pairs: Sequence[tuple[int, int]]) -> None:
        scratch = Scratch(), Scratch()
        for row in _rows(call, pairs):
            with one_blas_thread():  # again: a concurrent call that has ended lifted the limit
                for tile in row.tiles:
                    work(row, tile, *scratch)

    if pairs is None:
        pairs = list(itertools.product(range(call.batch), range(call.kv_heads)))
    parallel_for(share, pairs, call.query_length, alone)


def _rows(call: AttentionCall, pairs: Iterable[tuple[int, int]]) -> Iterator[Row]:
    """The query heads of these batch entries and kv heads."""
    kind = widened(call.query.dtype)
    key, value = host(call.key), host(call.value)
    group = call.heads // call.kv_heads
    shared = {1 if x is None else x.shape[1] for x in (call.mask, call.dense, call.bias)} <= {1, call.kv_heads}
    together = group if shared else 1
    tiles_of = _TileMaker(call, min(max(TILE_ROWS // together, 32), 256))
    bias = None if call.bias is None else host(call.bias)
    lag = call.bias_delay - (call.key_length - call.query_length) if call.bias_delay else None
    for b, g in pairs:
        k, v = (x[b, :, g].astype(kind) for x in (key, value))
        nonfinite = nonfinite_rows(k), nonfinite_rows(v)
        values = with_columns(v, 1)
        for h in range(g * group, (g + 1) * group, together):
            column: np.ndarray | float = 0
            hidden = None
            added = None if bias is None else _row(bias, b, h, call)
            if added is not None and added.shape[0] == 1 and call.softcap == 0 and lag is None:
                column, added = added.reshape(-1), None
                hidden = np.broadcast_to(np.isneginf(column.astype(kind)), len(k))
            keys = Keys(with_columns(k, column, 1), values, *nonfinite, hidden if np.any(hidden) else None)
            yield Row(b, g, slice(h, h + together), keys, added, lag, tiles_of(b, h))


def with_columns(x: np.ndarray, *columns: np.ndarray | float) -> np.ndarray:
    """``x (..., D)`` with further columns, each ``(...)`` or a number."""
    out = np.empty((*x.shape[:-1], x.shape[-1] + len(columns)), x.dtype)
    out[..., :x.shape[-1]] = x
    for i, column in enumerate(columns, x.shape[-1]):
        out[..., i] = column
    return out


def entry(array: np.ndarray, row: Row, call: AttentionCall) -> np.ndarray:
    """The entry for these heads in an array with axes (1|B, 1|Hkv|H, ...), as a view."""
    return _row(array, row.batch, row.heads.start, call)


def _row(array: np.ndarray, b: int, h: int, call: AttentionCall) -> np.ndarray:
    """The entry for batch ``b`` and query head ``h`` in an array with axes (1|B, 1|Hkv|H, ...)."""
    heads = array.shape[1]
    if heads != call.heads and heads > 1:
        h //= call.heads // call.kv_heads
    return array[b if array.shape[0] > 1 else 0, h if heads > 1 else 0]


class Scratch:
    """Memory for one product after the other, as large as the largest.

    Newly allocated arrays of this size would be returned to the system and mapped again page by page, which takes up to
    half the time of a backward pass.
    """

    def __init__(self) -> None:
        self.flat = np.empty(0)

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """``a (heads, queries, D) @ b (keys, D)^T``; overwrites the product before."""
        rows, columns = a.shape[0] * a.shape[1], len(b)
        if self.flat.size < rows * columns:
            self.flat = np.empty(rows * columns, a.dtype)
        out = self.flat[:rows * columns].reshape(rows, columns)
        return np.matmul(a.reshape(rows, -1), b.T, out=out).reshape(*a.shape[:2], columns)


def logits(q: np.ndarray, row: Row, tile: Tile, keys: np.ndarray, full: bool, softcap: float,
           scratch: Scratch) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Logits of these keys and the scaled queries ``q (heads, queries, D + 2)``, which end with 1 and the number to be
    added to the query's logits; undefined where a query does not see a key.

    Also the visible pairs, bool ``(queries, keys)``, None if all are (``full``); and ``tanh(x / softcap)``, None
    without softcap. The next call with the same ``scratch`` overwrites the logits.
    """
    kind, k, tanh = q.dtype.type, row.keys.k[keys], None
    if softcap > 0:
        tanh = np.tanh(scratch.product(q[..., :-2], k[:, :-2]) / kind(softcap))
        s = kind(softcap) * tanh
        s += q[..., -1:]
    else:
        s = scratch.product(q, k)
    visible, hidden = None if full else tile.visible(keys), None
    if row.bias is not None:
        rows = row.bias if row.bias.shape[0] == 1 else row.bias[tile.begin:tile.end]
        added = (rows if row.bias.shape[1] == 1 else rows[:, keys]).astype(kind)
        far = row.far(tile, keys)
        if far is not None:
            added = np.where(far, added, kind(0))
        s += added
        hidden = np.isneginf(added)
    elif row.keys.hidden is not None:
        hidden = row.keys.hidden[keys]
    if hidden is not None and hidden.any():
        visible = np.broadcast_to(~hidden if visible is None else visible & ~hidden, s.shape[1:])
    return s, visible, tanh


def hide(x: np.ndarray, visible: np.ndarray, instead: float = 0.0) -> None:
    """Overwrite ``x (heads, queries, keys)``, even NaNs, where ``visible``, which broadcasts to it, is False.

    Masks the bits of the numbers, which uses vector instructions: with an irregular mask, as of the best keys, np.where
    takes four times as long as the product that ``x`` comes from.
    """
    bits = x.view(f"i{x.itemsize}")
    kept = -visible.astype(bits.dtype)  # all bits set or none
    bits &= kept
    if instead:
        bits |= ~kept & x.dtype.type(instead).view(bits.dtype)


def norms(x: np.ndarray) -> np.ndarray:
    """Of the rows of ``x (..., D)``."""
    return np.sqrt(np.einsum("...d,...d->...", x, x))


def are_small(query: Any, key: Any, bias: Any, value: Any) -> Any:
    """Whether rows of so large norms and biases have logits that need no maximum subtracted: float32 holds their
    exponentials, and sums of these times values."""
    return (query * key + bias <= SMALL_LOGIT) & (value <= SMALL_VALUE)


def normalized(sums: np.ndarray, m: Any) -> tuple[np.ndarray, np.ndarray]:
    """``out`` and ``lse`` from the sums of ``exp(s - m)`` times the values, the last column that of ``exp(s - m)``."""
    kind = sums.dtype.type
    out, total = sums[..., :-1], sums[..., -1]
    seen = total != 0  # a sum of NaN is "seen": NaN stays NaN
    out = np.where(seen[..., None], out / total[..., None], kind(0))
    return out, np.where(seen, m + np.log(total), kind(-np.inf))


def nonfinite_rows(x: np.ndarray) -> np.ndarray:
    """Which rows of ``x (..., D)`` contain a NaN or infinity."""
    finite = np.isfinite(x)
    if finite.all():  # along short rows all() takes ten times as long
        return np.zeros(x.shape[:-1], bool)
    return ~finite.all(axis=-1)


def weighted_sum(p: np.ndarray, v: np.ndarray, nonfinite: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """``p (heads, queries, keys) @ v (keys, D)``; a non-finite row of ``v`` propagates only to rows of ``p`` that see
    it."""
    if not nonfinite.any():
        return (p.reshape(-1, p.shape[2]) @ v).reshape(*p.shape[:2], -1)
    clean = np.where(nonfinite[:, None], 0, v).astype(v.dtype)
    total = (p.reshape(-1, p.shape[2]) @ clean).reshape(*p.shape[:2], -1)
    for t in np.flatnonzero(nonfinite):
        sees = slice(None) if visible is None else visible[:, t]
        total[:, sees] += p[:, sees, t, None] * v[t]
    return total


def chunks(tile: Tile) -> Iterator[tuple[np.ndarray, bool]]:
    """The tile's keys, ``KEY_CHUNK`` at a time, and whether every query of the tile is known to see them."""
    full, partial = tile.full, tile.partial
    if len(full) < FEW_KEYS and len(partial):
        full, partial = full[:0], np.concatenate((full, partial))
    for keys, seen_by_all in ((full, True), (partial, False)):
        for begin in range(0, len(keys), KEY_CHUNK):
            yield keys[begin:begin + KEY_CHUNK], seen_by_all


class _TileMaker:
    """Cuts the queries of one (batch, head) into tiles and finds the keys of each."""

    def __init__(self, call: AttentionCall, step: int):
        self.call, self.step = call, step
        self.dense = None if call.dense is None else host(call.dense)
        self.runs, mask = None, call.mask
        if mask is not None:
            self.runs = [np.broadcast_to(mask.library.to_numpy(run.array), mask.shape)
                         for run in (mask._start, mask._stop)]

    def __call__(self, b: int, h: int) -> Iterator[Tile]:
        if self.dense is not None:
            return self._from_dense(b, h, _row(self.dense, b, h, self.call))
        return self._from_runs(b, h)

    def _spans(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.call.query_length, self.step):
            yield begin, min(begin + self.step, self.call.query_length)

    def _from_runs(self, b: int, h: int) -> Iterator[Tile]:
        call, n = self.call, self.call.key_length
        offset = n - call.query_length
        if self.runs is None:
            start, stop = np.full(n, EVER, np.int32), np.full(n, n, np.int32)
        else:
            start, stop = (_row(run, b, h, call) for run in self.runs)
        if call.causal:
            start = np.maximum(start, np.arange(n, dtype=np.int32))

        # Keys enter in order of their starts and leave at their stops, so work is proportional to the visible pairs.
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
            position = np.arange(first, last + 1, dtype=np.int32)[:, None]
            visible = partial(_within, start, stop, position)
            yield Tile(begin, end, active[full], active[~full], visible)

    def _from_dense(self, b: int, h: int, dense: np.ndarray) -> Iterator[Tile]:
        n = self.call.key_length
        offset = n - self.call.query_length
        for begin, end in self._spans():
            seen = np.broadcast_to(dense if dense.shape[0] == 1 else dense[begin:end], (end - begin, n))
            if self.call.causal:
                seen = seen & (np.arange(n) <= np.arange(begin + offset, end + offset)[:, None])
            if self.runs is not None:
                start, stop = (_row(run, b, h, self.call) for run in self.runs)
                seen = seen & _within(start, stop, np.arange(begin + offset, end + offset)[:, None], np.arange(n))
            some, every = seen.any(axis=0), seen.all(axis=0)
            yield Tile(begin, end, np.flatnonzero(every), np.flatnonzero(some & ~every), partial(_columns, seen))


def _within(start: np.ndarray, stop: np.ndarray, position: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return (start[keys] <= position) & (position < stop[keys])


def _columns(seen: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return seen[:, keys]
