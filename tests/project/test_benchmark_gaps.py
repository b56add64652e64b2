"""The benchmark gaps without a GPU: pauses of given kernels, and that wrong steps are noticed."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.routines import gaps  # noqa: E402


def test_pauses_are_between_kernels_of_a_step():
    """Three steps of three kernels, the second of which overlaps the first; the first step does not count."""
    times = [(90, 91), (95, 96), (99, 100), (200, 210), (205, 208), (212, 215), (300, 310), (313, 314), (315, 320)]
    found = gaps.pauses([("abc"[i % 3], begin, end) for i, (begin, end) in enumerate(times)], 3)
    assert found == {"launches": 3, "longest_us": 2.5, "worst_us": 3, "pauses_us": 3, "step_us": 17.5,
                     "between": ["a", "c"]}
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"got {count} of them"):
            gaps.pauses([("kernel", 0, 1)] * count, 3)


def test_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gaps, "PARTS", ("attention",))
    monkeypatch.setattr(gaps, "WARM_UP", 1)
    assert gaps.main(["--length", "64", "--model", "tiny", "--out", str(tmp_path), "--commit", "abc"]) == 0
    rows = json.loads(Path(tmp_path, "gaps.json").read_text())["rows"]
    assert [(row["peer"], row["window"], row["mode"]) for row in rows] == [
        (*of, mode) for of in (("dma", 32), ("dma", 64), ("sdpa", None)) for mode in ("eager", "graphs")]
    assert "attention, dma w 32, graphs" in capsys.readouterr().out


@pytest.mark.parametrize("wrong, says", [(1.2, "from the eager step"), (float("nan"), "not finite")])
def test_a_wrong_step_is_noticed(wrong, says):
    right = torch.ones(3)
    with pytest.raises(AssertionError, match=says):
        gaps.checked({"eager": lambda: (right,), "graphs": lambda: (wrong * right,)}, 1)


@pytest.mark.parametrize("how", ["graph", "events"])
def test_a_step_that_cannot_be_captured_is_no_captured_one(how, monkeypatch):
    from benchmarks.harness import measure

    monkeypatch.setattr(measure, "captured", lambda call: (call, how))
    if how == "graph":
        assert gaps.captured(lambda: (1, 2))() == (1, 2)
        return
    with pytest.raises(RuntimeError, match="cannot be captured"):
        gaps.captured(lambda: (1, 2))
