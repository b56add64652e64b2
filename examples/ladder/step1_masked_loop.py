"""Step 1: a loop over the visible keys, with online softmax: no N x N array of floats.

    python examples/ladder/step1_masked_loop.py

New: the row of logits is never stored. ``m`` is the largest logit so far, ``l`` the sum of ``exp(s - m)``, ``o`` the
sum of ``exp(s - m) * v``; when a larger logit comes, both sums are rescaled. This is what FlashAttention does, one key
at a time. Products are O(N * w) now, but every query still ranks all keys from scratch.
"""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def attention(q, k, v, score, w):
    n, d = q.shape
    out = np.zeros_like(v)
    for i in range(n):
        ranked = sorted(range(i + 1), key=lambda j: (score[j], j))
        m, l, o = -np.inf, 0.0, np.zeros(d, np.float32)
        for j in ranked[-w:]:
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
    from examples.ladder.step0_dense import attention as before

    sys.exit(main(attention, before))
