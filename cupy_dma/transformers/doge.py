"""Doge's attention in O(N): scores from its ``A`` and ``dt_proj``, selection, attention.

Computes the same function as transformers' own code, which builds the mask as an array ``(B, H, Q, K)``: queries see
the ``keep_window_size`` best of the keys before them. Of equal scores the newest key is kept; ``torch.topk`` keeps any.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cupy_dma.transformers.attention import dynamic_attention
from cupy_dma.transformers.cache import DynamicMaskCache
from cupy_dma.transformers.layers import NAME, DynamicMask


def doge_forward(original: Callable) -> Callable:
    """``DogeAttention.forward``, replaced if the model's attention implementation is ``cupy_dma``."""
    from transformers.models.doge.modeling_doge import apply_rotary_pos_emb

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor],
                attention_mask: Any = None, *caches: Any, **others: Any) -> Any:
        if self.config._attn_implementation != NAME:
            return original(self, hidden_states, position_embeddings, attention_mask, *caches, **others)
        cache = caches[0] if caches else others.get("cache", others.get("past_key_values"))
        if self.training and self.attention_dropout:
            raise NotImplementedError(f"attn_implementation='cupy_dma' has no dropout of attention weights, got "
                                      f"attention_dropout={self.attention_dropout}: set it to 0 in the configuration")
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out = dynamic_attention(self, DynamicMask(self.keep_window_size), query, key, value, attention_mask,
                                cache if isinstance(cache, DynamicMaskCache) else None, scale=self.scaling)
        return self.o_proj(out.flatten(-2)), None

    return forward
