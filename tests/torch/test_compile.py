"""The torch functions and layers under torch.compile, activation checkpointing and autocast, on CPU tensors."""
import shutil
import subprocess
import sys

import pytest
import torch

import cupy_dma as dma
from cupy_dma.backends import numpy as numpy_backend
from cupy_dma.torch import DynamicMaskAttention
from tests.oracle.torch_inputs import HKV, D, N, draw, float64, gradients, recipe, same

pytestmark = pytest.mark.usefixtures("same_numbers")
needs_a_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))),
                                      reason="inductor needs a C++ compiler")


def dynamic(q, k, v, s):
    return dma.dynamic_mask_attention(q, k, v, s, window=5, softcap=2.0)


def by_parts(q, k, v, s):
    scores = dma.key_scores(v, torch.full((HKV, HKV * D), 0.1), s.mean((0, 2)))
    mask = dma.IntervalMask.top_w(scores, (3, 7)) | dma.IntervalMask.sliding_window(N, [2, 4], like=q)
    mask = mask & dma.IntervalMask.documents(torch.tensor([0, 7, N]), key_length=N)
    return dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)


def inside(q, k, v, s):
    x = dma.dynamic_mask_attention(q * 2, k, v.sin(), s, window=7, keys="global", padding=torch.arange(N)[None] != 3)
    return dma.attention(x, k, v, causal=True, bias=s) + x


OUTER_MASK = dma.IntervalMask.sliding_window(N, 4, like=torch.zeros(1))


def with_a_mask_from_outside(q, k, v, s):
    return dma.attention(q, k, v, mask=OUTER_MASK, bias=s)


def several_masks(q, k, v, s):
    j = torch.arange(N)
    dense = (j * 7 % 5 != 0)[None, None, None], ((j + j[:, None]) % 3 != 0), (j * j[:, None] % 4 != 1)[None, None]
    mask = (dma.IntervalMask.top_w(s, 9), *dense)
    return dma.attention(q, k, v, mask=mask, bias=s[:, :, None] * s[:, :, :, None])


@pytest.mark.feature("numpy forward backward", "torch", "torch.compile")
@pytest.mark.parametrize(("function", "backend"), [
    (several_masks, "aot_eager"),
    (dynamic, "aot_eager"), (by_parts, "aot_eager"), (inside, "aot_eager"), (with_a_mask_from_outside, "aot_eager"),
    pytest.param(dynamic, "inductor", marks=needs_a_compiler)])
def test_compile_in_one_graph(function, backend):
    arguments = draw(torch.float32)
    eager, compiled = (f(*arguments) for f in (function, torch.compile(function, fullgraph=True, backend=backend)))
    torch.testing.assert_close(eager, compiled, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients(eager, arguments), gradients(compiled, arguments), rtol=0, atol=2e-5)
    with torch.no_grad():
        torch.compile(function, fullgraph=True, backend="eager")(*arguments)


@pytest.mark.parametrize("options", [{"window": 5}, {"window": (3, 7)}, {"window": (3, 7), "sinks": 1, "recent": 2},
                                     {"window": (3, 7), "keys": "global"}], ids=str)
def test_compile_with_dynamic_lengths(options):
    module = DynamicMaskAttention(HKV, D, form="linear", **options)
    torch.nn.init.normal_(module.A)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (6, 18, 31, 3):
        q, k, v, _ = draw(torch.float32, n=n)
        leaves = (q, k, v, *module.parameters())
        assert same(gradients(module(q, k, v), leaves), gradients(compiled(q, k, v), leaves))


def test_bad_input_under_compile_raises_when_run():
    q, k, v, s = draw(torch.float32)
    padding = torch.ones(len(q), N, dtype=torch.bool)
    for mask in (padding, (padding, padding[:, None, None])):
        with pytest.raises(Exception, match=r"mask must have four axes here, got \(2, \d+\), which is \(B, Lk\)"):
            torch.compile(lambda *x, mask=mask: dma.attention(*x, mask=mask), backend="eager")(q, k, v)
    for window, message in ((0, "window must be at least 1, got 0"), ((3, 4, 5), "one int for each of 2 kv heads")):
        with pytest.raises(ValueError, match=message):
            torch.compile(lambda *x, w=window: dma.dynamic_mask_attention(*x, window=w), backend="eager")(q, k, v, s)
        with pytest.raises(ValueError, match=message):
            torch.compile(lambda s, w=window: dma.IntervalMask.top_w(s, w), backend="eager")(s)
    with pytest.raises(ValueError, match="key must have query's batch and head dim"):
        torch.compile(lambda q, k: dma.attention(q, k[..., :4], k[..., :4]), backend="aot_eager")(q, k)
    with pytest.raises(ValueError, match="bias_delay needs a key bias"):
        torch.compile(lambda *x: dma.attention(*x, bias_delay=3), fullgraph=True, backend="aot_eager")(q, k, v)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    arguments = draw(torch.float32)
    again = checkpoint(dynamic, *arguments, use_reentrant=reentrant, determinism_check="default")
    loss = (again * again.detach()).sum()
    loss.backward()
    plain = dynamic(*arguments)
    assert same([x.grad for x in arguments], torch.autograd.grad((plain * plain.detach()).sum(), arguments))


@pytest.mark.feature("numpy forward", "torch", "autocast")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_autocast(kind):
    q, k, v, s = draw(torch.float32)
    with torch.autocast("cpu", kind):
        out, lse = dma.attention(q, k.to(kind), v, bias=s, causal=True, return_lse=True)
        compiled = torch.compile(lambda q, k, v, s: dma.attention(q, k.to(kind), v, bias=s, causal=True),
                                 fullgraph=True, backend="aot_eager")
        assert torch.equal(out, compiled(q, k, v, s))
        scores = dma.key_scores(v, *list(recipe(torch.float32).values())[:2])
        with torch.no_grad():
            assert dma.attention(q, k, v).dtype == kind
        assert dma.attention(*[x.double() for x in (q, k, v)]).dtype == float64
        with torch.autocast("cpu", enabled=False):
            assert dma.attention(q, k, v).dtype == torch.float32
    assert out.dtype == kind and lse.dtype == scores.dtype == torch.float32
    found = gradients(out, (q, k, v, s), torch.ones_like(out))
    assert {x.dtype for x in found} == {torch.float32}
    halves = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
    expected = gradients(dma.attention(*halves, bias=s, causal=True), (*halves, s), torch.ones_like(out))
    assert same(found, [x.float() for x in expected])


def test_deterministic_algorithms_are_obeyed(calls_of):
    calls = calls_of(numpy_backend, "attention_backward")
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            dynamic(*draw(torch.float32)).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert [call.forward.deterministic for call, in calls] == [False, True]


@needs_a_compiler
def test_the_compiler_keeps_the_last_axis_contiguous():
    """Tensors created inside the graph are passed to the operators with the strides that they have in eager mode."""
    def model(x, s):
        q = (x.transpose(1, 2) * 2).transpose(1, 2)  # (B, H, N, D) in memory
        k, v = x[:, :, :HKV].cos(), x[:, :, :1].expand(-1, -1, HKV, -1) + 1
        return dynamic(q, k, v, s)

    x, _, _, s = draw(torch.float32)
    found = torch.compile(model, fullgraph=True, backend="inductor")(x, s)
    torch.testing.assert_close(found, model(x, s), rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients(found, (x, s)), gradients(model(x, s), (x, s)), rtol=0, atol=2e-5)


def test_a_process_compiles_its_first_call_once():
    """Also if cupy_dma was imported before torch."""
    code = """
from cupy_dma import attention
import torch
graphs = []
compiled = torch.compile(lambda x: attention(x, x, x, causal=True, backend="numpy"),
                         backend=lambda graph, inputs: graphs.append(graph) or graph)
for _ in range(2):
    compiled(torch.ones(1, 5, 2, 4))
print(len(graphs))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"], done.stderr
