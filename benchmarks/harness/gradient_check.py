"""Gradients of long sequences against float64, on the device, for some queries and some keys.

The backward pass is a function of ``out`` and ``lse``, so both are taken as given. With x = scale * q . k:

    p_ij = exp(x_ij + bias_j - lse_i),   ds_ij = p_ij * (dout_i . v_j - dout_i . out_i)
    dq_i = scale * sum_j ds_ij k_j,   dk_j = scale * sum_i ds_ij q_i
    dv_j = sum_i p_ij dout_i,         dbias_j = sum_i ds_ij

A query costs its visible keys, a key the queries that see it; keys that live longer than ``LIFE`` queries are not
sampled. Allowed is three times the error of the plain same-precision computation (the same formulas accumulated in
float32, p and ds rounded to the type of the input before they are multiplied, the result rounded once) plus one
rounding of the largest value (16 of a float32 result, which is rounded no more coarsely than the steps of its sum,
whose order is free) plus 16 float32 roundings of the largest sum of absolute terms, which may have to cancel.

The gradients of keys that nobody sees must be exactly zero, all of them.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cupy_dma.cli.exact_rows import rounding

LIFE = 4096  # queries


@dataclass
class Deviation:
    """The largest of what was compared of one gradient, and what is allowed."""

    error: float = 0.0
    plain_error: float = 0.0
    largest: float = 0.0
    terms: float = 0.0
    unit: float = 0.0  # half a unit in the last place of 1.0
    factor: int = 3  # of the plain error that is allowed

    def compare(self, found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, terms: torch.Tensor) -> None:
        error = float((found.double() - exact).abs().max())
        self.error = math.inf if math.isnan(error) else max(self.error, error)
        self.plain_error = max(self.plain_error, float((plain.to(found.dtype).double() - exact).abs().max()))
        self.largest = max(self.largest, float(exact.abs().max()))
        self.terms = max(self.terms, float(terms.max()))
        self.unit = rounding(np.dtype(np.float32)) if found.dtype == torch.float32 else torch.finfo(found.dtype).eps / 2

    @property
    def allowed(self) -> float:
        single = rounding(np.dtype(np.float32))
        roundings = 16 if self.unit == single else 1
        return self.factor * self.plain_error + roundings * self.unit * self.largest + 16 * single * self.terms


@dataclass
class GradientCheck:
    queries: int
    keys: int  # (kv head, key) pairs that were compared
    unseen_keys: int  # (kv head, key) pairs that nobody sees
    unseen_are_zero: bool
    gradients: dict[str, dict[str, float]]  # name -> error, allowed

    @property
    def worst(self) -> float:
        """The largest error in units of what is allowed."""
        return max(math.inf if g["error"] > g["allowed"] == 0 else g["error"] / (g["allowed"] or 1)
                   for g in self.gradients.values())

    @property
    def ok(self) -> bool:
        return self.unseen_are_zero and self.queries > 0 and self.keys > 0 and self.worst <= 1


@dataclass
class _Pairs:
    """p, ds, ds rounded for the second products, and the absolute terms of ds, of some pairs (last axis: D)."""

    p: torch.Tensor
    ds: torch.Tensor
    dx: torch.Tensor
    terms: torch.Tensor

    @classmethod
    def of(cls, wide, q, k, v, dout, out, lse, bias, rounded=None):
        q, k, v, dout, out, lse, bias = (x.to(wide) for x in (q, k, v, dout, out, lse, bias))
        p = torch.exp(q.shape[-1] ** -0.5 * (q * k).sum(-1) + bias - lse)
        ds = p * ((dout * v).sum(-1) - (dout * out).sum(-1))
        terms = p * ((dout * v).abs().sum(-1) + (dout * out).abs().sum(-1))
        return (cls(p, ds, ds, terms) if rounded is None
                else cls(p.to(rounded).to(wide), ds, ds.to(rounded).to(wide), terms))


def check_gradients(gradients: Any, dout: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                    out: torch.Tensor, lse: torch.Tensor, bias: torch.Tensor, start: torch.Tensor, stop: torch.Tensor,
                    seed: int = 0) -> GradientCheck:
    """Compare ``gradients`` (query, key, value, bias) of attention under an interval mask with float64.

    Parameters
    ----------
    gradients : ``(query, key, value, bias)``, as ``attention_backward`` returns them
    dout, query, out : ``(1, L, H, D)``; key, value : ``(1, L, Hkv, D)``, as many keys as queries
    lse : ``(1, H, L)``; bias : ``(1, Hkv, L)``, both float32
    start, stop : int ``(1, Hkv, L)`` of the mask
    """
    dq, dk, dv, dbias = (x[0] for x in gradients)
    dout, query, key, value, out, lse, bias, start, stop = (
        x[0] for x in (dout, query, key, value, out, lse, bias, start, stop))
    length, heads, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    scale = size**-0.5
    deviations = {name: Deviation() for name in ("query", "key", "value", "bias")}
    rng = np.random.default_rng(seed)

    rows = sorted({0, length // 2, length - 1, *rng.integers(0, length, 5).tolist()})
    for i in rows:
        for g in range(kv_heads):
            seen = torch.nonzero((start[g] <= i) & (i < stop[g]))[:, 0]
            own = slice(g * group, (g + 1) * group)
            k, v = key[seen, g], value[seen, g]
            pairs = [_Pairs.of(wide, query[i, own, None], k, v, dout[i, own, None], out[i, own, None],
                               lse[own, i, None], bias[g, seen], rounded)
                     for wide, rounded in ((torch.float64, None), (torch.float32, query.dtype))]
            exact, plain = (scale * x.dx @ k.to(x.dx.dtype) for x in pairs)
            deviations["query"].compare(dq[i, own], exact, plain, scale * pairs[0].terms @ k.double().abs())

    life = stop.clamp(max=length) - start
    living = torch.nonzero((life > 0) & (life <= LIFE)).cpu().numpy()  # rows (kv head, key)
    sample = living[np.unique(rng.integers(0, len(living), 12))] if len(living) else living
    for g, j in sample.tolist():
        own = slice(g * group, (g + 1) * group)
        span = slice(int(start[g, j]), int(start[g, j] + life[g, j]))
        q, do = query[span, own], dout[span, own]
        arguments = q, key[j, g], value[j, g], do, out[span, own], lse[own, span].T, bias[g, j]
        exact = _Pairs.of(torch.float64, *arguments)
        plain = _Pairs.of(torch.float32, *arguments, query.dtype)
        for name, found, pairs, rows_of, factor in (("key", dk, (exact.dx, plain.dx, exact.terms), q, scale),
                                                    ("value", dv, (exact.p, plain.p, exact.p), do, 1.0)):
            sums = [factor * torch.einsum("ih,ihd->d", w, x.to(w.dtype))
                    for w, x in zip(pairs, (rows_of, rows_of, rows_of.abs()))]
            deviations[name].compare(found[j, g], *sums)
        deviations["bias"].compare(dbias[g, j], exact.ds.sum(), plain.ds.sum(), exact.terms.sum())

    unseen = life <= 0
    zero = all(not bool((x != 0).any(-1)[unseen.T].any()) for x in (dk, dv)) and not bool((dbias[unseen] != 0).any())
    return GradientCheck(len(rows), len(sample), int(unseen.sum()), zero,
                         {name: {"error": d.error, "allowed": d.allowed} for name, d in deviations.items()})
