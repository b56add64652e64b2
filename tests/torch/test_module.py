"""``DynamicMaskAttention`` on CPU tensors: kept keys, decoding with the layer's options, errors."""
import copy
import re

import numpy as np
import pytest
import torch

import cupy_dma as dma
from cupy_dma.torch import DynamicMaskAttention
from tests.oracle import layer_cases
from tests.oracle.layer_cases import check, problem
from tests.oracle.torch_inputs import HKV, B, D, H, N, draw, float64, gradients, same

pytestmark = pytest.mark.usefixtures("same_numbers")
OPTIONS = {"plain": {}, "linear": {"form": "linear"}, "dt_bias": {"dt_bias": True}, "scale": {"scale": 0.7},
           "softcap": {"softcap": 1.5}, "sinks": {"sinks": 2}, "recent": {"recent": 3},
           "slope": {"slope": (0.3, -0.1)}, "slope, kept": {"slope": 0.2, "sinks": 1, "recent": 2, "bias_delay": 2**30},
           "delay": {"bias_delay": 4}, "delay, kept": {"bias_delay": 4, "sinks": 2, "recent": 3},
           "windows": {"window": (3, 7)}, "windows, kept": {"window": (3, 8), "sinks": 1, "recent": 2},
           "all": {"sinks": 1, "recent": 2, "softcap": 2.0, "scale": 0.5, "form": "linear", "dt_bias": True}}


WIDTH = 7  # of the inputs that scores may come from
BY_INPUT = {f"input, {name}": {"scores": "input", "width": WIDTH, **options} for name, options in {
    "plain": {}, "dt_bias": {"dt_bias": True, "bias_delay": 3}, "kept": {"sinks": 1, "recent": 2},
    "slope": {"slope": (0.3, -0.1)}, "heads": {"window": (4, 9)}}.items()}
EITHER = OPTIONS | BY_INPUT


def layer(window=5, dtype=torch.float32, **options):
    made = DynamicMaskAttention(HKV, D, window, dtype=dtype, **options)
    for parameter in [made.A] if made.width is None else made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def input_of(module, dtype=torch.float32):
    """What a call takes besides query, key and value."""
    return {} if module.width is None else {"x": torch.randn(B, N, WIDTH, dtype=dtype)}


@pytest.mark.parametrize("options", EITHER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, float64])
def test_forward_is_the_definition(options, dtype):
    module, (q, k, v, _) = layer(dtype=dtype, **EITHER[options]), draw(dtype, requires_grad=False)
    more = input_of(module, dtype)
    check(module(q, k, v, **more), problem(module, q, k, v, **more))


def real_tokens(kind):
    real = torch.rand(B, N) < 0.6
    if kind != "holes":
        real = torch.arange(N)[None] < torch.tensor([[11], [N]])
    return real.flip(1) if kind == "left" else real


@pytest.mark.parametrize("options", ["plain", "sinks", "recent", "slope", "slope, kept", "all"])
@pytest.mark.parametrize("padded", [0, 1, B])
def test_every_document_keeps_its_own(options, padded):
    module, (q, k, v, _) = layer(3, **OPTIONS[options]), draw(torch.float32, requires_grad=False)
    ids = (torch.arange(N)[None] * torch.tensor([[1], [2]]) // 7).expand(B, N)
    real = real_tokens("holes")[:padded] if padded else None
    given = {"padding": real} if padded else {}
    check(module(q, k, v, documents=ids, **given), problem(module, q, k, v, real, ids))
    bounds, number = torch.tensor([0, 7, 7, N]), np.arange(N)[None] >= 7
    check(module(q, k, v, documents=bounds, **given), problem(module, q, k, v, real, number))


@pytest.mark.feature("numpy forward backward", "torch", "DynamicMaskAttention:")
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


@pytest.mark.feature("numpy backward", "torch", "DynamicMaskAttention, scores of")
@pytest.mark.parametrize("options", ["recent", "slope", "all", *BY_INPUT])
def test_gradients_with_padding(options):
    module, (q, k, v, _) = layer(dtype=float64, **EITHER[options]), draw()
    real, more = real_tokens("left"), [x.requires_grad_() for x in input_of(module, float64).values()]

    def call(q, k, v, *others):
        return module(q, k, v, **dict(zip(["x"][:len(more)], others)), padding=real)

    assert torch.autograd.gradcheck(call, (q, k, v, *more, *module.parameters()), fast_mode=True)


@pytest.mark.feature("numpy forward", "torch", "DynamicMaskAttention.extend", "DynamicMaskAttention, scores of")
@pytest.mark.parametrize("options", EITHER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, float64])
@pytest.mark.parametrize("pieces", [(N,), (7, 0, 11), (1,) * N])
@torch.no_grad()
def test_extend_is_forward(options, dtype, pieces):
    module, (q, k, v, _) = layer(dtype=dtype, **EITHER[options]), draw(dtype, requires_grad=False)
    cache, outs, more = module.make_cache(B), [], input_of(module, dtype)
    for a, b in zip(np.cumsum((0, *pieces)), np.cumsum(pieces)):
        outs.append(module.extend(cache, *(x[:, a:b] for x in (q, k, v)),
                                  **{name: x[:, a:b] for name, x in more.items()}))
    check(torch.cat(outs, 1), problem(module, q, k, v, **more))
    assert cache.memory_bytes == module.make_cache(B).memory_bytes


@torch.no_grad()
@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_a_cache_of_8_bits(storage):
    module, (q, k, v, _) = layer(dtype=torch.bfloat16), draw(torch.bfloat16, requires_grad=False)
    cache, exact = module.make_cache(B, storage=storage), module.make_cache(B)
    found, expected = (module.extend(x, q, k, v).float() for x in (cache, exact))
    assert cache.storage == storage and cache.memory_bytes < exact.memory_bytes
    assert 0 < (found - expected).norm() < (0.03 if storage == "int8" else 0.1) * expected.norm()


@torch.no_grad()
def test_extend_writes_to_out():
    module, (q, k, v, _) = layer(sinks=1), draw(torch.float32, requires_grad=False)
    given = torch.empty_like(q), torch.empty(B, H, N)
    out, lse = module.extend(module.make_cache(B), q, k, v, out=given, return_lse=True)
    assert out is given[0] and lse is given[1]
    torch.testing.assert_close(given, module(q, k, v, return_lse=True), rtol=0, atol=1e-6)


def test_scores_are_the_layers():
    module, (_, _, v, _) = layer(form="linear", dt_bias=True), draw(torch.float32)
    wanted = dma.key_scores(v, module.dt_proj.weight, module.A, dt_bias=module.dt_proj.bias, form="linear")
    assert torch.equal(module.scores(v), wanted) and torch.equal(module.scores(v[1]), wanted[1])
    assert all(x is not None for x in gradients(module.scores(v), (v, *module.parameters())))


def test_a_slope_is_added_by_position():
    """In the type of the scores, for whole sequences. A steep slope turns any scores into a window, and a slope of 0
    changes no bit."""
    module, (q, k, v, _) = layer(form="linear", slope=[0.25, -2]), draw(torch.float32, requires_grad=False)
    plain = layer(form="linear")
    plain.load_state_dict(module.state_dict())
    assert module.slope == (0.25, -2.0) and "slope=(0.25, -2.0)" in repr(module)
    wanted = plain.scores(v) + torch.arange(N) * torch.tensor([0.25, -2.0])[:, None]
    assert torch.equal(module.scores(v), wanted) and torch.equal(module.scores(v[1]), wanted[1])
    before = plain(q, k, v)
    plain.slope = (0, 0)
    torch.testing.assert_close(plain(q, k, v), before, rtol=0, atol=2e-6)
    plain.slope, plain.bias_delay = 1e4, 2**30
    torch.testing.assert_close(plain(q, k, v), dma.attention(
        q, k, v, mask=dma.IntervalMask.sliding_window(N, 5).to(q)), rtol=0, atol=2e-6)
    assert not torch.allclose(module(q, k, v), before, atol=1e-2)
    bounds = torch.tensor([0, 7, 8, N])
    packed = module(q[0], k[0], v[0], cu_seqlens=bounds, return_lse=True)
    ids = torch.bucketize(torch.arange(N), bounds[1:], right=True).expand(B, N)
    for documents in (bounds, ids):  # positions are those in each document
        for found, wanted in zip(module(q, k, v, documents=documents, return_lse=True), packed):
            torch.testing.assert_close(found[0], wanted, rtol=0, atol=2e-6)
    for wrong in ({"padding": torch.ones(B, N + 1)}, {"documents": ids[:, 1:]}, {"documents": ids[None]}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            module(q, k, v, **wrong)


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


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_documents_compile_in_one_graph(slope):
    module, (q, k, v, _) = layer(sinks=2, recent=3, slope=slope), draw(torch.float32)
    given = {"padding": torch.arange(N)[None] > 2, "documents": torch.tensor([0, 7, N])}
    compiled, leaves = torch.compile(module, fullgraph=True, backend="aot_eager"), (q, k, v, *module.parameters())
    assert same(gradients(module(q, k, v, **given), leaves), gradients(compiled(q, k, v, **given), leaves))


# ---- scores of the layer's input ----
def by_input(**options):
    made = layer(scores="input", width=WIDTH, **options)
    return made, input_of(made)["x"]


def test_the_input_s_scores_begin_as_a_window_and_learn_at_once():
    module, (q, k, v, _) = DynamicMaskAttention(HKV, D, 5, scores="input", width=WIDTH), draw(torch.float32)
    x = torch.randn(B, N, WIDTH)
    out = module(q, k, v, x=x)
    mask = dma.IntervalMask.sliding_window(N, 5).to(q)
    torch.testing.assert_close(out, dma.attention(q, k, v, mask=mask), rtol=0, atol=1e-6)
    out.square().sum().backward()
    assert module.score_proj.weight.grad.any() and list(module.state_dict()) == ["score_proj.weight"]
    torch.nn.init.ones_(module.score_proj.weight)
    module.reset_parameters()
    assert not module.score_proj.weight.any() and "width=7" in repr(module)


def test_other_projections_of_the_input():
    """A projection with a hook is called; a plain one is computed in float32, also under autocast, and compiles."""
    (module, x), (q, k, v, _) = by_input(), draw(torch.float32, requires_grad=False)
    out, half = module(q, k, v, x=x), copy.deepcopy(module).bfloat16()
    torch.testing.assert_close(module.scores(x[0]), module.scores(x[:1])[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module.scores(x), module.scores(x.float())) and module.scores(x).dtype == torch.float32
    exact = torch.einsum("bnc,hc->bhn", x.bfloat16().double(), half.score_proj.weight.double())
    torch.testing.assert_close(half.scores(x.bfloat16()).double(), exact, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, x=x), out)
    module.score_proj.register_forward_hook(lambda *given: 2 * given[2])
    torch.testing.assert_close(module.scores(x), 2 * torch.einsum("bnc,hc->bhn", x, module.score_proj.weight))
    module.score_proj = torch.nn.Linear(WIDTH, HKV + 1)
    module.score_proj.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match=r"score_proj must return a tensor of shape \(B, Lk, Hkv\) = \(2, 18, 2\)"):
        module(q, k, v, x=x)


def test_errors_about_the_input():
    (module, x), (q, k, v, _) = by_input(), draw(torch.float32, requires_grad=False)
    for given, error, message in (
            ({}, TypeError, "x must be a floating torch tensor.*got NoneType"),
            ({"x": x.long()}, TypeError, r"got torch\.int64"),
            ({"x": x[:, 1:]}, ValueError, r"x must have shape \(2, 18, 7\), got \(2, 17, 7\).*width=7"),
            ({"x": x[..., 1:]}, ValueError, "x must have shape")):
        with pytest.raises(error, match=message):
            module(q, k, v, **given)
    with pytest.raises(ValueError, match=r"x must have shape \(B, Lk, 7\)"):
        module.scores(v)
    with pytest.raises(ValueError, match="x needs scores='input', got x for a layer with scores='value'"):
        layer()(q, k, v, x=x)
    for options, message in (({"scores": "key"}, "scores must be 'value' or 'input'"),
                             ({"scores": "input"}, "width must be given with scores='input' and only then"),
                             ({"width": 3}, "width must be given with"),
                             ({"scores": "input", "width": 0}, "width must be at least 1"),
                             ({"scores": "input", "width": 3, "form": "exp"}, "form needs scores='value', got form="),
                             ({"scores": "input", "width": 3, "A_init": 1.0}, "A_init needs scores='value'")):
        with pytest.raises(ValueError, match=message):
            DynamicMaskAttention(HKV, D, 5, **options)
    with pytest.raises(ValueError, match="form needs"):
        module.form = "exp"
    with pytest.raises(AttributeError, match="width cannot be changed"):
        module.width = 8


WRONG = {
    "kv heads": (lambda m, q, k, v: m(q, k[:, :, :1], v[:, :, :1]),
                 r"key must have shape \(B, Lk, 2, 6\), got \(2, 18, 1, 6\): the layer was made with kv_heads=2, head"),
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
    """Warns once, and only if dt_proj would get no gradient."""
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
    assert not module.dt_proj.weight.grad.any()  # as the warning says
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


@pytest.mark.parametrize(("options", "message"), [
    ({"keys": "global", "sinks": 1}, "sinks and recent need keys='prefix', got sinks=1"), ({"kv_heads": 0}, "kv_heads"),
    ({"head_dim": 257}, "head_dim must be 1 to 256, got 257"),
    ({"keys": "all"}, "keys must be"), ({"causal": False}, "causal=False needs keys='global'"),
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
