"""The torch functions on CPU tensors: autograd, operators, errors, the module."""
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch

import cupy_dma as dma
from cupy_dma import checks
from cupy_dma.backends import numpy as numpy_backend
from cupy_dma.torch import DynamicMaskAttention
from tests.oracle.torch_inputs import HKV, B, D, H, N, draw, float64, gradients, recipe, same
from tests.torch import recall

pytestmark = pytest.mark.usefixtures("same_numbers")


# ---- autograd ----
MASKS = {
    "top_w": lambda s: dma.IntervalMask.top_w(s.detach(), 5),
    "none": lambda s: None,
    "dense": lambda s: torch.rand(B, 1, N, N) < 0.4,  # some rows have no visible keys
    "several": lambda s: (dma.IntervalMask.top_w(s.detach(), 9), torch.rand(1, H, N, N) < 0.7,
                          torch.rand(B, 1, 1, N) < 0.9, torch.rand(N, N) < 0.9),
    "padding": lambda s: dma.IntervalMask.padding(torch.rand(B, N) < 0.6),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradcheck_attention(mask, softcap):
    q, k, v, scores = draw()
    mask = MASKS[mask](scores)

    def run(*arguments):
        q, k, v, bias = arguments
        out, lse = dma.attention(q, k, v, mask=mask, bias=bias, causal=True, softcap=softcap, return_lse=True)
        return out, torch.where(lse > -1e30, lse, 0)

    assert torch.autograd.gradcheck(run, (q, k, v, scores), fast_mode=True)
    bias = torch.randn(1, H, N, 1, dtype=float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (q, k, v, bias), fast_mode=True)


@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("keys", ["prefix", "global"])
def test_gradcheck_the_whole_chain(form, keys):
    """Away from ties the selection is constant, so finite differences agree with the formulas."""
    q, k, v, _ = draw()

    def run(q, k, v, dt_proj, A, dt_bias):
        return dma.dynamic_mask_attention(q, k, v, dt_proj=dt_proj, A=A, dt_bias=dt_bias, form=form, keys=keys,
                                          window=5)

    assert torch.autograd.gradcheck(run, (q, k, v, *recipe().values()), fast_mode=True)
    assert torch.autograd.gradcheck(lambda *x: dma.key_scores(x[0], x[1], x[2], form=form),
                                    (v, *list(recipe().values())[:2]), fast_mode=True)


@pytest.mark.feature("numpy forward backward", "torch", "autograd")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autograd_has_the_bits_of_the_manual_functions(dtype):
    q, k, v, _ = draw(dtype)
    parameters = recipe(torch.float32)
    out, lse = dma.dynamic_mask_attention(q, k, v, **parameters, window=5, softcap=2.0, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    leaves = (q, k, v, *parameters.values())
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    with torch.no_grad():
        manual = dma.backward.dynamic_mask_attention_backward(dout, q, k, v, out, lse, **parameters, window=5,
                                                              softcap=2.0, dlse=dlse)
    manual = (*manual[:3], *manual[4:])
    assert all(a.dtype == b.dtype == leaf.dtype for a, b, leaf in zip(found, manual, leaves))
    assert same([x for i, x in enumerate(found) if i != 2], [x for i, x in enumerate(manual) if i != 2])
    rounding = torch.finfo(dtype).eps * manual[2].abs().max().item()
    # autograd rounds both terms before adding them
    torch.testing.assert_close(found[2], manual[2], rtol=0, atol=rounding)


@pytest.mark.parametrize("subset", [c for n in range(1, 5) for c in itertools.combinations(range(4), n)], ids=str)
def test_only_what_requires_grad_is_computed(subset, calls_of):
    asked = calls_of(numpy_backend, "attention_backward")
    arguments = draw(torch.float32, requires_grad=False)
    every = [x.clone().requires_grad_() for x in arguments]
    some = [x.clone().requires_grad_(i in subset) for i, x in enumerate(arguments)]

    def run(q, k, v, s):
        return dma.attention(q, k, v, mask=dma.IntervalMask.top_w(s, 5), bias=s)

    found = gradients(run(*some), [some[i] for i in subset])
    assert [call.needs for call, in asked] == [{("query", "key", "value", "bias")[i] for i in subset}]
    assert same(found, [gradients(run(*every), every)[i] for i in subset])


def test_nothing_requires_grad():
    q, k, v, s = draw(torch.float32, requires_grad=False)
    assert not dma.attention(q, k, v, bias=s).requires_grad
    with torch.no_grad():
        assert not dma.attention(q.requires_grad_(), k, v).requires_grad
    assert not dma.IntervalMask.top_w(s.requires_grad_(), 3).stop.requires_grad
    assert dma.attention(q, k, v).requires_grad and dma.attention(q.detach(), k, v, bias=s).requires_grad


@pytest.mark.parametrize("use", [
    lambda out, lse, weights: out.sum(), lambda out, lse, weights: (out * weights).sum(),
    lambda out, lse, weights: out[:, 3:, :, ::2].sum(), lambda out, lse, weights: lse.sum(),
    lambda out, lse, weights: (out * weights).sum() + (out * 2).sum(),
    lambda out, lse, weights: out.sum() + lse.sum() / 2],
    ids=["sum", "transposed", "sliced", "lse", "twice", "sum of both"])
def test_any_use_of_the_output(use):
    q, k, v, s = draw()
    out, lse = dma.attention(q, k, v, causal=True, bias=s, return_lse=True)
    weights = torch.randn(B, D, H, N, dtype=float64).permute(0, 3, 2, 1)  # last axis without unit stride
    loss = use(out, lse, weights)
    found = torch.autograd.grad(loss, (q, k, v, s), retain_graph=True)
    dout, dlse = torch.autograd.grad(loss, (out, lse), materialize_grads=True)
    with torch.no_grad():
        manual = dma.backward.attention_backward(dout, q, k, v, out, lse, causal=True, bias=s, dlse=dlse)
    torch.testing.assert_close(found, manual, rtol=0, atol=1e-13)


def test_there_is_no_second_derivative():
    q, k, v, s = draw()
    (dq,) = torch.autograd.grad(dma.attention(q, k, v, bias=s).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dq.sum().backward()
    with pytest.raises(NotImplementedError, match=r"query requires grad.*no second derivative.*torch\.no_grad"):
        dma.backward.attention_backward(q, q, k, v, q, torch.zeros(B, H, N))


def test_an_argument_changed_in_place_is_noticed():
    q, k, v, s = draw()
    x = q * 2
    out = dma.attention(x, k, v, bias=s)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_forward_and_backward_share_a_mask_and_release_one_of_their_own(monkeypatch):
    seen, forward, backward = [], numpy_backend.attention, numpy_backend.attention_backward
    monkeypatch.setattr(numpy_backend, "attention", lambda call: seen.append(weakref.ref(call.mask)) or forward(call))
    monkeypatch.setattr(numpy_backend, "attention_backward",
                        lambda call: seen.append(weakref.ref(call.forward.mask)) or backward(call))
    q, k, v, s = draw(torch.float32)
    mask = dma.IntervalMask.top_w(s, 5)
    dma.attention(q, k, v, mask=mask, bias=s).sum().backward()
    assert [found() for found in seen] == [mask, mask] and seen[0]() is seen[1]() is mask
    seen.clear()
    out = dma.dynamic_mask_attention(q, k, v, s, window=5)
    gc.collect()
    assert seen[0]() is None  # autograd has saved its arrays
    out.sum().backward()
    gc.collect()
    assert len(seen) == 2 and seen[1]() is None


def test_a_mask_with_the_same_starts_between_forward_and_backward():
    """Such a mask must not be mistaken for the first one while both are alive."""
    x = torch.randn(1, 12, 1, 4, requires_grad=True)
    mask = dma.IntervalMask.sliding_window(12, 3, like=x.detach())
    other = mask & dma.IntervalMask.padding(torch.arange(12)[None] < 6)
    found, expected = [], []
    for masks, results in (((mask, other), found), ((mask.to_dense(12), other.to_dense(12)), expected)):
        outputs = [dma.attention(x, x.detach(), x.detach(), mask=seen) for seen in masks]
        results += [torch.autograd.grad(out.sum(), x)[0] for out in outputs]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("how", ["scores", "recipe"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_dynamic_call_checks_each_argument_once(calls_of, how, packed):
    """The backward pass checks nothing again."""
    q, k, v, s = draw(torch.float32)
    calls = calls_of(checks, "one_of_types")
    given = {"scores": s} if how == "scores" else recipe(torch.float32)
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
        if how == "scores":
            given["scores"] = s[0]
        bounds = torch.tensor([0, 7, N], dtype=torch.int32)
        out = dma.varlen_dynamic_mask_attention(q, k, v, bounds, bounds, window=5, **given)
    else:
        out = dma.dynamic_mask_attention(q, k, v, window=5, **given)
    checked = [operand.name for operand, *_ in calls]
    assert len(checked) == len(set(checked)) and "query" in checked and set(given) <= set(checked)
    calls.clear()
    out.sum().backward()
    assert not calls


# ---- operators ----
def operator_calls():
    q, k, v, s = draw(torch.float32)
    p = list(recipe(torch.float32).values())
    start, stop = torch.ops.cupy_dma.top_w(s, [5], "prefix", None, None, None)
    interval, options = (start, stop, "key", (5, 1), False, None), (False, None, 0.0, False, 0, None)
    packed = (None,) * 4
    dense = (None, None, None, None, False, torch.rand(B, HKV, N, N) < 0.5)
    out, lse, made = (x.detach() for x in torch.ops.cupy_dma.attention(q, k, v, *interval, s, *packed, *options, True))
    for form in ("exp", "linear"):
        yield "key_scores", (v, *p, form, None)
    yield "key_scores_backward", (s.detach(), *[x.detach() for x in (v, *p)], "exp", None, ["value", "A"])
    for keys in ("prefix", "global"):
        for documents in (None, torch.tensor([0, 7, N]), torch.arange(N).expand(B, N) // 7):
            yield "top_w", (s, [5] if documents is None else [0, 5, 3], keys, torch.rand(B, N) < 0.8, documents, None)
    for masks in (interval, dense, (*interval[:5], dense[5]), (None,) * 4 + (False, None)):
        yield "attention", (q, k, v, *masks, s, *packed, *options, True)
        yield "attention", (q, k, v, *masks, None, *packed, True, 0.3, 2.0, True, 0, "numpy", True)
        yield "attention", (q, k, v, *masks, s, *packed, True, 0.3, 2.0, True, 7, "numpy", True)
        yield "attention_backward", (out, lse, out, lse, made, *[x.detach() for x in (q, k, v)], *masks, s.detach(),
                                     *packed, *options, True, ["key", "bias"])
    for given in ((s, None, None, None), (None, *p)):
        for documents, keys, window in ((None, "prefix", [5]), (torch.tensor([0, 7, N]), "global", [0, 5, 3])):
            arguments = (q, k, v, *given, torch.rand(B, N) < 0.8, documents, *packed, window, "exp", keys, True,
                         None, 0.0, False, 7, None)
            yield "dynamic_attention", (*arguments, True)
            plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
            yield "dynamic_attention", (*plain, False)
            out, lse, made = torch.ops.cupy_dma.dynamic_attention(*plain, True)
            yield "dynamic_attention_backward", (out, lse, out, lse, made, *plain, True, ["value", "query"])


@pytest.mark.parametrize("number", range(len([*operator_calls()])))
def test_opcheck(number):
    name, arguments = list(operator_calls())[number]
    torch.library.opcheck(getattr(torch.ops.cupy_dma, name).default, arguments)


# ---- errors ----
def test_errors_are_those_of_the_plain_functions():
    q, k, v, s = draw(torch.float32)
    plain = [x.detach() for x in (q, k, v, s)]
    for call in (lambda q, k, v, s: dma.attention(q, k[..., :3], v),
                 lambda q, k, v, s: dma.attention(q, k, v, bias=np.zeros((B, HKV, N), np.float32)),
                 lambda q, k, v, s: dma.attention(q, k, v, mask="causal"),
                 lambda q, k, v, s: dma.attention(q, k, v, softcap="much"),
                 lambda q, k, v, s: dma.attention(q, k, v, mask=dma.IntervalMask.causal(N)),
                 lambda q, k, v, s: dma.attention(q, k, v, causal=1),
                 lambda q, k, v, s: dma.attention(q.transpose(1, 3), k, v),
                 lambda q, k, v, s: dma.attention(q, k, v, backend="cuda"),
                 lambda q, k, v, s: dma.dynamic_mask_attention(q, k, v, s, window=0),
                 lambda q, k, v, s: dma.dynamic_mask_attention(q, k, v, s, window=2.0),
                 lambda q, k, v, s: dma.dynamic_mask_attention(q, k, v, s, window=3, keys="all"),
                 lambda q, k, v, s: dma.dynamic_mask_attention(q, k, v, window=3),
                 lambda q, k, v, s: dma.dynamic_mask_attention(q, k, v, dt_proj=s, window=3),
                 lambda q, k, v, s: dma.key_scores(v, s, s),
                 lambda q, k, v, s: dma.key_scores(v, s[0], s[0, 0, :2], form="log")):
        messages = []
        for arguments in (plain, (q, k, v, s)):
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                call(*arguments)
            messages.append((caught.type, str(caught.value)))
        assert messages[0] == messages[1], messages


# ---- the module ----
def test_the_module_starts_as_the_original_does():
    module = DynamicMaskAttention(HKV, D, 5)
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {
        "A": (HKV,), "dt_proj.weight": (HKV, HKV * D)}
    assert not module.A.any() and module.dt_proj.weight.any() and "window=5" in repr(module)
    q, k, v, _ = draw(torch.float32)
    out = module(q, k, v)
    window = dma.attention(q, k, v, mask=dma.IntervalMask.sliding_window(N, 5, like=q))
    torch.testing.assert_close(out, window)  # equal scores: a sliding window, and a bias that changes nothing
    out.square().sum().backward()
    assert module.A.grad.any() and not module.dt_proj.weight.grad.any()
    with_bias = DynamicMaskAttention(HKV, D, 5, dt_bias=True, dtype=torch.bfloat16, softcap=3.0, keys="global")
    assert with_bias.dt_proj.bias.shape == (HKV,) and with_bias.A.dtype == torch.bfloat16
    padding = torch.rand(B, N) < 0.8
    out, lse = with_bias(*(x.bfloat16() for x in (q, k, v)), padding=padding, return_lse=True)
    (out.float().sum() + lse.clamp(min=-9).sum()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in with_bias.parameters())


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_recall_is_learned(compiler):
    """All answers become right with a window of half the sequence, starting from equal scores."""
    right, steps = recall.train(compiler=compiler)
    print(f"{steps} steps")
    assert right == 1
