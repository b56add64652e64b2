"""The use cases in the original's API reference, with only the package name in the imports changed.

Each test is one of its examples, rewritten, on a GPU if there is one.
"""
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
F, nn = torch.nn.functional, torch.nn

from cupy_dma.flash_dmattn import (  # noqa: E402  - was: from flash_dmattn import
    CUDA_AVAILABLE,
    flash_dmattn_func_auto,
)
from cupy_dma.flash_dmattn.integrations.flash_dynamic_mask_attention import (  # noqa: E402
    flash_dynamic_mask_attention_forward,
)

DEVICE = "cuda" if torch.cuda.is_available() and CUDA_AVAILABLE else "cpu"
BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 128, 8, 4, 64


@pytest.fixture
def tensors():
    torch.manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)

    q, k, v = normal(BATCH, LENGTH, HEADS, HEAD_DIM), *normal(2, BATCH, LENGTH, KV_HEADS, HEAD_DIM)
    mask = torch.rand(BATCH, KV_HEADS, LENGTH, LENGTH, device=DEVICE) < 0.5
    return q, k, v, mask, normal(BATCH, KV_HEADS, LENGTH, LENGTH)


def eager(q, k, v, mask=None, bias=None, is_causal=False, scale=None):
    """The textbook formula in float32; every query must have a visible key."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias.float().repeat_interleave(s.shape[1] // bias.shape[1], 1)
    if mask is not None:
        s = s.masked_fill(~mask.repeat_interleave(s.shape[1] // mask.shape[1], 1), -torch.inf)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    return torch.nan_to_num(s.softmax(-1)) @ v


def close(out, expected):
    torch.testing.assert_close(out.float().transpose(1, 2), expected, rtol=2e-2, atol=2e-2)


def test_quick_start(tensors):
    q, k, v, mask, bias = tensors
    attention = flash_dmattn_func_auto()
    out = attention(q, k, v, is_causal=True)
    assert out.shape == (BATCH, LENGTH, HEADS, HEAD_DIM)
    close(out, eager(q, k, v, is_causal=True))
    out = attention(q, k, v, attn_mask=mask, attn_bias=bias, is_causal=True, scale=None)
    close(out, eager(q, k, v, mask, bias, True))
    forced = flash_dmattn_func_auto(backend="cuda" if DEVICE == "cuda" else "numpy")
    assert torch.equal(forced(q, k, v, attn_mask=mask, attn_bias=bias, is_causal=True), out)


class Attention(nn.Module):
    """A layer of a model that learns its mask, as in the original's integration example."""

    def __init__(self, size, style):
        super().__init__()
        self.is_causal, self.window_size, self.scaling, self.style = True, 24, HEAD_DIM**-0.5, style
        self.q_proj = nn.Linear(size, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(size, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(size, KV_HEADS * HEAD_DIM, bias=False)
        self.A = nn.Parameter(torch.linspace(-1, 1, KV_HEADS))
        self.dt_proj = nn.Linear(KV_HEADS * HEAD_DIM, KV_HEADS, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, size, bias=False)

    def forward(self, hidden, attention_mask=None):
        def split(x):
            return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

        q, k, v = split(self.q_proj(hidden)), split(self.k_proj(hidden)), split(self.v_proj(hidden))
        dt = self.dt_proj(v.transpose(1, 2).flatten(2))
        bias = torch.exp(self.A * F.softplus(dt)).transpose(-1, -2).to(hidden.dtype)
        if self.style == "1.0":  # a bias and a mask for every query
            bias = bias[:, :, None].expand(-1, -1, hidden.shape[1], -1)
            if attention_mask is not None:
                attention_mask = attention_mask.expand(-1, KV_HEADS, -1, -1)
        scale = {"scale" if self.style == "1.0" else "softmax_scale": self.scaling}
        out, weights = flash_dynamic_mask_attention_forward(self, q, k, v, attention_mask=attention_mask,
                                                            attention_bias=bias, **scale)
        assert weights is None
        return self.o_proj(out.flatten(2)), (q, k, v, bias)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("style", ["1.0", "1.2"])
def test_a_layer_for_transformers(style, with_mask):
    torch.manual_seed(0)
    layer = Attention(48, style).to(DEVICE)
    hidden = torch.randn(BATCH, LENGTH, 48, device=DEVICE)
    lower = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril()
    with torch.autocast(DEVICE, torch.bfloat16):
        out, (q, k, v, bias) = layer(hidden, lower[None, None].expand(BATCH, 1, -1, -1) if with_mask else None)
    out.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    bias = (bias if bias.dim() == 4 else bias[:, :, None]).float().expand(-1, -1, LENGTH, -1)
    ranked = bias.masked_fill(~lower, -torch.inf)
    newest = ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :24]  # first among equals
    kept = torch.zeros_like(lower.expand(bias.shape)).scatter(-1, LENGTH - 1 - newest, True) & lower
    expected = eager(*(x.transpose(1, 2).bfloat16() for x in (q, k, v)), kept, bias, True)
    expected = layer.o_proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)


def test_the_documentation_runs():
    page = (Path(__file__).resolve().parents[2] / "docs" / "coming_from_flash_dmattn.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    torch.testing.assert_close(names["out"], names["same"])


@pytest.mark.gpu
def test_memory():
    """The peak of a call under an interval mask grows with the length, not with its square."""
    if not CUDA_AVAILABLE:
        pytest.skip("needs the cuda backend")
    import cupy_dma as dma

    def peak(length):
        q = torch.randn(1, length, 2, 64, dtype=torch.bfloat16, device="cuda")
        scores = torch.randn(1, 2, length, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_dmattn_func_auto()(q, q, q, attn_mask=dma.IntervalMask.top_w(scores, 256), attn_bias=scores)
        return torch.cuda.max_memory_allocated() - before

    assert peak(32768) < 6 * peak(8192)
