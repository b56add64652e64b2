"""The attention forward on Hopper GPUs (``kernels/sm90``): warpgroup MMAs (wgmma) over gathered keys.

Supports 16-bit elements in aligned rows, with a positive scale by which a bias can be divided and no float32 dense
bias. With a mask it takes calls with more than a few keys or tiles. The portable kernel handles the rest and gives the
same numbers within rounding.
"""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.polynomial import Polynomial

from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.attention.sm90_schedule import Schedule, best_schedule, tile_shape
from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile, is_dense, schedule_key
from cupy_dma.backends.cuda.attention.tma import queries_map, rows_map, runs_map
from cupy_dma.backends.cuda.lists.intervals import ShortTiles
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import BIAS_DENSE, ELEMENTS, blocks
from cupy_dma.backends.cuda.runtime.params import Packed

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionCall


@dataclass(frozen=True)
class HopperForwardConfig(jit.Config):
    source = "sm90/forward.cu"
    element: str
    head_dim: int
    heads: int  # of a GQA group in one tile
    block_m: int
    block_n: int
    stages: int
    value_stages: int
    query_stages: int
    ping_pong: bool
    keys: str
    causal: bool
    bias: int  # BIAS_NONE, BIAS_OF_KEYS, BIAS_DENSE
    softcap: bool
    bits: bool
    bias_element: str
    sequences: bool
    kv_tma: bool
    query_tma: bool
    runs: bool
    split: bool = False  # the last tiles are split along their keys
    delay: bool = False  # of a key bias

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in the kernel file, rounded up, with room for alignment."""
        row = blocks(self.head_dim, 64) * 128
        rows = self.query_stages * self.block_m + (self.stages + self.value_stages) * self.block_n
        facts = 4 * self.block_n * (2 + max(2, blocks(self.block_m // self.heads, 32)) + self.delay)
        producer = 16 * self.block_n + 1536
        barriers = 64 * self.stages + 16 * self.value_stages + 96 * self.query_stages
        return 1024 + row * rows + self.stages * facts + barriers + producer


@dataclass(frozen=True)
class CombineConfig(jit.Config):
    source = "sm90/combine.cu"
    element: str
    head_dim: int
    heads: int  # as above
    block_m: int

    @property
    def block_rows(self) -> int:
        """Rows of a block of ``COMBINE_THREADS`` threads."""
        return COMBINE_THREADS // next(lanes for lanes in (4, 8, 16, 32) if self.head_dim <= 4 * lanes or lanes == 32)


NAME = "Hopper forward"
COMBINE_THREADS = 256  # as in the kernel file
SMALLEST_SCALE = 2.0**-40  # accumulators start at bias / scale, which must stay far below the largest float32
FEW_KEYS, FEW_ROWS = 512, 128  # masks up to this size go to the portable kernel: keys, and rows per SM


def reasons(build: Builder, call: AttentionCall, problem: Problem) -> list[str]:
    """Why not to use this kernel for the call; empty if it can run it and is faster."""
    wanted = build.overrides.hopper
    against = {
        "Overrides.hopper is False": wanted is False, "no Hopper GPU": not build.is_hopper,
        "float32 elements": problem.size != 2, "a paged KV cache": problem.page_size != 0,
        "rows that are not aligned to 16 bytes": not problem.vector,
        f"a scale below {SMALLEST_SCALE:.1e}": call.scale < SMALLEST_SCALE,
        "a float32 dense bias": problem.bias_kind == BIAS_DENSE and problem.bias_element == "float",
        "no keys": problem.params["key_length"] == 0, "row strides of 2^29 elements or more": not _strides_fit(problem)}
    found = [reason for reason, holds in against.items() if holds]
    if not found and wanted is None and not _pays(call, problem, build.num_sms):
        found = [f"a mask of at most {FEW_KEYS} keys and a single wave of tiles, where the portable kernel is faster"]
    return found


def _pays(call: AttentionCall, problem: Problem, num_sms: int) -> bool:
    """False for masks of few keys and a single wave of tiles, where the portable kernel is faster by up to 6 us."""
    return (call.key_length > FEW_KEYS or (problem.mask is None and not problem.bits)
            or call.batch * call.query_length * call.heads > FEW_ROWS * num_sms)


def _strides_fit(problem: Problem) -> bool:
    """Whether the byte distance of any two keys, values or key biases fits 32 bits."""
    return all(abs(problem.params.get(name, 0)) < 2**29 for name in ("key_row", "value_row", "bias_key"))


def attention(build: Builder, call: AttentionCall, problem: Problem, out: Array, lse: Array) -> None:
    """Launches a call without ``reasons`` against it; writes ``out`` and ``lse``."""
    query, heads = call.query, problem.tile_heads
    facts = schedule_key(call, problem)
    tile = build.overrides.tile or tile_shape(facts, build.num_sms)
    work = build.overrides.schedule or best_schedule(facts, tile, build.num_sms)
    queries = tile.block_m // heads
    problem.move_mask_to_rows(build)
    short_tiles = ShortTiles(tiles=work.short_tiles, missing_queries=64 // heads)
    lists = problem.key_lists(build, queries, tile.block_n, short_tiles)
    ordered = is_dense(problem)
    key_maps = _runs_maps(call) if ordered else None if lists is not None else _maps(call, tile.block_n)
    query_map = queries_map(query, queries, heads) if tile.block_m % heads == 0 else None
    out_map = None if query_map is None else _out_map(call, problem, out)
    config = HopperForwardConfig(
        element=ELEMENTS[query.dtype], head_dim=call.head_dim, heads=heads, **tile._asdict(),
        keys="KEYS_CONTIGUOUS" if lists is None else lists.keys, causal=problem.tests_causality,
        bias=problem.bias_kind, softcap=call.softcap > 0.0, bits=problem.bits, bias_element=problem.bias_element,
        sequences=problem.count > 0, kv_tma=key_maps is not None and not ordered, query_tma=query_map is not None,
        runs=key_maps is not None and ordered, split=work.num_splits > 1, delay=problem.delay)
    maps = Packed(b"")
    for found in (key_maps, query_map, out_map):
        maps += found or b""
    splits = _Splits(build, call, heads, tile, work) if work.num_splits > 1 else None
    # struct ForwardParams: the maps first, padded to a multiple of their alignment
    packed = maps + problem.pack(lists, out=out.ref, lse=lse.ref, tiles=work.tiles, swizzle_group=work.swizzle_group,
                                 tail_tiles=work.tail_tiles, short_tiles=work.short_tiles, rotation=work.rotation)
    packed += splits.packed if splits else b""
    packed += _softcap_polynomials(call.scale, call.softcap, problem.bias_kind != BIAS_DENSE)
    build.launch(build.load(config, "attention_forward", config.shared_bytes), work.grid, 128 + 2 * tile.block_m,
                 packed.padded(64 if maps.data else 8))
    if splits:
        splits.combine(build, out, lse)


class _Splits:
    """Results of the splits of the last tiles, tile by tile (kernels/sm90/split_kv.cuh)."""

    def __init__(self, build: Builder, call: AttentionCall, heads: int, tile: HopperTile, work: Schedule):
        self.call, self.work = call, work
        self.config = CombineConfig(element=ELEMENTS[call.query.dtype], head_dim=call.head_dim, heads=heads,
                                    block_m=tile.block_m)
        self.rows = (call.batch * (call.heads // heads) * work.tiles - work.first) * tile.block_m
        rows = self.rows * work.num_splits
        self.output = build.empty((rows * (call.head_dim + 2),), "float32").ref
        self.lse = self.output + 4 * rows * call.head_dim
        self.packed = jit.params("sm90/split_kv.cuh", "Splits").pack(
            output=self.output, lse=self.lse, first=work.first, count=work.num_splits, blocks=rows // tile.block_m)

    def combine(self, build: Builder, out: Array, lse: Array) -> None:
        """Launches their combination, after the kernel that wrote them."""
        work, (batch, length, heads, _) = self.work, self.call.query.shape
        params = jit.params("sm90/combine.cu", "CombineParams").pack(
            partial=self.output, partial_lse=self.lse, out=out.ref, lse=lse.ref, num_splits=work.num_splits,
            first=work.first, batch=batch, query_length=length, heads=heads, tiles=work.tiles,
            tail_tiles=work.tail_tiles)
        build.launch(build.load(self.config, "combine_splits"), self.rows // self.config.block_rows, COMBINE_THREADS,
                     params)


# tanh(y) / y as polynomials of y^2, with their ranges of y: minimax of the relative error, 5.5e-7 and 4.0e-7.
_TANH_POLYNOMIALS = ((0.5, (0.99999945577, -0.33326317936, 0.13190296603, -0.04440222612)),
                     (0.25, (0.999999604345, -0.33321908225, 0.12841613431)))
# For softcaps too large for those coefficients in float32: errors up to 2e-7 and 3e-8.
_LARGE_SOFTCAP = ((0.035, (1.0, -1 / 3)), (0.0003, (1.0,)))
_HUGE_SOFTCAP = _LARGE_SOFTCAP[1:] * 2


@functools.lru_cache(maxsize=64)
def _softcap_polynomials(scale: float, softcap: float, powers_of_2: bool) -> bytes:
    """Two ``SoftcapPolynomial`` of kernels/sm90/work.cuh; nothing without a softcap."""
    if softcap == 0.0:
        return b""
    ratio, unit = scale / softcap, math.log2(math.e) if powers_of_2 else 1.0
    for polynomials in (_TANH_POLYNOMIALS, _LARGE_SOFTCAP, _HUGE_SOFTCAP) if ratio < 2.0**100 else ():
        packed = np.zeros((2, 5))
        for fields, (end, terms) in zip(packed, polynomials):
            moved = Polynomial(terms)(Polynomial((end**2, 1.0))).coef  # of y^2 - end^2
            fields[0] = min((end / ratio)**2, 2.0**100)  # no logit is that large
            fields[1:len(terms) + 1] = [unit * scale * ratio**(2 * k) * float(term) for k, term in enumerate(moved)]
        numbers = abs(packed[packed != 0.0])
        if numbers.min() >= 2.0**-100 and numbers.max() <= 2.0**100:
            return packed.astype(np.float32).tobytes()
    return np.full((2, 5), -1.0, np.float32).tobytes()


def _maps(call: AttentionCall, block: int) -> Packed | None:
    """The TMA descriptors of keys and values; None if TMA cannot read them."""
    return _joined(rows_map(call.key, block), rows_map(call.value, block))


def _out_map(call: AttentionCall, problem: Problem, out: Array) -> Packed | None:
    """The TMA descriptor of the output, stored 16 rows of a warp at a time (``OUT_TMA`` in kernels/sm90/config.cuh);
    None if the kernel does not store it by TMA."""
    heads = problem.tile_heads
    if problem.count > 0 or 16 % heads != 0:
        return None
    found = queries_map(call.query.library.describe(out, "out"), 16 // heads, heads)
    assert found is not None  # the queries have one
    return found


def _runs_maps(call: AttentionCall) -> Packed | None:
    """The same for consecutive keys in the list of a tile."""
    return _joined(runs_map(call.key), runs_map(call.value))


def _joined(key: Packed | None, value: Packed | None) -> Packed | None:
    return None if key is None or value is None else key + value
