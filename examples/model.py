"""A small causal byte-level language model, and the full KV cache that it would need without ``DynamicCache``.

Embedded bytes and positions, then layers of dynamic mask attention and an MLP,

    x += out(attention(q, k, v; scores)),  x += mlp(x)      with  q, k, v = project(norm(x))

and a head for the logits of the next byte. It is untrained.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import cupy_dma as dma
from cupy_dma.torch import DynamicMaskAttention

BYTES = 256
ATTENTION = 1.5  # scale of the parameters: makes attention sharp and its contribution large
WAVES = 32  # sines and cosines that encode a position


class Layer(nn.Module):
    """Attention with GQA, and an MLP. ``extend`` is ``forward`` for the next tokens."""

    def __init__(self, width: int, heads: int, kv_heads: int, window: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.attend = DynamicMaskAttention(kv_heads, self.size, window, form="linear")
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))
        nn.init.normal_(self.project.weight, std=ATTENTION * width**-0.5)
        nn.init.normal_(self.out.weight, std=ATTENTION * width**-0.5)
        nn.init.ones_(self.attend.A)  # at 0 all scores would tie, and the mask would be a sliding window

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query ``(B, L, H, D)``, key and value ``(B, L, Hkv, D)`` of ``x (B, L, width)``."""
        projected = self.project(self.norm(x)).unflatten(2, (-1, self.size))
        return projected.split((self.heads, self.kv_heads, self.kv_heads), dim=2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(x, self.attend(*self.inputs(x)))

    def extend(self, x: Tensor, past: Any) -> Tensor:
        q, k, v = self.inputs(x)
        return self.finish(x, past.extend(q, k, v, self.attend.scores(v)))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, window: int):
        super().__init__()
        self.embed, self.place = nn.Embedding(BYTES, width), nn.Linear(2 * WAVES, width, bias=False)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, window) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False))
        nn.init.normal_(self.head[1].weight, std=2 * width**-0.5)
        self.window = window

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(L, BYTES)`` after each of ``tokens (L,)``."""
        x = self.embedded(tokens, torch.arange(len(tokens), device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[0].float()

    def extend(self, tokens: Tensor, positions: Tensor, pasts: list[Any]) -> Tensor:
        """The same for the next tokens, with one cache per layer."""
        x = self.embedded(tokens, positions)
        for layer, past in zip(self.layers, pasts):
            x = layer.extend(x, past)
        return self.head(x)[0].float()

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """``(1, L, width)``. Positions tell equal tokens apart; otherwise their scores would tie."""
        angle = positions[:, None] * 10000.0 ** (-torch.arange(WAVES, device=tokens.device).double() / WAVES)
        waves = torch.cat((angle.cos(), angle.sin()), dim=1).to(self.place.weight.dtype)
        return (self.embed(tokens) + self.place(waves))[None]

    def caches(self) -> list[dma.DynamicCache]:
        return [layer.attend.make_cache(1) for layer in self.layers]


class FullCache:
    """All keys and values of a layer; every query selects from all of them from scratch."""

    def __init__(self, layer: Layer, capacity: int):
        like, self.layer, self.length = layer.out.weight, layer, 0
        self.key, self.value = torch.empty((2, 1, capacity, layer.kv_heads, layer.size), dtype=like.dtype,
                                           device=like.device)

    def extend(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> Tensor:
        new, self.length = slice(self.length, self.length + key.shape[1]), self.length + key.shape[1]
        self.key[:, new], self.value[:, new] = key, value
        return self.layer.attend(query, self.key[:, :self.length], self.value[:, :self.length])
