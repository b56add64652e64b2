"""Code shared by the steps of the ladder: inputs, a clock, and the comparison with the previous step.

All steps compute the same function of one head, ``attention(q, k, v, score, w) -> out``:

    q, k, v  (N, D) float32      score  (N,) float32, one number per key, ranks the keys and is their bias
    query i attends to the w highest-ranked keys among 0 ... i, of equal scores the newest
    out_i = softmax over these keys j of (q_i . k_j / sqrt(D) + score_j), times v_j
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Attention = Callable[[Any, Any, Any, Any, int], Any]
ALLOWED = 1e-5  # allowed difference between steps, which sum float32 in different orders; outputs are about 1


def inputs(n: int, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v and score, the same in every step."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, n, d)).astype(np.float32)
    return q, k, v, rng.standard_normal(n).astype(np.float32)


def main(attention: Attention, before: Attention | None, arguments: list[str] | None = None) -> int:
    """Run a step and the previous one on the same inputs; returns 1 if their outputs differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=400, help="tokens (default: %(default)s)")
    parser.add_argument("--window", type=int, default=64, help="keys kept per query (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=32, help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    if min(args.length, args.window, args.head_dim) < 1:
        parser.error("--length, --window and --head-dim must be at least 1")
    q, k, v, score = inputs(args.length, args.head_dim)
    outs = []
    for name, step in (("this step", attention), ("the step before", before)):
        if step is not None:
            started = time.perf_counter()
            outs.append(step(q, k, v, score, args.window))
            print(f"{name:<16}{time.perf_counter() - started:8.3f} s")
    if before is None:
        return 0
    difference = float(abs(outs[0] - outs[1]).max())
    print(f"difference      {difference:8.1e}   {'the same' if difference <= ALLOWED else 'NOT THE SAME'}")
    return int(not difference <= ALLOWED)
