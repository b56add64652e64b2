"""Masks of eviction policies through the CUDA kernels: with a known window, tiles gather their keys; without one, they
read a shared list. Forward and gradients, against the oracle."""
import numpy as np
import pytest

import cupy_dma as dma
from tests.emulator.tests.test_residues import check_rows


@pytest.mark.feature("cuda forward backward", "Scores and selection", "masks of eviction")
@pytest.mark.parametrize("window", [12, None])
@pytest.mark.parametrize("query_length", [70, 20])
def test_masks_from_stops(rng, window, query_length):
    n, heads, kv_heads, d = 70, 4, 2, 16
    query = rng.standard_normal((1, query_length, heads, d)).astype(np.float16)
    key, value = rng.standard_normal((2, 1, n, kv_heads, d)).astype(np.float16)
    dout = rng.standard_normal(query.shape).astype(np.float16)
    stop = np.stack([evictions(rng, n, 12) for _ in range(kv_heads)])
    mask = dma.IntervalMask.from_stop(stop, window=window)
    check_rows(dout, query, key, value, mask=mask)


def evictions(rng, n: int, budget: int) -> np.ndarray:
    """Stops from a cache that evicts random keys: for each key, the first position that does not see it."""
    stop, kept = np.full(n, n), []
    for i in range(n):
        kept.append(i)
        if len(kept) == budget:
            stop[kept.pop(rng.integers(budget))] = i + 1
    return stop
