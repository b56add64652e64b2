"""What each kernel file can be specialised in, numbers it shares with the host, and the tile shapes of attention."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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
    bias: int  # BIAS_NONE, BIAS_OF_KEYS, BIAS_DENSE
    softcap: bool
    bits: bool = False  # a dense mask
    bias_element: str = "float"

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in the kernel file."""
        return self._shared_bytes(self.block_m)

    def _shared_bytes(self, rows: int) -> int:
        size = _shared_bytes(self.head_dim, rows, self.block_n)
        if self.bits:
            size += 8 * self.block_n * (blocks(self.queries, 32) - 2)
        if self.bias == BIAS_DENSE:
            size += _bias_bytes(blocks(self.block_m, self.heads), self.block_n, self.bias_element)
        return size

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.block_m // self.heads


@dataclass(frozen=True)
class BackwardQueryConfig(ForwardConfig):
    source = "backward_query.cu"
    dbias: bool = False

    @property
    def shared_bytes(self) -> int:
        return self._shared_bytes(2 * self.block_m)


@dataclass(frozen=True)
class BackwardBiasConfig(ForwardConfig):
    source = "backward_bias.cu"
    intervals: bool = False
    sum_keys: bool = False

    @property
    def shared_bytes(self) -> int:
        tile = Tile(self.block_m, self.block_n, self.warps, self.min_blocks)
        return _bias_pass_bytes(self.head_dim, tile, self.bias_element)


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
    bias: int
    softcap: bool
    dim_parts: int
    dkey: bool
    dvalue: bool
    dbias: bool
    bits: bool = False
    bias_element: str = "float"

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in backward_key.cu."""
        size = _key_shared_bytes(self.head_dim, self.block_n, self.block_q)
        if self.bits:
            size += 8 * blocks(self.block_q, 32) * self.block_n
        return size + (_bias_bytes(self.block_q, self.block_n, self.bias_element) if self.bias == BIAS_DENSE else 0)


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


@dataclass(frozen=True)
class DenseConfig(jit.Config):
    source = "dense.cu"
    queries: int


# Threads of a block and sizes, as in the kernel files.
BIAS_NONE, BIAS_OF_KEYS, BIAS_DENSE = 0, 1, 2
STATE_KEYS = 64
RESERVED = 1024  # bytes of a multiprocessor's shared memory that each of its blocks costs besides its own
SCORE_THREADS, SCORE_BLOCK_KEYS, SCORE_SLICE_KEYS = 256, 32, 512
SELECT_THREADS = {"local_top": 1024, "filter_arrivals": 1024, "sweep_arrivals": 512}
ARRIVALS = 256
LIST_THREADS, LIST_CHUNK, LIST_TILES, LIST_WARPS = 256, 2048, 8, 8
SUM_THREADS, SUM_WARPS = 256, 8

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
# With a dense bias, two tiles of which must fit as well: the first of which as many blocks fit as it names.
_BIASED_TILES = {
    64: (Tile(128, 64, 4, 2), Tile(128, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    128: (Tile(128, 32, 4, 2), Tile(128, 32, 8, 1), Tile(64, 32, 4, 1)),
    256: (Tile(128, 32, 8, 1), Tile(64, 32, 4, 1), Tile(64, 16, 4, 1)),
}
_BIASED_BACKWARD_QUERY_TILES = {
    64: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    128: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(64, 16, 4, 1)),
    256: (Tile(64, 32, 4, 1), Tile(32, 32, 2, 1), Tile(32, 16, 2, 1)),
}
_BIASED_BACKWARD_KEY_TILES = {
    64: (KeyTile(64, 64, 4, 2), KeyTile(64, 32, 4, 2), KeyTile(64, 32, 4, 1)),
    128: (KeyTile(64, 32, 4, 2), KeyTile(64, 32, 4, 1)),
    256: (KeyTile(64, 32, 4, 1), KeyTile(32, 16, 2, 1)),
}
_BACKWARD_BIAS_TILES = {
    64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 1)),
    128: (Tile(128, 64, 8, 1), Tile(64, 32, 4, 1)),
    256: (Tile(64, 64, 4, 1), Tile(64, 16, 4, 1)),
}
_SMALL_TILES = (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1))


def _shared_bytes(head_dim: int, block_m: int, block_n: int) -> int:
    row = (head_dim + 15) // 16 * 16 + 8
    return 2 * row * (block_m + 4 * block_n) + 4 * 9 * block_n


def _bias_bytes(rows: int, columns: int, element: str) -> int:
    """Two tiles of a dense bias."""
    return 2 * rows * (columns + 8) * (4 if element == "float" else 2)


def _key_shared_bytes(head_dim: int, block_n: int, block_q: int) -> int:
    row = (head_dim + 15) // 16 * 16 + 8
    return 2 * row * (2 * block_n + 4 * block_q) + 4 * (6 * block_q + 4 * block_n)


def _bias_pass_bytes(head_dim: int, tile: Tile, element: str) -> int:
    row = (head_dim + 15) // 16 * 16 + 8
    return (4 * row * (tile.block_m + tile.block_n) + 4 * tile.block_n * (2 + blocks(tile.block_m, 32))
            + _bias_bytes(tile.block_m, tile.block_n, element) // 2)


def _with_bias(size: Callable[[Any], int], rows: Callable[[Any], int], element: str) -> Callable[[Any], int]:
    """Bytes of as many blocks as a multiprocessor is to hold, with two tiles of a dense bias each, less what the limit
    of a single block leaves out already."""
    def together(shape: Any) -> int:
        return shape.min_blocks * (size(shape) + _bias_bytes(rows(shape), shape.block_n, element) + RESERVED) - RESERVED

    return together


def _first_that_fits(shapes: Sequence[Shape], size: Callable[[Shape], int], head_dim: int, shared_limit: int) -> Shape:
    for shape in shapes:
        if size(shape) <= shared_limit:
            return shape
    raise RuntimeError(f"no tile of head dim {head_dim} fits into {shared_limit} bytes of shared memory")


def _of_head_dim(shapes: Mapping[int, tuple[Shape, ...]], head_dim: int) -> tuple[Shape, ...]:
    return next(found for largest, found in shapes.items() if head_dim <= largest)


@functools.cache
def tile_shape(head_dim: int, shared_limit: int, few: bool = False, dense_bias: str | None = None) -> Tile:
    """The forward's tile for a head dim within ``shared_limit`` bytes of shared memory.

    ``few``: there are fewer tiles than multiprocessors, so that a tile's own time counts. ``dense_bias``: the kernels'
    type of a bias with a number per query and key.
    """
    shapes = _of_head_dim(_TILES if dense_bias is None else _BIASED_TILES, head_dim)
    if few and head_dim <= 128:
        shapes = _SMALL_TILES

    def size(tile: Tile) -> int:
        return _shared_bytes(head_dim, tile.block_m, tile.block_n) + 16 * tile.block_n  # words of a dense mask

    return _first_that_fits(shapes, size if dense_bias is None else _with_bias(size, lambda t: t.block_m, dense_bias),
                            head_dim, shared_limit)


@functools.cache
def backward_query_tile(head_dim: int, shared_limit: int, dense_bias: str | None = None) -> Tile:
    """The tile of the query gradient, which keeps dout beside the queries."""
    def size(tile: Tile) -> int:
        return _shared_bytes(head_dim, 2 * tile.block_m, tile.block_n) + 16 * tile.block_n

    if dense_bias is None:
        return _first_that_fits(_of_head_dim(_BACKWARD_QUERY_TILES, head_dim), size, head_dim, shared_limit)
    return _first_that_fits(_of_head_dim(_BIASED_BACKWARD_QUERY_TILES, head_dim),
                            _with_bias(size, lambda t: t.block_m, dense_bias), head_dim, shared_limit)


@functools.cache
def backward_bias_tile(head_dim: int, shared_limit: int, element: str) -> Tile:
    """The tile of the gradient of a dense bias that is shared."""
    return _first_that_fits(
        _of_head_dim(_BACKWARD_BIAS_TILES, head_dim),
        lambda t: t.min_blocks * (_bias_pass_bytes(head_dim, t, element) + RESERVED) - RESERVED, head_dim, shared_limit)


@functools.cache
def backward_key_tile(head_dim: int, shared_limit: int, dense_bias: str | None = None) -> KeyTile:
    """The tile of the gradients of keys and values."""
    def size(tile: KeyTile) -> int:
        return _key_shared_bytes(head_dim, tile.block_n, tile.block_q) + 16 * tile.block_n

    if dense_bias is None:
        return _first_that_fits(_of_head_dim(_BACKWARD_KEY_TILES, head_dim), size, head_dim, shared_limit)
    return _first_that_fits(_of_head_dim(_BIASED_BACKWARD_KEY_TILES, head_dim),
                            _with_bias(size, lambda t: t.block_q, dense_bias), head_dim, shared_limit)


def heads_per_tile(group: int, bits: bool = False) -> int:
    """Heads of a group that share a gathered tile: the largest divisor up to 4 (more would make lists too many).

    ``bits``: a tile's queries must begin at a word's or at an 8th, 16th of it.
    """
    return max(h for h in ((1, 2, 4) if bits else (1, 2, 3, 4)) if group % h == 0)


def blocks(length: int, size: int) -> int:
    """Pieces of ``size`` that cover ``length``."""
    return -(-length // size)
