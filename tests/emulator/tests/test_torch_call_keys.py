"""Torch calls that differ in one property get different keys: after one call has built its chain, each neighbouring
call gives the same result as with newly built programs."""
from collections.abc import Callable
from typing import Any

import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.runtime.program import fresh

torch = pytest.importorskip("torch")

from tests.emulator.tests import test_torch_programs  # noqa: E402
from tests.emulator.tests.test_torch_programs import (  # noqa: E402
    HKV,
    D,
    W,
    attend,
    draw,
    dynamic,
    from_values,
    parameters,
    same,
    step,
)

pytestmark = pytest.mark.usefixtures("chain_runs")
N = 44  # tokens
Call = tuple[Callable[..., Any], list[Any]]  # a function and its inputs


def check(first: Callable[[int], Call], neighbours: dict[str, Callable[[int], Call]]) -> None:
    call, inputs = first(0)
    step(call, *inputs)
    for name, make in (*neighbours.items(), ("the first kind", first)):
        call, inputs = make(9)
        found = step(call, *inputs)
        with fresh():
            for x, y in zip(found, step(call, *inputs), strict=True):
                assert torch.equal(x, y), name


def laid(x: Any, order: tuple[int, ...] | None = None, offset: int = 0) -> Any:
    """A copy with this ``order`` of axes in memory, ``offset`` elements after a multiple of 64 bytes."""
    order = order or tuple(range(x.ndim))
    memory = x.new_zeros(x.numel() + 64 + offset)
    begin = -memory.data_ptr() % 64 // x.element_size() + offset
    found = memory[begin:begin + x.numel()].view([x.shape[axis] for axis in order]).permute(
        sorted(range(x.ndim), key=order.__getitem__))
    return found.copy_(x.detach()).detach().requires_grad_(x.requires_grad)


def with_input(make: Callable[[int], Call], which: int, **place: Any) -> Callable[[int], Call]:
    """The same calls with another memory layout of one input."""
    def other(seed: int) -> Call:
        call, inputs = make(seed)
        inputs[which] = laid(inputs[which], **place)
        return call, inputs

    return other


def of(call: Callable[..., Any], batch: int = 2, **options: Any) -> Callable[[int], Call]:
    return lambda seed: (lambda *x: call(*x, **options), draw(seed, batch=batch, length=N))


@pytest.mark.slow
def test_strides_alignment_and_gradients_of_inputs(chain_runs):
    def without(which: int) -> Callable[[int], Call]:
        def make(seed: int) -> Call:
            call, inputs = first(seed)
            inputs[which].requires_grad_(False)
            return call, inputs

        return make

    first = of(dynamic)
    check(first, {f"input {i} {order or 'moved'}": with_input(first, i, order=order, offset=0 if order else 1)
                  for i in range(4) for order in (None, (1, 0, 2) if i == 3 else (0, 2, 1, 3))}
          | {f"no gradient of input {i}": without(i) for i in range(4)})


@pytest.mark.slow
def test_options(chain_runs):
    padding = torch.arange(2 * N).view(2, N) % 5 > 0
    check(of(dynamic), {
        "window": of(dynamic, window=W + 1), "everything": of(dynamic, window=N), "global": of(dynamic, keys="global"),
        "scale": of(dynamic, scale=0.3), "batch": of(dynamic, batch=1), "padding": of(dynamic, padding=padding)})
    check(of(dynamic, padding=padding), {
        "of all rows": of(dynamic, padding=padding[:1]),
        "at an odd address": of(dynamic, padding=laid(padding, offset=1)),
        "in longer rows": of(dynamic, padding=torch.nn.functional.pad(padding, (0, 8))[:, :N]), "none": of(dynamic)})
    check(of(attend, causal=True, softcap=2.0), {
        "not causal": of(attend, softcap=2.0), "softcap": of(attend, causal=True, softcap=3.0),
        "scale": of(attend, causal=True, softcap=2.0, scale=0.1), "no softcap": of(attend, causal=True)})


def test_masks(chain_runs):
    key = torch.arange(N, dtype=torch.int32)
    stop = key + 1 + torch.arange(2 * HKV * N, dtype=torch.int32).view(2, HKV, N) * 7 % 30
    kinds = {"starts of each row": dma.IntervalMask((key + stop % 3).contiguous(), stop),
             "stop at an odd address": dma.IntervalMask(key, laid(stop, offset=1)),
             "a known bound": dma.IntervalMask.from_stop(stop, window=40),
             "a known start": dma.IntervalMask.from_stop(stop), "one row": dma.IntervalMask(key, stop[:1, :1]),
             "open": dma.IntervalMask(key - N, stop)}
    check(of(attend, mask=dma.IntervalMask(key, stop)), {name: of(attend, mask=mask) for name, mask in kinds.items()})
    windows = {str(n): of(attend, mask=dma.IntervalMask.sliding_window(N, n, like=key)) for n in (N, 1, 30, N - 1)}
    check(windows.pop(str(N)), windows)


def test_parameters_of_scores(chain_runs):
    def first(seed: int) -> Call:
        return from_values, [*draw(seed, length=N)[:3], *parameters(seed).values()]

    def with_type(seed: int) -> Call:
        return from_values, [*draw(seed, length=N)[:3], *parameters(seed, torch.bfloat16).values()]

    def without_bias(seed: int) -> Call:
        return from_values, first(seed)[1][:5]

    check(first, {"linear": lambda seed: (lambda *x: from_values(*x, form="linear"), first(seed)[1]),
                  "bfloat16": with_type, "no dt_bias": without_bias,
                  "dt_proj in longer rows": lambda seed: _longer_rows(*first(seed)),
                  **{f"input {i} moved": with_input(first, i, offset=1) for i in (2, 3, 4, 5)}})


def _longer_rows(call: Callable[..., Any], inputs: list[Any]) -> Call:
    weight = torch.zeros(HKV, HKV * D + 8)
    weight[:, :-8] = inputs[3].detach()
    return call, [*inputs[:3], weight[:, :-8].detach().requires_grad_(), *inputs[4:]]


def test_upstream_gradients(chain_runs):
    """One forward program has a backward program for each kind of upstream gradient."""
    inputs = draw(0, batch=2, length=N)
    dout = torch.randn(2, N, test_torch_programs.H, D).bfloat16()
    kinds = {"transposed": laid(dout, (0, 2, 1, 3)), "batches last": laid(dout, (1, 0, 2, 3)),
             "moved": laid(dout, offset=1), "repeated": dout[:1].expand_as(dout), "one": dout[..., :1].expand_as(dout)}
    for name, upstream in (*[("first", dout)] * 5, *kinds.items(), ("first", dout)):
        found = torch.autograd.grad(dynamic(*inputs)[0], inputs, upstream)
        with fresh():
            for x, y in zip(found, torch.autograd.grad(dynamic(*inputs)[0], inputs, upstream), strict=True):
                assert torch.equal(x, y), name
    assert chain_runs["backward"] >= 3


def test_the_deterministic_mode_of_torch(chain_runs):
    """A program built without the mode may sum in any order."""
    q, k, v, s = draw(0, length=N)

    def gradients() -> Any:
        out = dma.attention(q, k, v, bias=s, causal=True, backend="emulator")
        return torch.autograd.grad(out.sum(), (q, k, v, s))

    for _ in range(3):
        gradients()
    assert chain_runs == {"forward": 3, "backward": 3}
    torch.use_deterministic_algorithms(True)
    try:
        found = gradients()
        assert chain_runs == {"forward": 4, "backward": 4}
        assert len(test_torch_programs.entry._known) == 2
        with fresh():
            same(found, gradients())
    finally:
        torch.use_deterministic_algorithms(False)
