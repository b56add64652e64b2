"""Prefix top-w (SPEC section 3): stop_j, the first position at which w better keys exist.

Let r_j be the rank of key j among all keys in the order (document, score, j), lowest first, keys hidden by padding
below all others, and T_p the w-th highest rank among the keys 0 .. p (-1 while there are fewer). T never falls, and key
j is kept at p >= j iff T_p <= r_j. So stop_j = max(j, first p with T_p > r_j), a binary search in T.

All T_p are found at once by a wavelet matrix, one bit of the rank after the other, the highest first. Bit by bit the
ranks are partitioned, zeros first, keeping their order; then the ranks of a prefix that share their higher bits with
T_p stand in one run of places [low, high). If it holds more than k ones, k being how many of it are higher than T_p,
that bit of T_p is 1 and the run narrows to its ones, otherwise k loses the ones and the run narrows to its zeros.
The work is O(Lk log Lk), the memory a few numbers per key, and everything is an integer.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cupy_dma.arrays import Operand
from cupy_dma.backends.triton.arrays import delivered, on_stream_of, tensor
from cupy_dma.masks import NEVER

BLOCK = 1024


def prefix_stop(scores: Operand, window: int, padding: Operand | None, document: Operand | None) -> Any:
    """int32 ``(B, Hkv, Lk)``: the first position at which ``window`` better keys exist; see ``cupy_dma.backends``."""
    with on_stream_of(scores):
        values = tensor(scores)
        batch, heads, n = values.shape
        hidden, group = (None if x is None else tensor(x).reshape(x.shape)[:, None].expand(batch, heads, n)
                         for x in (padding, document))
        if values.numel() == 0:
            return delivered(values.new_empty(values.shape, dtype=torch.int32), scores)
        hidden = None if hidden is None else ~hidden
        rank = _ranks(values, hidden, group).reshape(-1, n)
        best = _running_best(rank, min(window, n))
        stop = torch.searchsorted(best, rank, right=True, out_int32=True).view(batch, heads, n)
        key = torch.arange(n, dtype=torch.int32, device=values.device)
        stop = torch.where(stop < n, torch.maximum(stop, key), NEVER)
        return delivered(stop if hidden is None else torch.where(hidden, key, stop), scores)


def _ordered(scores: torch.Tensor) -> torch.Tensor:
    """Signed integers in the order of the scores: -0 equals +0, and all NaN are equal and above everything."""
    wide = scores.dtype == torch.float64
    kind = torch.int64 if wide else torch.int32
    bits = (scores + 0.0).contiguous().view(kind)  # -0 + 0 is +0
    ordered = torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits)
    return torch.where(torch.isnan(scores), torch.iinfo(kind).max, ordered)


def _ranks(scores: torch.Tensor, hidden: torch.Tensor | None, group: torch.Tensor | None) -> torch.Tensor:
    """int32: the place of every key in the order (document, score, j), hidden keys first."""
    order = _ordered(scores).sort(dim=-1, stable=True).indices  # of equal scores the newest ranks highest
    if hidden is not None or group is not None:
        first = torch.zeros_like(order) if group is None else group.long()
        first = first if hidden is None else torch.where(hidden, -1, first)
        order = order.gather(-1, first.gather(-1, order).sort(dim=-1, stable=True).indices)
    n = order.shape[-1]
    place = torch.arange(n, dtype=torch.int32, device=order.device).expand(order.shape)
    return torch.empty_like(place, memory_format=torch.contiguous_format).scatter_(-1, order, place)


def _running_best(rank: torch.Tensor, window: int) -> torch.Tensor:
    """int32 (rows, n): T, the ``window``-th highest of the first 1, 2, ... of the ranks, which are a permutation of
    0 .. n - 1; -1 where there are fewer."""
    rows, n = rank.shape
    bits = max(1, (n - 1).bit_length())
    current, following = rank, torch.empty_like(rank)
    best, low = torch.zeros_like(rank), torch.zeros_like(rank)
    high = torch.arange(1, n + 1, dtype=torch.int32, device=rank.device).repeat(rows, 1)
    higher = torch.full_like(rank, window - 1)
    grid = (rows * triton.cdiv(n, BLOCK),)
    for bit in range(bits - 1, -1, -1):
        ones = ((current >> bit) & 1).cumsum(-1, dtype=torch.int32)
        narrow[grid](current, following, ones, best, low, high, higher, n, bit, BLOCK)
        current, following = following, torch.empty_like(current) if current is rank else current
    best[:, :window - 1] = -1
    return best


@triton.jit(do_not_specialize=["n", "bit"])
def narrow(current, following, ones, best, low, high, higher, n, bit, BLOCK: tl.constexpr):
    """One bit: partitions ``current`` into ``following``, and narrows the runs. ``ones``: inclusive counts of ones."""
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * n
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    exists = place < n
    ones += row
    zeros = n - tl.load(ones + n - 1)

    rank = tl.load(current + row + place, mask=exists, other=0)
    is_one = (rank >> bit) & 1
    before = tl.load(ones + place, mask=exists, other=0) - is_one
    tl.store(following + row + tl.where(is_one != 0, zeros + before, place - before), rank, mask=exists)

    begin = tl.load(low + row + place, mask=exists, other=0)
    end = tl.load(high + row + place, mask=exists, other=0)
    k = tl.load(higher + row + place, mask=exists, other=0)
    ones_begin = tl.load(ones + begin - 1, mask=exists & (begin > 0), other=0)
    ones_end = tl.load(ones + end - 1, mask=exists & (end > 0), other=0)
    found = ones_end - ones_begin
    go = k < found
    tl.store(low + row + place, tl.where(go, zeros + ones_begin, begin - ones_begin), mask=exists)
    tl.store(high + row + place, tl.where(go, zeros + ones_end, end - ones_end), mask=exists)
    tl.store(higher + row + place, tl.where(go, k, k - found), mask=exists)
    sofar = tl.load(best + row + place, mask=exists, other=0)
    tl.store(best + row + place, sofar * 2 + go.to(tl.int32), mask=exists)
