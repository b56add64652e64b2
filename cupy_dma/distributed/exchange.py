"""The exchange of one call: survivors forward by an all-gather, their gradients back by an all-to-all.

    forward    own key, value, scores (n)       -> history of key, value, scores (R + n), rank 0: (n)
    backward   gradients of the history         -> own gradients + those that later ranks send, in the order of ranks

Collectives are started on the current stream, which waits for them: with NCCL the host never waits. A gradient is the
rank's own, in its type, plus the sum over later ranks in float32 (float64 for float64), rounded once.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cupy_dma.cache.distances import spread_rows
from cupy_dma.distributed.agreement import Agreement, all_gather
from cupy_dma.distributed.rows import Row, picked, with_rows_ahead
from cupy_dma.distributed.survivors import (
    HEADER,
    Front,
    Keep,
    Own,
    Survivors,
    first_mask,
    front,
    history_mask,
    spread,
    survivors,
)
from cupy_dma.masks.interval import IntervalMask


class Received(NamedTuple):
    """Rows and headers of all ranks, in rank order."""

    rows: Tensor  # int64 (W, B, Hkv, R, words)
    headers: Tensor  # int64 (W, B, HEADER)

    def front(self, own: Own, keep: Keep, row: Row, ranks: int) -> tuple[Front, Tensor]:
        """What this rank sees of the first ``ranks`` shards, at least 1, and its rows ``(B, Hkv, R, words)``."""
        rows, headers = self.rows[:ranks], self.headers[:ranks]
        first = None
        if own.documents is not None:
            ids = own.documents[:, 0] if own.scores.shape[2] else own.scores.new_zeros(1)
            first = ids.long().expand(own.scores.shape[0])
        found = front(row.scores(rows), row.ordinals(rows), headers, first, keep)
        flat = rows.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B, Hkv, M, words)
        return found, flat.gather(2, found.index[..., None].expand(*found.index.shape, flat.shape[3]))


    def ages(self, found: Front, there: Tensor, row: Row, ranks: int) -> Tensor:
        """int64 ``(B, Hkv, R)``: how far the token after the first ``ranks`` shards is ahead of the ``found`` rows."""
        tokens = self.headers[:ranks, :, -1]  # (r, B)
        later = (tokens.sum(0) - tokens.cumsum(0)).T[:, None].expand(-1, found.index.shape[1], -1)
        return row.ages(there) + later.gather(2, found.index // self.rows.shape[3])


class Exchange:
    """One call on one rank: what was sent and received, for the backward pass and the mask."""

    def __init__(self, own: Own, keep: Keep, row: Row, group: Any, agreement: Agreement, room: bool = False,
                 delay: int = 0):
        self.own, self.keep, self.row, self.group, self.agreement = own, keep, row, group, agreement
        self.room = room  # whether key and value have memory to write to ahead of them
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        # The number of rows ahead of the shard's own, and the bias delay to attend with.
        self.ahead, self.delay = (0, delay) if self.rank == 0 else spread_rows(keep.rows, own.scores.shape[2], delay)
        self._delay = delay
        self.mask: IntervalMask | None = None
        self._sent: Survivors | None = None
        self._front: Front | None = None

    # ---- forward ----------------------------------------------------------------------------------------------------

    def send(self, key: Tensor, value: Tensor, wanted: bool = True) -> tuple[Any, Received]:
        """Start the all-gather. Returns the work to wait for and where its results will be. ``wanted``: whether any
        rank reads the rows of this one."""
        batch, heads, _ = self.own.scores.shape
        shape = batch, heads, self.keep.rows, self.row.words(True)
        size = shape[0] * shape[1] * shape[2] * shape[3]
        mine = torch.zeros(size + batch * HEADER, dtype=torch.int64, device=key.device)
        if wanted:
            self._pack(key, value, mine[:size].view(shape), mine[size:].view(batch, HEADER))
        every = mine.new_empty(self.world * mine.numel())
        work = self.agreement.started(all_gather, every, mine, group=self.group)
        every = every.view(self.world, -1)
        return work, Received(every[:, :size].unflatten(1, shape), every[:, size:].unflatten(1, (batch, HEADER)))

    def _pack(self, key: Tensor, value: Tensor, rows: Tensor, header: Tensor) -> None:
        """Find the survivors and put them into ``rows (B, Hkv, R, words)``."""
        self._sent = survivors(self.own, self.keep)
        for field, x in zip(self.row.pair(rows), (key, value)):
            field.copy_(picked(x, self._sent.index))
        if key.shape[1]:
            self.row.scores(rows).copy_(self.own.scores.gather(2, self._sent.index))
        self.row.ordinals(rows).copy_(self._sent.ordinal)
        if self.row.has_ages:
            self.row.ages(rows).copy_(key.shape[1] - self._sent.index)
        header.copy_(self._sent.header)

    def join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key, value and scores of the history; sets ``mask``."""
        scores, rows = self.own.scores, self.ahead
        work, received = (None, None) if self.world == 1 else self.send(key, value, self.rank < self.world - 1)
        if self.rank == 0:
            self.mask = first_mask(self.own, self.keep)
            if work is not None:
                self.agreement.wait(work)
            return key.detach(), value.detach(), scores.detach()
        if self.room:
            joined = [with_rows_ahead(x, rows) for x in (key, value)]
        else:
            batch, n, heads, size = key.shape
            joined = [x.new_empty((batch, rows + n, heads, size)) for x in (key, value)]
            for target, x in zip(joined, (key, value)):  # while the exchange runs
                target[:, rows:] = x
        assert received is not None
        self.agreement.wait(work)
        found, there = received.front(self.own, self.keep, self.row, self.rank)
        ahead = self.row.scores(there).masked_fill(~found.filled, -torch.inf)
        self.mask = history_mask(self.own, self.keep, found, ahead)
        if self._delay:
            age = received.ages(found, there, self.row, self.rank)
            found, there, self.mask = spread(found, there, self.mask, age, key.shape[1], self._delay)
            ahead = self.row.scores(there).masked_fill(~found.filled, -torch.inf)
        for target, field in zip(joined, self.row.pair(there)):
            target[:, :rows] = field.transpose(1, 2)
        self._front = found
        return joined[0], joined[1], torch.cat((ahead, scores), 2)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def send_back(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """The gradients of the rank's own key, value and scores, from those of its history, which are overwritten."""
        if self.world == 1:
            return list(gradients)
        blocks = self._returned(gradients)
        found, rows = [], self.ahead
        for x, axis in zip(gradients, (1, 1, 2)):
            found.append(None if x is None else x.narrow(axis, rows, x.shape[axis] - rows))
        if self.rank < self.world - 1 and self.own.scores.shape[2]:
            for x, parts in zip(found, (*zip(*map(self.row.pair, blocks)), [self.row.scores(b) for b in blocks])):
                if x is not None:
                    self._add(x, parts)
        return found

    def _returned(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """All-to-all: rows to every earlier rank, from every later one, each ``(B, Hkv, R, words)``."""
        batch, heads, _ = self.own.scores.shape
        block = batch, heads, self.keep.rows, self.row.words(False)
        size = block[0] * block[1] * block[2] * block[3]
        earlier, later = self.rank, self.world - 1 - self.rank
        like = self.own.scores
        sent = torch.zeros(0, dtype=torch.int64, device=like.device)
        if earlier:
            sent = self._addressed(gradients, block)
        taken = sent.new_empty(later * size)
        work = self.agreement.started(
            dist.all_to_all_single, taken, sent.view(-1), [0] * (earlier + 1) + [size] * later,
            [size] * earlier + [0] * (later + 1), group=self.group)
        self.agreement.wait(work)
        return taken.view(later, *block).unbind(0) if later else ()

    def _addressed(self, gradients: tuple[Tensor | None, ...], block: tuple[int, ...]) -> Tensor:
        """``(r, B, Hkv, R, words)``: the gradients of the front, each in the slot its row came from; 0 elsewhere."""
        found, (batch, heads, rows, words), ahead = self._front, block, self.ahead
        assert found is not None
        packed = torch.zeros((batch, heads, ahead, words), dtype=torch.int64, device=found.index.device)
        for field, x in zip(self.row.pair(packed), gradients[:2]):
            if x is not None:
                field.copy_(x[:, :ahead].transpose(1, 2))
        if gradients[2] is not None:
            self.row.scores(packed).copy_(gradients[2][..., :ahead])
        slots = self.rank * rows  # one more, for empty slots
        sent = packed.new_zeros((batch, heads, slots + 1, words))
        place = torch.where(found.filled, found.index, slots)
        sent.scatter_(2, place[..., None].expand(*place.shape, words), packed)
        return sent[:, :, :slots].unflatten(2, (self.rank, rows)).permute(2, 0, 1, 3, 4).contiguous()

    def _add(self, own: Tensor, parts: Any) -> None:
        """Add the later ranks' ``parts (B, Hkv, R, D)`` or ``(B, Hkv, R)`` to ``own (B, n, Hkv, D)`` or ``(B, Hkv,
        n)``, in place."""
        assert self._sent is not None
        wide = torch.float64 if own.dtype == torch.float64 else torch.float32
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part
        index, empty = self._sent.index, self._sent.ordinal == 0
        if own.ndim == 4:
            own, index, empty = own.transpose(1, 2), index[..., None].expand_as(total), empty[..., None]
        # Empty slots repeat the last one, in index and value, so that only one value is written to each row.
        total = torch.where(empty, total[:, :, -1:], total)
        own.scatter_(2, index, (own.gather(2, index).to(wide) + total).to(own.dtype))


class _Joined(torch.autograd.Function):
    """``Exchange.join``, differentiable. Its outputs go to one attention call only, so it may overwrite their
    gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        outputs = exchange.join(key, value)
        ctx.mark_non_differentiable(*[x for x, needed in zip(outputs, ctx.needs_input_grad[1:]) if not needed])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.exchange.send_back(gradients)


def joined(exchange: Exchange, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key, value and scores of the rank's history, with gradients; ``exchange.mask`` is its mask."""
    return _Joined.apply(exchange, key, value, scores)
