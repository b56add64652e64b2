"""``DynamicMaskAttention`` on CPU tensors: what it keeps, decoding without repeating its options, errors."""
import copy
import itertools
import pickle
import re

import numpy as np
import pytest

import cupy_dma as dma

torch = pytest.importorskip("torch")

from cupy_dma.torch import DynamicMaskAttention  # noqa: E402
from tests.oracle import layer_cases  # noqa: E402
from tests.oracle.layer_cases import check, problem  # noqa: E402
from tests.oracle.torch_inputs import HKV, B, D, H, N, draw, float64, gradients, same, same_numbers  # noqa: E402, F401

OPTIONS = {"plain": {}, "linear": {"form": "linear"}, "dt_bias": {"dt_bias": True}, "scale": {"scale": 0.7},
           "softcap": {"softcap": 1.5}, "sinks": {"sinks": 2}, "recent": {"recent": 3},
           "all": {"sinks": 1, "recent": 2, "softcap": 2.0, "scale": 0.5, "form": "linear", "dt_bias": True}}


def layer(window=5, dtype=torch.float32, **options):
    made = DynamicMaskAttention(HKV, D, window, dtype=dtype, **options)
    torch.nn.init.normal_(made.A)
    return made


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, float64])
def test_forward_is_the_definition(options, dtype):
    module, (q, k, v, _) = layer(dtype=dtype, **OPTIONS[options]), draw(dtype, requires_grad=False)
    check(module(q, k, v), problem(module, q, k, v))


def real_tokens(kind):
    real = torch.rand(B, N) < 0.6
    if kind != "holes":
        real = torch.arange(N)[None] < torch.tensor([[N - 4], [N]])
    return real.flip(1) if kind == "left" else real


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("options", ["plain", "sinks", "recent", "all"])
def test_padding_is_no_token(kind, options):
    module, (q, k, v, _) = layer(**OPTIONS[options]), draw(torch.float32, requires_grad=False)
    real = real_tokens(kind)
    check(module(q, k, v, padding=real), problem(module, q, k, v, real))
    one = module(q, k, v, padding=real[:1])
    check(one, problem(module, q, k, v, real[:1]))


@pytest.mark.parametrize("options", ["plain", "sinks", "recent", "all"])
@pytest.mark.parametrize("padded", [False, True])
def test_every_document_keeps_its_own(options, padded):
    module, (q, k, v, _) = layer(3, **OPTIONS[options]), draw(torch.float32, requires_grad=False)
    ids = (torch.arange(N)[None] * torch.tensor([[1], [2]]) // 7).expand(B, N)
    real = real_tokens("holes") if padded else None
    given = {"padding": real} if padded else {}
    check(module(q, k, v, documents=ids, **given), problem(module, q, k, v, real, ids))
    bounds, number = torch.tensor([0, 7, 7, N]), np.arange(N)[None] >= 7
    check(module(q, k, v, documents=bounds, **given), problem(module, q, k, v, real, number))


@pytest.mark.parametrize("options", OPTIONS)
def test_packed_sequences(options):
    module, (q, k, v, _) = layer(3, **OPTIONS[options]), draw(torch.float32)
    bounds = torch.tensor([0, 7, 8, N], dtype=torch.int32)
    out, lse = module(q[0], k[0], v[0], cu_seqlens=bounds, return_lse=True)
    parts = [module(*(x[:1, a:b] for x in (q, k, v)), return_lse=True) for a, b in itertools.pairwise(bounds)]
    leaves = q, k, v, *module.parameters()
    torch.testing.assert_close(out, torch.cat([part[0][0] for part in parts]), rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, torch.cat([part[1][0] for part in parts], 1), rtol=0, atol=2e-6)
    weights = torch.randn_like(out)
    found = gradients(out, leaves, weights)
    wanted = gradients(torch.cat([part[0][0] for part in parts]), leaves, weights)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", layer_cases.INPUTS)
@pytest.mark.parametrize("besides", layer_cases.BESIDES, ids=str)
def test_what_the_kernels_are_tested_with(how, besides):
    sinks, recent = besides
    layer_cases.check_layer(layer(6, torch.bfloat16, sinks=sinks, recent=recent, form="linear", softcap=5.0), how)


@torch.no_grad()
def test_no_tokens():
    q, k, v, _ = draw(torch.float32, requires_grad=False, n=0)
    for options in OPTIONS.values():
        module = layer(**options)
        assert module(q, k, v, padding=torch.ones(B, 0, dtype=torch.bool)).shape == q.shape
        assert module.extend(module.make_cache(B), q, k, v).shape == q.shape


def test_more_sinks_and_recent_than_keys():
    q, k, v, _ = draw(torch.float32, requires_grad=False)
    for options in ({"sinks": N}, {"recent": 2**31 - 2}, {"sinks": 2**31 - 2, "recent": 4}):
        module = layer(1, **options)
        check(module(q, k, v), problem(module, q, k, v))


@pytest.mark.parametrize("options", ["recent", "all"])
def test_gradients_with_sinks_and_recent(options):
    module, (q, k, v, _) = layer(dtype=float64, **OPTIONS[options]), draw()
    real = real_tokens("left")
    assert torch.autograd.gradcheck(
        lambda q, k, v, *_: module(q, k, v, padding=real), (q, k, v, *module.parameters()), fast_mode=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, float64])
@pytest.mark.parametrize("pieces", [(N,), (7, 0, 11), (1,) * N])
@torch.no_grad()
def test_extend_is_forward(options, dtype, pieces):
    module, (q, k, v, _) = layer(dtype=dtype, **OPTIONS[options]), draw(dtype, requires_grad=False)
    cache, outs = module.make_cache(B), []
    for a, b in zip(np.cumsum((0, *pieces)), np.cumsum(pieces)):
        outs.append(module.extend(cache, *(x[:, a:b] for x in (q, k, v))))
    check(torch.cat(outs, 1), problem(module, q, k, v))
    assert cache.memory_bytes == module.make_cache(B).memory_bytes


@torch.no_grad()
def test_extend_takes_what_the_cache_takes():
    module, (q, k, v, _) = layer(sinks=1), draw(torch.float32, requires_grad=False)
    lengths, bounds = torch.tensor([6, 9]), torch.tensor([0, 6, 15])
    padded, packed = module.make_cache(B), module.make_cache(B)
    out, lse = module.extend(padded, *(x[:, :9] for x in (q, k, v)), lengths=lengths, return_lse=True)
    joined = [torch.cat((x[0, :6], x[1, :9])) for x in (q, k, v)]
    where = torch.empty(15, H, D)
    same_place = module.extend(packed, *joined, cu_seqlens=bounds, out=where)
    assert same_place is where and lse.shape == (B, H, 9)
    torch.testing.assert_close(where, torch.cat((out[0, :6], out[1])), rtol=0, atol=1e-6)
    assert padded.length.tolist() == packed.length.tolist() == [6, 9]


def test_scores_are_the_layers():
    module, (_, _, v, _) = layer(form="linear", dt_bias=True), draw(torch.float32)
    wanted = dma.key_scores(v, module.dt_proj.weight, module.A, dt_bias=module.dt_proj.bias, form="linear")
    assert torch.equal(module.scores(v), wanted) and torch.equal(module.scores(v[1]), wanted[1])
    assert all(x is not None for x in gradients(module.scores(v), (v, *module.parameters())))


def test_a_cache_follows_the_layer():
    def kind(cache):
        return re.search(r"dtype='(\w+)'", repr(cache))[1]

    module = layer(dtype=torch.bfloat16, sinks=1, recent=2)
    cache = module.make_cache(3)
    assert (cache.batch, cache.kv_heads, cache.head_dim) == (3, HKV, D)
    assert (cache.window, cache.sinks, cache.recent, kind(cache)) == (5, 1, 2, "bfloat16")
    assert "library='torch', device='cpu'" in repr(cache)
    assert kind(module.make_cache(1, dtype=torch.float32)) == kind(module.make_cache(1, dtype="float32")) == "float32"
    with torch.autocast("cpu", torch.float16):
        assert kind(layer().make_cache(1)) == "float16"
    assert kind(layer(dtype=float64).make_cache(1, device="cpu")) == "float64"


@torch.no_grad()
def test_decoding_under_autocast():
    module, (q, k, v, _) = layer(), draw(torch.float32, requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        out = module.extend(module.make_cache(B), q, k, v)
        assert out.dtype == torch.bfloat16
        check(out, problem(module, *(x.bfloat16() for x in (q, k, v))))


@pytest.mark.parametrize("given", [{}, {"padding": torch.arange(N)[None] > 2}, {"documents": torch.tensor([0, 7, N])}],
                         ids=lambda given: next(iter(given), "plain"))
def test_sinks_and_recent_compile_in_one_graph(given):
    module, (q, k, v, _) = layer(sinks=2, recent=3), draw(torch.float32)
    compiled, leaves = torch.compile(module, fullgraph=True, backend="aot_eager"), (q, k, v, *module.parameters())
    assert same(gradients(module(q, k, v, **given), leaves), gradients(compiled(q, k, v, **given), leaves))


def test_copies_and_reset():
    module = layer(sinks=1, dt_bias=True)
    q, k, v, _ = draw(torch.float32, requires_grad=False)
    out = module(q, k, v)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(q, k, v), out) and repr(twin) == repr(module)
    other = layer(sinks=1, dt_bias=True)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(q, k, v), out)
    old = module.dt_proj.weight.clone()
    module.reset_parameters()
    assert not module.A.any() and not torch.equal(module.dt_proj.weight, old)


WRONG = {
    "kv heads": (lambda m, q, k, v: m(q, k[:, :, :1], v[:, :, :1]),
                 r"key must have shape \(B, Lk, 2, 6\), got \(2, 18, 1, 6\): the layer was made with kv_heads=2, head"),
    "head dim": (lambda m, q, k, v: m(q[..., :4], k[..., :4], v[..., :4]), r"key must have shape .* head_dim=6"),
    "value": (lambda m, q, k, v: m(q, k, v[..., :4]), r"value must have shape \(B, Lk, 2, 6\), got \(2, 18, 2, 4\)"),
    "query": (lambda m, q, k, v: m(q[:, :, :3], k, v), r"query .* H a multiple of 2, got \(2, 18, 3, 6\): the layer"),
    "layout": (lambda m, q, k, v: m(*(x.transpose(1, 2) for x in (q, k, v))), r"key must have shape \(B, Lk, 2, 6\)"),
    "scores": (lambda m, q, k, v: m.scores(k[..., :3]), r"value must have shape \(B, Lk, 2, 6\), got \(2, 18, 2, 3\)"),
    "extend": (lambda m, q, k, v: m.extend(m.make_cache(B), q, k[..., :3], v), "the layer was made with kv_heads=2"),
    "packed": (lambda m, q, k, v: m(q, k, v, cu_seqlens=torch.tensor([0, N])), r"key must have shape \(total, 2, 6\)"),
    "both": (lambda m, q, k, v: m(q[0], k[0], v[0], cu_seqlens=torch.tensor([0, N]), padding=torch.ones(1, N) > 0),
             "cu_seqlens .* no padding"),
    "no tensor": (lambda m, q, k, v: m(q, k.numpy(), v), "key must be a torch tensor, got ndarray"),
    "no cache": (lambda m, q, k, v: m.extend(None, q, k, v), "cache must be a DynamicCache.*make_cache.*got NoneType"),
    "other window": (lambda m, q, k, v: m.extend(layer(4).make_cache(B), q, k, v),
                     "cache must have the layer's window=5, got window=4.*make_cache"),
    "other sinks": (lambda m, q, k, v: m.extend(layer(sinks=4).make_cache(B), q, k, v), "layer's sinks=0, got sinks=4"),
}


def test_where_A_begins():
    module, (q, k, v, _) = DynamicMaskAttention(HKV, D, 5, A_init=0.5), draw(torch.float32, requires_grad=False)
    assert module.A.tolist() == [0.5] * HKV and "A_init=0.5" in repr(module)
    torch.nn.init.zeros_(module.A)
    module.reset_parameters()
    assert module.A.tolist() == [0.5] * HKV
    module(q, k, v).square().sum().backward()
    assert module.dt_proj.weight.grad.any()  # from the first step on
    outer = dma.torch.DynamicMaskSelfAttention(16, 2, window=4, A_init=-1.0)
    assert outer.attention.A.tolist() == [-1, -1]
    with pytest.raises(TypeError, match="A_init must be"):
        DynamicMaskAttention(HKV, D, 5, A_init="one")


def test_a_frozen_A_of_zero_is_noticed(recwarn):
    """Once, and only where dt_proj would be trained by nothing."""
    q, k, v, _ = draw(torch.float32, requires_grad=False)
    module = DynamicMaskAttention(HKV, D, 5)
    module(q, k, v)
    module.A.requires_grad_(False)
    with torch.no_grad():
        module(q, k, v)
    DynamicMaskAttention(HKV, D, 5).requires_grad_(False)(q, k, v)
    other = DynamicMaskAttention(HKV, D, 5, A_init=1.0)
    other.A.requires_grad_(False)
    other(q, k, v)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="A is 0 and does not require grad, so dt_proj gets no gradient"):
        module(q, k, v).sum().backward()
    assert not module.dt_proj.weight.grad.any()  # what the warning says
    module(q, k, v)
    assert not recwarn.list
    frozen = DynamicMaskAttention(HKV, D, 5)
    frozen.A.requires_grad_(False)
    torch.compile(frozen, fullgraph=True, backend="eager")(q, k, v)
    assert not recwarn.list


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_in_the_users_terms(name):
    call, message = WRONG[name]
    with torch.no_grad(), pytest.raises((TypeError, ValueError), match=message):
        call(layer(), *draw(torch.float32, requires_grad=False)[:3])


def test_a_cache_has_no_gradient():
    module, (q, k, v, _) = layer(), draw(torch.float32, requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"parameters or inputs require grad.*torch\.no_grad"):
        module.extend(module.make_cache(B), q, k, v)
    module.requires_grad_(False).extend(module.make_cache(B), q, k, v)


@pytest.mark.parametrize(("options", "message"), [
    ({"keys": "global", "sinks": 1}, "sinks and recent need keys='prefix', got sinks=1"), ({"sinks": -1}, "sinks"),
    ({"recent": 1.5}, "recent"), ({"head_dim": 257}, "head_dim must be 1 to 256, got 257"),
    ({"softcap": -1}, "softcap"),
    ({"keys": "all"}, "keys must be"), ({"causal": False}, "causal=False needs keys='global'"),
    ({"scale": "x"}, "scale"),
])
def test_options_are_checked_when_the_layer_is_made(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DynamicMaskAttention(**{"kv_heads": 2, "head_dim": 6, "window": 5, **options})
    with pytest.raises(ValueError, match="keys='global' cannot decode"):
        layer(keys="global").make_cache(1)


def test_layers_without_a_group_do_not_import_the_compiler():
    """torch._dynamo takes seconds to import."""
    import subprocess
    import sys

    code = ("import sys; from cupy_dma.torch import DynamicMaskSelfAttention; DynamicMaskSelfAttention(16, 2); "
            "print('torch._dynamo' in sys.modules, 'cupy_dma.distributed.attention' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
