"""The selection is exact: its integers equal those of the definition and of a heap, for every kind of score."""
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.masks.interval import NEVER
from tests.oracle import reference

# Few values, so that ties are common; both zeros, infinities, NaN of either sign, subnormals.
NEGATIVE_NAN = float(np.copysign(np.float32(np.nan), -1))
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, NEGATIVE_NAN, 1e-45, -1e-45, 3.0, 2.0, -7.5]
ALPHABETS = [SPECIAL, [0.0, -0.0], [np.nan, NEGATIVE_NAN, np.inf], [-np.inf, -0.0, 0.0, 1e-45], [1.0, 2.0]]
quick = settings(max_examples=120, deadline=None)


@st.composite
def problems(draw, max_length=24):
    """(scores (B, Hkv, Lk), window for all heads or per head, padding or None, documents or None)."""
    n, batch, heads = draw(st.integers(0, max_length)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    alphabet = st.sampled_from(draw(st.sampled_from(ALPHABETS)))
    values = draw(st.lists(alphabet, min_size=batch * heads * n, max_size=batch * heads * n))
    scores = np.array(values, np.float32).reshape(batch, heads, n)
    windows = st.one_of(st.integers(1, 6), st.integers(1, 2 * max_length))
    window = draw(st.one_of(windows, st.tuples(*[windows] * heads)))
    rows = draw(st.sampled_from([1, batch]))
    padding = documents = None
    if draw(st.booleans()):
        padding = np.array(draw(st.lists(st.booleans(), min_size=rows * n, max_size=rows * n)), bool).reshape(rows, n)
    kind = draw(st.sampled_from(["none", "lengths", "ids"]))
    if kind == "lengths":
        cuts = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
        documents = np.array([0, *cuts, n], draw(st.sampled_from([np.int32, np.int64])))
    elif kind == "ids":
        ids = draw(st.lists(st.integers(0, 2), min_size=rows * n, max_size=rows * n))
        documents = np.array(ids, np.int32).reshape(rows, n)
    return scores, window, padding, documents


@pytest.mark.feature("numpy forward", "Scores and selection", "IntervalMask.top_w")
@given(problems(), st.sampled_from(["prefix", "global"]), st.integers(0, 30))
@quick
def test_top_w_is_the_definition(problem, keys, query_length):
    """This shows the interval theorem, too: a mask holds one run of positions per key, here one that begins at the
    key."""
    scores, window, padding, documents = problem
    mask = dma.IntervalMask.top_w(scores, window, keys=keys, padding=padding, documents=documents)
    assert keys == "global" or mask._starts == "key"
    expected = reference.top_w_dense(scores, window, keys, padding, documents, query_length)
    assert mask.shape == scores.shape
    assert np.array_equal(np.broadcast_to(mask.to_dense(query_length), expected.shape), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_every_short_row(dtype, window):
    """All short rows over four special values, not only those that a random search finds."""
    rows = list(itertools.product([0.0, -0.0, np.nan, NEGATIVE_NAN, -np.inf, 1.0], repeat=4))
    scores = np.array(rows, numpy_dtype(dtype))[:, None]
    assert np.array_equal(dma.IntervalMask.top_w(scores, window).to_dense(4), reference.top_w_dense(scores, window))


@given(problems(max_length=40))
@quick
def test_a_tile_sees_at_most_its_bound(problem):
    scores, window, padding, documents = problem
    for keys in ("prefix", "global"):
        mask = dma.IntervalMask.top_w(scores, window, keys=keys, padding=padding, documents=documents)
        dense, (base, slope) = mask.to_dense(scores.shape[2]), mask._bound
        for length in (1, 2, 5, 16):
            for first in range(0, max(scores.shape[2] - length, 0) + 1):
                seen = dense[:, :, first:first + length].any(axis=2).sum(axis=2)
                assert (seen <= base + slope * (length - 1)).all()


def test_float64_scores_are_not_rounded():
    scores = 1 + np.arange(8, 0, -1) * 2.0**-50  # all equal in float32
    assert dma.IntervalMask.top_w(scores[None, None], 1).to_dense(8)[0, 0].argmax(1).tolist() == [0] * 8


@pytest.mark.parametrize("window", [30, 31, 10**12])
def test_a_window_of_all_keys_is_causal(window):
    mask = dma.IntervalMask.top_w(np.zeros((2, 3, 30), np.float32), window)
    assert mask._causal_only and mask.shape == (2, 3, 30) and (mask.stop == NEVER).all()
    padded = dma.IntervalMask.top_w(np.zeros((2, 3, 30), np.float32), window, padding=np.arange(30)[None] > 3)
    assert not padded._causal_only and padded != mask


def test_a_long_row_counts_its_pairs(rng):
    n, w = 200_000, 1000
    mask = dma.IntervalMask.top_w(rng.standard_normal((1, 1, n)).astype(np.float32), w)
    assert mask.count(n).item() == n * w - w * (w - 1) // 2


def test_checked_values(monkeypatch):
    scores = np.array([[[1.0, np.nan]]], np.float32)
    dma.IntervalMask.top_w(scores, 1)
    monkeypatch.setenv("CUPY_DMA_CHECK", "1")
    with pytest.raises(ValueError, match="scores must be finite"):
        dma.IntervalMask.top_w(scores, 1)
