"""Attention under any mask and bias against float64, on the device, for some queries and some keys.

With x = scale * q . k + bias over the visible pairs (i, j), the forward of a query is

    lse_i = log sum_j exp(x_ij),   out_i = sum_j exp(x_ij - lse_i) v_j

and the gradients, computed from the given ``out`` and ``lse``, are

    p_ij = exp(x_ij - lse_i),   ds_ij = p_ij * (dout_i . v_j - dout_i . out_i)
    dq_i = scale * sum_j ds_ij k_j,   dk_j = scale * sum_i ds_ij q_i,   dv_j = sum_i p_ij dout_i,   dbias = ds, summed

A query costs its visible keys, a key the queries that see it. An error may be at most the sum of

    twice (gradients: three times) the error of the plain same-precision computation: the same formulas accumulated in
        float32, p and ds rounded to the type of the input before they are multiplied, the result rounded once
    one rounding of the largest value; 16 for a float32 result, because its sum may run in any order
    for gradients, 16 float32 roundings of the largest sum of absolute terms, because the terms may cancel

``check_forward`` and ``check_backward`` take any mask. ``check_interval_gradients`` and ``TokenCheck`` call them for
one kv head at a time and its visible keys only, for sequences whose rows of pairs in all heads would not fit.
"""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cupy_dma.cli.exact_rows import Deviation, kept_keys

LIFE = 4096  # queries; longer-lived keys are sampled only if no key is shorter-lived
Kept = Sequence[Tensor]  # of each kv head: the keys that are seen, int64
Seen = Callable[[int], Tensor]


@dataclass
class Problem:
    """The computation of one batch entry."""

    query: Tensor  # (Lq, H, D)
    key: Tensor  # (Lk, Hkv, D)
    value: Tensor
    visible: Callable[[Tensor, Tensor], Tensor]  # queries (n,), keys (m,) -> bool (1|Hkv|H, n, m)
    bias: Tensor | None = None  # (Hkv|H, 1|Lq, Lk)
    keys_of: Seen | None = None  # indices of the keys that a query can see; all
    queries_of: Seen | None = None  # indices of the queries that can see a key; all
    softcap: float = 0.0  # c: c * tanh(scale * q . k / c) in place of scale * q . k; 0 = none; forward only
    bias_delay: int = 0  # of a key bias; needs as many keys as queries

    def spread(self, x: Tensor) -> Tensor:
        """Repeat the entries of axis 0, ``Hkv`` or 1 of them, to ``H``."""
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
            s = s + self.spread(part[:, :, j]).to(wide) * self.is_biased(i, j)
        return s.masked_fill(~self.spread(self.visible(i, j)), -torch.inf)

    def is_biased(self, i: Tensor, j: Tensor) -> Tensor:
        """bool (n, m): whether the bias is added."""
        return (i[:, None] - j >= self.bias_delay) | (self.bias_delay == 0)

    def seen_by(self, row: int) -> Tensor:
        return self.keys_of(row) if self.keys_of else torch.arange(len(self.key), device=self.key.device)

    def seeing(self, key: int) -> Tensor:
        return self.queries_of(key) if self.queries_of else torch.arange(len(self.query), device=self.key.device)


def every(i: Tensor, j: Tensor) -> Tensor:
    """``Problem.visible`` if ``keys_of`` and ``queries_of`` already list visible pairs only."""
    return torch.ones((1, len(i), len(j)), dtype=torch.bool, device=i.device)


def sample(length: int, seed: int, count: int = 5) -> list[int]:
    """The first, middle and last rows, and random ones."""
    return sorted({0, length // 2, length - 1, *np.random.default_rng(seed).integers(0, length, count).tolist()})


def compare(deviation: Deviation, found: Tensor, exact: Tensor, plain: Tensor, terms: Tensor | None = None) -> None:
    single = found.dtype == torch.float32
    deviation.unit, deviation.roundings = torch.finfo(found.dtype).eps / 2, 16 if single else 1
    deviation.add(float((found.double() - exact).abs().max()),
                  float((plain.to(found.dtype).double() - exact).abs().max()), float(exact.abs().max()),
                  0.0 if terms is None else float(terms.max()))


def summary(deviations: dict[str, Deviation]) -> dict[str, Any]:
    """"ok", the "worst" error in units of what is allowed, and all errors."""
    worst = max((math.inf if d.error > d.allowed == 0 else d.error / (d.allowed or 1) for d in deviations.values()),
                default=0.0)
    return {"worst": worst, "ok": worst <= 1,
            "tensors": {name: {"error": d.error, "allowed": d.allowed} for name, d in deviations.items()}}


def check_forward(problem: Problem, out: Tensor, lse: Tensor | None, rows: Sequence[int]) -> dict[str, Any]:
    """``out (Lq, H, D)`` and ``lse (H, Lq)`` in these rows: "ok", the "worst" error in units of what is allowed, and
    all errors."""
    deviations = {name: Deviation() for name in ("out", "lse")[:1 if lse is None else 2]}
    compare_forward(deviations, problem, out, lse, rows)
    return summary(deviations)


def compare_forward(deviations: dict[str, Deviation], problem: Problem, out: Tensor, lse: Tensor | None,
                    rows: Sequence[int]) -> None:
    for row in rows:
        i = torch.tensor([row], device=out.device)
        j = problem.seen_by(row)
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
        compare(deviations["out"], out[row], exact, plain)
        if lse is not None:
            ours = lse[:, row]
            if not torch.equal(ours > -torch.inf, seen):
                deviations["lse"].error = torch.inf
            elif bool(seen.any()):
                compare(deviations["lse"], ours[seen], exact_lse[seen], plain_lse[seen])


@dataclass
class Given:
    """The inputs of the backward pass."""

    problem: Problem
    dout: Tensor  # (Lq, H, D)
    out: Tensor
    lse: Tensor  # (H, Lq)

    def pairs(self, i: Tensor, j: Tensor, wide: torch.dtype, rounded: torch.dtype) -> tuple[Tensor, ...]:
        """Four arrays (H, n, m): p and ds, both rounded for the second products, the absolute terms of ds, and ds."""
        problem = self.problem
        alive = self.lse[:, i] > -torch.inf
        p = torch.exp(problem.logits(i, j, wide) - torch.where(alive, self.lse[:, i], 0).to(wide)[..., None])
        do, o, v = (problem.rows(self.dout, i, wide), problem.rows(self.out, i, wide),
                    problem.rows(problem.value, j, wide))
        ds = p * (do @ v.transpose(1, 2) - (do * o).sum(-1, keepdim=True))
        terms = p * (do.abs() @ v.abs().transpose(1, 2) + (do * o).abs().sum(-1, keepdim=True))
        return p.to(rounded).to(wide), ds.to(rounded).to(wide), terms, ds


def check_backward(given: Given, gradients: Any, rows: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
    """Check gradients ``(query, key, value, bias)`` without the batch axis at these queries and keys; the bias is
    ``(Hkv|H, 1|Lq, Lk)`` or None. Returns the same as ``check_forward``."""
    names = "query", "key", "value", *(() if gradients[3] is None else ("bias",))
    deviations = {name: Deviation(factor=3) for name in names}
    compare_backward(deviations, given, gradients, rows, keys)
    return summary(deviations)


def compare_backward(deviations: dict[str, Deviation], given: Given, gradients: Any, rows: Sequence[int],
                     keys: Sequence[int]) -> None:
    problem = given.problem
    dq, dk, dv, dbias = gradients
    scale, kv_heads = problem.query.shape[2]**-0.5, problem.key.shape[1]
    kinds = (torch.float64, torch.float64), (torch.float32, problem.query.dtype)

    def grouped(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(0, (heads, -1)).sum(1)

    for row in rows:
        i = torch.tensor([row], device=dq.device)
        j = problem.seen_by(row)
        (_, dx, terms, ds), (_, plain_dx, _, plain_ds) = (given.pairs(i, j, *kind) for kind in kinds)
        k = problem.rows(problem.key, j, torch.float64)
        compare(deviations["query"], dq[row], scale * (dx @ k)[:, 0], scale * (plain_dx @ k.float())[:, 0],
                scale * (terms @ k.abs())[:, 0])
        if dbias is not None and dbias.shape[1] > 1:
            compare(deviations["bias"], dbias[:, row, j],
                    *(grouped(x[:, 0], dbias.shape[0]) for x in (ds, plain_ds, terms)))
    for key in keys:
        j = torch.tensor([key], device=dq.device)
        i = problem.seeing(key)
        (p, dx, terms, ds), (plain_p, plain_dx, _, plain_ds) = (given.pairs(i, j, *kind) for kind in kinds)
        q, do = problem.rows(problem.query, i, torch.float64), problem.rows(given.dout, i, torch.float64)
        for name, found, weights, x, factor in (("key", dk, (dx, plain_dx, terms), q, scale),
                                                ("value", dv, (p, plain_p, p), do, 1.0)):
            sums = [factor * (w.transpose(1, 2) @ y)[:, 0] for w, y in zip(weights, (x, x.float(), x.abs()))]
            compare(deviations[name], found[key], *(grouped(y, kv_heads) for y in sums))
        if dbias is not None and dbias.shape[1] == 1:
            sums = [grouped((x * problem.is_biased(i, j)).sum((1, 2)), dbias.shape[0]) for x in (ds, plain_ds, terms)]
            compare(deviations["bias"], dbias[:, 0, key], *sums)


# ---- long sequences under an interval mask ----
def check_interval_gradients(gradients: Any, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
                             lse: Tensor, bias: Tensor | None, start: Tensor, stop: Tensor, seed: int = 0,
                             bias_delay: int = 0) -> dict[str, Any]:
    """Check gradients of attention under an interval mask for the first batch entry; those of all invisible keys must
    be zero. Returns the same as ``check_forward``, and the numbers of sampled queries, of ``keys`` (pairs of a kv head
    and a key) and of keys that no query sees.

    Parameters
    ----------
    gradients : ``(query, key, value, bias)``, as ``attention_backward`` returns them
    dout, query, out : ``(B, L, H, D)``; key, value : ``(B, L, Hkv, D)``, as many keys as queries
    lse : ``(B, H, L)``; bias : ``(B, Hkv, L)`` or None, both float32
    start, stop : int ``(1, Hkv, L)`` of the mask
    bias_delay : as of ``attention``
    """
    dq, dk, dv, dbias = (None if x is None else x[0] for x in gradients)
    dout, query, key, value, out, lse, start, stop = (x[0] for x in (dout, query, key, value, out, lse, start, stop))
    bias = None if bias is None else bias[0]
    length, kv_heads = len(query), key.shape[1]
    group = query.shape[1] // kv_heads
    rng = np.random.default_rng(seed)
    rows = sample(length, seed)
    life = stop.clamp(max=length) - start
    short = (life > 0) & (life <= LIFE)
    living = torch.nonzero(short if bool(short.any()) else life > 0).cpu().numpy()  # rows (kv head, key)
    drawn = living[np.unique(rng.integers(0, len(living), 12))] if len(living) else living

    names = "query", "key", "value", *(() if bias is None else ("bias",))
    deviations = {name: Deviation(factor=3) for name in names}
    for g in range(kv_heads):
        one, own = slice(g, g + 1), slice(g * group, (g + 1) * group)

        def keys_of(row: int, g: int = g) -> Tensor:
            return torch.nonzero((start[g] <= row) & (row < stop[g]))[:, 0]

        def queries_of(key: int, g: int = g) -> Tensor:
            return torch.arange(int(start[g, key]), int(start[g, key] + life[g, key]), device=dq.device)

        problem = Problem(query[:, own], key[:, one], value[:, one], every, None if bias is None else bias[one, None],
                          keys_of, queries_of, bias_delay=bias_delay)
        given = Given(problem, dout[:, own], out[:, own], lse[own])
        of_bias = None if dbias is None else dbias[one, None]
        compare_backward(deviations, given, (dq[:, own], dk[:, one], dv[:, one], of_bias), rows,
                         drawn[drawn[:, 0] == g, 1].tolist())

    unseen = life <= 0
    zero = all(not bool((x != 0).any(-1)[unseen.T].any()) for x in (dk, dv))
    zero &= dbias is None or not bool((dbias[unseen] != 0).any())
    found = summary(deviations)
    return {"queries": len(rows), "keys": len(drawn), "unseen_keys": int(unseen.sum()), "unseen_are_zero": zero,
            **found, "ok": found["ok"] and zero and len(drawn) > 0}


# ---- decoding ----
def best_keys(scores: Tensor, window: int) -> Kept:
    """The keys of ``scores (Hkv, n)`` that the last position sees, oldest first."""
    return [torch.from_numpy(kept_keys(row, len(row) - 1, window)).to(scores.device) for row in scores.cpu().numpy()]


def sampled_batch(batch: int, seed: int) -> list[int]:
    """The first, the last and a random sequence."""
    return sorted({0, batch - 1, *np.random.default_rng(seed).integers(0, batch, 1).tolist()})


class TokenCheck:
    """Checks single queries over a long history; ``result()`` sums the checks up."""

    def __init__(self) -> None:
        self.deviations = {"out": Deviation(), "lse": Deviation()}
        self.wrong_keys = 0  # (sequence, kv head) pairs whose kept keys are not those of the definition

    def compare(self, out: Tensor, lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
                bias: Tensor | None = None, kept: Kept | None = None) -> None:
        """``out, query (H, D)``, ``lse (H,)``, ``key, value (n, Hkv, D)``, ``bias (Hkv, n)``. Without ``kept``, all
        keys are visible."""
        group = query.shape[0] // key.shape[1]
        for g in range(key.shape[1]):
            one, own = slice(g, g + 1), slice(g * group, (g + 1) * group)
            problem = Problem(query[None, own], key[:, one], value[:, one], every,
                              None if bias is None else bias[one, None],
                              None if kept is None else lambda row, keys=kept[g]: keys)
            compare_forward(self.deviations, problem, out[None, own], None if lse is None else lse[own, None], [0])

    def compare_kept(self, positions: Tensor, kept: Kept) -> None:
        """``positions (Hkv, R)``, in any order and -1 where there is none, must be ``kept``."""
        self.wrong_keys += sum(not torch.equal(row[row >= 0].sort().values, keys)
                               for row, keys in zip(positions, kept))

    def compare_rows(self, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, scores: Tensor,
                     start: Tensor, stop: Tensor, window: int, rows: Sequence[int]) -> None:
        """These queries of one batch entry, under the mask ``start, stop (Hkv, Lk)`` of the best ``window`` keys."""
        for row in rows:
            position = row + len(key) - len(query)
            kept = best_keys(scores[:, :position + 1], window)
            self.compare(out[row], lse[:, row], query[row], key, value, scores, kept)
            seen = (start <= position) & (position < stop)
            self.wrong_keys += sum(not torch.equal(keys.nonzero()[:, 0], best) for keys, best in zip(seen, kept))

    def result(self) -> dict[str, Any]:
        found = summary({name: d for name, d in self.deviations.items() if d.unit or d.error})
        return {**found, "wrong_keys": self.wrong_keys, "ok": found["ok"] and self.wrong_keys == 0}
