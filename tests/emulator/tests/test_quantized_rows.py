"""Caches with 8-bit rows: kernels write the same codes as the array code, and read the same numbers."""
from dataclasses import replace

import numpy as np
import pytest

from cupy_dma.arrays import numpy_dtype
from cupy_dma.cache.segments import rectangular
from tests.oracle.cache_cases import History

CASES = [
    History(length=20, dtype="float16", head_dim=16, value_dim=40, window=7, recent=2),
    History(length=20, dtype="bfloat16", head_dim=5, value_dim=3, window=7, recent=2),
    History(length=20, dtype="float32", head_dim=72, window=(9, 3), recent=2, heads=6),
    History(length=20, dtype="bfloat16", head_dim=256, value_dim=24, window=7, recent=2, batch=1),
]


def drawn(case: History) -> History:
    """A history whose rows differ widely in magnitude; some are zero or have non-finite numbers."""
    case, rng = replace(case), np.random.default_rng(1)
    for name in ("key", "value"):
        x = case.data[name]
        x[...] = (x * np.exp(3 * rng.standard_normal(x.shape))).clip(-6e4, 6e4).astype(numpy_dtype(case.dtype))
        x[:, 3] = 0
        x[:, 6] = x[:, 6] * x.dtype.type(1e-6)
        for token, number in ((5, np.nan), (9, np.inf), (11, -np.inf)):
            x[0, token, 0, -1] = number
    return case


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_and_scales(case, storage):
    """One token and several, with and without queries, from arrays with different strides."""
    case = drawn(case)
    cache, expected = (case.cache(backend=backend, storage=storage) for backend in ("emulator", "numpy"))
    begin = 0
    for n in (1, 4, 1, 8, 3, 2, 1):
        tokens = case.tokens(begin, begin + n)
        if n in (4, 2):
            for each in (cache, expected):
                each.update(*tokens[1:])
        else:
            # A row of NaN reaches every query that sees it.
            spaced = [np.repeat(x, 2, 1)[:, ::2] for x in tokens[:3]]
            found = cache.extend(*spaced, tokens[3], return_lse=True)
            for ours, theirs in zip(found, expected.extend(*tokens, return_lse=True)):
                ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
                np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
                # Both read the same rows; only the order of sums, and so their rounding, differs.
                np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.02 * np.nanmax(abs(theirs), initial=1))
        begin += n
        assert kept_rows(cache) == kept_rows(expected)


def kept_rows(cache) -> list[dict[int, tuple[bytes, ...]]]:
    """For each sequence and kv head, codes and scales of the kept rows, by position."""
    state, where, found = rectangular(cache._state), cache.positions, []
    arrays = [np.array(getattr(state, name).array) for name in ("key", "value", "key_scale", "value_scale")]
    for b, h in np.ndindex(where.shape[:2]):
        found.append({int(p): tuple(x[b, h, i].tobytes() for x in arrays) for i, p in enumerate(where[b, h]) if p >= 0})
    return found
