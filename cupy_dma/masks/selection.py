"""The dynamic mask: which keys every query keeps (SPEC section 3).

Keys are ranked by ``(score, j)``, highest first; NaN above everything, the newest key of equals first. The w-th best of
a growing prefix only rises, so a key that has fallen out of the kept set never returns: key ``j`` is visible from its
own position to ``stop_j``, the first position at which ``w`` better keys exist. A backend's ``prefix_stop`` finds
``stop_j``; all else follows from it here, in a few elementwise operations over ``(B, Hkv, Lk)``.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from cupy_dma import backends, checks
from cupy_dma.arrays import Library, Operand, describe, is_traced
from cupy_dma.masks.documents import DocumentRuns, document_runs
from cupy_dma.masks.interval import EVER, NEVER, Hints, IntervalMask


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Which keys may be kept: ``padding`` bool ``(1|B, Lk)``, True = real, and the documents to select within."""

    padding: Operand | None
    runs: DocumentRuns | None


def check_candidates(padding: Any, documents: Any, like: Operand, batch: int, length: int) -> Candidates:
    """The checked ``padding`` and ``documents`` of ``top_w``, of ``like``'s library and device."""
    real = None if padding is None else describe(padding, "padding")
    packed = None if documents is None else describe(documents, "documents")
    checks.require_same_device((like, real, packed))
    if real is not None:
        checks.one_of_types(real, ("bool",))
        checks.has_shape(real, "(1|B, Lk)", ((1, batch), (length,)))
        checks.rows_contiguous(real)
        real = checks.with_axes(real, 2)
    if packed is None:
        return Candidates(real, None)
    if packed.ndim == 2:
        checks.has_shape(packed, "(1|B, Lk)", ((1, batch), (length,)))
    return Candidates(real, document_runs(packed, length))


def top_w(scores: Any, window: int, keys: str, padding: Any, documents: Any, backend: str | None) -> IntervalMask:
    """The mask of the ``window`` highest-ranked keys.

    Parameters
    ----------
    scores : float array ``(B, Hkv, Lk)``
        Any float type; 16-bit scores are widened, float64 is exact on the numpy backend and refused on CUDA.
    window : int
        Keys kept per query, at least 1.
    keys
        ``"prefix"``: query ``i`` keeps the best of its candidates ``j <= p_i``; causal by construction.
        ``"global"``: one set, the best of all candidates, shared by every query (add ``causal=True`` in the attention
        to cut it, so that an early query may keep nothing).
    padding : bool array ``(1|B, Lk)``, optional
        True = a real key. A hidden key is no candidate and takes no place.
    documents : int32 or int64 array, optional
        As for ``IntervalMask.documents``: every document selects among its own keys.
    backend
        See ``cupy_dma.get_available_backends``. ``"numpy"`` with CUDA arrays copies to the host and back.

    Returns
    -------
    IntervalMask of shape ``(B, Hkv, Lk)``. It carries no gradient; the scores get theirs as a bias.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, shape or value, or (``CUPY_DMA_CHECK=1``) a score is not finite.

    Notes
    -----
    The best keys *of a sliding window* are no interval mask: a key that was pushed out comes back when a better one
    expires. To keep recent keys besides the best ones take the union, ``top_w(...) | sliding_window(...)``.
    """
    if is_traced(scores):
        from cupy_dma.torch.functions import traced_top_w

        return traced_top_w(scores, window, keys, padding, documents, backend)
    ranked = describe(scores, "scores")
    window = checks.whole(window, "window", 1)
    checks.choice(keys, "keys", ("prefix", "global"))
    checks.one_of_types(ranked)
    if ranked.ndim != 3:
        raise ValueError(f"scores must have shape (B, Hkv, Lk), got {ranked.shape}")
    checks.rows_contiguous(ranked)
    module = backends.choose(backend, (ranked,))
    if ranked.dtype == "float64" and ranked.device.kind == "cuda" and backend != "numpy":
        raise TypeError("scores must be float16, bfloat16 or float32 on CUDA, got float64 (backend='numpy' takes it)")
    candidates = check_candidates(padding, documents, ranked, ranked.shape[0], ranked.shape[2])
    return select(ranked, window, keys, candidates, module)


def select(scores: Operand, window: int, keys: str, candidates: Candidates, module: ModuleType) -> IntervalMask:
    """``top_w`` of arguments that have been checked, on the backend ``module``."""
    library, device, n = scores.library, scores.device, scores.shape[2]
    real, runs = candidates.padding, candidates.runs
    if checks.wants_values_checked() and not bool(library.xp.isfinite(scores.array).all()):
        raise ValueError("scores must be finite (CUPY_DMA_CHECK=1), got NaN or infinity")
    if scores.dtype in ("float16", "bfloat16"):
        scores = _of(library, library.astype(scores.array, "float32"), "scores")

    everything = window >= n and real is None and runs is None
    w = min(window, max(n, 1))
    hints = selection_hints(window, n, keys, real is not None, runs is not None)
    prefix_run = getattr(module, "prefix_run", None)
    if keys == "prefix" and runs is None and not everything and prefix_run is not None:
        start, stop = prefix_run(scores, w, real)
        return IntervalMask._make(library, start, stop, hints)
    if everything:
        stop = library.full(scores.shape, NEVER, "int32", device)
    else:
        document = None if runs is None else checks.with_axes(_of(library, runs.first, "documents"), 2)
        stop = module.prefix_stop(scores, w, real, document)
    if keys == "prefix":
        start = library.arange(0, n, device) if runs is None else runs.keys
        if runs is not None:
            with library.on(device):
                stop = library.xp.minimum(stop, runs.open_end()[:, None])
        return IntervalMask._make(library, start, stop, hints)

    with library.on(device):
        if runs is None:
            start, last = library.full((1, 1, n), EVER, "int32", device), n
            end = library.full((1, 1, n), NEVER, "int32", device)
        else:
            start, last, end = runs.open_first()[:, None], runs.end[:, None], runs.open_end()[:, None]
        stop = library.xp.where(stop >= last, end, start)
    return IntervalMask._make(library, start, stop, hints)


def selection_hints(window: int, length: int, keys: str, has_padding: bool, has_documents: bool) -> Hints:
    """What is known of a selection's mask from its arguments alone."""
    w = min(window, max(length, 1))
    if keys == "prefix":
        return Hints("key", (w, 1), window >= length and not has_padding and not has_documents)
    # Positions of two documents see the keys of both, and whole documents between them at most T - 2 keys.
    return Hints(None, (2 * w, 1)) if has_documents else Hints("open", (w, 0))


def _of(library: Library, array: Any, name: str) -> Operand:
    """The Operand of an array made here; it belongs to the caller's library also where that is a DLPack producer."""
    return replace(library.describe(array, name), library=library)
