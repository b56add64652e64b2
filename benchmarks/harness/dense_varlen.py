"""The varlen cases of dense_performance.py: unequal sequences against equal ones, packed and as a batch."""
from __future__ import annotations

import functools
from typing import Any

from benchmarks.harness.dense_cases import Benchmark

SEQUENCES, SHORTEST, LONGEST = 64, 100, 8000


def lengths(small: bool) -> list[int]:
    """Lengths of the sequences of a varlen case, a multiple of their number in all."""
    import numpy as np

    count, longest = (4, 150) if small else (SEQUENCES, LONGEST)
    drawn = np.random.default_rng(5).integers(SHORTEST, longest + 1, count)
    drawn[np.argmin(drawn)] += -int(drawn.sum()) % count
    return [int(n) for n in drawn]


class Varlen(Benchmark):
    def prepare(self) -> None:
        import torch

        case = self.case
        self.lengths = next(drawn for drawn in map(lengths, (False, True)) if sum(drawn) == case.key_length)
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        self.ends = ends.to(self._device, torch.int32)
        equal = case.key_length // len(self.lengths)
        self.equal_ends = torch.arange(0, case.key_length + 1, equal, dtype=torch.int32, device=self._device)
        self.scores = self.score() if case.window else None

    def pairs(self, lengths: list[int]) -> int:
        w = self.case.window or max(lengths)
        return self.case.heads * sum(n * min(w, n) - min(w, n) * (min(w, n) - 1) // 2 for n in lengths)

    def keep_pairs(self, lengths: list[int]) -> None:
        self.rows[-1]["pairs"] = self.pairs(lengths)

    def ours(self) -> None:
        import cupy_dma as dma

        if not hasattr(dma, "varlen_attention"):
            for direction in ("forward", "backward"):
                self.rows.append({"who": "cupy_dma", "stage": f"{direction} unequal", "ms": None, "timing": "",
                                     "note": "this version has no varlen_attention"})
            self.checks["varlen"] = {"worst": 0.0, "ok": True}
            return
        count = len(self.lengths)
        equal = [self.case.key_length // count] * count
        self.packed("unequal", self.ends, self.lengths)
        self.packed("equal, packed", self.equal_ends, equal)
        self.batch(equal)

    def packed(self, label: str, ends: Any, lengths: list[int]) -> None:
        import torch

        import cupy_dma as dma
        from benchmarks.harness.check import Given, Problem
        from cupy_dma.backward import varlen_attention_backward

        q, k, v, do = (x[0] for x in (self.query, self.key, self.value, self.dout))
        options: dict[str, Any] = {"causal": True}
        mask = None
        if self.scores is not None:
            mask = dma.IntervalMask.top_w(self.scores, window=self.case.window, documents=ends)
            options = {"mask": mask, "bias": self.scores[0]}

        def forget() -> None:
            if mask is not None:
                mask._cache.clear()

        forward = functools.partial(dma.varlen_attention, q, k, v, ends, ends, **options)
        self.record("cupy_dma", f"forward {label}", forward, forget)
        self.keep_pairs(lengths)
        out, lse = forward(return_lse=True)
        backward = functools.partial(varlen_attention_backward, do, q, k, v, out, lse, ends, ends, **options)
        self.record("cupy_dma", f"backward {label}", backward, forget)
        self.keep_pairs(lengths)
        found = backward()

        bounds = ends.tolist()

        def sequence_of(index: int) -> Any:
            at = next(n for n in range(1, len(bounds)) if index < bounds[n])
            return torch.arange(bounds[at - 1], bounds[at], device=q.device)

        def visible(i: Any, j: Any) -> Any:
            if mask is None:
                return (j <= i[:, None])[None]
            start, stop = (run.expand(mask.shape)[0][:, None, j] for run in (mask.start, mask.stop))
            return (start <= i[:, None]) & (i[:, None] < stop)

        problem = Problem(q, k, v, visible, None if self.scores is None else self.scores[0][:, None],
                          sequence_of, sequence_of)
        dbias = None if found.bias is None else found.bias.reshape(-1, 1, len(k))
        self.confirm(label, Given(problem, do, out, lse), (*found[:3], dbias))
        self.problem_of_all = problem

    def confirm(self, label: str, given: Any, gradients: Any) -> None:
        from benchmarks.harness.check import check_backward, check_forward

        self.checks[f"forward {label}"] = check_forward(given.problem, given.out, given.lse, self.sampled())
        self.checks[f"backward {label}"] = check_backward(given, gradients, self.sampled(), self.sampled())

    def batch(self, lengths: list[int]) -> None:
        """The equal sequences as a batch: the computation of the packed ones before."""
        import cupy_dma as dma
        from benchmarks.harness.check import Given
        from cupy_dma.backward import attention_backward

        count, n = len(lengths), lengths[0]
        q, k, v, do = (x.reshape(count, n, *x.shape[2:]) for x in (self.query, self.key, self.value, self.dout))
        options: dict[str, Any] = {"causal": True}
        mask = None
        if self.scores is not None:
            scores = self.scores[0].reshape(-1, count, n).transpose(0, 1).contiguous()
            mask = dma.IntervalMask.top_w(scores, window=self.case.window)
            options = {"mask": mask, "bias": scores}

        def forget() -> None:
            if mask is not None:
                mask._cache.clear()

        forward = functools.partial(dma.attention, q, k, v, **options)
        self.record("cupy_dma", "forward equal, batch", forward, forget)
        self.keep_pairs(lengths)
        out, lse = forward(return_lse=True)
        backward = functools.partial(attention_backward, do, q, k, v, out, lse, **options)
        self.record("cupy_dma", "backward equal, batch", backward, forget)
        self.keep_pairs(lengths)
        dq, dk, dv, dbias = backward()
        if dbias is not None:
            dbias = dbias.transpose(0, 1).flatten(1)[:, None]
        given = Given(self.problem_of_all, self.dout[0], out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
        self.confirm("equal, batch", given, (*(x.flatten(0, 1) for x in (dq, dk, dv)), dbias))
