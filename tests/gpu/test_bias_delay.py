"""Delayed key biases on a GPU: the oracle's cases, and long ones against dense float64."""
from contextlib import contextmanager

import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.runtime.program import fresh
from tests.gpu.sm90_tiles import portable
from tests.gpu.test_backward import converter, dense_gradients
from tests.oracle import cases, delay_cases, schedule_cases, varlen_cases

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
KERNELS = ("portable", "one pass", "two passes")
CASES = [c for c in delay_cases.CASES + delay_cases.LONG + delay_cases.FEW_QUERIES if c.dtype != "float64"]


@contextmanager
def on(kernels):
    with schedule_cases.hopper_gradients(kernels == "one pass"), portable() if kernels == "portable" else fresh():
        yield


@pytest.mark.feature("cuda forward backward", "attention", "bias_delay")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracles_cases(kernels, case):
    with on(kernels):
        cases.check(case, *cases.run(case, converter("cupy")), tf32=True)
        cases.check_backward(case, cases.run_backward(case, converter("cupy")), tf32=True)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", delay_cases.PACKED + delay_cases.PAGES, ids=str)
def test_sequences(kernels, case):
    with on(kernels):
        varlen_cases.check(case, *varlen_cases.run(case, converter("cupy")), tf32=True)
        if not case.page_size:
            varlen_cases.check_backward(case, varlen_cases.run_backward(case, converter("cupy")), tf32=True)


@pytest.mark.parametrize(("kernels", "compiled"), [*((kernels, False) for kernels in KERNELS), ("one pass", True)])
@pytest.mark.parametrize(("keys", "queries", "heads", "head_dim"), [
    (2500, 2500, (4, 2), 64), (1300, 700, (4, 2), 128), (600, 600, (2, 1), 256)])
def test_gates(keys, queries, heads, head_dim, kernels, compiled):
    """Closing gates, through autograd."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(length, h):
        return torch.randn(1, length, h, head_dim, generator=generator, device="cuda").bfloat16().requires_grad_()

    (q, dout), (k, v) = ((normal(n, h) for _ in range(2)) for n, h in zip((queries, keys), heads))
    dout = dout.detach()
    gates = torch.rand(1, heads[1], keys, generator=generator, device="cuda").log().requires_grad_()
    mask = dma.IntervalMask.from_gate(gates.detach(), delay=200, threshold=-1.5, sinks=2)

    def attend(q, k, v, gates):
        return dma.attention(q, k, v, mask=mask, bias=gates, bias_delay=200, deterministic=kernels == "two passes")

    with on(kernels):
        out = (torch.compile(attend, fullgraph=True) if compiled else attend)(q, k, v, gates)
        found = torch.autograd.grad(out, (q, k, v, gates), dout)
    exact = dense_gradients(torch, dout, q, k, v, gates, mask, torch.float64, bias_delay=200)
    for ours, expected in zip(found, exact):
        assert (ours.double() - expected).norm() <= 1e-2 * expected.norm()
