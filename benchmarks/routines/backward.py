"""Backward pass: this library, dense attention and FlexAttention with the same mask, in one run.

Inputs as in forward, and dout. Sets: ``table`` and ``model`` as in forward, up to N = 131072, the longest for which
dense attention is measured; ``model`` also has 64 heads, batches of four, D 256, and scores that rise, fall, come in
bursts or are all equal. ``plain``: causal attention and attention without a mask or bias, N = 4096 (batch 4) and 16384,
D 64 and 128.

Stages. backward: attention_backward with all four gradients and every list of the mask prepared. backward+lists: the
same with the mask's cache emptied before the capture. backward deterministic. forward+backward:
dynamic_mask_attention from values, dt_proj and A, and its gradients; scores and selection are computed twice, as they
are without autograd.

Peers. cudnn, flash: dense causal scaled_dot_product_attention on contiguous (B, H, N, D) tensors, timed as
torch.autograd.grad of a retained forward pass (forward+backward, cudnn only, times both). It does more work, because it
computes all pairs; in ``plain`` the work is equal. flex: the backward pass of compiled FlexAttention, with the interval
mask as block mask and the bias as a score_mod that learns.

Check: sampled queries (dq) and keys (dk, dv, dbias) of every case against float64, with at most three times the error
of the plain same-precision computation plus one rounding (harness/check.py). Gradients of keys that no query sees are
exactly zero, deterministic=True gives the same bits twice, and the whole chain agrees with its stages.
"""
import functools
from typing import Any

import torch

import cupy_dma as dma
from benchmarks.harness import measure, peers, suite
from benchmarks.harness.check import check_interval_gradients
from benchmarks.harness.suite import Case
from cupy_dma.backward import attention_backward, dynamic_mask_attention_backward, key_scores_backward


def cases(which: str) -> list[Case]:
    """The forward's training cases up to N = 131072, the longest for dense attention. FlexAttention runs three of
    them."""
    if which == "smoke":
        return [Case("smoke", 4, 2, 32, 300, 300, 64), Case("smoke", 2, 1, 64, 200, 200, 256),
                Case("smoke", 2, 1, 64, 200, 200, 64, batch=2, pattern="falling"),
                Case("plain", 2, 1, 64, 200, 200, 200, pattern="none")]

    def compiled(case: Case) -> bool:
        return (case.set, case.heads, case.head_dim, case.key_length, case.window) in (
            ("train", 2, 64, 32768, 1024), ("model", 16, 128, 16384, 1024), ("model", 16, 128, 32768, 1024))

    def more(n: int, heads: int = 16, head_dim: int = 128, window: int = 1024, **options: Any) -> Case:
        kv_heads = 2 if head_dim == 256 else 8
        return Case("model", heads, kv_heads, head_dim, n, n, window, **options)

    plain = [Case("plain", 16, 8, dim, n, n, n, batch=16384 // n, pattern=kind)
             for kind in ("causal", "none") for dim in (64, 128) for n in (4096, 16384)]
    found = [Case(c.set, c.heads, c.kv_heads, c.head_dim, c.query_length, c.key_length, c.window, flex=compiled(c))
             for c in suite.cases(which) if c.query_length > 1 and c.key_length <= 131072]
    models = [more(32768, heads=64, window=2048), more(32768, head_dim=256), more(8192, heads=32, batch=4),
              more(4096, batch=4), *(more(32768, pattern=kind) for kind in ("rising", "falling", "bursty", "equal"))]
    return found + models + plain


class Benchmark(suite.Benchmark):
    """All measurements of one case."""

    flex_stages = ("backward",)

    def prepare(self) -> None:
        self.plain = self.case.set == "plain"
        if self.plain:
            self.options: dict[str, Any] = {"causal": self.case.pattern == "causal"}
        else:
            super().prepare()
            self.options = {"mask": self.mask, "bias": self.scores}
        self.dout = self.normal(*self.query.shape)
        self.out, self.lse = self.attend()

    def score(self) -> Any:
        scores = super().score()
        if self.case.pattern in ("rising", "falling"):
            return scores.sort(-1, descending=self.case.pattern == "falling").values
        if self.case.pattern == "bursty":  # in each 4096 keys, a burst of 256 that score above all others
            position = torch.arange(scores.shape[-1], device=scores.device)
            return scores + scores.amax() * (position % 4096 < 256)
        return torch.ones_like(scores) if self.case.pattern == "equal" else scores

    def forget_lists(self) -> None:
        if not self.plain:
            super().forget_lists()

    def intervals(self) -> tuple[Any, Any]:
        if not self.plain:
            return super().intervals()
        start = torch.arange(self.case.key_length, dtype=torch.int32, device=self.query.device)
        if not self.options["causal"]:
            start = torch.zeros_like(start)
        shape = 1, self.case.kv_heads, self.case.key_length
        return start.expand(shape), torch.full_like(start, self.case.key_length).expand(shape)

    def backward(self, deterministic: bool = False) -> Any:
        return attention_backward(self.dout, self.query, self.key, self.value, self.out, self.lse, **self.options,
                                  deterministic=deterministic)

    def attend(self) -> Any:
        return dma.attention(self.query, self.key, self.value, **self.options, return_lse=True)

    def both(self) -> Any:
        return attention_backward(self.dout, self.query, self.key, self.value, *self.attend(), **self.options)

    def everything(self) -> Any:
        if self.plain or self.case.pattern:
            return self.both()
        made = {"dt_proj": self.dt_proj, "A": self.A, "window": self.case.window}
        out, lse = dma.dynamic_mask_attention(self.query, self.key, self.value, **made, return_lse=True)
        return dynamic_mask_attention_backward(self.dout, self.query, self.key, self.value, out, lse, **made)

    def ours(self) -> None:
        self.forget_lists()
        if not self.plain:
            self.record("cupy_dma", "backward+lists", self.backward, self.forget_lists)
        self.forget_lists()
        self.record("cupy_dma", "backward", self.backward)
        self.record("cupy_dma", "backward deterministic", functools.partial(self.backward, True))
        self.record("cupy_dma", "forward+backward", self.everything)

    def sampled(self, gradients: Any) -> dict[str, Any]:
        """Check sampled gradients against float64, see harness/check.py."""
        return check_interval_gradients(gradients, self.dout, self.query, self.key, self.value, self.out, self.lse,
                                        self.options.get("bias"), *self.intervals(), seed=self.case.seed,
                                        bias_delay=self.options.get("bias_delay", 0))

    def check(self) -> dict[str, Any]:
        """Check sampled gradients, equal bits in two runs, and that the chain agrees with its stages."""
        self.forget_lists()
        found = self.backward()
        sampled = self.sampled(found)
        again = (self.backward(deterministic=True) for _ in range(2))
        same_bits = all(x is None or torch.equal(x, y) for x, y in zip(*again))
        chain = self.chain_equals(found)
        return {**sampled, "same_bits": same_bits, "chain_equals_stages": chain,
                "ok": sampled["ok"] and same_bits and chain}

    def chain_equals(self, found: Any) -> bool:
        def close(x: Any, y: Any) -> bool:
            x, y = x.float(), y.float()
            return float((x - y).abs().max()) <= 2**-7 * float(y.abs().max())

        whole = self.everything()
        if self.plain or self.case.pattern:
            return all(close(x, y) for x, y in zip(whole, found) if x is not None)
        scores = key_scores_backward(found.bias, self.value, self.dt_proj, self.A)
        return (close(whole.query, found.query) and close(whole.key, found.key)
                and close(whole.value, found.value.float() + scores.value.float())
                and close(whole.dt_proj, scores.dt_proj) and close(whole.A, scores.A))

    def peers(self, deadline: float, flex: bool) -> None:
        case, tensors = self.case, (self.query, self.key, self.value, self.dout)
        if flex:
            if measure.on_gpu():
                start, stop = (x.contiguous() for x in self.intervals())
                for stage in self.flex_stages:
                    self.peer("flex", lambda whole=stage != "backward": peers.flex_backward(
                        *tensors, self.scores, peers.intervals(self.query, self.key, start, stop),
                        delay=self.options.get("bias_delay", 0), forward=whole), deadline, stage)
            return
        if case.set == "window":  # dense attention ignores the window: measured in "train"
            return
        causal = self.options.get("causal", True)
        for who, backend in peers.backends("cudnn", "flash").items():
            large = case.causal_pairs > 2e11  # these measure only the fastest peer's backward
            if who != "flash" or not large:
                self.peer(who, functools.partial(peers.dense_backward, backend, *tensors, causal=causal), deadline,
                          "backward")
            if who != "flash" and not large:
                self.peer(who, functools.partial(peers.dense_backward, backend, *tensors, causal=causal, forward=True),
                          deadline, "forward+backward")


SUITE = suite.Suite("backward", __doc__, cases, Benchmark, seconds=220)
add_options, run = SUITE.add_options, SUITE.run
