"""Attention on the CPU: the forward grid against the oracle, containment of bad values, memory and work."""
from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import library, numpy_dtype
from cupy_dma.backends import numpy as numpy_backend
from tests import cases, reference


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_forward_grid(case):
    out, lse = cases.run(case)
    cases.check(case, out, lse)
