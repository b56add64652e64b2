"""The decode cache on the device."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy_dma.backends.cuda.decode.step import serves
from cupy_dma.cache.chunked_prefill import Attention, extend_chunk
from cupy_dma.cache.record import PrefixStop
from cupy_dma.cache.state import CacheState, ExtendCall

Step = Callable[[CacheState, ExtendCall], tuple[Any, Any]]


def cache_extend(step: Step, prefix_stop: PrefixStop, attention: Attention, state: CacheState,
                 call: ExtendCall) -> tuple[Any, Any]:
    """``out`` and ``lse``, by this backend's own functions; see ``cupy_dma.backends``."""
    if serves(state, call):
        return step(state, call)
    return extend_chunk(prefix_stop, attention, state, call)
