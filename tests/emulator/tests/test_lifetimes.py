"""Masks without a bound: keys sorted by lifetime, and attention and gradients that use this order."""
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import describe
from cupy_dma.backends.cuda.attention import sm90_splits
from cupy_dma.backends.cuda.lists import intervals
from cupy_dma.backends.cuda.lists.intervals import SUMMARY_SIZES
from cupy_dma.backends.cuda.lists.varlen import mask_of_rows
from cupy_dma.backends.cuda.runtime.configs import blocks
from cupy_dma.backends.cuda.runtime.program import fresh, run
from cupy_dma.backward import attention_backward, varlen_attention_backward
from cupy_dma.calls.sequences import sequences_of
from tests import emulator
from tests.emulator.runtime import Order
from tests.oracle import reference, schedule_cases
from tests.oracle.lifetime_cases import NAMES, masks

EVER_KIND, UNSEEN = 17, 18


def expected_order(start: np.ndarray, stop: np.ndarray, queries: int, end: int | None = None) -> tuple[np.ndarray, int]:
    """The sorted keys of one row, whose intervals lie within the positions of queries, and the number of visible keys.
    ``end``: the stop of keys that live to the end, by default the length."""
    n, life = len(start) if end is None else end, stop - start
    kind = np.clip(np.floor(np.log2(np.maximum(life, 1) / 32)).astype(int), 0, EVER_KIND - 1)
    kind = np.where(life <= 0, UNSEEN, np.where(stop >= n, EVER_KIND, kind))
    groups: list[list[int]] = [[]]
    count, longest = 0, 64
    for k in range(EVER_KIND):
        of_kind = int((kind == k).sum())
        if of_kind and count * ((64 << k) - longest) >= 96 * queries:
            groups.append([])
            count = 0
        groups[-1].append(k)
        count += of_kind
        longest = 64 << k if of_kind else longest
    found = [keys for group in ([EVER_KIND], *groups[::-1]) if len(keys := np.flatnonzero(np.isin(kind, group)))]
    found = [keys[::-1] if i % 2 else keys for i, keys in enumerate(found)]
    unseen = np.flatnonzero(kind == UNSEEN)
    return np.concatenate([*found, unseen]).astype(int), len(start) - len(unseen)


def made_order(mask: dma.IntervalMask, queries: int, causal: bool, **runtime: Any) -> dict[str, np.ndarray]:
    """The order that the kernels make of a mask, row by row."""
    rows, n = mask.shape[0] * mask.shape[1], mask.key_length
    fields: dict[str, Any] = {}

    def make(build: Any, given: Any) -> Any:
        order = intervals._key_order(build, given, queries, causal)
        fields.update({name: ref.offset // 4 for name, ref in order.fields.items()})
        return order.workspace

    with emulator.using(**runtime) as device, device.memory.session() as session:
        words = run(device, make, emulator._announced(mask, session))
    sizes = {"order": n, "seen_count": 1, **{f"summaries_{size}": 4 * blocks(n, size) for size in SUMMARY_SIZES}}
    return {name: words[at:at + rows * sizes[name]].reshape(rows, -1) for name, at in fields.items()}


def clipped(mask: dma.IntervalMask, queries: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    n = mask.key_length
    start, stop = (np.broadcast_to(x, mask.shape).reshape(-1, n).astype(np.int64) for x in (mask.start, mask.stop))
    start = np.maximum(start, np.arange(n)) if causal else start
    return np.maximum(start, n - queries), np.minimum(stop, n)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("keys", "queries"), [(1, 1), (127, 127), (128, 40), (129, 300), (2047, 2047), (2049, 1000),
                                               (5000, 5000)])
def test_the_order_is_that_of_numpy(keys, queries, name):
    mask = dict(masks(keys, 2))[name]
    for causal in (False, True):
        found = made_order(mask, queries, causal)
        for row, (start, stop) in enumerate(zip(*clipped(mask, queries, causal))):
            order, seen = expected_order(start, stop, queries)
            assert (found["order"][row] == order).all() and found["seen_count"][row] == seen
            for size in SUMMARY_SIZES:
                summary = found[f"summaries_{size}"][row].reshape(-1, 4)
                for block in range(blocks(seen, size)):
                    own = order[block * size:min(seen, (block + 1) * size)]
                    assert summary[block].tolist() == [start[own].min(), start[own].max(), stop[own].min(),
                                                       stop[own].max()]


LONG, CHUNK = 2**31 - 1, 2048
PACKED = {  # lengths of queries and keys: within chunks, over several, at their edges, unused and missing keys
    "short": ((30, 30), (0, 5), (200, 200), (7, 0), (90, 40)),
    "long": ((40, 5000), (10, 10), (30, 3000)),
    "edges": ((20, CHUNK), (20, 2 * CHUNK), (5, 1), (9, CHUNK - 1)),
    "mixed": ((10, 700), (10, 900), (20, 6000), (5, 300), (5, 2500)),
}


def packed_mask(name: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, dma.IntervalMask]:
    """Cumulative lengths of queries and keys, and a mask of two heads without a bound: one key in eight is visible
    forever, the others for 40 positions, and one in ten never."""
    lengths = np.array(PACKED[name])
    bounds_q, bounds_k = (np.concatenate(([0], np.cumsum(x))).astype(np.int32) for x in lengths.T)
    n = int(bounds_k[-1])
    draw = rng.random((2, n))
    stop = np.where(draw < 1 / 8, LONG, np.where(draw < 0.9, np.arange(n) + 40, 0))
    return bounds_q, bounds_k, dma.IntervalMask(np.full((2, n), -LONG, np.int32), stop.astype(np.int32))


@pytest.mark.parametrize("name", PACKED)
def test_the_order_of_packed_sequences(name):
    """Keys are sorted by segment: consecutive chunks within one sequence form a segment, any other chunk its own."""
    bounds_q, bounds_k, given = packed_mask(name, np.random.default_rng(2))
    total, n = int(bounds_q[-1]), int(bounds_k[-1])
    fields: dict[str, Any] = {}
    query, key = (describe(np.zeros((1, x, 2, 1), np.float32), "x") for x in (total, n))
    sequences = sequences_of(query, key, bounds_q, bounds_k, None, None)

    def make(build: Any, bounds: Any, mask: Any) -> Any:
        own = replace(sequences, bounds=bounds)
        order = intervals._key_order(build, mask_of_rows(build, mask, own, True), total, False, own)
        fields.update({name: ref.offset // 4 for name, ref in order.fields.items()})
        return order.workspace

    with emulator.using() as device, device.memory.session() as session:
        words = run(device, make, session.operand(sequences.bounds), emulator._announced(given, session))
    chunks = blocks(n, CHUNK)
    start, stop = np.zeros((2, n), int), np.zeros((2, n), int)  # in rows
    segments = [(c, c + 1) for c in range(chunks)]
    for qa, qb, ka, kb in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
        shift = kb - qb
        start[:, ka:kb] = np.clip(np.maximum(given.start, np.arange(n))[0, :, ka:kb].astype(int) - shift, qa, qb)
        stop[:, ka:kb] = np.clip(given.stop[0, :, ka:kb].astype(int) - shift, qa, qb)
        own = range(blocks(int(ka), CHUNK), blocks(int(kb), CHUNK))
        for c in own:
            segments[c] = own.start, own.stop
    for row in range(2):
        order = words[fields["order"]:][:2 * n].reshape(2, n)[row]
        info = words[fields["chunk_info"]:][:8 * chunks].reshape(2, chunks, 4)[row]
        expected, unseen = [], []
        for first, end in dict.fromkeys(segments):
            keys = slice(first * CHUNK, min(end * CHUNK, n))
            size = keys.stop - keys.start
            found, seen = expected_order(start[row, keys], stop[row, keys], min(size, total), LONG)
            assert all(info[c].tolist() == [seen, 0, 0, sum(map(len, expected))] for c in range(first, end))
            expected.append(found[:seen] + keys.start)
            unseen.append(found[seen:] + keys.start)
        assert np.array_equal(order, np.concatenate([*expected, *unseen]))
        assert words[fields["seen_count"]:][row] == sum(map(len, expected))


@pytest.mark.parametrize("hopper", [False, True], ids=["portable", "Hopper"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name, hopper):
    """Outputs and gradients equal those of each sequence alone; invisible keys may hold anything."""
    rng = np.random.default_rng(4)
    bounds_q, bounds_k, mask = packed_mask(name, rng)
    total, n, size = int(bounds_q[-1]), int(bounds_k[-1]), 64 if hopper else 16
    q, dout = rng.standard_normal((2, total, 2, size)).astype(np.float16)
    k, v = rng.standard_normal((2, n, 2, size)).astype(np.float16)
    hidden = mask.stop[0].T <= np.arange(n)[:, None]
    k[hidden] = v[hidden] = np.nan
    given = {"mask": mask, "causal": True, "backend": "emulator"}
    with emulator.hopper_gpu() if hopper else emulator.using():
        out, lse = dma.varlen_attention(q, k, v, bounds_q, bounds_k, **given, return_lse=True)
        found = varlen_attention_backward(dout, q, k, v, out, lse, bounds_q, bounds_k, **given)
    assert np.isfinite(out).all() and not any(x[hidden].any() for x in found[1:3])
    for qa, qb, ka, kb in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
        if qa == qb or ka == kb:
            continue
        position = np.arange(qb - qa)[:, None] + (kb - qb)
        seen = (np.arange(ka, kb) <= position + qa) & (position + qa < mask.stop[0, :, None, ka:kb])
        arguments = [x[None, a:b] for x, a, b in ((dout, qa, qb), (q, qa, qb), (np.nan_to_num(k), ka, kb),
                                                  (np.nan_to_num(v), ka, kb))]
        reference.check_attention(out[None, qa:qb], *arguments[1:], dense_mask=seen[None])
        own = [x[None, a:b] for x, a, b in zip(found, (qa, ka, ka), (qb, kb, kb))]
        reference.check_attention_gradients(own, *arguments, dense_mask=seen[None])


@pytest.mark.parametrize("order", [Order("backward", "backward"), Order("random", "random", 3)], ids=str)
def test_the_order_is_that_of_any_threads(order):
    mask = dict(masks(5000, 2))["lognormal"]
    found = [made_order(mask, 5000, False, order=own)["order"] for own in (Order(), order)]
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize(("n", "rows", "end", "bound"), [(16384, 1, None, 1.2), (8192, 4, LONG, 1.35)])
def test_blocks_visit_few_hidden_keys(n, rows, end, bound):
    """Counts what tiles of queries and, of one sequence, tiles of keys visit: a window of 512 and one key in eight
    forever, in rows or in packed sequences."""
    rng, start, needed, forward, backward = np.random.default_rng(0), np.arange(n), 0, 0, 0
    for _ in range(rows):
        stop = np.where(rng.random(n) < 1 / 8, n, np.minimum(start + 512, n))
        order, seen = expected_order(start, stop, n, end)
        first, last = (np.array([f(x[order[at:at + 64]]) for at in range(0, seen, 64)]) for f, x in
                       ((np.min, start), (np.max, stop)))
        forward += sum(((first <= at + 95) & (last > at)).sum() for at in range(0, n, 96)) * 64 * 96
        backward += sum(128 * (stop[own].max() - start[own].min()) for own in
                        (order[at:at + 128] for at in range(0, seen, 128)))
        needed += (stop - start).sum()
    assert forward < bound * needed and (rows > 1 or backward < bound * needed)


KERNELS = pytest.mark.parametrize(("hopper", "one_pass"), [(False, None), (True, True), (True, False)],
                                  ids=["portable", "one pass", "two passes"])


@pytest.mark.parametrize("name", NAMES)
@KERNELS
def test_gradients(hopper, one_pass, name):
    check_gradients(270, 270, (4, 2), 64, name, hopper, one_pass)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@KERNELS
@pytest.mark.parametrize(("keys", "queries", "head_dim"), [(200, 110, 128), (200, 230, 40)])
def test_gradients_of_other_lengths(keys, queries, head_dim, hopper, one_pass, name):
    check_gradients(keys, queries, (2, 1), head_dim, name, hopper, one_pass)


def hidden_problem(name: str, keys: int, queries: int, batch: int, heads: tuple[int, int], head_dim: int,
                   causal: bool = False) -> tuple[list[np.ndarray], dict[str, Any], np.ndarray]:
    """dout, query, key and value, options, and which keys nobody sees: these may hold anything, and hold NaN."""
    rng, mask = np.random.default_rng(1), dict(masks(keys, heads[1]))[name]
    q, dout = rng.standard_normal((2, batch, queries, heads[0], head_dim)).astype(np.float16)
    k, v = rng.standard_normal((2, batch, keys, heads[1], head_dim)).astype(np.float16)
    bias = rng.standard_normal((1, heads[1], keys)).astype(np.float32)
    start, stop = clipped(mask, queries, causal)
    unseen = start >= stop
    k[:, unseen.T] = v[:, unseen.T] = np.nan
    return [dout, q, k, v], {"mask": mask, "bias": bias, "causal": causal, "backend": "emulator"}, unseen


def check_hidden_problem(found: Any, dout: Any, q: Any, k: Any, v: Any, given: dict[str, Any], unseen: Any) -> None:
    reference.check_attention_gradients(found, dout, q, np.nan_to_num(k), np.nan_to_num(v), causal=given["causal"],
                                        dense_mask=given["mask"].to_dense(q.shape[1]), bias=given["bias"][:, :, None])
    assert not found.key[:, unseen.T].any() and not found.bias[unseen[None]].any()


def check_gradients(keys: int, queries: int, heads: tuple[int, int], head_dim: int, name: str, hopper: bool,
                    one_pass: bool | None) -> None:
    for causal in (False, True) if name == "any start" else (False,):
        (dout, *rows), given, unseen = hidden_problem(name, keys, queries, 1, heads, head_dim, causal)
        with ((emulator.hopper_gpu if hopper else emulator.using)(), schedule_cases.hopper_gradients(one_pass),
              fresh(query_splits=sm90_splits.QuerySplits())):
            out, lse = dma.attention(*rows, **given, return_lse=True)
            first, second = (attention_backward(dout, *rows, out, lse, **given, deterministic=not one_pass)
                             for _ in range(2))
        assert one_pass or all(np.array_equal(ours, again) for ours, again in zip(first, second))
        check_hidden_problem(first, dout, *rows, given, unseen)
