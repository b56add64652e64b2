"""Gradient of a bias per pair, (1|B, 1|Hkv|H, Lq, Lk): ds summed over the batch entries and heads that share it.

A program owns BLOCK_M x BLOCK_N elements. It loops over the batch entries and heads that share them, accumulates ds in
float32 and writes each element once: no workspace, and bitwise reproducible.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from cupy_dma.backends.triton.problem import Problem
from cupy_dma.backends.triton.tiles import INF, PLAIN, gradients, key_runs, load_rows


def bias_gradient(problem: Problem, dbias: torch.Tensor | None) -> None:
    """Write dbias, contiguous, with the four axes of the bias."""
    assert dbias is not None
    batch, query_length = problem.call.query.shape[:2]
    shape, sharing = problem.shape("dbias"), problem.heads // dbias.shape[1]
    blocks = triton.cdiv(dbias.shape[3], shape.block_n)
    grid = (triton.cdiv(query_length, shape.block_m) * blocks * dbias.shape[0] * dbias.shape[1],)
    backward_dbias[grid](**problem.arguments, dbias=dbias, blocks=blocks, bias_heads=dbias.shape[1],
                        sharing_batches=batch // dbias.shape[0], sharing_heads=sharing, BLOCK_M=shape.block_m,
                        BLOCK_N=shape.block_n, num_warps=shape.warps, num_stages=shape.stages)


@triton.jit(do_not_specialize=PLAIN)
def backward_dbias(query, key, value, dout, lse, delta, dbias, start, stop, dense, bias,
                  query_batch, query_row, query_head, key_batch, key_row, key_head,
                  value_batch, value_row, value_head, dout_batch, dout_row, dout_head,
                  start_batch, start_head, stop_batch, stop_head, mask_batch, mask_head, mask_share,
                  dense_batch, dense_head, dense_row, dense_key, dense_share,
                  bias_batch, bias_head, bias_row, bias_key, bias_share,
                  heads, kv_heads, query_length, key_length, blocks, bias_heads, sharing_batches, sharing_heads, scale,
                  softcap, delay, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, INTERVALS: tl.constexpr, CAUSAL: tl.constexpr, DENSE: tl.constexpr,
                  BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    program = tl.program_id(0)
    rest = program // blocks
    tiles = tl.cdiv(query_length, BLOCK_M)
    entry = rest // tiles  # of (bias batch, bias head)
    i = rest % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    j = program % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = i < query_length
    exists = j < key_length
    position = i + key_length - query_length
    query_index = i.to(tl.int64)
    key_index = j.to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first_batch = entry // bias_heads * sharing_batches
    first_head = entry % bias_heads * sharing_heads
    for shared in range(0, sharing_batches * sharing_heads):
        b = (first_batch + shared // sharing_heads).to(tl.int64)
        head = first_head + shared % sharing_heads
        kv_head = (head // (heads // kv_heads)).to(tl.int64)
        start_base = start
        stop_base = stop
        if INTERVALS:
            start_base = start + b * start_batch + (head // mask_share).to(tl.int64) * start_head
            stop_base = stop + b * stop_batch + (head // mask_share).to(tl.int64) * stop_head
        begin, end = key_runs(j, exists, start_base, stop_base, INTERVALS, CAUSAL)
        statistics = (b * heads + head) * query_length + i
        row_lse = tl.load(lse + statistics, mask=rows, other=-INF)
        alive = row_lse != -INF
        visible = (begin[None, :] <= position[:, None]) & (position[:, None] < end[None, :]) & alive[:, None]
        if DENSE:
            seen = tl.load(dense + b * dense_batch + (head // dense_share).to(tl.int64) * dense_head
                           + query_index[:, None] * dense_row + key_index[None, :] * dense_key, mask=visible, other=0)
            visible = seen != 0
        if tl.max(tl.max(visible.to(tl.int32), axis=1), axis=0) > 0:
            q = load_rows(query + b * query_batch + head.to(tl.int64) * query_head, query_index * query_row, rows,
                          HEAD_DIM, BLOCK_D, True)
            do = load_rows(dout + b * dout_batch + head.to(tl.int64) * dout_head, query_index * dout_row, rows,
                           HEAD_DIM, BLOCK_D, True)
            k = load_rows(key + b * key_batch + kv_head * key_head, key_index * key_row, exists, HEAD_DIM, BLOCK_D,
                          True)
            v = load_rows(value + b * value_batch + kv_head * value_head, key_index * value_row, exists, HEAD_DIM,
                          BLOCK_D, True)
            row_delta = tl.load(delta + statistics, mask=rows, other=0.0)
            added = tl.load(bias + b * bias_batch + (head // bias_share).to(tl.int64) * bias_head
                            + query_index[:, None] * bias_row + key_index[None, :] * bias_key, mask=visible,
                            other=0.0).to(tl.float32)
            qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            _, ds, _ = gradients(qk, dp, added, visible, tl.where(alive, row_lse, INF)[:, None],
                                 row_delta[:, None], scale, softcap, SOFTCAP, BIAS)
            acc += ds
    target = dbias + (entry.to(tl.int64) * query_length + query_index[:, None]) * key_length + key_index[None, :]
    tl.store(target, acc.to(dbias.dtype.element_ty), mask=rows[:, None] & exists[None, :])
