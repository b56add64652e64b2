"""Key lists that backends derive from a mask and keep on it.

They are kept per stream, by the stream's id, so a call reuses only what earlier work on its own stream has made. A call
captured into a CUDA graph keeps nothing: the graph's own kernels make its lists. It may read a finished list of an
eager call; that list then stays on the mask for good, because a replay may read it.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from cupy_dma.arrays import driver

MAX_KEPT = 32  # entries per mask; the oldest are dropped
_lock, _trimming = threading.Lock(), threading.Lock()


class History(NamedTuple):
    """What a mask records about its entries besides their values."""

    events: dict[Any, driver.Event]  # by key: recorded after the kernels that make the entry
    captured: list[Any]  # entries that graphs read


def kept(mask: Any, identity: tuple[Any, ...], stream: Any, make: Callable[[], Any]) -> Any:
    """``make()``, kept for later calls with this ``identity`` on the same raw ``stream``."""
    handle, index = stream, mask.device.index
    on_gpu = mask.device.kind == "cuda" and type(stream) is int  # a recorded stream is of another type
    if on_gpu:
        if driver.is_capturing(handle, index):
            found = _complete(mask, identity)
            return make() if found is None else found
        stream = driver.stream_id(handle, index)
    key = (*identity, stream)
    found = mask._cache.get(key)
    if found is None:
        made = make()
        event = driver.Event(handle, index) if on_gpu else None
        with _lock:
            found = mask._cache.setdefault(key, made)  # another thread may have been faster
            if event is not None and found is made:
                mask._history.events[key] = event
            for old in forget_oldest(mask._cache, MAX_KEPT):
                mask._history.events.pop(old, None)
    return found


def forget_oldest(entries: dict[Any, Any], most: int) -> list[Any]:
    """Drop the oldest entries until ``most`` are left. Returns the keys of the dropped ones."""
    with _trimming:
        old = list(entries)[:max(0, len(entries) - most)]
        for key in old:
            entries.pop(key, None)
        return old


def _complete(mask: Any, identity: tuple[Any, ...]) -> Any:
    """A finished entry for this ``identity``, of any stream; None if there is none."""
    with _lock:
        for key, found in list(mask._cache.items()):
            event = mask._history.events.get(key)
            if key[:-1] == identity and event is not None and event.is_complete():
                if not any(found is x for x in mask._history.captured):
                    mask._history.captured.append(found)
                return found
    return None
