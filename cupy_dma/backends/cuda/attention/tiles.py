"""The tile shapes of the portable attention kernels, by head dim, type and a device's shared memory.

Shared memory is the limit: float32 rows take twice the bytes, and a dense bias needs two tiles of its own.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cupy_dma.backends.cuda.runtime.configs import (
    RESERVED,
    KeyTile,
    Tile,
    bias_bytes,
    bias_pass_bytes,
    key_tile_bytes,
    tile_bytes,
)

Shape = TypeVar("Shape", Tile, KeyTile)
Tiles = dict[int, dict[int, tuple[Tile, ...]]]
KeyTilesOf = dict[int, dict[int, tuple[KeyTile, ...]]]

# By bytes per element and head dim, the fastest first: the first one wins of which an SM holds as many blocks as it
# names. Measured in docs/lab/forward-sm80.md and backward.md; for float32 chosen by counting, the first that fits.
_FORWARD: Tiles = {2: {
    64: (Tile(128, 64, 4, 2), Tile(128, 32, 4, 2)),
    128: (Tile(128, 64, 4, 2), Tile(128, 32, 4, 2), Tile(128, 32, 4, 1)),
    192: (Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 32, 4, 1)),
    256: (Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 16, 4, 1)),
}, 4: {
    64: (Tile(128, 32, 4, 2),),
    128: (Tile(128, 16, 4, 2), Tile(64, 16, 4, 1)),
    192: (Tile(128, 32, 8, 1), Tile(128, 16, 8, 1), Tile(64, 16, 4, 1)),
    256: (Tile(128, 16, 8, 1), Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
}}
_BACKWARD_DQ: Tiles = {2: {
    64: (Tile(128, 64, 4, 2), Tile(64, 32, 4, 2)),
    128: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2)),
    256: (Tile(64, 32, 4, 1), Tile(32, 16, 2, 1)),
}, 4: {
    64: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 1)),
    128: (Tile(64, 16, 4, 2), Tile(32, 16, 2, 1)),
    256: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
}}
_BACKWARD_DKV: KeyTilesOf = {2: {
    64: (KeyTile(64, 64, 4, 2), KeyTile(64, 32, 4, 2)),
    128: (KeyTile(64, 64, 4, 2), KeyTile(64, 32, 4, 2), KeyTile(64, 32, 4, 1)),
    256: (KeyTile(64, 32, 4, 1), KeyTile(32, 16, 2, 1)),
}, 4: {
    64: (KeyTile(64, 32, 4, 2),),
    128: (KeyTile(64, 16, 4, 2), KeyTile(32, 16, 2, 1)),
    256: (KeyTile(64, 16, 4, 1), KeyTile(32, 16, 2, 1), KeyTile(16, 16, 1, 1)),
}}
# With a dense bias, two tiles of which must also fit.
_BIASED_FORWARD: Tiles = {2: {
    64: (Tile(128, 64, 4, 2), Tile(128, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    128: (Tile(128, 32, 4, 2), Tile(128, 32, 8, 1), Tile(64, 32, 4, 1)),
    256: (Tile(128, 32, 8, 1), Tile(64, 32, 4, 1), Tile(64, 16, 4, 1)),
}, 4: {
    64: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    128: (Tile(128, 16, 4, 2), Tile(128, 32, 8, 1), Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    256: (Tile(128, 16, 8, 1), Tile(64, 16, 4, 1), Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
}}
_BIASED_BACKWARD_DQ: Tiles = {2: {
    64: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    128: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(64, 16, 4, 1)),
    256: (Tile(64, 32, 4, 1), Tile(32, 32, 2, 1), Tile(32, 16, 2, 1)),
}, 4: {
    64: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    128: (Tile(64, 16, 4, 2), Tile(64, 32, 4, 1), Tile(32, 16, 2, 1)),
    256: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
}}
_BIASED_BACKWARD_DKV: KeyTilesOf = {2: {
    64: (KeyTile(64, 64, 4, 2), KeyTile(64, 32, 4, 2), KeyTile(64, 32, 4, 1)),
    128: (KeyTile(64, 32, 4, 2), KeyTile(64, 32, 4, 1)),
    256: (KeyTile(64, 32, 4, 1), KeyTile(32, 16, 2, 1)),
}, 4: {
    64: (KeyTile(64, 32, 4, 2), KeyTile(64, 16, 4, 2), KeyTile(64, 32, 4, 1)),
    128: (KeyTile(64, 16, 4, 2), KeyTile(64, 16, 4, 1), KeyTile(32, 16, 2, 1)),
    256: (KeyTile(64, 16, 4, 1), KeyTile(32, 16, 2, 1), KeyTile(16, 16, 1, 1)),
}}
_BACKWARD_DBIAS: Tiles = {2: {
    64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 1)),
    128: (Tile(128, 64, 8, 1), Tile(64, 32, 4, 1)),
    256: (Tile(64, 64, 4, 1), Tile(64, 16, 4, 1)),
}, 4: {
    64: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)),
    128: (Tile(128, 64, 8, 1), Tile(64, 64, 4, 1), Tile(64, 16, 4, 1)),
    256: (Tile(64, 32, 4, 1), Tile(32, 32, 2, 1), Tile(16, 16, 1, 1)),
}}
_SMALL = {
    2: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    4: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(64, 16, 4, 1)),
}


def _first_that_fits(shapes: Sequence[Shape], size: Callable[[Shape], int], head_dim: int, shared_limit: int,
                     alone: bool = False) -> Shape:
    """The first shape of which an SM holds as many blocks as it names (``alone``: one), else the first that fits."""
    for together in (False,) if alone else (True, False):
        for shape in shapes:
            if _fits(size(shape), shape.min_blocks if together else 1, shared_limit):
                return shape
    raise NotImplementedError(
        f"backend='cuda' cannot do this: no tile of head dim {head_dim} fits into this GPU's {shared_limit} bytes of "
        "shared memory (float32 gradients with head dims above 240 and a dense bias need more than 99 KB: use float16 "
        "or bfloat16, or another backend)")


def _fits(size: int, blocks: int, shared_limit: int) -> bool:
    return blocks * (size + RESERVED) - RESERVED <= shared_limit


def _bias_of(shape: Any, rows: int, element: str | None) -> int:
    return 0 if element is None else bias_bytes(rows, shape.block_n, element)


def _of_head_dim(shapes: Mapping[int, tuple[Shape, ...]], head_dim: int) -> tuple[Shape, ...]:
    return next(found for largest, found in shapes.items() if head_dim <= largest)


# Below, `size` is the bytes of an element of query, key and value, `dense_bias` the kernels' type of a dense bias.
# A dense mask takes 16 bytes per key: its words.
@functools.cache
def tile_shape(head_dim: int, shared_limit: int, tiles: str = "", size: int = 2,
               dense_bias: str | None = None) -> Tile:
    """The forward's tile for a head dim within ``shared_limit`` bytes of shared memory.

    ``tiles``: "few" if fewer than SMs, so that a tile's own time counts, "many" for several waves.
    """
    shapes = _of_head_dim((_FORWARD if dense_bias is None else _BIASED_FORWARD)[size], head_dim)
    few = tiles == "few" and head_dim <= 128  # so an SM holds one block

    def needed(tile: Tile) -> int:
        return (tile_bytes(size, head_dim, tile.block_m, tile.block_n) + 16 * tile.block_n
                + _bias_of(tile, tile.block_m, dense_bias))

    found = _first_that_fits(_SMALL[size] if few else shapes, needed, head_dim, shared_limit,
                             dense_bias is None and (few or size == 4))
    if tiles == "many" and dense_bias is None and head_dim <= 64 and _fits(needed(found), 3, shared_limit):
        return found._replace(min_blocks=3)  # 10 % faster there, slower elsewhere
    return found


@functools.cache
def backward_dq_tile(head_dim: int, shared_limit: int, size: int = 2, dense_bias: str | None = None) -> Tile:
    """The tile of the query gradient, which keeps dout in addition to the queries."""
    def needed(tile: Tile) -> int:
        return (tile_bytes(size, head_dim, 2 * tile.block_m, tile.block_n) + 16 * tile.block_n
                + _bias_of(tile, tile.block_m, dense_bias))

    shapes = (_BACKWARD_DQ if dense_bias is None else _BIASED_BACKWARD_DQ)[size]
    return _first_that_fits(_of_head_dim(shapes, head_dim), needed, head_dim, shared_limit,
                            dense_bias is None and size == 4)


@functools.cache
def backward_dkv_tile(head_dim: int, shared_limit: int, size: int = 2, dense_bias: str | None = None) -> KeyTile:
    """The tile of the gradients of keys and values."""
    def needed(tile: KeyTile) -> int:
        return (key_tile_bytes(size, head_dim, tile.block_n, tile.block_q) + 16 * tile.block_n
                + _bias_of(tile, tile.block_q, dense_bias))

    shapes = (_BACKWARD_DKV if dense_bias is None else _BIASED_BACKWARD_DKV)[size]
    return _first_that_fits(_of_head_dim(shapes, head_dim), needed, head_dim, shared_limit,
                            dense_bias is None and size == 4)


@functools.cache
def backward_dbias_tile(head_dim: int, shared_limit: int, size: int, dense_bias: str) -> Tile:
    """The tile of the gradient of a shared dense bias."""
    def needed(tile: Tile) -> int:
        return bias_pass_bytes(size, head_dim, tile.block_m, tile.block_n, dense_bias)

    return _first_that_fits(_of_head_dim(_BACKWARD_DBIAS[size], head_dim), needed, head_dim, shared_limit)


def heads_per_tile(group: int, bits: bool = False) -> int:
    """Heads of a group that share a gathered tile: the largest divisor up to 4 (more would make lists too many).

    ``bits``: a tile's queries must begin at a multiple of a word, of an 8th or a 16th of one.
    """
    return max(h for h in ((1, 2, 4) if bits else (1, 2, 3, 4)) if group % h == 0)
