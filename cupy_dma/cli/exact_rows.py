"""Exact rows of dynamic mask attention, to check results on sequences too long for a dense reference.

One query row costs O(Lk): rank its candidates by (score, j), keep ``window`` of them, and do the softmax of those in
float64, straight from the definition

    s_j = scale * q . k_j + score_j,   out = sum_j softmax(s)_j v_j,   lse = log(sum_j exp(s_j)).

The error allowed is relative to the same row computed the plain way in the precision of the inputs: 16-bit inputs,
float32 accumulation, probabilities rounded to 16 bit before the second product, and the output rounded once. The plain
error of float32 and float64 inputs is nothing but the luck of the order of summation, so these get 32 roundings more.
Where tensor cores multiply float32, the plain way has all factors of both products rounded to TF32 (``tf32``).
Everything here is NumPy on the host. benchmarks/harness/check.py applies the same rule to torch tensors on their
device, also to gradients and to other masks.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Deviation:
    """The largest deviation from float64 of what was compared so far, and what is allowed:

        factor * (error of the plain computation) + roundings * unit * (largest value) + 16 * 2**-24 * terms
    """

    factor: int = 2
    unit: float = 0.0  # half a unit in the last place of 1.0, in the type of the result
    roundings: int = 1
    error: float = 0.0
    plain_error: float = 0.0
    largest: float = 0.0
    terms: float = 0.0  # the largest sum of absolute terms, which may cancel

    def add(self, error: float, plain_error: float, largest: float, terms: float = 0.0) -> None:
        self.error = math.inf if math.isnan(error) else max(self.error, error)
        self.plain_error, self.largest = max(self.plain_error, plain_error), max(self.largest, largest)
        self.terms = max(self.terms, terms)

    @property
    def allowed(self) -> float:
        return (self.factor * self.plain_error + self.roundings * self.unit * self.largest
                + 16 * 2.0**-24 * self.terms)


@dataclass
class RowCheck:
    """The largest deviation from the float64 rows, and what is allowed."""

    rows: int  # query rows that were compared, each in all heads
    error: float  # of out, absolute
    allowed: float
    lse_error: float
    lse_allowed: float
    wrong_rows: int  # (kv head, row) pairs whose mask is not exactly the selection

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and self.lse_error <= self.lse_allowed and self.wrong_rows == 0


def kept_keys(scores: np.ndarray, position: int, window: int) -> np.ndarray:
    """Indices of the ``window`` best candidates ``j <= position`` of ``scores`` (Lk,): higher score first, of equal
    scores the newest, NaN above everything."""
    candidates = np.array(scores[:max(position + 1, 0)], np.float64)
    if len(candidates) <= window:
        return np.arange(len(candidates))
    missing = np.isnan(candidates)
    if missing.any():  # np.partition sorts NaN last, but comparisons with it are false: give it a rank of its own
        finite_rank = np.unique(candidates[~missing], return_inverse=True)[1]
        candidates[~missing] = finite_rank
        candidates[missing] = len(candidates)
    threshold = np.partition(candidates, -window)[-window]
    above = np.flatnonzero(candidates > threshold)
    tied = np.flatnonzero(candidates == threshold)
    return np.sort(np.concatenate([above, tied[len(tied) - (window - len(above)):]]))


def exact_row(query, key, value, bias, scale) -> tuple[np.ndarray, float]:
    """float64 ``(out, lse)`` of one query (D,) over its visible keys (n, D), values (n, D) and biases (n,)."""
    if len(key) == 0:
        return np.zeros(value.shape[1]), -math.inf
    s = scale * (key.astype(np.float64) @ query.astype(np.float64)) + bias.astype(np.float64)
    largest = s.max()
    p = np.exp(s - largest)
    return p @ value.astype(np.float64) / p.sum(), largest + math.log(p.sum())


def rounded_tf32(array: np.ndarray) -> np.ndarray:
    """float32 rounded to the 10 bits of mantissa of TF32, to nearest, ties away from zero."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    return np.where(np.isfinite(array), (bits + np.uint32(0x1000)) & np.uint32(0xffffe000), bits).view(np.float32)


def plain_row(query, key, value, bias, scale, tf32: bool = False) -> tuple[np.ndarray, float]:
    """The same row in the precision of the inputs, as a textbook implementation has it."""
    if len(key) == 0:
        return np.zeros(value.shape[1]), -math.inf
    wide = np.float64 if query.dtype == np.float64 else np.float32
    tf32 = tf32 and query.dtype == np.float32
    if tf32:
        query, key, value = rounded_tf32(query), rounded_tf32(key), rounded_tf32(value)
    s = wide(scale) * (key.astype(wide) @ query.astype(wide)) + bias.astype(wide)
    largest = s.max()
    p = np.exp(s - largest)
    total = p.sum(dtype=wide)
    weights = rounded_tf32(p) if tf32 else p.astype(query.dtype).astype(wide)
    out = (weights @ value.astype(wide)) / total
    return out.astype(query.dtype).astype(np.float64), float(largest + np.log(total))


def rounding(dtype: np.dtype) -> float:
    """Half a unit in the last place of 1.0."""
    if dtype.name == "bfloat16":
        return 2.0**-8
    return float(np.finfo(dtype).eps) / 2


def check_rows(out: np.ndarray, lse: np.ndarray, query: np.ndarray, key: np.ndarray, value: np.ndarray,
               scores: np.ndarray, window: int, rows: Sequence[int], *, start: np.ndarray | None = None,
               stop: np.ndarray | None = None, scale: float | None = None, tf32: bool = False) -> RowCheck:
    """Compare rows of one batch entry with the definition.

    Parameters
    ----------
    out, query : ``(Lq, H, D)``
    key, value : ``(Lk, Hkv, D)``
    scores : ``(Hkv, Lk)`` float32, the ranking and the bias
    lse : ``(H, Lq)``, natural log
    rows : query rows to compare
    start, stop : ``(Hkv, Lk)`` of the interval mask, compared with the selection if given
    scale : default ``1/sqrt(D)``
    tf32 : whether float32 was multiplied by tensor cores
    """
    query_length, heads, head_dim = query.shape
    key_length, kv_heads, _ = key.shape
    group = heads // kv_heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    of_out = Deviation(unit=rounding(query.dtype), roundings=1 if query.dtype.itemsize == 2 else 32)
    of_lse = Deviation(unit=2.0**-24, roundings=64)
    wrong_rows = 0
    for row in rows:
        position = row + key_length - query_length
        for g in range(kv_heads):
            kept = kept_keys(scores[g], position, window)
            if start is not None and stop is not None:
                wrong_rows += not np.array_equal(kept, np.flatnonzero((start[g] <= position) & (position < stop[g])))
            keys, values, bias = key[kept, g], value[kept, g], scores[g, kept]
            for h in range(g * group, (g + 1) * group):
                exact, exact_lse = exact_row(query[row, h], keys, values, bias, scale)
                plain, plain_lse = plain_row(query[row, h], keys, values, bias, scale, tf32)
                of_out.add(float(np.abs(out[row, h].astype(np.float64) - exact).max()),
                           float(np.abs(plain - exact).max()), float(np.abs(exact).max()))
                if exact_lse == -math.inf:
                    of_lse.add(0.0 if lse[h, row] == -math.inf else math.inf, 0.0, 0.0)
                else:
                    of_lse.add(abs(float(lse[h, row]) - exact_lse), abs(plain_lse - exact_lse), 1 + abs(exact_lse))
    return RowCheck(rows=len(rows), error=of_out.error, allowed=of_out.allowed, lse_error=of_lse.error,
                    lse_allowed=of_lse.allowed, wrong_rows=wrong_rows)
