"""Places in a history for kept keys, so that a bias that is delayed finds the distances of their positions.

Attention compares indices: query ``i`` of a history ``[rows | length new keys]`` stands at ``rows + i``. Kept keys have
gaps between their positions, so they are spread: keys at least ``delay`` behind the first new token come first, in
their order, and every other key stands as far ahead of the new ones as its position is.

    [ rows: far keys | near keys, by their distance | new keys ]

Where the delay is longer than all that is attended to, distances are shortened: only those that some new token passes
matter, and the ``rows`` places before the new keys hold the keys that are near for all of them.
"""
from __future__ import annotations

from typing import Any


def spread_rows(rows: int, length: int, delay: int) -> tuple[int, int]:
    """How many rows ahead of ``length`` new keys ``rows`` kept ones need, and the delay to attend with."""
    delay = min(delay, rows + length)
    return rows + delay, delay


def places(xp: Any, age: Any, slot: Any, rows: int, length: int, delay: int) -> Any:
    """Where kept keys stand, int64 of the shape of ``age``: how far the first new token is ahead of each key, at least
    1. ``slot`` 0, ..., rows - 1 along the last axis, in the order of positions."""
    total, own = spread_rows(rows, length, delay)
    cut = delay - own  # by which distances are shortened
    near = total - (age - cut)
    if cut:
        near = xp.where(age - cut > rows, near, total - rows + slot)
    return xp.where(age >= delay, slot, near)
