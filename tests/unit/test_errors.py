"""Bad input raises before anything is computed, and every message names the argument, the given value and what is
allowed.
"""
import operator
import traceback
from dataclasses import replace

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import backends, checks
from cupy_dma.arrays import Device, describe
from cupy_dma.backends import numpy as numpy_backend
from tests.oracle.refusals import check_refused, check_wrong, wrong

M = dma.IntervalMask
B, LQ, LK, H, HKV, D = 2, 5, 7, 4, 2, 8


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def integers(*shape):
    return np.zeros(shape, np.int32)


def bools(*shape):
    return np.zeros(shape, bool)


Q, K = zeros(B, LQ, H, D), zeros(B, LK, HKV, D)
SCORES, DT, A, LSE, RUN = zeros(B, HKV, LK), zeros(HKV, HKV * D), zeros(HKV), zeros(B, H, LQ), integers(LK)


def attend(query=Q, key=K, value=K, **options):
    return dma.attention(query, key, value, **options)


def key_scores(value=K, dt_proj=DT, A=A, **options):
    return dma.key_scores(value, dt_proj, A, **options)


def top_w(scores=SCORES, window=3, **options):
    return M.top_w(scores, window, **options)


def runs(start=RUN, stop=RUN):
    return M(start, stop)


def prefix_lm(prefix_length, **options):
    return M.prefix_lm(LK, prefix_length, **options)


def dynamic(scores=SCORES, window=3, **options):
    return dma.dynamic_mask_attention(Q, K, K, scores, window=window, **options)


def backward(**given):
    given = {"dout": Q, "out": Q, "lse": LSE, **given}
    return dma.backward.attention_backward(query=Q, key=K, value=K, **given)


def dynamic_backward(scores=SCORES, window=3, lse=LSE, **options):
    return dma.backward.dynamic_mask_attention_backward(Q, Q, K, K, Q, lse, scores, window=window, **options)


def key_scores_backward(dscores=SCORES, **options):
    return dma.backward.key_scores_backward(dscores, K, DT, A, **options)


def torch_tensor(*shape):
    return pytest.importorskip("torch").zeros(*shape)


WRONG = [
    *wrong(attend, TypeError, query=[[1.0], integers(B, LQ, H, D)], key=[K.astype(np.float16)],
           value=[K.astype(np.float64), lambda: torch_tensor(B, LK, HKV, D)],
           mask=["causal", (M.causal(LK), None)],
           bias=[lambda: torch_tensor(B, HKV, LK), integers(B, HKV, LK)],
           scale=["big"], softcap=[None], bias_delay=[True], causal=["yes"], deterministic=[1], backend=[3]),
    *wrong(attend, ValueError,
           query=[zeros(LQ, H, D), zeros(B, LQ, 3, D), zeros(B, LQ, 0, D), zeros(B, LQ, H, 257), zeros(B, LQ, H, 0),
                  zeros(B, LQ, H, 2 * D)[..., ::2]],
           key=[zeros(LK, HKV, D), zeros(3, LK, HKV, D), zeros(B, LK, HKV, 9)],
           value=[zeros(1, 1, LK, HKV, D), zeros(B, 6, HKV, D), zeros(B, LK, D, HKV).swapaxes(2, 3)],
           mask=[M.causal(8), M.padding(bools(3, LK)), M(integers(1, 3, LK), integers(LK)), bools(LQ, 6),
                 bools(B, 3, LQ, LK), bools(B, LQ, LK), bools(1, 1, LQ, 2 * LK)[..., ::2], [M.causal(LK), M.causal(8)]],
           bias=[zeros(B, 3, LK), zeros(B, HKV, 6), zeros(B, HKV, 4, LK), zeros(LQ, LK),
                 zeros(B, HKV, 1, 2 * LK)[..., ::2]],
           scale=[np.nan, np.inf, -1e39], softcap=[-1.0, 1e39, 1e-46],
           bias_delay=[-1, 2**30 + 1], backend=["cuda13"]),
    *wrong(key_scores, TypeError, value=[K.astype(np.int8)], dt_proj=[lambda: torch_tensor(HKV, HKV * D)],
           dt_bias=[0.5]),
    *wrong(key_scores, ValueError, value=[zeros(B, LK, D), zeros(B, LK, HKV, 300), zeros(B, LK, 0, D)],
           dt_proj=[DT.T, zeros(HKV * D, HKV).T], A=[zeros(3)], dt_bias=[zeros(HKV, 1)], form=["log"], backend=["no"]),
    *wrong(top_w, TypeError, window=[2.0, True], scores=[integers(B, HKV, LK)],
           padding=[lambda: torch_tensor(B, LK).bool()], documents=[[0, 7.0], [[0, 7], [1]]]),
    *wrong(top_w, ValueError, window=[0], keys=["window"], scores=[zeros(B, LK)], padding=[bools(3, LK)],
           documents=[[0, 6], integers(B, 6), np.array([0, 6])]),
    *wrong(runs, TypeError, start=[zeros(LK)], stop=[zeros(LK, dtype=np.int16)]),
    *wrong(runs, ValueError, start=[integers(6), integers(1, 1, 1, LK), integers(2 * LK)[::2]]),
    *wrong(M.causal, TypeError, key_length=[7.0]), *wrong(M.causal, ValueError, key_length=[-1]),
    *wrong(prefix_lm, TypeError, prefix_length=[zeros(2)]),
    *wrong(prefix_lm, ValueError, prefix_length=[-1, integers(2, 1)]),
    *wrong(M.padding, TypeError, padding=[np.ones((B, LK))]), *wrong(M.padding, ValueError, padding=[bools(LK)]),
    *wrong(M.documents, TypeError, documents=[zeros(B, LK)]),
    *wrong(M.documents, ValueError,
           documents=[np.array([1, 4]), np.array([0, 5, 3, 7]), integers(1, B, LK), integers(0)]),
    *wrong(M.causal(7).to_dense, ValueError, query_length=[-1]),
    *wrong(M.causal(7).count, TypeError, query_length=["x"]),
    *wrong(dynamic, ValueError, scores=[zeros(B, 3, LK), zeros(1, HKV, LK)], padding=[bools(B, 6)]),
    *wrong(backward, TypeError, dout=[Q.astype(np.float16), None, lambda: torch_tensor(*Q.shape)],
           lse=[integers(B, H, LQ)]),
    *wrong(backward, ValueError, dout=[Q[:, :1]], out=[K], lse=[zeros(B, LQ, H)], dlse=[zeros(B, H)],
           needs=["queries", ("query", "scores")]),
    *wrong(dynamic_backward, ValueError, needs=[("bias",)], lse=[Q]),
    *wrong(key_scores_backward, TypeError, dscores=[SCORES > 0]),
    *wrong(key_scores_backward, ValueError, dscores=[zeros(B, LK)], form=["log"], needs=["a"]),
]
# Several arguments that do not fit each other, and messages that say what to do instead.
CASES = [
    (lambda: attend(Q, *[zeros(B, LK, 0, D)] * 2), ValueError, ["query", "0 kv heads"]),
    (lambda: attend(mask=M.causal(LK, like=torch_tensor(1))), ValueError, ["mask", "torch", "numpy", ".to(query)"]),
    (lambda: attend(mask=zeros(LQ, LK)), TypeError, ["mask", "float32", "bool", "mask == 0", "bias"]),
    (lambda: attend(mask=bools(B, LK)), ValueError, ["mask", "(2, 7)", "is (B, Lk)", "mask[:, None, None]", "padding"]),
    (lambda: attend(Q[:, :2], mask=bools(2, LK)), ValueError, ["mask", "fits (Lq, Lk) and (B, Lk)", "[None, None]"]),
    (lambda: attend(mask=(bools(LQ, LK), bools(LQ, 6))), ValueError, ["mask", "1 or 7"]),
    (lambda: top_w(padding=zeros(B, LK)), TypeError, ["padding", "float32", "integers 1", "padding == 0"]),
    (lambda: top_w(padding=integers(B, LK) - 1), ValueError, ["padding", "1 for real keys"]),
    (lambda: M.causal(7, like=3), TypeError, ["like", "builtins.int"]),
    (lambda: M.sliding_window(7, 0), ValueError, ["window", "0", "at least 1"]),
    (lambda: M.sinks(7, -1), ValueError, ["count", "-1", "at least 0"]),
    (lambda: prefix_lm(integers(2), like=torch_tensor(1)), ValueError, ["prefix_length", "torch", "numpy"]),
    (lambda: M.documents(np.array([0, 4]), key_length=7), ValueError, ["documents", "[0, 4]", "7"]),
    (lambda: M.documents(integers(B, LK), key_length=8), ValueError, ["key_length", "8", "7"]),
    (lambda: M.documents(np.array([0, 7]), causal=None), TypeError, ["causal", "None", "True or False"]),
    (lambda: M.causal(7) & M.causal(8), ValueError, ["mask & mask", "(1, 1, 7)", "(1, 1, 8)"]),
    (lambda: M.causal(7) | M.causal(8), ValueError, ["mask | mask", "(1, 1, 7)", "(1, 1, 8)"]),
    (lambda: M.causal(7) & M.causal(7, like=torch_tensor(1)), ValueError, ["mask & mask", "torch", "numpy", ".to("]),
    (lambda: M.causal(7) == M.causal(7, like=torch_tensor(1)), ValueError, ["mask == mask", "torch", ".to("]),
    (lambda: dynamic(scores=None), ValueError, ["scores", "dt_proj", "neither"]),
    (lambda: dynamic(dt_proj=DT, A=A), ValueError, ["scores", "dt_proj", "both"]),
    (lambda: dynamic(scores=None, dt_proj=DT), ValueError, ["A", "dt_proj", "None"]),
    (lambda: dynamic(A=A), ValueError, ["A", "dt_proj", "scores"]),
    (lambda: dynamic(dt_bias=A), ValueError, ["dt_bias", "dt_proj", "scores"]),
    (lambda: dynamic(causal=False), ValueError, ["causal=False", "keys='prefix'", "keys='global'"]),
]


@pytest.fixture
def nothing_runs(monkeypatch):
    """No kernel may be launched before all checks."""
    for name in ("attention", "key_scores", "prefix_stop", "attention_backward", "key_scores_backward"):
        monkeypatch.setattr(numpy_backend, name, lambda *arguments: pytest.fail("launched before all checks"))


@pytest.mark.parametrize(("function", "error", "name", "value"), WRONG)
def test_wrong_arguments(function, error, name, value, nothing_runs):
    check_wrong(function, error, name, value)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_wrong_calls(number, nothing_runs):
    call, error, words = CASES[number]
    check_refused(error, words, call)


def test_the_same_calls_with_good_input_pass():
    attend(mask=M.causal(LK), bias=SCORES, scale=1, softcap=2, causal=np.bool_(True), backend="numpy")
    attend(scale=np.float32(0.5), softcap=np.int64(3), bias=zeros(1, 1, 1), mask=np.ones((LQ, LK), bool))
    dynamic(window=np.int64(3))
    dma.key_scores(K, DT, A, dt_bias=A, backend="numpy")


def test_a_mask_from_another_device_is_refused():
    """Messages about mixed devices need no second device, because the checks only read Operands."""
    with pytest.raises(ValueError, match=r"query is on cpu, key is on cuda:1"):
        far = replace(describe(K, "key"), device=Device("cuda", 1))
        checks.require_same_device((describe(Q, "query"), None, far))


# ---- the choice of a backend ----
ON_CUDA = replace(describe(Q, "query"), device=Device("cuda", 0))


def test_available_backends():
    names = dma.get_available_backends()
    assert "numpy" in names and set(names) <= {"cuda", "numpy", "flex"}
    for name in backends.NAMES:
        reason = backends.why_not(name)
        assert (reason is None) == (name in names) and (reason is None or isinstance(reason, str))


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(backends, "_loaded", {})
    monkeypatch.setattr(backends, "import_module", lambda name: (_ for _ in ()).throw(ImportError("no CuPy here")))
    with pytest.raises(RuntimeError, match=r"query on cuda:0.*no CuPy here.*backend='numpy'"):
        backends.choose(None, (ON_CUDA,))
    with pytest.raises(RuntimeError, match=r"backend='cuda'.*no CuPy here"):
        backends.choose("cuda", (ON_CUDA,))


def test_the_choice_follows_the_arrays(monkeypatch):
    class Cuda:
        unavailable = staticmethod(lambda: None)

    monkeypatch.setattr(backends, "_loaded", {"numpy": numpy_backend, "cuda": Cuda})
    assert backends.choose(None, (None, ON_CUDA)) is Cuda
    assert backends.choose("cuda", (ON_CUDA,)) is Cuda
    assert backends.choose("numpy", (ON_CUDA,)) is numpy_backend
    with pytest.raises(ValueError, match=r"backend='cuda' takes CUDA arrays, but query is on cpu"):
        attend(backend="cuda")


# ---- wrong ways to combine or pass masks, which would silently do something else ----
N = 5
CAUSAL, RECENT = M.causal(N), M.sliding_window(N, 2)
DENSE = np.tri(N, dtype=bool)


def q():
    return np.zeros((1, N, 2, 8), np.float32)


@pytest.mark.parametrize("use", [
    lambda: CAUSAL and RECENT, lambda: CAUSAL or RECENT, lambda: not CAUSAL, lambda: bool(CAUSAL),
    lambda: 1 if CAUSAL else 0, lambda: dma.attention(q(), q(), q(), mask=CAUSAL and RECENT)])
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
    for pair in ((CAUSAL, array), (array, CAUSAL)):
        with pytest.raises(TypeError, match=instead):
            combine(*pair)


def test_what_the_message_says_is_right():
    value = q() + np.arange(N, dtype=np.float32)[:, None, None]
    both, same = (dma.attention(q(), q(), value, mask=mask, return_lse=True)
                  for mask in ((RECENT, DENSE), CAUSAL & RECENT))
    assert all(np.array_equal(x, y) for x, y in zip(both, same))
    assert (RECENT.to_dense(N) | DENSE).shape == (1, 1, N, N)


@pytest.mark.parametrize("other", [None, 3, "mask", [True]])
def test_other_things_are_not_masks(other):
    assert CAUSAL != other and not CAUSAL == other
    for combine in (operator.and_, operator.or_):
        for pair in ((CAUSAL, other), (other, CAUSAL)):
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
        mask & CAUSAL


@pytest.mark.parametrize("call", [
    lambda x: dma.attention(q(), q(), q(), mask=np.ma.array(DENSE, mask=x)),
    lambda x: dma.attention(q(), q(), q(), mask=(CAUSAL, np.ma.array(DENSE, mask=x))),
    lambda x: dma.attention(q(), q(), np.ma.array(q(), mask=False)),
    lambda x: dma.attention(q(), q(), q(), bias=np.ma.array(DENSE.astype(np.float32), mask=x)),
    lambda x: M.padding(np.ma.array(DENSE, mask=x)),
    lambda x: M.top_w(np.zeros((1, 2, N), np.float32), 2, padding=np.ma.array(np.ones((1, N), bool))),
    lambda x: M.documents(np.ma.array([0, 2, N])), lambda x: M.from_stop(np.ma.arange(N)),
    lambda x: M.causal(N, like=np.ma.array([1.0])),
    lambda x: dma.key_scores(q(), np.zeros((2, 16), np.float32), np.ma.array(np.ones(2, np.float32)))])
def test_masked_arrays_are_refused(call):
    with pytest.raises(TypeError, match=r"(mask|value|bias|padding|documents|stop|like|A) "
                                        r"must not be a masked array, got numpy\.ma.*MaskedArray: pass \w+\.filled"):
        call(DENSE)


def test_errors_of_a_backend_are_not_chained():
    """Only one traceback, without that of an internal lookup."""
    for backend, error in (("cuda", (ValueError, RuntimeError)), ("none", ValueError), ([], TypeError), (3, TypeError)):
        for call in (lambda b: dma.attention(q(), q(), q(), backend=b),
                     lambda b: M.top_w(np.zeros((1, 2, N), np.float32), 2, backend=b),
                     lambda b: dma.DynamicCache(1, 2, 3, 8, backend=b)):
            with pytest.raises(error, match="backend") as caught:
                call(backend)
            text = "".join(traceback.format_exception(caught.value))
            assert text.count("Traceback") == 1 and "KeyError" not in text
