"""The tile scheduler of the Hopper forward, host side: which tile a call takes, and how its tiles fill the SMs.

The device side is ``kernels/sm90/scheduler.cuh``. Tiles run on persistent CTAs, one per SM, in waves; what these
functions decide is the last wave, which rarely fills the SMs: its tiles may be cut by rows, be short ones, or be split
along their keys (split-KV). Times are relative to that of a tile with the most keys.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

from cupy_dma.backends.cuda.attention.sm90_tiles import (
    BLOCK_128_KEYS,
    SECOND_TIMES,
    Facts,
    HopperTile,
    entry,
    tiles_of,
)
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime.configs import blocks

SWIZZLE_GROUP_WAVES = 2  # tiles that an SM has of an L2 swizzle group at least, if there is more than one group
SWIZZLE_GROUP_BYTES = 24 << 20  # keys and values that stay in L2
CUT_TIMES = {192: (0.75, 0.9), 128: (0.85,)}  # of 64 and of 128 rows of a tile, relative to all of its rows
SHORT_TILE_TIME = 0.8  # of a tile of 128 rows among those of 192
SHORT_TILE_WAVES = 3  # after more waves, tiles that can be cut in two are
TILE_TIME = 0.15  # of a tile without keys
# Split-KV: the most splits of a tile, or of all tiles if that is more, and the fewest keys of a split of a list at head
# dim 64.
MAX_SPLITS, MAX_SPLITS_OF_ALL, LISTED_SPLIT_KEYS = 32, 96, 128
# What a wave of splits costs beside its keys, in keys: in any case, for each split but the first FREE_SPLITS, and for
# each split of one tile but as many.
SPLIT_WAVE_KEYS, KEYS_PER_SPLIT, FREE_SPLITS, KEYS_PER_SPLIT_OF_TILE = 400, 5, 32, 25
CAUSAL_GAIN = 0.85  # causal tiles are split if that takes less than this part of the time of whole tiles


class Work(NamedTuple):
    """The schedule of a call's tiles: what the launch and the kernel's parameters say of it."""

    tiles: int  # of a set of heads
    grid: int  # persistent CTAs
    swizzle_group: int  # sets of heads whose keys and values stay in L2 together, if they fit
    tail_tiles: int  # tiles of a set that are scheduled last: they may meet fewer keys, or are short
    short_tiles: int = 0  # of those, all of the last wave: tiles with two thirds of the rows
    first: int = 0  # index in the schedule of the first tile that is split along its keys
    num_splits: int = 1  # of each of those; 1: none is split


@functools.lru_cache(maxsize=4096)
def tile_shape(facts: Facts, num_sms: int) -> HopperTile:
    """The tile for a call: the one with less time on ``num_sms`` SMs."""
    first, *others = tiles_of(facts.keys, facts.head_dim)
    if not others:
        return first
    second, = others
    time = entry(SECOND_TIMES[facts.keys], facts.head_dim)
    if facts.listed and second.block_n > first.block_n:
        time *= 1 + BLOCK_128_KEYS / max(1, facts.seen)
    return first if waves(facts, first, num_sms) <= time * waves(facts, second, num_sms) else second


@functools.lru_cache(maxsize=4096)
def work_of(facts: Facts, tile: HopperTile, num_sms: int) -> Work:
    """The schedule of a call. If the tiles of the last wave are few, the kernel cuts them by rows (``schedule`` in
    kernels/sm90/scheduler.cuh); where it takes less time they are split along their keys (kernels/sm90/split_kv.cuh),
    or that wave has short tiles only."""
    work = _whole_tiles(facts, tile, num_sms)
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    num_splits = _num_splits(facts, tile, num_sms, work)
    if num_splits > 1:
        return work._replace(grid=num_sms if full else rest * num_splits, first=full * num_sms, num_splits=num_splits)
    short_tiles = _short_tiles(facts, tile, num_sms, work)
    if short_tiles == 0:
        return work
    regular = full * num_sms // facts.sets
    return work._replace(tiles=regular + short_tiles, grid=num_sms if full else short_tiles * facts.sets,
                         tail_tiles=max(work.tail_tiles, short_tiles), short_tiles=short_tiles)


def _whole_tiles(facts: Facts, tile: HopperTile, num_sms: int) -> Work:
    """The schedule without splits and short tiles. Tail tiles may meet fewer keys, since their queries have fewer keys
    before them than a query of the mask sees at most; they are scheduled last, all sets together, so these keys must
    fit into L2."""
    queries = tile.block_m // facts.tile_heads
    tiles = tile_count(facts.query_length, queries, facts.sequences)
    slices = tile.block_m // 64 if _row_cut(facts) else 1
    groups = max(1, SWIZZLE_GROUP_BYTES // _bytes(facts, facts.key_length))
    num_groups = max(1, min(blocks(facts.groups, groups), facts.sets * tiles // (SWIZZLE_GROUP_WAVES * num_sms)))
    swizzle_group = blocks(facts.groups, num_groups) * facts.group_sets
    tail_tiles = 0
    if facts.seen < facts.key_length and not facts.sequences and _fit_together(facts):
        tail_tiles = max(0, facts.seen + facts.query_length - facts.key_length) // queries
    return Work(tiles, min(slices * tiles * facts.sets, num_sms), swizzle_group, tail_tiles)


def _fit_together(facts: Facts) -> bool:
    """Whether the keys that a query of each set sees fit into L2."""
    return facts.groups * _bytes(facts, facts.seen) <= SWIZZLE_GROUP_BYTES


def _row_cut(facts: Facts) -> bool:
    """Whether tiles may be cut by rows: ``ROW_CUT`` in kernels/sm90/config.cuh."""
    return 64 % facts.tile_heads == 0 and not facts.bits and not facts.causal


def _short_tiles(facts: Facts, tile: HopperTile, num_sms: int, work: Work) -> int:
    """How many short tiles each set has in the last wave, which then has no others; 0: none."""
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    regular, odd = divmod(full * num_sms, facts.sets)
    if rest == 0 or odd or tile.block_m != 192 or facts.sequences or not _row_cut(facts) or not _fit_together(facts):
        return 0
    if full > SHORT_TILE_WAVES and 2 * rest <= num_sms:
        return 0
    queries, missing = tile.block_m // facts.tile_heads, 64 // facts.tile_heads
    short_tiles = blocks(facts.query_length - regular * queries, queries - missing)
    if short_tiles * facts.sets > num_sms:
        return 0
    faster = _short_tiles_time(facts, tile, num_sms, work) < _row_cut_time(facts, tile, num_sms, work)
    return short_tiles if faster else 0


def _num_splits(facts: Facts, tile: HopperTile, num_sms: int, work: Work) -> int:
    """How many splits each tile of the last wave has; 1: none. Under causality only if there is a single wave: several
    balance tiles of different length."""
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    if rest == 0 or facts.sequences or facts.bits or (facts.causal and full):
        return 1
    keys = _keys_at(facts, tile, work, full * num_sms)
    most = min(num_sms // rest, max(MAX_SPLITS, MAX_SPLITS_OF_ALL // rest), keys // _min_split_keys(facts, tile))
    return 1 if most < 2 else _best_splits(facts, tile, num_sms, work, most)


def _min_split_keys(facts: Facts, tile: HopperTile) -> int:
    """Of one split."""
    return LISTED_SPLIT_KEYS * 64 // facts.head_dim if facts.listed else 2 * tile.block_n


def _best_splits(facts: Facts, tile: HopperTile, num_sms: int, work: Work, most: int) -> int:
    """The fastest number of splits, up to ``most`` (combine.cu reads four at a time); 1 if cutting by rows takes less
    time. It does for lists of all positions, of which the last tiles have the fewest keys, and where a tile may skip
    most keys."""
    if facts.listed and (facts.query_length == facts.key_length or facts.seen == facts.key_length):
        return 1
    time, num_splits = min((_split_time(facts, tile, num_sms, work, n), n) for n in range(2, most + 1)
                           if n <= 4 or n % 4 == 0)
    whole = _row_cut_time(facts, tile, num_sms, work)
    return num_splits if time < (CAUSAL_GAIN * whole if facts.causal else whole) else 1


def _bytes(facts: Facts, keys: int) -> int:
    """Of ``keys`` keys of a head and their values."""
    return 2 * 2 * keys * facts.head_dim


def waves(facts: Facts, tile: HopperTile, num_sms: int) -> float:
    """The time of all tiles, in times of a tile with the most keys."""
    work, chosen = _whole_tiles(facts, tile, num_sms), work_of(facts, tile, num_sms)
    count = facts.sets * work.tiles
    if facts.causal and chosen.num_splits == 1:  # the longest tiles first, with half of the keys on average
        return max(1.0, count / (2 * num_sms))
    full = count // num_sms
    whole = min(full, facts.sets * (work.tiles - work.tail_tiles) // num_sms)
    total = whole + sum(_time_at(facts, work, index * num_sms) for index in range(whole, full))
    if chosen.num_splits > 1:
        return total + _split_time(facts, tile, num_sms, work, chosen.num_splits)
    if chosen.short_tiles > 0:
        return total + _short_tiles_time(facts, tile, num_sms, work)
    return total + _row_cut_time(facts, tile, num_sms, work)


def _split_time(facts: Facts, tile: HopperTile, num_sms: int, work: Work, num_splits: int) -> float:
    """The time of the last wave with its tiles split: a fit to 176 calls, for which the chosen number of splits costs
    1 % more than the best one on average. Keys of a longer head dim, and of more rows, take longer."""
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    keys = _keys_at(facts, tile, work, full * num_sms) / num_splits
    beside = (SPLIT_WAVE_KEYS * (128 / tile.block_m)**0.65 + KEYS_PER_SPLIT * max(0, rest * num_splits - FREE_SPLITS)
              + KEYS_PER_SPLIT_OF_TILE * max(0, num_splits - FREE_SPLITS))
    return (keys + beside * (64 / facts.head_dim)**0.75) / _most_keys(facts, tile)


def _row_cut_time(facts: Facts, tile: HopperTile, num_sms: int, work: Work) -> float:
    """The same with its tiles cut by rows where they may be."""
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    if rest == 0:
        return 0.0
    first = full * num_sms
    time = _time_at(facts, work, first)
    if not _row_cut(facts):
        return time
    third, *half = CUT_TIMES[tile.block_m]
    if 2 * rest > num_sms:
        return max(third * time, _time_at(facts, work, first + (num_sms - rest) // (tile.block_m // 64 - 1)))
    return time * (third if tile.block_m // 64 * rest <= num_sms else half[0])


def _short_tiles_time(facts: Facts, tile: HopperTile, num_sms: int, work: Work) -> float:
    """The same with short tiles."""
    full = work.tiles * facts.sets // num_sms
    return SHORT_TILE_TIME * _time_at(facts, work, full * num_sms)


def _time_at(facts: Facts, work: Work, index: int) -> float:
    """Of the tile at ``index`` of the schedule."""
    return 1.0 - (1.0 - TILE_TIME) * _missing(facts, work, index)


def _keys_at(facts: Facts, tile: HopperTile, work: Work, index: int) -> int:
    """Keys of that tile."""
    return int(_most_keys(facts, tile) * (1.0 - _missing(facts, work, index)))


def _missing(facts: Facts, work: Work, index: int) -> float:
    """Which part of the most keys that tile lacks."""
    regular = facts.sets * (work.tiles - work.tail_tiles)
    left = 0 if index < regular else (index - regular) // facts.sets + 1
    return left / (work.tail_tiles + 1)


def _most_keys(facts: Facts, tile: HopperTile) -> int:
    """Of a tile: each query sees at most one key that the one before it does not."""
    return min(facts.key_length, facts.seen + tile.block_m // facts.tile_heads)
