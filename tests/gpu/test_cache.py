"""The decode cache on a GPU: what a service relies on. tests/unit/test_cache.py checks every option, on a GPU with CuPy
and torch too."""
import bisect
import contextlib
import functools
import gc
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import Device, library_named
from tests.gpu.gate import held
from tests.oracle import reference
from tests.oracle.cache_cases import History, draw_scores, packed
from tests.project.pages import run_page

pytestmark = pytest.mark.gpu
GPU = Device("cuda", 0)
PIECES = pytest.mark.parametrize("length", [1, 4, 40])


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


def to(name):
    library = library_named(name)
    return lambda array: library.from_numpy(np.ascontiguousarray(array), GPU)


def history_of(piece, **options):
    return History(**{"length": 6 * piece, "window": 24, "head_dim": 64, "dtype": "bfloat16", **options})


def same(torch, cache, other):
    return all(torch.equal(a, b) for a, b in zip(cache.kept(), other.kept()))


# ---- graphs ----
@pytest.mark.feature("cuda forward", "DynamicCache", "CUDA graphs")
@PIECES
@pytest.mark.parametrize(("ragged", "storage"), [(False, None), (True, None), (False, "fp8"), (True, "int8")])
@pytest.mark.usefixtures("uncollected")
def test_torch_graph_replay_equals_eager(torch, length, ragged, storage):
    """One graph serves every step, because it reads counters, slots and lengths from device memory."""
    history = history_of(length, sinks=2, recent=3, batch=3, options={"storage": storage})
    move, rng = to("torch"), np.random.default_rng(0)
    cache, eager = history.cache(move), history.cache(move)
    static = history.tokens(0, length, move)
    counts = move(np.full(3, length)) if ragged else None
    out = torch.empty_like(static[0])
    lse = torch.empty((3, history.heads, length), device="cuda")

    def extend(of, tokens, lengths, **more):
        return of.extend(*tokens, lengths=lengths, return_lse=True, **more)

    extend(cache, static, counts, out=(out, lse))  # compiles
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        extend(cache, static, counts, out=(out, lse))
    cache.reset()  # a capture runs nothing, so start from an empty cache
    for begin in range(0, history.length, length):
        tokens = history.tokens(begin, begin + length, move)
        for target, fresh in zip(static, tokens):
            target.copy_(fresh)
        if ragged:
            counts.copy_(move(rng.integers(0, length + 1, 3)))
        graph.replay()
        expected, expected_lse = extend(eager, tokens, counts)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert torch.equal(cache.length, eager.length) and same(torch, cache, eager)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.usefixtures("uncollected")
def test_the_first_step_is_captured_by_torch(torch, length):
    """The cache is right in eager calls before the replay, and in the replay, whatever the graph's memory held
    before."""
    history = history_of(length, length=8 * length, window=2048, batch=4, kv_heads=4, heads=8)
    move = to("torch")
    expected = [history.cache(move)]
    for begin in range(0, history.length, length):
        expected.append(expected[0].extend(*history.tokens(begin, begin + length, move)))  # compiles
    cache, static = history.cache(move), history.tokens(0, length, move)
    out, graph, dirty = torch.empty_like(static[0]), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(dirty):
        garbage = [torch.full((1 << k,), 0x7F7F7F7F, dtype=torch.int32, device="cuda") for k in range(4, 22)]
    dirty.replay()
    torch.cuda.synchronize()
    del garbage
    with torch.cuda.graph(graph, pool=dirty.pool()):
        cache.extend(*static, out=out)
    for i in range(8):
        tokens = history.tokens(i * length, (i + 1) * length, move)
        if i < 3 or i == 5:
            found = cache.extend(*tokens)
        else:
            for target, fresh in zip(static, tokens):
                target.copy_(fresh)
            graph.replay()
            found = out
        assert torch.equal(found, expected[i + 1]), i
    assert torch.equal(cache.length, expected[0].length) and same(torch, cache, expected[0])


@pytest.mark.feature("cuda forward", "DynamicCache", "CUDA graphs")
@pytest.mark.usefixtures("uncollected")
def test_the_first_step_is_captured_by_cupy():
    import cupy

    history, move = history_of(1, length=8, window=2048, batch=4, kv_heads=4, heads=8), to("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        eager, cache = history.cache(move), history.cache(move)
        expected = [eager.extend(*history.tokens(p, p + 1, move)) for p in range(8)]  # compiles
        static = history.tokens(0, 1, move)
        out = cupy.empty_like(static[0])
        stream.begin_capture()
        cache.extend(*static, out=out)
        graph = stream.end_capture()
        for p in range(8):
            tokens = history.tokens(p, p + 1, move)
            if p < 3 or p == 5:
                found = cache.extend(*tokens)
            else:
                for target, fresh in zip(static, tokens):
                    target[...] = fresh
                for k in range(4, 22):  # overwrite what the capture gave back to the pool
                    cupy.full((1 << k,), 0x7F7F7F7F, cupy.int32)
                graph.launch(stream)
                found = out
            assert cupy.array_equal(found.view(np.int16), expected[p].view(np.int16)), p
        stream.synchronize()
        history.check_kept(cache)


@pytest.mark.feature("cuda forward", "DynamicCache", "slots, attend, commit")
@PIECES
@pytest.mark.parametrize(("window", "storage"), [(24, None), ((24, 9), None), (24, "fp8"), ((24, 9), "int8")])
@pytest.mark.usefixtures("uncollected")
def test_a_graph_serves_any_slots(torch, length, window, storage):
    """Requests join and leave between replays of one graph, which also resets a slot and attends before it appends."""
    history = history_of(length, window=window, sinks=2, recent=3, batch=4, options={"storage": storage})
    move, rng = to("torch"), np.random.default_rng(0)
    cache, eager = history.cache(move), history.cache(move)
    static = [x[:3].clone() for x in history.tokens(0, length, move)]
    slots, left, counts, accepted = (move(np.full(n, value)) for n, value in ((3, -1), (1, -1), (3, 0), (3, 0)))

    def round_of(of):
        of.reset(left)
        found = of.extend(*static, lengths=counts, slots=slots)
        drafted = of.attend(*static, slots=slots, return_lse=True)
        of.commit(accepted)
        return found, *drafted

    round_of(cache)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = round_of(cache)
    for begin in range(0, history.length, length):
        numbers = rng.permutation(4)
        for target, fresh in ((slots, np.where(rng.random(3) < 0.2, -1, numbers[:3])), (left, numbers[3:]),
                              (counts, rng.integers(0, length + 1, 3)), (accepted, rng.integers(0, length + 1, 3))):
            target.copy_(move(fresh))
        for target, fresh in zip(static, history.tokens(begin, begin + length, move)):
            target.copy_(fresh[:3])
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, round_of(eager)))
        assert torch.equal(cache.length, eager.length) and same(torch, cache, eager)
    assert cache.length.max() > 0


@pytest.mark.usefixtures("uncollected")
def test_commit_after_each_replay_of_an_attend(torch):
    history, move, rng = history_of(4, batch=3), to("torch"), np.random.default_rng(0)
    cache, eager, static = history.cache(move), history.cache(move), history.tokens(0, 4, move)
    cache.attend(*static)  # compiles
    cache.attend(*history.tokens(0, 3, move))  # a call of another shape releases the arrays of the first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.attend(*static)
    for begin in range(0, history.length, 4):
        tokens, n = history.tokens(begin, begin + 4, move), move(rng.integers(0, 5, 3))
        for target, fresh in zip(static, tokens):
            target.copy_(fresh)
        graph.replay()
        cache.commit(n)
        eager.extend(*tokens, lengths=n)
        assert torch.equal(cache.length, eager.length) and same(torch, cache, eager)


# ---- no synchronization, constant memory ----
def every_call(cache, tokens, rows, bounds, counts, order):
    """All calls of a decode loop, on device arrays. Call them one after the other: a stream queues about a thousand
    kernels, and then blocks until the first has finished."""
    return [lambda: cache.extend(*tokens), lambda: cache.extend(*tokens, lengths=counts),
            lambda: cache.extend(*rows, cu_seqlens=bounds), lambda: cache.update(*tokens[1:]),
            lambda: cache.reorder(order), lambda: cache.kept().positions, lambda: cache.positions,
            lambda: cache.length, lambda: cache.select_batch(order).length, lambda: cache.clone().length,
            lambda: cache.state_dict()["lengths"], lambda: cache.extend(*tokens, slots=order),
            lambda: cache.attend(*rows, cu_seqlens=bounds, slots=order), lambda: cache.commit(counts),
            lambda: cache.attend(*tokens), lambda: cache.commit(1), lambda: cache.reset(order[:1]),
            lambda: cache.length]


def results_of(calls, around=contextlib.nullcontext):
    """The results of the calls, each made inside its own context."""
    results = []
    for call in calls:
        with around():
            results.append(call())
    silent = [3, 4, 13, 15, 16]  # update, reorder, commit and reset return nothing
    assert [i for i, x in enumerate(results) if x is None] == silent
    return [x for x in results if x is not None]


def decode_arguments(history, length, move):
    tokens = history.tokens(0, length)
    rows, bounds = packed(tokens, [length, length])
    return ([move(x) for x in tokens], [move(x) for x in rows], move(bounds), move(np.array([length, 0])),
            move(np.array([1, 0])))


@PIECES
def test_torch_calls_do_not_wait(torch, length):
    history, move = history_of(length), to("torch")
    arguments = decode_arguments(history, length, move)
    results_of(every_call(history.cache(move), *arguments))  # compiles, and looks at the device once
    cache, stream = history.cache(move), torch.cuda.Stream()
    expected = results_of(every_call(history.cache(move), *arguments))

    @contextlib.contextmanager
    def alone():
        with held(stream.cuda_stream):
            yield
            assert torch.cuda.default_stream().query(), "work was put on the default stream"

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            results = results_of(every_call(cache, *arguments), alone)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(results, expected))


@PIECES
def test_cupy_calls_do_not_wait(length):
    import cupy

    history, move = history_of(length), to("cupy")
    arguments = decode_arguments(history, length, move)
    cache = history.cache(move)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        results_of(every_call(history.cache(move), *arguments))  # compiles
        expected = results_of(every_call(history.cache(move), *arguments))
        # Reserve memory in the stream's pool: allocating from the driver takes seconds on a busy GPU.
        cupy.cuda.alloc(64 << 20)
        gc.collect()  # unload modules and graphs of earlier tests now, since unloading waits for the GPU
        stream.synchronize()
        results = results_of(every_call(cache, *arguments), functools.partial(held, stream.ptr))
    for a, b in zip(results, expected):
        assert cupy.asnumpy(a).tobytes() == cupy.asnumpy(b).tobytes()


def test_a_step_allocates_nothing(torch):
    history, move = history_of(1), to("torch")
    cache, tokens = history.cache(move), history.tokens(0, 1, to("torch"))
    out = torch.empty_like(tokens[0])
    cache.extend(*tokens, out=out)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(50):
        cache.extend(*tokens, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

    import cupy

    class Counter(cupy.cuda.MemoryHook):
        name, count = "counter", 0

        def malloc_preprocess(self, **facts):
            self.count += 1

    cache, tokens = history.cache(to("cupy")), history.tokens(0, 1, to("cupy"))
    out = cupy.empty_like(tokens[0])
    cache.extend(*tokens, out=out)
    with Counter() as counter:
        for _ in range(50):
            cache.extend(*tokens, out=out)
    assert counter.count == 0


def test_memory_stays_the_same(torch):
    history, move = history_of(1, window=100, length=1), to("torch")
    cache, tokens = history.cache(move), [x.repeat(1, 1 if x.ndim == 3 else 64, *[1] * (x.ndim - 2))
                                          for x in history.tokens(0, 1, move)]
    tokens[3] = tokens[3].repeat(1, 1, 64).contiguous()

    def use():
        cache.extend(*tokens)
        cache.extend(*(x[:, :1].contiguous() if x.ndim == 4 else x[:, :, :1].contiguous() for x in tokens))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    use()
    before = use()
    assert [use() for _ in range(50)] == [before] * 50
    assert cache.length.tolist() == [52 * 65] * 2


# ---- unbounded length ----
@pytest.mark.feature("cuda forward", "DynamicCache", "10^4 steps")
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (4, 60)])
def test_the_kept_set_does_not_drift_in_100000_steps(torch, sinks, recent):
    n, w = 100_000, 100
    scores = draw_scores("ties", (1, 2, n), np.random.default_rng(0))
    row = torch.ones((1, 1, 2, 8), device="cuda", dtype=torch.float16)
    cache = dma.DynamicCache(1, 2, w, 8, dtype="float16", sinks=sinks, recent=recent, like=row)
    given, best = torch.from_numpy(scores).cuda(), [[], []]
    for p in range(n):
        cache.update(row, row, given[:, :, p:p + 1])
        for head, kept in enumerate(best):
            bisect.insort(kept, (float(scores[0, head, p]), p))
            del kept[:-w]
        if (p + 1) % 10_000 == 0 or p in (w - 2, w - 1, w):
            for head, kept in enumerate(best):
                besides = {*range(min(sinks, p + 1)), *range(max(p + 1 - recent, 0), p + 1)}
                found = cache.kept().positions[0, head]
                assert found[found >= 0].tolist() == sorted({j for _, j in kept} | besides)


# ---- a serving shape ----
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_a_long_prompt_and_many_steps(name):
    """B2 H16/8 D128 w=512: a prompt of 3000 tokens in two pieces, then 40 steps; the last ones against the oracle."""
    rng, move, back = np.random.default_rng(0), to(name), library_named(name).to_numpy
    history = History(length=3040, batch=2, heads=16, kv_heads=8, head_dim=128, dtype="bfloat16", window=512, sinks=4,
                      recent=16)
    cache = history.cache(move)
    history.run(cache, [1800, 1200], move)
    out, lse = history.run(cache, [1] * 36 + [4], move, begin=3000)
    x, last = history.data, 3040 - 6
    scores = SimpleNamespace(**x).scores
    mask = reference.top_w_dense(scores, history.window, query_length=6)
    p, j = np.arange(last, 3040)[:, None], np.arange(3040)
    mask = mask | ((j <= p) & ((j < 4) | (j > p - 16)))
    reference.check_attention((out[:, -6:], lse[:, :, -6:]), x["query"][:, last:], x["key"], x["value"],
                              dense_mask=mask, bias=scores)
    positions = back(cache.kept().positions)
    b, g = (int(i) for i in (rng.integers(2), rng.integers(8)))
    assert positions[b, g][positions[b, g] >= 0].tolist() == np.flatnonzero(mask[b, g, -1]).tolist()


def test_float64_is_refused(torch):
    like = torch.empty(1, device="cuda")
    with pytest.raises(TypeError, match="dtype must be float16, bfloat16 or float32 on CUDA, got float64"):
        dma.DynamicCache(1, 1, 4, 8, dtype="float64", like=like)
    history = History(length=6, dtype="float64")
    cache = history.cache(to("torch"), backend="numpy")  # through the host, on request
    out, lse = history.run(cache, [3, 1, 2], to("torch"))
    history.check(out, lse)


def test_the_page_for_users(torch):
    names = run_page("decoding.md", gpu=True)
    assert names["cache"].length.tolist() == [1000, 1000]
