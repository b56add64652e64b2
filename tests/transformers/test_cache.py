"""``DynamicMaskCache`` after failed calls, layers that attend twice, and steps as CUDA graphs (with a small fake)."""
import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import cupy_dma.transformers as dmt
from cupy_dma.cache import DynamicCache
from cupy_dma.transformers import DecodingStep, DynamicMaskCache
from cupy_dma.transformers.cache import DynamicMaskLayer
from cupy_dma.transformers.layers import DynamicMask, GateMask
from tests.transformers import small_models as small
from tests.transformers.small_models import logits

IDS = small.batch("plain", 3, 60)[0]["input_ids"]
FAILED = "a call has failed after it had changed some layers"


@pytest.fixture(scope="module")
def model() -> Any:
    return small.converted_from(small.config_of("llama", num_hidden_layers=3), small.WINDOW, sinks=1, recent=3)


def filled(model: Any, length: int = 30, rows: Any = slice(None)) -> DynamicMaskCache:
    cache = DynamicMaskCache(model.config)
    logits(model, IDS[rows, :length], cache)
    return cache


def contents(cache: Any) -> list[Any]:
    """Everything that the layers hold."""
    found: list[Any] = []
    for layer in cache.layers:
        found.append(layer.get_seq_length())
        for state in (store._state for store in layer.stores):
            found += [getattr(state, name).array.clone() for name in (*state.arrays, "tickets")]
    return found


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) if isinstance(x, torch.Tensor) else
                                    x == y for x, y in zip(a, b))


@contextlib.contextmanager
def failing(owner: Any, name: str, call: int) -> Any:
    """Without memory at the method's ``call``-th call."""
    with small.failing(owner, name, call), pytest.raises(torch.OutOfMemoryError):
        yield


# ---- a forward pass that fails --------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [0, 30])
@pytest.mark.parametrize("where", ["scores", "append"])
def test_a_call_that_fails_in_the_first_layer_has_changed_nothing(model, where, length):
    from cupy_dma.transformers import attention

    cache = filled(model, length) if length else DynamicMaskCache(model.config)
    expected, before = logits(model, IDS[:, length:40], copy.deepcopy(cache)), contents(cache)
    owner, name = (attention, "layer_scores") if where == "scores" else (DynamicCache, "extend")
    with failing(owner, name, 1):
        logits(model, IDS[:, length:40], cache)
    assert cache.get_seq_length() == length
    found = logits(model, IDS[:, length:40], cache)
    assert torch.equal(found, expected) and cache.get_seq_length() == 40
    assert same(before, contents(cache)) == (length == 40)


def test_a_wrong_call_has_changed_nothing(model):
    cache, other = filled(model), filled(model)
    for wrong in (torch.full((4, 1), 5), torch.full((2, 3), 5)):
        with pytest.raises(ValueError, match="key must have shape"):
            logits(model, wrong, cache)
    position = torch.tensor([[30, 31, 0, 1]]).expand(3, 4)
    with pytest.raises(NotImplementedError, match="no packed sequences"):
        with torch.no_grad():
            seen = dmt.visibility.Visibility(4, 34, 30, position.device, documents=[torch.zeros(3, 34).long()])
            model(input_ids=IDS[:, 30:34], attention_mask=seen, **{small.CACHE: cache})
    assert cache.get_seq_length() == 30 and cache.layers[0]._announced
    assert torch.equal(logits(model, IDS[:, 30:32], cache), logits(model, IDS[:, 30:32], other))


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("where", ["append", "scores", "mlp"])
@pytest.mark.parametrize("length", [0, 30])
def test_a_call_that_fails_in_the_middle_is_not_gone_on_with(model, layer, where, length):
    from cupy_dma.transformers import attention

    cache = filled(model, length) if length else DynamicMaskCache(model.config)
    owner, name, call = {"append": (DynamicCache, "extend", layer + 1),
                         "scores": (attention, "layer_scores", layer + 1),
                         "mlp": (model.model.layers[layer - 1].mlp, "forward", 1)}[where]
    with failing(owner, name, call):
        logits(model, IDS[:, length:40], cache)
    before = contents(cache)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=FAILED):
            logits(model, IDS[:, length:40], cache)
        assert length == 0 or same(contents(cache), before)
    cache.reset()
    found, expected = logits(model, IDS[:, :40], cache), logits(model, IDS[:, :40], DynamicMaskCache(model.config))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("change", "owner", "name"), [
    (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), DynamicCache, "reorder"),
    (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), DynamicCache, "select_batch"),
    (lambda cache: cache.batch_repeat_interleave(2), DynamicCache, "select_batch"),
    (lambda cache: cache.crop(-3), DynamicCache, "update")], ids=["reorder", "select", "repeat", "crop"])
def test_a_change_that_fails(model, change, owner, name, layer):
    """A failure in the first layer changes nothing; after one in a later layer, the cache refuses further tokens."""
    cache, other = (filled(model, small.WINDOW) for _ in range(2))
    before = contents(cache)
    with failing(owner, name, layer + 1):
        change(cache)
    if layer:
        with pytest.raises(RuntimeError, match=FAILED):
            logits(model, IDS[:, 30:31], cache)
        cache.reset()
        return
    assert same(contents(cache), before)
    change(cache)
    change(other)
    assert same(contents(cache), contents(other))
    step = IDS[:1, 30:31].expand(other.layers[0].store.batch, 1)
    assert torch.equal(logits(model, step, cache), logits(model, step, other))


def test_crop_asks_all_layers_first(model):
    cache = filled(model, small.WINDOW)
    cache.layers[2]._parts[0].has_padding = True
    before = contents(cache)
    with pytest.raises(RuntimeError, match="no padding"):
        cache.crop(-1)
    assert same(contents(cache), before)


# ---- what is recorded -----------------------------------------------------------------------------------------------
def append(layer: DynamicMaskLayer, n: int, generator: torch.Generator, real: torch.Tensor | None = None,
           window: int = 4) -> torch.Tensor:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    key, value = draw(2, n, 2, 8), draw(2, n, 2, 8)
    layer.update(key.transpose(1, 2), value.transpose(1, 2))
    return layer.attend(draw(2, n, 4, 8), key, value, draw(2, 2, n), DynamicMask(window), real, {})


def test_tokens_after_a_recording_end_it():
    layer, generator = DynamicMaskLayer(), torch.Generator().manual_seed(0)
    append(layer, 10, generator)
    layer.activate_past_recording()
    append(layer, 3, generator)
    layer.record_past = False  # as generate does at its end
    append(layer, 4, generator)
    assert not layer.is_croppable
    with pytest.raises(RuntimeError, match="2 of 17 tokens cannot be removed"):
        layer.crop(-2)
    assert layer.get_seq_length() == 17 and layer.store.length.tolist() == [17, 17]
    layer.activate_past_recording()
    append(layer, 2, generator)
    layer.crop(-2)
    assert layer.get_seq_length() == 17 and layer.store.length.tolist() == [17, 17]


@pytest.mark.parametrize("how", [DynamicMask((9, 5), recent=1), GateMask(5, -1.0, 1, 1.0, capacity=(7, 2)),
                                 GateMask(5, -1.0, 1, 1.0)], ids=["windows", "capacities", "no capacity"])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_layer_whose_heads_have_rows_of_their_own(how, recorded):
    """Cropping, repeating, reordering and selecting rows leave the state of a cache that never had the removed
    tokens."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 90, heads, 8, generator=generator) for heads in (4, 2, 2))
    scores = torch.randn(2, 2, 90, generator=generator)
    scores[:, 1] -= 1

    def append(layer, begin, end, rows=slice(None)):
        part = slice(begin, end)
        layer.update(key[rows, part].transpose(1, 2), value[rows, part].transpose(1, 2))
        return layer.attend(query[rows, part], key[rows, part], value[rows, part], scores[rows, :, part], how, None, {})

    layer, other = DynamicMaskLayer(), DynamicMaskLayer()
    first = 40 if recorded else 2
    append(layer, 0, first)
    if recorded:
        layer.activate_past_recording()
    append(layer, first, first + 3)
    layer.crop(-2)
    append(other, 0, first + 1)
    layer.record_past = False
    begin, rows = first + 1, [0, 1]
    for end, change, argument in ((60, "batch_repeat_interleave", 2), (61, "reorder_cache", torch.tensor([3, 0, 1, 0])),
                                  (80, "batch_select_indices", torch.tensor([1, 2])), (90, "reset", None)):
        torch.testing.assert_close(append(layer, begin, end, rows), append(other, begin, end, rows))
        for each in (layer, other):
            getattr(each, change)(*([] if argument is None else [argument]))
        rows = [0, 0, 1, 1] if end == 60 else rows if argument is None else [rows[i] for i in argument]
        begin = end
    assert layer.store._state.segments is not None and layer.store.length.tolist() == [0, 0]


def test_padding_of_an_earlier_call_forbids_a_crop():
    """A row with padding holds fewer tokens than the layer has counted, also after later calls without padding."""
    layer, generator = DynamicMaskLayer(), torch.Generator().manual_seed(0)
    append(layer, 3, generator, real=torch.tensor([[True, True, True], [True, True, False]]), window=16)
    append(layer, 2, generator)
    assert not layer.is_croppable
    with pytest.raises(RuntimeError, match="no padding"):
        layer.crop(-3)
    assert layer.get_seq_length() == 5 and layer.store.length.tolist() == [5, 4]
    layer.reset()
    append(layer, 5, generator)
    layer.crop(-3)
    assert layer.store.length.tolist() == [2, 2]


@pytest.mark.parametrize("rows", [[2, 0, 0], [1], [0, 1, 2]], ids=["reorder", "select", "unchanged"])
@pytest.mark.parametrize("removed", [0, 1, 2, 4, 5])
def test_rows_change_while_the_past_is_recorded(model, rows, removed):
    cache = filled(model)
    cache.activate_past_recording()
    logits(model, IDS[:, 30:33], cache)
    logits(model, IDS[:, 33:35], cache)
    if len(rows) == 1:
        cache.batch_select_indices(torch.tensor(rows))
    elif rows != [0, 1, 2]:
        cache.reorder_cache(torch.tensor(rows))
    assert cache.layers[0].is_croppable
    cache.crop(-removed)
    other = filled(model, rows=rows)
    for place in range(30, 35 - removed):
        logits(model, IDS[rows, place:place + 1], other)
    found, expected = (logits(model, IDS[rows, 40:41], each) for each in (cache, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert cache.get_seq_length() == 36 - removed


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("removed", [0, 1])
def test_a_draft_is_not_copied(model, length, removed, monkeypatch):
    """The tokens of a call wait outside the cache, so tokens that ``crop`` removes never enter it."""
    cache, other = filled(model), filled(model)
    cache.activate_past_recording()
    with monkeypatch.context() as patch:
        patch.setattr(DynamicCache, "clone", None)
        drafted = logits(model, IDS[:, 30:30 + length], cache)
        cache.crop(-removed)
    end = 30 + length - removed
    if end > 30:
        torch.testing.assert_close(drafted[:, :end - 30], logits(model, IDS[:, 30:end], other), rtol=0, atol=1e-5)
    torch.testing.assert_close(contents(cache), contents(other), rtol=0, atol=1e-5)


@pytest.mark.parametrize("what", ["store", "copy", "reorder", "select", "stops", "call", "end", "reset"])
def test_a_draft_that_is_looked_at(model, what):
    """Once read, the tokens of a draft are in the cache, and can still be removed."""
    cache, other = (DynamicMaskCache(model.config, record_stops=True) for _ in range(2))
    for each in (cache, other):
        logits(model, IDS[:, :30], each)
    cache.activate_past_recording()
    for each in (cache, other):
        logits(model, IDS[:, 30:34], each)
    look = {"store": lambda each: [store.length.tolist() for layer in each.layers for store in layer.stores],
            "copy": lambda each: contents(copy.deepcopy(each)), "stops": lambda each: each.stops(),
            "reorder": lambda each: each.reorder_cache(torch.tensor([2, 0, 0])),
            "select": lambda each: each.batch_select_indices(torch.tensor([2, 0, 1])),
            "call": lambda each: [logits(model, IDS[:, 34:36], each)], "reset": lambda each: each.reset(),
            "end": lambda each: [setattr(layer, "record_past", False) for layer in each.layers] and None}[what]
    torch.testing.assert_close(look(cache) or [], look(other) or [], rtol=0, atol=1e-5)
    length = cache.get_seq_length()
    assert length == other.get_seq_length() == {"call": 36, "reset": 0}.get(what, 34)
    found, expected = (logits(model, IDS[:, 40:43], each) for each in (cache, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if what not in ("end", "reset"):
        cache.crop(-(length - 31) - 3)  # removes the last call, and all of the draft but one token
        assert {length for layer in cache.layers for store in layer.stores for length in store.length.tolist()} == {31}


def test_a_draft_whose_crop_fails(model):
    cache, other = filled(model), filled(model)
    cache.activate_past_recording()
    logits(model, IDS[:, 30:34], cache)
    with failing(DynamicCache, "commit", 1):
        cache.crop(-2)
    cache.crop(-2)
    logits(model, IDS[:, 30:32], other)
    torch.testing.assert_close(contents(cache), contents(other), rtol=0, atol=1e-5)


# ---- layers that attend twice ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def differential() -> Any:
    config = transformers.DiffLlamaConfig(**{**small.SIZES, "eos_token_id": None})
    return small.converted_from(config, 8, sinks=1, recent=2)


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_layer_that_attends_twice(differential, search):
    """DiffLlama attends with one half of the values, then with the other, over the same keys. Each call has its own
    selection."""
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **search}
    found = differential.generate(IDS[:, :20], **how, return_dict_in_generate=True)
    assert torch.equal(found.sequences, differential.generate(IDS[:, :20], use_cache=False, **how))
    layer = getattr(found, small.CACHE).layers[0]
    assert [store.length.tolist() for store in layer.stores] == [[24] * len(layer.store.length)] * 2


def test_a_layer_that_attends_twice_is_cropped(differential):
    cache = DynamicMaskCache(differential.config)
    logits(differential, IDS[:, :20], cache)
    cache.activate_past_recording()
    logits(differential, IDS[:, 40:44], cache)
    cache.crop(-4)
    other = DynamicMaskCache(differential.config)
    logits(differential, IDS[:, :20], other)
    torch.testing.assert_close(logits(differential, IDS[:, 20:21], cache), logits(differential, IDS[:, 20:21], other),
                               rtol=0, atol=1e-5)


@pytest.mark.parametrize("call", [2, 3, 4])
def test_a_layer_that_fails_the_second_time(differential, call):
    cache = DynamicMaskCache(differential.config)
    logits(differential, IDS[:, :20], cache)
    with failing(DynamicCache, "extend", call):
        logits(differential, IDS[:, 20:21], cache)
    with pytest.raises(RuntimeError, match=FAILED):
        logits(differential, IDS[:, 20:21], cache)


# ---- a step as a CUDA graph -----------------------------------------------------------------------------------------
class FakeCuda:
    """CUDA graphs on a CPU: captures the current call. A replay repeats it with the layers' old counters, because
    kernels do not know those."""

    def __init__(self, model: Any, monkeypatch: Any):
        self.model, self.training, self.device, self.captures = model, False, SimpleNamespace(type="cuda"), 0
        self.forward, self.graph, self.fail_at, self.calls = model.forward, None, None, 0
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, fake in {"Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": self.make_graph,
                           "stream": lambda s: contextlib.nullcontext(), "graph": self.capture,
                           "device": lambda d: contextlib.nullcontext()}.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def make_graph(self) -> Any:
        graph = SimpleNamespace(call=None, out=None, layers=None)

        @torch.no_grad()
        def replay() -> None:
            counts = [layer.get_seq_length() for layer in graph.call[small.CACHE].layers]
            graph.call["position_ids"] = graph.call[small.CACHE].layers[0].store.length[:, None]
            graph.out.copy_(self.model(**graph.call).logits)
            for layer, count in zip(graph.call[small.CACHE].layers, counts):
                layer.advance(count - layer.get_seq_length())

        graph.replay = replay
        return graph

    @contextlib.contextmanager
    def capture(self, graph: Any, capture_error_mode: str) -> Any:
        self.graph, self.captures = graph, self.captures + 1
        try:
            yield
        finally:
            self.graph = None

    def __call__(self, **given: Any) -> Any:
        self.calls += 1
        if self.calls == self.fail_at:
            middle = self.model.model.layers[1].mlp
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(middle, "forward", lambda x: 1 / 0)
                return self.model(**given)
        found = self.model(**given)
        if self.graph is not None:
            self.graph.call, self.graph.out = given, found.logits
        return found


def steps(model: Any, step: Any, other: Any, begin: int, n: int = 2, rows: Any = slice(None)) -> None:
    """Decode ``n`` tokens by ``step``, and the same by calls on the cache ``other``."""
    for place in range(begin, begin + n):
        ids = IDS[rows, place:place + 1]
        expected = logits(model, ids, other, position_ids=other.layers[0].store.length[:, None])
        torch.testing.assert_close(step(ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("change", "rows", "captures"), [
    (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0], 2),
    (lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0])), [1, 1, 0], 2),
    (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], 2),
    (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0], 1),
    (lambda cache: cache.reset(), [0, 1, 2], 1)], ids=["select", "other rows", "repeat", "reorder", "reset"])
def test_a_step_follows_the_rows_of_its_cache(model, change, rows, captures, monkeypatch):
    cache, other = filled(model), filled(model)
    fake = FakeCuda(model, monkeypatch)
    step = DecodingStep(fake, cache)
    steps(model, step, other, 30)
    change(cache)
    change(other)
    if len(rows) != 3:
        with pytest.raises(ValueError, match=rf"ids must have shape \({len(rows)}, 1\), got \(3, 1\)"):
            step(IDS[:, 30:31])
    steps(model, step, other, 40, rows=rows)
    steps(model, step, other, 42, rows=rows)
    assert fake.captures == captures
    assert same(contents(cache), contents(other))


def test_a_step_after_crop(model, monkeypatch):
    cache, other = filled(model, 8), filled(model, 6)
    fake = FakeCuda(model, monkeypatch)
    step = DecodingStep(fake, cache)
    cache.crop(-2)
    steps(model, step, other, 6)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="must not record its past"):
        step(IDS[:, 8:9])
    logits(model, IDS[:, 20:25], cache)
    cache.crop(-5)
    for layer in cache.layers:
        layer.record_past = False
    steps(model, step, other, 8)
    assert fake.captures == 1 and cache.get_seq_length() == 10


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_capture_that_fails_has_changed_nothing(model, call, monkeypatch):
    """Whether it fails in a warm-up pass or in the capture, even after the cache's rows have changed."""
    cache, other = filled(model), filled(model)
    fake, before = FakeCuda(model, monkeypatch), contents(cache)
    fake.fail_at = call
    with pytest.raises(ZeroDivisionError):
        DecodingStep(fake, cache)
    assert same(contents(cache), before)
    step = DecodingStep(fake, cache)
    assert same(contents(cache), before)
    for each in (cache, other):
        each.batch_select_indices(torch.tensor([1, 2]))
    before, fake.fail_at = contents(cache), fake.calls + call
    with pytest.raises(ZeroDivisionError):
        step(IDS[:2, 30:31])
    assert same(contents(cache), before) and not any(layer._announced for layer in cache.layers)
    steps(model, step, other, 30, rows=[1, 2])


def test_a_step_on_a_cache_that_a_call_has_left_broken(model, monkeypatch):
    cache = filled(model)
    step = DecodingStep(FakeCuda(model, monkeypatch), cache)
    with failing(DynamicCache, "extend", 2):
        logits(model, IDS[:, 30:31], cache)
    with pytest.raises(RuntimeError, match=FAILED):
        step(IDS[:, 30:31])
