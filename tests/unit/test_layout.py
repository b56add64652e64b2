"""``layout="bhnd"``: axes in the order of torch's SDPA, and hints in errors if it was forgotten."""
import warnings

import numpy as np
import pytest

import cupy_dma as dma
from tests.oracle.refusals import check_refused

B, N, H, HKV, D, W = 2, 9, 4, 2, 8, 3
REAL = np.arange(N) >= np.array([[3], [0]])


@pytest.fixture
def data(rng):
    shapes = (B, N, H, D), (B, N, HKV, D), (B, N, HKV, D), (B, HKV, N)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


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
            lambda *x, **o: dma.dynamic_mask_attention(*x, s, window=W, padding=convert(REAL), return_lse=True, **o),
            lambda *x, **o: dma.dynamic_mask_attention(*x, dt_proj=weight, A=A, window=W, return_lse=True, **o)):
        (out, lse), (same, same_lse) = run(*turned, layout="bhnd"), run(q, k, v, layout="bnhd")
        assert tuple(out.shape) == (B, H, N, D) and type(out) is type(q)
        assert np.array_equal(convert.back(out), convert.back(same).swapaxes(1, 2))
        assert lse is same_lse is None or np.array_equal(convert.back(lse), convert.back(same_lse))
    found = dma.key_scores(turned[2], weight, A, layout="bhnd")
    assert np.array_equal(convert.back(found), convert.back(dma.key_scores(v, weight, A)))


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_torch_gradients(compiler, data, torch):
    from cupy_dma import torch as dma_torch

    leaves = [torch.from_numpy(x).double().requires_grad_() for x in data]
    turned = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves[:3]]
    for module in (dma, dma_torch):
        def run(q, k, v, s, attend=module.dynamic_mask_attention):
            return attend(q, k, v, s, window=W, layout="bhnd")

        run = run if compiler is None else torch.compile(run, fullgraph=True, backend=compiler)
        found, same = run(*turned, leaves[3]), dma.dynamic_mask_attention(*leaves, window=W).transpose(1, 2)
        assert torch.equal(found, same)
        gradients = torch.autograd.grad(found.sin().sum(), (*turned, leaves[3]))
        expected = torch.autograd.grad(same.sin().sum(), leaves)
        for a, b in zip(gradients, (*(x.transpose(1, 2) for x in expected[:3]), expected[3])):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def shaped(*shapes):
    return [np.zeros(shape, np.float32) for shape in shapes]


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
    q, k = shaped(query, key)
    if backend == "torch":
        torch = pytest.importorskip("torch")
        q, k = (torch.from_numpy(x).requires_grad_() for x in (q, k))
    with pytest.warns(UserWarning, match=r"read as \(B, L, H, D\).*scaled_dot_product_attention.*layout='bhnd'"):
        dma.attention(q, k, k)
    scores = dma.key_scores(k.detach() if backend == "torch" else k, *(
        x if backend == "numpy" else torch.from_numpy(x) for x in shaped((key[2], key[2] * 16), (key[2],))))
    with pytest.warns(UserWarning, match="layout='bhnd'"):
        dma.dynamic_mask_attention(q, k, k, scores, window=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dma.attention(q, k, k, layout="bnhd")
        dma.attention(q, k, k, layout="bhnd")


@pytest.mark.parametrize(("query", "key"), MEANT)
def test_shapes_that_do_not(query, key):
    q, k = shaped(query, key)
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
    (lambda q, k: dma.key_scores(k, *shaped((2, 16), (2,)), layout="nhd"), ValueError, ["layout", "'nhd'"]),
])
def test_errors(call, error, words, data):
    check_refused(error, words, call, data[0], data[1])
