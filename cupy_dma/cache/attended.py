"""New rows that a cache has attended to and not appended, for ``commit``.

They are copied into arrays that the cache keeps. Calls of one shape share them, so a CUDA graph of ``attend`` finds the
same addresses at every replay; those that a graph has seen are never given up. The host cannot see a replay, so what an
``attend`` in a graph has left there may be appended after any of them. Call within
``state.library.on(state.device)``.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from cupy_dma import checks
from cupy_dma.arrays import Operand, numpy_dtype
from cupy_dma.cache.arguments import counts
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.calls.head_dims import movable

ROWS = ("key", "value", "scores", "lengths", "cu_seqlens", "slots")


class Attended:
    def __init__(self) -> None:
        self._last: ExtendCall | None = None  # an update by all rows
        self._is_captured = False  # whether in a graph
        self._arrays: dict[Any, dict[str, Operand]] = {}
        self._in_graphs: set[Any] = set()  # the keys of those that graphs have seen

    @property
    def memory_bytes(self) -> int:
        return sum(prod(x.shape) * numpy_dtype(x.dtype).itemsize
                   for arrays in self._arrays.values() for x in arrays.values())

    def arrays(self, state: CacheState, call: ExtendCall) -> dict[str, Operand]:
        """Arrays for the rows of a call: those of an earlier one of its shape, or new ones."""
        library, given = state.library, {name: x for name in ROWS if (x := getattr(call, name)) is not None}
        key = tuple([(name, x.shape, x.dtype) for name, x in given.items()])
        found = self._arrays.get(key)
        if found is None:
            found = {name: library.operand(library.empty(x.shape, x.dtype, state.device), name)
                     for name, x in given.items()}
            self._arrays = {other: self._arrays[other] for other in self._in_graphs} | {key: found}
        if library.is_capturing(state.device):
            self._in_graphs.add(key)
        return found

    def remember(self, state: CacheState, call: ExtendCall, arrays: dict[str, Operand]) -> None:
        """Copy the rows of a call into these arrays. Allocates nothing."""
        library = state.library
        for name, operand in arrays.items():
            target, source = (movable(library, x.array, x.dtype) for x in (operand, getattr(call, name)))
            target[...] = source
        rows: dict[str, Any] = arrays
        self._last = replace(call, query=None, out=None, lse=None, return_lse=False, commits=True, **rows)
        self._is_captured = library.is_capturing(state.device)

    def update(self, state: CacheState, n: Any) -> ExtendCall:
        """The call that appends the first ``n`` tokens. Raises what ``commit`` documents."""
        call, library = self._last, state.library
        if call is None:
            raise RuntimeError("commit needs an attend before it, after which the cache has not changed")
        if isinstance(n, (int, np.integer)):
            if checks.whole(n, "n", 0) > call.length:
                raise ValueError(f"n must lie between 0 and L = {call.length}, got {n}")
            if n == call.length:
                return call
            tokens = library.full((call.batch,), int(n), "int64", state.device)
        else:
            letter = "B" if call.slots is None else "n"
            given = counts(state, n, "n", (call.batch,), f"({letter},)", call.length)
            tokens = library.astype(given.array, "int64")
        if call.lengths is not None:
            tokens = library.xp.minimum(tokens, library.astype(call.lengths.array, "int64"))
        return replace(call, lengths=library.operand(tokens, "lengths"))

    def forget(self, state: CacheState) -> None:
        """The cache has changed, so the rows no longer come next."""
        if self._last is not None and (not self._is_captured or state.library.is_capturing(state.device)):
            self._last = None
