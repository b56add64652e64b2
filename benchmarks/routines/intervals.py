"""Interval masks without a known bound: what they cost relative to the pairs that they keep.

Such masks come from learned gates, from evictions recorded by a cache, or from a user's arrays
(``IntervalMask.from_stop``, ``from_gate``, ``IntervalMask(start, stop)``).

Inputs as in backward: 16/8 heads, D 128 and 64; N = 8192, 32768 and 131072; independent scores as bias. Masks: "1/8",
"1/16": every key is visible for 512 positions, and one in 8 or 16, drawn for each kv head, to the end. "gates 1/2" to
"1/16": the same from gates, whose logarithms are the bias from a distance of 512 on. "lognormal": a key's lifetime is
lognormal, median 256, sigma 1.5. "budgets": the best 256 to 2048 keys, with a different number for each kv head.
"sinks": StreamingLLM, 4 sinks and a window of 1024, as a cache records them. "H2O": evictions of a cache with room for
1024 keys, see ``h2o_stops``. "top-w": the best 1024 keys, given only as starts and stops; "top-w, bound": the same with
the bound. "all": every key to the end. "none": no key.

Backward: gradients of query, key, value and bias. "with lists": every call builds its lists. Forward and backward:
attention and its gradients, lists built once. Peers. cudnn: dense causal scaled_dot_product_attention. flex: compiled
FlexAttention with the same mask as block mask (not timed) and the bias as a score_mod that learns, at 32768 for "1/8"
and "gates 1/8". Allowed: causal pairs over kept pairs, the highest speedup possible at cuDNN's time per pair.

Check: sampled gradients, from the forward's output and lse, against float64; see harness/check.py.
"""
import functools
from typing import Any

import numpy as np
import torch

import cupy_dma as dma
from benchmarks.harness import suite
from benchmarks.harness.suite import Case
from benchmarks.routines import backward

WINDOW = 512
CLOSED = -20.0  # logarithm of a closed gate
PATTERNS = ("1/8", "1/16", "lognormal", "top-w", "top-w, bound", "all", "none", "gates 1/8", "gates 1/16",
            "gates 1/2", "budgets", "sinks", "H2O")


def cases(which: str) -> list[Case]:
    if which == "smoke":
        return [Case("intervals", 4, 2, 64, 200, 200, 40, pattern=pattern) for pattern in PATTERNS]
    found = [Case("intervals", 16, 8, 128, n, n, 1024, pattern=pattern, flex=n == 32768 and pattern.endswith("1/8"))
             for n in (8192, 32768, 131072) for pattern in PATTERNS
              if n == 32768 or pattern not in ("all", "none", "gates 1/2", "budgets", "sinks")]
    return found + [Case("intervals", 16, 8, 64, 32768, 32768, 1024, pattern=pattern)
                    for pattern in ("1/8", "top-w", "gates 1/8")]


@functools.cache
def h2o_stops(heads: int, length: int, budget: int) -> Any:
    """Stops of each head's keys, int64 ``(heads, length)``: evictions of H2O (examples/eviction.py) over synthetic
    attention, in texts of 8192 tokens. All queries of a head lean towards one direction, so some keys are heavy
    hitters. Each text starts with an empty cache and evicts all its keys at the end, so at most ``budget`` keys are
    alive at a time. Three in four die as soon as they are no longer recent, ``budget / 2`` positions behind."""
    from examples.eviction import generate, h2o

    rng, text, size = np.random.default_rng(0), min(length, 8192), 32
    stops = []
    for _ in range(heads):
        query, key = rng.standard_normal((2, text, size))
        query += 3 * rng.standard_normal(size)
        stops.append(generate(query, key, np.zeros((text, 1)), budget, h2o)[1])
    begins = np.arange(length) // text * text
    return begins + np.tile(stops, (1, -(-length // text)))[:, :length]


class Benchmark(backward.Benchmark):
    """All measurements of one case."""

    flex_stages = ("backward", "forward+backward")

    def prepare(self) -> None:
        super().prepare()
        if self.is_gated:
            self.options |= {"bias_delay": WINDOW}
            self.out, self.lse = self.attend()

    @property
    def is_gated(self) -> bool:
        return self.case.pattern.startswith("gates")

    def drawn(self) -> Any:
        """A number in [0, 1) for each key of each kv head."""
        return torch.rand((self.case.kv_heads, self.case.key_length), generator=self._generator, device=self._device)

    def score(self) -> Any:
        if not self.is_gated:
            return super().score()
        return torch.where(self.drawn() < self.share, -0.1 * self.drawn(), CLOSED * (1 + self.drawn()))[None]

    @property
    def share(self) -> float:
        """The share of keys that are kept forever."""
        return 1 / int(self.case.pattern.partition("/")[2])

    def select(self) -> Any:
        case = self.case
        if case.pattern == "top-w, bound":
            return dma.IntervalMask.top_w(self.scores, case.window)
        if case.pattern == "top-w":
            return dma.IntervalMask.from_stop(dma.IntervalMask.top_w(self.scores, case.window).stop)
        if self.is_gated:
            return dma.IntervalMask.from_gate(self.scores, delay=WINDOW, threshold=CLOSED / 2)
        n, shape = case.key_length, (case.kv_heads, case.key_length)
        if case.pattern == "budgets":
            return dma.IntervalMask.top_w(self.scores, [256 << g // 2 for g in range(case.kv_heads)])
        position, drawn = torch.arange(n, device=self._device), self.drawn()
        if case.pattern == "sinks":
            return dma.IntervalMask.from_stop(torch.where(position < 4, n, position + case.window).expand(shape))
        if case.pattern == "H2O":
            stops = torch.from_numpy(h2o_stops(case.kv_heads, n, case.window))
            return dma.IntervalMask.from_stop(stops.to(self._device))
        if case.pattern == "lognormal":
            life = (1.5 * torch.special.ndtri(drawn.double().clamp(1e-6, 1 - 1e-6)) + 5.545).exp()
            return dma.IntervalMask.from_stop(position + life.long() + 1)
        if case.pattern in ("all", "none"):
            return dma.IntervalMask.from_stop(torch.full(shape, n if case.pattern == "all" else 0,
                                                         device=self._device))
        return dma.IntervalMask.from_stop(torch.where(drawn < self.share, n, position + WINDOW))

    @property
    def kept_pairs(self) -> int:
        start, stop = (x.long() for x in self.intervals())
        return int((stop.clamp(max=self.case.key_length) - start).clamp(min=0).sum()) * self.case.heads // (
            self.case.kv_heads)

    def ours(self) -> None:
        self.forget_lists()
        self.record("cupy_dma", "forward with lists", self.attend, self.forget_lists)
        self.forget_lists()
        self.record("cupy_dma", "forward", self.attend)
        self.record("cupy_dma", "backward", self.backward)
        self.forget_lists()
        self.record("cupy_dma", "forward+backward", self.both, self.forget_lists)

    def check(self) -> dict[str, Any]:
        self.forget_lists()
        found = self.sampled(self.backward())
        ok = found["unseen_are_zero"] if self.case.pattern == "none" else found["ok"]
        return {**found, "worst": 0.0 if self.case.pattern == "none" else found["worst"], "ok": ok,
                "kept_pairs": self.kept_pairs}

    def peers(self, deadline: float, flex: bool) -> None:
        if flex or self.case.pattern == PATTERNS[0]:  # dense attention is the same for all masks
            super().peers(deadline, flex)


SUITE = suite.Suite("intervals", __doc__, cases, Benchmark, seconds=220)
add_options, run = SUITE.add_options, SUITE.run
