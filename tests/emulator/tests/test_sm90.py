"""The Hopper forward (kernels/sm90) on the CPU emulator: the grid, tests of tests/gpu/test_sm90.py, and orders of
threads and blocks. The emulator has twins of Hopper's instructions, and watches every access."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import backends
from cupy_dma.backends.cuda.attention import sm90
from tests import emulator
from tests.emulator.tests.test_forward import ORDERS, bits
from tests.gpu import test_sm90
from tests.gpu.sm90_tiles import TILES
from tests.oracle import cases, schedule_cases, varlen_cases

everything = test_sm90.everything

GRID = {  # by tile: cases that change the kernel, and its masks
    "192x96": ("float16-D40", "bfloat16-D64", "heads-4/2-causal", "lengths-33x129-none",
               "lengths-129x33-top_w", "lengths-1x70-causal", "mask-top_w_padding", "mask-documents", "mask-global",
               "causal-and-padding", "bias-key_per_head-none", "softcap-key", "softcap-40.0-key", "softcap-60.0-none",
               "layout-every_other", "window-1"),
    "128x128": ("float16-D128", "mask-dense_per_head", "causal-and-dense", "dense-mask-1gq1", "heads-6/2-top_w",
                "dense-both-per_head+padding+dense=b1qk+dense=1hq1-1hqk", "dense-sizes-8/2-130x96-D8",
                "dense-columns-shared"),
    "192x64x2": ("bfloat16-D128",),
    "192x128": ("bfloat16-D64", "heads-4/2-causal"),
    "128x32": ("bfloat16-D256",),
    "128x64": ("float16-D128", "dense-sizes-2/1-3x70-D128"),
    "192x64x6": ("heads-4/2-top_w",),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Tensors on the CPU go to the emulated GPU."""
    monkeypatch.setattr(backends, "_FOR_CPU", "emulator")
    with emulator.hopper_gpu() as runtime:
        yield runtime


@pytest.fixture
def device():
    return "cpu"


@pytest.mark.parametrize(("tile", "name"), [(tile, name) for tile, names in GRID.items() for name in names])
def test_forward_grid(tile, name, everything):
    served, case = everything(*TILES[tile]), next(c for c in cases.CASES if c.name == name)
    cases.check(case, *cases.run(case, backend="emulator"))
    assert served


@pytest.mark.parametrize(("tile", "name"), [
    ("192x96", "bias-key-none"), ("192x96", "tail-window"), ("128x64x6", "causal-and-window"), ("192x64", "long-top_w"),
    ("192x64", "long-global")])
def test_packed_sequences(tile, name, everything):
    served = everything(*TILES[tile])
    case = next(c for c in varlen_cases.CASES + varlen_cases.LONG if c.name == name)
    varlen_cases.check(case, *varlen_cases.run(case, backend="emulator"))
    assert served


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_without_tma(mask, everything, monkeypatch):
    served, case = everything(*TILES["128x128"]), cases.Case(f"gathered-{mask}", mask=mask, head_dim=64)
    monkeypatch.setattr(sm90, "_maps", lambda call, block: None)
    monkeypatch.setattr(sm90, "queries_map", lambda query, queries, heads: None)
    cases.check(case, *cases.run(case, backend="emulator"))
    assert served


# ---- tests of tests/gpu/test_sm90.py ----
@pytest.mark.parametrize(("slope", "softcap", "masked", "tile"), [
    (0.4, 0.0, True, "192x96"), (3.0, 0.0, False, "192x96"), (3.0, 2.0, True, "192x96"), (0.4, 0.0, False, "128x128")])
def test_logits_that_rise_and_fall(slope, softcap, masked, tile, everything, torch, device):
    test_sm90.test_logits_that_rise_and_fall(slope, softcap, masked, tile, everything, torch, device)


@pytest.mark.parametrize("largest", [0.2, 0.45, 3.0])
def test_softcaps_of_small_and_large_products(largest, everything, torch, device):
    test_sm90.test_softcaps_of_small_and_large_products(largest, True, everything, torch, device)


@pytest.mark.parametrize(("masked", "tile"), [(True, "192x96"), (False, "128x128x4")])
def test_softcaps_of_products_that_change(masked, tile, everything, torch, device):
    test_sm90.test_softcaps_of_products_that_change(masked, tile, everything, torch, device)


@pytest.mark.parametrize(("masked", "tile"), [(True, "192x96"), (False, "128x128x4")])
def test_softcaps_of_values_near_the_largest(masked, tile, gpu, everything, torch, device):
    gpu.most_writes = 2  # a CTA makes a second pass
    test_sm90.test_softcaps_of_values_near_the_largest(masked, tile, everything, torch, device)


@pytest.mark.parametrize(("masked", "tile"), [(False, "192x128"), (True, "192x96")])
def test_heads_that_do_not_fit_into_l2(masked, tile, everything, torch, device, monkeypatch):
    test_sm90.test_heads_that_do_not_fit_into_l2(masked, tile, everything, torch, monkeypatch, device, (6, 3),
                                                 (1, 2, 5), 500, split_on=8)


@pytest.mark.parametrize(("biased", "tile"), [(True, "192x96"), (False, "128x64x4")])
def test_lists_of_every_length(biased, tile, gpu, everything, torch, device):
    gpu.most_writes = 2  # some values are not finite: a CTA makes a second pass
    test_sm90.test_lists_of_every_length(biased, tile, everything, torch, device, every=2)


@pytest.mark.parametrize(("masked", "biased"), [(True, False), (False, True)])
def test_keys_that_follow_each_other(masked, biased, everything, torch, device, monkeypatch):
    test_sm90.test_keys_that_follow_each_other(masked, biased, "128x64", everything, torch, monkeypatch, device,
                                                      345)


def test_a_dense_bias_of_short_blocks(everything, torch, device):
    """Shared memory is poison at the beginning of every block."""
    test_sm90.test_a_dense_bias_of_short_blocks(64, everything, lambda: None, torch, device)


@pytest.mark.parametrize(("name", "tile"), [
    (name, "128x128" if name == "dense bias" else "192x96") for name in schedule_cases.CASES])
def test_the_same_bits_whatever_the_schedule(name, tile, gpu, everything, torch, device):
    gpu.most_writes = 2 if "finite" in name else 1
    test_sm90.test_the_same_bits_however_tiles_are_dealt_out(name, tile, everything, torch, device, [(2, 1)],
                                                                    (1, 5), 303)


@pytest.mark.parametrize(("name", "tile"), [
    ("none", "192x128"), ("causal", "128x128"), ("key bias", "128x64"), ("lists", "192x64x2"),
    ("short lists", "192x96"), ("values that are not finite", "192x96"), ("lists of all tiles", "192x96"),
    ("dense bias", "128x128"), ("sequences", "192x96")])
def test_tiles_split_along_their_keys(name, tile, gpu, everything, torch, device):
    gpu.most_writes = 2 if "finite" in name else 1
    counts = {"lists": (7, 60), "causal": (7, 60), "key bias": (60,), "dense bias": (60,)}.get(name, (7,))
    test_sm90.test_tiles_split_up_along_their_keys(name, tile, everything, torch, device, [(2, 1)], counts, 303)


@pytest.mark.parametrize(("name", "tile"), [
    ("none", "192x128"), ("lists", "192x96"), ("short lists", "192x64x2"), ("lists of all tiles", "192x96"),
    ("sequences", "192x96")])
def test_a_last_wave_of_short_tiles(name, tile, everything, torch, device):
    test_sm90.test_a_last_round_of_lower_tiles(name, tile, everything, torch, device, [(2, 1)], (3, 6, 10), 303)


def test_short_tiles_of_the_last_queries(everything, torch, device):
    test_sm90.test_short_tail_tiles_of_the_last_queries("192x96", 10, everything, torch, device)


@pytest.mark.parametrize(("tile", "name"), [
    *(("192x96", name) for name in (
        "float16-D40", "bfloat16-D64", "lengths-33x129-none", "lengths-129x33-top_w", "mask-top_w_padding",
        "mask-global", "bias-key_per_head-none", "softcap-40.0-key", "softcap-60.0-none", "layout-every_other",
        "window-1")),
    ("128x128", "heads-6/2-top_w"), ("128x32", "bfloat16-D256"), ("128x64", "float16-D128")])
def test_forward_grid_with_splits(tile, name, everything):
    case = next(c for c in cases.CASES if c.name == name)
    everything(*TILES[tile])
    with schedule_cases.num_sms(31, split=True) as splits:
        cases.check(case, *cases.run(case, backend="emulator"))
    assert len(splits) == 1 and splits[0] > 1


@pytest.mark.parametrize(("biased", "num_sms", "tile"), [
    (True, 3, "192x96"), (False, 2, "128x64x4")])
def test_splits_of_lists_of_every_length(biased, num_sms, tile, gpu, everything, torch, device):
    gpu.most_writes = 2  # some values are not finite: a CTA makes a second pass
    test_sm90.test_splits_of_lists_of_every_length(biased, num_sms, tile, everything, torch, device, every=4)


@pytest.mark.parametrize(("slope", "softcap", "tile"), [
    (0.05, 0.0, "192x96"), (3.0, 2.0, "128x64x6"), (-0.4, 0.0, "128x128")])
def test_splits_of_logits_that_rise_and_fall(slope, softcap, tile, gpu, everything, torch, device):
    gpu.most_writes = 2
    test_sm90.test_splits_of_logits_that_rise_and_fall(slope, tile, everything, torch, device, softcap)


def test_values_that_are_not_finite_in_splits(gpu, everything, torch, device):
    gpu.most_writes = 2
    test_sm90.test_nonfinite_values_reach_only_queries_that_see_them(
        "lists", "192x96", everything, torch, device, (31,), 300, split=True)


@pytest.mark.parametrize(("kind", "tile"), [("lists", "192x96"), ("causal", "192x128"), ("bits and bias", "128x128")])
def test_nonfinite_values_reach_only_queries_that_see_them(kind, tile, gpu, everything, torch, device):
    gpu.most_writes = 2  # a CTA makes a second pass
    test_sm90.test_nonfinite_values_reach_only_queries_that_see_them(
        kind, tile, everything, torch, device, (1, 3) if kind == "lists" else (3,), 300 if kind == "lists" else 220)


# ---- orders ----
def some_calls():
    """A few calls with whole and partial blocks, successive tiles, and both kinds of copies."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 330, heads, 64)).astype(np.float16) for heads in (4, 2, 2))
    scores = rng.standard_normal((1, 2, 330)).astype(np.float32)
    lists = dma.IntervalMask.top_w(scores, 150)
    return [*dma.attention(q, k, v, mask=lists, bias=scores, return_lse=True),
            *dma.attention(q, k, v, causal=True, softcap=5.0, return_lse=True)]


@pytest.mark.parametrize("tile", ["192x96", "192x64x6"])
def test_the_order_of_threads_and_blocks_changes_no_bit(tile, everything):
    everything(*TILES[tile])
    expected = some_calls()
    for order in ORDERS:
        with emulator.hopper_gpu(order=order):
            assert all(np.array_equal(bits(ours), bits(others)) for ours, others in zip(some_calls(), expected))
