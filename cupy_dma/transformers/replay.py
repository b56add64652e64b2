"""Forward passes over a generated text that see what the cache saw which generated it (specification, section 18).

    cache = GatedCache(model.config, record_stops=True)
    text = model.generate(prompt, cache=cache, ...)
    with replay(model, cache.stops()):
        logits = model(text, use_cache=False).logits      # the sampler's, with gradients
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cupy_dma.masks.interval import NEVER, IntervalMask
from cupy_dma.transformers.layers import dynamic_layers

STOPS = "replayed_stops"  # an attention module's, within ``replay``


@contextmanager
def replay(model: Any, stops: Sequence[Tensor | None]) -> Iterator[None]:
    """Let the model's layers see, within a ``with`` block, what a cache's calls saw.

    Parameters
    ----------
    model
        A Doge or converted model.
    stops
        Of the cache that generated the text, made with ``record_stops=True``: ``cache.stops()``, int32 ``(B, Hkv, N)``
        for each layer with a dynamic mask. Forward passes within the block take these ``B`` texts, with
        ``use_cache=False`` and the padding that the cache had. Tokens behind the first ``N``, such as the last
        generated one, which no cache has seen, evict no key.

    Raises
    ------
    TypeError, ValueError
        ``stops`` does not fit the model. In the forward pass: nor the text.
    NotImplementedError
        A forward pass gets a cache, or documents.

    Notes
    -----
    Scores and gates are those that the model computes now; only which keys are seen is the cache's. With gates in
    evaluation they are no part of the function, so only the rest of the model gets a gradient; ``train()`` of the gates
    adds the soft ones to the logits. With activation checkpointing the backward pass belongs into the block, too.
    """
    layers = dynamic_layers(model.config.get_text_config(decoder=True))
    found = {module.layer_idx: module for module in model.modules()
             if hasattr(module, "dynamic_mask") or hasattr(module, "keep_window_size") and hasattr(module, "layer_idx")}
    if not layers or found.keys() != layers.keys():
        raise ValueError(f"model must have dynamic masks, Doge's or a converted model's, got {type(model).__name__} "
                         f"without any")
    for index, module in found.items():
        stop = stops[index] if index < len(stops) else None
        if not isinstance(stop, Tensor) or stop.ndim != 3:
            raise TypeError(f"stops[{index}] must be a tensor (B, Hkv, N), as stops() of a cache of this model has "
                            f"them, got {type(stop).__name__}")
        setattr(module, STOPS, stop)
    try:
        yield
    finally:
        for module in found.values():
            delattr(module, STOPS)


def replayed(module: Any, key: Tensor, cache: Any) -> IntervalMask | None:
    """The mask of the layer's recorded stops for ``key (B, N, Hkv, D)``, None where it replays nothing."""
    stops = getattr(module, STOPS, None)
    if stops is None:
        return None
    batch, length, heads, _ = key.shape
    if cache is not None:
        raise NotImplementedError("a replay takes whole texts: call the model with use_cache=False")
    if (stops.shape[0], stops.shape[1]) != (batch, heads) or stops.shape[2] > length:
        raise ValueError(f"the text must be the one whose stops are replayed, {tuple(stops.shape)} (B, Hkv, N), got "
                         f"{batch} texts of {length} tokens and {heads} kv heads")
    stops = torch.nn.functional.pad(stops, (0, length - stops.shape[2]), value=NEVER)
    return IntervalMask.from_stop(stops.to(key.device))
