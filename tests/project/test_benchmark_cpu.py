"""The benchmark cpu on tiny inputs, and what it has recorded."""
import json

import pytest

import cupy_dma as dma
from benchmarks.harness import render
from benchmarks.routines import cpu
from cupy_dma.backends.numpy.threads import one_blas_thread
from tests.project import benchmark_runs as runs

pytest.importorskip("torch")


@pytest.mark.parametrize("which", ["small", "large", "all", "smoke"])
def test_cases(which):
    runs.check_names(cpu.cases(which))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return runs.smoke_run(cpu, "cpu_performance", tmp_path_factory)


def test_smoke_run(result):
    assert result["torch_threads"] >= 1
    assert result["cores"] >= 1
    assert all(pool["num_threads"] >= 1 for pool in result["thread_pools"])
    case, = result["cases"]
    assert len(case["check"]["entries"]) == case["batch"]
    for who in ("cupy_dma", "all BLAS threads", "sdpa"):
        assert 0 < render.value(case, who, "forward+backward", "fastest_ms") <= render.value(
            case, who, "forward+backward")
    assert "| 2, 70, 4/2 heads, D 16, w 20 |" in cpu.table(result)


def test_table_of_the_docs_is_the_recorded_one():
    shown = cpu.DOCS.read_text().split(cpu.REPORT.begin)[1].split(cpu.REPORT.end)[0].strip()
    recorded = (cpu.output(None, "cpu") / "cpu_performance.json").read_text()
    assert shown == cpu.table(json.loads(recorded)), "run: python -m benchmarks cpu --update-docs"


def test_long_sequences_reach_their_target_in_the_recorded_run():
    """Short ones do not: docs/lab/numpy.md."""
    cases = json.loads((cpu.output(None, "cpu") / "cpu_performance.json").read_text())["cases"]
    case = next(case for case in cases if case["key_length"] == 16384)
    sdpa, ours = (render.value(case, who, "forward+backward") for who in ("sdpa", "cupy_dma"))
    assert sdpa / ours >= cpu.WANTED[case["set"]]


def test_without_the_limit_blas_has_all_threads(monkeypatch):
    bench = cpu.Benchmark(*cpu.cases("smoke"))
    seen = []

    def watched():
        with one_blas_thread():
            seen.append([library.num_threads for library in blas.lib_controllers])

    blas = cpu.threads._blas()
    monkeypatch.setattr(bench, "ours", watched)
    with blas.limit(limits=2):
        bench.unlimited()
        bench.ours()
    assert seen == [[2] * len(blas.lib_controllers), [1] * len(blas.lib_controllers)]


@pytest.mark.parametrize("wrong", ["out", "gradient"])
def test_wrong_results_leave_the_record_alone(wrong, tmp_path, monkeypatch):
    module, name = (dma, "attention") if wrong == "out" else (dma.backward, "attention_backward")
    right = getattr(module, name)

    def broken(*arguments, **options):
        first, *rest = right(*arguments, **options)
        return first * 1.1, *rest

    monkeypatch.setattr(module, name, broken)
    assert cpu.main(["--set", "smoke", "--out", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["cpu_performance.failed.json"]


def test_repeats_must_be_positive(capsys):
    with pytest.raises(SystemExit):
        cpu.main(["--set", "smoke", "--repeats", "0"])
    assert "at least 1, got 0" in capsys.readouterr().err
