"""Models of transformers on a GPU: against eager attention, generation, and a step as a CUDA graph."""
import gc
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import cupy_dma.transformers as dmt  # noqa: E402
from cupy_dma.transformers import DecodingStep, DynamicMaskCache  # noqa: E402
from tests.transformers import small_models as small  # noqa: E402
from tests.transformers.test_serving import converted, prompts_of  # noqa: E402

pytestmark = pytest.mark.gpu
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
NAMES = ("doge", "llama", "qwen3", "gemma2", "gpt-oss")


def model_of(name, kind=torch.bfloat16, **options):
    return small.model_of(name, **{**WIDE, **options}).to("cuda", kind)


def on_gpu(given):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def results(model, given, real):
    model.zero_grad()
    logits = model(**given).logits[real].float()
    torch.nn.functional.cross_entropy(logits, given["input_ids"][real].roll(-1)).backward()
    return {"logits": logits.detach(), **{name: p.grad.float() for name, p in model.named_parameters()
                                          if p.grad is not None}}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["plain", "left", "packed"])
def test_forward_and_backward(name, how):
    """bfloat16 against the float32 model on the CPU: the norm of the error is at most twice eager's (gradients: three
    times). Single weights may differ more, because roundings change which keys are kept. Errors are summed over three
    batches, and eager's is the larger of GPU and CPU: the gradient of a router's bias has only four numbers, which can
    be close by chance.
    """
    options = {} if name != "doge" else {"keep_window_size": 40}
    ours = model_of(name, **options)
    plain, again = small.twin(ours, "eager"), small.twin(ours, "eager").cpu()
    truth = small.twin(ours, "eager", torch.float32).cpu()
    squares = {}
    for seed in range(3):
        given, real = small.batch(how, length=150, seed=seed)
        there = on_gpu(given), real.cuda()
        with small.ties_broken_alike(plain, again, truth):
            expected, *eager = results(truth, given, real), results(plain, *there), results(again, given, real)
        found = [results(ours, *there), *eager]
        for part, x in expected.items():
            one = [x.norm()**2, *((y[part].cpu() - x).norm()**2 for y in found)]
            squares[part] = squares.get(part, 0) + torch.stack(one)
    wrong = []
    for part, found in squares.items():
        size, a, *eager = found.sqrt().tolist()
        if a > (2 if part == "logits" else 3) * max(eager) + 2**-8 * size:
            wrong.append(f"{part}: {a:.3g}, eager {max(eager):.3g}, of {size:.3g}")
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["doge", "llama"])
@pytest.mark.parametrize("how", ["plain", "left"])
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_the_same_tokens_as_with_a_full_cache(name, how, search):
    if name == "doge":
        model = model_of(name, torch.float32)
    else:
        model = small.converted(name, sinks=1, recent=3).to("cuda")
    given, real = small.batch(how, 3, 60)
    prompt = {"input_ids": given["input_ids"].cuda(), "attention_mask": real.long().cuda()}
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **search}
    found = model.generate(**prompt, **options)
    full = {small.CACHE: transformers.DynamicCache(config=model.config)}
    assert torch.equal(found, model.generate(**prompt, **options, **full))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_step_as_a_cuda_graph(kind):
    model = model_of("doge", kind)
    given, real = small.batch("left", 3, 60)
    ids, mask = given["input_ids"].cuda(), real.long().cuda()
    options = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(input_ids=ids, attention_mask=mask, **options)
    cache = DynamicMaskCache(model.config)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, **{small.CACHE: cache}).logits
    step = DecodingStep(model, cache)
    assert cache.get_seq_length() == 60
    tokens = [logits[:, -1:].argmax(-1)]
    for _ in range(49):
        tokens.append(step(tokens[-1])[:, -1:].argmax(-1))
    assert cache.get_seq_length() == 109
    assert torch.equal(torch.cat(tokens, 1), expected[:, 60:])
    with pytest.raises(ValueError, match="ids must have shape"):
        step(tokens[0][:1])


def prompt(model, length=60):
    cache = DynamicMaskCache(model.config)
    ids = small.batch("plain", 3, 80)[0]["input_ids"].cuda()
    with torch.no_grad():
        model(input_ids=ids[:, :length], **{small.CACHE: cache})
    return ids, cache


def one_call(model, ids, cache):
    with torch.no_grad():
        return model(input_ids=ids, position_ids=cache.layers[0].store.length[:, None], **{small.CACHE: cache}).logits


@pytest.mark.parametrize(("change", "rows"), [
    (lambda cache: cache.batch_select_indices(torch.tensor([2, 0], device="cuda")), [2, 0]),
    (lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0], device="cuda")), [1, 1, 0]),
    (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0], device="cuda")), [2, 0, 0]),
    (lambda cache: cache.reset(), [0, 1, 2])], ids=["select", "other rows", "repeat", "reorder", "reset"])
def test_a_step_follows_the_rows_of_its_cache(change, rows):
    model = model_of("doge", torch.float32)
    (ids, cache), (_, other) = prompt(model), prompt(model)
    step = DecodingStep(model, cache)
    torch.testing.assert_close(step(ids[:, 60:61]), one_call(model, ids[:, 60:61], other), rtol=0, atol=1e-4)
    for each in (cache, other):
        change(each)
    stale = [torch.ones(1 << k, device="cuda") for k in range(8, 22)]  # overwrite freed memory
    for place in range(61, 65):
        token = ids[rows, place:place + 1]
        torch.testing.assert_close(step(token), one_call(model, token, other), rtol=0, atol=1e-4)
    for a, b in zip(cache.layers, other.layers):
        assert torch.equal(a.store.length, b.store.length) and a.get_seq_length() == b.get_seq_length()
        assert torch.equal(a.store.kept().positions, b.store.kept().positions)
    assert all(bool((x == 1).all()) for x in stale)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_capture_that_fails_has_changed_nothing(call):
    """Whether it fails in a warm-up pass or in the capture."""
    model = model_of("doge", torch.float32)
    (ids, cache), (_, other) = prompt(model), prompt(model)
    calls = []

    def fail(*_):
        calls.append(None)
        if len(calls) == call:
            raise torch.OutOfMemoryError("out of memory")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        DecodingStep(model, cache)
    hook.remove()
    for a, b in zip(cache.layers, other.layers):
        assert a.get_seq_length() == b.get_seq_length() == 60
        for name, x in a.store.state_dict().items():
            y = b.store.state_dict()[name]
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name
    step = DecodingStep(model, cache)
    for place in range(60, 64):
        token = ids[:, place:place + 1]
        torch.testing.assert_close(step(token), one_call(model, token, other), rtol=0, atol=1e-4)


SERVED = {"doge": lambda: model_of("doge", torch.float32, eos_token_id=None),
          "llama": lambda: converted("llama", window=16, sinks=1, recent=3).cuda(),
          "gates": lambda: converted("llama", policy="gate", delay=6, capacity=9).cuda()}


@pytest.mark.parametrize("name", SERVED)
def test_continuous_batching(name):
    """The same tokens with and without graphs, among many requests, alone on the same slots, and from ``generate``."""
    model, prompts, found = SERVED[name](), prompts_of((5, 1, 40, 17, 90, 64)), []
    for graphs in (True, False):
        batching = dmt.ContinuousBatching(model, slots=3, chunk=16, cuda_graphs=graphs)
        requests = [batching.submit(prompt, 20) for prompt in prompts]
        requests.append(batching.submit(prompts[2], 20, do_sample=True, temperature=1.3, top_p=0.9, seed=4))
        batching.step()
        memory = torch.cuda.memory_allocated()
        for _ in batching:
            assert not graphs or torch.cuda.memory_allocated() <= memory + 2**20
        found.append([request.generated_tokens for request in requests])
        for request in requests[:-1]:
            again = batching.submit(request.prompt_ids, 20)
            assert [token for _, token in batching] == again.generated_tokens == request.generated_tokens
    assert found[0] == found[1]
    for prompt, said in zip(prompts, found[0]):
        ids = torch.tensor([prompt], device="cuda")
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
                              pad_token_id=0)
        assert text[0, len(prompt):].tolist() == said


def test_a_prefill_without_memory():
    """Without graphs, since there a pass can fail halfway."""
    model, prompts = SERVED["llama"](), prompts_of((27, 30, 28))
    batching = dmt.ContinuousBatching(model, slots=2, chunk=16, cuda_graphs=False)
    requests, calls = [batching.submit(prompt, 12) for prompt in prompts], []

    def fail(_, given):
        if given[0].shape[1] == 16:
            calls.append(None)
            if len(calls) == 4:  # the first two requests take two chunks each
                raise torch.OutOfMemoryError("out of memory")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    failed = [request for request, token in batching if token is None]
    hook.remove()
    assert failed == [requests[1]] and requests[1].error == "OutOfMemoryError: out of memory"
    other = dmt.ContinuousBatching(model, slots=2, chunk=16)
    for each, request in ((other, requests[0]), (batching, requests[1]), (other, requests[2])):
        again = each.submit(request.prompt_ids, 12)
        assert [token for _, token in each] == again.generated_tokens
        assert len(again.generated_tokens) == 12 and request.generated_tokens in ([], again.generated_tokens)


@pytest.mark.parametrize("peer", ["cupy_dma", "full"])
def test_the_benchmark_of_serving(peer):
    """Its own checks pass: the same tokens alone, constant memory."""
    from benchmarks.routines import serve

    dmt.register()
    args = SimpleNamespace(size="tiny", requests=8, slots=3, chunk=32, window=24, seconds=100, seed=0)
    row = serve.ours(args, peer, serve.texts(args))
    assert row["ok"] and row["ended"] == 8 and row["tokens"] == row["said"][-1][1] > 8


def test_garbage_does_not_end_a_capture():
    """The collector would free a graph in a reference cycle and so break the capture, which must prevent this."""
    gc.collect()
    model, left = model_of("doge"), [torch.cuda.CUDAGraph()]
    with torch.cuda.graph(left[0]):
        torch.zeros(1, device="cuda")

    def leave_garbage(*_):
        if torch.cuda.is_current_stream_capturing() and left:
            round_about = [left.pop()]
            round_about.append(round_about)
            del round_about
            assert len([[] for _ in range(100_000)]) > gc.get_threshold()[0]  # runs the collector unless it is disabled

    model.register_forward_pre_hook(leave_garbage)
    cache = DynamicMaskCache(model.config)
    with torch.no_grad():
        logits = model(torch.randint(3, small.VOCABULARY, (1, 60), device="cuda"), **{small.CACHE: cache}).logits
        step = DecodingStep(model, cache)
    assert not left and step(logits[:, -1:].argmax(-1)).isfinite().all()


@pytest.mark.parametrize("how", ["plain", "left"])
def test_compiled(how):
    model = model_of("doge", torch.float32)
    given, real = small.batch(how)
    given, real = {**on_gpu(given), "use_cache": False}, real.cuda()
    expected = model(**given).logits[real]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model)(**given).logits[real], expected, rtol=0, atol=2e-2)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["doge", "llama"])
def test_memory_is_linear(name):
    """A forward and backward pass of 16384 tokens; one float32 mask of a head takes 1 GiB."""
    n = 16384
    model = model_of(name, max_position_embeddings=n)
    ids = torch.randint(3, small.VOCABULARY, (1, n), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29
