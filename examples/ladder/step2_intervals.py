"""Step 2: the mask is two integers per key.

    python examples/ladder/step2_intervals.py

New: the w-th best score of a growing prefix only rises, so a key that has fallen out of the best w never comes back.
Key j is visible to the queries j, j + 1, ..., stop[j] - 1 and to no others. One pass with a heap finds all stops in
O(N log w), and from one query to the next the kept set changes by one key at most.
"""
from __future__ import annotations

import heapq
import sys
from pathlib import Path

import numpy as np


def stops(score, w):
    """int32 ``(N,)``: the first query that no longer sees key j; j itself if no query sees it."""
    n = len(score)
    stop, kept = np.full(n, n, np.int32), []  # kept: a heap of (score, j), the lowest-ranked first
    for j in range(n):
        heapq.heappush(kept, (score[j], j))
        if len(kept) > w:
            _, evicted = heapq.heappop(kept)
            stop[evicted] = j
    return stop


def attention(q, k, v, score, w):
    n, d = q.shape
    stop, kept = stops(score, w), []
    out = np.zeros_like(v)
    for i in range(n):
        kept = [j for j in [*kept, i] if i < stop[j]]
        m, l, o = -np.inf, 0.0, np.zeros(d, np.float32)
        for j in kept:
            s = q[i] @ k[j] / d**0.5 + score[j]
            if s > m:
                rescale = np.exp(m - s)
                m, l, o = s, l * rescale, o * rescale
            p = np.exp(s - m)
            l, o = l + p, o + p * v[j]
        out[i] = o / l
    return out


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from examples.ladder.check import main
    from examples.ladder.step1_masked_loop import attention as before

    sys.exit(main(attention, before))
