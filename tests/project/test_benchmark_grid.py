"""The benchmark grid without a GPU: its grid, what is wanted, and that a wrong gradient is noticed."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.routines import grid  # noqa: E402


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(grid, "HEADS", ((2, 1, 16),))
    monkeypatch.setattr(grid, "LENGTHS", (64, 96))
    monkeypatch.setattr(grid, "MAX_TOKENS", 384)


def test_cases():
    found = grid.cases()
    assert len(found) == len({case.name for case in found}) >= 150
    assert {case.window for case in found} >= {64, 1024, 32768} and {case.batch for case in found} == {1, 4, 16}


@pytest.mark.parametrize(("ours", "dense", "stage", "ok"), [
    (1.0, 0.96, "both", True), (1.0, 0.94, "both", False), (0.14, 0.1, "forward", True), (0.15, 0.1, "forward", False),
    (0.18, 0.1, "both", True), (0.19, 0.1, "both", False)])
def test_what_is_wanted(ours, dense, stage, ok):
    assert grid.Row("a case", stage, ours, dense).ok is ok


def test_record(small, tmp_path, capsys):
    assert grid.main(["--out", str(tmp_path), "--commit", "abc"]) == 0
    record = json.loads(Path(tmp_path, "grid.json").read_text())
    assert record["commit"] == "abc" and len(record["rows"]) == 2 * len(grid.cases())
    assert {row["stage"] for row in record["rows"]} == {"forward", "both"}
    assert "as fast as wanted" in capsys.readouterr().out


def test_a_wrong_gradient_is_noticed(small, tmp_path, monkeypatch, capsys):
    right = grid.Benchmark.both
    monkeypatch.setattr(grid.Benchmark, "both", lambda self, *entry: tuple(2 * x for x in right(self, *entry)))
    assert grid.main(["--out", str(tmp_path)]) == 1
    assert "WRONG: model" in capsys.readouterr().out and not Path(tmp_path, "grid.json").exists()


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit):
        grid.main(["--heads", "5/2"])
    assert "--heads must be of 2/1, 6/3" in capsys.readouterr().err
