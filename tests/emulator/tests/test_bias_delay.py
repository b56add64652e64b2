"""Key biases that begin at a distance, through the kernels on the CPU emulator: portable and Hopper, forward and both
ways of the gradients."""
from __future__ import annotations

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backward import attention_backward
from tests.oracle import cases, delay_cases, schedule_cases, varlen_cases

build = pytest.importorskip("tests.emulator.build")
pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

from tests import emulator  # noqa: E402
from tests.emulator.tests.test_forward import BUILD  # noqa: E402

SHORT = [c for c in delay_cases.CASES if c.dtype != "float64"]
LONG = delay_cases.LONG  # lists, tiles in which all or no biases count
HOPPER = [*(c for c in SHORT[::3] if c.dtype != "float32"), *LONG]


def some_quick(all_cases, quick):
    """The cases, all but those with such names marked slow."""
    return [pytest.param(c, id=str(c), marks=() if any(name in c.name for name in quick) else pytest.mark.slow)
            for c in all_cases]


@pytest.fixture
def portable():
    with emulator.using(build=BUILD):
        yield


@pytest.fixture(params=[True, False], ids=["one pass", "two passes"])
def hopper(request):
    with emulator.hopper_gpu(build=BUILD), schedule_cases.hopper_gradients(request.param):
        yield


def check(case):
    cases.check(case, *cases.run(case, backend="emulator"), tf32=True)


def check_gradients(case):
    cases.check_backward(case, cases.run_backward(case, backend="emulator"), tf32=True)


@pytest.mark.parametrize("case", some_quick([*SHORT, *LONG[:5]], ("top_w-bfloat16", "dense-", "softcap")))
def test_forward(portable, case):
    check(case)


@pytest.mark.parametrize("case", some_quick([*SHORT, *LONG[:5]], ("top_w-bfloat16", "dense-", "softcap")))
def test_gradients(portable, case):
    check_gradients(case)


@pytest.mark.parametrize("case", some_quick(HOPPER, ("D64-0", "softcap-causal", "long-top_w")))
def test_hopper_forward(case):
    with emulator.hopper_gpu(build=BUILD):
        check(case)


@pytest.mark.parametrize("case", some_quick(HOPPER, ("top_w-D64-0", "survivors-D64-0", "causal-D64-4")))
def test_hopper_gradients(hopper, case):
    check_gradients(case)


@pytest.mark.parametrize("case", some_quick(delay_cases.PACKED + delay_cases.PAGES, ("64-top_w", "1-pages-none")))
def test_sequences(portable, case):
    varlen_cases.check(case, *varlen_cases.run(case, backend="emulator"), tf32=True)
    if not case.page_size:
        varlen_cases.check_backward(case, varlen_cases.run_backward(case, backend="emulator"), tf32=True)


@pytest.mark.parametrize("case", some_quick(delay_cases.PACKED, ("64-per_head", "64-top_w")))
def test_sequences_on_hopper(hopper, case):
    varlen_cases.check(case, *varlen_cases.run(case, backend="emulator"), tf32=True)
    varlen_cases.check_backward(case, varlen_cases.run_backward(case, backend="emulator"), tf32=True)


@pytest.mark.parametrize("gpu", [emulator.using, emulator.hopper_gpu])
def test_open_gates_change_no_bit(gpu):
    """Biases of 0, whatever the delay."""
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 1, 200, 4, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 200, 2, 64)).astype(np.float16)
    bias = np.zeros((1, 2, 200), np.float32)
    found = []
    with gpu(build=BUILD), schedule_cases.hopper_gradients(False):
        for delay in (0, 1, 70, 200):
            options = {"bias": bias, "bias_delay": delay, "causal": True, "backend": "emulator"}
            out, lse = dma.attention(q, k, v, return_lse=True, **options)
            found.append((out, lse, *attention_backward(dout, q, k, v, out, lse, **options)[:3]))
    assert all((x == first).all() for other in found[1:] for x, first in zip(other, found[0]))
