"""Checks ``DynamicMaskAttention`` against the oracle, on any backend and device."""
from typing import Any

import numpy as np
import torch

from cupy_dma.arrays import numpy_dtype
from cupy_dma.masks.windows import each_head
from cupy_dma.torch import DynamicMaskAttention
from tests.oracle import reference


def numbers(x: torch.Tensor) -> np.ndarray:
    """A tensor as a NumPy array of its type."""
    return x.detach().double().cpu().numpy().astype(numpy_dtype(str(x.dtype).removeprefix("torch.")))


def kept(scores: np.ndarray, layer: DynamicMaskAttention, real: np.ndarray, document: np.ndarray) -> np.ndarray:
    """bool ``(B, Hkv, N, N)`` by the definition: which keys each position sees. ``real (B, N)``: not padding;
    ``document (B, N)``: the number of each key's document."""
    found = np.zeros((*scores.shape, scores.shape[-1]), bool)
    for b, g, p in np.ndindex(scores.shape):
        own = [j for j in range(scores.shape[-1]) if real[b, j] and document[b, j] == document[b, p]]
        past = [j for j in own if j <= p]
        best = sorted(past, key=lambda j: (scores[b, g, j], j))[-each_head(layer.window, scores.shape[1])[g]:]
        last = past[len(past) - min(layer.recent, len(past)):]
        found[b, g, p, [*best, *(j for j in own[:layer.sinks] if j <= p), *last]] = True
    return found


def problem(layer: DynamicMaskAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: Any = None,
            document: Any = None, x: Any = None) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The oracle's arguments: query, key and value, and options with the mask and the scores. ``x``: the input from
    which ``scores="input"`` computes scores."""
    project = layer.dt_proj if x is None else layer.score_proj
    bias = None if project.bias is None else numbers(project.bias)
    if x is None:
        scores = reference.key_scores(numbers(v), numbers(project.weight), numbers(layer.A), bias, layer.form)
    else:
        scores = np.einsum("bnc,hc->bhn", *(numbers(y).astype(float) for y in (x, project.weight)))
        scores += 0 if bias is None else bias.astype(float)[:, None]
    every = np.ones(v.shape[:2], bool) if real is None else np.broadcast_to(np.asarray(real), v.shape[:2])
    scores = scores + np.multiply.outer(np.broadcast_to(layer.slope, v.shape[2]), every.cumsum(1) - 1).swapaxes(0, 1)
    number = np.zeros(v.shape[:2], int) if document is None else np.broadcast_to(np.asarray(document), v.shape[:2])
    return [numbers(x) for x in (q, k, v)], {"dense_mask": kept(scores, layer, every, number), "bias": scores,
                                             "scale": layer.scale, "softcap": layer.softcap,
                                             "bias_delay": layer.bias_delay}


def check(out: torch.Tensor, given: tuple[list[np.ndarray], dict[str, Any]]) -> None:
    """Check section 12 for the output of a ``problem``."""
    reference.check_attention(numbers(out), *given[0], **given[1])


def check_gradients(dout: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor,
                    given: tuple[list[np.ndarray], dict[str, Any]]) -> None:
    """Check section 12 for the gradients of query and key."""
    reference.check_attention_gradients(map(numbers, (dq, dk)), numbers(dout), *given[0], **given[1])


N = 200  # longer than a tile's list of keys, so that each tile has its own list
REAL = (torch.arange(N) >= torch.tensor([[9], [0]])) & (torch.arange(N) != 40)
DOCUMENT = (torch.arange(N) >= 41).long() + (torch.arange(N) >= 42).long()
BESIDES = (0, 0), (2, 3), (20, 30)  # sinks and recent
INPUTS: dict[str, dict[str, torch.Tensor]] = {  # ways to pass a batch of two sequences
    "plain": {}, "padding": {"padding": REAL}, "documents": {"documents": DOCUMENT.expand(2, N)},
    "both": {"padding": REAL, "documents": DOCUMENT.expand(2, N)},
    "packed": {"cu_seqlens": torch.tensor([0, 41, 42, N])}}


def check_layer(layer: DynamicMaskAttention, how: str, device: Any = "cpu") -> None:
    """Check forward, gradients of query and key, and for ``"plain"`` decoding, of a bfloat16 layer with random
    scores."""
    torch.nn.init.normal_(layer.A)
    heads, size = 2 * layer.kv_heads, layer.head_dim
    q, k, v = (torch.randn(2, N, h, size, dtype=torch.bfloat16, device=device).requires_grad_()
               for h in (heads, layer.kv_heads, layer.kv_heads))
    given = {name: x.to(device) for name, x in INPUTS[how].items()}
    packed = how == "packed"
    out = layer(*(x[0] if packed else x for x in (q, k, v)), **given)
    out = torch.stack((out, torch.zeros_like(out))) if packed else out
    dout = torch.randn_like(out) * torch.tensor([1.0, not packed], device=device, dtype=out.dtype)[:, None, None, None]
    dq, dk = torch.autograd.grad(out, (q, k), dout)
    rows = slice(0, 1) if packed else slice(None)
    wanted = problem(layer, q[rows], k[rows], v[rows], INPUTS[how].get("padding"),
                     DOCUMENT[None] if how in ("documents", "both", "packed") else None)
    check(out[rows], wanted)
    check_gradients(dout[rows], dq[rows], dk[rows], wanted)
    if how == "plain":
        with torch.no_grad():
            cache = layer.make_cache(2)
            parts = [layer.extend(cache, *part) for part in zip(*(x.split([N - 19, 1, 1, 17], 1) for x in (q, k, v)))]
        check(torch.cat(parts, 1), wanted)
