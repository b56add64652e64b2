"""Sink logits, and values with a different head dim from keys: every function against the definition, and errors. The
grids (``tests/oracle/cases.py``) cover ``attention`` on every backend."""
import itertools

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import backward
from tests.oracle import reference

B, N, H, HKV, D, DV, W = 2, 13, 4, 2, 8, 5, 4
CU = np.array([0, 6, 6, 13], np.int32)


@pytest.fixture
def data(rng):
    shapes = {"query": (B, N, H, D), "key": (B, N, HKV, D), "value": (B, N, HKV, DV), "scores": (B, HKV, N),
              "sink_logits": (H,), "dout": (B, N, H, DV), "dlse": (B, H, N), "dt_proj": (HKV, HKV * DV), "A": (HKV,)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_dynamic_mask_attention_and_its_gradients(data):
    q, k, v = (data[name] for name in ("query", "key", "value"))
    recipe = {"dt_proj": data["dt_proj"], "A": data["A"]}
    scores = reference.key_scores(v, **recipe)
    dense = reference.top_w_dense(scores, W)
    out, lse = dma.dynamic_mask_attention(q, k, v, **recipe, window=W, sink_logits=data["sink_logits"], return_lse=True)
    for found, expected in zip((out, lse), reference.attention(q, k, v, dense, scores, sinks=data["sink_logits"])):
        close(found, expected)
    found = backward.dynamic_mask_attention_backward(
        data["dout"], q, k, v, out, lse, **recipe, window=W, sink_logits=data["sink_logits"], dlse=data["dlse"])
    dq, dk, dv, dscores, dsinks = reference.attention_gradients(
        data["dout"], q, k, v, dense, scores, dlse=data["dlse"], sinks=data["sink_logits"])
    through, dproj, dA, _ = reference.key_scores_gradients(dscores, v, **recipe)
    for gradient, expected in ((found.query, dq), (found.key, dk), (found.value, dv + through), (found.dt_proj, dproj),
                               (found.A, dA), (found.sink_logits, dsinks)):
        close(gradient, expected)
    assert len(found) == 7  # as without sinks


def test_varlen_is_each_sequence(data):
    q, k, v = (data[name][0] for name in ("query", "key", "value"))
    bias, dout, dlse = (data[name][0] for name in ("scores", "dout", "dlse"))
    options = {"causal": True, "sink_logits": data["sink_logits"]}
    out, lse = dma.varlen_attention(q, k, v, CU, CU, bias=bias, **options, return_lse=True)
    found = backward.varlen_attention_backward(dout, q, k, v, out, lse, CU, CU, bias=bias, **options, dlse=dlse)
    dsinks = 0
    for first, end in itertools.pairwise(CU):
        own, given = slice(first, end), [x[None, first:end] for x in (q, k, v)]
        expected = dma.attention(*given, bias=bias[None, :, own], **options, return_lse=True)
        close(out[own], expected[0][0]), close(lse[:, own], expected[1][0])
        each = backward.attention_backward(dout[None, own], *given, *expected, bias=bias[None, :, own], **options,
                                           dlse=dlse[None, :, own])
        for whole, part in zip(found[:3], each):
            close(whole[own], part[0])
        dsinks = dsinks + each.sink_logits
    close(found.sink_logits, dsinks)


def test_pages_of_values(data):
    pages = {name: data[name].reshape(B * N, 1, HKV, -1) for name in ("key", "value")}
    table = np.arange(B * N).reshape(B, N)
    out = dma.varlen_attention(data["query"].reshape(B * N, H, D), pages["key"], pages["value"], [0, N, 2 * N], None,
                               block_table=table, seqused_k=[N, N], causal=True)
    expected = dma.attention(data["query"], data["key"], data["value"], causal=True)
    close(out, expected.reshape(B * N, H, DV))


def test_the_default_scale_is_that_of_the_keys(convert, data):
    """Also if head dims were padded: D 8, Dv 5 and vice versa."""
    for d, dv in ((D, DV), (3, D)):
        q, k = (data[name].astype(np.float32)[..., :d] for name in ("query", "key"))
        v = np.resize(data["value"].astype(np.float32), (B, N, HKV, dv))
        found = dma.attention(*map(convert, (q, k, v)))
        assert tuple(found.shape) == (B, N, H, dv)
        ref = reference.attention(q, k, v)[0]
        plain = reference.same_precision_attention(q, k, v, tf32=convert.gpu)[0]
        reference.assert_matches_reference(convert.back(found), ref, plain, np.float32)


def test_a_sink_of_minus_infinity_is_none(data):
    q, k, v = (data[name] for name in ("query", "key", "value"))
    mask = np.arange(N)[:, None] > np.arange(N)  # the first row has no visible keys
    plain = dma.attention(q, k, v, mask=mask, return_lse=True)
    found = dma.attention(q, k, v, mask=mask, return_lse=True, sink_logits=np.full(H, -np.inf))
    assert all(np.array_equal(a, b) for a, b in zip(plain, found))
    gradients = backward.attention_backward(data["dout"], q, k, v, *found, mask=mask, sink_logits=np.full(H, -np.inf))
    assert not gradients.sink_logits.any()


def test_a_row_that_sees_only_the_sink(data):
    q, k, v = (data[name] for name in ("query", "key", "value"))
    mask = np.arange(N)[:, None] > np.arange(N)
    options = {"mask": mask, "sink_logits": data["sink_logits"]}
    out, lse = dma.attention(q, k, v, **options, return_lse=True)
    assert not out[:, 0].any() and np.array_equal(lse[:, :, 0], np.broadcast_to(data["sink_logits"], (B, H)))
    clean = backward.attention_backward(data["dout"], q, k, v, out, lse, **options)
    data["dout"][:, 0] = np.nan
    dirty = backward.attention_backward(data["dout"], q, k, v, out, lse, **options)
    assert np.array_equal(clean.sink_logits, dirty.sink_logits) and not dirty.query[:, 0].any()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_errors(data, library):
    as_array = pytest.importorskip("torch").from_numpy if library == "torch" else np.asarray
    q, k, v = (as_array(data[name]) for name in ("query", "key", "value"))

    for options, error, words in (
            ({"sink_logits": as_array(np.ones(HKV))}, ValueError, r"sink_logits must have shape \(H,\) = \(4\)"),
            ({"sink_logits": as_array(np.ones((1, H)))}, ValueError, "sink_logits must have shape"),
            ({"sink_logits": as_array(np.ones(H, np.int64))}, TypeError, "sink_logits must be float16 or"),
            ({"sink_logits": [0.0] * H}, TypeError, "sink_logits must be"),
            ({"value": as_array(np.ones((B, N, HKV, 0)))}, ValueError, "or another head dim Dv .* 1 to 256, got"),
            ({"value": as_array(np.ones((B, N, HKV, 257)))}, ValueError, "or another head dim Dv .* 1 to 256, got"),
            ({"value": as_array(np.ones((B, N + 1, HKV, DV)))}, ValueError, "value must have key's shape")):
        with pytest.raises(error, match=words):
            dma.attention(**{"query": q, "key": k, "value": v, **options})
    with pytest.raises(ValueError, match=r"dout must have query's shape but value's head dim, \(2, 13, 4, 5\), got"):
        backward.attention_backward(q, q, k, v, q, as_array(data["dlse"]))


# ---- torch ----
INPUTS = "query", "key", "value", "scores", "sink_logits"


def functions():
    def masked(q, k, v, s, sinks):
        mask = dma.IntervalMask.causal(N, like=q)
        return dma.attention(q, k, v, mask=mask, bias=s, sink_logits=sinks, return_lse=True)

    def dynamic(q, k, v, s, sinks):
        return dma.dynamic_mask_attention(q, k, v, s, window=W, sink_logits=sinks, softcap=2.0, return_lse=True)

    def bhnd(q, k, v, s, sinks):
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return dma.attention(*turned, bias=s, causal=True, sink_logits=sinks, layout="bhnd", return_lse=True)

    def varlen(q, k, v, s, sinks):
        return dma.varlen_attention(q[0], k[0], v[0], CU.tolist(), CU.tolist(), bias=s[0], causal=True,
                                    sink_logits=sinks, return_lse=True)

    def varlen_dynamic(q, k, v, s, sinks):
        return dma.varlen_dynamic_mask_attention(q[0], k[0], v[0], CU.tolist(), CU.tolist(), s[0], window=W,
                                                 sink_logits=sinks, return_lse=True)

    return [masked, dynamic, bhnd, varlen, varlen_dynamic]


@pytest.mark.parametrize("function", functions(), ids=lambda f: f.__name__)
def test_torch_gradients(data, function, torch):
    inputs = [torch.from_numpy(data[name]).requires_grad_() for name in INPUTS]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    for name, found in zip(("out", "lse"), function(*inputs)):
        expected = function(*(x.detach() for x in inputs))[name == "lse"]
        assert torch.equal(found, expected)


def test_torch_compile_in_one_graph(data, torch):
    inputs = [torch.from_numpy(data[name]).requires_grad_() for name in INPUTS]
    for function in functions()[1:4:2]:
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        (out, lse), (expected, expected_lse) = compiled(*inputs), function(*inputs)
        torch.testing.assert_close((out, lse), (expected, expected_lse))
        loss, same = (a.sin().sum() + (b * b).sum() for a, b in ((out, lse), (expected, expected_lse)))
        torch.testing.assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(same, inputs))


def test_torch_rows_that_see_nothing_have_finite_gradients(data, torch):
    inputs = [torch.from_numpy(data[name]).requires_grad_() for name in ("query", "key", "value", "sink_logits")]
    sinks = torch.where(torch.arange(H) == 1, -torch.inf, inputs[3])
    mask = torch.arange(N)[:, None] > torch.arange(N)
    out, lse = dma.attention(*inputs[:3], mask=mask, sink_logits=sinks, return_lse=True)
    gradients = torch.autograd.grad((out.sum() + lse[:, 0].sum()), inputs)
    assert all(x.isfinite().all() for x in gradients) and gradients[3][1] == 0
