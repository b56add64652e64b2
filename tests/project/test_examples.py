"""The examples run, and notice what they are there to notice."""
import math
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

import cupy_dma as dma

SMALL = ["--device", "cpu", "--layers", "2", "--width", "64", "--window", "16", "--free", "60"]


@pytest.fixture
def generate(tmp_path, monkeypatch):
    """The example, with its plot in a folder of its own."""
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "path", [*sys.path])  # a script may add the tree
    from examples import generate as module

    plot = tmp_path / "plot.png"
    return SimpleNamespace(plot=plot, run=lambda *arguments: module.main([*arguments, "--output", str(plot)]),
                           Model=module.Model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generation(generate, capsys, dtype):
    assert generate.run("--tokens", "120", "--dtype", dtype, *SMALL) == 0
    said = capsys.readouterr().out
    assert "the first 60 tokens: all 60 tokens are the same" in said
    assert "of 199: all 120 tokens are the same" in said
    assert generate.plot.stat().st_size > 1000


def test_a_few_tokens(generate, capsys):
    for tokens in ("1", "2"):
        assert generate.run("--tokens", tokens, *SMALL) == 0


def test_generation_notices_another_selection(generate, capsys, monkeypatch):
    def narrow(self):
        return [dma.DynamicCache(1, layer.kv_heads, 3, layer.size, dtype="float32", like=self.embed.weight)
                for layer in self.layers]

    monkeypatch.setattr(generate.Model, "caches", narrow)
    assert generate.run("--tokens", "120", *SMALL) == 1
    said = capsys.readouterr().out
    assert len(re.findall(r"tokens DIFFER, the first at \d+", said)) == 2


def test_generation_notices_growing_memory(generate, capsys, monkeypatch):
    bytes_of = iter(range(10**6, 10**7))
    monkeypatch.setattr(dma.DynamicCache, "memory_bytes", property(lambda self: next(bytes_of)))
    assert generate.run("--tokens", "30", *SMALL) == 1
    assert "IT GREW" in capsys.readouterr().out


SHORT = ["--device", "cpu", "--layers", "1", "--width", "32", "--batch", "2", "--length", "64", "--window", "16"]


@pytest.fixture
def train(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(sys, "path", [*sys.path])
    from examples import train as module

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    yield module
    torch.set_num_threads(threads)


def test_training(train, tmp_path, capsys):
    """It predicts bytes better than their frequencies do."""
    train.main([*SHORT, "--steps", "100", "--count", "20", "--output", str(tmp_path / "model.pt")])
    said = capsys.readouterr().out
    first, last = map(float, re.search(r"([\d.]+) at first, ([\d.]+) in the last 10 steps", said).groups())
    text = "\n".join(train.topics.values()).encode()
    shares = [count / len(text) for count in Counter(text).values()]
    assert last < -sum(share * math.log(share) for share in shares) < 4 < first
    assert "\nThe statement " in said


def test_what_was_trained_writes_as_it_reads(train, tmp_path):
    """With a window that keeps every byte, the most likely bytes are those of passes over the whole text."""
    import torch

    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "window": 64}
    model = train.Model(**sizes)
    train.save(tmp_path / "model.pt", model, sizes)
    loaded, prompt = train.load(tmp_path / "model.pt", "cpu"), torch.randint(256, (2, 9))
    assert torch.equal(loaded(prompt), model(prompt))
    written = train.write(loaded, prompt, 20, temperature=1e-6)
    assert torch.equal(written[:, :9], prompt) and torch.equal(written[:, 9:], model(written)[:, 8:-1].argmax(-1))


@pytest.mark.parametrize(("option", "value", "message"), [
    ("steps", "0", "--steps must be at least 1, got 0"), ("temperature", "0", "--temperature must be above 0"),
    ("prompt", "", "--prompt must not be empty")])
def test_bad_options_of_training(train, capsys, option, value, message):
    with pytest.raises(SystemExit):
        train.main([f"--{option}", value])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokens", "free", "forced"])
def test_bad_numbers(generate, capsys, name):
    with pytest.raises(SystemExit):
        generate.run(f"--{name}", "0")
    assert f"--{name} must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_generation_on_a_gpu(generate, capsys, dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    for _ in range(3):  # other tests may come in between while the last tokens are written, but hardly each time
        assert generate.run("--tokens", "2000", "--free", "500", "--device", "cuda", "--dtype", dtype) == 0
        said = capsys.readouterr().out
        assert "of 2079: all 2000 tokens are the same" in said
        if float(re.search(r"\(([\d.]+) times that\)", said)[1]) < 1.5:
            return
    pytest.fail("the last tokens took 1.5 times as long as the first ones, three times over")
