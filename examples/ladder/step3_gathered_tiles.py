"""Step 3: tiles of queries share a list of keys, whose rows are gathered and multiplied densely.

    python examples/ladder/step3_gathered_tiles.py

New: consecutive queries see nearly the same keys, about w + BLOCK_M of them together. A tile gathers these rows once,
and all work becomes matrix products, at which hardware is fast. Only keys that enter or leave within the tile need the
mask. Keys come in blocks of BLOCK_N, with the online softmax of step 1 on whole rows.
"""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.ladder.step2_intervals import stops

BLOCK_M, BLOCK_N = 64, 32  # queries per tile, keys per block


def key_list(stop, first, last):
    """The keys that some query of ``first ... last`` sees."""
    start = np.arange(last + 1)
    return np.flatnonzero((stop[:last + 1] > first) & (stop[:last + 1] > start))


def attention(q, k, v, score, w):
    n, d = q.shape
    stop, out = stops(score, w), np.zeros_like(v)
    for first in range(0, n, BLOCK_M):
        rows = np.arange(first, min(first + BLOCK_M, n))[:, None]  # (M, 1)
        keys = key_list(stop, first, rows[-1, 0])
        m, l, o = np.full(rows.shape, -np.inf), np.zeros(rows.shape), np.zeros((len(rows), d), np.float32)
        for begin in range(0, len(keys), BLOCK_N):
            j = keys[begin:begin + BLOCK_N]
            s = q[rows[:, 0]] @ k[j].T / d**0.5 + score[j]  # (M, N)
            s = np.where((j <= rows) & (rows < stop[j]), s, -np.inf)
            top = np.maximum(m, s.max(1, keepdims=True))
            reference = np.where(np.isfinite(top), top, 0)  # 0 for rows that have seen no key yet
            rescale, p = np.exp(m - reference), np.exp(s - reference)
            m, l, o = top, l * rescale + p.sum(1, keepdims=True), o * rescale + p @ v[j]
        out[rows[:, 0]] = o / l
    return out


if __name__ == "__main__":
    from examples.ladder.check import main
    from examples.ladder.step2_intervals import attention as before

    sys.exit(main(attention, before))
