"""Measured costs of the Hopper forward's tiles, in microseconds: ``sm90_costs.json``, written by
``python -m benchmarks tune_schedule``.
"""
from __future__ import annotations

import bisect
import functools
import json
from pathlib import Path
from typing import Any

from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile
from cupy_dma.backends.cuda.runtime.configs import blocks

PATH = Path(__file__).with_suffix(".json")


class Costs:
    """Costs of waves of one tile per SM, by the number of keys in a tile's list.

    ``entry``: of the data file. ``waves`` are times for some numbers of keys: of ``whole`` tiles, of ``slices`` of 64
    rows, of ``halves`` of 64 and 128 rows (both with a whole tile's list), and of ``short`` tiles. ``splits`` are the
    extra costs of splitting along the keys: fixed, per CTA, and per split of one tile."""

    def __init__(self, entry: dict[str, Any]):
        self._block_n = HopperTile(*entry["tile"]).block_n
        self._keys = [self._rounded(wave["keys"]) for wave in entry["waves"]]
        self._waves = {name: [wave[name] for wave in entry["waves"]] for name in entry["waves"][0]}
        self._splits = entry["splits"]

    def _rounded(self, keys: float) -> int:
        return blocks(max(1, round(keys)), self._block_n) * self._block_n

    def wave(self, name: str, keys: float) -> float:
        """Interpolated between the two nearest numbers of keys, or extrapolated from the first or last two."""
        at, all_keys, times = self._rounded(keys), self._keys, self._waves[name]
        i = min(max(1, bisect.bisect_left(all_keys, at)), len(all_keys) - 1)
        slope = (times[i] - times[i - 1]) / (all_keys[i] - all_keys[i - 1])
        return max(0.0, times[i] + slope * (at - all_keys[i]))

    def splits(self, keys: float, tiles: int, num_splits: int) -> float:
        """Time of ``tiles`` tiles of this many keys, each in ``num_splits`` splits, and their combination."""
        always, per_cta, per_split = self._splits
        return (self.wave("whole", keys / num_splits) + always + per_cta * tiles * num_splits
                + per_split * num_splits)


@functools.cache
def _all_costs() -> dict[tuple[str, HopperTile], dict[int, Costs]]:
    found: dict[tuple[str, HopperTile], dict[int, Costs]] = {}
    for entry in json.loads(PATH.read_text())["tiles"]:
        found.setdefault((entry["kind"], HopperTile(*entry["tile"])), {})[entry["head_dim"]] = Costs(entry)
    return found


@functools.cache
def costs_of(kind: str, head_dim: int, tile: HopperTile) -> Costs:
    """The costs of the smallest measured head dim that is at least this one."""
    entries = _all_costs()[kind, tile]
    return entries[min(size for size in entries if size >= head_dim)]
