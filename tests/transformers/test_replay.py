"""One forward pass over a generated text, with the mask that the sampler's cache recorded, gives the sampler's
logits."""
import contextlib
from typing import Any

import pytest
import torch

import cupy_dma as dma
import cupy_dma.transformers as dmt
from cupy_dma.masks.interval import NEVER
from tests.transformers import small_models as small
from tests.transformers.test_gates import DELAY, SINKS, gated, gates_of
from tests.transformers.test_generation import NEW, dynamic, prompt

SAMPLED = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "pad_token_id": 0}
MODELS = {
    "doge": lambda: dynamic("doge"),
    "top_w": lambda: dynamic("llama", sinks=1, recent=3), "linear": lambda: dynamic("gpt-neox", form="linear"),
    "window": lambda: dmt.convert(small.model_of("gpt-oss", "eager"), policy="window", window=9, sinks=SINKS),
    "gate": lambda: gated("llama"), "gate, bounded": lambda: gated("qwen3"), "gate, full": lambda: gated("gpt-neox")}

pytestmark = pytest.mark.usefixtures("one_thread")


def cache_of(name: str, model: Any) -> Any:
    if name == "gate, full":
        return dmt.FullGatedCache(model.config)
    if name.startswith("gate"):
        return dmt.GatedCache(model.config, record_stops=True, capacity=3 if "bounded" in name else None)
    return dmt.DynamicMaskCache(model.config, record_stops=True)


def replayed(model: Any, stops: Any, ids: Any, padding: Any) -> Any:
    position = (padding.cumsum(1) - 1).clamp(min=0)
    with dmt.replay(model, stops):
        return model(input_ids=ids, attention_mask=padding, position_ids=position, use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["plain", "left"])
def test_the_samplers_logits(name, how):
    """Prefill and single tokens, as ``generate`` runs them; the last token was never in the cache."""
    model, given = MODELS[name]().requires_grad_(), prompt(how)
    cache = cache_of(name, model)
    found = model.generate(**given, **SAMPLED, **{small.CACHE: cache}, output_logits=True,
                           return_dict_in_generate=True)
    ids = found.sequences
    padding = torch.cat([given["attention_mask"], torch.ones(3, NEW, dtype=torch.long)], 1)
    stops = cache.stops()
    assert [None if x is None else tuple(x.shape) for x in stops if x is not None] == [
        (3, 4 if name in ("linear", "gate, full") else 2, 30 + NEW - 1) for x in stops if x is not None]
    evicted = sum((x < NEVER).float().mean().item() for x in stops if x is not None)
    assert evicted > 0.1
    sampler = torch.stack(found.logits, 1)
    logits = replayed(model, stops, ids, padding)[:, 29:-1]
    torch.testing.assert_close(logits, sampler, rtol=0, atol=2e-5 * max(1, sampler.abs().max().item()))
    if name == "gate, bounded":  # the model itself does not know the bound
        own = model(input_ids=ids, attention_mask=padding, use_cache=False).logits[:, 29:-1]
        assert (own - sampler).abs().max() > 1e-2
    loss = torch.log_softmax(logits, -1).gather(2, ids[:, 30:, None]).mean()
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for name, p in model.named_parameters()
               if name.endswith(("q_proj.weight", "query_key_value.weight")))


@pytest.mark.parametrize("name", ["top_w", "gate", "gate, bounded", "gate, full"])
def test_appended_in_parts_and_moved(name):
    """Chunks and single tokens with padding; rows are repeated, selected, reordered and cropped."""
    given, real = small.batch("left")
    model, ids, padding = MODELS[name](), given["input_ids"], given["attention_mask"]
    cache, rows, found, begin = cache_of(name, model), torch.arange(2), torch.zeros(2, 0, small.VOCABULARY), 0
    if name != "gate, full":
        for layer in cache.layers:
            layer.activate_past_recording()

    def more(count: int) -> None:
        nonlocal found, begin
        end = begin + count
        logits = small.logits(model, ids[rows, begin:end], cache, attention_mask=padding[rows, :end],
                              position_ids=given["position_ids"][rows, begin:end])
        found, begin = torch.cat([found, logits], 1), end

    for count in (13, 1, 1, 6):
        more(count)
    for change, chosen in ((lambda: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
                           (lambda: cache.batch_select_indices(torch.tensor([3, 0, 1])), [3, 0, 1]),
                           (lambda: cache.reorder_cache(torch.tensor([2, 1, 2])), [2, 1, 2])):
        change()
        rows, found = rows[chosen], found[chosen]
        more(1)
    more(8)
    cache.crop(-5)
    begin, found = begin - 5, found[:, :-5]
    for count in (1, 7, 1, 1):
        more(count)
    assert begin < small.LENGTH
    stops = cache.stops()
    expected = replayed(model, stops, ids[rows, :begin], padding[rows, :begin])
    keep = real[rows, :begin]
    torch.testing.assert_close(expected[keep], found[keep], rtol=0, atol=2e-5 * max(1, found.abs().max().item()))
    if name != "gate, full":
        for stop in stops:  # no query sees padding
            assert (stop.transpose(1, 2)[~keep] == torch.nonzero(~keep)[:, 1:]).all()


def test_stops_are_those_of_the_gates():
    """Without a bound, stops equal the mask of the gates; with a bound, the highest logits are kept."""
    model, given = gated("llama"), small.batch("plain")[0]
    full, own = dmt.FullGatedCache(model.config), dmt.GatedCache(model.config, record_stops=True)
    for cache in (full, own):
        small.logits(model, cache=cache, **given)
    for a, b, layer in zip(full.stops(), own.stops(), full.layers):
        assert torch.equal(a, b)
        expected = dma.IntervalMask.from_gate(layer.log_gate, delay=DELAY, threshold=-12.0).stop
        assert torch.equal(a, torch.where(expected < small.LENGTH, expected, NEVER))


def test_gates_in_training_get_gradients():
    model, given = gated("llama"), small.batch("plain")[0]
    cache = dmt.GatedCache(model.config, record_stops=True)
    small.logits(model, cache=cache, **given)
    for train in (False, True):
        for gate in gates_of(model):
            gate.train(train)
            gate.proj.weight.grad = None
        with dmt.replay(model.requires_grad_(), cache.stops()):
            model(**given, use_cache=False).logits.square().mean().backward()
        assert [gate.proj.weight.grad is not None and bool(gate.proj.weight.grad.any())
                for gate in gates_of(model)] == [train, train]


def test_errors():
    model, given = MODELS["top_w"](), small.batch("plain")[0]
    cache = dmt.DynamicMaskCache(model.config, record_stops=True)
    small.logits(model, cache=cache, **given)
    stops = cache.stops()
    with pytest.raises(RuntimeError, match="make it with record_stops=True"):
        dmt.DynamicMaskCache(model.config).stops()
    with pytest.raises(ValueError, match="model must have dynamic masks"), dmt.replay(small.model_of("llama"), stops):
        pass
    with pytest.raises(TypeError, match=r"stops\[1\] must be a tensor"), dmt.replay(model, stops[:1]):
        pass
    with dmt.replay(model, stops):
        with pytest.raises(NotImplementedError, match="call the model with use_cache=False"):
            model(**given, **{small.CACHE: dmt.DynamicMaskCache(model.config)})
        with pytest.raises(ValueError, match="must be the one whose stops are replayed"):
            model(input_ids=given["input_ids"][:1], use_cache=False)
        with pytest.raises(NotImplementedError, match="takes no packed sequences"):
            model(**small.batch("packed")[0])
    with contextlib.suppress(ZeroDivisionError), dmt.replay(model, stops):
        1 / 0  # noqa: B018
    assert not any(hasattr(module, "replayed_stops") for module in model.modules())
    with pytest.raises(ValueError, match="policy='gate', got LlamaConfig without gates"):
        dmt.GatedCache(model.config)
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        dmt.GatedCache(gated("llama").config, capacity=0)
