"""The benchmark host without a GPU: its rows, and that a step without gradients is noticed."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.routines import host  # noqa: E402


def test_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "CALLS", 1)
    monkeypatch.setattr(host, "ROUNDS", 1)
    assert host.main(["--out", str(tmp_path), "--commit", "abc"]) == 0
    record = json.loads(Path(tmp_path, "host.json").read_text())
    names = [row["name"] for row in record["rows"]]
    assert record["commit"] == "abc" and names[:2] == ["SDPA, forward", "SDPA, step"] and len(names) == 14
    assert all(row["host_us"] > 0 and row["times_sdpa"] > 0 for row in record["rows"])
    assert all(name in capsys.readouterr().out for name in names[:1])


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_a_step_without_gradients_is_noticed(wrong):
    with pytest.raises(AssertionError, match="some step"):
        host.check({"some step": lambda: (torch.ones(3), torch.full((3,), wrong))})
