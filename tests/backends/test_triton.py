"""The Triton backend: on a GPU (marked ``gpu``), and on the CPU in Triton's interpreter.

The interpreter must be selected before Triton is imported, so its tests run in a separate process:
``test_in_the_interpreter`` runs this file and ``test_triton_numerics.py`` with ``TRITON_INTERPRET=1``, and then their
tests use CPU tensors and a subset of the grid (all of it with ``CUPY_DMA_TRITON_GRID=all``).
"""
import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

import cupy_dma as dma
from cupy_dma.arrays import CPU, Device, library_named
from cupy_dma.backward import attention_backward, dynamic_mask_attention_backward
from tests.oracle import cases, delay_cases, score_cases, selection_cases
from tests.oracle.arrays import host
from tests.unit.test_selection import problems

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = CPU if INTERPRETED else Device("cuda", 0)
LIBRARIES = ["torch", "numpy" if INTERPRETED else "cupy"]
GRID = [c for c in cases.CASES + delay_cases.CASES if c.dtype != "float64"]
if INTERPRETED:
    from tests.backends.triton_interpreter import patch

    patch()
    if os.environ.get("CUPY_DMA_TRITON_GRID") != "all":
        GRID = [c for c in GRID if c.name in (
            "float16-D3", "bfloat16-D40", "float32-D16", "bfloat16-D128", "heads-6/2-causal", "heads-4/2-top_w",
            "lengths-0x5-none", "lengths-5x0-causal", "lengths-1x70-top_w", "lengths-129x33-causal",
            "lengths-300x300-top_w", "lengths-33x129-global", "mask-none", "mask-padding", "mask-prefix_lm",
            "mask-global_documents", "mask-union", "mask-per_head", "mask-per_batch", "mask-dense",
            "mask-dense_per_head", "mask-dense_rows", "causal-and-padding", "causal-and-dense", "bias-full-top_w",
            "sinks-top_w-float16", "value-dim-bfloat16-32/24-causal",
            "bias-full_per_head-none", "bias-row-top_w", "bias-key_shared-none", "softcap-full", "softcap-1e-06",
            "scale-zero-softcap", "scale-negative-softcap", "scale-1e-40", "layout-bhsd", "layout-every_other",
            "batch-0", *delay_cases.FEW)]
    RUNS = [(case, "numpy" if i % 4 == 0 else "torch") for i, case in enumerate(GRID)]
else:
    RUNS = [(case, LIBRARIES[i % len(LIBRARIES)]) for i, case in enumerate(GRID)]


POISONED = ("float16-D3", "heads-6/2-top_w", "heads-4/2-top_w", "lengths-129x33-causal", "lengths-33x129-global",
            "mask-per_head", "mask-dense_per_head", "bias-row-top_w", "bias-full-top_w", "bias-key_shared-none")


def on_device(test):
    """A test of the kernels, in the interpreter's process or on a GPU."""
    return test if INTERPRETED else pytest.mark.gpu(test)


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_in_the_interpreter():
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    files = [__file__, __file__.replace("test_triton", "test_triton_numerics")]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
                          env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture
def torch():
    pytest.importorskip("triton")
    return pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def quiet_interpreter():
    with np.errstate(all="ignore"):  # it computes with NumPy
        yield


def converter(name):
    library = library_named(name)
    return lambda x: library.from_numpy(np.ascontiguousarray(x), DEVICE)


def draw(torch, n, heads=4, kv_heads=2, size=32, lq=None, dtype=None):
    torch.manual_seed(n)
    q, k, v = (torch.randn(1, length, h, size).to(str(DEVICE), dtype or torch.float16)
               for length, h in ((lq or n, heads), (n, kv_heads), (n, kv_heads)))
    return q, k, v, torch.randn(1, kv_heads, n).to(str(DEVICE))


# ---- correctness ----
@pytest.mark.feature("triton forward backward", "attention", "every case", but=("float64-D",))
@on_device
@pytest.mark.parametrize(("case", "name"), RUNS, ids=str)
def test_grid(torch, case, name):
    """Forward and backward against the oracle."""
    pytest.importorskip(name)
    cases.check(case, *cases.run(case, converter(name), backend="triton"))
    with_dlse = case.name.startswith(("heads-", "mask-"))
    found = cases.run_backward(case, converter(name), with_dlse=with_dlse, backend="triton")
    cases.check_backward(case, found, with_dlse=with_dlse)


@on_device
@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("case", [c for c in GRID if c.name in POISONED], ids=str)
def test_uninitialised_memory_is_never_read(torch, case):
    """Every array that is allocated uninitialised, result or not, is filled with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic also fills, by default
    try:
        assert torch.empty(3).isnan().all()
        out, lse = cases.run(case, converter("torch"), backend="triton")
        found = cases.run_backward(case, converter("torch"), backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    cases.check(case, out, lse)
    cases.check_backward(case, found)


@on_device
@pytest.mark.parametrize("mask", ["causal", "top_w", "documents"])
def test_many_blocks_of_keys(torch, mask):
    """Several chunks of visible keys, and several tiles."""
    case = cases.Case(f"long-{mask}", dtype="float16", batch=1, query_length=80, key_length=2200, mask=mask,
                      window=300, head_dim=24, heads=2)
    cases.check(case, *cases.run(case, converter("torch"), backend="triton"))
    found = cases.run_backward(case, converter("torch"), backend="triton")
    cases.check_backward(case, found)


@pytest.mark.feature("triton forward", "Scores and selection", "IntervalMask.top_w", "a window per kv head")
@on_device
@given(problems(max_length=40))
@settings(max_examples=20 if INTERPRETED else 60, deadline=None)
def test_selection_is_the_definition(problem):
    pytest.importorskip("triton")
    selection_cases.check_definition(problem, converter("torch"), "triton")


@on_device
@pytest.mark.parametrize(("length", "window"), [(1, 1), (1023, 1), (1025, 7), (2048, 2048)] + (
    [] if INTERPRETED else [(5000, 4999), (9001, 256), (40000, 1000), (70001, 3000)]))
def test_selection_of_long_sequences(torch, length, window):
    scores = selection_cases.awkward_scores("special", 2, length)
    for options in selection_cases.options_of(length):
        selection_cases.check(scores, window, converter("torch"), "triton", **options)


@pytest.mark.feature("triton forward backward", "Scores and selection", "key_scores")
@on_device
@pytest.mark.parametrize(("name", "dtype"), [(LIBRARIES[0], "bfloat16"), (LIBRARIES[1], "float16"),
                                              (LIBRARIES[1], "bfloat16"), (LIBRARIES[0], "float32")])
@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("shape", [(2, 333, 1, 64), (2, 77, 3, 33), (1, 0, 2, 8)])
def test_key_scores(torch, name, dtype, form, shape):
    pytest.importorskip(name)
    score_cases.check(shape, dtype, form, "float32", converter(name), rtol=2e-6, backend="triton")
    score_cases.check_backward(shape, dtype, form, converter(name), rtol=0.0, backend="triton")


@pytest.mark.feature("triton forward backward", "dynamic_mask_attention", "from scores or values")
@pytest.mark.feature("triton forward backward", "torch", "autograd")
@on_device
def test_autograd_and_the_whole_chain(torch):
    """Torch's autograd through scores, selection and attention, against the explicit gradients and NumPy's."""
    q, k, v, _ = draw(torch, 90, dtype=torch.float32)
    weight, a = torch.randn(2, 64).to(q.device) / 8, torch.ones(2).to(q.device)
    leaves = [x.requires_grad_() for x in (q, k, v, weight, a)]
    out, lse = dma.dynamic_mask_attention(q, k, v, dt_proj=weight, A=a, window=20, return_lse=True, backend="triton")
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    with torch.no_grad():
        by_hand = dynamic_mask_attention_backward(dout, q, k, v, out, lse, window=20, dt_proj=weight, A=a,
                                                  backend="triton")
        wide = [host(x.detach()).astype(np.float64) for x in (dout, q, k, v, out, lse, weight, a)]
    expected = dynamic_mask_attention_backward(*wide[:6], window=20, dt_proj=wide[6], A=wide[7])
    for name, g in zip(("query", "key", "value", "dt_proj", "A"), found):
        ref = getattr(expected, name)
        assert np.abs(host(g) - ref).max() <= 2e-5 * np.abs(ref).max(), name
        assert torch.allclose(g, getattr(by_hand, name), rtol=1e-4, atol=1e-5), name


@pytest.mark.feature("triton forward", "torch", "autocast")
@pytest.mark.feature("triton forward backward", "torch", "torch.compile")
@on_device
def test_compile_and_autocast(torch):
    """One graph, with the gradients of the eager call; under autocast, in autocast's type."""
    leaves = [x.requires_grad_() for x in draw(torch, 60, dtype=torch.float32)]

    def loss(*arguments):
        return dma.dynamic_mask_attention(*arguments, window=20, backend="triton").sin().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(run(*leaves), leaves) for run in (compiled, loss))
    assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(found, expected))
    with torch.autocast(leaves[0].device.type, torch.bfloat16):
        out = dma.dynamic_mask_attention(*leaves, window=20, backend="triton")
    assert out.dtype == torch.bfloat16
    under = torch.autograd.grad(out.float().sin().sum(), leaves)
    for x, y in zip(under, expected):
        assert x.dtype == torch.float32 and (x - y).norm() <= 2e-2 * y.norm()


# ---- isolation of non-finite values ----
def nearly(x, y) -> bool:
    """Finite, and equal up to the order of summation: a tile with a non-finite row is recomputed in smaller blocks."""
    return bool(x.isfinite().all() and ((x - y).abs() <= 2**-9 * (1 + y.abs())).all())


@pytest.mark.feature("triton forward backward", "attention", "a NaN")
@on_device
@pytest.mark.parametrize(("name", "bad"), [("key", np.nan), ("key", np.inf), ("value", np.nan), ("value", -np.inf)])
@pytest.mark.parametrize("kind", ["causal", "top_w", "dense"])
def test_a_bad_row_reaches_only_the_queries_that_see_it(torch, name, bad, kind):
    n, where = 90, 45
    q, k, v, scores = draw(torch, n)
    clean = {"key": k.clone(), "value": v.clone()}
    {"key": k, "value": v}[name][0, where, 0, 5] = bad
    scores[0, 0, where] = 1.2  # kept for a while, but not to the end
    mask = {"causal": lambda: dma.IntervalMask.causal(n, like=q),
            "top_w": lambda: dma.IntervalMask.top_w(scores, 20, backend="triton"),
            "dense": lambda: torch.rand(1, 1, n, n).to(q.device) < 0.3}[kind]()
    options = {"mask": mask, "return_lse": True, "backend": "triton"}
    out, lse = dma.attention(q, k, v, **options)
    good, good_lse = dma.attention(q, clean["key"], clean["value"], **options)
    sees = (mask if kind == "dense" else mask.to_dense(n))[0, 0, :, where]
    assert sees.any() and not sees.all()
    for h in (0, 1):  # the heads of kv head 0
        assert nearly(out[0, ~sees, h], good[0, ~sees, h])
        if name == "value":
            assert not torch.isfinite(out[0, sees, h, 5]).any()
    assert torch.equal(out[:, :, 2:], good[:, :, 2:])

    dout = torch.randn_like(out)
    dirty = attention_backward(dout, q, k, v, out, lse, mask=mask, backend="triton")
    pure = attention_backward(dout, q, clean["key"], clean["value"], good, good_lse, mask=mask, backend="triton")
    assert nearly(dirty.query[0, ~sees], pure.query[0, ~sees])


@pytest.mark.feature("triton backward", "attention", "a NaN")
@on_device
def test_a_bad_query_reaches_only_the_keys_that_it_sees(torch):
    n, where = 90, 45
    q, k, v, scores = draw(torch, n)
    mask = dma.IntervalMask.top_w(scores, 20, backend="triton")
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True, backend="triton")
    dout = torch.randn_like(out)
    pure = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, backend="triton")
    seen = mask.to_dense(n)[0, 0, where]
    assert seen.any() and not seen.all()
    for name in ("query", "dout"):
        q2, dout2 = q.clone(), dout.clone()
        {"query": q2, "dout": dout2}[name][0, where, 1, 3] = float("nan")
        dirty = attention_backward(dout2, q2, k, v, out, lse, mask=mask, bias=scores, backend="triton")
        for name in ("key", "value"):
            assert nearly(getattr(dirty, name)[0, ~seen, 0], getattr(pure, name)[0, ~seen, 0])
        assert torch.isnan(dirty.key[0, seen, 0]).any(-1).all()
        assert torch.equal(dirty.query[:, :, 2:], pure.query[:, :, 2:])


@pytest.mark.feature("triton forward backward", "attention", "keys that no query sees")
@on_device
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_what_nobody_sees_changes_no_bit(torch, softcap):
    n = 150
    q, k, v, scores = draw(torch, n, 2, 1)
    real = torch.rand(1, n).to(q.device) < 0.7
    for mask in (dma.IntervalMask.top_w(scores, 60, padding=real, backend="triton"), dma.IntervalMask.padding(real),
                 real[:, None, None]):
        options = {"mask": mask, "bias": scores, "softcap": softcap, "backend": "triton"}
        out, lse = dma.attention(q, k, v, **options, return_lse=True)
        dout = torch.randn_like(out)
        first = attention_backward(dout, q, k, v, out, lse, **options)
        k2, v2 = k.clone(), v.clone()
        k2[:, ~real[0]], v2[:, ~real[0]] = float("nan"), float("inf")
        assert torch.equal(out, dma.attention(q, k2, v2, **options))
        again = attention_backward(dout, q, k2, v2, out, lse, **options)
        assert all(torch.equal(x, y) for x, y in zip(first, again))
        assert not first.key[:, ~real[0]].any() and not first.value[:, ~real[0]].any()


@on_device
def test_rows_that_see_nothing(torch):
    """More queries than keys: the first rows have no visible keys, get zeros, and a NaN in them does not propagate."""
    q, k, v, scores = draw(torch, 60, 2, 1, lq=100)
    mask = dma.IntervalMask.top_w(scores, 15, backend="triton")
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True, backend="triton")
    assert not out[:, :40].any() and torch.isneginf(lse[..., :40]).all() and torch.isfinite(lse[..., 40:]).all()
    dout = torch.randn_like(out)
    first = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, backend="triton")
    assert not first.query[:, :40].any() and first.query[:, 40:].any()
    q[:, :40], dout[:, :40] = float("nan"), float("inf")
    again = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, backend="triton")
    assert torch.equal(first.query[:, 40:], again.query[:, 40:])
    assert all(nearly(getattr(first, name), getattr(again, name)) for name in ("key", "value", "bias"))


@on_device
@pytest.mark.parametrize("needs", [("query",), ("key",), ("value",), ("bias",), ("query", "bias")])
@pytest.mark.parametrize("bias", ["key", "row", "full"])
def test_only_requested_gradients_are_returned(torch, needs, bias):
    n = 80
    q, k, v, scores = draw(torch, n)
    added = {"key": scores, "row": torch.randn(1, 4, n, 1).to(q.device),
             "full": torch.randn(1, 2, n, n).to(q.device)}[bias]
    options = {"mask": dma.IntervalMask.top_w(scores, 20, backend="triton"), "bias": added, "backend": "triton"}
    out, lse = dma.attention(q, k, v, **options, return_lse=True)
    dout = torch.randn_like(out)
    everything = attention_backward(dout, q, k, v, out, lse, **options)
    some = attention_backward(dout, q, k, v, out, lse, **options, needs=needs)
    # The needed gradients decide which kernel is compiled, and the compiler decides the order of summation: results are
    # bitwise equal only for the same needs. The sums are float32 of p (dout . v - delta); along a row they cancel.
    noise = 2**-23 * float(dout.float().norm(dim=-1).max() * v.float().norm(dim=-1).max())
    for name in everything._fields:
        assert (getattr(some, name) is None) == (name not in needs)
        if name in needs:
            found, expected = getattr(some, name), getattr(everything, name)
            rounding = torch.finfo(found.dtype).eps * expected.double().abs()
            assert ((found.double() - expected.double()).abs() <= rounding + noise).all()


@on_device
def test_refused(torch):
    x = torch.zeros(1, 3, 2, 8, dtype=torch.float64).to(str(DEVICE))
    with pytest.raises(NotImplementedError, match=r"^backend='triton' cannot do this: query must be .*got float64"):
        dma.attention(x, x, x, backend="triton")


@pytest.mark.parametrize(("handle", "expected"), [(0, "default 3"), (1, "default 3"), (2, "external 2 3"),
                                                  (94000, "external 94000 3")])
def test_a_raw_stream_maps_to_the_same_stream(torch, monkeypatch, handle, expected):
    """torch creates a new stream for a null handle, which is CuPy's default stream: that would race with CuPy."""
    from cupy_dma.backends.torch_common import arrays

    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: f"default {index}")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, index: f"external {handle} {index}")
    assert arrays._stream(handle, 3) == expected


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU arrays")
def test_cpu_arrays_are_refused():
    x = np.zeros((1, 3, 2, 8), np.float32)
    with pytest.raises((RuntimeError, ValueError), match=r"backend='triton' (cannot run here|takes CUDA arrays)"):
        dma.attention(x, x, x, backend="triton")


# ---- on a GPU only ----
@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("kind", ["default", "own", "non-blocking"])
def test_work_runs_on_cupys_stream(torch, kind):
    """torch works on CuPy's current stream, so that CuPy's own work before and after needs no other synchronization."""
    cupy = pytest.importorskip("cupy")
    from cupy_dma.arrays import describe
    from cupy_dma.backends.torch_common.arrays import on_stream_of

    stream = cupy.cuda.Stream.null if kind == "default" else cupy.cuda.Stream(non_blocking=kind == "non-blocking")
    with stream, on_stream_of(describe(cupy.zeros(3), "x")):
        assert torch.cuda.current_stream().cuda_stream == stream.ptr
    q, k, v, scores = draw(torch, 4000, size=64)
    expected, _ = dma.attention(q, k, v, bias=scores, causal=True, backend="triton", return_lse=True)
    given_arrays = [cupy.from_dlpack(x) for x in (q, k, v, scores)]
    torch.cuda.synchronize()
    for _ in range(20):
        with stream:
            poisoned = [cupy.full_like(x, cupy.nan) for x in given_arrays]
            for target, x in zip(poisoned, given_arrays):
                target[...] = x
            out = dma.attention(*poisoned[:3], bias=poisoned[3], causal=True, backend="triton")
            copy = out.copy()
            for x in (*poisoned, out):
                x.fill(cupy.nan)
            del poisoned, out
            assert np.array_equal(cupy.asnumpy(copy), host(expected))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_cuda_backend_agrees(torch, head_dim):
    n = 6000
    q, k, v, scores = draw(torch, n, size=head_dim, dtype=torch.bfloat16)
    mask = dma.IntervalMask.top_w(scores, 700, backend="triton")
    assert torch.equal(mask.stop, dma.IntervalMask.top_w(scores, 700, backend="cuda").stop)
    outs = [dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True, backend=b) for b in ("triton", "cuda")]
    assert (outs[0][0].float() - outs[1][0].float()).abs().max() < 0.02
    assert torch.allclose(outs[0][1], outs[1][1], atol=1e-4)
    dout = torch.randn_like(q)
    grads = [attention_backward(dout, q, k, v, *outs[0], mask=mask, bias=scores, backend=b) for b in ("triton", "cuda")]
    for name, x, y in zip(grads[0]._fields, *grads):
        assert (x.float() - y.float()).norm() / y.float().norm() < 0.01, name


@pytest.mark.feature("triton forward backward", "attention", "bitwise")
@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_the_same_bits_every_time_and_on_every_stream(torch):
    q, k, v, scores = draw(torch, 3000, size=64)
    mask = dma.IntervalMask.top_w(scores, 300, backend="triton")
    options = {"mask": mask, "bias": scores, "backend": "triton"}
    out, lse = dma.attention(q, k, v, **options, return_lse=True)
    dout = torch.randn_like(out)
    first = attention_backward(dout, q, k, v, out, lse, **options)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    for i in range(20):
        with torch.cuda.stream(other if i % 2 else torch.cuda.current_stream()):
            again, _ = dma.attention(q, k, v, **options, return_lse=True)
            found = attention_backward(dout, q, k, v, out, lse, **options)
        torch.cuda.synchronize()
        assert torch.equal(out, again) and all(torch.equal(x, y) for x, y in zip(first, found))
