"""The benchmark accuracy with the backend that runs anywhere."""
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.routines import accuracy
from cupy_dma import backends

WRONG = [lambda x: x * 1.1, lambda x: x * np.nan, lambda x: x[:, :1], lambda x: None, lambda x: x.astype(np.float64)]


def run(tmp_path, *arguments):
    return accuracy.main([*arguments, "--out", str(tmp_path)])


@pytest.mark.parametrize(("what", "tensors"), [("forward", {"out", "lse"}), ("backward", set(accuracy.GRADIENTS))])
def test_named_cases_of_every_type(what, tensors, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(backends._registered, "triton", SimpleNamespace(unavailable=lambda: "not today"))
    monkeypatch.delitem(backends._loaded, "triton", raising=False)
    assert run(tmp_path, what, "--backend", "numpy", "--backend", "triton", "--cases", "odd") == 0
    rows = json.loads((tmp_path / f"{what}_equivalence.json").read_text())["rows"]
    assert [(row["backend"], row["dtype"], row["reason"]) for row in rows] == [
        ("triton", "", "not available: not today"), *(("numpy", dtype, "") for dtype in accuracy.DTYPES)]
    for row in rows[1:]:
        assert row["tensors"].keys() == tensors
        assert row["ok"]
        assert any(0 < tensor["error"] <= tensor["allowed"] for tensor in row["tensors"].values())
    assert "not today" in capsys.readouterr().out


def test_the_grid_with_a_gradient_of_lse(tmp_path, capsys):
    assert run(tmp_path, "grid", "--backend", "numpy", "--cases", "softcap-40.0", "--dlse") == 0
    lines = json.loads((tmp_path / "grad_equivalence.json").read_text())["lines"]
    assert [(line["backend"], line["dtype"], line["cases"]) for line in lines] == [
        ("numpy", dtype, 2) for dtype in accuracy.SUITES["grid"].dtypes]
    assert all(0 < ratio <= 1 for line in lines for ratio in line["worst_error_over_allowed"].values())
    assert "numpy" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("what", "file", "cases"), [("forward", "forward_equivalence", "odd"),
                                                     ("grid", "grad_equivalence", "scale")])
def test_wrong_results_fail(tmp_path, monkeypatch, capsys, what, file, cases, wrong):
    suite = accuracy.SUITES[what]

    def broken(*arguments):
        found = suite.run(*arguments)
        return {**found, "out" if what == "forward" else "value": wrong(found["out" if what == "forward" else "value"])}

    monkeypatch.setitem(accuracy.SUITES, what, replace(suite, run=broken))
    assert run(tmp_path, what, "--backend", "numpy", "--dtype", "float16", "--cases", cases) == 1
    assert not (tmp_path / f"{file}.json").exists()
    assert (tmp_path / f"{file}.failed.json").exists()
    assert "EXCEEDS" in capsys.readouterr().out


def test_what_a_backend_refuses_is_named(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise NotImplementedError("backend='numpy' cannot do this: it is Sunday")

    monkeypatch.setitem(accuracy.SUITES, "forward", replace(accuracy.SUITES["forward"], run=refuse))
    assert run(tmp_path, "forward", "--backend", "numpy", "--cases", "odd") == 1
    assert "it is Sunday" in capsys.readouterr().out


def test_the_grid_counts_what_is_not_served(monkeypatch):
    """As on a GPU: CUDA has no line for types that it does not take, and counts cases that raise."""
    def refuse(*arguments):
        raise NotImplementedError

    suite = replace(accuracy.SUITES["grid"], run=refuse)
    monkeypatch.setattr(backends, "why_not", lambda backend: None)
    monkeypatch.setattr(accuracy, "library_for", lambda backend, suite: (None, None))
    lines = accuracy.by_type(list(accuracy.compare(suite, ["cuda"], list(suite.dtypes), "scale")))
    assert [(line["dtype"], line["cases"], line["not_served"]) for line in lines] == [
        ("float16", 0, 6), ("bfloat16", 0, 6), ("float32", 0, 6)]
    assert "–" in accuracy.table(lines)


def test_the_grid_has_every_case_once_in_every_type():
    for dtype in accuracy.SUITES["grid"].dtypes:
        chosen = accuracy.grid(dtype)
        assert {case.dtype for case in chosen} == {dtype}
        assert len({replace(case, name="") for case in chosen}) == len(chosen) > 100


def test_named_cases_differ():
    assert len({case.name for case in accuracy.CASES}) == len(accuracy.CASES)
    empty = accuracy.CASES[-1]
    assert empty.causal
    assert empty.query_length > empty.key_length
