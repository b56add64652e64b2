"""jax: differentiable functions of jax arrays, masks as pytrees, and a layer for flax.nnx.

    out = cupy_dma.jax.dynamic_mask_attention(query, key, value, scores, window=2048)
    layer = cupy_dma.jax.DynamicMaskAttention(kv_heads=8, head_dim=128, window=2048, rngs=nnx.Rngs(0))

Everything works in eager mode, under ``jit``, ``grad``, ``checkpoint``, ``vmap`` over batches and ``shard_map``, on
CPUs and NVIDIA GPUs. Options are static. Only first derivatives, in reverse mode, are available.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from cupy_dma.jax.versions import require_flax, require_jax

require_jax()

from cupy_dma.jax.attention import attention, dynamic_mask_attention  # noqa: E402 - jax may be missing
from cupy_dma.jax.masks import IntervalMask  # noqa: E402
from cupy_dma.jax.scores import key_scores, top_w  # noqa: E402

if TYPE_CHECKING:
    from cupy_dma.jax.layer import DynamicMaskAttention

__all__ = ["DynamicMaskAttention", "IntervalMask", "attention", "dynamic_mask_attention", "key_scores", "top_w"]


def __getattr__(name: str):
    if name != "DynamicMaskAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_flax()
    found = globals()[name] = import_module("cupy_dma.jax.layer").DynamicMaskAttention
    return found
