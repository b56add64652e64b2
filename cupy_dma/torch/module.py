"""Dynamic mask attention as a layer that learns its key scores."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cupy_dma import checks
from cupy_dma.calls.scores import FORMS
from cupy_dma.torch.attention import dynamic_mask_attention


class DynamicMaskAttention(nn.Module):
    """``dynamic_mask_attention`` with the parameters of the key scores.

    Parameters
    ----------
    kv_heads, head_dim : int
        ``Hkv`` and ``D`` of the keys and values.
    window : int
        Keys kept per query.
    dt_bias : bool
        Also learn an offset per kv head.
    form, keys, scale, softcap, deterministic, backend
        As for ``cupy_dma.dynamic_mask_attention``.
    device, dtype
        Of the parameters.

    Attributes
    ----------
    A : Parameter ``(Hkv,)``
        Initialised to zeros, as in the original (Hugging Face Doge), which also gives the names: all scores are equal
        at first, every query sees the last ``window`` keys, and only ``A`` gets a gradient until it has moved.
    dt_proj : nn.Linear
        ``Hkv * D -> Hkv``, initialised by ``nn.Linear``.
    """

    def __init__(self, kv_heads: int, head_dim: int, window: int, *, dt_bias: bool = False, form: str = "exp",
                 keys: str = "prefix", causal: bool = True, scale: float | None = None, softcap: float = 0.0,
                 deterministic: bool = False, backend: str | None = None, device: Any = None, dtype: Any = None):
        super().__init__()
        checks.choice(form, "form", FORMS)
        heads, size = checks.whole(kv_heads, "kv_heads", 1), checks.whole(head_dim, "head_dim", 1)
        self.window = checks.whole(window, "window", 1)
        self.options: dict[str, Any] = {
            "form": form, "keys": keys, "causal": causal, "scale": scale, "softcap": softcap,
            "deterministic": deterministic, "backend": backend}
        self.A = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))
        self.dt_proj = nn.Linear(heads * size, heads, bias=dt_bias, device=device, dtype=dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, padding: Tensor | None = None,
                documents: Tensor | None = None, return_lse: bool = False) -> Any:
        """Attention of ``query (B, Lq, H, D)`` over ``key, value (B, Lk, Hkv, D)``; ``padding`` and ``documents`` as
        for ``IntervalMask.top_w``."""
        return dynamic_mask_attention(query, key, value, window=self.window, dt_proj=self.dt_proj.weight, A=self.A,
                                      dt_bias=self.dt_proj.bias, padding=padding, documents=documents,
                                      return_lse=return_lse, **self.options)

    def extra_repr(self) -> str:
        shown = {"window": self.window, **{name: value for name, value in self.options.items() if value is not None}}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())
