"""Attention forward on the device (SPEC section 5), over gathered keys."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cupy_dma.backends.cuda.attention import flash_decode, sm90
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.attention.tiles import tile_shape
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime.configs import ELEMENTS, ForwardConfig, Tile
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionCall


def attention(runtime: Runtime, call: AttentionCall) -> tuple[Any, Any]:
    """``out (B, Lq, H, Dv)`` and ``lse (B, H, Lq)`` of a checked call."""
    problem = Problem(call)
    query, library, device = call.query, call.query.library, call.query.device
    batch, query_length, heads, head_dim = query.shape
    out = library.empty((*query.shape[:3], call.value_dim), query.dtype, device)
    lse = library.empty((batch, heads, query_length), "float32", device)
    if batch == 0 or query_length == 0:
        return out, lse
    if flash_decode.serves(runtime, device.index, call, problem):
        with runtime.on(device):
            flash_decode.attention(runtime, call, problem, out, lse)
        return out, lse
    if sm90.serves(runtime, device.index, call, problem):
        with runtime.on(device):
            sm90.attention(runtime, call, problem, out, lse)
        return out, lse
    tile, tiles, grid = _tiling(runtime, device.index, head_dim, problem.tile_heads, query_length, heads * batch,
                                problem.size, problem.bias_of_tiles, problem.count)
    stream = library.stream(device)
    with runtime.on(device):
        lists = None
        if problem.key_length > 0:
            problem.move_mask_to_rows(runtime, stream)
            lists = problem.key_lists(runtime, tile.block_m // problem.tile_heads, tile.block_n, stream)
        kernel = _kernel(runtime, device.index, ELEMENTS[query.dtype], head_dim, problem.vector, problem.tile_heads,
                         tile, "KEYS_CONTIGUOUS" if lists is None else lists.keys,
                         problem.tests_causality, problem.bias_kind, call.softcap > 0.0,
                         problem.bits and lists is not None, problem.bias_element, problem.count > 0,
                         problem.page_size)
        params = problem.pack(lists, out=library.pointer(out), lse=library.pointer(lse), tiles=tiles)
        kernel.launch(grid, 32 * tile.warps, params, stream)
    return out, lse


@functools.lru_cache(maxsize=4096)
def _tiling(runtime: Runtime, index: int, head_dim: int, tile_heads: int, query_length: int, rows: int, size: int,
            dense_bias: str | None, sequences: int) -> tuple[Tile, int, int]:
    """Tile shape, tiles per set of heads, and blocks in all, for ``rows`` = batch times heads, elements of ``size``
    bytes, the kernels' type of a dense bias, and the number of packed ``sequences`` (0: none)."""
    limit, num_sms = runtime.shared_memory_limit(index), runtime.num_sms(index)

    def cover(tile: Tile) -> tuple[Tile, int, int]:
        tiles = tile_count(query_length, tile.block_m // tile_heads, sequences)
        return tile, tiles, tiles * (rows // tile_heads)

    tile, tiles, grid = cover(tile_shape(head_dim, limit, False, size, dense_bias))
    if grid < num_sms:
        return cover(tile_shape(head_dim, limit, True, size, dense_bias))
    if dense_bias is None and head_dim <= 64 and grid >= 8 * num_sms:
        tile = tile._replace(min_blocks=3)  # 10 % faster where there are enough tiles for several waves, else slower
    return tile, tiles, grid


@functools.cache  # by fields: they hash faster than a configuration
def _kernel(runtime: Runtime, index: int, element: str, head_dim: int, vector: bool, heads: int, tile: Tile, keys: str,
            causal: bool, bias: int, softcap: bool, bits: bool, bias_element: str, sequences: bool,
            page_size: int) -> LoadedKernel:
    runtime.check_layout(index)
    config = ForwardConfig(element=element, head_dim=head_dim, vector=vector, heads=heads, **tile._asdict(), keys=keys,
                           causal=causal, bias=bias, softcap=softcap, bits=bits, bias_element=bias_element,
                           sequences=sequences, page_size=page_size)
    return runtime.load(config, "attention_forward", index, config.shared_bytes)
