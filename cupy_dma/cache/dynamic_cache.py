"""Decoding of unbounded length in constant memory (SPEC section 7).

Under prefix selection a key that has dropped out of the kept set never returns, so ``window`` rows per kv head give
exactly the attention over the full history, however long it gets. ``state.py`` documents what is stored and when a slot
may be overwritten; backends do the work (``cache_extend``).
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupy_dma import backends, checks
from cupy_dma.arrays import describe, numpy_dtype
from cupy_dma.cache.arguments import batch_rows, extend_call, type_name
from cupy_dma.cache.slots import AFTER_ALL, index, needed
from cupy_dma.cache.snapshot import ARRAYS, NUMBERS, copy_rows, empty_state, forget, load, saved_state
from cupy_dma.masks.windows import Window, widest, window_of


class KeptKeys(NamedTuple):
    """What a cache keeps, oldest first."""

    positions: Any  # int64 (B, Hkv, R): index in the sequence, -1 after the last kept key
    scores: Any  # float (B, Hkv, R), -inf after the last kept key


class DynamicCache:
    """The KV cache of one attention layer: the keys, values and scores that later queries can still see.

    The token at position ``p`` of its sequence attends to the ``window`` highest-scored of all tokens so far (SPEC
    section 3: NaN ranks highest, the newest of equal scores first), to the first ``sinks`` tokens, and to the last
    ``recent`` tokens, including itself; scores are key biases. This equals ``top_w(scores, window) | sinks(n, sinks) |
    sliding_window(n, recent)`` over the full history, without storing it.

    Parameters
    ----------
    batch, kv_heads, head_dim : int
        ``B``, ``Hkv`` and ``D`` (1 to 256).
    window : int, or one int per kv head
        ``w``, at least 1.
    value_dim : int, optional
        ``Dv``, 1 to 256; default ``head_dim``.
    dtype
        Type of queries, keys and values: a name ("float16", "bfloat16", "float32"; "float64" on the numpy backend) or
        a NumPy or torch dtype. Default: that of ``like``, bfloat16 without it. Scores are kept in float32 (float64 in
        a float64 cache).
    like : array, optional
        Sets the library and device of the cache, default NumPy, and the type unless ``dtype`` does.
    sinks, recent : int
        How many first and last tokens are kept in addition to the top. A key may belong to several of these sets.
    backend
        See ``cupy_dma.get_available_backends``; ``cuda`` and ``numpy`` have a cache.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value, or the backend does not take arrays on this device.
    RuntimeError
        The backend cannot run here.

    Notes
    -----
    ``B * Hkv * (window + sinks + recent)`` rows are allocated up front and never grow; where windows differ, every head
    has the rows of the widest. All calls work in place on the arrays' device and the current stream, and never
    synchronize. A cache carries no gradient.
    """

    def __init__(self, batch: int, kv_heads: int, window: int | Sequence[int], head_dim: int,
                 value_dim: int | None = None, dtype: Any = None, *, like: Any = None, sinks: int = 0, recent: int = 0,
                 backend: str | None = None):
        batch, kv_heads = checks.whole(batch, "batch", 0), checks.whole(kv_heads, "kv_heads", 1)
        window = window_of(window, kv_heads)
        sinks, recent = checks.whole(sinks, "sinks", 0), checks.whole(recent, "recent", 0)
        size = checks.whole(head_dim, "head_dim", 1)
        sizes = size, size if value_dim is None else checks.whole(value_dim, "value_dim", 1)
        for size, name in zip(sizes, ("head_dim", "value_dim")):
            if size > 256:
                raise ValueError(f"{name} must be 1 to 256, got {size}")
        if (rows := widest(window) + sinks + recent) >= 2**31:
            raise ValueError(f"window + sinks + recent must be below 2**31, got {rows}")
        seen = describe(np.empty(0) if like is None else like, "like")
        if dtype is None and like is not None:
            checks.one_of_types(seen)
        kind = type_name(dtype or ("bfloat16" if like is None else seen.dtype))
        self._module, library, device = backends.choose(backend, (seen,)), seen.library, seen.device
        self._backend = backend
        if kind == "float64" and device.kind == "cuda" and backend != "numpy":
            raise TypeError("dtype must be float16, bfloat16 or float32 on CUDA, got float64 (backend='numpy' takes "
                            "it)")
        with library.on(device):
            self._state = empty_state(library, device, kind, batch, kv_heads, (window, sinks, recent), *sizes)

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def extend(self, query: Any, key: Any, value: Any, scores: Any, *, bias_delay: int = 0,
               scale: float | None = None, softcap: float = 0.0, lengths: Any = None, cu_seqlens: Any = None,
               tail_padding: bool = False, return_lse: bool = False, out: Any = None) -> Any:
        """Append ``L >= 0`` tokens to every sequence and attend from them: a prompt, a chunk of one, or one new token.

        Parameters
        ----------
        query : array ``(B, L, H, D)`` of the cache's type, library and device
            ``H`` is a multiple of ``Hkv``.
        key, value : array ``(B, L, Hkv, D)`` and ``(B, L, Hkv, Dv)``
            Any strides of B, L and head, the last axis contiguous.
        scores : float array ``(B, Hkv, L)``
            See ``cupy_dma.key_scores``. Copied if the last axis is not contiguous.
        bias_delay, scale, softcap
            As for ``attention``: the scores are the bias. ``scale`` defaults to ``1 / sqrt(D)``.
        lengths : int32 or int64 array ``(B,)`` or list, optional
            The first ``lengths[b]`` tokens of row ``b`` are real; the others are ignored and get ``out = 0, lse =
            -inf``.
        cu_seqlens : int32 or int64 array ``(B + 1,)`` or list, optional
            Cumulative lengths: the new tokens of all sequences are concatenated, ``(total, H, D)``, scores
            ``(Hkv, total)``.
        tail_padding
            Allow tokens after the last sequence, as in arrays of a fixed size: they are ignored and get ``out = 0,
            lse = -inf``. False: lengths that end early raise where their values are checked (see below).
        return_lse
            Return ``(out, lse)``.
        out : array, or with ``return_lse`` a pair of arrays, optional
            Where to write the results; contiguous.

        Returns
        -------
        out : array ``(B, L, H, Dv)``, contiguous, or ``(total, H, Dv)``
        lse : float32 array ``(B, H, L)``, or ``(H, total)``, natural log (float64 in a float64 cache)

        Raises
        ------
        TypeError, ValueError
            An argument has the wrong type, shape or device; nothing has been launched. Values of ``lengths`` and
            ``cu_seqlens`` are always checked in host memory, in GPU memory only with ``CUPY_DMA_CHECK=1``.
        NotImplementedError
            A torch tensor requires grad, or the backend has no cache.
        """
        if query is None:
            raise TypeError("query must be an array, got None (update appends tokens without queries)")
        call = extend_call(self._state, query, key, value, scores, scale, softcap, lengths, cu_seqlens, return_lse, out,
                           tail_padding, bias_delay)
        results = self._module.cache_extend(self._state, call)[:2 if call.return_lse else 1]
        if out is not None:
            return out if not call.return_lse else tuple(out)
        assert call.query is not None
        export, packed = call.query.library.export, call.cu_seqlens is not None
        found = tuple(export(array[0] if packed else array) for array in results)
        return found if call.return_lse else found[0]

    def update(self, key: Any, value: Any, scores: Any, *, lengths: Any = None, cu_seqlens: Any = None,
               tail_padding: bool = False) -> None:
        """Append tokens without queries. Arguments and errors as for ``extend``.

        >>> cache = DynamicCache(1, 2, window=4, head_dim=8, dtype="float32")
        >>> cache.update(*np.ones((2, 1, 10, 2, 8), np.float32), np.zeros((1, 2, 10), np.float32))
        >>> cache.length
        array([10])
        """
        call = extend_call(self._state, None, key, value, scores, None, 0.0, lengths, cu_seqlens, False, None,
                           tail_padding)
        self._module.cache_extend(self._state, call)

    def reset(self) -> None:
        """Remove all tokens, in place."""
        with self._here():
            forget(self._state)

    # ---- contents ---------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """``B``: sequences."""
        return self._state.batch

    @property
    def kv_heads(self) -> int:
        """``Hkv``."""
        return self._state.kv_heads

    @property
    def head_dim(self) -> int:
        """``D`` of queries and keys."""
        return self._state.head_dim

    @property
    def window(self) -> Window:
        """``w``: highest-scored keys that are kept; a tuple if it differs between kv heads."""
        return self._state.window

    @property
    def sinks(self) -> int:
        """First tokens that are kept as well."""
        return self._state.sinks

    @property
    def recent(self) -> int:
        """Last tokens that are kept as well."""
        return self._state.recent

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
            score = xp.where(where < 0, -float("inf"), state.scores.array)
            batch, head = index(state, state.batch)[:, None, None], index(state, state.kv_heads)[:, None]
            return KeptKeys(*(self._export(array[batch, head, order]) for array in (where, score)))

    def _kept_positions(self) -> Any:
        """Positions of the keys that the last token sees, -1 elsewhere."""
        state = self._state
        return state.library.xp.where(needed(state, state.lengths.array - 1), state.positions.array, -1)

    @property
    def memory_bytes(self) -> int:
        """Size of the cache's arrays in bytes."""
        return sum(prod(x.shape) * numpy_dtype(x.dtype).itemsize for x in
                   (getattr(self._state, name) for name in ARRAYS))

    def __repr__(self) -> str:
        s = self._state
        return (f"DynamicCache(batch={s.batch}, kv_heads={s.kv_heads}, window={s.window}, head_dim={s.head_dim}, "
                f"value_dim={s.value_dim}, dtype={s.key.dtype!r}, sinks={s.sinks}, recent={s.recent}, "
                f"library={s.library.name!r}, device={str(s.device)!r})")

    # ---- whole sequences --------------------------------------------------------------------------------------------

    def reorder(self, indices: Any) -> None:
        """Replace sequence ``b`` by the former sequence ``indices[b]``, in place: a step of beam search.

        ``indices``: int32 or int64 array ``(B,)`` of the cache's library and device, or a list of ints.
        """
        rows = batch_rows(indices, self._state.key, self._state.batch, self._state.batch)
        with self._here():
            copy_rows(self._state, self._state, rows)

    def select_batch(self, indices: Any) -> DynamicCache:
        """A new cache of the sequences ``indices (n,)``, as for ``reorder``; they may repeat."""
        return self._copied(batch_rows(indices, self._state.key, self._state.batch))

    def clone(self) -> DynamicCache:
        """A copy that shares no memory."""
        return self._copied(None)

    def _copied(self, rows: Any) -> DynamicCache:
        s, found = self._state, DynamicCache.__new__(DynamicCache)
        with self._here():
            batch = s.batch if rows is None else int(rows.shape[0])
            found._module, found._backend = self._module, self._backend
            found._state = empty_state(s.library, s.device, s.key.dtype, batch, s.kv_heads,
                                       (s.window, s.sinks, s.recent), s.head_dim, s.value_dim)
            copy_rows(s, found._state, rows)
        return found

    def __copy__(self) -> DynamicCache:
        """``clone``: two caches that share arrays would overwrite each other's tokens."""
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicCache:
        return self.clone()

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: ``state_dict`` and the arguments that it does not imply."""
        return {"saved": self.state_dict(), "dtype": self._state.key.dtype, "backend": self._backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state["saved"]
        batch, kv_heads, _, head_dim = saved["key"].shape
        self.__init__(batch, kv_heads, saved["window"], head_dim, saved["value"].shape[3],  # type: ignore[misc]
                      state["dtype"], like=saved["key"], sinks=saved["sinks"], recent=saved["recent"],
                      backend=state["backend"])
        self.load_state_dict(saved)

    def state_dict(self) -> dict[str, Any]:
        """Everything that ``load_state_dict`` needs: copies of the arrays, in the cache's library, and numbers."""
        with self._here():
            saved = saved_state(self._state)
        return {name: x if name in NUMBERS else self._export(x) for name, x in saved.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved state, in place. Arrays of another library or device are copied through the host.

        Raises
        ------
        KeyError, TypeError, ValueError
            Something is missing, or belongs to a cache of other sizes or types; the cache is then unchanged.
        """
        with self._here():
            load(self._state, saved)

    # ---- internals --------------------------------------------------------------------------------------------------

    def _copy_from(self, other: DynamicCache) -> None:
        """Hold what ``other`` holds, a cache of the same sizes, type and device, in place. Nothing is allocated."""
        with self._here():
            copy_rows(other._state, self._state)

    def _here(self) -> AbstractContextManager:
        return self._state.library.on(self._state.device)

    def _export(self, array: Any) -> Any:
        return self._state.library.export(array)
