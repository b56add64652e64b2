"""Shared by the kernels: tiles of queries, blocks of keys and their visibility, logits, and non-finite values.

A tile has BLOCK_M rows: BLOCK_M / HEADS consecutive queries times HEADS heads of one GQA group, which share every
gathered key; row r is query r // HEADS, head r % HEADS. Query i stands at position i + Lk - Lq.

Without a bias logits are base 2, which saves a product per pair; with one they are natural: a bias may be the lowest
number of its type, and times log2(e) it would be -inf, which hides a key.

Keys are processed in blocks of BLOCK_N. LISTED: they come from the tile's own list, full keys (visible to the whole
tile) from the front, partial ones from the back. Otherwise they come in their own order. A pair is visible where start
<= position < stop and, if DENSE, the dense mask is true; a block that is not MASKED needs no test.
"""
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.402823466e38)
LN_2 = tl.constexpr(0.6931471805599453)
# Arguments that kernels are not specialized on: nothing is gained by it.
PLAIN = ["heads", "kv_heads", "query_length", "key_length", "tiles", "blocks", "capacity", "mask_batch", "mask_head",
         "mask_share", "dense_share", "bias_share", "bias_heads", "sharing_batches", "sharing_heads", "delay"]
EVER = tl.constexpr(-(2**31))
NEVER = tl.constexpr(2**31 - 1)
INF = tl.constexpr(float("inf"))


@triton.jit
def find_tile(tiles, heads, query_length, key_length, BLOCK_M: tl.constexpr, HEADS: tl.constexpr):
    """Tile, batch, first head; per row: query, head, whether it exists, position; first and last position."""
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # the longest causal tiles first
    rest = program // tiles
    sets = heads // HEADS
    first_head = rest % sets * HEADS
    batch = (rest // sets).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    query = tile * QUERIES + row // HEADS
    shift = key_length - query_length
    first = tile * QUERIES + shift
    last = tl.minimum(tile * QUERIES + QUERIES, query_length) - 1 + shift
    return tile, batch, first_head, query, first_head + row % HEADS, query < query_length, query + shift, first, last


@triton.jit
def load_rows(base, row_offsets, row_mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of HEAD_DIM numbers as (rows, BLOCK_D), 0 in the padding and where the row mask is False."""
    d = tl.arange(0, BLOCK_D)
    pointers = base + row_offsets[:, None] + d[None, :]
    if MASKED:
        if HEAD_DIM == BLOCK_D:
            rows = tl.load(pointers, mask=row_mask[:, None], other=0.0)
        else:
            rows = tl.load(pointers, mask=row_mask[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        rows = tl.load(pointers)
    else:
        rows = tl.load(pointers, mask=(d < HEAD_DIM)[None, :], other=0.0)
    return rows


@triton.jit
def store_rows(base, row_offsets, row_mask, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(base + row_offsets[:, None] + d[None, :], rows.to(base.dtype.element_ty),
             mask=row_mask[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def key_range(meta, row, tile, tiles, first, last, key_length, BLOCK_N: tl.constexpr, LISTED: tl.constexpr,
              INTERVALS: tl.constexpr, CAUSAL: tl.constexpr, DENSE: tl.constexpr):
    """begin and end of a tile's key indices, the first that needs masking, and (LISTED) the number of full keys."""
    full = 0
    if LISTED:
        full = tl.load(meta + (row * tiles + tile) * 2)
        begin = 0
        end = tl.load(meta + (row * tiles + tile) * 2 + 1)
        masked = full // BLOCK_N * BLOCK_N
    elif INTERVALS:
        begin = tl.load(meta + (row * tiles + tile) * 2)
        end = tl.load(meta + (row * tiles + tile) * 2 + 1)
        masked = begin
    else:
        begin = 0
        end = key_length
        masked = key_length // BLOCK_N * BLOCK_N
        if CAUSAL:
            end = tl.maximum(tl.minimum(key_length, last + 1), 0)
            masked = tl.maximum(tl.minimum(key_length, first + 1), 0) // BLOCK_N * BLOCK_N
    if DENSE:
        masked = begin
    return begin, end, masked, full


@triton.jit
def find_keys(index, end, full, capacity, listed, start_base, stop_base, first, last, rows, position, query, dense_base,
              dense_row, dense_key, LISTED: tl.constexpr, INTERVALS: tl.constexpr, CAUSAL: tl.constexpr,
              DENSE: tl.constexpr, MASKED: tl.constexpr):
    """The keys with these indices, which of them some query may see, and which pairs (rows, keys) are visible."""
    wanted = index < end
    key = index
    if LISTED:
        if MASKED:
            entry = tl.where(index < full, index, capacity - 1 - (index - full))
            key = tl.load(listed + entry, mask=wanted, other=0)
        else:
            key = tl.load(listed + index)
    start, stop = key_runs(key, wanted, start_base, stop_base, INTERVALS and MASKED, CAUSAL)
    visible = rows[:, None]
    if MASKED:
        wanted = wanted & (start <= last) & (stop > first) & (start < stop)
        visible = (start[None, :] <= position[:, None]) & (position[:, None] < stop[None, :]) & rows[:, None]
    if DENSE:
        seen = tl.load(dense_base + query.to(tl.int64)[:, None] * dense_row + key.to(tl.int64)[None, :] * dense_key,
                       mask=visible & wanted[None, :], other=0)
        visible = seen != 0
        wanted = tl.max(visible.to(tl.int32), axis=0) > 0
    return key, wanted, visible


@triton.jit
def key_runs(key, exists, start_base, stop_base, INTERVALS: tl.constexpr, CAUSAL: tl.constexpr):
    """First position that sees each key, and the first later one that does not; an empty run if there is no key."""
    start = tl.where(exists, EVER, NEVER)
    stop = tl.where(exists, NEVER, EVER)
    if INTERVALS:
        start = tl.load(start_base + key, mask=exists, other=2147483647)
        stop = tl.load(stop_base + key, mask=exists, other=-2147483648)
    if CAUSAL:
        start = tl.maximum(start, key)
    return start, stop


@triton.jit
def softcapped(x, cap):
    """cap * tanh(x / cap), with an absolute error of about 1e-7 cap."""
    return cap - 2.0 * cap / (tl.exp2(x * (2.0 * LOG2_E / cap)) + 1.0)


@triton.jit
def logits(qk, added, scale, softcap, SOFTCAP: tl.constexpr, BIAS: tl.constexpr):
    """softcap(scale * q . k) + bias; ``added`` is read with a bias only."""
    if BIAS != 0:
        s = qk * scale
        if SOFTCAP:
            s = softcapped(s, softcap)
        s += added
    elif SOFTCAP:
        s = softcapped(qk * scale, softcap) * LOG2_E
    else:
        s = qk * (scale * LOG2_E)
    return s


@triton.jit
def exponential(x, BIAS: tl.constexpr):
    """exp of a difference of logits."""
    return tl.exp2(x * LOG2_E if BIAS != 0 else x)


@triton.jit
def as_logit(lse, BIAS: tl.constexpr):
    """The lse to subtract from logits. Far from 0 rounding errors reach whole exponents, and p could be infinite: there
    lse is raised by more than these errors, and p vanishes."""
    raised = tl.where((tl.abs(lse) > 4194304.0) & (tl.abs(lse) < INF), lse + 3.8e-6 * tl.abs(lse), lse)
    return raised if BIAS != 0 else raised * LOG2_E


@triton.jit
def has_nonfinite(x):
    return tl.max(tl.max((tl.abs(x) < INF).to(tl.int32) ^ 1, axis=1), axis=0) > 0


@triton.jit
def finite_only(rows):
    return tl.where(tl.abs(rows.to(tl.float32)) < INF, rows, 0.0).to(rows.dtype)


@triton.jit
def nonfinite_part(weights, visible, rows):
    """The contribution of the non-finite numbers in ``rows`` to ``weights @ rows`` over visible pairs: 0, inf or NaN.

    In an MMA even a weight of 0 would propagate a NaN to rows that do not see it, so the MMA takes
    ``finite_only(rows)`` and this is added. It counts with MMAs of 0 and 1, exact in every type. This path is rare.
    """
    x = rows.to(tl.float32)
    kind = tl.float16
    infinite = tl.where(x == INF, 1.0, tl.where(x == -INF, -1.0, 0.0))
    sign = tl.where(visible, tl.where(weights > 0, 1.0, tl.where(weights < 0, -1.0, 0.0)), 0.0)
    lost = tl.where(visible & (sign == 0.0), 1.0, 0.0)  # a weight of 0 or NaN times an infinity
    net = tl.dot(sign.to(kind), infinite.to(kind))
    both = tl.dot(tl.abs(sign).to(kind), tl.abs(infinite).to(kind))
    nans = tl.dot(tl.where(visible, 1.0, 0.0).to(kind), tl.where(x != x, 1.0, 0.0).to(kind))
    nans += tl.dot(lost.to(kind), tl.abs(infinite).to(kind))
    is_nan = (nans > 0) | (both > tl.abs(net))  # both infinities: NaN
    return tl.where(is_nan, INF - INF, tl.where(net > 0, INF, tl.where(net < 0, -INF, 0.0)))


@triton.jit
def gradients(qk, dp, added, visible, lse, delta, scale, softcap, SOFTCAP: tl.constexpr, BIAS: tl.constexpr):
    """p, ds and dx of SPEC section 6 from q . k, dout . v, the bias, lse and delta; 0 where invisible."""
    s = logits(qk, added, scale, softcap, SOFTCAP, BIAS)
    p = tl.where(visible, exponential(s - as_logit(lse, BIAS), BIAS), 0.0)
    ds = tl.where(visible, p * (dp - delta), 0.0)
    dx = ds
    if SOFTCAP:
        ratio = tl.minimum(tl.maximum(scale / softcap, -LARGEST), LARGEST)  # an infinity times 0 is NaN
        tanh = softcapped(qk * ratio, 1.0)
        dx = tl.where(visible, ds * (1.0 - tanh * tanh), 0.0)
    return p, ds, dx
