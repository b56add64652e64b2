"""One query over a long history against float64, on the device, one kv head at a time.

With x_j = scale * q . k_j + bias_j over the keys j that it sees:

    lse = log sum_j exp(x_j),   out = sum_j exp(x_j - lse) v_j

Allowed is twice the error of the plain same-precision computation plus one rounding, as in ``dense_check.py``.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.check import summary
from benchmarks.harness.gradient_check import Deviation
from cupy_dma.cli.exact_rows import kept_keys

Kept = Sequence[Tensor]  # of each kv head: the keys that are seen, int64


def best_keys(scores: Tensor, window: int) -> Kept:
    """The keys of ``scores (Hkv, n)`` that the last position sees, oldest first."""
    return [torch.from_numpy(kept_keys(row, len(row) - 1, window)).to(scores.device) for row in scores.cpu().numpy()]


def sampled_batch(batch: int, seed: int) -> list[int]:
    """The first and the last sequence and one that is drawn."""
    return sorted({0, batch - 1, *np.random.default_rng(seed).integers(0, batch, 1).tolist()})


class TokenCheck:
    """Compares queries of any number of sequences; ``result()`` says how they were."""

    def __init__(self) -> None:
        self.deviations = {"out": Deviation(factor=2), "lse": Deviation(factor=2)}
        self.wrong_keys = 0  # (sequence, kv head) pairs whose kept keys are not those of the definition

    def compare(self, out: Tensor, lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
                bias: Tensor | None = None, kept: Kept | None = None) -> None:
        """``out, query (H, D)``, ``lse (H,)``, ``key, value (n, Hkv, D)``, ``bias (Hkv, n)``; no ``kept``: all keys."""
        heads, kv_heads = query.shape[0], key.shape[1]
        group, scale = heads // kv_heads, query.shape[1] ** -0.5
        for g in range(kv_heads):
            seen = slice(None) if kept is None else kept[g]
            part = slice(g * group, (g + 1) * group)
            found = []
            for wide, rounded in ((torch.float64, torch.float64), (torch.float32, out.dtype)):
                x = scale * query[part].to(wide) @ key[seen, g].to(wide).T
                if bias is not None:
                    x = x + bias[g, seen].to(wide)
                shift = x.amax(-1, keepdim=True)
                p = torch.exp(x - shift)
                total = p.sum(-1, keepdim=True)
                o = p.to(rounded).to(wide) @ value[seen, g].to(wide) / total
                found.append((o, (shift + total.log())[:, 0]))
            (exact, exact_lse), (plain, plain_lse) = found
            self.deviations["out"].compare(out[part], exact, plain, exact * 0)
            if lse is not None:
                self.deviations["lse"].compare(lse[part], exact_lse, plain_lse, exact_lse * 0)

    def compare_kept(self, positions: Tensor, kept: Kept) -> None:
        """``positions (Hkv, R)``, in any order and -1 where there is none, must be ``kept``."""
        self.wrong_keys += sum(not torch.equal(row[row >= 0].sort().values, keys)
                               for row, keys in zip(positions, kept))

    def result(self) -> dict[str, Any]:
        compared = {name: d for name, d in self.deviations.items() if d.unit}
        found = summary(compared)
        return {**found, "wrong_keys": self.wrong_keys, "ok": found["ok"] and self.wrong_keys == 0}
