"""A test of the testers: faults are put into the kernels one at a time, and the emulator tests must notice each.

Every fault is an exact replacement in one kernel file, with the test of tests/emulator/tests/test_forward.py that must fail for it.
The summary at the end of a run prints what each was caught by: a report of the emulator, or a wrong result.
"""
from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.cuda.attention import sm90, sm90_schedule
from cupy_dma.backends.cuda.runtime import jit
from tests.gpu.sm90_tiles import TILES, taken
from tests.oracle import cases, schedule_cases
from tests.oracle.cache_cases import History

build = pytest.importorskip("tests.emulator.build")
pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

from tests import emulator  # noqa: E402
from tests.emulator.tests import test_backward, test_decode, test_forward, test_varlen  # noqa: E402


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    caught_by: str  # a key of CHECKS


def named(name: str) -> cases.Case:
    return next(c for c in cases.CASES if c.name == name)


def elsewhere(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A test of another file with arguments of its own, so that it has seen the sound kernels there."""
    names = [*inspect.signature(test).parameters]
    given, fixtures = dict(zip(names, arguments)), names[len(arguments):]
    assert fixtures in ([], ["monkeypatch"])
    for mark in test.pytestmark:
        own = mark.args[0] if isinstance(mark.args[0], tuple) else (mark.args[0],)
        values = [value if len(own) > 1 else (value,) for value in mark.args[1]]
        assert tuple(given[name] for name in own) in values, f"{test.__name__} does not run with {arguments}"

    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(*arguments, *[patch] * len(fixtures))

    return check


def grid(name: str) -> Callable[[], None]:
    return elsewhere(test_forward.test_forward_grid, named(name))


def one_awkward_selection(kind: str, length: int, window: int) -> Callable[[], None]:
    return elsewhere(test_forward.test_selection_over_chunks, kind, length, window)


def varlen(name: str) -> Callable[[], None]:
    return elsewhere(test_varlen.test_forward, test_varlen.named(name))


def varlen_backward(name: str) -> Callable[[], None]:
    return elsewhere(test_varlen.test_backward, test_varlen.named(name))


def lists_over_chunks() -> None:
    """A mask whose lists are made from two chunks of 2048 keys."""
    rng = np.random.default_rng(0)
    n, lq = 2200, 300
    q, k = (rng.standard_normal((1, m, 1, 16)).astype(np.float16) for m in (lq, n))
    mask = dma.IntervalMask.sliding_window(n, 90)
    out = dma.attention(q, k, k, mask=mask, backend="emulator")
    expected = dma.attention(q.astype("f4"), k.astype("f4"), k.astype("f4"), mask=mask, backend="numpy")
    assert np.abs(out - expected).max() < 5e-3


def gathered_biases() -> None:
    """Biases of whole blocks of keys, with and without hidden keys between them; a last tile that is not full."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 1, 16)).astype(np.float16) for n in (70, 400))
    bias = rng.standard_normal((1, 1, 70, 400)).astype(np.float16)
    for mask in (np.broadcast_to(np.arange(400) % 3 == 0, (70, 400)).copy(), None):
        out, expected = (dma.attention(q, k, k, mask=mask, bias=bias, backend=name) for name in ("emulator", "numpy"))
        assert np.abs(out.astype("f4") - expected.astype("f4")).max() < 5e-3


def backward_grid(name: str) -> Callable[[], None]:
    return elsewhere(test_backward.test_backward_grid, named(name))


def decoding(**options: Any) -> Callable[[], None]:
    """Tokens one by one into a cache."""
    history = History(**{"dtype": "float16", "head_dim": 16, "window": 7, "length": 24, "batch": 1, **options})

    def check() -> None:
        cache = history.cache(backend="emulator")
        for p in range(history.length):
            results = history.run(cache, [1], begin=p)
            history.check_kept(cache, p)
            history.check(*results, begin=p)

    return check


def few_queries() -> None:
    """Several steps a warp, so that sums are rescaled."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, h, 16)).astype(np.float16) for n, h in ((2, 4), (6000, 2), (6000, 2)))
    out = dma.attention(3 * q, k, v, backend="emulator")
    expected = dma.attention(*(x.astype("f4") for x in (3 * q, k, v)), backend="numpy")
    assert np.abs(out - expected).max() < 3e-3


def window_of_few_queries() -> None:
    """Two queries, and one key that only the first of them sees, in a step of keys that both see or none."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, h, 16)).astype(np.float16) for n, h in ((2, 4), (600, 2), (600, 2)))
    mask = dma.IntervalMask.sliding_window(600, 90)
    out = dma.attention(q, k, v, mask=mask, backend="emulator")
    expected = dma.attention(*(x.astype("f4") for x in (q, k, v)), mask=mask, backend="numpy")
    assert np.abs(out - expected).max() < 2e-3


def last_queries(queries: int) -> Callable[[], None]:
    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test_decode.test_last_queries_of_a_history(6000, 60, queries, 4, "float16", patch)

    return check


def hopper_forward(tile: str, kind: str, head_dim: int = 64, **options: Any) -> Callable[[], None]:
    """Several tiles, one after the other, the last of them cut up, with queries and outputs through TMA.
    ``lists`` have whole blocks and others; keys of ``causal`` come through TMA too, of ``dense`` masks
    where they follow each other."""
    def check() -> None:
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((1, 500, heads, head_dim)).astype(np.float16) for heads in (4, 2, 2))
        scores = rng.standard_normal((1, 2, 500)).astype(np.float32)
        more: dict[str, Any] = {"causal": {"causal": True}, "lists": {"bias": scores}}.get(kind, {}) | options
        more["mask"] = {"causal": lambda: None, "lists": lambda: dma.IntervalMask.top_w(scores, 150),
                        "window": lambda: dma.IntervalMask.sliding_window(500, 150),
                        "dense": lambda: rng.random((1, 1, 500, 500)) < 0.5}[kind]()
        order = emulator.Order("random", "random", 1)
        with emulator.hopper_gpu(order=order), taken(*TILES[tile]), schedule_cases.num_sms(5):
            out = dma.attention(q, k, v, **more, backend="emulator")
        expected = dma.attention(*(x.astype("f4") for x in (q, k, v)), **more, backend="numpy")
        assert np.abs(out - expected).max() < 6e-3

    return check


def rising_logits() -> None:
    """Of whose exponentials some sums become too large, and some infinite."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 300, heads, 64)).astype(np.float16) for heads in (2, 1, 1))
    for slope in (0.4, 3.0):
        bias = np.broadcast_to(slope * np.arange(300, dtype=np.float32), (1, 1, 300))
        with emulator.hopper_gpu(), taken(*TILES["192x96"]):
            out = dma.attention(q, k, v, bias=bias, causal=True, backend="emulator")
        expected = dma.attention(*(x.astype("f4") for x in (q, k, v)), bias=bias, causal=True, backend="numpy")
        assert np.abs(out - expected).max() < 6e-3


def products_that_change() -> None:
    """Within a tile: one polynomial of the softcap holds for the first keys, another for more, none for the last."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 400, heads, 64)).astype(np.float16) for heads in (2, 1, 1))
    q /= 4
    for part, size in zip(np.split(k, 4, axis=1), (0.2, 0.45, 0.45, 3.0)):
        part *= size * 8.0 * 5.0 / np.abs(np.einsum("bqhd,bkgd->hqk", q.astype("f4"), part.astype("f4"))).max()
    options = {"softcap": 5.0, "mask": dma.IntervalMask.sliding_window(400, 390)}
    with emulator.hopper_gpu(), taken(*TILES["192x96"]):
        out = dma.attention(q, k, v, **options, backend="emulator")
    expected = dma.attention(*(x.astype("f4") for x in (q, k, v)), **options, backend="numpy")
    assert np.abs(out - expected).max() < 3e-3


def softcapped_biases(factor: float, bias: float, logit: float = 1.0) -> Callable[[], None]:
    """bfloat16 with a softcap and a bias of keys: a query that sees one key, large values, a query of large logits."""
    def check() -> None:
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((1, 400, heads, 64)).astype(numpy_dtype("bfloat16")) for heads in (2, 1, 1))
        v = (v.astype("f4") * factor).astype(v.dtype)
        q[:, 396] *= logit
        options = {"softcap": 20.0, "bias": bias + rng.standard_normal((1, 1, 400)).astype(np.float32), "causal": True}
        with emulator.hopper_gpu() as gpu, taken(*TILES["128x128x4"]):
            gpu.most_writes = 2
            out = dma.attention(q, k, v, **options, backend="emulator")
        expected = dma.attention(*(x.astype("f8") for x in (q, k, v)), **options, backend="numpy")
        largest = np.abs(v.astype("f8")).max()
        assert np.array_equal(out[0, 0], np.broadcast_to(v[0, 0], (2, 64)))
        assert np.abs(out.astype("f8") - expected).max() < 2**-7 * largest

    return check


def sections() -> None:
    """Three causal heads with 3 tiles each for 2 SMs, a section for each head."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 300, 3, 16)).astype(np.float16) for _ in range(3))
    with (emulator.hopper_gpu(), taken(*TILES["128x128"]), schedule_cases.num_sms(2),
          pytest.MonkeyPatch.context() as patch):
        patch.setattr(sm90, "work_of", sm90_schedule.work_of.__wrapped__)
        patch.setattr(sm90_schedule, "SWIZZLE_GROUP_BYTES", 1)
        patch.setattr(sm90_schedule, "SWIZZLE_GROUP_WAVES", 1)
        out = dma.attention(q, k, v, causal=True, backend="emulator")
    expected = dma.attention(*(x.astype("f4") for x in (q, k, v)), causal=True, backend="numpy")
    assert np.abs(out - expected).max() < 3e-3


def not_finite() -> None:
    """A value of every tile that some of its queries do not see."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 300, heads, 64)).astype(np.float16) for heads in (2, 1, 1))
    v[:, ::50] = np.inf
    mask = dma.IntervalMask.sliding_window(300, 20)
    with emulator.hopper_gpu() as gpu, taken(*TILES["192x96"]):
        gpu.most_writes = 2
        out = dma.attention(q, k, v, mask=mask, backend="emulator")
    expected = dma.attention(*(x.astype("f4") for x in (q, k, v)), mask=mask, backend="numpy")
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(out), finite) and np.abs(out[finite] - expected[finite]).max() < 3e-3


def lower_tiles() -> None:
    """Behind whole tiles, where they could be cut in two, and without any, where some could be cut in three."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 500, heads, 64)).astype(np.float16) for heads in (4, 2, 2))
    mask = dma.IntervalMask.top_w(rng.standard_normal((1, 2, 500)).astype(np.float32), 100)
    expected = dma.attention(*(x.astype("f4") for x in (q, k, v)), mask=mask, backend="numpy")
    for num_sms, count in ((8, 2), (18, 8)):
        with (emulator.hopper_gpu(), taken(*TILES["192x96"]),
              schedule_cases.num_sms(num_sms, short_tiles=True) as tiles):
            out = dma.attention(q, k, v, mask=mask, backend="emulator")
        assert tiles == [count]
        assert np.abs(out - expected).max() < 6e-3


def hopper_parts(kind: str) -> Callable[[], None]:
    """Behind whole tiles and without any, tiles split up along their keys; some queries see keys of some parts only."""
    def check() -> None:
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((1, n, h, 64)).astype(np.float16) for n, h in ((100, 4), (900, 2), (900, 2)))
        scores = rng.standard_normal((1, 2, 900)).astype(np.float32)
        options: dict[str, Any] = {"mask": None, "bias": 3 * np.sort(scores)}
        if kind == "lists":
            options["mask"] = dma.IntervalMask.top_w(scores, 600)
        elif kind == "not finite":
            v[:, ::100] = np.inf
            options = {"mask": dma.IntervalMask.sliding_window(900, 30)}
        elif kind == "nobody":  # the last queries see nothing
            options["mask"] = dma.IntervalMask(np.zeros((1, 1, 900), np.int32), np.full((1, 1, 900), 850, np.int32))
        expected = dma.attention(*(x.astype("f4") for x in (q, k, v)), **options, return_lse=True, backend="numpy")
        for num_sms, count in ((3, 3), (19, 4)):
            with (emulator.hopper_gpu() as gpu, taken(*TILES["192x64x6"]),
                  schedule_cases.num_sms(num_sms, split=True) as parts):
                gpu.most_writes = 2
                found = dma.attention(q, k, v, **options, return_lse=True, backend="emulator")
            assert parts == [count]
            for ours, theirs, error in zip(found, expected, (6e-3, 1e-4)):
                finite = np.isfinite(theirs)
                assert np.array_equal(np.isfinite(ours), finite)
                assert np.abs(ours[finite] - theirs[finite]).max() < error

    return check


def hopper_grid(tile: str, name: str) -> Callable[[], None]:
    def check() -> None:
        with emulator.hopper_gpu(), taken(*TILES[tile]):
            grid(name)()

    return check


OWN: dict[str, Callable[[], None]] = {
    "hopper[lists]": hopper_forward("192x96", "lists"),
    "hopper[lists, D128]": hopper_forward("192x64x2", "lists", head_dim=128),
    "hopper[window, D40]": hopper_forward("128x64x6", "window", head_dim=40),
    "hopper[causal]": hopper_forward("192x128", "causal"),
    "hopper[causal, softcap]": hopper_forward("192x96", "causal", softcap=2.0),
    "hopper[dense]": hopper_forward("128x128", "dense"),
    "hopper[rising]": rising_logits,
    "hopper[softcap]": products_that_change,
    "hopper[softcap and bias]": softcapped_biases(1.0, 7.0),
    "hopper[softcap and large bias]": softcapped_biases(1.0, 30.0),
    "hopper[softcap, large values]": softcapped_biases(2.0**114, 7.0),
    "hopper[softcap, a large row]": softcapped_biases(2.0**112, 0.0, 4.0),
    "hopper[sections]": sections,
    "hopper[not finite]": not_finite,
    "hopper[lower]": lower_tiles,
    **{f"hopper[parts, {kind}]": hopper_parts(kind) for kind in ("none", "lists", "not finite", "nobody")},
    "test_forward_grid[Hopper, heads-6/2]": hopper_grid("128x128", "heads-6/2-top_w"),
    "few_queries": few_queries,
    "few_queries[window]": window_of_few_queries,
    "decoding": decoding(),
    "decoding[several parts]": decoding(window=100, recent=2, length=104, heads=2, kv_heads=1),
    "decoding[sinks and recent]": decoding(sinks=2, recent=3),
    "last_queries[1]": last_queries(1),
    "last_queries[4]": last_queries(4),
    "lists_over_chunks": lists_over_chunks,
    "gathered_biases": gathered_biases,
}

CHECKS: dict[str, Callable[[], None]] = {
    **OWN,
    "test_forward_grid[mask-none]": grid("mask-none"),
    "test_forward_grid[heads-4/2-top_w]": grid("heads-4/2-top_w"),
    "test_forward_grid[mask-per_batch]": grid("mask-per_batch"),
    "test_forward_grid[float16-D3]": grid("float16-D3"),
    "test_forward_grid[bfloat16-D40]": grid("bfloat16-D40"),
    "test_forward_grid[lengths-33x129-causal]": grid("lengths-33x129-causal"),
    "test_forward_grid[lengths-129x33-top_w]": grid("lengths-129x33-top_w"),
    "test_forward_grid[lengths-300x300-causal]": grid("lengths-300x300-causal"),
    "test_forward_grid[lengths-300x300-top_w]": grid("lengths-300x300-top_w"),
    "test_many_blocks_of_keys[top_w]": elsewhere(test_forward.test_many_blocks_of_keys, "top_w", "key"),
    "test_no_masked_block": elsewhere(test_forward.test_no_masked_block, 64, 64),
    "test_a_bad_row[top_w]":
        elsewhere(test_forward.test_a_bad_row_reaches_only_the_queries_that_see_it, "value", np.inf, "top_w"),
    "test_selection[iid]": one_awkward_selection("iid", 3000, 130),
    "test_selection[increasing]": one_awkward_selection("increasing", 2100, 1030),
    "test_selection[ties]": one_awkward_selection("ties", 2100, 1030),
    "test_selection[special]": one_awkward_selection("special", 1500, 400),
    "test_selection[few of special]": one_awkward_selection("special", 1025, 7),
    "test_key_scores[heads 3, D 33]": elsewhere(test_forward.test_key_scores, "bfloat16", "exp", (2, 37, 3, 33)),
    "test_key_scores[heads 20]": elsewhere(test_forward.test_key_scores, "float16", "exp", (1, 35, 20, 64)),
    "test_key_scores[products]": elsewhere(test_forward.test_key_scores, "float16", "linear", (1, 37, 3, 40)),
    "test_forward_grid[float32-D64]": grid("float32-D64"),
    "test_forward_grid[float32-D4-causal]": grid("float32-D4-causal"),
    "test_a_bad_row_of_float32": elsewhere(test_forward.test_a_bad_row_of_float32, -np.finfo(np.float32).max, "top_w"),
    "test_backward_grid[float32-D40]": backward_grid("float32-D40"),
    "test_backward_grid[float32-dense-both]": backward_grid("float32-dense-both-dense=11qk-1gqk"),
    "test_backward_grid[mask-none]": backward_grid("mask-none"),
    "test_backward_grid[lengths-129x33-causal]": backward_grid("lengths-129x33-causal"),
    "test_forward_grid[mask-dense]": grid("mask-dense"),
    "test_forward_grid[causal-and-dense]": grid("causal-and-dense"),
    "test_forward_grid[dense-mask-1hqk]": grid("dense-mask-1hqk"),
    "test_backward_grid[mask-dense]": backward_grid("mask-dense"),
    "test_backward_grid[dense-both-1hqk-bhqk]": backward_grid("dense-both-dense=1hqk-bhqk"),
    "test_backward_grid[dense-both-11qk-1gqk]": backward_grid("dense-both-dense=11qk-1gqk"),
    "test_backward_grid[dense-both-b1q1]": backward_grid("dense-both-dense=b1q1-b1q1"),
    "test_dense_masks_with_gaps": elsewhere(test_backward.test_dense_masks_with_gaps, None),
    "test_a_bad_row_behind_a_dense_mask":
        elsewhere(test_backward.test_a_bad_row_reaches_no_gradient_behind_a_dense_mask, "key"),
    "test_super_tiles_of_dense_masks":
        elsewhere(test_backward.test_super_tiles_of_dense_masks, "columns", 4),
    "test_super_tiles": elsewhere(test_backward.test_super_tiles, "float16", 20),
    "test_key_scores_backward":
        elsewhere(test_backward.test_key_scores_backward, "float16", "exp", (1, 35, 20, 64)),
    "varlen[bfloat16-none]": varlen("bfloat16-none"),
    "varlen[mask-window]": varlen("mask-window"),
    "varlen[used-per_head]": varlen("used-per_head"),
    "varlen[long-per_head]": varlen("long-per_head"),
    "varlen[sixty-none]": varlen("sixty-none"),
    "varlen[pages-16-none]": varlen("pages-16-none"),
    "varlen backward[bfloat16-none]": varlen_backward("bfloat16-none"),
    "varlen backward[supers]": varlen_backward("supers"),
}

FAULTS = [
    # ---- Hopper: what is asynchronous ----
    Fault("keys are multiplied before they have come", "sm90/consumer.cuh",
          "        if (!keys_ready) barrier_wait(&shared.key_full[keys.stage], keys.phase);\n", "",
          "hopper[causal]"),
    Fault("values are multiplied before they have come", "sm90/consumer.cuh",
          "        if (!values_ready) barrier_wait(&shared.value_full[value_state.stage], value_state.phase);\n", "",
          "hopper[causal]"),
    Fault("queries are multiplied before they have come", "sm90/consumer.cuh",
          "        barrier_wait(&shared.query_full[query_state.stage], query_state.phase);\n", "", "hopper[lists, D128]"),
    Fault("keys come before their place is free", "sm90/producer.cuh",
          "        barrier_wait(&shared.key_empty[key_state.stage], key_state.phase ^ 1);\n        gather_facts",
          "        gather_facts",
          "hopper[causal]"),
    Fault("values come before their place is free", "sm90/producer.cuh",
          "        barrier_wait(&shared.value_empty[value_state.stage], value_state.phase ^ 1);\n", "", "hopper[causal]"),
    Fault("keys of whole blocks come before their place is free", "sm90/producer.cuh",
          "                if (!key_ready) barrier_wait(key_empty, key_state.phase ^ 1);\n", "", "hopper[lists, D128]"),
    Fault("queries come before their place is free", "sm90/producer.cuh",
          "    barrier_wait(empty, phase);\n    shared.tile[stage]", "    shared.tile[stage]", "hopper[causal]"),
    Fault("half of the queries' bytes are waited for", "sm90/producer.cuh",
          "barrier_expect(full, CHUNKS * BLOCK_M * CHUNK_ROW_BYTES)",
          "barrier_expect(full, CHUNKS * BLOCK_M * CHUNK_ROW_BYTES / 2)", "hopper[causal]"),
    Fault("too many bytes of keys are waited for", "sm90/gather.cuh",
          "!= 0) return;\n        barrier_expect(full, CHUNKS * BLOCK_N * CHUNK_ROW_BYTES);",
          "!= 0) return;\n        barrier_expect(full, CHUNKS * BLOCK_N * CHUNK_ROW_BYTES + 128);", "hopper[dense]"),
    Fault("keys count as there when half of the producer says so", "sm90/forward.cu",
          "barrier_init(&shared.key_full[i], 2 * PRODUCER_THREADS)",
          "barrier_init(&shared.key_full[i], PRODUCER_THREADS)", "hopper[lists]"),
    Fault("logits are read before they are there", "sm90/consumer.cuh", "        wgmma_wait<later>();\n", "",
          "hopper[causal]"),
    Fault("probabilities are replaced while they are multiplied", "sm90/forward.cu",
          "    c.commit_block(block);\n    c.wait_output();\n", "    c.commit_block(block);\n", "hopper[lists]"),
    Fault("queries come to the place of an output that is being copied", "sm90/consumer.cuh",
          "        tma_store_wait_read();\n", "", "hopper[causal]"),
    Fault("no __syncwarp before rows of output are copied", "sm90/epilogue.cuh",
          "    shared_write_fence();\n    __syncwarp();\n    if (lane_now() != 0)", "    if (lane_now() != 0)",
          "hopper[causal]"),
    Fault("lists of keys in two places", "sm90/producer.cuh", "shared.listed[block_index % LISTS]",
          "shared.listed[block_index % 2]",
          "hopper[lists]"),
    Fault("nobody gives the first turn away", "sm90/forward.cu",
          "    if (c.warpgroup() == CONSUMERS - 1) c.ping_pong_arrive();\n", "", "hopper[lists]"),
    Fault("a phase is one stage too long", "sm90/pipeline.cuh", "if (++stage == count)", "if (++stage > count)",
          "hopper[lists]"),
    # ---- Hopper: numbers and edges ----
    Fault("pieces of a row in another order", "sm90/smem.cuh", "((piece ^ row) & 7) * 8", "((piece + row) & 7) * 8",
          "hopper[lists]"),
    Fault("padding of a row is read", "sm90/gather.cuh",
          "(HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM);", "true;", "hopper[window, D40]"),
    Fault("keys that some queries see count as clear", "sm90/logits.cuh", "unmasked >= n / 2 * 32 + 32",
          "unmasked >= n / 2 * 32",
          "hopper[lists]"),
    Fault("outputs do not follow their reference", "sm90/consumer.cuh", "o[d].x[i] *= factor[fragment_row(i)];", ";",
          "hopper[rising]"),
    Fault("the sum does not follow its reference", "sm90/softmax.cuh", "            sum[r] *= factor[r];\n", "",
          "hopper[rising]"),
    Fault("products that are repeated are those of other keys", "sm90/consumer.cuh", "key = lane / 16 * 8 + lane % 8",
          "key = lane % 16", "hopper[rising]"),
    Fault("lower tiles begin where whole ones would", "common/query_tile.cuh", " - min(t.index, p.short_tiles) * (64 / HEADS)", "",
          "hopper[lower]"),
    Fault("lower tiles have the lists of whole ones", "lists/intervals.cu", " - min(tile, p.short_tiles) * p.missing_queries", "",
          "hopper[lower]"),
    Fault("lower tiles have the rows of whole ones", "sm90/scheduler.cuh", "halved || (short_tail && rest <= grid) ?", "halved ?",
          "hopper[lower]"),
    Fault("lower tiles are cut in two", "sm90/scheduler.cuh", "ROW_CUT && !short_tail && 2 *", "ROW_CUT && 2 *", "hopper[lower]"),
    Fault("lower tiles are cut in three", "sm90/scheduler.cuh", "!ROW_CUT || short_tail ? 0", "!ROW_CUT ? 0", "hopper[lower]"),
    Fault("parts of a tile have the first rows", "sm90/scheduler.cuh",
          "                t.first_query += work.first * CUT_QUERIES;\n", "", "hopper[lists]"),
    Fault("every lane has another key's bias", "sm90/smem.cuh", "KV_TMA ? 16 * n + 2 * t + k % 2 + k / 2 * 8 :",
          "KV_TMA ? 16 * n + 4 * t + k :",
          "hopper[causal]"),
    Fault("rows of a run in the order of rows", "sm90/smem.cuh",
          "return KV_TMA ? key : key / 32 * 32 + key % 8 / 2 * 8 + key / 8 % 4 * 2 + key % 2;", "return key;",
          "hopper[dense]"),
    Fault("large products take the polynomial", "sm90/logits.cuh", "square < polynomials[1].square",
          "square < 900.0f * polynomials[1].square", "hopper[causal, softcap]"),
    Fault("a polynomial is held to hold", "sm90/softmax.cuh", "static_cast<int>(signs[0] & signs[1]) < 0)",
          "true)", "hopper[softcap]"),
    Fault("references of rows that see one key are 0", "sm90/consumer.cuh", "block.is_full() && !shared.isolate_nonfinite",
          "!shared.isolate_nonfinite", "hopper[softcap and bias]"),
    Fault("references are 0 where sums overflow", "sm90/consumer.cuh", "block.is_full() && !shared.isolate_nonfinite",
          "block.is_full()", "hopper[softcap, large values]"),
    Fault("one of a lane's two rows may overflow", "sm90/epilogue.cuh",
          "nonfinite = add_zero_times(add_zero_times(nonfinite, words[1]), words[3]);", ";", "hopper[softcap, a large row]"),
    Fault("polynomials do not know of references that are not 0", "sm90/consumer.cuh",
          "            if (!softmax.max_is_zero()) polynomials = 0;\n", "", "hopper[softcap and large bias]"),
    Fault("biases beside softcaps are natural", "sm90/producer.cuh", "1.0f / p.scale : LOG2_E", "1.0f / p.scale : 1.0f",
          "hopper[softcap and bias]"),
    Fault("products are not repeated for the next polynomial", "sm90/consumer.cuh",
          "        recompute_logits();\n        --polynomials;", "        --polynomials;", "hopper[softcap]"),
    Fault("a section begins with the last tile of the one before", "sm90/scheduler.cuh",
          "rest = (wave - groups * waves) * grid + own",
          "rest = (wave - groups * waves) * grid + own - groups", "hopper[sections]"),
    Fault("sections have a round too few", "sm90/scheduler.cuh", "(p.swizzle_group * p.tiles + grid - 1) / grid, groups",
          "p.swizzle_group * p.tiles / grid, groups", "hopper[sections]"),
    Fault("lanes without a piece of a row read behind the tile", "sm90/epilogue.cuh", "min(piece, ROW_PIECES - 1)",
          "piece", "test_forward_grid[Hopper, heads-6/2]"),
    Fault("several warps write a flag as if they were alone", "sm90/epilogue.cuh", "raise(nonfinite_seen);", "nonfinite_seen = 1;",
          "hopper[not finite]"),
    Fault("a block does not begin again", "sm90/forward.cu", "    return shared.nonfinite_seen != 0;", "    return false;",
          "hopper[not finite]"),
    # ---- Hopper: parts of tiles ----
    Fault("a part begins with the list's first key", "sm90/scheduler.cuh",
          "source.first = blocks * split / num_splits * BLOCK_N;", "source.first = 0;", "hopper[parts, none]"),
    Fault("a part has a block of the next one", "sm90/scheduler.cuh", "blocks * (split + 1) / num_splits * BLOCK_N",
          "(blocks * (split + 1) / num_splits + 1) * BLOCK_N", "hopper[parts, none]"),
    Fault("whole blocks of a part are the list's first ones", "sm90/producer.cuh", " + FIRST(blocks.source);\n",
          ";\n", "hopper[parts, lists]"),
    Fault("whole blocks are counted from the list's beginning", "sm90/producer.cuh", " - FIRST(source), 0)", ", 0)",
          "hopper[parts, lists]"),
    Fault("a part leaves its results where another does", "sm90/split_kv.cuh", "row_of_split(blockIdx.x, row)",
          "row_of_split(blockIdx.x / 2, row)", "hopper[parts, none]"),
    Fault("a part that is not finite goes unnoticed", "sm90/split_kv.cuh", "if (nonfinite != 0.0f) raise(nonfinite_seen);", "",
          "hopper[parts, not finite]"),
    Fault("the last part is taken for a whole tile", "sm90/consumer.cuh", "if (blockIdx.x < launch.splits.blocks) {",
          "if (blockIdx.x + 1 < launch.splits.blocks) {", "hopper[parts, none]"),
    Fault("all parts have the same weight", "sm90/combine.cu", "exp2_fast((own[i] - highest) * LOG2_E)", "1.0f",
          "hopper[parts, none]"),
    Fault("parts in which a row sees nothing count", "sm90/combine.cu", " || own[i] == -infinity()) continue;",
          ") continue;", "hopper[parts, nobody]"),
    Fault("a sum of exponentials by another reference", "sm90/combine.cu", "= highest + logf(sum);", "= logf(sum);",
          "hopper[parts, none]"),
    Fault("the sum goes to the first tiles", "sm90/combine.cu", "tile_at(p.first + split_tile,", "tile_at(split_tile,",
          "hopper[parts, none]"),
    Fault("the sum misses the last part", "sm90/combine.cu", "if (begin + i >= p.num_splits ||",
          "if (begin + i >= p.num_splits - 1 ||", "hopper[parts, none]"),
    # ---- barriers and asynchronous copies ----
    Fault("no barrier before the first block of keys", "sm80/forward.cu", "    __syncthreads();  // the query rows and",
          "    // the query rows and", "test_forward_grid[heads-4/2-top_w]"),
    Fault("no barrier in the loop over blocks", "sm80/forward.cu", "        __syncthreads();  // this block's rows",
          "        // this block's rows", "test_forward_grid[mask-none]"),
    Fault("no wait for the block's rows", "sm80/forward.cu", "        copy_async_wait<0>();\n        __syncthreads();",
          "        __syncthreads();", "test_forward_grid[mask-none]"),
    Fault("no wait for the first indices", "sm80/forward.cu",
          "    copy_async_wait<0>();\n    round_rows", "    round_rows",
          "test_forward_grid[heads-4/2-top_w]"),
    Fault("no barrier before values are cleared", "sm80/gather.cuh",
          "    __syncthreads();  // all threads have read the values", "    // all threads have read the values",
          "test_a_bad_row[top_w]"),
    Fault("no __syncwarp before the output is read back", "sm80/gather.cuh", "    __syncwarp();  // the warp's rows",
          "    //", "test_forward_grid[mask-none]"),
    Fault("no __syncwarp before the query rows are overwritten", "sm80/gather.cuh", "    __syncwarp();  // no lane reads",
          "    //", "test_no_masked_block"),
    Fault("no barrier before warp sums are read", "common/block_select.cuh", "    __syncthreads();  // every warp's sum is",
          "    //", "test_selection[iid]"),
    Fault("no barrier before the histogram is counted", "common/block_select.cuh",
          "    __syncthreads();  // every warp's range and number are in place", "    //", "test_selection[iid]"),
    Fault("no barrier before the part of the answer is read", "common/block_select.cuh",
          "        __syncthreads();  // the part of the answer", "        //", "test_selection[iid]"),
    Fault("all warps of a tile list its keys", "lists/intervals.cu", "any && lane == tile_lane &&", "any &&",
          "test_forward_grid[lengths-300x300-top_w]"),
    Fault("no barrier before found keys are sorted", "lists/intervals.cu", "        __syncthreads();  // all keys of this step",
          "        //", "test_forward_grid[lengths-300x300-top_w]"),
    Fault("no barrier after weights are loaded", "select/key_scores.cu", "    __syncthreads();  // the weights are", "    //",
          "test_key_scores[heads 3, D 33]"),
    Fault("no barrier before weights are replaced", "select/key_scores.cu", "    __syncthreads();  // all threads are done with",
          "    //", "test_key_scores[heads 20]"),
    # ---- edges ----
    Fault("one query row too many", "sm80/gather.cuh",
          "first_row + row >= QUERIES * HEADS || query >= t.end_query) continue",
          "first_row + row >= QUERIES * HEADS || query > t.end_query) continue", "test_forward_grid[mask-none]"),
    Fault("the output's tail is not written", "sm80/gather.cuh", "i < WARP_ROWS * 16 * (HEAD_DIM / WIDTH); i += 32",
          "i < WARP_ROWS * 16 * (HEAD_DIM / WIDTH) - 32; i += 32", "test_forward_grid[lengths-300x300-top_w]"),
    Fault("lse is written by four lanes", "sm80/forward.cu", "if ((lane & 3) == 0 && row < QUERIES", "if (row < QUERIES",
          "test_forward_grid[mask-none]"),
    Fault("a row is read past its end", "common/smem_rows.cuh", "if (exists && d < HEAD_DIM) x",
          "if (exists && d <= HEAD_DIM) x", "test_forward_grid[float16-D3]"),
    Fault("the padding of a row is read", "common/smem_rows.cuh", "exists = exists && piece * PIECE < HEAD_DIM;", "",
          "test_forward_grid[bfloat16-D40]"),
    Fault("a partial block counts as whole", "common/mask.cuh", "block.masked = next_key + BLOCK_N > unmasked",
          "block.masked = next_key + 1 > unmasked", "test_forward_grid[mask-none]"),
    Fault("one key too many is scored", "select/key_scores.cu", "if (key < p.key_length && head",
          "if (key <= p.key_length && head", "test_key_scores[heads 3, D 33]"),
    Fault("one key too many is multiplied", "select/key_scores.cu", "HEADS && key < p.key_length", "HEADS && key <= p.key_length",
          "test_key_scores[products]"),
    Fault("channels behind the last one are multiplied", "select/key_scores.cu", "|| piece < PIECES", "|| piece <= PIECES",
          "test_key_scores[products]"),
    Fault("a key behind the last one is read", "select/key_scores.cu", "8 * r, p.key_length - 1)", "8 * r, p.key_length)",
          "test_key_scores[products]"),
    Fault("a chunk is searched short", "lists/intervals.cu", "        last_chunk = c;", "        last_chunk = max(c - 1, 0);",
          "lists_over_chunks"),
    Fault("the first chunk of a tile is missed", "lists/intervals.cu", "info.z <= first) continue",
          "info.z - 1000 <= first) continue", "lists_over_chunks"),
    # ---- masks ----
    Fault("a key is seen at its stop", "common/mask.cuh", "start <= position && position < stop",
          "start <= position && position <= stop", "test_forward_grid[heads-4/2-top_w]"),
    Fault("a block that begins within the tile is skipped", "common/mask.cuh", "seen = s.x <= last_position",
          "seen = s.x < first_position", "test_forward_grid[heads-4/2-top_w]"),
    Fault("positions count from the first key", "common/query_tile.cuh",
          "t.first_position = t.first_query + p.key_length - p.query_length", "t.first_position = t.first_query",
          "test_forward_grid[lengths-33x129-causal]"),
    Fault("partial keys count as full", "lists/intervals.cu", "own[k].x <= group_first && own[k].y > group_last ? 1",
          "own[k].x <= group_first && own[k].y > group_first ? 1", "lists_over_chunks"),
    Fault("keys that die within the tile count as full", "lists/intervals.cu", "v.x <= first_position && v.y > last_position",
          "v.x <= first_position && v.y > first_position", "lists_over_chunks"),
    Fault("mask rows of other batches", "common/query_tile.cuh", "(long long)t.batch * p.mask_batch",
          "(long long)0 * p.mask_batch", "test_forward_grid[mask-per_batch]"),
    # ---- dense masks ----
    Fault("bits of a word in the wrong order", "lists/dense_mask.cu", "__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)",
          "__byte_perm(b, a, 0x5410), __byte_perm(a, b, 0x7632)", "test_forward_grid[mask-dense]"),
    Fault("one byte of four is taken for all", "lists/dense_mask.cu", "row[(key + k) * p.dense_key]", "row[key * p.dense_key]",
          "test_forward_grid[mask-dense]"),
    Fault("keys that some see count as full", "lists/dense_mask.cu", "(own[k] & existing[w]) == existing[w]",
          "(own[k] & existing[w]) != 0", "test_forward_grid[mask-dense]"),
    Fault("causality is not packed", "lists/dense_mask.cu", "seen &= bits_between(first_position, key, NEVER)",
          "seen &= ALL_LANES", "test_forward_grid[causal-and-dense]"),
    Fault("the words of another query head", "lists/dense_mask.cu", "head / p.dense_share * p.dense_head", "0 * p.dense_head",
          "test_forward_grid[dense-mask-1hqk]"),
    Fault("the word of another warp", "sm80/gather.cuh", "WARP_ROWS * 16 / HEADS / 32][column]",
          "WARP_ROWS * 16 / 32][column]", "test_forward_grid[mask-dense]"),
    Fault("steps that some pairs see count as whole", "lists/dense_mask.cu", "all == existing ? 3 : 1", "3",
          "test_backward_grid[dense-both-11qk-1gqk]"),
    Fault("steps of listed keys that some pairs see count as whole", "lists/dense_macro_tiles.cu",
          "(whole & existing) == existing ? 3 : 1", "3", "test_backward_grid[mask-dense]"),
    Fault("a list of a super-tile begins in the one before", "lists/dense_macro_tiles.cu", "if (s < super) own_first",
          "if (s < super - 1) own_first", "test_super_tiles_of_dense_masks"),
    Fault("keys of other query heads are not listed", "lists/dense_macro_tiles.cu", "head < p.share; ++head", "head < 1; ++head",
          "test_super_tiles_of_dense_masks"),
    Fault("keys that nobody sees get no gradient", "sm80/backward_reduce.cu", "supers == 1 && slots[0] >= 0) return",
          "supers == 1) return", "test_a_bad_row_behind_a_dense_mask"),
    Fault("super-tiles that do not see a key are added", "sm80/backward_reduce.cu", "return slot < 0 ? -1 : row",
          "return slot < 0 ? 0 : row", "test_super_tiles_of_dense_masks"),
    Fault("sums over some of the queries are written as results", "sm80/key_tile.cuh",
          "end_query - first_query == p.query_length", "true", "test_super_tiles_of_dense_masks"),
    Fault("the words of other keys", "sm80/backward_dkv.cu", "p.key_stride + shared.index[i % BLOCK_N], 4",
          "p.key_stride + i % BLOCK_N, 4", "test_super_tiles_of_dense_masks"),
    Fault("every other step is left out", "sm80/backward_dkv.cu", "        pending &= pending - 1;",
          "        pending &= pending - 1, pending &= pending - 1;", "test_dense_masks_with_gaps"),
    Fault("the words of the first step", "sm80/backward_dkv.cu", "p.query_words + step.first / 32) * p.key_stride",
          "p.query_words) * p.key_stride", "test_dense_masks_with_gaps"),
    # ---- dense biases ----
    Fault("gathered keys are taken to follow each other", "sm80/gather.cuh",
          "index[BLOCK_N - 1] - index[0] == BLOCK_N - 1 && index[0]", "index[0]", "gathered_biases"),
    Fault("biases of queries past the last are read", "common/bias.cuh", "const bool exists = row < source.count;",
          "const bool exists = true;", "gathered_biases"),
    Fault("the bias is not turned over for the key gradient", "sm80/backward_dkv.cu",
          "shared.bias_rows[stage].x[column * BiasTile", "shared.bias_rows[stage].x[n * BiasTile",
          "test_backward_grid[dense-both-1hqk-bhqk]"),
    Fault("keys that no tile looks at get no bias gradient", "sm80/backward_dq.cu", "length == p.key_length) return;",
          "length != 0) return;", "test_dense_masks_with_gaps"),
    Fault("hidden pairs get bias gradients", "sm80/backward_dq.cu", "        if (current.masked) apply_mask(dp",
          "        if (false) apply_mask(dp", "test_backward_grid[dense-both-1hqk-bhqk]"),
    Fault("no __syncwarp before bias gradients are stored", "sm80/backward_dq.cu",
          "    __syncwarp();  // the warp's rows are complete\n    const int count", "    const int count",
          "test_backward_grid[dense-both-1hqk-bhqk]"),
    Fault("a shared bias misses a head", "sm80/backward_dbias.cu", "t.first_head < first_head + sharing",
          "t.first_head < first_head + sharing - 1", "test_backward_grid[dense-both-11qk-1gqk]"),
    Fault("no barrier before the rows of a shared bias are used", "sm80/backward_dbias.cu",
          "                __syncthreads();  // rows, biases", "                //",
          "test_backward_grid[dense-both-11qk-1gqk]"),
    Fault("no barrier before they are replaced", "sm80/backward_dbias.cu", "    __syncthreads();  // all threads are done with",
          "    //", "test_backward_grid[dense-both-11qk-1gqk]"),
    Fault("half of a row's sum over keys", "sm80/backward_dbias.cu", "            total = row_sum(total);\n", "",
          "test_backward_grid[dense-both-b1q1]"),
    # ---- numbers ----
    Fault("the accumulator is not rescaled", "sm80/forward.cu", "o[m][d].x[i] *= rescale[fragment_row(i)];", ";",
          "test_forward_grid[lengths-300x300-causal]"),
    Fault("uninitialised statistics", "common/softmax.cuh", ": m{-infinity(), -infinity()}, l{0.0f, 0.0f} {}", "{}",
          "test_forward_grid[lengths-129x33-top_w]"),
    Fault("the sum is not rescaled", "common/softmax.cuh", "            l[r] *= rescale[r];\n", "",
          "test_forward_grid[lengths-300x300-causal]"),
    Fault("lse in the wrong units", "common/softmax.cuh", "LN_2 * m[r] + logf", "m[r] + logf",
          "test_forward_grid[mask-none]"),
    Fault("the wrong head of a group", "sm80/gather.cuh", "row % HEADS * head, piece",
          "(HEADS - 1 - row % HEADS) * head, piece", "test_forward_grid[mask-none]"),
    Fault("the wrong slot of indices", "sm80/forward.cu", "after_slot = next_slot == 2 ? 0",
          "after_slot = next_slot == 2 ? 1", "test_many_blocks_of_keys[top_w]"),
    Fault("bad values are not isolated", "sm80/forward.cu", "            isolate_nonfinite(o, shared",
          "            if (false) isolate_nonfinite(o, shared", "test_a_bad_row[top_w]"),
    # ---- float32 through TF32 ----
    Fault("the rows of values in the order of the keys", "common/arch.cuh", "(8 * (i >> 2) + 2 * (lane & 3) + (i & 1)) * ld",
          "(8 * (i >> 2) + (lane & 3) + 4 * (i & 1)) * ld", "test_forward_grid[float32-D64]"),
    Fault("queries are not rounded to TF32", "sm80/forward.cu", "    round_rows<BLOCK_M, THREADS>(shared.query);\n", "",
          "test_forward_grid[float32-D64]"),
    Fault("keys are rounded ahead of their copies", "common/smem_rows.cuh", "    copy_async_wait<0>();\n    for_each_piece",
          "    for_each_piece", "test_backward_grid[float32-D40]"),
    Fault("rows of a shared bias are not rounded to TF32", "sm80/backward_dbias.cu",
          "                round_rows<BLOCK_M, THREADS>(shared.dout);\n", "", "test_backward_grid[float32-dense-both]"),
    Fault("pieces of eight floats", "sm80/gather.cuh", "constexpr int WIDTH = VECTOR ? PIECE : 1;",
          "constexpr int WIDTH = VECTOR ? 8 : 1;", "test_forward_grid[float32-D4-causal]"),
    Fault("what rounds to infinity counts as finite", "common/arch.cuh", "(x & 0x7fffffffu) + 0x00801000u",
          "(x & 0x7fffffffu) + 0x00800000u", "test_a_bad_row_of_float32"),
    # ---- selection ----
    Fault("the oldest of equals is kept", "select/prefix_top_w.cu", "            mark([&](int) { return rank - 1; });",
          "            mark([&](int) { return rank; });", "test_selection[ties]"),
    Fault("-0 ranks below +0", "common/rank.cuh", "__float_as_uint(score + 0.0f)", "__float_as_uint(score)",
          "test_selection[special]"),
    Fault("NaN of either sign ranks by its bits", "common/rank.cuh", "    if (isnan(score)) return 0xffffffffu;\n", "",
          "test_selection[special]"),
    Fault("bins keep what was counted", "common/block_select.cuh", "            bin = 0;\n", "", "test_selection[iid]"),
    Fault("what is no candidate counts beside NaN", "common/block_select.cuh",
          "min((1u << shift) - 1, range.low + range.span - low)", "(1u << shift) - 1",
          "test_selection[few of special]"),
    Fault("all keys of equal rank are taken", "common/block_select.cuh", "    if (missing > 0) {", "    if (missing < 0) {",
          "test_selection[ties]"),
    Fault("one kept key is forgotten", "select/prefix_top_w.cu", "p.kept_count[row.chunk(c)] = best.count;",
          "p.kept_count[row.chunk(c)] = max(best.count - 1, 0);", "test_selection[iid]"),
    Fault("one key that can die is held safe", "select/prefix_top_w.cu", "coming - (p.window - held.count))",
          "coming - (p.window - held.count) - 1)", "test_selection[increasing]"),
    Fault("padding is ignored", "select/prefix_top_w.cu", "p.padding[batch * p.padding_batch + j] == 0", "false",
          "test_selection[iid]"),
    # ---- gradients ----
    Fault("no wait for the query rows of a step", "sm80/backward_dkv.cu",
          "            copy_async_wait<0>();\n            __syncthreads();  // this step's",
          "            __syncthreads();  // this step's", "test_backward_grid[mask-none]"),
    Fault("no barrier in the loop over queries", "sm80/backward_dkv.cu",
          "            __syncthreads();  // this step's rows", "            //", "test_backward_grid[mask-none]"),
    Fault("no wait for the key rows of dquery", "sm80/backward_dq.cu",
          "        copy_async_wait<0>();\n        __syncthreads();", "        __syncthreads();",
          "test_backward_grid[mask-none]"),
    Fault("a sum misses its last super-tile", "sm80/backward_reduce.cu",
          "for (int i = 0; i < supers; ++i) {\n            const",
          "for (int i = 0; i < supers - 1; ++i) {\n            const", "test_super_tiles"),
    Fault("dkey is not scaled", "sm80/backward_dkv.cu", "p.dkey, p.partial_key, p.scale)", "p.dkey, p.partial_key, 1.0f)",
          "test_super_tiles"),
    Fault("rows that see nothing get weights", "sm80/backward_dkv.cu", "own_lse == -infinity() ? infinity() : ", "",
          "test_backward_grid[lengths-129x33-causal]"),
    Fault("keys that come late are left out of a super-tile", "lists/intervals.cu",
          "return v.y <= last ? 0 : v.x <= first ? 1 : 2;", "return v.y <= last ? 0 : v.x <= first ? 1 : 3;",
          "test_super_tiles"),
    Fault("no barrier before ddt is read", "select/key_scores_backward.cu",
          "        __syncthreads();  // ddt is in place\n#pragma", "#pragma", "test_key_scores_backward"),
    # ---- decoding ----
    Fault("every block changes the state", "decode/step.cu", "        if (!shared.last) return;", "        //",
          "decoding[several parts]"),
    Fault("no barrier before the ticket of a part", "decode/step.cu", "        __syncthreads();  // the block's results are",
          "        //", "decoding[several parts]"),
    Fault("of equal scores the oldest wins", "decode/step.cu", "ordered(score) >= ordered(", "ordered(score) > ordered(",
          "decoding"),
    Fault("a recent key is given away too early", "decode/step.cu", "position > now - p.recent);",
          "position > now - p.recent + 1);", "decoding[sinks and recent]"),
    Fault("the key that leaves the top stays in it", "decode/step.cu", "if (number == change.dropped || position < 0)",
          "if (position < 0)", "decoding[sinks and recent]"),
    Fault("a row of outputs is rescaled by another row's maximum", "decode/split_kv.cuh",
          "rescale[r], 8 * t);  // of row", "rescale[r], 8 * t + 4);  // of row", "few_queries"),
    Fault("no barrier before the query is read", "decode/step.cu", "        __syncthreads();  // the query and the token",
          "        //", "decoding[several parts]"),
    Fault("the slot's old key is multiplied, not the token's", "decode/step.cu", "if (here) take_key(",
          "if (false) take_key(", "decoding[several parts]"),
    Fault("the slot's old value is added, not the token's", "decode/step.cu", "if (here) take_value(",
          "if (false) take_value(", "decoding[several parts]"),
    Fault("the score kept beside the lowest key is the token's", "decode/step.cu", "from_ordered(lowest.rank);",
          "change.score;", "decoding[sinks and recent]"),
    Fault("no barrier before the ticket of a count", "select/last_queries_top_w.cu", "    __syncthreads();  // the block's counts",
          "    //", "last_queries[1]"),
    Fault("the last digit of the best is taken for one higher", "select/last_queries_top_w.cu",
          "const Ranked digit = DIGITS - 1 -", "const Ranked digit = DIGITS -", "last_queries[1]"),
    Fault("a key is seen for one position too long", "decode/flash_decode.cu", "rows.last_position < stop;",
          "rows.last_position <= stop;", "few_queries[window]"),
    Fault("arrivals push out nobody", "select/last_queries_top_w.cu", "&& --remaining == 0)", "&& --remaining < 0)",
          "last_queries[4]"),
    # ---- kernels one behind the other ----
    Fault("a kernel does not wait for the one ahead", "lists/varlen.cu", "    wait_for_earlier_kernels();\n", "",
          "varlen[mask-window]"),
    Fault("values are read ahead of the wait", "select/key_scores.cu",
          "    wait_for_earlier_kernels();\n#if TENSOR_CORES\n    score_keys(p);\n",
          "#if TENSOR_CORES\n    score_keys(p);\n    wait_for_earlier_kernels();\n", "test_key_scores[products]"),
    Fault("only producers wait for the kernel ahead", "sm90/forward.cu", "    wait_for_earlier_kernels();\n",
          "    if (threadIdx.x < PRODUCER_THREADS) wait_for_earlier_kernels();\n", "hopper[causal]"),
    # ---- sequences ----
    Fault("a tile runs on into the next sequence", "common/varlen.cuh", "min(row + size, end[b])", "row + size",
          "varlen[bfloat16-none]"),
    Fault("the search for a sequence leaves some out", "common/varlen.cuh", "high = min(high, low + step);",
          "high = min(high, low + step - 1);", "varlen[sixty-none]"),
    Fault("sequences are aligned at their first keys", "lists/varlen.cu", "shift = key_end - end;",
          "shift = p.bounds[2 * n + b] - first;", "varlen[mask-window]"),
    Fault("keys that are not in use count", "lists/varlen.cu", "const bool used = key < key_end;",
          "const bool used = true;", "varlen[used-per_head]"),
    Fault("the last chunk of a sequence is missed", "common/query_tile.cuh", "chunks[(t.end_key - 1) / p.chunk]",
          "chunks[t.first_key / p.chunk]", "varlen[long-per_head]"),
    Fault("every key is the first of its page", "sm80/gather.cuh", "exists ? key % PAGE_SIZE : 0", "0",
          "varlen[pages-16-none]"),
    Fault("queries of the sequence before get weights", "sm80/backward_dkv.cu",
          "t.first_query + (range.begin - t.first_query) / BLOCK_Q", "range.begin / BLOCK_Q",
          "varlen backward[bfloat16-none]"),
    Fault("further super-tiles lie on each other", "common/varlen.cuh", "(bounds[b] / queries + k - 1) * capacity",
          "(bounds[b] / queries) * capacity", "varlen backward[supers]"),
]


@pytest.fixture(autouse=True)
def quiet():
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@pytest.mark.parametrize("name", OWN)
def test_sound_kernels_pass(name):
    """The checks of other files run there."""
    OWN[name]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_caught(fault, monkeypatch, record_property):
    text = (jit.kernels_directory() / fault.file).read_text()
    assert text.count(fault.old) == 1, "the kernel has changed: adapt the fault"
    original = jit.source_text
    monkeypatch.setattr(jit, "source_text", lambda name: original(name).replace(fault.old, fault.new))
    with emulator.using(), pytest.raises((emulator.EmulatorError, AssertionError)) as caught:
        CHECKS[fault.caught_by]()
    lines = [line.strip() for line in str(caught.value).splitlines() if line.strip()]
    kind = "" if caught.type is emulator.EmulatorError else "wrong result: "
    record_property("fault", fault.name)
    record_property("caught", f"{fault.caught_by}: {kind}{lines[0] if lines else ''}")
