"""Decoding with learned eviction (SPEC sections 16 and 18): a cache that keeps the keys whose gates are open.

It is the cache of ``state.py`` with gates as scores: the last ``delay`` keys are its recent ones, and keys whose gate
is closed are never in its top. Without a capacity, every (sequence, kv head) has its own number of rows
(``segments.py``), which grows with its open gates. The host reads these numbers when it cannot be sure that the next
tokens fit.
"""
from __future__ import annotations

from itertools import chain
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Array, Ints, Windows
from cupy_dma.cache.arguments import extend_call, given
from cupy_dma.cache.chosen import Chosen
from cupy_dma.cache.key_cache import KeyCache
from cupy_dma.cache.segments import segments_of
from cupy_dma.cache.slots import index
from cupy_dma.cache.snapshot import SIZES, resized, with_segments
from cupy_dma.cache.state import CacheState, ExtendCall, Segments
from cupy_dma.masks.windows import Window

# Of a top without a bound: the least new room, the least room that is left after a count, and what room is rounded to.
ROWS, SPARE, MULTIPLE = 64, 32, 16


class GatedCache(KeyCache):
    """The KV cache of one attention layer with a gate per key and kv head, which decides how long the key is kept.

    The token at position ``p`` of its sequence attends to the last ``delay`` tokens, including itself, to the first
    ``sinks``, and to all keys whose gate is open, ``log_gate >= threshold``. This equals ``from_gate(log_gate,
    delay=delay, threshold=threshold, sinks=sinks)`` over the full history, without storing it. From distance ``delay``
    on, ``log_gate`` is added to a key's logits.

    With a ``capacity``, the token attends to at most that many open keys besides the last and first tokens: those with
    the highest gates of all tokens so far; of equal gates, the newest.

    Parameters
    ----------
    batch, kv_heads, head_dim : int
        ``B``, ``Hkv`` and ``D`` (1 to 256).
    value_dim : int, optional
        ``Dv``, 1 to 256; default ``head_dim``.
    dtype, like
        As for ``DynamicCache``.
    delay : int
        Number of last keys that are kept whatever their gates, at least 1.
    threshold : float
        Gates are open if their logarithm is at least this. Finite and below 0.
    capacity : int, or one int per kv head, optional
        Maximum number of open keys that are kept. Unlimited by default.
    sinks : int
        Number of first tokens that are kept whatever their gates.
    storage : "int8" or "fp8", optional
        As for ``DynamicCache``.
    record_stops : bool
        Keep the gates of all tokens, for ``stops``: 4 bytes per token and kv head, growing with the text.
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
    With a capacity, the constructor allocates ``capacity + sinks + delay`` rows per kv head (with its own capacity),
    and calls never synchronize. Without one, each kv head of a sequence has the rows that its open keys need, plus a
    quarter or 64, whichever is more. Calls then read the numbers of open keys from the GPU: with several tokens always,
    with one token when a head's rows may be used up. ``reorder`` and ``select_batch`` read ``indices``.
    """

    _grows = False
    _room = 0  # without a capacity: so many tokens fit surely

    def __init__(self, batch: int, kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: Any = None, *,
                 delay: int, threshold: float, capacity: Windows | None = None, sinks: int = 0,
                 like: Array | None = None, storage: str | None = None, record_stops: bool = False,
                 backend: str | None = None):
        delay, threshold = checks.delay(checks.whole(delay, "delay", 1)), checks.real(threshold, "threshold")
        self._grows = capacity is None
        window = ROWS if capacity is None else capacity
        if isinstance(window, int):
            checks.whole(window, "capacity", 1)
        self._allocate(batch, kv_heads, window, head_dim, value_dim, dtype, like, sinks, delay, record_stops, backend,
                       threshold, self._grows, storage)

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def extend(self, query: Array, key: Array, value: Array, log_gate: Array, *, add_gates: bool = True,
               scale: float | None = None, softcap: float = 0.0, lengths: Ints | None = None,
               cu_seqlens: Ints | None = None, tail_padding: bool = False, slots: Ints | None = None,
               return_lse: bool = False, out: Array | tuple[Array, Array] | None = None) -> Any:
        """Append ``L >= 0`` tokens to every sequence and attend from them: a prompt, a chunk of one, or one new token.

        Parameters
        ----------
        query, key, value
            As for ``DynamicCache.extend``.
        log_gate : float array ``(B, Hkv, L)``, or with ``cu_seqlens`` ``(Hkv, total)``
            The logarithms of the keys' gates. NaN is an open gate, above all others.
        add_gates : bool
            False: gates only decide which keys are kept; they are not added to the logits.
        scale, softcap, lengths, cu_seqlens, tail_padding, slots, return_lse, out
            As for ``DynamicCache.extend``.

        Returns
        -------
        As for ``DynamicCache.extend``.

        Raises
        ------
        TypeError, ValueError, NotImplementedError
            As for ``DynamicCache.extend``.
        RuntimeError
            The cache has no capacity, and the call is captured in a CUDA graph.
        """
        call = extend_call(self._state, given(query), key, value, log_gate, scale, softcap, lengths, cu_seqlens,
                           return_lse, out, tail_padding, self.delay, "log_gate", slots)
        call.is_biased = checks.flag(add_gates, "add_gates")
        return self._extended(call, out)

    def attend(self, query: Array, key: Array, value: Array, log_gate: Array, *, add_gates: bool = True,
               scale: float | None = None, softcap: float = 0.0, lengths: Ints | None = None,
               cu_seqlens: Ints | None = None, tail_padding: bool = False, slots: Ints | None = None,
               return_lse: bool = False, out: Array | tuple[Array, Array] | None = None) -> Any:
        """Return what ``extend`` would, without changing the cache. The tokens are copied, so ``commit`` can append the
        first of them; the next ``attend`` replaces them. Arguments and errors as for ``extend``.
        """
        call = extend_call(self._state, given(query), key, value, log_gate, scale, softcap, lengths, cu_seqlens,
                           return_lse, out, tail_padding, self.delay, "log_gate", slots)
        call.is_biased, call.commits = checks.flag(add_gates, "add_gates"), False
        return self._extended(call, out)

    def update(self, key: Array, value: Array, log_gate: Array, *, lengths: Ints | None = None,
               cu_seqlens: Ints | None = None, tail_padding: bool = False, slots: Ints | None = None) -> None:
        """Append tokens without queries. Arguments and errors as for ``extend``.

        >>> cache = dma.GatedCache(1, 2, head_dim=8, dtype="float32", delay=3, threshold=-1.0)
        >>> gate = np.where(np.arange(10) % 4, -np.inf, 0)[None, None].repeat(2, 1)
        >>> cache.update(*np.ones((2, 1, 10, 2, 8), np.float32), gate.astype(np.float32))
        >>> cache.kept().positions[0, 0, :6]
        array([ 0,  4,  7,  8,  9, -1])
        """
        call = extend_call(self._state, None, key, value, log_gate, None, 0.0, lengths, cu_seqlens, False, None,
                           tail_padding, name="log_gate", slots=slots)
        self._take(call)

    def _take(self, call: ExtendCall) -> tuple[Any, Any]:
        self._make_room(call)
        return super()._take(call)

    def _attend(self, call: ExtendCall) -> tuple[Any, Any]:
        self._make_room(call)
        return super()._attend(call)

    def _make_room(self, call: ExtendCall) -> None:
        """Rows for the open keys that there can be after the call, in a cache that grows."""
        state = self._state
        if not self._grows:
            return
        if state.library.is_capturing(state.device):
            raise RuntimeError("a GatedCache without a capacity cannot take tokens in a CUDA graph: it may have to "
                               "grow; give it a capacity")
        if call.length <= self._room:
            self._room -= call.length
            return
        with self._here():
            self._count(call)

    def _count(self, call: ExtendCall) -> None:
        """The same, by the numbers of open keys that there are."""
        state = self._state
        assert state.segments is not None
        left = state.library.xp.clip(-state.lowest.array, 0, None) - _open(state, call)  # ``lowest`` counts room
        lefts, besides = state.library.to_numpy(left).ravel().tolist(), state.sinks + state.recent
        counts = [size - besides - left for size, left in zip(state.segments.sizes, lefts)]
        rooms = [_enlarged(count + left, count) for count, left in zip(counts, lefts)]
        sizes = tuple([room + besides for room in rooms])
        if sizes != state.segments.sizes:
            self._state = resized(state, segments_of(state.library, state.device, sizes, state.batch, state.kv_heads))
        self._room = min([room - count for room, count in zip(rooms, counts)], default=0)

    # ---- contents ---------------------------------------------------------------------------------------------------

    @property
    def _is_growing(self) -> bool:
        return self._grows or super()._is_growing

    @property
    def delay(self) -> int:
        """Number of last tokens that are kept whatever their gates."""
        return self._state.recent

    @property
    def threshold(self) -> float:
        """Smallest logarithm of an open gate."""
        return self._state.threshold

    @property
    def capacity(self) -> Window | None:
        """Maximum number of open keys that are kept; None if unlimited."""
        return None if self._grows else self._state.window

    def _saved_segments(self, saved: dict[str, Any]) -> Segments:
        """Those of a saved state."""
        state = self._state
        batch, heads, besides = state.batch, state.kv_heads, state.sinks + state.recent
        if SIZES in saved:
            sizes = [[checks.whole(size, f"saved['{SIZES}']", 1 + besides) for size in each] for each in saved[SIZES]]
            if [len(each) for each in sizes] != [heads] * batch:
                raise ValueError(f"saved['{SIZES}'] must be {batch} lists of {heads} numbers, got {saved[SIZES]}")
        else:  # every head has the rows of the one with the most
            window = checks.whole(saved.get("window", state.window), "saved['window']", 1)
            sizes = [[window + besides] * heads] * batch
        return segments_of(state.library, state.device, tuple(chain(*sizes)), batch, heads)

    # ---- whole sequences --------------------------------------------------------------------------------------------

    def _copied(self, rows: Any) -> GatedCache:
        found = super()._copied(rows)
        found._grows, found._room = self._grows, self._room
        return found

    def _copy_from(self, other: Any) -> None:
        mine, its = self._state.segments, other._state.segments
        if mine is not None and mine.sizes != its.sizes:
            self._state = other.clone()._state
        super()._copy_from(other)
        self._room = other._room

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "grows": self._grows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._grows = state["grows"]
        super().__setstate__(state)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved state in place; a cache without a capacity gets new rows. Arrays of another library or device
        are copied through the host.

        Raises
        ------
        KeyError, TypeError, ValueError
            Something is missing, or belongs to a cache of other sizes or types; the cache is unchanged.
        """
        before, self._room = self._state, 0
        try:
            if self._grows:
                with self._here():
                    self._state = with_segments(before, self._saved_segments(saved), before.batch)
            super().load_state_dict(saved)
        except BaseException:
            self._state = before
            raise


def _enlarged(room: int, count: int) -> int:
    """Room for ``count`` open keys: as it is, or larger if little is left."""
    return room if room - count >= SPARE else -(-(count + max(ROWS, count // 4)) // MULTIPLE) * MULTIPLE


def _open(state: CacheState, call: ExtendCall) -> Any:
    """How many of the new keys' gates are open, int64 ``(B, Hkv)``."""
    library = state.library
    if call.slots is not None:
        chosen = Chosen.by(state, call.slots)
        found = library.full((state.batch, state.kv_heads), 0, "int64", state.device)
        found[chosen.rows] = _open(state, chosen.call(state, call))
        return found
    is_open = ~(call.scores.array < state.threshold)
    real = None if call.lengths is None else library.astype(call.lengths.array, "int64")
    if call.cu_seqlens is not None:
        bounds = library.astype(call.cu_seqlens.array, "int64")
        before = library.full((state.kv_heads, call.length + 1), 0, "int64", state.device)
        before[:, 1:] = library.cumsum(library.astype(is_open[0], "int32"))
        end = bounds[1:] if real is None else library.xp.minimum(bounds[1:], bounds[:-1] + real)
        return (before[:, end] - before[:, bounds[:-1]]).swapaxes(0, 1)
    if real is not None:
        is_open = is_open & (index(state, call.length) < real[:, None, None])
    return library.astype(is_open, "int64").sum(-1)
