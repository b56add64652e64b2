"""Dynamic masks for models that have none: the same function at first, other parameters, saved and loaded."""
from __future__ import annotations

import copy
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import cupy_dma.transformers as dmt  # noqa: E402
from tests.transformers import small_models as small  # noqa: E402

NAMES = [name for name in small.FORMS if name not in (*small.DOGES, "mistral")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["plain", "left", "packed"])
@pytest.mark.parametrize("form", ["exp", "linear"])
def test_a_long_window_changes_nothing(name, how, form):
    if form == "linear" and name != "llama":
        pytest.skip("one model is enough")
    if name == "gpt-oss":
        pytest.skip("attention sinks: test_what_cannot_be_converted")
    given, real = small.batch(how)
    model = small.model_of(name, "eager")
    expected = model(**given).logits[real]
    before = {key: x.clone() for key, x in model.state_dict().items()}
    assert dmt.convert(model, small.LENGTH, form=form) is model
    found = model(**given).logits[real]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    after = model.state_dict()
    assert all(torch.equal(after[key], x) for key, x in before.items())
    added = sorted(set(after) - set(before))
    assert len(added) == 2 * len(model.config.dynamic_mask["layers"]) > 0
    assert all(key.endswith((".A", ".dt_proj.weight")) for key in added)


@pytest.mark.parametrize("options", [{}, {"sinks": 2, "recent": 3}, {"form": "linear"}], ids=str)
@pytest.mark.parametrize("how", ["plain", "left", "packed"])
def test_the_mask_is_what_it_says(options, how):
    """Against transformers' eager attention with the mask and the scores written out, layer by layer."""
    given, real = small.batch(how)
    model = small.converted("llama", **options)
    seen = []

    def written_out(module, query, key, value, attention_mask, scaling, **_):
        from cupy_dma.torch.kept import kept_keys
        padding = None if attention_mask is None else attention_mask.padding
        documents = attention_mask.documents[0] if how == "packed" else None
        dt = module.dt_proj(value.transpose(1, 2).flatten(2))
        scores = module.A * torch.nn.functional.softplus(dt)
        scores = (scores if options.get("form") == "linear" else scores.exp()).transpose(1, 2)
        mask = kept_keys(scores, small.WINDOW, options.get("sinks", 0), options.get("recent", 0), padding, documents,
                         None).to_dense(query.shape[2])
        logits = query @ key.repeat_interleave(2, 1).transpose(2, 3) * scaling + scores[:, :, None].repeat_interleave(
            2, 1)
        weights = logits.masked_fill(~mask.repeat_interleave(2, 1), -torch.inf).softmax(-1).nan_to_num(0)
        seen.append(mask.float().mean().item())
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), None

    found = model(**given).logits[real]
    transformers.AttentionInterface.register("cupy_dma", written_out)
    try:
        expected = model(**given).logits[real]
    finally:
        transformers.AttentionInterface.register("cupy_dma", dmt.attention_forward)
    assert len(seen) == 2 and all(share < 0.45 for share in seen)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_it_learns():
    """``A`` at first, and once it has moved the projection, too."""
    model = small.converted("llama")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.A)
    given, _ = small.batch("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(**given, labels=given["input_ids"]).loss.backward()
        for layer in model.model.layers:
            assert layer.self_attn.A.grad.abs().max() > 0
            assert (layer.self_attn.dt_proj.weight.grad.abs().max() > 0) == (step > 0)
        optimizer.step()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox"])
@pytest.mark.parametrize("auto", [True, False])
def test_saved_and_loaded(name, auto, tmp_path):
    model = small.converted(name, sinks=1, recent=3)
    given, real = small.batch("left")
    expected = model(**given).logits[real]
    model.save_pretrained(tmp_path)
    noted = json.loads((tmp_path / "config.json").read_text())["dynamic_mask"]
    assert noted == {"layers": model.config.dynamic_mask["layers"], "window": small.WINDOW, "sinks": 1, "recent": 3,
                     "form": "exp"}
    kind = transformers.AutoModelForCausalLM if auto else type(model)
    loaded, about = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), about
    assert loaded.config._attn_implementation == "cupy_dma"
    assert torch.equal(loaded.eval()(**given).logits[real], expected)
    again = transformers.AutoModelForCausalLM.from_config(loaded.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(**given).logits[real], expected)


def test_a_doge_saved_and_loaded(tmp_path):
    model = small.model_of("doge")
    given, _ = small.batch("plain")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="cupy_dma").eval()
    assert loaded.config._attn_implementation == "cupy_dma"
    assert torch.equal(loaded(**given).logits, model(**given).logits)


def test_copies_and_types():
    model = small.converted("llama")
    given, _ = small.batch("plain")
    assert torch.equal(copy.deepcopy(model)(**given).logits, model(**given).logits)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half.model.layers[0].self_attn.A.dtype == torch.bfloat16
    assert half(**given).logits.dtype == torch.bfloat16


def test_another_implementation_is_refused():
    model = small.converted("llama")
    given, _ = small.batch("plain")
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="needs attn_implementation='cupy_dma', got 'eager'"):
        model(**given)
    model.set_attn_implementation("cupy_dma")
    model(**given)


@pytest.mark.parametrize("arguments, error, message", [
    ({"window": 0}, ValueError, "window"),
    ({"window": 2.5}, TypeError, "window"),
    ({"window": 4, "form": "log"}, ValueError, "form"),
    ({"window": 4, "sinks": -1}, ValueError, "sinks"),
    ({"window": 4, "layers": [0, 2]}, ValueError, r"layers must name some of the model's \[0, 1\], got \[0, 2\]"),
    ({"window": 4, "layers": []}, ValueError, "layers must name some"),
    ({"window": 4, "layers": [0.5]}, TypeError, "layers"),
], ids=str)
def test_arguments(arguments, error, message):
    model = small.model_of("llama", "eager")
    before = set(model.state_dict())
    with pytest.raises(error, match=message):
        dmt.convert(model, **arguments)
    assert set(model.state_dict()) == before and not hasattr(model.config, "dynamic_mask")
    assert model.config._attn_implementation == "eager"


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
    model = dmt.convert(small.model_of("gpt-oss"), 4)
    with pytest.raises(NotImplementedError, match="takes no s_aux"):
        model(**small.batch("plain")[0])
