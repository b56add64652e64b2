"""Wrong ways to combine or pass masks, which would silently do something else, raise errors."""
import operator
import traceback

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import IntervalMask

N = 5
A, B = IntervalMask.causal(N), IntervalMask.sliding_window(N, 2)
DENSE = np.tri(N, dtype=bool)


def q():
    return np.zeros((1, N, 2, 8), np.float32)


@pytest.mark.parametrize("use", [lambda: A and B, lambda: A or B, lambda: not A, lambda: bool(A), lambda: 1 if A else 0,
                                 lambda: dma.attention(q(), q(), q(), mask=A and B)])
def test_a_mask_has_no_truth_value(use):
    with pytest.raises(TypeError, match=r"mask has no truth value.*write a & b"):
        use()


@pytest.mark.parametrize("library", ["numpy", "scalar", "torch", pytest.param("cupy", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("combine", "instead"), [
    (operator.and_, r"mask & array is not defined.*mask=\(mask, array\)"),
    (operator.or_, r"mask \| array is not defined.*mask\.to_dense\(query_length\) \| array"),
    (operator.eq, r"mask == array is not defined.*mask\.to_dense\(query_length\) == array"),
    (operator.ne, r"mask == array is not defined")], ids=lambda x: getattr(x, "__name__", ""))
def test_masks_and_arrays(library, combine, instead):
    """With the array on either side."""
    if library == "scalar":
        array = np.True_
    else:
        array = pytest.importorskip(library).asarray(DENSE)
    for pair in ((A, array), (array, A)):
        with pytest.raises(TypeError, match=instead):
            combine(*pair)


def test_what_the_message_says_is_right():
    value = q() + np.arange(N, dtype=np.float32)[:, None, None]
    both, same = (dma.attention(q(), q(), value, mask=mask, return_lse=True) for mask in ((B, DENSE), A & B))
    assert all(np.array_equal(x, y) for x, y in zip(both, same))
    assert (B.to_dense(N) | DENSE).shape == (1, 1, N, N)


@pytest.mark.parametrize("other", [None, 3, "mask", [True]])
def test_other_things_are_not_masks(other):
    assert A != other and not A == other
    for combine in (operator.and_, operator.or_):
        for pair in ((A, other), (other, A)):
            with pytest.raises(TypeError, match="unsupported operand"):
                combine(*pair)


def test_masks_of_jax():
    pytest.importorskip("jax", minversion="0.9")
    pytest.importorskip("flax")
    import jax.numpy as jnp

    import cupy_dma.jax as dj

    mask = dj.IntervalMask.causal(N)
    with pytest.raises(TypeError, match="no truth value"):
        bool(mask)
    for array in (jnp.asarray(DENSE), DENSE):
        for combine in (operator.and_, operator.or_):
            for pair in ((mask, array), (array, mask)):
                with pytest.raises(TypeError, match="array is not defined"):
                    combine(*pair)
    with pytest.raises(TypeError, match="unsupported operand"):
        mask & A


@pytest.mark.parametrize("call", [
    lambda x: dma.attention(q(), q(), q(), mask=np.ma.array(DENSE, mask=x)),
    lambda x: dma.attention(q(), q(), q(), mask=(A, np.ma.array(DENSE, mask=x))),
    lambda x: dma.attention(q(), q(), np.ma.array(q(), mask=False)),
    lambda x: dma.attention(q(), q(), q(), bias=np.ma.array(DENSE.astype(np.float32), mask=x)),
    lambda x: IntervalMask.padding(np.ma.array(DENSE, mask=x)),
    lambda x: IntervalMask.top_w(np.zeros((1, 2, N), np.float32), 2, padding=np.ma.array(np.ones((1, N), bool))),
    lambda x: IntervalMask.documents(np.ma.array([0, 2, N])), lambda x: IntervalMask.from_stop(np.ma.arange(N)),
    lambda x: IntervalMask.causal(N, like=np.ma.array([1.0])),
    lambda x: dma.key_scores(q(), np.zeros((2, 16), np.float32), np.ma.array(np.ones(2, np.float32)))])
def test_masked_arrays_are_refused(call):
    with pytest.raises(TypeError, match=r"(mask|value|bias|padding|documents|stop|like|A) "
                                        r"must not be a masked array, got numpy\.ma.*MaskedArray: pass \w+\.filled"):
        call(DENSE)


def test_errors_of_a_backend_are_not_chained():
    """Only one traceback, without that of an internal lookup."""
    for backend, error in (("cuda", (ValueError, RuntimeError)), ("none", ValueError), ([], TypeError), (3, TypeError)):
        for call in (lambda b: dma.attention(q(), q(), q(), backend=b),
                     lambda b: IntervalMask.top_w(np.zeros((1, 2, N), np.float32), 2, backend=b),
                     lambda b: dma.DynamicCache(1, 2, 3, 8, backend=b)):
            with pytest.raises(error, match="backend") as caught:
                call(backend)
            text = "".join(traceback.format_exception(caught.value))
            assert text.count("Traceback") == 1 and "KeyError" not in text
