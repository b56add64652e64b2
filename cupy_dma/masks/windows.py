"""Windows: how many keys a query keeps, an int, or a tuple of one int per kv head (SPEC section 17)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from cupy_dma import checks
from cupy_dma.arrays import describe

Window: TypeAlias = "int | tuple[int, ...]"


def is_sequence(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def window_of(window: Any, heads: int | None = None, name: str = "window") -> Window:
    """The checked window: an int, or from ints on the host one for each of ``heads``, reduced to an int if all are
    equal. With ``heads=None`` their number is not checked and they stay a tuple."""
    if not is_sequence(window) and not getattr(window, "shape", None):
        return checks.whole(window, name, 1)
    if not is_sequence(window):
        given = describe(window, name)
        if given.ndim != 1 or given.device.kind != "cpu":
            raise TypeError(f"{name} must be an int, or ints in host memory, one per kv head, got an array of shape "
                            f"{given.shape} on {given.device}")
        window = given.library.to_numpy(given.array).tolist()
    each = tuple([checks.whole(size, f"{name}[{head}]", 1) for head, size in enumerate(window)])
    if not each or heads is not None and len(each) != heads:
        count = "per kv head" if heads is None else f"for each of {heads} kv heads"
        raise ValueError(f"{name} must be an int, or one int {count}, got {len(each)} of them")
    return each if heads is None else _as_one(each)


def clipped(window: Window, most: int) -> Window:
    """The window, limited to ``most``."""
    return _as_one(tuple([min(size, most) for size in window])) if isinstance(window, tuple) else min(window, most)


def each_head(window: Window, heads: int) -> tuple[int, ...]:
    return window if isinstance(window, tuple) else (window,) * heads


def widest(window: Window) -> int:
    return max(window) if isinstance(window, tuple) else window


def narrowest(window: Window) -> int:
    return min(window) if isinstance(window, tuple) else window


def _as_one(each: tuple[int, ...]) -> Window:
    return each[0] if len(set(each)) == 1 else each
