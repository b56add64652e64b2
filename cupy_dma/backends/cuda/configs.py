"""What each kernel file can be specialised in, numbers it shares with the host, and the tile shapes of attention."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from cupy_dma import jit

Shape = TypeVar("Shape", bound=tuple)
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
    gradient: bool

    @property
    def block_keys(self) -> int:
        return 8 * (32 // self.head_tile) * (4 if self.head_tile == 8 else 1)


@dataclass(frozen=True)
class ScoreBackwardConfig(jit.Config):
    source = "scores_backward.cu"
    value: str
    weight: str
    head_dim: int
    kv_heads: int
    head_tile: int


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
    sequences: bool = False


@dataclass(frozen=True)
class SequenceConfig(jit.Config):
    source = "sequences.cu"
    causal: bool


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
    sequences: bool = False
    page_size: int = 0  # 0: keys are not paged

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in the kernel file."""
        return _shared_bytes(self.head_dim, self.block_m, self.block_n)

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.block_m // self.heads


@dataclass(frozen=True)
class BackwardQueryConfig(ForwardConfig):
    source = "backward_query.cu"

    @property
    def shared_bytes(self) -> int:
        return _shared_bytes(self.head_dim, 2 * self.block_m, self.block_n)


class KeyTile(NamedTuple):
    """A block's part of the key gradients: keys, queries at a time, warps, blocks per multiprocessor."""

    block_n: int
    block_q: int
    warps: int
    min_blocks: int


@dataclass(frozen=True)
class BackwardKeyConfig(jit.Config):
    source = "backward_key.cu"
    element: str
    head_dim: int
    vector: bool
    block_n: int
    block_q: int
    warps: int
    min_blocks: int
    keys: str
    intervals: bool
    causal: bool
    bias: bool
    softcap: bool
    dim_parts: int
    dkey: bool
    dvalue: bool
    dbias: bool
    sequences: bool = False

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in backward_key.cu."""
        return _key_shared_bytes(self.head_dim, self.block_n, self.block_q)


@dataclass(frozen=True)
class BackwardSumConfig(jit.Config):
    source = "backward_sum.cu"
    element: str
    head_dim: int
    vector: bool
    causal: bool
    dkey: bool
    dvalue: bool
    dbias: bool
    sequences: bool = False


# Threads of a block and sizes, as in the kernel files.
SCORE_THREADS, SCORE_BLOCK_KEYS, SCORE_SLICE_KEYS = 256, 32, 512
SELECT_THREADS = {"local_top": 1024, "filter_arrivals": 1024, "sweep_arrivals": 512}
ARRIVALS = 256
LIST_THREADS, LIST_CHUNK, LIST_TILES, LIST_WARPS = 256, 2048, 8, 8
SUM_THREADS, SUM_WARPS = 256, 8
SEQUENCE_THREADS, SUPER_UNIT = 256, 64

# By head dim, the fastest first; the first that fits is taken. Measured in docs/performance-notes.md.
_TILES = {
    64: (Tile(128, 64, 4, 2),),
    128: (Tile(128, 64, 4, 2), Tile(128, 32, 4, 1)),
    192: (Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 32, 4, 1)),
    256: (Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 16, 4, 1)),
}
_BACKWARD_QUERY_TILES = {
    64: (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2)),
    256: (Tile(64, 32, 4, 1), Tile(32, 16, 2, 1)),
}
_BACKWARD_KEY_TILES = {
    64: (KeyTile(64, 64, 4, 2),),
    128: (KeyTile(64, 64, 4, 2), KeyTile(64, 32, 4, 1)),
    256: (KeyTile(64, 32, 4, 1), KeyTile(32, 16, 2, 1)),
}
_SMALL_TILES = (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))


def _shared_bytes(head_dim: int, block_m: int, block_n: int) -> int:
    row = (head_dim + 15) // 16 * 16 + 8
    return 2 * row * (block_m + 4 * block_n) + 4 * 9 * block_n


def _key_shared_bytes(head_dim: int, block_n: int, block_q: int) -> int:
    row = (head_dim + 15) // 16 * 16 + 8
    return 2 * row * (2 * block_n + 4 * block_q) + 4 * (6 * block_q + 4 * block_n)


def _first_that_fits(shapes: Sequence[Shape], size: Callable[[Shape], int], head_dim: int, shared_limit: int) -> Shape:
    for shape in shapes:
        if size(shape) <= shared_limit:
            return shape
    raise RuntimeError(f"no tile of head dim {head_dim} fits into {shared_limit} bytes of shared memory")


def _of_head_dim(shapes: Mapping[int, tuple[Shape, ...]], head_dim: int) -> tuple[Shape, ...]:
    return next(found for largest, found in shapes.items() if head_dim <= largest)


@functools.cache
def tile_shape(head_dim: int, shared_limit: int, few: bool = False) -> Tile:
    """The forward's tile for a head dim within ``shared_limit`` bytes of shared memory.

    ``few``: there are fewer tiles than multiprocessors, so that a tile's own time counts.
    """
    shapes = _SMALL_TILES if few and head_dim <= 128 else _of_head_dim(_TILES, head_dim)
    return _first_that_fits(shapes, lambda t: _shared_bytes(head_dim, t.block_m, t.block_n), head_dim, shared_limit)


@functools.cache
def backward_query_tile(head_dim: int, shared_limit: int) -> Tile:
    """The tile of the query gradient, which keeps dout beside the queries."""
    return _first_that_fits(_of_head_dim(_BACKWARD_QUERY_TILES, head_dim),
                            lambda t: _shared_bytes(head_dim, 2 * t.block_m, t.block_n), head_dim, shared_limit)


@functools.cache
def backward_key_tile(head_dim: int, shared_limit: int) -> KeyTile:
    """The tile of the gradients of keys and values."""
    return _first_that_fits(_of_head_dim(_BACKWARD_KEY_TILES, head_dim),
                            lambda t: _key_shared_bytes(head_dim, t.block_n, t.block_q), head_dim, shared_limit)


def heads_per_tile(group: int) -> int:
    """Heads of a group that share a gathered tile: the largest divisor up to 4 (more would make lists too many)."""
    return max(h for h in (1, 2, 3, 4) if group % h == 0)


def blocks(length: int, size: int) -> int:
    """Pieces of ``size`` that cover ``length``."""
    return -(-length // size)
