"""A delayed key bias (SPEC section 16) in torch: gradients, compiled graphs, operators and layers."""
import itertools

import numpy as np
import pytest

import cupy_dma as dma

torch = pytest.importorskip("torch")

from cupy_dma.torch import DynamicMaskAttention, DynamicMaskSelfAttention  # noqa: E402
from tests.oracle.layer_cases import check, problem  # noqa: E402
from tests.oracle.torch_inputs import HKV, B, D, N, draw, float64, gradients, recipe  # noqa: E402

BOUNDS = [0, 7, 7, N]


def attend(q, k, v, s, **options):
    return dma.attention(q, k, v, bias=s, causal=True, return_lse=True, **options)


def dynamic(q, k, v, s, **options):
    return dma.dynamic_mask_attention(q, k, v, s, window=5, return_lse=True, **options)


def computed(q, k, v, *parameters, **options):
    names = dict(zip(("dt_proj", "A", "dt_bias"), parameters))
    return dma.dynamic_mask_attention(q, k, v, **names, window=5, return_lse=True, **options)


def packed(q, k, v, s, **options):
    return dma.varlen_attention(q[0], k[0], v[0], BOUNDS, BOUNDS, bias=s[0], causal=True, return_lse=True, **options)


def packed_dynamic(q, k, v, s, **options):
    return dma.varlen_dynamic_mask_attention(q[0], k[0], v[0], BOUNDS, BOUNDS, s[0], window=5, return_lse=True,
                                             **options)


FUNCTIONS = [attend, dynamic, computed, packed, packed_dynamic]
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def inputs(function, dtype=float64):
    *qkv, s = draw(dtype)
    return [*qkv, *(recipe(dtype).values() if function is computed else [s])]


@every_function
def test_results_are_those_of_arrays(function):
    given = inputs(function)
    found = function(*given, bias_delay=4)
    expected = function(*[x.detach().numpy() for x in given], bias_delay=4)
    assert all(np.array_equal(ours.detach().numpy(), other) for ours, other in zip(found, expected))
    assert not torch.equal(found[0], function(*given)[0])


@every_function
def test_gradients(function):
    assert torch.autograd.gradcheck(lambda *x: function(*x, bias_delay=4), inputs(function), fast_mode=True)


@every_function
def test_compiled_in_one_graph(function):
    given = inputs(function)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for delay in (0, 4, 5):
        out, again = (run(*given, bias_delay=delay) for run in (function, compiled))
        for ours, other in zip((*out, *gradients(out, given)), (*again, *gradients(again, given))):
            torch.testing.assert_close(ours, other, rtol=0, atol=1e-9)


@every_function
def test_traced_gradients_of_an_eager_call(function):
    given = inputs(function)
    out = function(*given, bias_delay=4)[0]
    wanted = torch.autograd.grad(out.sum(), given, retain_graph=True)
    found = torch.autograd.grad(out.sum(), given, create_graph=True)  # by operators
    for ours, other in zip(found, wanted):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"sinks": 2, "recent": 3}], ids=["plain", "kept"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer(options, dtype):
    module = DynamicMaskAttention(HKV, D, 5, bias_delay=4, A_init=1.0, dtype=dtype, **options)
    q, k, v, _ = draw(dtype, requires_grad=False)
    check(module(q, k, v), problem(module, q, k, v))
    out = module(q[0], k[0], v[0], cu_seqlens=torch.tensor(BOUNDS))
    parts = [module(*(x[:1, a:b] for x in (q, k, v)))[0] for a, b in itertools.pairwise(BOUNDS)]
    torch.testing.assert_close(out, torch.cat(parts))
    assert "bias_delay=4" in repr(module)


def test_self_attention():
    module = DynamicMaskSelfAttention(24, 4, 2, 5, bias_delay=4, A_init=1.0)
    x = torch.randn(B, N, 24)
    out = module(x)
    core = module.attention
    assert core.bias_delay == module.bias_delay == 4
    module.bias_delay = 0
    assert core.bias_delay == 0 and not torch.equal(module(x), out)
    with pytest.raises(ValueError, match="bias_delay must be at least 0, got -1"):
        module.bias_delay = -1


@torch.no_grad()
@pytest.mark.parametrize("window", [5, (3, 8)])
def test_decoding(window):
    """Chunks and single tokens give the layer's outputs for the whole text; without the delay they would not."""
    module = DynamicMaskSelfAttention(24, 4, 2, window, bias_delay=4, A_init=1.0, sinks=1, recent=2,
                                      dtype=torch.float64)
    x, cache = torch.randn(B, N, 24, dtype=torch.float64), module.make_cache(B)
    expected, at = module(x), 0
    for n in (7, 1, 1, 6, *[1] * (N - 15)):
        torch.testing.assert_close(module(x[:, at:at + n], cache=cache), expected[:, at:at + n])
        at += n
    module.bias_delay = 0
    assert not torch.allclose(module(x)[:, -1], expected[:, -1])


def test_a_bias_is_needed_in_a_compiled_graph_too():
    q, k, v, _ = draw(requires_grad=False)
    compiled = torch.compile(lambda *x: dma.attention(*x, bias_delay=3), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="bias_delay needs a key bias"):
        compiled(q, k, v)
