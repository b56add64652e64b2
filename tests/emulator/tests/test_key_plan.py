"""Tiles of keys by lifetime that are split along their queries (kernels/sm90/backward_dkv_plan.cu): which tickets the
device plans, and gradients from them."""
import heapq
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.attention import sm90_backward, sm90_splits
from cupy_dma.backends.cuda.lists import intervals
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import blocks
from cupy_dma.backends.cuda.runtime.params import Packed, pack_pointer
from cupy_dma.backends.cuda.runtime.program import fresh, run
from cupy_dma.backward import attention_backward
from tests import emulator
from tests.emulator.runtime import Order
from tests.emulator.tests.test_lifetimes import check_hidden_problem, clipped, expected_order, hidden_problem
from tests.oracle import cases, delay_cases, reference, schedule_cases
from tests.oracle.lifetime_cases import NAMES, masks

TILE, UNIT = 128, 64  # keys of a tile; queries of a unit, with which steps begin in one pass
BUCKETS = 64  # of lengths of tickets
SMS = 132


def counted_steps(mask: dma.IntervalMask, queries: int, group: int, step: int, one_pass: bool) -> np.ndarray:
    """The steps of the tiles of each kv head, (rows, tiles)."""
    start, stop = clipped(mask, queries, True)
    shift = mask.key_length - queries
    found = []
    for a, b in zip(start, stop):
        order, seen = expected_order(a, b, queries)
        found.append([0] * blocks(len(a), TILE))
        for tile in range(blocks(seen, TILE)):
            own = order[tile * TILE:min(seen, (tile + 1) * TILE)]
            first = a[own].min() - shift
            first -= first % UNIT if one_pass else 0
            found[-1][tile] = group * blocks(int(b[own].max() - shift - first), step)
    return np.array(found)


def planned(mask: dma.IntervalMask, queries: int, group: int, head_dim: int, one_pass: bool, slots: int, steps: int,
            order: Order = Order()) -> dict[str, np.ndarray]:  # noqa: B008
    """What plan_tickets writes for a mask of one row for each kv head."""
    rows, n = mask.shape[0] * mask.shape[1], mask.key_length
    tiles = rows * blocks(n, TILE)
    sizes = {"tickets": 4 * (tiles + slots), "split_tiles": 4 * max(1, slots // 2), "counts": 2}
    at: dict[str, int] = {}

    def make(build: Any, given: Any) -> Any:
        lists = intervals._key_order(build, given, queries, True)
        space = intervals.Workspace(build, **sizes)
        at.update({name: ref.offset // 4 for name, ref in space.refs.items()})
        params = jit.params("common/params.cuh", "AttentionParams").pack_some({
            "list": lists.fields["order"], "summaries": lists.fields[f"summaries_{TILE}"], "batch": mask.shape[0],
            "kv_heads": mask.shape[1], "heads": mask.shape[1] * group, "mask_batch": mask.shape[1], "mask_group": 1,
            "mask_heads": mask.shape[1], "key_length": n, "query_length": queries})
        whole = bytes(8) + tiles.to_bytes(4, "little") + bytes(4 + 8 + 4) + tiles.to_bytes(4, "little")
        packed = Packed(bytes(256)) + params + whole
        for name in sizes:
            packed += pack_pointer(space.refs[name])
        packed += steps.to_bytes(4, "little") + SMS.to_bytes(4, "little")
        config = sm90_backward.HopperBackwardDkvPlanConfig(
            element="__half", head_dim=head_dim, stages=2, keys="KEYS_SHARED", causal=False, bias=0, softcap=False,
            sequences=False, bits=False, delay=False, block_q=sm90_backward.block_q(head_dim, one_pass, True),
            key_stages=1, intervals=False, dquery=one_pass)
        build.launch(build.load(config, "plan_tickets"), 1, sm90_backward.PLAN_THREADS, packed.padded(64))
        return space.workspace

    with emulator.hopper_gpu(order=order) as device, device.memory.session() as session:
        words = run(device, make, emulator._announced(mask, session))
    found = {name: words[at[name]:][:size] for name, size in sizes.items()}
    tickets, split_tiles = found["counts"]
    return {"tickets": found["tickets"].reshape(-1, 4)[:tickets],
            "split_tiles": found["split_tiles"].reshape(-1, 4)[:split_tiles, :3]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("keys", "queries", "group", "head_dim", "one_pass", "steps"), [
    (5000, 5000, 3, 64, True, 0), (5000, 700, 1, 128, True, 3), (700, 5000, 2, 64, False, 0), (1, 1, 3, 64, True, 0),
    (300, 300, 1, 64, True, 1)])
def test_tickets_cover_each_step_once(keys, queries, group, head_dim, one_pass, steps, name):
    mask = dict(masks(keys, 2))[name]
    counted = counted_steps(mask, queries, group, sm90_backward.block_q(head_dim, one_pass, True), one_pass)
    share = steps or max(sm90_splits.MIN_PLANNED, blocks(int(counted.sum()), SMS))
    splits = np.maximum(1, -(-counted.T.ravel() // share))  # tiles of all rows in turn
    slots = int(splits[splits > 1].sum())
    found = planned(mask, queries, group, head_dim, one_pass, slots if steps else 2 * SMS, steps)
    tickets, split_tiles = found["tickets"], found["split_tiles"]
    assert steps or slots < 2 * SMS
    expected, first_slots = [], {tile: slot for tile, slot, _ in split_tiles.tolist()}
    for tile, (own, count) in enumerate(zip(counted.T.ravel().tolist(), splits.tolist())):
        for i in range(count):
            slot = first_slots[tile] + i if count > 1 else -1
            expected.append((tile, i * share, min(share, own - i * share), slot))
    assert sorted(map(tuple, tickets.tolist())) == expected
    assert sorted(tickets[tickets[:, 3] >= 0, 3].tolist()) == list(range(slots))
    assert {tile: count for tile, _, count in split_tiles.tolist()} == {
        tile: count for tile, count in enumerate(splits.tolist()) if count > 1}
    longest = max(1, min(share, counted.max()))
    assert (np.diff(tickets[:, 2]) <= blocks(longest, BUCKETS - 1)).all()  # the longest first, within a bucket's width


def test_the_plan_of_any_threads():
    """Tickets and slots may change places: every tile has the same splits."""
    mask = dict(masks(2500, 2))["lognormal"]
    found = [planned(mask, 2500, 1, 64, True, 2 * SMS, 0, order) for order in (Order(), Order("random", "random", 3))]
    first, second = (sorted(map(tuple, x["tickets"][:, :3].tolist())) for x in found)
    assert first == second


def makespan(tickets: list[int], added: float = 0.0) -> float:
    """Steps until the last SM ends, as ``sm90_splits._makespan`` counts."""
    busy = [0.0] * SMS
    for steps in tickets:
        own = steps + sm90_splits.TILE_STEPS if steps else sm90_splits.EMPTY_STEPS
        heapq.heapreplace(busy, busy[0] + own)
    return max(busy) + added


@pytest.mark.parametrize(("kept", "steps", "before", "without", "after"), [
    (1 / 21, 2300, 174, 197, 33), (1.0, 18720, 174, 197, 162)])
def test_steps_of_few_kv_heads(kept, steps, before, without, after):
    """Counted for 8192 tokens with 9/3 heads of 64 and a delay of 64 (docs/lab/lists.md): as if every query saw every
    key, in the order of lifetimes without splits, and with them."""
    n, rows, group, rng = 8192, 3, 3, np.random.default_rng(0)
    stop = np.where(rng.random((rows, n)) < kept, n, np.arange(n) + 64)
    mask = dma.IntervalMask.from_stop(stop)
    counted = counted_steps(mask, n, group, 128, True).T.ravel()
    assert abs(counted.sum() - steps) < 0.02 * steps
    splits = sm90_splits._best_splits(n, n, rows, group, 64, 128, True, SMS)
    dense = [group * blocks(n - first, 128) for first in range(0, n, TILE)]
    numbers = 2 * 64 * sm90_splits.NUMBER_STEPS
    found = sm90_splits._makespan(dense, rows, splits.steps, SMS) + sm90_splits.SUM_STEPS + (
        splits.count * rows * n * numbers)
    share = blocks(int(counted.sum()), SMS)
    tickets = [min(share, own - i) for own in counted.tolist() for i in range(0, max(1, own), share)]
    slots = sum(blocks(own, share) for own in counted.tolist() if own > share)
    ours = makespan(sorted(tickets, reverse=True), sm90_splits.SUM_STEPS + slots * TILE * numbers)
    plain = makespan(sorted(counted.tolist(), reverse=True))
    assert (int(found), round(plain), round(ours)) == (before, without, after)


KERNELS = pytest.mark.parametrize("one_pass", [True, False], ids=["one pass", "two passes"])
SHAPES = [  # keys, queries, batch, heads, head dim, steps of a split: 0 as the device finds on 3 SMs
    (270, 270, 1, (3, 1), 64, 1), (333, 500, 2, (2, 2), 128, 3), (500, 333, 1, (6, 2), 64, 2),
    (1100, 1100, 1, (1, 1), 64, 0)]


@pytest.mark.parametrize("name", NAMES)
@KERNELS
@pytest.mark.parametrize(("keys", "queries", "batch", "heads", "head_dim", "steps"), SHAPES[:1])
def test_gradients_of_split_tiles(keys, queries, batch, heads, head_dim, steps, one_pass, name):
    """Against the oracle, also of tiles without steps, under masks that hide all keys and that show all; in two passes
    the same bits in any order of threads and on any number of SMs."""
    (dout, *rows), given, unseen = hidden_problem(name, keys, queries, batch, heads, head_dim)
    found = []
    with emulator.hopper_gpu():
        out, lse = dma.attention(*rows, **given, return_lse=True)
    splits = sm90_splits.QuerySplits(2, steps) if steps else None
    with schedule_cases.hopper_gradients(one_pass), fresh(query_splits=splits):
        for sms, order in ((3, Order()), (5 if steps else 3, Order("random", "random", 1))):
            with emulator.hopper_gpu(order=order), schedule_cases.num_sms(sms):
                found.append(attention_backward(dout, *rows, out, lse, **given, deterministic=not one_pass))
    for field, ours, again in zip(found[0]._fields, *found):
        assert one_pass and field == "query" or np.array_equal(ours, again), field
    check_hidden_problem(found[0], dout, *rows, given, unseen)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@KERNELS
@pytest.mark.parametrize(("keys", "queries", "batch", "heads", "head_dim", "steps"), [
    *SHAPES[1:], (200, 230, 1, (2, 1), 256, 2)])
def test_those_of_other_shapes(keys, queries, batch, heads, head_dim, steps, one_pass, name):
    test_gradients_of_split_tiles(keys, queries, batch, heads, head_dim, steps, one_pass, name)


DELAYED = [c for c in (*delay_cases.LONG, *delay_cases.CASES)
           if "survivors" in c.name and c.dtype in ("float16", "bfloat16") and "dense" not in c.name]


@pytest.mark.parametrize(("case", "steps", "one_pass"), [
    pytest.param(case, 1 + i % 3, one_pass, marks=() if i < 2 else pytest.mark.slow, id=f"{case.name}-{one_pass}")
    for i, case in enumerate(DELAYED) for one_pass in (True, False)])
def test_delayed_biases(case, steps, one_pass):
    """With biases of -inf and 30 that must not apply to near queries."""
    with (emulator.hopper_gpu(), schedule_cases.hopper_gradients(one_pass),
          fresh(query_splits=sm90_splits.QuerySplits(2, steps))):
        cases.check_backward(case, cases.run_backward(case, backend="emulator"), tf32=True)


@KERNELS
def test_splits_that_a_bias_leaves_without_steps(one_pass):
    """A delayed bias of -inf hides the longest-lived keys, whose tile is split, from all but the first queries."""
    rng, n = np.random.default_rng(3), 400
    q, dout, k, v = (rng.standard_normal((1, n, h, 64)).astype(np.float16) for h in (3, 3, 1, 1))
    bias = np.zeros((1, 1, n), np.float32)
    bias[..., :TILE] = -np.inf
    given = {"mask": dma.IntervalMask.from_stop(np.full((1, n), n)), "bias": bias, "bias_delay": 30}
    with (emulator.hopper_gpu(), schedule_cases.hopper_gradients(one_pass),
          fresh(query_splits=sm90_splits.QuerySplits(2, 2))):
        out, lse = dma.attention(q, k, v, **given, return_lse=True, backend="emulator")
        found = attention_backward(dout, q, k, v, out, lse, **given, deterministic=not one_pass, backend="emulator")
    reference.check_attention_gradients(found, dout, q, k, v, causal=True, bias=bias[:, :, None], bias_delay=30)


@pytest.mark.parametrize("needs", [("query",), ("key",), ("value",), ("bias",), ("query", "bias")])
def test_only_requested_gradients(needs):
    """They have the same bits as when all are requested."""
    rng, mask = np.random.default_rng(2), dict(masks(400, 1))["survivors"]
    q, dout, k, v = (rng.standard_normal((1, 400, h, 64)).astype(np.float16) for h in (2, 2, 1, 1))
    given = {"mask": mask, "bias": rng.standard_normal((1, 1, 400)).astype(np.float32), "backend": "emulator"}
    with (emulator.hopper_gpu(), schedule_cases.hopper_gradients(False),
          fresh(query_splits=sm90_splits.QuerySplits(2, 3))):
        out, lse = dma.attention(q, k, v, **given, return_lse=True)
        whole, some = (attention_backward(dout, q, k, v, out, lse, **given, **more) for more in ({}, {"needs": needs}))
    for name in whole._fields:
        assert (getattr(some, name) is None) == (name not in needs)
        assert name not in needs or np.array_equal(getattr(some, name), getattr(whole, name))
