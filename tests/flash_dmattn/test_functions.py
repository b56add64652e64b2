"""The drop-in's functions for fixed lengths: against the oracle, with every name of every argument, on every backend.
"""
import inspect
import subprocess
import sys

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import backends, flash_dmattn
from cupy_dma.flash_dmattn import flash_dmattn_func, flex_dmattn_func, triton_dmattn_func
from cupy_dma.flash_dmattn.utils.mask import topk_mask
from cupy_dma.flash_dmattn.utils.padding import unpad_input
from tests.oracle import reference
from tests.oracle.refusals import check_refused

B, LQ, LK, H, HKV, D = 2, 5, 7, 4, 2, 8
MASK_SHAPES = [(b, h, q, k) for b in (1, B) for h in (1, HKV, H) for q in (1, LQ) for k in (1, LK)]


@pytest.fixture
def qkv(rng):
    return [rng.standard_normal(shape).astype(np.float16)
            for shape in ((B, LQ, H, D), (B, LK, HKV, D), (B, LK, HKV, D))]


def check(out, qkv, mask=None, bias=None, causal=False, scale=None, softcap=0.0, lse=None):
    reference.check_attention(out if lse is None else (out, lse), *qkv, dense_mask=mask, bias=bias, causal=causal,
                              scale=scale, softcap=softcap)


# ---- masks and biases ----
@pytest.mark.feature("cuda numpy forward", "cupy_dma.flash_dmattn", "flash_dmattn_func")
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_every_broadcast_shape(shape, convert, qkv, rng):
    mask, bias = rng.random(shape) < 0.6, rng.standard_normal(shape).astype(np.float32)
    out, lse, p = flash_dmattn_func(*map(convert, qkv), convert(mask), convert(bias), return_attn_probs=True)
    check(convert.back(out), qkv, mask, bias, lse=convert.back(lse))
    assert type(out) is type(lse) is type(p) and tuple(p.shape) == (B, H, LQ, LK)


@pytest.mark.parametrize("form", ["bool", "zero-one", "integers"])
def test_every_form_of_a_mask(form, convert, qkv, rng):
    mask = rng.random((B, HKV, LQ, LK)) < 0.6
    given = {"bool": mask, "zero-one": mask.astype(np.float16), "integers": mask.astype(np.int64)}[form]
    check(convert.back(flash_dmattn_func(*map(convert, qkv), convert(given))), qkv, mask)


def additive_masks():
    """Float masks that are added to the logits, including one that contains a bias, as Doge makes it."""
    seen = np.tri(LQ, LK, LK - LQ, dtype=bool)[None, None]
    yield np.where(seen, 0, -np.inf).astype(np.float32)
    yield np.where(seen, 0, np.finfo(np.float16).min).astype(np.float16)
    yield np.where(seen, 0.5, -np.inf).astype(np.float32)
    yield np.zeros((1, 1, LQ, LK), np.float16)


@pytest.mark.parametrize("mask", list(additive_masks()))
def test_additive_masks_raise(mask, convert, qkv):
    q, k, v = map(convert, qkv)
    given, message = convert(mask), r"must be boolean, or 1 and 0 .*got float(16|32) with .* == 0, .*attn_bias"
    bhsd = [x.swapaxes(1, 2) for x in (q, k, v)]
    weight, A = convert(np.zeros((HKV, HKV * D), np.float16)), convert(np.zeros(HKV, np.float16))
    for name, call in (
            ("attn_mask", lambda: flash_dmattn_func(q, k, v, given)),
            ("attn_mask", lambda: flash_dmattn_func(q, k, v, (given, given))),
            ("active_mask", lambda: flash_dmattn.fwd(q, k, v, None, given)),
            ("causal_mask", lambda: flash_dmattn.apply_dynamic_mask_attention(*bhsd, weight, A, given)),
            ("attention_mask", lambda: topk_mask(given, given, 2)),
            ("attention_mask", lambda: unpad_input(q, given[0, 0])),
            ("attn_mask", lambda: flash_dmattn.flash_dmattn_varlen_func(
                q[0], k[0], v[0], cu_seqlens_q=convert(np.array([0, LQ])), cu_seqlens_k=convert(np.array([0, LK])),
                attn_mask=given))):
        with pytest.raises(ValueError, match=f"{name} {message}"):
            call()


def test_a_float_mask_cannot_be_read_under_compile(qkv, torch):
    q, k, v = map(torch.from_numpy, qkv)
    run = torch.compile(lambda m: flash_dmattn_func(q, k, v, m), backend="eager")
    mask = torch.rand(B, 1, LQ, LK) < 0.6
    torch.testing.assert_close(run(mask), flash_dmattn_func(q, k, v, mask))
    with pytest.raises(Exception, match=r"attn_mask must be boolean under torch\.compile"):
        run(mask.float())


@pytest.mark.parametrize(("keys", "columns", "fits"), [
    (100, 127, False), (100, 128, True), (100, 129, False), (100, 256, False), (127, 128, True), (128, 128, True),
    (128, 256, False), (129, 256, True), (129, 128, False)])
def test_masks_are_padded_to_the_next_multiple_of_128(keys, columns, fits, rng):
    """Like the original, and no further: a mask one block longer must belong to another call."""
    q, k, v = (rng.standard_normal((1, n, 1, 4)) for n in (2, keys, keys))
    mask, bias = rng.random((1, 1, 2, columns)) < 0.6, rng.standard_normal((1, 1, 2, columns))
    for options in ({"attn_mask": mask}, {"attn_bias": bias}):
        if fits:
            cut = {name: x[..., :keys] for name, x in options.items()}
            np.testing.assert_array_equal(flash_dmattn_func(q, k, v, **options), flash_dmattn_func(q, k, v, **cut))
        else:
            with pytest.raises(ValueError, match=next(iter(options)).removeprefix("attn_")):
                flash_dmattn_func(q, k, v, **options)


@pytest.mark.parametrize("kind", [bool, np.int32])
def test_a_mask_that_hides_everything(kind, convert, qkv):
    out, lse, p = flash_dmattn_func(*map(convert, qkv), convert(np.zeros((1, 1, 1, LK), kind)),
                                    return_attn_probs=True)
    assert (convert.back(out) == 0).all() and (convert.back(p) == 0).all() and (convert.back(lse) == -np.inf).all()


def test_probabilities_of_hidden_keys_are_zero(convert):
    """Whatever their bias and values are; NaN reaches only rows that see it."""
    rows = [np.ones((1, 2, 1, 4), np.float32) for _ in range(3)]
    mask, bias = np.tril(np.ones((1, 1, 2, 2), bool)), np.zeros((1, 1, 2, 2), np.float32)
    bias[..., 0, 1] = -np.inf
    _, _, p = flash_dmattn_func(*map(convert, rows), convert(mask), convert(bias), return_attn_probs=True)
    np.testing.assert_allclose(convert.back(p)[0, 0], [[1, 0], [0.5, 0.5]], rtol=1e-3)
    for bad in (np.nan, np.inf):
        rows[1][0, 1] = bad
        _, _, p = flash_dmattn_func(*map(convert, rows), convert(mask), return_attn_probs=True)
        np.testing.assert_array_equal(convert.back(p)[0, 0], [[1, 0], [np.nan, np.nan]])


def test_without_the_query_axis(convert, qkv, rng):
    mask, bias = rng.random((B, HKV, LK)) < 0.6, rng.standard_normal((B, 1, LK)).astype(np.float16)
    out = flash_dmattn_func(*map(convert, qkv), convert(mask), convert(bias))
    check(convert.back(out), qkv, mask[:, :, None], bias)


@pytest.mark.parametrize("length", [7, 128, 130, 256])
def test_key_axis_padded_to_128(length, convert, rng):
    rows = [rng.standard_normal((1, length, 1, D)).astype(np.float16) for _ in range(3)]
    mask = rng.random((1, 1, length, length)) < 0.6
    bias = rng.standard_normal(mask.shape).astype(np.float16)
    more = ((0, 0),) * 3 + ((0, -length % 128),)
    out = flash_dmattn_func(*map(convert, rows), convert(np.pad(mask, more)), convert(np.pad(bias, more)))
    check(convert.back(out), rows, mask, bias)


@pytest.mark.parametrize("causal", [False, True])
def test_interval_masks_and_tuples(causal, convert, qkv, rng):
    arrays, scores = [convert(x) for x in qkv], rng.standard_normal((B, HKV, LK)).astype(np.float32)
    top = dma.IntervalMask.top_w(convert(scores), 3)
    out = flash_dmattn_func(*arrays, top, convert(scores), is_causal=causal)
    kept = reference.top_w_dense(scores, 3, "prefix", None, None, LQ)
    check(convert.back(out), qkv, kept, scores)


def test_a_tuple_is_an_intersection(convert, qkv, rng):
    mask = rng.random((B, 1, LQ, LK)) < 0.7
    causal = dma.IntervalMask.causal(LK, like=convert(mask))
    out = flash_dmattn_func(*map(convert, qkv), (causal, convert(mask.astype(np.float32))))
    check(convert.back(out), qkv, mask, causal=True)


def test_last_axis_may_have_any_stride(convert, qkv, rng):
    mask, bias = rng.random((B, 1, LK, LQ)) < 0.6, rng.standard_normal((B, 1, LK, LQ)).astype(np.float32)
    turned = [convert(np.ascontiguousarray(x.swapaxes(1, 3))).swapaxes(1, 3) for x in qkv]
    out = flash_dmattn_func(*turned, convert(mask).swapaxes(2, 3), convert(bias).swapaxes(2, 3))
    check(convert.back(out), qkv, mask.swapaxes(2, 3), bias.swapaxes(2, 3))


def test_an_expanded_bias_stays_a_key_bias(monkeypatch, qkv, rng, torch):
    seen, real = [], dma.attention
    monkeypatch.setattr("cupy_dma.flash_dmattn.flash_dmattn_interface.attention",
                        lambda *x, **y: seen.append((y["mask"].shape, y["bias"].shape)) or real(*x, **y))
    mask, bias = rng.random((B, 1, 1, LK)) < 0.6, rng.standard_normal((B, HKV, 1, LK)).astype(np.float32)
    q, k, v = (torch.from_numpy(x) for x in qkv)
    scores = torch.from_numpy(bias).requires_grad_()
    long = scores.expand(-1, -1, LQ, -1)
    out = flash_dmattn_func(q, k, v, torch.from_numpy(mask).expand(-1, H, LQ, -1), long)
    assert seen == [((B, 1, 1, LK), (B, HKV, 1, LK))]
    check(out.detach().numpy(), qkv, mask, bias)
    dout = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, scores, dout)
    (expected,) = torch.autograd.grad(real(q, k, v, mask=torch.from_numpy(mask), bias=scores), scores, dout)
    assert torch.equal(found, expected)


def test_an_expanded_leaf_has_a_gradient_for_every_entry(qkv, torch):
    q, k, v = (torch.from_numpy(x.astype(np.float64)) for x in qkv)
    leaf = torch.zeros(B, HKV, 1, LK, dtype=torch.float64).expand(-1, -1, LQ, -1).requires_grad_()
    whole = leaf.detach().contiguous().requires_grad_()
    for bias in (leaf, whole):
        flash_dmattn_func(q, k, v, None, bias).square().sum().backward()
    assert torch.equal(leaf.grad, whole.grad) and whole.grad[:, :, 1:].abs().sum() > 0


@pytest.mark.feature("numpy backward", "cupy_dma.flash_dmattn", "flash_dmattn_func")
def test_gradients_are_those_of_attention(qkv, rng, torch):
    mask = torch.from_numpy(rng.random((B, HKV, LQ, LK)) < 0.6)
    leaves = [torch.from_numpy(x.astype(np.float64)).requires_grad_() for x in qkv]
    bias = torch.randn(B, HKV, LQ, LK, dtype=torch.float64, requires_grad=True)
    out = flash_dmattn_func(*leaves, mask, bias, is_causal=True, softcap=3.0)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (*leaves, bias), dout)
    expected = reference.attention_gradients(
        dout.numpy(), *(x.detach().numpy() for x in leaves), mask.numpy(), bias.detach().numpy(), True, None, 3.0)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-10, atol=1e-12)


# ---- options, names, results ----
def test_none_is_the_default_of_every_option(convert, qkv):
    arrays = [convert(x) for x in qkv]
    out = flash_dmattn_func(*arrays, None, None, None, None, None, None, None)
    assert (convert.back(out) == convert.back(dma.attention(*arrays))).all()


def test_options_by_position(convert, qkv, rng):
    mask, bias = rng.random((B, HKV, LQ, LK)) < 0.6, rng.standard_normal((B, HKV, LQ, LK)).astype(np.float32)
    arrays = [convert(x) for x in (*qkv, mask, bias)]
    out, lse, p = flash_dmattn_func(*arrays, 0.7, True, 2.0, True, True)
    check(convert.back(out), qkv, mask, bias, True, 0.7, 2.0, convert.back(lse))
    p, values = convert.back(p).astype(np.float64), np.repeat(qkv[2], H // HKV, 2).astype(np.float64)
    np.testing.assert_allclose(np.einsum("bhij,bjhd->bihd", p, values), convert.back(out).astype(np.float64), atol=1e-2)
    assert (np.abs(p.sum(-1) - 1) < 1e-2)[np.isfinite(convert.back(lse))].all()


SPELLINGS = {"query": ("query", "q", "query_states"), "key": ("key", "k"), "value": ("value", "v"),
             "mask": ("attn_mask", "mask", "attention_mask"), "bias": ("attn_bias", "bias", "attention_bias"),
             "scale": ("softmax_scale", "scale"), "causal": ("is_causal", "causal"),
             "probs": ("return_attn_probs", "return_softmax")}


@pytest.mark.parametrize("name", [name for names in SPELLINGS.values() for name in names])
def test_every_name_of_an_argument(name, qkv, rng):
    group = next(key for key, names in SPELLINGS.items() if name in names)
    mask, bias = rng.random((B, HKV, LQ, LK)) < 0.6, rng.standard_normal((B, HKV, LQ, LK)).astype(np.float32)
    values = dict(zip(SPELLINGS, (*qkv, mask, bias, 0.7, True, True)))
    named = {name if key == group else SPELLINGS[key][0]: value for key, value in values.items()}
    out, lse, _ = flash_dmattn_func(**named)
    check(out, qkv, mask, bias, True, 0.7, lse=lse)


@pytest.mark.parametrize("one, other", [(a, b) for names in SPELLINGS.values() for a in names for b in names if a < b])
def test_two_names_of_one_argument_raise(one, other, qkv):
    named = dict(zip(("query", "key", "value"), qkv))
    named = {name: array for name, array in named.items() if name not in (one, other)
             and not {one, other} <= set(SPELLINGS[name])}
    with pytest.raises(TypeError, match=f"one name only, got both '({one}' and '{other}|{other}' and '{one})'"):
        flash_dmattn_func(**named, **{one: None, other: None})


def test_a_name_and_a_position_raise(qkv):
    with pytest.raises(TypeError, match="'query' and 'q'"):
        flash_dmattn_func(*qkv, q=qkv[0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        flash_dmattn_func(*qkv, dropout_p=0.0)


@pytest.mark.feature("cuda numpy forward", "cupy_dma.flash_dmattn", "flash_dmattn_qkvpacked_func",
                     "flash_dmattn_kvpacked_func")
def test_packed(convert, rng):
    qkv, kv = (rng.standard_normal((B, LK, n, HKV, D)).astype(np.float16) for n in (3, 2))
    q = rng.standard_normal((B, LQ, H, D)).astype(np.float16)
    bias = rng.standard_normal((B, 1, 1, LK)).astype(np.float32)
    out = flash_dmattn.flash_dmattn_qkvpacked_func(convert(qkv), None, convert(bias), True, 0.7)
    check(convert.back(out), qkv.transpose(2, 0, 1, 3, 4), None, bias, True, 0.7)
    out = flash_dmattn.flash_dmattn_kvpacked_func(convert(q), convert(kv), None, convert(bias), 0.7, True)
    check(convert.back(out), (q, *kv.transpose(2, 0, 1, 3, 4)), None, bias, True, 0.7)
    out = flash_dmattn.flash_dmattn_kvpacked_func(q=convert(q), kv=convert(kv), scale=0.7, causal=True, softcap=2.0)
    check(convert.back(out), (q, *kv.transpose(2, 0, 1, 3, 4)), None, None, True, 0.7, 2.0)


@pytest.mark.feature("numpy backward", "cupy_dma.flash_dmattn", "flash_dmattn_qkvpacked_func")
def test_packed_gradients_go_to_the_packed_array(torch):
    qkv = torch.randn(B, LK, 3, H, D, dtype=torch.float64, requires_grad=True)
    out = flash_dmattn.flash_dmattn_qkvpacked_func(qkv, is_causal=True)
    dout = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, qkv, dout)
    expected = reference.attention_gradients(dout.numpy(), *(x.detach().numpy() for x in qkv.unbind(2)), causal=True)
    np.testing.assert_allclose(found.numpy(), np.stack(expected[:3], 2), rtol=1e-10, atol=1e-12)


def test_torch_compile(qkv, torch):
    q, k, v = (torch.from_numpy(x) for x in qkv)
    mask = torch.rand(B, 1, LQ, LK) < 0.6

    def run(q, k, v, mask):
        return flash_dmattn_func(q, k, v, mask=mask, scale=0.5, is_causal=True)

    torch._dynamo.reset()
    for given in (mask, mask.int()):
        assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v, given),
                           run(q, k, v, given))


# ---- backends ----
def test_flags_and_names_agree():
    names = flash_dmattn.get_available_backends()
    assert names == [name for name in ("cuda", "triton", "flex", "numpy") if backends.why_not(name) is None]
    assert [flash_dmattn.CUDA_AVAILABLE, flash_dmattn.TRITON_AVAILABLE, flash_dmattn.FLEX_AVAILABLE] == [
        name in names for name in ("cuda", "triton", "flex")]


@pytest.mark.parametrize("name", ["cuda", "triton", "flex"])
def test_a_backend_that_cannot_run_says_why(name, qkv):
    if backends.why_not(name) is None:
        pytest.skip(f"{name} can run here")
    with pytest.raises(RuntimeError, match=f"backend='{name}' cannot run here: .+; available: "):
        flash_dmattn.flash_dmattn_func_auto(name)
    call = {"triton": triton_dmattn_func, "flex": flex_dmattn_func}.get(name, flash_dmattn_func)
    with pytest.raises(RuntimeError, match=f"backend='{name}' cannot run here: "):
        call(*qkv, **({"backend": "cuda"} if name == "cuda" else {}))


def test_auto(convert, qkv):
    arrays = [convert(x) for x in qkv]
    out = flash_dmattn.flash_dmattn_func_auto()(*arrays, is_causal=True, scale=None)
    check(convert.back(out), qkv, causal=True)
    check(convert.back(flash_dmattn.flash_dmattn_func_auto("numpy", causal=True)(*arrays)), qkv, causal=True)
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'tpu'"):
        flash_dmattn.flash_dmattn_func_auto("tpu")
    with pytest.raises(TypeError, match="backend must be a str or None, got int"):
        flash_dmattn.flash_dmattn_func_auto(3)


def test_orders_of_the_other_backends(monkeypatch, qkv, rng):
    monkeypatch.setattr("cupy_dma.flash_dmattn.flash_dmattn_interface.choose_backend", lambda backend, first: None)
    mask = rng.random((B, HKV, LQ, LK)) < 0.6
    check(triton_dmattn_func(*qkv, mask, None, True, 0.7), qkv, mask, None, True, 0.7)
    check(flex_dmattn_func(*qkv, mask, None, False, 0.7), qkv, mask, None, False, 0.7)
    check(triton_dmattn_func(*qkv), qkv, causal=False)
    check(flex_dmattn_func(*qkv, softcap=2.0), qkv, causal=True, softcap=2.0)  # the original's default


# ---- the package ----
def test_names():
    for name in flash_dmattn.__all__:
        assert getattr(flash_dmattn, name) is not None and name in dir(flash_dmattn)
    for name in ("flash_sparse_attn_func", "flash_sparse_attn_varlen_func", "flash_sparse_attn_func_auto",
                 "triton_sparse_attn_func", "flex_sparse_attn_func"):
        assert getattr(flash_dmattn, name) is getattr(flash_dmattn, name.replace("sparse_attn", "dmattn"))
    with pytest.raises(AttributeError, match="no attribute 'flash_attn_func'"):
        _ = flash_dmattn.flash_attn_func


def test_signatures_are_shown():
    names = list(inspect.signature(flash_dmattn_func).parameters)
    assert names == ["query", "key", "value", "attn_mask", "attn_bias", "softmax_scale", "is_causal", "softcap",
                     "deterministic", "return_attn_probs", "backend"]


X = np.zeros


@pytest.mark.parametrize("call, kind, words", [
    (lambda q, k, v: flash_dmattn_func([1.0], k, v), TypeError, ["query", "list"]),
    (lambda q, k, v: flash_dmattn_func(q, None, v), TypeError, ["key", "NoneType"]),
    (lambda q, k, v: flash_dmattn_func(q[0], k, v), ValueError, ["query", "(B, Lq, H, D)", "(5, 4, 8)"]),
    (lambda q, k, v: flash_dmattn_func(q, k[0], v), ValueError, ["key", "(B, Lk, Hkv, D)", "(7, 2, 8)"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, X((B, LK), bool)), ValueError,
     ["attn_mask", "(1|B, 1|Hkv|H, 1|Lq, 1|Lk)", "(2, 7)", "mask[:, None]"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, X((B, 3, LQ, LK), bool)), ValueError, ["mask", "(2, 3, 5, 7)"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, X((B, 1, 1, LK), complex)), TypeError, ["attn_mask", "complex"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, "causal"), TypeError, ["attn_mask", "str"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, None, X((B, 1, LQ, 8), np.float32)), ValueError,
     ["bias", "(2, 1, 5, 8)"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, None, X((B, 1, LQ, LK), int)), TypeError, ["bias", "int64"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, is_causal=1), TypeError, ["is_causal", "True or False"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, deterministic="no"), TypeError, ["deterministic", "True or False"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, return_attn_probs=0), TypeError, ["return_attn_probs", "int"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, scale="1"), TypeError, ["scale", "str"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, softcap=-1.0), ValueError, ["softcap", "at least 0"]),
    (lambda q, k, v: flash_dmattn_func(q, k, v, backend="tpu"), ValueError, ["backend", "'tpu'", "'cuda'"]),
    (lambda q, k, v: flash_dmattn.flash_dmattn_qkvpacked_func(X((B, LK, 2, H, D), np.float32)), ValueError,
     ["qkv", "(B, L, 3, H, D)", "(2, 7, 2, 4, 8)"]),
    (lambda q, k, v: flash_dmattn.flash_dmattn_kvpacked_func(q, k), ValueError,
     ["kv", "(B, Lk, 2, Hkv, D)", "(2, 7, 2, 8)"]),
])
def test_errors(call, kind, words, qkv):
    check_refused(kind, words, call, *qkv)


def test_integers_of_a_mask_are_zero_or_one(monkeypatch, convert, qkv):
    monkeypatch.setenv("CUPY_DMA_CHECK", "1")  # arrays in host memory are always checked
    with pytest.raises(ValueError, match=r"attn_mask must be boolean, .*got int64 with other values"):
        flash_dmattn_func(*map(convert, qkv), convert(-np.arange(LK).reshape(1, 1, 1, LK)))


def test_importing_it_imports_no_array_library():
    """Nor does its function for transformers import them."""
    pytest.importorskip("torch")
    code = ("import sys; from cupy_dma.flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, fwd, utils; "
            "print([name for name in ('torch', 'triton') if name in sys.modules]); "
            "import cupy_dma.flash_dmattn.integrations.flash_dynamic_mask_attention; "
            "print('transformers' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["[]", "False"], done.stdout + done.stderr
