"""The benchmark intervals in parts that need no GPU."""
import numpy as np
import pytest

from benchmarks.harness import render_intervals
from benchmarks.routines import intervals
from tests.project import benchmark_runs as runs

pytest.importorskip("torch")


def test_smoke_run(tmp_path_factory):
    result = runs.smoke_run(intervals, "intervals_performance", tmp_path_factory)
    assert [case["pattern"] for case in result["cases"]] == list(intervals.PATTERNS)
    kept = {case["pattern"]: case["check"]["kept_pairs"] for case in result["cases"]}
    assert kept["none"] == 0 < kept["1/16"] and kept["all"] == 4 * 200 * 201 // 2
    assert kept["top-w"] == kept["top-w, bound"] == 4 * (200 * 40 - 40 * 39 // 2)
    assert kept["H2O"] == kept["top-w"]  # a cache is full from its first eviction on
    assert all(row["ms"] for case in result["cases"] for row in case["rows"] if row["who"] == "cupy_dma")


def test_recorded_evictions():
    """At most ``budget`` keys are seen anywhere, texts do not see each other, and lifetimes are irregular."""
    stops = intervals.h2o_stops(2, 2 * 8192 + 100, 64)
    position = np.arange(stops.shape[1])
    assert stops.shape == (2, 16484) and (stops > position).all()
    for row in stops:
        births, deaths = (np.bincount(x, minlength=3 * 8192 + 1) for x in (position, row))
        alive = np.cumsum(births - deaths)
        assert alive.max() == alive[8191] == 64 and alive[8192] == 1
        assert (row[:8192] <= 8192).all() and np.array_equal(row[8192:2 * 8192] - 8192, row[:8192])
        life = row[:8192] - position[:8192]
        assert len(np.unique(life[row[:8192] < 8192])) > 20  # besides the keys that stay to the end
        assert 33 == np.median(life) < life.max() / 20
    assert not np.array_equal(*stops)


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
