"""The layer of flax.nnx: equal to the function with its parameters, in training, and equal to torch's layer."""
import numpy as np
import pytest

jax = pytest.importorskip("jax", minversion="0.9")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import cupy_dma.jax as dj  # noqa: E402
from tests.jax.draws import HKV, D, N, draw, same  # noqa: E402


def layer(**options):
    made = dj.DynamicMaskAttention(HKV, D, 5, rngs=nnx.Rngs(0), **options)
    made.A[...] = jnp.array([0.5, -0.3], made.A.dtype)
    return made


def test_parameters():
    made = dj.DynamicMaskAttention(HKV, D, 5, dt_bias=True, rngs=nnx.Rngs(0))
    names = {jax.tree_util.keystr(path): x.shape for path, x in
             jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(made)))[0]}
    assert names == {"['A']": (HKV,), "['dt_proj']['bias']": (HKV,), "['dt_proj']['kernel']": (HKV * D, HKV)}
    assert not jnp.any(made.A[...])
    assert jnp.all(dj.DynamicMaskAttention(HKV, D, 5, A_init=1.5, rngs=nnx.Rngs(0)).A[...] == 1.5)
    assert 0.5 / 4 < float(jnp.abs(made.dt_proj.kernel[...]).max()) <= 1 / 4  # as torch's nn.Linear: 1 / sqrt(16)
    assert dj.DynamicMaskAttention(HKV, D, 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)).A.dtype == jnp.bfloat16


@pytest.mark.feature("numpy forward backward", "jax", "DynamicMaskAttention")
@pytest.mark.parametrize("options", [{}, {"dt_bias": True, "form": "linear", "softcap": 3.0, "scale": 0.4},
                                     {"keys": "global", "causal": False}, {"bias_delay": 4}], ids=str)
def test_the_layer_is_the_function(options):
    q, k, v, _ = draw()
    made = layer(**options)
    bias = made.dt_proj.bias[...] if options.get("dt_bias") else None
    parameters = {"dt_proj": made.dt_proj.kernel[...].T, "A": made.A[...], "dt_bias": bias}
    real = jnp.arange(N)[None] > 2
    options.pop("dt_bias", None)
    for more in ({}, {"padding": real}, {"documents": [0, 9, N]}):
        out, lse = made(q, k, v, return_lse=True, **more)
        expected = dj.dynamic_mask_attention(q, k, v, window=5, return_lse=True, **parameters, **options, **more)
        assert same(out, expected[0]) and same(lse, expected[1])
    form = {"form": options["form"]} if "form" in options else {}
    assert same(made.scores(v), dj.key_scores(v, **parameters, **form))


@pytest.mark.feature("numpy forward backward", "jax", "DynamicMaskAttention")
def test_it_trains_under_jit():
    q, k, v, _ = draw()
    made, target = layer(), draw(5)[0]
    optimizer = nnx.Optimizer(made, optax.adam(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(made, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(q, k, v) - target) ** 2))(made)
        optimizer.update(made, gradients)
        return loss

    losses = [float(step(made, optimizer)) for _ in range(20)]
    assert losses[-1] < losses[0] - 1e-3
    assert same(made(q, k, v), nnx.jit(lambda m: m(q, k, v))(made))


# ---- torch's layer, and scores of the layer's input ----
WIDTH = 7


def drawn(dtype=jnp.float32, **options):
    """A layer with random parameters, and tokens."""
    options = {"window": 5, "dtype": dtype, **options}
    made = dj.DynamicMaskAttention(HKV, D, rngs=nnx.Rngs(0), **options)
    rng = np.random.default_rng(3)
    for parameter in jax.tree.leaves(nnx.state(made, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param)):
        parameter[...] = jnp.asarray(rng.standard_normal(parameter.shape), dtype)
    return made, jnp.asarray(rng.standard_normal((2, N, WIDTH)), dtype)


def by_input(dtype=jnp.float32, **options):
    return drawn(dtype, scores="input", width=WIDTH, **options)


def torch_names(parameters):
    """Parameters, or their gradients, by torch's names."""
    found = {}
    for name, x in nnx.to_pure_dict(parameters).items():
        if isinstance(x, dict):
            found |= {f"{name}.{part.replace('kernel', 'weight')}": y.T for part, y in x.items()}
        else:
            found[name] = x
    return found


def torch_twin(made, dtype, **options):
    torch = pytest.importorskip("torch")
    from cupy_dma.torch import DynamicMaskAttention

    twin = DynamicMaskAttention(HKV, D, **{"window": 5, **options}, dtype=dtype)
    state = torch_names(nnx.state(made, nnx.Param))
    twin.load_state_dict({name: torch.tensor(np.array(x.astype(jnp.float32))) for name, x in state.items()})
    return twin


def near(x, expected):
    """Equal up to the order of sums."""
    assert x.dtype == expected.numpy().dtype
    np.testing.assert_allclose(x, expected.numpy(), rtol=1e-4, atol=1e-5)


INPUT = {"scores": "input", "width": WIDTH}
BY_INPUT = [{**INPUT, **options} for options in (
    {}, {"dt_bias": True, "bias_delay": 4}, {"sinks": 1, "recent": 4}, {"window": (4, 9), "softcap": 3.0},
    {"keys": "global", "causal": False})]
BY_VALUE = [{"dt_bias": True, **options} for options in (
    {}, {"sinks": 2}, {"recent": 3}, {"sinks": 1, "recent": 4}, {"bias_delay": 4}, {"sinks": 1, "bias_delay": 4})]


@pytest.mark.feature("numpy forward backward", "jax", "DynamicMaskAttention")
@pytest.mark.parametrize(("options", "given"), [
    *((options, {}) for options in BY_VALUE + BY_INPUT),
    *((options, given) for options in BY_INPUT if "sinks" not in options for given in (
        {"padding": np.arange(N)[None] % 7 != 2}, {"documents": np.arange(N)[None] // 9}))],
    ids=lambda given: ", ".join(given))
def test_torch_has_the_same_layer(options, given):
    torch = pytest.importorskip("torch")
    (made, x), (q, k, v, _) = drawn(**options), draw()
    if "padding" in given:
        x = jnp.where(given["padding"][..., None], x, jnp.nan)
    twin = torch_twin(made, torch.float32, **options)
    tokens = {"x": x} if "width" in options else {}
    arrays = {name: torch.tensor(np.array(y), requires_grad=True)
              for name, y in {"query": q, "key": k, "value": v, **tokens}.items()}
    out = twin(**arrays, **{name: torch.tensor(np.array(y)) for name, y in given.items()})
    out.square().sum().backward()
    for call in (lambda m: m(q, k, v, **tokens, **given), nnx.jit(lambda m: m(q, k, v, **tokens, **given))):
        near(call(made), out.detach())
    if not given:
        near(made.scores(tokens.get("x", v)), twin.scores(arrays["x" if tokens else "value"]).detach())

    def loss(m, arrays):
        return jnp.sum(m(**arrays, **given) ** 2)

    found, gradients = nnx.grad(loss, argnums=(0, 1))(made, {"query": q, "key": k, "value": v, **tokens})
    for name, gradient in gradients.items():
        near(gradient, arrays[name].grad)
    for name, gradient in torch_names(found).items():
        assert gradient.any()
        near(gradient, twin.get_parameter(name).grad)


def test_sixteen_bit_inputs_have_float32_scores():
    torch = pytest.importorskip("torch")
    made, x = by_input(jnp.bfloat16, dt_bias=True)
    twin = torch_twin(made, torch.bfloat16, dt_bias=True, **INPUT)
    scores = made.scores(x)
    near(scores, twin.scores(torch.tensor(np.array(x.astype(jnp.float32))).bfloat16()).detach())
    assert not same(scores, scores.astype(jnp.bfloat16).astype(jnp.float32))
    q, k, v, _ = draw(dtype=jnp.bfloat16)
    assert same(made(q, k, v, x=x), dj.dynamic_mask_attention(q, k, v, scores, window=5))


def test_the_input_s_scores_begin_as_a_window_and_learn_at_once():
    made = dj.DynamicMaskAttention(HKV, D, 5, scores="input", width=WIDTH, dt_bias=True, rngs=nnx.Rngs(0))
    (_, x), (q, k, v, _) = by_input(), draw()
    assert made.form == "linear"
    assert {name: value.shape for name, value in nnx.to_pure_dict(nnx.state(made))["score_proj"].items()} == {
        "kernel": (WIDTH, HKV), "bias": (HKV,)} and list(nnx.to_pure_dict(nnx.state(made))) == ["score_proj"]
    assert same(made(q, k, v, x=x), dj.attention(q, k, v, mask=dj.IntervalMask.sliding_window(N, 5)))
    gradients = nnx.grad(lambda m: jnp.sum(m(q, k, v, x=x) ** 2))(made)
    assert all(jnp.any(y) for y in jax.tree.leaves(gradients))


def test_another_projection_of_the_input_is_called():
    (made, x), (q, k, v, _) = by_input(), draw()
    plain, real = made(q, k, v, x=x), jnp.arange(N)[None] > 2
    padded = made(q, k, v, x=x, padding=real)
    made.score_proj = nnx.Sequential(made.score_proj)
    assert jnp.allclose(made(q, k, v, x=x), plain, atol=1e-5)
    x = jnp.where(real[..., None], x, jnp.nan)
    assert jnp.allclose(made(q, k, v, x=x, padding=real), padded, atol=1e-5)
    made.score_proj = lambda x: 2 * x[..., :HKV]
    assert same(made(q, k, v, x=x, padding=real), dj.dynamic_mask_attention(
        q, k, v, 2 * jnp.nan_to_num(x[..., :HKV]).swapaxes(1, 2), window=5, padding=real))


def test_inputs_that_do_not_fit():
    (made, x), (q, k, v, _) = by_input(), draw()
    for given, error, message in (
            ({}, TypeError, "x must be a float array, the layer's input, with scores='input', got None"),
            ({"x": jnp.ones(x.shape, int)}, TypeError, "x must be .*float32.* got int32"),
            ({"x": x[:, 1:]}, ValueError, r"x must have shape \(2, 24, 7\), got \(2, 23, 7\): the layer was made"),
            ({"x": x[..., 1:]}, ValueError, r"x must have shape \(2, 24, 7\), got \(2, 24, 6\)")):
        with pytest.raises(error, match=message):
            made(q, k, v, **given)
    with pytest.raises(ValueError, match=r"x must have shape \(B, Lk, 7\), got \(2, 24, 2, 8\)"):
        made.scores(v)
    with pytest.raises(ValueError, match="x needs scores='input', got x for a layer with scores='value'"):
        layer()(q, k, v, x=x)


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"kv_heads": 0}, ValueError, "kv_heads must be at least 1, got 0"),
    ({"head_dim": 257}, ValueError, "head_dim must be 1 to 256, got 257"),
    ({"window": "5"}, TypeError, "window must be an int, got str '5'"),
    ({"form": "log"}, ValueError, "form must be 'exp' or 'linear', got 'log'"),
    ({"causal": False}, ValueError, "causal=False needs keys='global'"),
    ({"sinks": -1}, ValueError, "sinks must be at least 0, got -1"),
    ({"bias_delay": -1}, ValueError, "bias_delay must be at least 0, got -1"),
    ({"recent": 2, "keys": "global"}, ValueError, "sinks and recent need keys='prefix', got sinks=0, recent=2 and"),
    ({"dt_bias": 1}, TypeError, "dt_bias must be True or False, got int 1"),
    ({"scores": "key"}, ValueError, "scores must be 'value' or 'input', got 'key'"),
    ({"scores": "input"}, ValueError, "width must be given with scores='input' and only then, got width=None"),
    ({"width": 3}, ValueError, "width must be given with scores='input' and only then, got width=3"),
    ({"scores": "input", "width": 0}, ValueError, "width must be at least 1, got 0"),
    ({"scores": "input", "width": 3, "form": "exp"}, ValueError, "form needs scores='value', got form='exp'"),
    ({"scores": "input", "width": 3, "A_init": 1.0}, ValueError, "A_init needs scores='value', got A_init=1.0"),
    ({"rngs": 0}, TypeError, "rngs must be flax.nnx.Rngs, got int")], ids=str)
def test_bad_options(changes, error, message):
    with pytest.raises(error, match=message):
        dj.DynamicMaskAttention(**{"kv_heads": HKV, "head_dim": D, "window": 5, "rngs": nnx.Rngs(0), **changes})


def test_arrays_that_do_not_fit():
    q, k, v, _ = draw()
    with pytest.raises(ValueError, match=r"value must have shape \(B, Lk, 2, 8\), got \(2, 24, 1, 8\): the layer was"):
        layer()(q, k, v[:, :, :1])
    with pytest.raises(ValueError, match=r"key must have shape \(B, Lk, 2, 8\)"):
        layer()(q, k[..., 1:], v)
    with pytest.raises(ValueError, match="documents must be None in a layer with sinks=1, recent=0"):
        layer(sinks=1)(q, k, v, documents=[0, 9, N])


def test_an_adapter_is_called():
    """LoRA is a different kind of linear layer; a replacement of dt_proj may be any module."""
    q, k, v, _ = draw()
    made = layer(form="linear")
    kernel, plain = made.dt_proj.kernel[...], made(q, k, v)
    for own in (made.dt_proj, nnx.Sequential(made.dt_proj)):
        made.dt_proj = own
        assert jnp.allclose(made(q, k, v), plain, atol=1e-5)
    made.dt_proj = nnx.LoRALinear(HKV * D, HKV, lora_rank=2, use_bias=False, rngs=nnx.Rngs(1))
    made.dt_proj.kernel[...] = kernel
    lora = made.dt_proj.lora
    lora.lora_b[...] = jnp.ones_like(lora.lora_b[...])
    merged = kernel + lora.lora_a[...] @ lora.lora_b[...]
    expected = dj.dynamic_mask_attention(q, k, v, window=5, dt_proj=merged.T, A=made.A[...], form="linear")
    assert jnp.allclose(made(q, k, v), expected, atol=1e-5) and not jnp.allclose(plain, expected, atol=1e-2)
    assert jnp.allclose(made.scores(v), dj.key_scores(v, dt_proj=merged.T, A=made.A[...], form="linear"), atol=1e-5)
    gradients = nnx.grad(lambda m: jnp.sum(m(q, k, v) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))(made)
    assert all(jnp.any(x) for x in jax.tree.leaves(gradients))
