"""Caches with 8-bit rows that were not rounded beforehand. test_cache.py, test_slots.py and the emulator's tests cover
8-bit rows too, with the rounded histories of ``cache_cases``."""
from dataclasses import replace

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import library_named, numpy_dtype
from cupy_dma.cache.storage import LARGEST, dequantized, fake_quantized, quantized
from tests.oracle.arrays import host
from tests.oracle.cache_cases import History, stored
from tests.unit.test_gated_cache import Gates

STORAGE = ("int8", "fp8")
TYPES = ("float16", "bfloat16", "float32")


def rows_of(dtype, rng, *shape):
    """Rows of many magnitudes; numbers within a row also differ by orders of magnitude."""
    x = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))
    return (x * np.exp(-3 * abs(rng.standard_normal(shape[:-1])))[..., None]).astype(numpy_dtype(dtype))


def off(rows, storage):
    """The most by which numbers of the rows are off, before they are rounded to their type."""
    exact, largest = abs(rows.astype(np.float64)), LARGEST[storage]
    most = exact.max(-1, keepdims=True)
    if rows.dtype == np.float16:
        most = np.maximum(most, largest * 2.0**-17)
    bound = most / 254 + 0 * exact if storage == "int8" else np.maximum(exact / 16, most / 1024 / largest)
    return bound * (1 if rows.dtype == np.float32 else 1 + 2.0**-8)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", TYPES)
def test_no_number_is_off_by_more_than_is_said(dtype, storage, rng):
    library, x = library_named("numpy"), rows_of(dtype, rng, 400, 3, 24)
    codes, scale = quantized(library, x, storage, dtype)
    exact, wide = codes.astype(np.float64) * scale[..., None], x.astype(np.float64)
    if storage == "fp8":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale[..., None]
    bound, most = off(x, storage), abs(wide).max(-1)
    assert (abs(exact - wide) <= bound * (1 + 1e-4)).all()  # y is itself rounded before it becomes a code
    assert (abs(exact - wide) > 0.9 * bound).any()  # the bound is tight
    large = most > (1e-2 if dtype == "float16" else 0)
    np.testing.assert_allclose(abs(exact).max(-1)[large], most[large], rtol=1e-6 if dtype == "float32" else 2.0**-8)
    found = dequantized(library, codes, scale, dtype)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, (exact.astype(np.float32)).astype(x.dtype))
    if dtype != "float32":
        np.testing.assert_array_equal(fake_quantized(library, found, storage, dtype), found)


@pytest.mark.parametrize("dtype", TYPES)
def test_fp8_has_the_codes_of_torch(dtype, rng):
    torch = pytest.importorskip("torch")
    x = rows_of(dtype, rng, 500, 24)
    codes, scale = quantized(library_named("numpy"), x, "fp8", dtype)
    y = np.clip(x.astype(np.float32) / scale[:, None], -LARGEST["fp8"], LARGEST["fp8"])
    np.testing.assert_array_equal(torch.from_numpy(y).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_zeros_and_rows_that_are_not_finite(dtype, storage, convert, rng):
    x = rng.standard_normal((6, 8)).astype(np.float32)
    x[1], x[2, 3], x[3, 0], x[4, 7] = 0, np.nan, np.inf, -np.inf
    array = convert(x)
    library = library_named(convert.name.removesuffix("-cuda"))
    codes, scale = quantized(library, array, storage, dtype)
    found = convert.back(dequantized(library, codes, scale, "float32"))
    assert np.isnan(found[2:5]).all() and not found[1].any() and np.isfinite(found[[0, 1, 5]]).all()
    expected = quantized(library_named("numpy"), x, storage, dtype)
    for ours, theirs in zip((codes, scale), expected):
        np.testing.assert_array_equal(convert.back(ours), theirs)


@pytest.mark.feature("cuda numpy forward", "DynamicCache", "8-bit rows")
@pytest.mark.feature("cuda numpy forward", "GatedCache", "8-bit rows")
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("case", [
    History(length=40, recent=2, sinks=1, dtype="float16"), History(window=(9, 3), value_dim=5, dtype="bfloat16"),
    History(length=30, bias_delay=4, recent=6), Gates(dtype="bfloat16"), Gates(capacity=(1, 6), dtype="float16")],
                         ids=str)
def test_a_cache_reads_rounded_rows(case, storage, convert):
    """Results equal, bit for bit, those of a cache that is given rounded rows, however tokens are grouped."""
    rounded = replace(case)
    rounded.__dict__["data"] = {**case.data, **{name: stored(case.data[name], storage) for name in ("key", "value")}}
    exact, cache = rounded.cache(convert), case.cache(convert, storage=storage)
    begin = 0
    for n in (1, 1, 6, 1, 9, 1, 1, 2):
        for found, expected in zip(case.run(cache, [n], convert, begin), rounded.run(exact, [n], convert, begin)):
            assert found.tobytes() == expected.tobytes()
        begin += n
    assert cache.storage == storage and exact.storage is None
    for found, expected in zip(cache.kept(), exact.kept()):
        np.testing.assert_array_equal(host(found), host(expected))
    if case.dtype != "float32":
        assert cache.memory_bytes < exact.memory_bytes


@pytest.mark.parametrize("storage", STORAGE)
def test_saved_states_have_scales(storage, convert):
    case = History(length=24, options={"storage": storage})
    cache = case.cache(convert)
    assert {"key_scale", "value_scale"} <= cache.state_dict().keys() and f"storage='{storage}'" in repr(cache)
    with pytest.raises(TypeError, match=r"saved\['key'\] must be"):
        case.cache(convert, storage=None).load_state_dict(cache.state_dict())


def logit_error(case, storage):
    """The maximum errors of a logit and of a value: SPEC section 18."""
    query, key, value = (case.data[name] for name in ("query", "key", "value"))
    key_off, value_off = (off(x, storage) * (1 + 2.0**-9) + abs(x.astype(np.float64)) * 2.0**-9 for x in (key, value))
    key_off = np.repeat(key_off, case.heads // case.kv_heads, 2)
    return np.einsum("bihd,bjhd->bhij", abs(query.astype(np.float64)), key_off) * case.head_dim**-0.5, value_off.max(-1)


@pytest.mark.parametrize("storage", STORAGE)
def test_attention_is_within_the_bound(storage):
    """|out - exact| <= (exp(2 e) - 1) max |v| + max |dv|, where e bounds the error of logits. Logits are small, so that
    the bound is a tenth of the outputs."""
    case = History(length=60, window=20, recent=4, head_dim=32)
    case.data["query"] *= 0.02
    case.data["value"] += 4
    out, _ = case.run(case.cache(storage=storage), [30] + [1] * 30)
    logits, values = logit_error(case, storage)
    e = np.where(np.repeat(case.mask, case.heads // case.kv_heads, 1), logits, 0).max(-1).swapaxes(1, 2)[..., None]
    (exact, _), _ = case.oracle()
    bound = np.expm1(2 * e) * abs(case.data["value"]).max() + values.max()
    assert (abs(out - exact) <= bound).all() and bound.max() < 0.25 * exact.mean()
    assert abs(out - exact).max() > 0.01 * bound.max()


@pytest.mark.parametrize("storage", ["int4", 8, b"int8", True])
def test_what_is_no_storage(storage):
    with pytest.raises(ValueError, match=r"storage must be None, 'int8' or 'fp8', got"):
        dma.DynamicCache(1, 1, 4, 8, storage=storage)
    with pytest.raises(ValueError, match=r"storage must be None, 'int8' or 'fp8', got"):
        dma.GatedCache(1, 1, 8, delay=2, threshold=-1.0, storage=storage)


def test_no_codes_of_float64():
    with pytest.raises(TypeError, match="dtype must be float16, bfloat16 or float32 with storage='fp8', got float64"):
        dma.DynamicCache(1, 1, 4, 8, dtype="float64", storage="fp8")
