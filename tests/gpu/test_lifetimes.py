"""Masks without a bound on a GPU: attention and gradients with keys sorted by lifetime."""
from itertools import pairwise

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.attention import sm90_splits
from cupy_dma.backends.cuda.runtime.program import fresh
from cupy_dma.backward import attention_backward, varlen_attention_backward
from cupy_dma.masks.interval import NEVER
from tests.gpu.sm90_tiles import portable
from tests.gpu.test_backward import dense_gradients
from tests.oracle import schedule_cases
from tests.oracle.lifetime_cases import NAMES, masks

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("hopper", "one_pass"), [(False, None), (True, True), (True, False)],
                         ids=["portable", "one pass", "two passes"])
@pytest.mark.parametrize(("keys", "queries", "heads", "head_dim"), [
    (2500, 2500, (4, 2), 64), (1300, 700, (4, 2), 128), (900, 1000, (2, 1), 40), (600, 600, (2, 1), 256)])
def test_gradients(keys, queries, heads, head_dim, hopper, one_pass, name):
    generator = torch.Generator("cuda").manual_seed(1)
    mask = dict(masks(keys, heads[1]))[name].to(torch.empty(1, device="cuda"))

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    q, dout = normal(1, queries, heads[0], head_dim).bfloat16(), normal(1, queries, heads[0], head_dim).bfloat16()
    k, v = normal(1, keys, heads[1], head_dim).bfloat16(), normal(1, keys, heads[1], head_dim).bfloat16()
    bias = normal(1, heads[1], keys)
    with schedule_cases.hopper_gradients(one_pass), fresh(query_splits=sm90_splits.QuerySplits()):
        with portable() if not hopper else fresh():
            out, lse = dma.attention(q, k, v, mask=mask, bias=bias, return_lse=True)
            found, again = (attention_backward(dout, q, k, v, out, lse, mask=mask, bias=bias,
                                               deterministic=not one_pass) for _ in range(2))
    exact = dense_gradients(torch, dout, q, k, v, bias, mask, torch.float64)
    for ours, twin, expected in zip(found, again, exact):
        assert one_pass or torch.equal(ours, twin)
        error, size = (ours.double() - expected).norm(), expected.norm()
        assert error <= 1e-2 * size


@pytest.mark.parametrize("one_pass", [True, False], ids=["one pass", "two passes"])
@pytest.mark.parametrize(("n", "heads", "head_dim", "steps"), [
    (4096, (9, 3), 64, None), (4096, (9, 3), 64, 1), (1000, (3, 1), 128, 2), (3000, (2, 2), 128, None),
    (900, (2, 1), 256, 2)])
@pytest.mark.parametrize("kept", [0.0, 1 / 21, 1.0])
def test_split_tiles(kept, n, heads, head_dim, steps, one_pass):
    """Learned gates with a delay: tiles split as the device finds, and into splits of a few steps, against the portable
    kernels; the same bits in two passes, and always of keys, values and biases."""
    generator = torch.Generator("cuda").manual_seed(2)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    q, dout = normal(2, n, heads[0], head_dim), normal(2, n, heads[0], head_dim)
    k, v = normal(2, n, heads[1], head_dim), normal(2, n, heads[1], head_dim)
    open_gate = torch.rand(2, heads[1], n, generator=generator, device="cuda") < kept
    bias = torch.where(open_gate, -0.1, -9.0)
    given = {"mask": dma.IntervalMask.from_gate(bias, delay=64, threshold=-5.0), "bias": bias, "bias_delay": 64}
    splits = None if steps is None else sm90_splits.QuerySplits(2, steps)
    with schedule_cases.hopper_gradients(one_pass), fresh(query_splits=splits):
        out, lse = dma.attention(q, k, v, **given, return_lse=True)
        found, again = (attention_backward(dout, q, k, v, out, lse, **given, deterministic=not one_pass)
                        for _ in range(2))
    with portable():
        expected = attention_backward(dout, q, k, v, out, lse, **given)
    for name, ours, twin, other in zip(found._fields, found, again, expected):
        assert torch.equal(ours, twin) or one_pass and name == "query"
        assert (ours.double() - other.double()).norm() <= 1e-2 * other.double().norm()


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(hopper, head_dim):
    """Outputs and gradients equal those of a call per sequence, for long sequences and for several in a chunk."""
    bounds = [0, 700, 700, 5900, 6200, 10500]
    n, generator = bounds[-1], torch.Generator("cuda").manual_seed(3)
    q, dout = torch.randn(2, n, 4, head_dim, generator=generator, device="cuda").bfloat16()
    k, v = torch.randn(2, n, 2, head_dim, generator=generator, device="cuda").bfloat16()
    stays = torch.rand(2, n, generator=generator, device="cuda") < 1 / 8
    stop = torch.where(stays, NEVER, torch.arange(n, device="cuda") + 100)
    mask, cu = dma.IntervalMask.from_stop(stop), torch.tensor(bounds, device="cuda")
    with fresh() if hopper else portable():
        out, lse = dma.varlen_attention(q, k, v, cu, cu, mask=mask, return_lse=True)
        found = varlen_attention_backward(dout, q, k, v, out, lse, cu, cu, mask=mask)
        for a, b in pairwise(bounds):
            if a == b:
                continue
            own = [x[None, a:b] for x in (q, k, v)]
            alone = dma.IntervalMask.from_stop((stop[:, a:b].clamp(max=n) - a).clamp(max=b - a))
            expected, expected_lse = dma.attention(*own, mask=alone, return_lse=True)
            gradients = attention_backward(dout[None, a:b], *own, expected, expected_lse, mask=alone)
            for ours, other in zip((out, *found), (expected, *gradients)):
                if other is not None:
                    error = (ours[a:b].double() - other[0].double()).norm()
                    assert error <= 1e-2 * other.double().norm()


@pytest.mark.usefixtures("uncollected")
def test_a_graph_replays_with_other_lifetimes():
    """The graph builds its lists itself: it replays with eight times as many surviving keys, and with none."""
    n, heads = 4096, 2
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 64, generator=generator, device="cuda").bfloat16() for h in (4, heads, heads))
    j = torch.arange(n, device="cuda")
    start, stop = j.int().expand(heads, n).contiguous(), (j + 64).int().expand(heads, n).contiguous()
    mask = dma.IntervalMask(start, stop)
    for _ in range(2):
        dma.attention(q, k, v, mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = dma.IntervalMask(start, stop)
        out, lse = dma.attention(q, k, v, mask=mask, return_lse=True)
        found = attention_backward(out, q, k, v, out, lse, mask=mask)
    for share in (1 / 32, 1 / 4, 0.0):
        stop.copy_(torch.where(torch.rand(heads, n, generator=generator, device="cuda") < share, n, j + 64))
        graph.replay()
        fresh_mask = dma.IntervalMask(start.clone(), stop.clone())
        expected, expected_lse = dma.attention(q, k, v, mask=fresh_mask, return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        gradients = attention_backward(expected, q, k, v, expected, expected_lse, mask=fresh_mask)
        for ours, other in zip(found[1:3], gradients[1:3]):
            assert np.isfinite(float(ours.float().norm())) and torch.equal(ours, other)
