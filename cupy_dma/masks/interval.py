"""Masks in two integers per key.

``IntervalMask``: key ``j`` is visible at position ``p`` iff ``start[..., j] <= p < stop[..., j]``, so never where
``stop <= start``. Query ``i`` of ``Lq`` stands at position ``p_i = i + Lk - Lq``: the last query stands at the last
key, and positions are negative where there are more queries than keys. Both runs are int32 ``(1|B, 1|Hkv|H, Lk)``:
memory and work are ``O(Lk)``, never ``O(Lq * Lk)``. An open start is ``EVER`` (before every position), an open stop
``NEVER`` (after every position).
"""
from __future__ import annotations

from types import ModuleType
from typing import Any

from cupy_dma import backends, checks
from cupy_dma.arrays import Array, Library, Operand, Windows, describe
from cupy_dma.masks.constructors import Constructors, library_and_device, positions
from cupy_dma.masks.derived import History
from cupy_dma.masks.operators import MaskOperators
from cupy_dma.masks.plot import Pictures
from cupy_dma.masks.runs import EVER, NEVER, UNKNOWN, Hints, Runs, equal, intersection, spread, union
from cupy_dma.masks.selection import Candidates, check_candidates, select
from cupy_dma.masks.windows import Window, window_of

__all__ = ["EVER", "NEVER", "Hints", "IntervalMask"]


def _restored(start: Any, stop: Any, hints: tuple[Any, ...]) -> IntervalMask:
    """Rebuild a mask from a pickle or copy."""
    operand = describe(start, "start")
    return IntervalMask._make(operand.library, operand.array, describe(stop, "stop").array, Hints(*hints))


class IntervalMask(Constructors, MaskOperators, Pictures):
    """A mask under which every key is visible to one run of consecutive positions.

    Parameters
    ----------
    start, stop : int32 or int64 array, ``(1|B, 1|Hkv|H, Lk)``
        First position that sees the key, and the first position after it that does not. Missing leading axes
        broadcast. Both are of one library and device. int64 arrays are copied to int32, in which larger positions mean
        ``EVER`` and ``NEVER``. A mask is immutable: do not write to its arrays afterwards.

    Raises
    ------
    TypeError
        ``start`` or ``stop`` is not an integer array, or they are of different libraries.
    ValueError
        Their shapes do not broadcast, their last axis is not contiguous, or they are on different devices.

    Examples
    --------
    Three keys that live for two positions each:

    >>> IntervalMask(np.array([0, 1, 2]), np.array([2, 3, 4])).to_dense(3)[0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])

    See Also
    --------
    causal, sliding_window, padding, documents, prefix_lm, sinks, top_w : constructors of the usual masks.
    from_stop, from_gate, from_startend : of evictions, learned eviction, and FlashMask's columns.
    plot, plot_lifetimes, plot_survival, plot_attention : pictures.
    """

    __slots__ = ("__weakref__", "_bound", "_cache", "_causal_only", "_facts", "_hints", "_history", "_start", "_starts",
                 "_stop", "device", "key_length", "library", "shape")
    __hash__ = None  # type: ignore[assignment]  # == compares values, so equal masks would need equal hashes

    # _start, _stop: Operands of the full ``shape``, with stride 0 on broadcast axes. _starts, _bound, _causal_only: the
    # fields of _hints. _cache, _history: what backends derive from the mask (derived.py). _facts: what
    # torch's look-up of calls knows of the mask.

    def __init__(self, start: Array, stop: Array):
        operands = describe(start, "start"), describe(stop, "stop")
        checks.require_same_device(operands)
        for operand in operands:
            checks.one_of_types(operand, checks.INTEGERS)
            checks.per_key(operand)
            checks.rows_contiguous(operand)
        shapes = [(1,) * (3 - operand.ndim) + tuple(operand.shape) for operand in operands]
        if shapes[0][2] != shapes[1][2] or any(a != b and 1 not in (a, b) for a, b in zip(*shapes)):
            raise ValueError(f"start and stop must broadcast to one shape (B, H, Lk), got start {operands[0].shape} "
                             f"and stop {operands[1].shape}")
        library = operands[0].library
        with library.on(operands[0].device):
            start, stop = (library.contiguous(positions(operand)) if operand.dtype == "int64" else operand.array
                           for operand in operands)
        self._set(library, start, stop, UNKNOWN)

    def _set(self, library: Library, start: Any, stop: Any, hints: Hints) -> None:
        a, b = ((1, 1, 1, *run.shape)[-3:] for run in (start, stop))
        shape = (b[0] if a[0] == 1 else a[0], b[1] if a[1] == 1 else a[1], b[2] if a[2] == 1 else a[2])
        self._start, self._stop = spread(library, start, "start", shape), spread(library, stop, "stop", shape)
        self.shape, self.key_length = shape, shape[2]
        self.library, self.device = library, self._start.device
        self._hints = hints
        self._starts, self._bound, self._causal_only = hints
        self._cache: dict[Any, Any] = {}
        self._history = History({}, [])
        self._facts: Any = None

    @classmethod
    def _make(cls, library: Library, start: Any, stop: Any, hints: Hints = UNKNOWN) -> IntervalMask:
        """A mask from arrays that are known to be valid."""
        mask = cls.__new__(cls)
        mask._set(library, start, stop, hints)
        return mask

    @classmethod
    def _of(cls, library: Library, runs: Runs) -> IntervalMask:
        return cls._make(library, *runs)

    @property
    def _runs(self) -> Runs:
        return Runs(self._start.array, self._stop.array, self._hints)

    def __copy__(self) -> IntervalMask:
        """Shares the arrays, and what backends have derived from them."""
        twin = self._make(self.library, self._start.array, self._stop.array,
                          Hints(self._starts, self._bound, self._causal_only))
        twin._cache, twin._history = self._cache, self._history
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Deep copies and pickles hold arrays and hints only; backends derive key lists anew."""
        return _restored, (self.start, self.stop, (self._starts, self._bound, self._causal_only))

    @property
    def start(self) -> Any:
        """int32 array with 3 axes that broadcasts to ``shape``: the first position that sees the key."""
        return self.library.export(self._start.array)

    @property
    def stop(self) -> Any:
        """int32 array with 3 axes that broadcasts to ``shape``: the first later position that does not see the key."""
        return self.library.export(self._stop.array)

    def __repr__(self) -> str:
        return f"IntervalMask(shape={self.shape}, library={self.library.name!r}, device={str(self.device)!r})"

    # ---- selection --------------------------------------------------------------------------------------------------

    @classmethod
    def top_w(cls, scores: Array, window: Windows, *, keys: str = "prefix", padding: Array | None = None,
              documents: Array | None = None, backend: str | None = None) -> IntervalMask:
        """The dynamic mask: the ``window`` highest-ranked keys.

        Parameters
        ----------
        scores : float array ``(B, Hkv, Lk)``
            Any float type; 16-bit scores are widened. float64 is exact on the numpy backend and rejected on CUDA.
            Copied if the last axis is not contiguous.
        window : int, or a sequence or integer array of ``Hkv`` ints in host memory
            Keys kept per query, at least 1; of each kv head if there are several.
        keys
            ``"prefix"``: query ``i`` keeps the best of its candidates ``j <= p_i``; causal by construction.
            ``"global"``: one set, the best of all candidates, shared by every query (with ``causal=True`` in the
            attention a query sees only its earlier members, possibly none).
        padding : bool array ``(1|B, Lk)``, or integers 0 and 1, optional
            True or 1 = a real key. Padding is not a candidate and does not count towards the window.
        documents : int32 or int64 array or list, optional
            As for ``IntervalMask.documents``: every document selects among its own keys.
        backend
            See ``cupy_dma.get_available_backends``. ``"numpy"`` with CUDA arrays copies to the host and back.

        Returns
        -------
        IntervalMask of shape ``(B, Hkv, Lk)``. It carries no gradient; the scores get theirs as a bias.

        Raises
        ------
        TypeError, ValueError
            An argument has the wrong type, shape or value, or (``CUPY_DMA_CHECK=1``) a score is not finite.

        Examples
        --------
        >>> IntervalMask.top_w(np.array([[[3.0, 1.0, 2.0, 0.0]]]), window=2).to_dense(4)[0, 0].astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 0, 1, 0]])

        Notes
        -----
        The best keys *within a sliding window* are not an interval mask: an outranked key returns when a better one
        leaves the window. To keep recent keys as well as the best ones take the union, ``top_w(...) |
        sliding_window(...)``.
        """
        if backends.is_traced(scores):
            return backends.traced().top_w(scores, window, keys, padding, documents, backend)
        ranked = describe(scores, "scores")
        checks.choice(keys, "keys", ("prefix", "global"))
        checks.one_of_types(ranked)
        if ranked.ndim != 3:
            raise ValueError(f"scores must have shape (B, Hkv, Lk), got {ranked.shape}")
        ranked, windows = checks.in_rows(ranked), window_of(window, ranked.shape[1])
        module = backends.choose(backend, (ranked,))
        if ranked.dtype == "float64" and ranked.device.kind == "cuda" and backend != "numpy":
            raise TypeError("scores must be float16, bfloat16 or float32 on CUDA, got float64 (backend='numpy' takes "
                            "it)")
        candidates = check_candidates(padding, documents, ranked, ranked.shape[0], ranked.shape[2])
        return cls._selected(ranked, windows, keys, candidates, module)

    @classmethod
    def _selected(cls, scores: Operand, window: Window, keys: str, candidates: Candidates,
                  module: ModuleType) -> IntervalMask:
        """``top_w`` with checked arguments, on the backend ``module``."""
        return cls._of(scores.library, select(scores, window, keys, candidates, module))

    # ---- algebra ----------------------------------------------------------------------------------------------------

    def _meet(self, other: IntervalMask, sign: str) -> bool:
        """Whether the shapes broadcast. ValueError if the masks differ in library or device."""
        if (self.library.name, self.device) != (other.library.name, other.device):
            raise ValueError(f"mask {sign} mask needs both of one library and device, got {self!r} and {other!r}; "
                             f"move one with .to(an array of the other's library and device)")
        a, b = self.shape, other.shape
        meets = a[2] == b[2] and all(x == y or 1 in (x, y) for x, y in zip(a, b))
        if not meets and sign != "==":
            raise ValueError(f"mask {sign} mask needs shapes that broadcast and equal key lengths, got {a} and {b}")
        return meets

    def __and__(self, other: IntervalMask) -> IntervalMask:
        """Visible under both: the later start and the earlier stop."""
        if not isinstance(other, IntervalMask):
            return self._with(other, "&")
        self._meet(other, "&")
        with self.library.on(self.device):
            return self._of(self.library, intersection(self.library.xp, self._runs, other._runs))

    def __or__(self, other: IntervalMask) -> IntervalMask:
        """Visible under either, where the two runs of every key touch or overlap.

        ValueError where they do not, because two separate runs are not an interval. If both masks start at the key
        itself the runs always touch and nothing is checked; otherwise the values are read, which synchronizes on CUDA.
        """
        if not isinstance(other, IntervalMask):
            return self._with(other, "|")
        self._meet(other, "|")
        with self.library.on(self.device):
            return self._of(self.library, union(self.library.xp, self._runs, other._runs))

    def __eq__(self, other: object) -> bool:
        """Whether both show the same keys at every position that a query can have (below ``Lk``). Synchronizes."""
        if not isinstance(other, IntervalMask):
            return self._with(other, "==")
        if not self._meet(other, "=="):
            return False
        with self.library.on(self.device):
            return equal(self.library, self.device, self.key_length, self._runs, other._runs)

    # ---- views of the mask ------------------------------------------------------------------------------------------

    def to(self, like: Array) -> IntervalMask:
        """The same mask with arrays of ``like``'s library on ``like``'s device (copied through the host)."""
        library, device = library_and_device(like)
        if (library.name, device) == (self.library.name, self.device):
            return self
        start, stop = (library.from_numpy(self.library.to_numpy(operand.array).copy(), device)
                       for operand in (self._start, self._stop))
        return self._make(library, start, stop, self._hints)

    def to_dense(self, query_length: int) -> Any:
        """bool ``(1|B, 1|Hkv|H, Lq, Lk)``, True = visible; query ``i`` stands at ``i + Lk - Lq``."""
        first = self.key_length - checks.whole(query_length, "query_length", 0)
        with self.library.on(self.device):
            position = self.library.arange(first, self.key_length, self.device)[:, None]
            start, stop = self._start.array, self._stop.array
            return self.library.export((start[:, :, None] <= position) & (position < stop[:, :, None]))

    def count(self, query_length: int) -> Any:
        """int64 array ``(1|B, 1|Hkv|H)``: visible (query, key) pairs of each row, in ``O(Lk)``."""
        first = self.key_length - checks.whole(query_length, "query_length", 0)
        library, xp = self.library, self.library.xp
        with library.on(self.device):
            begin = xp.maximum(self._start.array, library.full((1,), first, "int32", self.device))
            end = xp.minimum(self._stop.array, library.full((1,), self.key_length, "int32", self.device))
            seen = library.astype(end, "int64") - library.astype(begin, "int64")
            return library.export(xp.where(seen > 0, seen, seen * 0).sum(-1))
