"""Step 0: the definition, dense. An N x N mask, an N x N matrix of logits, one softmax.

    python examples/ladder/step0_dense.py

Work and memory are O(N * N), whatever the window.
"""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def attention(q, k, v, score, w):
    n, d = q.shape
    visible = np.zeros((n, n), bool)
    for i in range(n):
        ranked = sorted(range(i + 1), key=lambda j: (score[j], j))  # among equal scores the newest ranks higher
        visible[i, ranked[-w:]] = True
    s = np.where(visible, q @ k.T / d**0.5 + score, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from examples.ladder.check import main

    sys.exit(main(attention, None))
