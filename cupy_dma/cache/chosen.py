"""Calls for some of a cache's sequences, those that ``slots (n,)`` of a call names, in array code of any library.

The rows of these sequences are copied, the call runs on the copy, and what it has left there is written back. A slot of
-1 names none. It stands for a sequence that no other slot of the call names, another one for each (``n`` is at most the
number of sequences), takes no token there, and writes back what it has found: so every write has a place of its own,
shapes are fixed, and nothing is read on the host. Call within ``state.library.on(state.device)``.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.cache.segments import EMPTY
from cupy_dma.cache.slots import flagged_first, index
from cupy_dma.cache.snapshot import OCCUPIED, bits
from cupy_dma.cache.state import CacheState, ExtendCall, Segments
from cupy_dma.calls.head_dims import unmoved

DERIVED = ("lowest", "lowest_score", "free")


def named(state: CacheState, slots: Operand) -> Any:
    """bool ``(B,)``: which of the cache's sequences are named."""
    return state.library.xp.any(index(state, state.batch)[:, None] == slots.array, -1)


@dataclass(slots=True, eq=False)
class Chosen:
    """The sequences of a call."""

    rows: Any  # int64 (n,): different sequences of the cache
    idle: Any  # bool (n,): of slots of -1
    start: Any = None  # of segments, int64 (n, Hkv)
    count: Any = None  # int32 (n, Hkv)

    @classmethod
    def by(cls, state: CacheState, slots: Operand) -> Chosen:
        library, xp, idle = state.library, state.library.xp, slots.array < 0
        others = flagged_first(state, ~named(state, slots)[None, None])[0, 0]
        number = xp.clip(library.cumsum(library.astype(idle, "int32")) - 1, 0, None)  # of an idle one among these
        rows = xp.where(idle, others[library.astype(number, "int64")], library.astype(slots.array, "int64"))
        if state.segments is None:
            return cls(rows, idle)
        return cls(rows, idle, *(x.array[rows] for x in (state.segments.start, state.segments.count)))

    def call(self, state: CacheState, call: ExtendCall) -> ExtendCall:
        """The call for a copy of these sequences."""
        library = state.library
        lengths = call.length if call.lengths is None else call.lengths.array
        real = library.astype(library.xp.where(self.idle, 0, lengths), "int64")
        return replace(call, slots=None, lengths=library.operand(real, "lengths"))

    def copied(self, state: CacheState, slots: int | None = None) -> CacheState:
        """A copy of these sequences, with arrays ``(n, Hkv, slots, ...)``; by default of all slots."""
        library, xp = state.library, state.library.xp
        slots = state.rows if slots is None else min(slots, state.rows)
        made: dict[str, Any] = {"segments": None}
        place = exists = None
        if state.segments is not None:
            exists = index(state, slots) < self.count[..., None]
            place = self.start[..., None] + self._existing(state, slots)
            made["segments"] = Segments((), *(library.operand(x, name) for x, name in (
                (self.count, "count"), (self.start, "start"))))
        for name in state.arrays:
            operand = getattr(state, name)
            array = bits(operand)
            if name not in state.per_row:
                array = array[self.rows]
            elif exists is None:
                array = array[:, :, :slots][self.rows]
            else:
                array = xp.where(exists, array[place], EMPTY[name]) if name in EMPTY else array[place]
            made[name] = library.operand(unmoved(library, array, operand.dtype), name)
        return replace(state, **made, workspace={})

    def put(self, copy: CacheState, before: CacheState, state: CacheState, names: Iterable[str] | None = None) -> None:
        """Write back what a call has left in ``copy``; ``before``: what was copied, of the first slots or all."""
        xp, writes, slots = state.library.xp, [], copy.positions.shape[2]
        for name in state.arrays if names is None else names:
            array, target, place = bits(getattr(copy, name)), bits(getattr(state, name)), self.rows
            if name in DERIVED:  # those of a sequence without tokens stay what they are
                array = xp.where(self.idle[:, None], getattr(before, name).array, array)
            elif name in state.per_row and state.segments is None:
                target = target[:, :, :slots]
            elif name in state.per_row:
                slot = self._existing(state, slots)
                batch, head = index(state, slot.shape[0])[:, None, None], index(state, slot.shape[1])[:, None]
                array, place = array[batch, head, slot], self.start[..., None] + slot
            writes.append((target, place, array))
        for target, place, array in writes:  # which allocates nothing
            target[place] = array
        state.workspace.pop(OCCUPIED, None)

    def _existing(self, state: CacheState, slots: int) -> Any:
        """``0, ..., slots - 1``, or the last one of a head with fewer, int64 ``(n, Hkv, slots)``."""
        last = state.library.astype(self.count, "int64")[..., None] - 1
        return state.library.xp.minimum(index(state, slots), last)
