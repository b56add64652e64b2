"""Prefix top-w (SPEC section 3): ``scores_and_selection.prefix_stop`` with a kernel per bit for the w-th best rank T_p.

Bit by bit, from the highest, the ranks are stably partitioned, zeros first; the ranks of a prefix that share their
higher bits with T_p then form one run of indices [low, high). Let k be how many ranks of the run are higher than T_p:
if the run holds more than k ones, that bit of T_p is 1 and the run narrows to its ones; otherwise the run narrows to
its zeros and k decreases by the number of ones. The work is O(Lk log Lk), memory is a few integers per key.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cupy_dma.arrays import Operand
from cupy_dma.backends.torch_common import scores_and_selection
from cupy_dma.masks.windows import Window

BLOCK = 1024


def prefix_stop(scores: Operand, window: Window, padding: Operand | None, document: Operand | None) -> Any:
    """int32 ``(B, Hkv, Lk)``: the first position at which ``window`` better keys exist; see ``cupy_dma.backends``."""
    return scores_and_selection.prefix_stop(scores, window, padding, document, running_best)


def running_best(rank: torch.Tensor, window: int) -> torch.Tensor:
    """Like ``scores_and_selection.running_best``."""
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
    """One bit: partition ``current`` into ``following``, narrow the runs. ``ones``: inclusive prefix sums of it."""
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * n
    index = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    exists = index < n
    ones += row
    zeros = n - tl.load(ones + n - 1)

    rank = tl.load(current + row + index, mask=exists, other=0)
    is_one = (rank >> bit) & 1
    before = tl.load(ones + index, mask=exists, other=0) - is_one
    tl.store(following + row + tl.where(is_one != 0, zeros + before, index - before), rank, mask=exists)

    begin = tl.load(low + row + index, mask=exists, other=0)
    end = tl.load(high + row + index, mask=exists, other=0)
    k = tl.load(higher + row + index, mask=exists, other=0)
    ones_begin = tl.load(ones + begin - 1, mask=exists & (begin > 0), other=0)
    ones_end = tl.load(ones + end - 1, mask=exists & (end > 0), other=0)
    found = ones_end - ones_begin
    go = k < found
    tl.store(low + row + index, tl.where(go, zeros + ones_begin, begin - ones_begin), mask=exists)
    tl.store(high + row + index, tl.where(go, zeros + ones_end, end - ones_end), mask=exists)
    tl.store(higher + row + index, tl.where(go, k, k - found), mask=exists)
    sofar = tl.load(best + row + index, mask=exists, other=0)
    tl.store(best + row + index, sofar * 2 + go.to(tl.int32), mask=exists)
