"""Dense masks and biases, block and column structure, intervals as dense masks, varlen, and no mask, in one run.

    python -m benchmarks dense                       everything, below five minutes on an H200
    python -m benchmarks dense --table                           print the table from the results
    python -m benchmarks dense --update-docs                     put it into docs/performance.md

Inputs: bfloat16, batch 1, 16/8 heads, D 128; query, key, value, dout and biases independent normal numbers, seeded by
the case. Timing, L2 policy, medians and peak memory: see measure.py.

random: a mask (1, H, N, N) of which half is visible and a bias (1, H, N, N), N = 8192. Ours: forward and backward with
the gradient of the bias, the mask packed anew in every call. Peers: flex, compiled FlexAttention that reads the same
mask in mask_mod and the same bias in score_mod, block mask given ("block mask": the time that takes, not included);
cudnn, efficient: scaled_dot_product_attention with a float mask that is added up beforehand and kv heads expanded.
blocks: one in eight tiles of 128 x 128 visible, against the same call with everything visible; columns: one key in 16,
the same for all queries, likewise. Masks shared by all heads (1, 1, N, N) and of each head (1, H, N, N), no bias.
interval: the top-w mask, w = 1024, as a dense boolean (1, Hkv, N, N), against the interval mask itself (lists built
anew) and one read of the boolean (the faster of a reduction and half of a copy).
varlen causal, varlen top-w: 64 sequences of 100 to 8000 tokens, against 64 equal ones of as many tokens, as a batch
(B = 64) and packed. Causal attention of unequal lengths has more pairs, so times are compared per visible pair.
plain: forward of all keys and causal, without more and with a bias of keys and a softcap of 30, D 64 and 128, N = 8192
and 32768. Peers, which have neither bias nor softcap: cudnn, flash, scaled_dot_product_attention of the same.

Check: sampled rows and keys of every output and gradient, also the peers', against float64 under the rule "at most
twice (gradients: three times) the error of the plain same-precision computation plus one rounding", see dense_check.py.
If a check of this library fails the run exits with 1 and leaves the recorded results alone.
"""
from __future__ import annotations

from benchmarks.harness import render_dense, suite
from benchmarks.harness.dense_cases import Benchmark, Interval, Plain, Random, Structured
from benchmarks.harness.dense_varlen import Varlen, lengths
from benchmarks.harness.suite import Case


def cases(which: str, quick: bool = False) -> list[Case]:
    small = which == "smoke"
    n, heads, kv_heads, size, w = (140, 4, 2, 16, 40) if small else (8192, 16, 8, 128, 1024)

    def case(name: str, length: int, window: int = 0, size: int = size) -> Case:
        return Case(name, heads, kv_heads, size, length, length, window)

    total = sum(lengths(small))
    found = [case("random", n), case("blocks", n), case("columns", n), case("interval", n, w),
             case("varlen causal", total), case("varlen top-w", total, w)]
    found += [case("plain", n, 0, size)] if small else [case("plain", m, 0, d) for d in (64, 128) for m in (n, 4 * n)]
    return found[:4] if quick else found


CLASSES = {"random": Random, "blocks": Structured, "columns": Structured, "interval": Interval,
           "varlen causal": Varlen, "varlen top-w": Varlen, "plain": Plain}


def benchmark(case: Case) -> Benchmark:
    return CLASSES[case.set](case)


SUITE = suite.Suite(__doc__ or "", cases, benchmark, render_dense.DENSE, seconds=200)


def main(arguments: list[str] | None = None) -> int:
    return suite.main(SUITE, arguments)
