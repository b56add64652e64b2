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


# The Hopper forward does not keep apart what a bias hides (docs/sharp-bits.md): its gradients follow NumPy's forward.
KINDS = [(case, kernels) for case in hidden_keys.CASES + hidden_keys.FEW + WIDE for kernels in ("portable", "hopper")
         if (case.bias, kernels) != ("full", "hopper")]


@pytest.mark.parametrize(("case", "kernels"), KINDS, ids=str)
def test_forward_and_backward(case, kernels, monkeypatch):
    monkeypatch.setattr(sm90, "FEW_KEYS", 0)
    with emulator.hopper_gpu() if kernels == "hopper" else emulator.using() as runtime:
        runtime.most_writes = 2  # in two passes
        hidden_keys.run(case, forward="numpy" if kernels == "hopper" and case not in hidden_keys.FEW else None,
                        backend="emulator")
