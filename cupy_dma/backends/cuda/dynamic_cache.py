"""The decode cache on the device."""
from __future__ import annotations

from typing import Any

from cupy_dma.cache_chunk import Attention, PrefixStop, extend_chunk
from cupy_dma.cache_state import CacheState, ExtendCall


def cache_extend(prefix_stop: PrefixStop, attention: Attention, state: CacheState,
                 call: ExtendCall) -> tuple[Any, Any]:
    """``out`` and ``lse``, by this backend's own ``prefix_stop`` and ``attention``; see ``cupy_dma.backends``."""
    return extend_chunk(prefix_stop, attention, state, call)
