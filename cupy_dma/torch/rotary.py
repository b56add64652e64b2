"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in Llama's arrangement.

The pair ``(x[d], x[d + D/2])`` of a query or key at position ``p`` is rotated by ``p * base**(-2 d / D)``, so a product
of query and key depends only on the distance between their positions.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cupy_dma.torch.registration import wide


class Rotation(NamedTuple):
    """Cosine and sine of the angles, ``(..., 1, D/2)``: one for all heads."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, base: float) -> Rotation:
        """The rotation at integer ``positions (...)``. Angles are float64: at position 10**6 float32 is off by 0.1."""
        order = torch.arange(head_dim // 2, device=positions.device, dtype=torch.float64)
        angle = positions[..., None, None].double() * base ** (-2 / head_dim * order)
        return cls(angle.cos(), angle.sin())

    def __call__(self, x: Tensor) -> Tensor:
        """``x (..., heads, D)`` rotated, in its type; computed in float32 (float64 for float64)."""
        cos, sin = self.cos.to(wide(x)), self.sin.to(wide(x))
        a, b = x.to(wide(x)).chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
