"""Unusual torch tensors (views, subclasses, fake tensors): a right result, or an error that says what to do instead."""
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cupy_dma as dma
import tests.emulator  # noqa: F401  # a backend that reads addresses
from cupy_dma import torch as dma_torch
from tests.oracle.torch_inputs import HKV, B, D, H, N, draw, float64, gradients, recipe, same

pytestmark = pytest.mark.usefixtures("same_numbers")
CU = torch.tensor([0, 7, N], dtype=torch.int32)


def tensors(dtype=float64):
    return draw(dtype, requires_grad=False)


def negative(x):
    """The same values as a view whose negative bit is set."""
    found = torch._neg_view(-x.detach())
    assert found.is_neg()
    return found.requires_grad_(x.requires_grad)


CALLS = {
    "attention": lambda q, k, v, s: dma.attention(q, k, v, bias=s),
    "torch.attention": lambda q, k, v, s: dma_torch.attention(q, k, v, bias=s),
    "dynamic_mask_attention": lambda q, k, v, s: dma.dynamic_mask_attention(q, k, v, s, window=4),
    "recipe": lambda q, k, v, s: dma.dynamic_mask_attention(
        q, k, v, window=4, **{name: x.detach() for name, x in recipe(q.dtype).items()}),
    "key_scores": lambda q, k, v, s: dma.key_scores(v, *[x.detach() for x in list(recipe(q.dtype).values())[:2]]),
    "varlen_attention": lambda q, k, v, s: dma.varlen_attention(q[0], k[0], v[0], CU, CU, bias=s[0]),
    "varlen_dynamic_mask_attention": lambda q, k, v, s: dma.varlen_dynamic_mask_attention(
        q[0], k[0], v[0], CU, CU, s[0], window=3),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("which", ["query", "key", "value", "scores"])
@pytest.mark.parametrize("learns", [False, True])
def test_forward_mode_raises_instead_of_losing_the_tangent(name, which, learns):
    arguments = dict(zip(("query", "key", "value", "scores"), tensors()))
    used = {"recipe": ("query", "key", "value"), "key_scores": ("value",)}.get(name, tuple(arguments))
    with forward_ad.dual_level():
        CALLS[name](*arguments.values())  # works without a tangent
        x = arguments[which].requires_grad_(learns)
        arguments[which] = forward_ad.make_dual(x, torch.ones_like(x))
        if which not in used:
            CALLS[name](*arguments.values())
            return
        shown = "bias" if which == "scores" and "dynamic" not in name else which
        with pytest.raises(NotImplementedError, match=rf"{shown} carries a forward-mode tangent.*unpack_dual"):
            CALLS[name](*arguments.values())


def test_an_operator_does_not_lose_the_tangent_either():
    q, k, v, _ = tensors()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="key carries a forward-mode tangent"):
        torch.ops.cupy_dma.attention(q, forward_ad.make_dual(k, k), v, None, None, None, None, False, None, None,
                                     *[None] * 4, False, None, 0.0, False, 0, None, False)


TRANSFORMS = {
    "vmap": (lambda f, x: torch.vmap(lambda a: f(a[None]))(x), "vmap.*first axis of every argument"),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), "forward-mode tangent.*backward"),
    "grad": (lambda f, x: torch.func.grad(lambda a: f(a).sum())(x), r"torch\.func transform \(grad.*torch\.autograd"),
    "vjp": (lambda f, x: torch.func.vjp(f, x), r"torch\.func transform \(grad"),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), r"torch\.func transform \(grad"),
    "jacobian": (lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True), "vmap.*vectorize=True"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("module", [dma, dma_torch], ids=["cupy_dma", "cupy_dma.torch"])
def test_transforms_say_what_to_do(name, module):
    transform, message = TRANSFORMS[name]
    q, k, v, s = tensors()
    weight, A = list(recipe().values())[:2]

    def attend(x):
        return module.dynamic_mask_attention(x, k[:len(x)], v[:len(x)], s[:len(x)], window=3)

    with pytest.raises(NotImplementedError, match=message):
        transform(attend, q)
    if name not in ("vmap", "jacobian"):
        with pytest.raises(NotImplementedError, match=message):
            transform(lambda x: module.key_scores(x, weight, A), v)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_layers_say_what_to_do(name):
    transform, message = TRANSFORMS[name]
    layer = dma_torch.DynamicMaskSelfAttention(H * D, H, HKV, 3, dtype=float64)
    with pytest.raises(NotImplementedError, match=message):
        transform(lambda x: layer(x.flatten(2)), tensors()[0])


@pytest.mark.parametrize("form", ["sparse", "nested", "jagged", "meta"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("module", [dma, dma_torch], ids=["cupy_dma", "cupy_dma.torch"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_rows_in_memory(form, learns, module):
    make, message = {
        "sparse": (lambda x: x.to_sparse(),
                   r"must be a dense tensor \(torch\.strided\), got torch\.sparse_coo.*to_dense"),
        "nested": (lambda x: torch.nested.nested_tensor(list(x)),
                   r"must be a dense tensor, got a nested one: call varlen_attention.*offsets"),
        "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
                   r"must be a dense tensor, got a nested one: call varlen_attention.*values\(\)"),
        "meta": (lambda x: x.to("meta"), "is on the torch device meta.*allowed are cpu and cuda"),
    }[form]
    arguments = tensors()
    for i, name in enumerate(("query", "key", "value", "scores")):
        given = [make(x).requires_grad_(learns) if j == i else x for j, x in enumerate(arguments)]
        with pytest.raises(TypeError, match=f"{name} {message}"):
            module.dynamic_mask_attention(*given, window=3)


def test_a_nested_tensor_goes_to_varlen_as_the_error_says():
    q, k, v, s = tensors()
    parts = [torch.nested.nested_tensor([x[0, :5], x[1, :9]], layout=torch.jagged) for x in (q, k, v)]
    rows, offsets = [x.values() for x in parts], parts[0].offsets()
    packed = torch.cat((s[0, :, :5], s[1, :, :9]), -1)
    out = dma.varlen_dynamic_mask_attention(*rows, offsets, offsets, packed, window=3)
    for b, (begin, end) in enumerate(((0, 5), (5, 14))):
        n = end - begin
        alone = dma.dynamic_mask_attention(*[x[b:b + 1, :n] for x in (q, k, v)], s[b:b + 1, :, :n], window=3)
        torch.testing.assert_close(out[begin:end], alone[0])


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_get_fake_results(name, inside, learns):
    arguments = [x.requires_grad_(learns) for x in tensors(torch.float32)]
    expected = CALLS[name](*arguments)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = [mode.from_tensor(x) for x in arguments]
    if inside:
        with mode:
            found = CALLS[name](*fake)
    else:
        found = CALLS[name](*fake)
    assert type(found).__name__ == "FakeTensor"
    assert (found.shape, found.dtype, found.requires_grad) == (expected.shape, expected.dtype, learns)


def test_what_has_no_fake_form_says_so():
    fake = FakeTensorMode().from_tensor(torch.zeros(B, HKV, N))
    with pytest.raises(TypeError, match="scores must be a tensor with readable memory, got FakeTensor"):
        dma.IntervalMask.top_w(fake, 3)


def test_make_fx_traces_a_call_instead_of_its_result():
    q, k, v, s = tensors(torch.float32)
    traced = make_fx(lambda x: dma.attention(x, k, v, bias=s))(q)
    torch.testing.assert_close(traced(q + 1), dma.attention(q + 1, k, v, bias=s))


@pytest.mark.parametrize("backend", ["numpy", "emulator", "flex"])
def test_the_negative_bit(backend):
    plain = [x.requires_grad_() for x in tensors(torch.float32)]
    view = [negative(x) for x in plain]

    def run(q, k, v, s):
        return dma.attention(q, k, v, bias=s, mask=dma.IntervalMask.top_w(s, 4, backend=backend), backend=backend)

    expected, found = run(*plain), run(*view)
    assert torch.equal(found, expected)
    dout = torch.randn_like(expected)
    assert same(gradients(found, view, negative(dout)), gradients(expected, plain, dout))
    with torch.no_grad():
        assert torch.equal(run(*view), expected)


def test_the_negative_bit_of_what_a_cache_reads_and_writes():
    q, k, v, s = (x[:, :, :1] if x.ndim == 4 else x[:, :1] for x in tensors(torch.float32))
    caches = [dma.DynamicCache(B, 1, 4, D, dtype=torch.float32, like=q) for _ in range(2)]
    expected = caches[0].extend(q, k, v, s)
    assert torch.equal(caches[1].extend(*map(negative, (q, k, v, s))), expected)
    with pytest.raises(ValueError, match=r"out must be an ordinary tensor.*negative bit"):
        caches[1].extend(q, k, v, s, out=negative(torch.zeros_like(expected)))


def test_complex_tensors_are_refused_with_or_without_the_conjugate_bit():
    q, k, v, _ = tensors()
    for x in (torch.complex(q, q), torch.complex(q, q).conj()):
        with pytest.raises(TypeError, match=r"query must be float16 .* got torch\.complex128"):
            dma.attention(x, k, v)
    part = torch.complex(q, q).conj().imag
    assert part.is_neg()
    torch.testing.assert_close(dma.attention(part, k, v), dma.attention(-q, k, v))


def test_a_gradient_that_is_known_to_be_zero():
    q, k, v, _ = (x.requires_grad_() for x in tensors())
    out = dma.attention(q, k, v)
    zero = torch._efficientzerotensor(out.shape, dtype=out.dtype)
    for gradient in torch.autograd.grad(out, (q, k, v), zero):
        assert not gradient.any()
    assert out.shape == (B, N, H, D)
