"""``extend`` by any number of tokens (chunked prefill), with a backend's ordinary selection and attention.

The kept rows in order of position, followed by the new rows, form a short history of ``R + L`` keys. It is equivalent
to the full history: every evicted key is outranked by ``window`` kept keys at every new position, so prefix selection
over the short history keeps the same keys. With ``base = R - lengths``, the token at position ``p`` has index
``p + base`` in it, and key ``j`` is visible to ``j <= i < stop_j`` with

    stop_j = max(first i at which window better keys exist,      (the backend's prefix_stop)
                 never, if its position < sinks,
                 position + base + recent)

Empty slots come first, rank below everything (score -inf, oldest) and are never visible. New keys that are still needed
after the last new token are then written to slots that are no longer needed, in a copy of the state, which is copied
into place when all else has succeeded.

Packed calls do the same with all sequences concatenated: ``B * R + total`` keys, where sequence ``b`` starts at
``b * R + cu_seqlens[b]`` and each sequence is a history of its own.

A bias that is delayed compares distances: for attention alone the kept rows are then spread (``distances.py``).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.cache.chosen import Chosen
from cupy_dma.cache.distances import places, spread_rows
from cupy_dma.cache.record import PrefixStop, top_stops
from cupy_dma.cache.segments import rectangular
from cupy_dma.cache.slots import flagged_first, index, needed, refreshed, rows
from cupy_dma.cache.snapshot import copied, copy_rows
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.cache.storage import quantized_call, read
from cupy_dma.calls.head_dims import movable, widened
from cupy_dma.calls.sequences import Sequences, sequences_of
from cupy_dma.calls.types import AttentionCall, key_bias
from cupy_dma.masks.documents import runs_between
from cupy_dma.masks.interval import NEVER, Hints, IntervalMask

Attention = Callable[[AttentionCall], tuple[Any, Any]]


def extend_chunk(prefix_stop: PrefixStop, attention: Attention, state: CacheState,
                 call: ExtendCall) -> tuple[Any, Any]:
    """``out (B, L, H, Dv)`` and ``lse (B, H, L)``, None without a query, computed by these functions of a backend."""
    with state.library.on(state.device):
        if call.length == 0 or call.batch == 0:
            return no_tokens(state, call)
        target, chosen, call = state, None, quantized_call(state, call)
        if call.slots is None:
            state = rectangular(state)
        else:
            chosen = Chosen.by(state, call.slots)
            state, call = chosen.copied(state), chosen.call(state, call)
        history = _Padded(state, call) if call.cu_seqlens is None else _Packed(state, call)
        order = state.library.xp.argsort(state.positions.array)
        position = history.positions(_sorted(state, state.positions, order))
        score = history.scores(_sorted(state, state.scores, order))
        top = top_stops(prefix_stop, state, score, history.document)
        found = None
        if call.query is not None:
            mask = _visible(state, history, position, top)
            seen, source, delay = history, order, 0
            if call.bias_delay and call.is_biased:
                seen, source, mask, delay = _spread(state, call, history, order, mask)
                score = seen.scores(_sorted(state, state.scores, source))
            found = _attend(attention, state, call, seen, source, score, mask, delay)
        after = _stored(state, call, history, order, position, top, state is not target) if call.commits else None
        results = (None, None) if found is None else delivered(state, call, *found)
        if after is not None and chosen is not None:
            chosen.put(after, state, target)
        elif after is not None:
            copy_rows(after, target)
    return results


def no_tokens(state: CacheState, call: ExtendCall) -> tuple[Any, Any]:
    """The results of a call without tokens."""
    if call.query is None:
        return None, None
    library, (batch, length, heads, _) = state.library, call.query.shape
    out = library.full((batch, length, heads, state.value_dim), 0, state.dtype, state.device)
    lse = library.full((batch, heads, length), -float("inf"), state.scores.dtype, state.device)
    return delivered(state, call, out, lse)


class _Padded:
    """Histories ``(B, Hkv, R + L)``: each sequence's kept rows, then its new ones."""

    document: Operand | None = None
    sequences: Sequences | None = None

    def __init__(self, state: CacheState, call: ExtendCall, rows: int | None = None):
        """``rows`` for those that are kept, by default as many as the cache has."""
        library, device, self.rows = state.library, state.device, state.rows if rows is None else rows
        self.state, self.call, self.length = state, call, self.rows + call.length
        self.shape = (state.batch, state.kv_heads, self.length)
        if call.lengths is None:
            self.added = library.full((state.batch,), call.length, "int64", device)
        else:
            self.added = library.astype(call.lengths.array, "int64")
        self.base = self.of_tokens(self.rows - state.lengths.array)
        self.end = self.of_tokens(self.added + self.rows)  # one past the last real token
        self.new_positions = (state.lengths.array[:, None] + index(state, call.length))[:, None]
        self.ragged = call.lengths is not None
        self.batch_of_new = index(state, state.batch)[:, None, None]  # batch index of each sequence's new tokens

    def of_tokens(self, each: Any) -> Any:
        """A number per sequence, ``(B,)``, broadcast to its new tokens."""
        return each[:, None, None]

    def shifts(self, more: int) -> tuple[Any, Any]:
        """By how much indices of kept rows and of new tokens grow if every sequence has ``more`` rows."""
        return more, more

    def put(self, target: Any, old: Any, new: Any) -> None:
        """Write ``old (B, Hkv, R, ...)`` and ``new (B, Hkv|1, L, ...)`` into a history."""
        target[:, :, :self.rows] = old
        target[:, :, self.rows:] = new

    def separated(self, joined: Any) -> tuple[Any, Any]:
        """The inverse of ``put``: old and new."""
        return joined[:, :, :self.rows], joined[:, :, self.rows:]

    def kept_tokens(self, keep: Any, most: int) -> tuple[Any, Any]:
        """Indices of the new tokens to ``keep (B, Hkv, L)``: int64 ``(B, Hkv, most)``, of which the first
        ``count (B, Hkv)`` are valid."""
        return flagged_first(self.state, keep)[..., :most], keep.sum(-1)

    def joined(self, old: Any, new: Any, dtype: str) -> Any:
        target = self.state.library.empty(self.shape, dtype, self.state.device)
        self.put(target, old, new)
        return target

    def positions(self, old: Any) -> Any:
        """int64, -1 where a slot is empty."""
        return self.joined(old, self.new_positions, "int64")

    def scores(self, old: Any) -> Operand:
        """-inf where a slot is empty."""
        state = self.state
        joined = self.joined(old, self.call.scores.array, state.scores.dtype)
        return state.library.operand(joined, "scores")

    def rows_of(self, name: str, order: Any, size: int) -> Operand:
        """``(B, R + L, Hkv, size)`` of key or value, with zero columns up to ``size``."""
        state, library, shape, new = self.state, self.state.library, (*self.shape, size), getattr(self.call, name)
        dtype, own = state.dtype, new.shape[3]
        joined = (library.empty(shape, dtype, state.device) if own == size else
                  library.full(shape, 0, dtype, state.device))
        batch, head = index(state, state.batch)[:, None, None], index(state, state.kv_heads)[:, None]
        columns = movable(library, joined, dtype)[..., :own]
        self.put(columns, read(state, name, (batch, head, order)), rows(state, new).swapaxes(1, 2))
        return library.operand(joined.swapaxes(1, 2), name)


class _Packed(_Padded):
    """One history ``(1, Hkv, B * R + total)`` for all sequences. Tokens after the last sequence are not real."""

    def __init__(self, state: CacheState, call: ExtendCall, rows: int | None = None):
        library, device, batch, rows = state.library, state.device, state.batch, state.rows if rows is None else rows
        self.state, self.call, self.rows, self.ragged = state, call, rows, call.lengths is not None
        self.length = batch * rows + call.length
        self.shape = (1, state.kv_heads, self.length)
        assert call.cu_seqlens is not None
        bounds = library.astype(call.cu_seqlens.array, "int32")
        self.bounds = library.astype(bounds, "int64")
        self.added = self.bounds[1:] - self.bounds[:-1]
        if call.lengths is not None:
            self.added = library.xp.minimum(self.added, library.astype(call.lengths.array, "int64"))
        self.first = bounds + library.arange(0, batch + 1, device) * rows  # of each sequence in the history

        def sequence(of: Any, count: int) -> Any:
            """The sequence of each of ``count`` tokens or keys; those after the last sequence count as part of it."""
            number = library.search_right(of, library.arange(0, count, device)) - 1
            return library.astype(library.xp.clip(number, None, batch - 1), "int64")

        self.token, key = sequence(bounds, call.length), sequence(self.first, self.length)
        self.old = library.astype(self.first[:-1], "int64")[:, None] + index(state, rows)
        self.new = index(state, call.length) + (self.token + 1) * rows
        lengths, first = state.lengths.array, library.astype(self.first, "int64")
        self.base = (first[:-1] + rows - lengths)[key][None, None]
        self.end = (first[:-1] + rows + self.added)[key][None, None]
        self.new_positions = self.of_tokens(lengths - self.bounds[:-1]) + index(state, call.length)
        self.batch_of_old = index(state, batch)[:, None, None]
        self.batch_of_new = self.batch_of_old * 0
        runs = runs_between(library, device, self.first, self.length)
        self.document = library.operand(runs.first, "cu_seqlens")
        if call.query is not None:
            self.sequences = sequences_of(call.query, Operand(
                "key", None, library, (1, self.length, state.kv_heads, state.head_dim), (), state.dtype, device, 0),
                call.cu_seqlens.array, self.first, None, None)

    def of_tokens(self, each):
        return each[self.token][None, None]

    def shifts(self, more):
        return (self.batch_of_old + 1) * more, (self.token + 1)[None, None] * more

    def put(self, target, old, new):
        target[0][:, self.old] = old.swapaxes(0, 1)
        target[0][:, self.new] = self.state.library.xp.broadcast_to(new[0], (self.shape[1], *new.shape[2:]))

    def separated(self, joined):
        return joined[0][:, self.old].swapaxes(0, 1), joined[0][:, self.new][None]

    def kept_tokens(self, keep, most):
        state, library = self.state, self.state.library
        _, heads, total = keep.shape
        before = library.full((heads, total + 1), 0, "int64", state.device)  # kept tokens before each one
        before[:, 1:] = library.cumsum(library.astype(keep[0], "int32"))
        begin = before[:, self.bounds].swapaxes(0, 1)  # (B + 1, Hkv)
        indices = library.xp.clip(begin[:-1, :, None] + index(state, most), None, total - 1)
        return flagged_first(state, keep)[0][index(state, heads)[:, None], indices], begin[1:] - begin[:-1]


def _sorted(state: CacheState, operand: Operand, order: Any) -> Any:
    """The slots ``(B, Hkv, R, ...)`` in ``order``; empty slots have score -inf."""
    batch, head = index(state, state.batch)[:, None, None], index(state, state.kv_heads)[:, None]
    if operand is state.scores:
        empty = state.positions.array < 0
        return state.library.xp.where(empty, -float("inf"), operand.array)[batch, head, order]
    return rows(state, operand)[batch, head, order]


def _visible(state: CacheState, history: _Padded, position: Any, top: Any) -> IntervalMask:
    """Which keys of the history the new queries see."""
    library, xp, stop = state.library, state.library.xp, top
    if state.recent:
        until = xp.clip(position + (history.base + state.recent), 0, NEVER)
        stop = xp.maximum(stop, library.astype(until, "int32"))
    if state.sinks:
        stop = xp.where(position < state.sinks, NEVER, stop)
    if history.ragged:  # queries past a row's last real token see nothing
        stop = xp.minimum(stop, library.astype(history.end, "int32"))
    stop = library.astype(xp.where(position < 0, 0, stop), "int32")
    # At most R keys are visible at a position, and each next position adds one.
    return IntervalMask._make(library, library.arange(0, history.length, state.device), stop,
                              Hints("key", (state.rows, 1)))


def _spread(state: CacheState, call: ExtendCall, history: _Padded, order: Any,
            mask: IntervalMask) -> tuple[_Padded, Any, IntervalMask, int]:
    """A history whose row distances equal position distances; returns it, the slots of its rows (arbitrary for empty
    rows), its mask and the delay to use."""
    library, xp, device = state.library, state.library.xp, state.device
    rows, delay = spread_rows(state.rows, call.length, call.bias_delay)
    wide = type(history)(state, call, rows)
    batch, head = index(state, state.batch)[:, None, None], index(state, state.kv_heads)[:, None]
    position, slot = state.positions.array[batch, head, order], index(state, state.rows)
    place = places(xp, state.lengths.array[:, None, None] - position, slot, state.rows, call.length, call.bias_delay)
    place = xp.where(position < 0, slot, place)
    source, stop = (library.full((state.batch, state.kv_heads, rows), 0, "int64", device) for _ in range(2))
    source[batch, head, place] = order
    shape = (*history.shape[:2], history.length)
    parts = [library.astype(x, "int64") for x in history.separated(xp.broadcast_to(mask._stop.array, shape))]
    old, new = (xp.clip(x + shift, None, NEVER) for x, shift in zip(parts, history.shifts(rows - state.rows)))
    stop[batch, head, place] = xp.where(position < 0, 0, old)
    stops = library.astype(wide.joined(stop, new, "int64"), "int32")
    return wide, source, IntervalMask._make(library, library.arange(0, wide.length, device), stops, mask._hints), delay


def _attend(attention: Attention, state: CacheState, call: ExtendCall, history: _Padded, order: Any, score: Operand,
            mask: IntervalMask, delay: int) -> tuple[Any, Any]:
    """Attention of the new queries over the history. If key and value differ in width, zero columns even them out."""
    assert call.query is not None
    size = max(state.head_dim, state.value_dim)
    key, value = (history.rows_of(name, order, size) for name in ("key", "value"))
    bias = key_bias(score) if call.is_biased else None
    return attention(AttentionCall(widened(call.query, size), key, value, mask, None, bias, False,
                                   call.scale, call.softcap, False, sequences=history.sequences, bias_delay=delay))


def delivered(state: CacheState, call: ExtendCall, out: Any, lse: Any) -> tuple[Any, Any]:
    """The results without padding columns, in the call's output arrays if it has any."""
    library, dtype, size = state.library, state.dtype, state.value_dim
    if call.out is not None or out.shape[3] > size:
        target = library.empty((*out.shape[:3], size), dtype, state.device) if call.out is None else call.out.array
        movable(library, target, dtype)[...] = movable(library, out, dtype)[..., :size]
        out = target
    if call.lse is not None:
        call.lse.array[...] = lse
        lse = call.lse.array
    return out, lse


def _stored(state: CacheState, call: ExtendCall, history: _Padded, order: Any, position: Any, top: Any,
            is_copy: bool) -> CacheState:
    """A copy of the state with the new keys that are needed after the last new token, and only those. ``is_copy``: its
    rows are copies already."""
    state = copied(state, ("lengths",) if is_copy else state.saved)
    library, xp = state.library, state.library.xp
    batch, head = index(state, state.batch)[:, None, None], index(state, state.kv_heads)[:, None]
    real = (position >= 0) & (library.arange(0, history.length, state.device) < history.end)
    old_top, new_top = history.separated(real & (top >= history.end))
    state.in_top.array[batch, head, order] = library.astype(old_top, "uint8")

    state.lengths.array[...] = state.lengths.array + history.added
    last = state.lengths.array - 1
    keep = new_top
    if state.sinks:
        keep = keep | (history.new_positions < state.sinks)
    if state.recent:
        keep = keep | (history.new_positions > history.of_tokens(last) - state.recent)
    keep = keep & history.separated(real)[1]

    most = min(state.rows, call.length)
    token, count = history.kept_tokens(keep, most)
    slot = flagged_first(state, ~needed(state, last))[..., :most]
    taken = index(state, most) < count[..., None]
    source = history.batch_of_new
    stored = call.stored or {"key": call.key, "value": call.value}
    for target, fresh in (
            *((rows(state, getattr(state, name)), rows(state, new)[source, token, head])
              for name, new in stored.items()),
            (state.scores.array, call.scores.array[source, head, token]),
            (state.positions.array, history.new_positions[source, 0, token]),
            (state.in_top.array, library.astype(new_top, "uint8")[source, head, token])):
        changed = taken if target.ndim == 3 else taken[..., None]
        target[batch, head, slot] = xp.where(changed, fresh, target[batch, head, slot])
    return refreshed(state)
