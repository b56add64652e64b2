"""The demo: its text, its embedding, its exit codes, and that its check can fail."""
import re

import numpy as np
import pytest

from cupy_dma import __main__ as cli
from cupy_dma.cli import demo, devices, picture


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


def test_without_matplotlib(tmp_path, capsys, monkeypatch, without):
    without("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--backend", "numpy", "--length", "64", "--window", "8"]) == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "mask.png").exists()
    assert run(tmp_path, "--length", "64") == 2  # a requested picture
    assert "mask.png: matplotlib is missing" in capsys.readouterr().err


def test_picture_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure

    def fill(self, path, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", fill)
    assert run(tmp_path, "--length", "64") == 1
    shown = capsys.readouterr()
    assert "not drawn: " in shown.out and "check       passed" in shown.out
    assert shown.err == f"cupy_dma: cannot write the picture {tmp_path}/mask.png: No space left on device\n"


@pytest.mark.parametrize(("kv_heads", "shown"), [(1, [0]), (2, [0, 1]), (6, [0, 1, 2, 5])])
def test_picture_says_what_it_shows(tmp_path, capsys, monkeypatch, kv_heads, shown):
    figures = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda self, path, **options: figures.append(self))
    (tmp_path / "text").write_bytes(b"abc" * 40)
    assert run(tmp_path, "--file", str(tmp_path / "text"), "--window", "7", "--heads", str(kv_heads),
               "--kv-heads", str(kv_heads)) == 0
    drawn, = figures
    assert "120 bytes of" in drawn.get_suptitle() and "text" in drawn.get_suptitle()
    assert [entry.get_text() for entry in drawn.legends[0].get_texts()][::2] == ["visible", "hidden"]
    titles = [ax.get_title() for ax in drawn.axes]
    assert [int(title.split()[2].rstrip(":")) for title in titles] == shown
    assert all("the 7 keys with the highest scores" in title for title in titles[:-1])
    assert ("sliding window, the newest 7 keys" in titles[-1]) == (kv_heads > 1)


def test_existing_picture_is_replaced_and_a_folder_is_not(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "old.png").touch()
    (tmp_path / "folder.png").mkdir()
    assert not picture.why_not(str(tmp_path / "old.png"))
    assert picture.why_not(str(tmp_path / "folder.png")) == "it cannot be written"


def rounded(text):
    """The smallest and largest values that a printed number may stand for."""
    half = 0.5 * 10.0**-len(text.partition(".")[2])
    return float(text) - half, float(text) + half


def test_dense_attention_is_timed_beside_ours(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "DENSE_QUERIES", 50)
    assert run(tmp_path, "--length", "300", "--window", "20") == 0
    line, = (line for line in capsys.readouterr().out.splitlines() if line.startswith("time "))
    found = re.fullmatch(r"time +([\d.]+) s for key scores, selection and attention; dense attention, causal over all "
                         r"keys, takes ([\d.]+) s, estimated from 50 queries: ([\d.]+) times as long", line)
    own, dense, ratio = map(rounded, found.groups())
    assert own[0] > 0 and dense[0] > 0
    assert ratio[0] <= dense[1] / own[0] and dense[0] / own[1] <= ratio[1]


@pytest.mark.parametrize(("length", "queries"), [(1, 1), (301, 50), (300, 300)])
def test_queries_in_the_middle_speak_for_all(monkeypatch, length, queries):
    """With a clock that counts pairs, the estimate equals the number of all causal pairs."""
    clock = [0.0]

    def attention(query, key, value, **options):
        assert options["causal"]
        n, m = query.shape[1], key.shape[1]
        clock[0] += sum(range(m - n + 1, m + 1))

    monkeypatch.setattr(demo.dma, "attention", attention)
    monkeypatch.setattr(demo.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(demo, "DENSE_QUERIES", queries)
    problem = demo.embed(bytes(length), 2, 1, 4, "float32", 0, np)
    assert demo.dense_attention(problem, devices.HostDevice()) == (pytest.approx(length * (length + 1) / 2), queries)


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
