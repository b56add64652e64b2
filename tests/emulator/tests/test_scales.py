"""Scales of zero, of both signs and of the smallest numbers, with softcaps of all sizes, on all kernels."""
import contextlib

import numpy as np
import pytest

import cupy_dma as dma
from tests.oracle import cases, reference
from tests.oracle.cases import Case

pytest.importorskip("cupy")

from cupy_dma.backends.cuda.attention import sm90
from cupy_dma.backends.cuda.runtime.program import overridden
from tests import emulator

SCALES = (0.0, 1e-40, 1e-30, sm90.SMALLEST_SCALE, 0.3, -0.3, -1e-40)
SOFTCAPS = (0.0, 2.0**-126, 1e-6, 0.5, 3.0, 1e4)
CASES = [Case(f"{mask}-{scale:g}-{softcap:g}", dtype="float16", batch=1, query_length=21, key_length=45, head_dim=16,
              mask=mask, window=9, bias=bias, causal=True, scale=scale, softcap=softcap)
         for mask, bias in (("top_w", "key"), ("dense=11qk+top_w", "none")) for scale in SCALES for softcap in SOFTCAPS]


pytestmark = pytest.mark.usefixtures("fresh_programs")  # each call appears once

@pytest.mark.parametrize("kernels", ["portable", "hopper"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(case, kernels):
    with emulator.hopper_gpu() if kernels == "hopper" else contextlib.nullcontext(), overridden(hopper=True):
        cases.check(case, *cases.run(case, backend="emulator"))
        cases.check_backward(case, cases.run_backward(case, backend="emulator", with_dlse=True), with_dlse=True)


@pytest.mark.parametrize("kernels", ["portable", "hopper"])
def test_a_logit_of_zero_over_the_smallest_softcap(kernels, rng):
    """The quotient of scale and softcap is beyond float32."""
    q, k, v, dout = (rng.standard_normal((1, 20, 1, 16)).astype(np.float16) for _ in range(4))
    q[:, 3] = 0
    options = {"scale": 8.0, "softcap": 2.0**-126, "causal": True}
    with emulator.hopper_gpu() if kernels == "hopper" else contextlib.nullcontext():
        out, lse = dma.attention(q, k, v, **options, return_lse=True, backend="emulator")
        found = dma.backward.attention_backward(dout, q, k, v, out, lse, **options, backend="emulator")
    reference.check_attention(out, q, k, v, **options)
    assert all(np.isfinite(x).all() for x in (lse, *found[:3]))
