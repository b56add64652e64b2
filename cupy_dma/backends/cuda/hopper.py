"""The attention forward on Hopper GPUs (``kernels/sm90``): warpgroup matrix products over gathered keys.

It serves 16-bit elements in aligned rows, with a positive scale that a bias can be divided by, no float32 bias per
query and key and, where there is a mask, more than a few keys; the portable kernel does the rest and gives the same
numbers within rounding.
"""
from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_dma import jit
from cupy_dma.backends.cuda.configs import BIAS_DENSE, ELEMENTS, blocks
from cupy_dma.backends.cuda.lists import KeyLists
from cupy_dma.backends.cuda.problem import Problem
from cupy_dma.backends.cuda.runtime import Runtime
from cupy_dma.backends.cuda.sequences import tile_numbers
from cupy_dma.backends.cuda.tensor_maps import queries_map, rows_map, runs_map

if TYPE_CHECKING:
    from cupy_dma.calls import AttentionCall


class HopperTile(NamedTuple):
    """A block's part of the attention: rows (queries times heads), keys at a time, stages of keys, of their values and
    of queries, and whether the warpgroups that multiply take turns in doing so."""

    block_m: int
    block_n: int
    stages: int
    value_stages: int
    query_stages: int
    turns: bool = False


@dataclass(frozen=True)
class HopperForwardConfig(jit.Config):
    source = "sm90/forward.cu"
    element: str
    head_dim: int
    heads: int  # of a group in one tile
    block_m: int
    block_n: int
    stages: int
    value_stages: int
    query_stages: int
    turns: bool
    keys: str
    causal: bool
    bias: int  # BIAS_NONE, BIAS_OF_KEYS, BIAS_DENSE
    softcap: bool
    bits: bool
    bias_element: str
    sequences: bool
    bulk: bool
    query_bulk: bool
    runs: bool

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in the kernel file, rounded up, and room to align it."""
        row = blocks(self.head_dim, 64) * 128
        rows = self.query_stages * self.block_m + (self.stages + self.value_stages) * self.block_n
        facts = 4 * self.block_n * (2 + max(2, blocks(self.block_m // self.heads, 32)))
        producer = 16 * self.block_n + 1536
        barriers = 64 * self.stages + 16 * self.value_stages + 96 * self.query_stages
        return 1024 + row * rows + self.stages * facts + barriers + producer


SECTION_BYTES = 24 << 20
SMALLEST_SCALE = 2.0**-40  # sums begin at bias / scale, which must stay far from the largest float32

# By what a call's keys are and the largest head dim, measured by benchmarks/tune_hopper.py: one or two tiles, of which
# a call takes the one with less time. Warpgroups that do not take turns come to do the same thing at the same time;
# where there are two of them and little else to wait for, turns cost more than they bring.
WIDE_64, WIDE_128 = HopperTile(192, 96, 5, 5, 2, turns=True), HopperTile(192, 64, 4, 3, 2, turns=True)
TILES: dict[str, dict[int, tuple[HopperTile, ...]]] = {
    "short intervals": {64: (HopperTile(192, 64, 6, 6, 2, turns=True), HopperTile(128, 128, 4, 4, 2, turns=True))},
    "intervals": {64: (WIDE_64, HopperTile(128, 128, 4, 4, 2, turns=True)),
                  128: (WIDE_128, HopperTile(128, 64, 4, 4, 2, turns=True)),
                  192: (HopperTile(128, 64, 2, 2, 2, turns=True),), 256: (HopperTile(128, 32, 2, 2, 2, turns=True),)},
    "intervals with softcap": {64: (WIDE_64, HopperTile(128, 128, 4, 4, 2)),
                               128: (WIDE_128, HopperTile(128, 64, 4, 4, 2, turns=True)),
                               192: (HopperTile(128, 64, 2, 2, 2, turns=True),),
                               256: (HopperTile(128, 32, 2, 2, 2, turns=True),)},
    "bits": {64: (HopperTile(128, 128, 4, 4, 2),), 128: (HopperTile(128, 128, 2, 2, 2, turns=True),),
             192: (HopperTile(128, 64, 2, 2, 2),), 256: (HopperTile(128, 32, 2, 2, 2, turns=True),)},
    "contiguous": {64: (HopperTile(192, 128, 3, 3, 2, turns=True), HopperTile(128, 128, 4, 4, 2)),
                   128: (HopperTile(128, 128, 2, 2, 2, turns=True),), 192: (HopperTile(128, 64, 2, 2, 2),),
                   256: (HopperTile(128, 32, 2, 2, 2),)},
    "contiguous with bias": {64: (WIDE_64, HopperTile(128, 128, 4, 4, 2)),
                             128: (HopperTile(128, 128, 2, 2, 2),), 192: (HopperTile(128, 64, 2, 2, 2),),
                             256: (HopperTile(128, 32, 2, 2, 2, turns=True),)},
    "contiguous with bias and softcap": {64: (WIDE_64, HopperTile(128, 128, 4, 4, 2)),
                                         128: (HopperTile(128, 128, 2, 2, 2),), 192: (HopperTile(128, 64, 2, 2, 2),),
                                         256: (HopperTile(128, 32, 2, 2, 2, turns=True),)},
}
# The time of the second of two tiles, by that of the first. Blocks of 128 keys pay for lists of as many keys or more.
SECOND_TIMES: dict[str, dict[int, float]] = {
    "short intervals": {64: 0.72}, "intervals": {64: 0.77, 96: 0.78, 128: 0.73},
    "intervals with softcap": {64: 0.75, 96: 0.7, 128: 0.72}, "contiguous": {64: 0.77},
    "contiguous with bias": {64: 0.73}, "contiguous with bias and softcap": {64: 0.77}}
SHORT_LIST = 192  # keys of a query up to which intervals are short
BLOCK_128_KEYS = 20  # what such a block of a list costs, in keys
PART_TIMES = {192: (0.75, 0.9), 128: (0.85,)}  # of 64 and of 128 rows of a tile, by its own
TILE_TIME = 0.15  # of a tile without keys, by that of one with the most
FEW_KEYS = 512  # of a mask that is left to the portable kernel


def tiles_of(keys: str, head_dim: int) -> tuple[HopperTile, ...]:
    """The tiles for a name of ``TILES``; none where there are none for this head dim."""
    return _entry(TILES[keys], head_dim) or ()


def _entry(table: dict[int, Any], head_dim: int) -> Any:
    return next((entry for largest, entry in table.items() if head_dim <= largest), None)


def tile_shape(call: AttentionCall, problem: Problem, processors: int) -> HopperTile:
    """The tile for a call: the one with less time on so many multiprocessors."""
    keys = _keys(call, problem)
    first, *others = tiles_of(keys, call.head_dim)
    if not others:
        return first
    second, = others
    time = _entry(SECOND_TIMES[keys], call.head_dim)
    if problem.mask is not None and second.block_n > first.block_n:
        time *= 1 + BLOCK_128_KEYS / max(1, _most_seen(call, problem))
    rounds = [_rounds(call, problem, tile, processors) for tile in (first, second)]
    return first if rounds[0] <= time * rounds[1] else second


def _keys(call: AttentionCall, problem: Problem) -> str:
    if _dense(problem):
        return "bits"
    if problem.mask is not None:
        if call.softcap > 0.0:
            return "intervals with softcap"
        return "short intervals" if call.head_dim <= 64 and _most_seen(call, problem) <= SHORT_LIST else "intervals"
    if problem.bias is None:
        return "contiguous"
    return "contiguous with bias" if call.softcap == 0.0 else "contiguous with bias and softcap"


def _dense(problem: Problem) -> bool:
    """A dense mask, a dense bias, or both: keys come in blocks of some that follow each other, or nearly so."""
    return problem.bits or problem.bias_kind == BIAS_DENSE


def _tiles(call: AttentionCall, problem: Problem, tile: HopperTile) -> tuple[int, int]:
    """Numbers of tiles of a set of heads, and of all of them."""
    tiles = tile_numbers(call.query_length, tile.block_m // problem.tile_heads, problem.count)
    return tiles, tiles * (call.heads // problem.tile_heads) * call.batch


def _cut(problem: Problem) -> bool:
    """Whether tiles may be cut up: ``CUT`` in kernels/sm90/tile.cuh."""
    return 64 % problem.tile_heads == 0 and not problem.bits and (problem.mask is not None or not problem.causal)


def _grid(call: AttentionCall, problem: Problem, tile: HopperTile, processors: int) -> int:
    """Blocks of the grid. Few tiles are cut up among several each (``scheduled`` in kernels/sm90/producer.cuh)."""
    _, count = _tiles(call, problem, tile)
    return min((tile.block_m // 64 if _cut(problem) else 1) * count, processors)


def _shorter(call: AttentionCall, problem: Problem, tile: HopperTile) -> int:
    """How many tiles of a set of heads may meet fewer keys than the others, as their queries have fewer before them
    than a query of the mask sees at most. They are dealt out last, all sets at a time, so these keys must fit into the
    second cache."""
    seen = _most_seen(call, problem)
    if seen == call.key_length or problem.count > 0 or call.batch * call.kv_heads * _bytes(call, seen) > SECTION_BYTES:
        return 0
    return max(0, seen + call.query_length - call.key_length) // (tile.block_m // problem.tile_heads)


def _most_seen(call: AttentionCall, problem: Problem) -> int:
    """How many keys a query may see."""
    bound = None if problem.mask is None else problem.mask._bound
    return call.key_length if bound is None else min(call.key_length, bound[0])


def _bytes(call: AttentionCall, keys: int) -> int:
    """Of so many keys of a head and their values."""
    return 2 * 2 * keys * call.head_dim


def _rounds(call: AttentionCall, problem: Problem, tile: HopperTile, processors: int) -> float:
    """The time of all tiles, by that of one with the most keys."""
    tiles, count = _tiles(call, problem, tile)
    if problem.mask is None and problem.causal:  # the longest tiles first, with half of the keys on average
        return max(1.0, count / (2 * processors))
    shorter, sets = _shorter(call, problem, tile), count // tiles
    longer = count - sets * shorter

    def time(place: int) -> float:  # of the tile that is dealt out there
        left = 0 if place < longer else (place - longer) // sets + 1
        return 1.0 - (1.0 - TILE_TIME) * left / (shorter + 1)

    rounds, rest = divmod(count, processors)
    whole = min(rounds, longer // processors)
    total = whole + sum(time(place * processors) for place in range(whole, rounds))
    before = rounds * processors
    if rest == 0 or not _cut(problem):
        return total + (time(before) if rest else 0.0)
    third, *half = PART_TIMES[tile.block_m]
    if 2 * rest > processors:
        return total + max(third * time(before), time(before + (processors - rest) // (tile.block_m // 64 - 1)))
    return total + time(before) * (third if tile.block_m // 64 * rest <= processors else half[0])


def serves(runtime: Runtime, index: int, call: AttentionCall, problem: Problem) -> bool:
    """Whether this kernel takes the call on device ``index``: it can, and is faster."""
    return (problem.size == 2 and problem.page_size == 0 and runtime.hopper(index) and problem.vector
            and call.scale >= SMALLEST_SCALE
            and not (problem.bias_kind == BIAS_DENSE and problem.bias_element == "float")
            and problem.params["key_length"] > 0 and _strides_fit(problem) and _pays(call, problem))


def _pays(call: AttentionCall, problem: Problem) -> bool:
    """But for masks of few keys, where the portable kernel is faster by up to 6 us."""
    return call.key_length > FEW_KEYS or (problem.mask is None and not problem.bits)


def _strides_fit(problem: Problem) -> bool:
    """Rows of keys and values, and a key's bias, are found with 32 bits for the distance of two of them in bytes."""
    return all(abs(problem.params.get(name, 0)) < 2**29 for name in ("key_row", "value_row", "bias_key"))


def attention(runtime: Runtime, call: AttentionCall, problem: Problem, out: Any, lse: Any) -> None:
    """Writes ``out`` and ``lse`` of a call that ``serves``; on the call's device."""
    query, place, device = call.query, call.query.library, call.query.device
    processors = runtime.multiprocessors(device.index)
    tile = tile_shape(call, problem, processors)
    queries = tile.block_m // problem.tile_heads
    (tiles, _), stream = _tiles(call, problem, tile), place.stream(device)
    problem.move_mask_to_rows(runtime, stream)
    lists: KeyLists | None = problem.key_lists(runtime, queries, tile.block_n, stream)
    ordered = _dense(problem)
    key_maps = _runs_maps(call) if ordered else b"" if lists is not None else _maps(call, tile)
    query_map = queries_map(query, queries, problem.tile_heads) if tile.block_m % problem.tile_heads == 0 else None
    out_map = b"" if query_map is None else _out_map(call, problem, place.pointer(out))
    kernel = _kernel(runtime, device.index, ELEMENTS[query.dtype], call.head_dim, problem.tile_heads, *tile,
                     "KEYS_CONTIGUOUS" if lists is None else lists.keys, problem.causal and not problem.bits,
                     problem.bias_kind, call.softcap > 0.0, problem.bits, problem.bias_element, problem.count > 0,
                     bool(key_maps) and not ordered, query_map is not None, bool(key_maps) and ordered)
    grid = _grid(call, problem, tile, processors)
    params = problem.pack(lists, out=place.pointer(out), lse=place.pointer(lse), tiles=tiles,
                          section=_section(call, problem), shorter=_shorter(call, problem, tile))
    if key_maps or query_map:  # struct ForwardParams: the maps first, and all of it a multiple of their alignment
        packed = key_maps + (query_map or b"") + out_map + params.tobytes()
        params = np.frombuffer(packed + bytes(-len(packed) % 64), f"V{blocks(len(packed), 64) * 64}")[0]
    kernel.launch(grid, 128 + 2 * tile.block_m, params, stream)


def _maps(call: AttentionCall, tile: HopperTile) -> bytes:
    """The tensors of keys and values for the copy engine; empty where it cannot read them."""
    return _joined(rows_map(call.key, tile.block_n), rows_map(call.value, tile.block_n))


def _out_map(call: AttentionCall, problem: Problem, pointer: int) -> bytes:
    """The output for the copy engine, a warp's 16 rows at a time (``OUT_BULK`` in kernels/sm90/tile.cuh); empty where
    it does not write it."""
    heads = problem.tile_heads
    if problem.count > 0 or 16 % heads != 0:
        return b""
    _, length, all_heads, head_dim = call.query.shape
    row = all_heads * head_dim
    out = dataclasses.replace(call.query, pointer=pointer, strides=(length * row, row, head_dim, 1))
    found = queries_map(out, 16 // heads, heads)
    assert found is not None  # the queries have one
    return found


def _runs_maps(call: AttentionCall) -> bytes:
    """The same for keys that follow each other in the list of a tile."""
    return _joined(runs_map(call.key), runs_map(call.value))


def _joined(key: bytes | None, value: bytes | None) -> bytes:
    return b"" if key is None or value is None else key + value


def _section(call: AttentionCall, problem: Problem) -> int:
    """Sets of heads (as many as a tile has) whose keys and values stay in the second cache together."""
    kv_heads = max(1, SECTION_BYTES // _bytes(call, call.key_length))
    return min(kv_heads * (call.heads // call.kv_heads // problem.tile_heads), 2**16)


@functools.cache
def _kernel(runtime: Runtime, index: int, *fields: Any) -> Any:
    config = HopperForwardConfig(*fields)
    return runtime.load(config, "attention_forward", index, config.shared_bytes)
