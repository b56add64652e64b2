"""The order of the axes: ``"bnhd"``, (batch, position, head, dim), is ours; ``"bhnd"`` is that of torch's SDPA.

Both have four axes, so shapes alone cannot tell them apart. The functions compute in ``"bnhd"``; the other order is a
view of it, without copies. Where no layout is given and the shapes speak for the other one, a warning says so.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, library_of

LAYOUTS = ("bnhd", "bhnd")
MAX_HEADS = 128  # of models in use


def is_bnhd(layout: str | None) -> bool:
    """Whether the arrays are in our order. ValueError for a layout that is none."""
    if layout is None:
        return True
    checks.choice(layout, "layout", LAYOUTS)
    return layout == "bnhd"


def in_bhnd(function: Callable[..., Any], arrays: tuple[tuple[str, Any], ...], *rest: Any, **options: Any) -> Any:
    """``function`` of named arrays ``(B, H, N, D)``; its first result is turned back if it has four axes."""
    turned = [_turned(array, name) for name, array in arrays]
    try:
        found = function(*turned, *rest, **options, layout="bnhd")
    except ValueError as error:
        raise ValueError(f"{error} (layout='bhnd': shapes are shown after the exchange of the axes 1 and 2)") from error
    if isinstance(found, tuple):
        return (found[0].swapaxes(1, 2), *found[1:])
    return found.swapaxes(1, 2) if len(found.shape) == 4 else found


def _turned(array: Any, name: str) -> Any:
    library_of(array, name)  # TypeError if it is no array
    if len(array.shape) != 4:
        raise ValueError(f"{name} must have shape (B, heads, N, D) with layout='bhnd', got {tuple(array.shape)}")
    if not hasattr(array, "swapaxes"):
        raise TypeError(f"{name} must have a method swapaxes for layout='bhnd', got {type(array).__name__}")
    return array.swapaxes(1, 2)


def warn_if_bhnd(q: Operand, k: Operand, stacklevel: int) -> None:
    """A warning where query and key ``(B, L, H, D)`` are more plausible as ``(B, H, L, D)``."""
    if looks_like_bhnd(q, k):
        heads, keys = q.shape[2], k.shape[1]
        warnings.warn(f"query {q.shape} and key {k.shape} are read as (B, L, H, D): {heads} heads, but only {keys} "
                      f"keys. If they are (B, H, L, D), as for scaled_dot_product_attention, pass layout='bhnd'; if "
                      f"not, layout='bnhd' says so", UserWarning, stacklevel=stacklevel)


def looks_like_bhnd(q: Operand, k: Operand) -> bool:
    """Whether ``warn_if_bhnd`` warns. A single key is a usual case of ours, such as one token to attend to."""
    heads, keys = q.shape[2], k.shape[1]
    return heads > keys > 0 and k.shape[2] == heads and _fits(q, k) and (
        heads > MAX_HEADS or keys > 1 and (q.shape[1] > keys or heads > q.shape[1] > 1))


def hint(q: Operand, k: Operand) -> str:
    """What to add to an error about heads, where only the other layout fits."""
    return "; (B, H, L, D), as for scaled_dot_product_attention, needs layout='bhnd'" if _fits(q, k) else ""


def _fits(q: Operand, k: Operand) -> bool:
    """Whether the shapes are possible in the other layout."""
    return k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
