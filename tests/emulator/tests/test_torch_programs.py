"""Torch calls that run programs of earlier calls, against calls with newly built programs."""
import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.attention import backward, flash_decode, last_queries, sm90_splits
from cupy_dma.backends.cuda.lists import intervals
from cupy_dma.backends.cuda.runtime.program import fresh
from tests import emulator
from tests.oracle import reference
from tests.oracle.arrays import host

torch = pytest.importorskip("torch")

from cupy_dma.torch import DynamicMaskAttention, entry  # noqa: E402

pytestmark = pytest.mark.usefixtures("chain_runs")
N, H, HKV, D, W = 150, 4, 2, 64, 20


@pytest.fixture(params=[False, True], ids=["portable", "hopper"])
def device(request):
    """An emulated device that runs programs."""
    with (emulator.hopper_gpu if request.param else emulator.using)() as runtime:
        yield runtime


def draw(seed: int, *, dtype: Any = torch.bfloat16, batch: int = 1, length: int = N, grad: bool = True) -> Any:
    """query, key, value, scores in new memory each time."""
    torch.manual_seed(seed)
    shapes = [(batch, length, heads, D) for heads in (H, HKV, HKV)]
    found = [torch.randn(shape).to(dtype) for shape in shapes] + [torch.randn(batch, HKV, length)]
    return [x.requires_grad_(grad) for x in found]


def parameters(seed: int, dtype: Any = torch.float32) -> dict[str, Any]:
    """Parameters that give small, different scores, since a row of large ones alone would be computed twice."""
    torch.manual_seed(seed)
    shapes = {"dt_proj": (HKV, HKV * D), "A": (HKV,), "dt_bias": (HKV,)}
    drawn = {name: torch.randn(shape) / (8 if name == "dt_proj" else 1) for name, shape in shapes.items()}
    return {name: x.to(dtype).requires_grad_() for name, x in drawn.items()}


def step(call: Callable[..., Any], *inputs: Any, with_lse: bool = True) -> list[Any]:
    """Results and gradients."""
    out, lse = call(*inputs)
    torch.manual_seed(1)
    grads = [torch.randn_like(out), torch.randn_like(lse) if with_lse else None]
    wanted = [x for x in inputs if x.requires_grad]
    results = (out, lse) if with_lse else (out,)
    found = torch.autograd.grad(results, wanted, grads[:len(results)])
    return [out.detach(), lse.detach(), *found]


def same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)


def check_each(calls: Iterable[tuple[Callable[..., Any], list[Any]]], chain_runs: dict[str, int],
               **options: Any) -> None:
    """Check that calls give the results of newly built programs, and that all run as chains."""
    for call, inputs in calls:
        before = dict(chain_runs)
        found = step(call, *inputs, **options)
        assert {name: chain_runs[name] - before[name] for name in chain_runs} == {"forward": 1, "backward": 1}
        with fresh():
            same(found, step(call, *inputs, **options))


def check(call: Callable[..., Any], make: Callable[[int], Any], chain_runs: dict[str, int], **options: Any) -> None:
    """The same for two calls with equal keys."""
    check_each(((call, make(i)) for i in range(2)), chain_runs, **options)


def attend(q: Any, k: Any, v: Any, bias: Any = None, **options: Any) -> Any:
    return dma.attention(q, k, v, bias=bias, **options, deterministic=True, return_lse=True, backend="emulator")


def dynamic(q: Any, k: Any, v: Any, scores: Any = None, **options: Any) -> Any:
    return dma.dynamic_mask_attention(q, k, v, scores, **{"window": W} | options, deterministic=True, return_lse=True,
                                      backend="emulator")


def from_values(q: Any, k: Any, v: Any, *parameters: Any, **options: Any) -> Any:
    return dynamic(q, k, v, **dict(zip(("dt_proj", "A", "dt_bias"), parameters)), **options)


LENGTHS = [(60, 0, 57, 33), (10, 90, 3, 47), (1, 1, 1, 147)]


def ends(lengths: Any, kind: Any = torch.int32) -> Any:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=kind)


def draw_packed(seed: int, kind: str = "scores", **options: Any) -> list[Any]:
    """query, key, value, and scores or the parameters of scores."""
    made = [x.detach()[0].requires_grad_(x.requires_grad) for x in draw(seed, **options)]
    return [*made[:3], *parameters(seed).values()] if kind == "values" else made


def packed(kind: str, cu: Any, *inputs: Any, **options: Any) -> Any:
    options = {"deterministic": True, "return_lse": True, "backend": "emulator"} | options
    if kind == "scores":
        return dma.varlen_dynamic_mask_attention(*inputs[:3], cu, cu, inputs[3], window=W, **options)
    if kind == "values":
        named = dict(zip(("dt_proj", "A", "dt_bias"), inputs[3:]))
        return dma.varlen_dynamic_mask_attention(*inputs[:3], cu, cu, **named, window=W, **options)
    mask = dma.IntervalMask.top_w(inputs[3].detach()[None], W, backend="emulator") if kind == "mask" else None
    return dma.varlen_attention(*inputs[:3], cu, cu, mask=mask, bias=inputs[3], causal=True, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_prepared_mask(dtype, with_lse, device, chain_runs):
    """Each mask has its own lists."""
    masks = [dma.IntervalMask.top_w(draw(i)[3].detach(), W, backend="emulator") for i in range(2)]
    check_each(((functools.partial(attend, mask=masks[i % 2]), draw(i, dtype=dtype)) for i in range(3)), chain_runs,
               with_lse=with_lse)


def autocast(*inputs: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return dynamic(*inputs)


def padded(q: Any, *rest: Any) -> Any:
    """One of four paddings, by the first number."""
    chosen = int(q.detach()[0, 0, 0, 0] * 100) % 4
    return dynamic(q, *rest, padding=torch.rand(2, N, generator=torch.Generator().manual_seed(chosen)) < 0.8)


def views(i: int) -> Any:
    """Rows of one array."""
    q, k, v, s = draw(i, grad=False)
    rows = torch.cat((q, k, v), 2).split((H, HKV, HKV), 2)
    return [*(x.detach().requires_grad_() for x in rows), s.requires_grad_()]


def turned(q: Any, k: Any, v: Any, scores: Any) -> Any:
    return dynamic(*(x.transpose(1, 2) for x in (q, k, v)), scores, layout="bhnd")


def draw_values(i: int, dtype: Any = torch.float32) -> list[Any]:
    return [*draw(i)[:3], *parameters(i, dtype).values()]


CALLS: dict[str, tuple[Callable[..., Any], Callable[[int], list[Any]]]] = {
    "no mask": (attend, draw), "views": (dynamic, views), "the other layout": (turned, views),
    "padding": (padded, functools.partial(draw, batch=2)),
    "softcap": (functools.partial(attend, causal=True, softcap=2.0), draw),
    "scale": (functools.partial(attend, causal=True, scale=0.3), draw),
    **{f"scores, {batch} of {window}": (functools.partial(dynamic, window=window), functools.partial(draw, batch=batch))
       for batch in (1, 2) for window in (W, 2 * N)},  # a window of all keys is plain causality
    **{f"values, {form}, {dtype}": (functools.partial(from_values, form=form),
                                    functools.partial(draw_values, dtype=dtype))
       for form in ("exp", "linear") for dtype in (torch.float32, torch.bfloat16)},
    "autocast": (autocast, functools.partial(draw, dtype=torch.float32))}


@pytest.mark.parametrize("name", CALLS)
def test_later_calls_run_programs_of_the_first(name, device, chain_runs):
    check(*CALLS[name], chain_runs)


@pytest.mark.parametrize("rows", [1, N])
def test_a_dense_mask(rows, device, chain_runs):
    """A dense mask that is the same for all queries becomes a new interval mask."""
    for i in range(2):
        torch.manual_seed(i)
        mask = torch.rand(1, HKV, rows, N) < 0.7
        inputs = draw(i)
        found = step(lambda *x: attend(*x, mask=mask), *inputs)  # noqa: B023
        assert chain_runs["forward"] == (0 if rows == 1 else i + 1)
        with fresh():
            same(found, step(lambda *x: attend(*x, mask=mask.clone()), *inputs))  # noqa: B023
        *arrays, bias = (host(x.detach()) for x in inputs)
        reference.check_attention((host(found[0]), host(found[1])), *arrays, dense_mask=mask.numpy(), bias=bias)


def test_no_separate_launch_clears_sums(chain_runs, monkeypatch):
    """A one-pass backward with query splits needs no separate clearing: its first kernel clears dq, dbias and
    counters."""
    splits, cleared = sm90_splits.QuerySplits(3, 4), []
    monkeypatch.setattr(backward, "query_splits_of", lambda *_: splits)
    with emulator.hopper_gpu() as runtime:
        clear = runtime.clear
        monkeypatch.setattr(runtime, "clear", lambda *own: cleared.append(own[1]) or clear(*own))
        for i in range(2):
            cleared.clear()
            inputs = draw(i, length=600)
            out = dma.dynamic_mask_attention(*inputs, window=400, backend="emulator")
            torch.autograd.grad(out.sum(), inputs)
    assert chain_runs["backward"] == 2 and cleared == []


@pytest.mark.parametrize("off", [False, True])
def test_without_gradients(off, device, chain_runs):
    """The tensors require none, or autograd is off."""
    for i in range(2):
        with torch.set_grad_enabled(not off):
            inputs = draw(i, grad=off)
            found = dynamic(*inputs)
            assert chain_runs == {"forward": i + 1, "backward": 0} and not found[0].requires_grad
            with fresh():
                same(found, dynamic(*inputs))


@pytest.mark.parametrize("grad", [False, True])
def test_slots_of_super_tiles_are_counted_for_gradients(grad, device, chain_runs, calls_of):
    counted = calls_of(intervals, "_seen_sizes")
    found = dynamic(*draw(0, length=2100, grad=grad))  # more than one chunk
    assert [spans for _, spans in counted] == [grad] and chain_runs["forward"] == 1 and found[0].requires_grad is grad


def test_few_queries_do_without_a_mask(device, chain_runs, monkeypatch, calls_of):
    """Without gradients, every such call finds its keys directly from the scores."""
    served = calls_of(last_queries, "attend_last")
    monkeypatch.setattr(flash_decode, "_pays", lambda *_: True)
    query, key, value, scores = draw(0, length=1000)
    inputs = query[:, :2], key, value, scores
    for i in range(2):
        with torch.no_grad():
            out, lse = dynamic(*inputs)
        assert len(served) == i + 1 and chain_runs == {"forward": 0, "backward": 0}
    expected = dynamic(*inputs)
    assert len(served) == 2 and expected[0].requires_grad
    assert torch.allclose(out, expected[0], atol=2e-2) and torch.allclose(lse, expected[1], atol=1e-4)


@pytest.mark.parametrize("wanted", [(0,), (1, 2), (3,), (0, 3)], ids=str)
def test_some_gradients(wanted, device, chain_runs):
    def make(i: int) -> Any:
        return [x.requires_grad_(j in wanted) for j, x in enumerate(draw(i, grad=False))]

    check(dynamic, make, chain_runs)
    inputs = draw(9)  # another key
    found = step(dynamic, *inputs)
    with fresh():
        same(found, step(dynamic, *inputs))


def test_requested_gradients_may_change(device, chain_runs):
    """One forward may have several backward programs, for different requested gradients."""
    inputs = draw(0)

    def gradients(i: int) -> list[Any]:
        out, lse = dynamic(*inputs)
        loss = [out.sum(), lse.sum(), out[..., ::2].sum() + lse.sum()][i % 3]
        return list(torch.autograd.grad(loss, inputs[:2] if i > 3 else inputs))

    for i in range(6):
        found = gradients(i)
        with fresh():
            same(found, gradients(i))
    assert chain_runs["forward"] == 6


def test_errors_after_good_calls(device, chain_runs):
    q, k, v, s = draw(0)
    mask = dma.IntervalMask.top_w(s.detach(), W, backend="emulator")
    for _ in range(3):
        attend(q, k, v, s, mask=mask, causal=True)
        dynamic(q, k, v, s)
        from_values(q, k, v, *parameters(0).values())
    assert chain_runs["forward"] == 9
    for error, call in ((TypeError, lambda: attend(q, k, v, s, mask=mask, causal=1)),
                        (TypeError, lambda: attend(q, k, v, s, mask="all", causal=True)),
                        (TypeError, lambda: attend(q, k, v.float(), s, mask=mask, causal=True)),
                        (ValueError, lambda: attend(q, k, v[:, 1:], s, mask=mask, causal=True)),
                        (ValueError, lambda: attend(q, k, v, s[..., 1:], mask=mask, causal=True)),
                        (ValueError, lambda: attend(q, k, v, s, mask=dma.IntervalMask.causal(N), causal=True)),
                        (TypeError, lambda: attend(q, k, v, s, mask=mask, causal=True, softcap=None)),
                        (TypeError, lambda: dynamic(q, k, v, s, window=float(W))),
                        (ValueError, lambda: dynamic(q, k, v, s, dt_proj=parameters(0)["dt_proj"])),
                        (ValueError, lambda: dynamic(q, k, v, s, keys="all")),
                        (TypeError, lambda: dynamic(q, k, v, s, window=torch.ones(3))),
                        (ValueError, lambda: from_values(q, k, v, *parameters(0).values(), form="log"))):
        with pytest.raises(error):
            call()


def test_values_are_checked_on_request(device, monkeypatch):
    q, k, v, s = draw(0)
    for _ in range(3):
        dynamic(q, k, v, s)
    monkeypatch.setenv("CUPY_DMA_CHECK", "1")
    with pytest.raises(ValueError, match="finite"):
        dynamic(q, k, v, torch.full_like(s, torch.nan).requires_grad_())


def test_memory_is_released(device, chain_runs):
    for i in range(3):
        inputs = draw(i)
        mask = dma.IntervalMask.top_w(inputs[3].detach(), W, backend="emulator")
        out, lse = attend(*inputs, mask=mask)
        made = dynamic(*inputs)[0]
        (out.sum() + lse.sum() + made.sum()).backward()
        seen = [weakref.ref(x) for x in (*inputs, mask, out, lse, made)]
        del inputs, mask, out, lse, made
        gc.collect()
        assert not [found() for found in seen if found() is not None]
    assert chain_runs == {"forward": 6, "backward": 6}


def test_an_argument_changed_in_place_is_noticed(device, chain_runs):
    for _ in range(3):
        q, *rest = draw(0)
        x = q * 2
        out, _ = dynamic(x, *rest)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()
    assert chain_runs == {"forward": 3, "backward": 0}


@pytest.mark.parametrize("call", [dynamic, from_values], ids=["scores", "values"])
def test_a_gradient_that_autograd_follows_takes_operators(call, device, chain_runs):
    for i in range(2):
        inputs = draw(i, dtype=torch.float32)  # 16-bit sums would be rounded at each term
        inputs = inputs if call is dynamic else [*inputs[:3], *parameters(i).values()]
        out, lse = call(*inputs)
        found = torch.autograd.grad((out.float().sum(), lse.sum()), inputs, create_graph=True)
    assert chain_runs == {"forward": 2, "backward": 0}
    with pytest.raises(NotImplementedError, match="second derivative"):
        found[0].float().sum().backward()
    expected = torch.autograd.grad([x.float().sum() for x in call(*inputs)], inputs)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_hooks_on_saved_tensors(device, chain_runs):
    """Hooks may return tensors with other strides."""
    expected = step(dynamic, *views(0))
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(memory_format=torch.contiguous_format),
                                                      lambda x: x):
            same(step(dynamic, *views(0)), expected)
    assert chain_runs == {"forward": 4, "backward": 1}


def test_the_layer(device, chain_runs):
    torch.manual_seed(0)
    layer = DynamicMaskAttention(HKV, D, W, dtype=torch.bfloat16, backend="emulator", dt_bias=True, deterministic=True)
    torch.nn.init.constant_(layer.A, 0.1)

    def run(q: Any, k: Any, v: Any) -> list[Any]:
        layer.zero_grad()
        out = layer(q, k, v)
        out.backward(torch.ones_like(out))
        return [out.detach(), q.grad, k.grad, v.grad, *(x.grad.clone() for x in layer.parameters())]

    for i in range(2):
        found = run(*draw(i)[:3])
        with fresh():
            same(found, run(*draw(i)[:3]))
    assert chain_runs == {"forward": 2, "backward": 2}


def test_strange_gradients_have_no_programs(device, chain_runs):
    """Tensors with a negative bit, and tensors known to be zero."""
    inputs = draw(0)
    for _ in range(3):
        out, _ = dynamic(*inputs)
        dout = torch.randn_like(out)
        expected = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    before = dict(chain_runs)
    same(list(torch.autograd.grad(out, inputs, torch._neg_view(-dout), retain_graph=True)), list(expected))
    zero = torch.autograd.grad(out, inputs, torch._efficientzerotensor(out.shape, dtype=out.dtype))
    assert not any(x.any() for x in zero) and chain_runs == before


def test_strange_tensors_have_no_programs(device, chain_runs):
    """Whatever call came before. Tensors at odd addresses have their own programs."""
    q, k, v, s = draw(0)
    for _ in range(3):
        dynamic(q, k, v, s)
    before = chain_runs["forward"]
    turned = torch._neg_view(q.detach()).requires_grad_()
    moved = torch.cat((q.detach().flatten(), q.new_zeros(8)))[1:1 + q.numel()].view_as(q).requires_grad_()
    for x, runs in ((turned, 0), (moved, 3)):
        for _ in range(3):
            found = step(dynamic, x, k, v, s)
        assert chain_runs["forward"] == before + runs
        with fresh():
            same(found, step(dynamic, x, k, v, s))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="tangent"):
        dynamic(torch.autograd.forward_ad.make_dual(q.detach(), q.detach()), k, v, s)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: dynamic(x, k, v, s)[0].sum())(q.detach())
    with pytest.raises(TypeError, match="meta"):
        dynamic(*(x.detach().to("meta").requires_grad_() for x in (q, k, v, s)))
    assert chain_runs["forward"] == before + 3


# ---- compiled graphs ----
def dense_and_best(q: Any, k: Any, v: Any, s: Any) -> Any:
    mask = dma.IntervalMask.top_w(s.detach(), W, backend="emulator"), torch.ones(1, 1, N, N).tril() > 0
    return attend(q, k, v, s, mask=mask)


COMPILED = {"scores": (dynamic, draw),
            "16-bit scores": (dynamic, lambda i: [*draw(i)[:3], draw(i)[3].bfloat16()]),
            "values": (from_values, draw_values),
            "padding": (lambda *x: dynamic(*x, padding=torch.arange(N)[None] % 7 > 0), draw),
            "global": (lambda *x: dynamic(*x, keys="global"), draw),
            "another value dim": (lambda q, k, v, s: dynamic(q, k, v[..., :48], s), draw),
            "documents": (lambda *x: dynamic(*x, documents=torch.tensor([0, 40, N])), draw),
            "ids, padding": (lambda *x: dynamic(*x, keys="global", documents=torch.arange(2 * N).view(2, N) // 60,
                                                padding=torch.arange(2 * N).view(2, N) % 7 > 0),
                             functools.partial(draw, batch=2)),
            "top_w and dense": (dense_and_best, draw),
            "dense by key": (lambda *x: attend(*x, mask=torch.arange(N)[None, None, None] % 5 > 0), draw),
            "no mask": (attend, draw),
            **{f"packed {kind}": (functools.partial(packed, kind, ends(LENGTHS[0])),
                                  functools.partial(draw_packed, kind=kind)) for kind in ("mask", "scores", "values")}}
UNCHAINED = "another value dim", "top_w and dense", "dense by key"


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_call_is_two_operators(name, chain_runs):
    """The bits equal those of the eager call, whose programs have the same kernels."""
    call, make = COMPILED[name]
    graphs: list[list[str]] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "cupy_dma" in str(node.target)])
        return graph

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(keep(graph, inputs))))
    with emulator.hopper_gpu():
        for i in range(2):
            found = step(compiled, *make(i))
            assert name in UNCHAINED or chain_runs == {"forward": 2 * i + 1, "backward": 2 * i + 1}
            same(found, step(call, *make(i)))
    forward, backward = graphs
    own = [x for x in forward if "top_w" not in x]
    kind = "attention" if name in ("top_w and dense", "dense by key", "no mask", "packed mask") else "dynamic_attention"
    assert own == [f"cupy_dma.{kind}.default"] and backward == [f"cupy_dma.{kind}_backward.default"]


def test_compiled_lengths_that_are_dynamic_do_not_compile_again(chain_runs):
    compiles = []

    def counted(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(dynamic, fullgraph=True, dynamic=True, backend=counted)
    with emulator.using():
        for n in (70, 150, 200, 90):
            inputs = draw(0, length=n)
            same(step(compiled, *inputs), step(dynamic, *inputs))
    assert len(compiles) == 1


def test_windows_of_heads(device, chain_runs):
    """Later calls with the same windows run the first call's programs; each head equals a call of its own."""
    def call(windows: Any) -> Callable[..., Any]:
        return lambda *x: dma.dynamic_mask_attention(*x, window=windows, return_lse=True, backend="emulator")

    for seed, windows in enumerate([(5, 60), [5, 60], (60, 5)]):
        inputs = draw(seed, dtype=torch.float16)
        found = step(call(windows), *inputs)
        for head, window in enumerate(windows):
            rows, own = slice(2 * head, 2 * head + 2), slice(head, head + 1)
            mine = [x[:, :, at] for x, at in zip(inputs[:3], (rows, own, own))] + [inputs[3][:, own]]
            mine = [x.detach().clone().requires_grad_() for x in mine]
            out, lse = call(window)(*mine)
            torch.testing.assert_close(found[0][:, :, rows], out, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(found[1][:, rows], lse, rtol=1e-4, atol=1e-4)
    assert len(entry._known) == 4 and chain_runs["forward"] == 9 and chain_runs["backward"] == 3


def test_last_queries_with_windows_of_heads(device):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, h, 16)).astype(np.float16) for n, h in ((1, 4), (700, 2), (700, 2)))
    scores = rng.standard_normal((1, 2, 700)).astype(np.float32)
    out = dma.dynamic_mask_attention(q, k, v, scores, window=(9, 300), backend="emulator")
    for head, window in enumerate((9, 300)):
        rows, own = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        alone = dma.dynamic_mask_attention(q[:, :, rows], k[:, :, own], v[:, :, own], scores[:, own], window=window,
                                           backend="emulator")
        np.testing.assert_allclose(out[:, :, rows], alone, rtol=2e-3, atol=2e-3)


def test_windows_of_more_heads_than_the_parameters_hold(device):
    scores = np.zeros((1, 129, 20), np.float32)
    with pytest.raises(NotImplementedError, match="window must be an int for more than 128 heads on CUDA, got"):
        dma.IntervalMask.top_w(scores, range(1, 130), backend="emulator")


# ---- packed sequences -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["bias", "mask", "scores", "values"])
def test_packed_sequences(kind, integers, device, chain_runs):
    """Calls with equally many sequences, of any lengths, share one program."""
    check_each(((functools.partial(packed, kind, ends(lengths, integers)), draw_packed(i, kind))
                for i, lengths in enumerate(LENGTHS)), chain_runs)
    assert len(entry._known) == 1


@pytest.mark.parametrize("kind", ["bias", "mask", "scores", "values"])
def test_packed_sequences_one_by_one(kind, device, chain_runs):
    """Against a call per sequence, twice, because only the second call finds a program."""
    for seed in range(2):
        inputs = draw_packed(seed, kind, dtype=torch.float32)
        found = step(functools.partial(packed, kind, ends(LENGTHS[0])), *inputs)

    def apart(*x: Any) -> Any:
        results = []
        for first, end in zip(ends(LENGTHS[0]).tolist(), ends(LENGTHS[0]).tolist()[1:]):
            q, k, v = (y[None, first:end] for y in x[:3])
            bias = x[3][None, :, first:end] if kind != "values" else None
            if first == end:
                continue
            if kind == "scores":
                results.append(dynamic(q, k, v, bias))
            elif kind == "values":
                results.append(from_values(q, k, v, *x[3:]))
            else:  # the mask covers the whole pack
                stop = dma.IntervalMask.top_w(x[3].detach()[None], W, backend="emulator").stop[..., first:end] - first
                mask = None if kind == "bias" else dma.IntervalMask.from_stop(stop)
                results.append(attend(q, k, v, bias, mask=mask, causal=True))
        return torch.cat([out[0] for out, _ in results]), torch.cat([lse[0] for _, lse in results], 1)

    for x, y in zip(found, step(apart, *inputs)):
        assert torch.allclose(x, y, rtol=1e-3, atol=1e-3)
    assert chain_runs["forward"] >= 2


def test_packed_sequences_of_used_keys(device, chain_runs):
    """seqused_k, key lengths that differ from query lengths, and rows after the last sequence."""
    def call(i: int, *x: Any) -> Any:
        cu_q, cu_k, used = ends((30, 20 + i, 9)), ends((70, 40, 40)), torch.tensor([64, 3 + i, 40], dtype=torch.int64)
        return dma.varlen_attention(*x[:3], cu_q, cu_k, bias=x[3], causal=True, seqused_k=used, tail_padding=True,
                                    deterministic=True, return_lse=True, backend="emulator")

    check_each(((functools.partial(call, i), draw_packed(i)) for i in range(2)), chain_runs)


def test_a_paged_cache(device, chain_runs):
    pages = torch.tensor([[3, 0], [1, 4], [2, 2]], dtype=torch.int32)
    used = torch.tensor([20, 7, 16], dtype=torch.int32)
    for i in range(2):
        torch.manual_seed(i)
        q, k, v = torch.randn(12, H, D), torch.randn(5, 16, HKV, D), torch.randn(5, 16, HKV, D)

        def call(table: Any) -> Any:
            return dma.varlen_attention(q, k, v, ends((4, 6, 2)), None, block_table=table,  # noqa: B023
                                        seqused_k=used, causal=True, return_lse=True, backend="emulator")

        found = call(pages)
        assert chain_runs["forward"] == i + 1
        with fresh():
            same(found, call(pages))
        same(found, call(pages.long()))  # without a program
        assert chain_runs["forward"] == i + 1


@pytest.mark.parametrize("kind", ["bias", "mask", "scores", "values"])
def test_gradients_of_packed_sequences_without_programs(kind, device, chain_runs):
    """If a hook moves saved tensors, or autograd differentiates the gradient."""
    cu = ends(LENGTHS[1])

    def moved(x: Any) -> Any:
        wider = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., :x.shape[-1]]
        return wider.copy_(x)

    for _ in range(2):
        inputs = draw_packed(1, kind, dtype=torch.float32)
        expected = step(functools.partial(packed, kind, cu), *inputs)
    before = dict(chain_runs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: moved(x) if x.ndim == 3 else x):
        found = step(functools.partial(packed, kind, cu), *inputs)
    assert chain_runs == {"forward": before["forward"] + 1, "backward": before["backward"]}
    for x, y in zip(found, expected):
        assert torch.allclose(x, y, rtol=1e-4, atol=1e-4)

    out, lse = packed(kind, cu, *inputs)
    torch.manual_seed(1)
    upstream = [torch.randn_like(out), torch.randn_like(lse)]
    followed = torch.autograd.grad((out, lse), inputs, upstream, create_graph=True)
    for x, y in zip(followed, expected[2:]):
        assert torch.allclose(x, y, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(followed[0].sum(), inputs)


def test_errors_after_good_packed_calls(device, chain_runs):
    inputs, cu = draw_packed(0), ends(LENGTHS[0])
    common = {"causal": True, "backend": "emulator"}
    for _ in range(2):
        dma.varlen_attention(*inputs[:3], cu, cu, **common, max_seqlen_q=60, max_seqlen_k=60)
    assert chain_runs["forward"] == 2
    for error, match, arguments, options in (
            (ValueError, "max_seqlen_q must be at least", inputs[:3], {"max_seqlen_q": 37}),
            (TypeError, "max_seqlen_k must be", inputs[:3], {"max_seqlen_k": 60.0}),
            (ValueError, "max_seqlen_k must be", inputs[:3], {"max_seqlen_k": -1}),
            (ValueError, "must be different arrays", (inputs[0][:-1], *inputs[1:3]), {}),
            (ValueError, "cu_seqlens_q must have shape", inputs[:3], {"cu": cu[None]})):
        given = {"cu": cu} | options
        with pytest.raises(error, match=match):
            dma.varlen_attention(*arguments, given["cu"], given.pop("cu"), **common, **given)
