"""Gradients of attention (SPEC section 6; formulas in ``cupy_dma.backward``): no atomics, so bitwise reproducible.

1. ``backward_preprocess``: delta_i = dout_i . out_i - dlse_i, (B, H, Lq) float32.
2. ``backward_dq``: dq, and the gradient of a bias per query, over the same key lists as the forward.
3. ``backward_dkv``: dk, dv, and the gradient of a bias per key (backward_dkv.py).
4. ``backward_dbias``: the gradient of a bias per pair, every element written once (backward_dbias.py).

The gradient of a bias per query or key is float32 per query head, then summed over the heads and batch entries that
share the bias and rounded once.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cupy_dma.arrays import Operand
from cupy_dma.backends.torch_common.arrays import on_stream_of, result, tensor
from cupy_dma.backends.triton.backward_dbias import bias_gradient
from cupy_dma.backends.triton.backward_dkv import key_gradients
from cupy_dma.backends.triton.problem import Problem
from cupy_dma.backends.triton.tiles import (
    INF,
    PLAIN,
    find_keys,
    find_tile,
    finite_only,
    gradients,
    has_nonfinite,
    key_range,
    load_rows,
    nonfinite_part,
    store_rows,
)
from cupy_dma.calls.types import AttentionBackwardCall

DELTA_ROWS = 32


def attention_backward(call: AttentionBackwardCall) -> tuple[Any, Any, Any, Any]:
    """``(dquery, dkey, dvalue, dbias)``, None for what is not in ``call.needs``; see ``cupy_dma.backends``."""
    forward = call.forward
    query, key, bias = forward.query, forward.key, forward.bias
    with on_stream_of(query):
        problem = Problem(forward)
        arrays, grads = {}, {}
        for name, operand in (("query", query), ("key", key), ("value", forward.value), ("bias", bias)):
            if name in call.needs and operand is not None:
                arrays[name], grads[name] = result(operand, operand.shape, operand.dtype)
        if 0 in query.shape or key.shape[1] == 0:
            for grad in grads.values():
                grad.zero_()
        else:
            _launch(call, problem, grads)
    return arrays.get("query"), arrays.get("key"), arrays.get("value"), arrays.get("bias")


def _launch(call: AttentionBackwardCall, problem: Problem, grads: dict[str, torch.Tensor]) -> None:
    batch, query_length, heads, _ = call.forward.query.shape
    bias, dbias = call.forward.bias, grads.get("bias")
    per = None if bias is None or dbias is None else (
        "key" if bias.shape[2] == 1 else "query" if bias.shape[3] == 1 else "pair")

    problem.add_rows("dout", call.dout)
    problem.add_rows("out", call.out)
    lse, delta = tensor(call.lse), torch.empty((batch, heads, query_length), dtype=torch.float32,
                                               device=grads[next(iter(grads))].device)
    common = problem.arguments
    out = {name: common.pop(name) for name in ("out", "out_batch", "out_row", "out_head")}
    common.update(lse=lse, delta=delta)
    dlse = None if call.dlse is None else tensor(call.dlse)
    backward_preprocess[(triton.cdiv(delta.numel(), DELTA_ROWS),)](
        common["dout"], out["out"], lse, dlse, delta, common["dout_batch"], common["dout_row"], common["dout_head"],
        out["out_batch"], out["out_row"], out["out_head"], delta.numel(), heads, query_length,
        common["HEAD_DIM"], common["BLOCK_D"], DELTA_ROWS)

    if "query" in grads or per == "query":
        summed = torch.empty_like(delta) if per == "query" else None
        grid, arguments = problem.query_tiles("dq")
        arguments.update(dquery=grads.get("query"), dbias=summed, DQUERY="query" in grads, DBIAS=summed is not None,
                         nonfinite_seen=torch.empty(grid, dtype=torch.int8, device=delta.device))
        backward_dq[grid](**arguments, REPAIR=False)
        if problem.hides and "query" in grads:
            backward_dq[grid](**problem.for_repair(arguments), REPAIR=True)
        if summed is not None:
            assert bias is not None and dbias is not None
            dbias.copy_(_reduced(summed, bias).reshape(bias.shape))
    if "key" in grads or "value" in grads or per == "key":
        summed = None
        if per == "key":
            summed = torch.empty((batch, heads, call.forward.key.shape[1]), dtype=torch.float32, device=delta.device)
        key_gradients(problem, grads.get("key"), grads.get("value"), summed)
        if summed is not None:
            assert bias is not None and dbias is not None
            dbias.copy_(_reduced(summed, bias).reshape(bias.shape))
    if per == "pair":
        bias_gradient(problem, dbias)


def _reduced(summed: torch.Tensor, bias: Operand) -> torch.Tensor:
    """float32 (B, H, Lq or Lk) summed over the axes along which the bias broadcasts."""
    batch, heads, length = summed.shape
    if bias.shape[1] != heads:
        summed = summed.reshape(batch, bias.shape[1], heads // bias.shape[1], length).sum(2)
    if bias.shape[0] != batch:
        summed = summed.sum(0, keepdim=True)
    if bias.shape[2] * bias.shape[3] != length:
        summed = summed.sum(2, keepdim=True)
    return summed


@triton.jit(do_not_specialize=["count", *PLAIN])
def backward_preprocess(dout, out, lse, dlse, delta, dout_batch, dout_row, dout_head, out_batch, out_row, out_head,
                        count, heads, query_length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """delta_i = dout_i . out_i - dlse_i; 0 for a row with no visible keys."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # in (B, H, Lq)
    exists = index < count
    i, head, b = index % query_length, index // query_length % heads, index // query_length // heads
    alive = exists & (tl.load(lse + index, mask=exists, other=-INF) != -INF)
    x = load_rows(dout, b * dout_batch + i * dout_row + head * dout_head, alive, HEAD_DIM, BLOCK_D, True)
    y = load_rows(out, b * out_batch + i * out_row + head * out_head, alive, HEAD_DIM, BLOCK_D, True)
    found = tl.sum(x.to(tl.float32) * y.to(tl.float32), axis=1)
    if dlse is not None:
        found -= tl.load(dlse + index, mask=alive, other=0.0)
    tl.store(delta + index, found, mask=exists)


@triton.jit
def _loop(dq, drow, q, do, row_lse, row_delta, rows, position, query, first, last, begin, end, full, capacity, listed,
          start_base, stop_base, dense_base, dense_row, dense_key, bias_base, bias_row, bias_key, key_base, key_row,
          value_base, value_row, scale, softcap, delay, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
          BLOCK_N: tl.constexpr, LISTED: tl.constexpr, INTERVALS: tl.constexpr, CAUSAL: tl.constexpr,
          DENSE: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
          DQUERY: tl.constexpr, MASKED: tl.constexpr, ISOLATE: tl.constexpr):
    """dq, and the sums of ds along each row, after the keys with indices begin .. end of the tile."""
    SKIP: tl.constexpr = MASKED and (DENSE or (INTERVALS and not LISTED))
    for at in range(begin, end, BLOCK_N):
        index = at + tl.arange(0, BLOCK_N)
        key, wanted, visible = find_keys(index, end, full, capacity, listed, start_base, stop_base, first, last, rows,
                                         position, query, dense_base, dense_row, dense_key, LISTED, INTERVALS, CAUSAL,
                                         DENSE, MASKED)
        go = True
        if SKIP:
            go = tl.max(wanted.to(tl.int32), axis=0) > 0
        if go:
            k = load_rows(key_base, key.to(tl.int64) * key_row, wanted, HEAD_DIM, BLOCK_D, MASKED)
            v = load_rows(value_base, key.to(tl.int64) * value_row, wanted, HEAD_DIM, BLOCK_D, MASKED)
            added = 0.0
            if BIAS == 1 or BIAS == 3:
                added = tl.load(bias_base + key.to(tl.int64) * bias_key, mask=wanted,
                                other=0.0).to(tl.float32)[None, :]
                if BIAS == 3:
                    added = tl.where(position[:, None] - key[None, :] >= delay, added, 0.0)
            elif BIAS == 2:
                added = tl.load(bias_base + query.to(tl.int64)[:, None] * bias_row
                                + key.to(tl.int64)[None, :] * bias_key, mask=visible & wanted[None, :],
                                other=0.0).to(tl.float32)
            qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            _, ds, dx = gradients(qk, dp, added, visible, row_lse[:, None], row_delta[:, None], scale, softcap,
                                  SOFTCAP, BIAS)
            drow += tl.sum(ds, axis=1)
            if DQUERY:
                if ISOLATE:
                    dq += nonfinite_part(dx, visible, k)
                    k = finite_only(k)
                dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, drow


@triton.jit(do_not_specialize=PLAIN)
def backward_dq(query, key, value, dout, lse, delta, dquery, dbias, nonfinite_seen, start, stop, listed, meta, dense,
                bias, query_batch, query_row, query_head, key_batch, key_row, key_head,
                value_batch, value_row, value_head, dout_batch, dout_row, dout_head,
                start_batch, start_head, stop_batch, stop_head, mask_batch, mask_head, mask_share,
                dense_batch, dense_head, dense_row, dense_key, dense_share,
                bias_batch, bias_head, bias_row, bias_key, bias_share,
                heads, kv_heads, query_length, key_length, tiles, capacity, scale, softcap, delay,
                HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                HEADS: tl.constexpr, LISTED: tl.constexpr, INTERVALS: tl.constexpr, CAUSAL: tl.constexpr,
                DENSE: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
                DQUERY: tl.constexpr, DBIAS: tl.constexpr, REPAIR: tl.constexpr):
    """dq of a tile of queries, and dbias (B, H, Lq), ds summed over the keys. REPAIR: see forward.py."""
    if REPAIR:
        if tl.load(nonfinite_seen + tl.program_id(0)) == 0:
            return
    tile, b, first_head, i, head, rows, position, first, last = find_tile(tiles, heads, query_length, key_length,
                                                                         BLOCK_M, HEADS)
    kv_head = first_head // (heads // kv_heads)
    q = load_rows(query + b * query_batch, i.to(tl.int64) * query_row + head.to(tl.int64) * query_head, rows,
                  HEAD_DIM, BLOCK_D, True)
    do = load_rows(dout + b * dout_batch, i.to(tl.int64) * dout_row + head.to(tl.int64) * dout_head, rows,
                   HEAD_DIM, BLOCK_D, True)
    statistics = (b * heads + head) * query_length + i
    row_lse = tl.load(lse + statistics, mask=rows, other=-INF)
    row_delta = tl.load(delta + statistics, mask=rows, other=0.0)
    alive = rows & (row_lse != -INF)
    row_lse = tl.where(alive, row_lse, INF)
    row = b * mask_batch + (first_head // mask_share) * mask_head
    begin, end, masked, full = key_range(meta, row, tile, tiles, first, last, key_length, BLOCK_N, LISTED, INTERVALS,
                                         CAUSAL, DENSE)
    tile_list = listed
    start_base = start
    stop_base = stop
    if INTERVALS:
        start_base = start + b * start_batch + (first_head // mask_share).to(tl.int64) * start_head
        stop_base = stop + b * stop_batch + (first_head // mask_share).to(tl.int64) * stop_head
    if LISTED:
        tile_list = listed + (row * tiles + tile) * capacity
    dense_base = dense
    if DENSE:
        dense_base = dense + b * dense_batch + (first_head // dense_share).to(tl.int64) * dense_head
    bias_base = bias
    if BIAS != 0:
        bias_base = bias + b * bias_batch + (first_head // bias_share).to(tl.int64) * bias_head
    key_base = key + b * key_batch + kv_head.to(tl.int64) * key_head
    value_base = value + b * value_batch + kv_head.to(tl.int64) * value_head

    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    drow = tl.zeros((BLOCK_M,), tl.float32)
    if REPAIR:
        masked = begin
    elif not DENSE and (LISTED or not INTERVALS):
        dq, drow = _loop(dq, drow, q, do, row_lse, row_delta, alive, position, i, first, last, begin, masked, full,
                         capacity, tile_list, start_base, stop_base, dense_base, dense_row, dense_key, bias_base,
                         bias_row, bias_key, key_base, key_row, value_base, value_row, scale, softcap, delay, HEAD_DIM,
                         BLOCK_D, BLOCK_N, LISTED, INTERVALS, CAUSAL, DENSE, BIAS, SOFTCAP, PRECISION, DQUERY, False,
                         False)
    dq, drow = _loop(dq, drow, q, do, row_lse, row_delta, alive, position, i, first, last, masked, end, full, capacity,
                     tile_list, start_base, stop_base, dense_base, dense_row, dense_key, bias_base, bias_row, bias_key,
                     key_base, key_row, value_base, value_row, scale, softcap, delay, HEAD_DIM, BLOCK_D, BLOCK_N,
                     LISTED, INTERVALS, CAUSAL, DENSE, BIAS, SOFTCAP, PRECISION, DQUERY, True, REPAIR)
    if not REPAIR:
        tl.store(nonfinite_seen + tl.program_id(0), has_nonfinite(dq).to(tl.int8))
    if DQUERY:
        store_rows(dquery, ((b * query_length + i) * heads + head) * HEAD_DIM, rows, dq * scale, HEAD_DIM, BLOCK_D)
    if DBIAS:
        tl.store(dbias + statistics, drow, mask=rows)
