"""Each routine of ``python -m benchmarks`` in a size for a CPU: its record, and that wrong results are not recorded.

Gradients of FlexAttention run uncompiled: torch refuses them on the CPU, although it can compute them.
"""
import importlib.util
import json
import math
import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import cupy_dma as dma  # noqa: E402
from benchmarks.__main__ import main, methods  # noqa: E402
from benchmarks.harness import decoder, measure, pages, pages_models  # noqa: E402
from benchmarks.harness.command import attempted  # noqa: E402
from benchmarks.harness.pages import REPORTS  # noqa: E402
from benchmarks.harness.report import value  # noqa: E402
from benchmarks.routines import (  # noqa: E402
    backward,
    cpu,
    decode,
    dense,
    forward,
    gaps,
    grid,
    host,
    intervals,
    training,
)
from cupy_dma.backends.numpy.threads import one_blas_thread  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")]


def run(name, folder, *arguments, file="", status=0):
    """Run a routine and return its record."""
    assert main([name, *arguments, "--out", str(folder), "--commit", "abc"]) == status
    ending = ".failed.json" if status else ".json"
    found = [path for path in folder.iterdir() if path.suffix == ".json"]
    assert [path.name for path in found] == [f"{file or name}{ending}"]
    result = json.loads(found[0].read_text())
    assert {"method", "device", "versions", "commit", "date"} <= set(result) and result["commit"] == "abc"
    return result


def test_every_routine_is_listed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    listed = capsys.readouterr().out
    assert end.value.code == 0 and len(methods()) == 23
    for name, method in methods().items():
        assert f"  {name} " in listed and method.partition("\n")[0] in listed and len(method) > 200


@pytest.mark.parametrize("name", sorted(methods()))
def test_help(name, capsys):
    if name == "jax_steps":
        pytest.importorskip("jax", minversion="0.9")
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "--out" in shown and ("--update-docs" in shown) == (
        name in REPORTS and len(REPORTS[name].pieces) > 0)
    assert methods()[name].splitlines()[-1] in shown


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "benchmarks.routines.gaps", None)
    for arguments in (["gaps"], ["no_such"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    shown = capsys.readouterr().err
    assert "cannot run here: import of benchmarks.routines.gaps" in shown and "invalid choice: 'no_such'" in shown


@pytest.mark.parametrize(("name", "piece"), [(name, piece) for name, report in REPORTS.items()
                                             for piece in report.pieces], ids=lambda x: getattr(x, "name", x))
def test_pages_show_what_is_recorded(name, piece):
    expected = REPORTS[name].made(piece, REPORTS[name].results()).strip()
    assert piece.shown() == expected, f"run: python -m benchmarks {name} --update-docs"


@pytest.mark.parametrize(("arguments", "message"), [
    ("cpu --repeats 0", "--repeats must be at least 1, got 0"),
    ("training --lengths 100", "--lengths must be multiples of 128, got 100"),
    ("training --peers ours", "ours is not one of"), ("training --lengths 2K", "invalid literal"),
    ("transformers_models --peers sdpa", "--peers must name cupy_dma"),
    ("serve --peers full", "--peers must name cupy_dma"), ("serve --slots 0", "--slots must be at least 1"),
    ("context_parallel --lengths 1", "--lengths must be at least --ranks 2"),
    ("tune_sm90 --head-dim 300", "--head-dim must be 1 to 256, got"),
    ("tune_sm90 --kernels tests", "--kernels must be folders like kernels/, got tests, which has no arch.cuh"),
    ("mqar --share 4/3", "must be I/N with I from 1 to N, got '4/3'"), ("mqar --share 3", "must be I/N")])
def test_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 2 and message in capsys.readouterr().err


# ---- suites ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", [forward, backward, decode, dense, intervals, cpu])
def test_cases_have_names_of_their_own(module):
    for which in ("all", "smoke"):
        names = [case.name for case in module.cases(which)]
        assert len(set(names)) == len(names) > 0


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The record of a smoke set; each set runs once."""
    found = {}

    def record(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            found[name] = run(name, folder, "--set", "smoke", file=f"{name}_performance")
            assert all(case["check"]["ok"] for case in found[name]["cases"])
            if REPORTS[name].panels is not None:
                pytest.importorskip("matplotlib")
                assert (folder / f"{name}_performance.png").stat().st_size > 1000
        return json.loads(json.dumps(found[name]))

    return record


def test_tables_are_put_between_their_markers(smoke, tmp_path):
    result, report = smoke("decode"), REPORTS["decode"]
    piece, = report.pieces
    page = tmp_path / piece.page
    page.parent.mkdir(parents=True)
    page.write_text(f"before\n{piece.begin}\nold\n{piece.end}\nafter\n")
    (tmp_path / report.record).write_text(json.dumps(result))
    report.update(str(tmp_path), tmp_path)
    table = piece.table(result)
    assert page.read_text() == f"before\n{piece.begin}\n{table}\n{piece.end}\nafter\n"
    assert table in report.text(result) and "| 3, 4/2, 70 |" in table and "original H2/1" in report.text(result)
    assert all(len({line.count("|") for line in part.splitlines() if line.startswith("|")}) <= 1
               for part in table.split("\n\n"))


def test_forward(smoke):
    result = smoke("forward")
    for case in result["cases"]:
        for stage in ("key_scores", "selection", "attention", "lists+attention", "total"):
            assert value(case, "cupy_dma", stage) is not None
        assert value(case, "masked+build", "attention") is not None


def test_backward(smoke):
    result = smoke("backward")
    for case in result["cases"]:
        stages = ["backward", "backward deterministic", "forward+backward"]
        for stage in stages + ["backward+lists"] * (case["set"] != "plain"):
            assert value(case, "cupy_dma", stage) > 0
        for stage in ("backward", "forward+backward"):
            assert value(case, "dense", stage) is not None
    assert result["cases"][0]["check"]["unseen_keys"] > 0


def test_decode(smoke):
    result = smoke("decode")
    assert result["copy_tb_s"] > 0 and result["empty_replay_us"] > 0
    full, short, serving = result["cases"]
    for case in result["cases"]:
        assert all(row["ms"] is not None for row in case["rows"]), case["rows"]
    stages = {"step w100", "step w100, cpu clock", "stateless", "prepared"}
    assert full["check"]["stages"].keys() == short["check"]["stages"].keys() == stages
    assert {row["who"] for row in full["rows"] if row["note"] == "right"} == {"sdpa", "masked", "masked+build", "flex"}
    assert value(full, "cupy_dma", "step w100 replay", "queued_ms") > 0
    assert value(serving, "cupy_dma", "step w16", "kept_bytes") == 3 * 2 * 16 * 2 * 16 * 2
    assert value(serving, "cupy_dma", "step unequal w32", "kept_bytes") == 3 * (4 + 60) * 2 * 16 * 2
    assert all(serving["check"]["stages"][stage]["ok"] for stage in (
        "step unequal w32", "step w32, 4 tokens", "step w32, fp8 rows", "step w32, int8 rows"))
    assert value(serving, "cupy_dma", "step w32, 8 tokens", "ms") > 0
    assert value(serving, "sdpa", "dense", "cache_bytes") == pages.history_bytes(serving)


def test_decode_leaves_out_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda: 2**30)
    assert max(case.batch * case.key_length for case in decode.cases("all") if case.set == "serving") == 2**17


def test_dense(smoke):
    result = smoke("dense")
    assert [case["set"] for case in result["cases"]] == list(dense.CLASSES)
    assert all(row["ms"] is not None for case in result["cases"] for row in case["rows"])
    random, plain = result["cases"][0], result["cases"][-1]
    assert {(row["who"], row["stage"]) for row in random["rows"] if row["note"].endswith("right")} == {
        ("flex", "forward"), ("sdpa", "forward"), ("sdpa", "backward")}
    assert random["check"]["stages"].keys() == {"forward", "backward"} and len(plain["check"]["stages"]) == 4
    assert {row["stage"] for row in plain["rows"] if row["note"].endswith("right")} == {
        "forward all keys", "forward causal"}


def test_intervals(smoke):
    result = smoke("intervals")
    assert [case["pattern"] for case in result["cases"]] == list(intervals.PATTERNS)
    kept = {case["pattern"]: case["check"]["kept_pairs"] for case in result["cases"]}
    assert kept["none"] == 0 < kept["1/16"] and kept["all"] == 4 * 200 * 201 // 2
    assert kept["top-w"] == kept["top-w, bound"] == 4 * (200 * 40 - 40 * 39 // 2)
    assert kept["H2O"] == kept["top-w"]  # a cache is full from its first eviction on
    assert all(row["ms"] for case in result["cases"] for row in case["rows"] if row["who"] == "cupy_dma")


def test_portable(smoke):
    result = smoke("portable")
    assert [case["set"] for case in result["cases"]] == ["plain", "model"]
    for case in result["cases"]:
        assert {(row["who"], row["stage"]) for row in case["rows"] if row["ms"]} == {
            (who, stage) for who in ("own", "A100", "RTX", "flash") for stage in ("forward", "backward")}


def scaled(name):
    """Make a field in a method's result, or its first entry, slightly too large."""
    def change(right):
        def wrong(self, *arguments, **options):
            found = right(self, *arguments, **options)
            return found._replace(**{name: getattr(found, name) * 1.1}) if name else (found[0] * 1.1, *found[1:])

        return wrong

    return change


@pytest.mark.parametrize(("name", "where", "method", "change"), [
    ("forward", forward.Benchmark, "check", lambda right: lambda self: {"ok": False}),
    ("backward", backward.Benchmark, "backward", scaled("key")), ("decode", decode.Benchmark, "result", scaled("")),
    ("cpu", dma, "attention", scaled("")), ("cpu", dma.backward, "attention_backward", scaled("query"))])
def test_wrong_results_leave_the_record_alone(name, where, method, change, tmp_path, monkeypatch):
    monkeypatch.setattr(where, method, change(getattr(where, method)))
    options = [] if name == "cpu" else ["--seconds", "0"]
    found = run(name, tmp_path, "--set", "smoke", *options, file=f"{name}_performance", status=1)["cases"][0]["check"]
    assert not found["ok"] and found.get("worst", 2) > 1


def test_cpu(smoke):
    result = smoke("cpu")
    assert result["torch_threads"] >= 1 and result["cores"] >= 1
    assert all(pool["num_threads"] >= 1 for pool in result["thread_pools"])
    case, = result["cases"]
    assert len(case["check"]["entries"]) == case["batch"]
    for who in ("cupy_dma", "all BLAS threads", "sdpa"):
        assert 0 < value(case, who, "forward+backward", "fastest_ms") <= value(case, who, "forward+backward")
    assert "| 2, 70, 4/2 heads, D 16, w 20 |" in REPORTS["cpu"].text(result)


def test_long_sequences_reach_their_target_on_the_recorded_cpu():
    """Short sequences miss theirs: docs/lab/numpy.md."""
    result, = REPORTS["cpu"].results()
    case = next(case for case in result["cases"] if case["key_length"] == 16384)
    sdpa, ours = (value(case, who, "forward+backward") for who in ("sdpa", "cupy_dma"))
    assert sdpa / ours >= pages_models.CPU_WANTED[case["set"]]


def test_without_the_limit_blas_has_all_threads(monkeypatch):
    bench, seen = cpu.Benchmark(*cpu.cases("smoke")), []

    def watched():
        with one_blas_thread():
            seen.append([library.num_threads for library in blas.lib_controllers])

    blas = cpu.threads._blas()
    monkeypatch.setattr(bench, "ours", watched)
    with blas.limit(limits=2):
        bench.unlimited()
        bench.ours()
    assert seen == [[2] * len(blas.lib_controllers), [1] * len(blas.lib_controllers)]


# ---- grid, host and gaps --------------------------------------------------------------------------------------------
def test_grid(tmp_path, monkeypatch, capsys):
    found = grid.cases()
    assert len(found) == len({case.name for case in found}) >= 150
    assert {case.window for case in found} >= {64, 1024, 32768} and {case.batch for case in found} == {1, 4, 16}
    for name, x in (("HEADS", ((2, 1, 16),)), ("LENGTHS", (64, 96)), ("MAX_TOKENS", 384)):
        monkeypatch.setattr(grid, name, x)
    record = run("grid", tmp_path)
    assert len(record["rows"]) == 2 * len(grid.cases()) and {row["stage"] for row in record["rows"]} == {
        "forward", "both"}
    assert "as fast as wanted" in capsys.readouterr().out
    right = grid.Benchmark.both
    monkeypatch.setattr(grid.Benchmark, "both", lambda self, *entry: tuple(2 * x for x in right(self, *entry)))
    assert run("grid", tmp_path / "wrong", status=1)["wrong"] and "WRONG: model" in capsys.readouterr().out


@pytest.mark.parametrize(("ours", "peer", "stage", "ok"), [
    (1.0, 0.96, "both", True), (1.0, 0.94, "both", False), (0.14, 0.1, "forward", True), (0.15, 0.1, "forward", False),
    (0.18, 0.1, "both", True), (0.19, 0.1, "both", False)])
def test_what_the_grid_wants(ours, peer, stage, ok):
    assert grid.Row("a case", stage, ours, peer).ok is ok


def test_host(tmp_path, monkeypatch, capsys):
    for name, x in (("CALLS", 1), ("ROUNDS", 1), ("LENGTH", 64), ("WINDOW", 16)):
        monkeypatch.setattr(host, name, x)
    rows = run("host", tmp_path)["rows"]
    names = [row["name"] for row in rows]
    assert names[:2] == ["SDPA, forward", "SDPA, step"] and len(names) == 14
    assert all(row["host_us"] > 0 and row["times_sdpa"] > 0 for row in rows) and names[0] in capsys.readouterr().out
    for wrong in (0.0, math.nan):
        with pytest.raises(AssertionError, match="some step"):
            host.check({"some step": lambda wrong=wrong: (torch.ones(3), torch.full((3,), wrong))})


def test_gaps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gaps, "PARTS", ("attention",))
    monkeypatch.setattr(gaps, "WARM_UP", 1)
    rows = run("gaps", tmp_path, "--length", "64", "--model", "tiny")["rows"]
    assert [(row["peer"], row["window"], row["mode"]) for row in rows] == [
        (*of, mode) for of in (("dma", 32), ("dma", 64), ("sdpa", None)) for mode in ("eager", "graphs")]
    assert "attention  dma  window 32  graphs" in capsys.readouterr().out
    right = torch.ones(3)
    for wrong, says in ((1.2, "from the eager step"), (math.nan, "not finite")):
        with pytest.raises(AssertionError, match=says):
            gaps.checked({"eager": lambda: (right,), "graphs": lambda wrong=wrong: (wrong * right,)}, 1)
    monkeypatch.setattr(measure, "captured", lambda call: (call, "graph"))
    assert gaps.captured(lambda: (1, 2))() == (1, 2)
    monkeypatch.setattr(measure, "captured", lambda call: (call, "events"))
    with pytest.raises(RuntimeError, match="cannot be captured"):
        gaps.captured(lambda: (1, 2))


def test_pauses_are_between_kernels_of_a_step():
    """Three steps of three kernels; the second kernel overlaps the first, and the first step does not count."""
    times = [(90, 91), (95, 96), (99, 100), (200, 210), (205, 208), (212, 215), (300, 310), (313, 314), (315, 320)]
    found = gaps.pauses([("abc"[i % 3], begin, end) for i, (begin, end) in enumerate(times)], 3)
    assert found == {"launches": 3, "longest_us": 2.5, "worst_us": 3, "pauses_us": 3, "step_us": 17.5,
                     "between": ["a", "c"]}
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"got {count} of them"):
            gaps.pauses([("kernel", 0, 1)] * count, 3)


# ---- training -------------------------------------------------------------------------------------------------------
TINY = ("--models", "tiny", "--lengths", "128", "--tokens", "128", "--steps", "1", "--device", "cpu")


@pytest.fixture
def without_a_compiler(monkeypatch):
    """Replace the compiler with one that needs no C++."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(decoder, "COMPILER", "aot_eager")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None, raising=False)


@pytest.mark.usefixtures("without_a_compiler")
def test_training_of_every_peer_in_every_mode(tmp_path, capsys):
    result = run("training", tmp_path, *TINY)
    rows = {(row["mode"], row["peer"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == len(training.MODES) * len(training.PEERS)
    for (mode, peer), row in rows.items():
        assert row["ms"] > 0 and row["ok"], row
        assert row["losses"] == pytest.approx(rows["eager", peer]["losses"], abs=0.02), (mode, peer)
        assert ("attention_share" in row) == (peer != "none")
        assert row["tokens_per_second"] == pytest.approx(128e3 / row["ms"], rel=1e-4)
    for mode in training.MODES:  # only the layers' cores differ; dma and flex compute the same
        of = {peer: rows[mode, peer]["losses"] for peer in training.PEERS}
        assert of["dma"] == pytest.approx(of["flex"], abs=0.01) and of["dma"] != of["sdpa"] != of["none"]
    capsys.readouterr()
    assert not main(["training", "--show", "--out", str(tmp_path)])
    assert REPORTS["training"].text(result) in capsys.readouterr().out
    table, summary = (piece.table(result) for piece in REPORTS["training"].pieces)
    assert "tiny, 128, compile+checkpoint" in table
    assert [line.split(" | ")[0] for line in summary.splitlines()[2:]] == ["| tiny, eager", "| tiny, compile"]


def test_training_without_time(tmp_path):
    late = run("training", tmp_path, *TINY, "--modes", "eager", "--seconds", "-1")
    assert {row["note"] for row in late["rows"]} == {"no time left"}
    assert all("–" in line for line in REPORTS["training"].pieces[0].table(late).splitlines()[2:3])


@pytest.mark.parametrize(("error", "note"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to ..."), "out of memory"),
    (ValueError("no such kernel\nat all"), "ValueError: no such kernel")])
def test_a_peer_that_cannot_run_is_a_row(error, note):
    def fail():
        raise error

    assert attempted(fail) == {"ms": None, "note": note} and attempted(lambda: {"ms": 1.0}) == {"ms": 1.0}


@pytest.mark.usefixtures("without_a_compiler")
def test_a_wrong_loss_is_noticed(tmp_path, monkeypatch):
    """In our rows it fails the run and keeps the recorded results; in FlexAttention's it is only noted."""
    real = training.trained

    def spoiled(who, loss):
        def trained(sizes, peer, *rest):
            row = real(sizes, peer, *rest)
            return {**row, "losses": [*row["losses"][:-1], row["losses"][-1] + loss]} if peer == who else row
        return trained

    for loss in (math.nan, 0.2):
        monkeypatch.setattr(training, "trained", spoiled("dma", loss))
        run("training", tmp_path / str(loss), *TINY, "--modes", "eager", status=1)
    monkeypatch.setattr(training, "trained", spoiled("flex", math.nan))
    row = next(row for row in run("training", tmp_path / "ok", *TINY, "--modes", "eager")["rows"]
               if row["peer"] == "flex")
    assert not row["ok"] and row["note"].startswith("wrong loss nan")


@pytest.mark.usefixtures("without_a_compiler")
def test_a_dense_window_is_dense_attention():
    """A window of all keys with equal scores is dense attention, so both models must agree."""
    sizes, losses = replace(decoder.MODELS["tiny"], window=128), []
    for peer in ("dma", "sdpa", "flex"):
        with decoder.decoder(sizes, peer, compiled=False, checkpoint=False, device="cpu",
                             dtype=torch.float32) as (model, _):
            for name, x in model.named_parameters():
                if name.endswith(".A"):
                    torch.nn.init.zeros_(x)
            loss = model(decoder.batch_of(sizes, 1, 128, 0, "cpu"))
            loss.backward()
            losses.append((loss.item(), model.blocks[0].attention.q_proj.weight.grad))
    for loss, gradient in losses[1:]:
        assert loss == pytest.approx(losses[0][0], abs=1e-5)
        torch.testing.assert_close(gradient, losses[0][1], rtol=1e-3, atol=1e-6)


# ---- jax and transformers -------------------------------------------------------------------------------------------
def test_jax_steps(tmp_path, monkeypatch):
    pytest.importorskip("jax", minversion="0.9")
    monkeypatch.setitem(os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from benchmarks.routines import jax_steps

    monkeypatch.setattr(jax_steps, "ROUNDS", 2)
    monkeypatch.setattr(jax_steps, "CALLS", 2)
    result = run("jax_steps", tmp_path / "right", "--size", "tiny")
    assert [(row["part"], row["name"]) for row in result["rows"]] == [
        ("host", "jit(query + 1)"), ("host", "jit(dynamic_mask_attention)"), ("step", "jax"), ("step", "torch")]
    assert set(result["rows"][2]["apart"]) == set(jax_steps.NAMES)
    assert "128 tokens, 4/2 heads" in REPORTS["jax_steps"].text(result)
    monkeypatch.setattr(jax_steps, "NEAR", -1)
    run("jax_steps", tmp_path / "wrong", "--size", "tiny", status=1)


def test_transformers_models(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from benchmarks.routines import transformers_models as bench

    tiny = ["--size", "tiny", "--lengths", "100", "--repeats", "1"]
    result = run("transformers_models", tmp_path / "right", *tiny)
    rows = {(row["part"], row["peer"]): row for row in result["rows"]}
    assert set(rows) == {*((part, peer) for part in ("prefill", "train") for peer in bench.PEERS),
                         ("decode", "cupy_dma"), ("decode", "sdpa")}
    assert all(row["ms"] > 0 for row in rows.values())
    assert rows["prefill", "cupy_dma"]["error"] <= rows["prefill", "eager"]["error"] + 2**-8
    assert rows["decode", "cupy_dma"]["cache_bytes"] > 0 < rows["decode", "sdpa"]["cache_bytes"]
    table = REPORTS["transformers_models"].text(result)
    assert "| prefill | 100 |" in table and "| decode (CUDA graph) | 100 | –" in table
    monkeypatch.setattr(bench, "check", lambda rows: False)
    run("transformers_models", tmp_path / "wrong", *tiny, "--parts", "decode", status=1)


def test_serve(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from benchmarks.routines import serve as bench

    tiny = ["--size", "tiny", "--requests", "7", "--slots", "2", "--chunk", "32", "--window", "24"]
    result = run("serve", tmp_path / "right", *tiny)
    rows = {row["peer"]: row for row in result["rows"]}
    assert set(rows) == set(bench.PEERS)
    wanted = sum(min(n // 8, bench.MOST_GENERATED) for n in result["lengths"])
    assert 16 <= result["lengths"][0] < 40 < 100 < result["lengths"][-1] <= 160
    for name in ("cupy_dma", "full", "sdpa"):
        assert rows[name]["ended"] == 7 and rows[name]["tokens"] == wanted == rows[name]["said"][-1][1]
        assert 0 < rows[name]["ms"] <= rows[name]["p99_ms"] and 0 < rows[name]["first_s"][0] < rows[name]["seconds"]
    for name in ("cupy_dma", "full"):
        assert rows[name]["alone"] == [True] * 3 and rows[name]["ok"]
        assert {size for _, size in rows[name]["memory"]} == {rows[name]["cache_bytes"]}
    assert rows["cupy_dma"]["cache_bytes"] < rows["full"]["cache_bytes"] / 4
    assert rows["flash_attention_2"]["ms"] is None and "FlashAttention2" in rows["flash_attention_2"]["note"]
    table = REPORTS["serve"].text(result)
    assert "| cupy_dma | " in table and "7 requests of" in table and "| sdpa, paged | " in table
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "right" / "serve.png").stat().st_size > 1000
    only = [*tiny, "--peers", "cupy_dma"]
    monkeypatch.setattr(bench, "equal_alone", lambda *_: False)
    run("serve", tmp_path / "wrong", *only, status=1)


def test_what_is_wrong_of_transformers_models():
    pytest.importorskip("transformers")
    from benchmarks.routines.transformers_models import check

    def rows(part, field, **found):
        return [{"part": part, "length": 1, "peer": peer.replace("_graph", " graph"), "ms": 1.0, field: x}
                for peer, x in found.items()]

    wrong = rows("prefill", "error", cupy_dma=0.05, eager=0.02, sdpa=0.9)
    assert not check(wrong) and wrong[0]["ok"] is False
    assert check([{**wrong[0], "error": 0.02}, *wrong[1:]]) and check(wrong[::2])
    assert not check([{**wrong[0], "error": 0.2}, wrong[2]])
    losses = rows("train", "losses", cupy_dma=[2.0, 1.9], eager=[2.0, 1.8], sdpa=[2.0, 1.9])
    assert not check(losses) and not check(losses[::2])
    assert check([losses[0], {**losses[1], "losses": [2.0, 1.88]}, losses[2]])
    tokens = rows("decode", "tokens", cupy_dma=[3, 1], cupy_dma_graph=[3, 2])
    assert not check(tokens) and not check([tokens[0], {**tokens[1], "ms": None}])
    assert not check([{"part": "train", "length": 1, "peer": "cupy_dma", "ms": None}])
