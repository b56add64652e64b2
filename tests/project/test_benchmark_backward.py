"""The benchmark backward in parts that need no GPU."""
import pytest

from benchmarks.harness import render
from benchmarks.routines import backward
from tests.project import benchmark_runs as runs
from tests.project.benchmark_runs import gradients_of, small

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("which", ["table", "model", "plain", "all", "smoke"])
@pytest.mark.parametrize("quick", [False, True])
def test_cases(which, quick):
    chosen = backward.cases(which, quick)
    runs.check_names(chosen)
    assert all(case.query_length == case.key_length <= 131072 for case in chosen)
    assert sum(case.flex for case in backward.cases("all")) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradient_check(dtype):
    """Right gradients pass; each kind of wrong one fails."""
    from benchmarks.harness.check import check_interval_gradients

    do, q, k, v, scores, mask = small(torch, n=500, dtype=getattr(torch, dtype))
    out, lse, found = gradients_of(do, q, k, v, scores, mask)
    start, stop = mask.start.expand(1, 2, 500), mask.stop.expand(1, 2, 500)

    def check(**wrong):
        return check_interval_gradients(found._replace(**wrong), do, q, k, v, out, lse, scores, start, stop)

    right = check()
    assert right.ok, right
    assert right.unseen_keys > 0
    assert right.keys > 4
    for name, gradient in found._asdict().items():
        assert not check(**{name: gradient * 1.05}).ok, name
        assert not check(**{name: torch.full_like(gradient, float("nan"))}).ok, name
    g, j = (stop[0] <= start[0]).nonzero()[0].tolist()
    for name, index in (("key", (0, j, g)), ("value", (0, j, g)), ("bias", (0, g, j))):
        leak = getattr(found, name).clone()
        leak[index] = 1e-6
        assert not check(**{name: leak}).unseen_are_zero


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return runs.smoke_run(backward, "backward_performance", tmp_path_factory, "--commit", "abc")


def test_smoke_run(result):
    assert result["commit"] == "abc"
    for case in result["cases"]:
        stages = ["backward", "backward deterministic", "forward+backward"]
        for stage in stages + ["backward+lists"] * (case["set"] != "plain"):
            assert render.value(case, "cupy_dma", stage, "effective_tflops") > 0
        for stage in ("backward", "forward+backward"):
            assert render.value(case, "dense", stage) is not None
    assert result["cases"][0]["check"]["unseen_keys"] > 0


def test_tables_and_readme(result, tmp_path):
    result["cases"][0] |= {"set": "model", "heads": 16}
    runs.check_tables(render.BACKWARD, result, tmp_path, "| 300, 16/2 heads, D 32, w 64 |", "smoke H2/1")


def test_wrong_gradients_leave_the_results_alone(tmp_path, monkeypatch):
    right = backward.Benchmark.backward

    def wrong(self, deterministic=False):
        found = right(self, deterministic)
        return found._replace(key=found.key * 1.1)

    monkeypatch.setattr(backward.Benchmark, "backward", wrong)
    failed = runs.check_nothing_recorded(backward, "backward_performance", tmp_path)
    assert failed["cases"][0]["check"]["worst"] > 1
