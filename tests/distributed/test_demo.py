"""``python -m cupy_dma demo --ranks``: it runs, and its check can fail."""
from argparse import Namespace

import pytest

torch = pytest.importorskip("torch")

from cupy_dma import __main__ as cli  # noqa: E402
from cupy_dma.cli import demo, demo_ranks  # noqa: E402
from tests.distributed import jobs  # noqa: E402


@pytest.mark.slow
def test_it_runs(capfd):
    assert cli.main(["demo", "--ranks", "2", "--length", "601", "--window", "40"]) == 0
    said = capfd.readouterr().out
    assert "shards of 301, 300" in said and "check       passed" in said
    assert "   1" in said and "2 processes, float32" in said


@pytest.fixture
def found(ranks):
    args = Namespace(ranks=3, heads=4, kv_heads=2, head_dim=16, window=20, dtype="float32", backend=None, seed=0)
    text = demo.default_text()[:200]
    return text, args, ranks.run(3, jobs.demonstrate, text, args), demo_ranks._attend(text, args, None)


@pytest.mark.parametrize("field", [None, "out", "lse", "dkey", "dvalue"])
def test_it_notices_what_is_wrong(found, field):
    text, args, shards, alone = found
    if field is not None:
        x = shards[1][field]
        x[..., 0] += 0.1 * float(x.abs().max())  # lse: the first row of the shard, which is checked
    lines, ok = demo_ranks.report(text, "a text", args, shards, alone)
    assert ok == (field is None) and ("passed" in lines[-1]) == ok


@pytest.mark.parametrize(("arguments", "message"), [
    (["--ranks", "0"], "argument --ranks: must be at least 1, got 0"),
    (["--ranks", "2", "--output", "mask.png"], "--output is for one process"),
    (["--ranks", "2", "--heads", "3", "--kv-heads", "2"], "--heads must be a multiple of --kv-heads, got 3 and 2"),
    (["--ranks", "2", "--file", "/no/such/file"], "/no/such/file"),
    (["--ranks", "99", "--backend", "cuda"], "--backend cuda needs a GPU for each of --ranks 99")])
def test_bad_arguments(capsys, arguments, message):
    assert cli.main(["demo", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_without_torch(capsys, monkeypatch):
    monkeypatch.setattr(demo_ranks.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo", "--ranks", "2"]) == 2
    assert "--ranks needs torch" in capsys.readouterr().err


def test_one_rank_is_one_process(ranks, found):
    text, args, _, alone = found
    (one,) = ranks.run(1, jobs.demonstrate, text, args)
    assert torch.equal(one["out"], alone["out"]) and torch.equal(one["dvalue"], alone["dvalue"])
