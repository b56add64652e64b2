"""The flex backend on a GPU: compiled FlexAttention on some of the grid (each case compiles for some seconds)."""
from dataclasses import replace

import pytest

import cupy_dma as dma
from tests.gpu.test_forward import converter, host
from tests.oracle import cases
from tests.oracle.cases import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]  # warnings of torch's compiler

NAMES = ("bfloat16-D64", "float16-D3", "bfloat16-D128", "float32-D40", "float32-D64", "bfloat16-D256",
         "heads-6/2-top_w", "lengths-0x5-none", "lengths-33x129-causal", "lengths-129x33-top_w",
         "lengths-300x300-global",
         "mask-per_batch", "mask-dense_per_head", "mask-dense_rows", "causal-and-dense", "bias-none-none",
         "bias-full-top_w", "bias-row-none", "bias-key_shared-top_w", "softcap-full", "scale-negative",
         "layout-head_slice", "batch-3")
CHOSEN = [case for case in CASES if case.name in NAMES]


@pytest.mark.feature("flex forward", "attention", "every case", case="", but=("dense-both-", "delay-", "float64-D"))
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_forward(torch, case):
    cases.check(case, *cases.run(case, converter("torch"), backend="flex"))


@pytest.mark.feature("flex backward", "attention", "every case", case="", but=("dense-both-", "delay-", "float64-D"))
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_backward(torch, case):
    found = cases.run_backward(case, converter("torch"), backend="flex", with_dlse=True)
    cases.check_backward(case, found, with_dlse=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bias", ["full", "key_shared"])
def test_fits_into_shared_memory(torch, dtype, head_dim, bias):
    """A dense mask and a dense bias need shared memory beside keys and values; a float32 bias needs most."""
    case = replace(next(case for case in CASES if case.name == "causal-and-dense"), name=f"{dtype}-{head_dim}-{bias}",
                   dtype=dtype, head_dim=head_dim, bias=bias, mask="dense" if bias == "full" else "top_w")
    cases.check(case, *cases.run(case, converter("torch"), backend="flex"))
    cases.check_backward(case, cases.run_backward(case, converter("torch"), backend="flex"))


def test_cupy_arrays(torch):
    pytest.importorskip("cupy")
    case = next(case for case in CASES if case.name == "causal-and-dense")
    out, lse = cases.run(case, converter("cupy"), backend="flex")
    assert type(out).__module__.startswith("cupy")
    cases.check(case, host(out), host(lse))
    cases.check_backward(case, cases.run_backward(case, converter("cupy"), backend="flex"))


@pytest.mark.feature("flex forward backward", "attention", "bitwise")
@pytest.mark.parametrize("name", ["bias-key_shared-top_w", "bias-full-none"])
def test_deterministic(torch, name):
    case = replace(next(case for case in CASES if case.name == name), query_length=500, key_length=500, heads=8)
    first, again = (cases.run_backward(case, converter("torch"), backend="flex", deterministic=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again))


@pytest.mark.feature("flex forward backward", "attention", "keys that no query sees")
def test_what_nobody_sees_changes_no_bit(torch):
    make = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 64, generator=make, device="cuda", dtype=torch.bfloat16)
               for n, h in ((310, 4), (300, 2), (300, 2)))
    seen = torch.ones(1, 300, dtype=torch.bool, device="cuda")
    seen[0, [7, 8, 130]] = False
    bias = torch.randn(1, 2, 300, generator=make, device="cuda")
    dense = torch.rand(1, 2, 310, 300, generator=make, device="cuda") < 0.5
    dout = torch.randn_like(q)

    def everything():
        options = {"mask": (dma.IntervalMask.padding(seen), dense), "bias": bias, "causal": True, "backend": "flex",
                   "deterministic": True}
        out, lse = dma.attention(q, k, v, return_lse=True, **options)
        return out, lse, *dma.backward.attention_backward(dout, q, k, v, out, lse, **options)

    clean = everything()
    k[0, 7], v[0, 8], bias[0, 0, 130], q[0, 3] = (float("nan"),) * 4
    assert all(torch.equal(x, y) for x, y in zip(clean, everything()))
    assert all(torch.isfinite(x).all() for x in clean[2:])


@pytest.mark.feature("flex forward", "Scores and selection", "key_scores", "IntervalMask.top_w")
def test_selection_and_scores(torch):
    make = torch.Generator(device="cuda").manual_seed(0)
    value = torch.randn(2, 5000, 3, 64, generator=make, device="cuda", dtype=torch.bfloat16)
    dt_proj, A = torch.randn(3, 192, generator=make, device="cuda"), torch.rand(3, generator=make, device="cuda")
    ours, theirs = (dma.key_scores(value, dt_proj / 14, A, backend=backend) for backend in ("flex", "numpy"))
    assert torch.allclose(ours, theirs, rtol=1e-5)
    scores = (theirs * 8).round()  # ties
    scores[0, 0, ::97] = float("nan")
    padding = torch.rand(2, 5000, generator=make, device="cuda") < 0.9
    documents = torch.tensor([0, 10, 3000, 5000], device="cuda")
    for options in ({}, {"padding": padding}, {"documents": documents}, {"padding": padding, "documents": documents}):
        ours, theirs = (dma.IntervalMask.top_w(scores, 500, backend=backend, **options)
                        for backend in ("flex", "numpy"))
        assert torch.equal(ours.stop, theirs.stop)


@pytest.mark.feature("flex forward backward", "torch", "autograd", "torch.compile")
def test_autograd_and_compile(torch):
    make = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 200, h, 64, generator=make, device="cuda").requires_grad_() for h in (4, 2, 2))
    scores = torch.randn(1, 2, 200, generator=make, device="cuda").requires_grad_()

    def loss(backend):
        return dma.dynamic_mask_attention(q, k, v, scores, window=30, backend=backend).sin().sum()

    for run in (loss, torch.compile(loss)):
        ours, theirs = (torch.autograd.grad(run(backend), [q, k, v, scores]) for backend in ("flex", "numpy"))
        assert all(torch.allclose(x, y, atol=1e-3) for x, y in zip(ours, theirs))


def test_the_streams_of_the_caller(torch):
    """The backend works on CuPy's current stream, even if torch's differs."""
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.random.standard_normal((1, 300, h, 64), dtype=cupy.float32).astype(cupy.float16) for h in (4, 2, 2))
    expected = dma.attention(q, k, v, causal=True, backend="flex")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = cupy.zeros_like(q)
        for _ in range(200):  # keep the stream busy, so that work on another stream would read zeros
            late = late * 0
        late += q
        out = dma.attention(late, k, v, causal=True, backend="flex")
    stream.synchronize()
    assert cupy.array_equal(out, expected)
