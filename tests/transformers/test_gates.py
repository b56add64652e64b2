"""Models with gates: equal results at first, attention against its formula, generation, saving and loading. Also the
policy that they are compared with, sinks and a window."""
import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import cupy_dma.transformers as dmt
from cupy_dma.torch import RetentionGate
from tests.transformers import small_models as small
from tests.transformers.test_generation import BEAMS, GREEDY, NEW, dynamic, full_cache, generated, prompt

DELAY, SINKS = 5, 2
NAMES = ["llama", "qwen3", "gemma", "gemma2", "gpt-neox", "gpt-oss", "llama4"]


pytestmark = pytest.mark.usefixtures("one_thread")


def gates_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, RetentionGate)]


def gated(name: str, **options: Any) -> Any:
    """A model with about half of its gates closed."""
    model = dmt.convert(small.model_of(name, "eager"), policy="gate", **{"delay": DELAY, "sinks": SINKS, **options})
    torch.manual_seed(2)
    for gate in gates_of(model):
        for layer in gate.modules():
            if isinstance(layer, torch.nn.Linear):
                torch.nn.init.normal_(layer.weight, std=0.1)
        gate.offset = 0.1
    return model.eval()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["plain", "left", "right", "packed"])
def test_open_gates_change_nothing(name, how):
    small.check_unchanged(name, how, ".retention_gate.proj.weight", ".retention_gate.proj.bias", policy="gate",
                          delay=DELAY)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("how", ["plain", "left", "packed"])
def test_gates_written_out(how, training):
    """Layer by layer, outputs and gradients of the gates against attention with the gates as a dense mask and bias."""
    given, real = small.batch(how)
    model = gated("llama", threshold=-1e6)
    for gate in gates_of(model):
        gate.train(training)
    seen = []

    def written_out(module, query, key, value, attention_mask, scaling, **_):
        n = key.shape[2]
        log_gate = module.gate_call.log_gate(module.retention_gate, n, attention_mask)
        far = torch.arange(n)[:, None] - torch.arange(n) >= DELAY
        bias = torch.where(far, log_gate[:, :, None], 0).repeat_interleave(2, 1)
        visible = attention_mask.interval().to_dense(n) if isinstance(attention_mask, dmt.attention.Visibility) \
            else torch.ones(n, n).tril().bool()
        logits = query @ key.repeat_interleave(2, 1).transpose(2, 3) * scaling + bias
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)
        seen.append((log_gate < -1).float().mean().item())
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), None

    results = []
    for function in (dmt.attention_forward, written_out):
        torch.manual_seed(3)
        model.zero_grad()
        with small.attention_by(function):
            logits = model(**given).logits[real]
        if training:
            logits.square().mean().backward()
        results.append([logits.detach(), *(gate.proj.weight.grad for gate in gates_of(model) if training)])
    assert len(seen) == 2 and all(0.1 < share < 0.7 for share in seen)
    for found, expected in zip(*results):
        assert found.any()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


# ---- generation ----
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt-neox", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("how", ["plain", "left"])
@pytest.mark.parametrize("search", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_cached_is_uncached(name, how, search):
    model = small.randomize(gated(name), spread=0.25)
    for gate in gates_of(model):
        torch.nn.init.normal_(gate.proj.weight, std=0.1)
    found, cache = generated(model, prompt(how), **search)
    assert type(cache) is dmt.GatedCache
    expected, _ = generated(model, prompt(how), **search, use_cache=False)
    assert torch.equal(found, expected)
    expected, cache = generated(model, prompt(how), **search, **{small.CACHE: dmt.FullGatedCache(model.config)})
    assert torch.equal(found, expected)
    shares = [layer.log_gate.isinf().float().mean().item() for layer in cache.layers if hasattr(layer, "log_gate")]
    assert shares and all(0.1 < share < 0.9 for share in shares)
    with torch.no_grad():
        logits = model(found, use_cache=False).logits
        for gate in gates_of(model):
            gate.enabled = False
        assert (model(found, use_cache=False).logits - logits)[:, SINKS + DELAY:].abs().max() > 0.1


@pytest.mark.parametrize("name", ["doge", "llama", "gates"])
@pytest.mark.parametrize("draft", ["same", "other", "prompt lookup"])
def test_assisted_decoding(name, draft):
    """Also of models with dynamic masks."""
    model = gated("llama") if name == "gates" else dynamic(name)
    given, more = prompt("plain", rows=1), {"prompt_lookup_num_tokens": 4}
    if draft != "prompt lookup":
        assistant = copy.deepcopy(model)
        spread = 0.14 if name == "gates" else 0.24
        more = {"assistant_model": assistant if draft == "same" else small.randomize(assistant, spread=spread)}
    assert torch.equal(model.generate(**given, **GREEDY, **more), model.generate(**given, **GREEDY))


@pytest.mark.parametrize("steps", [(25, 1, 10, 4), (1,) * 40])
@pytest.mark.parametrize("kind", [dmt.FullGatedCache, dmt.GatedCache])
def test_logits_of_parts(steps, kind):
    """Logits in pieces, also with a cache whose rows were repeated, selected, reordered and cropped."""
    given, real = small.batch("left")
    model, ids = gated("llama"), given["input_ids"]
    expected = model(**given, use_cache=False).logits
    cache, begin = kind(model.config), 0
    if kind is dmt.GatedCache:
        cache.activate_past_recording()

    def more(rows, begin, end):
        return small.logits(model, ids[rows, begin:end], cache, attention_mask=given["attention_mask"][rows, :end],
                            position_ids=given["position_ids"][rows, begin:end])

    for count in steps:
        close(more(slice(None), begin, begin + count)[real[:, begin:begin + count]],
              expected[:, begin:begin + count][real[:, begin:begin + count]])
        begin += count
    for change, rows in ((lambda: cache.crop(-9), [0, 1]),
                         (lambda: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
                         (lambda: cache.batch_select_indices(torch.tensor([2, 0, 1])), [1, 0, 0]),
                         (lambda: cache.reorder_cache(torch.tensor([2, 1, 0])), [0, 0, 1])):
        change()
        close(more(rows, begin - 9, begin), expected[rows, begin - 9:])
        cache.crop(-9)
    cache.reset()
    assert cache.get_seq_length() == 0
    close(more(rows, 0, begin)[real[rows]], expected[rows][real[rows]])


@pytest.mark.parametrize(("name", "kind"), [
    ("doge", dmt.DynamicMaskCache), ("llama", dmt.DynamicMaskCache), ("gates", dmt.FullGatedCache),
    ("gates", dmt.GatedCache)])
@pytest.mark.parametrize("how", ["plain", "left"])
def test_a_continued_chat(name, kind, how):
    """Also of models with dynamic masks."""
    model, first = gated("llama") if name == "gates" else dynamic(name), prompt(how)
    cache = kind(model.config)
    said = model.generate(**first, **GREEDY, **{small.CACHE: cache})
    more = torch.randint(3, small.VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(5))
    real = torch.ones_like(more)
    if name != "gates":  # without a cache, padding between two tokens counts for the delay
        real[1, :2] = 0
    ids = torch.cat([said, more], 1)
    mask = torch.cat([first["attention_mask"], torch.ones(3, NEW, dtype=torch.long), real], 1)
    found = model.generate(ids, attention_mask=mask, **GREEDY, **{small.CACHE: cache})
    assert torch.equal(found, model.generate(ids, attention_mask=mask, **GREEDY, use_cache=False))
    assert cache.get_seq_length() == found.shape[1] - 1


def test_a_bounded_cache():
    """It keeps the open keys with the highest logits, and crops what it has recorded."""
    model, given = gated("llama"), small.batch("left")[0]
    cache, inputs = dmt.GatedCache(model.config, capacity=4), {}
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.update({module.layer_idx: kwargs["hidden_states"]}), with_kwargs=True)
    small.logits(model, cache=cache, **given)
    for index, (layer, module) in enumerate(zip(cache.layers, model.model.layers)):
        logits = module.self_attn.retention_gate.ranks(inputs[index])
        kept = layer.store.kept()
        assert kept.positions.shape[2] == 4 + DELAY + SINKS
        for b, pad in enumerate((given["attention_mask"] == 0).sum(1).tolist()):
            n = small.LENGTH - pad
            for h in range(2):
                ranked = logits[b, h, pad:]
                best = [j for j in ranked.argsort(descending=True)[:4].tolist() if ranked[j] > 0]
                expected = sorted({*best, *range(SINKS), *range(n - DELAY, n)})
                assert [j for j in kept.positions[b, h].tolist() if j >= 0] == expected
    with pytest.raises(RuntimeError, match="the cache keeps open gates and no padding"):
        cache.crop(-1)


@pytest.mark.parametrize("how", ["plain", "left"])
def test_a_capacity_of_the_model(how):
    """Forward passes respect it, as generation does; open gates and gates in training have no capacity."""
    model = gated("llama", capacity=[[3, 6], 2])
    given, real = small.batch(how)
    logits = model(**given, use_cache=False).logits[real]
    unbounded = copy.deepcopy(model)
    for layer in unbounded.model.layers:
        layer.self_attn.dynamic_mask = replace(layer.self_attn.dynamic_mask, capacity=None)
    assert (unbounded(**given, use_cache=False).logits[real] - logits).abs().max() > 1e-3
    cache = dmt.GatedCache(model.config)
    close(small.logits(model, cache=cache, **given)[real], logits)
    found, cache = generated(model, prompt(how), **GREEDY)
    assert [store.capacity for layer in cache.layers for store in layer.stores] == [(3, 6), 2]
    assert torch.equal(found, generated(model, prompt(how), **GREEDY, use_cache=False)[0])
    wide = dmt.GatedCache(model.config, capacity=[99, [99, 98]])
    found, _ = generated(model, prompt(how), **GREEDY, **{small.CACHE: wide})
    assert [store.capacity for layer in wide.layers for store in layer.stores] == [99, (99, 98)]
    assert torch.equal(found, generated(unbounded, prompt(how), **GREEDY)[0])
    for both in (model, unbounded):
        for gate in gates_of(both):
            gate.enabled = False
    for options in ({"use_cache": False}, {}):
        close(model(**given, **options).logits[real], unbounded(**given, **options).logits[real])
    with pytest.raises(ValueError, match="config must have no capacity, which a FullGatedCache does not keep to"):
        dmt.FullGatedCache(model.config)


def test_what_a_gated_cache_does_not_take():
    model = gated("llama")
    cache = dmt.GatedCache(model.config)
    ids = small.batch("plain")[0]["input_ids"]
    packed = dmt.attention.Visibility(small.LENGTH, small.LENGTH, 0, ids.device, documents=[(ids > 200).long()])
    with pytest.raises(NotImplementedError, match="a GatedCache supports no packed sequences"):
        small.logits(model, ids, cache, attention_mask=packed)
    cache.reset()
    small.logits(model, ids, cache)
    with pytest.raises(ValueError, match="cache must not grow: give a GatedCache a capacity"):
        dmt.DecodingStep(model, cache)


@pytest.mark.parametrize("kind", [dmt.FullGatedCache, dmt.GatedCache])
def test_soft_gates_in_a_cache(kind):
    """In training mode, gates in a cache are drawn as in forward passes."""
    model, ids = gated("llama", threshold=-4.0), small.batch("plain")[0]["input_ids"]
    for gate in gates_of(model):
        gate.train()
    cache = kind(model.config)
    with torch.no_grad():
        torch.manual_seed(3)
        expected = model(input_ids=ids, use_cache=False).logits
        torch.manual_seed(3)
        close(small.logits(model, ids, cache), expected)
        assert small.logits(model, ids[:, :1], cache).isfinite().all()


def test_caches_that_do_not_fit():
    model = gated("llama")
    ids = small.batch("plain")[0]["input_ids"]
    with torch.no_grad():
        other = model(input_ids=ids[:, :20], **full_cache(model))[small.CACHE]
        with pytest.raises(NotImplementedError, match="needs the gates of earlier keys: give the model a GatedCache"):
            model(input_ids=ids[:, 20:], **{small.CACHE: other})
        with pytest.raises(NotImplementedError, match="supports no static cache"):
            model.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
        broken = dmt.FullGatedCache(model.config)
        model(input_ids=ids[:, :20], **{small.CACHE: broken})
        broken.layers[0].log_gate = broken.layers[0].log_gate[..., 1:]
        with pytest.raises(RuntimeError, match=r"20 earlier keys and 19 gates of them: .* reset\(\) the cache"):
            model(input_ids=ids[:, 20:], **{small.CACHE: broken})
    with pytest.raises(ValueError, match="one with gates needs a GatedCache"):
        dmt.DynamicMaskCache(model.config)
    with pytest.raises(ValueError, match="converted with policy='gate', got LlamaConfig without gates"):
        dmt.FullGatedCache(small.converted("llama").config)


# ---- saving, copying, training ----
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "hidden"), [("llama", None), ("gpt-neox", 6)])
def test_saved_and_loaded(name, hidden, kind, tmp_path):
    """Gates are float32 in a model of any type."""
    torch.manual_seed(4)
    small.model_of(name, "eager").save_pretrained(tmp_path / "dense")  # to(kind) would cast the rotary frequencies
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=kind)
    dmt.convert(model, policy="gate", delay=DELAY, hidden=hidden)
    for gate in gates_of(model):
        torch.nn.init.normal_(gate.proj.weight if hidden is None else gate.proj[2].weight, std=0.1)
    loaded = small.check_reloaded(model.eval(), tmp_path, {
        "policy": "gate", "delay": DELAY, "threshold": -12.0, "sinks": 4, "temperature": 0.1, "hidden": hidden},
        dtype=kind)
    assert loaded.dtype == kind
    assert all(p.dtype == torch.float32 for gate in gates_of(loaded) for p in gate.parameters())
    state = model.state_dict()
    assert all(torch.equal(x, state[key]) for key, x in loaded.state_dict().items())
    assert [repr(gate) for gate in gates_of(loaded)] == [repr(gate) for gate in gates_of(model)]
    found, expected = (each.generate(**prompt("left"), **GREEDY) for each in (loaded, model))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("make", "part"), [
    (lambda: gated("llama"), "retention_gate.proj.weight"), (lambda: dynamic("llama", sinks=1), "A")],
    ids=["gates", "dynamic mask"])
def test_copies_and_pickles(make, part):
    model = make()
    given, _ = small.batch("plain")
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert [type(x) for x in again.modules()] == [type(x) for x in model.modules()]
        assert torch.equal(again(**given).logits, model(**given).logits)
        ours, theirs = (x.get_parameter(f"model.layers.0.self_attn.{part}") for x in (again, model))
        assert ours is not theirs


@pytest.mark.parametrize("trainable", [None, "gate", "all"])
def test_what_is_trainable(trainable):
    model = small.model_of("llama", "eager")
    model.lm_head.weight.requires_grad_(False)
    dmt.convert(model, policy="gate", trainable=trainable)
    for name, parameter in model.named_parameters():
        expected = name != "lm_head.weight" if trainable == "all" else ".retention_gate." in name
        assert parameter.requires_grad == expected


# ---- sinks and a window ----
@pytest.mark.parametrize("how", ["plain", "left", "packed"])
def test_a_window_against_eager_attention(how):
    """Against eager attention with an explicit mask, over real tokens."""
    given, real = small.batch(how)
    model = small.model_of("llama", "eager")
    n, position = small.LENGTH, given.get("position_ids", torch.arange(small.LENGTH)[None]).expand(2, -1)
    order = real.long().cumsum(1)
    sequence = (position.diff(dim=1, prepend=position[:, :1]) < 0).cumsum(1)
    i, j = order[:, :, None], order[:, None]
    visible = (i - j < 6) | (position[:, None] < SINKS)
    visible &= torch.ones(n, n).tril().bool() & real[:, None] & (sequence[:, :, None] == sequence[:, None])
    named = {key: x for key, x in given.items() if key != "attention_mask"}
    expected = model(**named, attention_mask=torch.where(visible, 0.0, -1e9)[:, None]).logits[real]
    before = set(model.state_dict())
    dmt.convert(model, policy="window", window=6, sinks=SINKS)
    assert set(model.state_dict()) == before
    assert model.config.dynamic_mask == {"layers": [0, 1], "policy": "window", "window": 6, "sinks": SINKS}
    close(model(**given).logits[real], expected)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
@pytest.mark.parametrize("how", ["plain", "left"])
def test_generation_in_a_window(name, how, tmp_path):
    model = dmt.convert(small.model_of(name, "eager"), policy="window", window=9, sinks=SINKS)
    model.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    found, cache = generated(model, prompt(how), **GREEDY)
    assert isinstance(cache, dmt.DynamicMaskCache)
    assert all((store.window, store.sinks) == (9, SINKS) for layer in cache._dynamic for store in layer.stores)
    assert torch.equal(found, generated(model, prompt(how), **GREEDY, **full_cache(model))[0])
    assert torch.equal(found, generated(model, prompt(how), **GREEDY, use_cache=False)[0])
