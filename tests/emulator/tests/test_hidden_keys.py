"""Keys that a bias of -inf hides, on all kernels (``tests/oracle/hidden_keys.py``)."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backward import attention_backward
from tests.oracle import hidden_keys

pytest.importorskip("cupy")

from cupy_dma.backends.cuda.runtime.program import overridden
from tests import emulator

pytestmark = pytest.mark.usefixtures("fresh_programs")  # each call appears once
WIDE = [hidden_keys.Case("wide", mask, head_dim=136, query_length=40, key_length=40) for mask in ("causal", "window")]


# The forward kernels and the portable dquery do not isolate keys that a bias hides (docs/sharp-bits.md), so here the
# Hopper gradients follow NumPy's forward, and few queries use the decode kernel.
KINDS = [case for case in hidden_keys.CASES + WIDE + hidden_keys.FEW if case.bias != "full"]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_forward_and_backward(case):
    with emulator.hopper_gpu() as runtime, overridden(hopper=True):
        runtime.most_writes = 2  # in two passes
        hidden_keys.run(case, forward=None if case in hidden_keys.FEW else "numpy",
                        backend="emulator")


@pytest.mark.parametrize("hopper", [False, True], ids=["portable", "hopper"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("bias", ["key", "pair"])
def test_rows_that_only_see_hidden_keys_are_zero(bias, value, hopper):
    """Whatever the value of such a key is."""
    n, rng = 200, np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, n, heads, 64)).astype("f2") for heads in (2, 1, 1, 2))
    v[0, [0, 70, 199]] = value
    added = np.zeros((1, 1, n) if bias == "key" else (1, 2, n, n), "f4" if bias == "key" else "f2")
    added[..., [0, 70, 199]] = -np.inf
    options = {"mask": dma.IntervalMask.sliding_window(n, 1), "bias": added}
    with emulator.hopper_gpu() if hopper else emulator.using():
        out, lse = dma.attention(q, k, v, **options, return_lse=True, backend="emulator")
        found = attention_backward(dout, q, k, v, out, lse, **options, backend="emulator")
    hidden = np.isin(np.arange(n), [0, 70, 199])
    assert (lse[..., hidden] == -np.inf).all() and np.isfinite(lse[..., ~hidden]).all()
    assert not out[0, hidden].any() and np.isfinite(out).all()
    for grad in found[:3]:
        assert not grad[0, hidden].any() and np.isfinite(grad).all()
    assert not found[3][..., hidden].any() and np.isfinite(found[3]).all()
