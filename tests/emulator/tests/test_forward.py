"""Every portable kernel on the CPU emulator against the oracle, and in different orders of threads and blocks.

The emulator watches every access (tests/emulator), so a race or an out-of-bounds read fails these tests even if the
numbers are right. ``CUPY_DMA_EMULATOR_BUILD`` chooses another build (``make test-sanitize``: ``address``).
"""
import contextlib
import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.cuda.attention import sm90, sm90_costs, sm90_schedule, sm90_tiles
from cupy_dma.backends.cuda.lists import intervals
from cupy_dma.backends.cuda.runtime import warmup
from cupy_dma.backends.cuda.runtime.configs import ListConfig
from tests import emulator
from tests.emulator import Order
from tests.oracle import bad_rows, cases, reference, score_cases, selection_cases
from tests.unit.test_selection import problems

FORWARD = [c for c in cases.CASES if c.dtype in ("float16", "bfloat16", "float32")]
ORDERS = [Order("backward", "backward"), Order("random", "random", 1), Order("random", "random", 2)]


# ---- attention ----
@pytest.mark.feature("cuda forward", "attention", "every case", but=("delay-", "float64-D"))
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward_grid(case):
    cases.check(case, *cases.run(case, backend="emulator"), tf32=True)


@pytest.mark.parametrize("bias", ["none", "key", "key_per_head"])
@pytest.mark.parametrize("mask", ["none", "causal", "top_w", "global"])
def test_many_blocks_of_keys(mask, bias):
    """More than 32 blocks of keys (a group of summaries) and several tiles."""
    case = cases.Case(f"long-{mask}-{bias}", dtype="float16", batch=1, query_length=150, key_length=2200, mask=mask,
                      window=300, bias=bias, head_dim=24, heads=4, kv_heads=2)
    cases.check(case, *cases.run(case, backend="emulator"), tf32=True)


@pytest.mark.parametrize(("lq", "lk"), [(64, 64), (100, 128)])
def test_no_masked_block(lq, lk):
    """Only whole blocks and no bias, so kernels run without the barriers of masked blocks and biases."""
    case = cases.Case(f"whole-{lq}x{lk}", mask="none", bias="none", query_length=lq, key_length=lk)
    cases.check(case, *cases.run(case, backend="emulator"), tf32=True)


@pytest.mark.feature("cuda forward", "attention", "a NaN")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("kind", ["causal", "top_w", "window", "dense"])
def test_a_bad_row_reaches_only_the_queries_that_see_it(name, bad, kind):
    bad_rows.check(kind, name, bad, backend="emulator")


@pytest.mark.feature("cuda backward", "attention", "a NaN")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.finfo(np.float32).max])
@pytest.mark.parametrize("kind", ["causal", "top_w"])
def test_a_bad_row_of_float32(bad, kind):
    """Bad values include the largest float32, which TF32 rounds to infinity."""
    for name in ("key", "value"):
        bad_rows.check(kind, name, bad, backend="emulator", dtype="float32")
        dirty, clean, mask, sees = bad_rows.problem(kind, name, bad, "float32")
        grads = []
        for x in (dirty, clean):
            results = dma.attention(*x.values(), mask=mask, return_lse=True, backend="emulator")
            grads.append(dma.backward.attention_backward(clean["query"], *x.values(), *results, mask=mask,
                                                         backend="emulator").query)
        assert np.array_equal(grads[0][0, ~sees, 0], grads[1][0, ~sees, 0])


@pytest.mark.parametrize("shape", [(1, 2, 90, 100), (1, 2, 1, 100)])
def test_minus_infinity_in_a_bias_hides(shape):
    """Queries whose biases are all -inf have no visible keys; NaN reaches only its own queries."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 2, 16)).astype(np.float16) for n in (90, 100))
    bias = np.where(rng.random(shape) < 0.5, rng.standard_normal(shape), -np.inf).astype(np.float32)
    bias[0, 0, 7 % shape[2]] = -np.inf
    out, lse = dma.attention(q, k, k, bias=bias, return_lse=True, backend="emulator")
    ref, ref_lse = reference.attention(q, k, k, None, bias)
    assert np.abs(out - ref).max() < 2e-3
    assert np.array_equal(np.isneginf(lse), np.isneginf(ref_lse))
    assert np.isneginf(lse[0, 0, 7]) and not out[0, 7, 0].any()
    bias[0, 1, 5 % shape[2], 3] = np.nan
    spoiled = dma.attention(q, k, k, bias=bias, backend="emulator")
    bad = np.isnan(spoiled).any(axis=(0, 3))
    assert bad[5, 1] and not bad[:, 0].any() and (bad[:, 1].sum() == 1 or shape[2] == 1)


# ---- selection ----
AWKWARD = ["iid", "equal", "increasing", "decreasing", "ties", "special"]
LENGTHS_AND_WINDOWS = [(1, 1), (1023, 1), (1025, 7), (1500, 400), (2100, 1030), (3000, 130),
                       (1500, (1, 2000)), (2100, (1030, 64))]


@pytest.mark.parametrize(("kind", "length", "window", "counted"), [
    (kind, *lengths, counted) for i, kind in enumerate(AWKWARD) for j, lengths in enumerate(LENGTHS_AND_WINDOWS)
    for counted in (False, True) if kind in ("iid", "special") or (i + j // 2) % 2 == counted
    or lengths == (2100, 1030)])
def test_selection_in_both_ways(kind, length, window, counted):
    """Each case runs half of the options, so that every option meets every kind and every length."""
    first = (AWKWARD.index(kind) + LENGTHS_AND_WINDOWS.index((length, window))) % 2
    with selection_cases.counting(counted):
        for options in selection_cases.options_of(length)[first::2]:
            selection_cases.check(selection_cases.awkward_scores(kind, 2, length), window, backend="emulator",
                                       **options)


@pytest.mark.parametrize("window", [1, 1023, 1024, 1030, 2100])
def test_selection_of_equal_scores(window):
    """In three chunks. Equal scores select a sliding window, except where one key or all later keys are better or
    worse, a key is missing, or a second document begins."""
    length, places = 2200, (0, 1024, 2100)
    scores = np.ones((1, 1 + 4 * len(places), length), np.float32)
    for head, (at, score) in enumerate(itertools.product(places, (0.5, 2.0)), start=1):
        scores[0, 2 * head - 1, at] = scores[0, 2 * head, at:] = score

    check = functools.partial(selection_cases.check, window=window, backend="emulator")
    with selection_cases.counting(False):
        check(scores)
        for at in (1, 1024, 1200):
            check(scores[:, :1], padding=(np.arange(length) != at)[None])
            check(scores[:, :1], documents=(np.arange(length) >= at)[None].astype(np.int32))


def test_a_document_that_begins_within_a_chunk():
    """Its keys compete only with each other, however high earlier scores are."""
    scores = selection_cases.awkward_scores("decreasing", 1, 2600)
    with selection_cases.counting(False):
        for at in (700, 1024, 1500, 2300):
            documents = (np.arange(2600) >= at)[None].astype(np.int32)
            selection_cases.check(scores, 40, backend="emulator", documents=documents)


@pytest.mark.feature("cuda forward", "Scores and selection", "IntervalMask.top_w", "a window per kv head")
@given(problems(max_length=40))
@settings(max_examples=25, deadline=None)
def test_selection_is_the_definition(problem):
    selection_cases.check_definition(problem, backend="emulator")


# ---- key scores ----
# Every type with every shape, and each of them with both forms.
SCORE_CASES = [(dtype, ("linear", "exp")[(i + j) % 2], shape) for j, shape in enumerate([
    (2, 33, 1, 64), (1, 40, 8, 128), (2, 37, 3, 33), (1, 35, 20, 64), (1, 5, 2, 1), (1, 0, 2, 8), (1, 37, 3, 40),
    (2, 130, 2, 24)]) for i, dtype in enumerate(("float16", "bfloat16", "float32"))]


@pytest.mark.feature("cuda forward", "Scores and selection", "key_scores")
@pytest.mark.parametrize(("dtype", "form", "shape"), SCORE_CASES)
def test_key_scores(dtype, form, shape):
    """Tensor cores need weights of the values' type; here float32 values have weights of another type."""
    weights = "float32" if form == "exp" else "float16" if dtype == "float32" else dtype
    score_cases.check(shape, dtype, form, weights, backend="emulator")


# ---- orders ----
def forward_chain():
    """Scores, selection, lists and attention, over two chunks of the selection."""
    rng, options = np.random.default_rng(3), {"backend": "emulator"}
    n, lq = 1100, 60
    v, w, a, _ = score_cases.problem((1, n, 2, 16), "bfloat16")
    k, q = (rng.standard_normal((1, m, h, 16)).astype(numpy_dtype("bfloat16")) for m, h in ((n, 2), (lq, 4)))
    scores = dma.key_scores(v, w, a, **options)
    mask = dma.IntervalMask.top_w(scores, 70, **options)
    everything = dma.IntervalMask.top_w(scores, 70, keys="global", **options)
    return [scores, mask.stop, *dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True, **options),
            *dma.attention(q, k, v, mask=everything, bias=scores, causal=True, return_lse=True, **options)]


@functools.cache
def in_order(make):
    """The arrays that ``make`` returns with threads and blocks in forward order."""
    return make()


def check_order(order, make):
    """``make`` returns the same bits in another order."""
    with emulator.using(order=order):
        found = make()
    check_bits(found, in_order(make))


def bits(array):
    return np.ascontiguousarray(array).view("u1")


def check_bits(found, expected):
    for ours, other in zip(found, expected, strict=True):
        assert ours is other is None or np.array_equal(bits(ours), bits(other))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_order_of_threads_and_blocks_changes_no_bit(order):
    check_order(order, forward_chain)


# ---- what is chosen for Hopper ----
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_warmup_compiles_what_usual_calls_load_on_hopper(device, monkeypatch, head_dim, group):
    """Checks only the choice of kernels, so those of ``kernels/sm90`` need not run."""
    asked, real = [], device.load

    class LaunchedOnHopper(Exception):
        pass

    def launch(*arguments, **options):
        raise LaunchedOnHopper

    def load(config, entry, index, shared_bytes=0):
        asked.append(config)
        return SimpleNamespace(launch=launch) if config.source.startswith("sm90/") else real(
            config, entry, index, shared_bytes)

    monkeypatch.setattr(device, "load", load)
    monkeypatch.setattr(device, "hopper", lambda index: True)
    monkeypatch.setattr(sm90, "rows_map", lambda rows, block: bytes(128))  # only a driver can make descriptors
    monkeypatch.setattr(sm90, "queries_map", lambda rows, queries, heads: bytes(128))
    query, key = (np.zeros((1, 600, heads, head_dim), np.float16) for heads in (2 * group, 2))
    scores = np.random.default_rng(0).standard_normal((1, 2, 600)).astype(np.float32)
    top_w = dma.IntervalMask.top_w(scores, 20)
    documents = dma.IntervalMask.documents(np.array([0, 30, 600], np.int32))
    for options in ({}, {"causal": True}, {"causal": True, "bias": scores}, {"mask": top_w, "bias": scores},
                    {"mask": documents, "bias": scores}):
        with contextlib.suppress(LaunchedOnHopper):
            dma.attention(query, key, key, **options, backend="emulator")
    history = np.zeros((1, 4000, 2, head_dim), np.float16)
    for causal in (False, True):
        with contextlib.suppress(LaunchedOnHopper):
            dma.attention(query[:, :20], history, history, causal=causal, backend="emulator")
    served = {config for config in asked if config.source.startswith("sm90/")}
    assert len(served) == 8 and len([config for config in served if getattr(config, "split", False)]) == 2
    assert served <= set(warmup.hopper_configs((head_dim,), ("float16",), (group,)))
    listed = {config for config in asked if isinstance(config, ListConfig)}
    configs = warmup.usual_configs((head_dim,), ("float16",), (group,), device.shared_limit)
    assert listed <= {*configs, *warmup.hopper_configs((head_dim,), ("float16",), (group,))}


@pytest.mark.parametrize(("batch", "keys", "masked", "pays"), [
    (1, 512, True, False), (2, 512, True, False), (3, 512, True, True), (1, 513, True, True), (1, 64, False, True)])
def test_masks_of_few_keys_and_tiles_are_left_to_the_portable_kernel(batch, keys, masked, pays):
    """From 16896 rows on, each of 132 SMs has a tile: 16 heads of more than two sequences of 512 queries."""
    call = SimpleNamespace(batch=batch, query_length=512, key_length=keys, heads=16)
    assert sm90._pays(call, SimpleNamespace(mask=masked or None, bits=False), 132) == pays


def hopper_facts(head_dim, length, heads, kv_heads, window=None, bias=False, softcap=0.0, causal=False, queries=0,
                 **more):
    scores = np.zeros((1, 1, length), np.float32)
    mask = dma.IntervalMask.top_w(scores, window) if window else None
    call = SimpleNamespace(head_dim=head_dim, softcap=softcap, query_length=queries or length, key_length=length,
                           heads=heads, kv_heads=kv_heads, batch=1)
    return sm90_tiles.schedule_key(call, SimpleNamespace(
        bits=False, bias_kind=int(bias), mask=mask, bias=scores if bias else None, count=0, causal=causal,
        tile_heads=heads // kv_heads))._replace(**more)


@pytest.mark.parametrize(("arguments", "shape"), [
    ((64, 32768, 16, 8, 1024, True), (192, 96)), ((64, 4096, 16, 8, 1024, True), (192, 96)),
    ((64, 32768, 2, 1, 1024, True), (192, 96)),
    ((64, 32768, 2, 1, 128, True), (192, 64)), ((64, 4096, 16, 8, 128, True), (192, 64)),
    ((64, 32768, 2, 1, 4096, True), (192, 96)), ((64, 32768, 16, 8, 1024, True, 30.0), (192, 96)),
    ((96, 32768, 2, 1, 1024, True), (192, 64)), ((128, 32768, 2, 1, 1024, True), (192, 64)),
    ((128, 16384, 2, 1, 1024, True), (128, 64)), ((128, 32768, 16, 8, 1024, True), (192, 64)),
    ((128, 4096, 16, 8, 1024, True), (192, 64)), ((64, 8192, 16, 8, None, True), (192, 96)),
    ((64, 8192, 16, 8), (192, 128)), ((64, 32768, 16, 8, None, True, 30.0), (192, 96)),
    ((64, 8192, 16, 8, None, False, 0.0, True), (192, 128)), ((128, 8192, 16, 8), (128, 128)),
    ((192, 4096, 2, 1, 1024), (128, 64)), ((256, 4096, 2, 1), (128, 32))])
def test_hopper_tiles_by_the_time_of_their_waves(arguments, shape):
    """The choice follows times measured on 132 SMs."""
    assert sm90_schedule.tile_shape(hopper_facts(*arguments), 132)[:2] == shape


@pytest.mark.parametrize(("head_dim", "window", "stages"), [
    (64, 192, 3), (64, 193, 2), (96, 128, 3), (128, 128, 3), (128, 129, 2), (192, 32, 2)])
def test_lists_of_few_keys_have_a_third_query_stage(head_dim, window, stages):
    facts = hopper_facts(head_dim, 32768, 16, 8, window, True)
    assert sm90_schedule.tile_shape(facts, 132).query_stages == stages


@pytest.mark.parametrize(("length", "causal", "blocks"), [
    (96, False, 3), (40 * 96, False, 120), (44 * 96, False, 132), (100 * 96, False, 132),
    (44 * 96, True, 44), (500 * 96, False, 132)])
def test_few_tiles_are_cut_by_rows(length, causal, blocks):
    facts = hopper_facts(64, length, 2, 1, causal=causal)
    assert next(sm90_schedule.candidates(facts, sm90_tiles.TILES["contiguous"][64][0], 132)).grid == blocks


@pytest.mark.parametrize(("arguments", "queries", "least", "most"), [
    ((64, 16384, 2, 1), 0, 2, 4), ((64, 8192, 16, 8), 0, 2, 4), ((128, 4096, 2, 1), 0, 2, 2),
    ((256, 1024, 4, 4), 0, 2, 4), ((256, 1024, 2, 1, 512), 0, 2, 8),
    # pieces of prompts
    ((128, 131072, 16, 8, 2048, True), 128, 4, 12), ((64, 65536, 16, 8), 128, 8, 16), ((64, 2**20, 2, 1), 128, 32, 48),
    ((128, 65536, 2, 1, 512, True), 128, 3, 8), ((128, 65536, 16, 8, 1024, True), 256, 2, 4),
    # under causality
    ((64, 65536, 16, 8, None, False, 0.0, True), 128, 8, 16), ((64, 2048, 2, 1, None, False, 0.0, True), 0, 2, 4),
    ((128, 65536, 16, 8, None, False, 0.0, True), 512, 2, 2),
    # one or two tiles
    ((128, 16384, 2, 1), 12, 16, 32), ((128, 65536, 2, 1), 12, 32, 96), ((128, 2**18, 2, 1), 12, 64, 96)])
def test_tiles_are_split_along_many_keys(arguments, queries, least, most):
    """The choice follows times measured on 132 SMs."""
    facts = hopper_facts(*arguments, queries=queries)
    tile = sm90_schedule.tile_shape(facts, 132)
    work = sm90_schedule.best_schedule(facts, tile, 132)
    full, rest = divmod(work.tiles * facts.sets, 132)
    assert least <= work.num_splits <= most and work.first == 132 * full
    assert work.grid == (132 if full else rest * work.num_splits)


@pytest.mark.parametrize(("arguments", "queries", "more"), [
    ((64, 32768, 16, 8, 1024, True), 0, {}), ((64, 8192, 16, 8, 1024, True), 0, {}),
    ((64, 8192, 16, 8, None, False, 0.0, True), 0, {}),  # several waves under causality
    ((64, 8192, 16, 8), 0, {"sequences": 3}), ((64, 65536, 16, 8), 256, {"listed": True}),  # keys of a query: unknown
    ((64, 6 * 192 * 11, 8, 4), 0, {})])  # 528 tiles: all waves are full
def test_tiles_are_not_split(arguments, queries, more):
    facts = hopper_facts(*arguments, queries=queries, **more)
    assert sm90_schedule.best_schedule(facts, sm90_schedule.tile_shape(facts, 132), 132).num_splits == 1


def test_every_schedule_that_is_considered_fits():
    """Splits have at least two blocks of keys and run in one wave; combine.cu reads four splits at a time."""
    found = 0
    for queries, window, causal in itertools.product((100, 1000, 5000, 30000), (None, 300, 2000), (False, True)):
        facts = hopper_facts(64, 32768, 2, 1, window, causal=causal and not window, queries=queries)
        for tile in sm90_tiles.tiles_of(facts.keys, 64):
            whole, *others = sm90_schedule.candidates(facts, tile, 132)
            for work in (work for work in others if work.num_splits > 1):
                rest = whole.tiles % 132
                assert (work.tiles, work.short_tiles) == (whole.tiles, 0) and rest * work.num_splits <= 132
                assert work.num_splits <= 4 or work.num_splits % 4 == 0
                assert 2 * tile.block_n * work.num_splits <= min(32768, facts.seen + 96)
                found += 1
    assert found > 50


@pytest.mark.parametrize(("length", "heads", "kv_heads", "head_dim", "swizzle_group"), [
    (8192, 16, 8, 128, 4),  # 6 would leave 2 for the second group
    (32768, 16, 8, 128, 1), (131072, 16, 8, 128, 1),
    (32768, 16, 8, 64, 3),
    (16384, 64, 8, 128, 12),  # kv heads are not divided: 4 sets of 2 heads share one
    (16384, 4, 2, 256, 2),  # one kv head has 256 tiles, fewer than two for each SM
    (2048, 16, 8, 128, 8)])
def test_swizzle_groups_of_causal_heads_are_equal(length, heads, kv_heads, head_dim, swizzle_group):
    facts = hopper_facts(head_dim, length, heads, kv_heads, causal=True, tile_heads=2,
                         group_sets=heads // kv_heads // 2)
    tile = sm90_tiles.HopperTile(128, 128, 2, 2, 2)
    assert sm90_schedule.best_schedule(facts, tile, 132).swizzle_group == swizzle_group


@pytest.mark.parametrize(("length", "heads", "kv_heads", "window", "tail", "waves"), [
    # 8 sets of 342 tiles, ten of each with fewer keys; in the last wave, the 18 longest of 96 tiles are cut by rows, 16
    # of them with all keys, and the next one has 10 / 11 of the keys
    (32768, 16, 8, 1024, 10, [(20, "whole", 1), (1, "whole", 10 / 11)]),
    (16384, 2, 1, 1024, 10, [(1, "whole", 1), (1, "slices", 1)]),  # 39 tiles of the second wave are cut
    (16384, 2, 1, 16384, 0, [(1, "whole", 1), (1, "slices", 1)]),  # every query may see all keys
    # 8 heads with so many keys do not fit into L2: the others include 170 tiles with fewer keys, on average half
    (32768, 32, 8, 16384, 0, [(41, "whole", 1 - 170 / 684), (1, "halves", 1)]),
    (9600, 2, 1, 1024, 10, [(1, "whole", 1)]),  # 100 tiles: 16 are cut, the others whole
])
def test_the_time_of_unsplit_tiles(length, heads, kv_heads, window, tail, waves):
    """Tiles of fewer keys are scheduled last."""
    facts, tile = hopper_facts(64, length, heads, kv_heads, window), sm90_tiles.WIDE_64
    work = next(sm90_schedule.candidates(facts, tile, 132))
    assert work.tail_tiles == tail
    costs, keys = sm90_costs.costs_of("intervals", 64, tile), min(length, window + 96)
    expected = costs.wave("launch", keys) + sum(n * costs.wave(name, int(part * keys)) for n, name, part in waves)
    assert sm90_schedule.microseconds(facts, tile, work, 132) == pytest.approx(1.03 * expected)


@pytest.mark.parametrize(("arguments", "batch", "before", "after"), [
    ((128, 2048, 16, 8, 1024), 16, 1.3, 1.06),  # 22 tiles of a set on 132 SMs: each always gets the same tile
    ((128, 2048, 16, 16, 1024), 16, 1.3, 1.06), ((128, 1024, 32, 8, 512), 32, 1.25, 1.04),  # 11 and 22
    ((64, 512, 12, 12, 256), 64, 1.3, 1.03),  # 3 tiles, only the last of which is shorter
    ((128, 4096, 16, 8, 2048), 8, 1.11, 1.08),
    ((128, 2048, 16, 8), 16, 1.11, 1.08)])  # number of keys per query unknown
def test_keys_are_balanced_across_ctas(arguments, batch, before, after):
    """The ratio of the most keys of a CTA to the mean, over all full waves."""
    facts = hopper_facts(*arguments)._replace(listed=True)
    facts = facts._replace(groups=batch * facts.groups)
    tile = sm90_tiles.tiles_of(facts.keys, arguments[0])[0]
    work, queries = next(sm90_schedule.candidates(facts, tile, 132)), tile.block_m // facts.tile_heads
    assert work.tail_tiles == 0

    def most(rotation):
        keys = np.zeros(132)
        for wave in range(work.tiles * facts.sets // 132):
            index = (wave * 132 + (np.arange(132) + wave * rotation) % 132) % work.tiles
            keys += np.minimum(facts.seen, queries * (work.tiles - 1 - index)) + queries
        return keys.max() / keys.mean()

    assert most(0) > before and most(work.rotation) < after


def test_costs_are_interpolated():
    """Interpolated between neighbouring measurements, or extrapolated from the first or last two; partial blocks count
    whole."""
    waves = [{"keys": n, "whole": us, "launch": 10.0} for n, us in ((130, 4.0), (1000, 12.0), (2000, 21.0))]
    costs = sm90_costs.Costs({"tile": [192, 64, 4, 3, 2, True], "waves": waves, "splits": [1.0, 0.1, 0.2]})
    for keys, us in ((192, 4.0), (129, 4.0), (1024, 12.0), (961, 12.0), (1536, 16.5), (4096, 39.0), (64, 2.769)):
        assert costs.wave("whole", keys) == pytest.approx(us, rel=1e-3), keys
    assert costs.wave("launch", 300) == 10.0
    assert costs.splits(4096, 3, 4) == pytest.approx(12.0 + 1.0 + 12 * 0.1 + 4 * 0.2)


def test_every_tile_in_use_has_costs():
    """Every tile that has several schedules."""
    for kind, head_dims in sm90_tiles.TILES.items():
        for head_dim, tile in ((d, tile) for d, tiles in head_dims.items() for tile in tiles if kind != "bits"):
            for d in (1, head_dim):
                costs = sm90_costs.costs_of(kind, d, tile)
                assert 0 < costs.wave("slices", 500) < costs.wave("whole", 500) < costs.wave("whole", 3000)
                assert tile.block_m == 128 or costs.wave("slices", 500) < costs.wave("short", 500)


@pytest.mark.parametrize(("arguments", "queries", "short", "grid"), [
    # 264 tiles of 96 queries are two waves, and 7424 queries remain
    ((64, 32768, 2, 1, 1024, True), 0, 116, 132), ((128, 32768, 2, 1, 512, True), 0, 116, 132),
    ((64, 65536, 16, 8, 512), 132 * 96 // 4 + 1000, 16, 132), ((64, 7500, 2, 1, 1024), 0, 118, 118),  # no other tiles
    ((64, 45 * 96, 6, 3, 1024), 0, 0, 132),  # of 132 tiles all waves would be full
    ((64, 61440, 12, 12, 8192), 0, 0, 132)])  # keys of all heads do not fit into L2
def test_the_last_wave_may_have_short_tiles(arguments, queries, short, grid):
    facts, tile = hopper_facts(*arguments, queries=queries), sm90_tiles.tiles_of("intervals", arguments[0])[0]
    work = sm90_schedule.best_schedule(facts, tile, 132)
    assert (work.short_tiles, work.grid) == (short, grid) and work.tail_tiles >= short


def test_short_tiles_cover_all_queries():
    """After full waves, and at most one per SM."""
    found = 0
    for heads, kv_heads, window, num_sms in itertools.product((2, 4, 12), (1, 2, 4), (None, 300), (132, 78)):
        for length in range(640, 40000, 640):
            facts = hopper_facts(64, length, heads * kv_heads, kv_heads, window, tile_heads=2, group_sets=heads // 2)
            for tile in sm90_tiles.tiles_of("intervals", 64):
                for work in filter(lambda work: work.short_tiles, sm90_schedule.candidates(facts, tile, num_sms)):
                    before = (work.tiles - work.short_tiles) * facts.sets
                    assert before % num_sms == 0 and work.short_tiles * facts.sets <= num_sms
                    assert 0 <= work.tiles * 96 - work.short_tiles * 32 - length < 64
                    found += 1
    assert found > 100


@pytest.mark.parametrize(("rows", "tiles", "warps"), [(1, 342, 2), (1, 264, 4), (8, 342, 1), (1, 1, 4)])
def test_few_tiles_are_listed_on_all_multiprocessors(rows, tiles, warps):
    assert intervals._tile_warps(rows, tiles, 132) == warps


def test_warmup_compiles_hopper_kernels_for_hopper_only():
    labels = {arch: [label for label, _ in warmup.jobs(arch)] for arch in ("sm_90a", "sm_80")}
    assert any(label.startswith("sm90/") for label in labels["sm_90a"])
    assert not any(label.startswith("sm90/") for label in labels["sm_80"])
