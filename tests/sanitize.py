"""Every kernel once, on small odd shapes, for a run under compute-sanitizer:

    compute-sanitizer --tool memcheck  python -m tests.sanitize
    compute-sanitizer --tool racecheck python -m tests.sanitize

CuPy's memory pool is off, so that every array has its own allocation and a read past its end is seen. Results are
checked too, against the oracle. ``make sanitize`` runs both tools.
"""
from __future__ import annotations

import contextlib
import io
import itertools
import sys
from unittest import mock

import cupy
import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends import cuda
from cupy_dma.backends.cuda import hopper
from cupy_dma.backward import attention_backward, key_scores_backward
from tests import cases, reference, varlen_cases

LENGTHS = ("lengths-1x70", "lengths-33x129", "lengths-129x33")
NAMES = ("float32-", "float16-D64", "bfloat16-D128", "bfloat16-D40", "float16-D3", "bfloat16-D256", "mask-",
         "causal-and-", "window-1", "bias-", "softcap-", "layout-bhsd", "layout-head_slice", "dense-both",
         "dense-columns", "dense-sizes", *LENGTHS)


def forward() -> int:
    chosen = [c for c in cases.CASES if c.name.startswith(NAMES) and c.dtype in ("float16", "bfloat16", "float32")]
    for case in chosen:
        out, lse = cases.run(case, cupy.asarray)
        cases.check(case, cupy.asnumpy(out), cupy.asnumpy(lse), tf32=True)
    return len(chosen)


def hopper_forward() -> int:
    """The Hopper kernel, also where it would not pay, with every tile it has."""
    if not cuda.runtime.hopper(0):
        return 0
    runs = 0
    shapes = {(tile, largest) for kind in hopper.TILES.values() for largest, tile in kind.items()}
    for (tile, largest), case in itertools.product(sorted(shapes), cases.CASES):
        if not case.name.startswith(NAMES) or case.dtype not in ("float16", "bfloat16"):
            continue
        with mock.patch.object(hopper, "tile_shape", lambda call, problem, tile=tile: tile), mock.patch.object(
                hopper, "_pays", lambda runtime, index, call, problem, tile=tile, largest=largest:
                call.head_dim <= largest and (tile.block_m == 128 or not (problem.bits or problem.bias_kind == 2))):
            out, lse = cases.run(case, cupy.asarray)
        cases.check(case, cupy.asnumpy(out), cupy.asnumpy(lse))
        runs += 1
    return runs


def backward() -> int:
    chosen = [c for c in cases.CASES if c.name.startswith(NAMES) and c.dtype in ("float16", "bfloat16", "float32")]
    for case in chosen:
        gradients = cases.run_backward(case, cupy.asarray, with_dlse=True)
        cases.check_backward(case, [None if g is None else cupy.asnumpy(g) for g in gradients], with_dlse=True,
                             tf32=True)
    return len(chosen)


def super_tiles() -> int:
    """Long enough for several super-tiles: their lists, partial sums and the sum of these."""
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
            x, y = cupy.asnumpy(ours).astype(np.float64), other.astype(np.float64)
            assert np.linalg.norm(x - y) < 1e-2 * np.linalg.norm(y)
    return 3


def varlen() -> int:
    """Packed sequences, pages, and super-tiles of sequences."""
    forward = [c for c in varlen_cases.CASES + varlen_cases.PAGES + varlen_cases.LONG if c.dtype != "float64"]
    backward = [c for c in varlen_cases.CASES + varlen_cases.SUPERS if c.dtype != "float64"]
    for case in forward:
        varlen_cases.check(case, *(cupy.asnumpy(x) for x in varlen_cases.run(case, cupy.asarray)), tf32=True)
    for case in backward:
        gradients = varlen_cases.run_backward(case, cupy.asarray)
        varlen_cases.check_backward(case, [None if g is None else cupy.asnumpy(g) for g in gradients], tf32=True)
    return len(forward) + len(backward)


def selection() -> int:
    """Two chunks and more, so that all three kernels work; ties, padding, documents."""
    rng = np.random.default_rng(0)
    count = 0
    for length, window in ((1, 1), (1030, 3), (2500, 130)):
        scores = rng.integers(-50, 50, (1, 2, length)).astype(np.float32)
        padding = rng.random((1, length)) < 0.8
        documents = np.cumsum(rng.random((1, length)) < 3 / length, axis=-1).astype(np.int32)
        for options in ({}, {"padding": padding}, {"documents": documents}):
            expected = dma.IntervalMask.top_w(scores, window, **options)
            mask = dma.IntervalMask.top_w(cupy.asarray(scores), window,
                                          **{name: cupy.asarray(x) for name, x in options.items()})
            assert np.array_equal(cupy.asnumpy(mask.stop), expected.stop)
            count += 1
    return count


def key_scores() -> int:
    rng = np.random.default_rng(0)
    shapes = ((1, 70, 1, 64), (2, 33, 8, 128), (1, 41, 3, 33), (1, 37, 20, 64))
    for shape in shapes:
        value = rng.standard_normal(shape).astype(numpy_dtype("bfloat16"))
        weight = (rng.standard_normal((shape[2], shape[2] * shape[3])) / 8).astype(np.float32)
        a = np.ones(shape[2], np.float32)
        got = cupy.asnumpy(dma.key_scores(*(cupy.asarray(x) for x in (value, weight, a))))
        np.testing.assert_allclose(got, reference.key_scores(value, weight, a), rtol=2e-5)
        upstream = rng.standard_normal(got.shape).astype(np.float32)
        found = key_scores_backward(*(cupy.asarray(x) for x in (upstream, value, weight, a)))
        expected = key_scores_backward(*(x.astype(np.float64) for x in (upstream, value, weight, a)))
        for ours, other in zip(found[:3], expected[:3]):
            x = cupy.asnumpy(ours).astype(np.float64)
            assert np.linalg.norm(x - other) < 1e-2 * np.linalg.norm(other)
    return len(shapes)


def main() -> int:
    cupy.cuda.set_allocator(None)
    with contextlib.redirect_stdout(io.StringIO()):  # the errors of every case
        counts = {"forward": forward(), "backward": backward(), "super-tile": super_tiles(), "varlen": varlen(),
                  "selection": selection(), "score": key_scores()}
    print("agree with the oracle:", ", ".join(f"{count} {name}" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
