"""A window per kv head in JAX equals that of the functions for other arrays, eager and jitted, with gradients."""
import numpy as np
import pytest

import cupy_dma as dma

jax = pytest.importorskip("jax", minversion="0.9")

import jax.numpy as jnp  # noqa: E402

import cupy_dma.jax as dj  # noqa: E402
from tests.jax.draws import HKV, D, N, draw, same  # noqa: E402
from tests.unit.test_windows import WRONG, own  # noqa: E402

WINDOWS = (3, 9)


@pytest.mark.parametrize("windows", [WINDOWS, list(WINDOWS), np.array(WINDOWS)], ids=type)
@pytest.mark.parametrize("keys", ["prefix", "global"])
def test_masks(windows, keys):
    s = draw()[3]
    mask, theirs = dj.top_w(s, windows, keys=keys), dma.IntervalMask.top_w(np.asarray(s), windows, keys=keys)
    assert np.array_equal(mask.to_dense(N), theirs.to_dense(N)) and mask._hints == theirs._hints
    assert np.array_equal(dj.IntervalMask.sliding_window(N, windows).to_dense(N),
                          dma.IntervalMask.sliding_window(N, windows).to_dense(N))
    assert dj.top_w(s, [N, N + 1])._hints.causal_only


def test_attention_and_its_gradients():
    arguments = draw()

    def together(*x):
        return dj.dynamic_mask_attention(*x, window=WINDOWS)

    def one_by_one(*x):
        return jnp.concatenate([dj.dynamic_mask_attention(*own(head, *x), window=window)
                                for head, window in enumerate(WINDOWS)], 2)

    (out, pull), (expected, pull_expected) = (jax.vjp(jax.jit(f), *arguments) for f in (together, one_by_one))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert same(out, together(*arguments))
    for a, b in zip(pull(jnp.sin(out)), pull_expected(jnp.sin(out))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_windows(window, error, message):
    q, k, v, s = draw()
    with pytest.raises(error, match=message):
        dj.dynamic_mask_attention(q, k, v, s, window=window)
    with pytest.raises(error, match=message):
        dj.top_w(s, window)


@pytest.mark.parametrize("options", [{}, {"sinks": 1, "recent": 2}], ids=str)
def test_layer(options):
    nnx = pytest.importorskip("flax.nnx")
    q, k, v, _ = draw()
    layer = dj.DynamicMaskAttention(HKV, D, WINDOWS, A_init=1.0, rngs=nnx.Rngs(0), **options)
    scores = layer.scores(v)
    mask = dj.top_w(scores, WINDOWS)
    if options:
        mask = mask | dj.IntervalMask.sinks(N, 1) | dj.IntervalMask.sliding_window(N, 2)
    np.testing.assert_allclose(nnx.jit(lambda m: m(q, k, v))(layer), dj.attention(q, k, v, mask=mask, bias=scores),
                               rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="one int for each of 2 kv heads, got 3"):
        dj.DynamicMaskAttention(HKV, D, (3, 4, 5), rngs=nnx.Rngs(0))
