"""Split-KV for few query rows (``kernels/decode/split_kv.cuh``): how the keys of a tile are split among blocks.

Shared by attention over few queries and by the steps of the decode cache.
"""
from __future__ import annotations

import heapq
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
    """Slots per split, for tiles of unequal numbers of slots, ``sets`` of each of these ``sizes``, so that the last
    block ends soonest. ``resident`` blocks run at a time, those of the largest tiles first; when one ends, the next
    begins. Among equals the fewest splits."""
    slots = -np.sort(-np.array(sizes))
    steps = -(-slots // (WARPS * STEP))
    first = blocks(int(steps[0]), MAX_SPLITS)
    of_split = np.unique(np.geomspace(first, int(steps[0]), num=100).round().astype(int))  # at most 100 candidates
    total = sets * (BLOCK_STEPS * -(-steps // of_split[:, None]) + steps).sum(1)
    bound = np.maximum(total / resident, BLOCK_STEPS + of_split)
    best = np.inf, 0
    for i in np.lexsort((-of_split, bound)):
        if bound[i] > best[0]:
            break
        best = min(best, (_last_end(steps.tolist() * sets, int(of_split[i]), resident), -int(of_split[i])))
    return -best[1] * WARPS * STEP


def _last_end(steps: list[int], of_split: int, resident: int) -> int:
    """When the last block ends."""
    ends = [0] * resident  # a heap
    for n in steps:
        for begin in range(0, n, of_split):
            heapq.heapreplace(ends, ends[0] + BLOCK_STEPS + min(of_split, n - begin))
    return max(ends)


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
