"""A call in FlexAttention's terms: tensors, the two index functions that the kernel calls, and block lists.

    visible(b, h, i, j)   = start[b, h', j] <= p < stop[b, h', j]  and  dense[b, h', i, j]  and (causal) j <= p
    modified(s, b, h, i, j) = softcap(s) + bias[b, h', i, j]           p = i + Lk - Lq,  s = scale * q . k

A delayed bias is 0 where ``p - j < delay``. ``h'`` is ``h``, or the kv head ``h // G`` for an array with kv heads.
Arrays are stored without the axes along which they broadcast.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cupy_dma.backends.torch_common.arrays import shaped
from cupy_dma.calls.types import AttentionCall

BLOCK = 128  # FlexAttention skips blocks of this many queries and keys
PAIRS_AT_A_TIME = 2**28  # pairs of a dense mask that are read at a time to find its blocks


@dataclass(frozen=True)
class Captured:
    """An array that the kernel indexes: ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` without the axes of size 1."""

    data: Tensor
    form: tuple[int, ...]  # its shape with all four axes
    axes: tuple[int, ...]  # which of (b, h, i, j) it has
    group: int  # query heads per head of the array

    @classmethod
    def of(cls, array: Tensor, heads: int, key_length: int) -> Captured:
        if array.numel() == 1:  # it needs at least one axis to index
            array = array.expand(1, 1, 1, key_length).contiguous()
        axes = tuple(axis for axis in range(4) if array.shape[axis] > 1) or (3,)
        return cls(array.reshape([array.shape[axis] for axis in axes]), tuple(array.shape), axes,
                   heads // array.shape[1])

    @property
    def static(self) -> tuple[Any, ...]:
        """What a compiled kernel depends on."""
        return tuple(self.data.shape), self.data.dtype, self.axes, self.group

    def reader(self) -> Callable[..., Tensor]:
        """``read(data, b, h, i, j)``, the entry for one pair."""
        axes, group = self.axes, self.group

        def read(data: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
            own = h if group == 1 else h // group
            index = b, own, i, j
            return data[tuple([index[axis] for axis in axes])]

        return read


@dataclass
class Problem:
    """Mask and lengths of a call."""

    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    start: Tensor | None  # int32 (1|B, 1|Hkv|H, Lk)
    stop: Tensor | None
    dense: Tensor | None  # bool (1|B, 1|Hkv|H, 1|Lq, 1|Lk)
    causal: bool
    device: Any

    @classmethod
    def of(cls, call: AttentionCall, device: Any) -> Problem:
        start, stop = (None, None) if call.mask is None else (
            shaped(run) for run in (call.mask._start, call.mask._stop))
        return cls(call.query_length, call.key_length, call.heads, call.kv_heads, start, stop,
                   None if call.dense is None else shaped(call.dense), call.causal, device)

    @property
    def offset(self) -> int:
        return self.key_length - self.query_length

    @property
    def everything_is_visible(self) -> bool:
        return self.start is None and self.dense is None and not self.causal

    def captured(self) -> list[Captured]:
        """The arrays that ``visible`` reads."""
        arrays = [run[:, :, None] for run in (self.start, self.stop) if run is not None]
        return [Captured.of(x, self.heads, self.key_length)
                for x in (*arrays, *([] if self.dense is None else [self.dense]))]

    def visible(self) -> Callable[..., Tensor]:
        """``visible(b, h, i, j, *data)``, where ``data`` are the data of ``captured()``."""
        offset, causal = self.offset, self.causal
        readers = [captured.reader() for captured in self.captured()]
        runs, dense = (readers[:2] if self.start is not None else []), self.dense is not None

        def visible(b: Any, h: Any, i: Any, j: Any, *data: Tensor) -> Tensor:
            position = i + offset
            seen = j <= position if causal else j >= 0
            if runs:
                seen = seen & (runs[0](data[0], b, h, i, j) <= position) & (position < runs[1](data[1], b, h, i, j))
            if dense:
                seen = seen & readers[-1](data[-1], b, h, i, j)
            return seen

        return visible

    # ---- which blocks, which keys ----

    def survey(self) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks with some visible pair and blocks with only visible pairs, ``(1|B, 1|Hkv|H, Lq/BLOCK, Lk/BLOCK)``
        (rounded up; a block that crosses an edge is never full), and the keys that some query sees,
        ``(1|B, 1|Hkv, Lk)``."""
        some, full, seen = zip(*(self._survey_dense() if self.dense is not None else [self._survey_runs()]))
        keys = torch.stack(seen).any(0)
        if keys.shape[1] not in (1, self.kv_heads):
            keys = keys.reshape(keys.shape[0], self.kv_heads, -1, keys.shape[2]).any(2)
        return torch.cat(some, 2), torch.cat(full, 2), keys

    def _intervals(self) -> tuple[Tensor, Tensor]:
        """``start`` and ``stop`` combined with causality; everything is visible without a mask."""
        key = torch.arange(self.key_length, device=self.device, dtype=torch.int32)
        start, stop = self.start, self.stop
        if start is None or stop is None:
            start, stop = torch.zeros_like(key)[None, None] - 2**30, torch.zeros_like(key)[None, None] + 2**30
        return (torch.maximum(start, key) if self.causal else start), stop

    def _survey_runs(self) -> tuple[Tensor, Tensor, Tensor]:
        start, stop = (x[:, :, None] for x in self._intervals())
        first = torch.arange(0, self.query_length, BLOCK, device=start.device)[:, None] + self.offset
        last = torch.clamp(first + BLOCK, max=self.key_length)  # one past the last position
        some = (start < stop) & (start < last) & (stop > first)
        full = (start <= first) & (stop >= last) & (last - first == BLOCK)
        return _by_key_block(some).any(-1), _by_key_block(full).all(-1), some.any(2)

    def _survey_dense(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The same for a dense mask, a few rows of blocks at a time."""
        dense = self.dense
        assert dense is not None
        start, stop = self._intervals()
        heads = max(dense.shape[1], start.shape[1])
        dense, start, stop = (x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)
                              for x in (dense, start, stop))
        row = max(dense.shape[0], start.shape[0]) * heads * self.key_length
        step = max(1, PAIRS_AT_A_TIME // (row * BLOCK)) * BLOCK
        for begin in range(0, self.query_length, step):
            end = min(begin + step, self.query_length)
            position = torch.arange(begin, end, device=dense.device)[:, None] + self.offset
            seen = (dense[:, :, begin:end] if dense.shape[2] > 1 else dense) & (
                start[:, :, None] <= position) & (position < stop[:, :, None])
            rows = torch.nn.functional.pad(seen, (0, 0, 0, -(end - begin) % BLOCK))
            blocks = _by_key_block(rows).unflatten(2, (-1, BLOCK))
            yield blocks.any(-1).any(3), blocks.all(-1).all(3), seen.any(2)

    def block_mask(self, some: Tensor, full: Tensor, visible: Callable[..., Tensor]) -> Any:
        """FlexAttention's ``BlockMask`` of these blocks."""
        from torch.nn.attention.flex_attention import BlockMask

        some, full = (x if x.shape[1] in (1, self.heads) else x.repeat_interleave(self.heads // x.shape[1], 1)
                      for x in (some, full))
        return BlockMask.from_kv_blocks(*_lists(some & ~full), *_lists(full), BLOCK_SIZE=BLOCK, mask_mod=visible,
                                        seq_lengths=(self.query_length, self.key_length))


def _by_key_block(pairs: Tensor) -> Tensor:
    """The last axis divided into blocks, padded with False."""
    return torch.nn.functional.pad(pairs, (0, -pairs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks are set in each row, and all block indices with those first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)
