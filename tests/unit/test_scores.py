"""Key scores against the oracle: types, forms, strides, extreme states."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.numpy import scores as numpy_scores
from tests.oracle import reference


def draw(rng, *, b=2, n=30, heads=2, d=16, dtype="float32", parameters="float32"):
    kind = numpy_dtype(parameters)
    return (rng.standard_normal((b, n, heads, d)).astype(numpy_dtype(dtype)),
            (rng.standard_normal((heads, heads * d)) / np.sqrt(heads * d)).astype(kind),
            rng.standard_normal(heads).astype(kind), rng.standard_normal(heads).astype(kind))


@pytest.mark.feature("numpy forward", "Scores and selection", "key_scores")
@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("parameters", ["float16", "bfloat16", "float32"])
def test_types(rng, dtype, parameters, form):
    value, dt_proj, A, dt_bias = draw(rng, dtype=dtype, parameters=parameters)
    scores = dma.key_scores(value, dt_proj, A, dt_bias=dt_bias, form=form)
    assert scores.dtype == (np.float64 if dtype == "float64" else np.float32) and scores.shape == (2, 2, 30)
    # A sum of 32 products and a few functions: at most a few dozen roundings.
    tolerance = 50 * np.finfo(scores.dtype).eps
    np.testing.assert_allclose(scores, reference.key_scores(value, dt_proj, A, dt_bias, form), tolerance, tolerance)


@pytest.mark.parametrize(("b", "n", "heads", "d"), [(0, 5, 1, 8), (1, 0, 2, 8), (1, 1, 1, 1), (3, 7, 5, 3),
                                                    (1, 9, 1, 256)])
def test_shapes(rng, b, n, heads, d):
    value, dt_proj, A, _ = draw(rng, b=b, n=n, heads=heads, d=d)
    scores = dma.key_scores(value, dt_proj, A)
    assert scores.shape == (b, heads, n)
    np.testing.assert_allclose(scores, reference.key_scores(value, dt_proj, A), 1e-4)


def test_strides(rng):
    value, dt_proj, A, _ = draw(rng, b=1)
    views = [np.ascontiguousarray(value.swapaxes(1, 2)).swapaxes(1, 2), np.repeat(value, 3, axis=2)[:, :, ::3],
             np.concatenate((value, value), axis=3)[..., :16]]
    for view in views:
        assert not view.flags.c_contiguous
        assert np.array_equal(dma.key_scores(view, dt_proj, A), dma.key_scores(value, dt_proj, A))


def test_many_blocks(rng, monkeypatch):
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
