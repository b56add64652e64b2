"""utils.mask and utils.padding against a few lines of Python; the first generation's functions against the oracle."""
import math

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import flash_dmattn
from cupy_dma.flash_dmattn.utils import mask as masks
from cupy_dma.flash_dmattn.utils import padding
from cupy_dma.flash_dmattn.windows import best_keys
from tests.flash_dmattn.test_functions import check
from tests.oracle import reference
from tests.oracle.refusals import check_refused

B, H, HKV, LQ, LK, D = 2, 4, 2, 6, 11, 8
LOWEST = float(np.finfo(np.float32).min)


def best(row, visible, window):
    """Indices of the ``window`` best visible keys: NaN first, then the highest, the newest of equal ones first."""
    rank = [(math.isnan(x), 0.0 if math.isnan(x) else float(x), j) for j, x in enumerate(row) if visible[j]]
    return sorted(j for _, _, j in sorted(rank, reverse=True)[:window])


def simple_topk(bias, visible, window):
    bias, visible = np.broadcast_arrays(bias, visible)
    kept = np.zeros(bias.shape, bool)
    for row in np.ndindex(bias.shape[:-1]):
        kept[(*row, best(bias[row], visible[row], window))] = True
    return kept


def simple_smooth(mask, block):
    out = np.zeros_like(mask)
    for begin in range(0, mask.shape[-1], block):
        keys = mask[..., begin:begin + block]
        out[..., begin:begin + block] = 2 * keys.sum(-1, keepdims=True) > keys.shape[-1]
    return out


def biases(rng, *shape):
    """Few distinct values, so many ties; a NaN, infinities and zeros of both signs."""
    bias = (rng.integers(-3, 4, shape) / 2).astype(np.float32)
    bias[..., 3], bias[..., 4], bias[0, ..., 5], bias[0, ..., 6] = -0.0, 0.0, np.inf, -np.inf
    bias[-1, ..., 7] = np.nan
    return bias


# ---- masks ----
SHAPES = [((B, HKV, LQ, LK), (B, 1, 1, LK)), ((B, HKV, 1, LK), (1, 1, LQ, LK)), ((1, 1, 1, LK), (B, H, LQ, LK)),
          ((B, H, LQ, LK), None)]


@pytest.mark.parametrize("window", [1, 3, LK, 50])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["topk_mask", "dynamic_mask"])
def test_topk_mask(name, shapes, window, convert, rng):
    bias = biases(rng, *shapes[0])
    visible = np.ones((1,) * 4, bool) if shapes[1] is None else rng.random(shapes[1]) < 0.6
    found = getattr(masks, name)(convert(bias), None if shapes[1] is None else convert(visible), window, LOWEST)
    assert type(found) is type(convert(bias))
    assert (convert.back(found) == simple_topk(bias, visible, window)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_topk_mask_of_every_type(dtype, convert, rng):
    import ml_dtypes

    bias = biases(rng, B, HKV, 1, LK).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    found = convert.back(masks.topk_mask(convert(bias), None, keep_window_size=4))
    assert (found == simple_topk(bias.astype(np.float64), np.ones(LK, bool), 4)).all()


def test_keys_of_the_lowest_bias_are_hidden(convert):
    bias = np.array([[[[1, LOWEST, 0, LOWEST]]]], np.float32)
    assert convert.back(masks.topk_mask(convert(bias), None, 4, LOWEST)).tolist() == [[[[True, False, True, False]]]]
    assert convert.back(masks.topk_mask(convert(bias), None, 3)).tolist() == [[[[True, False, True, True]]]]


@pytest.mark.parametrize("block", [1, 2, 3, 4, LK, 20])
def test_block_smooth(block, convert, rng):
    mask = rng.random((B, H, LQ, LK)) < 0.5
    given = convert(mask.copy())
    found = masks.block_smooth(given, LK, block)
    assert (convert.back(found) == simple_smooth(mask, block)).all() and (convert.back(given) == mask).all()


@pytest.mark.parametrize("kind", ["topk", "relu"])
@pytest.mark.parametrize("block", [None, 3])
def test_a_smoothed_mask_shows_nothing_hidden(kind, block, convert, rng):
    bias, visible = biases(rng, B, HKV, LQ, LK), rng.random((B, 1, LQ, LK)) < 0.7
    kept = simple_topk(bias, visible, 5) if kind == "topk" else (bias > 0) & visible
    expected = kept if block is None else simple_smooth(kept, block) & visible
    found = masks.create_mask(convert(bias), convert(visible), B, LQ, LK, 5, LOWEST, block, kind)
    assert (convert.back(found) == expected).all()
    if kind == "relu":
        direct = masks.relu_mask(convert(bias), convert(visible), LOWEST, block, window_size=5)
        assert (convert.back(direct) == expected).all()


@pytest.mark.parametrize("length", [LK, LQ, None])
@pytest.mark.parametrize("form", [bool, np.int64])
def test_create_mask_with_padding(length, form, convert, rng):
    bias = biases(rng, B, HKV, LK)
    visible = np.ones((B, LK), bool)
    if length:
        visible[:, LK - length:] = rng.random((B, length)) < 0.7
    given = None if length is None else convert(visible[:, LK - length:].astype(form))
    found = masks.create_mask(convert(bias), given, batch_size=B, query_len=LQ, key_len=LK, keep_window_size=4,
                              min_dtype=LOWEST)
    assert (convert.back(found) == simple_topk(bias[:, :, None], visible[:, None, None], 4)).all()


@pytest.mark.parametrize("window", [1, 4, LK, 50])
def test_topk_indices(window, convert, rng):
    bias = biases(rng, B, HKV, LK)
    found = convert.back(masks.topk_indices(convert(bias), window))
    assert found.dtype == np.int64
    for row in np.ndindex(B, HKV):
        assert found[row].tolist() == best(bias[row], np.ones(LK, bool), window)


def test_ties_are_broken_as_by_interval_masks(rng):
    scores = biases(rng, B, HKV, LK)
    dense = masks.topk_mask(scores[:, :, None], dma.IntervalMask.causal(LK).to_dense(LK), 4)
    assert (dense == dma.IntervalMask.top_w(scores, 4).to_dense(LK)).all()


@pytest.mark.parametrize("call, kind, words", [
    (lambda x: masks.topk_mask(x, None, 0), ValueError, ["window_size", "at least 1", "0"]),
    (lambda x: masks.topk_mask(x, None, 2.5), TypeError, ["window_size", "float"]),
    (lambda x: masks.topk_mask(x, None, 2, window_size=3, keep_window_size=3), TypeError, ["window_size"]),
    (lambda x: masks.topk_mask(x, np.ones((3, 1, 1, LK), bool), 2), ValueError,
     ["attention_mask", "broadcast", "(2, 2, 1, 11)", "(3, 1, 1, 11)"]),
    (lambda x: masks.topk_mask(np.zeros(x.shape, int), None, 2), TypeError, ["attention_bias", "int64"]),
    (lambda x: masks.topk_mask(x, None, 2, "low"), TypeError, ["min_dtype", "str"]),
    (lambda x: masks.relu_mask(x, None, sharpness=1), TypeError, ["sharpness"]),
    (lambda x: masks.block_smooth(x > 0, LK, 0), ValueError, ["block_size", "at least 1"]),
    (lambda x: masks.block_smooth(x > 0, 8, 2), ValueError, ["attention_mask", "key_len=8", "(2, 2, 1, 11)"]),
    (lambda x: masks.topk_mask(x, None, 2, block_size=-1), ValueError, ["block_size", "-1"]),
    (lambda x: masks.topk_indices(x, 0), ValueError, ["window_size"]),
    (lambda x: masks.create_mask(x, None, B, 1, LK, 2, LOWEST, type="best"), ValueError, ["type", "'best'", "'topk'"]),
    (lambda x: masks.create_mask(x, None, B, 1, 8, 2, LOWEST), ValueError, ["attention_bias", "Lk=8", "(2, 2, 1, 11)"]),
    (lambda x: masks.create_mask(x, np.ones((B, 5), bool), B, 1, LK, 2, LOWEST), ValueError,
     ["attention_mask", "(2, 11)", "(2, 1)", "(2, 5)"]),
])
def test_errors_of_masks(call, kind, words, rng):
    check_refused(kind, words, call, biases(rng, B, HKV, 1, LK))


# ---- padding ----
@pytest.mark.parametrize("form", [bool, np.int64])
def test_unpad_and_pad(form, convert, rng):
    hidden, mask = rng.standard_normal((3, LK, 2, 4)).astype(np.float32), rng.random((3, LK)) < 0.6
    unused = (rng.random((3, LK)) < 0.5) & ~mask
    mask[1], unused[1] = False, False  # a sequence without tokens
    for other in (None, unused):
        every = mask if other is None else mask | other
        packed, indices, cu_seqlens, longest, used = padding.unpad_input(
            convert(hidden), convert(mask.astype(form)), None if other is None else convert(other.astype(form)))
        assert (convert.back(packed) == hidden[every]).all()
        assert (convert.back(indices) == np.flatnonzero(every)).all()
        assert convert.back(cu_seqlens).tolist() == [0, *np.cumsum(every.sum(1))]
        assert convert.back(cu_seqlens).dtype == convert.back(used).dtype == np.int32
        assert longest == every.sum(1).max() and convert.back(used).tolist() == mask.sum(1).tolist()
        padded = convert.back(padding.pad_input(packed, indices, 3, LK))
        assert (padded == np.where(every[:, :, None, None], hidden, 0)).all()
    found = padding.get_unpad_data(convert(mask.astype(form)))
    assert (convert.back(found[0]) == np.flatnonzero(mask)).all() and found[2] == mask.sum(1).max()
    rows = padding.index_first_axis(convert(hidden), found[0])
    assert (convert.back(rows) == hidden[mask]).all()


@pytest.mark.parametrize("query_length", [LK, 1, 4])
def test_upad_input(query_length, convert, rng):
    mask = np.arange(LK) >= np.array([[3], [0], [6]])  # padding on the left
    q, k, v = (rng.standard_normal((3, n, 2, 4)).astype(np.float32) for n in (query_length, LK + 5, LK + 5))
    query, key, value, indices, (cu_q, cu_k), (longest_q, longest_k) = padding.upad_input(
        *map(convert, (q, k, v)), convert(mask), query_length, padding.unpad_input)
    seen = mask[:, LK - query_length:]
    assert (convert.back(query) == q[seen]).all()
    assert (convert.back(key) == k[:, :LK][mask]).all() and (convert.back(value) == v[:, :LK][mask]).all()
    assert convert.back(cu_q).tolist() == [0, *np.cumsum(seen.sum(1))] and longest_q == seen.sum(1).max()
    assert convert.back(cu_k).tolist() == [0, *np.cumsum(mask.sum(1))] and longest_k == mask.sum(1).max()
    assert (convert.back(indices) == np.flatnonzero(seen)).all()


def test_gradients_through_padding(torch):
    hidden, mask = torch.randn(2, 5, 3, requires_grad=True), torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    packed, indices, *_ = padding.unpad_input(hidden, mask)
    (3 * padding.pad_input(packed, indices, 2, 5)).sum().backward()
    assert torch.equal(hidden.grad, 3.0 * mask[:, :, None].expand(-1, -1, 3))


@pytest.mark.parametrize("call, words", [
    (lambda x, m: padding.unpad_input(x, m[0]), ["attention_mask", "(B, L)", "(5,)"]),
    (lambda x, m: padding.unpad_input(x, m, m[:1]), ["unused_mask", "(2, 5)", "(1, 5)"]),
    (lambda x, m: padding.unpad_input(x[:1], m), ["hidden_states", "(2, 5)", "(1, 5, 3)"]),
    (lambda x, m: padding.pad_input(x[0], np.arange(5), -1, 5), ["batch", "at least 0", "-1"]),
    (lambda x, m: padding.upad_input(x[..., None], x[:, :3, :, None], x[..., None], m, 5), ["key_layer", "(2, 5)"]),
])
def test_errors_of_padding(call, words):
    check_refused(ValueError, words, call, np.zeros((2, 5, 3)), np.ones((2, 5), bool))


# ---- the first generation ----
@pytest.fixture
def data(rng):
    shapes = {"query": (B, LQ, H, D), "key": (B, LK, HKV, D), "value": (B, LK, HKV, D)}
    found = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    return {**found, "dt_proj": rng.standard_normal((HKV, HKV * D)).astype(np.float16) / 4,
            "A": np.array([0.5, -1.0], np.float16)}


def scores_of(data, convert):
    """Scores as the library computes them, so that the comparison does not depend on their last bit."""
    found = dma.key_scores(*(convert(data[name]) for name in ("value", "dt_proj", "A")))
    exact = reference.key_scores(data["value"], data["dt_proj"], data["A"])
    np.testing.assert_allclose(convert.back(found), exact, rtol=1e-5)
    return convert.back(found)


def bhsd(data, convert):
    return [convert(np.ascontiguousarray(data[name].swapaxes(1, 2))) for name in ("query", "key", "value")]


def selected(scores, window, visible):
    """The best keys among those that each query may see."""
    if visible.shape[1] == H:
        scores = np.repeat(scores, H // HKV, axis=1)
    return simple_topk(scores[:, :, None], visible, window or LK)


CAUSAL = np.arange(LK) <= np.arange(LQ)[:, None] + LK - LQ
LEFT_PADDING = np.arange(LK) >= np.array([2, 0])[:, None, None, None]
CAUSAL_MASKS = {
    "none": (None, True), "none, all keys": (None, False),
    "causal": (CAUSAL[None, None], True), "causal in the mask alone": (CAUSAL[None, None], False),
    "causal and padding": (CAUSAL & LEFT_PADDING, True), "padding": (LEFT_PADDING, True),
    "padding, all keys": (LEFT_PADDING, False),
    "band": ((CAUSAL & (np.arange(LK) > np.arange(LQ)[:, None] + 1))[None, None], True),
    "per head": (np.random.default_rng(5).random((B, H, LQ, LK)) < 0.7, True),
    "per kv head, all keys": (np.random.default_rng(5).random((1, HKV, LQ, LK)) < 0.7, False),
}


@pytest.mark.feature("cuda numpy forward", "cupy_dma.flash_dmattn", "apply_dynamic_mask_attention")
@pytest.mark.parametrize("window", [0, 3, 2048])
@pytest.mark.parametrize("name", CAUSAL_MASKS)
@pytest.mark.parametrize("form", [bool, np.float16])
def test_apply_dynamic_mask_attention(form, name, window, convert, data):
    mask, causal = CAUSAL_MASKS[name]
    if mask is None and form is not bool:
        pytest.skip("there is no mask")
    given = None if mask is None else convert(mask.astype(form))
    scores = scores_of(data, convert)
    visible = np.ones((1, 1, 1, 1), bool) if mask is None else mask
    kept = selected(scores, window, visible & CAUSAL if causal else visible)
    out = flash_dmattn.apply_dynamic_mask_attention(
        *bhsd(data, convert), dt_proj=convert(data["dt_proj"]), A=convert(data["A"]), causal_mask=given,
        keep_window_size=window, is_causal=causal)
    assert tuple(out.shape) == (B, H, LQ, D)
    qkv = [data[name] for name in ("query", "key", "value")]
    check(convert.back(out.swapaxes(1, 2)), qkv, kept, scores)


def test_apply_dynamic_mask_attention_stays_linear_where_it_can(data):
    scores = reference.key_scores(data["value"], data["dt_proj"], data["A"])
    for name, (mask, causal) in CAUSAL_MASKS.items():
        found = best_keys(scores, 3, mask, causal, LQ)
        linear = name not in ("band", "per head", "per kv head, all keys")
        assert isinstance(found, dma.IntervalMask) == linear, name


@pytest.mark.feature("numpy backward", "cupy_dma.flash_dmattn", "apply_dynamic_mask_attention")
def test_apply_dynamic_mask_attention_has_gradients(data, torch):
    leaves = [torch.from_numpy(np.asarray(x, np.float64)).requires_grad_() for x in (
        *(np.ascontiguousarray(data[name].swapaxes(1, 2)) for name in ("query", "key", "value")), data["dt_proj"],
        data["A"])]
    out, lse, p = flash_dmattn.apply_dynamic_mask_attention(*leaves, window_size=3, return_attn_probs=True)
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    same = dma.dynamic_mask_attention(q, k, v, dt_proj=leaves[3], A=leaves[4], window=3).transpose(1, 2)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(same, leaves, dout))
    assert lse.shape == (B, H, LQ) and p.shape == (B, H, LQ, LK)
    assert ((p > 0).sum(-1) <= 3).all()


@pytest.mark.feature("cuda numpy forward", "cupy_dma.flash_dmattn", "fwd")
@pytest.mark.parametrize("zoh_shape", [(B, HKV, LQ, LK), (B, HKV, LK), (B, H, 1, LK)], ids=str)
def test_fwd(zoh_shape, convert, data, rng):
    qkv = [data[name] for name in ("query", "key", "value")]
    zoh, active = rng.standard_normal(zoh_shape).astype(np.float16), rng.random((B, HKV, LQ, LK)) < 0.6
    arrays = dict(zip("qkv", map(convert, qkv)))
    found = flash_dmattn.fwd(**arrays, zoh=convert(zoh), active_mask=convert(active.astype(np.float16)),
                             softmax_scale=0.4, is_causal=True, keep_window_size=4)
    assert isinstance(found, list) and len(found) == 4 and found[2] is found[3] is None
    check(convert.back(found[0]), qkv, active, zoh, True, 0.4, lse=convert.back(found[1]))
    given = *arrays.values(), convert(zoh), convert(active)
    for again in (flash_dmattn.fwd(*given, None, 0.0, 0.4, True, 4, 0.0, True, None),
                  flash_dmattn.fwd(*given, softmax_scale=0.4, is_causal=True, return_softmax=True)):
        assert (convert.back(again[0]) == convert.back(found[0])).all()
        assert tuple(again[2].shape) == (B, H, LQ, LK)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("zoh_shape", [(B, HKV, LQ, LK), (B, HKV, LK), (B, HKV, 1, LK)], ids=str)
def test_fwd_selects_where_no_mask_is_given(zoh_shape, causal, convert, data, rng):
    qkv = [data[name] for name in ("query", "key", "value")]
    zoh = rng.standard_normal(zoh_shape).astype(np.float32)
    row = zoh[:, :, None] if zoh.ndim == 3 else zoh
    kept = simple_topk(row, CAUSAL if causal else np.ones((1, 1), bool), 4)
    found = flash_dmattn.fwd(*map(convert, qkv), bias=convert(zoh), keep_window_size=4, causal=causal)
    check(convert.back(found[0]), qkv, kept, zoh)
    everything = flash_dmattn.fwd(*map(convert, qkv), convert(zoh), keep_window_size=0, is_causal=causal)
    check(convert.back(everything[0]), qkv, None, zoh, causal)


def test_fwd_writes_to_out(convert, data):
    qkv = [convert(data[name]) for name in ("query", "key", "value")]
    target = convert(np.zeros((B, LQ, H, D), np.float16))
    found = flash_dmattn.fwd(*qkv, out=target)
    assert found[0] is target
    check(convert.back(target), [data[name] for name in ("query", "key", "value")])


@pytest.mark.parametrize("call, kind, words", [
    (lambda q, k, **more: flash_dmattn.fwd(q, k, k, p_dropout=0.1), NotImplementedError, ["p_dropout", "0.1"]),
    (lambda q, k, **more: flash_dmattn.fwd(q, k, k, out=k), ValueError, ["out", "(2, 6, 4, 8)", "(2, 11, 2, 8)"]),
    (lambda q, k, **more: flash_dmattn.fwd(q, k, k, q=q), TypeError, ["'q'"]),
    (lambda q, k, **more: flash_dmattn.fwd(q, k, k, keep_window_size=-1), ValueError, ["keep_window_size", "-1"]),
    (lambda q, k, dt, A: flash_dmattn.apply_dynamic_mask_attention(q[0], k, k, dt, A), ValueError,
     ["query", "(B, heads, length, D)", "(6, 4, 8)"]),
    (lambda q, k, dt, A: flash_dmattn.apply_dynamic_mask_attention(q, k, k, dt[:1], A), ValueError, ["dt_proj"]),
    (lambda q, k, dt, A: flash_dmattn.apply_dynamic_mask_attention(q, k, k, dt, A, keep_window_size=1, window_size=1),
     TypeError, ["'keep_window_size' and 'window_size'"]),
    (lambda q, k, dt, A: flash_dmattn.apply_dynamic_mask_attention(
        q.swapaxes(1, 2), k.swapaxes(1, 2), k.swapaxes(1, 2), dt, A, np.zeros((LQ, LK))), ValueError,
     ["causal_mask", "(1|B, 1|Hkv|H, 1|Lq, 1|Lk)", "(6, 11)"]),
])
def test_errors_of_the_first_generation(call, kind, words, data):
    check_refused(kind, words, call, data["query"], data["key"], dt=data["dt_proj"], A=data["A"])
