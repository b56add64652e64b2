"""The portable kernels beside FlashAttention-2, on one Hopper GPU with the occupancy of other cards.

Most GPUs run the portable kernels (kernels/sm80). This routine compares them with FlashAttention-2, torch's flash
backend, on a Hopper GPU: the library without its Hopper kernels (``Overrides``), and FlashAttention with the tiles that
it chooses for this card.

Rows. "own": with this card's 227 KiB of shared memory. "A100": 163 KiB. "RTX": 99 KiB, as consumer cards of compute
capability 8.6, 8.9 and 12.0. Each row uses that card's tiles, and launches request enough shared memory that no more
blocks fit on an SM than on that card. Clocks, tensor cores and memory remain the H100's, so times show the effect of
occupancy, not the speed of those cards.

Inputs, as in backward.py: bfloat16, 16/8 heads, D 64 and 128; causal attention of 4096 to 16384 tokens without a bias,
and the best 1024 keys of 8192 and 32768 tokens, with the scores as bias and lists prepared. Gradients are those of
query, key, value and bias. Timing, L2 policy, medians: see measure.py.

Check: sampled gradients of each card's kernels, from the output and lse of that card's forward, against float64; see
harness/check.py.
"""
import functools
from typing import Any

from benchmarks.harness import peers, suite
from benchmarks.harness.suite import Case
from benchmarks.routines import backward
from cupy_dma.backends.cuda.runtime.program import overridden

CARDS = {"own": None, "A100": 163 * 1024, "RTX": 99 * 1024}  # bytes of shared memory that a block may have


def cases(which: str) -> list[Case]:
    if which == "smoke":
        return [Case("plain", 4, 2, 32, 150, 150, 150, pattern="causal"), Case("model", 4, 2, 64, 150, 150, 40)]
    found = [Case("plain", 16, 8, dim, n, n, n, pattern="causal") for dim in (128, 64) for n in (4096, 8192, 16384)]
    return found + [Case("model", 16, 8, dim, n, n, 1024) for dim in (128, 64) for n in (8192, 32768)]


class Benchmark(backward.Benchmark):
    """All measurements of one case."""

    def ours(self) -> None:
        for card, limit in CARDS.items():
            with overridden(hopper=False, shared_memory=limit):
                self.forget_lists()
                self.record(card, "forward", self.attend)
                self.out, self.lse = self.attend()
                self.record(card, "backward", self.backward)

    def check(self) -> dict[str, Any]:
        found = {}
        for card, limit in CARDS.items():
            self.forget_lists()
            with overridden(hopper=False, shared_memory=limit):
                self.out, self.lse = self.attend()
                gradients = self.backward()
            found[card] = self.sampled(gradients)
        return {"worst": max(x["worst"] for x in found.values()), "ok": all(x["ok"] for x in found.values()), **found}

    def peers(self, deadline: float, flex: bool) -> None:
        backend, = peers.backends("flash").values()
        self.peer("flash", functools.partial(peers.dense, backend, self.query, self.key, self.value), deadline,
                  "forward")
        self.peer("flash", functools.partial(peers.dense_backward, backend, self.query, self.key, self.value,
                                             self.dout), deadline, "backward")


SUITE = suite.Suite("portable", __doc__, cases, Benchmark, seconds=300)
add_options, run = SUITE.add_options, SUITE.run
