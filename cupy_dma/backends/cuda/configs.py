"""What each kernel file can be specialised in, numbers it shares with the host, and the tile shapes of attention."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from cupy_dma import jit

ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}


@dataclass(frozen=True)
class LayoutConfig(jit.Config):
    source = "layout.cu"
    element: str


@dataclass(frozen=True)
class ScoreConfig(jit.Config):
    source = "scores.cu"
    value: str
    weight: str
    head_dim: int
    kv_heads: int
    head_tile: int
    vector: bool
    exp_form: bool

    @property
    def block_keys(self) -> int:
        return 8 * (32 // self.head_tile) * (4 if self.head_tile == 8 else 1)


@dataclass(frozen=True)
class SelectConfig(jit.Config):
    source = "select.cu"
    documents: bool
    padding: bool


@dataclass(frozen=True)
class ListConfig(jit.Config):
    source = "lists.cu"
    causal: bool
    block_n: int


class Tile(NamedTuple):
    """A block's part of the attention: rows (queries times heads), keys at a time, warps, blocks per multiprocessor."""

    block_m: int
    block_n: int
    warps: int
    min_blocks: int


@dataclass(frozen=True)
class ForwardConfig(jit.Config):
    source = "forward.cu"
    element: str
    head_dim: int
    vector: bool
    heads: int  # of a group in one tile
    block_m: int
    block_n: int
    warps: int
    min_blocks: int
    keys: str
    causal: bool
    bias: bool
    softcap: bool

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in forward.cu."""
        return _shared_bytes(self.head_dim, self.block_m, self.block_n)

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.block_m // self.heads


# Threads of a block and sizes, as in the kernel files.
SCORE_THREADS = 256
SELECT_THREADS = {"local_top": 1024, "filter_arrivals": 1024, "sweep_arrivals": 512}
ARRIVALS = 256
LIST_THREADS, LIST_CHUNK, LIST_TILES, LIST_WARPS = 256, 2048, 8, 8

# By head dim, the fastest first; the first that fits is taken. Measured in docs/performance-notes.md.
_TILES = {
    64: (Tile(128, 64, 4, 2),),
    128: (Tile(128, 64, 4, 2), Tile(128, 32, 4, 1)),
    192: (Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 32, 4, 1)),
    256: (Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 16, 4, 1)),
}
_SMALL_TILES = (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))


def _shared_bytes(head_dim: int, block_m: int, block_n: int) -> int:
    row = (head_dim + 15) // 16 * 16 + 8
    return 2 * row * (block_m + 4 * block_n) + 4 * 9 * block_n


@functools.cache
def tile_shape(head_dim: int, shared_limit: int, few: bool = False) -> Tile:
    """The tile for a head dim within ``shared_limit`` bytes of shared memory.

    ``few``: there are fewer tiles than multiprocessors, so that a tile's own time counts.
    """
    shapes = next(shapes for largest, shapes in _TILES.items() if head_dim <= largest)
    if few and head_dim <= 128:
        shapes = _SMALL_TILES
    for shape in shapes:
        if _shared_bytes(head_dim, shape.block_m, shape.block_n) <= shared_limit:
            return shape
    raise RuntimeError(f"no tile of head dim {head_dim} fits into {shared_limit} bytes of shared memory")


def heads_per_tile(group: int) -> int:
    """Heads of a group that share a gathered tile: the largest divisor up to 4 (more would make lists too many)."""
    return max(h for h in (1, 2, 3, 4) if group % h == 0)


def blocks(length: int, size: int) -> int:
    """Pieces of ``size`` that cover ``length``."""
    return -(-length // size)
