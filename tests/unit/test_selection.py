"""Key scores against the oracle, and their selection, whose integers equal those of the definition."""
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.numpy import scores as numpy_scores
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


# ---- the scores ----
def draw(rng, *, b=2, n=30, heads=2, d=16, dtype="float32", parameters="float32"):
    kind = numpy_dtype(parameters)
    return (rng.standard_normal((b, n, heads, d)).astype(numpy_dtype(dtype)),
            (rng.standard_normal((heads, heads * d)) / np.sqrt(heads * d)).astype(kind),
            rng.standard_normal(heads).astype(kind), rng.standard_normal(heads).astype(kind))


@pytest.mark.feature("numpy forward", "Scores and selection", "key_scores")
@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("parameters", ["float16", "bfloat16", "float32"])
def test_scores_of_every_type(rng, dtype, parameters, form):
    value, dt_proj, A, dt_bias = draw(rng, dtype=dtype, parameters=parameters)
    scores = dma.key_scores(value, dt_proj, A, dt_bias=dt_bias, form=form)
    assert scores.dtype == (np.float64 if dtype == "float64" else np.float32) and scores.shape == (2, 2, 30)
    # A sum of 32 products and a few functions: at most a few dozen roundings.
    tolerance = 50 * np.finfo(scores.dtype).eps
    np.testing.assert_allclose(scores, reference.key_scores(value, dt_proj, A, dt_bias, form), tolerance, tolerance)


@pytest.mark.parametrize(("b", "n", "heads", "d"), [(0, 5, 1, 8), (1, 0, 2, 8), (1, 1, 1, 1), (3, 7, 5, 3),
                                                    (1, 9, 1, 256)])
def test_shapes_of_values(rng, b, n, heads, d):
    value, dt_proj, A, _ = draw(rng, b=b, n=n, heads=heads, d=d)
    scores = dma.key_scores(value, dt_proj, A)
    assert scores.shape == (b, heads, n)
    np.testing.assert_allclose(scores, reference.key_scores(value, dt_proj, A), 1e-4)


def test_strides_of_values(rng):
    value, dt_proj, A, _ = draw(rng, b=1)
    views = [np.ascontiguousarray(value.swapaxes(1, 2)).swapaxes(1, 2), np.repeat(value, 3, axis=2)[:, :, ::3],
             np.concatenate((value, value), axis=3)[..., :16]]
    for view in views:
        assert not view.flags.c_contiguous
        assert np.array_equal(dma.key_scores(view, dt_proj, A), dma.key_scores(value, dt_proj, A))


def test_scores_in_many_blocks(rng, monkeypatch):
    value, dt_proj, A, _ = draw(rng)
    whole = dma.key_scores(value, dt_proj, A)
    monkeypatch.setattr(numpy_scores, "SCORE_CHUNK", 7)
    np.testing.assert_allclose(dma.key_scores(value, dt_proj, A), whole, 1e-6)


def test_extreme_states_stay_finite():
    """softplus(x) is x for large x and exp(x) for small, without overflow on the way."""
    value = np.array([-1e30, -100, 0, 100, 1e30], np.float32).reshape(1, 5, 1, 1)
    one = np.ones((1, 1), np.float32)
    scores = dma.key_scores(value, one, np.ones(1, np.float32), form="linear")[0, 0]
    np.testing.assert_allclose(scores, [0, 0, np.log(2), 100, 1e30], 1e-6, 1e-40)


def test_a_nan_stays_with_its_key(rng):
    value, dt_proj, A, _ = draw(rng)
    value[0, 3, 1, 2] = np.nan
    assert np.argwhere(np.isnan(dma.key_scores(value, dt_proj, A))).tolist() == [[0, 0, 3], [0, 1, 3]]
