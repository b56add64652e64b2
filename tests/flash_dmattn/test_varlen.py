"""The drop-in's varlen functions: every shape of mask and bias against the oracle of each sequence."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import flash_dmattn
from cupy_dma.flash_dmattn import flash_dmattn_varlen_func
from tests.oracle import reference
from tests.oracle.refusals import check_refused

H, HKV, D = 4, 2, 8
LENGTHS = ((3, 5), (4, 4), (0, 2), (6, 1), (1, 0), (2, 7))  # (Lq, Lk) of each sequence
B, MAX_Q, MAX_K = len(LENGTHS), 6, 7
CU_Q, CU_K = (np.cumsum([0, *(n[axis] for n in LENGTHS)]).astype(np.int32) for axis in (0, 1))
TOTAL_Q, TOTAL_K = int(CU_Q[-1]), int(CU_K[-1])
PER_KEY = [(1, TOTAL_K), (HKV, TOTAL_K), (H, TOTAL_K)]
PER_QUERY = [(TOTAL_Q, h, MAX_K) for h in (1, HKV, H)]
PADDED = [(b, h, q, k) for b, h, q, k in ((B, HKV, MAX_Q, MAX_K), (1, 1, MAX_Q, MAX_K), (B, H, 1, MAX_K),
                                          (B, 1, MAX_Q, 1), (1, H, 1, 1))]


@pytest.fixture
def rows(rng):
    return [rng.standard_normal(shape).astype(np.float16)
            for shape in ((TOTAL_Q, H, D), (TOTAL_K, HKV, D), (TOTAL_K, HKV, D))]


def of_sequence(array, b):
    """The part of a mask or bias of any shape that belongs to sequence ``b``, with four axes."""
    if array is None:
        return None
    (lq, lk), q, k = LENGTHS[b], slice(*CU_Q[b:b + 2]), slice(*CU_K[b:b + 2])
    if array.ndim == 2:
        return array[None, :, None, k]
    if array.ndim == 3:
        return array[q, :, :lk].swapaxes(0, 1)[None]
    array = array[b:b + 1] if len(array) > 1 else array
    return array[:, :, :lq if array.shape[2] > 1 else 1, :lk if array.shape[3] > 1 else 1]


def each(rows, mask, bias, *options):
    """Arguments of the oracle, sequence by sequence; ``mask`` an array or a function of the sequence."""
    for b in range(B):
        q, k = slice(*CU_Q[b:b + 2]), slice(*CU_K[b:b + 2])
        seen = mask(b) if callable(mask) else of_sequence(mask, b)
        yield b, q, (rows[0][None, q], rows[1][None, k], rows[2][None, k], seen, of_sequence(bias, b), *options)


def check(out, rows, mask=None, bias=None, causal=False, scale=None, softcap=0.0, lse=None, p=None):
    found = {"ref": [], "plain": [], "ref lse": [], "plain lse": []}
    for b, _, arguments in each(rows, mask, bias, causal, scale, softcap):
        for name, function in (("ref", reference.attention), ("plain", reference.same_precision_attention)):
            result, its_lse = function(*arguments)
            found[name].append(result[0])
            found[name + " lse"].append(its_lse[0])
        if p is not None:
            lq, lk = LENGTHS[b]
            values = np.repeat(arguments[2][0], H // HKV, 1).astype(np.float64)
            np.testing.assert_allclose(np.einsum("hij,jhd->ihd", p[b, :, :lq, :lk].astype(np.float64), values),
                                       found["ref"][-1], atol=1e-2)
            assert (p[b, :, lq:] == 0).all() and (p[b, :, :, lk:] == 0).all()
    reference.assert_matches_reference(out, *(np.concatenate(found[name]) for name in ("ref", "plain")), out.dtype)
    if lse is not None:
        reference.assert_matches_reference(
            lse, *(np.concatenate(found[name], 1) for name in ("ref lse", "plain lse")), lse.dtype)


def lengths(convert, longest=True):
    return (convert(CU_Q), convert(CU_K), *((MAX_Q, MAX_K) if longest else (None, None)))


@pytest.mark.feature("cuda numpy forward", "cupy_dma.flash_dmattn", "flash_dmattn_varlen_func, mask",
                     "flash_dmattn_varlen_func, per")
@pytest.mark.parametrize("shape", PER_KEY + PER_QUERY + PADDED, ids=str)
@pytest.mark.parametrize("what", ["mask", "bias", "both"])
def test_every_shape_of_mask_and_bias(what, shape, convert, rows, rng):
    mask = rng.random(shape) < 0.6 if what != "bias" else None
    bias = rng.standard_normal(shape).astype(np.float32) if what != "mask" else None
    given = [None if x is None else convert(x) for x in (mask, bias)]
    out, lse, p = flash_dmattn_varlen_func(*map(convert, rows), *given, *lengths(convert), 0.7, True, 2.0,
                                           return_attn_probs=True)
    check(convert.back(out), rows, mask, bias, True, 0.7, 2.0, convert.back(lse), convert.back(p))
    assert tuple(p.shape) == (B, H, MAX_Q, MAX_K) and type(p) is type(lse) is type(out)
    alone = flash_dmattn_varlen_func(*map(convert, rows), *given, *lengths(convert, longest=False), 0.7, True, 2.0)
    check(convert.back(alone), rows, mask, bias, True, 0.7, 2.0)


@pytest.mark.parametrize("queries, keys", [((0, 0), (0, 0)), ((2, 1), (0, 0)), ((0, 0), (1, 2))], ids=str)
@pytest.mark.parametrize("longest", [None, 3])
def test_only_empty_sequences(longest, queries, keys, convert):
    cu_q, cu_k = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (queries, keys))
    q, k = (np.ones((cu[-1], 1, D), np.float16) for cu in (cu_q, cu_k))
    max_q, max_k = (max(lengths) if longest is None else longest for lengths in (queries, keys))
    for shape in ((1, cu_k[-1]), (cu_q[-1], 1, max_k), (1, 1, 1, 1)):
        out, lse, p = flash_dmattn_varlen_func(
            *map(convert, (q, k, k)), convert(np.ones(shape, bool)), convert(np.zeros(shape, np.float32)),
            convert(cu_q), convert(cu_k), longest, longest, return_attn_probs=True)
        assert [tuple(x.shape) for x in (out, lse, p)] == [q.shape, (1, len(q)), (2, 1, max_q, max_k)]
        assert not convert.back(p).any()


@pytest.mark.parametrize("mask_shape", [PER_KEY[1], PER_QUERY[1], PADDED[2], None], ids=str)
@pytest.mark.parametrize("bias_shape", [PER_KEY[2], PER_QUERY[0], PADDED[0], None], ids=str)
def test_shapes_together(mask_shape, bias_shape, convert, rows, rng):
    mask = None if mask_shape is None else rng.random(mask_shape) < 0.6
    bias = None if bias_shape is None else rng.standard_normal(bias_shape).astype(np.float16)
    given = [None if x is None else convert(x) for x in (None if mask is None else mask.astype(np.float32), bias)]
    check(convert.back(flash_dmattn_varlen_func(*map(convert, rows), *given, *lengths(convert))), rows, mask, bias)


@pytest.mark.parametrize("bias_shape", [None, PER_KEY[1], PER_QUERY[1]], ids=str)
def test_interval_mask_in_packed_positions(bias_shape, convert, rows, rng):
    start = rng.integers(-3, TOTAL_K, (1, HKV, TOTAL_K)).astype(np.int32)
    start[..., ::4], stop = -(2**31), start + rng.integers(0, 8, start.shape).astype(np.int32)
    stop[..., 1::4] = 2**31 - 1
    bias = None if bias_shape is None else rng.standard_normal(bias_shape).astype(np.float32)

    def seen(b):
        lq, lk = LENGTHS[b]
        p = CU_K[b] + np.arange(lq)[:, None] + lk - lq
        k = slice(*CU_K[b:b + 2])
        return (start[:, :, None, k] <= p) & (p < stop[:, :, None, k])

    out = flash_dmattn_varlen_func(*map(convert, rows), dma.IntervalMask(convert(start), convert(stop)),
                                   None if bias is None else convert(bias), *lengths(convert))
    check(convert.back(out), rows, seen, bias)


def test_both_orders_and_all_names(rows, rng):
    mask, bias = rng.random(PER_KEY[1]) < 0.6, rng.standard_normal(PER_KEY[1]).astype(np.float32)
    every = (CU_Q, CU_K, MAX_Q, MAX_K, 0.7, True, 2.0, True, True)
    old = flash_dmattn_varlen_func(*rows, mask, bias, *every)
    check(old[0], rows, mask, bias, True, 0.7, 2.0, old[1], old[2])
    new = flash_dmattn_varlen_func(*rows, *every)
    check(new[0], rows, None, None, True, 0.7, 2.0, new[1], new[2])
    for named in ({"mask": mask, "bias": bias}, {"attn_mask": mask, "attention_bias": bias}):
        mixed = flash_dmattn_varlen_func(*rows, CU_Q, CU_K, MAX_Q, max_seqlen_k=MAX_K, scale=0.7, causal=True,
                                         softcap=2.0, **named)
        assert np.array_equal(mixed, flash_dmattn_varlen_func(*rows, mask, bias, *every[:-1]))
    q, k, v = rows
    named = flash_dmattn_varlen_func(q=q, k=k, v=v, cu_seq_lens_q=CU_Q, cu_seq_lens_k=CU_K.astype(np.int64),
                                     max_length_q=MAX_Q, max_length_k=MAX_K)
    check(named, rows)
    assert flash_dmattn_varlen_func(*rows, None, None, CU_Q, CU_K).shape == q.shape


@pytest.mark.feature("cuda numpy forward", "cupy_dma.flash_dmattn", "flash_dmattn_varlen_qkvpacked_func",
                     "flash_dmattn_varlen_kvpacked_func")
def test_packed(convert, rng):
    cu = convert(CU_K)
    qkv, kv = (rng.standard_normal((TOTAL_K, n, HKV, D)).astype(np.float16) for n in (3, 2))
    q = rng.standard_normal((TOTAL_Q, H, D)).astype(np.float16)
    bias = rng.standard_normal((HKV, TOTAL_K)).astype(np.float32)
    out = flash_dmattn.flash_dmattn_varlen_qkvpacked_func(convert(qkv), None, convert(bias), cu, MAX_K, 0.7, True)
    same = flash_dmattn_varlen_func(*(convert(np.ascontiguousarray(qkv[:, i])) for i in range(3)), None, convert(bias),
                                    cu, cu, None, None, 0.7, True)
    assert (convert.back(out) == convert.back(same)).all()
    out = flash_dmattn.flash_dmattn_varlen_kvpacked_func(
        q=convert(q), kv=convert(kv), bias=convert(bias), cu_seqlens_q=convert(CU_Q), cu_seqlens_k=cu, causal=True)
    check(convert.back(out), (q, *kv.swapaxes(0, 1)), None, bias, True)


def test_rows_after_the_last_sequence_and_unused_keys(convert, rows, rng):
    more = [np.concatenate((x, np.full_like(x[:2], 3))) for x in rows]
    mask = np.concatenate((rng.random((TOTAL_Q, 1, MAX_K)) < 0.6, np.ones((2, 1, MAX_K), bool)))
    used = np.array([max(k - 1, 0) for _, k in LENGTHS], np.int32)
    arrays = [convert(x) for x in more]
    out, lse, _ = flash_dmattn_varlen_func(*arrays, convert(mask), None, *lengths(convert), return_attn_probs=True,
                                           tail_padding=True)
    check(convert.back(out)[:TOTAL_Q], rows, mask[:TOTAL_Q], lse=convert.back(lse)[:, :TOTAL_Q])
    assert (convert.back(out)[TOTAL_Q:] == 0).all() and (convert.back(lse)[:, TOTAL_Q:] == -np.inf).all()
    dense = flash_dmattn_varlen_func(*arrays, convert(np.ones_like(mask)), None, *lengths(convert), is_causal=True,
                                     seqused_k=convert(used), tail_padding=True)
    linear = flash_dmattn_varlen_func(*arrays, None, None, *lengths(convert), is_causal=True, seqused_k=convert(used),
                                      tail_padding=True)
    np.testing.assert_allclose(convert.back(dense).astype(float), convert.back(linear).astype(float), atol=2e-3)
    for given in (None, convert(mask)):
        with pytest.raises(ValueError, match=r"cu_seqlens_q must end at query's length 18, .*rows 16 to 17"):
            flash_dmattn_varlen_func(*arrays, given, None, *(x.tolist() for x in (CU_Q, CU_K)))


@pytest.mark.feature("numpy backward", "cupy_dma.flash_dmattn", "flash_dmattn_varlen_func, mask",
                     "flash_dmattn_varlen_func, per")
@pytest.mark.parametrize("shape", [None, PER_KEY[1], PER_QUERY[1], PADDED[0]], ids=str)
def test_gradients(shape, rows, rng, torch):
    leaves = [torch.from_numpy(x.astype(np.float64)).requires_grad_() for x in rows]
    mask, bias = None, None
    if shape is not None:
        mask, bias = rng.random(shape) < 0.7, rng.standard_normal(shape)
        leaves.append(torch.from_numpy(bias).requires_grad_())
    out = flash_dmattn_varlen_func(*leaves[:3], None if mask is None else torch.from_numpy(mask),
                                   leaves[3] if shape else None, torch.from_numpy(CU_Q), torch.from_numpy(CU_K), MAX_Q,
                                   MAX_K, None, True)
    dout = torch.randn_like(out)
    found = [x.numpy() for x in torch.autograd.grad(out, leaves, dout)]
    wide, expected = [x.astype(np.float64) for x in rows], [np.zeros(x.shape) for x in leaves]
    for b, q, arguments in each(wide, mask, bias, True):
        dq, dk, dv, dbias = reference.attention_gradients(dout.numpy()[None, q], *arguments)
        k = slice(*CU_K[b:b + 2])
        expected[0][q], expected[1][k], expected[2][k] = dq[0], dk[0], dv[0]
        if dbias is not None:
            of_sequence(expected[3], b)[...] += dbias
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


# ---- paged KV cache ----
@pytest.mark.feature("cuda numpy forward", "cupy_dma.flash_dmattn", "flash_dmattn_varlen_func, block_table")
@pytest.mark.parametrize("with_mask", [False, True])
def test_paged_kv_cache(with_mask, convert, rows, rng):
    size, most = 3, 3
    table = rng.permutation(B * most).reshape(B, most).astype(np.int32)
    pages = [np.full((B * most, size, HKV, D), np.nan, np.float16) for _ in range(2)]
    bias = rng.standard_normal((B, HKV, size * most)).astype(np.float32)
    mask, flat = rng.random((B, 1, size * most)) < 0.7, np.zeros((HKV, TOTAL_K), np.float32)
    flat_mask = np.zeros((1, TOTAL_K), bool)
    for b, (_, lk) in enumerate(LENGTHS):
        for j in range(lk):
            for page, array in zip(pages, rows[1:]):
                page[table[b, j // size], j % size] = array[CU_K[b] + j]
        flat[:, CU_K[b]:CU_K[b + 1]], flat_mask[:, CU_K[b]:CU_K[b + 1]] = bias[b, :, :lk], mask[b, :, :lk]
    more = {"attn_mask": convert(mask), "attn_bias": convert(bias)} if with_mask else {}
    query, used = convert(rows[0]), convert(np.array([k for _, k in LENGTHS], np.int32))
    given = query, *map(convert, pages)
    out, lse, p = flash_dmattn_varlen_func(
        *given, cu_seqlens_q=convert(CU_Q), cu_seqlens_k=convert(CU_K), max_seqlen_q=MAX_Q, max_seqlen_k=MAX_K,
        is_causal=True, block_table=convert(table), return_attn_probs=True, **more)
    assert p is None
    check(convert.back(out), rows, flat_mask if with_mask else None, flat if with_mask else None, True,
          lse=convert.back(lse))
    same = flash_dmattn_varlen_func(*given, cu_seqlens_q=convert(CU_Q), is_causal=True, block_table=convert(table),
                                    seqused_k=used, **more)
    assert (convert.back(same) == convert.back(out)).all()


X = np.zeros


@pytest.mark.parametrize("call, kind, words", [
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v), TypeError, ["cu_seqlens_q", "None"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, cu_seqlens_q=CU_Q), TypeError, ["cu_seqlens_k", "None"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, CU_Q, CU_K, cu_seqlens_k=CU_K), TypeError, ["cu_seqlens_k"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, CU_Q, CU_K, 6, 7, 1.0, scale=1.0), TypeError,
     ["'softmax_scale' and 'scale'"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, CU_Q, CU_K, *range(10)), TypeError, ["13", "15"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q[None], k, v, CU_Q, CU_K), ValueError, ["query", "(total_q, H, D)"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, X((TOTAL_Q, 1, 9), bool), None, CU_Q, CU_K, 6, 7), ValueError,
     ["attn_mask", "(total_q, 1|Hkv|H, max_seqlen_k)", "(16, 1, 9)"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, None, X((3, 1, 6, 7)), CU_Q, CU_K, 6, 7), ValueError,
     ["attn_bias", "1|max_seqlen_q", "(3, 1, 6, 7)"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, None, X((1, 1, 1, 6, 7)), CU_Q, CU_K), ValueError,
     ["attn_bias", "(1, 1, 1, 6, 7)"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, mask=X(TOTAL_K, bool)),
     ValueError, ["attn_mask", "(1|Hkv|H, total_k)", "(19,)"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, X((2, 9), bool), None, CU_Q, CU_K), ValueError, ["mask", "9"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, X((TOTAL_Q, 1, 5), bool), None, CU_Q, CU_K, 6, 5), ValueError,
     ["max_seqlen_k", "7", "5"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, X((TOTAL_Q, 1, 7), bool), None, CU_Q, np.delete(CU_K, -2), 6, 7),
     ValueError, ["cu_seqlens_q and cu_seqlens_k", "7", "6"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k, v, X((TOTAL_Q, 1, 7), bool), None, CU_Q, CU_K + 1, 6, 7),
     ValueError, ["cu_seqlens_k", "start at 0", "19"]),
    (lambda q, k, v: flash_dmattn_varlen_func(q, k[:, None], v[:, None], X((TOTAL_Q, 1, 1, 7), bool), None, CU_Q, CU_K,
                                              block_table=X((B, 7), np.int32)), NotImplementedError,
     ["attn_mask", "block_table", "max_pages"]),
    (lambda q, k, v: flash_dmattn.flash_dmattn_varlen_qkvpacked_func(q), ValueError, ["qkv", "(total, 3, H, D)"]),
    (lambda q, k, v: flash_dmattn.flash_dmattn_varlen_kvpacked_func(q, k[:, None]), ValueError,
     ["kv", "(total_k, 2, Hkv, D)", "(19, 1, 2, 8)"]),
])
def test_errors(call, kind, words, rows):
    check_refused(kind, words, call, *rows)
