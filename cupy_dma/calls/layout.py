"""The order of the axes: ``"bnhd"`` (batch, position, head, dim) of this library, or ``"bhnd"`` of torch's SDPA.

Both have four axes, so shapes alone cannot tell them apart. Everything is computed in ``"bnhd"``; ``"bhnd"`` arrays are
viewed in that order, without a copy. If no layout is given and the shapes look like ``"bhnd"``, a warning says so.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, library_of

LAYOUTS = ("bnhd", "bhnd")
MAX_HEADS = 128  # in current models


def is_bnhd(layout: str | None) -> bool:
    """Whether the layout is ``"bnhd"`` or None. ValueError for an unknown one."""
    if layout is None:
        return True
    checks.choice(layout, "layout", LAYOUTS)
    return layout == "bnhd"


def in_bhnd(function: Callable[..., Any], arrays: tuple[tuple[str, Any], ...], *rest: Any, **options: Any) -> Any:
    """``function`` of named arrays ``(B, H, N, D)``; its first result is transposed back if it has four axes."""
    turned = [_turned(array, name) for name, array in arrays]
    try:
        found = function(*turned, *rest, **options, layout="bnhd")
    except ValueError as error:
        raise ValueError(f"{error} (layout='bhnd': shapes are shown with axes 1 and 2 swapped)") from error
    if isinstance(found, tuple):
        return (found[0].swapaxes(1, 2), *found[1:])
    return found.swapaxes(1, 2) if len(found.shape) == 4 else found


def _turned(array: Any, name: str) -> Any:
    library_of(array, name)  # TypeError if it is not an array
    if len(array.shape) != 4:
        raise ValueError(f"{name} must have shape (B, heads, N, D) with layout='bhnd', got {tuple(array.shape)}")
    if not hasattr(array, "swapaxes"):
        raise TypeError(f"{name} must have a method swapaxes for layout='bhnd', got {type(array).__name__}")
    return array.swapaxes(1, 2)


def warn_if_bhnd(q: Operand, k: Operand, stacklevel: int) -> None:
    """Warn if query and key, taken as ``(B, L, H, D)``, look more like ``(B, H, L, D)``."""
    if looks_like_bhnd(q, k):
        heads, keys = q.shape[2], k.shape[1]
        warnings.warn(f"query {q.shape} and key {k.shape} are read as (B, L, H, D): {heads} heads, but only {keys} "
                      f"keys. If they are (B, H, L, D), as for scaled_dot_product_attention, pass layout='bhnd'; if "
                      f"not, layout='bnhd' silences this warning", UserWarning, stacklevel=stacklevel)


def looks_like_bhnd(q: Operand, k: Operand) -> bool:
    """Whether to warn. A single key is common in this library: one token to attend to."""
    heads, keys = q.shape[2], k.shape[1]
    return heads > keys > 0 and k.shape[2] == heads and _fits(q, k) and (
        heads > MAX_HEADS or keys > 1 and (q.shape[1] > keys or heads > q.shape[1] > 1))


def hint(q: Operand, k: Operand) -> str:
    """What to append to an error about heads if only the other layout fits."""
    return "; (B, H, L, D), as for scaled_dot_product_attention, needs layout='bhnd'" if _fits(q, k) else ""


def _fits(q: Operand, k: Operand) -> bool:
    """Whether the shapes are valid in the other layout."""
    return k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
