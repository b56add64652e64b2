"""Budgets: how many keys the layers of a model keep, by layer and kv head.

    512                       every layer and kv head
    [512, 64, ...]            one per layer
    [[512, 64], [64, 64]]     for each layer one per kv head; a single layer's stands for all
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupy_dma.arrays import describe
from cupy_dma.masks.windows import Window, is_sequence, window_of


def budgets(given: Any, name: str, layers: Sequence[int], heads: Sequence[int | None]) -> list[Window]:
    """The checked budget of each of ``layers``, which have these numbers of kv ``heads`` (None: not checked).

    Raises
    ------
    TypeError, ValueError
        A budget is not an int of at least 1, or there are too many or too few.
    """
    if getattr(given, "shape", None):
        array = describe(given, name)
        if array.ndim > 2 or array.device.kind != "cpu":
            raise TypeError(f"{name} must be ints in host memory, at most (layers, kv heads) of them, got an array of "
                            f"shape {array.shape} on {array.device}")
        given = array.library.to_numpy(array.array).tolist()
    if not is_sequence(given):
        return [window_of(given, name=name)] * len(layers)
    if len(given) == 1 and is_sequence(given[0]):
        given = [given[0]] * len(layers)
    if len(given) != len(layers):
        raise ValueError(f"{name} must be an int, one per layer, or for each layer one per kv head, where the layers "
                         f"are {list(layers)}, got {len(given)} of them; [[...]] gives all layers the same ones per kv "
                         f"head")
    return [window_of(each, number, f"{name}[{place}]") for place, (each, number) in enumerate(zip(given, heads))]


def stored(each: Sequence[Window]) -> int | list[int | list[int]]:
    """Budgets as a configuration keeps them, and ``budgets`` takes them."""
    if len(set(each)) == 1 and isinstance(each[0], int):
        return each[0]
    return [list(budget) if isinstance(budget, tuple) else budget for budget in each]
