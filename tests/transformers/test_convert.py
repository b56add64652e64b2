"""Dynamic masks for models without any: equal results at first, new parameters, saving and loading."""
import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers

import cupy_dma.transformers as dmt
from tests.transformers import small_models as small
from tests.transformers.test_masks import BART

NAMES = [name for name in small.FORMS if name not in (*small.DOGES, "mistral")]


@pytest.mark.parametrize(("name", "options"), [
    *((name, {"form": "exp"}) for name in NAMES), ("llama", {"form": "linear"}), ("gpt-oss", {"form": "linear"}),
    *((name, {"scores": "input"}) for name in NAMES)], ids=str)
@pytest.mark.parametrize("how", ["plain", "left", "packed"])
def test_a_long_window_changes_nothing(name, how, options):
    added = [".score_proj.weight"] if "scores" in options else [".A", ".dt_proj.weight"]
    small.check_unchanged(name, how, *added, window=small.LENGTH, **options)


@pytest.mark.parametrize("options", [{}, {"sinks": 2, "recent": 3}, {"form": "linear"}, {"window": [[9, 4]]},
                                     {"window": [4, 12]}, {"window": [[9, 4], 6]}, {"scores": "input"},
                                     {"scores": "input", "recent": 3}], ids=str)
@pytest.mark.parametrize("how", ["plain", "left", "packed"])
def test_the_mask_against_eager_attention(options, how):
    """Against transformers' eager attention with the mask and the scores written out, layer by layer: logits, and the
    gradients of all parameters."""
    given, real = small.batch(how)
    model = small.converted("llama", **options)
    windows = {str([[9, 4]]): [(9, 4)] * 2, str([4, 12]): [4, 12], str([[9, 4], 6]): [(9, 4), 6]}.get(
        str(options.get("window")), [small.WINDOW] * 2)
    seen = []

    def written_out(module, query, key, value, attention_mask, scaling, **_):
        from cupy_dma.torch.kept import kept_keys
        padding = None if attention_mask is None else attention_mask.padding
        documents = attention_mask.documents[0] if how == "packed" else None
        if "scores" in options:
            scores = module.score_proj(module.score_input)
        else:
            scores = module.A * torch.nn.functional.softplus(module.dt_proj(value.transpose(1, 2).flatten(2)))
            scores = scores if options.get("form") == "linear" else scores.exp()
        scores = scores.transpose(1, 2)
        mask = kept_keys(scores, windows[module.layer_idx], options.get("sinks", 0), options.get("recent", 0), padding,
                         documents, None).to_dense(query.shape[2])
        logits = query @ key.repeat_interleave(2, 1).transpose(2, 3) * scaling + scores[:, :, None].repeat_interleave(
            2, 1)
        weights = logits.masked_fill(~mask.repeat_interleave(2, 1), -torch.inf).softmax(-1).nan_to_num(0)
        seen.append(mask.float().mean().item())
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), None

    def results():
        model.zero_grad()
        logits = model(**given).logits[real]
        logits.log_softmax(-1)[:, 7].sum().backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters()}

    found, gradients = results()
    assert all(x.any() for x in gradients.values())
    with small.attention_by(written_out):
        expected, others = results()
    assert len(seen) == 2 and all(share < 0.45 for share in seen)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(gradients, others, rtol=1e-3, atol=1e-3)


# ---- budgets ----
@pytest.mark.parametrize(("given", "noted", "each"), [
    (7, 7, [7, 7]), ([7, 7], 7, [7, 7]), ([[7, 7]], 7, [7, 7]), ((7, 9), [7, 9], [7, 9]),
    ([[9, 4]], [[9, 4], [9, 4]], [(9, 4), (9, 4)]), ([[9, 4], 6], [[9, 4], 6], [(9, 4), 6]),
    (torch.tensor([[9, 4], [6, 6]]), [[9, 4], 6], [(9, 4), 6])], ids=str)
@pytest.mark.parametrize("options", [{}, {"policy": "window", "sinks": 1}, {"policy": "gate", "delay": 5}], ids=str)
def test_budgets(given, noted, each, options, tmp_path):
    """Budgets per layer and kv head, in the configuration, in a model loaded from it, and in its caches."""
    name = "capacity" if options.get("policy") == "gate" else "window"
    model = small.randomize(dmt.convert(small.model_of("llama", "eager"), **{name: given}, **options))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dynamic_mask"][name] == noted
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert [getattr(layer.self_attn.dynamic_mask, name) for layer in model.model.layers] == each
    ids = small.batch("plain")[0]["input_ids"]
    cache = (dmt.DynamicMaskCache if name == "window" else dmt.GatedCache)(model.config)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    parts = [small.logits(model, part, cache) for part in ids.split([9, 1, 30], 1)]
    assert [getattr(store, name) for layer in cache.layers for store in layer.stores] == each
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["window", "capacity"])
@pytest.mark.parametrize(("given", "error", "message"), [
    (0, ValueError, "{} must be at least 1, got 0"), ([4, 0], ValueError, r"{}\[1\] must be at least 1, got 0"),
    ([4, 5, 6], ValueError, r"{} must be an int, one per layer.*the layers are \[0, 1\], got 3 of them"),
    ([[4, 5, 6]], ValueError, r"{}\[0\] must be an int, or one int for each of 2 kv heads, got 3"),
    ([[4, 5], [4, 0]], ValueError, r"{}\[1\]\[1\] must be at least 1"), ("16", TypeError, "{} must be an int"),
    ([4, 2.5], TypeError, r"{}\[1\]"), (torch.ones(2, 2, 2), TypeError, "{} must be ints in host memory"),
    ([], ValueError, "got 0 of them")], ids=str)
def test_budgets_that_do_not_fit(name, given, error, message):
    model = small.model_of("llama", "eager")
    policy = "gate" if name == "capacity" else "top_w"
    with pytest.raises(error, match=message.format(name)):
        dmt.convert(model, policy=policy, **{name: given})
    with pytest.raises(ValueError, match=rf"layers must ascend where {name} has one entry per layer, got \[1, 0\]"):
        dmt.convert(model, policy=policy, layers=[1, 0], **{name: [4, 5]})
    assert not hasattr(model.config, "dynamic_mask") and model.config._attn_implementation == "eager"


# ---- scores of the layer's input ----
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_saved_and_loaded_by_the_input(name, kind, tmp_path):
    """The projection is float32 in a model of any type."""
    small.model_of(name, "eager").save_pretrained(tmp_path / "dense")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=kind)
    dmt.convert(model, small.WINDOW, scores="input", recent=3)
    loaded = small.check_reloaded(small.randomize(model), tmp_path, {
        "window": small.WINDOW, "sinks": 0, "recent": 3, "scores": "input"}, dtype=kind)
    kinds = {name.endswith("score_proj.weight"): p.dtype for name, p in loaded.named_parameters() if "_proj" in name}
    assert kinds == {True: torch.float32, False: kind}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox"])
@pytest.mark.parametrize("auto", [True, False])
def test_saved_and_loaded(name, auto, tmp_path):
    model = small.converted(name, sinks=1, recent=3)
    loaded = small.check_reloaded(model, tmp_path, {"window": small.WINDOW, "sinks": 1, "recent": 3, "form": "exp"},
                                  None if auto else type(model))
    given, real = small.batch("left")
    again = transformers.AutoModelForCausalLM.from_config(loaded.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(**given).logits[real], model(**given).logits[real])


def test_a_doge_saved_and_loaded(tmp_path):
    model = small.model_of("doge")
    given, _ = small.batch("plain")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="cupy_dma").eval()
    assert loaded.config._attn_implementation == "cupy_dma"
    assert torch.equal(loaded(**given).logits, model(**given).logits)


def test_another_implementation_is_refused():
    model = small.converted("llama")
    given, _ = small.batch("plain")
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="needs attn_implementation='cupy_dma', got 'eager'"):
        model(**given)
    model.set_attn_implementation("cupy_dma")
    model(**given)


@pytest.mark.parametrize("arguments, error, message", [
    ({"window": 4, "form": "log"}, ValueError, "form"),
    ({"window": 4, "sinks": -1}, ValueError, "sinks"),
    ({"window": 4, "layers": [0, 2]}, ValueError, r"layers must name some of the model's \[0, 1\], got \[0, 2\]"),
    ({"window": 4, "layers": []}, ValueError, "layers must name some"),
    ({"window": 4, "layers": [0.5]}, TypeError, "layers"),
    ({"window": 4, "scores": "key"}, ValueError, "scores must be 'value' or 'input', got 'key'"),
    ({"window": 4, "scores": "input", "form": "exp"}, ValueError, "form needs scores='value', got form='exp'"),
    ({"policy": "window", "window": 4, "scores": "input"}, ValueError, "takes window, sinks, got scores"),
    ({"policy": "gates"}, ValueError, "policy must be 'top_w' or 'window' or 'gate', got 'gates'"),
    ({"policy": "gate", "window": 4}, ValueError, "takes delay, threshold, sinks.*, capacity, got window"),
    ({"policy": "window", "window": 4, "recent": 3, "delay": 2}, ValueError, "takes window, sinks, got recent, delay"),
    ({"window": 4, "hidden": 8}, ValueError, "takes window, sinks, recent, form, scores, got hidden"),
    ({"policy": "window"}, TypeError, "policy='window' needs a window"), ({}, TypeError, "policy='top_w' needs a wind"),
    ({"policy": "gate", "delay": 0}, ValueError, "delay must be at least 1"),
    ({"policy": "gate", "threshold": 1.0}, ValueError, "threshold must be below 0"),
    ({"policy": "gate", "trainable": "base"}, ValueError, "trainable must be 'gate' or 'all', got 'base'"),
    ({"window": 4, "trainable": "all"}, ValueError, "trainable needs policy='gate', got policy='top_w'"),
], ids=str)
def test_arguments(arguments, error, message):
    model = small.model_of("llama", "eager")
    before = set(model.state_dict())
    with pytest.raises(error, match=message):
        dmt.convert(model, **arguments)
    assert set(model.state_dict()) == before and not hasattr(model.config, "dynamic_mask")
    assert model.config._attn_implementation == "eager" and all(p.requires_grad for p in model.parameters())


def test_what_cannot_be_converted():
    with pytest.raises(TypeError, match="PreTrainedModel"):
        dmt.convert(torch.nn.Linear(2, 2), 4)
    with pytest.raises(ValueError, match="has dynamic masks already"):
        dmt.convert(small.model_of("doge"), 4)
    with pytest.raises(ValueError, match="has dynamic masks already"):
        dmt.convert(small.converted("llama"), 4)
    with pytest.raises(ValueError, match="every layer of the model has a sliding window"):
        dmt.convert(small.model_of("mistral"), 4)
    with pytest.raises(ValueError, match=r"layers must not name those with a sliding window.*\[0\], got \[0, 1\]"):
        dmt.convert(small.model_of("gemma2"), 4, layers=[0, 1])
    with pytest.raises(ValueError, match="do not fit T5ForConditionalGeneration: it is an encoder and a decoder"):
        dmt.convert(transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)), 4)
    encoder = transformers.AutoModelForCausalLM.from_config(transformers.RobertaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32))
    with pytest.raises(ValueError, match="it is not causal"):
        dmt.convert(encoder, 4)
    assert encoder.config._attn_implementation != "cupy_dma" and not hasattr(encoder.config, "dynamic_mask")


def test_a_model_that_has_become_bidirectional():
    model = small.converted("llama")
    model.config.is_causal = False
    with pytest.raises(NotImplementedError, match="a layer with a dynamic mask is causal"):
        model(**small.batch("plain")[0])


# ---- pickles, and replacements of dt_proj ----
@pytest.mark.slow
def test_a_pickle_in_another_process(tmp_path):
    model = small.converted("llama")
    given, _ = small.batch("plain")
    torch.save(model, tmp_path / "model.pt")
    torch.save((given, model(**given).logits), tmp_path / "result.pt")
    code = ("import sys, torch\n"
            "model, (given, expected) = (torch.load(f'{sys.argv[1]}/{name}.pt', weights_only=False)\n"
            "                            for name in ('model', 'result'))\n"
            "torch.testing.assert_close(model(**given).logits, expected)\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


@pytest.mark.parametrize("options", [{}, {"sinks": 2, "recent": 3}], ids=str)
def test_hooks_and_adapters_of_a_converted_model(options):
    """A hook on the projection has the same effect as a changed projection, also with a cache."""
    given, _ = small.batch("plain")
    model = small.converted("llama", **options)
    twice = copy.deepcopy(model)
    with torch.no_grad():
        for layer in twice.model.layers:
            layer.self_attn.dt_proj.weight *= 2
    expected = twice(**given).logits
    before = model(**given).logits
    calls = []
    for layer in model.model.layers:
        layer.self_attn.dt_proj.register_forward_hook(lambda *of: calls.append(1) or 2 * of[2])
    found = model(**given).logits
    assert len(calls) == 2 and (before - expected).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    cached = small.logits(model, cache=dmt.DynamicMaskCache(model.config), **given)
    torch.testing.assert_close(cached, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["doge", "converted"])
def test_offloaded_models(name):
    accelerate = pytest.importorskip("accelerate")
    model = small.model_of("doge") if name == "doge" else small.converted("llama")
    given, _ = small.batch("plain")
    with torch.no_grad():
        expected = model(**given).logits
        found = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))(**given).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# ---- models with cross-attention ----
def test_cross_attention_stays():
    torch.manual_seed(0)
    model = small.randomize(transformers.AutoModelForCausalLM.from_config(transformers.BartConfig(**BART)))
    ids, states = torch.randint(3, 60, (2, 20)), torch.randn(2, 9, 32)
    expected = model(ids, encoder_hidden_states=states).logits
    dmt.convert(model, 64)
    assert [name for name, x in model.named_modules() if hasattr(x, "dynamic_mask")] == [
        f"model.decoder.layers.{i}.self_attn" for i in range(2)]
    torch.testing.assert_close(model(ids, encoder_hidden_states=states, use_cache=False).logits, expected, rtol=0,
                               atol=1e-4)
    assert model.generate(ids, max_new_tokens=3, pad_token_id=0).shape == (2, 23)
