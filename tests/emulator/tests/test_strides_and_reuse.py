"""Query, key and value with different strides, edges of tiles and chunks, and masks shared by calls, on the CPU
emulator: inputs that expose small faults of kernels and launchers."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.runtime.program import overridden
from cupy_dma.backward import dynamic_mask_attention_backward
from tests import emulator
from tests.emulator.tests.test_call_keys import Arrays
from tests.emulator.tests.test_residues import check_rows


@pytest.fixture(autouse=True, params=["portable", "hopper"])
def device(request):
    """A device whose Hopper kernels compute gradients however few tiles there are."""
    with (emulator.hopper_gpu() if request.param == "hopper" else emulator.using() as runtime,
          overridden(hopper=True)):
        yield runtime


def draw(*shape, dtype=np.float16, seed=0):
    """Numbers that differ from shape to shape."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def within(array, *shape):
    """The array as a view into a larger one of this shape."""
    larger = np.full(shape, np.nan, array.dtype)
    part = larger[tuple(slice(size) for size in array.shape)]
    part[...] = array
    return part


LARGER = {"batch": (2, 50, 2, 16), "row": (2, 40, 3, 16), "head": (2, 40, 2, 24), "odd": (2, 40, 2, 19)}


def check_strides(places, passes, **options):
    """Forward and gradients of arrays within larger ones: of query, key, value, dout and out."""
    arrays = [within(draw(2, 40, 2, 16, seed=seed), *place) for seed, place in enumerate(places[:3])]
    check_rows(within(draw(*arrays[0].shape, seed=3), *places[3]), *arrays, passes=passes,
               out_like=lambda out: within(out, *places[4]), **options)


@pytest.mark.parametrize("passes", [1, 2])
def test_every_array_has_strides_of_its_own(passes):
    """Each of five arrays is read at its own strides, in one pass and in two."""
    larger = [LARGER[name] for name in ("batch", "row", "head")]
    for first in range(3):
        check_strides([larger[(first + i) % 3] for i in range(5)], passes)
    for odd in range(5):  # one of them in rows that are not aligned
        check_strides([LARGER["odd" if i == odd else "batch"] for i in range(5)], passes)


@pytest.mark.parametrize("passes", [1, 2])
def test_biases_and_masks_have_strides_of_their_own(passes):
    """Including strides of 0 on broadcast axes."""
    plain = [(2, 40, 2, 16)] * 5
    bias, dense = draw(2, 2, 40, dtype=np.float32), draw(2, 2, 40, 40) < 0.3
    for given in (within(bias, 2, 3, 40), within(bias, 2, 2, 45), np.broadcast_to(bias[:, :1], bias.shape),
                  np.broadcast_to(bias[:1], bias.shape), bias.swapaxes(0, 1)):
        check_strides(plain, passes, bias=given)
    for given in (within(dense, 2, 3, 40, 40), within(dense, 2, 2, 43, 40), within(dense, 2, 2, 40, 43),
                  np.broadcast_to(dense[:, :1], dense.shape), np.broadcast_to(dense[:, :, :1], dense.shape)):
        check_strides(plain, passes, mask=given, bias=bias)


@pytest.mark.parametrize("passes", [1, 2])
def test_intervals_have_strides_of_their_own(passes):
    """Starts, stops and the keys that nobody sees differ between batch entries and heads, without super-tiles and with
    them; biases that broadcast over heads, keys and all but keys."""
    start, stop = np.random.default_rng(0).integers(0, 41, (2, 2, 2, 40)).astype(np.int32)
    for bias in (draw(1, 1, 40, 40), draw(2, 2, 1, dtype=np.float32), draw(1, 1, 40, dtype=np.float32)):
        check_strides([(2, 40, 2, 16)] * 5, passes, mask=dma.IntervalMask(start, stop), bias=bias)
    rows = [draw(2, 300, 2, 16, seed=seed) for seed in range(4)]
    start = np.random.default_rng(1).integers(0, 300, (2, 2, 300)).astype(np.int32)
    start[0, 1, 30:] = 300
    mask = dma.IntervalMask.top_w(draw(2, 2, 300, dtype=np.float32), 20) & dma.IntervalMask(start, 300 + 0 * start)
    check_rows(rows[3], *rows[:3], mask=mask, passes=passes)


def test_dense_biases_have_strides_of_their_own():
    """In rows of even and odd length, aligned and not, with all gradients."""
    arrays = [draw(2, 40, 2, 16, seed=seed) for seed in range(3)]
    for keys in (37, 40):
        rows = [x[:, :keys] if i else x for i, x in enumerate(arrays)]
        bias = draw(2, 2, 40, keys)
        for given in (within(bias, 2, 3, 40, keys), within(bias, 2, 2, 43, keys), within(bias, 2, 2, 40, 48),
                      within(bias, 2, 2, 40, 45), Arrays().placed(bias, offset=1),
                      np.broadcast_to(bias[:, :1], bias.shape)):
            check_rows(arrays[0], *rows, bias=given)


def test_strides_of_a_single_axis_that_are_not_aligned():
    """One stride of one array, of batch entries, rows or heads, rules out 16-byte reads; all else is aligned."""
    for array in range(3):
        for axis in range(3):
            arrays = [draw(2, 20, 2, 16, seed=seed) for seed in range(3)]
            strides = [1600, 80, 32, 2]
            strides[axis] += 2
            odd = np.lib.stride_tricks.as_strided(np.zeros(2 * 20 * 44, np.float16), (2, 20, 2, 16), strides)
            odd[...] = arrays[array]
            arrays[array] = odd
            check_rows(arrays[0], *arrays)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scores_of_strided_values_and_weights(dtype):
    """With and without tensor cores, including gradients."""
    query, key, value = (draw(2, 40, 2, 16, seed=seed) for seed in range(3))
    weight, a = draw(2, 32, dtype=dtype) / dtype(6), np.full(2, 0.5, dtype)
    for larger in LARGER.values():
        for wide in (32, 40, 35):
            strided, options = within(value, *larger), {"dt_proj": within(weight, 3, wide), "A": a}
            found, expected = (dma.key_scores(strided, **options, backend=name) for name in ("emulator", "numpy"))
            assert np.abs(found - expected).max() < 1e-5
            if wide == 32:
                continue
            options |= {"window": 9}
            out, lse = dma.dynamic_mask_attention(query, key, strided, **options, return_lse=True, backend="numpy")
            found, expected = (dynamic_mask_attention_backward(out, query, key, strided, out, lse, **options,
                                                               needs=("value", "dt_proj"), backend=name)
                               for name in ("emulator", "numpy"))
            for name in ("value", "dt_proj"):
                ours, other = (getattr(x, name).astype("f4") for x in (found, expected))
                assert np.abs(ours - other).max() < 1e-2 * max(1, np.abs(other).max())


def test_tiles_that_begin_inside_the_heads_of_a_query():
    """Tiles of 16 rows begin and end between the 7 heads of a query."""
    query, scores = draw(1, 5, 7, 16), draw(1, 1, 700, dtype=np.float32)
    for mask in (dma.IntervalMask.causal(700), dma.IntervalMask.sliding_window(700, 600)):
        check_rows(query, query, *(draw(1, 700, 1, 16, seed=seed) for seed in (1, 2)), mask=mask, bias=scores)


@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_a_last_position_that_begins_a_chunk(tiles):
    """Lists of ``tiles`` tiles are made together, and their last query is at key 2048, the first of a chunk."""
    shift, length = 2049 - 64 * tiles, 64 * tiles + 20
    query, key = draw(1, length, 1, 8), draw(1, shift + length, 1, 8)
    check_rows(query, query, key, key, mask=dma.IntervalMask.sliding_window(shift + length, 64))


def test_a_key_that_only_the_last_word_of_queries_sees():
    query, key, value = (draw(1, n, 1, 16, seed=seed) for seed, n in enumerate((120, 200, 200)))
    mask = np.zeros((1, 1, 120, 200), bool)
    mask[..., 5] = mask[0, 0, 110, 150] = True
    assert check_rows(np.ones_like(query), query, key, value, mask=mask).value[0, 150].any()


@pytest.mark.parametrize("first", [True, False])
def test_a_mask_with_causality_and_without(first):
    """Lists kept on a mask are identified by causality too."""
    stop = np.random.default_rng(0).integers(0, 400, 300).astype(np.int32)
    mask = dma.IntervalMask(np.full(300, -5, np.int32), stop)
    arrays = [draw(1, 300, 1, 16, seed=seed) for seed in range(3)]
    for causal in (first, not first):
        check_rows(arrays[0], *arrays, mask=mask, causal=causal)
