"""A decoding step as a CUDA graph: one launch in place of several hundred.

A ``DynamicMaskCache`` never grows or moves by itself and keeps its lengths on the GPU, so one captured forward pass of
one token serves every step, at any length.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from cupy_dma.torch.capture import uncollected
from cupy_dma.transformers.cache import DynamicMaskCache, DynamicMaskLayer, cache_argument
from cupy_dma.transformers.croppable import Store

WARM_UP = 2
Result = TypeVar("Result")


def captured(call: Callable[[], Result], device: Any) -> tuple[Any, Result]:
    """``call`` as a CUDA graph, after ``WARM_UP`` calls, and its result, which every replay overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    call()
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        # In the mode "global" any other thread that uses CUDA meanwhile aborts the capture.
        with uncollected(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            return graph, call()


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
    cache : DynamicMaskCache, or GatedCache with a capacity
        With at least one token per row, without ``record_stops``.

    Raises
    ------
    TypeError, ValueError
        The model or the cache does not meet these conditions. Nothing is changed then.

    Notes
    -----
    Every step overwrites the logits returned by the previous one. The capture takes two forward passes and leaves the
    cache unchanged, even if it fails. Rotary positions count each row's real tokens. If the cache's rows have moved to
    other memory (``batch_select_indices``, ``batch_repeat_interleave``), the next step is captured again.
    """

    def __init__(self, model: Any, cache: DynamicMaskCache):
        if not isinstance(cache, DynamicMaskCache):
            raise TypeError(f"cache must be a DynamicMaskCache, got {type(cache).__name__}")
        if not all(isinstance(layer, DynamicMaskLayer) for layer in cache.layers):
            raise ValueError("cache must be of a model whose layers all have dynamic masks: the others' tokens move as "
                             "they grow")
        self._model, self._cache = model, cache
        self._layers: list[DynamicMaskLayer] = cache.layers
        stores = self._checked_stores()
        if model.training or model.device.type != "cuda":
            raise ValueError(f"model must be on a GPU and in evaluation mode, got one on {model.device}"
                             f"{' in training mode' if model.training else ''}")
        self._capture(stores)

    def _checked_stores(self) -> list[Store]:
        """The caches of all layers."""
        if any(store._is_growing for layer in self._layers for store in layer.stores):
            raise ValueError("cache must not grow: give a GatedCache a capacity, and do not record stops")
        if any(not layer.stores or layer.record_past for layer in self._layers):
            raise ValueError("cache must hold at least one token and must not record its past")
        self._cache.check_whole()
        return [store for layer in self._layers for store in layer.stores]

    def _capture(self, stores: list[Store]) -> None:
        """Capture a step on these caches."""
        ids = torch.zeros(stores[0].batch, 1, dtype=torch.long, device=stores[0].length.device)
        lengths, saved = [layer.get_seq_length() for layer in self._layers], [store.clone() for store in stores]
        named = cache_argument(self._model)

        def forward() -> Tensor:
            positions = stores[0].length[:, None]
            return self._model(input_ids=ids, position_ids=positions, **{named: self._cache}).logits

        try:
            graph, logits = captured(forward, self._model.device)
        finally:
            for store, before in zip(stores, saved):
                store._copy_from(before)  # in place: the graph's addresses stay valid
            for layer, length in zip(self._layers, lengths):
                layer.restore(length)
        self._graph, self._ids, self._logits, self._stores = graph, ids, logits, stores

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
            ``ids`` has another shape, or the cache records its past.
        RuntimeError
            An earlier forward pass on the cache failed part-way.
        """
        stores = self._checked_stores()
        if ids.shape != (stores[0].batch, 1):
            raise ValueError(f"ids must have shape {(stores[0].batch, 1)}, got {tuple(ids.shape)}")
        if len(stores) != len(self._stores) or any(a is not b for a, b in zip(stores, self._stores)):
            self._capture(stores)
        self._ids.copy_(ids)
        self._graph.replay()
        for layer in self._layers:
            layer.advance(1)
        return self._logits
