"""The CUDA backend on a GPU: the forward grid, exact selection, and its use of streams, devices, graphs and allocators.
Everything here is marked ``gpu``."""
import gc
import itertools

import numpy as np
import pytest
from hypothesis import given, settings

import cupy_dma as dma
from cupy_dma.arrays import Device, library_named
from cupy_dma.backends import cuda
from cupy_dma.backends.cuda.runtime import jit, launch
from cupy_dma.backends.cuda.runtime.configs import LayoutConfig
from cupy_dma.backends.cuda.runtime.program import fresh
from tests.gpu.gate import held
from tests.gpu.sm90_tiles import portable
from tests.oracle import bad_rows, cases, reference, score_cases, selection_cases
from tests.oracle.arrays import host
from tests.unit.test_arrays import Producer
from tests.unit.test_selection import problems

pytestmark = pytest.mark.gpu

CUDA = Device("cuda", 0)
FORWARD = [c for c in cases.CASES if c.dtype in ("float16", "bfloat16", "float32")]
# Cases alternate between the two libraries, so both see every feature of a call.
BY_TURNS = pytest.mark.parametrize(("case", "name"), [(c, ("cupy", "torch")[i % 2]) for i, c in enumerate(FORWARD)],
                                   ids=str)


def converter(name, device=CUDA):
    library = library_named(name)
    return lambda x: library.from_numpy(np.ascontiguousarray(x), device)


def draw(torch, lq, lk, heads, kv_heads, head_dim, batch=1, dtype=None, seed=0, device="cuda"):
    make = torch.Generator(device=device).manual_seed(seed)
    return [torch.randn(batch, n, h, head_dim, generator=make, device=device, dtype=torch.float32).to(
        dtype or torch.bfloat16) for n, h in ((lq, heads), (lk, kv_heads), (lk, kv_heads))]


def draw_scores(torch, batch, heads, length, seed=1, device="cuda"):
    make = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(batch, heads, length, generator=make, device=device)


# ---- correctness ----
@pytest.mark.feature("cuda forward", "attention", "every case", but=("delay-", "float64-D"))
@BY_TURNS
def test_forward_grid(case, name):
    pytest.importorskip(name)
    cases.check(case, *cases.run(case, converter(name)), tf32=True)


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward_grid_of_portable_kernels(case):
    pytest.importorskip("cupy")
    with portable():
        cases.check(case, *cases.run(case, converter("cupy")), tf32=True)


@pytest.mark.parametrize("case", [c for c in FORWARD if c.name.startswith(("bfloat16-D", "float32-D", "mask-", "heads-",
                                                                           "window"))], ids=str)
@pytest.mark.parametrize("limit", [99, 163])
def test_tiles_of_smaller_gpus(case, limit):
    with portable(shared_memory=limit * 1024):
        cases.check(case, *cases.run(case, converter("cupy")), tf32=True)


def _sample_check(torch, q, k, v, mask, bias, out, lse, rows, softcap=0.0):
    """Check rows of a large problem against the oracle, each as a problem of one query."""
    lq, lk, heads, group = q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2]
    start = mask.start.expand(1, k.shape[2], lk) if mask is not None else None
    stop = mask.stop.expand(1, k.shape[2], lk) if mask is not None else None
    for i in rows:
        p = i + lk - lq
        for h in (0, heads - 1):
            g = h // group
            seen = (torch.arange(lk, device=q.device) <= p if mask is None else
                    (start[0, g] <= p) & (p < stop[0, g]))
            js = seen.nonzero()[:, 0]
            one = [x.cpu() for x in (q[:1, i:i + 1, h:h + 1], k[:1, js, g:g + 1], v[:1, js, g:g + 1])]
            one = [library_named("torch").to_numpy(x.contiguous()) for x in one]
            added = None if bias is None else host(bias[:1, g:g + 1, js].contiguous())
            ref, ref_lse = reference.attention(*one, bias=added, softcap=softcap)
            plain, plain_lse = reference.same_precision_attention(*one, bias=added, softcap=softcap, tf32=True)
            reference.assert_matches_reference(host(out[:1, i:i + 1, h:h + 1].contiguous()), ref, plain, plain.dtype)
            exact = ref_lse[0, 0, 0]
            allowed = 1e-4 * max(1.0, abs(exact)) + 2 * abs(plain_lse[0, 0, 0] - exact)
            assert abs(float(lse[0, h, i]) - exact) < allowed


@pytest.mark.parametrize(("head_dim", "dtype"), [
    *((size, "bfloat16") for size in (64, 128, 80, 192, 256, 33)),
    *((size, "float32") for size in (64, 128, 192, 250))])
@pytest.mark.parametrize("kind", ["top_w", "causal", "documents"])
def test_long_sequences(torch, kind, head_dim, dtype):
    n = 5000
    q, k, v = draw(torch, n, n, 4, 2, head_dim, dtype=getattr(torch, dtype))
    scores = draw_scores(torch, 1, 2, n)
    mask = {"top_w": lambda: dma.IntervalMask.top_w(scores, 700), "causal": lambda: None,
            "documents": lambda: dma.IntervalMask.documents(torch.tensor([0, 100, 100, 3000, n]).cuda())}[kind]()
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, causal=kind == "causal", return_lse=True)
    _sample_check(torch, q, k, v, mask, scores, out, lse, (0, 1, 99, 100, 2999, 3000, n - 1))


def test_more_than_2_to_31_elements(torch):
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of device memory")
    n, heads, head_dim = 1_050_000, 16, 128
    assert n * heads * head_dim > 2**31
    q, k, v = (torch.empty(1, n, heads, head_dim, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(3))
    scores = draw_scores(torch, 1, heads, n)
    mask = dma.IntervalMask.top_w(scores, 64)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    _sample_check(torch, q, k, v, mask, scores, out, lse, (0, 70, n // 2, n - 1))
    del q, k, v, out
    torch.cuda.empty_cache()


@pytest.mark.feature("cuda forward", "attention", "a NaN")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("kind", ["causal", "top_w", "window"])
def test_a_bad_row_reaches_only_the_queries_that_see_it(name, bad, kind):
    bad_rows.check(kind, name, bad, converter("cupy"), dtype="bfloat16", n=300, heads=(4, 2), head_dim=64)


@pytest.mark.feature("cuda forward", "attention", "keys that no query sees")
def test_a_key_nobody_sees_changes_no_bit(torch):
    n = 400
    q, k, v = draw(torch, n, n, 2, 1, 64)
    scores = draw_scores(torch, 1, 1, n)
    real = torch.rand(1, n, device="cuda") < 0.7
    for mask in (dma.IntervalMask.top_w(scores, 60, padding=real), dma.IntervalMask.padding(real)):
        out = dma.attention(q, k, v, mask=mask, bias=scores)
        k2, v2, s2 = k.clone(), v.clone(), scores.clone()
        k2[:, ~real[0]] = float("nan")
        v2[:, ~real[0]] = float("inf")
        s2[:, :, ~real[0]] = float("nan")
        assert torch.equal(out, dma.attention(q, k2, v2, mask=mask, bias=s2))


@pytest.mark.feature("cuda forward", "Scores and selection", "IntervalMask.top_w")
@given(problems(max_length=40))
@settings(max_examples=60, deadline=None)
def test_selection_is_the_definition(problem):
    for counted in (False, True):
        with selection_cases.counting(counted):
            selection_cases.check_definition(problem, converter("cupy"))


KINDS = ["iid", "increasing", "decreasing", "equal", "ties", "recency", "bursty", "rounded", "relu",
         "special"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "window"), [(1, 1), (1023, 1), (1025, 7), (4096, 1024), (5000, 4999), (9001, 256),
                                                (40000, 1000), (70001, 3000), (40000, (1000, 60))])
def test_selection_of_long_sequences(kind, length, window):
    scores = selection_cases.awkward_scores(kind, 2, length)
    for options, counted in itertools.product(selection_cases.options_of(length), (False, True)):
        with selection_cases.counting(counted):
            selection_cases.check(scores, window, converter("cupy"), **options)


@pytest.mark.feature("cuda forward", "Scores and selection", "key_scores")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("shape", [(2, 333, 1, 64), (1, 1000, 8, 128), (2, 77, 3, 33), (1, 100, 20, 64), (1, 0, 2, 8),
                                   (1, 300, 3, 40)])
def test_key_scores(dtype, form, shape):
    for weights in ("float32", "float16", "bfloat16"):
        score_cases.check(shape, dtype, form, weights, converter("cupy"))


@pytest.mark.feature("cuda forward", "attention", "bitwise")
def test_the_same_bits_every_time(torch):
    q, k, v = draw(torch, 2000, 2000, 4, 2, 64)
    weights, a = torch.randn(2, 128, device="cuda") / 10, torch.ones(2, device="cuda")
    first = dma.dynamic_mask_attention(q, k, v, dt_proj=weights, A=a, window=300, return_lse=True)
    for _ in range(20):
        again = dma.dynamic_mask_attention(q, k, v, dt_proj=weights, A=a, window=300, return_lse=True)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


# ---- bad input ----
def test_wide_types_are_refused():
    move = converter("cupy")
    x = move(np.ones((1, 4, 1, 8), np.float64))
    with pytest.raises(TypeError, match=r"query.*float64"):
        dma.attention(x, x, x)
    with pytest.raises(TypeError, match="float64"):
        dma.IntervalMask.top_w(move(np.ones((1, 1, 4))), 2)


# ---- streams, devices, graphs and memory ----
def chain(q, k, v, scores, window=100):
    return dma.dynamic_mask_attention(q, k, v, scores, window=window)


@pytest.mark.feature("cuda forward", "torch", "CUDA graphs")
@pytest.mark.usefixtures("uncollected")
def test_torch_cuda_graph(torch):
    q, k, v = draw(torch, 500, 500, 4, 2, 64)
    scores = draw_scores(torch, 1, 2, 500)
    chain(q, k, v, scores)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(q, k, v, scores)
    for seed in (5, 6):
        for static, other in zip((q, k, v), draw(torch, 500, 500, 4, 2, 64, seed=seed), strict=True):
            static.copy_(other)
        scores.copy_(draw_scores(torch, 1, 2, 500, seed=seed))
        graph.replay()
        assert torch.equal(out, chain(q, k, v, scores))


@pytest.mark.parametrize("length", [400, 3000])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.usefixtures("uncollected")
def test_kernels_that_come_early_wait_for_those_ahead(torch, monkeypatch, length, captured):
    """A chain of calls, each reading the previous result, in recycled memory, gives the same as a chain whose kernels
    each start on an idle device."""
    x, scores = draw(torch, length, length, 2, 2, 64)[0], draw_scores(torch, 1, 2, length)

    def calls():
        y, all_of_it = x, []
        for i in range(12):
            y = 1.5 * y if i % 4 == 3 else chain(y, y, y, scores, window=30 + i)  # sometimes a kernel of torch
            all_of_it.append(y.sum(2, keepdim=True))
        return torch.cat(all_of_it)

    original = launch.Function.launch

    def launch_alone(self, grid, threads, params, stream, pdl=True):
        torch.cuda.synchronize()
        original(self, grid, threads, params, stream, pdl=False)

    with monkeypatch.context() as patch, fresh():
        patch.setattr(launch.Function, "launch", launch_alone)
        expected = calls()
    if not captured:
        for _ in range(10):
            assert torch.equal(calls(), expected)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = calls()
    for _ in range(10):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_a_launch_that_fails_names_the_kernel():
    kernel = cuda.runtime.load(LayoutConfig("__half"), "fragment_layout", 0)
    params = jit.params("common/check_fragment_layout.cu", "LayoutParams").pack(x=0, ok=0)
    with pytest.raises(RuntimeError, match=r"fragment_layout .*1 blocks of 2048 threads.*CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(1, 2048, params, 0)


def test_runs_on_the_callers_stream_and_does_not_wait(torch):
    q, k, v = draw(torch, 500, 500, 4, 2, 64)
    scores = draw_scores(torch, 1, 2, 500)
    expected = chain(q, k, v, scores)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.empty_like(scores)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream), held(stream.cuda_stream):
            late.copy_(scores)
            out = chain(q, k, v, late)
            assert torch.cuda.default_stream().query(), "work was put on the default stream"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


def test_a_call_that_waits_is_seen():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with pytest.raises(AssertionError, match="waited for the stream"), held(stream.ptr, limit=0.1):
        stream.synchronize()


def test_key_lists_are_per_stream(torch, fresh_programs):
    q, k, v = draw(torch, 500, 500, 2, 1, 64)
    mask = dma.IntervalMask.top_w(draw_scores(torch, 1, 1, 500), 50)
    dma.attention(q, k, v, mask=mask)
    with torch.cuda.stream(torch.cuda.Stream()):
        dma.attention(q, k, v, mask=mask)
    assert len({identity[-1] for identity in mask._cache}) == 2
    torch.cuda.synchronize()


def test_torch_inputs_allocate_through_torch(torch):
    import cupy

    q, k, v = draw(torch, 2000, 2000, 4, 2, 64)
    scores = draw_scores(torch, 1, 2, 2000)
    chain(q, k, v, scores)
    gc.collect()
    before = cupy.get_default_memory_pool().total_bytes()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    chain(q, k, v, scores)
    assert cupy.get_default_memory_pool().total_bytes() == before
    assert torch.cuda.memory_stats()["allocation.all.allocated"] > allocated


def test_memory_is_linear(torch):
    """Extra device memory at H16/8, D128, w=2048: at most 1 GiB at N=131072, and twice that for twice the length."""
    def extra(n):
        q, k, v = draw(torch, n, n, 16, 8, 128)
        scores = draw_scores(torch, 1, 8, n)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = chain(q, k, v, scores, window=2048)
        return torch.cuda.max_memory_allocated() - before - out.nbytes

    half, whole = extra(65536), extra(131072)
    print(f"{half / 2**20:.0f} MiB at 65536, {whole / 2**20:.0f} MiB at 131072")
    assert whole <= 2**30 and whole < 2.2 * half


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_a_device_that_is_not_current(name):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    pytest.importorskip(name)
    assert cupy.cuda.runtime.getDevice() == 0
    for case in (c for c in FORWARD if c.name in ("mask-top_w_padding", "mask-documents", "mask-causal", "mask-union",
                                                  "bfloat16-D64")):
        out, lse = cases.run(case, converter(name, Device("cuda", 1)))
        assert library_named(name).describe(out, "out").device == Device("cuda", 1)
        cases.check(case, host(out), host(lse), tf32=True)
    assert cupy.cuda.runtime.getDevice() == 0


def test_dlpack_producers_get_their_own_kind_back():
    import cupy

    x = cupy.asarray(np.random.default_rng(0).standard_normal((1, 100, 2, 64)).astype(np.float16))
    out = dma.attention(*(Producer(x, cupy) for _ in range(3)), causal=True)
    assert isinstance(out, Producer)
    assert cupy.array_equal(out._array, dma.attention(x, x, x, causal=True))
