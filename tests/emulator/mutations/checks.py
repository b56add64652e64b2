"""Checks that detect the faults: tests of tests/emulator/tests, and dedicated probes (``OWN``)."""
import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import backends
from cupy_dma.arrays import library_named
from cupy_dma.backends.cuda.attention import sm90
from cupy_dma.backends.cuda.attention.sm90_splits import QuerySplits
from cupy_dma.backends.cuda.runtime.program import fresh, overridden
from cupy_dma.masks.interval import Hints
from tests import emulator
from tests.emulator.tests import (
    test_backward,
    test_bias_delay,
    test_chunks,
    test_decode,
    test_documents,
    test_forward,
    test_hidden_keys,
    test_key_plan,
    test_lifetimes,
    test_numerics,
    test_quantized_rows,
    test_several_tokens,
    test_sm90,
    test_sm90_backward,
    test_sm90_stored,
    test_strides_and_reuse,
    test_varlen,
)
from tests.gpu.sm90_tiles import TILES, taken
from tests.oracle import cases, schedule_cases


def later(check: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """A function that binds the arguments of a check."""
    return lambda *arguments, **options: lambda: check(*arguments, **options)


def named(name: str) -> cases.Case:
    return next(c for c in cases.CASES if c.name == name)


def elsewhere(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A test of another file, with arguments that it uses there, so sound kernels are known to pass."""
    names = [*inspect.signature(test).parameters]
    given, fixtures = dict(zip(names, arguments)), names[len(arguments):]
    assert fixtures in ([], ["monkeypatch"])
    for mark in (x for x in getattr(test, "pytestmark", ()) if x.name == "parametrize"):
        own = mark.args[0] if isinstance(mark.args[0], tuple) else (mark.args[0],)
        values = [value if len(own) > 1 else (value,) for value in mark.args[1]]
        assert tuple(given[name] for name in own) in values, f"{test.__name__} does not run with {arguments}"

    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(*arguments, *[patch] * len(fixtures))

    return check


def drawn(queries: int, keys: int, heads: tuple[int, int] = (2, 1), size: int = 64) -> Any:
    """A generator, and query, key and value of one batch entry."""
    rng = np.random.default_rng(0)
    lengths = (queries, heads[0]), (keys, heads[1]), (keys, heads[1])
    return rng, *(rng.standard_normal((1, n, h, size)).astype(np.float16) for n, h in lengths)


def agrees(rows: Sequence[np.ndarray], error: float, tile: str | None = None, around: Any = None, writes: int = 1,
           order: emulator.Order | None = None, **options: Any) -> None:
    """Run a call. Its output must agree with the NumPy backend's within ``error``, and be finite where that is.
    ``tile``: of the Hopper kernel; ``around``: a context for the call; ``writes``: how often a result may be
    written."""
    with contextlib.ExitStack() as stack:
        if tile is not None:
            gpu = stack.enter_context(emulator.hopper_gpu(order=order or emulator.Order()))
            gpu.most_writes = writes
            stack.enter_context(taken(*TILES[tile]))
        stack.enter_context(around or contextlib.nullcontext())
        found = dma.attention(*rows, **options, return_lse=True, backend="emulator")
    expected = dma.attention(*(x.astype("f4") for x in rows), **options, return_lse=True, backend="numpy")
    for ours, theirs, bound in zip(found, expected, (error, 1e-4)):
        finite = np.isfinite(theirs)
        bound *= max(1.0, np.abs(theirs[finite]).max()) if ours is found[1] else 1.0
        assert np.array_equal(np.isfinite(ours.astype(theirs.dtype)), finite)
        assert np.abs(ours[finite] - theirs[finite]).max() < bound


def of_sm90(test: Callable[..., None], *case: Any) -> Callable[[], None]:
    """A test of test_sm90.py that ``of_gpu`` has made, with one of its cases."""
    assert case in test.pytestmark[0].args[1]

    def check() -> None:
        torch = pytest.importorskip("torch")
        with (contextlib.ExitStack() as stack, emulator.hopper_gpu() as gpu, pytest.MonkeyPatch.context() as patch,
              mock.patch.object(backends, "_FOR_CPU", "emulator"),
              mock.patch.object(sm90, "attention", side_effect=sm90.attention) as attention):

            def everything(*tile: Any) -> Any:
                stack.enter_context(taken(*tile))
                return attention.call_args_list

            test(case, gpu, everything, torch, "cpu", patch)

    return check


def grid(name: str) -> tuple[Any, ...]:
    return test_forward.test_forward_grid, named(name)


def delay(kernels: str, name: str) -> tuple[Any, ...]:
    return test_bias_delay.test_attention, kernels, next(
        c for k, c in test_bias_delay.CALLS if k == kernels and c.name == name)


@later
def bounds(pages: int) -> None:
    with emulator.using() as device:
        test_varlen.test_bounds_that_a_program_makes(("int32", "int64", "int32"), True, pages, device)


def several(case: int) -> tuple[Any, ...]:
    return (test_several_tokens.test_bits_are_those_of_tokens_one_by_one, test_several_tokens.CASES[case], 8)


def slots(case: int, length: int) -> tuple[Any, ...]:
    found = next(m for m in test_several_tokens.test_slots.pytestmark if m.args[0] == "case").args[1][case]
    return test_several_tokens.test_slots, found, length, True


def last_queries() -> None:
    test_decode.test_last_queries_of_a_history(6000, 60, 4, 4, "float16", lambda *_: True)


@later
def sm90_forward(tile: str, kind: str, head_dim: int = 64, **options: Any) -> None:
    """Several successive tiles, the last one cut by rows, with queries and outputs through TMA. ``lists`` have full and
    partial blocks; TMA also loads the keys of ``causal``, and consecutive ones of ``dense`` masks."""
    rng, *rows = drawn(500, 500, (4, 2), head_dim)
    scores = rng.standard_normal((1, 2, 500)).astype(np.float32)
    more: dict[str, Any] = {"causal": {"causal": True}, "lists": {"bias": scores}}.get(kind, {}) | options
    more["mask"] = {"causal": lambda: None, "lists": lambda: dma.IntervalMask.top_w(scores, 150),
                    "window": lambda: dma.IntervalMask.sliding_window(500, 150),
                    "dense": lambda: rng.random((1, 1, 500, 500)) < 0.5}[kind]()
    agrees(rows, 6e-3, tile, schedule_cases.num_sms(5), order=emulator.Order("random", "random", 1), **more)


def cut_tiles() -> None:
    """Tiles cut by rows: a CTA gets none, and in the others a consumer without rows runs first, which takes no turns
    with the one that has some. Queries that come by TMA and others."""
    _, *rows = drawn(130, 900)
    for around in (contextlib.nullcontext(), mock.patch.object(sm90, "queries_map", lambda *_: None)):
        with around:
            agrees(rows, 6e-3, "128x128", schedule_cases.num_sms(6), order=emulator.Order("backward", "backward"))


@later
def queries_without_tma(check: Callable[[], None]) -> None:
    with mock.patch.object(sm90, "queries_map", lambda *_: None):
        check()


@later
def sm90_splits(kind: str) -> None:
    """Tiles split along their keys, after whole waves and without any; some queries see only keys of some splits."""
    rng, q, k, v = drawn(100, 900, (4, 2))
    scores = rng.standard_normal((1, 2, 900)).astype(np.float32)
    options: dict[str, Any] = {"mask": None, "bias": 3 * np.sort(scores)}
    if kind == "lists":
        options["mask"] = dma.IntervalMask.top_w(scores, 600)
    elif kind == "non-finite":
        v[:, ::100] = np.inf
        options = {"mask": dma.IntervalMask.sliding_window(900, 30)}
    elif kind == "nothing seen":  # by the last queries
        start, stop = np.zeros((1, 1, 900), np.int32), np.full((1, 1, 900), 850, np.int32)
        stop[..., 800:] = 0
        options["mask"] = dma.IntervalMask._make(library_named("numpy"), start, stop, Hints(bound=(800, 0)))
    for num_sms, count in ((3, 3), (19, 4)):
        with schedule_cases.num_sms(num_sms, split=True) as splits:
            agrees((q, k, v), 6e-3, "192x64x6", writes=2, **options)
        assert splits == [count]


@later
def sm90_grid(tile: str, name: str) -> None:
    with emulator.hopper_gpu(), taken(*TILES[tile]):
        elsewhere(*grid(name))()


@later
def few_queries(name: str) -> None:
    with overridden(decode=True):
        elsewhere(test_decode.test_few_queries_on_the_forward_grid, named(name), True)()


@later
def on_hopper(check: Callable[[], None]) -> None:
    with emulator.hopper_gpu(), overridden(hopper=True):
        check()


@later
def sm90_backward(num_sms: int = 1, order: emulator.Order | None = None, **options: Any) -> None:
    """Gradients of ``test_sm90_backward`` by one CTA that processes all tiles, or by several; in two passes by
    default."""
    options = {"deterministic": True} | options
    with hopper_in_random_order(order), schedule_cases.num_sms(num_sms):
        found = test_sm90_backward.gradients("emulator", **options)
    test_sm90_backward.check(found, **options)


@later
def sm90_backward_splits(count: int, steps: int, **options: Any) -> None:
    """Query splits, some of which begin within a head."""
    with fresh(query_splits=QuerySplits(count, steps)):
        sm90_backward(num_sms=2, **options)()


@later
def sm90_backward_runs(keys: slice, start: int, stop: int) -> None:
    """400 keys in their own order; queries ``start`` to ``stop`` see ``keys``, and all queries see the other keys."""
    runs = np.zeros((2, 1, 1, 400), np.int32)
    runs[1] = 400
    runs[..., keys] = np.array([start, stop])[:, None, None, None]
    sm90_backward(length=400, window=0, mask=dma.IntervalMask(*runs))()


@later
def sm90_stored(lists: int = 0, **options: Any) -> None:
    """Gradients of ``test_sm90_backward`` from stored dS, for the given number of lists at a time."""
    with test_sm90_stored.stored(lists=lists, sms=2, order=emulator.Order("random", "random", 1)):
        found = test_sm90_backward.gradients("emulator", **options)
    test_sm90_backward.check(found, **options)


@later
def in_random_order(check: Callable[[], None]) -> None:
    with hopper_in_random_order():
        check()


@contextlib.contextmanager
def hopper_in_random_order(order: emulator.Order | None = None) -> Iterator[None]:
    with emulator.hopper_gpu(order=order or emulator.Order("random", "random", 1)), test_sm90_backward.in_one_pass():
        yield


def bad_super_tile() -> None:
    """NaN in the queries of later super-tiles (320 queries each) does not reach keys invisible to them, although the
    third step of 128 queries begins in the first super-tile and ends in the second."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((1, 1, 700)).astype(np.float32)
    mask = dma.IntervalMask.top_w(scores, 300)
    with hopper_in_random_order():
        clean, found = test_sm90_backward.clean_and_spoiled(
            {"q": (slice(320, None), np.nan), "dout": (slice(320, None), np.inf)}, window=0, mask=mask,
            deterministic=True)
    unseen = ~mask.to_dense(700)[0, 0, 320:].any(0)  # by the bad queries
    assert unseen.any() and np.array_equal(clean.key[:, unseen], found.key[:, unseen])
    assert np.array_equal(clean.value[:, unseen], found.value[:, unseen])


def sm90_backward_causality_and_intervals() -> None:
    case = named("causal-and-padding")
    with hopper_in_random_order():
        found = cases.run_backward(case, backend="emulator", with_dlse=True, deterministic=True)
    cases.check_backward(case, found, with_dlse=True)


OWN: dict[str, Callable[[], None]] = {
    "sm90[lists]": sm90_forward("192x96", "lists"),
    "sm90[lists, D128]": sm90_forward("192x64x2", "lists", head_dim=128),
    "sm90[window, D40]": sm90_forward("128x64x6", "window", head_dim=40),
    "sm90[causal]": sm90_forward("192x128", "causal"),
    "sm90[causal, softcap]": sm90_forward("192x96", "causal", softcap=2.0),
    "sm90[dense]": sm90_forward("128x128", "dense"),
    "sm90[cut tiles]": cut_tiles,
    "sm90[lists, queries without TMA]": queries_without_tma(sm90_forward("192x96", "lists")),
    **{f"sm90[splits, {kind}]": sm90_splits(kind) for kind in ("none", "lists", "non-finite", "nothing seen")},
    "sm90 backward[lists]": sm90_backward(),
    "sm90 backward[lists, D256]": sm90_backward(head_dim=256, num_sms=2, length=500),
    "sm90 backward[causal, D192]": sm90_backward(head_dim=192, num_sms=2, window=0, causal=True, length=300),
    "sm90 backward[super-tiles]": sm90_backward(window=300),
    "sm90 backward[dense mask]": sm90_backward(window=0, dense="bands", length=300, queries=2300, heads=(4, 2)),
    "sm90 backward[causal, D128]": sm90_backward(num_sms=2, window=0, causal=True, head_dim=128, length=500),
    "sm90 backward[one tile]": sm90_backward(order=emulator.Order("backward", "backward"), window=0, length=100),
    "sm90 backward[10 steps]": sm90_backward(window=0, length=384, queries=256, heads=(5, 1)),
    "sm90 backward[11 steps]": sm90_backward(window=0, length=384, queries=128, heads=(11, 1)),
    "sm90 backward[first query masked]": sm90_backward_runs(slice(64), 1, 400),
    "sm90 backward[last query masked]": sm90_backward_runs(slice(128), 0, 255),
    "sm90 backward[empty tiles]": sm90_backward_runs(slice(128, None), 0, 0),
    "sm90 backward[splits]": sm90_backward_splits(
        5, 5, window=0, causal=True, length=300, queries=900, heads=(3, 1), bias=np.ones((1, 1, 300), np.float32)),
    "sm90 stored": sm90_stored(heads=(4, 2), length=500), "sm90 stored[3 heads]": sm90_stored(heads=(3, 1), length=501),
    "sm90 stored[chunks]": sm90_stored(lists=1, length=500),
    "sm90 backward[D40]": sm90_backward(window=0, length=200, head_dim=40),
    "sm90 backward[softcap]": sm90_backward(softcap=3.0),
    "sm90 backward[a bad super-tile]": bad_super_tile,
    "sm90 backward[causality and intervals]": sm90_backward_causality_and_intervals,
    "sm90 one pass[lists]": sm90_backward(num_sms=2, deterministic=False),
    "sm90 one pass[causal, D128]": sm90_backward(window=0, causal=True, head_dim=128, length=500, deterministic=False),
    "sm90 one pass[more keys than queries]": sm90_backward(window=0, causal=True, head_dim=128, length=180, queries=130,
                                                           deterministic=False),
    "test_forward_grid[Hopper, heads-6/2]": sm90_grid("128x128", "heads-6/2-top_w"),
    "last_queries": last_queries,
}

TESTS: dict[str, tuple[Any, ...]] = {  # a test of another file and its arguments
    "sm90 backward[biases that hide]": (test_hidden_keys.test_forward_and_backward, test_hidden_keys.KINDS[3]),
    "sm90 stored[unseen]": (test_sm90_stored.test_rows_and_keys_that_do_not_count_may_hold_anything,),
    "sm90 stored[a bad key]": (test_sm90_stored.test_a_bad_key_leaves_rows_that_see_nothing_zero,),
    "several": several(0), "several[sinks and recent]": several(1), "several[splits]": several(5),
    "several[recent]": several(12),
    "several[slots]": (test_several_tokens.test_more_slots_than_a_plan_keeps_in_registers,),
    "several[infinities]": (
        test_several_tokens.test_nonfinite_keys_reach_only_queries_that_see_them, "value", "float16"),
    "several[speculation]": (test_several_tokens.test_speculation, test_several_tokens.CASES[1]),
    "several[launches]": (test_several_tokens.test_sequences_with_fewer_tokens, 6),
    "slots": slots(0, 1), "slots[ragged]": slots(1, 4),
    **{f"codes[{name}{kind}]": (test_quantized_rows.test_codes_and_scales, test_quantized_rows.CASES[i], kind)
       for i, name in ((0, ""), (2, "float32 ")) for kind in ("int8", "fp8")},
    **{f"chunks[{name}]": (test_chunks.test_bits_are_those_of_array_code, test_chunks.CASES[i], "lengths")
       for i, name in enumerate(("sinks and recent", "windows", "biases", "recent", "gates", "ragged", "closed", "int8",
                                 "fp8", "8-bit gates"))},
    **{f"chunks[packed{kind}]": (test_chunks.test_bits_are_those_of_array_code, test_chunks.CASES[i], "packed")
       for kind, i in (("", 0), (" gates", 5), (" codes", 8))},
    "chunks[long]": (test_chunks.test_long_chunks, 40), "chunks[rows]": (test_chunks.test_long_chunks, 1500),
    **{f"decoding[{name}]": (test_decode.test_against_the_oracle, test_decode.CASES[i], "as it comes")
       for i, name in ((0, "several splits"), (1, "sinks and recent"), (6, "sets"), (9, "windows"), (11, "delay"),
                       (13, "ragged"))},
    "decoding[clusters]": (test_decode.test_clusters_of_blocks, test_decode.CLUSTERS[0]),
    **{f"test_forward_grid[{name}]": grid(name) for name in (
        "mask-none", "mask-window", "heads-4/2-top_w", "mask-per_batch", "float16-D3", "bfloat16-D40",
        "lengths-33x129-causal", "lengths-129x33-top_w", "lengths-300x300-causal", "lengths-300x300-top_w",
        "float32-D64", "float32-D4-causal", "mask-dense", "causal-and-dense", "dense-mask-1hqk",
        "dense-both-per_batch+dense=1gqk-bgqk")},
    **{f"test_backward_grid[{name}]": (test_backward.test_backward_grid, named(name)) for name in (
        "float32-D16", "float32-D40", "float32-dense-both-dense=11qk-1gqk", "mask-none", "lengths-129x33-causal",
        "mask-dense", "dense-both-dense=1hqk-bhqk", "dense-both-dense=11qk-1gqk", "dense-both-dense=b1q1-b1q1")},
    **{f"varlen[{name}]": (test_varlen.test_forward, test_varlen.named(name)) for name in (
        "bfloat16-none", "mask-window", "used-per_head", "long-per_head", "sixty-none", "pages-16-none")},
    **{f"varlen backward[{name}]": (test_varlen.test_backward, test_varlen.named(name)) for name in (
        "bfloat16-none", "supers")},
    **{f"test_first_key_and_end[{name}]": (test_documents.test_first_key_and_end, name) for name in (
        "a few", "most of them empty", "ids, chunks", "ids in a few words", "ids in columns", "one id, chunks")},
    "test_the_order_is_that_of_numpy": (test_lifetimes.test_the_order_is_that_of_numpy, 5000, 5000, "lognormal"),
    "key plan": (test_key_plan.test_tickets_cover_each_step_once, 5000, 5000, 3, 64, True, 0, "lognormal"),
    "key plan[nothing seen]": (test_key_plan.test_tickets_cover_each_step_once, 300, 300, 1, 64, True, 1, "nothing"),
    "key plan[one step]": (test_key_plan.test_tickets_cover_each_step_once, 300, 300, 1, 64, True, 1, "everything"),
    "key plan[any threads]": (test_key_plan.test_the_plan_of_any_threads,),
    "split tiles": (test_key_plan.test_gradients_of_split_tiles, *test_key_plan.SHAPES[0], True, "survivors"),
    "split tiles[D256]": (test_key_plan.test_those_of_other_shapes, 200, 230, 1, (2, 1), 256, 2, True, "survivors"),
    "split tiles[delay]": (test_key_plan.test_splits_that_a_bias_leaves_without_steps, True),
    "delay": delay("portable", "delay-65-top_w-bfloat16"),
    "delay[sequences]": (test_bias_delay.test_sequences, "portable", next(
        c for _, c in test_bias_delay.PACKED if c.name == "delay-30-top_w")),
    "delay[Hopper]": delay("Hopper, one pass", "delay-100-long-survivors-D64-0"),
    "delay[Hopper, lists]": delay("Hopper, two passes", "delay-100-long-top_w-D64-0"),
    "delay[Hopper, hidden]": (test_bias_delay.test_keys_that_whole_steps_do_not_see,),
    "delay[Hopper, softcap]": delay("Hopper, one pass", "delay-100-long-causal-D64-4"),
    "test_the_order_of_packed_sequences": (test_lifetimes.test_the_order_of_packed_sequences, "mixed"),
    "test_gradients_by_lifetimes[Hopper, two rows]": (test_lifetimes.test_gradients, True, False, "lognormal"),
    "test_gradients_by_lifetimes[Hopper]": (test_lifetimes.test_gradients_of_other_lengths, 200, 110, 128, True, True,
                                            "lognormal"),
    "test_many_blocks_of_keys[top_w]": (test_forward.test_many_blocks_of_keys, "top_w", "key"),
    "test_no_masked_block": (test_forward.test_no_masked_block, 64, 64),
    "test_a_bad_row[top_w]": (
        test_forward.test_a_bad_row_reaches_only_the_queries_that_see_it, "value", np.inf, "top_w"),
    **{f"test_selection[{name}]": (test_forward.test_selection_in_both_ways, kind, length, window, "counted" in name)
       for name, kind, length, window in (
           ("iid", "iid", 3000, 130), ("increasing", "increasing", 2100, 1030), ("ties", "ties", 2100, 1030),
           ("special", "special", 1500, 400), ("windows", "iid", 2100, (1030, 64)),
           ("few of special", "special", 1025, 7), ("counted", "ties", 2100, 1030),
           ("counted, padding", "iid", 3000, 130), ("counted, most of them", "increasing", 2100, 1030))},
    **{f"test_the_mask[{name}]": (test_documents.test_the_mask_is_that_of_numpy, documents, keys)
       for name, documents, keys in (("prefix", "a few", "prefix"), ("ids", "some ids", "global"),
                                     ("lengths", "empty at both ends", "global"), ("global", None, "global"))},
    "test_keys_behind_the_last_document": (test_documents.test_keys_behind_the_last_document, True),
    "test_wrong_lengths": (test_documents.test_wrong_lengths_on_a_device_read_nothing_else, (-5, 70, 300)),
    **{f"test_selection_of_equal_scores[{n}]": (test_forward.test_selection_of_equal_scores, n) for n in (1023, 1030)},
    "test_key_scores[heads 3, D 33]": (test_forward.test_key_scores, "bfloat16", "exp", (2, 37, 3, 33)),
    "test_key_scores[heads 20]": (test_forward.test_key_scores, "float16", "exp", (1, 35, 20, 64)),
    "test_key_scores[products]": (test_forward.test_key_scores, "float16", "linear", (1, 37, 3, 40)),
    "test_a_bad_row_of_float32": (test_forward.test_a_bad_row_of_float32, -np.finfo(np.float32).max, "top_w"),
    "test_dense_masks_with_gaps": (test_backward.test_dense_masks_with_gaps, None),
    "test_a_bad_row_behind_a_dense_mask": (
        test_backward.test_a_bad_row_reaches_no_gradient_behind_a_dense_mask, "key"),
    "test_super_tiles_of_dense_masks": (test_backward.test_super_tiles_of_dense_masks, "columns", 4),
    "test_super_tiles": (test_backward.test_super_tiles, "float16", 20, 400, 400),
    "test_super_tiles, more keys": (test_backward.test_super_tiles, "float16", 20, 370, 480),
    "test_key_scores_backward": (test_backward.test_key_scores_backward, "float16", "exp", (1, 35, 20, 64)),
    "test_low_biases": (test_numerics.test_low_biases, "portable", "float16", "key", "lowest", 0),
    "test_low_biases[Hopper, keys]": (test_numerics.test_low_biases, "hopper", "float16", "key", -1e30, 0),
    "test_low_biases[Hopper, dense]": (test_numerics.test_low_biases, "hopper", "bfloat16", "bfloat16", -1e10, 30),
    "test_low_biases[Hopper, dense rows]": (test_numerics.test_rows_of_low_biases_beside_others, "none", -1.2e9, 32),
    "test_low_biases[Hopper, splits]": (test_numerics.test_rows_of_low_biases_in_splits, "none", -1e20),
    "test_gradients_with_low_biases": (
        test_numerics.test_gradients_with_low_biases, "portable", "float16", "key", False, -1e9, 0.0),
    "test_gradients_with_low_biases[Hopper]": (
        test_numerics.test_gradients_with_low_biases, "hopper", "bfloat16", "key", True, -1e7, 0.0),
    **{f"test_softcaps_of_any_size[{name}]": (
        test_numerics.test_softcaps_of_any_size, "portable", "float16", 1.0, float(name)) for name in ("0.5", "1e5")},
    "test_a_small_scale": (test_numerics.test_a_small_scale_beside_a_large_softcap, "portable"),
    **{f"test_keys_behind{name}": (
        test_numerics.test_nothing_comes_from_keys_behind_the_last_query, kernel, "key", queries)
       for name, kernel, queries in (("", "portable", 4), ("[Hopper]", "hopper", 200),
                                     ("[Hopper, lists]", "hopper lists", 200))},
    "test_intervals": (test_strides_and_reuse.test_intervals_have_strides_of_their_own, 1),
    "test_a_bad_key": (test_backward.test_a_bad_key_reaches_the_query_gradients_that_see_it_only,),
    "test_dense_strides": (test_strides_and_reuse.test_dense_biases_have_strides_of_their_own,),
    "test_strides": (test_strides_and_reuse.test_every_array_has_strides_of_its_own, 1),
    "test_strided_scores": (test_strides_and_reuse.test_scores_of_strided_values_and_weights, np.float16),
    "test_tiles_inside_heads": (test_strides_and_reuse.test_tiles_that_begin_inside_the_heads_of_a_query,),
    "test_a_last_position_that_begins_a_chunk": (test_strides_and_reuse.test_a_last_position_that_begins_a_chunk, 2),
    "test_a_key_of_the_last_word": (test_strides_and_reuse.test_a_key_that_only_the_last_word_of_queries_sees,),
}
OF_SM90: dict[str, tuple[Any, ...]] = {
    "sm90[rising]": (test_sm90.test_logits_that_rise_and_fall, 0.4, 0.0, True, "192x96"),
    "sm90[softcap]": (test_sm90.test_softcaps_of_products_that_change, True, "192x96"),
    "sm90[softcap, whole tiles]": (test_sm90.test_softcaps_of_products_that_change, False, "128x128x4"),
    "sm90[softcap, large values]": (test_sm90.test_softcaps_of_values_near_the_largest, True, "192x96"),
    "sm90[heads that do not fit]": (test_sm90.test_heads_that_do_not_fit_into_l2, False, "192x128"),
    "sm90[lists that do not fit]": (test_sm90.test_heads_that_do_not_fit_into_l2, True, "192x96"),
    "sm90[non-finite]": (test_sm90.test_nonfinite_values_reach_only_queries_that_see_them, "lists", "192x96", (1, 3),
                         300, False),
    "sm90[short tiles]": (test_sm90.test_a_last_wave_of_short_tiles, "none", "192x128"),
    "sm90[short tiles of lists]": (test_sm90.test_a_last_wave_of_short_tiles, "lists", "192x96"),
}
IN_RANDOM_ORDER: dict[str, tuple[Any, ...]] = {  # the same for tests of the Hopper gradients
    "sm90 backward[blank rows]": (test_sm90_backward.test_rows_that_see_nothing_may_hold_anything, 64, True),
    "sm90 one pass[unseen keys]": (test_sm90_backward.test_keys_that_nobody_sees_may_hold_anything, False, False),
    "sm90 backward[softcap, vanished]": (
        test_sm90_backward.test_softcaps_of_small_and_vanishing_probabilities, 20.0, 60.0, True),
    "sm90 backward[a bad value]": (test_sm90_backward.test_a_bad_value_reaches_the_queries_that_see_it_only, True),
    "sm90 one pass[a bad value]": (test_sm90_backward.test_a_bad_value_reaches_the_queries_that_see_it_only, False),
    "sm90 one pass[a bad dout]": (test_sm90_backward.test_a_bad_row_reaches_the_keys_that_it_sees_only, "dout",
                                  "causal", {"head_dim": 64}, False),
    "sm90 backward[a bad query]": (test_sm90_backward.test_a_bad_row_reaches_the_keys_that_it_sees_only, "query",
                                   "lists", {"head_dim": 64}, True),
    "sm90 backward[bands]": (test_sm90_backward.test_tiles_in_bands, 2100, 13),
    "sm90 one pass[sequences]": (test_sm90_backward.test_a_bad_value_stays_in_its_sequence, False),
}

CHECKS: dict[str, Callable[[], None]] = {
    **OWN, **{name: elsewhere(*given) for name, given in TESTS.items()},
    **{name: of_sm90(*given) for name, given in OF_SM90.items()},
    **{name: in_random_order(elsewhere(*given)) for name, given in IN_RANDOM_ORDER.items()},
    **{f"{name}[Hopper]": on_hopper(elsewhere(*TESTS[name])) for name in ("test_intervals", "test_dense_strides")},
    **{f"few_queries[{name}]": few_queries(name) for name in ("mask-global_documents", "float16-D3")},
    "test_forward_grid[Hopper, dense]": sm90_grid("128x128", "dense-both-per_head+padding+dense=b1qk+dense=1hq1-1hqk"),
    "test_bounds": bounds(0), "test_bounds[pages]": bounds(3),
    "sm90 stored[40 blocks]": test_sm90_stored.many_blocks, "sm90 stored[batch]": test_sm90_stored.a_batch_of_lists,
}
