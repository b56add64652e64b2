"""The Hopper gradients (kernels/sm90/backward_*.cu) on a Hopper GPU, in two passes and in one: the grids, long calls
against the portable kernels, and equal bits on every run, also on few SMs beside other work. Everything here is marked
``gpu``."""
from unittest import mock

import pytest

import cupy_dma as dma
from cupy_dma.backends import cuda
from cupy_dma.backends.cuda.attention import sm90_backward, sm90_stored
from cupy_dma.backends.cuda.runtime import program
from cupy_dma.backward import attention_backward
from tests.gpu.sm90_tiles import portable
from tests.gpu.test_forward import converter, draw, draw_scores
from tests.oracle import cases, schedule_cases, varlen_cases

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if not cuda.runtime.hopper(0):
        pytest.skip("needs a Hopper GPU (compute capability 9.0)")
    return module


def tiles(torch, length):
    """A dense mask with an eighth of its 128 x 128 tiles visible, which makes one super-tile."""
    seen = torch.rand(1, 1, -(-length // 128), -(-length // 128), device="cuda") < 0.125
    return seen.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :length, :length].contiguous()


def problem(torch, kind, head_dim, length=4000, heads=4, kv_heads=2, dtype=None):
    """The arguments of ``attention_backward``, by position and by name."""
    q, k, v = draw(torch, length, length, heads, kv_heads, head_dim, dtype=dtype)
    scores = draw_scores(torch, 1, kv_heads, length)
    options = {"lists": lambda: {"mask": dma.IntervalMask.top_w(scores, 300), "bias": scores},
               "softcap": lambda: {"mask": dma.IntervalMask.top_w(scores, 300), "bias": scores, "softcap": 5.0},
               "increasing": lambda: {"mask": dma.IntervalMask.top_w(scores.sort(-1).values, 300)},
               "dense": lambda: {"mask": dma.IntervalMask.top_w(scores, 300).to_dense(length), "bias": scores},
               "tiles": lambda: {"mask": tiles(torch, length), "bias": scores},
               "causal": lambda: {"causal": True}, "none": dict}[kind]()
    out, lse = dma.attention(q, k, v, **options, return_lse=True)
    return (torch.randn_like(out), q, k, v, out, lse), options


@pytest.fixture(params=[False, True], ids=["two passes", "one pass"])
def one_pass(request, fresh_programs):
    with schedule_cases.hopper_gradients(request.param):
        yield request.param


@pytest.mark.parametrize("case", [c for c in cases.CASES if c.dtype in ("float16", "bfloat16")], ids=str)
def test_grid(torch, case, one_pass):
    cases.check_backward(case, cases.run_backward(case, converter("cupy"), with_dlse=True), with_dlse=True)


@pytest.mark.parametrize("case", [c for c in varlen_cases.CASES + varlen_cases.SUPERS
                                  if c.dtype in ("float16", "bfloat16")], ids=str)
def test_packed_sequences(torch, case, one_pass):
    varlen_cases.check_backward(case, varlen_cases.run_backward(case, converter("cupy")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [24, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", ["lists", "softcap", "increasing", "dense", "tiles", "causal", "none"])
def test_as_the_portable_kernel(torch, kind, head_dim, dtype, one_pass):
    arguments, options = problem(torch, kind, head_dim, dtype=getattr(torch, dtype))
    with mock.patch.object(sm90_backward, "launch_dkv", side_effect=sm90_backward.launch_dkv) as launch:
        found = attention_backward(*arguments, **options)
    assert bool(launch.call_args.args[-1]) is (one_pass and head_dim <= 128 and kind not in ("dense", "tiles"))
    with portable():
        expected = attention_backward(*arguments, **options)
    for name, ours, other in zip(found._fields, found, expected):
        if ours is not None:
            error = ((ours.double() - other.double()).norm() / other.double().norm()).item()
            assert error < 1e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("kind", "head_dim", "heads"), [
    ("lists", 24, (4, 4)), ("lists", 64, (4, 2)), ("softcap", 96, (6, 2)), ("increasing", 128, (8, 2)),
    ("lists", 128, (4, 2))])
def test_stored_ds(torch, kind, head_dim, heads, dtype, fresh_programs):
    """Gradients from stored dS match the query pass, with equal bits in chunks and on few SMs, 50 times."""
    arguments, options = problem(torch, kind, head_dim, 4000, *heads, dtype=getattr(torch, dtype))
    with schedule_cases.hopper_gradients(False):
        expected = attention_backward(*arguments, **options)
        with program.overridden(stored=True), mock.patch.object(sm90_stored, "launch",
                                                                side_effect=sm90_stored.launch) as launch:
            found = attention_backward(*arguments, **options)
            chunks = launch.call_args.args[3]
            bytes_of_list = sm90_stored.STEP_BYTES * chunks.tiles * chunks.steps * heads[0] // heads[1]
            for i in range(50):
                few, most = (3, 132)[i % 2], (1, 5, chunks.count)[i % 3] * bytes_of_list
                with schedule_cases.num_sms(few), mock.patch.object(sm90_stored, "max_stored", lambda most=most: most):
                    again = attention_backward(*arguments, **options)
                torch.cuda.synchronize()
                assert launch.call_args.args[3].size <= (1, 5, chunks.count)[i % 3]
                for name, x, y in zip(found._fields, found, again):
                    assert x is None or torch.equal(x, y), (i, name)
    for name, ours, other in zip(found._fields, found, expected):
        if ours is not None:
            error = ((ours.double() - other.double()).norm() / other.double().norm()).item()
            assert error < 1e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("num_sms", [3, 132])
@pytest.mark.parametrize(("kind", "head_dim"), [("lists", 64), ("lists", 128), ("lists", 256), ("dense", 128),
                                               ("causal", 64), ("causal", 128)])
def test_the_same_bits_beside_other_work(torch, kind, head_dim, num_sms, one_pass):
    """200 repeats, with many or few tiles per CTA, sometimes slowed down by copies on another stream. In one pass dq
    may differ by the order of its additions."""
    arguments, options = problem(torch, kind, head_dim, length=2000)
    with schedule_cases.num_sms(num_sms):  # query splits depend on it
        first = attention_backward(*arguments, **options)
    stream, ballast = torch.cuda.Stream(), torch.randn(2**24, device="cuda")
    torch.cuda.synchronize()
    for i in range(200):
        if i % 3:
            with torch.cuda.stream(stream):
                ballast.mul_(1.0)
        with schedule_cases.num_sms(num_sms):
            again = attention_backward(*arguments, **options)
        torch.cuda.synchronize()
        for name, x, y in zip(first._fields, first, again):
            if one_pass and name == "query":
                assert (x - y).norm() < 1e-2 * x.norm(), i
            else:
                assert x is None or torch.equal(x, y), (i, name)
