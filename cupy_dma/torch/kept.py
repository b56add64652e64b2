"""Which keys a layer keeps: the best ``window``, the first ``sinks`` and the last ``recent`` of every sequence.

    top_w(scores, window) | sinks(n, sinks) | sliding_window(n, recent)

as a ``DynamicCache`` keeps them. Padding is neither a sink nor recent and is not counted, so a padded row keeps the
same keys as the row without padding. Every document has its own sinks and recent keys.
"""
from __future__ import annotations

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
    count, start = torch.broadcast_tensors(real.long().cumsum(1), start)  # real keys up to each, in all documents
    rank = count - (count - real.long()).gather(1, start)  # 1 for the first of its document
    if padding is None:
        later = position + recent
    else:
        in_order = padding.logical_not().long().argsort(dim=1, stable=True).expand_as(count)  # the real keys first
        following = count - 1 + recent
        there = following.clamp(0, max(position.shape[0] - 1, 0))
        later = torch.where(following < count[:, -1:], in_order.gather(1, there), NEVER)
    stop = torch.where(rank <= sinks, NEVER, later.clamp(max=NEVER))
    return torch.where(real, stop, position).int()
