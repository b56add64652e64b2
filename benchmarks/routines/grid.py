"""Speed beside dense attention over a grid of shapes: forward, and forward and backward, from given scores.

Grid: bfloat16, 2/1 to 32/8 heads, D 64 and 128, N 256 to 32768, w 64 to N, batch 1, 4 and 16, with at most 65536 tokens
in a batch. Scores are independent, and every call builds its lists. Ours: dynamic_mask_attention, alone and with
torch.autograd.grad for query, key, value and scores. Dense: causal scaled_dot_product_attention of the same tensors, by
cuDNN or FlashAttention, whichever is faster.

Goal: where dense attention takes more than 150 us, at least 0.95 times its speed; elsewhere at most 40 us more than
dense attention, or 80 us more with the backward pass.

Check: gradients of the first batch entry against float64 for sampled queries and keys, as in backward.py; the other
entries must equal those of calls with one entry.
"""
import argparse
import functools
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import cupy_dma as dma
from benchmarks.harness import measure, peers
from benchmarks.harness.check import check_interval_gradients
from benchmarks.harness.command import conclude
from benchmarks.harness.peers import forward_backward
from benchmarks.harness.suite import Case
from benchmarks.routines import backward
from cupy_dma.backward import AttentionGradients

HEADS = ((2, 1, 64), (6, 3, 128), (16, 8, 64), (16, 8, 128), (32, 8, 128))
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 32768)
MAX_TOKENS = 65536
MIN_SPEED, SHORT_MS = 0.95, 0.15
MORE_MS = {"forward": 0.04, "both": 0.08}


class Row(NamedTuple):
    """Times of one case, in ms."""

    name: str
    stage: str  # "forward" or "both"
    ours: float
    dense: float

    @property
    def ok(self) -> bool:
        if self.dense > SHORT_MS:
            return self.dense >= MIN_SPEED * self.ours
        return self.ours <= self.dense + MORE_MS[self.stage]


def cases() -> list[Case]:
    found = []
    for h, kv_heads, head_dim in HEADS:
        for n in LENGTHS:
            windows = sorted({w for w in (64, 256, 1024, 4096, n) if w <= n})
            found += [Case("model", h, kv_heads, head_dim, n, n, w, batch=b) for b in (1, 4, 16) for w in windows
                      if n * b <= MAX_TOKENS and (b == 1 or w in (256, 1024, n))]
    return found


class Benchmark(backward.Benchmark):
    """The calls of one case."""

    def forward(self) -> Any:
        with torch.no_grad():
            return dma.dynamic_mask_attention(self.query, self.key, self.value, self.scores, window=self.case.window)

    def both(self, entry: slice = slice(None)) -> Any:
        return forward_backward(functools.partial(dma.dynamic_mask_attention, window=self.case.window),
                                [x[entry] for x in (self.query, self.key, self.value, self.scores)], self.dout[entry])

    def right(self) -> bool:
        found = self.both()
        first = AttentionGradients(*(x[:1] for x in found))
        inputs = (x[:1] for x in (self.dout, self.query, self.key, self.value, self.out, self.lse, self.scores))
        sampled = check_interval_gradients(first, *inputs, *self.intervals(), seed=self.case.seed)
        if self.case.batch == 1:
            return sampled["ok"]
        last = slice(self.case.batch - 1, None)
        return sampled["ok"] and all(torch.allclose(x[last].float(), y.float(), rtol=2**-6, atol=2**-6)
                                  for x, y in zip(found, self.both(last)))


def dense_ms(bench: Benchmark) -> dict[str, float]:
    tensors = bench.query, bench.key, bench.value
    found: dict[str, list[float]] = {"forward": [], "both": []}
    for backend in peers.backends("cudnn", "flash").values():
        calls = {"forward": peers.dense(backend, *tensors),
                 "both": peers.dense_backward(backend, *tensors, bench.dout, forward=True)}
        for stage, (call, _) in calls.items():
            found[stage].append(measure.gpu_ms(call)[0])
    return {stage: min(ms) for stage, ms in found.items()}


def measured() -> tuple[list[Row], list[str]]:
    """Measure all cases. Returns the rows, and the names of cases with wrong results."""
    rows: list[Row] = []
    wrong = []
    dense: dict[Any, dict[str, float]] = {}
    for case in tqdm(cases(), unit="case", disable=None):
        bench = Benchmark(case)
        bench.prepare()
        shape = case.heads, case.head_dim, case.key_length, case.batch
        if shape not in dense:
            dense[shape] = dense_ms(bench)
        for stage, call in (("forward", bench.forward), ("both", bench.both)):
            rows.append(Row(case.name, stage, measure.gpu_ms(call)[0], dense[shape][stage]))
        if not bench.right():
            wrong.append(case.name)
        del bench
        measure.free_memory()
    return rows, wrong


def run(args: argparse.Namespace) -> int:
    rows, wrong = measured()
    return conclude("grid", args, __doc__, not wrong, wrong=wrong,
                    rows=[{**row._asdict(), "ok": row.ok} for row in rows])
