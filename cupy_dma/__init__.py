"""Flash Dynamic Mask Attention for CuPy, torch and NumPy.

    scores = cupy_dma.key_scores(value, dt_proj, A)                 # one number per key and kv head
    mask = cupy_dma.IntervalMask.top_w(scores, window=2048)         # which queries see each key: two integers per key
    out = cupy_dma.attention(query, key, value, mask=mask, bias=scores)

Every public name is loaded on first use, so importing the package imports no array library and needs no GPU.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupy_dma import backward, distributed, flash_dmattn
    from cupy_dma.api import (
        attention,
        dynamic_mask_attention,
        key_scores,
        varlen_attention,
        varlen_dynamic_mask_attention,
    )
    from cupy_dma.arrays import Array
    from cupy_dma.backends import get_available_backends
    from cupy_dma.backends.cuda.explain import explain
    from cupy_dma.backends.cuda.runtime.user_kernel import jit
    from cupy_dma.cache import DynamicCache, GatedCache
    from cupy_dma.masks import IntervalMask, policies

__version__ = "0.1.0"

__all__ = ["Array", "DynamicCache", "GatedCache", "IntervalMask", "attention", "backward", "distributed",
           "dynamic_mask_attention", "explain", "flash_dmattn", "get_available_backends", "jit", "key_scores",
           "policies", "varlen_attention", "varlen_dynamic_mask_attention"]

_SUBMODULES = ("backward", "distributed", "flash_dmattn", "jax", "retrofit", "torch", "transformers")
_MODULE_OF = {
    "Array": "cupy_dma.arrays",
    "DynamicCache": "cupy_dma.cache",
    "GatedCache": "cupy_dma.cache",
    "IntervalMask": "cupy_dma.masks",
    "attention": "cupy_dma.api",
    "dynamic_mask_attention": "cupy_dma.api",
    "explain": "cupy_dma.backends.cuda.explain",
    "get_available_backends": "cupy_dma.backends",
    "jit": "cupy_dma.backends.cuda.runtime.user_kernel",
    "key_scores": "cupy_dma.api",
    "policies": "cupy_dma.masks",
    "varlen_attention": "cupy_dma.api",
    "varlen_dynamic_mask_attention": "cupy_dma.api",
}


def __getattr__(name: str):
    if name in _SUBMODULES:
        return import_module(f"cupy_dma.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
