"""Arguments as users pass them: 0/1 padding, lists, strided scores, different array types, the other layout."""
import copy
import pickle
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import backends
from cupy_dma.arrays import describe
from tests.oracle.refusals import check_refused

B, N, H, HKV, D = 2, 9, 4, 2, 8
REAL = np.arange(N) >= np.array([[3], [0]])


@pytest.fixture
def data(rng):
    shapes = (B, N, H, D), (B, N, HKV, D), (B, N, HKV, D), (B, HKV, N)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def equal(convert, a, b):
    return np.array_equal(convert.back(a), convert.back(b))


# ---- padding, lists, scores ----
@pytest.mark.parametrize("kind", ["int64", "int32", "int16", "int8", "uint8"])
@pytest.mark.parametrize("keys", ["prefix", "global"])
def test_padding_of_zeros_and_ones(kind, keys, convert, data):
    *qkv, scores = map(convert, data)
    given, real = convert(REAL.astype(kind)), convert(REAL)
    assert dma.IntervalMask.padding(given) == dma.IntervalMask.padding(real)
    assert dma.IntervalMask.top_w(scores, 3, keys=keys, padding=given) == dma.IntervalMask.top_w(
        scores, 3, keys=keys, padding=real)
    found, expected = (dma.dynamic_mask_attention(*qkv, scores, window=3, keys=keys, padding=x) for x in (given, real))
    assert equal(convert, found, expected)


def test_padding_of_other_integers_on_request(monkeypatch, convert):
    monkeypatch.setenv("CUPY_DMA_CHECK", "1")
    with pytest.raises(ValueError, match="padding must be 1 for real keys and 0 for padding"):
        dma.IntervalMask.padding(convert(np.array([[0, 2]])))


def test_documents_as_a_list(convert, data):
    *qkv, scores = map(convert, data)
    for given in ([0, 4, N], (0, 4, N), [[0] * 4 + [1] * 5] * B):
        found, expected = (dma.dynamic_mask_attention(*qkv, scores, window=3, documents=x)
                           for x in (given, convert(np.array(given, np.int32))))
        assert equal(convert, found, expected)


@pytest.mark.parametrize("keys", ["prefix", "global"])
def test_scores_of_any_strides(keys, convert, data):
    *qkv, scores = map(convert, data)
    strided = convert(np.ascontiguousarray(data[3].swapaxes(1, 2))).swapaxes(1, 2)
    assert describe(strided, "scores").strides[-1] != 1
    assert dma.IntervalMask.top_w(strided, 3, keys=keys) == dma.IntervalMask.top_w(scores, 3, keys=keys)
    assert equal(convert, dma.dynamic_mask_attention(*qkv, strided, window=3, keys=keys),
                 dma.dynamic_mask_attention(*qkv, scores, window=3, keys=keys))
    assert equal(convert, dma.attention(*qkv, bias=strided), dma.attention(*qkv, bias=scores))


def test_gradients_of_scores_of_any_strides(data, torch):
    leaves = [torch.from_numpy(x).requires_grad_() for x in data[:3]]
    s = torch.from_numpy(np.ascontiguousarray(data[3].swapaxes(1, 2))).requires_grad_()
    for run in (lambda s: dma.dynamic_mask_attention(*leaves, s, window=3),
                lambda s: dma.attention(*leaves, bias=s, causal=True)):
        found, same = run(s.transpose(1, 2)), run(s.transpose(1, 2).contiguous())
        assert torch.equal(found, same)
        for a, b in zip(*(torch.autograd.grad(x.sin().sum(), (*leaves, s)) for x in (found, same))):
            assert torch.equal(a, b)


def test_manual_gradients_of_scores_of_any_strides(data):
    q, k, v, s = data
    strided = np.ascontiguousarray(s.swapaxes(1, 2)).swapaxes(1, 2)
    out, lse = dma.dynamic_mask_attention(q, k, v, s, window=3, return_lse=True)
    found, same = (dma.backward.dynamic_mask_attention_backward(np.ones_like(out), q, k, v, out, lse, x, window=3)
                   for x in (strided, s))
    assert np.array_equal(found.scores, same.scores) and np.array_equal(found.key, same.key)


# ---- no keys ----
@pytest.mark.parametrize("keys", ["prefix", "global"])
@pytest.mark.parametrize("queries", [0, 3])
def test_no_keys(keys, queries, convert, data):
    q, k = convert(data[0][:, :queries]), convert(data[1][:, :0])
    weight, A = convert(np.ones((HKV, HKV * D), np.float32)), convert(np.ones(HKV, np.float32))
    for more in ({}, {"padding": convert(np.ones((B, 0), bool))}, {"documents": [0, 0]}, {"dt_bias": A}):
        out, lse = dma.dynamic_mask_attention(q, k, k, dt_proj=weight, A=A, window=3, keys=keys, return_lse=True,
                                              **more)
        assert tuple(out.shape) == (B, queries, H, D) and not convert.back(out).any()
        assert np.isneginf(convert.back(lse)).all()


# ---- the cache ----
@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_a_cache_has_the_type_of_an_array(kind, convert, data):
    like = convert(data[0].astype(kind))
    assert f"dtype={kind!r}" in repr(dma.DynamicCache(B, HKV, 3, D, like=like))
    assert "dtype='float16'" in repr(dma.DynamicCache(B, HKV, 3, D, dtype="float16", like=like))
    assert "dtype='bfloat16'" in repr(dma.DynamicCache(B, HKV, 3, D))
    with pytest.raises(TypeError, match=r"like must be float16 .*, got int64"):
        dma.DynamicCache(B, HKV, 3, D, like=convert(np.zeros(1, np.int64)))
    told = dma.DynamicCache(B, HKV, 3, D, dtype="float16", like=convert(np.zeros(1, np.int64)))
    assert "dtype='float16'" in repr(told)


def test_types_of_a_cache_may_be_those_of_a_library(torch):
    for kind in (np.float16, np.dtype("float16"), torch.float16):
        assert "dtype='float16'" in repr(dma.DynamicCache(1, 1, 1, 1, dtype=kind))


def copies(x):
    yield from (copy.copy(x), copy.deepcopy(x), copy.deepcopy([x, x])[1])
    yield from (pickle.loads(pickle.dumps(x, protocol)) for protocol in (2, pickle.HIGHEST_PROTOCOL))


def test_copies_of_a_cache_keep_its_backend(monkeypatch, convert, data):
    """Also copies of copies and of selected rows."""
    calls = []
    backend = SimpleNamespace(unavailable=lambda: None, cache_extend=lambda state, call: calls.append(state))
    monkeypatch.setattr(backends, "_loaded", {"other": backend})
    _, k, v, s = map(convert, data)
    cache = dma.DynamicCache(B, HKV, 3, D, like=k, backend="other")
    for own in (cache, cache.clone(), cache.select_batch([1, 0])):
        for twin in (own, *copies(own)):
            calls.clear()
            twin.update(k, v, s)
            assert calls == [twin._state]


# ---- masks ----
def test_copies_and_pickles_of_a_mask(convert, data):
    *qkv, scores = map(convert, data)
    M = dma.IntervalMask
    for mask in (M.top_w(scores, 3), M.sliding_window(N, 3, like=scores), M.padding(convert(REAL)),
                 M(convert(np.zeros(N, np.int32)), convert(np.full((B, 1, N), 5, np.int32)))):
        dma.attention(*qkv, mask=mask)  # may cache something on the mask
        for twin in copies(mask):
            assert twin == mask and (twin.shape, twin.device, twin._hints) == (mask.shape, mask.device, mask._hints)
            assert type(twin.start) is type(mask.start) and twin.library is mask.library
            for run in (twin._start, twin._stop):
                assert run.pointer == describe(run.array, "run").pointer
            assert equal(convert, dma.attention(*qkv, mask=twin), dma.attention(*qkv, mask=mask))


# ---- the range of scale and softcap ----
def test_scale_and_softcap_within_float32_are_used_and_beyond_raise(data):
    q, k, v, _ = data
    for options in ({"scale": 2.0**127}, {"softcap": 2.0**127}, {"softcap": 2.0**-126}):
        assert np.isfinite(dma.attention(0 * q, k, v, **options)).all()
    wide = [x.astype(np.float64) for x in (q, k, v)]
    assert np.isfinite(dma.attention(*wide, softcap=1e39)).all()
    assert np.isfinite(dma.attention(0 * wide[0], *wide[1:], scale=1e39)).all()


# ---- layout="bhnd": axes in the order of torch's SDPA, and hints in errors if it was forgotten ----
def bhnd(x):
    return np.ascontiguousarray(x.swapaxes(1, 2))


def test_the_same_bits_without_copies(convert, data):
    q, k, v, s = map(convert, data)
    turned = [convert(bhnd(x)) for x in data[:3]]
    weight, A = convert(np.ones((HKV, HKV * D), np.float32) / 8), convert(np.ones(HKV, np.float32))
    mask = convert(np.tri(N, dtype=bool)[None, None] & (np.arange(N) % 3 != 1))
    for run in (
            lambda *x, **o: dma.attention(*x, mask=mask, bias=s, softcap=2.0, return_lse=True, **o),
            lambda *x, **o: (dma.attention(*x, causal=True, **o), None),
            lambda *x, **o: dma.dynamic_mask_attention(*x, s, window=3, padding=convert(REAL), return_lse=True, **o),
            lambda *x, **o: dma.dynamic_mask_attention(*x, dt_proj=weight, A=A, window=3, return_lse=True, **o)):
        (out, lse), (same, same_lse) = run(*turned, layout="bhnd"), run(q, k, v, layout="bnhd")
        assert tuple(out.shape) == (B, H, N, D) and type(out) is type(q)
        assert np.array_equal(convert.back(out), convert.back(same).swapaxes(1, 2))
        assert lse is same_lse is None or np.array_equal(convert.back(lse), convert.back(same_lse))
    found = dma.key_scores(turned[2], weight, A, layout="bhnd")
    assert np.array_equal(convert.back(found), convert.back(dma.key_scores(v, weight, A)))


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_gradients_of_the_other_layout(compiler, data, torch):
    from cupy_dma import torch as dma_torch

    leaves = [torch.from_numpy(x).double().requires_grad_() for x in data]
    turned = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves[:3]]
    for module in (dma, dma_torch):
        def run(q, k, v, s, attend=module.dynamic_mask_attention):
            return attend(q, k, v, s, window=3, layout="bhnd")

        run = run if compiler is None else torch.compile(run, fullgraph=True, backend=compiler)
        found, same = run(*turned, leaves[3]), dma.dynamic_mask_attention(*leaves, window=3).transpose(1, 2)
        assert torch.equal(found, same)
        gradients = torch.autograd.grad(found.sin().sum(), (*turned, leaves[3]))
        expected = torch.autograd.grad(same.sin().sum(), leaves)
        for a, b in zip(gradients, (*(x.transpose(1, 2) for x in expected[:3]), expected[3])):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


FORGOTTEN = [  # SDPA's layout: query and key
    ((1, 8, 100, 16), (1, 8, 100, 16)), ((1, 8, 100, 16), (1, 2, 100, 16)), ((1, 1, 300, 16), (1, 1, 300, 16)),
    ((1, 8, 5, 16), (1, 2, 5, 16)), ((1, 8, 300, 16), (1, 1, 300, 16)),
]
MEANT = [  # ours: query and key
    ((1, 100, 8, 16), (1, 100, 8, 16)), ((1, 1, 8, 16), (1, 1, 8, 16)), ((1, 1, 8, 16), (1, 500, 8, 16)),
    ((1, 3, 8, 16), (1, 3, 2, 16)), ((1, 64, 8, 16), (1, 16, 8, 16)), ((1, 5, 8, 16), (1, 77, 8, 16)),
    ((1, 1, 32, 16), (1, 1, 32, 16)), ((1, 3, 8, 16), (1, 0, 8, 16)),
    ((1, 4, 8, 16), (1, 1, 8, 16)), ((1, 40, 8, 16), (1, 1, 8, 16)), ((1, 2, 128, 16), (1, 1, 128, 16)),  # one key
]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize(("query", "key"), FORGOTTEN)
def test_shapes_that_give_the_layout_away(query, key, backend):
    q, k = (np.zeros(shape, np.float32) for shape in (query, key))
    if backend == "torch":
        torch = pytest.importorskip("torch")
        q, k = (torch.from_numpy(x).requires_grad_() for x in (q, k))
    with pytest.warns(UserWarning, match=r"read as \(B, L, H, D\).*scaled_dot_product_attention.*layout='bhnd'"):
        dma.attention(q, k, k)
    with pytest.warns(UserWarning, match="layout='bhnd'"):
        dma.dynamic_mask_attention(q, k, k, k[..., 0].swapaxes(1, 2), window=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dma.attention(q, k, k, layout="bnhd")
        dma.attention(q, k, k, layout="bhnd")


@pytest.mark.parametrize(("query", "key"), MEANT)
def test_shapes_that_do_not(query, key):
    q, k = (np.zeros(shape, np.float32) for shape in (query, key))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dma.attention(q, k, k)


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda q, k: dma.attention(bhnd(q), bhnd(k[:, :4]), bhnd(k[:, :4])), ValueError,
     ["H % Hkv", "9 query heads", "4 kv heads", "scaled_dot_product_attention", "layout='bhnd'"]),
    (lambda q, k: dma.attention(q, k, k, layout="bshd"), ValueError, ["layout", "'bnhd' or 'bhnd'", "'bshd'"]),
    (lambda q, k: dma.attention(q[0], k, k, layout="bhnd"), ValueError, ["query", "(B, heads, N, D)", "(9, 4, 8)"]),
    (lambda q, k: dma.attention(q, [1], k, layout="bhnd"), TypeError, ["key", "builtins.list"]),
    (lambda q, k: dma.attention(bhnd(q), bhnd(k), bhnd(k[:, :4]), layout="bhnd"), ValueError,
     ["value", "(2, 4, 2, 8)", "layout='bhnd'", "axes 1 and 2"]),
    (lambda q, k: dma.key_scores(k, k, k, layout="nhd"), ValueError, ["layout", "'nhd'"]),
])
def test_errors_of_the_layout(call, error, words, data):
    check_refused(error, words, call, data[0], data[1])
