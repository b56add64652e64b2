"""Mask constructors that need no scores. All arrays are int32, of size O(Lk)."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_dma import checks
from cupy_dma.arrays import CPU, Array, Device, Library, Operand, Windows, describe, library_named
from cupy_dma.masks.documents import check_documents, document_runs, documents_mask
from cupy_dma.masks.runs import EVER, NEVER, Hints, Runs, covers, gated
from cupy_dma.masks.windows import each_head, narrowest, widest, window_of

if TYPE_CHECKING:
    from cupy_dma.masks.interval import IntervalMask


class Constructors:
    """Base of ``IntervalMask``. ``like``: an array whose library and device the mask gets; NumPy by default."""

    __slots__ = ()

    @classmethod
    def _of(cls, library: Library, runs: Runs) -> IntervalMask:
        raise NotImplementedError

    @classmethod
    def causal(cls, key_length: int, *, like: Array | None = None) -> IntervalMask:
        """Every position sees its own key and all earlier ones. ``like``: the mask gets its library and device."""
        n = checks.whole(key_length, "key_length", 0)
        library, device = library_and_device(like)
        return cls._of(library, Runs(library.arange(0, n, device), library.full((n,), NEVER, "int32", device),
                             Hints("key", causal_only=True)))

    @classmethod
    def sliding_window(cls, key_length: int, window: Windows, *, like: Array | None = None) -> IntervalMask:
        """Every position sees the last ``window`` keys, including its own. Several ints: one window per head."""
        n, windows = checks.whole(key_length, "key_length", 0), window_of(window)
        library, device = library_and_device(like)
        with library.on(device):
            start = library.arange(0, n, device)
            stops = [start + w if w + n < NEVER else library.full((n,), NEVER, "int32", device)
                     for w in each_head(windows, 1)]
            stop = stops[0] if len(stops) == 1 else library.xp.stack(stops)
        return cls._of(library, Runs(start, stop, Hints("key", (widest(windows), 1), covers(narrowest(windows), n))))

    @classmethod
    def sinks(cls, key_length: int, count: int, *, like: Array | None = None) -> IntervalMask:
        """Attention sinks: only the first ``count`` keys, each from its own position on. For unions."""
        n, c = checks.whole(key_length, "key_length", 0), checks.whole(count, "count", 0)
        library, device = library_and_device(like)
        with library.on(device):
            start = library.arange(0, n, device)
            stop = library.xp.where(start < min(c, NEVER), library.full((n,), NEVER, "int32", device), start)
        return cls._of(library, Runs(start, stop, Hints("key", (c, 0), covers(c, n))))

    @classmethod
    def prefix_lm(cls, key_length: int, prefix_length: int | Array, *, like: Array | None = None) -> IntervalMask:
        """The first ``prefix_length`` keys (int, or integer array ``(B,)``) are visible everywhere, the rest causal.

        >>> IntervalMask.prefix_lm(4, 2).to_dense(4)[0, 0].astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
        """
        n = checks.whole(key_length, "key_length", 0)
        lengths = describe(prefix_length, "prefix_length") if getattr(prefix_length, "shape", ()) else None
        library, device = library_and_device(prefix_length if lengths and like is None else like)
        if lengths:
            checks.one_of_types(lengths, checks.INTEGERS)
            if lengths.ndim != 1:
                raise ValueError(f"prefix_length must be an int or have shape (B,), got shape {lengths.shape}")
            if (lengths.library.name, lengths.device) != (library.name, device):
                raise ValueError(f"prefix_length must be of like's library and device, {library.name} on {device}, got "
                                 f"{lengths.library.name} on {lengths.device}")
            limit = lengths.array[:, None, None]
        else:
            limit = min(checks.whole(prefix_length, "prefix_length", 0), NEVER)
        with library.on(device):
            key = library.arange(0, n, device)
            start = library.xp.where(key[None, None] < limit, library.full((1, 1, n), EVER, "int32", device), key)
        return cls._of(library, Runs(start, library.full((n,), NEVER, "int32", device)))

    @classmethod
    def padding(cls, padding: Array) -> IntervalMask:
        """Real keys are visible at every position, padding at none. ``padding (B, Lk)``: bool, or integers 0 and 1;
        True or 1 = real."""
        real = checks.real_keys(describe(padding, "padding"))
        if real.ndim != 2:
            raise ValueError(f"padding must have shape (B, Lk), got {real.shape}")
        library, device, n = real.library, real.device, real.shape[1]
        with library.on(device):
            start = library.full((n,), EVER, "int32", device)
            stop = library.xp.where(real.array, library.full((n,), NEVER, "int32", device), start)
        return cls._of(library, Runs(start, stop[:, None], Hints("open")))

    @classmethod
    def from_stop(cls, stop: Array, *, window: int | None = None) -> IntervalMask:
        """The mask of any eviction policy: key ``j`` is visible from its own position until it is evicted.

        Parameters
        ----------
        stop : int32 or int64 array, ``(Lk,)``, ``(1|Hkv|H, Lk)`` or ``(1|B, 1|Hkv|H, Lk)``
            The first position that no longer sees key ``j``. At most ``j``: never visible; ``Lk`` or more: never
            evicted. An evicted key cannot come back, so each key has one stop, and the mask is exact.
        window
            An upper bound on the keys that any position sees, if known: kernels then gather that many instead of
            reading all keys up to the query. It is checked in host memory, in GPU memory only with
            ``CUPY_DMA_CHECK=1``; unchecked, a position that sees more gives undefined results.

        Raises
        ------
        TypeError, ValueError
            ``stop`` is not an integer array with 1 to 3 axes, or some position sees more than ``window`` keys.

        Examples
        --------
        Keys on even positions live for 4 positions, the others for 2:

        >>> key = np.arange(6)
        >>> mask = IntervalMask.from_stop(key + np.where(key % 2, 2, 4), window=3)
        >>> mask.count(6)
        array([[15]])
        """
        given = describe(stop, "stop")
        checks.one_of_types(given, checks.INTEGERS)
        checks.per_key(given)
        library, device, n = given.library, given.device, given.shape[-1]
        limit = None if window is None else checks.whole(window, "window", 1)
        with library.on(device):
            start = library.arange(0, n, device)
            end = checks.in_rows(library.operand(positions(given), "stop")).array
            if limit is None:
                return cls._of(library, Runs(start, end, Hints("key")))
            if checks.values_known(given):
                _check_window(library, library.operand(end, "stop"), limit)
        return cls._of(library, Runs(start, end, Hints("key", (limit, 1))))

    @classmethod
    def from_gate(cls, bias: Array, *, delay: int, threshold: float, sinks: int = 0) -> IntervalMask:
        """Learned eviction: a key with a closed gate is evicted ``delay`` positions after its own.

        Parameters
        ----------
        bias : float array, ``(Lk,)``, ``(1|Hkv|H, Lk)`` or ``(1|B, 1|Hkv|H, Lk)``
            The logarithm of each key's gate. Key ``j`` is visible at ``delay`` positions, starting with its own, if
            ``bias[j] < threshold``, and otherwise (NaN included) from its own on.
        delay
            At least 1.
        threshold
            A finite number.
        sinks
            The first ``sinks`` keys are never evicted.

        Raises
        ------
        TypeError, ValueError
            ``bias`` is not a float array with 1 to 3 axes, or another argument is not a number in its range.

        Examples
        --------
        >>> gate = np.array([0.9, 0.01, 0.01, 0.8, 0.01])
        >>> IntervalMask.from_gate(np.log(gate), delay=2, threshold=np.log(0.1)).to_dense(5)[0, 0].astype(int)
        array([[1, 0, 0, 0, 0],
               [1, 1, 0, 0, 0],
               [1, 1, 1, 0, 0],
               [1, 0, 1, 1, 0],
               [1, 0, 0, 1, 1]])
        """
        given = describe(bias, "bias")
        checks.one_of_types(given)
        checks.per_key(given)
        distance, first = checks.whole(delay, "delay", 1), checks.whole(sinks, "sinks", 0)
        least = checks.real(threshold, "threshold")
        library, device, n = given.library, given.device, given.shape[-1]
        with library.on(device):
            key, never = library.arange(0, n, device), library.full((n,), NEVER, "int32", device)
            stop = library.contiguous(gated(library.xp, given.array, key, never, distance, least, first))
        return cls._of(library, Runs(key, stop, Hints("key")))

    @classmethod
    def from_startend(cls, startend_row_indices: Array, *, causal: bool = True, check: bool = True) -> IntervalMask:
        """The mask that FlashMask (arXiv 2410.01359) describes by columns, for as many queries as keys.

        The array is that of PaddlePaddle's ``flashmask_attention``, but may have query heads, too; rows are queries.

        Parameters
        ----------
        startend_row_indices : int32 or int64 array ``(1|B, 1|Hkv|H, Lk, 1|2)``
            With ``causal``, column 0: the first row that does not see the key; column 1: the first later row that sees
            it again. Without, two columns: the first row after those that see the key, and the first that sees it.
        causal
            Hide each key from the rows before its own.
        check
            With ``causal`` and two columns: reject keys that are seen in two separate runs of rows, which no interval
            can express. This reads the values, which synchronizes once on CUDA. Without it, as needed under
            ``torch.compile`` and in CUDA graphs, such a key is seen in the first run only.

        Raises
        ------
        TypeError, ValueError
            An argument has the wrong type or shape, or, with ``check``, a key is seen in two separate runs of rows.
        NotImplementedError
            There are four columns: two ranges of hidden rows.

        Examples
        --------
        Two documents, of 2 and 3 tokens:

        >>> stop = np.array([2, 2, 5, 5, 5])[None, None, :, None]
        >>> IntervalMask.from_startend(stop) == IntervalMask.documents(np.array([0, 2, 5]))
        True
        """
        given, causal = describe(startend_row_indices, "startend_row_indices"), checks.flag(causal, "causal")
        check = checks.flag(check, "check")
        checks.one_of_types(given, checks.INTEGERS)
        columns = given.shape[-1] if given.ndim == 4 else 0
        if columns == 4 and not causal:
            raise NotImplementedError(f"startend_row_indices must have at most 2 columns, got shape {given.shape}: two "
                                      "ranges of hidden rows leave no single interval; use a dense mask")
        if columns not in ((1, 2) if causal else (2,)):
            raise ValueError(f"startend_row_indices must have shape (1|B, 1|Hkv|H, Lk, {'1|2' if causal else 2}) with "
                             f"causal={causal}, got {given.shape}")
        library, xp, n = given.library, given.library.xp, given.shape[2]
        with library.on(given.device):
            rows = positions(given)
            first, last = library.contiguous(rows[..., 0]), library.contiguous(rows[..., columns - 1])
            if not causal:
                return cls._of(library, Runs(last, first))
            key = library.arange(0, n, given.device)
            if columns == 1:
                return cls._of(library, Runs(key, first, Hints("key")))
            hidden, late = first < last, first <= key
            if check and bool((hidden & ~late & (last < n)).any()):
                raise ValueError("startend_row_indices must let each key be seen in one run of rows, got one that is "
                                 "seen, then hidden, then seen again; use a dense mask")
            never = library.full((1, 1, n), NEVER, "int32", given.device)
            start = xp.where(hidden & late, xp.maximum(key, last), key)
            return cls._of(library, Runs(start, xp.where(hidden & ~late, first, never)))

    @classmethod
    def documents(cls, documents: Array, *, key_length: int | None = None, causal: bool = True) -> IntervalMask:
        """Every position sees the keys of its own document; with ``causal``, only those up to itself.

        Parameters
        ----------
        documents : int32 or int64 array
            ``(documents + 1,)``: cumulative lengths, from 0 to the key length, never decreasing; or ``(B, Lk)``: ids.
            Every change of id along the row begins a new document, even if the id has occurred before.
        key_length
            With cumulative lengths: their last entry. By default it is read from the array, which synchronizes on CUDA.

        Raises
        ------
        TypeError, ValueError
            ``documents`` has the wrong type or shape, or its lengths do not rise from 0 to the key length. Values are
            always checked in host memory, in GPU memory only with ``CUPY_DMA_CHECK=1``.

        Notes
        -----
        The first document is also visible to earlier positions (more queries than keys) and the last to later ones, so
        that one document of all keys is the plain causal mask, or no mask.
        """
        given = describe(documents, "documents")
        runs = document_runs(given, check_documents(given, key_length))
        return cls._of(runs.library, documents_mask(runs, checks.flag(causal, "causal")))


def library_and_device(like: Any) -> tuple[Library, Device]:
    """Library and device of ``like``; by default NumPy's."""
    if like is None:
        return library_named("numpy"), CPU
    operand = describe(like, "like")
    return operand.library, operand.device


def positions(given: Operand) -> Any:
    """As int32; larger positions become the largest int32, since any position after all others is equivalent."""
    library, array = given.library, given.array
    if given.dtype == "int32":
        return array
    least, most = (library.full((1,), bound, "int32", given.device) for bound in (EVER, NEVER))
    return library.astype(library.xp.maximum(library.xp.minimum(array, most), least), "int32")


def _check_window(library: Library, stop: Operand, window: int) -> None:
    """ValueError if some position sees more than ``window`` of the keys that are visible until ``stop``."""
    n = stop.shape[-1]
    key = np.arange(n)
    for row in library.to_numpy(stop.array).reshape(-1, n) if n else ():
        gone = np.bincount(np.clip(row, key, n), minlength=n + 1)[:n]  # keys that end at each position
        seen = key + 1 - np.cumsum(gone)
        if seen.max() > window:
            raise ValueError(f"window must be at least the number of keys that any position sees, {seen.max()} at "
                             f"position {seen.argmax()}, got {window}")
