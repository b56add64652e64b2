"""The benchmark decode in parts that need no GPU."""
import json

import pytest

import cupy_dma as dma
from benchmarks.harness import render, render_decode
from benchmarks.routines import decode
from cupy_dma.masks.interval import IntervalMask
from tests.project import benchmark_runs as runs
from tests.project.benchmark_runs import small

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("which", ["table", "model", "all", "smoke"])
@pytest.mark.parametrize("quick", [False, True])
def test_cases(which, quick):
    chosen = decode.cases(which, quick)
    runs.check_names(chosen)
    assert all(case.query_length == 1 for case in chosen)
    assert sum(case.flex for case in decode.cases("all")) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("window", [None, 40])
def test_check(dtype, window):
    """Right outputs and kept keys pass; each kind of wrong one fails."""
    from benchmarks.harness.check import TokenCheck, best_keys

    _, q, k, v, scores, _ = small(torch, n=200, dtype=getattr(torch, dtype))
    scores = (4 * scores).round() / 4  # ties
    q = q[:, -1:]
    kept = None if window is None else best_keys(scores[0], window)
    mask = None if window is None else IntervalMask.top_w(scores, window=window)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)

    def check(out, lse, positions=None):
        found = TokenCheck()
        found.compare(out[0, 0], lse[0, :, 0], q[0, 0], k[0], v[0], scores[0], kept)
        if positions is not None:
            found.compare_kept(positions, kept)
        return found.result()["ok"]

    assert check(out, lse)
    for wrong in (lambda x: x * 1.05, lambda x: x * float("nan"), lambda x: x + 0.1):
        assert not check(wrong(out), lse)
        assert not check(out, wrong(lse))
    if window is not None:
        cache = dma.DynamicCache(1, 2, window, 16, dtype=q.dtype, like=q)
        cache.update(k, v, scores)
        positions = cache.positions[0]
        assert check(out, lse, positions)
        positions[1, 7] = -1
        assert not check(out, lse, positions)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return runs.smoke_run(decode, "decode_performance", tmp_path_factory)


def test_smoke_run(result):
    assert result["copy_tb_s"] > 0 and result["empty_replay_us"] > 0
    full, short, serving = result["cases"]
    for case in result["cases"]:
        assert all(row["ms"] is not None for row in case["rows"]), case["rows"]
    stages = {"step w100", "step w100, cpu clock", "stateless", "prepared"}
    assert full["check"]["stages"].keys() == short["check"]["stages"].keys() == stages
    assert {row["who"] for row in full["rows"] if row["note"] == "right"} == {"sdpa", "masked", "masked+build", "flex"}
    assert render.value(full, "cupy_dma", "step w100 replay", "queued_ms") > 0
    assert render.value(serving, "cupy_dma", "step w16", "kept_bytes") == 3 * 2 * 16 * 2 * 16 * 2
    assert render.value(serving, "sdpa", "dense", "cache_bytes") == render_decode.history_bytes(serving)


def test_tables_and_readme(result, tmp_path):
    runs.check_tables(render_decode.DECODE, result, tmp_path, "| 3, 4/2, 70 |", "original H2/1")
    render_decode.DECODE.chart(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_goals():
    def case(name, batch, heads, keys, window, rows):
        return {"set": name, "batch": batch, "heads": heads, "kv_heads": 8, "head_dim": 128, "key_length": keys,
                "window": window, "rows": [{"who": who, "stage": stage, **row} for (who, stage), row in rows.items()]}

    us, step = "cupy_dma", ("cupy_dma", "step w2048")
    result = {"copy_tb_s": 4.0, "cases": [
        case("original", 1, 2, 256, 1024, {(us, "step w1024"): {"ms": 1.0}}),  # not full: does not count
        case("original", 1, 2, 4096, 1024, {(us, "step w1024"): {"ms": 0.008}, (us, "stateless"): {"ms": 0.02}}),
        case("original", 1, 2, 524288, 1024, {
            (us, "step w1024"): {"ms": 0.009, "cold_ms": 0.012},
            (us, "step w1024 replay"): {"ms": 0.016, "queued_ms": 0.01},
            (us, "stateless"): {"ms": 0.03}}),
        case("serving", 32, 16, 4096, 2048, {step: {"ms": 0.1, "kept_bytes": 2.4e8}}),
        case("serving", 32, 16, 32768, 2048, {step: {"ms": 0.1, "kept_bytes": 3e8}}),
        case("serving", 8, 32, 131072, 2048, {step: {"ms": 0.03, "kept_bytes": 2**26}, ("cudnn", "dense"): {"ms": 0.9},
                                              ("flash", "dense"): {"ms": 0.75}})]}
    found = render_decode.goals(result)
    assert [goal["found"] for goal in found] == pytest.approx([9, 12, 10, 16, 30, 0.6, 25, 1 / 64])
    assert [goal["ok"] for goal in found] == [True, True, True, False, True, False, True, True]
    assert [goal["found"] for goal in render_decode.goals({"copy_tb_s": 4.0, "cases": []})] == [None] * 8


def test_leaves_out_what_does_not_fit(tmp_path, monkeypatch, capsys):
    from benchmarks.harness import measure

    monkeypatch.setattr(measure, "free_bytes", lambda: 0)
    assert decode.main(["--set", "smoke", "--out", str(tmp_path)]) == 0
    cases = json.loads((tmp_path / "decode_performance.json").read_text())["cases"]
    assert all("do not fit" in row["note"] for case in cases for row in case["rows"])


def test_wrong_steps_leave_the_results_alone(tmp_path, monkeypatch):
    right = decode.Benchmark.result

    def wrong(self, cache, token):
        out, lse = right(self, cache, token)
        return out * 1.1, lse

    monkeypatch.setattr(decode.Benchmark, "result", wrong)
    failed = runs.check_nothing_recorded(decode, "decode_performance", tmp_path)
    assert failed["cases"][0]["check"]["worst"] > 1
