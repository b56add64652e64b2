"""Key lists: which keys each tile of queries must gather, made on the device from the intervals of a mask.

A mask of which it is known that few keys meet a tile gets a list per tile (``KEYS_LISTED``). Any other mask gets one
list per row, of all keys that somebody sees, with a summary per block of keys by which a tile skips what it does not
see (``KEYS_SHARED``): memory stays linear for every mask.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma import jit
from cupy_dma.backends.cuda.configs import LIST_CHUNK, LIST_THREADS, LIST_TILES, LIST_WARPS, ListConfig, blocks
from cupy_dma.backends.cuda.runtime import Runtime
from cupy_dma.masks import IntervalMask


@dataclass(frozen=True, slots=True)
class KeyLists:
    """What the attention kernels need of a mask, on the device. Addresses point into ``workspace``."""

    keys: str  # KEYS_LISTED or KEYS_SHARED
    capacity: int  # entries of a tile's list
    list: int
    list_lengths: int
    summaries: int
    workspace: Any


def key_lists(runtime: Runtime, mask: IntervalMask, query_length: int, queries: int, block_n: int, causal: bool,
              stream: int) -> KeyLists:
    """The key lists of a mask for tiles of ``queries`` queries; kept on the mask, per stream."""
    identity = (query_length, queries, block_n, causal, stream)
    lists = mask._cache.get(identity)
    if lists is None:
        lists = mask._cache[identity] = _build(runtime, mask, query_length, queries, block_n, causal, stream)
    return lists


def _tile_capacity(mask: IntervalMask, queries: int) -> int:
    """Entries that a list of ``queries`` consecutive queries can need; 0 if one list must serve all tiles."""
    if mask._bound is None:
        return 0
    base, per_position = mask._bound
    capacity = base + per_position * (queries - 1)
    return capacity if capacity < mask.key_length else 0


def _build(runtime: Runtime, mask: IntervalMask, query_length: int, queries: int, block_n: int, causal: bool,
           stream: int) -> KeyLists:
    place, device, length = mask.library, mask.device, mask.key_length
    batch, heads, _ = mask.shape
    rows, chunks, tiles = batch * heads, blocks(length, LIST_CHUNK), blocks(query_length, queries)
    capacity = _tile_capacity(mask, queries)
    summary_blocks = 0 if capacity else blocks(length, block_n)
    sizes = {"chunk_info": 4 * rows * chunks, "summaries": 4 * rows * summary_blocks, "interval": 2 * rows * length,
             "seen": rows * length, "seen_count": rows, "list": rows * tiles * capacity,
             "list_lengths": 2 * rows * tiles}  # in int32
    workspace = place.empty((sum(sizes.values()) + 4 * len(sizes),), "int32", device)
    at = place.pointer(workspace)
    where = {}
    for name, size in sizes.items():
        where[name] = at
        at += 16 * blocks(size, 4)
    start, stop = mask._start, mask._stop
    params = jit.params("lists.cu", "ListParams").pack(
        start=start.pointer, stop=stop.pointer, start_batch=start.strides[0], start_head=start.strides[1],
        stop_batch=stop.strides[0], stop_head=stop.strides[1], heads=heads, key_length=length,
        query_length=query_length, chunks=chunks, queries=queries, tiles=tiles, capacity=capacity,
        summary_blocks=summary_blocks, **where)
    grids = {"count_seen": rows * chunks, "compact_seen": rows * chunks}
    if capacity:
        grids["tile_lists"] = rows * blocks(tiles, LIST_TILES)
    else:
        grids["summarize"] = rows * blocks(summary_blocks, LIST_WARPS)
    for entry, grid in grids.items():
        runtime.load(ListConfig(causal, block_n), entry, device.index).launch(grid, LIST_THREADS, params, stream)
    if capacity:
        return KeyLists("KEYS_LISTED", capacity, where["list"], where["list_lengths"], 0, workspace)
    return KeyLists("KEYS_SHARED", 0, where["seen"], where["seen_count"], where["summaries"], workspace)
