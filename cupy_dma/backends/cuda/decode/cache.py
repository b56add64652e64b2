"""The decode cache on the device."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy_dma.backends.cuda.decode import chunk, step
from cupy_dma.cache.chunked_prefill import Attention, delivered, extend_chunk
from cupy_dma.cache.record import PrefixStop
from cupy_dma.cache.state import CacheState, ExtendCall

Step = Callable[[CacheState, ExtendCall], tuple[Any, Any]]
Run = Callable[..., tuple[Any, ...]]


def cache_extend(few: Step, run: Run, prefix_stop: PrefixStop, attention: Attention, state: CacheState,
                 call: ExtendCall) -> tuple[Any, Any]:
    """``out`` and ``lse``, by this backend's own functions; see ``cupy_dma.backends``."""
    if step.serves(state, call):
        return few(state, call)
    if not chunk.serves(state, call):
        return extend_chunk(prefix_stop, attention, state, call)
    with state.library.on(state.device):
        found = run(chunk.extend, state, call)
        return delivered(state, call, *found) if found else (None, None)
