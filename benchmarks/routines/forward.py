"""Forward pass: this library, dense attention, and other ways to compute the same masked attention, in one run.

Inputs: bfloat16, query, key, value and dt_proj independent normal numbers (torch.manual_seed of a number made from the
case), A = 0.1, so scores are independent and identically distributed.

Sets. ``table``, the original package's (B1 H2/1 D64): "train" N = 256 ... 32768 with w = 1024, "window" w = 32 ...
32768 at N = 32768 (and 256 at N = 1024), "infer" one query against 256 ... 524288 keys, w = 1024. ``model``: 16/8 and
32/8 heads, D 64 and 128, N = 4096 ... 1048576, w 1024 and 2048.

Stages. key_scores; selection (IntervalMask.top_w); attention (mask and key lists prepared); lists+attention (mask
prepared, its cache emptied before the capture); total = dynamic_mask_attention from dt_proj and A. "infer" selects
with keys="global".

Peers. cudnn, flash: dense causal scaled_dot_product_attention (more work: all pairs). masked: the same function with
the dense additive mask; masked+build: including the time to build the mask by topk. flex: compiled FlexAttention with
the same interval mask as block mask (not timed) and the bias as score_mod.

Check: rows of every case (first, last, random) are compared with a float64 computation of the definition under the rule
"at most twice the error of the plain same-precision computation plus one rounding of the output"; the mask must equal
the exact selection in those rows.
"""
import functools
import time
from typing import Any

import numpy as np
import torch

import cupy_dma as dma
from benchmarks.harness import measure, peers, suite
from benchmarks.harness.check import TokenCheck
from benchmarks.harness.suite import cases


class Benchmark(suite.Benchmark):
    """All measurements of one case."""

    def ours(self) -> None:
        case, q, k, v = self.case, self.query, self.key, self.value

        def attend() -> Any:
            return dma.attention(q, k, v, mask=self.mask, bias=self.scores)

        def everything() -> Any:
            return dma.dynamic_mask_attention(q, k, v, dt_proj=self.dt_proj, A=self.A, window=case.window,
                                              keys=case.keys)

        self.record("cupy_dma", "key_scores", self.score)
        self.record("cupy_dma", "selection", self.select)
        self.forget_lists()
        self.record("cupy_dma", "lists+attention", attend, self.forget_lists)
        self.forget_lists()
        self.record("cupy_dma", "attention", attend)
        self.record("cupy_dma", "total", everything)
        self.forget_lists()

    def check(self) -> dict[str, Any]:
        """Check sampled rows against float64."""
        case = self.case
        out, lse = dma.attention(self.query, self.key, self.value, mask=self.mask, bias=self.scores, return_lse=True)
        n = case.query_length
        drawn = np.random.default_rng(case.seed).integers(0, n, 3 if case.key_length > 2**18 else 8).tolist()
        check, arrays = TokenCheck(), (out, lse, self.query, self.key, self.value, self.scores, *self.intervals())
        check.compare_rows(*(x[0] for x in arrays), case.window, sorted({0, n // 2, n - 1, *drawn}))
        total = dma.dynamic_mask_attention(self.query, self.key, self.value, dt_proj=self.dt_proj, A=self.A,
                                           window=case.window, keys=case.keys)
        same = bool((total == out).all())
        found = check.result()
        return {**found, "total_equals_stages": same, "ok": found["ok"] and same}

    def peers(self, deadline: float, flex: bool) -> None:
        case, q, k, v = self.case, self.query, self.key, self.value
        group = case.heads // case.kv_heads

        def one(who: str, make: Any) -> None:
            self.peer(who, make, deadline, "attention")

        if flex:
            if case.flex and measure.on_gpu():
                start, stop = (x.contiguous() for x in self.intervals())
                one("flex", lambda: peers.flex(q, k, v, self.scores, peers.intervals(q, k, start, stop)))
            return
        if case.set != "window" and case.key_length <= 2**19:
            for who, backend in peers.backends("cudnn", "flash").items():
                if who == "flash" and case.causal_pairs > 2e11:
                    continue
                one(who, functools.partial(peers.dense, backend, q, k, v))
        if case.masked:
            def build() -> Any:
                return peers.dense_mask(self.scores, case.query_length, case.window, q.dtype, group)

            mask = build() if time.monotonic() < deadline else torch.empty(0)
            one("masked", lambda: peers.masked(q, k, v, lambda: mask))
            del mask
            one("masked+build", lambda: peers.masked(q, k, v, build))


SUITE = suite.Suite("forward", __doc__, cases, Benchmark, seconds=240)
add_options, run = SUITE.add_options, SUITE.run
