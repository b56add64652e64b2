"""Every kernel once, on small odd shapes, for a run under compute-sanitizer:

    compute-sanitizer --tool memcheck  python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize
    ... python -m tests.gpu.sanitize forward varlen                    some kernels only
    ... python -m tests.gpu.sanitize backward --share 2/4              every fourth case, from the second on

CuPy's memory pool is off: every array has its own allocation, so compute-sanitizer sees reads past its end. Results are
also checked against the oracle. ``make sanitize`` runs both tools.
"""
import argparse
import contextlib
import functools
import io
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import cupy
import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends import cuda
from cupy_dma.backends.cuda.attention import sm90_schedule, sm90_stored
from cupy_dma.backends.cuda.attention.sm90_splits import QuerySplits
from cupy_dma.backends.cuda.attention.sm90_tiles import TILES, HopperTile
from cupy_dma.backends.cuda.decode import step
from cupy_dma.backends.cuda.runtime.device import CudaRuntime
from cupy_dma.backends.cuda.runtime.program import fresh, overridden
from cupy_dma.backward import attention_backward, varlen_attention_backward
from tests.gpu.sm90_tiles import portable, taken
from tests.oracle import (
    cases,
    delay_cases,
    reference,
    schedule_cases,
    score_cases,
    selection_cases,
    varlen_cases,
)
from tests.oracle.cache_cases import History, packed

LENGTHS = ("lengths-1x70", "lengths-33x129", "lengths-129x33")
NAMES = ("float32-", "float16-D64", "bfloat16-D128", "bfloat16-D40", "float16-D3", "bfloat16-D256", "mask-",
         "causal-and-", "window-1", "bias-", "softcap-", "layout-bhsd", "layout-head_slice", "dense-both",
         "dense-columns", "dense-sizes", *LENGTHS)
HOPPER_NAMES = ("float16-D64", "bfloat16-D128", "bfloat16-D40", "mask-causal", "mask-padding", "mask-top_w_padding",
                "softcap-key", "lengths-129x33-causal", "lengths-300x300", "causal-and-dense", "dense-mask-1gqk",
                "dense-columns-key")

share = slice(None)  # share of each grid's cases


def forward(dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")) -> int:
    chosen = [c for c in cases.CASES if c.name.startswith(NAMES) and c.dtype in dtypes][share]
    for case in chosen:
        cases.check(case, *cases.run(case, cupy.asarray), tf32=True)
    return len(chosen)


def hopper_forward(tile: HopperTile, largest: int) -> int:
    """The Hopper kernel with this tile, even where it is not the fastest: on two SMs, so that CTAs process several
    tiles and an odd last tile is cut by rows; and on more SMs, with tiles split along their keys."""
    if not cuda.runtime.hopper(0):
        return 0

    smallest = 65 if tile.block_n < 64 else 1  # only large head dims use blocks of 32 keys
    with (fresh(), taken(tile, range(smallest, largest + 1)),
          mock.patch.object(CudaRuntime, "num_sms", lambda runtime, index: 2)):
        return (forward(("float16", "bfloat16")) + varlen_forward(("float16", "bfloat16")) + rising_logits(largest)
                + schedules(largest))


def rising_logits(head_dim: int) -> int:
    """Logits that rise so far that exponentials overflow float32, or nearly; with and without lists; and with a softcap
    that is large compared to most logits."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 300, heads, head_dim)).astype(np.float16) for heads in (2, 1, 1))
    count = 0
    for slope, softcap in ((0.4, 0.0), (3.0, 0.0), (0.4, 12.0)):
        bias = np.broadcast_to(slope * np.arange(300, dtype=np.float32), (1, 1, 300))
        for window in (None, 200):
            results = []
            for move in (cupy.asarray, np.asarray):
                q, k, v, b = (move(x) for x in (query, key, value, bias))
                mask = None if window is None else dma.IntervalMask.sliding_window(300, window, like=q)
                results.append(dma.attention(q, k, v, mask=mask, bias=b, causal=True, softcap=softcap))
            ours, expected = results[0].get().astype(np.float64), results[1].astype(np.float64)
            assert np.abs(ours - expected).max() < 2**-6 * np.abs(value).max()
            count += 1
    return count


def schedules(head_dim: int) -> int:
    """Several SMs give the results of one: tiles cut by rows, split along their keys, or short; and keys that do not
    fit into L2, where CTAs shift by one place from each full wave to the next."""
    count = 0
    rotated = mock.patch.multiple(sm90_schedule, SWIZZLE_GROUP_BYTES=1, _rotation=lambda *facts: 1)
    for names, sms, how, around in (
            (schedule_cases.CASES, (2,), {}, contextlib.nullcontext()),
            (schedule_cases.CASES, (7, 25), {"split": True}, contextlib.nullcontext()),
            (("none", "lists", "lists of all tiles"), (6, 10), {"short_tiles": True}, contextlib.nullcontext()),
            (("lists",), (2, 3), {}, rotated)):
        for name in names:
            with around:
                results = []
                for num_sms, options in ((1, {}), *((n, how) for n in sms)):
                    with schedule_cases.num_sms(num_sms, **options):
                        results.append(schedule_cases.run(name, 2, 1, head_dim, cupy.asarray, length=303))
            exact = not how and schedule_cases.CASES[name]
            for ours, expected, error in ((*pair, error) for others in results[1:]
                                          for *pair, error in zip(others, results[0], (2**-8, 1e-4))):
                assert not exact or cupy.array_equal(ours.view(cupy.int16), expected.view(cupy.int16))
                assert cupy.allclose(ours.astype("f4"), expected.astype("f4"), rtol=0, atol=error, equal_nan=True)
            count += 1
    return count


def backward() -> int:
    chosen = [c for c in cases.CASES if c.name.startswith(NAMES) and c.dtype in ("float16", "bfloat16", "float32")]
    chosen = chosen[share]
    for case in chosen:
        gradients = cases.run_backward(case, cupy.asarray, with_dlse=True)
        cases.check_backward(case, gradients, with_dlse=True, tf32=True)
    return len(chosen)


def super_tiles() -> int:
    """Lengths of several super-tiles: their lists, partial sums, and the final sum."""
    rng = np.random.default_rng(0)
    for dtype, size in (("bfloat16", 64), ("float16", 20), ("float32", 64)):
        q, k, v = (rng.standard_normal((1, 700, heads, size)).astype(numpy_dtype(dtype)) for heads in (2, 1, 1))
        scores = rng.standard_normal((1, 1, 700)).astype(np.float32)
        found = []
        for move in (cupy.asarray, np.asarray):
            args, bias = [move(x) for x in (q, k, v)], move(scores)
            mask = dma.IntervalMask.top_w(bias, 40)
            out, lse = dma.attention(*args, mask=mask, bias=bias, return_lse=True)
            found.append(attention_backward(args[0], *args, out, lse, mask=mask, bias=bias))
        for ours, other in zip(*found):
            reference.check_norm(cupy.asnumpy(ours), other)
    return 3


def lifetimes() -> int:
    """Masks without a bound, portable and Hopper, forward and backward, in one pass and two, whole tiles and splits."""
    rng, count = np.random.default_rng(0), 0
    kernels = [(False, None), (True, True), (True, False)] if cuda.runtime.hopper(0) else [(False, None)]
    splits = QuerySplits(), QuerySplits(2, 2)
    for (size, keys, queries), own in itertools.product(((64, 300, 300), (128, 260, 130), (40, 2200, 100)), splits):
        q, dout, k, v = (rng.standard_normal((1, n, heads, size)).astype(numpy_dtype("bfloat16"))
                         for n, heads in ((queries, 2), (queries, 2), (keys, 1), (keys, 1)))
        stop = (np.arange(keys) + np.exp(rng.normal(4, 1.5, (1, keys)))).astype(int)
        for hopper, one_pass in kernels:
            with (schedule_cases.hopper_gradients(one_pass), fresh(hopper=None if hopper else False,
                                                                   query_splits=own)):
                found = []
                for move in (cupy.asarray, np.asarray):
                    *args, upstream = map(move, (q, k, v, dout))
                    mask = dma.IntervalMask.from_stop(move(stop))
                    out, lse = dma.attention(*args, mask=mask, return_lse=True)
                    found.append(attention_backward(upstream, *args, out, lse, mask=mask,
                                                    deterministic=not one_pass)[:3])
                    found[-1] += _packed(*(x[0] for x in (upstream, *args)), mask)
            for ours, other in zip(*found):
                reference.check_norm(cupy.asnumpy(ours), other)
            count += 1
    return count


def _packed(dout: Any, query: Any, key: Any, value: Any, mask: dma.IntervalMask) -> tuple[Any, ...]:
    """The same tokens as two sequences: output and gradients."""
    bounds = [[0, len(x) // 3, len(x)] for x in (query, key)]
    out, lse = dma.varlen_attention(query, key, value, *bounds, mask=mask, return_lse=True)
    return (out, *varlen_attention_backward(dout, query, key, value, out, lse, *bounds, mask=mask)[:3])


def delays() -> int:
    """Biases with a delay, with the kernels of ``lifetimes``."""
    chosen = [c for c in delay_cases.CASES + delay_cases.LONG if c.dtype != "float64"][share]
    kernels = [(False, None), (True, True), (True, False)] if cuda.runtime.hopper(0) else [(False, None)]
    for case, (hopper, one_pass) in itertools.product(chosen, kernels):
        with schedule_cases.hopper_gradients(one_pass), fresh(hopper=None if hopper else False):
            cases.check(case, *cases.run(case, cupy.asarray), tf32=True)
            cases.check_backward(case, cases.run_backward(case, cupy.asarray), tf32=True)
    return len(chosen) * len(kernels)


def hopper_backward() -> int:
    """The Hopper gradients in two passes (also from dS stored in chunks) and in one, on two SMs, so that CTAs process
    several tiles, and on many, so that tiles are split."""
    if not cuda.runtime.hopper(0):
        return 0
    count, chosen = 0, [c for c in cases.CASES if c.name.startswith(HOPPER_NAMES)][share]
    for one_pass, sms in itertools.product((False, True), (2, 132)):
        with (fresh(), mock.patch.object(CudaRuntime, "num_sms", lambda runtime, index, sms=sms: sms),
              schedule_cases.hopper_gradients(one_pass)):
            for case in chosen:
                cases.check_backward(case, cases.run_backward(case, cupy.asarray, with_dlse=True), with_dlse=True)
            count += len(chosen) + (super_tiles() if sms == 2 else 0)
            if not one_pass:
                with overridden(stored=True), mock.patch.object(sm90_stored, "max_stored", lambda: 1 << 19):
                    count += super_tiles()
    return count


def varlen_forward(dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")) -> int:
    """Packed sequences and paged KV caches."""
    chosen = [c for c in varlen_cases.CASES + varlen_cases.PAGES + varlen_cases.LONG if c.dtype in dtypes][share]
    for case in chosen:
        varlen_cases.check(case, *(cupy.asnumpy(x) for x in varlen_cases.run(case, cupy.asarray)), tf32=True)
    return len(chosen)


def varlen_backward() -> int:
    """Gradients of packed sequences, including sequences of several super-tiles."""
    chosen = [c for c in varlen_cases.CASES + varlen_cases.SUPERS if c.dtype != "float64"][share]
    for case in chosen:
        varlen_cases.check_backward(case, varlen_cases.run_backward(case, cupy.asarray), tf32=True)
    return len(chosen)


def decoding() -> int:
    """Append tokens to caches, one by one and several at once, with one split and several; and run the last queries of
    histories."""
    return _steps() + _last_queries()


def clusters() -> int:
    """The same tokens as in ``decoding``, with clusters of blocks."""
    if not cuda.runtime.hopper(0):
        return 0
    with mock.patch.object(step, "clusters_pay", lambda *_: True):
        step.split.cache_clear()
        count = _steps()
    step.split.cache_clear()
    return count


def _steps() -> int:
    histories = [History(dtype="bfloat16", head_dim=64, window=150, recent=3, length=156, batch=1),
                 History(dtype="float16", head_dim=16, value_dim=24, window=9, sinks=2, recent=3),
                 History(dtype="float16", head_dim=5, window=9, heads=12, kv_heads=1),
                 History(dtype="float16", head_dim=64, window=(90, 30), recent=3, length=100, batch=1, bias_delay=20),
                 History(dtype="float32", head_dim=136, window=5, heads=20, kv_heads=1, length=12),
                 History(dtype="bfloat16", head_dim=64, window=150, length=156, batch=1, options={"storage": "fp8"}),
                 History(dtype="float16", head_dim=5, window=(9, 4), recent=2, options={"storage": "int8"})]
    for history in histories:
        cache, outs = history.cache(cupy.asarray), []
        for p in range(history.length):
            outs.append(history.run(cache, [1], cupy.asarray, begin=p))
            history.check_kept(cache, p)
        results = [np.concatenate(x, axis) for x, axis in zip(zip(*outs), (1, 2))]
        history.check(*results, tf32=True)
        _several(history, cache, results)
    return 2 * len(histories)


def chunks() -> int:
    """Append tokens to caches in chunks, padded, by slots and packed. Rows are copied in units of every size."""
    histories = [History(dtype="bfloat16", head_dim=64, window=90, recent=3, length=700, batch=1),
                 History(dtype="float16", head_dim=16, window=(9, 4), sinks=2, recent=3, length=70),
                 History(dtype="float32", head_dim=5, window=9, heads=6, kv_heads=3, length=70, scores="nan"),
                 History(dtype="float16", head_dim=64, window=30, length=70, options={"storage": "fp8"}),
                 History(dtype="bfloat16", head_dim=5, window=9, recent=2, length=70, options={"storage": "int8"})]
    for history in histories:
        cache = history.cache(cupy.asarray)
        pieces = [20, 9, history.length - 29]
        history.check(*history.run(cache, pieces, cupy.asarray), tf32=True)
        history.check_kept(cache)
        other, joined = history.cache(cupy.asarray), history.cache(cupy.asarray)
        for begin, end in itertools.pairwise([0, *itertools.accumulate(pieces)]):
            tokens = history.tokens(begin, end)
            other.update(*[cupy.asarray(np.ascontiguousarray(x[::-1])) for x in tokens[1:]],
                         slots=cupy.arange(history.batch)[::-1])
            rows, bounds = packed(tokens, [end - begin] * history.batch, behind=3)
            joined.extend(*[cupy.asarray(x) for x in rows], cu_seqlens=cupy.asarray(bounds),
                          tail_padding=True)
        history.check_kept(other)
        history.check_kept(joined)
    return 3 * len(histories)


def _several(history: History, cache: dma.DynamicCache, results: list[np.ndarray]) -> None:
    """The same history in calls of 4 tokens, which are attended to before they are appended, in slots."""
    other, slots = history.cache(cupy.asarray), cupy.arange(history.batch)[::-1]
    for p in range(0, history.length, 4):
        tokens = [cupy.ascontiguousarray(x[::-1]) for x in history.tokens(p, p + 4, cupy.asarray)]
        drafted = other.attend(*tokens, slots=slots, scale=history.scale, softcap=history.softcap, return_lse=True,
                               **history.call)
        other.commit(4)
        for ours, theirs in zip(drafted, (results[0][:, p:p + 4], results[1][..., p:p + 4])):
            assert np.array_equal(cupy.asnumpy(ours)[::-1], theirs)
    history.check_kept(other)
    for name, array in cache.state_dict().items():
        assert not isinstance(array, cupy.ndarray) or cupy.array_equal(array, other.state_dict()[name]), name


def _last_queries() -> int:
    rng = np.random.default_rng(0)
    sizes = ((9001, 70, 1, np.float16), (9001, 70, 5, np.float32), (600, 599, 1, np.float16))
    for length, window, queries, kind in sizes:
        q, k, v = (rng.standard_normal((1, n, h, 16)).astype(kind) for n, h in ((queries, 4), (length, 2), (length, 2)))
        scores = rng.integers(-50, 50, (1, 2, length)).astype(np.float32)
        out = cupy.asnumpy(dma.dynamic_mask_attention(*(cupy.asarray(x) for x in (q, k, v, scores)), window=window))
        wide = [x.astype(np.float64) for x in (q, k, v, scores)]
        assert np.abs(out - dma.dynamic_mask_attention(*wide, window=window)).max() < 4e-3
        out = cupy.asnumpy(dma.attention(*(cupy.asarray(x) for x in (q, k, v)), causal=True))
        assert np.abs(out - dma.attention(*wide[:3], causal=True)).max() < 4e-3
    return 2 * len(sizes)


def selection() -> int:
    """Select in two or more chunks and over all keys at once; with and without ties, equal scores, padding,
    documents."""
    count = 0
    for counted in (False, True):
        with selection_cases.counting(counted):
            count += _selections()
    return count


def _selections() -> int:
    rng = np.random.default_rng(0)
    count = 0
    for length, window in ((1, 1), (1030, 3), (2500, 130), (2500, (130, 3, 40))):
        scores = np.stack([rng.integers(-50, 50, length), rng.standard_normal(length), np.ones(length)])[None]
        candidates = *selection_cases.options_of(length)[:3], {
            "documents": np.array([0, length // 3, length // 3, length])}
        for options, keys in itertools.product(candidates, ("prefix", "global")):
            selection_cases.check(scores.astype(np.float32), window, cupy.asarray, keys=keys, **options)
            count += 1
    return count


def key_scores() -> int:
    shapes = ((1, 70, 1, 64), (2, 33, 8, 128), (1, 41, 3, 33), (1, 37, 20, 64), (1, 37, 3, 40))
    for shape, kind in itertools.product(shapes, ("float32", "bfloat16")):
        score_cases.check(shape, "bfloat16", "exp", kind, cupy.asarray)
        score_cases.check_backward(shape, "bfloat16", "exp", cupy.asarray)
    return 2 * len(shapes)


def in_portable_kernels(suite: Callable[[], int]) -> int:
    with portable():
        return suite()


SUITES = {"forward": functools.partial(in_portable_kernels, forward),
         "backward": functools.partial(in_portable_kernels, backward), "super-tiles": super_tiles,
         "varlen": functools.partial(in_portable_kernels, varlen_forward), "varlen-backward": varlen_backward,
         "hopper-backward": hopper_backward, "lifetimes": lifetimes, "delays": delays,
         "selection": selection, "decoding": decoding, "chunks": chunks,
         "clusters": clusters, "scores": key_scores}
SUITES |= {f"hopper-{tile.block_m}x{tile.block_n}x{tile.stages}{'-ping-pong' * tile.ping_pong}":
          functools.partial(hopper_forward, tile, largest)
          for kind in TILES.values() for largest, tiles in kind.items() for tile in tiles}


def main(arguments: list[str] | None = None) -> int:
    global share
    options = argparse.ArgumentParser(description="Run every kernel once, on small odd shapes.")
    options.add_argument("suite", nargs="*", help=f"only these, of {', '.join(SUITES)}")
    options.add_argument("--share", metavar="I/N", default="1/1", help="every Nth case of the grids, from the Ith on")
    args = options.parse_args(arguments)
    chosen = args.suite or list(SUITES)
    if not set(chosen) <= set(SUITES):
        options.error(f"suite must be of {', '.join(SUITES)}, got {' '.join(chosen)}")
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", args.share)
    if not found or int(found[1]) > int(found[2]):
        options.error(f"--share must be I/N with 1 <= I <= N, got {args.share}")
    share = slice(int(found[1]) - 1, None, int(found[2]))
    cupy.cuda.set_allocator(None)
    with contextlib.redirect_stdout(io.StringIO()):  # hides the printed errors of every case
        counts = {name: SUITES[name]() for name in chosen}
    print("agree with the oracle:", ", ".join(f"{count} {name}" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
