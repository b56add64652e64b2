"""The benchmark portable in parts that need no GPU."""
import pytest

from benchmarks.harness import render_portable
from benchmarks.routines import portable
from tests.project import benchmark_runs as runs

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return runs.smoke_run(portable, "portable_performance", tmp_path_factory)


def test_smoke_run(result):
    assert [case["set"] for case in result["cases"]] == ["plain", "model"]
    for case in result["cases"]:
        assert {(row["who"], row["stage"]) for row in case["rows"] if row["ms"]} == {
            (who, stage) for who in ("own", "A100", "RTX", "flash") for stage in ("forward", "backward")}


def test_tables(result):
    case = {"set": "plain", "window": 512, "key_length": 8192, "head_dim": 64, "check": {"worst": 0.5, "ok": True},
            "rows": [{"who": who, "stage": stage, "ms": ms} for stage in ("forward", "backward")
                     for who, ms in (("own", 1.0), ("A100", 2.0), ("RTX", 4.0), ("flash", 3.0))]}
    made = render_portable.PORTABLE.table({**result, "cases": [case]})
    assert "| 8K, D 64, causal | backward | 3.00 | 3.00 | 1.50 | 0.75 |" in made
    assert "check: 0.50 of what is allowed" in render_portable.PORTABLE.text({**result, "cases": [case]})
