"""Continuous batching: every text gets the tokens it would get alone, whichever requests join, leave or fail beside
it."""
import queue
import re
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import cupy_dma.transformers as dmt
from cupy_dma.transformers import ContinuousBatching, serving, slot_pass
from cupy_dma.transformers.sampling import Sampling, next_tokens
from tests.transformers import causal_models, every_model
from tests.transformers import small_models as small
from tests.transformers.test_every_model import BROKEN
from tests.transformers.test_masks import BART

pytestmark = pytest.mark.usefixtures("one_thread")
ENDLESS = {"eos_token_id": None}
LENGTHS = (5, 1, 40, 17, 33, 80, 2, 64)


def converted(name: str, seed: int = 0, config: dict[str, Any] | None = None, **options: Any) -> Any:
    return small.converted_from(small.config_of(name, **ENDLESS, **(config or {})), seed=seed, **options)


def differential() -> Any:
    return small.converted_from(transformers.DiffLlamaConfig(**{**small.SIZES, **ENDLESS}), 12)


@pytest.fixture(scope="module")
def model() -> Any:
    return converted("llama", window=small.WINDOW, sinks=1, recent=3, config={"num_hidden_layers": 3})


def prompts_of(lengths: Any = LENGTHS, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, small.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def alone(model: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    """The tokens of ``generate``."""
    found = model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, pad_token_id=0, **options)
    return found[0, len(prompt):].tolist()


def finish(batching: ContinuousBatching) -> None:
    for _ in batching:
        pass
    assert batching.waiting == batching.running == 0


def right(model: Any, requests: Any, n: int) -> None:
    """Whether all requests ended without an error, with the tokens that each gets alone."""
    for request in requests:
        assert request.error is None and request.status.name == "FINISHED"
        assert request.generated_tokens == alone(model, request.prompt_ids, n)


# ---- the same tokens ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [
    lambda: converted("llama", window=16, sinks=1, recent=3),
    lambda: converted("llama", window=[16, [5, 12]], scores="input"),
    lambda: converted("llama", policy="gate", delay=6, capacity=[[3, 9]]),
    lambda: converted("gpt-neox", policy="window", window=12),
    lambda: small.model_of("doge", **ENDLESS),
    lambda: converted("gpt-oss", window=16, layers=[0, 1], config={"layer_types": ["full_attention"] * 2}),
    differential,
    lambda: small.converted_from(transformers.GPT2Config(vocab_size=small.VOCABULARY, n_embd=64, n_layer=2, n_head=4,
                                                         n_positions=128, **ENDLESS), 12),
], ids=["llama", "heads", "gates", "window", "doge", "gpt-oss", "diffllama", "gpt2"])
def test_each_text_as_if_alone(make):
    model = make()
    found = dmt.generate_batch(model, prompts_of(), max_new_tokens=12, slots=3, chunk=16)
    assert list(found) == [f"req_{i}" for i in range(len(LENGTHS))]
    right(model, found.values(), 12)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize(("options", "kind"), [
    ({"window": 16, "sinks": 1, "recent": 3}, dmt.DynamicMaskCache),
    ({"policy": "gate", "delay": 6, "capacity": [[3, 9]]}, dmt.GatedCache)], ids=["window", "gates"])
def test_rows_of_8_bits(options, kind, storage):
    model = converted("llama", **options)
    found = dmt.generate_batch(model, prompts_of(), max_new_tokens=12, slots=3, chunk=16, storage=storage)
    argument, differs = dmt.cache_argument(model), 0
    for request in found.values():
        cache = kind(model.config, storage=storage)
        assert request.generated_tokens == alone(model, request.prompt_ids, 12, **{argument: cache})
        assert {store.storage for layer in cache.layers for store in layer.stores} == {storage}
        differs += request.generated_tokens != alone(model, request.prompt_ids, 12)
    assert differs
    with pytest.raises(ValueError, match="storage must be None, 'int8' or 'fp8', got 'fp4'"):
        kind(model.config, storage="fp4")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, converts) in every_model.recorded()[1].items()
                                  if name in every_model.NAMES and (converts == "works" or name == "doge")])
def test_every_type(name):
    """Every model type is refused or gives right tokens."""
    if name in BROKEN.get(every_model.VERSION, ()):
        pytest.skip(f"broken in transformers {every_model.VERSION}")
    model, config = causal_models.tiny_model(name, **ENDLESS).eval(), transformers.GenerationConfig(max_new_tokens=6)
    prompts = [[token % 60 + 3 for token in prompt] for prompt in prompts_of([12, 3, 25])]
    try:
        if name == "doge":
            model.set_attn_implementation("cupy_dma")
        else:
            dmt.convert(model, 9, sinks=1, recent=2)
        found = dmt.generate_batch(model, prompts, config, slots=2, chunk=8)
    except ValueError as error:  # the last type in older versions of transformers
        assert re.search("^slots need a model whose layers all have|^model must take position_ids|"
                         "does not call the attention interface", str(error))
    else:
        right(model, found.values(), 6)


@pytest.mark.parametrize(("slots", "chunk"), [(1, 16), (2, 1), (5, 7), (8, 128)])
def test_any_slots_and_chunks(model, slots, chunk):
    batching = ContinuousBatching(model, slots=slots, chunk=chunk)
    memory, most = batching.memory_bytes, 0
    stores = [(store, store._state.key.pointer) for layer in batching._cache.layers for store in layer.stores]
    requests = [batching.submit(prompt, 10) for prompt in prompts_of()]
    said: dict[Any, list[int]] = {}
    while batching.waiting or batching.running:
        for request, token in batching.step():
            said.setdefault(request, []).append(token)
        most = max(most, batching.running)
        assert batching.memory_bytes == memory
    right(model, requests, 10)
    assert said == {request: request.generated_tokens for request in requests} and most == min(slots, len(requests))
    assert stores == [(store, store._state.key.pointer) for layer in batching._cache.layers for store in layer.stores]
    assert stores[0][0].batch == slots and len(stores) == 3


def test_requests_join_and_leave(model):
    """Requests arrive while others decode, and from another thread; slots are reused repeatedly."""
    batching, prompts = ContinuousBatching(model, slots=2, chunk=16), prompts_of(range(3, 60, 3))
    requests = [batching.submit(prompts[0], 30)]
    cancelled = []
    for prompt in prompts[1:]:
        for _ in range(3):
            batching.step()
        requests.append(batching.submit(torch.tensor(prompt), 8))
        if len(requests) % 4 == 0:
            has_ended = requests[-2].is_finished()
            assert batching.cancel(requests[-2]) is not has_ended
            cancelled += [] if has_ended else [requests[-2]]
    thread = threading.Thread(target=lambda: requests.append(batching.submit(prompts[5], 8)))
    thread.start()
    thread.join()
    finish(batching)
    for i, request in enumerate(requests):
        expected = alone(model, request.prompt_ids, 30 if i == 0 else 8)
        if request not in cancelled:
            assert request.error is None and request.generated_tokens == expected
        else:
            assert request.error == "cancelled" and request.status.name == "FAILED"
            assert request.generated_tokens == expected[:len(request.generated_tokens)]
    assert len(cancelled) >= 3


def test_what_ends_a_text(model):
    prompt, = prompts_of([20])
    said = alone(model, prompt, 12)
    batching = ContinuousBatching(model, slots=4, chunk=8)
    first = said.index(said[6])  # a token may come twice
    ends = {"eos": batching.submit(prompt, 12, eos_token_id=said[6]),
            "several": batching.submit(prompt, eos_token_id=[-1, said[6]]),
            "stop": batching.submit(prompt, 12, stop=[[1, 1], said[2:5]]),
            "short": batching.submit(prompt, 1),
            "begun": batching.submit(prompt, 2, stop=[[prompt[-1], said[0]]])}  # a stop counts what is generated
    finish(batching)
    tokens = {name: request.generated_tokens for name, request in ends.items()}
    assert tokens == {"eos": said[:first + 1], "several": said[:first + 1], "stop": said[:5], "short": said[:1],
                      "begun": said[:2]}


def test_times(model):
    found = dmt.generate_batch(model, prompts_of([5, 9]), record_timestamps=True, max_new_tokens=4, slots=1)
    first, second = found.values()
    for request in (first, second):
        begin, end = request.lifespan
        assert request.created_time <= begin <= request.timestamps[0] and request.timestamps[-1] <= end
        assert request.timestamps == sorted(request.timestamps) and len(request.timestamps) == 4
    assert first.lifespan[1] <= second.timestamps[0]
    batching = ContinuousBatching(model, slots=1)
    assert batching.submit([3], 1).timestamps is None


# ---- drawn tokens ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [
    (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (0.5, 7, 0.8)])
def test_tokens_are_drawn_as_transformers_does(temperature, top_k, top_p):
    """Sampling has the same candidates and probabilities."""
    logits, n = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)) * 2, 20000
    warped = logits
    for form, value in ((transformers.TemperatureLogitsWarper, temperature), (transformers.TopKLogitsWarper, top_k),
                        (transformers.TopPLogitsWarper, top_p)):
        warped = warped if value in (0, 1.0) and form is not transformers.TemperatureLogitsWarper else form(value)(
            None, warped)
    settings = torch.tensor([temperature, top_k, top_p, 0], dtype=torch.float64).repeat(n, 1)
    settings[:, 3] = (torch.arange(n) + 0.5) / n
    tokens = next_tokens(logits.expand(n, -1), settings)
    share = torch.bincount(tokens, minlength=40) / n
    torch.testing.assert_close(share, warped.softmax(-1)[0], rtol=0, atol=2 / n)
    assert torch.equal(share > 0, warped[0] > -torch.inf)


def test_rows_draw_by_themselves():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    drawn = Sampling(0.9, None, 0.9, seed=5)
    settings = torch.tensor([(0, 0, 0, 0), drawn.settings, (1.0, 1, 1.0, 0.999)], dtype=torch.float64)
    found = next_tokens(logits, settings)
    assert found[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    assert found[1] == next_tokens(logits[1:2], settings[1:2])[0]
    extremes = torch.tensor([[1.0, 3, 0.7, u] for u in (0.0, 1 - 2**-53)], dtype=torch.float64)
    assert set(next_tokens(logits[:1].expand(2, -1), extremes).tolist()) <= set(logits[0].topk(3).indices.tolist())


def test_a_seed_decides_whoever_runs_beside(model):
    prompts, options = prompts_of(), {"do_sample": True, "temperature": 1.5, "top_p": 0.95}
    few, many = ContinuousBatching(model, slots=1, chunk=16), ContinuousBatching(model, slots=5, chunk=16)
    one = [few.submit(prompt, 10, seed=i, **options) for i, prompt in enumerate(prompts)]
    two = [many.submit(prompt, 10, seed=i, **options) for i, prompt in enumerate(prompts)]
    greedy = many.submit(prompts[0], 10)
    finish(few), finish(many)
    assert [r.generated_tokens for r in one] == [r.generated_tokens for r in two]
    assert greedy.generated_tokens == alone(model, prompts[0], 10) != one[0].generated_tokens
    config = transformers.GenerationConfig(do_sample=True, top_k=40, max_new_tokens=10, num_return_sequences=2)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append({name: r.generated_tokens for name, r in dmt.generate_batch(model, prompts[:2], config).items()})
    assert found[0] == found[1] != found[2]
    assert list(found[0]) == ["req_0__child#0", "req_0", "req_1__child#0", "req_1"]
    assert found[0]["req_0"] != found[0]["req_0__child#0"]


# ---- failures -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("where", ["mlp", "store"])
def test_a_prefill_without_memory(model, layer, where, monkeypatch):
    """In any layer, before and after its cache has taken the chunk."""
    batching = ContinuousBatching(model, slots=3, chunk=16)
    requests = [batching.submit(prompt, 10) for prompt in prompts_of([20, 33, 18])]
    for _ in range(3):
        batching.step()
    bad = requests[1]
    assert 0 < bad.cached < len(bad.prompt_ids)
    original, owner = batching._prefill.run, model.model.layers[layer].mlp
    if where == "store":
        owner = batching._cache.layers[layer].store
    name = "forward" if where == "mlp" else "extend"

    def run(rows: Any) -> Any:
        with small.failing(owner, name, 1):
            return original(rows)

    with monkeypatch.context() as patch:
        patch.setattr(batching._prefill, "run", run)
        assert (bad, None) in batching.step()
    assert bad.status.name == "FAILED" and bad.error == "OutOfMemoryError: out of memory"
    again = batching.submit(bad.prompt_ids, 10)
    finish(batching)
    right(model, [requests[0], requests[2], again], 10)


def test_a_layer_that_fails_the_second_time():
    """The layer attends twice to the same tokens but caches them once; its second call fails."""
    model = differential()
    batching, (one, two) = ContinuousBatching(model, slots=2, chunk=16), prompts_of([20, 18])
    first = batching.submit(one, 10)
    while not first.generated_tokens:
        batching.step()
    second = batching.submit(two, 10)
    with small.failing(batching._cache.layers[0].stores[1], "extend", 2):  # a decoding pass takes the first calls
        assert [token is None for _, token in batching.step()] == [True, False]
    assert second.error == "OutOfMemoryError: out of memory" and first.error is None
    third = batching.submit(two, 10)
    finish(batching)
    right(model, [first, third], 10)


def test_a_slot_that_cannot_be_emptied(model):
    batching = ContinuousBatching(model, slots=1, chunk=16)
    requests = [batching.submit(prompt, 5) for prompt in prompts_of([20, 33, 18])]
    with small.failing(batching, "_empty", 2):
        finish(batching)
    assert requests[1].error == "OutOfMemoryError: out of memory" and not requests[1].generated_tokens
    right(model, [requests[0], requests[2]], 5)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_decoding_pass_without_memory(model, times, monkeypatch):
    """Affected texts are cached again from their first token; the third failure ends them."""
    batching = ContinuousBatching(model, slots=3, chunk=16)
    requests = [batching.submit(prompt, 10) for prompt in prompts_of([20, 33, 18, 9])]
    while not all(request.generated_tokens for request in requests[:3]):
        batching.step()
    original, count = batching._decode.run, [0]

    def run(rows: Any) -> Any:
        count[0] += 1
        if count[0] > times:
            return original(rows)
        with small.failing(model.model.layers[1].mlp, "forward", 1):
            return original(rows)

    monkeypatch.setattr(batching._decode, "run", run)
    said = [list(request.generated_tokens) for request in requests]
    events = batching.step()
    assert not events and batching.running == 0 and batching.waiting == 4
    assert said == [request.generated_tokens for request in requests]
    finish(batching)
    failed = [request for request in requests if request.error]
    assert all(request.error == "OutOfMemoryError: out of memory" for request in failed)
    assert bool(failed) == (times == 3) and requests[3] not in failed
    right(model, [request for request in requests if request not in failed], 10)


@pytest.mark.parametrize("which", ["_decode", "_prefill"])
def test_an_interruption(model, which):
    batching = ContinuousBatching(model, slots=2, chunk=16)
    sampled = batching.submit(prompts_of([12], 4)[0], 10, do_sample=True, seed=3)
    requests = [batching.submit(prompt, 10) for prompt in prompts_of([20, 18, 70])]
    while not requests[0].generated_tokens:
        batching.step()
    batching.cancel(requests[0])
    call = 1 if which == "_decode" else 2
    with small.failing(model.model.layers[1].mlp, "forward", call, error=KeyboardInterrupt()):
        with pytest.raises(KeyboardInterrupt):
            batching.step()
    assert batching.running == 0 and not sampled.is_finished()
    finish(batching)
    right(model, requests[1:], 10)
    other = ContinuousBatching(model, slots=1)
    same = other.submit(sampled.prompt_ids, 10, do_sample=True, seed=3)
    finish(other)
    assert sampled.generated_tokens == same.generated_tokens


def test_a_full_queue(model):
    batching = ContinuousBatching(model, slots=1, chunk=16, queue_size=2)
    requests = [batching.submit(prompt, 3) for prompt in prompts_of([4, 5])]
    with pytest.raises(queue.Full, match="queue_size=2 requests are waiting already"):
        batching.submit([3], 3)
    batching.step()
    requests.append(batching.submit([3], 3))
    assert (batching.waiting, batching.running) == (2, 1)
    assert batching.cancel(requests[1]) and not batching.cancel(requests[1])
    requests.append(batching.submit([4], 3))
    finish(batching)
    right(model, [requests[0], *requests[2:]], 3)
    assert not batching.cancel(requests[0]) and requests[0].error is None


@pytest.mark.parametrize(("given", "error", "match"), [
    ({"prompt_ids": []}, ValueError, "prompt_ids must be one or more ints"),
    ({"prompt_ids": [[3, 4]]}, ValueError, "prompt_ids must be one or more ints"),
    ({"prompt_ids": [0.5]}, ValueError, "prompt_ids must be one or more ints"),
    ({"prompt_ids": [3, 512]}, ValueError, "prompt_ids must lie between 0 and 511, got 3 to 512"),
    ({"prompt_ids": [-1]}, ValueError, "prompt_ids must lie between 0 and 511"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1"),
    ({"max_new_tokens": None}, ValueError, "max_new_tokens must be given where no eos_token_id"),
    ({"max_new_tokens": None, "eos_token_id": -1}, ValueError, "max_new_tokens must be given"),
    ({"stop": [[]]}, ValueError, "stop must be sequences of at least one token"),
    ({"temperature": 0.5, "seed": 1}, ValueError, "do_sample must be True with temperature, seed"),
    ({"do_sample": True, "temperature": 0}, ValueError, "temperature must be positive, got 0"),
    ({"do_sample": True, "temperature": float("nan")}, ValueError, "temperature must be a finite number"),
    ({"do_sample": True, "top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0.0"),
    ({"do_sample": True, "top_k": -1}, ValueError, "top_k must be at least 0"),
    ({"do_sample": 1}, TypeError, "do_sample must be")])
def test_requests_that_are_refused(model, given, error, match):
    batching = ContinuousBatching(model, slots=1)
    with pytest.raises(error, match=match):
        batching.submit(**{"prompt_ids": [3], "max_new_tokens": 4, **given})
    assert batching.waiting == 0


@pytest.mark.parametrize(("make", "match"), [
    (lambda: small.model_of("llama"), "model must have dynamic masks"),
    (lambda: small.converted("llama").train(), "model must be in evaluation mode"),
    (lambda: small.converted("llama", layers=[1]), r"slots need a model whose layers all have .* in layers \[0\]"),
    (lambda: converted("llama", policy="gate"), "capacity must be given with slots"),
    (lambda: small.model_of("doge-moe"), "mixture of experts mixes the tokens"),
    (lambda: converted("llama", window=9, config={"rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}), "rope_type='dynamic'"),
    (lambda: small.converted_from(transformers.BartConfig(**BART, is_decoder=True, is_encoder_decoder=False), 9),
     "model must take position_ids"),
], ids=["dense", "training", "layers", "gates", "experts", "rope", "positions"])
def test_models_that_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        ContinuousBatching(make())


def test_arguments_that_are_refused(model):
    for name in ("slots", "chunk", "queue_size"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            ContinuousBatching(model, **{name: 0})
    learned = small.converted_from(transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=30), 9)
    batching = ContinuousBatching(learned, slots=1)
    assert batching.submit([3] * 20, 10)
    for n in (11, None):
        with pytest.raises(ValueError, match="must make at most 30 tokens"):
            batching.submit([3] * 20, n, eos_token_id=2)
    finish(batching)


def test_settings_that_generate_batch_refuses(model):
    config = transformers.GenerationConfig
    for wrong in ({"repetition_penalty": 1.2}, {"num_beams": 2}, {"min_new_tokens": 3}, {"stop_strings": ["a"]}):
        with pytest.raises(ValueError, match=f"generation_config must leave out .*{next(iter(wrong))}"):
            dmt.generate_batch(model, [[3]], config(max_new_tokens=3, **wrong))
    with pytest.raises(ValueError, match="max_new_tokens must be given"):
        dmt.generate_batch(model, [[3]])
    assert dmt.generate_batch(model, []) == {}
    prompt, = prompts_of([7])
    found = dmt.generate_batch(model, [prompt], config(max_length=11, num_beams=1, repetition_penalty=1.0))
    assert found["req_0"].generated_tokens == alone(model, prompt, 4)
    assert isinstance(found["req_0"], transformers.generation.continuous_batching.requests.GenerationOutput)


# ---- the cache's slots ----------------------------------------------------------------------------------------------
def test_passes_to_some_slots(model):
    """A pass that a cache with slots refuses changes nothing."""
    cache, first = dmt.DynamicMaskCache(model.config, slots=3), torch.tensor([2, 0], dtype=torch.int32)
    ids, lengths = torch.tensor(prompts_of([9, 9])), torch.tensor([9, 5], dtype=torch.int32)
    named = {small.CACHE: cache}
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"takes tokens within cache\.at"):
            model(input_ids=ids, **named)
        with cache.at(first, lengths):
            with pytest.raises(ValueError, match=r"attention_mask must be None within cache\.at"):
                model(input_ids=ids, attention_mask=torch.tensor([[1] * 9, [0] * 4 + [1] * 5]), **named)
            found = model(input_ids=ids, position_ids=torch.arange(9)[None], **named).logits
        assert cache.layers[0].store.length.tolist() == [5, 0, 9]
        cache.reset(first[:1])
        assert cache.layers[0].store.length.tolist() == [5, 0, 0]
        with cache.at(None, torch.tensor([1, 0, 0], dtype=torch.int32)):
            one = model(input_ids=ids[1:, 5:6].expand(3, 1), position_ids=torch.full((3, 1), 5), **named).logits
        expected = model(input_ids=ids[1:, :6], use_cache=False).logits
        torch.testing.assert_close(torch.cat([found[1:, :5], one[:1]], 1), expected, rtol=0, atol=1e-4)
    for wrong in (lambda: dmt.DynamicMaskCache(model.config).reset(first),
                  lambda: dmt.DynamicMaskCache(model.config).at(first, lengths).__enter__()):
        with pytest.raises(ValueError, match="needs a cache made with slots="):
            wrong()
    with pytest.raises(ValueError, match="record_stops must be False with slots"):
        dmt.DynamicMaskCache(model.config, slots=2, record_stops=True)
    with pytest.raises(ValueError, match="slots must be at least 1"):
        dmt.DynamicMaskCache(model.config, slots=0)


def test_passes_as_graphs(model, monkeypatch):
    """With a small fake: a replay reads arguments at the addresses of the capture, and writes logits to the captured
    ones."""
    captures = []

    def captured(call: Any, _: Any) -> Any:
        with torch.no_grad():
            out = call()
        captures.append(call)

        @torch.no_grad()
        def replay() -> None:
            fresh = call()
            if out is not None:
                out.copy_(fresh)

        return SimpleNamespace(replay=replay), out

    monkeypatch.setattr(slot_pass, "captured", captured)
    monkeypatch.setattr(serving, "captured", captured)
    batching = ContinuousBatching(model, slots=3, chunk=16)
    assert not captures  # not on a CPU
    batching._decode = slot_pass.SlotPass(model, batching._cache, 3, 1, True)
    batching._prefill = slot_pass.SlotPass(model, batching._cache, 1, 16, True)
    requests = [batching.submit(prompt, 10) for prompt in prompts_of()]
    finish(batching)
    right(model, requests, 10)
    assert len(captures) == 2 and np.shares_memory(batching._decode._numbers, batching._decode._sent[0].numpy())
