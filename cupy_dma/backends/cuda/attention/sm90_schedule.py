"""The tile scheduler of the Hopper forward, host side: the tile of a call, and how its tiles fill the SMs.

The device side is ``kernels/sm90/scheduler.cuh``. Tiles run on persistent CTAs, one per SM, in waves. The last wave
rarely fills the SMs: its tiles may be cut by rows, be short tiles, or be split along their keys (split-KV). The
candidate with the fastest predicted time wins, by the measured costs of tiles (``sm90_costs``).
"""
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cupy_dma.backends.cuda.attention.sm90_costs import Costs, costs_of
from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile, ScheduleKey, tiles_of
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime.configs import blocks

SWIZZLE_GROUP_WAVES = 2  # tiles per SM in an L2 swizzle group, at least, if there are several groups
SWIZZLE_GROUP_BYTES = 24 << 20  # keys and values that stay in L2
# At most this many splits of a tile (or of all tiles, if that is more), and at least this many blocks of keys in each:
# only these have been measured.
MAX_SPLITS, MAX_SPLITS_OF_ALL, SPLIT_BLOCKS = 32, 96, 2
ROTATIONS, ROTATED_WAVES = 32, 64  # rotations tried, and waves to judge them by
FIXED_KEYS = 100  # take as long as an empty tile
# Calls take longer than the waves measured: lists of tiles of 192 rows, which may be a block longer, by 2 to 4 %; split
# causal tiles of the shortest calls by up to 17 %. These corrections decide between nearly equal candidates.
LARGE_LISTS, CAUSAL_SPLITS = 1.03, 1.1


class Schedule(NamedTuple):
    """The schedule of a call's tiles, as the launch and the kernel's parameters need it."""

    tiles: int  # per set of heads
    grid: int  # persistent CTAs
    swizzle_group: int  # sets of heads whose keys and values stay in L2 together, if they fit
    tail_tiles: int  # tiles of a set that are scheduled last: they may meet fewer keys, or are short
    short_tiles: int = 0  # of those, all of the last wave: tiles with two thirds of the rows
    first: int = 0  # index in the schedule of the first tile that is split along its keys
    num_splits: int = 1  # of each split tile; 1: none is split
    rotation: int = 0  # places by which CTAs shift from one full wave to the next


@functools.lru_cache(maxsize=4096)
def tile_shape(facts: ScheduleKey, num_sms: int) -> HopperTile:
    """The tile for a call: the fastest predicted on ``num_sms`` SMs."""
    return min(tiles_of(facts.keys, facts.head_dim),
               key=lambda tile: microseconds(facts, tile, best_schedule(facts, tile, num_sms), num_sms))


@functools.lru_cache(maxsize=4096)
def best_schedule(facts: ScheduleKey, tile: HopperTile, num_sms: int) -> Schedule:
    """The fastest predicted schedule of a call with this tile; whole tiles if its costs have not been measured (only
    tests use such tiles)."""
    found = candidates(facts, tile, num_sms)
    if tile not in tiles_of(facts.keys, facts.head_dim):
        return next(found)
    return min(found, key=lambda work: microseconds(facts, tile, work, num_sms))


def candidates(facts: ScheduleKey, tile: HopperTile, num_sms: int) -> Iterator[Schedule]:
    """The candidate schedules of a call: whole tiles, the last wave cut by rows in the kernel if it is small
    (``schedule`` in kernels/sm90/scheduler.cuh); a last wave of short tiles; a last wave split along its keys
    (kernels/sm90/split_kv.cuh)."""
    work = _unsplit(facts, tile, num_sms)
    yield work
    yield from _short_tiles(facts, tile, num_sms, work)
    yield from _splits(facts, tile, num_sms, work)


def _unsplit(facts: ScheduleKey, tile: HopperTile, num_sms: int) -> Schedule:
    """Tail tiles may meet fewer keys, because their queries have fewer keys before them than the mask shows at most.
    They are scheduled last, all sets together, so their keys must fit into L2."""
    queries = tile.block_m // facts.tile_heads
    tiles = tile_count(facts.query_length, queries, facts.sequences)
    slices = tile.block_m // 64 if _row_cut(facts) else 1
    groups = max(1, SWIZZLE_GROUP_BYTES // _bytes(facts, facts.key_length))
    num_groups = max(1, min(blocks(facts.groups, groups), facts.sets * tiles // (SWIZZLE_GROUP_WAVES * num_sms)))
    swizzle_group = blocks(facts.groups, num_groups) * facts.group_sets
    tail_tiles = _shorter_tiles(facts, tile) if _fit_together(facts) else 0
    rotation = 0
    if (facts.listed or facts.bits) and not (tail_tiles or facts.sequences):
        rotation = _rotation(tiles, queries, facts.key_length - facts.query_length, facts.seen,
                             tiles * facts.sets // num_sms, num_sms)
    return Schedule(tiles, min(slices * tiles * facts.sets, num_sms), swizzle_group, tail_tiles, rotation=rotation)


@functools.lru_cache(maxsize=4096)
def _rotation(tiles: int, queries: int, first_position: int, seen: int, waves: int, grid: int) -> int:
    """The rotation that balances keys across CTAs in full waves, over sets of ``tiles`` tiles, set after set, the last
    tiles of a set first. A query sees at most ``seen`` keys, none of them behind it."""
    positions = np.maximum(0, first_position + queries * np.arange(tiles)[::-1])
    times = np.minimum(positions, seen) + queries + FIXED_KEYS
    rotations, places = grid * np.arange(ROTATIONS) // ROTATIONS, np.arange(grid)
    busy = np.zeros((ROTATIONS, grid), int)
    for wave in range(min(waves, ROTATED_WAVES)):
        busy += times[(wave * grid + (places + wave * rotations[:, None]) % grid) % tiles]
    return int(rotations[busy.max(1).argmin()])


def _short_tiles(facts: ScheduleKey, tile: HopperTile, num_sms: int, work: Schedule) -> Iterator[Schedule]:
    """The last wave consists of short tiles of each set and nothing else."""
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    regular, odd = divmod(full * num_sms, facts.sets)
    if rest == 0 or odd or tile.block_m != 192 or facts.sequences or not _row_cut(facts) or not _fit_together(facts):
        return
    short_tiles = blocks(facts.query_length - regular * (tile.block_m // facts.tile_heads), 128 // facts.tile_heads)
    if short_tiles * facts.sets <= num_sms:
        yield work._replace(tiles=regular + short_tiles, grid=num_sms if full else short_tiles * facts.sets,
                            tail_tiles=max(work.tail_tiles, short_tiles), short_tiles=short_tiles)


def _splits(facts: ScheduleKey, tile: HopperTile, num_sms: int, work: Schedule) -> Iterator[Schedule]:
    """Each tile of the last wave is split. Under causality only if it is the only wave: several waves balance tiles of
    different lengths anyway. Not if a tile may skip most keys. combine.cu reads four splits at a time."""
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    unknown = facts.listed and facts.seen == facts.key_length
    if rest == 0 or facts.sequences or facts.bits or unknown or (facts.causal and full):
        return
    keys = _keys_at(facts, tile, work, full * num_sms)
    most = min(num_sms // rest, max(MAX_SPLITS, MAX_SPLITS_OF_ALL // rest), keys // _min_split_keys(tile))
    for num_splits in range(2, most + 1):
        if num_splits <= 4 or num_splits % 4 == 0:
            yield work._replace(grid=num_sms if full else rest * num_splits, first=full * num_sms,
                                num_splits=num_splits)


def _min_split_keys(tile: HopperTile) -> int:
    return SPLIT_BLOCKS * tile.block_n


def _fit_together(facts: ScheduleKey) -> bool:
    """Whether the keys that a query of each set sees fit into L2."""
    return facts.groups * _bytes(facts, facts.seen) <= SWIZZLE_GROUP_BYTES


def _row_cut(facts: ScheduleKey) -> bool:
    """Whether the kernel may cut tiles by rows: ``ROW_CUT`` in kernels/sm90/config.cuh."""
    return 64 % facts.tile_heads == 0 and not facts.bits and not facts.causal


def _bytes(facts: ScheduleKey, keys: int) -> int:
    """Bytes of ``keys`` keys and their values, of one head."""
    return 2 * 2 * keys * facts.head_dim


# ---- predicted times ------------------------------------------------------------------------------------------------
def microseconds(facts: ScheduleKey, tile: HopperTile, work: Schedule, num_sms: int) -> float:
    """Predicted time of a launch with all its tiles."""
    time = _all_waves(facts, tile, work, num_sms)
    if facts.causal and work.num_splits > 1:
        time *= CAUSAL_SPLITS
    return LARGE_LISTS * time if facts.listed and tile.block_m == 192 else time


def _all_waves(facts: ScheduleKey, tile: HopperTile, work: Schedule, num_sms: int) -> float:
    """Wave by wave, in the kernel's order."""
    costs = costs_of(facts.keys, facts.head_dim, tile)
    launch = costs.wave("launch", _most_keys(facts, tile))
    count = facts.sets * (work.tiles - work.short_tiles)
    if facts.causal and work.num_splits == 1:  # longest tiles first: all SMs get equal work
        mean = facts.key_length - facts.query_length / 2
        longest = costs.wave("whole", _most_keys(facts, tile))
        return launch + max(longest, count / num_sms * costs.wave("whole", mean))
    full, rest = divmod(count, num_sms)
    regular = min(full, facts.sets * (work.tiles - max(work.tail_tiles, work.short_tiles)) // num_sms)
    total = launch + regular * costs.wave("whole", _mean_keys(facts, tile, work))
    total += sum(costs.wave("whole", _keys_at(facts, tile, work, wave * num_sms)) for wave in range(regular, full))
    first = full * num_sms
    if work.short_tiles:
        return total + costs.wave("short", _keys_at(facts, tile, work, first))
    if work.num_splits > 1:
        return total + costs.splits(_keys_at(facts, tile, work, first), rest, work.num_splits)
    return total + (_last_wave(facts, tile, work, costs, first, rest, num_sms) if rest else 0.0)


def _last_wave(facts: ScheduleKey, tile: HopperTile, work: Schedule, costs: Costs, first: int, rest: int,
               num_sms: int) -> float:
    """Of the last ``rest`` tiles, from index ``first`` on, cut by rows if possible."""
    keys = _keys_at(facts, tile, work, first)
    if not _row_cut(facts):
        return costs.wave("whole", keys)
    slices = tile.block_m // 64
    if 2 * rest > num_sms:  # some are cut into all slices, the others stay whole
        cut = (num_sms - rest) // (slices - 1)
        return max(costs.wave("slices", keys), costs.wave("whole", _keys_at(facts, tile, work, first + cut)))
    return costs.wave("slices" if slices * rest <= num_sms else "halves", keys)


def _keys_at(facts: ScheduleKey, tile: HopperTile, work: Schedule, index: int) -> int:
    """Keys of the tile at ``index`` of the schedule."""
    tail = work.tail_tiles
    regular = facts.sets * (work.tiles - tail)
    missing = 0 if index < regular else (index - regular) // facts.sets + 1
    return int(_most_keys(facts, tile) * (1.0 - missing / (tail + 1)))


def _mean_keys(facts: ScheduleKey, tile: HopperTile, work: Schedule) -> float:
    """Average keys of the tiles that are not scheduled last; all CTAs get about as many."""
    shorter = 0 if work.tail_tiles else min(work.tiles, _shorter_tiles(facts, tile))
    return _most_keys(facts, tile) * (1.0 - shorter / (2 * work.tiles))


def _shorter_tiles(facts: ScheduleKey, tile: HopperTile) -> int:
    """Tiles of a set that may meet fewer keys than others, because their queries have fewer before them."""
    if facts.seen >= facts.key_length or facts.sequences:
        return 0
    return max(0, facts.seen + facts.query_length - facts.key_length) // (tile.block_m // facts.tile_heads)


def _most_keys(facts: ScheduleKey, tile: HopperTile) -> int:
    """Of a tile: each query sees at most one key that its predecessor does not."""
    return min(facts.key_length, facts.seen + tile.block_m // facts.tile_heads)
