"""A delayed key bias (SPEC section 16) on the NumPy backend. test_varlen.py has the packed sequences."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends.numpy import tiles
from tests.oracle import cases, delay_cases, reference


@pytest.mark.feature("numpy forward", "attention", "bias_delay", case="delay-")
@pytest.mark.parametrize("case", delay_cases.CASES, ids=str)
def test_forward(case):
    cases.check(case, *cases.run(case))


@pytest.mark.feature("numpy backward", "attention", "bias_delay", case="delay-")
@pytest.mark.parametrize("case", delay_cases.CASES, ids=str)
def test_backward(case, monkeypatch):
    monkeypatch.setattr(tiles, "KEY_CHUNK", 50)
    cases.check_backward(case, cases.run_backward(case, with_dlse=True), with_dlse=True)


@pytest.mark.parametrize("delay", [0, 1, 5, 40])
@pytest.mark.parametrize(("queries", "keys"), [(30, 30), (20, 30), (30, 20)])
def test_the_oracle_against_a_bias_per_pair(queries, keys, delay, rng):
    q, k, v, dout = (rng.standard_normal((1, n, 2, 8)) for n in (queries, keys, keys, queries))
    bias = rng.standard_normal((1, 2, keys))
    distance = np.arange(queries)[:, None] + keys - queries - np.arange(keys)
    far = distance >= delay if delay else np.ones_like(distance, bool)
    per_pair = np.where(far, bias[:, :, None], 0)
    for ours, full in zip(reference.attention(q, k, v, bias=bias, bias_delay=delay),
                          reference.attention(q, k, v, bias=per_pair)):
        assert np.array_equal(ours, full)
    *ours, dbias = reference.attention_gradients(dout, q, k, v, bias=bias, bias_delay=delay)
    *full, dpair = reference.attention_gradients(dout, q, k, v, bias=per_pair)
    assert all(map(np.array_equal, ours, full))
    assert np.allclose(dbias, np.where(far, dpair, 0).sum(2), rtol=1e-12, atol=1e-12)


def draw(rng, lq=40, lk=40):
    q, k, v = (rng.standard_normal((1, n, h, 8)).astype(np.float32) for n, h in ((lq, 4), (lk, 2), (lk, 2)))
    return q, k, v, rng.standard_normal((1, 2, lk)).astype(np.float32)


def test_a_dynamic_call_delays_the_bias_and_not_the_selection(rng):
    q, k, v, scores = draw(rng)
    mask = dma.IntervalMask.top_w(scores, 7)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, bias_delay=9, return_lse=True)
    found = dma.dynamic_mask_attention(q, k, v, scores, window=7, bias_delay=9, return_lse=True)
    assert np.array_equal(found[0], out) and np.array_equal(found[1], lse)
    assert not np.array_equal(out, dma.dynamic_mask_attention(q, k, v, scores, window=7))
    given = out, q, k, v, out, lse
    gradients = dma.backward.attention_backward(*given, mask=mask, bias=scores, bias_delay=9)
    dynamic = dma.backward.dynamic_mask_attention_backward(*given, scores, window=7, bias_delay=9)
    assert all(map(np.array_equal, dynamic[:4], gradients))


def test_computed_scores_are_delayed(rng):
    q, k, v, _ = draw(rng)
    recipe = {"dt_proj": rng.standard_normal((2, 16)).astype(np.float32), "A": np.ones(2, np.float32)}
    scores = dma.key_scores(v, **recipe)
    expected = dma.dynamic_mask_attention(q, k, v, scores, window=7, bias_delay=9)
    assert np.array_equal(dma.dynamic_mask_attention(q, k, v, **recipe, window=7, bias_delay=9), expected)
    packed = dma.varlen_dynamic_mask_attention(q[0], k[0], v[0], [0, 40], [0, 40], **recipe, window=7, bias_delay=9)
    assert np.array_equal(packed, expected[0])


def test_a_bias_of_one_query_is_one_of_keys(rng):
    q, k, v, bias = draw(rng, lq=1)
    assert np.array_equal(dma.attention(q, k, v, bias=bias[:, :, None], bias_delay=9),
                          dma.attention(q, k, v, bias=bias, bias_delay=9))


def test_what_has_no_delay(rng):
    q, k, v, _ = draw(rng)
    pairs = np.zeros((1, 1, 40, 40), np.float32)
    for given, words in (({"bias": pairs}, r"one per query and key, \(1, 1, 40, 40\)"), ({}, "no bias")):
        with pytest.raises(ValueError, match=f"bias_delay needs a key bias, .*, got bias_delay=3 and {words}"):
            dma.attention(q, k, v, **given, bias_delay=3)
    with pytest.raises(ValueError, match="bias_delay needs a key bias"):
        dma.varlen_attention(q[0], k[0], v[0], [0, 40], [0, 40], bias_delay=3)
