"""What a cache of kept keys is made with: its arrays, its backend and its sizes."""
from __future__ import annotations

from contextlib import AbstractContextManager
from math import inf
from typing import Any

import numpy as np

from cupy_dma import backends, checks
from cupy_dma.arrays import describe
from cupy_dma.cache.arguments import type_name
from cupy_dma.cache.attended import Attended
from cupy_dma.cache.record import Record
from cupy_dma.cache.segments import segments_of
from cupy_dma.cache.snapshot import empty_state
from cupy_dma.cache.state import CacheState
from cupy_dma.cache.storage import checked_storage
from cupy_dma.masks.windows import Window, widest, window_of


class CacheBase:
    """``state.py`` says what it holds."""

    _module: Any  # the backend
    _backend: str | None
    _state: CacheState
    _record: Record | None
    _attended: Attended

    def _allocate(self, batch: Any, kv_heads: Any, window: Any, head_dim: Any, value_dim: Any, dtype: Any, like: Any,
                  sinks: Any, recent: Any, record_stops: Any, backend: str | None, threshold: float = -inf,
                  grows: bool = False, storage: Any = None) -> None:
        """Check the constructor's arguments, and make a cache without tokens. One that grows has segments."""
        batch, kv_heads = checks.whole(batch, "batch", 0), checks.whole(kv_heads, "kv_heads", 1)
        window = window_of(window, kv_heads)
        sinks, recent = checks.whole(sinks, "sinks", 0), checks.whole(recent, "recent", 0)
        size = checks.whole(head_dim, "head_dim", 1)
        sizes = size, size if value_dim is None else checks.whole(value_dim, "value_dim", 1)
        for size, name in zip(sizes, ("head_dim", "value_dim")):
            if size > 256:
                raise ValueError(f"{name} must be 1 to 256, got {size}")
        if (rows := widest(window) + sinks + recent) >= 2**31:
            raise ValueError(f"window + sinks + recent must be below 2**31, got {rows}")
        seen = describe(np.empty(0) if like is None else like, "like")
        if dtype is None and like is not None:
            checks.one_of_types(seen)
        kind = type_name(dtype or ("bfloat16" if like is None else seen.dtype))
        storage = checked_storage(storage, kind)
        self._module, library, device = backends.choose(backend, (seen,)), seen.library, seen.device
        self._backend = backend
        if kind == "float64" and device.kind == "cuda" and backend != "numpy":
            raise TypeError("dtype must be float16, bfloat16 or float32 on CUDA, got float64 (backend='numpy' takes "
                            "it)")
        self._record = Record() if checks.flag(record_stops, "record_stops") else None
        self._attended = Attended()
        with library.on(device):
            numbers, pairs = (window, sinks, recent, threshold), batch * kv_heads
            segments = segments_of(library, device, (rows,) * pairs, batch, kv_heads) if grows else None
            self._state = empty_state(library, device, kind, batch, kv_heads, numbers, *sizes, segments, storage)

    # ---- sizes ------------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """``B``: sequences."""
        return self._state.batch

    @property
    def kv_heads(self) -> int:
        """``Hkv``."""
        return self._state.kv_heads

    @property
    def head_dim(self) -> int:
        """``D`` of queries and keys."""
        return self._state.head_dim

    @property
    def window(self) -> Window:
        """``w``: highest-scored keys that are kept; a tuple if it differs between kv heads."""
        return self._state.window

    @property
    def sinks(self) -> int:
        """First tokens that are kept as well."""
        return self._state.sinks

    @property
    def recent(self) -> int:
        """Last tokens that are kept as well."""
        return self._state.recent

    @property
    def storage(self) -> str | None:
        """How rows are stored: "int8", "fp8" or None, as they are given."""
        return self._state.storage

    def __repr__(self) -> str:
        s = self._state
        storage = "" if s.storage is None else f"storage={s.storage!r}, "
        return (f"{type(self).__name__}(batch={s.batch}, kv_heads={s.kv_heads}, window={s.window}, "
                f"head_dim={s.head_dim}, value_dim={s.value_dim}, dtype={s.dtype!r}, sinks={s.sinks}, "
                f"recent={s.recent}, {storage}library={s.library.name!r}, device={str(s.device)!r})")

    # ---- internals --------------------------------------------------------------------------------------------------

    def _here(self) -> AbstractContextManager:
        return self._state.library.on(self._state.device)

    def _export(self, array: Any) -> Any:
        return self._state.library.export(array)
