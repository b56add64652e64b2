"""The gradient of the queries from stored dS (kernels/sm90/stored_ds.cuh, backward_dq_stored.cu) on the CPU emulator:
against the oracle and the query pass, in chunks, in other orders of threads and blocks, and isolated from values that
do not count."""
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.attention import sm90_stored
from cupy_dma.backends.cuda.runtime import program
from tests import emulator
from tests.emulator.tests.test_forward import ORDERS, check_bits
from tests.emulator.tests.test_sm90_backward import check, clean_and_spoiled, gradients, near
from tests.oracle import cases, schedule_cases, varlen_cases

OPTIONS: list[dict[str, Any]] = [
    {"head_dim": 32, "heads": (1, 1)}, {"head_dim": 64}, {"head_dim": 128, "dtype": "bfloat16", "heads": (4, 1)},
    {"head_dim": 40, "heads": (3, 1), "length": 501}, {"head_dim": 128, "heads": (8, 2), "length": 333},
    {"head_dim": 96, "softcap": 3.0, "heads": (6, 2)}, {"length": 900, "window": 300, "heads": (2, 2)},
    {"queries": 300, "length": 701}, {"batch": 2, "heads": (4, 2), "length": 600, "head_dim": 16}]


@pytest.fixture
def launched():
    with mock.patch.object(sm90_stored, "launch", side_effect=sm90_stored.launch) as launch:
        yield launch


@contextmanager
def stored(wanted: bool | None = True, lists: int = 0, sms: int = 4, **device: Any) -> Iterator[None]:
    """Gradients from stored dS or by the query pass, with at most ``lists`` lists at a time (0: any number)."""
    chosen = sm90_stored.chunks_of

    def chunks_of(*arguments: Any) -> sm90_stored.Chunks:
        found = chosen(*arguments)
        return dataclasses.replace(found, size=min(lists, found.count)) if lists else found

    with (emulator.hopper_gpu(**device), schedule_cases.hopper_gradients(False),
          schedule_cases.num_sms(sms), program.overridden(stored=wanted),
          mock.patch.object(sm90_stored, "chunks_of", chunks_of)):
        yield


def check_stored(**options: Any) -> None:
    with stored():
        check(gradients("emulator", **options), **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients(options, launched):
    """Gradients match the oracle, and nearly the query pass."""
    with stored():
        found = gradients("emulator", **options)
    check(found, **options)
    assert launched.called
    launched.reset_mock()
    with stored(False):
        expected = gradients("emulator", **options)
    assert not launched.called
    for ours, other in zip(found, expected):
        near(ours, other)


@pytest.mark.parametrize("options", [
    {"mask": "top_w_padding"}, {"mask": "window", "bias": "none", "layout": "every_other", "query_length": 350},
    {"bias_delay": 100, "batch": 1, "heads": 2, "kv_heads": 1},
    {"bias_delay": 10, "extremes": True, "batch": 1, "heads": 2, "kv_heads": 1}], ids=str)
def test_masks_layouts_and_delays(options, launched):
    """With a gradient of lse; a delayed bias of -inf hides its key from the delay on."""
    case = cases.Case("stored", **{"dtype": "float16", "batch": 2, "query_length": 300, "key_length": 350, "window": 30,
                                   "head_dim": 64, "heads": 4, "kv_heads": 2, **options})
    with stored():
        cases.check_backward(case, cases.run_backward(case, backend="emulator", with_dlse=True), with_dlse=True)
    assert launched.called


@functools.cache
def whole(**options: Any) -> Any:
    with stored():
        return gradients("emulator", **options)


@pytest.mark.parametrize(("lists", "sms", "order"), [(1, 1, None), (2, 3, None), (4, 3, ORDERS[0]), (0, 3, ORDERS[1])])
def test_chunks_and_orders_change_no_bit(lists, sms, order):
    """Four lists of three blocks each, in chunks that end within the lists of a head or with them."""
    options = {"heads": (4, 2), "length": 500}
    with stored(lists=lists, sms=sms, **({} if order is None else {"order": order})):
        check_bits(gradients("emulator", **options), whole(**options))


def test_fewest_chunks_that_fit():
    """Chunks have equal sizes."""
    call = dataclasses.make_dataclass("Call", ["forward"])(dataclasses.make_dataclass(
        "Own", ["batch", "heads", "kv_heads"])(1, 16, 8))
    fields = {"super_queries": 1024, "super_capacity": 2048, "supers": 33}
    supers = sm90_stored.SuperLists(33 * 2048, fields, None)
    of_list = 16 * 16 * 2 * 2 * 64 * 128  # blocks, steps, heads, bytes
    for most, size in ((2**40, 264), (264 * of_list, 264), (264 * of_list - 1, 132), (100 * of_list, 88), (of_list, 1),
                       (of_list - 1, 0)):
        with mock.patch.object(sm90_stored, "max_stored", lambda most=most: most):
            chunks = sm90_stored.chunks_of(call, supers)
        assert (chunks.count, chunks.size, chunks.tiles, chunks.steps) == (264, size, 16, 16)
        assert size == 0 or chunks.number == -(-264 // size)


def test_rows_and_keys_that_do_not_count_may_hold_anything():
    """Queries without visible keys; keys that no query sees, or that their bias hides."""
    rng = np.random.default_rng(1)
    real = rng.random((1, 500)) < 0.7
    real[:, :5] = False
    scores = rng.standard_normal((1, 1, 500)).astype(np.float32)
    hidden = rng.random((1, 1, 500)) < 0.2
    bias = np.where(hidden, -np.inf, scores).astype(np.float32)
    mask = dma.IntervalMask.top_w(scores, 60, padding=real)
    blank = ~(mask.to_dense(500) & ~hidden[:, :, None]).any(-1)[0, 0]
    unseen = ~real[0] | hidden[0, 0]
    assert blank.any() and unseen.any()
    with stored():
        clean, found = clean_and_spoiled({"q": (blank, np.nan), "dout": (blank, np.inf), "k": (unseen, np.nan),
                                          "v": (unseen, np.inf)}, window=0, length=500, mask=mask, bias=bias)
    check_bits(found, clean)
    assert not found.query[:, blank].any() and np.isfinite(found.query).all() and np.isfinite(found.key).all()


def test_a_bad_key_leaves_rows_that_see_nothing_zero():
    """Some of these rows are in a step of the key's block, some in a tile without blocks."""
    runs = np.array([[0] * 400 + [300] * 100, [100] * 100 + [0] * 300 + [500] * 100], np.int32)
    mask = with_bound(dma.IntervalMask(*runs[:, None, None]), (100, 0))
    with stored():
        found = gradients("emulator", window=0, length=500, mask=mask, spoil={"k": (20, np.nan)})
    assert np.isnan(found.query[:, :100]).all() and not found.query[:, 100:300].any()


def with_bound(mask: dma.IntervalMask, bound: tuple[int, int]) -> dma.IntervalMask:
    """A mask of ``first`` keys for the first query, and ``step`` more for each next query."""
    start, stop, hints = mask._runs
    return dma.IntervalMask._make(mask.library, start, stop, hints._replace(bound=bound))


def many_blocks() -> None:
    """Twenty new keys per query make lists of more than 32 blocks; a tile reads the steps of 32 blocks at once."""
    first = 5700 + np.arange(6000, dtype=np.int32) // 20
    mask = with_bound(dma.IntervalMask(first[None, None], first[None, None] + 4), (100, 20))
    check_stored(window=0, queries=300, length=6000, head_dim=16, mask=mask)


def a_batch_of_lists() -> None:
    """One to three blocks of keys for each head of each batch entry."""
    key = np.arange(400, dtype=np.int32)
    kept = np.random.default_rng(1).random((2, 2, 400)) < np.array([[[0.5], [0.1]], [[0.9], [0.5]]])
    mask = with_bound(dma.IntervalMask(np.broadcast_to(key, kept.shape), np.where(kept, key + 100, 0)), (100, 1))
    check_stored(window=0, queries=300, length=400, heads=(2, 2), batch=2, head_dim=16, mask=mask)


@pytest.mark.parametrize("lists", [many_blocks, a_batch_of_lists])
def test_lists(lists, launched):
    lists()
    assert launched.called


def test_a_bad_value_reaches_the_queries_that_see_it_only():
    scores = np.random.default_rng(3).standard_normal((1, 1, 500)).astype(np.float32)
    mask = dma.IntervalMask.top_w(scores, 60)
    sees = mask.to_dense(500)[0, 0, :, 250]
    with stored():
        clean, found = clean_and_spoiled({"v": (250, np.inf)}, window=0, length=500, mask=mask, bias=scores)
    assert np.array_equal(found.query[:, ~sees], clean.query[:, ~sees])
    assert not np.isfinite(found.query[:, sees]).all(-1).any()


@pytest.mark.parametrize(("options", "reason"), [
    ({"needs": ("key", "value")}, "no gradient of the queries"), ({"head_dim": 136}, "a head dim above 128"),
    ({"window": 0, "causal": True}, "no lists of super-tiles"), ({"window": 0, "dense": "causal"}, "a dense mask")],
    ids=str)
def test_what_is_not_served(options, reason, launched):
    found: list[str] = []
    chosen = sm90_stored.reasons
    with mock.patch.object(sm90_stored, "reasons", lambda *own: found.extend(chosen(*own)) or found):
        check_stored(**{"length": 400, **options})
    assert reason in found and not launched.called


def test_packed_sequences_are_not_served(launched):
    case = next(c for c in varlen_cases.SUPERS if c.name == "supers")
    with stored():
        found = varlen_cases.run_backward(case, backend="emulator")
    varlen_cases.check_backward(case, found)
    assert not launched.called
