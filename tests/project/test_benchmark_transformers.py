"""The benchmark transformers_models on the CPU in a tiny size: its rows, its checks, and its table."""
from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.harness import folders  # noqa: E402
from benchmarks.routines import transformers_models as bench  # noqa: E402

TINY = ["--size", "tiny", "--lengths", "100", "--repeats", "1", "--commit", "abc"]


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run(tmp_path, capsys):
    assert bench.main([*TINY, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "transformers_models.json").read_text())
    rows = {(row["part"], row["peer"]): row for row in result["rows"]}
    assert set(rows) == {*((part, peer) for part in ("prefill", "train") for peer in bench.PEERS),
                         ("decode", "cupy_dma"), ("decode", "sdpa")}
    assert all(row["ms"] > 0 for row in rows.values()) and result["commit"] == "abc"
    assert rows["prefill", "cupy_dma"]["error"] <= rows["prefill", "eager"]["error"] + 2**-8
    assert rows["decode", "cupy_dma"]["cache_bytes"] > 0 < rows["decode", "sdpa"]["cache_bytes"]
    assert "| prefill | 100 |" in bench.table(result) and "| decode (CUDA graph) | 100 | –" in bench.table(result)
    assert not (tmp_path / "transformers_models.partial.json").exists()


def test_what_is_wrong():
    wrong = [{"part": "prefill", "length": 1, "peer": peer, "ms": 1.0, "error": error}
             for peer, error in (("cupy_dma", 0.05), ("eager", 0.02), ("sdpa", 0.9))]
    assert not bench.check(wrong) and wrong[0]["ok"] is False
    assert bench.check([{**wrong[0], "error": 0.02}, *wrong[1:]]) and bench.check(wrong[::2])
    assert not bench.check([{**wrong[0], "error": 0.2}, wrong[2]])
    losses = [{"part": "train", "length": 1, "peer": peer, "ms": 1.0, "losses": [2.0, loss]}
              for peer, loss in (("cupy_dma", 1.9), ("eager", 1.8), ("sdpa", 1.9))]
    assert not bench.check(losses) and not bench.check(losses[::2])
    assert bench.check([losses[0], {**losses[1], "losses": [2.0, 1.88]}, losses[2]])
    tokens = [{"part": "decode", "length": 1, "peer": peer, "ms": 1.0, "tokens": [3, token]}
              for peer, token in (("cupy_dma", 1), ("cupy_dma graph", 2))]
    assert not bench.check(tokens)
    assert not bench.check([tokens[0], {**tokens[1], "ms": None}])
    assert not bench.check([{"part": "train", "length": 1, "peer": "cupy_dma", "ms": None}])


def test_a_failed_run_exits_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "check", lambda rows: False)
    assert bench.main([*TINY, "--parts", "decode", "--out", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["transformers_models.failed.json"]


def test_the_docs_show_what_is_recorded():
    shown = bench.DOCS.read_text().split(bench.REPORT.begin)[1].split(bench.REPORT.end)[0].strip()
    recorded = folders.recorded("transformers_models.json")
    expected = bench.table(json.loads(recorded.read_text())) if recorded else bench.render.PENDING
    assert shown == expected, "run: python -m benchmarks transformers_models --update-docs"


def test_arguments():
    for wrong in (["--repeats", "0"], ["--peers", "sdpa"], ["--parts", "prefil"]):
        with pytest.raises(SystemExit):
            bench.main(wrong)
