"""A step of decoding as a CUDA graph: one launch instead of some hundred of the host's.

A ``DynamicMaskCache`` never grows or moves and keeps its lengths on the GPU, so one captured forward pass of one token
serves every step, at any length.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupy_dma.torch.capture import uncollected
from cupy_dma.transformers.cache import DynamicMaskCache, DynamicMaskLayer, cache_argument

WARM_UP = 2


class DecodingStep:
    """Forward passes of one token per row on a cache that holds a prompt, captured once::

        cache = DynamicMaskCache(model.config)
        logits = model(prompt, **{"cache": cache}).logits       # past_key_values up to transformers 5.19
        step = DecodingStep(model, cache)
        for _ in range(n):
            logits = step(logits[:, -1:].argmax(-1))

    Parameters
    ----------
    model
        A Doge or converted model on a GPU, all of whose layers have dynamic masks, in evaluation mode.
    cache : DynamicMaskCache
        With at least one token per row. Its rows must stay what they are (no ``reorder_cache``, no ``reset``).

    Raises
    ------
    TypeError, ValueError
        The model or the cache is not as above. Nothing has been changed then.

    Notes
    -----
    Every step overwrites the logits that the one before returned. The capture takes two forward passes; the cache is
    as before afterwards. Rotary positions count each row's real tokens.
    """

    def __init__(self, model: Any, cache: DynamicMaskCache):
        if not isinstance(cache, DynamicMaskCache):
            raise TypeError(f"cache must be a DynamicMaskCache, got {type(cache).__name__}")
        self._layers: list[DynamicMaskLayer] = cache.layers
        if not all(isinstance(layer, DynamicMaskLayer) for layer in cache.layers):
            raise ValueError("cache must be of a model whose layers all have dynamic masks: the others' tokens move as "
                             "they grow")
        if any(layer.store is None or layer.record_past for layer in self._layers):
            raise ValueError("cache must hold at least one token, without recording of the past")
        if model.training or model.device.type != "cuda":
            raise ValueError(f"model must be on a GPU and in evaluation mode, got one on {model.device}"
                             f"{' in training mode' if model.training else ''}")
        stores = [layer.store for layer in self._layers]
        lengths, saved = [layer.get_seq_length() for layer in self._layers], [store.state_dict() for store in stores]
        named = cache_argument(model)
        self._ids = torch.zeros(stores[0].batch, 1, dtype=torch.long, device=model.device)

        def forward() -> Tensor:
            positions = stores[0].length[:, None]
            return model(input_ids=self._ids, position_ids=positions, **{named: cache}).logits

        with torch.no_grad(), torch.cuda.device(model.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    forward()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with uncollected(), torch.cuda.graph(self._graph):
                self._logits = forward()
            for layer, store, state, length in zip(self._layers, stores, saved, lengths):
                store.load_state_dict(state)  # in place: the graph's addresses stay valid
                layer.advance(length - layer.get_seq_length())

    def __call__(self, ids: Tensor) -> Tensor:
        """Append one token per row and return the logits after it.

        Parameters
        ----------
        ids : int64 Tensor ``(B, 1)``

        Returns
        -------
        Tensor ``(B, 1, vocabulary)``, overwritten by the next call

        Raises
        ------
        ValueError
            ``ids`` has another shape.
        """
        if ids.shape != self._ids.shape:
            raise ValueError(f"ids must have shape {tuple(self._ids.shape)}, got {tuple(ids.shape)}")
        self._ids.copy_(ids)
        self._graph.replay()
        for layer in self._layers:
            layer.advance(1)
        return self._logits
