"""``dt_proj`` is an ordinary submodule: the layers respect wrappers, replacements and hooks."""
import copy
import functools

import pytest
import torch
from torch import nn

import cupy_dma as dma
from cupy_dma.torch import DynamicMaskAttention, DynamicMaskSelfAttention
from cupy_dma.torch.scores import is_linear
from tests.oracle.torch_inputs import HKV, B, D, N, draw, float64, gradients, same

pytestmark = pytest.mark.usefixtures("same_numbers")
OPTIONS = {"plain": {}, "linear": {"form": "linear", "softcap": 2.0}, "sinks": {"sinks": 1, "recent": 2},
           "dt_bias": {"dt_bias": True}, "global": {"keys": "global"}}
GIVEN = {"whole": {}, "padding": {"padding": (torch.arange(N) >= torch.tensor([[4], [0]])).long()},
         "documents": {"documents": torch.tensor([0, 7, N])},
         "packed": {"cu_seqlens": torch.tensor([0, 7, N], dtype=torch.int32)}}


class LoRA(nn.Module):
    """Not an ``nn.Linear``, as adapters are."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down, self.up = (nn.Parameter(torch.randn(shape, dtype=base.weight.dtype)) for shape in (
            (rank, base.in_features), (base.out_features, rank)))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T

    def merged(self):
        merged = copy.deepcopy(self.base)
        merged.weight = nn.Parameter(self.base.weight.detach() + self.up.detach() @ self.down.detach())
        return merged


def layer(dtype=float64, **options):
    return DynamicMaskAttention(HKV, D, 5, A_init=0.7, dtype=dtype, **options)


def inputs(given, dtype=float64):
    q, k, v, _ = draw(dtype)
    return [x[0].detach().requires_grad_() for x in (q, k, v)] if "cu_seqlens" in given else [q, k, v]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("options", OPTIONS)
def test_an_adapter_equals_the_merged_weight(options, given):
    """Values and gradients, also of the adapter; in float64, a score of lower precision would show."""
    given = GIVEN[given]
    adapted, leaves = layer(**OPTIONS[options]), inputs(given)
    adapted.dt_proj = LoRA(adapted.dt_proj)
    merged = copy.deepcopy(adapted)
    merged.dt_proj = adapted.dt_proj.merged()
    assert not is_linear(adapted.dt_proj) and is_linear(merged.dt_proj)
    found, wanted = (module(*leaves, return_lse=True, **given) for module in (adapted, merged))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    a, b = (gradients(out, (*leaves, module.A)) for out, module in ((found, adapted), (wanted, merged)))
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    (dweight,) = gradients(merged(*leaves, return_lse=True, **given), [merged.dt_proj.weight])
    adapter = gradients(adapted(*leaves, return_lse=True, **given), (
        adapted.dt_proj.base.weight, adapted.dt_proj.up, adapted.dt_proj.down))
    up, down = adapted.dt_proj.up, adapted.dt_proj.down
    torch.testing.assert_close(adapter, (dweight, dweight @ down.T, up.T @ dweight), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("pieces", [(N,), (7, *[1] * (N - 7))], ids=len)
@torch.no_grad()
def test_an_adapter_decodes(pieces):
    module, (q, k, v, _) = layer(), draw()
    module.dt_proj = LoRA(module.dt_proj)
    cache = module.make_cache(B)
    parts = [module.extend(cache, *part) for part in zip(*(x.split(pieces, 1) for x in (q, k, v)))]
    torch.testing.assert_close(torch.cat(parts, 1), module(q, k, v), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook",
                                 "instance forward", "global hook"])
def test_hooks_run(how, request):
    module, (q, k, v, _), seen = layer(), draw(), []
    plain, projection = module(q, k, v), module.dt_proj
    if how == "instance forward":  # as accelerate does
        projection.forward = functools.partial(lambda forward, x: seen.append(1) or forward(x), projection.forward)
    elif how == "global hook":
        hook = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(1) if m is projection else None)
        request.addfinalizer(hook.remove)
    else:
        getattr(projection, f"register_{how}")(lambda *_: seen.append(1))
    out = module(q, k, v)
    torch.testing.assert_close(out, plain, rtol=1e-9, atol=1e-9)
    out.sum().backward()
    assert seen == [1]


def test_hooks_that_change_something():
    """Hooks that compute the weight before each call, as old weight norm and pruning do, or change the output."""
    module, (q, k, v, _) = layer(), draw()
    from torch.nn.utils import prune

    prune.random_unstructured(module.dt_proj, "weight", 0.5)
    module.dt_proj.weight_orig.data.mul_(2)  # weight itself is still the old value
    module.dt_proj.register_forward_hook(lambda m, args, out: 3 * out)
    wanted = layer()
    wanted.dt_proj.weight = nn.Parameter(3 * module.dt_proj.weight_orig.detach() * module.dt_proj.weight_mask)
    torch.testing.assert_close(module(q, k, v), wanted(q, k, v), rtol=1e-9, atol=1e-9)


def test_hooks_of_the_layer_see_decoding():
    module, (q, k, v, _), seen = layer(), draw(), []
    module.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        module.extend(module.make_cache(B), q, k, v)
    assert seen == [1]


def test_parametrized_weights_are_read():
    module, (q, k, v, _) = layer(), draw()
    nn.utils.parametrizations.weight_norm(module.dt_proj)
    assert is_linear(module.dt_proj)
    out = module(q, k, v)
    module.dt_proj.register_forward_hook(lambda *_: None)
    assert not is_linear(module.dt_proj)
    torch.testing.assert_close(module(q, k, v), out, rtol=1e-9, atol=1e-9)


def test_wrapped_weights_are_not_read():
    """Quantized weights are wrapped tensors with their own linear layer."""
    from torch.testing._internal.two_tensor import TwoTensor

    linear = nn.Linear(4, 2)
    assert is_linear(linear)
    linear.weight = nn.Parameter(TwoTensor(linear.weight.detach(), linear.weight.detach()))
    assert not is_linear(linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_types(dtype, autocast):
    """The module gets its own type; scores are float32."""
    module, (q, k, v, _) = layer(torch.float32), draw(dtype, requires_grad=False)
    module.dt_proj = LoRA(module.dt_proj)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, scores = module(q, k, v), module.scores(v)
    assert out.dtype == (torch.bfloat16 if autocast else dtype) and scores.dtype == torch.float32
    weight = module.dt_proj.merged().weight
    torch.testing.assert_close(scores, dma.key_scores(v, weight, module.A), rtol=0.05 if autocast else 1e-4, atol=1e-3)


def test_padding_may_hold_anything():
    module, (q, k, v, _) = layer(), draw()
    module.dt_proj = LoRA(module.dt_proj)
    real = torch.arange(N) >= torch.tensor([[4], [0]])
    spoiled = torch.where(real[..., None, None], v.detach(), torch.nan)
    for given in (real, real.int()):
        for besides in (0, 1):
            module.sinks = besides
            out, wanted = module(q, k, spoiled, padding=given), module(q, k, v, padding=real)
            rows = real[..., None, None].expand_as(out)
            assert torch.equal(out[rows], wanted[rows])
            found = gradients(out.where(rows, 0), tuple(module.parameters()))
            assert all(x.isfinite().all() for x in found)
    with pytest.raises(ValueError, match="padding must have shape"):
        module(q, k, v, padding=real[:, 1:])


def test_dropout_of_an_adapter_is_the_same_when_it_is_recomputed():
    module, x = DynamicMaskSelfAttention(24, 4, 2, window=5, A_init=1.0, dtype=float64), torch.randn(B, N, 24).double()
    for owner, name in ((module, "q_proj"), (module.attention, "dt_proj")):
        setattr(owner, name, nn.Sequential(nn.Dropout(0.5), getattr(owner, name)))
    found = []
    for module.checkpoint in (False, True):
        torch.manual_seed(1)
        found.append(gradients(module(x), tuple(module.parameters())))
    assert same(*found)


@pytest.mark.parametrize("strict", [False, True])
def test_compile_and_export(strict):
    module, (q, k, v, _) = layer(), draw()
    module.dt_proj = LoRA(module.dt_proj)
    leaves = q, k, v, *module.parameters()
    out = module(q, k, v)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(compiled, out) and same(gradients(out, leaves), gradients(compiled, leaves))
    exported = torch.export.export(module, (q, k, v), strict=strict).module()
    assert torch.equal(exported(q, k, v), out)


def test_a_plain_linear_is_one_operator_in_an_export():
    module, (q, k, v, _) = layer(), draw()
    for strict in (False, True):
        graph = torch.export.export(module, (q, k, v), strict=strict).graph
        assert "cupy_dma.dynamic_attention.default" in [str(node.target) for node in graph.nodes]


@pytest.mark.parametrize(("forward", "error", "message"), [
    (lambda x: x, ValueError, r"dt_proj must return a tensor of shape .* = \(2, 18, 2\), got \(2, 18, 12\)"),
    (lambda x: None, TypeError, "dt_proj must return a float tensor, got NoneType from Linear"),
    (lambda x: x[..., :2].int(), TypeError, r"dt_proj must return a float tensor, got torch\.int32"),
])
def test_errors(forward, error, message):
    module, (q, k, v, _) = layer(), draw()
    module.dt_proj.forward = forward
    with pytest.raises(error, match=message):
        module(q, k, v)


def test_a_frozen_A_of_zero_is_noticed_with_an_adapter():
    module, (q, k, v, _) = DynamicMaskAttention(HKV, D, 5), draw(torch.float32)
    module.requires_grad_(False)
    module.dt_proj = LoRA(module.dt_proj)
    with pytest.warns(UserWarning, match="A is 0 and does not require grad, so dt_proj gets no gradient"):
        module(q, k, v)


# ---- other libraries ----
@pytest.mark.filterwarnings("ignore")  # deprecations of torch.ao
@torch.no_grad()
def test_dynamic_quantization():
    module, x = DynamicMaskSelfAttention(24, 4, 2, window=5, A_init=1.0), torch.randn(B, N, 24)
    quantized = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    out = quantized(x)
    assert (out - module(x)).abs().max() < 0.5 and not torch.equal(out, module(x))
    cache = quantized.make_cache(B)
    torch.testing.assert_close(quantized(x, cache=cache), out, rtol=0, atol=0.1)  # by a call's largest element
    assert cache.length.tolist() == [N] * B


@torch.no_grad()
def test_offloading():
    accelerate = pytest.importorskip("accelerate")
    module, x = DynamicMaskSelfAttention(24, 4, 2, window=5, A_init=1.0, sinks=1), torch.randn(B, N, 24)
    right = module(x)
    accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert module.attention.A.is_meta and module.attention.dt_proj.weight.is_meta
    torch.testing.assert_close(module(x), right, rtol=0, atol=1e-5)
    cache = module.make_cache(B, device="cpu")
    torch.testing.assert_close(torch.cat([module(y, cache=cache) for y in x.split(7, 1)], 1), right, rtol=0, atol=1e-5)
