"""How kv heads share a budget of rows."""
import pytest
import torch

import cupy_dma.transformers as dmt
from cupy_dma import retrofit
from tests.retrofit.test_training import DELAY, WORDS, model_of
from tests.transformers import small_models as small

pytestmark = pytest.mark.usefixtures("one_thread")
SINKS, ROWS, N = 1, 12, 80


@pytest.fixture
def model():
    torch.manual_seed(0)
    found = model_of()
    for i, gate in enumerate(retrofit.gates_of(found).values()):
        torch.nn.init.normal_(gate.proj.weight, std=0.1)
        torch.nn.init.constant_(gate.proj.bias, 0.02 * i)
    return found.eval()


def texts(*sizes):
    return [torch.randint(WORDS, size, generator=torch.Generator().manual_seed(i)) for i, size in enumerate(sizes)]


def logits_of(model, batches):
    """(layers, Hkv, texts, older keys), from a forward pass for each text."""
    found = []
    for text in (row[None] for batch in batches for row in batch):
        states = model.model(input_ids=text, output_hidden_states=True, use_cache=False).hidden_states
        layers = zip(model.model.layers, states)
        found.append(torch.stack([layer.self_attn.retention_gate.ranks(layer.input_layernorm(x))[0, :, SINKS:-DELAY]
                                  for layer, x in layers]))
    return torch.stack(found, 2)


@torch.no_grad()
def test_one_threshold_for_all_heads(model):
    batches = texts((2, N), (1, N))
    found = torch.tensor(retrofit.capacities(model, iter(batches), ROWS))
    logits = logits_of(model, batches)
    assert found.shape == logits.shape[:2] and not model.training
    mean = found.double().mean() + DELAY + SINKS
    assert ROWS - 1 < mean <= ROWS and len(found.unique()) > 1
    free = (ROWS - DELAY - SINKS - 1) * found.numel() * 3
    least = logits.flatten().sort(descending=True).values[free]
    assert torch.equal(found, (logits > least).sum((2, 3)) // 3 + 1)


@torch.no_grad()
def test_a_cache_takes_them(model):
    ids, = texts((2, N))
    found = retrofit.capacities(model, [ids], ROWS)
    cache = dmt.GatedCache(model.config, capacity=found)
    model(input_ids=ids, **{small.CACHE: cache})
    for layer, own in zip(cache.layers, found):
        kept = (layer.store.kept().positions >= 0).sum(-1)
        assert (kept <= torch.tensor(own) + (DELAY + SINKS)).all()


@torch.no_grad()
def test_gates_that_are_closed_need_no_rows(model):
    ids, = texts((1, N))
    for gate in retrofit.gates_of(model).values():
        gate.proj.bias.fill_(-100.0)
    assert retrofit.capacities(model, [ids], 70) == [[1] * model.config.num_key_value_heads] * 2
    for gate in retrofit.gates_of(model).values():
        gate.proj.bias.fill_(100.0)
    assert retrofit.capacities(model, [ids], 1000) == [[N - DELAY - SINKS + 1] * model.config.num_key_value_heads] * 2


def test_wrong_arguments(model):
    ids, = texts((1, N))
    with pytest.raises(ValueError, match="model must be converted with policy='gate'"):
        retrofit.capacities(small.model_of("llama", "eager"), [ids], ROWS)
    with pytest.raises(ValueError, match=r"rows must be at least delay \+ sinks \+ 1, 6 on average, got 5"):
        retrofit.capacities(model, [ids], 5)
    with pytest.raises(TypeError, match="rows must be"):
        retrofit.capacities(model, [ids], 7.5)
    with pytest.raises(ValueError, match="longer than delay"):
        retrofit.capacities(model, [ids[:, :5]], ROWS)
    with pytest.raises(TypeError, match=r"batches must be Tensors \(B, N\), got list"):
        retrofit.capacities(model, [[1, 2]], ROWS)
    with pytest.raises(ValueError, match="at least one text"):
        retrofit.capacities(model.train(), [], ROWS)
    assert model.training and not any(gate._forward_hooks for gate in retrofit.gates_of(model).values())
