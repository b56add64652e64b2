"""Generation: a cache of ``window`` rows gives the tokens of a full cache and of transformers' own attention."""
import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cupy_dma.transformers import DecodingStep, DynamicMaskCache  # noqa: E402
from cupy_dma.transformers.cache import DynamicMaskLayer  # noqa: E402
from tests.transformers import small_models as small  # noqa: E402

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


@pytest.mark.parametrize("name", ["doge", "llama"])
def test_sampling(name):
    model = dynamic(name, sinks=1, recent=3) if name == "llama" else dynamic(name)
    options = {**GREEDY, "do_sample": True, "top_k": 20}
    torch.manual_seed(3)
    found = model.generate(**prompt("left"), **options)
    torch.manual_seed(3)
    assert torch.equal(found, model.generate(**prompt("left"), **options, **full_cache(model)))


@pytest.mark.parametrize("name", ["doge", "llama"])
@pytest.mark.parametrize("draft", ["same", "other", "prompt lookup"])
def test_assisted_decoding(name, draft):
    model = dynamic(name)
    given = prompt("plain", rows=1)
    if draft == "prompt lookup":
        found = model.generate(**given, **GREEDY, prompt_lookup_num_tokens=4)
    else:
        assistant = small.randomize(copy.deepcopy(model), spread=0.25 if draft == "same" else 0.24)
        found = model.generate(**given, **GREEDY, assistant_model=assistant)
    assert torch.equal(found, model.generate(**given, **GREEDY))


@pytest.mark.parametrize("name", ["doge", "llama"])
@pytest.mark.parametrize("how", ["plain", "left"])
def test_a_continued_chat(name, how):
    model = dynamic(name)
    first = prompt(how)
    cache = DynamicMaskCache(model.config)
    said = model.generate(**first, **GREEDY, **{small.CACHE: cache})
    more = torch.randint(3, small.VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(5))
    real = torch.ones_like(more)
    real[1, :2] = 0  # padding within the conversation
    ids = torch.cat([said, more], 1)
    mask = torch.cat([first["attention_mask"], torch.ones(3, NEW, dtype=torch.long), real], 1)
    found = model.generate(ids, attention_mask=mask, **GREEDY, **{small.CACHE: cache})
    assert torch.equal(found, model.generate(ids, attention_mask=mask, **GREEDY, **full_cache(model)))
    assert cache.get_seq_length() == found.shape[1] - 1


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
def logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **{small.CACHE: cache}).logits


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


def test_crop_where_nothing_was_dropped():
    model, ids = dynamic("llama"), prompt("plain")["input_ids"]
    cache, short = DynamicMaskCache(model.config), DynamicMaskCache(model.config)
    logits(model, ids[:, :small.WINDOW], cache)
    assert cache.is_croppable
    cache.crop(-5)
    logits(model, ids[:, :small.WINDOW - 5], short)
    assert cache.get_seq_length() == small.WINDOW - 5
    for piece in ids[:, small.WINDOW - 5:].split(3, 1):
        found, expected = (logits(model, piece, each) for each in (cache, short))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("removed", [0, 1, 4, 9])
def test_crop_of_what_was_recorded(removed):
    model, ids = dynamic("llama"), prompt("plain", length=60)["input_ids"]
    cache, other = DynamicMaskCache(model.config), DynamicMaskCache(model.config)
    logits(model, ids[:, :25], cache)
    cache.activate_past_recording()
    for piece in ids[:, 25:34].split([4, 1, 1, 3], 1):
        logits(model, piece, cache)
    cache.crop(-removed)
    logits(model, ids[:, :25], other)
    for place in range(25, 34 - removed):
        logits(model, ids[:, place:place + 1], other)
    found, expected = (logits(model, ids[:, 34 - removed:40], each) for each in (cache, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    cache.crop(-1)  # a token of the last call, recorded too
    assert cache.get_seq_length() == 39


def test_crop_with_padding_takes_the_last_tokens():
    model, given = dynamic("llama"), prompt("left")
    caches = DynamicMaskCache(model.config), DynamicMaskCache(model.config)
    caches[0].activate_past_recording()
    ids, mask = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        for cache, n in zip(caches, (30, 27)):
            position = (mask.cumsum(1) - 1).clamp(min=0)[:, :n]
            model(input_ids=ids[:, :n], attention_mask=mask[:, :n], position_ids=position, **{small.CACHE: cache})
    caches[0].crop(-3)
    for a, b in zip(*(cache.layers for cache in caches)):
        assert torch.equal(a.store.length, b.store.length)
        assert torch.equal(a.store.kept().positions, b.store.kept().positions)


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
    padded = DynamicMaskCache(model.config)
    with torch.no_grad():
        model(**{**prompt("left", length=10), small.CACHE: padded})
    with pytest.raises(RuntimeError, match="no padding"):
        padded.crop(-1)


@pytest.mark.usefixtures("one_thread")
def test_rows_are_chosen_repeated_and_forgotten():
    model, ids = dynamic("llama"), prompt("plain")["input_ids"]
    cache, other = DynamicMaskCache(model.config), DynamicMaskCache(model.config)
    cache.batch_repeat_interleave(2)  # on an empty cache
    logits(model, ids[:2, :20], cache)
    logits(model, ids[[1, 1, 0, 0], :20], other)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 3, 0, 1]))
    step = ids[[1, 1, 0, 0], 20:]
    assert torch.equal(logits(model, step, cache), logits(model, step, other))
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    assert cache.batch_size == 2 and torch.equal(
        logits(model, ids[[1, 0], :3], cache), logits(model, ids[[1, 1, 0, 0], :3], other)[1:3])
    cache.reset()
    assert cache.get_seq_length() == 0
    logits(model, ids[:2, :20], cache)
    fresh = DynamicMaskCache(model.config)
    logits(model, ids[:2, :20], fresh)
    assert torch.equal(logits(model, ids[:2, 20:], cache), logits(model, ids[:2, 20:], fresh))


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
