"""``checkpoint``, ``vmap``, ``scan``, ``shard_map``, donated buffers, and missing derivatives."""
import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax", minversion="0.9")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import cupy_dma.jax as dj  # noqa: E402
from cupy_dma.backends import numpy as numpy_backend  # noqa: E402
from tests.jax.draws import HKV, B, H, N, draw, recipe, same  # noqa: E402

V = 3  # elements of a vmap


def attend(q, k, v, s):
    return dj.dynamic_mask_attention(q, k, v, s, window=5)


def from_values(q, k, v, dt_proj, A, dt_bias):
    return dj.dynamic_mask_attention(q, k, v, dt_proj=dt_proj, A=A, dt_bias=dt_bias, window=5)


def loss(function):
    return lambda *x: jnp.sum(function(*x) ** 2)


def close(a, b):
    return all(np.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


# ---- checkpoint, scan, donation ----
@pytest.mark.feature("numpy forward backward", "jax", "checkpoint")
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_checkpoint(jitted):
    arguments, gradient = draw(), jax.grad(loss(jax.checkpoint(attend)), (0, 1, 2, 3))
    found = (jax.jit(gradient) if jitted else gradient)(*arguments)
    assert all(map(same, found, jax.grad(loss(attend), (0, 1, 2, 3))(*arguments)))


def test_scan_over_layers():
    q, k, v, s = draw()

    def layers(q, k, v, s):
        return jax.lax.scan(lambda x, _: (attend(x, k, v, s) + x, None), q, None, length=3)[0]

    def unrolled(q, k, v, s):
        for _ in range(3):
            q = attend(q, k, v, s) + q
        return q

    assert close(jax.jit(jax.grad(loss(layers), (0, 1, 2, 3)))(q, k, v, s),
                 jax.grad(loss(unrolled), (0, 1, 2, 3))(q, k, v, s))


def test_donated_arguments():
    """A result may reuse the memory of a donated argument only after its last read."""
    expected = attend(*draw())
    for _ in range(3):
        q, k, v, s = draw()
        out, scores = jax.jit(lambda q, k, v, s: (attend(q, k, v, s), s * 1), donate_argnums=(0, 3))(q, k, v, s)
        assert same(out, expected) and same(scores, draw()[3])
        assert q.is_deleted() and s.is_deleted()


def test_one_array_in_several_places():
    q = draw()[0]
    found = jax.grad(lambda x: jnp.sum(dj.attention(x, x, x, causal=True) ** 2))(q)
    apart = jax.grad(lambda a, b, c: jnp.sum(dj.attention(a, b, c, causal=True) ** 2), (0, 1, 2))(q, q, q)
    assert close(found, sum(apart))


# ---- which gradients ----
@pytest.mark.parametrize("wanted", [(0,), (1, 2), (3,)], ids=str)
def test_only_gradients_that_are_asked_for_are_computed(calls_of, wanted):
    seen = calls_of(numpy_backend, "attention_backward")
    arguments = draw()
    found = jax.grad(loss(attend), wanted)(*arguments)
    names = "query", "key", "value", "bias"
    assert [call.needs for call, in seen] == [frozenset(names[i] for i in wanted)]
    every = jax.grad(loss(attend), (0, 1, 2, 3))(*arguments)
    assert all(same(x, every[i]) for x, i in zip(found, wanted))


def test_gradients_through_lse_alone_and_through_nothing():
    def of_lse(*x):
        return jnp.sum(jnp.sin(dj.dynamic_mask_attention(*x, window=5, return_lse=True)[1]))

    arguments = draw()
    found = jax.grad(of_lse, (0, 1, 2, 3))(*arguments)
    assert not jnp.any(found[2]) and all(jnp.any(x) for x in (found[0], found[1], found[3]))
    step = 1e-2 * jnp.cos(jnp.arange(arguments[1].size, dtype=jnp.float32)).reshape(arguments[1].shape)
    ahead, back = (of_lse(arguments[0], arguments[1] + x, *arguments[2:]) for x in (step, -step))
    assert np.isclose(ahead - back, 2 * jnp.sum(found[1] * step), rtol=1e-2)
    none = jax.grad(lambda q, k, v, s: jnp.sum(q) + 0 * jnp.sum(jax.lax.stop_gradient(attend(q, k, v, s))))(*arguments)
    assert same(none, jnp.ones_like(none))


def test_masks_and_padding_have_no_gradient():
    q, k, v, s = draw()
    mask = dj.top_w(s, 5)
    _, pull = jax.vjp(lambda q, m: dj.attention(q, k, v, mask=m), q, mask)
    dq, dmask = pull(jnp.ones_like(q))
    assert jnp.any(dq) and all(x.dtype == jax.dtypes.float0 for x in jax.tree.leaves(dmask))
    assert not jnp.any(jax.grad(lambda s: jnp.sum(dj.attention(q, k, v, mask=dj.top_w(s, 5))))(s))


def second(q, *rest):
    return jax.grad(lambda q: jnp.sum(jax.grad(loss(attend))(q, *rest)))(q)


def scores_twice(q, k, v, s):
    parameters = recipe()[:2]
    return jax.grad(lambda v: jnp.sum(jax.grad(lambda v: jnp.sum(dj.key_scores(v, *parameters)))(v)))(v)


@pytest.mark.parametrize("function", [second, jax.jit(second), scores_twice, jax.hessian(loss(attend)),
                                      lambda *x: jax.jvp(jax.grad(loss(attend)), x, x)],
                         ids=["grad of grad", "jit", "scores", "hessian", "jvp of grad"])
def test_second_derivatives_raise(function):
    with pytest.raises(NotImplementedError, match=r"not differentiable \(there is no second derivative\).*stop_gradi"):
        function(*draw())


def test_forward_mode_raises():
    arguments = draw()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(attend, arguments, arguments)


# ---- vmap ----
def stacked(*axes):
    """``draw`` with a new axis at the given place of each array (None: no new axis)."""
    draws = [draw(seed) for seed in range(V)]
    return [draws[0][i] if axis is None else jnp.stack([x[i] for x in draws], axis) for i, axis in enumerate(axes)]


def one_by_one(function, arguments, axes):
    found = [function(*(x if axis is None else jnp.take(x, i, axis) for x, axis in zip(arguments, axes)))
             for i in range(V)]
    return jax.tree.map(lambda *x: jnp.stack(x), *found)


@pytest.mark.feature("numpy forward backward", "jax", "vmap")
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (2, 4, 1, 3),
                                  pytest.param((None, None, None, 0), marks=pytest.mark.slow)], ids=str)
def test_vmap(axes):
    arguments = stacked(*axes)
    out = jax.vmap(attend, axes)(*arguments)
    assert close(out, one_by_one(attend, arguments, axes))
    gradient = jax.grad(loss(attend), (0, 1, 2, 3))
    found = jax.jit(jax.vmap(gradient, axes))(*arguments)
    assert close(found, one_by_one(gradient, arguments, axes))
    summed = jax.grad(lambda *x: jnp.sum(jax.vmap(attend, axes)(*x) ** 2), (0, 1, 2, 3))(*arguments)
    per_element = one_by_one(gradient, arguments, axes)
    for x, each, axis in zip(summed, per_element, axes):
        assert np.allclose(x, each.sum(0) if axis is None else jnp.moveaxis(each, 0, axis), atol=1e-4)


def test_vmap_is_one_call(calls_of):
    calls = calls_of(numpy_backend, "attention")
    jax.vmap(attend)(*stacked(0, 0, 0, 0))
    jax.vmap(jax.vmap(attend))(*(x[None] for x in stacked(0, 0, 0, 0)))
    assert [call.batch for call, in calls] == [V * B, V * B]


@pytest.mark.parametrize("axes", [(0, 0, 0, None, None, None), (0, 0, 0, 0, 0, 0),
                                  pytest.param((None, None, 0, 0, None, None), marks=pytest.mark.slow)], ids=str)
def test_vmap_with_parameters_of_scores(axes):
    """Per-element gradients of shared parameters, as for per-example clipping, and per-element parameters, as in an
    ensemble."""
    arguments = [*stacked(0, 0, 0, None)[:3], *(jnp.stack([x, x + 0.1, x - 0.1]) for x in recipe())]
    arguments = [x if axis == 0 else x[0] for x, axis in zip(arguments, axes)]
    gradient = jax.grad(loss(from_values), tuple(range(6)))
    assert close(jax.vmap(from_values, axes)(*arguments), one_by_one(from_values, arguments, axes))
    assert close(jax.vmap(gradient, axes)(*arguments), one_by_one(gradient, arguments, axes))


BIASES = {"per batch": (B, HKV, N), "shared by the batch": (1, H, N), "dense": (1, 1, N, N), "one row": (B, 1, 1, N)}


@pytest.mark.parametrize(("name", "mapped"), [
    pytest.param(name, mapped, marks=[] if mapped or name == "shared by the batch" else pytest.mark.slow)
    for name in BIASES for mapped in (True, False)])
def test_vmap_with_biases_that_broadcast(name, mapped):
    arguments = stacked(0, 0, 0, None)
    bias = jnp.cos(jnp.arange(V * np.prod(BIASES[name]), dtype=jnp.float32)).reshape(V, *BIASES[name])
    arguments[3] = bias if mapped else bias[0]
    axes = (0, 0, 0, 0 if mapped else None)

    def biased(q, k, v, bias):
        return dj.attention(q, k, v, bias=bias, bias_delay=4 if name == "per batch" else 0, causal=True)

    gradient = jax.grad(loss(biased), (0, 3))
    assert close(jax.vmap(biased, axes)(*arguments), one_by_one(biased, arguments, axes))
    assert close(jax.vmap(gradient, axes)(*arguments), one_by_one(gradient, arguments, axes))


def test_vmap_sums_a_16_bit_bias_before_it_is_rounded():
    q, k, v, _ = stacked(0, 0, 0, None)
    bias = jnp.cos(jnp.arange(V * N, dtype=jnp.float32)).reshape(V, 1, 1, N).astype(jnp.bfloat16)

    def gradient(q, k, v, bias):
        return jax.grad(lambda x: jnp.sum(dj.attention(q, k, v, bias=x, causal=True)[:, :, 0, 0] * 3))(bias)

    found = jax.vmap(gradient)(q, k, v, bias)
    wide = jax.vmap(gradient)(q, k, v, bias.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    assert np.allclose(found.astype(jnp.float32), wide, rtol=2**-8, atol=1e-6)  # one rounding


def test_vmap_over_masks_and_selections():
    q, k, v, s = stacked(0, 0, 0, 0)
    padding = (jnp.arange(V * N).reshape(V, 1, N) % 5) > 0
    documents = jnp.stack([jnp.array([0, 7 + i, N]) for i in range(V)])
    for options, axes in (({"padding": padding}, {"padding": 0}), ({"padding": padding[0]}, {"padding": None}),
                          ({"documents": documents}, {"documents": 0}), ({"documents": documents[0]},
                                                                        {"documents": None})):
        def select(q, k, v, s, options):
            mask = dj.top_w(s, 5, **options)
            return dj.attention(q, k, v, mask=mask, bias=s), dj.dynamic_mask_attention(q, k, v, s, window=5, **options)

        found = jax.vmap(select, (0, 0, 0, 0, axes))(q, k, v, s, options)
        for i in range(V):
            own = {name: x[i] if axes[name] == 0 else x for name, x in options.items()}
            assert close([x[i] for x in found], select(q[i], k[i], v[i], s[i], own))
    masks = jax.vmap(lambda s: dj.top_w(s, 5))(s)
    out = jax.vmap(lambda q, k, v, m: dj.attention(q, k, v, mask=m),
                   (0, 0, 0, dj.IntervalMask._make(0, 0, masks._hints)))(q, k, v, masks)
    assert close(out[1], dj.attention(q[1], k[1], v[1], mask=dj.top_w(s[1], 5)))
    ids = jnp.sort(jnp.arange(V * B * N).reshape(V, B, N) % 3, axis=-1)
    found = jax.vmap(lambda s, x: dj.top_w(s, 5, keys="global", documents=x).to_dense(N))(s, ids)
    assert np.array_equal(found[2], dj.top_w(s[2], 5, keys="global", documents=ids[2]).to_dense(N))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_over_an_axis_that_is_no_batch(axis):
    q = draw()[0]
    with pytest.raises(ValueError, match=r"query must have shape \(B, Lq, H, D\), got .*under jax.vmap needs a batch"):
        jax.vmap(functools.partial(dj.attention, causal=True), axis)(q, q, q)


# ---- shard_map ----
def selected(q, k, v, s):
    return dj.attention(q, k, v, mask=dj.top_w(s, 5), bias=s)


@pytest.mark.feature("numpy forward backward", "jax", "shard_map")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("function", "replicated"), [(from_values, 3), (selected, 0)])
def test_shard_map(function, replicated, check_vma):
    """Two devices, half of the batch each; replicated parameters get the sum of the gradients."""
    assert len(jax.devices("cpu")) == 2
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu"))
    arguments = [*draw()[:3], *recipe()] if replicated else draw()
    specs = (P("data"),) * (len(arguments) - replicated) + (P(),) * replicated
    sharded = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
    assert same(jax.jit(sharded)(*arguments), function(*arguments))
    wanted = tuple(range(len(arguments)))
    found = jax.jit(jax.grad(loss(sharded), wanted))(*arguments)
    assert close(found, jax.grad(loss(function), wanted)(*arguments))
