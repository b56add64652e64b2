"""The Hopper forward (kernels/sm90) on the CPU emulator: the grid, tests of tests/gpu/test_sm90.py, and orders of
threads and blocks. The emulator has twins of Hopper's instructions, and watches every access."""
import inspect
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import backends
from cupy_dma.backends.cuda.attention import sm90
from tests import emulator
from tests.emulator.tests.test_forward import ORDERS, check_bits
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
def of_gpu(test: Any, names: str, *cases: tuple[Any, ...], writes: int = 1, **fixed: Any) -> Any:
    """A test of tests/gpu/test_sm90.py with ``cases`` of these arguments. ``writes``: 2 where a CTA may make a second
    pass, because some values are not finite."""
    takes = inspect.signature(test).parameters

    @pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))
    def run(case: tuple[Any, ...], gpu: Any, everything: Any, torch: Any, device: str, monkeypatch: Any) -> None:
        given = fixed | dict(zip(names.split(), case))
        gpu.most_writes = given.pop("writes", writes)
        fixtures = {"everything": everything, "torch": torch, "device": device, "monkeypatch": monkeypatch,
                    "poison": lambda: None}  # shared memory is poison at the beginning of every block
        test(**given, **{name: x for name, x in fixtures.items() if name in takes})

    return run


test_logits_that_rise_and_fall = of_gpu(
    test_sm90.test_logits_that_rise_and_fall, "slope softcap masked tile", (0.4, 0.0, True, "192x96"),
    (3.0, 0.0, False, "192x96"), (3.0, 2.0, True, "192x96"), (0.4, 0.0, False, "128x128"))
test_softcaps_of_small_and_large_products = of_gpu(
    test_sm90.test_softcaps_of_small_and_large_products, "largest", (0.2,), (0.45,), (3.0,), masked=True)
test_softcaps_of_products_that_change = of_gpu(
    test_sm90.test_softcaps_of_products_that_change, "masked tile", (True, "192x96"), (False, "128x128x4"))
test_softcaps_of_values_near_the_largest = of_gpu(
    test_sm90.test_softcaps_of_values_near_the_largest, "masked tile", (True, "192x96"), (False, "128x128x4"), writes=2)
test_heads_that_do_not_fit_into_l2 = of_gpu(
    test_sm90.test_heads_that_do_not_fit_into_l2, "masked tile", (False, "192x128"), (True, "192x96"), heads=(6, 3),
    sm_counts=(1, 2, 5), length=500, split_on=8)
test_lists_of_every_length = of_gpu(
    test_sm90.test_lists_of_every_length, "biased tile", (True, "192x96"), (False, "128x64x4"), every=2, writes=2)
test_keys_that_follow_each_other = of_gpu(
    test_sm90.test_keys_that_follow_each_other, "masked biased", (True, False), (False, True), tile="128x64",
    length=345)
test_a_dense_bias_of_short_blocks = of_gpu(test_sm90.test_a_dense_bias_of_short_blocks, "head_dim", (64,))
test_the_same_bits_whatever_the_schedule = of_gpu(
    test_sm90.test_the_same_bits_however_tiles_are_dealt_out, "name tile writes",
    *((name, "128x128" if name == "dense bias" else "192x96", 1 + ("finite" in name)) for name in schedule_cases.CASES),
    heads=[(2, 1)], sm_counts=(1, 5), length=303)
test_tiles_split_along_their_keys = of_gpu(
    test_sm90.test_tiles_split_up_along_their_keys, "name tile sm_counts writes",
    ("none", "192x128", (7,), 1), ("causal", "128x128", (7, 60), 1), ("key bias", "128x64", (60,), 1),
    ("lists", "192x64x2", (7, 60), 1), ("short lists", "192x96", (7,), 1),
    ("values that are not finite", "192x96", (7,), 2), ("lists of all tiles", "192x96", (7,), 1),
    ("dense bias", "128x128", (60,), 1), ("sequences", "192x96", (7,), 1), heads=[(2, 1)], length=303)
test_a_last_wave_of_short_tiles = of_gpu(
    test_sm90.test_a_last_round_of_lower_tiles, "name tile", ("none", "192x128"), ("lists", "192x96"),
    ("short lists", "192x64x2"), ("lists of all tiles", "192x96"), ("sequences", "192x96"), heads=[(2, 1)],
    sm_counts=(3, 6, 10), length=303)
test_short_tiles_of_the_last_queries = of_gpu(
    test_sm90.test_short_tail_tiles_of_the_last_queries, "tile sms", ("192x96", 10))
test_splits_of_lists_of_every_length = of_gpu(
    test_sm90.test_splits_of_lists_of_every_length, "biased sms tile", (True, 3, "192x96"), (False, 2, "128x64x4"),
    every=4, writes=2)
test_splits_of_logits_that_rise_and_fall = of_gpu(
    test_sm90.test_splits_of_logits_that_rise_and_fall, "slope softcap tile", (0.05, 0.0, "192x96"),
    (3.0, 2.0, "128x64x6"), (-0.4, 0.0, "128x128"), writes=2)
test_nonfinite_values_reach_only_queries_that_see_them = of_gpu(
    test_sm90.test_nonfinite_values_reach_only_queries_that_see_them, "kind tile sm_counts length split",
    ("lists", "192x96", (1, 3), 300, False), ("causal", "192x128", (3,), 220, False),
    ("bits and bias", "128x128", (3,), 220, False), ("lists", "192x96", (31,), 300, True), writes=2)


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
            check_bits(some_calls(), expected)
