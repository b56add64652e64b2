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


@dataclass(frozen=True, slots=True)
class SuperLists:
    """Keys of each super-tile of consecutive queries, for the gradients of keys and values. Addresses as above."""

    supers: int
    queries: int  # of a super-tile
    capacity: int  # entries of a list, a multiple of block_n
    fields: dict[str, int]  # what the kernels' parameters call the addresses
    workspace: Any


def super_lists(runtime: Runtime, mask: IntervalMask, query_length: int, block_n: int, causal: bool,
                stream: int) -> SuperLists | None:
    """The super-tile lists of a mask, kept on it per stream; None for a mask that needs none (see ``_tile_capacity``).

    A super-tile has as many queries as a query sees keys: measured best, and what bounds the partial sums' memory.
    """
    if mask._bound is None:
        return None
    queries = max(256, blocks(mask._bound[0], 64) * 64)
    capacity = blocks(_tile_capacity(mask, queries), block_n) * block_n
    if not capacity or queries >= query_length:
        return None
    identity = ("super", query_length, queries, block_n, causal, stream)
    lists = mask._cache.get(identity)
    if lists is None:
        lists = mask._cache[identity] = _build_supers(runtime, mask, query_length, queries, capacity, causal, stream)
    return lists


class _Workspace:
    """One allocation for several arrays of int32, each on 16 bytes."""

    def __init__(self, mask: IntervalMask, sizes: dict[str, int]):
        self.array = mask.library.empty((sum(sizes.values()) + 4 * len(sizes),), "int32", mask.device)
        self.addresses = {}
        at = mask.library.pointer(self.array)
        for name, size in sizes.items():
            self.addresses[name] = at
            at += 16 * blocks(size, 4)


_UNUSED = {name: 0 for name in ("chunk_info", "seen", "interval", "seen_count", "list", "list_lengths", "summaries",
                                "span_sum", "span_offset", "super_list", "super_lengths", "places", "queries", "tiles",
                                "capacity", "summary_blocks", "super_queries", "supers", "super_capacity")}


def _launch(runtime: Runtime, mask: IntervalMask, query_length: int, config: ListConfig, stream: int,
            grids: dict[str, int], **fields: int) -> None:
    start, stop = mask._start, mask._stop
    length = mask.key_length
    chunks = blocks(length, LIST_CHUNK)
    rows = mask.shape[0] * mask.shape[1]
    params = jit.params("lists.cu", "ListParams").pack(
        start=start.pointer, stop=stop.pointer, start_batch=start.strides[0], start_head=start.strides[1],
        stop_batch=stop.strides[0], stop_head=stop.strides[1], heads=mask.shape[1], key_length=length,
        query_length=query_length, chunks=chunks, **{**_UNUSED, **fields})
    for entry, grid in {"count_seen": rows * chunks, "compact_seen": rows * chunks, **grids}.items():
        runtime.load(config, entry, mask.device.index).launch(grid, LIST_THREADS, params, stream)


def _compacted(mask: IntervalMask) -> dict[str, int]:
    """Sizes of what count_seen and compact_seen write."""
    rows, length = mask.shape[0] * mask.shape[1], mask.key_length
    return {"chunk_info": 4 * rows * blocks(length, LIST_CHUNK), "interval": 2 * rows * length, "seen": rows * length,
            "seen_count": rows}


def _build(runtime: Runtime, mask: IntervalMask, query_length: int, queries: int, block_n: int, causal: bool,
           stream: int) -> KeyLists:
    rows, tiles = mask.shape[0] * mask.shape[1], blocks(query_length, queries)
    capacity = _tile_capacity(mask, queries)
    summary_blocks = 0 if capacity else blocks(mask.key_length, block_n)
    space = _Workspace(mask, {**_compacted(mask), "summaries": 4 * rows * summary_blocks,
                              "list": rows * tiles * capacity, "list_lengths": 2 * rows * tiles})
    last = {"tile_lists": rows * blocks(tiles, LIST_TILES)} if capacity else {
        "summarize": rows * blocks(summary_blocks, LIST_WARPS)}
    _launch(runtime, mask, query_length, ListConfig(causal, block_n), stream, last, queries=queries, tiles=tiles,
            capacity=capacity, summary_blocks=summary_blocks, **space.addresses)
    at = space.addresses
    if capacity:
        return KeyLists("KEYS_LISTED", capacity, at["list"], at["list_lengths"], 0, space.array)
    return KeyLists("KEYS_SHARED", 0, at["seen"], at["seen_count"], at["summaries"], space.array)


def _build_supers(runtime: Runtime, mask: IntervalMask, query_length: int, queries: int, capacity: int, causal: bool,
                  stream: int) -> SuperLists:
    rows, supers = mask.shape[0] * mask.shape[1], blocks(query_length, queries)
    space = _Workspace(mask, {**_compacted(mask), "span_sum": rows * blocks(mask.key_length, LIST_CHUNK),
                              "span_offset": rows * mask.key_length, "super_list": rows * supers * capacity,
                              "super_lengths": rows * supers, "places": rows * supers * capacity})
    _launch(runtime, mask, query_length, ListConfig(causal, block_n=64), stream, {"super_lists": rows * supers},
            super_queries=queries, supers=supers, super_capacity=capacity, **space.addresses)
    kept = ("seen", "seen_count", "span_offset", "super_list", "super_lengths", "places")
    return SuperLists(supers, queries, capacity, {name: space.addresses[name] for name in kept}, space.array)
