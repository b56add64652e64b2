"""Eviction policies of KV caches as exact masks: one pass over the sequence equals decoding with the cache.

    python examples/eviction.py                     three policies, 600 tokens, anywhere
    python examples/eviction.py --length 2000 --budget 200

Once a cache with room for ``budget`` keys is full, it must evict one at every step, and evicted keys never come back.
So with any policy, key ``j`` is visible in one interval, from its own position to the step that evicted it. Under the
mask ``IntervalMask.from_stop`` of the evictions, attention over the whole sequence (for training, a prompt or an
evaluation) equals generation with that cache.

    h2o             evicts the least total attention so far, except recent keys (Zhang et al., arXiv 2306.14048)
    tova            evicts the least attention of the current query (Oren et al., arXiv 2401.06104)
    l2              evicts the largest norm (Devoto et al., arXiv 2406.11430); if even the newest key may be evicted,
                    this is IntervalMask.top_w(-norm, budget), without simulating a cache
    StreamingLLM    sinks(n, 4) | sliding_window(n, budget - 4) (Xiao et al., arXiv 2309.17453)

``cupy_dma.policies`` has these and more for whole batches. The exit status is 1 if mask and cache disagree.
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

# weights (kept,): attention of the current query to the kept keys; totals (kept,): each key's sum of weights so far;
# kept (kept,): positions of the kept keys, oldest first; key (N, D). Returns the entry of kept to evict.
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
    """Decode one head, arrays ``(N, D)``, token by token with a cache of ``budget`` keys: the outputs, and for each key
    the first position that does not see it, ``(N,)``."""
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
        if len(kept) == budget:  # make room for the next key
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
        # one head as (B, N, H, D), the whole sequence at once
        same = dma.attention(*(x[None, :, None] for x in (query, key, value)), mask=mask)[0, :, 0]
        error = float(abs(same - out).max())
        worst = max(worst, error)
        print(f"{name:<8}{(stop < args.length).sum():>7}  {mask.count(args.length).item():>13,}  {error:.1e}")
    return int(worst > 1e-10)


if __name__ == "__main__":
    sys.exit(main())
