"""``flash_dmattn_func`` on the triton backend, with the original's argument order for that backend."""
from __future__ import annotations

from typing import Any

from cupy_dma.flash_dmattn.argument_names import any_names
from cupy_dma.flash_dmattn.flash_dmattn_interface import flash_dmattn_func


@any_names
def triton_dmattn_func(query: Any, key: Any, value: Any, attn_mask: Any = None, attn_bias: Any = None,
                       is_causal: bool | None = None, softmax_scale: float | None = None,
                       softcap: float | None = None, deterministic: bool | None = None,
                       return_attn_probs: bool | None = None) -> Any:
    """``flash_dmattn_func(..., backend="triton")``. As in the original, ``is_causal`` comes before the scale."""
    return flash_dmattn_func(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic,
                             return_attn_probs, backend="triton")
