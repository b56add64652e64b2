"""What the kernels need to know about a mask's runs, built on the device and cached on the mask, per stream.

If the mask has a bound (``_bound``: few keys are visible to a tile), every tile of consecutive queries gets a list of
the keys that some of its queries see: full keys (visible to all of them) from the front, partial ones from the back.
For any other mask every tile gets the range of key blocks that it has to process. Memory is linear in Lk.

The gradients of keys loop over the queries that see any key of a block, so a block should hold keys with similar runs:
``key_order`` sorts the keys by the size class of their run, floor(log2(length)), then by its start. Within a class the
ranges of the blocks cover the queries once, so the loops visit at most twice the visible pairs plus Lq times the number
of classes, whatever the mask.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from cupy_dma.backends.torch_common.arrays import tensor
from cupy_dma.backends.triton.tiles import EVER, NEVER
from cupy_dma.masks.derived import kept
from cupy_dma.masks.interval import IntervalMask

LIST_CHUNK = 1024  # keys that a tile reads in one step
CHUNKS = 1024  # chunks or blocks whose summaries it reads in one step
LOWEST, HIGHEST = EVER.value, NEVER.value


class TileKeys(NamedTuple):
    """The keys of tiles with a fixed number of queries; ``rows`` are mask rows, batch by batch, head by head."""

    listed: Any  # int32 (rows, tiles, capacity), or None: keys in their own order
    capacity: int
    meta: Any  # int32 (rows, tiles, 2): number of full keys and of all keys; without a list: begin and end of the keys


def tile_keys(mask: IntervalMask, query_length: int, queries: int, block_n: int, causal: bool) -> TileKeys:
    capacity = _capacity(mask, queries)
    identity = ("triton", query_length, queries, 0 if capacity else block_n, causal)
    return kept(mask, identity, _stream(mask),
                lambda: _build(mask, query_length, queries, block_n, causal, capacity))


def key_order(mask: IntervalMask, query_length: int, causal: bool) -> torch.Tensor:
    """int32 (rows, Lk): the keys, longest runs first; keys that no query sees come last."""
    return kept(mask, ("triton", "order", query_length, causal), _stream(mask),
                lambda: _key_order(mask, query_length, causal))


def _key_order(mask: IntervalMask, query_length: int, causal: bool) -> torch.Tensor:
    begin, end = _runs(mask, query_length, causal)
    size = (end.long() - begin).clamp_(min=0)
    # frexp's exponent is 0 for an empty run, otherwise floor(log2) + 1; exact, as sizes are below 2^53
    rank = torch.frexp(size.double()).exponent.long()
    rank = ((64 - rank) << 32) + (begin.long() - (mask.key_length - query_length)).clamp_(0, query_length)
    return rank.sort(dim=-1, stable=True).indices.int()


def _stream(mask: IntervalMask) -> int:
    return mask.library.stream(mask.device)


def _capacity(mask: IntervalMask, queries: int) -> int:
    """The most entries that the list of ``queries`` consecutive queries can have; 0 to use no lists."""
    if mask._bound is None:
        return 0
    base, per_position = mask._bound
    capacity = base + per_position * (queries - 1)
    return capacity if capacity < mask.key_length else 0


def _runs(mask: IntervalMask, query_length: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The runs clipped to the positions of the queries: int32 (rows, Lk) each, empty where end <= begin."""
    n = mask.key_length
    start, stop = (tensor(run).expand(mask.shape).reshape(-1, n) for run in (mask._start, mask._stop))
    begin = start.clamp(min=n - query_length)
    if causal:
        begin = torch.maximum(begin, torch.arange(n, dtype=torch.int32, device=begin.device))
    return begin, stop.clamp(max=n)


def _build(mask: IntervalMask, query_length: int, queries: int, block_n: int, causal: bool,
           capacity: int) -> TileKeys:
    begin, end = _runs(mask, query_length, causal)
    rows, n = begin.shape
    tiles, seen = -(-query_length // queries), begin < end
    step = LIST_CHUNK if capacity else block_n
    chunks = -(-n // step)
    index = torch.arange(n, device=begin.device).expand(rows, n)
    if capacity:  # pack the keys that some query sees, in order
        index = torch.where(seen, seen.cumsum(-1) - 1, chunks * step)
        packed = begin.new_zeros((rows, chunks * step + 1))
        packed.scatter_(1, index, torch.arange(n, dtype=torch.int32, device=begin.device).expand(rows, n))
    low = begin.new_full((rows, chunks * step + 1), HIGHEST).scatter_(1, index, torch.where(seen, begin, HIGHEST))
    high = begin.new_full((rows, chunks * step + 1), LOWEST).scatter_(1, index, torch.where(seen, end, LOWEST))
    low, high = (x[:, :-1].contiguous().view(rows, chunks, step) for x in (low, high))
    lowest, highest = low.amin(-1), high.amax(-1)
    meta = begin.new_empty((rows, tiles, 2))
    grid = (rows * tiles,)
    if not capacity:
        tile_ranges[grid](lowest, highest, meta, chunks, tiles, query_length, n, queries, block_n, CHUNKS)
        return TileKeys(None, 0, meta)
    listed = begin.new_empty((rows, tiles, capacity))
    tile_lists[grid](packed[:, :-1].contiguous(), low, high, lowest, highest, listed, meta, chunks, capacity, tiles,
                     query_length, n, queries, LIST_CHUNK, CHUNKS)
    return TileKeys(listed, capacity, meta)


@triton.jit
def _meeting(lowest, highest, chunks, first, last, BLOCK: tl.constexpr):
    """The range of chunks with keys that positions first .. last may see."""
    begin = chunks
    end = 0
    for at in range(0, chunks, BLOCK):
        chunk = at + tl.arange(0, BLOCK)
        exists = chunk < chunks
        low = tl.load(lowest + chunk, mask=exists, other=2147483647)
        high = tl.load(highest + chunk, mask=exists, other=-2147483648)
        meets = exists & (low <= last) & (high > first)
        begin = tl.minimum(begin, tl.min(tl.where(meets, chunk, chunks), axis=0))
        end = tl.maximum(end, tl.max(tl.where(meets, chunk + 1, 0), axis=0))
    return begin, end


@triton.jit
def _positions(tile, queries, query_length, key_length):
    first = tile * queries + key_length - query_length
    return first, tl.minimum(tile * queries + queries, query_length) - 1 + key_length - query_length


@triton.jit(do_not_specialize=["chunks", "tiles", "query_length", "key_length"])
def tile_ranges(lowest, highest, meta, chunks, tiles, query_length, key_length, queries, step, BLOCK: tl.constexpr):
    """meta: begin and end of the keys that a tile has to process. A program is one tile of one mask row."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    first, last = _positions(program % tiles, queries, query_length, key_length)
    begin, end = _meeting(lowest + row * chunks, highest + row * chunks, chunks, first, last, BLOCK)
    tl.store(meta + program * 2, tl.minimum(begin * step, end * step))
    tl.store(meta + program * 2 + 1, tl.minimum(end * step, key_length))


@triton.jit(do_not_specialize=["chunks", "capacity", "tiles", "query_length", "key_length"])
def tile_lists(packed, low, high, lowest, highest, listed, meta, chunks, capacity, tiles, query_length, key_length,
               queries, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """listed and meta of a tile, from the packed keys of its mask row: the keys visible at positions first .. last."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    first, last = _positions(program % tiles, queries, query_length, key_length)
    begin, end = _meeting(lowest + row * chunks, highest + row * chunks, chunks, first, last, BLOCK)
    target = listed + program.to(tl.int64) * capacity
    full = 0
    partial = 0
    for chunk in range(begin, end):
        index = (row * chunks + chunk) * CHUNK + tl.arange(0, CHUNK)
        start = tl.load(low + index)
        stop = tl.load(high + index)
        key = tl.load(packed + row * chunks * CHUNK + chunk * CHUNK + tl.arange(0, CHUNK))
        meets = (start <= last) & (stop > first)
        whole = meets & (start <= first) & (stop > last)
        rest = (meets & (whole == 0)).to(tl.int32)
        ones = whole.to(tl.int32)
        tl.store(target + full + tl.cumsum(ones, axis=0) - ones, key, mask=whole)
        tl.store(target + capacity - 1 - (partial + tl.cumsum(rest, axis=0) - rest), key, mask=rest != 0)
        full += tl.sum(ones, axis=0)
        partial += tl.sum(rest, axis=0)
    tl.store(meta + program * 2, full)
    tl.store(meta + program * 2 + 1, full + partial)
