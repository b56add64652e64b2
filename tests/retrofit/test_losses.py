"""The losses of a retrofit against plain formulas, values and gradients."""
import pytest
import torch
from torch.nn import functional

from cupy_dma.retrofit import Head, budget_loss, chunked_kl
from tests.transformers import small_models as small

TOKENS, WIDTH, OTHER, WORDS = (2, 5), 6, 4, 23


def drawn(kind=torch.float64, bias=True, **options):
    torch.manual_seed(0)
    heads = [Head(torch.randn(WORDS, width, dtype=kind), torch.randn(WORDS, dtype=kind) if bias else None, **options)
             for width in (WIDTH, OTHER)]
    states = [torch.randn(*TOKENS, width, dtype=kind) for width in (WIDTH, OTHER)]
    for x in (states[0], heads[0].weight, heads[0].bias):
        if x is not None:
            x.requires_grad_()
    return states[0], heads[0], states[1], heads[1]


def plain(hidden, head, teacher, teacher_head, direction):
    logs = []
    for x, (weight, bias, scale, softcap) in ((hidden, head), (teacher, teacher_head)):
        z = functional.linear(x, weight, bias) * scale
        logs.append((softcap * torch.tanh(z / softcap) if softcap else z).log_softmax(-1))
    student, other = logs
    return (other.exp() * (other - student) if direction == "forward" else student.exp() * (student - other)).sum(-1)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("chunk", [1, 5, WORDS, 100])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"scale": 0.3}, {"softcap": 2.0, "scale": 1.5}], ids=str)
def test_the_formula(direction, chunk, options):
    hidden, head, teacher, teacher_head = drawn(**options)
    found = chunked_kl(hidden, head, teacher, teacher_head, direction=direction, chunk=chunk)
    expected = plain(hidden, head, teacher, teacher_head, direction)
    assert found.shape == TOKENS and (expected > 0.01).all()
    torch.testing.assert_close(found, expected)
    weights, learned = torch.randn(TOKENS, dtype=torch.float64), [x for x in (hidden, *head[:2]) if x is not None]
    torch.testing.assert_close(*(torch.autograd.grad(kl, learned, weights) for kl in (found, expected)))


def test_large_logits_and_equal_models():
    hidden, head, teacher, teacher_head = drawn()
    large = head._replace(weight=head.weight * 300), teacher_head._replace(weight=teacher_head.weight * 300)
    torch.testing.assert_close(chunked_kl(hidden, large[0], teacher, large[1], chunk=4),
                               plain(hidden, large[0], teacher, large[1], "forward"))
    found = chunked_kl(hidden, head, hidden.detach(), chunk=4)
    gradient, = torch.autograd.grad(found.sum(), hidden)
    assert found.abs().max() < 1e-14 and gradient.abs().max() < 1e-14


@pytest.mark.parametrize("kind, off", [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.01)])
@pytest.mark.parametrize("autocast", [False, True])
def test_types(kind, off, autocast):
    hidden, head, teacher, teacher_head = drawn(torch.float32)
    expected = plain(hidden, head, teacher, teacher_head, "forward")
    wanted, = torch.autograd.grad(expected.mean(), hidden)
    if autocast and kind != torch.float32:
        with torch.autocast("cpu", kind):
            found = chunked_kl(hidden, head, teacher, teacher_head, chunk=7)
        given = hidden
    else:
        given = hidden.detach().to(kind).requires_grad_()
        found = chunked_kl(given, head, teacher.to(kind), teacher_head, chunk=7)
    assert found.dtype == torch.float32
    gradient, = torch.autograd.grad(found.mean(), given)
    assert gradient.dtype == given.dtype
    torch.testing.assert_close(found, expected, rtol=off, atol=off)
    torch.testing.assert_close(gradient.float(), wanted, rtol=off, atol=off)


def test_logits_are_never_held():
    """Neither pass makes a tensor of size tokens x vocabulary."""
    torch.manual_seed(0)
    hidden, head = torch.randn(40, 3, requires_grad=True), Head(torch.randn(1000, 3))
    with small.Largest() as largest:
        chunked_kl(hidden, head, torch.randn(40, 3), chunk=20).sum().backward()
    assert 0 < largest.most <= 1000 * 3


def test_the_budget():
    kept = torch.tensor(0.6, requires_grad=True)
    for target, expected, slope in ((0.5, 0.1, 1.0), (0.7, 0.0, 0.0)):
        loss = budget_loss(kept, target)
        gradient, = torch.autograd.grad(loss, kept)
        torch.testing.assert_close(loss.item(), expected, rtol=1e-6, atol=1e-7)
        assert gradient == slope


@pytest.mark.parametrize("change, error, message", [
    ({"direction": "both"}, ValueError, "direction must be 'forward' or 'reverse'"),
    ({"chunk": 0}, ValueError, "chunk"),
    ({"hidden": torch.ones(2, 5, 7)}, ValueError, r"hidden must have shape \(\.\.\., 6\)"),
    ({"hidden": torch.ones(2, 4, 6)}, ValueError, r"must be of the same tokens, got \(2, 4\) and \(2, 5\)"),
    ({"teacher_head": Head(torch.ones(9, OTHER))}, ValueError, "same vocabulary, got 23 and 9 words"),
], ids=str)
def test_arguments(change, error, message):
    given = dict(zip(("hidden", "head", "teacher_hidden", "teacher_head"), drawn()))
    given.update(change)
    with pytest.raises(error, match=message):
        chunked_kl(**given)
