"""Timed calls of models of transformers, for transformers_models and retrofit_speed.

After ``WARM_UP`` calls, up to ``repeats`` calls are queued without waiting, with CUDA events between them; the median
counts. Peak memory: that of the measured calls less what was allocated before (model, optimizer, cache and input).
"""
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import decoder, measure

WARM_UP, STEPS = 2, 16  # calls, tokens of a call that decodes


def timed(call: Callable[[], Any], repeats: int, device: str) -> dict[str, Any]:
    began = time.perf_counter()
    for _ in range(WARM_UP):
        call()
        measure.synchronize()
        pace, began = time.perf_counter() - began, time.perf_counter()
    return measure.timed(call, max(1, min(repeats, int(5 / pace))), device, beyond=True)


@torch.no_grad()
def prefill(model: Any, ids: Tensor, repeats: int) -> dict[str, Any]:
    """A forward pass without a cache, logits of the last tokens alone."""
    return timed(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1), repeats, ids.device.type)


def trainer(model: Any, ids: Tensor, rate: float, decay: float = 0.1) -> tuple[Callable[[], None], list[Tensor]]:
    """Forward, loss, backward and AdamW; and the list of losses."""
    return decoder.trainer(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss, model.parameters(), rate,
                           decay)


@torch.no_grad()
def filled(model: Any, ids: Tensor, cache: Any, piece: int) -> Tensor:
    """Read ``ids`` into the cache, ``piece`` tokens of each text at a time. Returns the next tokens."""
    from cupy_dma.transformers import cache_argument

    for part in ids.split(max(1, piece), 1):
        logits = model(input_ids=part, logits_to_keep=1, **{cache_argument(model): cache}).logits
    return logits.argmax(-1)


@torch.no_grad()
def decode(model: Any, cache: Any, latest: Tensor, graph: bool, repeats: int) -> dict[str, Any]:
    """``STEPS`` tokens after ``latest``, as eager calls or a CUDA graph of one: the time of a token, the size of the
    cache, and the tokens."""
    from cupy_dma.transformers import DecodingStep, cache_argument

    given, tokens = {cache_argument(model): cache}, []
    step = DecodingStep(model, cache) if graph else lambda ids: model(input_ids=ids, **given).logits

    def call() -> None:
        nonlocal latest
        for _ in range(STEPS):
            latest = step(latest)[:, -1:].argmax(-1)
            tokens.append(latest)

    found = timed(call, repeats, latest.device.type)
    size = cache.memory_bytes if hasattr(cache, "memory_bytes") else sum(
        2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)
    return {**found, "ms": found["ms"] / STEPS, "cache_bytes": size, "tokens": torch.cat(tokens, 1)[0].tolist()}
