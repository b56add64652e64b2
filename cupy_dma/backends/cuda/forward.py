"""Attention forward on the device (SPEC section 5), over gathered keys."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cupy_dma import jit
from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.configs import ELEMENTS, ForwardConfig, Tile, blocks, heads_per_tile, tile_shape
from cupy_dma.backends.cuda.lists import KeyLists, key_lists
from cupy_dma.backends.cuda.runtime import LoadedKernel, Runtime
from cupy_dma.masks import IntervalMask

if TYPE_CHECKING:
    from cupy_dma.attention import AttentionCall

_NO_BIAS = {"bias": 0, "bias_batch": 0, "bias_group": 0, "bias_head": 0, "bias_key": 0}
_NO_LISTS = {"start": 0, "stop": 0, "list": 0, "list_lengths": 0, "summaries": 0, "start_batch": 0, "start_head": 0,
             "stop_batch": 0, "stop_head": 0, "mask_batch": 0, "mask_group": 0, "mask_head": 0, "mask_heads": 1,
             "capacity": 0}


def attention(runtime: Runtime, call: AttentionCall) -> tuple[Any, Any]:
    """``out (B, Lq, H, D)`` and ``lse (B, H, Lq)`` of a checked call."""
    query, key, value = call.query, call.key, call.value
    mask, bias = _supported(call)
    place, device = query.library, query.device
    batch, query_length, heads, head_dim = query.shape
    key_length, kv_heads = key.shape[1], key.shape[2]
    out = place.empty(query.shape, query.dtype, device)
    lse = place.empty((batch, heads, query_length), "float32", device)
    if batch == 0 or query_length == 0:
        return out, lse

    causal = call.causal
    if mask is not None:
        if mask._causal_only:
            mask, causal = None, True
        elif mask._starts == "key":
            causal = False  # the mask itself hides a key from positions before its own
    per_head = (mask is not None and mask.shape[1] not in (1, kv_heads)) or (
        bias is not None and bias.shape[1] not in (1, kv_heads))
    tile_heads = 1 if per_head else heads_per_tile(heads // kv_heads)
    tile, tiles, grid = _tiling(runtime, device.index, head_dim, tile_heads, query_length, heads * batch)
    queries = tile.block_m // tile_heads
    stream = place.stream(device)
    with runtime.on(device):
        lists = None
        if mask is not None and key_length > 0:
            lists = key_lists(runtime, mask, query_length, queries, tile.block_n, causal, stream)
        kernel = _kernel(runtime, device.index, ELEMENTS[query.dtype], head_dim, _vector(query, key, value), tile_heads,
                         *tile, "KEYS_CONTIGUOUS" if lists is None else lists.keys, causal, bias is not None,
                         call.softcap > 0.0)
        params = jit.params("params.cuh", "AttentionParams").pack(
            query=query.pointer, key=key.pointer, value=value.pointer, out=place.pointer(out),
            lse=place.pointer(lse),
            query_batch=query.strides[0], query_row=query.strides[1], query_head=query.strides[2],
            key_batch=key.strides[0], key_row=_row_stride(key), key_head=key.strides[2],
            value_batch=value.strides[0], value_row=_row_stride(value), value_head=value.strides[2],
            query_length=query_length, key_length=key_length, heads=heads, kv_heads=kv_heads, tiles=tiles,
            scale=call.scale, softcap=call.softcap, **_bias_fields(bias, kv_heads),
            **_list_fields(lists, mask, kv_heads))
        kernel.launch(grid, 32 * tile.warps, params, stream)
    return out, lse


@functools.lru_cache(maxsize=4096)
def _tiling(runtime: Runtime, index: int, head_dim: int, tile_heads: int, query_length: int,
            rows: int) -> tuple[Tile, int, int]:
    """Tile shape, tiles per row of heads, and blocks in all, for ``rows`` = batch times heads."""
    limit, processors = runtime.shared_memory_limit(index), runtime.multiprocessors(index)

    def cover(tile: Tile) -> tuple[Tile, int, int]:
        tiles = blocks(query_length, tile.block_m // tile_heads)
        return tile, tiles, tiles * (rows // tile_heads)

    tile, tiles, grid = cover(tile_shape(head_dim, limit))
    if grid < processors:
        return cover(tile_shape(head_dim, limit, few=True))
    if head_dim <= 64 and grid >= 8 * processors:
        tile = tile._replace(min_blocks=3)  # 10 % faster where there are enough tiles for several waves, else slower
    return tile, tiles, grid


@functools.cache
def _kernel(runtime: Runtime, index: int, *fields: Any) -> LoadedKernel:
    """The kernel of ``ForwardConfig(*fields)`` (a call per launch: the fields hash faster than the configuration)."""
    runtime.check_layout(index)
    config = ForwardConfig(*fields)
    return runtime.load(config, "attention_forward", index, config.shared_bytes)


def _supported(call: AttentionCall) -> tuple[IntervalMask | None, Operand | None]:
    """The call's mask and its bias in float32; raises for what arrives later."""
    query, mask, bias = call.query, call.mask, call.bias
    if query.dtype not in ("float16", "bfloat16"):
        raise TypeError(f"query must be float16 or bfloat16 on CUDA, got {query.dtype} (backend='numpy' takes it; "
                        f"float32 through TF32 arrives with a later version)")
    if isinstance(mask, Operand):
        raise NotImplementedError("dense masks on CUDA arrive with a later version: mask must be an IntervalMask or "
                                  "None, got a dense array (backend='numpy' takes it)")
    if bias is not None:
        if bias.shape[2] != 1:
            raise NotImplementedError(f"dense biases on CUDA arrive with a later version: bias must be one number per "
                                      f"key, (1|B, 1|Hkv|H, 1, 1|Lk), got {bias.shape} (backend='numpy' takes it)")
        if bias.dtype != "float32":
            bias = _as_float32(bias)
    for operand in (call.key, call.value):
        if abs(_row_stride(operand)) >= 2**31:
            raise NotImplementedError(f"{operand.name} must have a row stride below 2^31 elements on CUDA, got "
                                      f"{operand.strides[1]}")
    return mask, bias


def _as_float32(bias: Operand) -> Operand:
    """A key bias (1|B, 1|Hkv|H, 1, 1|Lk) as float32; its array may have three or four axes."""
    place = bias.library
    seen = place.describe(place.astype(bias.array, "float32"), "bias")
    strides = seen.strides if len(seen.strides) == 4 else (*seen.strides[:2], 0, seen.strides[2])
    strides = tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, strides))
    return Operand("bias", seen.array, place, bias.shape, strides, "float32", bias.device, seen.pointer)


def _row_stride(operand: Operand) -> int:
    return operand.strides[1] if operand.shape[1] > 1 else 0


def _vector(*operands: Operand) -> bool:
    """Whether every row can be read in pieces of 16 bytes (strides of axes of size 1 do not matter)."""
    for operand in operands:
        (b, n, h, d), (batch, row, head, _) = operand.shape, operand.strides
        if (d % 8 or operand.pointer % 16 or (batch % 8 and b > 1) or (row % 8 and n > 1) or (head % 8 and h > 1)):
            return False
    return True


def _bias_fields(bias: Operand | None, kv_heads: int) -> dict[str, int]:
    if bias is None:
        return _NO_BIAS
    batch, head, _, key = bias.strides
    by_group = bias.shape[1] == kv_heads
    return {"bias": bias.pointer, "bias_batch": batch, "bias_group": head if by_group else 0,
            "bias_head": 0 if by_group else head, "bias_key": key}


def _list_fields(lists: KeyLists | None, mask: IntervalMask | None, kv_heads: int) -> dict[str, int]:
    if lists is None or mask is None:
        return _NO_LISTS
    start, stop, (mask_batch, mask_heads, _) = mask._start, mask._stop, mask.shape
    return {"start": start.pointer, "stop": stop.pointer, "start_batch": start.strides[0],
            "start_head": start.strides[1], "stop_batch": stop.strides[0], "stop_head": stop.strides[1],
            "list": lists.list, "list_lengths": lists.list_lengths, "summaries": lists.summaries,
            "capacity": lists.capacity, "mask_heads": mask_heads, "mask_batch": mask_heads if mask_batch > 1 else 0,
            "mask_group": int(1 < mask_heads == kv_heads), "mask_head": int(mask_heads not in (1, kv_heads))}
