"""Tiles of the Hopper forward (``kernels/sm90``): their shapes, which of them a call takes, how they are dealt out."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime.configs import BIAS_DENSE, blocks

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionCall


class HopperTile(NamedTuple):
    """A block's part of the attention: rows (queries times heads), keys at a time, stages of keys, of their values and
    of queries, and whether the warpgroups that multiply take turns in doing so."""

    block_m: int
    block_n: int
    stages: int
    value_stages: int
    query_stages: int
    ping_pong: bool = False


SWIZZLE_GROUP_WAVES = 2  # so many tiles a SM has of a section at least, if there is more than one
SWIZZLE_GROUP_BYTES = 24 << 20
# By what a call's keys are and the largest head dim, measured by benchmarks/tune_sm90.py: one or two tiles, of which
# a call takes the one with less time. Warpgroups that do not take turns come to do the same thing at the same time;
# where there are two of them and little else to wait for, turns cost more than they bring. A tile of few keys is over
# before the next one but one has its queries, which come to the place of its output: there it is worth a third place.
WIDE_64, WIDE_128 = HopperTile(192, 96, 5, 5, 2, ping_pong=True), HopperTile(192, 64, 4, 3, 2, ping_pong=True)
TILES: dict[str, dict[int, tuple[HopperTile, ...]]] = {
    "short intervals": {64: (HopperTile(192, 64, 6, 6, 3, ping_pong=True), HopperTile(128, 64, 6, 6, 3, ping_pong=True)),
                        128: (HopperTile(192, 64, 2, 2, 3, ping_pong=True), HopperTile(128, 64, 4, 4, 2, ping_pong=True))},
    "intervals": {64: (WIDE_64, HopperTile(128, 128, 4, 4, 2, ping_pong=True)),
                  128: (WIDE_128, HopperTile(128, 64, 4, 4, 2, ping_pong=True)),
                  192: (HopperTile(128, 64, 2, 2, 2, ping_pong=True),), 256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
    "intervals with softcap": {64: (WIDE_64, HopperTile(128, 128, 4, 4, 2)),
                               128: (WIDE_128, HopperTile(128, 64, 4, 4, 2, ping_pong=True)),
                               192: (HopperTile(128, 64, 2, 2, 2, ping_pong=True),),
                               256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
    "bits": {64: (HopperTile(128, 128, 4, 4, 2),), 128: (HopperTile(128, 128, 2, 2, 2, ping_pong=True),),
             192: (HopperTile(128, 64, 2, 2, 2),), 256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
    "contiguous": {64: (HopperTile(192, 128, 3, 3, 2, ping_pong=True), HopperTile(128, 128, 4, 4, 2)),
                   128: (HopperTile(128, 128, 2, 2, 2, ping_pong=True),), 192: (HopperTile(128, 64, 2, 2, 2),),
                   256: (HopperTile(128, 32, 2, 2, 2),)},
    "contiguous with bias": {64: (WIDE_64, HopperTile(128, 128, 4, 4, 2)),
                             128: (HopperTile(128, 128, 2, 2, 2),), 192: (HopperTile(128, 64, 2, 2, 2),),
                             256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
    "contiguous with bias and softcap": {64: (WIDE_64, HopperTile(128, 128, 4, 4, 2)),
                                         128: (HopperTile(128, 128, 2, 2, 2),), 192: (HopperTile(128, 64, 2, 2, 2),),
                                         256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
}
# The time of the second of two tiles, by that of the first. Blocks of 128 keys pay for lists of as many keys or more.
SECOND_TIMES: dict[str, dict[int, float]] = {
    "short intervals": {64: 0.78, 128: 0.85}, "intervals": {64: 0.77, 96: 0.78, 128: 0.73},
    "intervals with softcap": {64: 0.75, 96: 0.7, 128: 0.72}, "contiguous": {64: 0.77},
    "contiguous with bias": {64: 0.73}, "contiguous with bias and softcap": {64: 0.74}}
SHORT_LISTS = {64: 192, 128: 128}  # keys of a query up to which intervals are short
BLOCK_128_KEYS = 20  # what such a block of a list costs, in keys
CUT_TIMES = {192: (0.75, 0.9), 128: (0.85,)}  # of 64 and of 128 rows of a tile, by its own
SHORT_TILE_TIME = 0.8  # of a tile of 128 rows among those of 192
SHORT_TILE_WAVES = 3  # behind more, tiles that can be cut in two are
TILE_TIME = 0.15  # of a tile without keys, by that of one with the most
# Of tiles split up along their keys: the most parts of a tile, or of all if those are more, and the fewest keys of one,
# where listed and of head dim 64.
MAX_SPLITS, MAX_SPLITS_OF_ALL, LISTED_SPLIT_KEYS = 32, 96, 128
# What a round of them costs beside its keys, in such keys: in any case, and for each of its parts but the first ones,
# and for each of a tile's.
SPLIT_WAVE_KEYS, KEYS_PER_SPLIT, FREE_SPLITS, KEYS_PER_SPLIT_OF_TILE = 400, 5, 32, 25
CAUSAL_GAIN = 0.85  # of the time of whole tiles, below which causal ones are split up


class Facts(NamedTuple):
    """What tiles depend on, of a call."""

    keys: str  # a name of ``TILES``
    head_dim: int
    tile_heads: int  # of a tile
    group_sets: int  # of so many heads that share a kv head
    groups: int  # kv heads of the whole batch
    query_length: int
    key_length: int
    seen: int  # keys that a query may see
    sequences: int  # packed ones
    bits: bool  # there is a dense mask
    listed: bool  # there is one of intervals
    causal: bool  # there is none, and keys are those up to a query's own position

    @property
    def sets(self) -> int:
        """Sets of ``tile_heads`` heads in the batch."""
        return self.groups * self.group_sets


class Work(NamedTuple):
    """How the tiles of a call are dealt out: what the launch and the kernel's parameters say of it."""

    tiles: int  # of a set of heads
    grid: int  # blocks, which stay for many tiles
    swizzle_group: int  # sets of heads whose keys and values stay in the L2 together, if they fit
    tail_tiles: int  # tiles of a set that come last, as they may meet fewer keys than the others or are lower
    short_tiles: int = 0  # of those, all that the last round has, so many have two thirds of the rows
    first: int = 0  # of the tiles that are split up along their keys, in the order in which they are dealt out
    num_splits: int = 1  # of each of those; 1: none is split up


def facts_of(call: AttentionCall, problem: Problem) -> Facts:
    bound = None if problem.mask is None else problem.mask._bound
    seen = call.key_length if bound is None else min(call.key_length, bound[0])
    listed = problem.mask is not None
    return Facts(_keys(call, problem, seen), call.head_dim, problem.tile_heads,
                 call.heads // call.kv_heads // problem.tile_heads, call.batch * call.kv_heads, call.query_length,
                 call.key_length, seen, problem.count, problem.bits, listed, problem.causal and not listed)


def _keys(call: AttentionCall, problem: Problem, seen: int) -> str:
    if is_dense(problem):
        return "bits"
    if problem.mask is not None:
        if call.softcap > 0.0:
            return "intervals with softcap"
        return "short intervals" if seen <= (_entry(SHORT_LISTS, call.head_dim) or 0) else "intervals"
    if problem.bias is None:
        return "contiguous"
    return "contiguous with bias" if call.softcap == 0.0 else "contiguous with bias and softcap"


def is_dense(problem: Problem) -> bool:
    """A dense mask, a dense bias, or both: keys come in blocks of some that follow each other, or nearly so."""
    return problem.bits or problem.bias_kind == BIAS_DENSE


def tiles_of(keys: str, head_dim: int) -> tuple[HopperTile, ...]:
    """The tiles for a name of ``TILES``; none where there are none for this head dim."""
    return _entry(TILES[keys], head_dim) or ()


def _entry(table: dict[int, Any], head_dim: int) -> Any:
    return next((entry for largest, entry in table.items() if head_dim <= largest), None)


@functools.lru_cache(maxsize=4096)
def tile_shape(facts: Facts, num_sms: int) -> HopperTile:
    """The tile for a call: the one with less time on so many SMs."""
    first, *others = tiles_of(facts.keys, facts.head_dim)
    if not others:
        return first
    second, = others
    time = _entry(SECOND_TIMES[facts.keys], facts.head_dim)
    if facts.listed and second.block_n > first.block_n:
        time *= 1 + BLOCK_128_KEYS / max(1, facts.seen)
    return first if waves(facts, first, num_sms) <= time * waves(facts, second, num_sms) else second


@functools.lru_cache(maxsize=4096)
def work_of(facts: Facts, tile: HopperTile, num_sms: int) -> Work:
    """Few tiles are cut up among several blocks each (``scheduled`` in kernels/sm90/scheduler.cuh), by rows, or where it
    takes less time split up along their keys (kernels/sm90/split_kv.cuh). Or all of the last round are lower ones."""
    work = _whole_tiles(facts, tile, num_sms)
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    num_splits = _num_splits(facts, tile, num_sms, work)
    if num_splits > 1:
        return work._replace(grid=num_sms if full else rest * num_splits, first=full * num_sms, num_splits=num_splits)
    short_tiles = _short_tiles(facts, tile, num_sms, work)
    if short_tiles == 0:
        return work
    higher = full * num_sms // facts.sets
    return work._replace(tiles=higher + short_tiles, grid=num_sms if full else short_tiles * facts.sets,
                         tail_tiles=max(work.tail_tiles, short_tiles), short_tiles=short_tiles)


def _whole_tiles(facts: Facts, tile: HopperTile, num_sms: int) -> Work:
    """Those that may meet fewer keys, as their queries have fewer before them than a query of the mask sees at most,
    are dealt out last, all sets at a time, so these keys must fit into the L2."""
    queries = tile.block_m // facts.tile_heads
    tiles = tile_count(facts.query_length, queries, facts.sequences)
    num_splits = tile.block_m // 64 if _row_cut(facts) else 1
    groups = max(1, SWIZZLE_GROUP_BYTES // _bytes(facts, facts.key_length))
    num_groups = max(1, min(blocks(facts.groups, groups), facts.sets * tiles // (SWIZZLE_GROUP_WAVES * num_sms)))
    swizzle_group = blocks(facts.groups, num_groups) * facts.group_sets
    tail_tiles = 0
    if facts.seen < facts.key_length and not facts.sequences and _fit_together(facts):
        tail_tiles = max(0, facts.seen + facts.query_length - facts.key_length) // queries
    return Work(tiles, min(num_splits * tiles * facts.sets, num_sms), swizzle_group, tail_tiles)


def _fit_together(facts: Facts) -> bool:
    """Whether the keys that a query of each set sees fit into the L2."""
    return facts.groups * _bytes(facts, facts.seen) <= SWIZZLE_GROUP_BYTES


def _row_cut(facts: Facts) -> bool:
    """Whether tiles may be cut up: ``ROW_CUT`` in kernels/sm90/config.cuh."""
    return 64 % facts.tile_heads == 0 and not facts.bits and not facts.causal


def _short_tiles(facts: Facts, tile: HopperTile, num_sms: int, work: Work) -> int:
    """Of how many lower tiles each set has in the last round; 0 if it is not all of such, or none."""
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    higher, odd = divmod(full * num_sms, facts.sets)
    if rest == 0 or odd or tile.block_m != 192 or facts.sequences or not _row_cut(facts) or not _fit_together(facts):
        return 0
    if full > SHORT_TILE_WAVES and 2 * rest <= num_sms:
        return 0
    queries, less = tile.block_m // facts.tile_heads, 64 // facts.tile_heads
    short_tiles = blocks(facts.query_length - higher * queries, queries - less)
    time = _short_tiles_time(facts, tile, num_sms, work)
    return short_tiles if short_tiles * facts.sets <= num_sms and time < _row_cut_time(facts, tile, num_sms, work) else 0


def _num_splits(facts: Facts, tile: HopperTile, num_sms: int, work: Work) -> int:
    """How many parts the tiles of the last round are split up into; 1: none. Under causality there is but one:
    several balance tiles of different length."""
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    if rest == 0 or facts.sequences or facts.bits or (facts.causal and full):
        return 1
    keys = _keys_at(facts, tile, work, full * num_sms)
    most = min(num_sms // rest, max(MAX_SPLITS, MAX_SPLITS_OF_ALL // rest), keys // _min_split_keys(facts, tile))
    return 1 if most < 2 else _best_splits(facts, tile, num_sms, work, most)


def _min_split_keys(facts: Facts, tile: HopperTile) -> int:
    """Of one part."""
    return LISTED_SPLIT_KEYS * 64 // facts.head_dim if facts.listed else 2 * tile.block_n


def _best_splits(facts: Facts, tile: HopperTile, num_sms: int, work: Work, most: int) -> int:
    """The fastest number of parts, up to ``most``, for combine.cu reads four at a time; or 1, if it takes less time to
    cut the tiles up. So it does for lists of all positions, of which the last tiles have the fewest keys, and where a
    tile may skip most."""
    if facts.listed and (facts.query_length == facts.key_length or facts.seen == facts.key_length):
        return 1
    time, num_splits = min((_split_time(facts, tile, num_sms, work, n), n) for n in range(2, most + 1)
                      if n <= 4 or n % 4 == 0)
    whole = _row_cut_time(facts, tile, num_sms, work)
    return num_splits if time < (CAUSAL_GAIN * whole if facts.causal else whole) else 1


def _bytes(facts: Facts, keys: int) -> int:
    """Of so many keys of a head and their values."""
    return 2 * 2 * keys * facts.head_dim


def waves(facts: Facts, tile: HopperTile, num_sms: int) -> float:
    """The time of all tiles, by that of one with the most keys."""
    work, chosen = _whole_tiles(facts, tile, num_sms), work_of(facts, tile, num_sms)
    count = facts.sets * work.tiles
    if facts.causal and chosen.num_splits == 1:  # the longest tiles first, with half of the keys on average
        return max(1.0, count / (2 * num_sms))
    full = count // num_sms  # rounds
    whole = min(full, facts.sets * (work.tiles - work.tail_tiles) // num_sms)
    total = whole + sum(_time_at(facts, work, index * num_sms) for index in range(whole, full))
    if chosen.num_splits > 1:
        return total + _split_time(facts, tile, num_sms, work, chosen.num_splits)
    if chosen.short_tiles > 0:
        return total + _short_tiles_time(facts, tile, num_sms, work)
    return total + _row_cut_time(facts, tile, num_sms, work)


def _split_time(facts: Facts, tile: HopperTile, num_sms: int, work: Work, num_splits: int) -> float:
    """The time of the last round, its tiles split up into so many parts: a fit to 176 calls, of which the chosen number
    costs 1 % more than the best one on average. Keys of a longer head dim, and of more rows, take longer."""
    full, rest = divmod(work.tiles * facts.sets, num_sms)
    keys = _keys_at(facts, tile, work, full * num_sms) / num_splits
    beside = (SPLIT_WAVE_KEYS * (128 / tile.block_m)**0.65 + KEYS_PER_SPLIT * max(0, rest * num_splits - FREE_SPLITS)
              + KEYS_PER_SPLIT_OF_TILE * max(0, num_splits - FREE_SPLITS))
    return (keys + beside * (64 / facts.head_dim)**0.75) / _most_keys(facts, tile)


def _row_cut_time(facts: Facts, tile: HopperTile, num_sms: int, work: Work) -> float:
    """The same, its tiles cut up where they may be."""
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
    """The same of lower tiles."""
    full = work.tiles * facts.sets // num_sms
    return SHORT_TILE_TIME * _time_at(facts, work, full * num_sms)


def _time_at(facts: Facts, work: Work, index: int) -> float:
    """Of the tile that is dealt out there."""
    return 1.0 - (1.0 - TILE_TIME) * _missing(facts, work, index)


def _keys_at(facts: Facts, tile: HopperTile, work: Work, index: int) -> int:
    """Keys of that tile."""
    return int(_most_keys(facts, tile) * (1.0 - _missing(facts, work, index)))


def _missing(facts: Facts, work: Work, index: int) -> float:
    """Which part of the most keys that tile has not."""
    longer = facts.sets * (work.tiles - work.tail_tiles)
    left = 0 if index < longer else (index - longer) // facts.sets + 1
    return left / (work.tail_tiles + 1)


def _most_keys(facts: Facts, tile: HopperTile) -> int:
    """Of a tile: a query has one key more or less than the one before it."""
    return min(facts.key_length, facts.seen + tile.block_m // facts.tile_heads)
