"""The benchmark training on the CPU in a tiny size: its rows, its check, and what it makes of them."""
from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.harness import decoder, render_training  # noqa: E402
from benchmarks.routines import training  # noqa: E402

TINY = ["--models", "tiny", "--lengths", "128", "--tokens", "128", "--steps", "1", "--device", "cpu", "--commit", "abc"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """A compiler that needs no C++; torch refuses gradients of FlexAttention on the CPU, although it can."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(decoder, "COMPILER", "aot_eager")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def record(folder: Path, *arguments: str) -> dict:
    assert training.main([*TINY, "--out", str(folder), *arguments]) == 0
    return json.loads((folder / "training.json").read_text())


def test_every_peer_in_every_mode(tmp_path, capsys):
    result = record(tmp_path)
    rows = {(row["mode"], row["peer"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == len(training.MODES) * len(training.PEERS)
    for (mode, peer), row in rows.items():
        assert row["ms"] > 0 and row["ok"], row
        assert row["losses"] == pytest.approx(rows["eager", peer]["losses"], abs=0.02), (mode, peer)
        assert ("attention_share" in row) == (peer != "none")
        assert row["tokens_per_second"] == pytest.approx(128e3 / row["ms"])
    for mode in training.MODES:  # the same model but for the layers' cores; dma and flex compute the same
        of = {peer: rows[mode, peer]["losses"] for peer in training.PEERS}
        assert of["dma"] == pytest.approx(of["flex"], abs=0.01) and of["dma"] != of["sdpa"] != of["none"]
    assert result["commit"] == "abc" and (tmp_path / "training.png").stat().st_size > 1000
    assert not (tmp_path / "training.partial.json").exists()
    assert "tiny, 128, compile+checkpoint" in render_training.table(result)

    capsys.readouterr()
    assert training.main(["--show", "--out", str(tmp_path)]) == 0
    assert render_training.line(result["rows"][0]) in capsys.readouterr().out
    tables = {tmp_path / "page.md": (render_training.MARKED, render_training.table(result)),
              tmp_path / "readme.md": (render_training.SUMMARY, render_training.summary(result))}
    for page, (marked, _) in tables.items():
        page.write_text(f"before\n{marked.begin}\nold\n{marked.end}\nafter\n")
    render_training.update(*tables, result)
    for page, (marked, text) in tables.items():
        assert page.read_text() == f"before\n{marked.begin}\n{text}\n{marked.end}\nafter\n"
    assert [line.split(" | ")[0] for line in render_training.summary(result).splitlines()[2:]] == [
        "| tiny, eager", "| tiny, compile"]


def test_rows_are_added(tmp_path):
    """Those that are measured again are replaced, and shares are of one run."""
    first = record(tmp_path, "--modes", "eager", "--peers", "none,sdpa")["rows"]
    rows = record(tmp_path, "--modes", "eager,checkpoint", "--peers", "none,dma", "--add")["rows"]
    assert [(row["mode"], row["peer"]) for row in rows] == [
        ("eager", "none"), ("eager", "dma"), ("eager", "sdpa"), ("checkpoint", "none"), ("checkpoint", "dma")]
    assert rows[2] == first[1] and rows[0] != first[0]
    path = tmp_path / "training.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "device": "another"}))
    with pytest.raises(SystemExit, match=r"--add: .* has the device another"):
        training.main([*TINY, "--out", str(tmp_path), "--add"])


def test_what_cannot_run_is_a_row(tmp_path, monkeypatch):
    """Out of memory, another error, and no time left; the other rows and the record are there."""
    class Failing(torch.nn.Module):
        def __init__(self, error):
            super().__init__()
            self.error = error

        def forward(self, *_, **__):
            raise self.error

    monkeypatch.setattr(decoder, "DenseCore", lambda grouped: Failing(torch.cuda.OutOfMemoryError("CUDA out of memory. "
                                                                                                   "Tried to ...")))
    monkeypatch.setattr(decoder, "FlexCore", lambda *sizes: Failing(ValueError("no such kernel\nat all")))
    rows = record(tmp_path, "--modes", "eager")["rows"]
    notes = {row["peer"]: row["note"] for row in rows}
    assert notes == {"none": "", "dma": "", "sdpa": "out of memory", "flex": "ValueError: no such kernel"}
    assert [row["ms"] is None for row in rows] == [False, False, True, True]
    rows = record(tmp_path, "--modes", "eager", "--seconds", "-1")["rows"]
    assert {row["note"] for row in rows} == {"no time left"}
    assert all("–" in line for line in render_training.table({**record(tmp_path, "--modes", "eager"),
                                                              "rows": rows}).splitlines()[2:3])


def test_a_wrong_loss_is_noticed(tmp_path, monkeypatch):
    """In a row of ours the run fails and the recorded results stay; of FlexAttention it is a word in its row."""
    real = training.trained

    def spoiled(who, loss):
        def trained(sizes, peer, *rest):
            row = real(sizes, peer, *rest)
            return {**row, "losses": [*row["losses"][:-1], row["losses"][-1] + loss]} if peer == who else row
        return trained

    for loss in (math.nan, 0.2):
        monkeypatch.setattr(training, "trained", spoiled("dma", loss))
        assert training.main([*TINY, "--modes", "eager", "--peers", "none,dma,sdpa,flex", "--out", str(tmp_path)]) == 1
        assert not (tmp_path / "training.json").exists() and (tmp_path / "training.failed.json").exists()
    monkeypatch.setattr(training, "trained", spoiled("flex", math.nan))
    row = next(row for row in record(tmp_path, "--modes", "eager")["rows"] if row["peer"] == "flex")
    assert not row["ok"] and row["note"].startswith("wrong loss nan")
    for peer in ("none", "dma", "sdpa"):  # beside the recorded rows
        monkeypatch.setattr(training, "trained", spoiled(peer, 0.1))
        arguments = [*TINY, "--modes", "checkpoint", "--peers", peer, "--out", str(tmp_path), "--add"]
        assert training.main(arguments) == 1
        monkeypatch.setattr(training, "trained", real)
        assert training.main(arguments) == 0


def test_a_dense_window_is_dense_attention():
    """A window of all keys and scores that are all equal leave dense attention: the models around them are the same."""
    from dataclasses import replace

    sizes = replace(training.models()["tiny"], window=128)
    losses = []
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


@pytest.mark.parametrize(("arguments", "message"), [
    (["--lengths", "100"], "--lengths must be multiples of 128, got 100"), (["--peers", "ours"], "ours is not one of"),
    (["--steps", "0"], "--steps and --tokens must be at least 1"), (["--lengths", "2K"], "invalid literal")])
def test_bad_options(capsys, arguments, message):
    with pytest.raises(SystemExit):
        training.main(arguments)
    assert message in capsys.readouterr().err


def test_sizes_are_those_of_the_models():
    counts = {}
    for name, sizes in training.models().items():
        with torch.device("meta"):
            counts[name] = sum(x.numel() for x in decoder.Decoder(sizes, decoder.NoCore).parameters()) / 1e6
    assert counts["80m"] == pytest.approx(89, abs=1) and counts["1.7b"] == pytest.approx(268, abs=2)
