"""Packed sequences and pages on a GPU: the grid against the oracle, long sequences against a call per sequence, and no
synchronization with the device. Everything here is marked ``gpu``."""
import itertools

import numpy as np
import pytest

import cupy_dma as dma
from tests.gpu.sm90_tiles import portable
from tests.gpu.test_forward import converter
from tests.oracle import varlen_cases as cases

pytestmark = pytest.mark.gpu

FORWARD = [c for c in cases.CASES + cases.PAGES + cases.LONG if c.dtype != "float64"]
BACKWARD = [c for c in cases.CASES + cases.SUPERS if c.dtype != "float64"]


# ---- correctness ----
@pytest.mark.feature("cuda forward", "varlen and paged", "block_table", case="pages-")
@pytest.mark.feature("cuda forward", "varlen and paged", "varlen_dynamic_mask_attention", case="bfloat16-top_w")
@pytest.mark.feature("cuda forward", "varlen and paged", "varlen_attention")
@pytest.mark.parametrize("name", ["cupy", "torch"])
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward(case, name):
    pytest.importorskip(name)
    cases.check(case, *cases.run(case, converter(name)), tf32=True)


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward_of_portable_kernels(case):
    pytest.importorskip("cupy")
    with portable():
        cases.check(case, *cases.run(case, converter("cupy")), tf32=True)


@pytest.mark.feature("cuda backward", "varlen and paged", "varlen_attention")
@pytest.mark.parametrize("name", ["cupy", "torch"])
@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_backward(case, name):
    pytest.importorskip(name)
    cases.check_backward(case, cases.run_backward(case, converter(name)), tf32=True)


@pytest.mark.parametrize("case", [c for c in BACKWARD if c.name.startswith(("supers", "mask-", "bfloat16-", "D128"))],
                         ids=str)
def test_tiles_of_smaller_gpus(case):
    with portable(shared_memory=99 * 1024):
        cases.check(case, *cases.run(case, converter("cupy")), tf32=True)
        cases.check_backward(case, cases.run_backward(case, converter("cupy")), tf32=True)


LENGTHS = (3000, 17, 1, 5000, 0, 700, 64, 4097)


def packed(torch, heads=8, kv_heads=2, size=64, dtype=None):
    """query, key, value, scores that require gradients, and the bounds."""
    make = torch.Generator(device="cuda").manual_seed(0)
    total, dtype = sum(LENGTHS), dtype or torch.bfloat16
    rows = [torch.randn(total, h, size, generator=make, device="cuda").to(dtype).requires_grad_()
            for h in (heads, kv_heads, kv_heads)]
    scores = torch.randn(kv_heads, total, generator=make, device="cuda").requires_grad_()
    cu = torch.tensor(np.concatenate(([0], np.cumsum(LENGTHS))), dtype=torch.int32, device="cuda")
    return [*rows, scores], cu


@pytest.mark.feature("cuda backward", "varlen and paged", "varlen_dynamic_mask_attention")
@pytest.mark.parametrize("kind", ["causal", "top_w", "global", "window"])
def test_long_sequences_are_as_calls_of_their_own(torch, kind):
    """Forward and backward, some over several super-tiles. Key blocks differ, so results are equal up to roundings."""
    arguments, cu = packed(torch)
    total, options = sum(LENGTHS), {"softcap": 20.0}

    def attend(q, k, v, s):
        if kind == "causal":
            return dma.varlen_attention(q, k, v, cu, cu, bias=s, causal=True, **options)
        if kind == "window":
            mask = dma.IntervalMask.sliding_window(total, 400, like=q)
            return dma.varlen_attention(q, k, v, cu, cu, bias=s, mask=mask, **options)
        return dma.varlen_dynamic_mask_attention(q, k, v, cu, cu, s, window=500,
                                                 keys="global" if kind == "global" else "prefix", **options)

    def by_itself(q, k, v, s):
        n = q.shape[0]
        q, k, v, s = (x[None] for x in (q, k, v, s))
        if kind == "causal":
            return dma.attention(q, k, v, bias=s, causal=True, **options)[0]
        if kind == "window":
            return dma.attention(q, k, v, bias=s, mask=dma.IntervalMask.sliding_window(n, 400, like=q), **options)[0]
        return dma.dynamic_mask_attention(q, k, v, s, window=500, keys="global" if kind == "global" else "prefix",
                                          **options)[0]

    weights = torch.randn(total, 8, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    out = attend(*arguments)
    found = [out, *torch.autograd.grad(out, arguments, weights)]
    for a, b in itertools.pairwise(np.concatenate(([0], np.cumsum(LENGTHS)))):
        one = [x[..., a:b].detach() if x.ndim == 2 else x[a:b].detach() for x in arguments]
        one = [x.contiguous().requires_grad_() for x in one]
        alone = by_itself(*one)
        expected = [alone, *torch.autograd.grad(alone, one, weights[a:b])]
        for x, y in zip(found, expected):
            x = (x[..., a:b] if x.ndim == 2 else x[a:b]).double()
            assert (x - y.double()).norm() <= 1e-2 * y.double().norm() + 2e-2


def test_the_same_bits_every_time(torch):
    arguments, cu = packed(torch)

    def gradients():
        out = dma.varlen_dynamic_mask_attention(*arguments[:3], cu, cu, arguments[3], window=300, deterministic=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), arguments)]

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients()))


def test_a_cache_of_more_than_2_31_elements(torch):
    page_size, pages = 16, 140_000
    cache = torch.zeros(pages, page_size, 8, 128, dtype=torch.bfloat16, device="cuda")
    assert cache.numel() > 2**31
    table = torch.tensor([[pages - 1, 5], [pages - 2, pages - 3]], dtype=torch.int32, device="cuda")
    used = torch.tensor([20, 32], dtype=torch.int32, device="cuda")
    cache[table.flatten().long()] = torch.randn(4, page_size, 8, 128, device="cuda").bfloat16()
    q, cu = torch.randn(5, 8, 128, device="cuda").bfloat16(), torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda")
    out = dma.varlen_attention(q, cache, cache, cu, None, block_table=table, seqused_k=used, causal=True)
    for b, rows in enumerate((slice(0, 2), slice(2, 5))):
        k = cache[table[b].long()].reshape(1, -1, 8, 128)[:, :used[b]]
        expected = dma.attention(q[None, rows], k, k, causal=True)[0]
        assert (out[rows].float() - expected.float()).abs().max() < 2e-2


# ---- synchronization and graphs ----
def everything(torch, arguments, cu):
    q, k, v, s = arguments
    out = dma.varlen_dynamic_mask_attention(q, k, v, cu, cu, s, window=300)
    return [out, *torch.autograd.grad(out, arguments, torch.ones_like(out))]


def test_nothing_waits_for_the_device(torch):
    arguments, cu = packed(torch)
    everything(torch, arguments, cu)  # compiles, and looks at the device once
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(torch, arguments, cu)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.feature("cuda forward", "varlen and paged", "CUDA graphs")
@pytest.mark.usefixtures("uncollected")
def test_a_graph_takes_other_lengths(torch):
    """A captured call reads the lengths again at every replay."""
    arguments, cu = packed(torch)
    q, k, v, s = (x.detach() for x in arguments)
    lengths = cu.clone()

    def attend(bounds):
        return dma.varlen_dynamic_mask_attention(q, k, v, bounds, bounds, s, window=300)

    attend(lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(lengths)
    for other in (cu, torch.tensor([0, 100, 4000, 4000, 9000, 9001, 9002, 12000, 12500], dtype=torch.int32)):
        lengths.copy_(other)
        graph.replay()
        assert torch.equal(out, attend(other.to("cuda")))


@pytest.mark.feature("cuda forward backward", "varlen and paged", "torch.compile")
def test_compile_in_one_graph(torch):
    arguments, cu = packed(torch)
    torch._dynamo.reset()
    plain = everything(torch, arguments, cu)
    compiled = torch.compile(lambda q, k, v, s: dma.varlen_dynamic_mask_attention(q, k, v, cu, cu, s, window=300),
                             fullgraph=True)
    out = compiled(*arguments)
    found = [out, *torch.autograd.grad(out, arguments, torch.ones_like(out))]
    assert all(torch.equal(a, b) for a, b in zip(found, plain))


@pytest.mark.parametrize("bad", ["cu_seqlens_q", "seqused_k", "block_table"])
def test_values_are_checked_on_request(torch, bad, monkeypatch):
    monkeypatch.setenv("CUPY_DMA_CHECK", "1")
    given = {"cu_seqlens_q": [0, 3], "seqused_k": [5], "block_table": [[0, 1]],
             bad: {"cu_seqlens_q": [0, 4], "seqused_k": [9], "block_table": [[0, 7]]}[bad]}
    given = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in given.items()}
    q, pages = (torch.zeros(shape, dtype=torch.float16, device="cuda") for shape in ((3, 2, 8), (2, 4, 2, 8)))
    with pytest.raises(ValueError, match=bad):
        dma.varlen_attention(q, pages, pages, given.pop("cu_seqlens_q"), None, **given)
