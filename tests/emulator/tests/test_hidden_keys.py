"""Keys that a bias of -inf hides, on all kernels (``tests/oracle/hidden_keys.py``)."""
from __future__ import annotations

import pytest

from tests.oracle import hidden_keys

pytest.importorskip("cupy")

from cupy_dma.backends.cuda.attention import sm90
from tests import emulator


@pytest.fixture(autouse=True)
def _(unplanned):
    """Each kind of call is made once."""


WIDE = [hidden_keys.Case("wide", mask, head_dim=136, query_length=40, key_length=40) for mask in ("causal", "window")]


# The forward kernels and the portable dquery do not keep apart what a bias hides (docs/sharp-bits.md): here the Hopper
# gradients follow NumPy's forward, and few queries are those of decoding.
KINDS = [case for case in hidden_keys.CASES + WIDE + hidden_keys.FEW if case.bias != "full"]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_forward_and_backward(case, monkeypatch):
    monkeypatch.setattr(sm90, "FEW_KEYS", 0)
    with emulator.hopper_gpu() as runtime:
        runtime.most_writes = 2  # in two passes
        hidden_keys.run(case, forward=None if case in hidden_keys.FEW else "numpy",
                        backend="emulator")
