"""Concurrent calls: results do not depend on graphs, threads, streams or the order of calls."""
import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

import cupy_dma as dma

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("uncollected")]

N, W, ROUNDS = 2048, 128, 50
POISON = 0x7F7F7F7F


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def draw(n: int = N, grad: bool = False) -> list[Any]:
    """query, key, value."""
    return [torch.randn(1, n, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
            for heads in (8, 4, 4)]


def draw_scores(n: int = N) -> Any:
    return torch.randn(1, 4, n, device="cuda")


def poisoned_pool() -> Any:
    """A graph whose pool's free memory holds ``POISON``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        blocks = [torch.full((1 << k,), POISON, dtype=torch.int32, device="cuda") for k in range(4, 23)]
    graph.replay()
    torch.cuda.synchronize()
    del blocks
    return graph


# ---- graphs ----
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "called before"])
@pytest.mark.parametrize("second_alone", [True, False])
def test_a_mask_in_two_graphs(warm, second_alone):
    a, b, scores = draw(), draw(), draw_scores()
    expected = [dma.attention(*x, mask=dma.IntervalMask.top_w(scores, W)) for x in (a, b)]
    pool, mask = poisoned_pool(), dma.IntervalMask.top_w(scores, W)
    if warm:
        dma.attention(*a, mask=mask)
        for i in range(40):  # lists that the mask has evicted stay alive for the graph
            dma.attention(a[0][:, :N - i], *a[1:], mask=mask)
    torch.cuda.synchronize()
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph, x in zip(graphs, (a, b)):
        with torch.cuda.graph(graph, pool=pool.pool()):
            outs.append(dma.attention(*x, mask=mask))
    for i in range(40):
        dma.attention(a[0][:, :N - 50 - i], *a[1:], mask=mask)
    for round_ in range(ROUNDS):
        for out in outs:
            out.zero_()
        order = [1] if second_alone else [round_ % 2, 1 - round_ % 2]
        for i in order:
            graphs[i].replay()
        for i in order:
            assert torch.equal(outs[i], expected[i])


def test_an_eager_call_on_the_stream_of_a_capture():
    a, b, scores = draw(), draw(), draw_scores()
    expected = dma.attention(*b, mask=dma.IntervalMask.top_w(scores, W))
    pool, stream = poisoned_pool(), torch.cuda.Stream()
    for _ in range(ROUNDS):
        mask, graph = dma.IntervalMask.top_w(scores, W), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=pool.pool(), stream=stream):
            dma.attention(*a, mask=mask)
        with torch.cuda.stream(stream):
            found = dma.attention(*b, mask=mask)
        torch.cuda.synchronize()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_captured_training_step(dtype):
    """Forward and backward in one graph, for a mask that was never used before, and from scores."""
    rows, scores = [x.to(dtype).detach().requires_grad_() for x in draw()], draw_scores().requires_grad_()
    mask = dma.IntervalMask.top_w(scores.detach(), W)
    torch.cuda.synchronize()

    def step(mask: Any) -> Any:
        out = dma.attention(*rows, mask=mask, bias=scores, deterministic=True)
        made = dma.dynamic_mask_attention(*rows, scores, window=W, deterministic=True)
        return out, made, *torch.autograd.grad((out.float() + made.float()).sum(), (*rows, scores))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm torch up with another mask, so that this one has no lists
        expected = [x.clone() for x in step(dma.IntervalMask.top_w(scores.detach(), W))]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=poisoned_pool().pool()):
        found = step(mask)
    for _ in range(ROUNDS):
        for x in found:
            x.zero_()
        graph.replay()
        for x, wanted in zip(found, expected):
            assert torch.equal(x, wanted)


FIRST_CALL = """
import torch
import cupy_dma as dma
torch.manual_seed(0)
q, k, v = (torch.randn(1, 777, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 4, 4))
scores, graph = torch.randn(1, 4, 777, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = dma.dynamic_mask_attention(q, k, v, scores, window=100)
graph.replay()
expected = dma.dynamic_mask_attention(q, k, v, scores, window=100)
assert torch.equal(out, expected)
print("right")
"""


def run_alone(program: str, **environment: str) -> None:
    """Run in a process of its own, which must print "right"."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **environment})
    assert done.returncode == 0 and done.stdout.strip().endswith("right"), done.stdout + done.stderr


def test_the_first_call_of_a_process_is_captured():
    run_alone(FIRST_CALL)


def test_a_cupy_graph_holds_its_memory():
    cupy = pytest.importorskip("cupy")
    cupy.random.seed(0)
    q, k, v = (cupy.random.standard_normal((1, N, h, 64)).astype(cupy.float16) for h in (8, 4, 4))
    scores = cupy.random.standard_normal((1, 4, N)).astype(cupy.float32)

    def step() -> Any:
        mask = dma.IntervalMask.top_w(scores, W) | dma.IntervalMask.sliding_window(N, 20, like=scores)
        return dma.attention(q, k, v, mask=mask) + dma.dynamic_mask_attention(q, k, v, scores, window=W)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        expected = step()
        stream.begin_capture()
        out = step()
        graph = stream.end_capture()
        held = out.data.mem
        others = [cupy.full(n, 7, cupy.int32) for n in (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20) * 6]
        for _ in range(ROUNDS):
            out[:] = 0
            graph.launch(stream)
            assert bool((out == expected).all()) and all(bool((x == 7).all()) for x in others)
    assert held.size


def test_memory_of_cupy_graphs_is_let_go():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.random.standard_normal((1, N, h, 64)).astype(cupy.float16) for h in (8, 4, 4))
    scores = cupy.random.standard_normal((1, 4, N)).astype(cupy.float32)
    stream, pool, used = cupy.cuda.Stream(non_blocking=True), cupy.get_default_memory_pool(), []
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        dma.dynamic_mask_attention(q, k, v, scores, window=W)
        for _ in range(ROUNDS):
            stream.begin_capture()
            dma.dynamic_mask_attention(q, k, v, scores, window=W)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            used.append(pool.used_bytes())
            del graph
            gc.collect()
            time.sleep(0.01)  # the driver notifies from its own thread
    assert max(used[10:]) <= max(used[:10])


# ---- threads and streams ----
def in_threads(count: int, work: Any) -> None:
    """Run ``work(number)`` in this many threads and raise the first error."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if errors:
        raise errors[0]


@pytest.mark.parametrize("streams", [False, True], ids=["one stream", "a stream each"])
def test_threads_share_a_fresh_mask(streams):
    x, scores = draw(), draw_scores()
    expected = dma.attention(*x, mask=dma.IntervalMask.top_w(scores, W))
    sides = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        mask, outs, barrier = dma.IntervalMask.top_w(scores, W), [None] * 8, threading.Barrier(8)
        torch.cuda.synchronize()

        def work(number: int) -> None:
            with torch.cuda.stream(sides[number] if streams else torch.cuda.default_stream()):
                barrier.wait()  # noqa: B023
                outs[number] = dma.attention(*x, mask=mask)  # noqa: B023

        in_threads(8, work)
        torch.cuda.synchronize()
        noise = [torch.full((size,), 1, dtype=torch.int32, device="cuda") for size in (1 << 14, 1 << 16, 1 << 18) * 3]
        again = dma.attention(*x, mask=mask)
        for out in (*outs, again):
            assert torch.equal(out, expected)
        del noise


PER_THREAD_STREAMS = """
import threading
import cupy
import cupy_dma as dma
cupy.random.seed(0)
N, W = 4096, 128
q, k, v = (cupy.random.standard_normal((1, N, h, 64)).astype(cupy.float16) for h in (8, 4, 4))
scores = cupy.random.standard_normal((1, 4, N)).astype(cupy.float32)
spin = cupy.RawKernel('extern "C" __global__ void spin(long long n) {'
                      'const long long t = clock64(); while (clock64() - t < n) {} }', "spin")
spin((1,), (1,), (1,))
other, box = -scores, {}
for _ in range(4):
    want = dma.attention(q, k, v, mask=dma.IntervalMask.top_w(scores, W))
assert cupy.cuda.get_current_stream().ptr == 2
for _ in range(50):
    for _ in range(4):  # memory of lists that is taken again holds wrong ones
        dma.attention(q, k, v, mask=dma.IntervalMask.top_w(other, W))
    mask = dma.IntervalMask.top_w(scores, W)
    cupy.cuda.runtime.deviceSynchronize()
    queued, end = threading.Event(), threading.Event()
    def first():
        spin((1,), (1,), (20_000_000,))
        box["a"] = dma.attention(q, k, v, mask=mask)
        queued.set(); end.wait(10)
        cupy.cuda.get_current_stream().synchronize()
    def second():
        queued.wait(10)
        out = dma.attention(q, k, v, mask=mask)
        cupy.cuda.get_current_stream().synchronize()
        box["b"] = bool((out == want).all())
        end.set()
    threads = [threading.Thread(target=f) for f in (first, second)]
    [t.start() for t in threads]; [t.join(30) for t in threads]
    assert box.pop("b")
print("right")
"""


def test_the_default_stream_of_each_thread():
    run_alone(PER_THREAD_STREAMS, CUPY_CUDA_PER_THREAD_DEFAULT_STREAM="1")


def test_what_a_call_makes_is_freed_by_its_backward():
    """Even while the loss is referenced: autograd saves lists, mask and scores."""
    rows, scores = draw(16384, grad=True), draw_scores(16384).requires_grad_()

    def allocated() -> float:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() / 2**20

    def call() -> Any:
        return dma.dynamic_mask_attention(*rows, scores, window=1024).float().sum()

    torch.autograd.grad(call(), rows)
    before, losses = allocated(), []
    for _ in range(4):
        losses.append(call())
        torch.autograd.grad(losses[-1], rows)
    assert allocated() - before < 0.1


@pytest.mark.parametrize("seconds", [float(os.environ.get("CUPY_DMA_STRESS_SECONDS", "10"))])
def test_stress(seconds):
    """Eight threads, shared masks, side streams, captures in between."""
    kinds = [(draw(n), draw_scores(n), n) for n in (300, 777, 1024, N)]
    expected = []
    for x, scores, _ in kinds:
        rows = [y.detach().requires_grad_() for y in x]
        out = dma.dynamic_mask_attention(*rows, scores, window=W, deterministic=True)
        expected.append((dma.attention(*x, mask=dma.IntervalMask.top_w(scores, W)), out.detach(),
                         torch.autograd.grad(out.float().sum(), rows)))
    masks = [[dma.IntervalMask.top_w(scores, W)] for _, scores, _ in kinds]
    torch.cuda.synchronize()
    end, capture, calls = time.monotonic() + seconds, threading.Lock(), [0] * 8

    def check(found: Any, wanted: Any) -> None:
        torch.cuda.current_stream().synchronize()
        assert torch.equal(found, wanted)

    def work(number: int) -> None:
        rng, stream = random.Random(number), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while time.monotonic() < end:
                i = rng.randrange(len(kinds))
                (x, scores, _), what = kinds[i], rng.randrange(6)
                if what == 0:  # a new mask for all threads
                    fresh = dma.IntervalMask.top_w(scores, W)
                    stream.synchronize()
                    masks[i][0] = fresh
                elif what in (1, 2):
                    mask = masks[i][0]  # held until its work on this stream has ended
                    check(dma.attention(*x, mask=mask), expected[i][0])
                elif what == 3:
                    rows = [y.detach().requires_grad_() for y in x]
                    out = dma.dynamic_mask_attention(*rows, scores, window=W, deterministic=True)
                    check(out.detach(), expected[i][1])
                    for found, wanted in zip(torch.autograd.grad(out.float().sum(), rows), expected[i][2]):
                        check(found, wanted)
                elif what == 4:
                    check(dma.dynamic_mask_attention(*x, scores, window=W), expected[i][1])
                elif capture.acquire(blocking=False):
                    try:
                        mask, graph = masks[i][0], torch.cuda.CUDAGraph()
                        graph.capture_begin(capture_error_mode="thread_local")
                        out = dma.attention(*x, mask=mask)
                        graph.capture_end()
                        for _ in range(3):
                            out.zero_()
                            graph.replay()
                            check(out, expected[i][0])
                        graph.reset()
                        del graph, out
                    finally:
                        capture.release()
                calls[number] += 1

    in_threads(8, work)
    assert min(calls) > 5


def test_memory_is_flat_over_many_shapes():
    """Memory of host and device stays constant over lengths that never repeat."""
    import resource

    x, scores = draw(4096, grad=True), draw_scores(4096)
    rss: list[float] = []
    gpu: list[float] = []
    count = int(os.environ.get("CUPY_DMA_SHAPES", "400"))
    mask = dma.IntervalMask.sliding_window(4096, W, like=scores)
    for i in range(count):
        n = 1000 + i
        rows = [y[:, :n] for y in x]
        out = dma.dynamic_mask_attention(*rows, scores[..., :n], window=W)
        out.backward(torch.ones_like(out))
        dma.attention(x[0][:, :n], *x[1:], mask=mask)
        del out, rows
        gc.collect() if i % 50 == 0 else None
        rss.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        gpu.append(torch.cuda.memory_allocated() / 2**20)
    half = count // 2
    assert max(gpu[half:]) <= max(gpu[:half]) + 8
    if count >= 2000:  # caches are full after 1024 shapes
        assert rss[-1] - rss[-500] < 20
