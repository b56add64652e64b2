"""The examples run, and notice what they are there to notice."""
import math
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_dma as dma
from tests.oracle import reference

SMALL = ["--device", "cpu", "--layers", "2", "--width", "64", "--window", "16", "--free", "60"]


@pytest.fixture
def generate(tmp_path, own_path, torch):
    """The example, with its plot in a folder of its own."""
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
def train(own_path, one_thread):
    from examples import train as module

    return module


def test_training(train, tmp_path, capsys):
    """It predicts bytes better than their frequencies do."""
    train.main([*SHORT, "--steps", "100", "--count", "20", "--output", str(tmp_path / "model.pt")])
    said = capsys.readouterr().out
    first, last = map(float, re.search(r"([\d.]+) at first, ([\d.]+) in the last 10 steps", said).groups())
    text = "\n".join(train.topics.values()).encode()
    shares = [count / len(text) for count in Counter(text).values()]
    assert last < -sum(share * math.log(share) for share in shares) < 4 < first
    assert "\nThe statement " in said


@pytest.mark.parametrize("attention", ["dynamic", "dense"])
def test_what_was_trained_writes_as_it_reads(train, tmp_path, attention):
    """With a window that keeps every byte, the most likely bytes are those of passes over the whole text."""
    import torch

    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "window": 64, "attention": attention}
    model = train.Model(**sizes)
    train.save(tmp_path / "model.pt", model, sizes)
    loaded, prompt = train.load(tmp_path / "model.pt", "cpu"), torch.randint(256, (2, 9))
    assert torch.equal(loaded(prompt), model(prompt))
    written = train.write(loaded, prompt, 20, temperature=1e-6)
    assert torch.equal(written[:, :9], prompt) and torch.equal(written[:, 9:], model(written)[:, 8:-1].argmax(-1))


def test_kinds_of_attention_begin_alike(train):
    """Dense attention is dynamic attention whose window keeps every byte; A = 0 is a sliding window."""
    import torch

    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1}
    logits, ids = {}, torch.randint(256, (2, 50))
    for attention, window in (("dense", 50), ("dynamic", 50), ("dynamic", 8), ("window", 8)):
        torch.manual_seed(3)
        model = train.Model(**sizes, window=window, attention=attention)
        logits[attention, window] = model(ids)
        learns = [x.requires_grad for name, x in model.named_parameters() if name.endswith(".A")]
        assert learns == {"dense": [], "dynamic": [True, True], "window": [False, False]}[attention]
    torch.testing.assert_close(logits["dense", 50], logits["dynamic", 50], rtol=0, atol=1e-5)
    assert torch.equal(logits["dynamic", 8], logits["window", 8])
    assert not torch.allclose(logits["dynamic", 8], logits["dynamic", 50], atol=1e-3)


LEARN = [*SHORT, "--steps", "12", "--save", "5", "--validate", "4", "--pieces", "6", "--count", "5"]


def recorded(path):
    import torch

    saved = torch.load(path, weights_only=True)
    return saved["run"]["losses"], saved["run"]["validation"], saved["model"]


@pytest.mark.parametrize("attention", ["dynamic", "dense"])
def test_a_resumed_run_is_an_uninterrupted_one(train, tmp_path, monkeypatch, capsys, attention):
    """The same losses, validations and parameters, bit for bit, from a run that ends after 8 steps, with a checkpoint
    after 5 of them."""
    import torch

    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    options = [*LEARN, "--attention", attention]
    train.main([*options, "--output", str(whole)])
    real = train.Run.step

    def step(run):
        if len(run.losses) == 8:
            raise KeyboardInterrupt
        return real(run)

    monkeypatch.setattr(train.Run, "step", step)
    with pytest.raises(KeyboardInterrupt):
        train.main([*options, "--output", str(parts)])
    monkeypatch.undo()
    assert len(recorded(parts)[0]) == 5
    capsys.readouterr()
    torch.randn(7)  # whatever state the generators of the process are in
    train.main(["--resume", str(parts), "--device", "cpu", "--count", "5"])
    assert "has done 5 of 12 steps" in capsys.readouterr().out
    (losses, validation, model), (again, validated, resumed) = recorded(whole), recorded(parts)
    assert losses == again and len(losses) == 12 and validation == validated
    assert [step for step, _ in validation] == [4, 8, 12]
    assert model.keys() == resumed.keys() and all(torch.equal(model[name], resumed[name]) for name in model)
    for path in (whole, parts):
        assert path.with_suffix(".png").stat().st_size > 1000


def test_a_run_is_not_resumed_as_another(train, tmp_path, capsys):
    train.main([*LEARN, "--output", str(tmp_path / "model.pt")])
    for option, value in (("--window", "9"), ("--attention", "dense"), ("--kv-heads", "4")):
        with pytest.raises(SystemExit):
            train.main(["--resume", str(tmp_path / "model.pt"), option, value])
        assert f"{option} was " in capsys.readouterr().err


def test_training_on_a_text_of_ones_own(train, tmp_path, capsys, monkeypatch):
    """What repeats is learned, compiled and under autocast; the held-out part is not trained on."""
    import functools

    import torch

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    text = tmp_path / "text.txt"
    text.write_bytes(b"The quick brown fox. " * 200 + b"0123456789" * 50)
    train.main([*SHORT, "--text", str(text), "--steps", "60", "--compile", "--autocast", "--rate", "0.02", "--count",
                "3", "--output", str(tmp_path / "model.pt")])
    found = re.search(r"4700 bytes of text.*?([\d.]+) in the last 10 steps, ([\d.]+) on held-out",
                      capsys.readouterr().out)
    learned, held_out = map(float, found.groups())
    assert learned < 1 and held_out > 3  # digits have never been seen
    text.write_bytes(b"short")
    with pytest.raises(SystemExit):
        train.main([*SHORT, "--text", str(text)])
    assert "--text must have at least 4 pieces of --length 64, got 5 bytes" in capsys.readouterr().err


def test_comparison(train, tmp_path, capsys):
    import json

    from examples import compare

    output = tmp_path / "compare.json"
    assert compare.main([*SHORT, "--steps", "3", "--seeds", "0,5", "--pieces", "4", "--kinds", "dense,dynamic,window",
                         "--output", str(output)]) == 0
    said, runs = capsys.readouterr().out, json.loads(output.read_text())["runs"]
    assert [(run["seed"], run["attention"]) for run in runs] == [
        (seed, kind) for seed in (0, 5) for kind in ("dense", "dynamic", "window")]
    last = [run["validation"][-1][1] for run in runs]
    apart = (last[1] - last[0] + last[4] - last[3]) / 2
    assert f"dynamic - dense: {apart:+.4f} nats" in said and "window - dense: " in said
    assert runs[1]["losses"][0] == runs[2]["losses"][0]  # the same text and parameters


@pytest.mark.parametrize(("option", "value", "message"), [
    ("steps", "0", "--steps must be at least 1, got 0"), ("temperature", "0", "--temperature must be above 0"),
    ("save", "0", "--save must be at least 1, got 0"), ("prompt", "", "--prompt must not be empty")])
def test_bad_options_of_training(train, capsys, option, value, message):
    with pytest.raises(SystemExit):
        train.main([f"--{option}", value])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("script", "options", "message"), [
    ("train", ["--text", "no/such/file"], "--text no/such/file: No such file or directory"),
    ("train", ["--device", "cuda:99"], "--device must be cpu, cuda or cuda:N of this machine, got cuda:99: "),
    ("train", ["--output", "no/such/model"], "--output must be a file in a folder that exists, got no/such/model"),
    ("train", ["--resume", "no/such/file"], "--resume no/such/file: No such file or directory"),
    ("train", ["--resume", "README.md"], "--resume README.md is no checkpoint of this script"),
    ("compare", ["--text", "no/such/file"], "--text no/such/file: No such file or directory"),
    ("compare", ["--device", "gpu"], "--device must be cpu, cuda or cuda:N of this machine, got gpu: "),
    ("compare", ["--seeds", "1,x"], "argument --seeds: must be whole numbers, such as 0,1,2, got '1,x'")])
def test_bad_paths_and_devices(train, capsys, monkeypatch, script, options, message):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit):
        import_module(f"examples.{script}").parsed(options)
    assert message in capsys.readouterr().err


def test_help_of_the_comparison_has_its_own_defaults(train, capsys):
    from examples import compare

    with pytest.raises(SystemExit):
        compare.parsed(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, usual in (("steps", 1000), ("length", 4096), ("width", 256), ("rate", 0.002), ("output", "compare.json")):
        assert re.search(rf"--{name} \S+ [^-]*\(default: {usual}\)", shown), name
    assert "On a CPU" in shown


@pytest.mark.parametrize("name", ["tokens", "free", "forced"])
def test_bad_numbers(generate, capsys, name):
    with pytest.raises(SystemExit):
        generate.run(f"--{name}", "0")
    assert f"--{name} must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_generation_on_a_gpu(generate, capsys, dtype, torch):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    for _ in range(3):  # other tests may come in between while the last tokens are written, but hardly each time
        assert generate.run("--tokens", "2000", "--free", "500", "--device", "cuda", "--dtype", dtype) == 0
        said = capsys.readouterr().out
        assert "of 2079: all 2000 tokens are the same" in said
        if float(re.search(r"\(([\d.]+) times that\)", said)[1]) < 1.5:
            return
    pytest.fail("the last tokens took 1.5 times as long as the first ones, three times over")


# ---- eviction policies and key biases ----
def test_eviction_policies(capsys):
    from examples import eviction

    assert eviction.main(["--length", "150", "--budget", "20"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        [name, "130"] for name in ("h2o", "tova", "l2")]
    assert eviction.main(["--length", "3", "--budget", "1"]) == eviction.main(["--length", "1"]) == 0


@pytest.mark.feature("numpy forward", "Scores and selection", "masks of eviction")
@pytest.mark.parametrize("name", ["h2o", "tova", "l2"])
def test_an_evicted_key_is_hidden_and_no_other(name, rng):
    """The mask against the dense formula, and the formula against what the cache held at each step."""
    from examples import eviction

    query, key, value = rng.standard_normal((3, 60, 8))
    held = []

    def watched(weights, totals, kept, keys):
        held.append(kept.copy())
        return eviction.POLICIES[name](weights, totals, kept, keys)

    out, stop = eviction.generate(query, key, value, 12, watched)
    dense = (np.arange(60)[:, None] >= np.arange(60)) & (np.arange(60)[:, None] < stop)
    for i, kept in enumerate(held, 11):
        assert np.flatnonzero(dense[i]).tolist() == kept.tolist() and len(kept) == 12
    expected, _ = reference.attention(*(x[None, :, None] for x in (query, key, value)), dense_mask=dense[None, None])
    np.testing.assert_allclose(out, expected[0, :, 0], atol=1e-12)
    mask = dma.IntervalMask.from_stop(stop, window=12)
    assert np.array_equal(mask.to_dense(60)[0, 0], dense)


def test_eviction_notices_another_mask(capsys, monkeypatch):
    from examples import eviction

    right = dma.IntervalMask.from_stop
    monkeypatch.setattr(dma.IntervalMask, "from_stop", lambda stop, window: right(stop + 1))
    assert eviction.main(["--length", "40", "--budget", "8"]) == 1


def test_key_biases(capsys):
    from examples import key_biases

    assert key_biases.main(["--length", "90"]) == 0
    assert capsys.readouterr().out.count("outputs differ by") == 2


@pytest.mark.parametrize("name", ["alibi", "forgetting"])
def test_key_biases_are_the_dense_formulas(name, rng):
    from examples import key_biases

    n, heads = 70, 6
    query = rng.standard_normal((1, n, heads, 16)).astype(np.float32)
    key, value = rng.standard_normal((2, 1, n, 2, 16)).astype(np.float32)
    distance = np.arange(n)[:, None] - np.arange(n)
    if name == "alibi":
        slopes = key_biases.alibi_slopes(heads)
        assert slopes[0] == np.float32(2 ** (-8 / 6)) and slopes[-1] == np.float32(2**-8)
        bias, dense = key_biases.alibi(slopes, n), -slopes.astype(float)[:, None, None] * distance
    else:
        log_f = np.log(rng.uniform(0.8, 1, (1, heads, n))).astype(np.float32)
        bias = key_biases.forgetting(log_f)
        dense = np.array([[[log_f[0, h, j + 1:i + 1].sum(dtype=float) for j in range(n)] for i in range(n)]
                          for h in range(heads)])
    out = dma.attention(query, key, value, causal=True, bias=bias)
    expected, _ = reference.attention(query, key, value, causal=True, bias=dense[None])
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_gates_learn_through_their_key_bias(rng, torch):
    """The gradient of log f is that of the dense formula."""
    from examples import key_biases

    n = 24
    query, key, value = torch.from_numpy(rng.standard_normal((3, 1, n, 2, 8)))
    gradients = []
    for way in ("key bias", "dense"):
        log_f = torch.linspace(-0.3, -0.01, 2 * n, dtype=torch.float64).reshape(1, 2, n).requires_grad_()
        total = log_f.cumsum(-1)
        if way == "key bias":
            out = dma.attention(query, key, value, causal=True, bias=key_biases.forgetting(log_f))
        else:
            logits = torch.einsum("bihd,bjhd->bhij", query, key) / 8**0.5 + total[..., None] - total[:, :, None]
            logits = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            out = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), value)
        out.square().sum().backward()
        gradients.append(log_f.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0.01


# ---- JAX ----
@pytest.mark.slow
def test_training_in_jax(capsys):
    pytest.importorskip("jax", minversion="0.9")
    pytest.importorskip("flax")
    from examples import train_jax

    small = ["--batch", "2", "--length", "48", "--width", "32", "--layers", "1", "--window", "12"]
    assert train_jax.main([*small, "--steps", "12"]) == 0
    said = capsys.readouterr().out
    assert "12 steps on cpu: " in said and "nats per byte" in said
    with pytest.raises(SystemExit, match="too few for --length 1000000"):
        train_jax.main([*small, "--text", __file__, "--length", "1000000"])


@pytest.mark.gpu
def test_training_in_jax_on_a_gpu(capsys):
    jax = pytest.importorskip("jax", minversion="0.9")
    pytest.importorskip("flax")
    if jax.default_backend() != "gpu":
        pytest.skip("jax sees no GPU")
    from examples import train_jax

    assert train_jax.main(["--device", "gpu", "--steps", "60"]) == 0
    assert "60 steps on gpu: " in capsys.readouterr().out
