"""What caches of kept keys have in common: their contents, their stops, copies of whole sequences, saving."""
from __future__ import annotations

from math import inf, prod
from typing import Any, NamedTuple, TypeVar

from cupy_dma.arrays import Ints, numpy_dtype
from cupy_dma.cache.arguments import batch_rows, checked_slots
from cupy_dma.cache.attended import Attended
from cupy_dma.cache.base import CacheBase
from cupy_dma.cache.chosen import named
from cupy_dma.cache.record import NAME, Record, stops
from cupy_dma.cache.segments import rectangular, selected
from cupy_dma.cache.slots import AFTER_ALL, index, needed
from cupy_dma.cache.snapshot import (
    NUMBERS,
    SIZES,
    copy_rows,
    forget,
    load,
    same_kind,
    saved_state,
    with_segments,
)
from cupy_dma.cache.state import CacheState, ExtendCall, Segments

Own = TypeVar("Own", bound="KeyCache")


class KeptKeys(NamedTuple):
    """What a cache keeps, oldest first."""

    positions: Any  # int64 (B, Hkv, R): index in the sequence, -1 after the last kept key
    scores: Any  # float (B, Hkv, R), -inf after the last kept key


class KeyCache(CacheBase):
    """A cache of one attention layer."""

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def _extended(self, call: ExtendCall, out: Any) -> Any:
        """What ``extend`` returns."""
        results = (self._take if call.commits else self._attend)(call)[:2 if call.return_lse else 1]
        if out is not None:
            return out if not call.return_lse else tuple(out)
        assert call.query is not None
        export, packed = call.query.library.export, call.cu_seqlens is not None
        found = tuple(export(array[0] if packed else array) for array in results)
        return found if call.return_lse else found[0]

    def _take(self, call: ExtendCall) -> tuple[Any, Any]:
        if self._record is not None:
            with self._here():
                self._record.append(self._state, call)
        found = self._module.cache_extend(self._state, call)
        self._attended.forget(self._state)
        return found

    def _attend(self, call: ExtendCall) -> tuple[Any, Any]:
        with self._here():
            arrays = self._attended.arrays(self._state, call)
        found = self._module.cache_extend(self._state, call)
        with self._here():
            self._attended.remember(self._state, call, arrays)
        return found

    def commit(self, n: int | Ints) -> None:
        """Append the first ``n`` tokens of the last ``attend`` to each of its sequences.

        The cache then holds what ``extend`` of these tokens alone would have left; the others have changed nothing.

        Parameters
        ----------
        n : int, or int32 or int64 array ``(B,)`` or list; ``(n,)`` after an ``attend`` with ``slots``
            0 to ``L``. Tokens that are not real are never appended.

        Raises
        ------
        RuntimeError
            There was no ``attend``, or the cache has changed since: ``commit``, ``extend``, ``update``, ``reset``,
            ``reorder`` and ``load_state_dict`` change it. After an ``attend`` in a CUDA graph this is not known, and
            ``commit`` appends tokens of the last replay.
        TypeError, ValueError
            ``n`` has the wrong type, shape, device or value. Values in GPU memory are only checked with
            ``CUPY_DMA_CHECK=1``. Whatever is raised, nothing has changed.

        >>> from cupy_dma import DynamicCache
        >>> cache = DynamicCache(1, 2, window=4, head_dim=8, dtype="float32")
        >>> drafted = np.ones((1, 5, 2, 8), np.float32)
        >>> out = cache.attend(drafted, drafted, drafted, np.zeros((1, 2, 5), np.float32))
        >>> cache.commit(3)
        >>> cache.length
        array([3])
        """
        with self._here():
            call = self._attended.update(self._state, n)
        self._take(call)

    def reset(self, slots: Ints | None = None) -> None:
        """Remove all tokens, in place, or those of the sequences ``slots``, as for ``extend``."""
        chosen = None if slots is None else checked_slots(self._state, slots)
        with self._here():
            forget(self._state, None if chosen is None else named(self._state, chosen))
        if self._record is not None:
            self._record.forget(slots is not None)
        self._attended.forget(self._state)

    # ---- contents ---------------------------------------------------------------------------------------------------

    @property
    def _is_growing(self) -> bool:
        """Whether it allocates as the text gets longer, so that a CUDA graph cannot take tokens."""
        return self._record is not None

    @property
    def length(self) -> Any:
        """int64 array ``(B,)``: tokens added to each sequence so far (a copy)."""
        with self._here():
            return self._export(self._state.lengths.array + 0)

    @property
    def positions(self) -> Any:
        """int64 array ``(B, Hkv, R)``: index in its sequence of the token in each slot, -1 where the last token sees
        none. The order is arbitrary; see ``kept``."""
        with self._here():
            return self._export(self._kept_positions())

    def kept(self) -> KeptKeys:
        """Positions and scores of the keys that each sequence's last token sees, oldest first; for analysis."""
        state, xp = self._state, self._state.library.xp
        with self._here():
            where = self._kept_positions()
            order = xp.argsort(xp.where(where < 0, AFTER_ALL, where))
            score = xp.where(where < 0, -float("inf"), rectangular(state, ("scores",)).scores.array)
            batch, head = index(state, state.batch)[:, None, None], index(state, state.kv_heads)[:, None]
            return KeptKeys(*(self._export(array[batch, head, order]) for array in (where, score)))

    def _kept_positions(self) -> Any:
        """Positions of the keys that the last token sees, -1 elsewhere."""
        state = rectangular(self._state, ("positions", "in_top"))
        return state.library.xp.where(needed(state, state.lengths.array - 1), state.positions.array, -1)

    def stops(self) -> Any:
        """What the cache has evicted: for every key the first position that did not see it.

        Returns
        -------
        int32 array ``(B, Hkv, N)``
            ``N`` is the number of tokens of the longest sequence. Key ``j`` was visible to the tokens at positions
            ``j``, ..., ``stop - 1``; 2**31 - 1 where the last token sees it, ``j`` where none did or the sequence has
            no token ``j``. Under ``IntervalMask.from_stop(stops)``, attention over the whole text is what the cache's
            calls computed.

        Raises
        ------
        RuntimeError
            The cache was not made with ``record_stops=True``.

        Notes
        -----
        Synchronizes.

        >>> from cupy_dma import DynamicCache
        >>> cache = DynamicCache(1, 1, window=2, head_dim=8, dtype="float32", record_stops=True)
        >>> cache.update(*np.ones((2, 1, 5, 1, 8), np.float32), np.array([[[5, 3, 4, 1, 2.]]], np.float32))
        >>> cache.stops()
        array([[[2147483647,          2, 2147483647,          3,          4]]],
              dtype=int32)
        """
        if self._record is None:
            raise RuntimeError("the cache has not recorded its stops: make it with record_stops=True")
        with self._here():
            return self._export(stops(self._state, self._record, self._module.prefix_stop))

    @property
    def memory_bytes(self) -> int:
        """Size of the cache's arrays in bytes."""
        arrays, segments = [getattr(self._state, name) for name in self._state.arrays], self._state.segments
        arrays += [x for x in (segments.count, segments.start, segments.order) if x is not None] if segments else []
        return self._attended.memory_bytes + sum(prod(x.shape) * numpy_dtype(x.dtype).itemsize for x in arrays) + (
            self._record.memory_bytes if self._record else 0)

    # ---- whole sequences --------------------------------------------------------------------------------------------

    def reorder(self, indices: Ints) -> None:
        """Replace sequence ``b`` by the former sequence ``indices[b]``, in place: a step of beam search.

        ``indices``: int32 or int64 array ``(B,)`` of the cache's library and device, or a list of ints.
        """
        rows = batch_rows(indices, self._state.key, self._state.batch, self._state.batch)
        with self._here():
            record = self._record and self._record.selected(rows)
            segments = selected(self._state, rows)
            if segments is self._state.segments:
                copy_rows(self._state, self._state, rows)
            else:  # of a cache that grows
                self._state = self._selected_state(rows, segments)
            self._record = record
        self._attended.forget(self._state)

    def select_batch(self: Own, indices: Ints) -> Own:
        """A new cache of the sequences ``indices (n,)``, as for ``reorder``; they may repeat."""
        return self._copied(batch_rows(indices, self._state.key, self._state.batch))

    def clone(self: Own) -> Own:
        """A copy that shares no memory."""
        return self._copied(None)

    def _copied(self: Own, rows: Any) -> Own:
        s, found = self._state, self.__class__.__new__(self.__class__)
        with self._here():
            segments = s.segments if rows is None else selected(s, rows)
            found._module, found._backend = self._module, self._backend
            found._state = self._selected_state(rows, segments)
            found._record = self._record and self._record.selected(rows)
            found._attended = Attended()
        return found

    def _selected_state(self, rows: Any, segments: Segments | None) -> CacheState:
        """A copy of the sequences ``rows (n,)``, by default of all."""
        state = self._state
        found = with_segments(state, segments, state.batch if rows is None else int(rows.shape[0]))
        copy_rows(state, found, rows)
        return found

    def __copy__(self: Own) -> Own:
        """``clone``: two caches that share arrays would overwrite each other's tokens."""
        return self.clone()

    def __deepcopy__(self: Own, memo: dict[int, Any]) -> Own:
        return self.clone()

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: ``state_dict`` and the arguments that it does not imply."""
        return {"saved": self.state_dict(), "dtype": self._state.dtype, "backend": self._backend,
                "kv_heads": self.kv_heads, "storage": self.storage}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state["saved"]
        self._allocate(saved["lengths"].shape[0], state.get("kv_heads", saved["key"].shape[1]), saved["window"],
                       saved["key"].shape[-1], saved["value"].shape[-1], state["dtype"], saved["key"], saved["sinks"],
                       saved["recent"], NAME in saved, state["backend"], saved.get("threshold", -inf),
                       state.get("grows", False), state.get("storage"))
        self.load_state_dict(saved)

    def state_dict(self) -> dict[str, Any]:
        """Everything that ``load_state_dict`` needs: copies of the arrays, in the cache's library, and numbers."""
        with self._here():
            saved = saved_state(self._state)
            if self._record is not None:
                saved[NAME] = self._record.saved(self._state)
        return {name: x if name in (*NUMBERS, SIZES) else self._export(x) for name, x in saved.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved state, in place. Arrays of another library or device are copied through the host.

        Raises
        ------
        KeyError, TypeError, ValueError
            Something is missing, or belongs to a cache of other sizes or types; the cache is then unchanged.
        """
        with self._here():
            record = None
            if self._record is not None:
                if NAME not in saved:
                    raise KeyError(f"saved must contain {NAME}: it is of a cache made without record_stops=True")
                record = Record()
                record.load(same_kind(self._state.scores, saved[NAME], f"saved[{NAME!r}]").array)
            load(self._state, saved)
            self._record = record
        self._attended.forget(self._state)

    def _slots(self) -> tuple[Any, Any, Any, Any]:
        """Keys, values, scores and positions ``(B, Hkv, R, ...)``, without segments the cache's own arrays."""
        with self._here():
            state = rectangular(self._state)
        return state.key.array, state.value.array, state.scores.array, state.positions.array

    # ---- internals --------------------------------------------------------------------------------------------------

    def _copy_from(self, other: KeyCache) -> None:
        """Hold what ``other`` holds, a cache of the same sizes, type and device, in place. Nothing is allocated."""
        with self._here():
            copy_rows(other._state, self._state)
            self._record = other._record and other._record.selected()
        self._attended.forget(self._state)
