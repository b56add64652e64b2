"""Full attention in the scheduler of ``ContinuousBatching``: every key of a text, in a cache of fixed size.

A layer holds ``key, value (slots, rows, Hkv, D)``; padding goes to the last row. Attention is torch's FlashAttention,
which reads only the keys of its text; without a GPU it is ``scaled_dot_product_attention`` with a mask. transformers
knows ``attention`` and a mask function that returns None as ``NAME``.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from cupy_dma.transformers import ContinuousBatching

NAME = "static_slots"


class StaticLayer(CacheLayerMixin):
    current: StaticLayer  # the layer whose attention runs next

    def __init__(self, model: Any, slots: int, rows: int) -> None:
        super().__init__()
        config = model.config
        size = slots, rows + 1, config.num_key_value_heads, config.head_dim
        self.key, self.value = (torch.zeros(size, dtype=model.dtype, device=model.device) for _ in range(2))
        self.length = torch.zeros(slots, dtype=torch.long, device=model.device)
        self.at: tuple[Tensor | None, Tensor] = None, self.length
        self.store = self  # the attribute that DynamicMaskLayer has

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append ``(n, Hkv, L, D)``. Returns all."""
        given, self.count = self.at
        self.slots = torch.arange(len(self.length), device=self.length.device) if given is None else given.long()
        place = torch.arange(key_states.shape[2], device=self.length.device)
        row = torch.where(place < self.count[:, None], self.length[self.slots][:, None] + place, self.key.shape[1] - 1)
        self.key[self.slots[:, None], row] = key_states.transpose(1, 2)
        self.value[self.slots[:, None], row] = value_states.transpose(1, 2)
        self.length.index_add_(0, self.slots, self.count.long())
        StaticLayer.current = self
        return self.key, self.value

    def lazy_initialization(self, *_: Any) -> None:
        pass

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class StaticSlots(Cache):
    def __init__(self, model: Any, slots: int, rows: int) -> None:
        self.slots = slots
        super().__init__(layers=[StaticLayer(model, slots, rows) for _ in range(model.config.num_hidden_layers)])

    @property
    def memory_bytes(self) -> int:
        return sum(2 * layer.key.numel() * layer.key.element_size() for layer in self.layers)

    @contextmanager
    def at(self, slots: Tensor | None, lengths: Tensor) -> Iterator[None]:
        for layer in self.layers:
            layer.at = slots, lengths
        yield

    def reset(self, slots: Tensor) -> None:
        for layer in self.layers:
            layer.length.index_fill_(0, slots.long(), 0)


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
              **_: Any) -> tuple[Tensor, None]:
    """Attention of ``query (n, H, L, D)`` over a layer's slots, ``(n, L, H, D)``."""
    layer, (n, heads, length, size) = StaticLayer.current, query.shape
    used = torch.where(layer.count > 0, layer.length[layer.slots], 0)
    if query.is_cuda:
        # Only real tokens are queries; the last query has the position of the last key.
        # torch 2.11's varlen_attn takes neither pages nor fewer kv heads; the operator behind it takes lengths in use.
        rows = key.shape[1]
        if n > 1:  # all slots, a token each
            ends = torch.arange(n + 1, device=query.device)
            begins = ends * rows
        else:
            ends = torch.stack([layer.count[0] * 0, layer.count[0]])
            begins = torch.stack([layer.slots[0], layer.slots[0] + 1]) * rows
        out = torch.ops.aten._flash_attention_forward(
            query.transpose(1, 2).reshape(n * length, heads, size), key.flatten(0, 1), value.flatten(0, 1), ends.int(),
            begins.int(), length, rows, 0.0, length > 1, False, scale=scaling, seqused_k=used.int())[0]
        return out.view(n, length, heads, size), None
    last = (used - layer.count)[:, None, None] + torch.arange(length)[:, None]  # that a query sees
    seen = torch.arange(key.shape[1]) <= last
    key, value = (x[layer.slots].transpose(1, 2) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen[:, None], scale=scaling,
                                                           enable_gqa=True)
    return out.transpose(1, 2), None


class FullBatching(ContinuousBatching):
    """``rows``: tokens of the longest text."""

    def __init__(self, model: Any, rows: int, **options: Any) -> None:
        self._rows = rows
        super().__init__(model, **options)

    def _made_cache(self, model: Any, slots: int, storage: str | None) -> Any:
        return StaticSlots(model, slots, self._rows)


def register() -> None:
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
