"""A delayed key bias (SPEC section 16) in torch: gradients, compiled graphs and operators. The tests of the layers
have delays among their options."""
import numpy as np
import pytest
import torch

import cupy_dma as dma
from tests.oracle.torch_inputs import N, draw, float64, gradients, recipe

pytestmark = pytest.mark.usefixtures("same_numbers")
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
    return dma.varlen_dynamic_mask_attention(q[0], k[0], v[0], BOUNDS, BOUNDS, s[0], window=[3, 7], return_lse=True,
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
        torch.testing.assert_close((*out, *gradients(out, given)), (*again, *gradients(again, given)),
                                   rtol=0, atol=1e-9)


@every_function
def test_traced_gradients_of_an_eager_call(function):
    given = inputs(function)
    out = function(*given, bias_delay=4)[0]
    wanted = torch.autograd.grad(out.sum(), given, retain_graph=True)
    found = torch.autograd.grad(out.sum(), given, create_graph=True)  # by operators
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
