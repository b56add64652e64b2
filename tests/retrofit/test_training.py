"""Retrofit: the parts of the objective, schedules, training of a tiny model, and checkpoints."""
import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

import cupy_dma
import cupy_dma.transformers as dmt
from cupy_dma import retrofit
from cupy_dma.torch import RetentionGate
from tests.transformers import small_models as small

DELAY, WORDS, CONTENT = 4, 64, 34

pytestmark = pytest.mark.usefixtures("same_numbers")


def model_of(name: str = "llama", **options: Any) -> Any:
    return dmt.convert(small.model_of(name, "eager", num_hidden_layers=2, vocab_size=WORDS), policy="gate",
                       **{"delay": DELAY, "sinks": 1, **options})


def with_empty_words() -> Any:
    """A one-layer model in which words from ``CONTENT`` on have keys and values of 0, so a gate can learn to drop that
    half of the keys."""
    model = small.model_of("llama", "eager", num_hidden_layers=1, vocab_size=WORDS)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[CONTENT:] = 0
        model.model.embed_tokens.weight[CONTENT:, 0] = 3
        attention.v_proj.weight *= 3
        for projection in (attention.k_proj, attention.v_proj):
            projection.weight[:, 0] = 0
    return dmt.convert(model, policy="gate", delay=DELAY, sinks=1)


def texts(count: int, first: int = 0, length: int = 48) -> Any:
    for number in range(first, first + count):
        yield torch.randint(3, WORDS, (4, length), generator=torch.Generator().manual_seed(number))


def run(model: Any, steps: int, **options: Any) -> list[dict[str, Any]]:
    options = {"ratio": 2, "rate": 3e-4, "progress": False, **options}
    return retrofit.train(model, texts(steps), steps=steps, **options)


@torch.no_grad()
def hard(model: Any, ids: Any) -> tuple[float, float]:
    """KL and kept share in evaluation."""
    losses = retrofit.Distillation(model.eval())(ids, target=1.0)
    return losses.kl.item(), losses.kept.mean().item()


@torch.no_grad()
def at_random(model: Any, ids: Any, kept: float, seed: int) -> float:
    """KL in evaluation with equally many open gates, drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(module, given, gates):
        closed = torch.rand(gates.log_gate.shape, generator=generator) > kept
        return gates._replace(log_gate=torch.zeros_like(gates.log_gate).masked_fill(closed, -torch.inf))

    gate, = retrofit.gates_of(model).values()
    hook = gate.register_forward_hook(drawn)
    try:
        return retrofit.Distillation(model.eval())(ids, target=1.0).kl.item()
    finally:
        hook.remove()


def test_training_finds_what_to_keep():
    """The divergence rises as the kept share shrinks and falls as the gates learn; gates open for words with
    content."""
    model = with_empty_words()
    logs = run(model, 120, shrink=40)
    assert logs[0]["kept"] > 0.98 and logs[0]["kl"] < 0.01
    shares = [log["kept"] for log in logs]
    assert all(abs(share - 0.5) < 0.12 for share in shares[-20:]) and logs[-1]["target"] == 0.5
    mean = [sum(log["kl"] for log in logs[at:at + 20]) / 20 for at in range(0, 120, 20)]
    assert mean[-1] < 0.9 * max(mean)
    ids = torch.cat(list(texts(4, 1000)))
    kl, kept = hard(model, ids)
    assert 0.35 < kept < 0.6
    assert all(kl < 0.3 * at_random(model, ids, kept, seed) for seed in range(3))
    gate, = retrofit.gates_of(model).values()
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    is_open = gate(x).log_gate[..., 1:] == 0
    content = (ids[:, None, 1:] < CONTENT).expand_as(is_open)
    assert is_open[content].float().mean() > 0.8 and is_open[~content].float().mean() < 0.2


def test_logs_and_what_is_trained():
    model, seen = model_of(), []
    before = {name: p.clone() for name, p in model.named_parameters()}
    logs = run(model, 3, temperature=(0.5, 0.1), callback=seen.append)
    assert logs == seen and [log["step"] for log in logs] == [0, 1, 2] and not model.training
    assert [log["target"] for log in logs] == pytest.approx([1, 2 / 3, 1 / 2])
    assert [log["temperature"] for log in logs] == pytest.approx([0.5, 0.3, 0.1])
    for log in logs:
        assert log["loss"] == pytest.approx(log["kl"] + 4 * log["budget"], rel=1e-5)
        assert log["budget"] == pytest.approx(max(log["kept"] - log["target"], 0), abs=1e-6)
        assert len(log["kept_by_layer"]) == 2 and log["tokens"] == 4 * 48 and log["norm"] > 0 and log["seconds"] > 0
        assert 0 <= log["dropped"] <= 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (".retention_gate." not in name)


def test_compiled_layers():
    """The same training with a changing temperature and length compiles few graphs."""
    def run(compiled: bool) -> Any:
        torch.manual_seed(1)
        model, steps = model_of(), 6
        for layer in model.model.layers if compiled else ():
            layer.compile(backend="aot_eager", fullgraph=True)
        batches = (next(texts(1, step, 40 if step > 3 else 48)) for step in range(steps))
        logs = retrofit.train(model, batches, steps=steps, ratio=2, temperature=(0.5, 0.1), progress=False)
        return [(log["kl"], log["kept"], log["norm"]) for log in logs]

    expected = run(False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for found, right in zip(run(True), expected, strict=True):
        assert found == pytest.approx(right, rel=1e-4)
    counted = torch._dynamo.utils.counters
    assert not counted["graph_break"] and counted["stats"]["unique_graphs"] <= 8, counted  # 3 kinds, then dynamic ones


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox", "qwen3"])
@pytest.mark.parametrize("how", ["plain", "left"])
def test_the_objective_is_the_formula(name, how):
    """Against the formula on full logits of both models."""
    given, real = small.batch(how)
    ids = {"input_ids": given["input_ids"] % WORDS, "attention_mask": given.get("attention_mask")}
    model = model_of(name)
    for gate in retrofit.gates_of(model).values():
        torch.nn.init.normal_(gate.proj.weight, std=0.01)
        gate.offset = 0.5
        gate.train()
    objective = retrofit.Distillation(model, weight=0.7, chunk=10)
    torch.manual_seed(1)
    losses = objective(**ids, target=0.25)
    losses.loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with torch.no_grad(), retrofit.open_gates(model):
        teacher = model(**ids, use_cache=False).logits
    kept = []
    hooks = [gate.register_forward_hook(lambda _, given, gates: kept.append(gates.kept.mean()))
             for gate in retrofit.gates_of(model).values()]
    torch.manual_seed(1)
    student = model(**ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    logs = teacher.log_softmax(-1), student.log_softmax(-1)
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)[real].mean()
    budget = torch.relu(sum(kept) / len(kept) - 0.25)
    (kl + 0.7 * budget).backward()
    assert kl > 0.01 and budget > 0.05
    torch.testing.assert_close([losses.kl, losses.budget, losses.loss.detach()],
                               [kl.detach(), budget.detach(), (kl + 0.7 * budget).detach()], rtol=1e-4, atol=1e-5)
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(expected) > 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_schedules():
    ratio = [retrofit.kept_target(step, 4, 5) for step in range(6)]
    assert ratio == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 5])
    share = [retrofit.kept_target(step, 4, 5, linear="share") for step in range(6)]
    assert share == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])
    for arguments, message in (((-1, 4, 5), "step"), ((0, 0, 5), "steps"), ((0, 4, 0.5), "ratio")):
        with pytest.raises(ValueError, match=message):
            retrofit.kept_target(*arguments)


def test_open_gates_are_the_model_before():
    model = small.model_of("llama", "eager")
    ids = small.batch("plain")[0]["input_ids"]
    expected = model(ids).logits
    dmt.convert(model, policy="gate", delay=DELAY)
    for gate in retrofit.gates_of(model).values():
        torch.nn.init.normal_(gate.proj.weight)
    assert (model(ids).logits - expected).abs().max() > 0.01
    with retrofit.open_gates(model):
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=2e-5)
    assert all(gate.enabled for gate in retrofit.gates_of(model).values())


# ---- resuming ----
def without_times(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in log.items() if name != "seconds"} for log in logs]


def test_a_resumed_run_is_the_run(tmp_path):
    path, options = tmp_path / "state.pt", {"shrink": 6, "ratio": 3}
    whole = model_of()
    torch.manual_seed(4)
    expected = run(whole, 6, **options)
    model = model_of()
    torch.manual_seed(4)
    first = run(model, 4, checkpoint=path, every=2, **options)
    assert without_times(first) == without_times(expected[:4])
    again = model_of()
    torch.manual_seed(99)
    logs = run(again, 6, checkpoint=path, resume=True, **options)
    assert without_times(logs) == without_times(expected)
    assert all(torch.equal(x, whole.state_dict()[key]) for key, x in again.state_dict().items())
    assert run(model_of(), 6, checkpoint=path, resume=True, **options) == logs  # nothing is left to do
    assert not list(tmp_path.glob("*.new"))


def test_an_interrupted_run(tmp_path):
    path = tmp_path / "state.pt"

    def stop(log):
        if log["step"] == 3:
            raise KeyboardInterrupt

    model = model_of()
    with pytest.raises(KeyboardInterrupt):
        run(model, 6, checkpoint=path, every=2, callback=stop)
    assert not model.training
    logs = run(model_of(), 6, checkpoint=path, resume=True)
    assert [log["step"] for log in logs] == list(range(6))
    with pytest.raises(ValueError, match=r"was made with ratio=2\.0, got 4\.0"):
        run(model_of(), 6, checkpoint=path, resume=True, ratio=4)
    with pytest.raises(ValueError, match="resume needs a checkpoint"):
        run(model_of(), 6, resume=True)


# ---- options ----
def test_all_parameters_with_a_teacher():
    model = model_of(trainable="all")
    teacher = copy.deepcopy(model).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    logs = run(model, 2, trainable="all", teacher=teacher, base_rate=1e-3)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in teacher.named_parameters())
    assert logs[1]["kl"] > 0


def test_a_teacher_of_another_width():
    other = transformers.LlamaForCausalLM(small.config_of("llama", vocab_size=WORDS, hidden_size=32)).eval()
    logs = run(model_of(), 2, teacher=other)
    assert logs[0]["kl"] > 0.1  # two random models


@pytest.mark.parametrize("options", [{"autocast": torch.bfloat16}, {"direction": "reverse"}], ids=str)
def test_options(options):
    logs = run(model_of(), 2, **options)
    assert all(log["norm"] > 0 for log in logs)


def test_a_model_of_16_bits():
    """Its gates are trained in float32."""
    model = model_of().to(torch.bfloat16)
    run(model, 2)
    kinds = {(".retention_gate." in name, p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_checkpointing_is_in_effect():
    """The numbers are the same, and the layers of a frozen model run twice."""
    results, calls = [], []
    for checkpointed in (False, True):
        model = model_of()
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        count = []
        model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        torch.manual_seed(3)
        results.append(without_times(run(model, 3)))
        calls.append(len(count))
    assert results[0] == results[1] and calls[1] == calls[0] + 3


class Own(torch.nn.Module):
    """A user's model class, unknown to transformers."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), torch.nn.Linear(16, WORDS)

    def forward(self, input_ids):
        return self.head(self.body(input_ids))


class Body(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = torch.nn.Embedding(WORDS, 16), torch.nn.Linear(16, 48)
        self.gate = RetentionGate(16, 2, delay=DELAY, sinks=0)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return x + self.gate.attend(query, key, value, self.gate(x).log_gate).flatten(2)


def test_a_model_of_ones_own():
    model = Own()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gate" in name)
    objective = retrofit.Distillation(model, backbone="body", head="head")
    losses = objective(next(texts(1)), target=0.5)
    losses.loss.backward()
    assert model.body.gate.proj.weight.grad.any() and losses.kept.shape == (1,)


# ---- bad input ----
def test_what_does_not_fit():
    plain = small.model_of("llama")
    with pytest.raises(ValueError, match="student must be a model with gates"):
        run(plain, 2)
    assert all(p.requires_grad for p in plain.parameters())
    with pytest.raises(ValueError, match="trainable='all' needs a teacher"):
        run(model_of(), 2, trainable="all")
    with pytest.raises(ValueError, match="teacher must be given if parameters other"):
        run(model_of(trainable="all"), 2, trainable=None)
    with pytest.raises(ValueError, match="teacher must be in evaluation mode"):
        run(model_of(), 2, teacher=small.model_of("llama").train())
    with pytest.raises(ValueError, match="batches must have one per step, 3, got 2"):
        retrofit.train(model_of(), texts(2), steps=3, ratio=2, progress=False)
    with pytest.raises(ValueError, match="texts must be longer than the gates' delay, 4"):
        retrofit.train(model_of(), texts(2, length=4), steps=2, ratio=2, progress=False)
    scaled = model_of()
    scaled.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)
    with pytest.raises(ValueError, match="the logits of LlamaForCausalLM are not those of its head"):
        run(scaled, 2)
    for name, value in (("steps", 0), ("ratio", 0.5), ("rate", 0.0), ("clip", -1.0), ("chunk", 0), ("weight", -1.0),
                        ("temperature", (0.1, 0.0)), ("trainable", "base"), ("linear", "log"), ("every", 0),
                        ("direction", "both")):
        options = {"steps": 2, "ratio": 2, "progress": False, name: value}
        with pytest.raises(ValueError, match=name):
            retrofit.train(model_of(), texts(2), **options)


def test_a_loss_that_is_not_finite():
    model = model_of()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises((FloatingPointError, ValueError), match="nan"):
        run(model, 2)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if "lm_head" not in name)


def test_it_is_loaded_on_demand():
    code = ("import sys, cupy_dma\nassert 'torch' not in sys.modules\ncupy_dma.retrofit\n"
            "assert 'torch' in sys.modules and 'transformers' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
    assert cupy_dma.retrofit is retrofit
