"""``python -m cupy_dma bench`` on the CPU: its table, its check, and its messages if something is missing."""
import re
from types import SimpleNamespace

import numpy as np
import pytest

from cupy_dma import __main__ as cli
from cupy_dma.cli import bench

SMALL = ["bench", "--backend", "numpy", "--length", "96", "--window", "16", "--head-dim", "8", "--seconds", "1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "MAX_REPEATS", 3)
    return tmp_path


@pytest.mark.parametrize("arguments", [[], ["--dtype", "bfloat16", "--batch", "2", "--heads", "6", "--kv-heads", "3"]])
def test_bench(folder, capsys, arguments):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    assert cli.main([*SMALL, *arguments]) == 0
    said = capsys.readouterr().out
    assert "on the CPU (NumPy backend)" in said and "says nothing about the CUDA kernels" in said
    for row in (bench.SCORES, bench.MASK, bench.BACKWARD, bench.DECODE):
        ours, peer, ratio = map(float, re.search(rf"{row} +(\S+) +(\S+) +(\S+)x", said).groups())
        assert ours > 0 and ratio == pytest.approx(peer / ours, rel=0.01)
    assert "check       passed" in said and "chart       bench.png" in said
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_torch_and_matplotlib(folder, capsys, without):
    without("torch", "matplotlib")
    assert cli.main(SMALL) == 0
    said = capsys.readouterr().out
    assert "no torch that reaches it, so no SDPA" in said and re.search(r"backward +\S+ +- +-\n", said)
    assert "not drawn: matplotlib is missing" in said and not (folder / "bench.png").exists()


def test_a_peer_that_cannot_run_leaves_a_gap(capsys, monkeypatch, torch):

    def full(*arguments, **options):
        raise RuntimeError("CUDA out of memory.\nmore")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", full)
    assert cli.main(SMALL) == 0
    said = capsys.readouterr().out
    assert said.count("torch SDPA, ") == 3 and "torch SDPA, backward: CUDA out of memory.\n" in said
    assert re.search(r"decode +\S+ +- +-\n", said)


def test_calls_are_timed_between_events_on_a_gpu():
    """The clock for GPUs, with fake events that count."""
    recorded = []

    class Event:
        def record(self):
            recorded.append("record")

        def synchronize(self):
            recorded.append("wait")

    cuda = SimpleNamespace(Event=Event, get_elapsed_time=lambda begin, end: len(recorded))
    device = SimpleNamespace(name="cuda", xp=SimpleNamespace(cuda=cuda), wait=lambda: recorded.append("ready"))
    ms = bench.milliseconds(lambda: recorded.append("call"), 0.0, device)
    assert recorded == ["call", "ready", *["record", "call", "record", "wait"] * 3]
    assert ms == np.median([6, 10, 14])


@pytest.mark.gpu
def test_bench_on_a_gpu(capsys):
    assert cli.main(["bench", "--backend", "cuda", "--length", "4096", "--window", "512", "--seconds", "2"]) == 0
    said = capsys.readouterr().out
    assert "check       passed" in said and "NumPy" not in said
