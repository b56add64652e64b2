"""ALiBi and forgetting gates as key biases: biases per pair that need only one number per key.

    python examples/key_biases.py                   both, against the dense formula, anywhere

A bias that splits into a part of the query and a part of the key, ``bias[i, j] = a[i] + b[j]``, needs only ``b``: ``a``
is the same for all keys of a query, so the softmax cancels it. Then there is no ``(H, N, N)`` array, and the bias costs
as much as scores. ``lse`` lacks ``a[i]``; the output and all gradients are the same.

    ALiBi              -slope[h] * (i - j)                b[j] = slope[h] * j        (Press et al., arXiv 2108.12409)
    forgetting gates   sum of log f[l] over j < l <= i    b[j] = -cumsum(log f)[j]   (Lin et al., arXiv 2503.02130)

Both grow along the sequence, and float32 has 24 bits: biases beyond ``2**24 * 1e-3`` have errors of 1e-3. ``alibi``
counts from the last key, so that the newest keys, which matter most, have the smallest biases.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import numpy as np

import cupy_dma as dma


def alibi_slopes(heads: int) -> np.ndarray:
    """float32 ``(H,)``: the geometric sequence of the paper, ``2 ** (-8 (h + 1) / H)``."""
    return (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).astype(np.float32)


def alibi(slopes: np.ndarray, length: int) -> np.ndarray:
    """float32 ``(1, H, 1, N)``: the key bias of ALiBi, 0 at the last key."""
    return slopes[None, :, None, None] * np.arange(1 - length, 1, dtype=np.float32)


def forgetting(log_f: Any) -> Any:
    """``(B, H, 1, N)``: the key bias of forgetting gates. ``log_f (B, H, N)``: logarithms of the gates, such as
    ``torch.nn.functional.logsigmoid`` of a projection; a tensor gets its gradient."""
    return -log_f.cumsum(-1)[:, :, None]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="ALiBi and forgetting gates as key biases.")
    parser.add_argument("--length", type=int, default=300, help="tokens (default: %(default)s)")
    parser.add_argument("--window", type=int, default=64, help="keys kept per query (default: %(default)s)")
    args = parser.parse_args(arguments)
    if min(args.length, args.window) < 1:
        parser.error("--length and --window must be at least 1")
    n, heads = args.length, 4
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, n, heads, 32)).astype(np.float32)
    slopes, log_f = alibi_slopes(heads), np.log(rng.uniform(0.9, 1, (1, heads, n))).astype(np.float32)
    mask = dma.IntervalMask.sinks(n, 4) | dma.IntervalMask.sliding_window(n, args.window)  # any mask will do

    i, j = np.arange(n)[:, None], np.arange(n)
    total = log_f.astype(float).cumsum(-1)
    dense = {"ALiBi": -slopes.astype(float)[:, None, None] * (i - j),
             "forgetting": total[..., None] - total[:, :, None]}
    biases = {"ALiBi": alibi(slopes, n), "forgetting": forgetting(log_f)}
    worst = 0.0
    for name, bias in biases.items():
        out = dma.attention(query, key, value, mask=mask, bias=bias)
        logits = np.einsum("bihd,bjhd->bhij", query, key, dtype=float) / 32**0.5 + dense[name]
        p = np.where(mask.to_dense(n), np.exp(logits - logits.max(-1, keepdims=True)), 0)
        same = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), value)
        error = float(abs(out - same).max())
        worst = max(worst, error)
        print(f"{name:<12}key bias {bias.shape}, dense bias {(heads, n, n)}: outputs differ by {error:.1e}")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
