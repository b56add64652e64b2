"""Functions of jax arrays: values and gradients against the oracle, eager and jitted."""
import contextlib

import numpy as np
import pytest

import cupy_dma as dma

jax = pytest.importorskip("jax", minversion="0.9")

import jax.numpy as jnp  # noqa: E402

import cupy_dma.jax as dj  # noqa: E402
from tests.jax.draws import HKV, B, D, N, check_case, draw, recipe, same  # noqa: E402
from tests.oracle import delay_cases, reference  # noqa: E402
from tests.oracle.cases import CASES, OF_HEADS  # noqa: E402
from tests.unit.test_windows import WRONG, own  # noqa: E402

# Cases that matter to jax: types, masks, biases of every rank, lengths. XLA chooses strides itself.
QUICK = ("float16-D16", "bfloat16-D40", "float32-D64", "float64-D16", "heads-6/2-top_w", "heads-1/1-causal",
         "lengths-0x5-top_w", "lengths-5x0-none", "lengths-33x129-top_w", "mask-padding", "mask-global_documents",
         "mask-per_batch", "mask-dense_2d", "mask-dense_rows", "bias-none-none", "bias-key_per_head-top_w",
         "bias-key_shared-none", "bias-row-none", "softcap-key", "dense-mask-1g1k", "dense-bias-1hq1",
         "sinks-causal-bfloat16", "value-dim-float16-16/32-top_w",
         "dense-both-per_batch+dense=1gqk-bgqk", "dense-both-per_head+padding+dense=b1qk+dense=1hq1-1hqk")
GRID = [pytest.param(case, marks=[] if case.name in QUICK else pytest.mark.slow, id=case.name) for case in CASES
        # In the last case, query and key gradients are denormal, and XLA flushes them to zero.
        if not case.name.startswith(("layout-", "float32-layout-", "scale-1e-40"))]
GRID += [pytest.param(case, id=case.name) for case in OF_HEADS + delay_cases.CASES
         if case in OF_HEADS or case.name in delay_cases.FEW]


TYPES = [pytest.param(jnp.float32, id="float32"), pytest.param(jnp.bfloat16, id="bfloat16", marks=pytest.mark.slow)]


def test_the_quick_cases_exist():
    assert set(QUICK) <= {case.name for case in CASES}


@pytest.mark.feature("numpy forward backward", "jax", "attention")
@pytest.mark.parametrize("case", GRID)
def test_grid(case):
    with jax.enable_x64(True) if case.dtype == "float64" else contextlib.nullcontext():
        check_case(case)


# ---- the same bits, eager and jitted, and as from NumPy arrays ----
FUNCTIONS = {
    "scores": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, s, window=5, return_lse=True),
    "softcap": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, s, window=5, softcap=2.0, scale=0.5),
    "everything": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, s, window=N),
    "recipe": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, **RECIPE, window=5),
    "recipe, everything": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, **RECIPE, window=N, form="linear"),
    "global": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, s, window=5, keys="global", causal=False),
    "padding": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, s, window=5, padding=jnp.arange(N)[None] > 3),
    "documents": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, s, window=5, documents=[0, 7, 7, N]),
    "bhnd": lambda q, k, v, s: dj.dynamic_mask_attention(
        *(x.swapaxes(1, 2) for x in (q, k, v)), s, window=5, layout="bhnd").swapaxes(1, 2),
    "delay": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, s, window=5, bias_delay=4, return_lse=True),
    "delay, everything": lambda q, k, v, s: dj.dynamic_mask_attention(q, k, v, **RECIPE, window=N, bias_delay=4),
    "delay, bhnd": lambda q, k, v, s: dj.attention(
        *(x.swapaxes(1, 2) for x in (q, k, v)), bias=s, bias_delay=4, layout="bhnd").swapaxes(1, 2),
    "few keys": lambda q, k, v, s: dj.attention(q, k, v, mask=(dma.IntervalMask.causal(N), jnp.arange(N)[None] != 3)),
}
RECIPE: dict = {}


@pytest.mark.feature("numpy forward backward", "jax", "dynamic_mask_attention", case="recipe")
@pytest.mark.feature("numpy forward backward", "jax", "dynamic_mask_attention", case="scores")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", TYPES)
def test_jit_is_eager_and_numpy(name, dtype):
    RECIPE.update(zip(("dt_proj", "A", "dt_bias"), recipe(dtype=dtype)))
    function, arguments = FUNCTIONS[name], draw(dtype=dtype)
    eager = jax.tree.leaves(function(*arguments))
    jitted = jax.tree.leaves(jax.jit(function)(*arguments))
    assert all(map(same, eager, jitted))

    def loss(*x):
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in jax.tree.leaves(function(*x)))

    wanted = (0, 1, 2) if name in ("recipe", "recipe, everything", "delay, everything", "few keys") else (0, 1, 2, 3)
    value, gradients = jax.value_and_grad(loss, wanted)(*arguments)
    assert float(value) > 0 and all(float(jnp.abs(x).max()) > 0 for x in gradients)
    assert all(map(same, gradients, jax.jit(jax.grad(loss, wanted))(*arguments)))


def test_numpy_has_the_same_bits():
    q, k, v, s = draw()
    arrays = [np.asarray(x) for x in (q, k, v, s)]
    out, lse = dj.dynamic_mask_attention(q, k, v, s, window=5, return_lse=True)
    expected = dma.dynamic_mask_attention(*arrays, window=5, return_lse=True)
    assert same(out, expected[0]) and same(lse, expected[1])
    dout, dlse = jnp.cos(out), jnp.sin(lse)
    _, pull = jax.vjp(lambda *x: dj.dynamic_mask_attention(*x, window=5, return_lse=True), q, k, v, s)
    manual = dma.backward.dynamic_mask_attention_backward(np.asarray(dout), *arrays[:3], *expected, arrays[3], window=5,
                                                          dlse=np.asarray(dlse))
    assert all(map(same, pull((dout, dlse)), manual[:4]))
    given = [np.asarray(x) for x in recipe()]
    _, pull = jax.vjp(lambda q, k, v, P, A, b: dj.dynamic_mask_attention(q, k, v, dt_proj=P, A=A, dt_bias=b, window=5,
                                                                         return_lse=True), q, k, v, *given)
    named = dict(zip(("dt_proj", "A", "dt_bias"), given))
    expected = dma.dynamic_mask_attention(*arrays[:3], **named, window=5, return_lse=True)
    manual = dma.backward.dynamic_mask_attention_backward(np.asarray(dout), *arrays[:3], *expected, **named, window=5,
                                                          dlse=np.asarray(dlse))
    assert all(map(same, pull((dout, dlse)), (*manual[:3], *manual[4:])))  # scores are not an argument


@pytest.mark.feature("numpy forward backward", "jax", "key_scores")
@pytest.mark.parametrize("form", ["exp", "linear"])
def test_scores_and_their_gradients_are_the_definition(form):
    value, (dt_proj, A, dt_bias) = draw()[2], recipe()
    weights = jnp.cos(jnp.arange(B * HKV * N, dtype=jnp.float32)).reshape(B, HKV, N)

    def scores(value, dt_proj, A, dt_bias):
        return dj.key_scores(value, dt_proj, A, dt_bias=dt_bias, form=form)

    found, pull = jax.vjp(jax.jit(scores), value, dt_proj, A, dt_bias)
    np.testing.assert_allclose(found, reference.key_scores(value, dt_proj, A, dt_bias, form), rtol=1e-5)
    expected = reference.key_scores_gradients(weights, value, dt_proj, A, dt_bias, form)
    for gradient, exact in zip(pull(weights), expected):
        np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-5)
    turned = dj.key_scores(value.swapaxes(1, 2), dt_proj, A, dt_bias=dt_bias, form=form, layout="bhnd")
    assert same(turned, found)


SELECTIONS = {"prefix": {}, "everything": {"window": N + 1}, "global": {"keys": "global"},
              "padding": {"padding": np.arange(N)[None] % 5 > 0}, "integers": {"padding": np.arange(N)[None] % 5},
              "lengths": {"documents": np.array([0, 9, N], np.int32)},
              "ids": {"documents": np.sort(np.arange(B * N).reshape(B, N) % 3, axis=1).astype(np.int32)},
              "all": {"keys": "global", "padding": np.arange(B * N).reshape(B, N) % 5 > 0,
                      "documents": np.sort(np.arange(B * N).reshape(B, N) % 3, axis=1).astype(np.int32)}}


@pytest.mark.feature("numpy forward", "jax", "top_w, padding, documents")
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("dtype", TYPES)
def test_selection_is_the_definition(name, dtype):
    options = {"window": 5, **SELECTIONS[name]}
    scores = jnp.round(draw()[3] * 2).astype(dtype) / 2  # with ties
    mask = jax.jit(lambda s: dj.top_w(s, **options))(scores)
    options["padding"] = None if options.get("padding") is None else options["padding"] != 0
    expected = reference.top_w_dense(scores, **options)
    causal = expected & (np.arange(N)[:, None] >= np.arange(N))  # a global mask may also show later keys
    seen = np.asarray(mask.to_dense(N))
    assert (np.broadcast_to(seen & (np.arange(N)[:, None] >= np.arange(N)), causal.shape) == causal).all()
    assert mask.shape == (B, HKV, N) and mask.start.dtype == mask.stop.dtype == jnp.int32


# ---- masks ----
def test_masks_are_pytrees():
    s = draw()[3]
    mask = dj.top_w(s, 5)
    leaves, tree = jax.tree.flatten(mask)
    assert [x.shape for x in leaves] == [(1, 1, N), (B, HKV, N)]
    assert tree == jax.tree.structure(dj.top_w(s + 1, 5)) != jax.tree.structure(dj.top_w(s, 6))
    again = jax.tree.unflatten(tree, leaves)
    assert same(again.stop, mask.stop) and again._hints == mask._hints
    through = jax.jit(lambda m: m)(mask)
    assert isinstance(through, dj.IntervalMask) and through._hints == mask._hints
    assert jax.tree.map(lambda x: x.shape, mask).stop == (B, HKV, N)  # leaves may be anything
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(mask)[0]]
    assert names == [".start", ".stop"] and "IntervalMask" in repr(mask)


def test_masks_as_arguments_of_a_jitted_function():
    q, k, v, s = draw()
    calls = []

    @jax.jit
    def run(q, k, v, mask):
        calls.append(mask)
        return dj.attention(q, k, v, mask=mask)

    for shift in (0.0, 1.0):
        mask = dj.top_w(jnp.sin(s + shift), 5)
        assert same(run(q, k, v, mask), dj.attention(q, k, v, mask=mask))
    assert len(calls) == 1


def test_algebra_and_constructors():
    s = draw()[3]
    arrays = dma.IntervalMask.top_w(np.asarray(s), 5)
    padding = np.arange(B * N).reshape(B, N) % 3 > 0
    pairs = [(dj.top_w(s, 5) & dj.IntervalMask.padding(padding), arrays & dma.IntervalMask.padding(padding)),
             (dj.top_w(s, 5) | dj.IntervalMask.sliding_window(N, 3), arrays | dma.IntervalMask.sliding_window(N, 3)),
             (dj.IntervalMask.causal(N) & dj.IntervalMask.padding(padding.astype(np.int32)),
              dma.IntervalMask.causal(N) & dma.IntervalMask.padding(padding)),
             (dj.IntervalMask.of(dma.IntervalMask.prefix_lm(N, 4)), dma.IntervalMask.prefix_lm(N, 4)),
             (jax.jit(lambda s, t: dj.IntervalMask.from_gate(s, delay=4, threshold=t, sinks=2))(s, 0.1),
              dma.IntervalMask.from_gate(np.asarray(s), delay=4, threshold=0.1, sinks=2)),
             (dj.IntervalMask.from_gate(s[0], delay=2**40, threshold=0.1),
              dma.IntervalMask.from_gate(np.asarray(s)[0], delay=2**40, threshold=0.1)),
             (dj.IntervalMask(jnp.zeros(N, jnp.int32), jnp.arange(N, dtype=jnp.int32)[None]),
              dma.IntervalMask(np.zeros(N, np.int32), np.arange(N, dtype=np.int32)))]
    for ours, theirs in pairs:
        assert np.array_equal(ours.to_dense(N), theirs.to_dense(N)) and ours.shape == theirs.shape
        assert ours.key_length == N
    united = jax.jit(lambda s: dj.top_w(s, 5) | dj.IntervalMask.sliding_window(N, 3))(s)
    assert np.array_equal(united.to_dense(N), pairs[1][1].to_dense(N))
    with pytest.raises(ValueError, match="runs are known to touch at trace time"):
        jax.jit(lambda m: m | dj.IntervalMask.padding(padding))(pairs[0][0])
    assert np.array_equal((dj.top_w(s, 5) & dj.IntervalMask.causal(N)).to_dense(N), arrays.to_dense(N))


# ---- a window per kv head ----
WINDOWS = (3, 9)


@pytest.mark.parametrize("windows", [WINDOWS, list(WINDOWS), np.array(WINDOWS)], ids=type)
@pytest.mark.parametrize("keys", ["prefix", "global"])
def test_masks_of_a_window_per_head(windows, keys):
    s = draw()[3]
    mask, theirs = dj.top_w(s, windows, keys=keys), dma.IntervalMask.top_w(np.asarray(s), windows, keys=keys)
    assert np.array_equal(mask.to_dense(N), theirs.to_dense(N)) and mask._hints == theirs._hints
    assert np.array_equal(dj.IntervalMask.sliding_window(N, windows).to_dense(N),
                          dma.IntervalMask.sliding_window(N, windows).to_dense(N))
    assert dj.top_w(s, [N, N + 1])._hints.causal_only


def test_attention_with_a_window_per_head():
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
def test_a_layer_with_a_window_per_head(options):
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
