"""The Python blocks of pages that no test of a module runs."""
import numpy as np
import pytest

from tests.project.pages import run_page


def test_biases_and_eviction(capsys):
    pytest.importorskip("torch")
    names = run_page("biases-and-eviction.md", gpu=False)
    seen = names["mask"].to_dense(200)[0, 0].sum(-1)
    assert seen.tolist() == [min(i + 1, 24) for i in range(200)]
    assert np.isfinite(names["log_f"].grad.numpy()).all() and capsys.readouterr().out.startswith("[[")
