"""The torch functions and layers on CUDA tensors: what tests on CPU tensors cannot check. Everything here is marked
``gpu``."""
import copy

import numpy as np
import pytest

import cupy_dma as dma

torch = pytest.importorskip("torch")

from cupy_dma.torch import DynamicMaskAttention, DynamicMaskSelfAttention  # noqa: E402
from tests.oracle import layer_cases, reference  # noqa: E402
from tests.oracle.torch_inputs import same  # noqa: E402
from tests.torch import recall  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("uncollected", "same_numbers")]


def draw(n=300, heads=4, kv_heads=2, size=64, dtype=torch.bfloat16):
    """query, key, value, scores."""
    shapes = (2, n, heads, size), (2, n, kv_heads, size), (2, n, kv_heads, size)
    rows = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
    return [*rows, torch.randn(2, kv_heads, n, device="cuda").requires_grad_()]


def dynamic(q, k, v, s):
    """Deterministic, because tests compare gradients bit by bit."""
    return dma.dynamic_mask_attention(q, k, v, s, window=50, softcap=5.0, deterministic=True)


def gradients(function, arguments):
    out = function(*arguments)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype)
    return torch.autograd.grad(out, arguments, weights)


@pytest.mark.feature("cuda forward backward", "torch", "autograd")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autograd_has_the_bits_of_the_manual_functions(dtype):
    q, k, v, s = draw(dtype=dtype)
    out, lse = dma.dynamic_mask_attention(q, k, v, s, window=50, deterministic=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v, s), (dout, dlse))
    with torch.no_grad():
        manual = dma.backward.dynamic_mask_attention_backward(dout, q, k, v, out, lse, s, window=50, dlse=dlse,
                                                              deterministic=True)
    assert same(found, manual[:4])


def test_forward_and_backward_share_their_key_lists(monkeypatch):
    q, k, v, s = draw(n=2000)
    mask = dma.IntervalMask.top_w(s, 100)

    def attend(*x):
        return dma.attention(*x[:3], mask=mask, bias=x[3], deterministic=True)

    first, kept = gradients(attend, (q, k, v, s)), dict(mask._cache)
    second = gradients(attend, (q, k, v, s))
    assert kept and all(mask._cache[key] is x for key, x in kept.items()) and len(mask._cache) == len(kept)
    assert same(first, second)


@pytest.mark.parametrize("how", ["compile", "dynamic lengths", "checkpoint", "other stream", "no unit stride"])
def test_the_same_gradients_however_it_runs(how):
    from torch.utils.checkpoint import checkpoint

    arguments = draw()
    plain = gradients(dynamic, arguments)
    stream = torch.cuda.Stream()

    def elsewhere(*x):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = dynamic(*x)
        torch.cuda.current_stream().wait_stream(stream)
        return out

    run = {"compile": lambda: torch.compile(dynamic, fullgraph=True),
           "dynamic lengths": lambda: torch.compile(dynamic, fullgraph=True, dynamic=True),
           "checkpoint": lambda: lambda *x: checkpoint(dynamic, *x, use_reentrant=False),
           "other stream": lambda: elsewhere,
           "no unit stride": lambda: lambda *x: dynamic(*x).transpose(1, 3).clone(
               memory_format=torch.contiguous_format).transpose(1, 3)}[how]()
    found = gradients(run, arguments)
    torch.cuda.synchronize()
    assert same(plain, found)


@pytest.mark.feature("cuda forward", "torch", "autocast")
def test_autocast():
    q, k, v, s = (x.detach().float().requires_grad_() for x in draw())
    with torch.autocast("cuda", torch.bfloat16):
        out = dynamic(q, k, v, s)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in (q, k, v, s))


@pytest.mark.feature("cuda backward", "torch", "CUDA graphs")
def test_a_cuda_graph_of_forward_and_backward():
    layer = DynamicMaskAttention(2, 64, 50, deterministic=True, device="cuda")
    torch.nn.init.constant_(layer.A, 0.2)
    q, k, v, _ = draw()
    leaves = (q, k, v, *layer.parameters())
    eager = gradients(lambda *x: layer(*x[:3]), leaves)
    graphed = torch.cuda.make_graphed_callables(layer, (q, k, v))
    for _ in range(3):
        found = gradients(lambda *x: graphed(*x[:3]), leaves)
        torch.cuda.synchronize()
        assert same(eager, found)


@pytest.mark.feature("cuda forward backward", "torch", "DynamicMaskAttention:")
@pytest.mark.feature("cuda forward", "torch", "DynamicMaskAttention.extend")
@pytest.mark.parametrize("how", layer_cases.INPUTS)
@pytest.mark.parametrize("besides", layer_cases.BESIDES, ids=str)
def test_what_the_kernels_are_tested_with(how, besides):
    sinks, recent = besides
    layer_cases.check_layer(DynamicMaskAttention(2, 64, 6, sinks=sinks, recent=recent, form="linear", softcap=5.0,
                                                 device="cuda", dtype=torch.bfloat16), how, "cuda")


@pytest.mark.feature("cuda forward", "torch", "DynamicMaskSelfAttention", "DynamicMaskSelfAttention, with")
@pytest.mark.parametrize("graphed", [False, True])
@torch.no_grad()
def test_decoding_is_forward(graphed):
    """A prompt padded on the left, then single tokens, with or without one CUDA graph. The window keeps every key,
    because rounded scores could select others than exact ones."""
    module = DynamicMaskSelfAttention(256, 4, 2, 64, qk_norm=True, slope=(0.02, -0.01), device="cuda",
                                      dtype=torch.bfloat16)
    torch.nn.init.normal_(module.attention.A, std=0.1)
    x, real = torch.randn(2, 50, 256, device="cuda", dtype=torch.bfloat16), torch.ones(2, 50, dtype=torch.bool)
    real[0, :7] = False
    whole = module(x, padding=real.cuda())
    exact = copy.deepcopy(module).double().cpu()(x.double().cpu(), padding=real)
    cache = module.make_cache(2)
    outs = [module(x[:, :40], padding=real[:, :40].cuda(), cache=cache)]
    token = x[:, 40:41].clone()
    outs.append(module(token, cache=cache))  # the first step compiles
    graph, out = torch.cuda.CUDAGraph(), token
    if graphed:
        with torch.cuda.graph(graph):
            out = module(token, cache=cache)
    for i in range(41, 50):
        token.copy_(x[:, i:i + 1])
        if graphed:
            graph.replay()
        else:
            out = module(token, cache=cache)
        outs.append(out.clone())
    assert cache.length.tolist() == [43, 50]
    reference.assert_matches_reference(*(y.double().cpu().numpy() for y in (torch.cat(outs, 1), exact, whole)),
                                       reference.ml_dtypes.bfloat16)


@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_recall_is_learned(compiler):
    right, steps = recall.train("cuda", torch.bfloat16, compiler=compiler)
    print(f"{steps} steps")
    assert right == 1


@pytest.mark.feature("cuda forward backward", "torch", "torch.compile")
def test_compiled_and_eager_training_agree():
    """A hundred steps of four layers in bfloat16 autocast: the same loss curve within rounding."""
    eager, compiled = ([*recall.losses(run, 32, 64, 100, 0.1, "cuda", (4, 256), True, form="linear")] for run in (
        lambda model: model, lambda model: torch.compile(model, fullgraph=True)))
    assert eager[-1] < eager[0]
    np.testing.assert_allclose(compiled, eager, rtol=2e-2)
