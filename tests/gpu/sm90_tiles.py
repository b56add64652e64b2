"""Tile shapes for the Hopper forward, and contexts that force or forbid the Hopper kernels."""
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cupy_dma.backends.cuda.attention import sm90
from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile
from cupy_dma.backends.cuda.runtime.program import fresh

TILES = {  # tile: head dims that fit
    "128x128": (HopperTile(128, 128, 2, 2, 2), range(1, 129)),
    "128x128x4": (HopperTile(128, 128, 4, 4, 2, ping_pong=True), range(1, 65)),
    "128x64": (HopperTile(128, 64, 2, 2, 2, ping_pong=True), range(65, 193)),
    "128x64x6": (HopperTile(128, 64, 6, 6, 3, ping_pong=True), range(1, 65)),
    "128x64x4": (HopperTile(128, 64, 4, 4, 2, ping_pong=True), range(65, 129)),
    "128x32": (HopperTile(128, 32, 2, 2, 2), range(129, 257)),
    "192x64": (HopperTile(192, 64, 4, 3, 2, ping_pong=True), range(1, 129)),
    "192x64x6": (HopperTile(192, 64, 6, 6, 3, ping_pong=True), range(1, 65)),
    "192x64x2": (HopperTile(192, 64, 2, 2, 3, ping_pong=True), range(65, 129)),
    "192x96": (HopperTile(192, 96, 5, 5, 2, ping_pong=True), range(1, 65)),
    "192x128": (HopperTile(192, 128, 3, 3, 2, ping_pong=True), range(1, 65)),
}


@contextmanager
def taken(tile: HopperTile, head_dims: Container[int]) -> Iterator[None]:
    """Inside the context, calls with these head dims that the Hopper kernel supports use this tile; others use the
    portable kernel. Dense masks and biases need tiles of 128 rows."""
    def pays(call: Any, problem: Any, num_sms: int) -> bool:
        return call.head_dim in head_dims and (tile.block_m == 128 or not sm90.is_dense(problem))

    with fresh(tile=tile), mock.patch.object(sm90, "_pays", pays):
        yield


@contextmanager
def portable(**overrides: Any) -> Iterator[None]:
    """No call goes to the Hopper kernels."""
    with fresh(hopper=False, **overrides):
        yield
