"""The benchmark forward and what it shares with the others, in parts that need no GPU."""
import numpy as np
import pytest

from benchmarks.harness import render
from benchmarks.routines import forward
from cupy_dma.masks.interval import IntervalMask
from tests.project import benchmark_runs as runs

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("which", ["table", "model", "all", "smoke"])
@pytest.mark.parametrize("quick", [False, True])
def test_cases_have_names_of_their_own(which, quick):
    runs.check_names(forward.cases(which, quick))


def test_pairs_are_counted_as_the_mask_counts_them():
    case = forward.Case("smoke", 4, 2, 32, 300, 300, 64)
    mask = IntervalMask.top_w(np.random.default_rng(0).standard_normal((1, 2, 300)).astype(np.float32), 64)
    assert case.kept_pairs == 2 * int(mask.count(300).sum())


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return runs.smoke_run(forward, "forward_performance", tmp_path_factory)


def test_smoke_run(result):
    assert "host_us" in result
    for case in result["cases"]:
        for stage in ("key_scores", "selection", "lists", "attention", "lists+attention", "total"):
            assert render.value(case, "cupy_dma", stage) is not None
        assert render.value(case, "masked+build", "attention") is not None


def test_tables_and_readme(result, tmp_path):
    result["cases"][0] |= {"set": "model", "heads": 16}
    runs.check_tables(render.FORWARD, result, tmp_path, "| 300, 16/2 heads, D 32, w 64 |", "smoke H2/1")


def test_failed_check_leaves_the_results_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(forward.Benchmark, "check", lambda self: {"ok": False})
    runs.check_nothing_recorded(forward, "forward_performance", tmp_path)


@pytest.mark.parametrize(("ms", "shown"), [
    (None, "–"), (0.0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (141.2, "141"), (1412.0, "1412")])
def test_three_digits(ms, shown):
    assert render.milliseconds(ms) == shown
