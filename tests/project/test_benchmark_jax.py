"""The benchmark jax_steps on the CPU in a tiny size: its rows, its check, and its table."""
from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax", minversion="0.9")

from benchmarks.harness import folders
from benchmarks.routines import jax_steps as bench


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(bench, "CALLS", 2)


def test_a_run(tmp_path, capsys):
    assert bench.main(["--size", "tiny", "--commit", "abc", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "jax_steps.json").read_text())
    assert [(row["part"], row["name"]) for row in result["rows"]] == [
        ("host", "jit(query + 1)"), ("host", "jit(dynamic_mask_attention)"), ("step", "jax"), ("step", "torch")]
    assert set(result["rows"][2]["apart"]) == set(bench.NAMES) and result["commit"] == "abc"
    assert "128 tokens, 4/2 heads" in bench.table(result) and bench.table(result).splitlines()[0] in (
        capsys.readouterr().out)


def test_a_failed_run_exits_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "NEAR", -1)
    assert bench.main(["--size", "tiny", "--out", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["jax_steps.failed.json"]


def test_the_docs_show_what_is_recorded():
    shown = bench.DOCS.read_text().split(bench.REPORT.begin)[1].split(bench.REPORT.end)[0].strip()
    recorded = folders.recorded("jax_steps.json")
    expected = bench.table(json.loads(recorded.read_text())) if recorded else bench.render.PENDING
    assert shown == expected, "run: python -m benchmarks jax_steps --update-docs"
