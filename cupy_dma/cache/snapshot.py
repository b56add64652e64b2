"""Whole sequences of a cache: creation, copies, reordering and saving. Call within ``library.on(device)``.

Whoever changes a cache computes new arrays first and then copies them into place (``copy_rows``), which allocates
nothing: a call that runs out of memory has changed nothing.
"""
from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Device, Library, Operand, describe
from cupy_dma.cache.slots import refreshed
from cupy_dma.cache.state import CacheState
from cupy_dma.calls.head_dims import movable
from cupy_dma.masks.windows import Window, widest

SAVED = ("key", "value", "scores", "positions", "in_top", "lengths")  # the other arrays follow from these
NUMBERS = ("window", "sinks", "recent", "threshold")
ARRAYS = (*SAVED, "lowest", "lowest_score", "free")
OCCUPIED = "occupied"  # in the workspace: how many slots of each head may be occupied, the first ones


def empty_state(library: Library, device: Device, dtype: str, batch: int, kv_heads: int,
                numbers: tuple[Window, int, int, float], head_dim: int, value_dim: int) -> CacheState:
    """A cache without tokens; ``numbers`` are window, sinks, recent and threshold."""
    window, sinks, recent, _ = numbers
    rows, scores = widest(window) + sinks + recent, "float64" if dtype == "float64" else "float32"

    def make(name: str, kind: str, *shape: int, value: int = 0) -> Operand:
        return library.operand(library.full(shape, value, kind, device), name)

    found = CacheState(
        make("key", dtype, batch, kv_heads, rows, head_dim), make("value", dtype, batch, kv_heads, rows, value_dim),
        make("scores", scores, batch, kv_heads, rows), make("positions", "int64", batch, kv_heads, rows, value=-1),
        make("in_top", "uint8", batch, kv_heads, rows), make("lengths", "int64", batch),
        make("lowest", "int32", batch, kv_heads), make("lowest_score", scores, batch, kv_heads),
        make("free", "int32", batch, kv_heads), *numbers, make("tickets", "int32", batch * kv_heads + batch),
        _windows(make("windows", "int32", kv_heads), window) if isinstance(window, tuple) else None)
    _all_room(found)
    return found


def without_tokens(state: CacheState, window: Window) -> CacheState:
    """A cache like this one, without tokens, with another window."""
    return empty_state(state.library, state.device, state.key.dtype, state.batch, state.kv_heads,
                       (window, state.sinks, state.recent, state.threshold), state.head_dim, state.value_dim)


def resized(state: CacheState, window: int) -> CacheState:
    """The same contents with a larger window."""
    found = without_tokens(state, window)
    for name in ("key", "value", "scores", "positions", "in_top"):
        _bits(getattr(found, name))[:, :, :state.rows] = _bits(getattr(state, name))
    found.lengths.array[...] = state.lengths.array
    return refreshed(found)


def _windows(empty: Operand, window: tuple[int, ...]) -> Operand:
    for head, size in enumerate(window):  # numbers of the host, also while a graph is captured
        empty.array[head:head + 1] = size
    return empty


def _all_room(state: CacheState) -> None:
    state.lowest.array[...] = -(state.window if state.windows is None else state.windows.array)  # type: ignore[operator]


def forget(state: CacheState) -> None:
    """Remove all tokens, in place."""
    for operand, value in ((state.positions, -1), (state.in_top, 0), (state.lengths, 0), (state.free, 0)):
        operand.array[...] = value
    _all_room(state)
    state.workspace.pop(OCCUPIED, None)


def copy_rows(source: CacheState, target: CacheState, rows: Any = None, names: Iterable[str] = ARRAYS) -> None:
    """Copy the sequences ``rows (n,)`` of ``source``, by default all, into ``target``, which may be ``source``.
    Without ``rows`` nothing is allocated."""
    arrays: Iterable[Any] = (_bits(getattr(source, name)) for name in names)
    if rows is not None:
        arrays = (array[rows] for array in arrays)
    if source is target:
        arrays = list(arrays)  # all of them before the first is overwritten
    for name, array in zip(names, arrays):
        _bits(getattr(target, name))[...] = array
    target.workspace.pop(OCCUPIED, None)


def copied(state: CacheState, names: Iterable[str] = ARRAYS) -> CacheState:
    """The state with copies of these arrays."""
    def copy(operand: Operand) -> Operand:
        array = state.library.empty(operand.shape, operand.dtype, state.device)
        made = state.library.operand(array, operand.name)
        _bits(made)[...] = _bits(operand)
        return made

    return state.having({name: copy(getattr(state, name)) for name in names})


def numbers_of(state: CacheState) -> dict[str, Any]:
    """Those that define what is kept; no threshold where none is set."""
    return {name: getattr(state, name) for name in NUMBERS if name != "threshold" or state.threshold > -inf}


def saved_state(state: CacheState) -> dict[str, Any]:
    """Copies of the arrays, and the numbers that define their meaning."""
    copies = copied(state, SAVED)
    return numbers_of(state) | {name: getattr(copies, name).array for name in SAVED}


def load(state: CacheState, saved: dict[str, Any]) -> None:
    """The reverse of ``saved_state``. Raises what ``DynamicCache.load_state_dict`` documents."""
    numbers = numbers_of(state)
    missing = [name for name in (*SAVED, *numbers) if name not in saved]
    if missing:
        raise KeyError(f"saved must contain {', '.join((*SAVED, *numbers))}; missing: {', '.join(missing)}")
    for name, own in numbers.items():
        number = tuple(saved[name]) if isinstance(saved[name], list) else saved[name]  # windows that JSON has kept
        if number != own:
            raise ValueError(f"saved must be of a cache with {name}={own}, got {saved[name]}")
    arrays = {name: _as_here(getattr(state, name), saved[name], f"saved[{name!r}]") for name in SAVED}
    copy_rows(refreshed(state.having(arrays)), state)


def _as_here(here: Operand, array: Any, name: str) -> Operand:
    """The same, of ``here``'s shape, too."""
    checks.has_shape(describe(array, name), "of this cache", tuple((size,) for size in here.shape))
    return same_kind(here, array, name)


def same_kind(here: Operand, array: Any, name: str) -> Operand:
    """A saved array of ``here``'s type, in its library and on its device."""
    given = describe(array, name)
    if given.dtype != here.dtype:
        raise TypeError(f"{name} must be {here.dtype}, got {given.dtype}")
    if (given.library.name, given.device) == (here.library.name, here.device):
        return given
    values = given.library.to_numpy(given.array).copy()
    return here.library.operand(here.library.from_numpy(values, here.device), name)


def _bits(operand: Operand) -> Any:
    return movable(operand.library, operand.array, operand.dtype)
