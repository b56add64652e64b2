"""The decode cache: a single token updates one slot (SPEC section 7); several go through chunked prefill."""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.backends.numpy.selection import prefix_stop
from cupy_dma.backends.numpy.varlen import attention
from cupy_dma.cache.chosen import Chosen
from cupy_dma.cache.chunked_prefill import delivered, extend_chunk
from cupy_dma.cache.segments import rectangular
from cupy_dma.cache.slots import index, needed, refreshed, rows
from cupy_dma.cache.snapshot import OCCUPIED, copied, copy_rows
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.cache.storage import quantized_call, read
from cupy_dma.calls.head_dims import unmoved, widened
from cupy_dma.calls.types import AttentionCall, key_bias

COUNTED = ("scores", "positions", "in_top", "lengths")  # the small arrays of a state
NAMES = (*COUNTED, "lowest", "lowest_score", "free")


def cache_extend(state: CacheState, call: ExtendCall) -> tuple[Any, Any]:
    """``out`` and ``lse``; see ``cupy_dma.backends``."""
    if call.length == 1 and call.cu_seqlens is None and call.batch and call.commits:
        with state.library.on(state.device):
            return _step(state, call)
    return extend_chunk(prefix_stop, attention, state, call)


def _step(state: CacheState, call: ExtendCall) -> tuple[Any, Any]:
    """One token per sequence: it takes a free slot, the slot of the key it evicts, or none."""
    call = quantized_call(state, call)
    slots, chosen = _occupied(state) + 2, None  # one for the token and one for the next
    if call.slots is None:
        held = _first_slots(state, slots)
    else:
        chosen = Chosen.by(state, call.slots)
        held, call = chosen.copied(state, slots), chosen.call(state, call)
    after, library, xp, position = copied(held, COUNTED), state.library, state.library.xp, held.lengths.array + 0
    batch, head = index(state, call.batch)[:, None], index(state, state.kv_heads)
    top, lowest, free, score = after.in_top.array, held.lowest.array, held.free.array, call.scores.array[:, :, 0]
    has_room = lowest < 0
    evicted = library.astype(xp.where(has_room, 0, lowest), "int64")
    real = library.full((call.batch,), True, "bool", state.device) if call.lengths is None else call.lengths.array > 0
    enters = real[:, None] & (has_room | xp.isnan(score) | (score >= held.scores.array[batch, head, evicted]))
    enters = enters & ~(score < state.threshold)
    stored = real[:, None] & (enters | (position < state.sinks)[:, None] | (state.recent > 0))

    top[batch, head, evicted] = xp.where(enters & ~has_room, 0, top[batch, head, evicted])
    slot = library.astype(xp.where(free >= 0, free, evicted), "int64")
    for target, fresh in ((after.scores.array, score), (after.positions.array, position[:, None]),
                          (top, library.astype(enters, "uint8"))):
        target[batch, head, slot] = xp.where(stored, fresh, target[batch, head, slot])
    after.lengths.array[...] = position + library.astype(real, "int64")
    seen, after = needed(after, position) & real[:, None, None], refreshed(after)

    given = call.stored or {"key": call.key, "value": call.value}
    targets = [rows(state, getattr(held, name)) for name in given]
    before = [target[batch, head, slot] for target in targets]
    fresh = [xp.where(stored[..., None] if old.ndim == 3 else stored, rows(state, new)[:, 0], old)
             for new, old in zip(given.values(), before)]
    found = (None, None)
    try:
        for target, row in zip(targets, fresh):
            target[batch, head, slot] = row
        if call.query is not None:
            found = _attend(held, after, call, seen, position)
    except BaseException:
        for target, row in zip(targets, before):
            target[batch, head, slot] = row
        raise
    if chosen is None and state.segments is None:
        copy_rows(after, held, names=NAMES)
    else:  # what is held are copies
        place = (batch if chosen is None else chosen.rows[:, None], head, slot)
        if held.segments is not None:
            place = held.segments.start.array + slot
        if chosen is None:
            copy_rows(after, state, names=NAMES)
        else:
            chosen.put(after, held, state, NAMES)
        for name, row in zip(given, fresh):
            rows(state, getattr(state, name))[place] = row
    state.workspace[OCCUPIED] = min(slots - 1, state.rows)
    return found


def _occupied(state: CacheState) -> int:
    """Upper bound on the occupied slots of any head, which are the first ones; found once and then counted."""
    if OCCUPIED not in state.workspace:
        library = state.library
        held = rectangular(state, ("positions",)).positions.array
        used = library.to_numpy((held >= 0).any(0)).any(0)  # (R,)
        state.workspace[OCCUPIED] = int(used.nonzero()[0].max(initial=-1)) + 1
    return state.workspace[OCCUPIED]


def _first_slots(state: CacheState, n: int) -> CacheState:
    """The first ``n`` slots, views of them without segments: the cost of a step depends on the number of kept keys, not
    on the window."""
    if state.segments is not None:
        return rectangular(state, slots=min(n, state.rows))
    if n >= state.rows:
        return state
    return state.having({name: state.library.operand(getattr(state, name).array[:, :, :n], name)
                         for name in state.per_row})


def _attend(held: CacheState, after: CacheState, call: ExtendCall, seen: Any, position: Any) -> tuple[Any, Any]:
    """Attention over the slots that are ``seen (B, Hkv, n)`` by tokens at ``position (B,)``. If key and value differ in
    width, the narrower gets zero columns."""
    library, size = held.library, max(held.head_dim, held.value_dim)
    assert call.query is not None
    key, value = (widened(library.operand(unmoved(library, read(held, name, ...), held.dtype).swapaxes(1, 2), name),
                          size) for name in ("key", "value"))
    mask, scores = checks.with_axes(library.operand(seen[:, :, None], "mask"), 4), after.scores
    if call.bias_delay:
        far = after.positions.array <= position[:, None, None] - call.bias_delay
        scores = library.operand(library.xp.where(far, scores.array, 0), "scores")
    bias = key_bias(scores) if call.is_biased else None
    out, lse = attention(AttentionCall(widened(call.query, size), key, value, None, mask, bias, False, call.scale,
                                       call.softcap, False))
    return delivered(held, call, out, lse)
