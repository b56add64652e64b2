"""The lowest finite biases on the Triton backend: only a row without visible keys has out = 0, lse = -inf. Runs like
tests/backends/test_triton.py, which also starts this file in the interpreter."""
import ml_dtypes
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backward import attention_backward
from tests.backends.test_triton import converter, host, on_device, quiet_interpreter, torch  # noqa: F401
from tests.oracle import reference

KINDS = {"key": ("float16", (1, 1, 1, 90)), "pair": ("bfloat16", (1, 2, 90, 90)),
         "float32": ("float32", (1, 1, 90, 90))}


def problem(kind, low, near):
    """Queries, keys, values, and a bias of ``low`` for all keys but the ``near`` last ones."""
    dtype, shape = KINDS[kind]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 90, heads, 32)).astype(numpy_dtype(dtype)) for heads in (4, 2, 2))
    bias_type = "float32" if kind == "key" else dtype
    bias = np.full(shape, float(ml_dtypes.finfo(numpy_dtype(bias_type)).min) if low == "lowest" else low)
    bias[..., 90 - near:] = rng.standard_normal((*shape[:3], near))
    return (q, k, v), np.ascontiguousarray(bias.astype(numpy_dtype(bias_type)))


@on_device
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("near", [0, 50])
@pytest.mark.parametrize("low", [-1e9, "lowest"], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_low_biases(torch, kind, low, near, softcap):  # noqa: F811
    """Such keys vanish beside others, but a row that sees only such keys attends to them: its output is their mean."""
    arrays, bias = problem(kind, low, near)
    move, options = converter("torch"), {"causal": True, "softcap": softcap}
    out, lse = map(host, dma.attention(*map(move, arrays), bias=move(bias), **options, return_lse=True,
                                       backend="triton"))
    reference.check_attention((out, lse), *arrays, bias=bias, **options)
    assert np.isfinite(lse).all() and (lse[..., :90 - near] < -9e8).all()


@on_device
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("low", [-1e7, -1e9, "lowest"], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_low_biases(torch, kind, low, softcap):  # noqa: F811
    """The first rows see only such keys. float32 cannot represent their probabilities, which must not become infinite:
    they get no gradient."""
    arrays, bias = problem(kind, low, 50)
    move, options = converter("torch"), {"causal": True, "softcap": softcap}
    dout = arrays[0][:, ::-1].copy()
    given = [*map(move, arrays)]
    out, lse = dma.attention(*given, bias=move(bias), **options, return_lse=True, backend="triton")
    found = attention_backward(move(dout), *given, out, lse, bias=move(bias), **options, backend="triton")
    dout[:, :40] = 0
    reference.check_attention_gradients(map(host, found), dout, *arrays, bias=bias, **options)


@on_device
@pytest.mark.parametrize("hidden", [-np.inf, "mask"], ids=str)
def test_rows_that_see_nothing_beside_low_biases(torch, hidden):  # noqa: F811
    """A mask or a bias of -inf hides keys; the lowest finite bias does not."""
    arrays, bias = problem("float32", "lowest", 0)
    seen = np.ones((1, 1, 90, 90), bool)
    seen[:, :, :30] = False
    move, options = converter("torch"), {}
    if hidden == "mask":
        options["mask"] = move(seen)
    else:
        bias = np.where(seen, bias, np.float32(hidden))
    out, lse = map(host, dma.attention(*map(move, arrays), bias=move(bias), **options, return_lse=True,
                                       backend="triton"))
    assert not out[:, :30].any() and np.isneginf(lse[..., :30]).all()
    assert np.isfinite(lse[..., 30:]).all() and out[:, 30:].any(-1).all()
