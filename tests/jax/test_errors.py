"""Errors are raised while a function is traced, before anything runs; errors that depend on values, when it runs."""
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_dma as dma

jax = pytest.importorskip("jax", minversion="0.9")

import jax.numpy as jnp  # noqa: E402

import cupy_dma.jax as dj  # noqa: E402
from cupy_dma.backends import numpy as numpy_backend  # noqa: E402
from cupy_dma.jax import programs, versions  # noqa: E402
from tests.jax.draws import B, N, draw, recipe  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
q, k, v, s = draw()
P, A, b = recipe()

#: errors of a callback that raises; ValueError if it raised before the call returned
FAILURES = (jax.errors.JaxRuntimeError, ValueError)


def attend(**changes):
    return lambda: dj.attention(**{"query": q, "key": k, "value": v, **changes})


def dynamic(**changes):
    return lambda: dj.dynamic_mask_attention(**{"query": q, "key": k, "value": v, "scores": s, "window": 5, **changes})


def gated(bias=s, delay=1, threshold=0.0):
    return lambda: dj.IntervalMask.from_gate(bias, delay=delay, threshold=threshold)


WRONG = {
    "a list": (attend(query=[1.0]), TypeError, r"query must be a jax.Array or numpy.ndarray, got builtins.list"),
    "random keys": (attend(key=jax.random.key(0)), TypeError, r"key must be an array of numbers, got key<fry>"),
    "integers": (attend(query=jnp.zeros(q.shape, int)), TypeError, r"query must be float16 or .*, got int32"),
    "complex": (attend(bias=s.astype(complex)), TypeError, r"bias must be float16 or .*, got complex64"),
    "mixed types": (attend(key=k.astype(jnp.float16)), TypeError, r"key must have query's type float32, got float16"),
    "rank": (attend(value=v[0, 0]), ValueError, r"value must have shape \(B, Lk, Hkv, D\), got \(2, 8\)(\n|$)"),
    "heads": (attend(query=q[:, :, :3]), ValueError, r"multiple of key's heads .*3 query heads and 2 kv heads"),
    "key length": (attend(value=v[:, 1:]), ValueError, r"value must have key's shape \(2, 24, 2, 8\), or .*got"),
    "head dim": (attend(query=jnp.zeros((1, 1, 1, 257))), ValueError, r"head dim D \(last axis\) of 1 to 256"),
    "bias": (attend(bias=s[:, :, 1:]), ValueError, r"bias must have shape \(1\|B, 1\|Hkv\|H, 1\|Lk\)"),
    "float mask": (attend(mask=jnp.zeros((N, N))), TypeError, r"mask must be bool, got float32; write a mask of 0"),
    "dense mask": (attend(mask=jnp.zeros((N, N + 1), bool)), ValueError, r"mask must have shape .*\(1, 1, 24, 25\)"),
    "padding as mask": (attend(mask=jnp.ones((B, N), bool)), ValueError, r"mask must have four axes here"),
    "mask of other keys": (attend(mask=dj.IntervalMask.causal(N + 1)), ValueError, r"mask must have shape .*25\)"),
    "mask in mask": (attend(mask=(None,)), TypeError, r"mask must hold IntervalMask and bool arrays"),
    "mask of heads": (attend(mask=dma.IntervalMask(np.zeros((3, N), np.int32), np.zeros((3, N), np.int32))),
                      ValueError, r"mask must have shape \(1\|B, 1\|Hkv\|H, Lk\) = \(1 or 2, 1 or 2 or 4, 24\), got"),
    "softcap": (attend(softcap=-1.0), ValueError, r"softcap must be a finite number of at least 0, got -1"),
    "scale": (attend(scale="1"), TypeError, r"scale must be a real number, got str"),
    "causal": (attend(causal=1), TypeError, r"causal must be True or False, got int 1"),
    "return_lse": (attend(return_lse=2), TypeError, r"return_lse must be True or False, got int 2"),
    "layout": (attend(layout="nope"), ValueError, r"layout must be 'bnhd' or 'bhnd', got 'nope'"),
    "shapes in the other layout": (attend(layout="bhnd", key=k[:, 1:]), ValueError, r"\(layout='bhnd': shapes are"),
    "rank in the other layout": (attend(layout="bhnd", query=q[0]), ValueError, r"query must have shape \(B, heads, N"),
    "backend": (attend(backend="jax"), ValueError, r"backend must be one of 'cuda', .* got 'jax'"),
    "a GPU's backend": (attend(backend="cuda"), (ValueError, RuntimeError), r"backend='cuda' (takes|cannot run here)"),
    "window": (dynamic(window=0), ValueError, r"window must be at least 1, got 0"),
    "keys": (dynamic(keys="all"), ValueError, r"keys must be 'prefix' or 'global', got 'all'"),
    "not causal": (dynamic(causal=False), ValueError, r"causal=False needs keys='global'"),
    "no scores": (dynamic(scores=None), ValueError, r"give either scores or dt_proj and A, got neither"),
    "both": (dynamic(dt_proj=P, A=A), ValueError, r"give either scores or dt_proj and A, got both"),
    "form": (dynamic(scores=None, dt_proj=P, A=A, form="log"), ValueError, r"form must be 'exp' or 'linear', got"),
    "dt_proj": (dynamic(scores=None, dt_proj=P[:1], A=A), ValueError, r"dt_proj must have shape \(Hkv, Hkv\*D\)"),
    "scores": (dynamic(scores=s[:1]), ValueError, r"scores must have shape \(B, Hkv, Lk\)"),
    "padding": (dynamic(padding=jnp.ones((B, N - 1), bool)), ValueError, r"padding must have shape \(1\|B, Lk\)"),
    "padding's type": (dynamic(padding=jnp.ones((B, N))), TypeError, r"padding must be bool, or integers"),
    "padding's rank": (dynamic(padding=jnp.ones(N, bool)), ValueError, r"padding must have shape \(1\|B, Lk\)"),
    "documents": (dynamic(documents=jnp.zeros((3, N), int)), ValueError, r"documents must have shape \(1\|B, Lk\)"),
    "documents' type": (dynamic(documents=jnp.zeros((B, N))), TypeError, r"documents must be int32 or int64, got fl"),
    "documents' rank": (dynamic(documents=np.zeros((1, 1, N), np.int32)), ValueError, r"documents must be cumulative"),
    "key_scores": (lambda: dj.key_scores(v, P, A, form="log"), ValueError, r"form must be 'exp' or 'linear'"),
    "key_scores' A": (lambda: dj.key_scores(v, P, A[:1]), ValueError, r"A must have shape \(Hkv,\) = \(2\), got \(1"),
    "top_w": (lambda: dj.top_w(s[0], 5), ValueError, r"scores must have shape \(B, Hkv, Lk\), got \(2, 24\)"),
    "top_w's type": (lambda: dj.top_w(s.astype(int), 5), TypeError, r"scores must be float16 or"),
    "top_w's window": (lambda: dj.top_w(s, 1.5), TypeError, r"window must be an int, got float 1.5"),
    "start": (lambda: dj.IntervalMask(s, s), TypeError, r"start must be int32, got float32"),
    "start's rank": (lambda: dj.IntervalMask(jnp.zeros((1, 1, 1, N), jnp.int32), jnp.zeros(N, jnp.int32)), ValueError,
                     r"start must have 1 to 3 axes"),
    "stop": (lambda: dj.IntervalMask(jnp.zeros((2, N), jnp.int32), jnp.zeros((3, N), jnp.int32)), ValueError,
             r"start and stop must broadcast to one shape"),
    "gates": (gated(bias=np.zeros(4, np.int32)), TypeError, "bias must be a float array, got int32"),
    "gates' rank": (gated(bias=np.zeros((1, 1, 1, 4), np.float32)), ValueError, "bias must have 1 to 3 axes"),
    "gates' delay": (gated(delay=0), ValueError, "delay must be at least 1, got 0"),
    "gates' threshold": (gated(threshold=np.nan), ValueError, "threshold must be a finite number, got nan"),
    "no mask": (lambda: dj.IntervalMask.of(s), TypeError, r"mask must be an IntervalMask, got Array"),
    "masks of other lengths": (lambda: dj.IntervalMask.causal(3) & dj.IntervalMask.causal(4), ValueError,
                               r"mask & mask needs shapes that broadcast"),
}


@pytest.fixture
def nothing_runs(monkeypatch):
    def never(*_):
        raise AssertionError("a callback has run")

    monkeypatch.setattr(programs.Program, "_fill", never)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_bad_input_raises_before_anything_runs(name, jitted, nothing_runs):
    function, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        jax.jit(function)() if jitted else function()


@pytest.mark.parametrize("name", ["window", "scale", "softcap", "causal", "bias_delay"])
def test_options_are_static(name):
    def run(x):
        return dj.dynamic_mask_attention(q, k, v, s, **{"window": 5, name: x})

    with pytest.raises(TypeError, match=f"{name} must be a Python value, known when .* got a traced value; .*static_"):
        jax.jit(run)(1)
    with pytest.raises(TypeError, match=f"{name} must be a Python value, .* got an array"):
        run(jnp.ones(()))


def test_a_warning_where_the_axes_look_turned():
    x = jnp.zeros((1, 8, 2, 4)).swapaxes(1, 2)
    with pytest.warns(UserWarning, match="pass layout='bhnd'"):
        dj.attention(jnp.zeros((1, 4, 8, 4)), x[:, :2], x[:, :2])


# ---- in a callback ----
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_an_exception_in_a_callback_reaches_the_user(monkeypatch, jitted):
    def broken(call):
        raise RuntimeError("the disk is full of keys")

    monkeypatch.setattr(numpy_backend, "attention", broken)
    function = jax.jit(lambda q: dj.attention(q, k, v)) if jitted else lambda q: dj.attention(q, k, v)
    with pytest.raises(FAILURES, match="RuntimeError: the disk is full of keys"):
        jax.block_until_ready(function(q))
    monkeypatch.undo()
    assert jax.block_until_ready(function(q)).shape == q.shape  # later calls still work


def test_values_that_are_wrong():
    with pytest.raises(FAILURES, match=r"documents must be cumulative lengths.* key length 24, got"):
        jax.block_until_ready(jax.jit(lambda x: dj.top_w(s, 5, documents=x).stop)(jnp.array([0, 30, 24])))


def test_checked_values(monkeypatch):
    monkeypatch.setenv("CUPY_DMA_CHECK", "1")
    with pytest.raises(FAILURES, match="scores must be finite"):
        jax.block_until_ready(dj.top_w(s.at[0, 0, 0].set(jnp.nan), 5).stop)


# ---- which jax ----
def test_an_old_jax(monkeypatch):
    old = {"jax": SimpleNamespace(__version__="0.5.3"), "jax.tree_util": SimpleNamespace(register_static=None),
           "jax.lax": SimpleNamespace()}
    monkeypatch.setattr(versions, "_imported", old.get)
    with pytest.raises(ImportError, match=r"needs jax 0.9 or later, but jax 0.5.3 is installed, which lacks jax.typeof "
                                          r"\(since jax 0.6.0\), jax.experimental.buffer_callback.buffer_callback "
                                          r"\(since jax 0.6.1\), jax.lax.pcast \(since jax 0.9\)"):
        versions.require_jax()


def test_without_jax_or_flax(tmp_path):
    """In a process that cannot import them, the rest of cupy_dma works."""
    for name, use, message in (
            ("jax", "import cupy_dma.jax", "cupy_dma.jax needs jax, which is not installed: pip install 'cupy_dma["),
            ("flax", "import cupy_dma.jax; cupy_dma.jax.DynamicMaskAttention", "needs flax.nnx, which is not inst")):
        code = f"import sys; sys.modules[{name!r}] = None; import cupy_dma; {use}"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode != 0 and f"ImportError: {'cupy_dma.jax.DynamicMaskAttention ' * (name == 'flax')}" in (
            done.stderr) and message in done.stderr


def test_unknown_names():
    with pytest.raises(AttributeError, match="has no attribute 'varlen_attention'"):
        dj.varlen_attention  # noqa: B018


@pytest.mark.parametrize("transform", [jax.jit, lambda call: jax.grad(lambda x: call(x).sum()), jax.vmap])
def test_functions_for_arrays_name_those_for_jax(transform):
    x = jnp.ones((1, 1, 4, 2, 8))[0 if transform is not jax.vmap else slice(None)]
    with pytest.raises(TypeError, match=r"query must be an array with values, .* traces .*: .* of cupy_dma\.jax"):
        transform(lambda x: dma.attention(x, x, x))(x)
