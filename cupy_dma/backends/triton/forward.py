"""Attention over gathered keys (SPEC section 5): one program per tile of queries, online softmax in float32.

    s = softcap(scale * q . k) + bias      m = max s      p = e^(s - m)      l = sum p
    out = (sum p v) / l      lse = m + ln(l)      out = 0 and lse = -inf where l = 0

query (B, Lq, H, D), key and value (B, Lk, Hkv, D), out like query, lse (B, H, Lq) float32. p is rounded to the type of
value for the second MMA.

If only some rows of a tile see a non-finite value, the MMA propagates it to the accumulators of all of them. A tile
with a non-finite result therefore sets ``nonfinite_seen``, and a second launch (REPAIR) recomputes such tiles with
non-finite values isolated; its other programs exit at once.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cupy_dma.backends.torch_common.arrays import on_stream_of, result
from cupy_dma.backends.triton.problem import Problem
from cupy_dma.backends.triton.tiles import (
    INF,
    LN_2,
    PLAIN,
    exponential,
    find_keys,
    find_tile,
    finite_only,
    has_nonfinite,
    key_range,
    load_rows,
    logits,
    nonfinite_part,
    store_rows,
)
from cupy_dma.calls.types import AttentionCall


def attention(call: AttentionCall) -> tuple[Any, Any]:
    """``out (B, Lq, H, D)`` and ``lse (B, H, Lq)`` of a checked call."""
    query = call.query
    batch, query_length, heads, _ = query.shape
    with on_stream_of(query):
        problem = Problem(call)
        out, out_tensor = result(query, query.shape, query.dtype)
        lse, lse_tensor = result(query, (batch, heads, query_length), "float32")
        if batch and query_length:
            grid, arguments = problem.query_tiles("forward")
            arguments.update(out=out_tensor, lse=lse_tensor,
                             nonfinite_seen=torch.empty(grid, dtype=torch.int8, device=out_tensor.device))
            attention_forward[grid](**arguments, REPAIR=False)
            if problem.hides:
                attention_forward[grid](**problem.for_repair(arguments), REPAIR=True)
    return out, lse


@triton.jit
def _attend(acc, m, l, q, rows, position, query, first, last, begin, end, full, capacity, listed, start_base,
            stop_base, dense_base, dense_row, dense_key, bias_base, bias_row, bias_key, key_base, key_row, value_base,
            value_row, scale, softcap, delay, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
            LISTED: tl.constexpr, INTERVALS: tl.constexpr, CAUSAL: tl.constexpr, DENSE: tl.constexpr,
            BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
            ISOLATE: tl.constexpr):
    """acc, m and l after the keys with indices begin .. end of the tile."""
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
            added = 0.0
            if BIAS == 1 or BIAS == 3:
                of_keys = tl.load(bias_base + key.to(tl.int64) * bias_key, mask=wanted, other=0.0) if MASKED else (
                    tl.load(bias_base + key.to(tl.int64) * bias_key))
                added = of_keys.to(tl.float32)[None, :]
                if BIAS == 3:
                    added = tl.where(position[:, None] - key[None, :] >= delay, added, 0.0)
            elif BIAS == 2:
                added = tl.load(bias_base + query.to(tl.int64)[:, None] * bias_row
                                + key.to(tl.int64)[None, :] * bias_key, mask=visible & wanted[None, :],
                                other=0.0).to(tl.float32)
            s = logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), added, scale, softcap, SOFTCAP, BIAS)
            if MASKED:
                s = tl.where(visible, s, -INF)
            m_new = tl.maximum(m, tl.max(s, axis=1))
            shift = tl.where(m_new == -INF, 0.0, m_new)
            p = exponential(s - shift[:, None], BIAS)
            rescale = exponential(m - shift, BIAS)
            m = m_new
            l = l * rescale + tl.sum(p, axis=1)
            v = load_rows(value_base, key.to(tl.int64) * value_row, wanted, HEAD_DIM, BLOCK_D, MASKED)
            acc = acc * rescale[:, None]
            if ISOLATE:
                acc += nonfinite_part(p, visible, v)
                v = finite_only(v)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m, l


@triton.jit(do_not_specialize=PLAIN)
def attention_forward(query, key, value, out, lse, nonfinite_seen, start, stop, listed, meta, dense, bias,
                      query_batch, query_row, query_head, key_batch, key_row, key_head,
                      value_batch, value_row, value_head, start_batch, start_head, stop_batch, stop_head,
                      mask_batch, mask_head, mask_share, dense_batch, dense_head, dense_row, dense_key, dense_share,
                      bias_batch, bias_head, bias_row, bias_key, bias_share,
                      heads, kv_heads, query_length, key_length, tiles, capacity, scale, softcap, delay,
                      HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      HEADS: tl.constexpr, LISTED: tl.constexpr, INTERVALS: tl.constexpr, CAUSAL: tl.constexpr,
                      DENSE: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
                      REPAIR: tl.constexpr):
    if REPAIR:
        if tl.load(nonfinite_seen + tl.program_id(0)) == 0:
            return
    tile, b, first_head, i, head, rows, position, first, last = find_tile(tiles, heads, query_length, key_length,
                                                                         BLOCK_M, HEADS)
    kv_head = first_head // (heads // kv_heads)
    q = load_rows(query + b * query_batch, i.to(tl.int64) * query_row + head.to(tl.int64) * query_head, rows,
                  HEAD_DIM, BLOCK_D, True)
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

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m = tl.full((BLOCK_M,), -INF, tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    if REPAIR:
        masked = begin
    elif not DENSE and (LISTED or not INTERVALS):
        acc, m, l = _attend(acc, m, l, q, rows, position, i, first, last, begin, masked, full, capacity, tile_list,
                            start_base, stop_base, dense_base, dense_row, dense_key, bias_base, bias_row, bias_key,
                            key_base, key_row, value_base, value_row, scale, softcap, delay, HEAD_DIM, BLOCK_D,
                            BLOCK_N, LISTED, INTERVALS, CAUSAL, DENSE, BIAS, SOFTCAP, PRECISION, False, False)
    acc, m, l = _attend(acc, m, l, q, rows, position, i, first, last, masked, end, full, capacity, tile_list,
                        start_base, stop_base, dense_base, dense_row, dense_key, bias_base, bias_row, bias_key,
                        key_base, key_row, value_base, value_row, scale, softcap, delay, HEAD_DIM, BLOCK_D, BLOCK_N,
                        LISTED, INTERVALS, CAUSAL, DENSE, BIAS, SOFTCAP, PRECISION, True, REPAIR)
    if not REPAIR:
        tl.store(nonfinite_seen + tl.program_id(0), has_nonfinite(acc).to(tl.int8))
    seen = l != 0.0  # a sum of NaN is "seen": NaN stays NaN
    acc = tl.where(seen[:, None], acc / tl.where(seen, l, 1.0)[:, None], 0.0)
    log_sum = tl.log2(tl.where(seen, l, 1.0))
    row_lse = tl.where(seen, m + LN_2 * log_sum if BIAS != 0 else LN_2 * (m + log_sum), -INF)
    index = (b * query_length + i) * heads + head
    store_rows(out, index * HEAD_DIM, rows, acc, HEAD_DIM, BLOCK_D)
    tl.store(lse + (b * heads + head) * query_length + i, row_lse, mask=rows)
