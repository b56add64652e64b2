"""Key scores and their gradients: problems, and checks against the oracle and against float64."""
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from tests.oracle import reference
from tests.oracle.arrays import host


def problem(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
    """``value`` of this shape, and ``dt_proj``, ``A``, ``dt_bias`` in float32."""
    rng = np.random.default_rng(0)
    _, _, heads, size = shape
    value = rng.standard_normal(shape).astype(numpy_dtype(dtype))
    weight = (rng.standard_normal((heads, heads * size)) / np.sqrt(heads * size)).astype(np.float32)
    return value, weight, rng.standard_normal(heads).astype(np.float32), rng.standard_normal(heads).astype(np.float32)


def check(shape: tuple[int, ...], dtype: str, form: str, weights: str, convert: Any = np.asarray, rtol: float = 2e-5,
          **options: Any) -> None:
    """``weights``: the type of ``dt_proj``."""
    value, weight, a, offset = problem(shape, dtype)
    weight = weight.astype(numpy_dtype(weights))
    got = host(dma.key_scores(*map(convert, (value, weight, a)), dt_bias=convert(offset), form=form, **options))
    assert got.dtype == np.float32 and got.shape == (shape[0], shape[2], shape[1])
    np.testing.assert_allclose(got, reference.key_scores(value, weight, a, offset, form), rtol=rtol, atol=rtol / 20)


def check_backward(shape: tuple[int, ...], dtype: str, form: str, convert: Any = np.asarray,
                   rtol: float = 2e-5, **options: Any) -> None:
    """``rtol``: tolerance of float32 sums, in addition to one rounding to the type of the result."""
    value, weight, a, offset = problem(shape, dtype)
    rng = np.random.default_rng(1)
    dscores = rng.standard_normal((shape[0], shape[2], shape[1])).astype(np.float32)
    dscores[rng.random(dscores.shape) < 0.2] = 0
    arguments = [dscores, value, weight, a, offset]
    given, wide = map(convert, arguments), (x.astype(np.float64) for x in arguments)
    found, expected = (dma.backward.key_scores_backward(*x, dt_bias=last, form=form, **more)
                       for (*x, last), more in ((given, options), (wide, {"backend": "numpy"})))
    for name, ours, ref in zip(("value", "dt_proj", "A", "dt_bias"), map(host, found), expected):
        largest = np.abs(ref).max(initial=0.0)
        roundings = reference.one_rounding(largest, ours.dtype) + rtol * max(largest, 1.0)
        assert np.abs(ours.astype(np.float64) - ref).max(initial=0.0) <= roundings, name
