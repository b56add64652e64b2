"""Key lists: which keys each tile of queries must gather, made on the device from the intervals of a mask.

A mask known to show few keys to a tile gets a list per tile (``KEYS_LISTED``). Any other mask gets one list per row, of
all keys that some query sees, with a summary per block of keys by which a tile skips blocks that it does not see
(``KEYS_SHARED``): memory stays linear for every mask. Without a bound, keys are sorted by their lifetimes, and the
gradients of keys use that list too, except for packed sequences.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cupy_dma.backends.cuda.lists.varlen import super_entries, tile_count
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder, GivenMask, argument_type
from cupy_dma.backends.cuda.runtime.configs import (
    LIFETIME_KINDS,
    LIST_CHUNK,
    LIST_THREADS,
    LIST_WARPS,
    LifetimesConfig,
    ListConfig,
    blocks,
)
from cupy_dma.backends.cuda.runtime.params import Packed, Ref
from cupy_dma.calls.sequences import Sequences
from cupy_dma.masks.interval import IntervalMask

SUMMARY_SIZES = (16, 32, 64, 96, 128)  # block sizes of the attention kernels, in keys

Fields = dict[str, Any]  # of kernels' parameters: numbers and Refs


@dataclass(frozen=True, slots=True)
class KeyLists:
    """The key lists that attention kernels read, on the device. Addresses point into ``workspace``."""

    keys: str  # KEYS_LISTED or KEYS_SHARED
    fields: Fields  # list, list_lengths, summaries, chunk_info, chunk, capacity
    workspace: Array | None


@argument_type
class ShortTiles(NamedTuple):
    """The first tiles of a set may have fewer queries than the others: how many tiles, and how many queries fewer."""

    tiles: int = 0
    missing_queries: int = 0


NO_SHORT_TILES = ShortTiles()


def key_lists(build: Builder, mask: IntervalMask, query_length: int, queries: int, block_n: int, causal: bool,
              sequences: Sequences | None = None, short_tiles: ShortTiles = NO_SHORT_TILES) -> KeyLists:
    """The key lists of a mask for tiles of ``queries`` queries; the lists of a caller's mask are kept on it.

    With ``sequences`` the mask is one of rows (``mask_of_rows``), which belongs to a single call.
    """
    if mask._bound is None:
        order = _derived(build, mask, _key_order, query_length, causal, sequences).fields
        of_chunks = {"chunk_info": order["chunk_info"], "chunk": LIST_CHUNK} if sequences else {}
        return KeyLists("KEYS_SHARED", {"list": order["order"], "list_lengths": order["seen_count"],
                                        "summaries": order[f"summaries_{block_n}"], **of_chunks}, None)
    # A tile's own list has no blocks, so forward and backward share it, whatever their block sizes.
    block_n = 64 if _tile_capacity(mask, queries) else block_n
    return _derived(build, mask, _tile_lists, query_length, queries, block_n, causal, sequences, short_tiles)


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """All keys of a mask row by their lifetimes, for masks without a bound (kernels/lists/lifetimes.cu)."""

    fields: Fields  # order, seen_count, of packed sequences chunk_info, and summaries of blocks of each size
    workspace: Array | None


def key_order(build: Builder, mask: IntervalMask, query_length: int, causal: bool,
              sequences: Sequences | None) -> KeyOrder | None:
    """The keys of a mask by their lifetimes, for all passes of a call, kept as ``key_lists`` are; None for packed
    sequences and for a mask with a bound."""
    if mask._bound is not None or sequences is not None:
        return None
    return _derived(build, mask, _key_order, query_length, causal, None)


def _key_order(build: Builder, mask: IntervalMask, query_length: int, causal: bool,
               sequences: Sequences | None = None) -> KeyOrder:
    rows, length = mask.shape[0] * mask.shape[1], mask.key_length
    chunks = rows * blocks(length, LIST_CHUNK)
    all_blocks = {size: rows * blocks(length, size) for size in SUMMARY_SIZES}
    space = Workspace(build, kind_count=LIFETIME_KINDS * chunks, order=rows * length, interval=2 * rows * length,
                      seen_count=rows, chunk_info=4 * chunks if sequences else 0,
                      summaries=4 * sum(all_blocks.values()))
    packed = {"bounds": sequences.bounds.pointer, "sequences": sequences.count} if sequences else {}
    params = jit.params("lists/lifetimes.cu", "LifetimeParams").pack_some(
        _mask_fields(mask, query_length), {"rows": rows, **packed}, space.refs)
    for entry, grid in (("count_kinds", chunks), ("order_keys", chunks),
                        ("summarize_keys", blocks(sum(all_blocks.values()), LIST_WARPS))):
        build.launch(build.load(LifetimesConfig(causal, bool(sequences)), entry), grid, LIST_THREADS, params)
    fields = {name: space.refs[name] for name in ("order", "seen_count", *(["chunk_info"] if sequences else []))}
    at = space.refs["summaries"]
    for size, count in all_blocks.items():
        fields[f"summaries_{size}"] = at
        at += 16 * count
    return KeyOrder(fields, space.workspace)


def _derived(build: Builder, mask: IntervalMask, make: Callable[..., Any], *arguments: Any) -> Any:
    """``make(build, mask, *arguments)``, once: kept on a caller's mask, otherwise by the program."""
    if isinstance(mask, GivenMask):
        return build.lists_of(mask, make, *arguments)
    known, identity = build.derived(mask), (make, *arguments)
    if identity not in known:
        known[identity] = make(build, mask, *arguments)
    return known[identity]


def _tile_capacity(mask: IntervalMask, queries: int) -> int:
    """Upper bound on the list entries of ``queries`` consecutive queries; 0 if one list must serve all tiles."""
    if mask._bound is None:
        return 0
    base, per_position = mask._bound
    capacity = base + per_position * (queries - 1)
    return capacity if capacity < mask.key_length else 0


@dataclass(frozen=True, slots=True)
class SuperLists:
    """Keys of each super-tile of consecutive queries, for the gradients of keys and values."""

    entries: int  # of all lists of a mask row
    fields: Fields  # capacity: entries of a list, a multiple of block_n
    workspace: Array | None


def super_lists(build: Builder, mask: IntervalMask, query_length: int, block_n: int, causal: bool,
                sequences: Sequences | None = None) -> SuperLists | None:
    """The super-tile lists of a mask, kept as ``key_lists`` are; None for a mask that needs none (``_tile_capacity``).

    A super-tile has as many queries as a query sees keys: measured fastest, and it bounds the memory of partial sums.
    """
    queries, capacity = _super_sizes(mask, query_length, block_n)
    if not queries:
        return None
    return _derived(build, mask, _super_lists, query_length, queries, capacity, causal, sequences)


def super_entries_of(mask: IntervalMask, query_length: int, block_n: int) -> int:
    """Entries of such lists of a mask row; 0 for a mask that needs none."""
    queries, capacity = _super_sizes(mask, query_length, block_n)
    return blocks(query_length, queries) * capacity if queries else 0


def _super_sizes(mask: IntervalMask, query_length: int, block_n: int) -> tuple[int, int]:
    """Queries of a super-tile of this mask and entries of its list; 0 for a mask that needs none."""
    queries = _super_queries(mask, query_length)
    return queries, blocks(_tile_capacity(mask, queries), block_n) * block_n if queries else 0


def _super_queries(mask: IntervalMask, query_length: int) -> int:
    """Queries of a super-tile of this mask; 0 for a mask that needs none."""
    if mask._bound is None:
        return 0
    queries = max(256, blocks(mask._bound[0], 64) * 64)
    return queries if _tile_capacity(mask, queries) and queries < query_length else 0


@functools.lru_cache(maxsize=1024)
def _layout(sizes: tuple[tuple[str, int], ...]) -> tuple[int, dict[str, int]]:
    """Layout of int32 arrays of these sizes in one allocation, each at 16 bytes: total bytes, and offsets by name."""
    offsets, at = {}, 0
    for name, size in sizes:
        offsets[name] = at
        at += 16 * blocks(size, 4)
    return at // 4 + 4, offsets


class Workspace:
    """One allocation for several int32 arrays."""

    def __init__(self, build: Builder, **sizes: int):
        length, offsets = _layout(tuple(sizes.items()))
        self.workspace = build.empty((length,), "int32")
        self.refs = {name: self.workspace.ref + offset for name, offset in offsets.items()}


def _seen_sizes(mask: IntervalMask, spans: bool) -> dict[str, int]:
    """The arrays that they write; ``spans``: also for super-tiles."""
    rows, length = mask.shape[0] * mask.shape[1], mask.key_length
    chunks = blocks(length, LIST_CHUNK)
    sizes = {"chunk_info": 4 * rows * chunks, "interval": 2 * rows * length, "seen": rows * length, "seen_count": rows}
    return sizes | {"span_sum": rows * chunks, "span_offset": rows * length} if spans else sizes


def _seen(build: Builder, mask: IntervalMask, query_length: int, block_n: int, causal: bool,
          sequences: Sequences | None, for_supers: bool = False) -> dict[str, Ref] | None:
    """The keys of a mask that some query sees, from count_seen and compact_seen, for all lists of a mask that the
    program makes itself; None for other masks, whose lists are made separately. ``block_n``: of the first list that
    needs them, whose kernels are loaded. ``for_supers``: also for super-tiles, which a backward needs."""
    if sequences is not None or isinstance(mask, GivenMask):
        return None
    known, identity = build.derived(mask), ("seen", query_length, causal)
    seen = known.get(identity)
    if seen is None or (for_supers and "span_sum" not in seen.refs):
        queries = _super_queries(mask, query_length) if for_supers or build.grad else 0
        seen = known[identity] = Workspace(build, **_seen_sizes(mask, queries > 0))
        params = _params(mask, query_length, {"super_queries": queries}, seen.refs, None)
        _count(build, mask, params, causal, block_n, False)
    return seen.refs


def _params(mask: IntervalMask, query_length: int, fields: Fields, refs: dict[str, Ref],
            sequences: Sequences | None) -> Packed:
    return jit.params("lists/intervals.cu", "ListParams").pack_some(_mask_fields(mask, query_length), {
        "bounds": sequences.bounds.pointer if sequences else 0, "sequences": sequences.count if sequences else 0},
        fields, refs)


def _mask_fields(mask: IntervalMask, query_length: int) -> Fields:
    start, stop, length = mask._start, mask._stop, mask.key_length
    return {"start": start.pointer, "stop": stop.pointer, "start_batch": start.strides[0],
            "start_head": start.strides[1], "stop_batch": stop.strides[0], "stop_head": stop.strides[1],
            "heads": mask.shape[1], "key_length": length, "query_length": query_length,
            "chunks": blocks(length, LIST_CHUNK)}


def _count(build: Builder, mask: IntervalMask, params: Packed, causal: bool, block_n: int, sequences: bool) -> None:
    """count_seen and compact_seen."""
    batch, heads, length = mask.shape
    for entry in ("count_seen", "compact_seen"):
        build.launch(build.load(ListConfig(causal, block_n, sequences), entry),
                     batch * heads * blocks(length, LIST_CHUNK), LIST_THREADS, params)


def _launch(build: Builder, mask: IntervalMask, query_length: int, causal: bool, block_n: int, last: str, grid: int,
            fields: Fields, refs: dict[str, Ref], count: bool, sequences: Sequences | None) -> None:
    """Launch ``last`` with its grid, if ``count`` after count_seen and compact_seen."""
    params = _params(mask, query_length, fields, refs, sequences)
    if count:
        _count(build, mask, params, causal, block_n, sequences is not None)
    # Lists take different times: with more blocks than SMs, all SMs must get equally many (1 % of 574 us).
    even = last == "tile_lists" and grid > build.num_sms
    build.launch(build.load(ListConfig(causal, block_n, sequences is not None), last), grid, LIST_THREADS, params,
                 pdl=not even)


def _tile_lists(build: Builder, mask: IntervalMask, query_length: int, queries: int, block_n: int, causal: bool,
                sequences: Sequences | None, short_tiles: ShortTiles) -> KeyLists:
    rows, length = mask.shape[0] * mask.shape[1], mask.key_length
    length_of_full_tiles = query_length + short_tiles.tiles * short_tiles.missing_queries
    tiles = tile_count(length_of_full_tiles, queries, sequences.count if sequences else 0)
    capacity = _tile_capacity(mask, queries)
    summary_blocks = 0 if capacity else blocks(length, block_n)
    of_all = capacity > 0 and length <= LIST_CHUNK  # tile_lists reads all keys
    seen = None if of_all else _seen(build, mask, query_length, block_n, causal, sequences)
    count = seen is None and not of_all
    space = Workspace(build, **_seen_sizes(mask, False) if count else {}, summaries=4 * rows * summary_blocks,
                      list=rows * tiles * capacity, list_lengths=2 * rows * tiles)
    fields = {"queries": queries, "tiles": tiles, "capacity": capacity, "summary_blocks": summary_blocks}
    at = (seen or {}) | space.refs
    if capacity:
        warps = _tile_warps(rows, tiles, build.num_sms)
        _launch(build, mask, query_length, causal, block_n, "tile_lists", rows * blocks(tiles, LIST_WARPS // warps),
                {**fields, "short_tiles": short_tiles.tiles, "missing_queries": short_tiles.missing_queries,
                 "tile_warps": warps}, at, count, sequences)
        return KeyLists("KEYS_LISTED", {"list": at["list"], "list_lengths": at["list_lengths"], "capacity": capacity},
                        space.workspace)
    _launch(build, mask, query_length, causal, block_n, "summarize",
            rows * blocks(summary_blocks, LIST_WARPS), fields, at, count, sequences)
    return KeyLists("KEYS_SHARED", {"list": at["seen"], "list_lengths": at["seen_count"], "summaries": at["summaries"],
                                    "chunk_info": at["chunk_info"], "chunk": LIST_CHUNK}, space.workspace)


def _tile_warps(rows: int, tiles: int, num_sms: int) -> int:
    """Warps per tile's list. A block searches the keys of all its tiles: more tiles per block mean fewer searches,
    fewer tiles mean more SMs at work."""
    return next((warps for warps in (4, 2) if rows * blocks(tiles, LIST_WARPS // warps) <= num_sms), 1)


def _super_lists(build: Builder, mask: IntervalMask, query_length: int, queries: int, capacity: int, causal: bool,
                 sequences: Sequences | None) -> SuperLists:
    rows = mask.shape[0] * mask.shape[1]
    supers = tile_count(query_length, queries, sequences.count if sequences else 0)
    entries = supers * capacity if sequences is None else super_entries(query_length, queries, capacity, sequences)
    seen = _seen(build, mask, query_length, 64, causal, sequences, for_supers=True)
    space = Workspace(build, **_seen_sizes(mask, True) if seen is None else {}, super_list=rows * entries,
                      super_lengths=rows * supers, slots=rows * entries)
    at = (seen or {}) | space.refs
    sizes = {"super_queries": queries, "supers": supers, "super_capacity": capacity, "super_entries": entries}
    _launch(build, mask, query_length, causal, 64, "super_lists", rows * supers, sizes, at, seen is None, sequences)
    read = ("seen", "seen_count", "span_offset", "super_list", "super_lengths", "slots")
    return SuperLists(entries, sizes | {name: at[name] for name in read}, space.workspace)
