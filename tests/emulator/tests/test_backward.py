"""The gradients on the CPU emulator: attention and key scores against the oracle, on small odd shapes."""
import functools
import math

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import library_named, numpy_dtype
from cupy_dma.backends.cuda.attention import backward, backward_chunks
from cupy_dma.backends.cuda.lists import dense_macro_tiles
from cupy_dma.backends.cuda.lists.dense_mask import pack_mask
from cupy_dma.backends.cuda.runtime.program import fresh
from cupy_dma.backward import attention_backward
from tests import emulator
from tests.emulator.tests.test_forward import FORWARD, ORDERS, SCORE_CASES, check_bits, check_order
from tests.emulator.tests.test_residues import check_rows
from tests.oracle import cases, reference, score_cases

NAMES = ("float32-", "float16-D64", "bfloat16-D128", "bfloat16-D40", "float16-D3", "bfloat16-D256", "mask-",
         "causal-and-", "heads-", "window-1", "bias-", "softcap-", "scale-", "layout-", "lengths-1x", "lengths-33x129",
         "lengths-129x33", "dense-", "batch-3", "sinks-", "value-dim-")


@pytest.mark.feature("cuda backward", "attention", "every case", but=("delay-", "float64-D"))
@pytest.mark.parametrize("case", [c for c in FORWARD if c.name.startswith(NAMES)], ids=str)
def test_backward_grid(case):
    with_dlse = case.name.startswith(("heads-", "mask-"))
    gradients = cases.run_backward(case, backend="emulator", with_dlse=with_dlse)
    cases.check_backward(case, gradients, with_dlse=with_dlse, tf32=True)


@pytest.mark.parametrize("case", [c for c in FORWARD if c.name.startswith((
    "bfloat16-D128", "bfloat16-D256", "float32-D128", "float32-D192", "float32-D256", "float32-dense-bias",
    "float32-dense-both", "float32-dense-sizes", "dense-both", "dense-sizes"))], ids=str)
def test_tiles_of_smaller_gpus(case, device):
    """Cases whose tiles differ on smaller GPUs, forward and backward, and cases with few queries."""
    device.shared_limit = 99 * 1024
    cases.check(case, *cases.run(case, backend="emulator"), tf32=True)
    cases.check_backward(case, cases.run_backward(case, backend="emulator"), tf32=True)


@pytest.mark.parametrize("bias", ["full=bhqk", "full=11qk"])
def test_large_float32_rows_with_a_dense_bias(bias, device, fresh_programs):
    """These fit on GPUs with more shared memory, and are refused on smaller ones."""
    case = cases.Case("large", dtype="float32", head_dim=256, mask="dense=b1qk", bias=bias, query_length=37,
                      key_length=40)
    for limit in (227, 163):
        device.shared_limit = limit * 1024
        cases.check_backward(case, cases.run_backward(case, backend="emulator"), tf32=True)
    device.shared_limit = 99 * 1024
    with pytest.raises(NotImplementedError, match="99 KB"):
        cases.run_backward(case, backend="emulator")


def super_tiles(dtype, size, queries=400, keys=400):
    """Gradients over several super-tiles: their lists, partial sums, and the final sum."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, length, heads, size)).astype(numpy_dtype(dtype))
               for length, heads in ((queries, 2), (keys, 1), (keys, 1)))
    scores = rng.standard_normal((1, 1, keys)).astype(np.float32)
    mask = dma.IntervalMask.top_w(scores, 40)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True, backend="numpy")
    return [attention_backward(q, q, k, v, out, lse, mask=mask, bias=scores, backend=name)
            for name in ("emulator", "numpy")]


@pytest.mark.parametrize(("dtype", "size", "queries", "keys"), [
    ("bfloat16", 64, 400, 400), ("float16", 20, 400, 400), ("float32", 36, 400, 400), ("float16", 20, 370, 480),
    ("float16", 20, 400, 300)])
def test_super_tiles(dtype, size, queries, keys):
    for ours, other in zip(*super_tiles(dtype, size, queries, keys)):
        reference.check_norm(ours, other, 1e-3 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("needs", [("query", "key", "value", "bias"), ("value",), ("query", "bias")], ids=str)
@pytest.mark.parametrize(("batch", "mask_heads", "bias_heads"), [(1, 3, 6), (1, 1, 3), (2, 3, 3), (2, 6, 6), (1, 3, 1)])
def test_in_chunks(batch, mask_heads, bias_heads, needs, monkeypatch):
    """Chunks of batch entries and kv heads give the same bits. 6 heads over 3 kv heads make chunks of 4 and 2. Masks
    per query head have no such sums; the gradient of a bias that chunks share is made as a whole."""
    rng = np.random.default_rng(0)
    q, dout, k, v = (rng.standard_normal((batch, 300, heads, 16)).astype(np.float16) for heads in (6, 6, 3, 3))
    scores, dlse = (rng.standard_normal((batch, 6, 300)).astype(np.float32) for _ in range(2))
    mask = dma.IntervalMask.top_w(scores[:, :mask_heads], 40)
    bias = scores[:, :bias_heads]

    def gradients():
        return attention_backward(dout, q, k, v, out, lse, mask=mask, bias=bias, dlse=dlse, needs=needs,
                                  backend="emulator")

    with emulator.using(build="plain"), fresh():  # the watched build does not see copies on the host
        out, lse = dma.attention(q, k, v, mask=mask, bias=bias, return_lse=True, backend="emulator")
        whole, made, run = gradients(), [], backward.attention_backward

        @functools.wraps(run)
        def chunk(build, call):
            made.append(call.forward.key.shape)
            return run(build, call)

        monkeypatch.setattr(backward, "attention_backward", chunk)
        # Two super-tiles, of 256 queries and of 295 keys in blocks of 64 or 128.
        sums = batch * 3 * 2 * 384 * 4 * (16 * len({"key", "value"} & set(needs)) + 2 * ("bias" in needs))
        monkeypatch.setattr(backward_chunks, "MAX_SUMS", 2 * sums // 3)
        check_bits(gradients(), whole)
    chunks = {(1, 3): [(1, 300, 2, 16), (1, 300, 1, 16)], (1, 1): [(1, 300, 2, 16), (1, 300, 1, 16)],
              (2, 3): 2 * [(1, 300, 3, 16)], (2, 6): [(2, 300, 3, 16)]}[batch, mask_heads]
    assert made == (chunks if bias_heads > 1 or "bias" not in needs else [(batch, 300, 3, 16)])


def float16_super_tiles():
    return super_tiles("float16", 20)[0]


def dense_super_tiles():
    return cases.run_backward(next(c for c in FORWARD if c.name == "dense-columns-full"), backend="emulator")


@pytest.mark.parametrize("make", [float16_super_tiles, dense_super_tiles])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_order_of_threads_and_blocks_changes_no_bit(order, make):
    check_order(order, make)


def dense_gradients(backend):
    """A block mask, so that steps and lists are skipped, over more than 32 steps of queries; biases per head and
    shared."""
    rng = np.random.default_rng(0)
    n, lq = 136, 1100
    q, k, v = (rng.standard_normal((1, m, heads, 16)).astype("f2") for m, heads in ((lq, 2), (n, 1), (n, 1)))
    blocks = rng.choice(3, (1, 2, -(-lq // 32), -(-n // 8)), p=(0.7, 0.15, 0.15))
    spread = blocks.repeat(32, 2)[:, :, :lq].repeat(8, 3)[..., :n]
    mask = (spread == 2) | ((spread == 1) & (rng.random((1, 2, lq, n)) < 0.5))
    mask[:, :, 200:700] = False
    found = []
    for heads in (1, 2):
        bias = rng.standard_normal((1, heads, lq, n)).astype("f2")
        out, lse = dma.attention(q, k, v, mask=mask, bias=bias, return_lse=True, backend=backend)
        found += [out, lse, *attention_backward(q, q, k, v, out, lse, mask=mask, bias=bias, backend=backend)]
    return found


emulated_dense_gradients = functools.partial(dense_gradients, "emulator")


@pytest.mark.parametrize("order", [None, *ORDERS], ids=str)
def test_dense_masks_with_gaps(order):
    if order is not None:
        check_order(order, emulated_dense_gradients)
        return
    for a, b in zip(emulated_dense_gradients(), dense_gradients("numpy")):
        assert np.array_equal(np.isfinite(a), np.isfinite(b))
        reference.check_norm(*(np.where(np.isfinite(z), z, 0) for z in (a, b)))


def super_mask(kind, heads, queries=300, keys=200):
    """A dense mask (1, heads, queries, keys) for super-tiles of 64 queries and more."""
    rng = np.random.default_rng(heads)
    i, j = np.arange(queries)[:, None], np.arange(keys)
    some = rng.random((1, heads, queries, keys)) < 0.6
    if kind == "columns":
        return some & (rng.random((1, heads, 1, keys)) < 0.12)
    if kind == "top_w":
        scores = rng.standard_normal((1, heads, keys)).astype(np.float32)
        return dma.IntervalMask.top_w(scores, 15).to_dense(queries)
    masks = {"diagonal": i // 64 == j // 48, "later": (i >= 200) & (j >= 150), "causal": j + queries - keys <= i,
             "full": j >= 0, "nothing": j < 0, "one": j == 7}
    return np.broadcast_to(masks[kind], some.shape) if kind != "later" else some & masks[kind]


def expected_lists(mask, kv_heads, capacity):
    """For each list row, the super-tiles of the first choice that fits: (first query, end, keys)."""
    _, heads, queries, _ = mask.shape
    for head in range(1 if heads == 1 else kv_heads):
        share = max(heads // kv_heads, 1)
        seen = mask[0, head * share:(head + 1) * share].any(0)
        size = 64
        while True:
            ends = [(first, min(first + size, queries)) for first in range(0, queries, size)]
            lists = [(first, end, np.flatnonzero(seen[first:end].any(0))) for first, end in ends]
            if len(lists) == 1 or sum(-(-len(found) // 128) for *_, found in lists) * 128 <= capacity:
                break
            size *= 2
        yield lists


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["columns", "top_w", "diagonal", "later", "causal", "full", "nothing", "one"])
def test_super_tiles_of_dense_masks(kind, heads, monkeypatch):
    """The lists are those of numpy, and the gradients agree, with super-tiles of 64 queries and more."""
    monkeypatch.setattr(dense_macro_tiles, "UNIT_QUERIES", 64)
    rng = np.random.default_rng(0)
    mask = super_mask(kind, heads)
    q = rng.standard_normal((1, 300, 4, 16)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 200, 2, 16)).astype(np.float16)
    bias = rng.standard_normal((1, 4, 200)).astype(np.float32)
    found = check_rows(q, q, k, v, mask=mask, bias=bias[:, :, None])
    unseen = ~mask[0].reshape(heads, 300, 200).any(1)
    for head in range(2):
        nobody = unseen[head * heads // 2:max((head + 1) * heads // 2, 1)].all(0)
        assert not found.key[0, nobody, head].any() and not found.value[0, nobody, head].any()

    made = []

    def last_keys(build, dense):  # named as a function that the emulator knows
        packed = pack_mask(build, dense, None, False, 300, 200)
        made.append(dense_macro_tiles.dense_supers(build, packed, heads, 2))
        return made[-1].workspace

    given = library_named("numpy").describe(mask.reshape(1, heads, 300, 200), "dense")
    with emulator.using(build="plain"):  # lists are not full
        workspace, entries = emulator.BACKEND._run(last_keys, given), made[0].entries
    assert entries == 384  # 1.45 times 200 in tiles of 128
    rows = [*expected_lists(mask, 2, entries)]

    def read(name, *shape):
        first = made[0].fields[name].offset // 4
        return workspace[first:first + math.prod(shape)].reshape(shape)

    assert read("super_counts", len(rows)).tolist() == [len(lists) for lists in rows]
    for lists, numbers, found_blocks in zip(rows, read("super_list", len(rows), entries // 64, 64),
                                            read("super_blocks", len(rows), entries // 64, 4)):
        wanted = [(first, end, keys[at:at + 64]) for first, end, keys in lists
                  for at in range(0, -(-len(keys) // 128) * 128, 64)]
        for block, (first, end, keys) in enumerate(wanted):
            assert found_blocks[block].tolist() == [first, end, len(keys), 0]
            assert numbers[block, :len(keys)].tolist() == keys.tolist()
        assert not found_blocks[len(wanted):].any()


@pytest.mark.parametrize("needs", [("bias",), ("query",), ("key",), ("value", "bias"), ("query", "key", "bias")])
@pytest.mark.parametrize("name", ["bias-full_per_head-top_w", "dense-both-dense=1hqk-bhqk", "dense-bias-1gq1"])
def test_some_gradients_of_dense_biases(name, needs):
    case = next(c for c in FORWARD if c.name == name)
    gradients = cases.run_backward(case, backend="emulator", needs=needs)
    assert all((found is not None) == (part in needs) for part, found in gradients._asdict().items())
    cases.check_backward(case, gradients)


def test_a_bias_of_float64():
    case = next(c for c in FORWARD if c.name == "dense-bias-11qk")
    (q, k, v), named = cases.arguments(case, np.asarray)
    named["bias"] = named["bias"].astype(np.float64)
    out, lse = dma.attention(q, k, v, **named, return_lse=True, backend="emulator")
    found = attention_backward(q, q, k, v, out, lse, **named, needs="bias", backend="emulator").bias
    expected = attention_backward(q, q, k, v, out, lse, **named, needs="bias", backend="numpy").bias
    assert found.dtype == np.float64 and np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.feature("cuda backward", "attention", "a NaN")
@pytest.mark.parametrize("kind", ["key", "value", "query", "dout"])
def test_a_bad_row_reaches_no_gradient_behind_a_dense_mask(kind):
    """An invisible key row, or a query row without visible keys, may hold NaN."""
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((1, 100, 2, 16)).astype(np.float16) for name in ("query", "key", "value", "dout")}
    mask = rng.random((1, 2, 100, 100)) < 0.3
    (mask[:, 0, :, 50] if kind in ("key", "value") else mask[:, 0, 50])[...] = False
    bias = rng.standard_normal((1, 1, 100, 100)).astype(np.float16)
    results = []
    for spoil in (False, True):
        if spoil:
            x[kind][0, 50, 0] = np.nan
        q, k, v, do = x["query"], x["key"], x["value"], x["dout"]
        out, lse = dma.attention(q, k, v, mask=mask, bias=bias, return_lse=True, backend="emulator")
        results.append(attention_backward(do, q, k, v, out, lse, mask=mask, bias=bias, backend="emulator"))
    for clean, found in zip(*results):
        assert np.array_equal(clean, found)


@pytest.mark.feature("cuda backward", "attention", "a NaN")
def test_a_bad_key_reaches_the_query_gradients_that_see_it_only():
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 100, 2, 16)).astype(np.float16) for _ in range(4))
    k[0, 20, 0, 3] = np.nan
    mask = dma.IntervalMask.sliding_window(100, 5)
    out, lse = dma.attention(q, k, v, mask=mask, return_lse=True, backend="emulator")
    found = attention_backward(dout, q, k, v, out, lse, mask=mask, backend="emulator").query
    assert np.array_equal(np.isnan(found).any((0, 2, 3)), np.isin(np.arange(100), range(20, 25)))


@pytest.mark.feature("cuda backward", "Scores and selection", "key_scores")
@pytest.mark.parametrize(("dtype", "form", "shape"), SCORE_CASES)
def test_key_scores_backward(dtype, form, shape):
    score_cases.check_backward(shape, dtype, form, backend="emulator")
