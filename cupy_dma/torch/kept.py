"""Which keys a layer keeps: the best ``window``, the first ``sinks`` and the last ``recent`` of every sequence.

    top_w(scores, window) | sinks(n, sinks) | sliding_window(n, recent)

as a ``DynamicCache`` keeps them. Padding is neither a sink nor recent and is not counted, so a padded row keeps the
same keys as the row without padding. Every document has its own sinks and recent keys.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupy_dma.arrays import describe, library_named
from cupy_dma.masks.documents import document_runs
from cupy_dma.masks.interval import NEVER, IntervalMask
from cupy_dma.masks.selection import selection_hints
from cupy_dma.masks.windows import Window, narrowest, widest
from cupy_dma.torch.registration import as_tensor


def kept_keys(scores: Tensor, window: Window, sinks: int, recent: int, padding: Tensor | None,
              documents: Tensor | None, backend: str | None) -> IntervalMask:
    """The mask of these keys for ``scores (B, Hkv, Lk)``; ``padding`` and ``documents`` as for ``top_w``."""
    n = scores.shape[2]
    best = IntervalMask.top_w(scores.detach(), window, padding=padding, documents=documents, backend=backend)
    padding, documents = None if padding is None else padding != 0, as_tensor(documents, scores)
    position = torch.arange(n, device=scores.device)
    runs = None if documents is None else document_runs(describe(documents, "documents"), n)
    besides = _stop_besides(position, sinks, recent, padding, None if runs is None else runs.first.long())
    stop = torch.maximum(best._stop.array, besides[:, None])
    if runs is not None:
        stop = torch.minimum(stop, runs.open_end()[:, None])
    # Every run starts at its key: T positions see what the first of them sees and at most T - 1 keys that begin later.
    bound = selection_hints(widest(window) + sinks + recent, n, "prefix", True, True).bound
    known = selection_hints(max(narrowest(window), sinks, recent), n, "prefix", padding is not None,
                            runs is not None)
    return IntervalMask._make(library_named("torch"), position.int(), stop, known._replace(bound=bound))


def _stop_besides(position: Tensor, sinks: int, recent: int, padding: Tensor | None, first: Tensor | None) -> Tensor:
    """int32 ``(1|B, Lk)``: where each key stops being a sink or recent, ignoring the end of its document; its own
    position if it is padding. ``first (1|B, Lk)``: the first key of each key's document."""
    real = torch.ones_like(position, dtype=torch.bool)[None] if padding is None else padding
    start = torch.zeros_like(position)[None] if first is None else first
    count, rank = counted(real, start)
    if padding is None:
        later = position + recent
    else:
        in_order = padding.logical_not().long().argsort(dim=1, stable=True).expand_as(count)  # the real keys first
        following = count - 1 + recent
        there = following.clamp(0, max(position.shape[0] - 1, 0))
        later = torch.where(following < count[:, -1:], in_order.gather(1, there), NEVER)
    stop = torch.where(rank <= sinks, NEVER, later.clamp(max=NEVER))
    return torch.where(real, stop, position).int()


def counted(real: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """For keys of which some are ``real (1|B, Lk)`` and whose documents begin at ``start (1|B, Lk)``: how many real
    ones there are up to each, in all documents and in its own (1 for the first)."""
    count, start = torch.broadcast_tensors(real.long().cumsum(1), start)
    return count, count - (count - real.long()).gather(1, start)


def places_of(batch: int, length: int, padding: Tensor | None, documents: Any, like: Tensor) -> Tensor:
    """The positions of keys in their documents, ``(Lk,)`` or ``(1|B, Lk)``. ``padding`` and ``documents`` as for
    ``top_w``, which rejects those of the wrong shape; they have no influence here."""
    position, allowed = torch.arange(length, device=like.device), ((1, length), (batch, length))
    documents = as_tensor(documents, like)
    if padding is not None and tuple(padding.shape) not in allowed:
        padding = None
    if documents is not None and documents.ndim != 1 and tuple(documents.shape) not in allowed:
        documents = None
    if padding is None and documents is None:
        return position
    real = torch.ones_like(position, dtype=torch.bool)[None] if padding is None else padding != 0
    start = torch.zeros_like(position)[None] if documents is None else \
        document_runs(describe(documents, "documents"), length).first.long()
    return (counted(real, start)[1] - 1).clamp(min=0)
