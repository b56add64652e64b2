"""Small inputs shared by the torch tests."""
import torch

N, B, H, HKV, D = 18, 2, 4, 2, 6
float64 = torch.float64


def draw(dtype=float64, requires_grad=True, n=N):
    """query, key, value, scores."""
    shapes = (B, n, H, D), (B, n, HKV, D), (B, n, HKV, D), (B, HKV, n)
    return [torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes]


def recipe(dtype=float64):
    shapes = {"dt_proj": (HKV, HKV * D), "A": (HKV,), "dt_bias": (HKV,)}
    return {name: (torch.randn(shape, dtype=dtype) / 3).requires_grad_() for name, shape in shapes.items()}


def gradients(out, arguments, dout=None):
    """Gradients of ``(out * dout).sum()``, or of a weighted sum of all outputs."""
    outs = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(1)
    weights = [dout] if dout is not None else [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outs]
    return torch.autograd.grad(outs, arguments, weights, allow_unused=True)


def same(a, b):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b))
