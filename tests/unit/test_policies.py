"""Eviction policies, against caches written out head by head, and as masks."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.masks.interval import NEVER
from cupy_dma.masks.policies import (
    POLICIES,
    average_rotation,
    evictions,
    expected_attention,
    from_press,
    snapkv,
)
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


def test_the_example(rng):
    from examples import eviction

    query, key, value = (x[:, :, :1] for x in drawn(rng))
    for name, ours in (("h2o", "h2o"), ("tova", "tova"), ("l2", "knorm")):
        _, stop = eviction.generate(query[0, :, 0], key[0, :, 0], value[0, :, 0], BUDGET, eviction.POLICIES[name])
        found = evictions(query, key, BUDGET, ours, recent=RECENT.get(ours, 0))
        np.testing.assert_array_equal(np.minimum(found[0, 0], N), stop)


def test_a_policy_of_ones_own(rng):
    """Knorm, as scores per key; texts shorter than the budget evict nothing."""
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


# ---- Expected Attention ----
def turned(x, position, base=10000.0):
    """Rotated by complex numbers, halves together; ``x (..., D)``, ``position (...)``."""
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * position[..., None] * base ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag], -1)


def expected_written_out(query, key, value, sinks, prompt, rotation, epsilon=0.0, covariance=True, scale=D ** -0.5):
    """Scores of the keys after the sinks; one kv head: query (N, G, D), key and value (N, D)."""
    found = np.zeros(prompt - sinks)
    for g in range(query.shape[1]):
        q = query[sinks:prompt, g] @ rotation.T
        mean, spread = q.mean(0), np.cov(q.T, bias=True)
        z = np.array([np.exp(scale * mean @ k + covariance * scale ** 2 / 2 * k @ spread @ k)
                      for k in key[sinks:prompt]])
        found += z / z.sum() / query.shape[1]
    return found if value is None else (found + epsilon) * np.linalg.norm(value[sinks:prompt], axis=-1)


@pytest.mark.parametrize(("options", "with_value"), [
    ({}, True), ({}, False), ({"sinks": 0, "epsilon": 0.02}, True), ({"covariance": False, "scale": 0.6}, True),
    ({"rotation": average_rotation(D, 40, 16)}, True)], ids=str)
def test_expected_attention(options, with_value, rng, convert):
    prompt, budget = 40, 13
    query, key, value = drawn(rng)
    given = [convert(query), convert(key), convert(value) if with_value else None]
    found = convert.back(expected_attention(*given, budget, prompt, **options))
    others = {"sinks": 4, "rotation": np.eye(D), **options}
    for b, h in np.ndindex(B, HKV):
        scores = expected_written_out(query[b, :, 2 * h:2 * h + 2], key[b, :, h],
                                      value[b, :, h] if with_value else None, prompt=prompt, **others)
        kept = {*range(others["sinks"]), *(others["sinks"] + np.argsort(scores)[::-1][:budget - others["sinks"]])}
        assert set(np.flatnonzero(found[b, h] == NEVER)) == {*kept, *range(prompt, N)}
        assert (np.delete(found[b, h], [*kept, *range(prompt, N)]) == prompt).all()


def test_the_closed_form_is_the_mean(rng):
    """It equals the mean of ``exp(scale * q . k)`` over many Gaussian queries, so nearly the same keys stay."""
    length, budget = 4000, 100
    query, key = rng.standard_normal((2, 1, length, 1, D))
    query = query @ (0.35 * rng.standard_normal((D, D))) + 0.3 * rng.standard_normal(D)
    stop = expected_attention(query, key, None, budget, length, sinks=0)[0, 0]
    mean = np.exp(query[0, :, 0] @ key[0, :, 0].T / np.sqrt(D)).mean(0)
    best = np.argsort(mean)[-budget:]
    assert (stop[best] == NEVER).mean() > 0.9
    by_mean = expected_attention(query, key, None, budget, length, sinks=0, covariance=False)[0, 0]
    assert (by_mean[best] == NEVER).mean() < 0.7


def test_the_average_rotation(rng):
    x, position = rng.standard_normal((5, D)), np.arange(7, 7 + 30)
    expected = np.mean([turned(x, np.full(5, p)) for p in position], 0)
    np.testing.assert_allclose(x @ average_rotation(D, 7, 30).T, expected, rtol=0, atol=1e-12)


# ---- kvpress ----
class Press:
    """A press in the convention of kvpress that prefers keys with small norms and values with large ones."""

    def __init__(self):
        self.calls = []

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        self.calls.append((module, hidden_states, keys.shape, values.shape, attentions, kwargs))
        return (values ** 2).sum(-1) - (keys ** 2).sum(-1)


def test_a_press(rng, convert):
    press, prompt, budget = Press(), 40, 12
    _, key, value = drawn(rng)
    found = convert.back(from_press(press, convert(key), convert(value), budget, prompt, module="m", hidden_states="x",
                                    kwargs={"position": 3}, sinks=2, recent=3))
    assert press.calls == [("m", "x", (B, HKV, prompt, D), (B, HKV, prompt, D), None, {"position": 3})]
    scores = (value ** 2).sum(-1) - (key ** 2).sum(-1)
    for b, h in np.ndindex(B, HKV):
        free = scores[b, 2:prompt - 3, h]
        kept = {0, 1, *(2 + np.argsort(free)[::-1][:budget - 5]), *range(prompt - 3, N)}
        assert set(np.flatnonzero(found[b, h] == NEVER)) == kept
    bare = from_press(press.score, convert(key), convert(value), budget, prompt, sinks=2, recent=3)
    np.testing.assert_array_equal(convert.back(bare), found)
    assert (convert.back(from_press(press, convert(key), convert(value), prompt, prompt)) == NEVER).all()


def test_a_press_as_a_cache(rng):
    """A gated cache filled with the prompt stores the remaining keys, and later tokens see what the mask shows."""
    prompt, budget = 40, 12
    query, key, value = drawn(rng, np.float32)
    stop = from_press(Press(), key, value, budget, prompt, sinks=1)
    out = dma.attention(query, key, value, mask=dma.IntervalMask.from_stop(stop))
    gates = np.where(stop == NEVER, 0, -np.inf).astype(np.float32)
    cache = dma.GatedCache(B, HKV, D, dtype="float32", delay=1, threshold=-1.0)
    cache.update(key[:, :prompt], value[:, :prompt], gates[..., :prompt])
    assert (cache.kept().positions >= 0).sum(-1).max() <= budget + 1  # the last token, too
    later = cache.extend(query[:, prompt:], key[:, prompt:], value[:, prompt:], gates[..., prompt:], add_gates=False)
    np.testing.assert_allclose(later, out[:, prompt:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda q, k, v: expected_attention(q, k, v, 8, N + 1), ValueError, f"prompt must be at most N={N}, got {N + 1}"),
    (lambda q, k, v: expected_attention(q, k, v, 3, 40), ValueError, "budget must be at least 4"),
    (lambda q, k, v: expected_attention(q, k, v, 8, 4), ValueError, "prompt must be at least 5"),
    (lambda q, k, v: expected_attention(q, k, v[:, 1:], 8, 40), ValueError, "value must have shape"),
    (lambda q, k, v: expected_attention(q, k, v, 8, 40, rotation=np.eye(3)), ValueError, "rotation must have shape"),
    (lambda q, k, v: expected_attention(q, k, v, 8, 40, epsilon=-1.0), ValueError, "epsilon"),
    (lambda q, k, v: average_rotation(3, 0), ValueError, "size must be even and base above 0, got size=3"),
    (lambda q, k, v: from_press(3, k, v, 8, 40), TypeError, "press must be a function or have a method score, got int"),
    (lambda q, k, v: from_press(Press(), k, v, 4, 40, sinks=3, recent=2), ValueError, "budget must be at least 5"),
    (lambda q, k, v: from_press(lambda *given: given[2], k, v, 8, 40), ValueError,
     r"press must return scores of shape \(B, Hkv, prompt\) = \(2, 2, 40\), got \(2, 2, 40, 8\)"),
    (lambda q, k, v: from_press(Press(), k[0], v, 8, 40), ValueError, "key must have shape"),
    (lambda q, k, v: snapkv(q, k, 40, 40, pool=4), ValueError, "pool must be odd"),
    (lambda q, k, v: evictions(q, k, 0, "h2o"), ValueError, "budget must be at least 1"),
    (lambda q, k, v: evictions(q, k, 5, "lru"), ValueError, "policy must be 'streaming' or"),
    (lambda q, k, v: evictions(q, k, 5, "h2o", sinks=3, recent=2), ValueError, "recent must be less than budget=5"),
    (lambda q, k, v: evictions(q[:, :3], k, 5, "h2o"), ValueError, "query must have shape")])
def test_errors(call, error, message, rng):
    with pytest.raises(error, match=message):
        call(*drawn(rng))
