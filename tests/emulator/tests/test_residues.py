"""Every residue of lengths, of Lk - Lq and of windows modulo tile sizes: pairs at the edge of a block, of a step or of
a warp's keys. Tests compare each element, because a norm over all would hide one wrong pair."""
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.runtime.program import overridden
from cupy_dma.backward import attention_backward
from tests import emulator
from tests.oracle import by_element, schedule_cases


@pytest.fixture(params=["portable", "hopper"])
def device(request):
    """The plain build: other tests of these kernels use the watched one, which takes several times as long. Hopper
    kernels run all calls that they support, however small."""
    with ((emulator.hopper_gpu if request.param == "hopper" else emulator.using)(build="plain") as runtime,
          schedule_cases.hopper_gradients(True), overridden(hopper=True)):
        yield runtime


def check_rows(dout: Any, *rows: np.ndarray, passes: int = 1, out_like: Any = np.asarray, **options: Any) -> Any:
    """Forward and gradients, element by element; ``out_like`` lays ``out`` out anew. Returns the gradients."""
    mask = options.get("mask")
    seen = mask.to_dense(rows[0].shape[1]) if isinstance(mask, dma.IntervalMask) else mask
    problem = by_element.Problem(*rows, seen, options.get("bias"), options.get("causal", False))
    out, lse = dma.attention(*rows, **options, return_lse=True, backend="emulator")
    problem.check_attention(out, lse)
    out = out_like(out)
    found = attention_backward(dout, *rows, out, lse, **options, deterministic=passes == 2, backend="emulator")
    problem.check_gradients(found, dout, out)
    return found


def check(queries: int, keys: int, passes: int = 1, mask: Any = None, heads: int = 1, **options: Any) -> None:
    rng = np.random.default_rng(queries + 1000 * keys)
    q, dout = rng.standard_normal((2, 1, queries, heads, 16)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, keys, 1, 16)).astype(np.float16)
    check_rows(dout, q, k, v, passes=passes, mask=mask, **options)


def test_lengths_of_causal_attention(device):
    """Lk - Lq in every residue modulo 128, both lengths modulo 64; in one pass and in two."""
    for behind in range(128):
        half, rest = divmod(behind, 64)
        queries = 1 + (2 * rest + half) % 64
        check(queries, queries + behind, 1 + (behind // 16 + half) % 2, causal=True)


def test_more_queries_than_keys(device):
    for more in range(1, 17):
        check(20 + more, 20, 1 + more % 2, causal=True)


@pytest.mark.parametrize("least", [1, 100])
def test_windows(least, device):
    """Lengths of windows and of keys in every residue modulo 64. There are more keys than a tile of 192 queries could
    see, so keys are listed. With long windows every query sees more than a block of keys, plus any number."""
    for window in range(least, least + 64):
        keys, queries = window + 200, 12 if least > 1 else 1 + window * 5 % 32
        mask = dma.IntervalMask.sliding_window(keys, window)
        check(queries, keys, 1 + window // 16 % 2, mask)


def test_keys_that_begin_and_end_at_any_query(device):
    """In a whole block, one key starts at any query and another one stops; all others are always visible. Such a mask
    has no bound, so the list is shared."""
    queries, keys = 150, 140
    for at in range(64):
        start, stop = np.full(keys, -100, np.int32), np.full(keys, keys, np.int32)
        start[at], stop[127 - at] = keys - queries + at, keys - queries + 80 + at
        mask = dma.IntervalMask(start, stop)
        check(queries, keys, 1 + at // 16 % 2, mask)


def test_keys_that_nobody_sees(device):
    for keys in range(60, 76):
        start, stop = np.arange(keys, dtype=np.int32) - 40, np.arange(keys, dtype=np.int32)[::-1].copy() + 3
        stop[::7] = start[::7]
        mask = dma.IntervalMask(start, stop)
        check(50, keys, 1 + keys % 2, mask)


@pytest.mark.parametrize("heads", [1, 2])
def test_dense_biases(heads, device):
    """Gradients of dense biases, per head or shared by two, under causality and under a mask whose keys stop at any
    query."""
    for behind in range(0, 64, 1 if heads > 1 else 7):
        queries = 20 + behind % 7
        keys = queries + behind
        bias = np.random.default_rng(keys).standard_normal((1, 1, queries, keys)).astype(np.float16)
        check(queries, keys, heads=heads, bias=bias, causal=True)
        if behind % 4 == 0:
            mask = dma.IntervalMask.sliding_window(keys, 1 + keys % 40)
            check(queries, keys, 1, mask, heads, bias=bias)


def test_super_tiles_of_keys_of_several_chunks(device):
    """Two super-tiles of 256 queries and a partial one, with keys in two chunks of 2048; a key stops at each query."""
    queries, keys = 600, 2600
    scores = np.random.default_rng(0).standard_normal((1, 1, keys)).astype(np.float32)
    mask = dma.IntervalMask.sliding_window(keys, 60)
    for passes in (1, 2):
        check(queries, keys, passes, mask, bias=scores)


def test_super_tiles_of_global_keys_under_causality(device):
    """Causality hides keys from earlier queries, whatever the mask says."""
    queries, keys = 300, 340
    scores = np.random.default_rng(0).standard_normal((1, 1, keys)).astype(np.float32)
    mask = dma.IntervalMask.top_w(scores, 50, keys="global")
    for passes in (1, 2):
        check(queries, keys, passes, mask, causal=True)
