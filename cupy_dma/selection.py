"""The dynamic mask: which keys every query keeps (SPEC section 3), and the documents they are chosen within.

Keys are ranked by ``(score, j)``, highest first; NaN above everything, the newest key of equals first. The w-th best of
a growing prefix only rises, so a key that has fallen out of the kept set never returns: key ``j`` is visible from its
own position to ``stop_j``, the first position at which ``w`` better keys exist. A backend's ``prefix_stop`` finds
``stop_j``; all else follows from it here, in a few elementwise operations over ``(B, Hkv, Lk)``.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cupy_dma import backends, checks
from cupy_dma.arrays import Device, Library, Operand, describe, require_same_place
from cupy_dma.masks import EVER, NEVER, IntervalMask


@dataclass(frozen=True, slots=True, eq=False)
class DocumentRuns:
    """First key and end (first key after) of the document of every key, int32 ``(1|B, Lk)``."""

    library: Library
    device: Device
    key_length: int
    keys: Any  # int32 (Lk,): 0, 1, ...
    first: Any
    end: Any

    def open_first(self) -> Any:
        """``first``, with the first document open to earlier positions."""
        with self.library.on(self.device):
            ever = self.library.full((1, 1), EVER, "int32", self.device)
            return self.library.xp.where(self.first > 0, self.first, ever)

    def open_end(self) -> Any:
        """``end``, with the last document open to later positions."""
        with self.library.on(self.device):
            never = self.library.full((1, 1), NEVER, "int32", self.device)
            return self.library.xp.where(self.end < self.key_length, self.end, never)


def document_runs(documents: Operand, key_length: int | None) -> DocumentRuns:
    """The runs of cumulative lengths ``(n + 1,)`` or ids ``(B, Lk)``; see ``IntervalMask.documents``."""
    checks.one_of_types(documents, checks.INTEGERS)
    if documents.ndim not in (1, 2) or documents.ndim == 1 and documents.shape[0] == 0:
        raise ValueError(f"documents must be cumulative lengths (documents + 1,) or ids (B, Lk), "
                         f"got shape {documents.shape}")
    place, device = documents.library, documents.device
    with place.on(device):
        if documents.ndim == 1:
            if key_length is None:
                key_length = int(documents.array[-1])
            key_length = checks.whole(key_length, "key_length", 0)
            return _runs_of_lengths(documents, key_length)
        if key_length is not None and checks.whole(key_length, "key_length", 0) != documents.shape[1]:
            raise ValueError(f"key_length must be the length of documents' rows, {documents.shape[1]}, "
                             f"got {key_length}")
        return _runs_of_ids(documents)


def _runs_of_lengths(documents: Operand, key_length: int) -> DocumentRuns:
    place, device, count = documents.library, documents.device, documents.shape[0]
    if device.kind == "cpu" or checks.wants_values_checked():
        values = place.to_numpy(documents.array)
        if values[0] != 0 or (values[1:] < values[:-1]).any() or values[-1] != key_length:
            raise ValueError(f"documents must be cumulative lengths that start at 0, never fall and end at the key "
                             f"length {key_length}, got {values.tolist()[:16]}{' ...' if count > 16 else ''}")
    bounds = place.astype(documents.array, "int32")
    keys = place.arange(0, key_length, device)
    after = place.search_right(bounds, keys)  # number of the boundary that ends the key's document
    inside = place.xp.where(after < count, after, after * 0 + (count - 1))
    return DocumentRuns(place, device, key_length, keys, bounds[after - 1][None], bounds[inside][None])


def _runs_of_ids(documents: Operand) -> DocumentRuns:
    place, device, xp = documents.library, documents.device, documents.library.xp
    rows, key_length = documents.shape
    if rows * key_length > NEVER:
        raise ValueError(f"documents may have at most 2**31 - 1 ids, got shape {documents.shape}")
    ids, keys = documents.array, place.arange(0, key_length, device)
    changes = place.full((rows, key_length), 0, "int32", device)
    if key_length > 1:
        changes[:, 1:] = place.astype(ids[:, 1:] != ids[:, :-1], "int32")
    # Numbered through all rows the documents are one sorted list, and searching it gives both ends of every run.
    row = place.arange(0, rows, device)[:, None] * key_length
    number = (place.cumsum(changes) + row).reshape(-1)
    first = place.search_right(number, number - 1).reshape(rows, key_length) - row
    end = place.search_right(number, number).reshape(rows, key_length) - row
    return DocumentRuns(place, device, key_length, keys, first, end)


def top_w(scores: Operand, window: int, keys: str, padding: Any, documents: Any, backend: str | None) -> IntervalMask:
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
    w = checks.whole(window, "window", 1)
    checks.choice(keys, "keys", ("prefix", "global"))
    checks.one_of_types(scores)
    if scores.ndim != 3:
        raise ValueError(f"scores must have shape (B, Hkv, Lk), got {scores.shape}")
    checks.rows_contiguous(scores)
    batch, _, n = scores.shape
    place, device = scores.library, scores.device
    real = _padding(padding, scores)
    runs = _documents(documents, scores)
    module = backends.choose(backend, (scores,))
    if scores.dtype == "float64" and module.__name__.endswith(".cuda"):
        raise TypeError("scores must be float16, bfloat16 or float32 on CUDA, got float64 (the numpy backend takes it)")
    if checks.wants_values_checked() and not bool(place.xp.isfinite(scores.array).all()):
        raise ValueError("scores must be finite (CUPY_DMA_CHECK=1), got NaN or infinity")
    if scores.dtype in ("float16", "bfloat16"):
        scores = replace(place.describe(place.astype(scores.array, "float32"), "scores"), library=place)

    everything = w >= n and real is None and runs is None
    w = min(w, max(n, 1))
    if everything:
        stop = place.full(scores.shape, NEVER, "int32", device)
    else:
        document = None if runs is None else checks.with_axes(place.describe(runs.first, "documents"), 2)
        stop = module.prefix_stop(scores, w, real, document)
    if keys == "prefix":
        start = place.arange(0, n, device) if runs is None else runs.keys
        if runs is not None:
            with place.on(device):
                stop = place.xp.minimum(stop, runs.open_end()[:, None])
        return IntervalMask._make(place, start, stop, starts="key", bound=(w, 1), causal_only=everything)

    with place.on(device):
        if runs is None:
            start, bound, last, end = place.full((1, 1, n), EVER, "int32", device), (w, 0), n, None
            end = place.full((1, 1, n), NEVER, "int32", device)
        else:  # positions of two documents see the keys of both, and whole documents between them at most T - 2 keys
            start, bound, last, end = (runs.open_first()[:, None], (2 * w, 1), runs.end[:, None],
                                       runs.open_end()[:, None])
        stop = place.xp.where(stop >= last, end, start)
    return IntervalMask._make(place, start, stop, starts="open" if runs is None else None, bound=bound)


def _padding(padding: Any, scores: Operand) -> Operand | None:
    if padding is None:
        return None
    real = describe(padding, "padding")
    require_same_place((scores, real))
    checks.one_of_types(real, ("bool",))
    checks.has_shape(real, "(1|B, Lk)", ((1, scores.shape[0]), (scores.shape[2],)))
    checks.rows_contiguous(real)
    return checks.with_axes(real, 2)


def _documents(documents: Any, scores: Operand) -> DocumentRuns | None:
    if documents is None:
        return None
    operand = describe(documents, "documents")
    require_same_place((scores, operand))
    if operand.ndim == 2:
        checks.has_shape(operand, "(1|B, Lk)", ((1, scores.shape[0]), (scores.shape[2],)))
    return document_runs(operand, scores.shape[2])
