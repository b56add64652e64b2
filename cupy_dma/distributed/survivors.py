"""Which keys of earlier shards a rank needs, and the mask of its history: all that needs no communication.

    survivors(own scores)          -> the R rows that later shards may see, and a header
    front(rows, headers of q < r)  -> the R rows that this shard sees, oldest first, after the empty slots
    history_mask(...)              -> the interval mask of [front | own keys]; query i stands at i + R

``R = window + sinks + recent``. A shard's *open* document is its last one, the only one that may continue in the next
shard; without documents the whole sequence is one. The *ordinal* of a token is its number among the real tokens (not
padding) of its document, from 1. Nothing here reads a value on the host, and all shapes follow from the arguments.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma import backends
from cupy_dma.arrays import describe, library_named
from cupy_dma.cache.distances import places, spread_rows
from cupy_dma.masks.documents import document_runs
from cupy_dma.masks.interval import NEVER, Hints, IntervalMask
from cupy_dma.masks.windows import Window, narrowest, widest
from cupy_dma.torch.kept import kept_keys

HEADER = 5  # int64 per batch entry: real tokens of the open document, first id, last id, several documents?, tokens


class Keep(NamedTuple):
    """How many keys a query keeps: the best, the first and the last of its document."""

    window: Window
    sinks: int = 0
    recent: int = 0

    @property
    def rows(self) -> int:
        """``R``, of the widest window."""
        return widest(self.window) + self.sinks + self.recent


class Own(NamedTuple):
    """A shard's scores ``(B, Hkv, n)``, without gradient, its real tokens and its documents."""

    scores: Tensor
    padding: Tensor | None  # bool (1|B, n), True = a real token
    documents: Tensor | None  # ids (1|B, n)
    backend: str | None


class Survivors(NamedTuple):
    """What a shard sends. Empty slots come first and repeat the index of the last slot."""

    index: Tensor  # int64 (B, Hkv, R)
    ordinal: Tensor  # int32 (B, Hkv, R), in the shard's part of the open document; 0 = empty
    header: Tensor  # int64 (B, HEADER)


class Front(NamedTuple):
    """What a shard sees of earlier ones: ``R`` of the ``M`` received rows of each (batch, kv head), in their order."""

    index: Tensor  # int64 (B, Hkv, R) into the rows; anything where empty
    filled: Tensor  # bool (B, Hkv, R)
    in_top: Tensor  # bool (B, Hkv, R): among the best ``window``
    ordinal: Tensor  # int64 (B, Hkv, R), in the whole document
    total: Tensor  # int64 (B,): the document's real tokens before this shard


# ---- a shard's survivors --------------------------------------------------------------------------------------------


class Open(NamedTuple):
    """The open document of a shard."""

    tokens: Tensor  # bool (1|B, n): its real tokens
    ordinal: Tensor  # int64 (1|B, n): how many of them there are up to each token
    header: Tensor  # int64 (B, HEADER)


def open_document(batch: int, n: int, padding: Tensor | None, documents: Tensor | None, device: Any) -> Open:
    """The open document of a shard of ``n`` tokens."""
    tokens = torch.ones((1, n), dtype=torch.bool, device=device) if padding is None else padding
    first = last = several = torch.zeros((1,), dtype=torch.int64, device=device)
    if documents is not None and n:
        run = _begins(documents).long().cumsum(1)
        tokens, several = tokens & (run == run[:, -1:]), (run[:, -1] > 0).long()
        first, last = documents[:, 0].long(), documents[:, -1].long()
    ordinal = tokens.long().cumsum(1)
    count = ordinal[:, -1] if n else first
    columns = (count, first, last, several, torch.full_like(count, n))
    return Open(tokens, ordinal, torch.stack([column.expand(batch) for column in columns], 1))


def survivors(own: Own, keep: Keep) -> Survivors:
    """The keys of a shard that the next position would see if it belonged to the same document."""
    batch, heads, n = own.scores.shape
    tokens, ordinal, header = open_document(batch, n, own.padding, own.documents, own.scores.device)
    if (best := _best_of_all(own, keep)) is not None:
        return Survivors(best, best.int() + 1, header)
    if not n:
        empty = torch.zeros((batch, heads, keep.rows), dtype=torch.int64, device=own.scores.device)
        return Survivors(empty, empty.int(), header)
    kept = _best(own.scores, tokens[:, None].expand(batch, heads, n), keep.window)
    if keep.sinks or keep.recent:
        kept = kept | (tokens & ((ordinal <= keep.sinks) | (ordinal[:, -1:] - ordinal < keep.recent)))[:, None]
    index, filled = last_flagged(kept, keep.rows)
    sent = ordinal.int()[:, None].expand(batch, heads, n).gather(2, index)
    return Survivors(torch.where(filled, index, index[..., -1:]), torch.where(filled, sent, 0), header)


def _best_of_all(own: Own, keep: Keep) -> Tensor | None:
    """Their indices from the backend, if all tokens are candidates and no others are kept; else None."""
    window, plain = keep.window, own.padding is None and own.documents is None
    if isinstance(window, tuple) or not plain or not keep.rows == window < own.scores.shape[2]:
        return None
    if own.scores.dtype != torch.float32 or not own.scores.numel():
        return None
    scores = describe(own.scores, "scores")
    last_keys = getattr(backends.choose(own.backend, (scores,)), "last_keys", None)
    return None if last_keys is None else last_keys(scores, window).long().sort(2).values


def _begins(ids: Tensor) -> Tensor:
    """bool ``(1|B, n)``: where the id differs from that of the token before."""
    return torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0))


def last_flagged(flags: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the set ``flags (B, H, n)``, at most ``count`` of them, the last ones, in order at the end of
    ``(B, H, count)``, and which slots are filled. Unfilled slots hold any index."""
    through = flags.cumsum(2)  # number of set flags up to each
    number = torch.arange(1, count + 1, device=flags.device) + (through[..., -1:] - count)  # 1 for the first flag
    index = torch.searchsorted(through, number.clamp(min=1)).clamp(max=flags.shape[2] - 1)
    return index, number > 0


# ---- what is left of all earlier shards -----------------------------------------------------------------------------


def open_tokens(headers: Tensor, first_id: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which shards contain part of the next token's document, bool ``(r, B)``, and how many real tokens of it, int64
    ``(r, B)``. ``headers (r, B, HEADER)``; ``first_id (B,)``: that document, None without documents."""
    count = headers[..., 0]
    if first_id is None:
        return torch.ones_like(count, dtype=torch.bool), count
    reaches, following, alive = torch.ones_like(first_id, dtype=torch.bool), first_id, []
    for header in headers.flip(0):
        _, first, last, several, tokens = header.unbind(-1)
        some = tokens > 0
        here = reaches & some & (last == following)
        alive.append(here)
        reaches = torch.where(some, here & (several == 0), reaches)
        following = torch.where(some, first, following)
    found = torch.stack(alive[::-1])
    return found, torch.where(found, count, 0)


def front(scores: Tensor, ordinal: Tensor, headers: Tensor, first_id: Tensor | None, keep: Keep) -> Front:
    """The rows of ``r >= 1`` earlier shards that a shard sees.

    ``scores`` and ``ordinal (r, B, Hkv, R)`` as the ranks sent them; ``headers`` and ``first_id`` as for
    ``open_tokens``.
    """
    ranks, batch, heads, rows = scores.shape
    alive, count = open_tokens(headers, first_id)
    through = count.cumsum(0)
    before, total = through - count, through[-1]

    def joined(x: Tensor) -> Tensor:  # (r, B, Hkv, R) -> (B, Hkv, r * R)
        return x.permute(1, 2, 0, 3).reshape(batch, heads, ranks * rows)

    valid = joined((ordinal > 0) & alive[..., None, None])
    placed = joined(ordinal + before[..., None, None])
    top = _best(joined(scores), valid, keep.window)
    kept = top
    if keep.sinks or keep.recent:
        kept = top | (valid & ((placed <= keep.sinks) | (total[:, None, None] - placed < keep.recent)))
    index, filled = last_flagged(kept, rows)
    return Front(index, filled, top.gather(2, index) & filled, placed.gather(2, index), total)


def _best(scores: Tensor, valid: Tensor, window: Window) -> Tensor:
    """Which of ``scores (B, Hkv, M)``, in order of position, are among the best ``window`` valid ones: bool."""
    n = scores.shape[2]
    if n <= narrowest(window):
        return valid
    if isinstance(window, tuple):
        return torch.cat([_best(scores[:, head:head + 1], valid[:, head:head + 1], size)
                          for head, size in enumerate(window)], 1)
    best = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    ranked = torch.where(valid, _ordered(scores), torch.iinfo(torch.int64).min)
    if scores.dtype == torch.float64:  # 64 bits leave no room for the position: use a stable sort
        index = torch.sort(ranked, dim=2, stable=True).indices[..., -window:]
    else:
        index = torch.topk(ranked, window, dim=2, sorted=False).indices
    return best.scatter_(2, index, True) & valid


def _ordered(scores: Tensor) -> Tensor:
    """int64 keys that sort like ``(score, position)``, for float64 like the score: -0 equals +0, all NaN are equal and
    highest. The lowest int64 is never used."""
    limits = torch.iinfo(torch.int64 if scores.dtype == torch.float64 else torch.int32)
    bits = (scores + 0.0).view(torch.int64 if limits.bits == 64 else torch.int32)
    key = torch.where(scores.isnan(), limits.max, torch.where(bits < 0, bits ^ limits.max, bits))
    if limits.bits == 64:
        return key
    return (key.long() << 32) | torch.arange(scores.shape[2], device=scores.device)


# ---- the mask of the history ----------------------------------------------------------------------------------------


def history_mask(own: Own, keep: Keep, found: Front, front_scores: Tensor) -> IntervalMask:
    """The mask of ``[front | own keys]``: ``(B, Hkv, R + n)``. ``front_scores (B, Hkv, R)``: -inf in empty slots."""
    rows, n = keep.rows, own.scores.shape[2]
    scores = torch.cat((front_scores, own.scores), 2)
    padding = None if own.padding is None else torch.nn.functional.pad(own.padding, (rows, 0), value=True)
    documents = None
    if own.documents is not None and n:
        documents = torch.cat((own.documents[:, :1].expand(-1, rows), own.documents), 1)
    best = IntervalMask.top_w(scores, keep.window, padding=padding, documents=documents, backend=own.backend)
    stop = best._stop.array.expand(scores.shape)
    if keep.sinks or keep.recent:
        stop = torch.maximum(stop, _stop_besides(own, keep, found))
        if documents is not None:
            stop = torch.minimum(stop, document_runs(describe(documents, "documents"), n + rows).open_end()[:, None])
    stop = torch.where(torch.nn.functional.pad(found.filled, (0, n), value=True), stop, 0)
    position = torch.arange(rows + n, dtype=torch.int32, device=scores.device)
    # Every run starts at its key: T positions see what the first of them sees and at most T - 1 keys that begin later.
    return IntervalMask._make(library_named("torch"), position, stop, Hints("key", (min(rows, rows + n), 1)))


def spread(found: Front, sent: Tensor, mask: IntervalMask, age: Tensor, n: int,
           delay: int) -> tuple[Front, Tensor, IntervalMask]:
    """``found``, its rows ``sent (B, Hkv, R, words)`` and the mask of the history, spread so that the rows are as far
    apart as their positions (``cache/distances.py``). ``age (B, Hkv, R)``: distance to the shard's first token."""
    rows = found.index.shape[2]
    total, _ = spread_rows(rows, n, delay)
    slot = torch.arange(rows, device=age.device)
    place = torch.where(found.filled, places(torch, age, slot, rows, n, delay), slot)

    def wide(x: Tensor) -> Tensor:
        index = place if x.ndim == 3 else place[..., None].expand_as(x)
        return x.new_zeros((*x.shape[:2], total, *x.shape[3:])).scatter_(2, index, x)

    stop = (mask._stop.array.expand(*found.index.shape[:2], rows + n).long() + (total - rows)).clamp(max=NEVER)
    stop = torch.cat((wide(torch.where(found.filled, stop[..., :rows], 0)), stop[..., rows:]), 2).int()
    position = torch.arange(total + n, dtype=torch.int32, device=age.device)
    index, filled, in_top, ordinal = (wide(x) for x in found[:4])
    return (Front(index, filled, in_top, ordinal, found.total), wide(sent),
            IntervalMask._make(library_named("torch"), position, stop, mask._hints))


def first_mask(own: Own, keep: Keep) -> IntervalMask:
    """The mask of the first shard: ``(B, Hkv, n)``."""
    if keep.sinks or keep.recent:
        return kept_keys(own.scores, *keep, own.padding, own.documents, own.backend)
    return IntervalMask.top_w(own.scores, keep.window, padding=own.padding, documents=own.documents,
                              backend=own.backend)


def _stop_besides(own: Own, keep: Keep, found: Front) -> Tensor:
    """int32 ``(B, Hkv, R + n)``: where each key of the history stops being a sink or recent, ignoring the end of its
    document; at or before itself if it is neither."""
    batch, heads, n = own.scores.shape
    rows, device = keep.rows, own.scores.device
    real = torch.ones((1, n), dtype=torch.bool, device=device) if own.padding is None else own.padding
    real = real.expand(batch, n)
    count = real.long().cumsum(1)  # real tokens of the shard up to each, (B, n)
    at = torch.arange(rows, rows + n, device=device).expand(batch, n)
    rank = ordinals(real, own.documents, found.total)

    def leaves(target: Tensor) -> Tensor:
        """History index of the first own token with ``target (B, m)`` real ones up to it."""
        there = torch.searchsorted(count, target.contiguous())
        return torch.where(there < n, there + rows, NEVER)

    mine = torch.where(rank <= keep.sinks, NEVER, leaves(count + keep.recent))
    mine = torch.where(real, mine, at)
    age = found.total[:, None, None] - found.ordinal  # real tokens between the key and the shard
    theirs = leaves((keep.recent - age).flatten(1)).view_as(age)
    theirs = torch.where(age < keep.recent, theirs, 0)
    theirs = torch.where(found.ordinal <= keep.sinks, NEVER, theirs)
    return torch.cat((theirs, mine[:, None].expand(batch, heads, n)), 2).int()


def ordinals(real: Tensor, documents: Tensor | None, before: Tensor) -> Tensor:
    """int64 ``(B, n)``: the real tokens of each token's document up to it, in this shard and in earlier ones.
    ``real (B, n)``; ``before (B,)``: those of the shard's first document in earlier shards."""
    count = real.long().cumsum(1)
    if documents is None or not real.shape[1]:
        return count + before[:, None]
    begins = _begins(documents).expand(real.shape)
    until = torch.where(begins, count - real.long(), 0).cummax(1).values  # real tokens ahead of the document
    return torch.where(begins.long().cumsum(1) > 0, count - until, count + before[:, None])
