"""Attention forward on the device (SPEC section 5), over gathered keys."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from cupy_dma.backends.cuda.attention import flash_decode, sm90
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.attention.tiles import tile_shape
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import ELEMENTS, ForwardConfig, Tile

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionCall


def attention(build: Builder, call: AttentionCall) -> tuple[Array, Array]:
    """``out (B, Lq, H, Dv)`` and ``lse (B, H, Lq)`` of a checked call."""
    problem, query = Problem(call), call.query
    batch, query_length, heads, head_dim = query.shape
    out = build.empty((*query.shape[:3], call.value_dim), query.dtype)
    lse = build.empty((batch, heads, query_length), "float32")
    if batch == 0 or query_length == 0:
        return out, lse
    for kernels in (flash_decode, sm90):
        if build.takes(kernels.NAME, kernels.reasons(build, call, problem)):
            kernels.attention(build, call, problem, out, lse)
            return out, lse
    tile, tiles, grid = _tiling(build.shared_memory_limit, build.num_sms, head_dim, problem.tile_heads, query_length,
                                heads * batch, problem.size, problem.bias_of_tiles, problem.count)
    lists = None
    if problem.key_length > 0:
        problem.move_mask_to_rows(build)
        lists = problem.key_lists(build, tile.block_m // problem.tile_heads, tile.block_n)
    config = ForwardConfig(
        element=ELEMENTS[query.dtype], head_dim=head_dim, vector=problem.vector, heads=problem.tile_heads,
        **tile._asdict(), keys="KEYS_CONTIGUOUS" if lists is None else lists.keys, causal=problem.tests_causality,
        bias=problem.bias_kind, softcap=call.softcap > 0.0, bits=problem.bits and lists is not None,
        bias_element=problem.bias_element, sequences=problem.count > 0, page_size=problem.page_size,
        delay=problem.delay)
    build.check_layout()
    build.launch(build.load(config, "attention_forward", config.shared_bytes), grid, 32 * tile.warps,
                 problem.pack(lists, out=out.ref, lse=lse.ref, tiles=tiles))
    return out, lse


@functools.lru_cache(maxsize=4096)
def _tiling(limit: int, num_sms: int, head_dim: int, tile_heads: int, query_length: int, rows: int, size: int,
            dense_bias: str | None, sequences: int) -> tuple[Tile, int, int]:
    """Tile shape, tiles per set of heads, and the total number of blocks, for ``rows`` = batch times heads, elements of
    ``size`` bytes, the kernels' type of a dense bias, and the number of packed ``sequences`` (0: none)."""
    def cover(tile: Tile) -> tuple[Tile, int, int]:
        tiles = tile_count(query_length, tile.block_m // tile_heads, sequences)
        return tile, tiles, tiles * (rows // tile_heads)

    tile, tiles, grid = cover(tile_shape(head_dim, limit, "", size, dense_bias))
    if grid < num_sms:
        return cover(tile_shape(head_dim, limit, "few", size, dense_bias))
    if grid >= 8 * num_sms:
        return cover(tile_shape(head_dim, limit, "many", size, dense_bias))
    return tile, tiles, grid
