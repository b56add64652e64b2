"""A torch call passes only saved tensors to its backward; autograd frees them and shows them to hooks."""
import contextlib
import gc
import weakref
from typing import Any

import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.runtime.program import fresh
from tests import emulator

torch = pytest.importorskip("torch")

from cupy_dma.torch import entry  # noqa: E402

N, W = 100, 12


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(entry, "_known", {})
    return entry._known


@pytest.fixture(params=[True, False], ids=["kept", "fresh"])
def device(request):
    with contextlib.nullcontext() if request.param else fresh():
        yield


def draw() -> list[Any]:
    torch.manual_seed(0)
    shapes = [(1, N, heads, 16) for heads in (2, 1, 1)]
    return [*(torch.randn(shape, dtype=torch.float16, requires_grad=True) for shape in shapes),
            torch.randn(1, 1, N, requires_grad=True)]


def from_scores(q: Any, k: Any, v: Any, s: Any) -> Any:
    return dma.dynamic_mask_attention(q, k, v, s, window=W, backend="emulator")


def from_values(q: Any, k: Any, v: Any, s: Any) -> Any:
    return dma.dynamic_mask_attention(q, k, v, window=W, dt_proj=s[0, :, :16], A=s[0, :, 0], backend="emulator")


def with_two_masks(q: Any, k: Any, v: Any, s: Any) -> Any:
    masks = (dma.IntervalMask.top_w(s.detach(), W, backend="emulator"), dma.IntervalMask.sliding_window(N, 50, like=q))
    return dma.attention(q, k, v, mask=masks, bias=s, backend="emulator")


def packed(q: Any, k: Any, v: Any, s: Any) -> Any:
    return dma.varlen_dynamic_mask_attention(q[0], k[0], v[0], [0, 30, N], [0, 30, N], s[0], window=W,
                                             backend="emulator")


CALLS = [from_scores, from_values, with_two_masks, packed]


def alive(references: list[Any]) -> int:
    gc.collect()
    return sum(x() is not None for x in references)


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_makes_is_freed_by_its_backward(call, device):
    inputs, saved = draw(), []

    def pack(x: Any) -> Any:
        if x.data_ptr() not in [known.data_ptr() for known in inputs]:
            saved.append(weakref.ref(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = call(*inputs).sum()
    assert alive(saved) >= 3  # out, lse, and at least one array that the call has made
    loss.backward()
    assert alive(saved) == 0 and loss.grad_fn is not None


@pytest.mark.parametrize("call", CALLS)
def test_a_checkpointed_call_keeps_nothing(call, device, monkeypatch):
    from torch.utils.checkpoint import checkpoint

    inputs, made = draw(), []
    save = torch.autograd.function.FunctionCtx.save_for_backward
    monkeypatch.setattr(torch.autograd.function.FunctionCtx, "save_for_backward", lambda ctx, *tensors: (
        made.extend(weakref.ref(x) for x in tensors if x is not None and not x.requires_grad), save(ctx, *tensors))[1])
    loss = checkpoint(call, *inputs, use_reentrant=False).sum()
    assert made and not alive(made)
    loss.backward()
    expected = torch.autograd.grad(call(*inputs).sum(), inputs)
    for x, wanted in zip(inputs, expected):
        assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("call", CALLS)
def test_the_graph_may_be_kept(call, device):
    inputs = draw()
    loss = call(*inputs).sum()
    first, second = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second):
        assert torch.equal(a, b)


@pytest.mark.parametrize("call", CALLS)
def test_hooks_may_move_what_is_saved(call, device):
    """Offloading, for example, returns other memory, so addresses of key lists must be looked up again."""
    inputs = draw()
    expected = torch.autograd.grad(call(*inputs).sum(), inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        loss = call(*inputs).sum()
    gc.collect()
    for a, b in zip(torch.autograd.grad(loss, inputs), expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("change", "told"), [(lambda x: x.float(), "float32"), (lambda x: x[..., :1], r", 1\)"),
                                              (lambda x: x.to("meta"), "meta")], ids=["type", "shape", "device"])
@pytest.mark.parametrize("call", CALLS)
def test_hooks_must_not_change_the_kind_of_a_tensor(call, change, told, device):
    inputs = draw()
    hook = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: change(x) if x.dtype == torch.float16 else x)
    with hook:
        loss = call(*inputs).sum()
    with pytest.raises(RuntimeError, match=f"saved-tensor hook returned out .*{told}.*as it was saved"):
        loss.backward()


def test_a_call_whose_programs_cannot_be_built_fails(known, monkeypatch):
    """The next call builds them."""
    inputs = draw()
    with monkeypatch.context() as patch:
        patch.setattr(emulator.BACKEND, "make_chain", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
        for _ in range(2):
            with pytest.raises(MemoryError, match="no memory"):
                from_scores(*inputs)
    assert not known
    from_scores(*inputs)
    assert [x.chain is not None for x in known.values()] == [True]


def test_gradients_that_are_views_have_one_program(known):
    """The stride of an axis of length 1 is not part of a key."""
    inputs = draw()
    for n in (1, 5, 9):
        out = from_scores(*inputs)
        torch.cat([out, torch.zeros(1, n, 2, 16, dtype=out.dtype)], 1).sum().backward()
    step, = (x.chain for x in known.values())
    assert len(step._backward) == 1


def test_kinds_are_bounded(known, monkeypatch):
    monkeypatch.setattr(entry, "MAX_ENTRIES", 3)
    for n in range(20, 27):
        from_scores(*(x[:, :n] if x.ndim == 4 else x[..., :n] for x in draw()))
    assert len(known) == 3
