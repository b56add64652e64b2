"""The tokens of one attention of a layer, which can be taken back: a cache, and what ``crop`` and ``stops`` need.

Tokens can be taken back exactly while nothing has been dropped, and where they were recorded. A few that were recorded
first, such as a draft that is checked, wait outside the cache: ``crop`` appends those that remain. Of more there is a
copy of the cache from before them, to which those that remain are appended again.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma.cache import DynamicCache, GatedCache
from cupy_dma.masks.interval import NEVER
from cupy_dma.masks.windows import Window, narrowest
from cupy_dma.torch.registration import wide
from cupy_dma.torch.tokens import real_first, taken
from cupy_dma.transformers.layers import DynamicMask, GateMask

Store = DynamicCache | GatedCache
DRAFT = 64  # tokens of one call that may wait


class At(NamedTuple):
    """Where the rows of a forward pass belong; see ``DynamicMaskCache.at``."""

    slots: Tensor | None  # (n,) int32
    lengths: Tensor  # (n,) int32


class _Chunk(NamedTuple):
    """Tokens of one call."""

    key: Tensor  # (B, L, Hkv, D); with padding, real tokens first in each row
    value: Tensor
    scores: Tensor  # (B, Hkv, L)
    real: Tensor | None  # bool (B, L): which are, in their own order; None: all


class CroppableCache:
    """Every method that raises has changed nothing."""

    def __init__(self, key: Tensor, value: Tensor, how: DynamicMask | GateMask, record_stops: bool = False,
                 capacity: Window | None = None, slots: int | None = None, storage: str | None = None) -> None:
        """A cache without tokens, for ``key (B, L, Hkv, D)`` and ``value (B, L, Hkv, Dv)``. ``capacity``: in place of
        that of a ``GateMask``; ``slots``: of ``B``."""
        batch, _, heads, size = key.shape
        batch = slots or batch
        options: dict[str, Any] = {"like": key, "sinks": how.sinks, "record_stops": record_stops,
                                   "storage": storage}
        self.store: Store
        if isinstance(how, GateMask):
            self.store = GatedCache(batch, heads, size, value.shape[3], delay=how.delay, threshold=how.threshold,
                                    capacity=how.capacity if capacity is None else capacity, **options)
        else:
            self.store = DynamicCache(batch, heads, how.window, size, value.shape[3], recent=how.recent, **options)
        self.has_padding = False  # whether there has been any
        self._real: list[Tensor] | None = [] if record_stops else None  # bool (B, L) of every call: which tokens are
        self._before: Store | None = None  # where the past is recorded: the store when that began
        self._since: list[_Chunk] = []  # and what has been appended to it
        self._waits = False  # whether that is one chunk that has been attended to only

    def append(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, real: Tensor | None, record: bool,
               settings: dict[str, Any], sink_logits: Tensor | None = None, at: At | None = None) -> Tensor:
        """Append tokens and attend from them: ``out (B, L, H, Dv)``. See ``DynamicMaskLayer.attend``. ``at``: in place
        of ``real``, for a call to some slots."""
        place = result = None
        slots, lengths = (None, None) if at is None else at
        if real is not None:
            lengths = real.sum(1)
            if real.shape[1] > 1:
                order = real_first(real)
                query, key, value = (taken(x, order) for x in (query, key, value))
                scores, place = taken(scores.transpose(1, 2), order).transpose(1, 2).contiguous(), order.argsort(1)
                result = torch.empty((*query.shape[:3], value.shape[3]), dtype=query.dtype, device=query.device)
        self._settle(record)
        waits, before = record and not self._since and at is None and key.shape[1] <= DRAFT, self._before
        if record and before is None and not waits:
            before = self.store.clone()
        chunk = _Chunk(key, value, scores, real)
        sinks = None if sink_logits is None else sink_logits.to(wide(query))[:, None]
        take = self.store.attend if waits else self.store.extend
        out = take(query, key, value, scores, lengths=lengths, slots=slots, return_lse=sinks is not None, **settings)
        if sinks is not None:
            out, lse = out
            out.mul_(lse.sub_(sinks).sigmoid_().transpose(1, 2)[..., None])  # allocates nothing, so it cannot fail
        self.has_padding = self.has_padding or real is not None
        if record:
            self._before, self._since, self._waits = before, [*self._since, chunk], waits
        else:
            self.forget_past()
        if self._real is not None:
            self._real.append(key.new_ones(key.shape[:2], dtype=torch.bool) if real is None else real)
        if place is None:
            return out
        return torch.gather(out, 1, place[..., None, None].expand_as(out), out=result)  # which allocates nothing

    def stops(self) -> Tensor:
        """``store.stops()`` with positions among all tokens, padding included, which nobody sees."""
        self._settle()
        stops = self.store.stops()
        if not self.has_padding or not self._real:
            return stops
        self._real = [torch.cat(self._real, 1)]
        real, total = self._real[0], self._real[0].shape[1]
        number = (real.long().cumsum(1) - 1).clamp(min=0)[:, None].expand(-1, stops.shape[1], -1)  # of real tokens
        stop = stops.gather(2, number)
        column = real_first(real)[:, None].expand_as(number).gather(2, stop.clamp(max=total - 1).long())
        own = torch.arange(total, device=stop.device)
        return torch.where(real[:, None], torch.where(stop == NEVER, NEVER, column), own).int()

    def keeps_all(self, length: int) -> bool:
        """Whether it holds each of ``length`` tokens."""
        kept = self.store.delay if isinstance(self.store, GatedCache) else narrowest(self.store.window)
        return length <= kept and not self.has_padding

    @property
    def recorded(self) -> int:
        """How many of the last tokens were recorded."""
        return sum(chunk.key.shape[1] for chunk in self._since)

    @property
    def whole_store(self) -> Store:
        """The store with all tokens in it."""
        self._settle()
        return self.store

    def _settle(self, record: bool = True) -> None:
        """Append the chunk that waits, and keep a copy from before it, or with ``record=False`` give it up."""
        if self._waits:
            before = self.store.clone() if record else None
            self._commit(self.recorded)
            self._before, self._since, self._waits = before, self._since if record else [], False

    def _commit(self, n: int) -> None:
        """Append the first ``n`` tokens of the chunk that waits."""
        real = self._since[-1].real
        self.store.commit(n if real is None else real[:, :n].sum(1))

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return self.__dict__

    def forget_past(self) -> None:
        """Give up what was recorded."""
        self._settle(record=False)
        self._before, self._since = None, []

    def reset(self, slots: Tensor | None = None) -> None:
        """Remove all tokens, or those of some slots."""
        if slots is not None:
            self._settle(record=False)
        self.store.reset(slots)
        self._before, self._since, self._waits = None, [], False
        self.has_padding, self._real = False, None if self._real is None else []

    def reorder(self, rows: Tensor) -> None:
        """Replace row ``b`` by the former row ``rows[b]``."""
        self._settle()
        before, since = self._past_of(rows)
        self.store.reorder(rows)
        self._before, self._since, self._real = before, since, self._real_of(rows)

    def selected(self, rows: Tensor) -> CroppableCache:
        """A new one, of these rows."""
        found = CroppableCache.__new__(CroppableCache)
        found.has_padding, found.store, found._waits = self.has_padding, self.whole_store.select_batch(rows), False
        found._before, found._since = self._past_of(rows)
        found._real = self._real_of(rows)
        return found

    def _real_of(self, rows: Tensor) -> list[Tensor] | None:
        return None if self._real is None else [real[rows] for real in self._real]

    def _past_of(self, rows: Tensor) -> tuple[Store | None, list[_Chunk]]:
        """What is recorded of these rows."""
        before = None if self._before is None else self._before.select_batch(rows)
        return before, [_Chunk(*(None if x is None else x[rows] for x in chunk)) for chunk in self._since]

    def take_back(self, left: Store | None, removed: int, length: int) -> None:
        """Hold what ``left`` holds, of the first ``length`` tokens, the last ``removed`` gone."""
        if left is None:
            self._commit(self.recorded - removed)
            self._waits = False
        else:
            self.store._copy_from(left)  # in place: a CUDA graph's addresses stay valid
        if self._real:
            self._real = [torch.cat(self._real, 1)[:, :length]]

    def without(self, removed: int, length: int) -> Store | None:
        """A cache of the same rows without the last ``removed`` of ``length`` tokens, recorded or all kept; None where
        these wait."""
        if self._waits and removed <= self.recorded:
            return None
        self._settle()
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

    def _first(self, removed: int, length: int) -> Store:
        """The same of a cache that has kept every token."""
        found = self.store.clone()
        key, value, scores, where = self.store._slots()  # positions (B, Hkv, R): -1 where there is none
        order = torch.where(where < 0, torch.iinfo(where.dtype).max, where).argsort(-1)[..., :length]
        rows = order.transpose(1, 2)[..., None]  # (B, L, Hkv, 1)
        key, value = (x.transpose(1, 2).gather(1, rows.expand(-1, -1, -1, x.shape[-1])) for x in (key, value))
        scores, lengths = scores.gather(-1, order), (self.store.length - removed).clamp(min=0)
        found.reset()
        found.update(key, value, scores, lengths=lengths)
        return found
