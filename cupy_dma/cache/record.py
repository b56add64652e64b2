"""The scores of all tokens of a cache, from which its selection can be done again: the stops of all keys.

What a cache keeps follows from scores alone, so for its whole history 4 bytes per token and kv head say when each key
was evicted. Room for them doubles when it is used up. The host counts how many tokens there can be, and reads how many
there are before it enlarges the room of sequences that get tokens and are reset on their own.
"""
from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.cache.chosen import Chosen
from cupy_dma.cache.slots import index
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.masks.runs import NEVER
from cupy_dma.masks.windows import Window, clipped

PrefixStop = Callable[[Operand, Window, Operand | None, Operand | None], Any]  # of a backend
NAME = "recorded"  # of the scores in a saved state


class Record:
    """Call within ``state.library.on(state.device)``."""

    def __init__(self) -> None:
        self.scores: Any = None  # (B, Hkv, room): those of the tokens so far, then anything; None: no room
        self.most = 0  # tokens of the longest sequence, or more
        self.is_loose = False  # whether it may be many more: where sequences join and leave

    @property
    def memory_bytes(self) -> int:
        return 0 if self.scores is None else self.scores.nbytes

    @property
    def room(self) -> int:
        """For so many tokens of a sequence."""
        return 0 if self.scores is None else self.scores.shape[2]

    def append(self, state: CacheState, call: ExtendCall) -> None:
        """Note the scores of tokens that the cache is about to take. If it does not, they do not count."""
        library, length = state.library, call.length
        if call.batch == 0 or length == 0:
            return
        if library.is_capturing(state.device):
            raise RuntimeError("a cache with record_stops=True cannot take tokens in a CUDA graph: its record grows")
        self.is_loose = self.is_loose or call.slots is not None
        if self.is_loose and self.most + length > self.room:
            self.most = max(library.to_numpy(state.lengths.array).tolist())
        self._make_room(state, self.most + length)
        sequence = index(state, state.batch) if call.slots is None else Chosen.by(state, call.slots).rows
        before = state.lengths.array[sequence]
        scores, head = call.scores.array, index(state, state.kv_heads)[:, None]
        if call.cu_seqlens is None:
            position = before[:, None, None] + index(state, length)
            self.scores[sequence[:, None, None], head, position] = scores
        else:
            bounds = library.astype(call.cu_seqlens.array, "int32")
            number = library.search_right(bounds, library.arange(0, length, state.device)) - 1
            number = library.astype(library.xp.clip(number, None, call.batch - 1), "int64")
            position = (before - library.astype(bounds[:-1], "int64"))[number] + index(state, length)
            self.scores[sequence[number][None], head, position[None]] = scores[0]
        self.most += length

    def _make_room(self, state: CacheState, tokens: int) -> None:
        if tokens > self.room:
            shape = state.batch, state.kv_heads, max(tokens, 2 * self.room)
            larger = state.library.full(shape, 0, state.scores.dtype, state.device)
            if self.scores is not None:
                larger[:, :, :self.room] = self.scores
            self.scores = larger

    def forget(self, some: bool = False) -> None:
        """Remove all tokens, or those of ``some`` sequences."""
        self.most, self.is_loose = self.most if some else 0, some

    def selected(self, rows: Any = None) -> Record:
        """A copy, of the sequences ``rows (n,)``, by default of all."""
        found = Record()
        found.most, found.is_loose = self.most, self.is_loose
        if self.scores is not None:
            found.scores = self.scores[rows] if rows is not None else self.scores + 0
        return found

    def saved(self, state: CacheState) -> Any:
        """The scores ``(B, Hkv, tokens of the longest sequence)``. Synchronizes."""
        longest = max(state.library.to_numpy(state.lengths.array).tolist(), default=0)
        self._make_room(state, longest)
        if self.scores is None:
            return state.library.full((state.batch, state.kv_heads, 0), 0, state.scores.dtype, state.device)
        return state.library.contiguous(self.scores[:, :, :longest])

    def load(self, scores: Any) -> None:
        """The reverse of ``saved``."""
        self.scores, self.most = scores + 0, scores.shape[2]


def top_stops(prefix_stop: PrefixStop, state: CacheState, scores: Operand, document: Operand | None = None) -> Any:
    """Until when keys are in the top: a backend's ``prefix_stop``, and 0 for those below the threshold."""
    library, window = state.library, clipped(state.window, scores.shape[-1])
    if state.threshold == -inf:
        return prefix_stop(scores, window, None, document)
    closed = scores.array < state.threshold
    ranked = library.operand(library.xp.where(closed, -inf, scores.array), "scores")
    return library.xp.where(closed, 0, prefix_stop(ranked, window, None, document))


def stops(state: CacheState, record: Record, prefix_stop: PrefixStop) -> Any:
    """int32 ``(B, Hkv, N)``; see ``DynamicCache.stops``."""
    library, xp = state.library, state.library.xp
    scores = record.saved(state)
    tokens = scores.shape[2]
    key = library.arange(0, tokens, state.device)
    if not tokens or not state.batch:
        return library.full(scores.shape, 0, "int32", state.device)
    found = top_stops(prefix_stop, state, library.operand(scores, "scores"))
    if state.recent:
        found = xp.maximum(found, xp.clip(key, None, NEVER - state.recent) + state.recent)
    if state.sinks:
        found = xp.where(key < state.sinks, NEVER, found)
    length = library.astype(xp.clip(state.lengths.array, None, NEVER), "int32")[:, None, None]
    found = xp.where(found >= length, NEVER, xp.maximum(found, key))
    return library.astype(xp.where(key < length, found, key), "int32")
