"""Attention under any mask and bias against float64, on the device, for some queries and some keys.

With x = scale * q . k + bias over the visible pairs (i, j), the forward of a query is

    lse_i = log sum_j exp(x_ij),   out_i = sum_j exp(x_ij - lse_i) v_j

and the gradients, functions of ``out`` and ``lse`` as they were given, are

    p_ij = exp(x_ij - lse_i),   ds_ij = p_ij * (dout_i . v_j - dout_i . out_i)
    dq_i = scale * sum_j ds_ij k_j,   dk_j = scale * sum_i ds_ij q_i,   dv_j = sum_i p_ij dout_i,   dbias = ds, summed

A query costs its visible keys, a key the queries that see it. Allowed is twice (gradients: three times) the error of
the plain same-precision computation plus the roundings that ``gradient_check.Deviation`` names.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.gradient_check import Deviation

Span = Callable[[int], tuple[int, int]]


@dataclass
class Problem:
    """One batch entry: what is computed."""

    query: Tensor  # (Lq, H, D)
    key: Tensor  # (Lk, Hkv, D)
    value: Tensor
    visible: Callable[[Tensor, Tensor], Tensor]  # queries (n,), keys (m,) -> bool (1|Hkv|H, n, m)
    bias: Tensor | None = None  # (Hkv|H, 1|Lq, Lk)
    keys_of: Span | None = None  # the keys that a query can see; all
    queries_of: Span | None = None  # the queries that can see a key; all
    softcap: float = 0.0  # c: c * tanh(scale * q . k / c) in place of scale * q . k; 0 = none; forward only

    def spread(self, x: Tensor) -> Tensor:
        """Axis 0 of ``Hkv`` or 1 entries as one of ``H``."""
        heads = self.query.shape[1]
        return x.expand(heads, *x.shape[1:]) if x.shape[0] == 1 else x.repeat_interleave(heads // x.shape[0], 0)

    def rows(self, x: Tensor, index: Tensor, wide: torch.dtype) -> Tensor:
        """``(H, n, D)`` of the given rows."""
        return self.spread(x[index].transpose(0, 1).to(wide))

    def logits(self, i: Tensor, j: Tensor, wide: torch.dtype) -> Tensor:
        s = self.query.shape[2]**-0.5 * self.rows(self.query, i, wide) @ self.rows(self.key, j, wide).transpose(1, 2)
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.bias is not None:
            part = self.bias if self.bias.shape[1] == 1 else self.bias[:, i]
            s = s + self.spread(part[:, :, j]).to(wide)
        return s.masked_fill(~self.spread(self.visible(i, j)), -torch.inf)

    def range(self, span: Span | None, index: int, length: int) -> Tensor:
        begin, end = (0, length) if span is None else span(index)
        return torch.arange(begin, end, device=self.query.device)


def sample(length: int, seed: int, count: int = 5) -> list[int]:
    """The first, middle and last rows and some drawn ones."""
    return sorted({0, length // 2, length - 1, *np.random.default_rng(seed).integers(0, length, count).tolist()})


def summary(deviations: dict[str, Deviation]) -> dict[str, Any]:
    """"ok", the "worst" error in units of what is allowed, and all errors."""
    worst = max(d.error / d.allowed if d.allowed else float(d.error > 0) * torch.inf for d in deviations.values())
    return {"worst": worst, "ok": worst <= 1,
            "tensors": {name: {"error": d.error, "allowed": d.allowed} for name, d in deviations.items()}}


def check_forward(problem: Problem, out: Tensor, lse: Tensor | None, rows: Sequence[int]) -> dict[str, Any]:
    """``out (Lq, H, D)`` and ``lse (H, Lq)`` in these rows: "ok", the "worst" error in units of what is allowed, and
    all errors."""
    deviations = {"out": Deviation(factor=2), **({} if lse is None else {"lse": Deviation(factor=2)})}
    for row in rows:
        i = torch.tensor([row], device=out.device)
        j = problem.range(problem.keys_of, row, len(problem.key))
        found = []
        for wide, rounded in ((torch.float64, torch.float64), (torch.float32, out.dtype)):
            s = problem.logits(i, j, wide)
            total = s.logsumexp(-1)  # (H, 1)
            seen = total > -torch.inf
            shift = torch.where(seen, s.amax(-1), 0)[..., None]
            p = torch.exp(s - shift)
            o = p.to(rounded).to(wide) @ problem.rows(problem.value, j, wide) / p.sum(-1, keepdim=True)
            found.append((torch.where(seen[..., None], o, 0)[:, 0], total[:, 0], seen[:, 0]))
        (exact, exact_lse, seen), (plain, plain_lse, _) = found
        deviations["out"].compare(out[row], exact, plain, exact * 0)
        if lse is not None:
            ours = lse[:, row]
            if not torch.equal(ours > -torch.inf, seen):
                deviations["lse"].error = torch.inf
            elif bool(seen.any()):
                deviations["lse"].compare(*(x[seen] for x in (ours, exact_lse, plain_lse, exact_lse * 0)))
    return summary(deviations)


@dataclass
class Given:
    """What the backward pass was given."""

    problem: Problem
    dout: Tensor  # (Lq, H, D)
    out: Tensor
    lse: Tensor  # (H, Lq)

    def pairs(self, i: Tensor, j: Tensor, wide: torch.dtype, rounded: torch.dtype) -> tuple[Tensor, ...]:
        """(H, n, m) each: p and ds rounded for the second products, the absolute terms of ds, ds."""
        problem = self.problem
        alive = self.lse[:, i] > -torch.inf
        p = torch.exp(problem.logits(i, j, wide) - torch.where(alive, self.lse[:, i], 0).to(wide)[..., None])
        do, o, v = (problem.rows(self.dout, i, wide), problem.rows(self.out, i, wide),
                    problem.rows(problem.value, j, wide))
        ds = p * (do @ v.transpose(1, 2) - (do * o).sum(-1, keepdim=True))
        terms = p * (do.abs() @ v.abs().transpose(1, 2) + (do * o).abs().sum(-1, keepdim=True))
        return p.to(rounded).to(wide), ds.to(rounded).to(wide), terms, ds


def check_backward(given: Given, gradients: Any, rows: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
    """Gradients ``(query, key, value, bias)`` without the batch axis, the bias ``(Hkv|H, 1|Lq, Lk)`` or None, of these
    queries and keys; as ``check_forward``."""
    problem = given.problem
    dq, dk, dv, dbias = gradients
    names = "query", "key", "value", *(() if dbias is None else ("bias",))
    deviations = {name: Deviation() for name in names}
    scale, kv_heads = problem.query.shape[2]**-0.5, problem.key.shape[1]
    kinds = (torch.float64, torch.float64), (torch.float32, problem.query.dtype)

    def grouped(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(0, (heads, -1)).sum(1)

    for row in rows:
        i = torch.tensor([row], device=dq.device)
        j = problem.range(problem.keys_of, row, len(problem.key))
        (_, dx, terms, ds), (_, plain_dx, _, plain_ds) = (given.pairs(i, j, *kind) for kind in kinds)
        k = problem.rows(problem.key, j, torch.float64)
        deviations["query"].compare(dq[row], scale * (dx @ k)[:, 0], scale * (plain_dx @ k.float())[:, 0],
                                    scale * (terms @ k.abs())[:, 0])
        if dbias is not None and dbias.shape[1] > 1:
            parts = (grouped(x[:, 0], dbias.shape[0]) for x in (ds, plain_ds, terms))
            deviations["bias"].compare(dbias[:, row, j], *parts)
    for key in keys:
        j = torch.tensor([key], device=dq.device)
        i = problem.range(problem.queries_of, key, len(problem.query))
        (p, dx, terms, ds), (plain_p, plain_dx, _, plain_ds) = (given.pairs(i, j, *kind) for kind in kinds)
        q, do = problem.rows(problem.query, i, torch.float64), problem.rows(given.dout, i, torch.float64)
        for name, found, weights, x, factor in (("key", dk, (dx, plain_dx, terms), q, scale),
                                                ("value", dv, (p, plain_p, p), do, 1.0)):
            sums = [factor * (w.transpose(1, 2) @ y)[:, 0] for w, y in zip(weights, (x, x.float(), x.abs()))]
            deviations[name].compare(found[key], *(grouped(y, kv_heads) for y in sums))
        if dbias is not None and dbias.shape[1] == 1:
            sums = [grouped(x.sum((1, 2)), dbias.shape[0]) for x in (ds, plain_ds, terms)]
            deviations["bias"].compare(dbias[:, 0, key], *sums)
    return summary(deviations)
