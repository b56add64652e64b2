"""Eviction policies, against caches written out head by head, and as masks."""
from __future__ import annotations

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.masks.interval import NEVER
from cupy_dma.masks.policies import POLICIES, evictions, snapkv
from tests.oracle import reference

B, N, H, HKV, D, BUDGET = 2, 50, 4, 2, 8, 11
RECENT = {"h2o": BUDGET // 2}


def drawn(rng, dtype=np.float64):
    return [rng.standard_normal((B, N, heads, D)).astype(dtype) for heads in (H, HKV, HKV)]


def written_out(query, key, name, sinks=0, recent=0):
    """One kv head: query (N, G, D), key (N, D). Stops, and which keys each query saw."""
    kept, totals, stop, seen = [], {}, np.full(N, NEVER), np.zeros((N, N), bool)
    for i in range(N):
        kept.append(i)
        seen[i, kept] = True
        weights = np.exp(query[i] @ key[kept].T / np.sqrt(D))
        weights = (weights / weights.sum(-1, keepdims=True)).sum(0)
        for j, weight in zip(kept, weights):
            totals[j] = totals.get(j, 0) + weight
        if len(kept) == BUDGET:
            unit = key[kept] / np.linalg.norm(key[kept], axis=-1, keepdims=True)
            rank = {"streaming": kept, "h2o": [totals[j] for j in kept], "tova": weights,
                    "knorm": -np.linalg.norm(key[kept], axis=-1), "keydiff": -(unit @ unit.mean(0))}[name]
            free = [(r, j) for r, j in zip(rank, kept) if j >= sinks and j <= i - recent]
            gone = min(free)[1]
            stop[gone] = i + 1
            kept.remove(gone)
    return stop, seen


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("sinks", [0, 3])
def test_against_a_cache_written_out(name, sinks, rng, convert):
    query, key, value = drawn(rng)
    recent = RECENT.get(name, 2)
    found = convert.back(evictions(convert(query), convert(key), BUDGET, name, sinks=sinks, recent=recent))
    seen = np.zeros((B, HKV, N, N), bool)
    for b, h in np.ndindex(B, HKV):
        stop, seen[b, h] = written_out(query[b, :, 2 * h:2 * h + 2], key[b, :, h], name, sinks, recent)
        np.testing.assert_array_equal(found[b, h], stop)
    mask = dma.IntervalMask.from_stop(np.array(found), window=BUDGET)
    np.testing.assert_array_equal(mask.to_dense(N), seen)
    out = dma.attention(query, key, value, mask=mask)
    expected, _ = reference.attention(query, key, value, seen)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)


def test_streaming_is_sinks_and_a_window(rng):
    query, key, _ = drawn(rng, np.float32)
    found = dma.IntervalMask.from_stop(evictions(query, key, BUDGET, "streaming", sinks=4))
    masks = dma.IntervalMask
    np.testing.assert_array_equal(found.to_dense(N), np.broadcast_to(
        (masks.sinks(N, 4) | masks.sliding_window(N, BUDGET - 4)).to_dense(N), (B, HKV, N, N)))


def test_the_example(rng):
    from examples import eviction

    query, key, value = (x[:, :, :1] for x in drawn(rng))
    for name, ours in (("h2o", "h2o"), ("tova", "tova"), ("l2", "knorm")):
        _, stop = eviction.generate(query[0, :, 0], key[0, :, 0], value[0, :, 0], BUDGET, eviction.POLICIES[name])
        found = evictions(query, key, BUDGET, ours, recent=RECENT.get(ours, 0))
        np.testing.assert_array_equal(np.minimum(found[0, 0], N), stop)


def test_a_policy_of_ones_own(rng):
    """Knorm, as scores per key; and shorter than the budget, nothing goes."""
    query, key, _ = drawn(rng)
    own = evictions(query, key, BUDGET, lambda step: -step.xp.sqrt((step.key ** 2).sum(-1)))
    np.testing.assert_array_equal(own, evictions(query, key, BUDGET, "knorm"))
    assert (evictions(query, key, N + 1, "h2o") == NEVER).all()
    assert evictions(query[:, :0], key[:, :0], 3, "h2o").shape == (B, HKV, 0)


@pytest.mark.parametrize(("budget", "window", "pool"), [(20, 8, 5), (12, 8, 1), (40, 8, 3), (8, 8, 7)])
def test_snapkv(budget, window, pool, rng, convert):
    prompt = 40
    query, key, _ = drawn(rng)
    found = convert.back(snapkv(convert(query), convert(key), budget, prompt, window=window, pool=pool))
    for b, h in np.ndindex(B, HKV):
        votes = np.zeros(prompt - window)
        for i in range(prompt - window, prompt):
            for g in (2 * h, 2 * h + 1):
                weights = np.exp(key[b, :i + 1, h] @ query[b, i, g] / np.sqrt(D))
                votes += weights[:prompt - window] / weights.sum()
        pooled = [votes[max(j - pool // 2, 0):j + pool // 2 + 1].max() for j in range(len(votes))]
        threshold = np.sort(pooled)[::-1][budget - window - 1] if budget > window else np.inf
        gone = np.flatnonzero(found[b, h] < NEVER)
        assert len(gone) == prompt - budget and (found[b, h][gone] == prompt).all()
        assert all(pooled[j] <= threshold + 1e-9 for j in gone) and (gone < prompt - window).all()


@pytest.mark.parametrize(("arguments", "options", "message"), [
    ((0, "h2o"), {}, "budget must be at least 1"), ((5, "lru"), {}, "policy must be 'streaming' or"),
    ((5, "h2o"), {"sinks": 3, "recent": 2}, "sinks \\+ recent must be less than budget=5")])
def test_errors(arguments, options, message, rng):
    query, key, _ = drawn(rng)
    with pytest.raises(ValueError, match=message):
        evictions(query, key, *arguments, **options)
    with pytest.raises(ValueError, match="query must have shape"):
        evictions(query[:, :3], key, 5, "h2o")
    with pytest.raises(ValueError, match="pool must be odd"):
        snapkv(query, key, 40, 40, pool=4)
