"""A forward pass of one shape on some slots of a ``DynamicMaskCache``: on a GPU a CUDA graph, which serves any tokens.

    given   int64 (rows, 2 + length)    a row's slot, how many of its tokens are real, the tokens
    out     int64 (rows,)               the token after each row's last one; of rows without tokens, any

The positions of a row's tokens are those after what its slot holds, so the host sends nothing but this, and what it
sends it may overwrite once it has read ``out``.
"""
from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma.transformers.cache import DynamicMaskCache, cache_argument
from cupy_dma.transformers.graph import captured
from cupy_dma.transformers.layers import NAME, dynamic_layers
from cupy_dma.transformers.sampling import GREEDY, Sampling, next_tokens


class Row(NamedTuple):
    """A text's next tokens."""

    slot: int
    tokens: Sequence[int]  # at most the pass's length
    sampling: Sampling | None  # None: greedy


class SlotPass:
    """With as many rows as the cache has slots, row ``i`` is slot ``i``."""

    def __init__(self, model: Any, cache: DynamicMaskCache, rows: int, length: int, graph: bool) -> None:
        """Runs the model without tokens, so that all memory is allocated and all kernels are compiled."""
        self.length, self._model, self._cache, self._is_whole = length, model, cache, rows == cache.slots
        sizes = ((rows, 2 + length), torch.long), ((rows, len(GREEDY)), torch.float64)
        self._sent = [torch.zeros(size, dtype=kind, pin_memory=model.device.type == "cuda") for size, kind in sizes]
        self._given, self._settings = [x.to(model.device) for x in self._sent]
        self._numbers, self._drawn = [x.numpy() for x in self._sent]
        self._graph: Any = None
        self.run([])
        if graph:
            self._graph, self._logits = captured(self._forward, model.device)

    @torch.no_grad()
    def run(self, rows: Sequence[Row]) -> Tensor:
        """``out``, on the device."""
        self._numbers[:, 1] = 0
        for row in rows:
            at = row.slot if self._is_whole else 0
            self._numbers[at, :2] = row.slot, len(row.tokens)
            self._numbers[at, 2:2 + len(row.tokens)] = row.tokens
            self._drawn[at] = GREEDY if row.sampling is None else row.sampling.settings
        self._given.copy_(self._sent[0], non_blocking=True)
        drawn = any(row.sampling is not None for row in rows)
        if drawn:
            self._settings.copy_(self._sent[1], non_blocking=True)
        if self._graph is None:
            logits = self._forward()
        else:
            self._graph.replay()
            logits = self._logits
        return next_tokens(logits, self._settings if drawn else None)

    def _forward(self) -> Tensor:
        """Logits ``(rows, vocabulary)``."""
        slots, count, ids = self._given[:, 0], self._given[:, 1], self._given[:, 2:]
        store, place = self._cache.layers[0].store, torch.arange(self.length, device=ids.device)
        begin = torch.zeros_like(slots) if store is None else store.length if self._is_whole else store.length[slots]
        positions = torch.where(place < count[:, None], begin[:, None] + place, 0)
        last = (count - 1).clamp(min=0)
        wanted = {"logits_to_keep": last} if self.length > 1 and self._model._supports_logits_to_keep() else {}
        with self._cache.at(None if self._is_whole else slots.int(), count.int()):
            logits = self._model(input_ids=ids, position_ids=positions, **{cache_argument(self._model): self._cache},
                                 **wanted).logits
        return logits[:, 0] if logits.shape[1] == 1 else logits[0, last]


def checked_config(model: Any) -> Any:
    """The text configuration of a model whose texts can share a batch.

    Raises
    ------
    ValueError
        It has no dynamic masks, is being trained, or its texts depend on each other or on where they stand in a batch.
    """
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if not dynamic_layers(config) or config._attn_implementation != NAME:
        raise ValueError(f"model must have dynamic masks and attn_implementation='cupy_dma', got {name} with "
                         f"{config._attn_implementation!r}")
    if model.training:
        raise ValueError(f"model must be in evaluation mode, got {name} in training mode")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"model must take position_ids, as texts in one batch have different lengths; {name} does not")
    if config.model_type == "doge" and config.is_moe:
        raise ValueError("model must treat each text by itself, but Doge's mixture of experts mixes the tokens of a "
                         "batch")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # of all layers, or by kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(f"model must have rotary frequencies of its own for each text, but those of rope_type="
                             f"{rope['rope_type']!r} follow the longest text of a batch")
    return config
