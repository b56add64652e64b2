"""Attention and its gradients on the CPU: the grid against the oracle, isolation of non-finite values, laws, memory."""
import itertools
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends import numpy as numpy_backend
from cupy_dma.backends.numpy import backward, forward, tiles
from cupy_dma.backends.numpy import scores as numpy_scores
from tests.oracle import cases, hidden_keys, reference
from tests.oracle.cases import CASES, Case

NAMES = ("query", "key", "value", "bias")


def draw(rng, *, b=1, lq=60, lk=60, h=2, g=1, d=16, dtype=np.float32):
    return [rng.standard_normal(shape).astype(dtype) for shape in ((b, lq, h, d), (b, lk, g, d), (b, lk, g, d))]


def draw_all(rng, **sizes):
    """query, key, value, dout."""
    q, k, v = draw(rng, **sizes)
    return q, k, v, rng.standard_normal(q.shape).astype(q.dtype)


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


def test_scratch_keeps_its_memory():
    rng, scratch = np.random.default_rng(0), tiles.Scratch()
    for shape in ((2, 9, 4), (2, 5, 4), (1, 3, 4)):
        a, b = rng.standard_normal(shape), rng.standard_normal((7, 4))
        found, flat = scratch.product(a, b), scratch.flat
        np.testing.assert_allclose(found, a @ b.T)
        assert np.shares_memory(found, flat)
        assert flat.size == 2 * 9 * 7


# ---- gradients ----
def both_ways(q, k, v, dout, *, deterministic=False, needs=NAMES, dlse=None, **options):
    """(out, lse), and the gradients."""
    out, lse = dma.attention(q, k, v, **options, return_lse=True)
    return (out, lse), dma.backward.attention_backward(dout, q, k, v, out, lse, dlse=dlse, needs=needs,
                                                       deterministic=deterministic, **options)


def gradients(*arguments, **options):
    return both_ways(*arguments, **options)[1]


@pytest.mark.feature("numpy backward", "attention", "every case", but=("delay-",))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_grid(case):
    cases.check_backward(case, cases.run_backward(case))


@pytest.mark.parametrize("case", cases.OF_HEADS + [
    case for case in CASES if case.name.startswith(("mask-", "causal-and-", "bias-"))], ids=str)
def test_many_chunks_and_with_dlse(case, monkeypatch):
    """The same grid with tiles of 32 queries and chunks of 5 keys, so that the online softmax takes many steps, and a
    gradient of lse."""
    monkeypatch.setattr(tiles, "KEY_CHUNK", 5)
    monkeypatch.setattr(tiles, "TILE_ROWS", 1)
    cases.check(case, *cases.run(case))
    cases.check_backward(case, cases.run_backward(case, with_dlse=True), with_dlse=True)


@pytest.mark.parametrize("needs", [subset for n in range(6)
                                   for subset in itertools.combinations((*NAMES, "sink_logits"), n)], ids=str)
def test_any_subset_has_the_same_bits(needs):
    case = Case("subset", heads=4, kv_heads=2, softcap=2.0, sinks="float32")
    every, some = cases.run_backward(case), cases.run_backward(case, needs=needs)
    for name in (*NAMES, "sink_logits"):
        whole, subset = getattr(every, name), getattr(some, name)
        assert (subset is not None) == (name in needs) and (subset is None or np.array_equal(whole, subset))


def test_what_is_not_asked_for_is_not_computed(rng, monkeypatch):
    q, k, v, dout = draw_all(rng)
    products = []
    monkeypatch.setattr(backward, "weighted_sum", lambda *arguments: products.append(1) or
                        tiles.weighted_sum(*arguments))
    key_bias, dense_bias = np.zeros((1, 1, 60), np.float32), np.zeros((1, 1, 60, 60), np.float32)
    for needs, count, bias in (((), 0, key_bias), (("value",), 1, key_bias), (("bias",), 1, key_bias),
                               (("bias",), 0, dense_bias), (("query",), 1, key_bias), (NAMES, 3, key_bias)):
        products.clear()
        gradients(q, k, v, dout, needs=needs, bias=bias)
        assert len(products) == count  # one tile, one chunk


def test_the_bias_has_its_own_shape_and_type(rng):
    q, k, v, dout = draw_all(rng, b=2, h=4, g=2, dtype=np.float16)
    for kind, shape in itertools.product((np.float16, np.float32, ml_dtypes.bfloat16),
                                         ((2, 2, 60), (1, 1, 1), (1, 4, 60, 1), (2, 1, 1, 60), (2, 4, 60, 60))):
        bias = rng.standard_normal(shape).astype(kind)
        found = gradients(q, k, v, dout, bias=bias, needs=("bias",))
        assert found.bias.dtype == kind and found.bias.shape == shape and found[:3] == (None,) * 3
        reference.check_attention_gradients(found, dout, q, k, v, bias=bias)
    assert gradients(q, k, v, dout).bias is None  # no bias was given


@pytest.mark.parametrize("layout", ["expanded", "one number", "transposed", "reversed"])
def test_any_strides_of_dout(rng, layout):
    q, k, v, dout = draw_all(rng, b=2, h=4, g=2)
    dout = {"expanded": lambda: np.broadcast_to(dout[:, :1], dout.shape),
            "one number": lambda: np.broadcast_to(np.float32(0.5), dout.shape),
            "transposed": lambda: np.ascontiguousarray(dout.swapaxes(1, 3)).swapaxes(1, 3),
            "reversed": lambda: dout[::-1, ::-1, :, ::-1]}[layout]()
    dlse = np.broadcast_to(np.float32(0.25), (2, 4, 60))
    for a, b in zip(gradients(q, k, v, dout, dlse=dlse, causal=True),
                    gradients(q, k, v, dout.copy(), dlse=dlse.copy(), causal=True)):
        assert a is b or np.array_equal(a, b)


# ---- isolation of non-finite values, and exact zeros ----
@pytest.mark.feature("numpy forward backward", "attention", "keys that no query sees")
def test_rows_that_see_nothing_and_keys_nobody_sees_get_exact_zeros(rng):
    q, k, v, dout = draw_all(rng, lq=70, dtype=np.float16)
    padding = np.ones((1, 60), bool)
    padding[0, [7, 8, 59]] = False
    mask, bias = dma.IntervalMask.padding(padding), rng.standard_normal((1, 1, 60)).astype(np.float32)
    options = {"mask": mask, "bias": bias, "causal": True, "dlse": np.ones((1, 2, 70), np.float32)}
    outs, clean = both_ways(q, k, v, dout, **options)
    assert (clean.query[:, :10] == 0).all() and (clean.query[:, 10:].any(-1)[:, 1:]).all()
    for found in (clean.key[0, :, 0].T, clean.value[0, :, 0].T, clean.bias):
        assert not found[..., ~padding[0]].any() and found[..., padding[0]].any()
    k[0, 7], v[0, 7], v[0, 8], bias[0, 0, 59] = np.nan, np.inf, np.nan, np.nan
    q[:, :10], dout[:, 3:10] = np.nan, np.inf
    dirty_outs, dirty = both_ways(q, k, v, dout, **options)
    assert all(np.array_equal(a, b) for a, b in zip((*outs, *clean), (*dirty_outs, *dirty)))


@pytest.mark.parametrize("case", hidden_keys.CASES + hidden_keys.FEW, ids=str)
def test_what_a_bias_of_minus_infinity_hides(case):
    hidden_keys.run(case)


@pytest.mark.feature("numpy backward", "attention", "a NaN")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", range(4), ids=("query", "key", "value", "dout"))
def test_a_bad_row_reaches_only_visible_pairs(rng, bad, where):
    """Query i sees keys i - 4 to i: query 20 affects keys 16 to 20; key 20 affects queries 20 to 24 and, through them,
    keys 16 to 24."""
    arrays = draw_all(rng)
    arrays[where][0, 20, 0, 3] = bad
    found = gradients(*arrays, mask=dma.IntervalMask.sliding_window(60, 5), bias=np.zeros((1, 1, 60), np.float32))
    of_keys = where in (1, 2)
    rows, keys = (slice(20, 25), slice(16, 25)) if of_keys else (slice(20, 21), slice(16, 21))
    for name, x, hit in zip(NAMES, found, (rows, keys, keys, keys)):
        clean = np.isfinite(x.reshape(60, -1)).all(-1)
        clean[hit] = True
        assert clean.all(), name
    assert not all(np.isfinite(x).all() for x in found)


# ---- laws ----
@pytest.mark.feature("numpy forward backward", "attention", "bitwise")
def test_the_same_bits_every_time(rng):
    q, k, v, dout = draw_all(rng, lq=200, lk=200, h=4, g=2)
    scores = rng.standard_normal((1, 2, 200)).astype(np.float32)
    options = {"mask": dma.IntervalMask.top_w(scores, 20), "bias": scores}
    outs, first = both_ways(q, k, v, dout, **options)
    for deterministic in (False, True) * 5:
        again_outs, again = both_ways(q, k, v, dout, deterministic=deterministic, **options)
        assert all(np.array_equal(a, b) for a, b in zip((*outs, *first), (*again_outs, *again)))


def test_gqa_groups_are_summed_before_rounding(rng):
    """16 query heads on one kv head in bfloat16: sums of rounded terms would exceed the tolerance by far."""
    q, k, v, dout = draw_all(rng, h=16, g=1, lq=40, lk=40, dtype=ml_dtypes.bfloat16)
    reference.check_attention_gradients(gradients(q, k, v, dout, causal=True), dout, q, k, v, causal=True)


def test_lengths_beyond_one_chunk(rng):
    """More keys than a chunk and more queries than a tile, without shrinking either."""
    n = 2 * tiles.KEY_CHUNK + 77
    q, k, v, dout = draw_all(rng, lq=300, lk=n, h=1, d=8)
    outs, found = both_ways(q, k, v, dout, causal=True)
    reference.check_attention(outs, q, k, v, causal=True)
    reference.check_attention_gradients(found, dout, q, k, v, causal=True)


# ---- scores ----
@pytest.mark.feature("numpy backward", "Scores and selection", "key_scores")
@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("parameters", ["float32", "own"])
def test_key_scores_backward(rng, form, dtype, parameters, monkeypatch):
    monkeypatch.setattr(numpy_scores, "SCORE_CHUNK", 7)
    kind = cases.numpy_dtype(dtype)
    own = kind if parameters == "own" else np.float32
    value = rng.standard_normal((2, 30, 3, 8)).astype(kind)
    dt_proj, A, dt_bias = ((rng.standard_normal(shape) / 3).astype(own) for shape in ((3, 24), (3,), (3,)))
    wide = np.float64 if dtype == "float64" else np.float32
    dscores = rng.standard_normal((2, 3, 30)).astype(wide)
    found = dma.backward.key_scores_backward(dscores, value, dt_proj, A, dt_bias=dt_bias, form=form)
    arguments = (dscores, value, dt_proj, A, dt_bias, form)
    for mine, argument, ref, plain in zip(found, (value, dt_proj, A, dt_bias),
                                          reference.key_scores_gradients(*arguments),
                                          reference.key_scores_gradients(*arguments, wide)):
        assert mine.dtype == argument.dtype and mine.shape == argument.shape
        reference.assert_matches_reference(mine, ref, plain.astype(mine.dtype), mine.dtype, factor=3, terms=10.0)
    for needs in (("A",), ("value", "dt_bias"), ()):
        subset = dma.backward.key_scores_backward(dscores, value, dt_proj, A, dt_bias=dt_bias, form=form, needs=needs)
        for name, a, b in zip(subset._fields, subset, found):
            assert (a is None) == (name not in needs) and (a is None or np.array_equal(a, b))
    assert dma.backward.key_scores_backward(dscores, value, dt_proj, A).dt_bias is None


def test_a_key_without_gradient_may_hold_nan(rng):
    value, dt_proj, A = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 30, 2, 8), (2, 16), (2,)))
    dscores = rng.standard_normal((1, 2, 30)).astype(np.float32)
    dscores[..., 5] = 0
    clean = dma.backward.key_scores_backward(dscores, value, dt_proj, A)
    value[0, 5, 1, 2] = np.nan
    dirty = dma.backward.key_scores_backward(dscores, value, dt_proj, A)
    assert all(np.array_equal(a, b) for a, b in zip(clean[:3], dirty)) and not dirty.value[0, 5].any()


# ---- the whole chain ----
def chain(rng, dtype=np.float32):
    q, k, v, dout = draw_all(rng, b=2, h=4, g=2, dtype=dtype)
    dt_proj, A, dt_bias = ((rng.standard_normal(shape) / 2).astype(np.float32) for shape in ((2, 32), 2, 2))
    return q, k, v, dout, {"dt_proj": dt_proj, "A": A, "dt_bias": dt_bias, "form": "linear"}


@pytest.mark.feature("numpy backward", "dynamic_mask_attention", "from scores or values")
@pytest.mark.parametrize("keys", ["prefix", "global"])
def test_dynamic_mask_attention_backward_equals_its_steps(rng, keys):
    q, k, v, dout, recipe = chain(rng)
    options = {"window": 7, "keys": keys, "softcap": 2.0, "padding": rng.random((2, 60)) < 0.8}
    out, lse = dma.dynamic_mask_attention(q, k, v, **recipe, **options, return_lse=True)
    scores = dma.key_scores(v, **recipe)
    mask = dma.IntervalMask.top_w(scores, 7, keys=keys, padding=options["padding"])
    direct = dma.backward.attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, causal=True, softcap=2.0)
    given = dma.backward.dynamic_mask_attention_backward(dout, q, k, v, out, lse, scores, **options)
    assert all(np.array_equal(a, b) for a, b in zip(given[:4], direct)) and given[4:] == (None,) * 3
    more = dma.backward.key_scores_backward(direct.bias, v, **recipe)
    made = dma.backward.dynamic_mask_attention_backward(dout, q, k, v, out, lse, **recipe, **options)
    assert made.scores is None
    for name in ("dt_proj", "A", "dt_bias"):
        assert np.array_equal(getattr(made, name), getattr(more, name))
    np.testing.assert_allclose(made.value, direct.value + more.value, rtol=0, atol=1e-6)
    for needs in (("A",), ("value",), ("query",), ("dt_proj", "key")):
        some = dma.backward.dynamic_mask_attention_backward(dout, q, k, v, out, lse, **recipe, **options, needs=needs)
        for name, a, b in zip(some._fields, some, made):
            assert (a is None) == (name not in needs) and (a is None or np.array_equal(a, b))


def test_both_terms_of_dvalue_meet_the_tolerance(rng):
    q, k, v, dout, recipe = chain(rng, np.float16)
    recipe["A"] *= 4
    out, lse = dma.dynamic_mask_attention(q, k, v, **recipe, window=7, return_lse=True)
    found = dma.backward.dynamic_mask_attention_backward(dout, q, k, v, out, lse, **recipe, window=7, needs=("value",))
    scores = reference.key_scores(v, **recipe)
    dense = reference.top_w_dense(dma.key_scores(v, **recipe), 7)
    ref, plain = (f(dout, q, k, v, dense, scores.astype(kind)) for f, kind in (
        (reference.attention_gradients, np.float64), (reference.same_precision_attention_gradients, np.float32)))
    ref_more, plain_more = (reference.key_scores_gradients(x[3], v, **recipe, wide=wide)[0]
                            for x, wide in ((ref, np.float64), (plain, np.float32)))
    reference.assert_matches_reference(found.value, ref[2] + ref_more, (plain[2] + plain_more).astype(np.float16),
                                       np.float16, factor=3)


# ---- memory and work ----
@pytest.mark.parametrize(("module", "name", "most"), [(forward, "weighted_sum", 1.4), (backward, "logits", 1.6)],
                         ids=["forward", "backward"])
def test_memory_is_linear_and_work_follows_the_kept_pairs(module, name, most, rng, monkeypatch):
    """Gathered pairs stay close to needed pairs: counted, not timed."""
    n, gathered, function = 8192, 0, getattr(module, name)
    q, k, v, dout = draw_all(rng, lq=n, lk=n, h=4, g=2, d=32, dtype=np.float16)
    scores = rng.standard_normal((1, 2, n)).astype(np.float32)
    mask = dma.IntervalMask.top_w(scores, 256)

    def counting(p, *rest):
        nonlocal gathered
        found = function(p, *rest)
        gathered += p.size if module is forward else found[0].size
        return found

    monkeypatch.setattr(module, name, counting)
    tracemalloc.start()
    try:
        out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
        if module is backward:
            tracemalloc.reset_peak()
            dma.backward.attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    needed = 2 * int(mask.count(n).sum())  # two query heads per kv head
    assert peak < n * n / 2 and needed <= gathered < most * needed
