"""torch: differentiable functions, the operators beneath them, and layers.

    out = cupy_dma.torch.dynamic_mask_attention(query, key, value, scores, window=2048)     # or cupy_dma's own
    layer = cupy_dma.torch.DynamicMaskAttention(kv_heads=8, head_dim=128, window=2048)      # learns its scores
    block = cupy_dma.torch.DynamicMaskSelfAttention(2048, heads=16, kv_heads=8, window=2048)    # with projections
    gate = cupy_dma.torch.RetentionGate(2048, kv_heads=8)   # which keys to keep, from a layer's input

Everything works in eager mode, under ``torch.compile(fullgraph=True)``, autocast and activation checkpointing, on CUDA
and CPU tensors. Only first derivatives are available.
"""
from cupy_dma.torch.attention import attention
from cupy_dma.torch.dynamic import dynamic_mask_attention
from cupy_dma.torch.gate import Gates, RetentionGate
from cupy_dma.torch.module import DynamicMaskAttention
from cupy_dma.torch.scores import key_scores
from cupy_dma.torch.self_attention import DynamicMaskSelfAttention
from cupy_dma.torch.varlen import varlen_attention, varlen_dynamic_mask_attention

__all__ = ["DynamicMaskAttention", "DynamicMaskSelfAttention", "Gates", "RetentionGate", "attention",
           "dynamic_mask_attention", "key_scores", "varlen_attention", "varlen_dynamic_mask_attention"]
