"""The decode cache: a single token updates one slot (SPEC section 7); several go through chunked prefill."""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.backends.numpy.selection import prefix_stop
from cupy_dma.backends.numpy.varlen import attention
from cupy_dma.cache.chunked_prefill import delivered, extend_chunk
from cupy_dma.cache.slots import index, needed, refresh, rows
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.calls.head_dims import widened
from cupy_dma.calls.types import AttentionCall, key_bias


def cache_extend(state: CacheState, call: ExtendCall) -> tuple[Any, Any]:
    """``out`` and ``lse``; see ``cupy_dma.backends``."""
    if call.length == 1 and call.cu_seqlens is None and state.batch:
        with state.library.on(state.device):
            return _step(state, call)
    return extend_chunk(prefix_stop, attention, state, call)


def _step(state: CacheState, call: ExtendCall) -> tuple[Any, Any]:
    """One token per sequence: it takes a free slot, or that of the key that it evicts, or none."""
    library, xp, position = state.library, state.library.xp, state.lengths.array + 0
    batch, head = index(state, state.batch)[:, None], index(state, state.kv_heads)
    top, lowest, free, score = state.in_top.array, state.lowest.array, state.free.array, call.scores.array[:, :, 0]
    has_room = lowest < 0
    evicted = library.astype(xp.where(has_room, 0, lowest), "int64")
    real = library.full((state.batch,), True, "bool", state.device) if call.lengths is None else call.lengths.array > 0
    enters = real[:, None] & (has_room | xp.isnan(score) | (score >= state.scores.array[batch, head, evicted]))
    stored = real[:, None] & (enters | (position < state.sinks)[:, None] | (state.recent > 0))

    top[batch, head, evicted] = xp.where(enters & ~has_room, 0, top[batch, head, evicted])
    slot = library.astype(xp.where(free >= 0, free, evicted), "int64")
    for target, fresh in ((rows(state, state.key), rows(state, call.key)[:, 0]),
                          (rows(state, state.value), rows(state, call.value)[:, 0]),
                          (state.scores.array, score), (state.positions.array, position[:, None]),
                          (top, library.astype(enters, "uint8"))):
        taken = stored if target.ndim == 3 else stored[..., None]
        target[batch, head, slot] = xp.where(taken, fresh, target[batch, head, slot])
    state.lengths.array[...] = position + library.astype(real, "int64")
    found = (None, None)
    if call.query is not None:
        found = _attend(state, call, needed(state, position) & real[:, None, None])
    refresh(state)
    return found


def _attend(state: CacheState, call: ExtendCall, seen: Any) -> tuple[Any, Any]:
    """Attention over the slots that are ``seen (B, Hkv, R)``. If key and value differ in width, zero columns even them
    out."""
    library, size = state.library, max(state.head_dim, state.value_dim)
    assert call.query is not None
    key, value = (widened(library.operand(x.array.swapaxes(1, 2), x.name), size) for x in (state.key, state.value))
    mask = checks.with_axes(library.operand(seen[:, :, None], "mask"), 4)
    out, lse = attention(AttentionCall(widened(call.query, size), key, value, None, mask, key_bias(state.scores), False,
                                       call.scale, call.softcap, False))
    return delivered(state, call, out, lse)
