"""Extreme numbers on the CPU emulator, under section 12 of the specification: the lowest biases of a type, softcaps of
any size, and NaN in invisible places."""
import contextlib

import ml_dtypes
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backward import attention_backward
from tests import emulator
from tests.oracle import reference, schedule_cases


@contextlib.contextmanager
def gpu(kernel):
    """The emulated GPU. Gradients of "hopper lists" run in two passes and always use lists."""
    hopper = kernel.startswith("hopper")
    with (emulator.hopper_gpu() if hopper else emulator.using() as runtime,
          schedule_cases.hopper_gradients(False if "lists" in kernel else None)):
        yield runtime


def problem(kernel, dtype="float16", keys=600, queries=70, head_dim=32, heads=(2, 1), size=1.0):
    """Queries, keys and values that this kernel supports."""
    rng = np.random.default_rng(0)
    queries = 3 if kernel == "flash decode" else queries
    return [(factor * rng.standard_normal((1, n, h, head_dim))).astype(numpy_dtype(dtype))
            for n, h, factor in ((queries, heads[0], size), (keys, heads[1], size), (keys, heads[1], 1.0))]


def check_forward(arrays, out, lse=None, **options):
    reference.check_attention(out if lse is None else (out, lse), *arrays, tf32=True, **options)


def check_gradients(arrays, dout, found, **options):
    reference.check_attention_gradients(found, dout, *arrays, tf32=True, **options)


# ---- biases ----
def lowest_of(kind):
    return float(ml_dtypes.finfo("float32" if kind == "key" else kind).min)


def low_bias(kind, low, queries, keys, near):
    """``low`` for all keys but the ``near`` last ones."""
    bias = np.full((1, 1, keys), low, np.float32)
    bias[..., keys - near:] = np.random.default_rng(1).standard_normal(near)
    if kind == "key":
        return bias
    return np.ascontiguousarray(np.broadcast_to(bias[:, :, None], (1, 1, queries, keys)).astype(numpy_dtype(kind)))


@pytest.mark.parametrize(("kernel", "dtype", "kind", "low", "near"), [
    (*case, low, near) for case in (
        ("portable", "float16", "key"), ("portable", "bfloat16", "bfloat16"), ("portable", "float32", "float32"),
        ("hopper", "float16", "key"), ("hopper", "bfloat16", "key"), ("hopper", "bfloat16", "bfloat16"),
        ("flash decode", "float16", "key"), ("flash decode", "float32", "key"))
    for low in (-1e9, -1e10, -1e30, "lowest") for near in (0, 30)])
def test_low_biases(kernel, dtype, kind, low, near):
    """Such keys vanish beside others, but a row that sees only such keys attends to them: its output is their mean."""
    arrays = problem(kernel, dtype)
    lowest = lowest_of(kind)
    bias = low_bias(kind, lowest if low == "lowest" else low, arrays[0].shape[1], 600, near)
    with gpu(kernel):
        out, lse = dma.attention(*arrays, bias=bias, return_lse=True, backend="emulator")
    exact = near or (kernel, kind) == ("hopper", "bfloat16") or (
        kernel != "hopper" and low == "lowest" and kind != "bfloat16")
    check_forward(arrays, out, lse if exact else None, bias=bias)
    assert np.isfinite(lse).all() and (near or (lse < -4e8).all())


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("low", [-1.2e9, -1e20, "lowest"], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "softcap", "lists", "dense mask"])
def test_rows_of_low_biases_beside_others(kind, low, head_dim):
    """Rows of a warp of the Hopper kernel, by row modulo 8: biases are low except for the first keys (2, 6) or the last
    keys (1, and 5 with -inf before them), less low for the last keys (3), all low (0, 4), or all -inf, so the row sees
    no key (7). The last rows are all of kind 5."""
    rng = np.random.default_rng(2)
    arrays = problem("hopper", "bfloat16", head_dim=head_dim)
    low, row = lowest_of("bfloat16") if low == "lowest" else low, np.arange(70) % 8
    row[56:] = 5
    arrays[0][:, row % 4 % 3 == 0] = 0  # float32 cannot represent what they would add to low biases
    bias = np.where(rng.random((70, 600)) < 0.3, 0.95 * low, low)
    bias[row == 3, 580:590] = -1e9
    bias[row == 5] = -np.inf
    for at, chosen in ((580, row % 4 == 1), (0, row % 4 == 2)):
        bias[chosen, at:at + 10] = rng.standard_normal((chosen.sum(), 10))
    bias[row == 7] = -np.inf
    options = {"bias": bias[None, None].astype(numpy_dtype("bfloat16")), "causal": kind == "causal",
               "softcap": 5.0 if kind == "softcap" else 0.0}
    mask, seen = None, None
    if kind == "lists":
        mask = dma.IntervalMask.top_w(rng.standard_normal((1, 1, 600)).astype(np.float32), 550)
        seen = mask.to_dense(70)
    elif kind == "dense mask":
        mask = seen = rng.random((1, 1, 70, 600)) < 0.9
    with gpu("hopper"):
        out, lse = dma.attention(*arrays, **options, mask=mask, return_lse=True, backend="emulator")
    check_forward(arrays, out, lse, **options, dense_mask=seen)
    _, expected = reference.attention(*arrays, **options, dense_mask=seen)
    near = np.abs(expected) < 100
    assert near.any() and np.abs(lse[near] - expected[near]).max() < 1e-5
    assert not out[:, row == 7].any() and np.isneginf(lse[..., row == 7]).all()
    assert np.isfinite(lse[..., row % 4 == 0]).all()


@pytest.mark.parametrize("low", [-1.2e9, -1e20, "lowest"], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "softcap", "lists"])
def test_rows_of_low_biases_in_splits(kind, low):
    """Splits are weighted by their number of keys, however low the biases are."""
    with schedule_cases.num_sms(30, split=True) as splits:
        test_rows_of_low_biases_beside_others(kind, low, 32)
    assert min(splits) > 1


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("low", [-1e7, -1e9, -1e30, "lowest"], ids=str)
@pytest.mark.parametrize(("kernel", "dtype", "kind", "deterministic"), [
    ("portable", "float16", "key", False), ("portable", "bfloat16", "bfloat16", False),
    ("portable", "float32", "float32", False), ("hopper", "bfloat16", "key", False),
    ("hopper", "bfloat16", "key", True), ("hopper", "bfloat16", "bfloat16", False)])
def test_gradients_with_low_biases(kernel, dtype, kind, deterministic, low, softcap):
    """The first rows see only such keys. float32 cannot represent their probabilities, which must not become infinite:
    they get no gradient."""
    arrays = problem(kernel, dtype, keys=90, queries=90)
    lowest = lowest_of(kind)
    options = {"bias": low_bias(kind, lowest if low == "lowest" else low, 90, 90, 50), "causal": True,
               "softcap": softcap}
    dout = arrays[0][:, ::-1].copy()
    with gpu(kernel):
        out, lse = dma.attention(*arrays, **options, return_lse=True, backend="emulator")
        found = attention_backward(dout, *arrays, out, lse, **options, deterministic=deterministic, backend="emulator")
    dout[:, :40] = 0
    check_gradients(arrays, dout, found, **options)


def test_a_cache_of_low_scores():
    """The scores are biases of the kept keys."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, 1, 16)).astype(np.float16) for _ in range(3))
    scores = np.full((1, 1, 4), np.finfo(np.float32).min)
    cache = dma.DynamicCache(1, 1, 8, 16, like=q, dtype="float16", backend="emulator")
    with emulator.using():
        for i in range(4):
            one = slice(i, i + 1)
            out, lse = cache.extend(q[:, one], k[:, one], v[:, one], scores[:, :, one], return_lse=True)
            mean = v[:, :i + 1].astype("f4").mean(1)
            assert np.abs(out[:, 0].astype("f4") - mean).max() < 2e-3 and lse.item() == np.finfo(np.float32).min


# ---- softcaps ----
@pytest.mark.parametrize("softcap", [0.5, 30.0, 3e4, 1e5, 1e7, 1e15, 1e30, 1.7e38])
@pytest.mark.parametrize("size", [1.0, 6.0])
@pytest.mark.parametrize(("kernel", "dtype"), [
    ("portable", "float16"), ("portable", "float32"), ("hopper", "float16"), ("hopper", "bfloat16"),
    ("flash decode", "float16")])
def test_softcaps_of_any_size(kernel, dtype, size, softcap):
    """A large one changes nothing."""
    arrays = problem(kernel, dtype, keys=600 if kernel == "flash decode" else 100, size=size)
    with gpu(kernel):
        out, lse = dma.attention(*arrays, softcap=softcap, return_lse=True, backend="emulator")
    check_forward(arrays, out, lse, softcap=softcap)
    if kernel == "flash decode":
        return
    dout = arrays[0][:, ::-1].copy()
    with gpu(kernel):
        found = attention_backward(dout, *arrays, out, lse, softcap=softcap, backend="emulator")
    check_gradients(arrays, dout, found[:3], softcap=softcap)


@pytest.mark.parametrize("kernel", ["portable", "hopper"])
def test_a_small_scale_beside_a_large_softcap(kernel):
    """Their quotient is below float32's normal numbers."""
    q, k, v = problem(kernel, "bfloat16", keys=100)
    q, k, options = (q.astype("f4") * 1000).astype(q.dtype), (k.astype("f4") * 1000).astype(k.dtype), {"scale": 1e-7}
    with gpu(kernel):
        out = dma.attention(q, k, v, **options, softcap=1.7e38, backend="emulator")
        expected = dma.attention(q, k, v, **options, backend="emulator")
    assert np.abs(out.astype("f4") - expected.astype("f4")).max() < 2**-6


# ---- invisible places ----
@pytest.mark.parametrize("queries", [4, 200])
@pytest.mark.parametrize("bad", ["key", "value", "bias"])
@pytest.mark.parametrize("kernel", ["portable", "hopper", "hopper lists"])
def test_nothing_comes_from_keys_behind_the_last_query(kernel, bad, queries):
    """Also if the last step of queries is partial, with columns that are no queries."""
    q, k, v = problem(kernel, keys=queries, queries=queries)
    start = np.zeros(queries, np.int32)
    start[1::3] = queries + np.arange(len(start[1::3]))
    options = {"mask": dma.IntervalMask(start, np.full(queries, 2**31 - 1, np.int32)),
               "bias": np.random.default_rng(2).standard_normal((1, 1, queries)).astype(np.float32)}
    results = []
    for spoil in (False, True):
        if spoil:
            {"key": k, "value": v}.get(bad, options["bias"][:, 0])[:, 1::3] = np.nan if bad != "value" else np.inf
        with gpu(kernel):
            out, lse = dma.attention(q, k, v, **options, return_lse=True, backend="emulator")
            results.append((out, *attention_backward(out, q, k, v, out, lse, **options, backend="emulator")))
    for clean, found in zip(*results):
        assert np.array_equal(clean, found)
    assert not found[..., 1::3].any() and not results[1][2][:, 1::3].any() and not results[1][3][:, 1::3].any()


@pytest.mark.parametrize("shown", [(1, 2, 70, 600), (1, 1, 70, 600)])
def test_absent_bias_has_no_address(shown):
    """With a dense bias of negative strides, no address may use the strides of the absent key bias."""
    arrays = problem("portable")
    bias = np.random.default_rng(0).standard_normal(shown).astype(np.float16)[::-1, ::-1, ::-1]
    for kernel in ("portable", "hopper"):
        with emulator.hopper_gpu(build="plain") if kernel == "hopper" else emulator.using(build="plain"):
            out = dma.attention(*arrays, bias=bias, backend="emulator")
        check_forward(arrays, out, bias=bias)
