"""Whole sequences of a cache: creation, copies, reordering and saving. Call within ``library.on(device)``."""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Device, Library, Operand, describe
from cupy_dma.cache.slots import refresh
from cupy_dma.cache.state import CacheState
from cupy_dma.calls.head_dims import movable

SAVED = ("key", "value", "scores", "positions", "in_top", "lengths")  # the other arrays follow from these
NUMBERS = ("window", "sinks", "recent")
ARRAYS = (*SAVED, "lowest", "lowest_score", "free")


def empty_state(library: Library, device: Device, dtype: str, batch: int, kv_heads: int, numbers: tuple[int, int, int],
                head_dim: int, value_dim: int) -> CacheState:
    """A cache without tokens; ``numbers`` are window, sinks and recent."""
    rows, scores = sum(numbers), "float64" if dtype == "float64" else "float32"

    def make(name: str, kind: str, *shape: int, value: int = 0) -> Operand:
        return library.operand(library.full(shape, value, kind, device), name)

    return CacheState(
        make("key", dtype, batch, kv_heads, rows, head_dim), make("value", dtype, batch, kv_heads, rows, value_dim),
        make("scores", scores, batch, kv_heads, rows), make("positions", "int64", batch, kv_heads, rows, value=-1),
        make("in_top", "uint8", batch, kv_heads, rows), make("lengths", "int64", batch),
        make("lowest", "int32", batch, kv_heads, value=-1), make("lowest_score", scores, batch, kv_heads),
        make("free", "int32", batch, kv_heads), *numbers)


def forget(state: CacheState) -> None:
    """Remove all tokens, in place."""
    for operand, value in ((state.positions, -1), (state.in_top, 0), (state.lengths, 0), (state.lowest, -1),
                           (state.free, 0)):
        operand.array[...] = value


def copy_rows(source: CacheState, target: CacheState, rows: Any = None) -> None:
    """Copy the sequences ``rows (n,)`` of ``source``, by default all, into ``target``, which may be ``source``."""
    for name in ARRAYS:
        old, new = _bits(getattr(source, name)), _bits(getattr(target, name))
        new[...] = old if rows is None else old[rows]


def saved_state(state: CacheState) -> dict[str, Any]:
    """Copies of the arrays, and the numbers that define their meaning."""
    found: dict[str, Any] = {name: getattr(state, name) for name in NUMBERS}
    for name in SAVED:
        operand = getattr(state, name)
        copy = state.library.operand(state.library.empty(operand.shape, operand.dtype, state.device), name)
        _bits(copy)[...] = _bits(operand)
        found[name] = copy.array
    return found


def load(state: CacheState, saved: dict[str, Any]) -> None:
    """The reverse of ``saved_state``. Raises what ``DynamicCache.load_state_dict`` documents."""
    missing = [name for name in (*SAVED, *NUMBERS) if name not in saved]
    if missing:
        raise KeyError(f"saved must contain {', '.join((*SAVED, *NUMBERS))}; missing: {', '.join(missing)}")
    for name in NUMBERS:
        if saved[name] != getattr(state, name):
            raise ValueError(f"saved must be of a cache with {name}={getattr(state, name)}, got {saved[name]}")
    arrays = [_as_here(getattr(state, name), saved[name], f"saved[{name!r}]") for name in SAVED]
    for name, operand in zip(SAVED, arrays):
        _bits(getattr(state, name))[...] = _bits(operand)
    refresh(state)


def _as_here(here: Operand, array: Any, name: str) -> Operand:
    """A saved array of ``here``'s shape and type, in the library and on the device of ``here``."""
    given = describe(array, name)
    checks.has_shape(given, "of this cache", tuple((size,) for size in here.shape))
    if given.dtype != here.dtype:
        raise TypeError(f"{name} must be {here.dtype}, got {given.dtype}")
    if (given.library.name, given.device) == (here.library.name, here.device):
        return given
    values = given.library.to_numpy(given.array).copy()
    return here.library.operand(here.library.from_numpy(values, here.device), name)


def _bits(operand: Operand) -> Any:
    return movable(operand.library, operand.array, operand.dtype)
