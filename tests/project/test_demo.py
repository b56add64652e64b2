"""The demo: its text, its embedding, its exit codes, and that its check can fail."""
import sys

import numpy as np
import pytest

from cupy_dma import __main__ as cli
from cupy_dma.cli import demo


def run(tmp_path, *arguments):
    return cli.main(["demo", "--backend", "numpy", "--output", str(tmp_path / "mask.png"), *arguments])


def test_default_text_is_long_and_always_the_same():
    text = demo.default_text()
    assert len(text) > 300_000
    assert text == demo.default_text()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_demo_passes_its_check(tmp_path, capsys, dtype):
    pytest.importorskip("matplotlib")
    assert run(tmp_path, "--length", "700", "--window", "50", "--dtype", dtype) == 0
    shown = capsys.readouterr().out
    assert "check       passed" in shown
    assert "selection   exact" in shown
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [
    ["--length", "1"], ["--length", "2", "--window", "1"], ["--length", "300", "--window", "1000"],
    ["--length", "300", "--heads", "6", "--kv-heads", "3", "--head-dim", "17", "--window", "7"],
    ["--length", "200", "--heads", "1", "--kv-heads", "1", "--head-dim", "1", "--window", "20"]])
def test_odd_shapes(tmp_path, capsys, arguments):
    assert run(tmp_path, *arguments) == 0


def test_file_shorter_than_the_length(tmp_path, capsys):
    (tmp_path / "text").write_bytes(bytes(range(256)))
    assert run(tmp_path, "--file", str(tmp_path / "text"), "--window", "9") == 0
    assert "256 bytes of" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--window", "0"], "--window must be at least 1, got 0"),
    (["--length", "-5"], "--length must be at least 1, got -5"),
    (["--heads", "3", "--kv-heads", "2"], "--heads must be a multiple of --kv-heads, got 3 and 2"),
    (["--length", "9", "--head-dim", "257"], "257"), (["--file", "/no/such/file"], "/no/such/file")])
def test_bad_arguments_say_what_is_wrong(tmp_path, capsys, arguments, message):
    assert run(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err


def test_empty_file(tmp_path, capsys):
    (tmp_path / "empty").touch()
    assert run(tmp_path, "--file", str(tmp_path / "empty")) == 2
    assert "is empty" in capsys.readouterr().err


def test_backend_that_cannot_run(capsys, monkeypatch):
    from cupy_dma.cli import demo

    monkeypatch.setattr(demo, "why_not", lambda name: "the cable is unplugged" if name == "cuda" else None)
    assert cli.main(["demo", "--backend", "cuda"]) == 2
    assert "--backend cuda cannot run here: the cable is unplugged" in capsys.readouterr().err


def test_wrong_result_fails_the_check(tmp_path, capsys, monkeypatch):
    import cupy_dma

    right = cupy_dma.attention

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        out[0, 0] += 0.1
        return out, lse

    monkeypatch.setattr(cupy_dma, "attention", wrong)
    assert run(tmp_path, "--length", "64", "--window", "8") == 1
    assert "check       FAILED" in capsys.readouterr().out


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(tmp_path, "--length", "64", "--window", "8") == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "mask.png").exists()


def test_picture_that_cannot_be_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert cli.main(["demo", "--backend", "numpy", "--length", "64", "--output", str(tmp_path / "no" / "m.png")]) == 0
    assert "not drawn: " in capsys.readouterr().out


def test_embedding_is_seeded_and_sees_the_bytes_before():
    def key_of(text, seed=0):
        return demo.embed(text, 2, 1, 16, "float32", seed, np).key[0]

    assert np.array_equal(key_of(b"the cat"), key_of(b"the cat"))
    assert not np.array_equal(key_of(b"the cat"), key_of(b"the cat", seed=1))
    one, other = key_of(b"the cat"), key_of(b"the bat")
    differs = (one != other).any(axis=(1, 2))
    assert differs.tolist() == [False] * 4 + [True] * 3  # the changed byte and the contexts that hold it


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1, 1, 9)).astype(np.float32)

    def turned(vector, position):
        return demo.rotate(vector, np.array([float(position)]), np)[0, 0]

    assert np.linalg.norm(turned(x, 1000)) == pytest.approx(np.linalg.norm(x), rel=1e-6)
    assert turned(x, 5) @ turned(y, 2) == pytest.approx(turned(x, 105) @ turned(y, 102), rel=1e-4, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_demo_on_a_gpu(tmp_path, capsys, dtype):
    assert cli.main(["demo", "--backend", "cuda", "--length", "5000", "--window", "300", "--dtype", dtype,
                     "--output", str(tmp_path / "mask.png")]) == 0
    assert "check       passed" in capsys.readouterr().out
