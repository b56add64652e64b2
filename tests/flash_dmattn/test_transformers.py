"""The attention function for transformers models, against the oracle with the equivalent mask."""
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cupy_dma as dma  # noqa: E402
from cupy_dma.flash_dmattn.integrations import flash_sparse_attention_forward  # noqa: E402
from cupy_dma.flash_dmattn.integrations.flash_dynamic_mask_attention import (  # noqa: E402
    flash_dynamic_mask_attention_forward,
)
from tests.flash_dmattn.test_functions import check  # noqa: E402
from tests.flash_dmattn.test_masks import simple_topk  # noqa: E402
from tests.oracle.refusals import check_refused  # noqa: E402

B, H, HKV, L, D = 2, 4, 2, 9, 8
CAUSAL = np.tril(np.ones((L, L), bool))
LEFT = np.arange(L) >= np.array([[3], [0]])
RIGHT = LEFT[:, ::-1].copy()
MODULE = SimpleNamespace(is_causal=True)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def data(rng):
    qkv = [rng.standard_normal(shape).astype(np.float16) for shape in ((B, L, H, D), (B, L, HKV, D), (B, L, HKV, D))]
    return qkv, rng.standard_normal((B, HKV, L)).astype(np.float32)


def attend(qkv, mask=None, bias=None, module=MODULE, device="cpu", **options):
    q, k, v = (torch.from_numpy(x).to(device).transpose(1, 2) for x in qkv)
    mask, bias = (None if x is None else torch.from_numpy(x).to(device) for x in (mask, bias))
    out, weights = flash_dynamic_mask_attention_forward(module, q, k, v, attention_mask=mask, attention_bias=bias,
                                                        **options)
    assert weights is None and out.dtype == q.dtype
    return out.detach().cpu().numpy()


MASKS = {
    "none": (None, CAUSAL),
    "padding": (LEFT, CAUSAL & LEFT[:, None, None]),
    "padding of integers": (LEFT.astype(np.int64), CAUSAL & LEFT[:, None, None]),
    "padding on the right": (RIGHT, CAUSAL & RIGHT[:, None, None] & RIGHT[:, None, :, None]),
    "causal and padding": (CAUSAL & LEFT[:, None, None], CAUSAL & LEFT[:, None, None]),
    "ones and zeros": ((CAUSAL & LEFT[:, None, None]).astype(np.float16), CAUSAL & LEFT[:, None, None]),
    "band": (np.triu(np.ones((1, 1, L, L), bool), -4), np.triu(CAUSAL, -4)),
}


@pytest.mark.parametrize("window", [None, 3, L, 100])
@pytest.mark.parametrize("bias_axes", [None, 3, 4, "expanded", "per query", "shared", "shared, per query"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_windows(name, bias_axes, window, device, data, rng):
    qkv, scores = data
    given, visible = MASKS[name]
    bias = {None: None, 3: scores, 4: scores[:, :, None], "expanded": np.repeat(scores[:, :, None], L, 2),
            "per query": rng.standard_normal((B, HKV, L, L)).astype(np.float32), "shared": scores[:1, :, None],
            "shared, per query": rng.standard_normal((1, HKV, L, L)).astype(np.float32)}[bias_axes]
    seen = np.broadcast_to(visible, (B, 1, L, L))
    if bias is not None and window is not None and window < L:
        ranked = bias[:, :, None] if bias.ndim == 3 else bias
        seen = simple_topk(np.broadcast_to(ranked, (B, *ranked.shape[1:])), seen, window)
    out = attend(qkv, given, bias, device=device, scaling=0.3, window_size=window, softcap=5.0)
    if given is not None and given.ndim == 2:
        assert (out[given == 0] == 0).all()
    check(out, qkv, seen, bias, False, 0.3, 5.0)


def test_an_expanded_bias_under_padding_and_a_window(device, data):
    (q, k, v), scores = data
    expanded = torch.from_numpy(scores[:1, :, None]).to(device).expand(B, -1, -1, -1)
    out, _ = flash_dynamic_mask_attention_forward(
        MODULE, *(torch.from_numpy(x).to(device).transpose(1, 2) for x in (q, k, v)), torch.from_numpy(LEFT).to(device),
        expanded, window_size=3)
    expected = attend((q, k, v), LEFT, scores[:1, :, None], window_size=3)  # on the CPU
    np.testing.assert_allclose(out.cpu().float().numpy(), expected.astype(float), atol=0 if device == "cpu" else 2e-3)


def test_expanded_masks_and_biases_stay_linear(data, monkeypatch):
    qkv, scores = data
    taken, real = [], dma.attention
    monkeypatch.setattr("cupy_dma.flash_dmattn.flash_dmattn_interface.attention",
                        lambda *x, **y: taken.append((y["mask"], y["bias"])) or real(*x, **y))
    seen = CAUSAL & LEFT[:, None, None]
    bias = torch.from_numpy(scores)[:, :, None].expand(-1, -1, L, -1)
    for mask in (seen, LEFT[:, None, None]):
        long = torch.from_numpy(mask).expand(-1, HKV, L, -1)
        out, _ = flash_dynamic_mask_attention_forward(
            MODULE, *(torch.from_numpy(x).transpose(1, 2) for x in qkv), long, bias, window_size=3)
        check(out.numpy(), qkv, simple_topk(scores[:, :, None], seen, 3), scores)
        assert isinstance(taken[-1][0], dma.IntervalMask) and taken[-1][1].shape == (B, HKV, 1, L)


@pytest.mark.parametrize("keys", [1, 4])
def test_decoding(keys, data):
    """Only the last queries, as with a KV cache, give the last rows of the full result."""
    (q, k, v), scores = data
    for mask in (None, LEFT):
        whole = attend((q, k, v), mask, scores, window_size=3)
        last = attend((q[:, -keys:], k, v), mask, scores, window_size=3)
        np.testing.assert_allclose(last.astype(float), whole[:, -keys:].astype(float), atol=2e-3)


def test_a_static_cache_is_longer_than_the_mask(data):
    (q, k, v), scores = data
    short = [q[:, :6], k[:, :6], v[:, :6]]
    out = attend((q[:, :6], k, v), np.ones((B, 6), bool), scores, window_size=3)
    np.testing.assert_array_equal(out, attend(short, None, np.ascontiguousarray(scores[..., :6]), window_size=3))


@pytest.mark.parametrize("window", [None, 3])
def test_several_sequences_in_one_row(window, data):
    (q, k, v), scores = data
    one = [x[:1] for x in (q, k, v)]
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    same = np.repeat([0, 1], [4, 5])[:, None] == np.repeat([0, 1], [4, 5])
    seen = (CAUSAL & same)[None, None]
    expected = simple_topk(scores[:1, :, None], seen, window) if window else seen
    for given in (None, CAUSAL[None, None], np.ones((1, L), bool)):
        out = attend(one, given, scores[:1], window_size=window, position_ids=torch.from_numpy(positions))
        check(out, one, expected, scores[:1])
    plain = attend(one, None, scores[:1], window_size=window, position_ids=torch.arange(L)[None])
    np.testing.assert_array_equal(plain, attend(one, None, scores[:1], window_size=window))
    if window is None:
        cu = torch.tensor([0, 4, L], dtype=torch.int32)
        check(attend(one, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5, max_length_k=5), one, seen)


def test_sources_of_options(data):
    qkv, scores = data
    expected = attend(qkv, None, scores, window_size=3)
    for name in ("window_size", "keep_window_size"):
        module = SimpleNamespace(is_causal=True, **{name: 3})
        assert np.array_equal(attend(qkv, None, scores, module), expected)
        assert np.array_equal(attend(qkv, None, scores, **{name: 3}), expected)
        module = SimpleNamespace(is_causal=True, **{name: 5})  # the call's window counts
        assert np.array_equal(attend(qkv, None, scores, module, window_size=3), expected)
        assert not np.array_equal(attend(qkv, None, scores, module), expected)
    for name in ("scaling", "scale", "softmax_scale"):
        assert np.array_equal(attend(qkv, **{name: 0.2}), attend(qkv, scaling=0.2))
    assert flash_sparse_attention_forward is flash_dynamic_mask_attention_forward


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("given", [False, True, None])
def test_is_causal_of_a_call_wins(own, given, data):
    options = {} if given is None else {"is_causal": given}
    out = attend(data[0], module=SimpleNamespace(is_causal=own), scaling=0.3, **options)
    check(out, data[0], CAUSAL if (own if given is None else given) else np.ones((L, L), bool), scale=0.3)


def test_float32_becomes_the_type_of_the_weights(data):
    qkv, _ = data
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.float16))
    module.is_causal = True
    arguments = [torch.from_numpy(x.astype(np.float32)).transpose(1, 2) for x in qkv]
    out, _ = flash_dynamic_mask_attention_forward(module, *arguments)
    assert out.dtype == torch.float16 and np.array_equal(out.numpy(), attend(qkv))
    out, _ = flash_dynamic_mask_attention_forward(MODULE, *arguments)
    assert out.dtype == torch.float32


def test_gradients(data):
    qkv, scores = data
    leaves = [torch.from_numpy(x.astype(np.float64)).requires_grad_() for x in (*qkv, scores)]
    q, k, v, s = leaves
    out, _ = flash_dynamic_mask_attention_forward(MODULE, *(x.transpose(1, 2) for x in (q, k, v)), None, s,
                                                  window_size=3)
    same = dma.dynamic_mask_attention(q, k, v, s, window=3)
    dout = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(same, leaves, dout)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(B, 1, L, L), (B, HKV, L, L), (B, 1, 1, L), (B, L)], ids=str)
@pytest.mark.parametrize("shown", [0.0, 0.25])
def test_additive_masks_raise_instead_of_losing_their_bias(shape, shown, data):
    """Doge adds its learned bias to the mask."""
    mask = np.full(shape, shown, np.float32)
    mask[..., -1] = -np.inf if shown else np.finfo(np.float32).min
    for bias in (None, data[1]):
        with pytest.raises(ValueError, match=r"attention_mask must be boolean.*attention_mask == 0.*attn_bias"):
            attend(data[0], mask, bias, window_size=3)


@pytest.mark.parametrize("options, kind, words", [
    ({"head_mask": torch.ones(1)}, NotImplementedError, ["head_mask", "Tensor"]),
    ({"s_aux": torch.ones(1)}, NotImplementedError, ["s_aux"]),
    ({"dropout": 0.1}, NotImplementedError, ["dropout", "0.1"]),
    ({"scaling": 1.0, "scale": 1.0}, TypeError, ["'scaling' and 'scale'"]),
    ({"is_causal": 1}, TypeError, ["is_causal", "True or False"]),
    ({"mask": np.ones((B, 4), bool)}, ValueError, ["attention_mask", "9 queries", "(2, 4)"]),
    ({"mask": np.ones((L, L, L), bool)}, ValueError, ["mask", "(9, 9, 1, 9)"]),
    ({"mask": np.ones((B, L), bool), "cu_seq_lens_q": torch.tensor([0, 18])}, NotImplementedError,
     ["cu_seq_lens_q", "attention_mask"]),
])
def test_errors(options, kind, words, data):
    check_refused(kind, words, attend, data[0], **options)


def test_attention_weights_are_not_computed(data):
    with pytest.warns(UserWarning, match="output_attentions=True has no effect"):
        attend(data[0], output_attentions=True)
    attend(data[0], output_attentions=False, head_mask=None, dropout=0.0, use_cache=True, sliding_window=None)
