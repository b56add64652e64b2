"""What a cache's slots are good for, and the few array operations behind it: the same code for NumPy, CuPy and torch.

Everything is elementwise, a running sum, or an indexed copy: it runs where the arrays are, in a fixed order, and never
looks at a value from the host. Call within ``state.library.on(state.device)``.
"""
from __future__ import annotations

from typing import Any

from cupy_dma.arrays import Library, Operand
from cupy_dma.cache.state import CacheState

AFTER_ALL = 2**63 - 1  # no token stands there


def index(state: CacheState, stop: int) -> Any:
    """int64 0, ..., stop - 1: a type that all libraries take as an index."""
    return state.library.astype(state.library.arange(0, stop, state.device), "int64")


def movable(library: Library, array: Any, dtype: str) -> Any:
    """Elements as they are moved about: bfloat16, which not every operation knows, as the integers of its bits."""
    return array.view(library.xp.int16) if dtype == "bfloat16" else array


def rows(state: CacheState, operand: Operand) -> Any:
    """Keys or values, of the cache or new ones, as they are moved about."""
    return movable(state.library, operand.array, operand.dtype)


def needed(state: CacheState, position: Any) -> Any:
    """bool ``(B, Hkv, R)``: slots that a query at ``position (B,)`` sees, if nothing newer has come."""
    where = state.positions.array
    found = state.in_top.array != 0
    if state.sinks:
        found = found | ((where >= 0) & (where < state.sinks))
    if state.recent:
        found = found | ((where >= 0) & (where > position[:, None, None] - state.recent))
    return found


def refresh(state: CacheState) -> None:
    """Find ``lowest``, its score and ``free`` anew for the position ``lengths`` that comes next."""
    xp, score, where = state.library.xp, state.scores.array, state.positions.array
    top, length = state.in_top.array != 0, state.lengths.array
    # The smallest number in the top, or, where all are NaN, any; of those the oldest.
    number = top & ~xp.isnan(score)
    least = xp.amin(xp.where(number, score, float("inf")), -1)[..., None]
    last = xp.where(xp.any(number, -1)[..., None], number & (score == least), top)
    slot = xp.argmin(xp.where(last, where, AFTER_ALL), -1)
    state.lowest.array[...] = xp.where((length >= state.window)[:, None], slot, -1)
    state.lowest_score.array[...] = xp.where(xp.any(number, -1), least[..., 0], float("nan"))
    spare = ~needed(state, length)
    state.free.array[...] = xp.where(xp.any(spare, -1), xp.argmax(state.library.astype(spare, "uint8"), -1), -1)


def flagged_first(state: CacheState, flags: Any) -> Any:
    """int64 permutation of the last axis of ``flags (B', Hkv, n)``: where it is set, then the rest, each in order."""
    library = state.library
    lead, heads, n = flags.shape
    yes, no = (library.astype(library.cumsum(library.astype(x, "int32")), "int64") for x in (flags, ~flags))
    target = library.xp.where(flags, yes - 1, yes[..., -1:] + no - 1)
    found = library.full((lead, heads, n), 0, "int64", state.device)
    found[index(state, lead)[:, None, None], index(state, heads)[:, None], target] = index(state, n)
    return found


def widened(operand: Operand, size: int) -> Operand:
    """``operand (..., d)`` with zero columns up to ``size``: a product of rows does not change by them."""
    if operand.shape[-1] == size:
        return operand
    library = operand.library
    wide = library.operand(library.full((*operand.shape[:-1], size), 0, operand.dtype, operand.device), operand.name)
    movable(library, wide.array, wide.dtype)[..., :operand.shape[-1]] = movable(library, operand.array, operand.dtype)
    return wide
