"""Rows on the wire: keys, values and scores of some positions side by side, as 8-byte words.

    row of the forward    [ key: D | value: D | (to 8 bytes) score | ordinal: int32 | age: int32 | (to 8 bytes) ]
    row of the backward   [ dkey: D | dvalue: D | (to 8 bytes) dscore | (to 8 bytes) ]

The age, the distance from the token to the end of its shard, is present with a delayed bias only. Whole rows are moved,
sorted and picked as words, whatever their types; fields are views into them.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

WORD = 8


def _up(size: int) -> int:
    return -(-size // WORD) * WORD


class Row(NamedTuple):
    """The layout of a row."""

    head_dim: int
    kind: torch.dtype  # of keys and values
    score: torch.dtype  # float32 or float64
    has_ages: bool = False

    @property
    def _score_at(self) -> int:
        return _up(2 * self.head_dim * self.kind.itemsize)

    def words(self, ordinals: bool) -> int:
        """Of a row with ordinals (forward) or without (backward)."""
        return _up(self._score_at + self.score.itemsize + ((8 if self.has_ages else 4) if ordinals else 0)) // WORD

    def pair(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Views ``(..., D)`` of key and value in ``rows (..., words)``, int64 with contiguous rows."""
        size = self.head_dim * self.kind.itemsize
        octets = rows.view(torch.uint8)
        return octets[..., :size].view(self.kind), octets[..., size:2 * size].view(self.kind)

    def scores(self, rows: Tensor) -> Tensor:
        """View ``(...)`` of the scores."""
        at = self._score_at
        return rows.view(torch.uint8)[..., at:at + self.score.itemsize].view(self.score)[..., 0]

    def ordinals(self, rows: Tensor) -> Tensor:
        """View ``(...)`` of the ordinals, int32."""
        return self._int32(rows, self._score_at + self.score.itemsize)

    def ages(self, rows: Tensor) -> Tensor:
        """View ``(...)`` of the ages, int32."""
        return self._int32(rows, self._score_at + self.score.itemsize + 4)

    @staticmethod
    def _int32(rows: Tensor, at: int) -> Tensor:
        return rows.view(torch.uint8)[..., at:at + 4].view(torch.int32)[..., 0]


def picked(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``(B, Hkv, R, D)`` of ``x (B, n, Hkv, D)`` at ``index (B, Hkv, R)``; zeros if ``x`` has no rows."""
    x = x.transpose(1, 2)
    wide = index[..., None].expand(*index.shape, x.shape[3])
    return x.gather(2, wide) if x.shape[2] else torch.zeros(wide.shape, dtype=x.dtype, device=x.device)


def empty_with_room(batch: int, length: int, kv_heads: int, head_dim: int, rows: int, *, dtype: torch.dtype,
                    device: Any = None) -> Tensor:
    """An uninitialised tensor ``(batch, length, kv_heads, head_dim)`` for keys or values, with memory for ``rows`` more
    rows ahead of each batch entry: ``context_parallel_attention(..., room=True)`` puts received rows there.

    ``rows``: ``R = window + sinks + recent``, with a ``bias_delay`` ``R + min(bias_delay, R + length)``. The tensor is
    ``buffer[:, rows:]`` of a buffer with ``rows + length`` rows; any such slice can be passed with ``room=True``.
    """
    return torch.empty((batch, rows + length, kv_heads, head_dim), dtype=dtype, device=device)[:, rows:]


def has_room(x: Tensor, rows: int) -> bool:
    """Whether there is memory for ``rows`` rows ahead of each batch entry of ``x (B, n, Hkv, D)``."""
    row = x.stride(1)
    return x.storage_offset() >= rows * row > 0 and (x.shape[0] < 2 or x.stride(0) >= (rows + x.shape[1]) * row)


def with_rows_ahead(x: Tensor, rows: int) -> Tensor:
    """``x (B, n, Hkv, D)`` with the ``rows`` rows of memory ahead of each batch entry, ``(B, rows + n, Hkv, D)``. It
    does not share autograd's version counter, because writes there do not change ``x``."""
    batch, n, heads, size = x.shape
    return x.data.as_strided((batch, rows + n, heads, size), x.stride(), x.storage_offset() - rows * x.stride(1))
