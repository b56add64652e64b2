"""The layer of flax.nnx: the function with its parameters, in training, and as torch's."""
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


@pytest.mark.parametrize("options", [{}, {"sinks": 2}, {"recent": 3}, {"sinks": 1, "recent": 4},
                                     {"bias_delay": 4}, {"sinks": 1, "bias_delay": 4}], ids=str)
def test_torch_has_the_same_layer(options):
    torch = pytest.importorskip("torch")
    from cupy_dma.torch import DynamicMaskAttention

    made, twin = layer(dt_bias=True, **options), DynamicMaskAttention(HKV, D, 5, dt_bias=True, **options)
    with torch.no_grad():
        twin.A.copy_(torch.from_numpy(np.array(made.A[...])))
        twin.dt_proj.weight.copy_(torch.from_numpy(np.array(made.dt_proj.kernel[...].T)))
        twin.dt_proj.bias.copy_(torch.from_numpy(np.array(made.dt_proj.bias[...])))
    q, k, v, _ = draw()
    out = twin(*(torch.from_numpy(np.array(x)) for x in (q, k, v)))
    out.square().sum().backward()
    assert same(made(q, k, v), out.detach().numpy())
    assert same(made(q, k, v), nnx.jit(lambda m: m(q, k, v))(made))
    gradients = nnx.grad(lambda m: jnp.sum(m(q, k, v) ** 2))(made)
    np.testing.assert_allclose(gradients["A"][...], twin.A.grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(gradients["dt_proj"]["kernel"][...].T, twin.dt_proj.weight.grad.numpy(), rtol=1e-4,
                               atol=1e-6)


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
    """LoRA is a linear layer of its own kind; what is put in the place of dt_proj need not be one."""
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
