"""Results come from the library of the arguments; strides, types, and corner cases of the libraries."""
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import CPU, describe, library_named, numpy_dtype
from tests.oracle import cases


class Producer:
    """An array of a ``library`` that supports DLPack and nothing else."""

    def __init__(self, array, library=np):
        self._array, self._library = array, library

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda x: Producer(self._library.from_dlpack(x), self._library))


SOME = [case for case in cases.CASES if case.name.startswith((
    "mask-", "bias-", "layout-", "float16-D3", "bfloat16-D40", "float64-D64", "lengths-0x5", "lengths-33x129"))]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_torch_tensors_give_torch_tensors(case, torch):
    out, lse = cases.run(case, lambda x: library_named("torch").from_numpy(x, CPU))
    assert out.dtype == getattr(torch, case.dtype)
    gradients = cases.run_backward(case, lambda x: library_named("torch").from_numpy(x, CPU), with_dlse=True)
    for ours, theirs in zip((out, lse, *gradients), (*cases.run(case), *cases.run_backward(case, with_dlse=True))):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert isinstance(ours, torch.Tensor) and ours.is_contiguous()
            assert np.array_equal(library_named("torch").to_numpy(ours), theirs, equal_nan=False)


def test_every_stage_keeps_the_kind(rng, torch):
    draws = [rng.standard_normal(shape).astype(np.float32) for shape in ((1, 9, 2, 4), (1, 9, 1, 4), (1, 4), 1)]
    expected = None
    for make, kind, back in ((np.asarray, np.ndarray, np.asarray), (torch.from_numpy, torch.Tensor, np.asarray),
                             (Producer, Producer, lambda x: x._array)):
        q, k, dt_proj, A = (make(x) for x in draws[:3] + [draws[3] if np.ndim(draws[3]) else np.float32([draws[3]])])
        scores = dma.key_scores(k, dt_proj, A)
        mask = dma.IntervalMask.top_w(scores, 3)
        out, lse = dma.attention(q, k, k, mask=mask, bias=scores, return_lse=True)
        whole = dma.dynamic_mask_attention(q, k, k, dt_proj=dt_proj, A=A, window=3)
        of_attention = dma.backward.attention_backward(out, q, k, k, out, lse, mask=mask, bias=scores, dlse=lse)
        of_scores = dma.backward.key_scores_backward(of_attention.bias, k, dt_proj, A)
        of_whole = dma.backward.dynamic_mask_attention_backward(out, q, k, k, out, lse, dt_proj=dt_proj, A=A, window=3)
        results = [scores, mask.start, mask.stop, mask.to_dense(9), mask.count(9), out, lse, whole, *of_attention,
                   *of_scores[:3], *of_whole[:3], *of_whole[4:6]]
        assert all(isinstance(x, kind) for x in results), [type(x) for x in results]
        values = [back(x) for x in results]
        expected = expected or values
        assert all(np.array_equal(a, b) for a, b in zip(values, expected))
        assert (mask & mask) == mask and (mask | mask) == mask
        window = dma.IntervalMask.sliding_window(9, 2, like=q)
        dma.attention(q, k, k, mask=mask | window)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool", "int32", "int64"])
def test_describe_agrees_between_libraries(dtype, torch):
    base = np.zeros((3, 8, 6), numpy_dtype(dtype))
    for library in (library_named("numpy"), library_named("torch")):
        array = library.from_numpy(base, CPU)[1:, ::2, :5]
        seen = describe(array, "x")
        assert (seen.name, seen.dtype, seen.device) == ("x", dtype, CPU)
        assert (seen.shape, seen.strides) == ((2, 4, 5), (48, 12, 1))
        assert seen.pointer == base.ctypes.data + 48 * base.itemsize  # shared, not copied
        assert np.shares_memory(library.to_numpy(array), base)


def test_torch_subclasses_and_read_only_arrays(torch):
    weight = torch.nn.Parameter(torch.zeros(1, 4, 1, 8), requires_grad=False)
    assert isinstance(dma.attention(weight, weight, weight), torch.Tensor)
    frozen = np.zeros((1, 4, 1, 8), np.float32)
    frozen.flags.writeable = False
    dma.attention(frozen, frozen, frozen)


def test_gradients_are_never_dropped(torch):
    """Whichever argument requires grad gets its gradient."""
    q, k, v, scores = (torch.rand(shape) for shape in ((1, 4, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8), (1, 1, 4)))
    dt_proj, A, dt_bias = torch.rand(1, 8), torch.ones(1), torch.zeros(1)
    calls = {
        "attention": (lambda: dma.attention(q, k, v, bias=scores, causal=True), (q, k, v, scores)),
        "scores given": (lambda: dma.dynamic_mask_attention(q, k, v, scores, window=2), (q, k, v, scores)),
        "scores made": (lambda: dma.dynamic_mask_attention(q, k, v, dt_proj=dt_proj, A=A, dt_bias=dt_bias, window=2),
                        (q, k, v, dt_proj, A, dt_bias)),
        "key_scores": (lambda: dma.key_scores(v, dt_proj, A, dt_bias=dt_bias), (v, dt_proj, A, dt_bias)),
    }
    for call, arguments in calls.values():
        assert not call().requires_grad
        for argument in arguments:
            argument.requires_grad_()
            out = call()
            out.square().sum().backward()
            assert argument.grad.any()
            argument.grad = None
            with torch.no_grad():
                assert torch.equal(call(), out) and not call().requires_grad
            argument.requires_grad_(False)
    mask = dma.IntervalMask.top_w(scores.requires_grad_(), 2)  # selection has no gradient: none is dropped
    assert not mask.stop.requires_grad


def test_importing_needs_and_loads_nothing():
    """Importing takes under 50 ms and loads neither CuPy nor torch nor triton, not even for NumPy work. The best of a
    few runs counts: the machine may be busy, and the first run writes the bytecode."""
    code = """
import sys, time
begin = time.perf_counter()
import cupy_dma
seconds = time.perf_counter() - begin
assert "numpy" not in sys.modules
print(seconds)
import numpy as np
x = np.zeros((1, 4, 1, 8), np.float32)
cupy_dma.dynamic_mask_attention(x, x, x, np.zeros((1, 1, 4), np.float32), window=2)
assert callable(cupy_dma.attention), "the module hides the function"
loaded = {"cupy", "torch", "triton", "jax"} & set(sys.modules)
assert not loaded, loaded
"""
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(4)]
    assert min(float(run.stdout) for run in runs) < 0.05
