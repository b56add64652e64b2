"""Packed sequences and pages through the kernels on the CPU emulator, against the oracle of single sequences."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import describe
from cupy_dma.backends.cuda.lists.varlen import with_own_bounds
from cupy_dma.backends.cuda.runtime.program import run
from cupy_dma.backward import varlen_attention_backward
from cupy_dma.calls.sequences import sequences_of
from tests import emulator
from tests.emulator.tests.test_forward import ORDERS, bits, check_order
from tests.oracle import schedule_cases
from tests.oracle import varlen_cases as cases

FORWARD = [c for c in cases.CASES + cases.PAGES if c.dtype != "float64"]
BACKWARD = [c for c in FORWARD if not c.page_size and c.name.startswith((
    "bfloat16-", "float32-", "mask-", "causal-and-", "bias-key_", "used-", "tail-", "heads-6/2", "D3", "short-",
    "sixty-", "one", "empty", "softcap"))]


def named(name: str) -> cases.Case:
    return next(c for c in cases.CASES + cases.PAGES + cases.SUPERS + cases.LONG if c.name == name)


@pytest.mark.feature("cuda forward", "varlen and paged", "block_table", case="pages-")
@pytest.mark.feature("cuda forward", "varlen and paged", "varlen_dynamic_mask_attention", case="bfloat16-top_w")
@pytest.mark.feature("cuda forward", "varlen and paged", "varlen_attention")
@pytest.mark.parametrize("case", FORWARD + cases.LONG, ids=str)
def test_forward(case):
    cases.check(case, *cases.run(case, backend="emulator"), tf32=True)


@pytest.mark.feature("cuda backward", "varlen and paged", "varlen_attention")
@pytest.mark.parametrize("case", BACKWARD + cases.SUPERS, ids=str)
def test_backward(case):
    cases.check_backward(case, cases.run_backward(case, backend="emulator"), tf32=True)


@pytest.mark.parametrize("pages", [0, 3])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kinds", [("int32", "int64", "int32"), ("int64", "int32", "int64")], ids=str)
def test_bounds_that_a_program_makes(kinds, used, pages, device):
    """More sequences than a block has threads, some of them empty, and rows after the last one."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, (2, 300))
    cu_q, cu_k = (np.concatenate(([0], np.cumsum(x))).astype(kind) for x, kind in zip(lengths, kinds))
    key_shape = (50, 4) if pages else (1, int(cu_k[-1]))
    query, key = (describe(np.zeros((*shape, 1, 1), np.float32), "x") for shape in ((1, int(cu_q[-1]) + 5), key_shape))
    given = (cu_q, cu_k, rng.integers(0, lengths[1] + 1).astype(kinds[2]) if used else None,
             rng.integers(0, 50, (300, pages)).astype(np.int32) if pages else None)
    expected = sequences_of(query, key, *given)

    def make(build, *arguments):
        found = with_own_bounds(build, expected, arguments, query.shape[1])
        assert (found.page_table is None) == (not pages)
        return found.bounds.array

    with device.memory.session() as session:
        made = run(device, make, *[None if x is None else session.operand(x) for x in expected.given])
    assert np.array_equal(made, expected.bounds.array)


def everything():
    return [*cases.run(named("mask-global"), backend="emulator"), *cases.run(named("pages-16-top_w"),
                                                                             backend="emulator"),
            *cases.run_backward(named("supers-window"), backend="emulator"),
            *cases.run_backward(named("tail-none"), backend="emulator")]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_order_of_threads_and_blocks_changes_no_bit(order):
    check_order(order, everything)


def test_bad_queries_stay_in_their_sequence():
    """A sequence's last step of queries has room for queries of the next sequence, which must not count."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((130, 1, 64)).astype(np.float16) for _ in range(4))
    bounds = np.array([0, 30, 130], np.int32)
    out, lse = dma.varlen_attention(q, k, v, bounds, bounds, return_lse=True, backend="numpy")

    def gradients(spoiled):
        upstream, queries = dout.copy(), q.copy()
        if spoiled:
            upstream[30:], queries[30:] = np.inf, np.nan
        return [varlen_attention_backward(upstream, queries, k, v, out, lse, bounds, bounds, deterministic=exact,
                                          needs=("key", "value"), backend="emulator") for exact in (False, True)]

    def check():
        for found, clean in zip(gradients(True), gradients(False)):
            for x, y in ((found.key, clean.key), (found.value, clean.value)):
                assert np.array_equal(bits(x[:30]), bits(y[:30])) and not np.isfinite(x[30:]).any()

    check()
    with emulator.hopper_gpu(), schedule_cases.hopper_gradients(True):
        check()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_of_a_bias_per_key_through_torch(dtype):
    """The bias has two axes, (Hkv, keys), and may have a type that the kernels do not read."""
    torch = pytest.importorskip("torch")
    make = torch.Generator().manual_seed(0)
    shapes = (30, 4, 16), (30, 2, 16), (30, 2, 16), (2, 30)
    bounds, results = torch.tensor([0, 11, 30], dtype=torch.int32), []
    values = [torch.randn(shape, generator=make).to(torch.float16) for shape in shapes]
    values[3] = values[3].to(getattr(torch, dtype))
    for backend in ("numpy", "emulator"):
        q, k, v, bias = leaves = [x.clone().requires_grad_() for x in values]
        out = dma.varlen_attention(q, k, v, bounds, bounds, bias=bias, causal=True, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaves, values[0])])
    for found, expected in zip(*results):
        assert found.dtype == expected.dtype
        assert torch.allclose(found.float(), expected.float(), atol=2e-2)
