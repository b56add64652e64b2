"""Generation: a cache of ``window`` rows gives the tokens of a full cache and of transformers' own attention."""
from typing import Any

import pytest
import torch
import transformers

from cupy_dma.transformers import DecodingStep, DynamicMaskCache
from cupy_dma.transformers.cache import DynamicMaskLayer
from tests.transformers import small_models as small
from tests.transformers.small_models import logits

NEW = 24
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
BEAMS = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}


def dynamic(name: str, **options: Any) -> Any:
    """A model with dynamic masks and scores that strongly affect its outputs."""
    model = small.model_of(name) if name in small.DOGES else small.converted(name, **options)
    return small.randomize(model, spread=0.25)


def full_cache(model: Any) -> dict[str, Any]:
    return {small.CACHE: transformers.DynamicCache(config=model.config)}


def prompt(how: str, rows: int = 3, length: int = 30) -> dict[str, Any]:
    given, real = small.batch("left" if how == "left" else "plain", rows, length)
    return {"input_ids": given["input_ids"], "attention_mask": real.long()}


def generated(model: Any, given: dict[str, Any], **options: Any) -> tuple[torch.Tensor, Any]:
    found = model.generate(**given, return_dict_in_generate=True, **options)
    return found.sequences, getattr(found, small.CACHE)


@pytest.mark.parametrize(("name", "options"), [(name, {}) for name in ("doge", "llama", "qwen3", "gpt-neox")] +
                         [("llama", {"scores": "input"}), ("qwen3", {"scores": "input", "sinks": 2, "recent": 3}),
                          ("llama", {"sinks": 1, "recent": 3}), ("gpt-neox", {"recent": 5, "form": "linear"})], ids=str)
@pytest.mark.parametrize("how", ["plain", "left"])
@pytest.mark.parametrize("search", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_the_same_tokens_as_with_a_full_cache(name, how, search, options):
    model = dynamic(name, **options)
    found, cache = generated(model, prompt(how), **search)
    given = {"use_cache": False} if "scores" in options else full_cache(model)  # which stores no scores
    expected, full = generated(model, prompt(how), **search, **given)
    assert isinstance(cache, DynamicMaskCache) and not isinstance(full, DynamicMaskCache)
    assert torch.equal(found, expected)
    assert len(found[0]) == 30 + NEW


def test_a_full_cache_stores_no_scores():
    model, ids = dynamic("llama", scores="input"), prompt("plain")["input_ids"]
    with torch.no_grad():
        cache = model(input_ids=ids[:, :20], **full_cache(model))[small.CACHE]
        with pytest.raises(NotImplementedError, match="needs the scores of earlier keys: give the model a DynamicMask"):
            model(input_ids=ids[:, 20:], **{small.CACHE: cache})


@pytest.mark.parametrize(("name", "how"), [(name, how) for name in small.FORMS for how in ("plain", "left") if
                                           (name, how) != ("doge-moe", "left")])  # see CASES of test_models.py
@pytest.mark.parametrize("search", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_the_same_tokens_as_transformers_own_attention(name, how, search):
    model = small.model_of(name)
    eager = small.twin(model, "eager")
    found, cache = generated(model, prompt(how), **search)
    with small.ties_broken_alike(eager):
        expected, _ = generated(eager, prompt(how), **search)
    assert isinstance(cache, DynamicMaskCache) == (name in small.DOGES)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["doge", "llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("how", ["plain", "left"])
def test_a_static_cache(name, how):
    model = dynamic(name) if name in ("doge", "llama") else small.model_of(name)
    found = model.generate(**prompt(how), **GREEDY, cache_implementation="static")
    assert torch.equal(found, model.generate(**prompt(how), **GREEDY))


def test_memory_does_not_grow():
    model = dynamic("doge")
    sizes = []
    for length in (small.WINDOW + 2, 8 * small.WINDOW):
        _, cache = generated(model, prompt("plain", length=length), **GREEDY)
        assert cache.get_seq_length() == length + NEW - 1
        sizes.append(cache.memory_bytes)
    rows = 3 * 2 * small.WINDOW  # batch, kv heads, window
    assert sizes[0] == sizes[1] < 2 * rows * (2 * 16 * 4 + 32)  # two layers; key and value, and metadata per key


@pytest.mark.parametrize(("name", "options"), [("llama", {"layers": [1]}), ("gemma2", {})], ids=str)
def test_some_layers_have_dynamic_masks(name, options):
    """The named layers, or those without a sliding window."""
    model = dynamic(name, **options)
    found, cache = generated(model, prompt("left"), **GREEDY)
    assert [isinstance(layer, DynamicMaskLayer) for layer in cache.layers] == [False, True]
    assert torch.equal(found, model.generate(**prompt("left"), **GREEDY, **full_cache(model)))


# ---- the cache itself ----
@pytest.mark.parametrize("name", ["doge", "llama"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_in_pieces(name, kind):
    """A prompt in chunks or in one piece, then tokens one by one."""
    model = dynamic(name).to(getattr(torch, kind))
    ids = prompt("plain")["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
    size = expected.abs().max().item()
    for cuts in ([30], [11, 19], [1] * 30):
        cache = DynamicMaskCache(model.config)
        found = torch.cat([logits(model, piece, cache) for piece in ids.split(cuts, 1)], 1).float()
        assert (found - expected).abs().max() < (1e-5 if kind == "float32" else 0.15) * size, cuts


def test_crop_that_cannot_be_exact():
    model, ids = dynamic("llama"), prompt("plain")["input_ids"]
    cache = DynamicMaskCache(model.config)
    logits(model, ids, cache)
    assert not cache.is_croppable
    with pytest.raises(RuntimeError, match="keeps 16 keys"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="minus the number of tokens"):
        cache.crop(3)
    assert cache.get_seq_length() == 30
    cache.crop(0)


@pytest.mark.usefixtures("one_thread")
def test_rows_of_an_empty_cache_and_rows_chosen_by_a_mask():
    model, ids = dynamic("llama"), prompt("plain")["input_ids"]
    cache, other = DynamicMaskCache(model.config), DynamicMaskCache(model.config)
    cache.batch_repeat_interleave(2)
    assert torch.equal(logits(model, ids[:, :20], cache), logits(model, ids[:, :20], other))
    cache.batch_select_indices(torch.tensor([False, True, True]))
    assert cache.batch_size == 2
    assert torch.equal(logits(model, ids[1:, 20:], cache), logits(model, ids[:, 20:], other)[1:])


def test_another_attention_is_found_out():
    model = small.model_of("doge")
    cache = DynamicMaskCache(model.config)
    model.set_attn_implementation("eager")
    logits(model, prompt("plain")["input_ids"], cache)
    with pytest.raises(RuntimeError, match="never reached the cache"):
        logits(model, prompt("plain")["input_ids"][:, :1], cache)


def test_training_with_a_cache_is_refused():
    model = small.model_of("doge")
    with pytest.raises(NotImplementedError, match="grad"):
        model(**prompt("plain"), **{small.CACHE: DynamicMaskCache(model.config)})


def test_configurations_without_dynamic_masks():
    with pytest.raises(ValueError, match="LlamaConfig without any"):
        DynamicMaskCache(small.config_of("llama"))
    with pytest.raises(ValueError, match="without any"):
        DynamicMaskCache(small.config_of("doge", sliding_window=8))


def test_a_graph_needs_a_gpu_and_a_prompt():
    model = small.model_of("doge")
    cache = DynamicMaskCache(model.config)
    with pytest.raises(TypeError, match="must be a DynamicMaskCache"):
        DecodingStep(model, transformers.DynamicCache())
    with pytest.raises(ValueError, match="at least one token"):
        DecodingStep(model, cache)
    logits(model, prompt("plain")["input_ids"], cache)
    with pytest.raises(ValueError, match="on a GPU and in evaluation mode, got one on cpu"):
        DecodingStep(model, cache)
    mixed = dynamic("llama", layers=[1])
    with pytest.raises(ValueError, match="layers all have dynamic masks"):
        DecodingStep(mixed, DynamicMaskCache(mixed.config))
