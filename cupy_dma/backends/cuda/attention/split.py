"""Split-KV for few query rows (``kernels/decode/split_kv.cuh``): how the keys of a tile are split among blocks.

Shared by attention over few queries and by the steps of the decode cache.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import ELEMENT_BYTES, ELEMENTS, blocks

ROW_BYTES = 256  # of keys or values: longer rows leave registers for 8 query heads only, and none to load ahead
WARPS, STEP = 4, 16  # warps of a block; keys per step of a warp
MAX_SPLITS = 512  # as in the kernel file
BLOCK_STEPS = 4  # fixed cost of a block, in steps of its warps


@dataclass(frozen=True)
class SplitConfig(jit.Config):
    """The configuration that kernels/decode/split_kv.cuh needs."""

    element: str
    head_dim: int
    value_dim: int
    vector: bool
    rows: int
    warps: int
    softcap: bool
    min_blocks: int

    def shared_bytes(self, num_splits: int) -> int:
        """``struct SplitShared`` and the weights of ``num_splits`` splits."""
        chunks = blocks(self.head_dim, 64 // ELEMENT_BYTES[self.element])
        query = 512 * chunks * (2 if self.rows > 8 else 1)
        return query + 4 * self.rows * (self.warps * (self.value_dim + 2) + 1 + max(num_splits, self.warps)) + 16


def choose_splits(tiles: int, slots: int, resident: int) -> tuple[int, int]:
    """Splits per tile, for ``tiles`` tiles, and slots per split, if ``resident`` blocks run at a time: the fewest
    steps, one wave of blocks after the other; among equals the fewest splits."""
    best = None
    for wanted in range(1, min(blocks(slots, WARPS * STEP), MAX_SPLITS) + 1):
        split_size = blocks(blocks(slots, wanted), STEP) * STEP
        num_splits = blocks(slots, split_size)
        cost = blocks(tiles * num_splits, resident) * (BLOCK_STEPS + blocks(split_size, WARPS * STEP))
        if best is None or cost < best[0]:
            best = cost, num_splits, split_size
    assert best is not None
    return best[1:]


def choose_split_size(sizes: tuple[int, ...], sets: int, resident: int) -> int:
    """Slots per split, for tiles of unequal numbers of slots, ``sets`` of each of these ``sizes``, by the same rule.
    Those with more slots get more splits."""
    slots = np.array(sizes)
    steps = blocks(int(slots.max()), WARPS * STEP)
    first = blocks(steps, MAX_SPLITS)
    size = WARPS * STEP * np.unique(np.geomspace(first, steps, num=100).round().astype(int))  # at most 100 candidates
    waves = -(-sets * (-(-slots // size[:, None])).sum(1) // resident)
    cost = waves * (BLOCK_STEPS + size // (WARPS * STEP))
    return int(size[::-1][cost[::-1].argmin()])


def rows_of_group(group: int, head_dim: int, value_dim: int, dtype: str) -> tuple[int, int]:
    """Query heads per block, all of one GQA group, and the number of such sets in a group."""
    sets = max(1, blocks(group, max_rows(head_dim, value_dim, dtype)))
    return max(1, blocks(group, sets)), sets


def max_rows(head_dim: int, value_dim: int, dtype: str) -> int:
    """Of a block's tile."""
    return 8 if max(head_dim, value_dim) * ELEMENT_BYTES[ELEMENTS[dtype]] > ROW_BYTES else 16


def min_blocks(head_dim: int, value_dim: int, dtype: str, rows: int, cluster: int = 1) -> int:
    """Blocks per SM for which the registers must suffice, given the operands of a step. There are never more blocks in
    clusters than SMs."""
    if cluster > 1:
        return 1
    row_bytes = max(head_dim, value_dim) * ELEMENT_BYTES[ELEMENTS[dtype]]
    return 1 if row_bytes > ROW_BYTES else 2 if rows > 8 or row_bytes > ROW_BYTES // 2 else 4
