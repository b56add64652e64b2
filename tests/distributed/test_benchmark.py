"""The benchmark context_parallel on the CPU in a tiny size: its rows, checks and tables."""
import json
import math

import pytest

torch = pytest.importorskip("torch")

from benchmarks.__main__ import main  # noqa: E402
from benchmarks.harness import pages_models, shards  # noqa: E402
from benchmarks.harness.report import length, line, times  # noqa: E402
from benchmarks.harness.shards import Problem  # noqa: E402
from benchmarks.routines import context_parallel as benchmark  # noqa: E402
from tests.distributed import benchmark_jobs as jobs  # noqa: E402

SMOKE = ["--device", "cpu", "--smoke", "--commit", "abc"]
# Without ring: its device mesh makes process groups, which needs all four processes of ``ranks``.
OURS = ["--peers", "one,ours,copies"]


def record(folder, rows):
    return json.loads((folder / "context_parallel.partial.json").read_text()) | {"rows": rows}


def test_every_peer_in_every_pass(ranks, tmp_path):
    rows, ok = ranks.run(2, jobs.measured, [*SMOKE, *OURS, "--ranks", "2", "--out", str(tmp_path)])[0]
    assert ok and len(rows) == 2 * 2 * 3 + 2
    result = record(tmp_path, rows)
    assert {"method", "device", "versions", "commit", "date", "arguments"} <= set(result)
    for row in rows:
        assert row["ms"] > 0 and row["ranks"] == 2
        if row["pass"] == "model":
            assert len(row["losses"]) == 3 and row["loss_differs"] < 5e-3
            continue
        if row["peer"] != "one":
            assert [check["ok"] for check in row["checks"]] == [True, True]
            assert ("gradients" in row["checks"][0]) == (row["pass"] == "training")
            assert len(row["bytes"][0]) == (2 if row["pass"] == "training" else 1)
    table = pages_models.ranks_table(result)
    assert "| 96, forward |" in table and "| 161, training |" in table and "2 x " in table


def test_a_mesh_of_two_axes(ranks, tmp_path):
    """Two sequences, each over two ranks, train like one process on both."""
    rows, ok = ranks.run(4, jobs.measured, [*SMOKE, *OURS, "--ranks", "4", "--out", str(tmp_path), "--passes",
                                            "mesh"])[0]
    assert ok and [row["peer"] for row in rows] == ["one", "ours"]
    one, ours = (row["losses"] for row in rows)
    assert len(ours) == 3 and ours != one and abs(ours[2] - one[2]) < 5e-3
    assert "| 96, mesh |" in pages_models.ranks_table(record(tmp_path, rows))


PARTS = [*OURS, "--passes", "forward,training"]


def test_another_loss_is_noticed():
    row = {"length": 96, "pass": "model"}
    bench = object.__new__(benchmark.Bench)
    bench.losses = {("model", 96): [5.0, 4.0]}
    bench.compare(row, [5.0, 4.01])
    assert not row["ok"]
    bench.compare(row, [5.0, 4.001])
    assert row["ok"]


@pytest.mark.parametrize("what", ["output", "gradients", "bytes"])
def test_what_is_wrong_is_noticed(ranks, tmp_path, what):
    rows, ok = ranks.run(2, jobs.spoiled, [*SMOKE, "--ranks", "2", "--out", str(tmp_path), *PARTS], what)[0]
    assert not ok
    wrong = {(row["pass"], row["peer"]) for row in rows if not row["ok"]}
    assert wrong == {("training", "ours"), ("training", "copies")} | (
        set() if what == "gradients" else {("forward", "ours"), ("forward", "copies")})
    assert "NOT ok" in line(next(row for row in rows if not row["ok"]))
    assert "–" in pages_models.ranks_table(record(tmp_path, rows))


def test_what_cannot_run_is_a_row(ranks, tmp_path):
    folder = [*OURS, "--ranks", "2", "--out", str(tmp_path)]
    rows, ok = ranks.run(2, jobs.measured, [*SMOKE, *folder, "--seconds", "-1"])[0]
    assert ok and {row["note"] for row in rows} == {"no time left"}
    rows, ok = ranks.run(2, jobs.failing, [*SMOKE, *folder, *PARTS, "--peers", "one,ours"])[0]
    assert not ok and {row["note"] for row in rows[:4]} == {"out of memory"}
    assert {row["note"] for row in rows[4:]} == {"could not run at 96 tokens"}


def test_nothing_to_measure(ranks, tmp_path):
    with pytest.raises(Exception, match="nothing to measure"):
        ranks.run(2, jobs.measured, [*SMOKE, "--ranks", "2", "--out", str(tmp_path), "--passes", "mesh"])


@pytest.mark.slow
def test_the_command(tmp_path, capfd):
    assert main(["context_parallel", *SMOKE, "--ranks", "2", "--out", str(tmp_path)]) == 0
    assert "| 96, forward |" in capfd.readouterr().out
    rows = json.loads((tmp_path / "context_parallel_2.json").read_text())["rows"]
    assert all(row["note"] and row["ms"] is None for row in rows if row["peer"] == "ring")  # torch has none on the CPU


def test_peers_that_do_not_fit_are_skipped():
    """A shard of 4M tokens needs 16 GiB for each array of 16 heads in bfloat16."""
    problem = Problem(2**23, 2, 16, 8, 128, 2048, torch.bfloat16, "cpu")
    assert problem.bytes_needed("ours", False) == (2 * 16 + 3 * 8) * 2**30
    assert problem.bytes_needed("copies", True) == (4 * 16 + 7 * 8) * 2**30 * 7 // 5


def test_gradients_are_compared_in_pieces(monkeypatch):
    monkeypatch.setattr(shards, "PIECE", 4)
    one = [torch.ones(2, 5), torch.full((3,), 2.0)]
    worst, allowed = shards.gradients_differ([one[0], one[1] + 0.5], one)
    assert worst == 0.25 and allowed == shards.GRADIENT_ROUNDINGS * 2.0**-23
    for wrong, place in ((0, (1, 4)), (0, (0, 0)), (1, (2,))):  # last piece, first piece, other gradient
        ours = [x.clone() for x in one]
        ours[wrong][place] = math.nan
        assert not shards.gradients_differ(ours, one)[0] <= allowed


def test_ratios():
    fast, slow = ({"ms": ms, "ok": True, "note": ""} for ms in (2.0, 3.9))
    assert pages_models.faster(slow, fast) == times(1.95) and pages_models.faster(None, fast) == "–"
    assert pages_models.faster({**slow, "ok": False}, fast) == "–"
    assert [length(n) for n in (96, 65536, 2**20, 2**23)] == ["96", "64K", "1M", "8M"]
    assert math.isclose(float(pages_models.received({"bytes": [[2**20, 2**20], [2**20, 0]]})), 2)
