"""Which slots of a cache are needed, and the array operations behind it: the same code for NumPy, CuPy and torch.

``needed`` and ``flagged_first`` take arrays ``(B, Hkv, R)``, as ``rectangular`` gives them.
Everything is an elementwise operation, a prefix sum or an indexed copy: it runs on the arrays' device in a fixed order
and never reads a value on the host. Call within ``state.library.on(state.device)``.
"""
from __future__ import annotations

from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.cache.segments import rectangular
from cupy_dma.cache.state import CacheState
from cupy_dma.calls.head_dims import movable

AFTER_ALL = 2**63 - 1  # after the position of any token


def index(state: CacheState, stop: int) -> Any:
    """int64 0, ..., stop - 1: a type that all libraries accept as an index."""
    return state.library.astype(state.library.arange(0, stop, state.device), "int64")


def rows(state: CacheState, operand: Operand) -> Any:
    """Keys or values, the cache's or new ones, in a type that every copy supports."""
    return movable(state.library, operand.array, operand.dtype)


def needed(state: CacheState, position: Any) -> Any:
    """bool ``(B, Hkv, R)``: slots that a query at ``position (B,)`` sees if no newer token has been added."""
    where = state.positions.array
    found = state.in_top.array != 0
    if state.sinks:
        found = found | ((where >= 0) & (where < state.sinks))
    if state.recent:
        found = found | ((where >= 0) & (where > position[:, None, None] - state.recent))
    return found


def refreshed(state: CacheState) -> CacheState:
    """The state with new arrays ``lowest``, ``lowest_score`` and ``free``, for the next position, ``lengths``."""
    xp, held = state.library.xp, rectangular(state, ("scores", "positions", "in_top"))
    score, where, top, length = held.scores.array, held.positions.array, held.in_top.array != 0, state.lengths.array
    # The smallest score in the top that is a number, or any if all are NaN; of equal ones the oldest.
    number = top & ~xp.isnan(score)
    least = xp.amin(xp.where(number, score, float("inf")), -1)[..., None]
    last = xp.where(xp.any(number, -1)[..., None], number & (score == least), top)
    slot = xp.argmin(xp.where(last, where, AFTER_ALL), -1)
    spare = ~needed(held, length)
    if state.segments is not None:
        spare = spare & (index(state, where.shape[2]) < state.segments.count.array[..., None])
    room = state.each_window - state.library.astype(top, "int32").sum(-1)
    found = {"lowest": xp.where(room > 0, -room, slot),
             "lowest_score": xp.where(xp.any(number, -1), least[..., 0], float("nan")),
             "free": xp.where(xp.any(spare, -1), xp.argmax(state.library.astype(spare, "uint8"), -1), -1)}
    return state.having({name: state.library.operand(state.library.astype(x, getattr(state, name).dtype), name)
                         for name, x in found.items()})


def flagged_first(state: CacheState, flags: Any) -> Any:
    """int64 stable partition of the last axis of ``flags (B', Hkv, n)``: indices where it is set, then the others."""
    library = state.library
    lead, heads, n = flags.shape
    yes, no = (library.astype(library.cumsum(library.astype(x, "int32")), "int64") for x in (flags, ~flags))
    target = library.xp.where(flags, yes - 1, yes[..., -1:] + no - 1)
    found = library.full((lead, heads, n), 0, "int64", state.device)
    found[index(state, lead)[:, None, None], index(state, heads)[:, None], target] = index(state, n)
    return found
