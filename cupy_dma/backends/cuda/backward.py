"""Gradients of the attention on the device (SPEC section 6): two passes, no atomics, the same bits on every run.

1. ``row_delta``: ``delta_i = dout_i . out_i - dlse_i``.
2. ``backward_query``: dq, query-major, over the same key lists as the forward.
3. ``backward_key``: dk, dv and the bias gradient, key-stationary. Where few keys meet a tile, the keys of each
   super-tile of queries are gathered and their sums kept in float32, which ``sum_partials`` adds in order; else keys in
   their own order look at every query that may see them.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.configs import (
    ELEMENTS,
    SUM_THREADS,
    SUM_WARPS,
    BackwardKeyConfig,
    BackwardQueryConfig,
    BackwardSumConfig,
    backward_key_tile,
    backward_query_tile,
    blocks,
)
from cupy_dma.backends.cuda.forward import load_kernel
from cupy_dma.backends.cuda.lists import key_lists, super_lists
from cupy_dma.backends.cuda.problem import Problem, rows_aligned
from cupy_dma.backends.cuda.runtime import Runtime

if TYPE_CHECKING:
    from cupy_dma.calls import AttentionBackwardCall


def attention_backward(runtime: Runtime, call: AttentionBackwardCall) -> tuple[Any, Any, Any, Any]:
    """Gradients of query, key, value and bias (4-D, its given shape and type); None for what is not needed."""
    problem, needs = Problem(call.forward), call.needs
    query, key = call.forward.query, call.forward.key
    place, device = query.library, query.device
    made = {name: place.empty(operand.shape, operand.dtype, device) if name in needs else None
            for name, operand in (("query", query), ("key", key), ("value", call.forward.value))}
    batch, query_length, heads, _ = query.shape
    key_length = key.shape[1]
    dbias = None
    with runtime.on(device):
        if "bias" in needs:
            dbias = place.full((batch, heads, key_length), 0.0, "float32", device)
        if batch and query_length and key_length:
            _launch(runtime, call, problem, made, dbias)
        else:  # nothing is seen
            made = {name: None if array is None else place.full(array.shape, 0.0, query.dtype, device)
                    for name, array in made.items()}
        if dbias is not None:
            dbias = _reduce_bias(call.forward.bias, dbias, key.shape[2])
    return made["query"], made["key"], made["value"], dbias


def _launch(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, made: dict[str, Any], dbias: Any) -> None:
    query, dout, out = call.forward.query, call.dout, call.out
    place, device = query.library, query.device
    batch, query_length, heads, head_dim = query.shape
    element, index, stream = ELEMENTS[query.dtype], device.index, place.stream(device)
    delta = place.empty((batch, heads, query_length), "float32", device)
    wanted = made["key"] is not None, made["value"] is not None, dbias is not None
    common = {
        "lse": call.lse.pointer, "delta": place.pointer(delta), "dout": dout.pointer, "dout_batch": dout.strides[0],
        "dout_row": dout.strides[1], "dout_head": dout.strides[2], "out": out.pointer, "out_batch": out.strides[0],
        "out_row": out.strides[1], "out_head": out.strides[2], "dlse": call.dlse.pointer if call.dlse else 0,
        **{f"d{name}": place.pointer(array) for name, array in made.items() if array is not None},
        "dbias": 0 if dbias is None else place.pointer(dbias)}
    sums = load_kernel(runtime, BackwardSumConfig, "row_delta", index, element, head_dim, problem.causal,
                       *wanted)
    sums.launch(blocks(batch * query_length * heads, SUM_WARPS), SUM_THREADS, problem.pack(None, **common), stream)
    if made["query"] is not None:
        _query_gradient(runtime, call, problem, common, stream)
    if any(wanted):
        _key_gradients(runtime, call, problem, made, wanted, common, stream)


def _query_gradient(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, common: dict[str, Any],
                    stream: int) -> None:
    query, device = call.forward.query, call.forward.query.device
    batch, query_length, heads, head_dim = query.shape
    tile = backward_query_tile(head_dim, runtime.shared_memory_limit(device.index))
    queries = tile.block_m // problem.tile_heads
    tiles = blocks(query_length, queries)
    lists = None
    if problem.mask is not None:
        lists = key_lists(runtime, problem.mask, query_length, queries, tile.block_n, problem.causal, stream)
    kernel = load_kernel(runtime, BackwardQueryConfig, "backward_query", device.index, ELEMENTS[query.dtype], head_dim,
                         problem.vector and rows_aligned(call.dout), problem.tile_heads, *tile,
                         "KEYS_CONTIGUOUS" if lists is None else lists.keys, problem.causal, problem.bias is not None,
                         call.forward.softcap > 0.0)
    kernel.launch(tiles * (heads // problem.tile_heads) * batch, 32 * tile.warps,
                  problem.pack(lists, tiles=tiles, **common), stream)


def _key_gradients(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, made: dict[str, Any],
                   wanted: tuple[bool, bool, bool], common: dict[str, Any], stream: int) -> None:
    query, key = call.forward.query, call.forward.key
    place, device = query.library, query.device
    index, head_dim, rows = device.index, query.shape[3], key.shape[0] * key.shape[2]
    tile = backward_key_tile(head_dim, runtime.shared_memory_limit(index))
    parts = 2 if head_dim > 128 else 1
    supers = None
    if problem.mask is not None and not problem.by_head:
        supers = super_lists(runtime, problem.mask, query.shape[1], tile.block_n, problem.causal, stream)
    kernel = load_kernel(runtime, BackwardKeyConfig, "backward_key", index, ELEMENTS[query.dtype], head_dim,
                         problem.vector and rows_aligned(call.dout), *tile,
                         "KEYS_CONTIGUOUS" if supers is None else "KEYS_LISTED", problem.mask is not None,
                         problem.causal, problem.bias is not None, call.forward.softcap > 0.0, parts, *wanted)
    if supers is None:
        kernel.launch(rows * blocks(key.shape[1], tile.block_n) * parts, 32 * tile.warps, problem.pack(None, **common),
                      stream)
        return
    entries = rows * supers.supers * supers.capacity
    sizes = {"partial_key": head_dim * wanted[0], "partial_value": head_dim * wanted[1],
             "partial_bias": query.shape[2] // key.shape[2] * wanted[2]}
    partials = {name: place.empty((entries * size,), "float32", device) for name, size in sizes.items() if size}
    params = problem.pack(None, **common, **supers.fields, supers=supers.supers, super_capacity=supers.capacity,
                          super_queries=supers.queries, **{name: place.pointer(x) for name, x in partials.items()})
    for name in ("key", "value"):  # keys that nobody sees
        if made[name] is not None:
            place.clear(made[name])
    kernel.launch(rows * supers.supers * (supers.capacity // tile.block_n) * parts, 32 * tile.warps, params, stream)
    sums = load_kernel(runtime, BackwardSumConfig, "sum_partials", index, ELEMENTS[query.dtype], head_dim,
                       problem.causal, *wanted)
    sums.launch(rows * blocks(key.shape[1], SUM_WARPS), SUM_THREADS, params, stream)


def _reduce_bias(bias: Operand | None, dbias: Any, kv_heads: int) -> Any:
    """float32 (B, H, Lk) summed over the axes along which the bias broadcasts, rounded once to its type."""
    assert bias is not None
    place = bias.library
    batch, heads, length = dbias.shape
    if bias.shape[1] != heads:
        dbias = dbias.reshape(batch, bias.shape[1], heads // bias.shape[1], length).sum(2)
    if bias.shape[0] != batch:
        dbias = dbias.sum(0)[None]
    if bias.shape[3] != length:
        dbias = dbias.sum(2)[:, :, None]
    return place.astype(dbias.reshape(bias.shape), bias.dtype)
