"""The tokens of one attention of a layer, which can be taken back: a ``DynamicCache``, and what ``crop`` needs besides.

Tokens can be taken back exactly while nothing has been dropped, and where they were recorded: then there is a copy of
the cache from before them, to which those that remain are appended again.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma.cache import DynamicCache
from cupy_dma.torch.registration import wide
from cupy_dma.torch.tokens import real_first, taken
from cupy_dma.transformers.layers import DynamicMask


class _Chunk(NamedTuple):
    """Tokens of one call."""

    key: Tensor  # (B, L, Hkv, D); with padding, real tokens first in each row
    value: Tensor
    scores: Tensor  # (B, Hkv, L)
    real: Tensor | None  # bool (B, L): which are, in their own order; None: all


class CroppableCache:
    """Every method that raises has changed nothing."""

    def __init__(self, key: Tensor, value: Tensor, how: DynamicMask) -> None:
        """A cache without tokens, for ``key (B, L, Hkv, D)`` and ``value (B, L, Hkv, Dv)``."""
        self.store = DynamicCache(key.shape[0], key.shape[2], how.window, key.shape[3], value.shape[3], like=key,
                                  sinks=how.sinks, recent=how.recent)
        self.has_padding = False  # whether there has been any
        self._before: DynamicCache | None = None  # where the past is recorded: the store when that began
        self._since: list[_Chunk] = []  # and what has been appended to it

    def append(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, real: Tensor | None, record: bool,
               settings: dict[str, Any], sink_logits: Tensor | None = None) -> Tensor:
        """Append tokens and attend from them: ``out (B, L, H, Dv)``. See ``DynamicMaskLayer.attend``."""
        lengths = place = result = None
        if real is not None:
            lengths = real.sum(1)
            if real.shape[1] > 1:
                order = real_first(real)
                query, key, value = (taken(x, order) for x in (query, key, value))
                scores, place = taken(scores.transpose(1, 2), order).transpose(1, 2).contiguous(), order.argsort(1)
                result = torch.empty((*query.shape[:3], value.shape[3]), dtype=query.dtype, device=query.device)
        before = self.store.clone() if record and self._before is None else self._before
        chunk = _Chunk(key, value, scores, real)
        sinks = None if sink_logits is None else sink_logits.to(wide(query))[:, None]
        out = self.store.extend(query, key, value, scores, lengths=lengths, return_lse=sinks is not None, **settings)
        if sinks is not None:
            out, lse = out
            out.mul_(lse.sub_(sinks).sigmoid_().transpose(1, 2)[..., None])  # allocates nothing, so it cannot fail
        self.has_padding = self.has_padding or real is not None
        if record:
            self._before, self._since = before, [*self._since, chunk]
        else:
            self.forget_past()
        if place is None:
            return out
        return torch.gather(out, 1, place[..., None, None].expand_as(out), out=result)  # which allocates nothing

    @property
    def recorded(self) -> int:
        """How many of the last tokens were recorded."""
        return sum(chunk.key.shape[1] for chunk in self._since)

    def forget_past(self) -> None:
        """Give up what was recorded."""
        self._before, self._since = None, []

    def reset(self) -> None:
        """Remove all tokens."""
        self.forget_past()
        self.store.reset()
        self.has_padding = False

    def reorder(self, rows: Tensor) -> None:
        """Replace row ``b`` by the former row ``rows[b]``."""
        before, since = self._past_of(rows)
        self.store.reorder(rows)
        self._before, self._since = before, since

    def selected(self, rows: Tensor) -> CroppableCache:
        """A new one, of these rows."""
        found = CroppableCache.__new__(CroppableCache)
        found.has_padding, found.store = self.has_padding, self.store.select_batch(rows)
        found._before, found._since = self._past_of(rows)
        return found

    def _past_of(self, rows: Tensor) -> tuple[DynamicCache | None, list[_Chunk]]:
        """What is recorded of these rows."""
        before = None if self._before is None else self._before.select_batch(rows)
        return before, [_Chunk(*(None if x is None else x[rows] for x in chunk)) for chunk in self._since]

    def without(self, removed: int, length: int) -> DynamicCache:
        """A cache of the same rows without the last ``removed`` of ``length`` tokens, recorded or all kept."""
        if self._before is None or removed > self.recorded:
            return self._first(removed, length)
        found, left = self._before.clone(), self.recorded - removed
        for key, value, scores, real in self._since:
            n = min(left, key.shape[1])
            if n > 0:
                found.update(key[:, :n], value[:, :n], scores[:, :, :n],
                             lengths=None if real is None else real[:, :n].sum(1))
            left -= n
        return found

    def _first(self, removed: int, length: int) -> DynamicCache:
        """The same of a cache that has kept every token."""
        found, saved = self.store.clone(), self.store.state_dict()
        where = saved["positions"]  # (B, Hkv, R): -1 where there is none
        order = torch.where(where < 0, torch.iinfo(where.dtype).max, where).argsort(-1)[..., :length]
        rows = order.transpose(1, 2)[..., None]  # (B, L, Hkv, 1)
        key, value = (saved[name].transpose(1, 2).gather(1, rows.expand(-1, -1, -1, saved[name].shape[-1]))
                      for name in ("key", "value"))
        scores, lengths = saved["scores"].gather(-1, order), (self.store.length - removed).clamp(min=0)
        found.reset()
        found.update(key, value, scores, lengths=lengths)
        return found
