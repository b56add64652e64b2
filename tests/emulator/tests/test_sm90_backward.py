"""The Hopper gradients (kernels/sm90/backward_*.cu) on the CPU emulator: the grid, orders of threads and blocks, CTAs
that process several tiles, and values that must not influence gradients. Deterministic results take two passes, others
one."""
import functools
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.cuda.attention import sm90_backward, sm90_splits
from cupy_dma.backends.cuda.runtime.program import fresh
from cupy_dma.backward import attention_backward, varlen_attention_backward
from tests import emulator
from tests.emulator.tests.test_forward import ORDERS, bits, check_bits
from tests.oracle import by_element, cases, reference, schedule_cases, varlen_cases

GRID = ("float16-D64", "bfloat16-D128", "bfloat16-D40", "float16-D16", "bfloat16-D256", "mask-window",
        "mask-top_w_padding", "mask-padding", "mask-documents", "mask-global", "causal-and-padding", "heads-6/2-top_w",
        "heads-3/1-causal", "bias-key_shared-none", "bias-key-top_w", "softcap-none", "softcap-key", "softcap-40.0-key",
        "lengths-1x70-causal", "lengths-33x129-none", "lengths-129x33-top_w", "lengths-129x33-causal",
        "layout-every_other", "window-1")
DENSE = ("mask-dense", "causal-and-dense", "dense-mask-11qk", "dense-mask-1gq1", "dense-mask-bgqk",
         "dense-columns-key", "dense-columns-shared")
PORTABLE = ("float16-D3", "bias-full-none")
BY_HEAD = ("mask-per_head", "mask-dense_per_head", "bias-key_per_head-none")  # only keys and values differ
LISTED_STEPS = sm90_backward.LISTED_STEPS  # as measured
VARLEN = ("float16-causal", "bfloat16-none", "tail-none", "short-none", "heads-6/2-none", "causal-and-window",
          "causal-and-open", "supers", "supers-window", "D128")


@pytest.fixture(autouse=True)
def gpu():
    with emulator.hopper_gpu() as runtime, in_one_pass():
        yield runtime


def in_one_pass() -> Any:
    """Cases that run in one pass."""
    return schedule_cases.hopper_gradients(True)


@pytest.fixture
def served_query():
    with mock.patch.object(sm90_backward, "launch_dq", side_effect=sm90_backward.launch_dq) as launch:
        yield launch


@pytest.fixture
def served():
    with mock.patch.object(sm90_backward, "launch_dkv", side_effect=sm90_backward.launch_dkv) as launch:
        yield launch


def in_turn(names: str, values: Iterable[Any]) -> Any:
    """Parameters: values are alternately ``deterministic`` and not."""
    found = [(*(value if isinstance(value, tuple) else (value,)), i % 2 == 1) for i, value in enumerate(values)]
    return pytest.mark.parametrize((*names.split(), "deterministic"), found, ids=str)


def case_named(name: str) -> cases.Case:
    return next(c for c in cases.CASES if c.name == name)


def gradients(backend: str, length: int = 700, queries: int | None = None, window: int = 60, head_dim: int = 64,
              heads: tuple[int, int] = (2, 1), batch: int = 1, dtype: str = "float16",
              spoil: dict[str, tuple[Any, float]] | None = None, dense: str = "",
              needs: tuple[str, ...] = ("query", "key", "value", "bias"), **options: Any) -> Any:
    """Gradients under a mask of the best keys with their scores as bias; without a window, of ``options`` alone.
    ``spoil``: rows of ``q``, ``k``, ``v`` or ``dout``, and a number for them, for the backward pass."""
    rng = np.random.default_rng(0)
    queries = length if queries is None else queries
    q, dout, k, v = (rng.standard_normal((batch, n, h, head_dim)).astype(numpy_dtype(dtype)) for n, h in (
        (queries, heads[0]), (queries, heads[0]), (length, heads[1]), (length, heads[1])))
    scores = rng.standard_normal((1, heads[1], length)).astype(np.float32)
    if window:
        options |= {"mask": dma.IntervalMask.top_w(scores, window), "bias": scores}
    if dense:
        options |= {"mask": dense_mask(dense, heads[1], queries, length), "bias": scores}
    out, lse = dma.attention(q, k, v, **options, return_lse=True, backend="numpy")
    for name, (rows, number) in (spoil or {}).items():
        {"q": q, "k": k, "v": v, "dout": dout}[name][:, rows] = number
    if backend == "oracle":
        mask = options.get("mask")
        seen = mask.to_dense(queries) if isinstance(mask, dma.IntervalMask) else mask
        problem = by_element.Problem(q, k, v, seen, options.get("bias"), options.get("causal", False),
                                     softcap=options.get("softcap", 0.0))
        return {name: x for name, x in problem.gradients(dout, out).items() if name in needs}
    return attention_backward(dout, q, k, v, out, lse, **options, needs=needs, backend=backend)


def clean_and_spoiled(spoil: dict[str, tuple[Any, float]], **options: Any) -> list[Any]:
    return [gradients("emulator", spoil=bad, **options) for bad in (None, spoil)]


def check(found: Any, **options: Any) -> None:
    """Check each element of the gradients for these options of ``gradients``."""
    expected = gradients("oracle", **options)
    for name, ours in zip(found._fields, found):
        assert (ours is None) == (name not in expected)
        if ours is not None:
            expected[name].check(ours, f"d{name}")


def near(found: np.ndarray, expected: np.ndarray) -> None:
    """Whether arrays are equal up to the order of float32 sums before rounding to float16."""
    reference.check_norm(found, expected, 1e-3)


def dense_mask(kind: str, heads: int, queries: int, length: int) -> np.ndarray:
    rng, i, j = np.random.default_rng(2), np.arange(queries)[:, None], np.arange(length)
    masks = {"diagonal": i // 150 == j // 150, "causal": j + queries - length <= i, "full": i + j >= 0,
             "bands": (i // 200 % 3 == j // 100) & (rng.random((queries, length)) < 0.5),
             "random": rng.random((queries, length)) < 0.3, "few": (rng.random((queries, length)) < 0.01) & (i >= 130)}
    if kind == "top_w":
        scores = rng.standard_normal((1, heads, length)).astype(np.float32)
        return dma.IntervalMask.top_w(scores, 60).to_dense(queries)
    return masks[kind][None, None]


@pytest.mark.parametrize("name", DENSE)
def test_dense_masks(name, served, served_query):
    case = case_named(name)
    cases.check_backward(case, cases.run_backward(case, backend="emulator", with_dlse=True), with_dlse=True)
    assert served.called and served_query.called and served.call_args.args[-1] is None  # two passes


@pytest.mark.parametrize("options", [
    {"dense": "diagonal"}, {"dense": "causal", "length": 400, "head_dim": 128, "dtype": "bfloat16"},
    {"dense": "full", "length": 300, "head_dim": 96},
    {"dense": "random", "length": 260, "head_dim": 256, "heads": (3, 1)},
    {"dense": "top_w", "length": 400, "head_dim": 192, "heads": (6, 2)},
    {"dense": "top_w", "length": 1100, "heads": (4, 1), "head_dim": 16},
    {"dense": "few", "length": 450, "softcap": 3.0}, {"dense": "few", "length": 300, "queries": 1200},
    {"dense": "bands", "length": 300, "queries": 2300}, {"dense": "random", "length": 900, "queries": 70},
], ids=str)
def test_steps_of_dense_masks(options, served, served_query):
    """Tiles of one and of several super-tiles, some without visible pairs; other orders give the same bits."""
    options = {"window": 0, **options}
    with schedule_cases.num_sms(3):
        found = gradients("emulator", **options)
    check(found, **options)
    assert served.called and served_query.called
    with emulator.hopper_gpu(order=ORDERS[-1]), schedule_cases.num_sms(2):
        again = gradients("emulator", **options)
    check_bits(found, again)


def test_hidden_values_of_dense_masks_do_not_matter():
    """Invisible keys, and queries without visible keys; a non-finite value reaches only queries that see it."""
    options: dict[str, Any] = {"window": 0, "dense": "few", "length": 500}
    seen = dense_mask("few", 1, 500, 500)[0, 0]
    keys, rows = np.flatnonzero(~seen.any(0)), np.flatnonzero(~seen.any(1))
    assert len(keys) and len(rows) > 100

    clean, found = clean_and_spoiled({"k": (keys, np.nan), "v": (keys, np.inf), "q": (rows, np.nan),
                                      "dout": (rows, np.inf)}, **options)
    check_bits(clean, found)
    assert not found.query[:, rows].any() and not found.key[:, keys].any() and not found.value[:, keys].any()

    one = int(np.argmax(seen.sum(0)))
    found = gradients("emulator", spoil={"v": (one, np.inf)}, **options)
    assert np.array_equal(clean.query[:, ~seen[:, one]], found.query[:, ~seen[:, one]])
    assert not np.isfinite(found.query[:, seen[:, one]]).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", GRID)
def test_backward_grid(name, deterministic, served):
    case = case_named(name)
    found = cases.run_backward(case, backend="emulator", with_dlse=True, deterministic=deterministic)
    cases.check_backward(case, found, with_dlse=True)
    in_one_pass = not deterministic and case.head_dim <= 128
    assert bool(served.call_args.args[-1]) is in_one_pass


@pytest.mark.parametrize("name", PORTABLE + BY_HEAD)
def test_what_the_portable_kernel_does(name, served, served_query):
    case = case_named(name)
    cases.check_backward(case, cases.run_backward(case, backend="emulator", with_dlse=True), with_dlse=True)
    assert not served.called
    assert served_query.called == (name in BY_HEAD)


def test_packed_sequences_with_a_mask_of_each_head(served, served_query):
    case = next(c for c in varlen_cases.CASES if c.name == "causal-and-per_head")
    varlen_cases.check_backward(case, varlen_cases.run_backward(case, backend="emulator"))
    assert served_query.called and not served.called


@pytest.mark.parametrize("needs", [("query",), ("key",), ("value",), ("bias",), ("key", "value"), ("query", "bias")])
@pytest.mark.parametrize("window", [0, 60])
def test_only_requested_gradients(window, needs):
    """Single gradients have the same bits as when all are requested."""
    options = {"window": window, "deterministic": True}
    if not window:
        options |= {"causal": True, "bias": np.ones((1, 1, 700), np.float32)}
    everything, some = gradients("emulator", **options), gradients("emulator", needs=needs, **options)
    for name in everything._fields:
        assert (getattr(some, name) is None) == (name not in needs)
        if name in needs:
            assert np.array_equal(getattr(some, name), getattr(everything, name)), name


@pytest.mark.parametrize(("options", "tiles"), [
    ({}, 9), ({"head_dim": 128, "heads": (4, 2)}, 18), ({"window": 0, "dense": "top_w"}, 8)], ids=str)
def test_no_more_tiles_than_sms_are_left_to_the_portable_kernel(options, tiles, served, served_query):
    with fresh(one_pass=None, stored=False), mock.patch.object(sm90_backward, "MIN_TILES", 1.0):
        for sms in (tiles - 1, tiles):
            served.reset_mock()
            with schedule_cases.num_sms(sms):
                check(gradients("emulator", **options), **options)
            assert served.called == (sms < tiles) and served_query.called


@in_turn("options count steps", [
    ({"causal": True, "heads": (4, 1)}, 4, 12), ({"head_dim": 128, "heads": (2, 2)}, 3, 4),
    ({"batch": 2, "heads": (4, 2), "bias": (1, 1), "length": 300, "needs": ("query", "value", "bias")}, 3, 6),
    ({"causal": True, "length": 300, "queries": 900, "heads": (3, 1)}, 5, 5),
    ({"batch": 2, "heads": (4, 2), "bias": (2, 2), "length": 300, "needs": ("query", "bias")}, 3, 6),
    ({"length": 200, "queries": 1000, "head_dim": 192, "heads": (2, 1)}, 7, 5)])
def test_query_splits(options, count, steps, deterministic, served):
    """Some splits begin or end within a head, and some have no steps; dk, dv and dbias have the same bits in any
    order."""
    options = {"window": 0, "deterministic": deterministic, "bias": (1, options["heads"][1]), **options}
    bias = np.linspace(0, 1, options.get("length", 700), dtype=np.float32)
    options["bias"] = np.broadcast_to(bias, (*options["bias"], bias.size)).copy()
    splits = sm90_splits.QuerySplits(count, steps)
    with fresh(query_splits=splits):
        found = gradients("emulator", **options)
        with emulator.hopper_gpu(order=ORDERS[-1]), schedule_cases.num_sms(3):
            again = gradients("emulator", **options)
    check(found, **options)
    assert served.call_args.args[-2] == splits
    for name, x, y in zip(found._fields, found, again):
        assert name == "query" or x is y is None or np.array_equal(bits(x), bits(y)), name


def test_number_of_query_splits():
    """On 132 SMs, few tiles are split and many are not; every step belongs to a split."""
    few = sm90_splits._best_splits(2048, 2048, 3, 2, 128, 64, True, 132)
    assert few.count > 1 and few.count * few.steps >= 2 * 2048 // 64 > (few.count - 1) * few.steps
    assert sm90_splits._best_splits(1024, 1024, 8, 2, 128, 64, True, 132) == sm90_splits.QuerySplits(3, 11)
    for length, rows in ((16384, 8), (4096, 8), (128, 1)):
        assert sm90_splits._best_splits(length, length, rows, 1, 128, 64, True, 132) == sm90_splits.QuerySplits()


@pytest.mark.parametrize("options", [
    {"window": 0, "causal": True}, {"window": 0, "causal": True, "deterministic": True}, {"head_dim": 256}], ids=str)
def test_those_of_keys_in_order_and_of_wide_heads_are_not(options, served):
    with fresh(one_pass=None), mock.patch.object(sm90_backward, "MIN_TILES", 1.0):
        check(gradients("emulator", **options), **options)
    assert served.called


@pytest.mark.parametrize(("options", "least", "keys", "in_one_pass"), [
    ({}, 100.0, "KEYS_CONTIGUOUS", True), ({}, 0.0, "KEYS_LISTED", False),
    ({"window": 400}, 0.0, "KEYS_CONTIGUOUS", True), ({"deterministic": True}, 100.0, "KEYS_LISTED", False),
    ({"needs": ("key", "value")}, 100.0, "KEYS_LISTED", False),
    ({"window": 0, "causal": True}, 100.0, "KEYS_CONTIGUOUS", True)], ids=str)
def test_one_pass_where_lists_leave_out_little(options, least, keys, in_one_pass, served):
    """On one SM. A super-tile of 400 queries may see all of 700 keys, so there are no lists."""
    with fresh(one_pass=None), mock.patch.object(sm90_backward, "LISTED_STEPS", least):
        check(gradients("emulator", **options), **options)
    _, _, _, found, entries, *_, sums = served.call_args.args
    assert found == keys and (entries > 0) is (keys == "KEYS_LISTED")
    assert (sums is not None) is in_one_pass


@pytest.mark.parametrize(("batch", "heads", "head_dim", "queries", "keys", "window", "pays"), [
    (1, 2, 64, 2048, 2048, 256, False), (16, 2, 64, 2048, 2048, 256, True), (1, 16, 128, 1024, 1024, 256, False),
    (1, 16, 128, 2048, 2048, 256, True), (1, 16, 128, 2048, 2048, 1024, False), (1, 2, 64, 8192, 8192, 1024, True),
    (1, 2, 64, 8192, 8192, 4096, False), (1, 16, 128, 32768, 32768, 1024, True),
    (1, 16, 128, 128, 131072, 2048, True), (1, 16, 128, 4096, 1024, 256, False)])
def test_lists_by_the_pairs_that_they_leave_out(batch, heads, head_dim, queries, keys, window, pays):
    """As measured on 132 SMs; with more queries than keys, the first queries see no key."""
    mask = dma.IntervalMask.top_w(np.zeros((1, 1, keys), np.float32), window)
    own = SimpleNamespace(batch=batch, heads=heads, query_length=queries, key_length=keys,
                          query=SimpleNamespace(device=SimpleNamespace(index=0)))
    for sequences in (0, 3):
        with mock.patch.object(sm90_backward, "LISTED_STEPS", LISTED_STEPS):
            found = sm90_backward.lists_pay(SimpleNamespace(num_sms=lambda index: 132), SimpleNamespace(forward=own),
                                            SimpleNamespace(mask=mask, count=sequences))
        assert found is (pays or sequences > 0)


def test_one_pass_of_masks_without_a_bound(served):
    """Such masks have no lists per super-tile, whatever they hide."""
    mask = dma.IntervalMask.top_w(np.random.default_rng(1).standard_normal((1, 1, 700)).astype(np.float32), 60)
    options = {"window": 0, "mask": dma.IntervalMask(mask.start, mask.stop)}
    with fresh(one_pass=None):
        check(gradients("emulator", **options), **options)
    assert served.call_args.args[-1] is not None


@in_turn("name", VARLEN)
def test_packed_sequences(name, deterministic, served, gpu):
    gpu.most_writes = 2  # the forward writes twice if a value is not finite
    case = next(c for c in varlen_cases.CASES + varlen_cases.SUPERS if c.name == name)
    varlen_cases.check_backward(case, varlen_cases.run_backward(case, backend="emulator", deterministic=deterministic))
    assert bool(served.call_args.args[-1]) is not deterministic  # in one pass


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{"length": 900, "window": 300}, *(
    {"queries": queries, "length": length, "head_dim": head_dim, "window": 0, "causal": True,
     "bias": np.ones((1, 1, length), np.float32)}
    for queries, length, head_dim in ((130, 180, 128), (1000, 1010, 64)))],
    ids=["super-tiles", "D128", "D64"])
def test_steps_that_reach_beyond_their_tile(options, deterministic):
    """A step of 128 queries reaches into the next super-tile of 320, whose queries belong to another tile. In one pass,
    steps begin at a multiple of 64 queries, up to 63 before the first query that sees a key, which may need one more
    step."""
    options = options | {"deterministic": deterministic}
    check(gradients("emulator", **options), **options)


@pytest.mark.parametrize(("options", "num_sms", "deterministic"), [
    *((options, *rest) for i, options in enumerate([
        {"head_dim": 64}, {"head_dim": 128, "dtype": "bfloat16"}, {"head_dim": 96, "softcap": 3.0},
        {"window": 0, "causal": True, "length": 1500, "head_dim": 16}, {"window": 0, "causal": True, "head_dim": 128},
        {"window": 0, "length": 300, "queries": 1200, "head_dim": 40}, {"length": 500, "window": 200, "heads": (6, 2)},
        {"window": 0, "causal": True, "head_dim": 72, "softcap": 3.0}])
      for rest in ((1, i % 2 == 0), (3, i % 2 == 1))),
    ({"head_dim": 256, "length": 500, "heads": (3, 1)}, 3, False),
    ({"window": 0, "causal": True, "head_dim": 192, "length": 500, "softcap": 3.0}, 1, False),
    ({"window": 0, "length": 150, "head_dim": 136}, 1, False)], ids=str)
def test_tile_after_tile(options, num_sms, deterministic, served):
    """Few CTAs that process several tiles, short ones and some longer than LOOKAHEAD."""
    options = options | {"deterministic": deterministic}
    with schedule_cases.num_sms(num_sms):
        found = gradients("emulator", **options)
    check(found, **options)
    assert served.called


@pytest.mark.parametrize(("length", "num_sms"), [(1100, 30), (2100, 13), (2100, 90)])
def test_tiles_in_bands(length, num_sms):
    """Three heads with nine or seventeen tiles, in one group, or in two whose last has one head. Bands have two tiles,
    the last band one."""
    options = {"window": 0, "causal": True, "length": length, "head_dim": 16, "heads": (3, 3)}
    with schedule_cases.num_sms(num_sms):
        check(gradients("emulator", **options), **options)


@functools.cache
def in_order(**options: Any) -> Any:
    with schedule_cases.num_sms(2):
        return gradients("emulator", **options)


@pytest.mark.parametrize(("options", "deterministic", "order"), [
    *((options, *rest) for options in ({}, {"window": 0, "causal": True, "length": 500, "head_dim": 128})
      for rest in zip((False, True, False, True), (*ORDERS, ORDERS[0]))),
    ({"head_dim": 256, "length": 300}, True, ORDERS[0]), ({"head_dim": 256, "length": 300}, True, ORDERS[1])], ids=str)
def test_the_order_of_threads_and_blocks_changes_no_bit(options, deterministic, order):
    """Only query gradients in one pass may change."""
    options = options | {"deterministic": deterministic}
    expected = in_order(**options)
    with emulator.hopper_gpu(order=order), schedule_cases.num_sms(3):
        got = gradients("emulator", **options)
    for name, ours, other in zip(got._fields, got, expected):
        if ours is not None and (deterministic or name != "query"):
            assert np.array_equal(bits(ours), bits(other)), name
    near(got.query, expected.query)


@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (64, True), (128, False), (256, True)])
def test_rows_that_see_nothing_may_hold_anything(head_dim, deterministic):
    """Such rows lie between rows that see the first keys and rows that see the others, or come first, with more queries
    than keys."""
    runs = np.array([[0] * 150 + [150] * 250, [100] * 150 + [400] * 250], np.int32)[:, None, None]
    for rows, options in ((slice(100, 150), {"length": 400, "mask": dma.IntervalMask(*runs)}),
                          (slice(201), {"length": 300, "queries": 501, "causal": True})):
        options |= {"head_dim": head_dim, "window": 0, "deterministic": deterministic}
        clean, found = clean_and_spoiled({"q": (rows, np.nan), "dout": (rows, np.inf)}, **options)
        assert np.array_equal(clean.key, found.key) and np.array_equal(clean.value, found.value)
        near(found.query, clean.query)
        assert not found.query[:, rows].any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_keys_that_nobody_sees_may_hold_anything(listed, deterministic):
    rng = np.random.default_rng(1)
    real = rng.random((1, 700)) < 0.7
    mask = dma.IntervalMask.padding(real)
    if listed:
        mask = dma.IntervalMask.top_w(rng.standard_normal((1, 1, 700)).astype(np.float32), 60, padding=real)
    clean, found = clean_and_spoiled({"k": (~real[0], np.nan), "v": (~real[0], np.inf)}, window=0, mask=mask,
                                     deterministic=deterministic)
    assert np.array_equal(clean.key, found.key) and np.array_equal(clean.value, found.value)
    near(found.query, clean.query)
    assert not found.key[:, ~real[0]].any() and not found.value[:, ~real[0]].any()


def test_keys_that_end_ahead_of_all_queries_may_hold_anything():
    """In one pass, the query gradient multiplies these keys too."""
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 1, 170, 2, 128)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 300, 1, 128)).astype(np.float16)
    mask = dma.IntervalMask.sliding_window(300, 100)
    k[:, :31] = v[:, :31] = np.nan
    with emulator.hopper_gpu():
        out, lse = dma.attention(q, k, v, mask=mask, return_lse=True, backend="emulator")
        found = attention_backward(dout, q, k, v, out, lse, mask=mask, backend="emulator")
    assert all(np.isfinite(x).all() for x in found[:3]) and not found.key[:, :31].any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("softcap", [0.5, 20.0])
@pytest.mark.parametrize("spread", [0.0, 60.0])
def test_softcaps_of_small_and_vanishing_probabilities(softcap, spread, deterministic):
    """The derivative is computed from the probability, which large biases make vanish here."""
    rng = np.random.default_rng(0)
    options = {"window": 0, "length": 200, "softcap": softcap, "causal": True, "deterministic": deterministic,
               "bias": (spread * rng.standard_normal((1, 1, 200))).astype(np.float32)}
    check(gradients("emulator", **options), **options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bad_value_reaches_the_queries_that_see_it_only(deterministic):
    clean, found = clean_and_spoiled({"v": (40, np.inf)}, length=200, window=0, causal=True,
                                     deterministic=deterministic)
    near(found.query[:, :40], clean.query[:, :40])
    assert not np.isfinite(found.query[:, 40:]).any(-1).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bad_value_stays_in_its_sequence(deterministic):
    """The first sequence has 30 queries, so its step of 128 queries has room for queries of the next."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((130, 1, 64)).astype(np.float16) for _ in range(4))
    bounds = np.array([0, 30, 130], np.int32)

    def query_gradient() -> np.ndarray:
        with np.errstate(invalid="ignore"):
            out, lse = dma.varlen_attention(q, k, v, bounds, bounds, return_lse=True, backend="numpy")
        return varlen_attention_backward(dout, q, k, v, out, lse, bounds, bounds, deterministic=deterministic,
                                         backend="emulator").query

    clean = query_gradient()
    v[10] = np.inf
    found = query_gradient()
    near(found[30:], clean[30:])
    assert not np.isfinite(found[:30]).any(-1).all()


@in_turn("bad kind options", [
    (*bad, options) for options, bad in itertools.product(
        ({"head_dim": 64}, {"head_dim": 64, "softcap": 3.0}, {"head_dim": 128}, {"head_dim": 256}),
        (("dout", "causal"), ("query", "lists"), ("dout", "lists")))])
def test_a_bad_row_reaches_the_keys_that_it_sees_only(bad, kind, options, deterministic):
    """Checks the gradients of biases, values and keys, which are sums of P * dout and of dS * q; P and dS are 0 where a
    key is hidden."""
    scores = np.random.default_rng(3).standard_normal((1, 1, 320)).astype(np.float32)
    mask = dma.IntervalMask.top_w(scores, 60 if kind == "lists" else 320)
    seen = mask.to_dense(320)[0, 0]
    options = options | {"length": 320, "window": 0, "bias": scores, "deterministic": deterministic}
    options |= {"mask": mask} if kind == "lists" else {"causal": True}
    clean, found = clean_and_spoiled({"q" if bad == "query" else "dout": (220, np.nan)}, **options)
    hidden, in_step = ~seen[220], seen[192:256].any(0)  # in one super-tile with all queries before
    assert (hidden & in_step).any() and (kind == "causal" or (hidden & ~in_step & seen[:192].any(0)).any())
    for name in ("bias", "value" if bad == "query" else "key"):
        ours, expected = (getattr(x, name).reshape(320, -1) for x in (found, clean))
        assert np.array_equal(ours[hidden], expected[hidden]) and np.isnan(ours[~hidden]).any(-1).all()
