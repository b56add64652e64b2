"""benchmarks/intervals.py in parts that need no GPU."""
import pytest

from benchmarks import intervals
from benchmarks.harness import render_intervals
from tests.project import benchmark_runs as runs

pytest.importorskip("torch")


def test_smoke_run(tmp_path_factory):
    result = runs.smoke_run(intervals, "intervals_performance", tmp_path_factory)
    assert [case["pattern"] for case in result["cases"]] == list(intervals.PATTERNS)
    kept = {case["pattern"]: case["check"]["kept_pairs"] for case in result["cases"]}
    assert kept["none"] == 0 < kept["1/16"] and kept["all"] == 4 * 200 * 201 // 2
    assert kept["top-w"] == kept["top-w, bound"] == 4 * (200 * 40 - 40 * 39 // 2)
    assert all(row["ms"] for case in result["cases"] for row in case["rows"] if row["who"] == "cupy_dma")


def test_tables():
    def case(pattern, **rows):
        return {"pattern": pattern, "key_length": 8192, "head_dim": 64, "causal_pairs": 80, "name": pattern,
                "check": {"worst": 0.5, "ok": True, "kept_pairs": 20},
                "rows": [{"who": who, "stage": stage, "ms": ms} for (who, stage), ms in rows["rows"].items()]}

    us = {("cupy_dma", "backward"): 2.0, ("cupy_dma", "forward+backward"): 3.0}
    result = {"device": "GPU", "versions": {}, "commit": "", "date": "2026-11-28", "cases": [
        case("1/8", rows={**us, ("cudnn", "backward"): 5.0, ("cudnn", "forward+backward"): 6.0}),
        case("none", rows=us)]}
    table = render_intervals.INTERVALS.table(result)
    assert "| 8K, D 64, 1/8 | – | – | 2.00 | 3.00 | 5.00 | 6.00 | – | – | 2.5 | 2.0 | 4.0 |" in table
    assert "| 8K, D 64, none | – | – | 2.00 | 3.00 | 5.00 | 6.00 | – | – | 2.5 | 2.0 | 4.0 |" in table
    assert "check: 0.50 of what is allowed" in render_intervals.INTERVALS.text(result)
