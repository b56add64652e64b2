"""Eviction policies of KV caches as exact masks: one pass over the sequence gives what the cache gave token by token.

    python examples/eviction.py                     three policies, 600 tokens, anywhere
    python examples/eviction.py --length 2000 --budget 200

A cache with room for ``budget`` keys must evict one at every step once it is full, and what it has evicted does not
come back. So whatever the policy looks at, key ``j`` is visible from its own position to the step that evicted it: one
interval, and ``IntervalMask.from_stop`` of the evictions is the mask under which attention over the whole sequence
(for training, for a prompt, for an evaluation) equals generation with that cache.

    h2o             the least total attention so far goes, apart from recent keys (Zhang et al., arXiv 2306.14048)
    tova            the least attention of the present query goes (Oren et al., arXiv 2401.06104)
    l2              the largest norm goes (Devoto et al., arXiv 2406.11430); where the newest key may go at once, too,
                    that is IntervalMask.top_w(-norm, budget), and no cache has to be simulated
    StreamingLLM    sinks(n, 4) | sliding_window(n, budget - 4) (Xiao et al., arXiv 2309.17453)

``cupy_dma.policies`` has these and more for whole batches. The exit status is 1 if the two disagree.
"""
from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import numpy as np

import cupy_dma as dma

# weights (kept,): attention of the present query to the kept keys; totals (kept,): the sums of all weights that each
# has had; kept (kept,): their numbers, oldest first; key (N, D). Returns which entry of kept goes.
Policy = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], int]


def h2o(weights: np.ndarray, totals: np.ndarray, kept: np.ndarray, key: np.ndarray) -> int:
    return int(totals[: (len(kept) + 1) // 2].argmin())  # the newer half is recent and stays


def tova(weights: np.ndarray, totals: np.ndarray, kept: np.ndarray, key: np.ndarray) -> int:
    return int(weights.argmin())


def l2(weights: np.ndarray, totals: np.ndarray, kept: np.ndarray, key: np.ndarray) -> int:
    return int(np.linalg.norm(key[kept], axis=-1).argmax())


POLICIES: dict[str, Policy] = {"h2o": h2o, "tova": tova, "l2": l2}


def generate(query: np.ndarray, key: np.ndarray, value: np.ndarray, budget: int,
             policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """One head, ``(N, D)`` each, token by token with a cache of ``budget`` keys: the outputs, and the first position
    that does not see each key, ``(N,)``."""
    n = len(query)
    stop, totals = np.full(n, n), np.zeros(n)
    out, kept = np.zeros(value.shape), np.zeros(0, int)
    for i in range(n):
        kept = np.append(kept, i)
        logits = key[kept] @ query[i] / math.sqrt(query.shape[1])
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        out[i] = weights @ value[kept]
        totals[kept] += weights
        if len(kept) == budget:  # room for the next one
            gone = policy(weights, totals[kept], kept, key)
            stop[kept[gone]] = i + 1
            kept = np.delete(kept, gone)
    return out, stop


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Eviction policies as exact masks.")
    parser.add_argument("--length", type=int, default=600, help="tokens (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=64, help="keys in the cache (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=32, help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    if min(args.length, args.budget, args.head_dim) < 1:
        parser.error("--length, --budget and --head-dim must be at least 1")
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, args.length, args.head_dim))
    worst = 0.0
    print("policy  evicted  pairs visible  largest difference of the outputs")
    for name, policy in POLICIES.items():
        out, stop = generate(query, key, value, args.budget, policy)
        mask = dma.IntervalMask.from_stop(stop, window=args.budget)
        # (B, N, H, D) of one head, and the whole sequence at once
        same = dma.attention(*(x[None, :, None] for x in (query, key, value)), mask=mask)[0, :, 0]
        error = float(abs(same - out).max())
        worst = max(worst, error)
        print(f"{name:<8}{(stop < args.length).sum():>7}  {mask.count(args.length).item():>13,}  {error:.1e}")
    return int(worst > 1e-10)


if __name__ == "__main__":
    sys.exit(main())
