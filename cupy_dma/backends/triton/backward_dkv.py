"""Gradients of key, value and a bias per key, key-major:

    dv_j = sum_i p_ij dout_i      dk_j = scale * sum_i dx_ij q_i      dbias_j = sum_i ds_ij

i runs over the queries of all heads in the key's GQA group. A program owns BLOCK_N keys of one kv head and loops, head
by head, over the queries that may see any of them, BLOCK_M at a time; its logits are transposed (key rows, query
columns). Under an interval mask a program's keys come from ``lists.key_order``, so that their runs are similar. Every
result has one writer. A non-finite row of query or dout that sees only some of the keys is handled by a REPAIR launch
as in forward.py.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from cupy_dma.backends.triton.lists import key_order
from cupy_dma.backends.triton.problem import Problem
from cupy_dma.backends.triton.tiles import (
    EVER,
    INF,
    NEVER,
    PLAIN,
    finite_only,
    gradients,
    has_nonfinite,
    key_runs,
    load_rows,
    nonfinite_part,
    store_rows,
)


def key_gradients(problem: Problem, dkey: torch.Tensor | None, dvalue: torch.Tensor | None,
                  dbias: torch.Tensor | None) -> None:
    """Write dkey and dvalue (B, Lk, Hkv, D), and dbias (B, H, Lk) float32; None for what is not needed."""
    shape, order = problem.shape("dkv"), None
    batch, key_length, kv_heads, _ = problem.call.key.shape
    if problem.mask is not None and not problem.runs_by_head:
        order = key_order(problem.mask, problem.call.query.shape[1], problem.causal)
    blocks = triton.cdiv(key_length, shape.block_n)
    grid = (blocks * kv_heads * batch,)
    arguments = {
        **problem.arguments, "dkey": dkey, "dvalue": dvalue, "dbias": dbias, "order": order, "blocks": blocks,
        "nonfinite_seen": torch.empty(grid, dtype=torch.int8, device=problem.arguments["delta"].device),
        "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "ORDER": order is not None, "DKEY": dkey is not None,
        "DVALUE": dvalue is not None, "DBIAS": dbias is not None, "num_warps": shape.warps, "num_stages": shape.stages}
    backward_dkv[grid](**arguments, REPAIR=False)
    if dkey is not None or dvalue is not None:
        backward_dkv[grid](**{**arguments, "BLOCK_M": 16, "num_stages": 1}, REPAIR=True)


@triton.jit
def _add_queries(dk, dv, db, k, v, start, stop, wanted, key, at, b, head, query_base, query_row, dout_base, dout_row,
                 lse_base, delta_base, dense_base, dense_row, dense_key, bias_base, bias_row, bias_key, query_length,
                 key_length, scale, softcap, delay, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_M: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
                 PRECISION: tl.constexpr, DKEY: tl.constexpr, DVALUE: tl.constexpr, DBIAS: tl.constexpr,
                 REPAIR: tl.constexpr):
    """Add the contributions of the queries at .. at + BLOCK_M of one head."""
    i = at + tl.arange(0, BLOCK_M)
    rows = i < query_length
    position = i + key_length - query_length
    row_lse = tl.load(lse_base + i, mask=rows, other=-INF)
    alive = row_lse != -INF  # a row with no visible keys contributes nothing, even if it holds NaN
    visible = (start[:, None] <= position[None, :]) & (position[None, :] < stop[:, None]) & alive[None, :]
    if DENSE:
        seen = tl.load(dense_base + key.to(tl.int64)[:, None] * dense_key + i.to(tl.int64)[None, :] * dense_row,
                       mask=visible, other=0)
        visible = seen != 0
    go = True
    if DENSE:
        go = tl.max(tl.max(visible.to(tl.int32), axis=1), axis=0) > 0
    if go:
        q = load_rows(query_base, i.to(tl.int64) * query_row, rows, HEAD_DIM, BLOCK_D, True)
        do = load_rows(dout_base, i.to(tl.int64) * dout_row, rows, HEAD_DIM, BLOCK_D, True)
        delta = tl.load(delta_base + i, mask=rows, other=0.0)
        added = 0.0
        far = position[None, :] - key[:, None] >= delay
        if BIAS == 1 or BIAS == 3:
            added = tl.load(bias_base + key.to(tl.int64) * bias_key, mask=wanted,
                            other=0.0).to(tl.float32)[:, None]
            if BIAS == 3:
                added = tl.where(far, added, 0.0)
        elif BIAS == 2:
            added = tl.load(bias_base + key.to(tl.int64)[:, None] * bias_key + i.to(tl.int64)[None, :] * bias_row,
                            mask=visible, other=0.0).to(tl.float32)
        qk = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dp = qk
        if DKEY or DBIAS:
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        p, ds, dx = gradients(qk, dp, added, visible, tl.where(alive, row_lse, INF)[None, :], delta[None, :],
                              scale, softcap, SOFTCAP, BIAS)
        if DBIAS:
            db += tl.sum(tl.where(far, ds, 0.0) if BIAS == 3 else ds, axis=1)
        if DVALUE:
            if REPAIR:
                dv += nonfinite_part(p, visible, do)
                do = finite_only(do)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        if DKEY:
            if REPAIR:
                dk += nonfinite_part(dx, visible, q)
                q = finite_only(q)
            dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, db


@triton.jit(do_not_specialize=PLAIN)
def backward_dkv(query, key, value, dout, lse, delta, dkey, dvalue, dbias, nonfinite_seen, order, start, stop, dense,
                 bias, query_batch, query_row, query_head, key_batch, key_row, key_head,
                 value_batch, value_row, value_head, dout_batch, dout_row, dout_head,
                 start_batch, start_head, stop_batch, stop_head, mask_batch, mask_head, mask_share,
                 dense_batch, dense_head, dense_row, dense_key, dense_share,
                 bias_batch, bias_head, bias_row, bias_key, bias_share,
                 heads, kv_heads, query_length, key_length, blocks, scale, softcap, delay,
                 HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 INTERVALS: tl.constexpr, CAUSAL: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr,
                 SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, ORDER: tl.constexpr, DKEY: tl.constexpr,
                 DVALUE: tl.constexpr, DBIAS: tl.constexpr, REPAIR: tl.constexpr):
    program = tl.program_id(0)
    if REPAIR:
        if tl.load(nonfinite_seen + program) == 0:
            return
    rows_of_keys = tl.num_programs(0) // blocks
    row = program % rows_of_keys  # the longest runs of every kv head come first
    kv_head = row % kv_heads
    b = (row // kv_heads).to(tl.int64)
    group_size = heads // kv_heads
    index = program // rows_of_keys * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = index < key_length
    key_index = index
    if ORDER:
        mask_row = b * mask_batch + (kv_head * group_size // mask_share) * mask_head
        key_index = tl.load(order + mask_row * key_length + index, mask=exists, other=0)
    wide = key_index.to(tl.int64)
    k = load_rows(key + b * key_batch + kv_head.to(tl.int64) * key_head, wide * key_row, exists, HEAD_DIM, BLOCK_D,
                  True)
    v = load_rows(value + b * value_batch + kv_head.to(tl.int64) * value_head, wide * value_row, exists, HEAD_DIM,
                  BLOCK_D, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    shift = key_length - query_length
    for member in range(0, group_size):
        head = kv_head * group_size + member
        start_base = start
        stop_base = stop
        if INTERVALS:
            start_base = start + b * start_batch + (head // mask_share).to(tl.int64) * start_head
            stop_base = stop + b * stop_batch + (head // mask_share).to(tl.int64) * stop_head
        first, end = key_runs(key_index, exists, start_base, stop_base, INTERVALS, CAUSAL)
        empty = first >= end
        lowest = tl.maximum(tl.min(tl.where(empty, NEVER, first), axis=0), shift)
        highest = tl.minimum(tl.max(tl.where(empty, EVER, end), axis=0), key_length)
        until = tl.maximum(highest, shift) - shift
        begin = tl.minimum(lowest, key_length) - shift
        dense_base = dense
        if DENSE:
            dense_base = dense + b * dense_batch + (head // dense_share).to(tl.int64) * dense_head
        bias_base = bias
        if BIAS != 0:
            bias_base = bias + b * bias_batch + (head // bias_share).to(tl.int64) * bias_head
        query_base = query + b * query_batch + head.to(tl.int64) * query_head
        dout_base = dout + b * dout_batch + head.to(tl.int64) * dout_head
        statistics = (b * heads + head) * query_length
        db = tl.zeros((BLOCK_N,), tl.float32)
        for at in range(begin // BLOCK_M * BLOCK_M, until, BLOCK_M):
            dk, dv, db = _add_queries(dk, dv, db, k, v, first, end, exists, key_index, at, b, head, query_base,
                                      query_row, dout_base, dout_row, lse + statistics, delta + statistics, dense_base,
                                      dense_row, dense_key, bias_base, bias_row, bias_key, query_length, key_length,
                                      scale, softcap, delay, HEAD_DIM, BLOCK_D, BLOCK_M, DENSE, BIAS, SOFTCAP,
                                      PRECISION, DKEY, DVALUE, DBIAS, REPAIR)
        if DBIAS:
            tl.store(dbias + (b * heads + head) * key_length + wide, db, mask=exists)
    if not REPAIR:
        tl.store(nonfinite_seen + program, (has_nonfinite(dk) | has_nonfinite(dv)).to(tl.int8))
    target = ((b * key_length + wide) * kv_heads + kv_head) * HEAD_DIM
    if DKEY:
        store_rows(dkey, target, exists, dk * scale, HEAD_DIM, BLOCK_D)
    if DVALUE:
        store_rows(dvalue, target, exists, dv, HEAD_DIM, BLOCK_D)
