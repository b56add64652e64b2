"""Attention on the CPU: the forward grid against the oracle, isolation of non-finite values, memory and work."""
import tracemalloc

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends import numpy as numpy_backend
from cupy_dma.backends.numpy import forward, tiles
from tests.oracle import cases, reference
from tests.oracle.cases import CASES


def draw(rng, *, b=1, lq=60, lk=60, h=2, g=1, d=16, dtype=np.float32):
    return [rng.standard_normal(shape).astype(dtype) for shape in ((b, lq, h, d), (b, lk, g, d), (b, lk, g, d))]


def compare(q, k, v, dense, *, mask, **options):
    found = dma.attention(q, k, v, mask=mask, return_lse=True, **options)
    reference.check_attention(found, q, k, v, dense_mask=dense, **options)
    return found


# ---- the grid ----
@pytest.mark.feature("numpy forward", "attention", "every case", but=("delay-",))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_grid(case):
    cases.check(case, *cases.run(case))


def test_the_grid_is_not_vacuous():
    """Most rows of most cases see some keys and not others."""
    mixed = 0
    for case in CASES:
        dense = cases.dense_mask(case)
        mixed += dense is not None and dense.size > 0 and bool((dense.any(-1) & ~dense.all(-1)).mean() > 0.5)
    assert mixed > len(CASES) / 2


# ---- isolation of non-finite values, and rows with no visible keys ----
@pytest.mark.feature("numpy forward", "attention", "a NaN")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_a_bad_row_reaches_only_the_queries_that_see_it(rng, bad, where):
    q, k, v = draw(rng)
    (k if where == "key" else v)[0, 20, 0, 3] = bad
    p, j = np.arange(60)[:, None], np.arange(60)
    dense = ((j <= p) & (j > p - 5))[None, None]
    for mask in (dense, dma.IntervalMask.sliding_window(60, 5)):
        out, _ = compare(q, k, v, dense, mask=mask)
        assert np.isfinite(np.delete(out, np.s_[20:25], 1)).all() and not np.isfinite(out[:, 20:25]).all()


def test_a_nan_score_stays_visible(rng):
    q, k, v = draw(rng)
    scores = rng.standard_normal((1, 1, 60)).astype(np.float32)
    scores[0, 0, 10] = np.nan
    out = dma.dynamic_mask_attention(q, k, v, scores, window=3)
    assert np.isfinite(out[:, :10]).all() and np.isnan(out[:, 10:]).all()


def test_rows_that_see_nothing(rng):
    q, k, v = draw(rng, lq=70)
    out, lse = compare(q, k, v, None, mask=None, causal=True)
    assert (out[:, :10] == 0).all() and np.isneginf(lse[..., :10]).all() and np.isfinite(lse[..., 10:]).all()
    out, lse = dma.attention(q, k, v, mask=np.zeros((70, 60), bool), return_lse=True)
    assert (out == 0).all() and np.isneginf(lse).all()
    v[:] = np.nan  # no query sees it
    assert (dma.attention(q, k, v, mask=dma.IntervalMask.sinks(60, 0)) == 0).all()


# ---- dynamic_mask_attention ----
@pytest.mark.feature("numpy forward", "dynamic_mask_attention", "from scores or values")
@pytest.mark.parametrize("keys", ["prefix", "global"])
def test_dynamic_mask_attention_equals_its_steps(rng, keys):
    q, k, v = draw(rng, b=2, h=4, g=2)
    padding = rng.random((2, 60)) < 0.8
    documents = np.array([0, 20, 60], np.int32)
    dt_proj, A, dt_bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 32), 2, 2))
    options = {"keys": keys, "padding": padding, "documents": documents}
    scores = dma.key_scores(v, dt_proj, A, dt_bias=dt_bias, form="linear")
    mask = dma.IntervalMask.top_w(scores, 7, **options)
    stepwise = dma.attention(q, k, v, mask=mask, bias=scores, causal=True, softcap=2.0, scale=0.4, return_lse=True)
    given = dma.dynamic_mask_attention(q, k, v, scores, window=7, softcap=2.0, scale=0.4, return_lse=True, **options)
    made = dma.dynamic_mask_attention(q, k, v, dt_proj=dt_proj, A=A, dt_bias=dt_bias, form="linear", window=7,
                                      softcap=2.0, scale=0.4, return_lse=True, **options)
    for whole in (given, made):
        assert all(np.array_equal(a, b) for a, b in zip(whole, stepwise))


def test_arguments_that_a_backend_receives(rng, monkeypatch):
    """Biases and dense masks arrive with four axes and stride 0 where they broadcast, in the caller's memory."""
    calls = []

    def record(call):
        calls.append(call)
        return call.query.array, call.query.array

    monkeypatch.setattr(numpy_backend, "attention", record)
    q, k, v = draw(rng, b=2, h=4, g=2, d=8)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query_length": 60, "key_length": 60, "head_dim": 8}
    options = {"scale": 0.5, "softcap": 2.0, "causal": True, "deterministic": True}
    for kind, shapes in ((np.float32, ((2, 2, 60), (1, 1, 60), (2, 4, 1), (1, 4, 60, 60), (2, 1, 60, 1))),
                         (bool, ((60, 60), (2, 1, 60, 60), (1, 2, 60, 1)))):
        for shape in shapes:
            array = np.zeros(shape, kind)
            dma.attention(q, k, v, **{"mask" if kind is bool else "bias": array}, **options)
            call, axes = calls.pop(), array[:, :, None] if array.ndim == 3 else array[(None,) * (4 - array.ndim)]
            operand = call.dense if kind is bool else call.bias
            strides = tuple(step // array.itemsize if size > 1 else 0 for size, step in zip(axes.shape, axes.strides))
            assert (operand.shape, operand.strides, operand.pointer) == (axes.shape, strides, array.ctypes.data)
            assert call.mask is None and {name: getattr(call, name) for name in sizes | options} == sizes | options
    for shape in ((1, 2, 1, 60), (2, 1, 1, 1), (1, 60)):  # equal for every query: becomes an interval mask
        dense = rng.random(shape) < 0.5
        dma.attention(q, k, v, mask=dense)
        call = calls.pop()
        assert call.dense is None and call.mask.shape == (*((1,) * (4 - len(shape)) + shape)[:2], 60)
        assert np.array_equal(np.broadcast_to(dense, (*call.mask.shape[:2], 60, 60)), call.mask.to_dense(60))
    whole, by_head, window = np.ones((60, 60), bool), np.ones((2, 4, 60, 60), bool), dma.IntervalMask.causal(60)
    by_head[:, 2] = False
    dma.attention(q, k, v, mask=(whole, window, by_head, np.ones((1, 2, 1, 60), bool)))
    call = calls.pop()
    assert np.array_equal(call.dense.array, by_head) and call.mask.shape == (1, 2, 60)
    scores = np.zeros((2, 2, 60), np.float32)
    for keys, causal in (("prefix", False), ("global", True)):  # a prefix mask is causal by construction
        dma.dynamic_mask_attention(q, k, v, scores, window=7, keys=keys)
        call = calls.pop()
        assert call.causal is causal and call.mask.shape == (2, 2, 60) and call.scale == 8 ** -0.5
        assert (call.bias.name, call.bias.strides, call.bias.pointer) == ("bias", (120, 60, 0, 1), scores.ctypes.data)


def test_global_keys_without_causality(rng):
    q, k, v = draw(rng, lq=80)
    scores = rng.standard_normal((1, 1, 60)).astype(np.float32)
    dense = reference.top_w_dense(scores, 7, "global", query_length=80)
    assert (dense.sum(-1) == 7).all()
    out = dma.dynamic_mask_attention(q, k, v, scores, window=7, keys="global", causal=False)
    np.testing.assert_allclose(out, reference.attention(q, k, v, dense, scores)[0], rtol=0, atol=1e-6)


# ---- memory and work ----
def test_memory_is_linear_and_work_follows_the_kept_pairs(rng, monkeypatch):
    """Gathered pairs stay close to needed pairs: counted, not timed."""
    n, gathered, weighted_sum = 16384, 0, tiles.weighted_sum
    q, k, v = draw(rng, lq=n, lk=n, h=4, g=2, d=64, dtype=np.float16)
    scores = rng.standard_normal((1, 2, n)).astype(np.float32)

    def counting(p, *rest):
        nonlocal gathered
        gathered += p.size
        return weighted_sum(p, *rest)

    monkeypatch.setattr(forward, "weighted_sum", counting)
    tracemalloc.start()
    try:
        dma.dynamic_mask_attention(q, k, v, scores, window=512)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    needed = int(dma.IntervalMask.top_w(scores, 512).count(n).sum()) * 2  # two query heads per kv head
    assert peak < n * n / 4 and needed <= gathered < 1.4 * needed


# ---- what the tiles are made of ----
def test_scratch_keeps_its_memory():
    rng, scratch = np.random.default_rng(0), tiles.Scratch()
    for shape in ((2, 9, 4), (2, 5, 4), (1, 3, 4)):
        a, b = rng.standard_normal(shape), rng.standard_normal((7, 4))
        found, flat = scratch.product(a, b), scratch.flat
        np.testing.assert_allclose(found, a @ b.T)
        assert np.shares_memory(found, flat)
        assert flat.size == 2 * 9 * 7
