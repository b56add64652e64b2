"""Bad input raises before anything is computed, and every message names the argument, the given value and what is
allowed.
"""
import functools
import operator
import traceback
from dataclasses import replace

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma import backends, checks
from cupy_dma.arrays import Device, describe
from cupy_dma.backends import numpy as numpy_backend
from tests.oracle.refusals import check_refused

M = dma.IntervalMask
B, LQ, LK, H, HKV, D = 2, 5, 7, 4, 2, 8


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K = zeros(B, LQ, H, D), zeros(B, LK, HKV, D)
SCORES, DT, A, LSE = zeros(B, HKV, LK), zeros(HKV, HKV * D), zeros(HKV), zeros(B, H, LQ)


def attend(query=Q, key=K, value=K, **options):
    return dma.attention(query, key, value, **options)


def dynamic(scores=SCORES, window=3, **options):
    return dma.dynamic_mask_attention(Q, K, K, scores, window=window, **options)


def backward(**given):
    given = {"dout": Q, "out": Q, "lse": LSE, **given}
    return dma.backward.attention_backward(query=Q, key=K, value=K, **given)


def dynamic_backward(scores=SCORES, window=3, lse=LSE, **options):
    return dma.backward.dynamic_mask_attention_backward(Q, Q, K, K, Q, lse, scores, window=window, **options)


def torch_tensor(*shape):
    return pytest.importorskip("torch").zeros(*shape)


# (call, exception, required words of the message: argument, given value, allowed values)
CASES = [
    # types of arguments
    (lambda: attend(query=[1.0]), TypeError, ["query", "builtins.list", "numpy.ndarray"]),
    (lambda: attend(query=zeros(B, LQ, H, D, dtype=np.int32)), TypeError, ["query", "int32", "float16"]),
    (lambda: attend(key=K.astype(np.float16)), TypeError, ["key", "float16", "float32"]),
    (lambda: attend(value=K.astype(np.float64)), TypeError, ["value", "float64", "float32"]),
    (lambda: attend(value=torch_tensor(B, LK, HKV, D)), TypeError, ["value", "torch", "query", "numpy"]),
    (lambda: attend(bias=torch_tensor(B, HKV, LK)), TypeError, ["bias", "torch", "numpy"]),
    # shapes of query, key, value
    (lambda: attend(query=zeros(LQ, H, D)), ValueError, ["query", "(5, 4, 8)", "(B, Lq, H, D)"]),
    (lambda: attend(key=zeros(LK, HKV, D)), ValueError, ["key", "(7, 2, 8)", "(B, Lk, Hkv, D)"]),
    (lambda: attend(value=zeros(1, 1, LK, HKV, D)), ValueError, ["value", "(1, 1, 7, 2, 8)", "(B, Lk, Hkv, D)"]),
    (lambda: attend(key=zeros(3, LK, HKV, D)), ValueError, ["key", "(3, 7, 2, 8)", "(2, any, any, 8)"]),
    (lambda: attend(key=zeros(B, LK, HKV, 9)), ValueError, ["key", "(2, 7, 2, 9)", "(2, any, any, 8)"]),
    (lambda: attend(value=zeros(B, 6, HKV, D)), ValueError, ["value", "(2, 6, 2, 8)", "(2, 7, 2, 8)"]),
    (lambda: attend(zeros(B, LQ, 3, D)), ValueError, ["query", "H % Hkv", "3 query heads", "2 kv heads"]),
    (lambda: attend(zeros(B, LQ, 0, D)), ValueError, ["query", "0 query heads"]),
    (lambda: attend(Q, *[zeros(B, LK, 0, D)] * 2), ValueError, ["query", "0 kv heads"]),
    (lambda: attend(*[zeros(1, 2, 1, 257)] * 3), ValueError, ["query", "(1, 2, 1, 257)", "1 to 256"]),
    (lambda: attend(*[zeros(1, 2, 1, 0)] * 3), ValueError, ["query", "(1, 2, 1, 0)", "1 to 256"]),
    (lambda: attend(query=zeros(B, LQ, H, 2 * D)[..., ::2]), ValueError, ["query", "last axis", "stride 2"]),
    (lambda: attend(value=zeros(B, LK, D, HKV).swapaxes(2, 3)), ValueError, ["value", "last axis", "stride 2"]),
    # masks
    (lambda: attend(mask=M.causal(8)), ValueError, ["mask", "(1, 1, 8)", "(1 or 2, 1 or 2 or 4, 7)"]),
    (lambda: attend(mask=M.padding(np.ones((3, LK), bool))), ValueError, ["mask", "(3, 1, 7)", "(1 or 2, "]),
    (lambda: attend(mask=M(zeros(1, 3, LK, dtype=np.int32), zeros(LK, dtype=np.int32))), ValueError,
     ["mask", "(1, 3, 7)", "1 or 2 or 4"]),
    (lambda: attend(mask=M.causal(LK, like=torch_tensor(1))), ValueError, ["mask", "torch", "numpy", ".to(query)"]),
    (lambda: attend(mask=zeros(LQ, LK)), TypeError, ["mask", "float32", "bool", "mask == 0", "bias"]),
    (lambda: attend(mask=zeros(B, LK, dtype=bool)), ValueError,
     ["mask", "(2, 7)", "is (B, Lk)", "mask[:, None, None]", "padding", "(Lq, Lk) = (5, 7)"]),
    (lambda: attend(Q[:, :2], mask=zeros(2, LK, dtype=bool)), ValueError,
     ["mask", "(2, 7)", "fits (Lq, Lk) and (B, Lk)", "mask[:, None, None]", "mask[None, None]", "padding"]),
    (lambda: attend(mask=zeros(LQ, 6, dtype=bool)), ValueError, ["mask", "(1, 1, 5, 6)", "1 or 7"]),
    (lambda: attend(mask=zeros(B, 3, LQ, LK, dtype=bool)), ValueError, ["mask", "(2, 3, 5, 7)", "1 or 2 or 4"]),
    (lambda: attend(mask=zeros(B, LQ, LK, dtype=bool)), ValueError, ["mask", "(2, 5, 7)"]),
    (lambda: attend(mask=zeros(1, 1, LQ, 2 * LK, dtype=bool)[..., ::2]), ValueError, ["mask", "last axis", "stride 2"]),
    (lambda: attend(mask="causal"), TypeError, ["mask", "builtins.str"]),
    (lambda: attend(mask=(M.causal(LK), None)), TypeError, ["mask", "tuple", "NoneType", "IntervalMask"]),
    (lambda: attend(mask=[M.causal(LK), M.causal(8)]), ValueError, ["mask", "(1, 1, 8)", "(1 or 2, 1 or 2 or 4, 7)"]),
    (lambda: attend(mask=(zeros(LQ, LK, dtype=bool), zeros(LQ, 6, dtype=bool))), ValueError, ["mask", "1 or 7"]),
    # biases
    (lambda: attend(bias=zeros(B, HKV, LK, dtype=np.int64)), TypeError, ["bias", "int64", "float32"]),
    (lambda: attend(bias=zeros(B, 3, LK)), ValueError, ["bias", "(2, 3, 7)", "1 or 2 or 4"]),
    (lambda: attend(bias=zeros(B, HKV, 6)), ValueError, ["bias", "(2, 2, 6)", "1 or 7"]),
    (lambda: attend(bias=zeros(B, HKV, 4, LK)), ValueError, ["bias", "(2, 2, 4, 7)", "1 or 5"]),
    (lambda: attend(bias=zeros(LQ, LK)), ValueError, ["bias", "(5, 7)"]),
    (lambda: attend(bias=zeros(B, HKV, 1, 2 * LK)[..., ::2]), ValueError, ["bias", "last axis", "stride 2"]),
    # options
    (lambda: attend(scale="big"), TypeError, ["scale", "'big'", "real number"]),
    (lambda: attend(scale=np.nan), ValueError, ["scale", "nan", "finite"]),
    (lambda: attend(scale=np.inf), ValueError, ["scale", "inf", "finite"]),
    (lambda: attend(softcap=-1.0), ValueError, ["softcap", "-1.0", "at least 0"]),
    (lambda: attend(softcap=1e39), ValueError, ["softcap", "1e+39", "1.7e38", "float32"]),
    (lambda: attend(softcap=1e-46), ValueError, ["softcap", "1e-46", "1.2e-38", "float32"]),
    (lambda: attend(scale=-1e39), ValueError, ["scale", "-1e+39", "1.7e38", "float32"]),
    (lambda: attend(softcap=None), TypeError, ["softcap", "None", "real number"]),
    (lambda: attend(causal="yes"), TypeError, ["causal", "'yes'", "True or False"]),
    (lambda: attend(deterministic=1), TypeError, ["deterministic", "1", "True or False"]),
    # scores
    (lambda: dma.key_scores(zeros(B, LK, D), DT, A), ValueError, ["value", "(2, 7, 8)", "(B, Lk, Hkv, D)"]),
    (lambda: dma.key_scores(zeros(B, LK, HKV, 300), DT, A), ValueError, ["value", "(2, 7, 2, 300)", "1 to 256"]),
    (lambda: dma.key_scores(zeros(B, LK, 0, D), DT, A), ValueError, ["value", "(2, 7, 0, 8)", "kv head"]),
    (lambda: dma.key_scores(K.astype(np.int8), DT, A), TypeError, ["value", "int8", "float16"]),
    (lambda: dma.key_scores(K, DT.T, A), ValueError, ["dt_proj", "(16, 2)", "(2, 16)"]),
    (lambda: dma.key_scores(K, DT, zeros(3)), ValueError, ["A", "(3,)", "(2)"]),
    (lambda: dma.key_scores(K, DT, A, dt_bias=zeros(HKV, 1)), ValueError, ["dt_bias", "(2, 1)", "(Hkv,)"]),
    (lambda: dma.key_scores(K, DT, A, dt_bias=0.5), TypeError, ["dt_bias", "float"]),
    (lambda: dma.key_scores(K, zeros(HKV * D, HKV).T, A), ValueError, ["dt_proj", "last axis", "stride 2"]),
    (lambda: dma.key_scores(K, DT, A, form="log"), ValueError, ["form", "'log'", "'exp' or 'linear'"]),
    (lambda: dma.key_scores(K, torch_tensor(HKV, HKV * D), A), TypeError, ["dt_proj", "torch", "numpy"]),
    # selection
    (lambda: M.top_w(SCORES, 0), ValueError, ["window", "0", "at least 1"]),
    (lambda: M.top_w(SCORES, 2.0), TypeError, ["window", "2.0", "int"]),
    (lambda: M.top_w(SCORES, True), TypeError, ["window", "True", "int"]),
    (lambda: M.top_w(SCORES, 3, keys="window"), ValueError, ["keys", "'window'", "'prefix' or 'global'"]),
    (lambda: M.top_w(zeros(B, LK), 3), ValueError, ["scores", "(2, 7)", "(B, Hkv, Lk)"]),
    (lambda: M.top_w(zeros(B, HKV, LK, dtype=np.int32), 3), TypeError, ["scores", "int32", "float16"]),
    (lambda: M.top_w(SCORES, 3, padding=zeros(B, LK)), TypeError,
     ["padding", "float32", "bool", "integers 1", "padding == 0"]),
    (lambda: M.top_w(SCORES, 3, padding=zeros(B, LK, dtype=np.int64) - 1), ValueError, ["padding", "1 for real keys"]),
    (lambda: M.top_w(SCORES, 3, documents=[0, 6]), ValueError, ["documents", "[0, 6]", "key length 7"]),
    (lambda: M.top_w(SCORES, 3, documents=[0, 7.0]), TypeError, ["documents", "[0, 7.0]", "list of ints"]),
    (lambda: M.top_w(SCORES, 3, documents=[[0, 7], [1]]), TypeError, ["documents", "[[0, 7], [1]]", "list of ints"]),
    (lambda: M.top_w(SCORES, 3, padding=zeros(3, LK, dtype=bool)), ValueError, ["padding", "(3, 7)", "1 or 2"]),
    (lambda: M.top_w(SCORES, 3, padding=torch_tensor(B, LK).bool()), TypeError, ["padding", "torch", "numpy"]),
    (lambda: M.top_w(SCORES, 3, documents=zeros(B, 6, dtype=np.int32)), ValueError, ["documents", "(2, 6)", "7"]),
    (lambda: M.top_w(SCORES, 3, documents=np.array([0, 6])), ValueError, ["documents", "[0, 6]", "key length 7"]),
    # hand-made masks and constructors
    (lambda: M(zeros(LK), zeros(LK, dtype=np.int32)), TypeError, ["start", "float32", "int32"]),
    (lambda: M(zeros(LK, dtype=np.int32), zeros(LK, dtype=np.int16)), TypeError, ["stop", "int16", "int32"]),
    (lambda: M(zeros(LK, dtype=np.int32), zeros(6, dtype=np.int32)), ValueError, ["start", "stop", "(7,)", "(6,)"]),
    (lambda: M(*[zeros(1, 1, 1, LK, dtype=np.int32)] * 2), ValueError, ["start", "(1, 1, 1, 7)", "1 to 3 axes"]),
    (lambda: M(*[zeros(2 * LK, dtype=np.int32)[::2]] * 2), ValueError, ["start", "last axis", "stride 2"]),
    (lambda: M.causal(-1), ValueError, ["key_length", "-1", "at least 0"]),
    (lambda: M.causal(7.0), TypeError, ["key_length", "7.0", "int"]),
    (lambda: M.causal(7, like=3), TypeError, ["like", "builtins.int"]),
    (lambda: M.sliding_window(7, 0), ValueError, ["window", "0", "at least 1"]),
    (lambda: M.sinks(7, -1), ValueError, ["count", "-1", "at least 0"]),
    (lambda: M.prefix_lm(7, -1), ValueError, ["prefix_length", "-1", "at least 0"]),
    (lambda: M.prefix_lm(7, zeros(2)), TypeError, ["prefix_length", "float32", "int32"]),
    (lambda: M.prefix_lm(7, zeros(2, 1, dtype=np.int32)), ValueError, ["prefix_length", "(2, 1)", "(B,)"]),
    (lambda: M.prefix_lm(7, zeros(2, dtype=np.int32), like=torch_tensor(1)), ValueError,
     ["prefix_length", "torch", "numpy"]),
    (lambda: M.padding(np.ones(LK, bool)), ValueError, ["padding", "(7,)", "(B, Lk)"]),
    (lambda: M.padding(np.ones((B, LK))), TypeError, ["padding", "float64", "bool"]),
    (lambda: M.documents(np.array([1, 4])), ValueError, ["documents", "[1, 4]", "start at 0"]),
    (lambda: M.documents(np.array([0, 5, 3, 7])), ValueError, ["documents", "[0, 5, 3, 7]", "never decrease"]),
    (lambda: M.documents(np.array([0, 4]), key_length=7), ValueError, ["documents", "[0, 4]", "7"]),
    (lambda: M.documents(zeros(B, LK)), TypeError, ["documents", "float32", "int32"]),
    (lambda: M.documents(zeros(1, B, LK, dtype=np.int32)), ValueError, ["documents", "(1, 2, 7)", "(B, Lk)"]),
    (lambda: M.documents(zeros(0, dtype=np.int32)), ValueError, ["documents", "(0,)"]),
    (lambda: M.documents(zeros(B, LK, dtype=np.int32), key_length=8), ValueError, ["key_length", "8", "7"]),
    (lambda: M.documents(np.array([0, 7]), causal=None), TypeError, ["causal", "None", "True or False"]),
    (lambda: M.causal(7).to_dense(-1), ValueError, ["query_length", "-1", "at least 0"]),
    (lambda: M.causal(7).count("x"), TypeError, ["query_length", "'x'", "int"]),
    (lambda: M.causal(7) & M.causal(8), ValueError, ["mask & mask", "(1, 1, 7)", "(1, 1, 8)"]),
    (lambda: M.causal(7) | M.causal(8), ValueError, ["mask | mask", "(1, 1, 7)", "(1, 1, 8)"]),
    (lambda: M.causal(7) & M.causal(7, like=torch_tensor(1)), ValueError, ["mask & mask", "torch", "numpy", ".to("]),
    (lambda: M.causal(7) == M.causal(7, like=torch_tensor(1)), ValueError, ["mask == mask", "torch", ".to("]),
    # dynamic_mask_attention
    (lambda: dynamic(scores=None), ValueError, ["scores", "dt_proj", "neither"]),
    (lambda: dynamic(dt_proj=DT, A=A), ValueError, ["scores", "dt_proj", "both"]),
    (lambda: dynamic(scores=None, dt_proj=DT), ValueError, ["A", "dt_proj", "None"]),
    (lambda: dynamic(A=A), ValueError, ["A", "dt_proj", "scores"]),
    (lambda: dynamic(dt_bias=A), ValueError, ["dt_bias", "dt_proj", "scores"]),
    (lambda: dynamic(causal=False), ValueError, ["causal=False", "keys='prefix'", "keys='global'"]),
    (lambda: dynamic(scores=zeros(B, 3, LK)), ValueError, ["scores", "(2, 3, 7)", "2 or 4"]),
    (lambda: dynamic(scores=zeros(1, HKV, LK)), ValueError, ["scores", "(1, 2, 7)", "(2, 2 or 4, 7)"]),
    (lambda: dynamic(padding=zeros(B, 6, dtype=bool)), ValueError, ["padding", "(2, 6)", "(1 or 2, 7)"]),
    # gradients
    (lambda: backward(dout=Q.astype(np.float16)), TypeError, ["dout", "query's type", "float16"]),
    (lambda: backward(dout=Q[:, :1]), ValueError, ["dout", "query's shape", "(2, 1, 4, 8)"]),
    (lambda: backward(dout=None), TypeError, ["dout", "NoneType"]),
    (lambda: backward(dout=torch_tensor(*Q.shape)), TypeError, ["dout", "torch", "numpy"]),
    (lambda: backward(out=K), ValueError, ["out", "query's shape", str(K.shape)]),
    (lambda: backward(lse=zeros(B, LQ, H)), ValueError, ["lse", "(B, H, Lq)", "(2, 5, 4)"]),
    (lambda: backward(lse=zeros(B, H, LQ, dtype=np.int32)), TypeError, ["lse", "int32"]),
    (lambda: backward(dlse=zeros(B, H)), ValueError, ["dlse", "(B, H, Lq)", "(2, 4)"]),
    (lambda: backward(needs="queries"), ValueError, ["needs", "'queries'", "'query'"]),
    (lambda: backward(needs=("query", "scores")), ValueError, ["needs", "'scores'", "'bias'"]),
    (lambda: dynamic_backward(needs=("bias",)), ValueError, ["needs", "'bias'", "'dt_proj'"]),
    (lambda: dynamic_backward(None, dt_proj=DT, A=A, lse=Q), ValueError, ["lse", "(B, H, Lq)"]),
    (lambda: dma.backward.key_scores_backward(zeros(B, LK), K, DT, A), ValueError, ["dscores", "(2, 7)", "(2, 2, 7)"]),
    (lambda: dma.backward.key_scores_backward(SCORES, K, DT, A, form="log"), ValueError, ["form", "'log'"]),
    (lambda: dma.backward.key_scores_backward(SCORES, K, DT, A, needs="a"), ValueError, ["needs", "'a'", "'A'"]),
    (lambda: dma.backward.key_scores_backward(SCORES > 0, K, DT, A), TypeError, ["dscores", "bool", "float32"]),
    # backends
    (lambda: attend(backend="cuda13"), ValueError, ["backend", "'cuda13'", "'numpy'"]),
    (lambda: attend(backend=3), TypeError, ["backend", "int", "str"]),
    (lambda: dma.key_scores(K, DT, A, backend="no"), ValueError, ["backend", "'no'"]),
    # checks that entry points share
    *[(lambda call=call, delay=delay: call(bias_delay=delay), error, ["bias_delay", words])
      for call in (functools.partial(attend, bias=SCORES), dynamic, functools.partial(backward, bias=SCORES))
      for delay, error, words in ((-1, ValueError, "at least 0, got -1"), (2**30 + 1, ValueError, "at most 2**30"),
                                  (1.5, TypeError, "an int, got"), (True, TypeError, "an int, got bool"),
                                  (None, TypeError, "an int, got NoneType"))],
    (lambda: attend(key="text"), TypeError, ["key", "builtins.str"]),
    (lambda: attend(mask=zeros(LQ, LK, dtype=np.int64)), TypeError, ["mask", "int64", "bool"]),
    (lambda: attend(mask=(M.causal(LK), zeros(B, LK, dtype=bool))), ValueError, ["mask", "(B, Lk)"]),
    (lambda: attend(mask=(zeros(LQ, LK, dtype=bool), zeros(LQ, LK))), TypeError, ["mask", "float32", "bool"]),
    (lambda: M.top_w(SCORES, -3), ValueError, ["window", "-3", "at least 1"]),
    (lambda: M(zeros(2, 1, LK, dtype=np.int32), zeros(3, 1, LK, dtype=np.int32)), ValueError,
     ["start", "stop", "(2, 1, 7)", "(3, 1, 7)"]),
    (lambda: dynamic(scale=2e38), ValueError, ["scale", "2e+38", "1.7e38"]),
    (lambda: dynamic(window=0), ValueError, ["window", "0", "at least 1"]),
    (lambda: dynamic(keys="all"), ValueError, ["keys", "'all'", "'prefix' or 'global'"]),
    (lambda: dynamic(None, dt_proj=DT, A=A, padding=zeros(B, LK)), TypeError, ["padding", "float32", "bool"]),
    (lambda: dynamic(None, dt_proj=DT, A=A, documents=np.array([0, 9])), ValueError, ["documents", "[0, 9]", "7"]),
    (lambda: dynamic(None, dt_proj=DT, A=A, form="no"), ValueError, ["form", "'no'", "'exp' or 'linear'"]),
    (lambda: dynamic(softcap=-2), ValueError, ["softcap", "-2", "at least 0"]),
    (lambda: backward(bias=zeros(3, HKV, LK)), ValueError, ["bias", "(3, 2, 7)"]),
    (lambda: backward(softcap=-1.0), ValueError, ["softcap", "at least 0"]),
    (lambda: backward(backend="flux"), ValueError, ["backend", "'flux'", "'flex'"]),
    (lambda: dynamic_backward(window=0), ValueError, ["window", "0", "at least 1"]),
    (lambda: dynamic_backward(dt_proj=DT, A=A), ValueError, ["scores", "dt_proj", "both"]),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_bad_input(number, monkeypatch):
    call, kind, fragments = CASES[number]
    # no kernel may have been launched
    for name in ("attention", "key_scores", "prefix_stop", "attention_backward", "key_scores_backward"):
        monkeypatch.setattr(numpy_backend, name, lambda *arguments: pytest.fail("launched before all checks"))
    check_refused(kind, fragments, call)


def test_unknown_names():
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(dma, "no_such_name")  # noqa: B009


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
