"""cupy_dma.jit: users' kernels on the emulator and on a GPU, and errors for wrong ones."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import backends
from cupy_dma.backends.cuda.runtime import jit as runtime

build = pytest.importorskip("tests.emulator.build")
emulated = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

SOURCE = """
#include "common/{header}"
struct Params {{
    const {element}* x;  // (n)
    {element}* y;        // (n)
    int n;
    float factor;
}};
extern "C" __global__ void scale(const Params p) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    {guard} p.y[i] = {store}(FACTOR * p.factor * {load}(p.x[i]));
}}
"""


def source(element="float", guard="if (i < p.n)", header="rank.cuh"):
    load, store = {"float": ("float", "float"), "__half": ("__half2float", "__float2half_rn"),
                   "__nv_bfloat16": ("__bfloat162float", "__float2bfloat16_rn")}[element]
    return SOURCE.format(element=element, guard=guard, header=header, load=load, store=store)


@pytest.fixture
def emulator():
    if build.unavailable() is not None:
        pytest.skip(str(build.unavailable()))
    import tests.emulator

    return tests.emulator


def arrays(n=100):
    return np.arange(n, dtype=np.float32), np.zeros(n, np.float32)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_kernel_on_the_emulator(emulator, library):
    x, y = arrays()
    given = [x, y]
    if library == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(x), torch.from_numpy(y)]
    dma.jit(source(), defines={"FACTOR": 3})(2, 64, x=given[0], y=given[1], n=100, factor=0.5)
    assert np.array_equal(y, 1.5 * x)


@pytest.mark.parametrize("element", ["float", "__half", "__nv_bfloat16"])
def test_from_a_file_and_with_headers_of_the_project(emulator, tmp_path, element):
    from cupy_dma.arrays import numpy_dtype

    dtype = numpy_dtype({"float": "float32", "__half": "float16", "__nv_bfloat16": "bfloat16"}[element])
    path = tmp_path / "scale.cu"
    path.write_text(source(element, header="arch.cuh"))
    x, y = (array.astype(dtype) for array in arrays(30))
    for given in (path, str(path)):
        y[:] = 0
        dma.jit(given, "scale", defines={"FACTOR": True, "ELEMENT": element})(1, 32, x=x, y=y, n=30, factor=2)
        assert np.array_equal(y, 2 * x)


@pytest.mark.gpu
def test_a_kernel_on_a_gpu():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = (cupy.asarray(array) for array in arrays(1000))
        dma.jit(source(), defines={"FACTOR": 3})(8, 128, x=x, y=y, n=1000, factor=0.5)
        assert np.array_equal(y.get(), 1.5 * np.arange(1000))


@pytest.mark.gpu
def test_kernels_of_one_source_with_other_shared_memory_on_a_gpu():
    """They share one driver function, which must allow the largest size."""
    import cupy

    text = source(guard="extern __shared__ float s[]; s[p.n] = 0; if (i < p.n)")
    sizes = 100_000, 60_000, 10_000, 100_000, 1000, 60_000
    kernels = {size: dma.jit(text, defines={"FACTOR": 3}, shared_bytes=size) for size in sizes}
    x = cupy.arange(100, dtype=np.float32)
    for size in sizes:
        y = cupy.zeros_like(x)
        kernels[size](1, 128, x=x, y=y, n=100, factor=0.5)
        assert np.array_equal(y.get(), 1.5 * np.arange(100))


def test_the_emulator_reports_what_a_kernel_does_wrong(emulator):
    x, y = arrays()
    with pytest.raises(emulator.EmulatorError, match=r"scale.*thread 36|thread 36.*user.cu"):
        dma.jit(source(guard=""), defines={"FACTOR": 3})(2, 64, x=x, y=y, n=100, factor=1)
    read_only = source().replace("p.y[i] =", "const_cast<float*>(p.x)[i] =")
    with pytest.raises(emulator.EmulatorError, match="x"):
        dma.jit(read_only, defines={"FACTOR": 3})(2, 64, x=x, y=y, n=100, factor=1)


def test_changed_defines_are_another_kernel(emulator):
    for factor in (2, 5):
        x, y = arrays()
        dma.jit(source(), defines={"FACTOR": factor})(2, 64, x=x, y=y, n=100, factor=1)
        assert np.array_equal(y, factor * x)


def test_a_kernel_compiles_for_a_gpu_without_one():
    try:
        runtime.find_headers()
    except runtime.CompileError as error:
        pytest.skip(str(error))
    assert runtime.compile(dma.jit(source(), defines={"FACTOR": 2})._config, "sm_80").spill_bytes == 0
    wrong = dma.jit(source().replace("float(p.x[i])", "p.z[i]"), defines={"FACTOR": 2})
    with pytest.raises(runtime.CompileError, match=r"sm_80(.|\n)*user\.cu\(\d+\): error"):
        runtime.compile(wrong._config, "sm_80")


@pytest.mark.parametrize(("text", "entry", "message"), [
    ("int x;", None, "it has none of that form, got None"),
    (source(), "other", "it has scale, got 'other'"),
    (source().replace('extern "C" ', ""), None, "it has none of that form"),
    (source() + 'extern "C" __global__ void two(const Params p) {}\n', None, "it has scale, two, got None"),
    (source().replace("struct Params", "struct Other"), None, "takes a struct Params, which the source does not def"),
    (source().replace("int n;", "double n;"), None, "arrays of int, and pointers.*'double n'"),
    (source().replace("const float* x;", "const float *x, *z;"), None, r"got 'const float \*x, \*z'"),
])
def test_wrong_sources(text, entry, message):
    with pytest.raises(ValueError, match=message):
        dma.jit(text, entry)


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"no\.cu"):
        dma.jit("no.cu")


X, Y = arrays()
GOOD = {"x": X, "y": Y, "n": 100, "factor": 1.0}


@pytest.mark.parametrize(("grid", "threads", "changes", "error", "message"), [
    (0, 32, {}, ValueError, "grid must be at least 1, got 0"),
    (1, 2.0, {}, TypeError, "threads must be an int, got float"),
    (1, 32, {"z": 1}, TypeError, "scale takes x, y, n, factor, got x, y, n, factor, z"),
    (1, 32, {"x": X.astype(np.float64)}, TypeError, r"x is a const float\* and must be float32, got float64"),
    (1, 32, {"x": [1.0]}, TypeError, "x must be a numpy.ndarray, .*, got builtins.list"),
    (1, 32, {"y": np.zeros((100, 2), np.float32)[:, 0]}, ValueError, "y must be contiguous, got shape"),
    (1, 32, {"n": 1.5}, TypeError, "n must be an int, got float"),
    (1, 32, {"n": 2**31}, ValueError, r"n must be below 2\*\*31, as int holds it, got 2147483648"),
    (1, 32, {"factor": "a"}, TypeError, "factor must be a real number"),
])
def test_wrong_launches(grid, threads, changes, error, message):
    with pytest.raises(error, match=message):
        dma.jit(source(), defines={"FACTOR": 1})(grid, threads, **{**GOOD, **changes})


def test_without_an_emulator_or_a_gpu(monkeypatch):
    monkeypatch.setattr(backends, "_registered", {})
    with pytest.raises(RuntimeError, match=r"x is on the CPU, .* in a checkout, import tests\.emulator first"):
        dma.jit(source())(1, 32, **GOOD)
    with pytest.raises(ValueError, match="backend must be 'cuda' or 'emulator', got 'numpy'"):
        dma.jit(source(), backend="numpy")(1, 32, **GOOD)
