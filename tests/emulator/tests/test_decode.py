"""The decode kernels on the CPU emulator, against the oracle on the whole history, and in different thread orders."""
from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import Operand, describe, library_named, numpy_dtype
from cupy_dma.backends.cuda.attention import flash_decode, last_queries, split
from cupy_dma.backends.cuda.decode import step
from cupy_dma.backends.cuda.runtime.program import overridden
from cupy_dma.masks.windows import widest
from tests import emulator
from tests.emulator.tests.test_forward import ORDERS, check_bits, check_order
from tests.oracle import bad_rows, by_element, cases, reference, selection_cases
from tests.oracle.cache_cases import SCORES, History
from tests.unit.test_cache import check_invariants

SMALL = History(dtype="float16", head_dim=16, length=24, window=7)
# Two sets of query heads; each has two splits for one kv head and one for the other.
RAGGED = History(dtype="float16", head_dim=8, window=(66, 3), sinks=1, length=75, heads=24, scores="distinct")
# Both ways to load rows, one split and several, tiles of one and two operands, sets of tiles.
CASES = [
    History(dtype="bfloat16", head_dim=64, window=100, recent=3, length=112, batch=1, heads=2, kv_heads=1),
    History(dtype="float16", head_dim=16, value_dim=24, window=9, sinks=2, recent=3),
    History(dtype="float16", head_dim=5, value_dim=7, window=9, heads=3, kv_heads=1, softcap=3.0, scale=0.7),
    History(dtype="float32", head_dim=40, window=9, sinks=3, length=30),
    History(dtype="float32", head_dim=7, window=70, length=74, batch=1, recent=1, heads=10, kv_heads=1),
    History(dtype="bfloat16", head_dim=24, window=5, heads=12, kv_heads=1, length=20, batch=1),
    History(dtype="bfloat16", head_dim=136, value_dim=16, window=5, heads=20, kv_heads=2, length=12, batch=1),
    History(dtype="float16", head_dim=8, window=1, length=10, heads=36, kv_heads=1, batch=1),
    History(dtype="float32", head_dim=256, window=3, length=8, heads=9, kv_heads=1, batch=1, scale=-0.05),
    History(dtype="float16", head_dim=16, window=(9, 2), sinks=2, recent=3),
    History(dtype="bfloat16", head_dim=64, window=(5, 80), length=90, batch=1, scores="distinct"),
    History(dtype="float16", head_dim=16, window=9, bias_delay=4, scores="hidden"),
    History(dtype="bfloat16", head_dim=64, window=(90, 30), recent=3, length=100, batch=1, bias_delay=20),
    RAGGED,
    replace(RAGGED, value_dim=16, options={"storage": "int8"}),
    History(dtype="bfloat16", head_dim=136, value_dim=16, window=70, heads=20, kv_heads=2, length=80, batch=1,
            scores="distinct", options={"storage": "fp8"}),
]


def steps(history: History, cache=None, begin: int = 0, **options) -> tuple[np.ndarray, np.ndarray]:
    cache = cache or history.cache(backend="emulator")
    return history.run(cache, [1] * (history.length - begin), begin=begin, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("way", ["as it comes", "one split"])
def test_against_the_oracle(case, way, monkeypatch):
    if way != "as it comes" and case.heads in (36, 20, 3):
        pytest.skip("one way is enough")
    if way == "one split":
        if widest(case.window) > 50 and case is not RAGGED:
            pytest.skip("takes long, and several splits are the point")
        monkeypatch.setattr(split, "MAX_SPLITS", 1)
    cache = case.cache(backend="emulator")
    out, lse = steps(case, cache)
    case.check(out, lse, tf32=True)
    case.check_kept(cache)
    check_invariants(cache._state, case.length)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 0), (0, 1), (2, 3)])
@pytest.mark.parametrize("scores", [*SCORES, "infinite"])
def test_state_after_every_step(scores, sinks, recent, device):
    history = History(scores=scores, sinks=sinks, recent=recent, length=16, dtype="float16", head_dim=8, window=5)
    cache = history.cache(backend="emulator")
    for p in range(history.length):
        out, lse = history.run(cache, [1], begin=p)
        history.check_kept(cache, p)
        if scores not in ("nan", "all_nan", "infinite"):
            check_invariants(cache._state, p + 1)
        if scores != "infinite":
            history.check(out, lse, begin=p)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("history", [CASES[0], RAGGED], ids=str)
def test_the_order_of_threads_and_blocks_changes_no_bit(history, order):
    begin = history.length - 10
    expected = history.cache(backend="emulator")
    history.run(expected, [begin], np.asarray)
    with emulator.using(order=order):
        other = expected.clone()
        got = steps(history, other, begin)
    wanted = steps(history, expected, begin)
    check_bits(got, wanted)
    for name, array in expected.state_dict().items():
        assert np.asarray(array).tobytes() == np.asarray(other.state_dict()[name]).tobytes(), name


CLUSTERS = [
    History(dtype="bfloat16", head_dim=64, window=150, length=156, batch=1, recent=3),
    History(dtype="float16", head_dim=5, value_dim=7, window=9, heads=3, kv_heads=1, softcap=3.0, scale=0.7),
    History(dtype="float32", head_dim=40, window=139, sinks=3, length=146, batch=1, heads=10, kv_heads=1),
    History(dtype="float16", head_dim=64, window=9, length=20, options={"storage": "fp8"})]


@contextmanager
def in_clusters():
    """Every step whose heads have equal numbers of slots."""
    step.split.cache_clear()
    with mock.patch.object(step, "clusters_pay", lambda *_: True), emulator.hopper_gpu():
        yield
    step.split.cache_clear()


@pytest.mark.parametrize("case", CLUSTERS, ids=str)
def test_clusters_of_blocks(case):
    cache, begin = case.cache(backend="emulator"), case.length - 12
    case.run(cache, [begin], np.asarray)
    with in_clusters():
        case.check(*steps(case, cache, begin), tf32=True, begin=begin)
    case.check_kept(cache)
    kept = cache._state.workspace["decode step", case.heads, case.batch, 1, False]
    assert kept["num_splits"] == step.CLUSTER


@pytest.mark.parametrize("length", [2, 5])
def test_several_tokens_in_clusters(length):
    case = History(dtype="bfloat16", head_dim=64, window=70, length=80, heads=2, kv_heads=1)
    caches, begin = [case.cache(backend="emulator") for _ in range(2)], case.length - 10
    for cache in caches:
        case.run(cache, [begin], np.asarray)
    with in_clusters():
        found = case.run(caches[0], [length] * (10 // length), begin=begin)
        for ours, one in zip(found, steps(case, caches[1], begin)):
            assert ours.tobytes() == one.tobytes()
    case.check_kept(caches[0])


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("most", [1, 3])
def test_sequences_that_take_no_step_or_few(most, kind):
    """In one call, step by step; places without a token get zeros and -inf. The first call has no lse."""
    history = History(dtype="float16", head_dim=16, value_dim=24 if most > 1 else None, length=30, window=7, batch=3,
                      recent=2)
    cache, expected = history.cache(backend="emulator"), history.cache(backend="numpy")
    rng, taking = np.random.default_rng(0), np.array([0, 1, 1], kind)
    assert not cache.extend(*history.tokens(0, 1), lengths=taking)[0][0].any()
    expected.extend(*history.tokens(0, 1), lengths=taking)
    for p in range(0, history.length, most):
        tokens, lengths = history.tokens(p, p + most), rng.integers(0, most + 1, 3).astype(kind)
        out, lse = cache.extend(*tokens, lengths=lengths, return_lse=True)
        wanted, wanted_lse = expected.extend(*tokens, lengths=lengths, return_lse=True)
        np.testing.assert_allclose(lse, wanted_lse, atol=2e-3)
        assert np.abs(out.astype("f4") - wanted.astype("f4")).max() < 4e-3
        behind = np.arange(most) >= lengths[:, None]
        assert not out[behind].any() and np.isneginf(lse.swapaxes(1, 2)[behind]).all()
        for mine, theirs in zip((*cache.kept(), cache.length), (*expected.kept(), expected.length)):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("scores", ["equal", "ties", "nan"])
def test_the_oldest_of_equals_among_slots_of_several_steps(scores, monkeypatch):
    """A split has more slots than its block reads in a step, and the oldest of equal keys must be evicted."""
    monkeypatch.setattr(split, "MAX_SPLITS", 1)
    history = History(dtype="float16", head_dim=16, length=310, window=300, batch=1, heads=1, kv_heads=1, scores=scores)
    cache = history.cache(backend="emulator")
    out, lse = history.run(cache, [300] + [1] * 10)
    history.check_kept(cache)
    if scores != "nan":
        history.check(out, lse)


def test_update_is_a_step_without_queries():
    cache = SMALL.cache(backend="emulator")
    for p in range(SMALL.length - 4):
        cache.update(*SMALL.tokens(p, p + 1)[1:])
        SMALL.check_kept(cache, p)
    SMALL.check(*steps(SMALL, cache, SMALL.length - 4), begin=SMALL.length - 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_reaches_only_those_that_see_it(bad):
    """Non-finite rows of keys that leave the top w but stay in their slots for a while."""
    history = History(dtype="float16", head_dim=16, length=30, window=5, sinks=2, recent=3, scores="distinct", batch=1)
    clean = steps(history)[0]
    for where in (0, 9, 20):
        for name in ("key", "value"):
            spoiled = replace(history)
            spoiled.data[name][0, where, 0, 3] = bad
            out = steps(spoiled)[0]
            sees = history.mask[0, 0, :, where]
            assert np.array_equal(out[0, ~sees, :2], clean[0, ~sees, :2])
            assert np.array_equal(out[0, :, 2:], clean[0, :, 2:])
            if name == "value":
                assert not np.isfinite(out[0, sees, :2, 3].astype("f4")).any()


def test_a_step_allocates_nothing(monkeypatch):
    from tests.emulator.memory import WatchedLibrary

    cache = SMALL.cache(backend="emulator")
    out = np.zeros((2, 1, 4, 16), np.float16)
    cache.extend(*SMALL.tokens(0, 1), out=out)
    for name in ("empty", "full"):
        monkeypatch.setattr(WatchedLibrary, name, lambda *_: pytest.fail("memory was asked for"))
    for p in range(1, SMALL.length):
        assert cache.extend(*SMALL.tokens(p, p + 1), out=out) is out
    SMALL.check_kept(cache)
    assert np.abs(out - SMALL.oracle()[0][0][:, -1:]).max() <= 3e-3


def test_rows_of_any_strides():
    """Views that are not aligned to 16 bytes, and BHSD views."""
    history, far = SMALL, SMALL.cache(backend="emulator")
    for p in range(history.length):
        views = []
        for x in history.tokens(p, p + 1)[:3]:
            room = np.zeros((2, x.shape[2], 3, 19), x.dtype)[:, :, 1:2, 1:17].transpose(0, 2, 1, 3)
            room[...] = x
            views.append(room)
        score = np.zeros((5, 2, 2), np.float32).transpose(2, 1, 0)[:, :, 2:3]
        score[...] = history.tokens(p, p + 1)[3]
        out, lse = far.extend(*views, score, return_lse=True)
        history.check(out, lse, begin=p)


def test_parts_cover_the_slots():
    for rows in (1, 15, 63, 64, 1000, 1024, 5000, 70000):
        for pairs in (1, 8, 300):
            for group in (0, 1, 8, 9, 40):
                plan = step.split((pairs, 1, rows, 128), 128, group, "float16", 132, False)
                assert plan.split_size % split.STEP == 0 and plan.num_splits <= split.MAX_SPLITS and plan.cluster == 1
                assert (plan.num_splits - 1) * plan.split_size < rows <= plan.num_splits * plan.split_size
                assert plan.rows * plan.sets >= group and 1 <= plan.rows <= 16


@pytest.mark.parametrize("sizes", [(8192, 32, 32, 32), (69, 117), (1,), (64,) * 500, (100_000, 1), (40_000,) * 3])
@pytest.mark.parametrize(("sets", "resident"), [(1, 132 * 3), (3, 8)])
def test_splits_of_heads_with_rows_of_their_own(sizes, sets, resident):
    """No other split size ends sooner, except for sizes between the candidates."""
    def cost(size):
        ends = [0] * resident
        for n in sorted(sizes, reverse=True) * sets:
            for begin in range(0, n, size):
                first = ends.index(min(ends))
                ends[first] += split.BLOCK_STEPS + -(-min(size, n - begin) // 64)
        return max(ends)

    size = split.choose_split_size(sizes, sets, resident)
    assert size % split.STEP == 0 and -(-max(sizes) // size) <= split.MAX_SPLITS
    least = 64 * -(-max(sizes) // (64 * split.MAX_SPLITS))
    best = min(map(cost, range(least, max(sizes) + 64, 64)))
    assert best <= cost(size) <= 1.05 * best


def test_few_heads_take_clusters():
    for rows, pairs, group, expected in (
            (1024, 1, 2, True), (2048, 8, 2, False), (100, 1, 2, True), (16, 1, 2, False), (1024, 8, 2, True),
            (1024, 9, 2, False), (1024, 1, 17, False), (65536, 1, 2, False)):
        plan = step.split((1, pairs, rows, 64), 64, group, "float16", 132, True)
        assert (plan.cluster == plan.num_splits == step.CLUSTER) == expected == (plan.cluster > 1)
        assert plan.split_size % split.STEP == 0 and rows <= plan.num_splits * plan.split_size and plan.grid <= 132 * 4


# ---- few queries against a long history ----
NAMES = ("lengths-1x", "lengths-33x", "lengths-129x33-t", "mask-causal", "mask-window", "mask-top_w", "mask-global",
         "mask-none", "softcap-", "float16-D3", "bfloat16-D256", "bfloat16-D40", "float32-D64", "float32-D256",
         "float32-D7", "bias-key", "heads-8/1", "heads-4/2-top_w", "layout-bhsd", "window-1")
FEW = [c for c in cases.CASES if c.name.startswith(NAMES) and not any(
    part in c.name for part in ("dense", "per_head", "softcap-full"))]


@pytest.fixture
def always(calls_of):
    """The split-KV kernel for few queries runs every call that it supports."""
    with overridden(decode=True):
        yield calls_of(flash_decode, "attention")


@pytest.mark.parametrize(("queries", "keys", "group", "kv_heads", "masked", "pays"), [
    (64, 512, 1, 1, True, True), (65, 2**17, 1, 1, True, False), (64, 511, 1, 1, False, False),
    (16, 2**17, 1, 80, True, True), (17, 2**17, 1, 80, True, False), (65, 4096, 1, 1, False, True),
    (65, 4095, 1, 1, False, False), (264, 4096, 2, 1, False, True), (265, 4096, 2, 1, False, False),
    (66, 8192, 2, 8, False, True), (67, 2**17, 2, 8, False, False)])
def test_calls_that_use_split_kv(queries, keys, group, kv_heads, masked, pays):
    """Calls that use split-KV on 132 SMs."""
    mask = dma.IntervalMask.sliding_window(keys, 100) if masked else None
    call = SimpleNamespace(query_length=queries, key_length=keys, heads=group * kv_heads, kv_heads=kv_heads, batch=1,
                           mask=mask)
    assert flash_decode._pays(SimpleNamespace(num_sms=lambda index: 132), 0, call) == pays


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_queries_on_the_forward_grid(case, always):
    out, lse = cases.run(case, backend="emulator")
    cases.check(case, out, lse, tf32=True)
    assert always


@pytest.mark.parametrize(("queries", "heads", "keys"), [(1, 1, 2200), (4, 16, 1600)])
def test_more_splits_than_are_combined_at_a_time(queries, heads, keys, device, monkeypatch):
    """A thread combines 8 or 16 splits at a time, and there are up to 35."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, h, 16)).astype(np.float16) for n, h in (
        (queries, heads), (keys, 1), (keys, 1)))
    for sms in (5, 11, 132):
        monkeypatch.setattr(type(device), "num_sms", lambda runtime, index, sms=sms: sms)
        out, lse = dma.attention(q, k, v, causal=True, return_lse=True, backend="emulator")
        by_element.Problem(q, k, v, causal=True).check_attention(out, lse)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["causal", "top_w", "window"])
def test_few_queries_isolate_bad_rows(bad, kind, always):
    for dtype, name in itertools.product(("float16", "float32"), ("key", "value")):
        bad_rows.check(kind, name, bad, backend="emulator", dtype=dtype)
    assert always


def few_queries():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, h, 16)).astype(np.float16) for n, h in ((3, 4), (5000, 2), (5000, 2)))
    scores = np.round(rng.standard_normal((1, 2, 5000)).astype(np.float32), 2)
    return dma.dynamic_mask_attention(q, k, v, scores, window=300, return_lse=True, backend="emulator")


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
def test_few_queries_in_any_order(order, always):
    check_order(order, few_queries)


# ---- the last queries' selection ----
@pytest.mark.parametrize("kind", ["iid", "equal", "increasing", "decreasing", "ties", "special"])
@pytest.mark.parametrize(("length", "window", "queries"), [(2, 1, 1), (4096, 30, 1), (6000, 50, 4), (9000, 4500, 1),
                                                           (70, 3, 9), (9000, 20, 33)])
def test_selection_of_the_last_queries(kind, length, window, queries, device):
    """Keys in order, and the positions to which they are visible, against the heap of the NumPy backend."""
    scores = selection_cases.awkward_scores(kind, 2, length)
    stop = np.asarray(dma.IntervalMask.top_w(scores, window, backend="numpy").stop)[0]

    def attention(build, operand):  # named as a function that the emulator knows
        found = last_queries.select_last(build, operand, window, queries, 1)
        return found.list, found.interval

    (keys,), interval = emulator.BACKEND._run(attention, describe(scores, "scores"))
    first = length - queries
    for row in range(2):
        seen = np.flatnonzero((np.arange(length) <= first) & (stop[row] > first))
        assert np.array_equal(keys[row], [*seen, *range(first + 1, length)])
        if interval is not None:
            start, end = interval[0, row].T
            assert (start[:window] <= first).all() and np.array_equal(start[window:], keys[row, window:])
            assert np.array_equal(np.minimum(end, length), np.minimum(stop[row, keys[row]], length))


@pytest.mark.parametrize(("length", "window", "queries", "heads", "dtype"), [
    (700, 60, 1, 2, "float16"), (700, 60, 3, 10, "bfloat16"), (600, 90, 8, 4, "float32"),
    (530, 529, 1, 2, "float16")])
def test_last_queries_of_a_history(length, window, queries, heads, dtype, calls_of):
    rng, kind = np.random.default_rng(0), numpy_dtype(dtype)
    q, k, v = (rng.standard_normal((2, n, h, 16)).astype(kind)
               for n, h in ((queries, heads), (length, 2), (length, 2)))
    scores = rng.integers(-9, 9, (2, 2, length)).astype(np.float16)
    launched = calls_of(last_queries, "select_last")
    out, lse = dma.dynamic_mask_attention(q, k, v, scores, window=window, return_lse=True, backend="emulator")
    assert launched
    seen = reference.top_w_dense(scores, window, query_length=queries)
    reference.check_attention((out, lse), q, k, v, dense_mask=seen, bias=scores, tf32=dtype == "float32")


def test_last_queries_that_use_masks(monkeypatch):
    """These calls use masks: padding, global selection, masks per head, and histories no longer than the window."""
    monkeypatch.setattr(flash_decode, "_pays", lambda *_: True)
    monkeypatch.setattr(last_queries, "select_last", lambda *_: pytest.fail("these need a mask"))
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((1, 2, 4, 8)).astype(np.float16), rng.standard_normal((1, 40, 2, 8)).astype(np.float16)
    scores, by_head = (rng.standard_normal((1, h, 40)).astype(np.float32) for h in (2, 4))
    for s, options in ((scores, {"window": 39}), (scores, {"window": 5, "keys": "global"}), (by_head, {"window": 5}),
                       (scores, {"window": 5, "padding": np.arange(40)[None] > 3}),
                       (scores, {"window": 5, "documents": np.array([0, 20, 40])})):
        out = dma.dynamic_mask_attention(q, k, k, s, **options, backend="emulator")
        expected = dma.dynamic_mask_attention(*(x.astype("f4") for x in (q, k, k)), s, **options, backend="numpy")
        assert np.abs(out - expected).max() < 4e-3


# ---- the first step in a CUDA graph, and without memory ----
class Capturing(emulator.EmulatorRuntime):
    """A device that is capturing while ``graph`` is set: launches are recorded and not run."""

    graph: list | None = None

    def load(self, *arguments, **options):
        kernel = super().load(*arguments, **options)
        launch = kernel.launch

        def recorded(*arguments, **options):
            if self.graph is None:
                launch(*arguments, **options)
            else:
                self.graph.append(partial(launch, *arguments, **options))

        kernel.launch = recorded
        return kernel


@pytest.mark.parametrize(("heads", "window"), [(2, 70), (10, 70), (2, (70, 9))])
def test_the_first_step_is_captured(heads, window, monkeypatch):
    """Arrays made by a capture are garbage until its replay, so an eager step before that must not use them."""
    history = History(dtype="float16", head_dim=16, length=12, window=window, batch=1, heads=heads,
                      kv_heads=1 if window == 70 else 2)
    library, memory, filled = library_named("numpy"), [], []  # arrays of the graph
    with emulator.using(Capturing, build="plain") as device:
        def garbage(array):
            array[...] = 0x7F7F7F7F if array.dtype.kind == "i" else np.nan

        def in_capture(make, name):
            def made(*arguments):
                array = make(*arguments)
                if device.graph is not None:
                    (memory if name == "empty" else filled).append(array)
                    if name == "empty":
                        garbage(array)
                return array
            return made

        for name in ("empty", "full"):
            monkeypatch.setattr(library, name, in_capture(getattr(library, name), name), raising=False)
        monkeypatch.setattr(library, "is_capturing", lambda _: device.graph is not None, raising=False)
        cache = history.cache(backend="emulator")
        static, out = [x.copy() for x in history.tokens(0, 1)], np.empty((1, 1, heads, 16), np.float16)
        device.graph = graph = []
        cache.extend(*static, out=out)
        device.graph = None
        contents = [array.copy() for array in filled]  # a replay writes these
        for array in filled:
            garbage(array)
        assert len(graph) == 1 and cache.length == 0
        assert not any(isinstance(x, (Operand, dict)) for x in cache._state.workspace.values())
        first = history.run(cache, [1] * 4)
        for p in range(4, 8):
            for target, fresh in zip(static, history.tokens(p, p + 1)):
                target[...] = fresh
            for array, content in zip(filled, contents):
                array[...] = content
            graph[0]()
            first = np.concatenate((first[0], out), 1), first[1]
        rest = history.run(cache, [1] * 4, begin=8)
    (ref, plain), _ = history.oracle(tf32=True)
    reference.assert_matches_reference(np.concatenate((first[0], rest[0]), 1), ref, plain, np.float16)
    history.check_kept(cache)


def test_a_step_without_memory_changes_nothing(monkeypatch):
    history = History(dtype="float16", head_dim=16, length=12, window=70, batch=1, heads=10, kv_heads=1)
    library, cache = library_named("numpy"), history.cache(backend="emulator")
    history.run(cache, [10])
    before = cache.state_dict()
    for number in itertools.count():
        left = itertools.count(number, -1)

        def empty(*arguments, left=left):
            if next(left) == 0:
                raise MemoryError
            return type(library).empty(library, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(library, "empty", empty, raising=False)
            try:
                out, lse = history.run(cache, [1], begin=10)
                break
            except MemoryError:
                for name, x in cache.state_dict().items():
                    np.testing.assert_array_equal(x, before[name])
    assert number == 5  # out, lse, and three buffers between blocks
    history.check(out, lse, begin=10, tf32=True)
    history.check_kept(cache, 10)
