"""The dynamic mask: which keys every query keeps (SPEC section 3).

Keys are ranked by ``(score, j)``, highest first: NaN ranks above everything, the newest of equal keys first. The w-th
best rank of a growing prefix never decreases, so a key that has dropped out of the kept set never returns: key ``j`` is
visible from its own position to ``stop_j``, the first position at which ``w`` better keys exist. A backend's
``prefix_stop`` computes ``stop_j``; the rest is done here, in a few elementwise operations over ``(B, Hkv, Lk)``,
unless the backend has a ``selected_run``, which does all of it.
"""
from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.masks.documents import check_documents, document_runs
from cupy_dma.masks.runs import EVER, NEVER, Hints, Runs, covers
from cupy_dma.masks.windows import Window, clipped, narrowest, widest


class Candidates(NamedTuple):
    """Which keys may be kept."""

    padding: Operand | None = None  # bool (1|B, Lk), True = a real key
    documents: Operand | None = None  # cumulative lengths or ids of those to select within
    apart: bool = False  # the attention itself separates the documents, so the mask need not


def check_candidates(padding: Any, documents: Any, like: Operand, batch: int, length: int) -> Candidates:
    """The checked ``padding`` and ``documents`` of ``top_w``, of ``like``'s library and device."""
    real = None if padding is None else describe(padding, "padding")
    packed = None if documents is None else checks.integers(documents, "documents", like)
    checks.require_same_device((like, real))
    if real is not None:
        real = checks.real_keys(real)
        checks.has_shape(real, "(1|B, Lk)", ((1, batch), (length,)))
        checks.rows_contiguous(real)
        real = checks.with_axes(real, 2)
    if packed is None:
        return Candidates(real, None)
    if packed.ndim == 2:
        checks.has_shape(packed, "(1|B, Lk)", ((1, batch), (length,)))
    check_documents(packed, length)
    return Candidates(real, packed)


def select(scores: Operand, window: Window, keys: str, candidates: Candidates, module: ModuleType) -> Runs:
    """The mask of the ``window`` best keys, from checked arguments, on the backend ``module``."""
    library, device, n = scores.library, scores.device, scores.shape[2]
    real, documents, apart = candidates
    if checks.wants_values_checked() and not bool(library.xp.isfinite(scores.array).all()):
        raise ValueError("scores must be finite (CUPY_DMA_CHECK=1), got NaN or infinity")
    if scores.dtype in ("float16", "bfloat16"):
        scores = checks.with_axes(library.operand(library.astype(scores.array, "float32"), "scores"), 3)

    everything = narrowest(window) >= n and real is None and (documents is None or apart)
    w = clipped(window, max(n, 1))
    hints = selection_hints(window, n, keys, real is not None, documents is not None and not apart)
    whole = everything and keys == "prefix"
    selected_run = getattr(module, "selected_run", None)
    if selected_run is not None and not whole and 0 not in scores.shape:
        start, stop = selected_run(scores, None if everything else w, keys, real, documents, apart)
        return Runs(start, stop, hints)
    runs = None if documents is None or whole else document_runs(documents, n)
    if everything:
        stop = library.full(scores.shape, NEVER, "int32", device)
    else:
        document = None if runs is None else checks.with_axes(library.operand(runs.first, "documents"), 2)
        stop = module.prefix_stop(scores, w, real, document)
    with library.on(device):
        if keys == "prefix":
            if runs is not None and not apart:
                stop = library.xp.minimum(stop, runs.open_end()[:, None])
            return Runs(library.arange(0, n, device), stop, hints)
        start, end = (library.full((1, 1, n), bound, "int32", device) for bound in (EVER, NEVER))
        last: Any = n
        if runs is not None:
            last = runs.end[:, None]
            if not apart:
                start, end = runs.open_first()[:, None], runs.open_end()[:, None]
        kept = stop >= last
        if runs is not None and real is not None:  # past the last document nothing is kept
            kept = kept & real.array[:, None]
        return Runs(start, library.xp.where(kept, end, start), hints)


def selection_hints(window: Window, length: int, keys: str, has_padding: bool, has_documents: bool) -> Hints:
    """What is known about a selection's mask from its arguments alone."""
    w = widest(window)
    w = max(length, 1) if covers(w, max(length, 1)) else w
    if keys == "prefix":
        return Hints("key", (w, 1), not has_padding and not has_documents and covers(narrowest(window), length))
    # T positions that span several documents see w keys of the first, w of the last and all of those in between, which
    # have at most T - 2 keys.
    return Hints(None, (2 * w, 1)) if has_documents else Hints("open", (w, 0))
