"""Prefix top-w (SPEC section 3): the running w-th best rank of ``_torch_math.prefix_stop``, with a kernel a bit.

Bit by bit from the highest the ranks are partitioned, zeros first, keeping their order; then the ranks of a prefix that
share their higher bits with T_p stand in one run of places [low, high). If it holds more than k ones, k being how many
of it are higher than T_p, that bit of T_p is 1 and the run narrows to its ones, otherwise k loses the ones and the run
narrows to its zeros. The work is O(Lk log Lk), the memory a few numbers per key, and everything is an integer.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cupy_dma.arrays import Operand
from cupy_dma.backends.torch_common import scores_and_selection

BLOCK = 1024


def prefix_stop(scores: Operand, window: int, padding: Operand | None, document: Operand | None) -> Any:
    """int32 ``(B, Hkv, Lk)``: the first position at which ``window`` better keys exist; see ``cupy_dma.backends``."""
    return scores_and_selection.prefix_stop(scores, window, padding, document, running_best)


def running_best(rank: torch.Tensor, window: int) -> torch.Tensor:
    """As ``_torch_math.running_best``."""
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
