"""A drop-in replacement for the ``flash_dmattn`` package (and for ``flash_sparse_attn``, its later name).

    from cupy_dma.flash_dmattn import flash_dmattn_func_auto    # was: from flash_dmattn import ...
    out = flash_dmattn_func_auto()(q, k, v, attn_mask=mask, attn_bias=bias, is_causal=True)

Functions, argument names and argument order are those of the original, in all its versions; semantics are those of
``cupy_dma.attention``, on which this is a thin layer. ``docs/coming_from_flash_dmattn.md`` lists the original's calls,
their equivalents here, and the deliberate differences. Every name is loaded on first use.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from cupy_dma.backends import why_not

if TYPE_CHECKING:
    from cupy_dma.flash_dmattn import integrations as integrations
    from cupy_dma.flash_dmattn import utils
    from cupy_dma.flash_dmattn.auto import flash_dmattn_func_auto
    from cupy_dma.flash_dmattn.choice import get_available_backends
    from cupy_dma.flash_dmattn.first_generation import apply_dynamic_mask_attention, fwd
    from cupy_dma.flash_dmattn.flash_dmattn_flex import flex_dmattn_func
    from cupy_dma.flash_dmattn.flash_dmattn_interface import (
        flash_dmattn_func,
        flash_dmattn_kvpacked_func,
        flash_dmattn_qkvpacked_func,
        flash_dmattn_varlen_func,
        flash_dmattn_varlen_kvpacked_func,
        flash_dmattn_varlen_qkvpacked_func,
    )
    from cupy_dma.flash_dmattn.flash_dmattn_triton import triton_dmattn_func

    CUDA_AVAILABLE: bool
    TRITON_AVAILABLE: bool
    FLEX_AVAILABLE: bool

__all__ = [
    "CUDA_AVAILABLE", "FLEX_AVAILABLE", "TRITON_AVAILABLE", "apply_dynamic_mask_attention", "flash_dmattn_func",
    "flash_dmattn_func_auto", "flash_dmattn_kvpacked_func", "flash_dmattn_qkvpacked_func", "flash_dmattn_varlen_func",
    "flash_dmattn_varlen_kvpacked_func", "flash_dmattn_varlen_qkvpacked_func", "flex_dmattn_func", "fwd",
    "get_available_backends", "triton_dmattn_func", "utils"]

_SUBMODULES = ("integrations", "utils")  # integrations needs torch, so it is not in __all__
_MODULE_OF = {
    "apply_dynamic_mask_attention": "first_generation",
    "fwd": "first_generation",
    "flash_dmattn_func_auto": "auto",
    "get_available_backends": "choice",
    "flex_dmattn_func": "flash_dmattn_flex",
    "triton_dmattn_func": "flash_dmattn_triton",
}
_SPARSE = {f"{prefix}_sparse_attn_func{suffix}": f"{prefix}_dmattn_func{suffix}" for prefix, suffix in (
    ("flash", ""), ("flash", "_auto"), ("triton", ""), ("flex", ""))}
_SPARSE["flash_sparse_attn_varlen_func"] = "flash_dmattn_varlen_func"


def __getattr__(name: str):
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name in ("CUDA_AVAILABLE", "TRITON_AVAILABLE", "FLEX_AVAILABLE"):
        return why_not(name.partition("_")[0].lower()) is None
    name = _SPARSE.get(name, name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'flash_dmattn_interface')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SPARSE})
