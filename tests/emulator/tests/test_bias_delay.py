"""Delayed key biases through the kernels on the CPU emulator: forward and gradients, portable and Hopper kernels, in
one pass and in two."""
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backward import attention_backward
from tests import emulator
from tests.oracle import cases, delay_cases, schedule_cases, varlen_cases

PORTABLE, ONE_PASS, TWO_PASSES = KERNELS = ("portable", "Hopper, one pass", "Hopper, two passes")
SHORT = [c for c in delay_cases.CASES if c.dtype != "float64"]
LONG = delay_cases.LONG  # lists, and blocks and steps in which all biases apply, or none
HOPPER = [*(c for c in SHORT[::3] if c.dtype != "float32"), *LONG]
CALLS = [*((PORTABLE, c) for c in (*SHORT, *LONG[:5], *delay_cases.FEW_QUERIES)), *((ONE_PASS, c) for c in HOPPER),
         *((TWO_PASSES, c) for c in (*HOPPER[::4], *LONG))]
PACKED = [(kernels, c) for kernels in KERNELS for c in delay_cases.PACKED]
PAGED = [(PORTABLE, c) for c in delay_cases.PAGES]
QUICK = ("delay-65-top_w-bfloat16", "delay-65-dense", "delay-64-softcap-causal", "delay-100-long-survivors-D64-0",
         "delay-100-long-top_w-D64-0", "delay-100-long-causal-D64-4", "delay-30-per_head", "delay-30-top_w",
         "delay-1-pages-none", "delay-60-few-5x700-causal")


def quick(calls: list) -> list:
    return [call for call in calls if call[1].name in QUICK]


def slow(calls: list) -> list:
    return [call for call in calls if call[1].name not in QUICK]


@contextmanager
def on(kernels: str) -> Iterator[None]:
    with (emulator.using if kernels == PORTABLE else emulator.hopper_gpu)(), \
            schedule_cases.hopper_gradients(kernels == ONE_PASS):
        yield


@pytest.mark.feature("cuda forward backward", "attention", "bias_delay")
@pytest.mark.parametrize(("kernels", "case"), quick(CALLS), ids=str)
def test_attention(kernels, case):
    with on(kernels):
        if kernels != TWO_PASSES:
            cases.check(case, *cases.run(case, backend="emulator"), tf32=True)
        cases.check_backward(case, cases.run_backward(case, backend="emulator"), tf32=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "case"), slow(CALLS), ids=str)
def test_more_attention(kernels, case):
    test_attention(kernels, case)


@pytest.mark.parametrize(("kernels", "case"), quick(PACKED + PAGED), ids=str)
def test_sequences(kernels, case):
    with on(kernels):
        varlen_cases.check(case, *varlen_cases.run(case, backend="emulator"), tf32=True)
        if not case.page_size:
            varlen_cases.check_backward(case, varlen_cases.run_backward(case, backend="emulator"), tf32=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "case"), slow(PACKED + PAGED), ids=str)
def test_more_sequences(kernels, case):
    test_sequences(kernels, case)


@pytest.mark.parametrize("kernels", [PORTABLE, TWO_PASSES])
def test_open_gates_change_no_bit(kernels):
    """Biases of 0 change nothing, whatever the delay."""
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 1, 200, 4, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 200, 2, 64)).astype(np.float16)
    found = []
    with on(kernels):
        for delay in (0, 1, 70, 200):
            options = {"bias": np.zeros((1, 2, 200), np.float32), "bias_delay": delay, "causal": True,
                       "backend": "emulator"}
            out, lse = dma.attention(q, k, v, return_lse=True, **options)
            found.append((out, lse, *attention_backward(dout, q, k, v, out, lse, **options)[:3]))
    assert all((x == first).all() for other in found[1:] for x, first in zip(other, found[0]))


def test_keys_that_whole_steps_do_not_see():
    """Such keys, beside keys whose biases apply to some queries of the step."""
    rng, j = np.random.default_rng(0), np.arange(256, dtype=np.int32)
    q, dout = rng.standard_normal((2, 1, 256, 2, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 256, 1, 64)).astype(np.float16)
    mask = dma.IntervalMask(np.where(j % 2, 192, 0).astype(np.int32)[None], np.full((1, 256), 256, np.int32))
    options = {"bias": rng.standard_normal((1, 1, 256)).astype(np.float32), "bias_delay": 80, "mask": mask}
    out, lse = dma.attention(q, k, v, return_lse=True, **options, backend="numpy")
    expected = attention_backward(dout, q, k, v, out, lse, **options, backend="numpy")
    with on(TWO_PASSES):
        found = attention_backward(dout, q, k, v, out, lse, **options, backend="emulator")
    for ours, exact in zip(found, expected):
        assert np.abs(ours - exact.astype(np.float32)).max() < 1e-2 * np.abs(exact).max()


@pytest.mark.parametrize("queries", [1, 3])
def test_the_last_queries(queries):
    """The last queries of a long history, with keys selected by score."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, queries, 4, 32)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 900, 2, 32)).astype(np.float16)
    options = {"scores": rng.standard_normal((1, 2, 900)).astype(np.float32), "window": 40, "bias_delay": 300}
    with emulator.using():
        found = dma.dynamic_mask_attention(q, k, v, **options, backend="emulator")
    expected = dma.dynamic_mask_attention(*(x.astype(np.float32) for x in (q, k, v)), **options, backend="numpy")
    assert np.abs(found - expected).max() < 5e-3
