"""A chunk of new tokens for a decode cache as one program (``kernels/decode/chunk.cu``).

It does what ``cupy_dma/cache/chunked_prefill.py`` does with array code, which takes some 300 launches: it gathers the
kept rows in order of position, followed by the new ones, selects, attends, and writes the new rows that are still
needed to slots that are not. Only the last kernel changes the state.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from cupy_dma.backends.cuda.attention.forward import attention
from cupy_dma.backends.cuda.attention.problem import rows_aligned
from cupy_dma.backends.cuda.decode import codes
from cupy_dma.backends.cuda.decode.codes import STORAGE
from cupy_dma.backends.cuda.lists.varlen import with_own_bounds
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder, argument_type
from cupy_dma.backends.cuda.runtime.configs import ELEMENT_BYTES, ELEMENTS, blocks
from cupy_dma.backends.cuda.select.prefix import MAX_HEADS, prefix_stop
from cupy_dma.cache.state import CacheState, ExtendCall, Segments
from cupy_dma.calls.sequences import Sequences
from cupy_dma.calls.types import AttentionCall, key_bias
from cupy_dma.masks.interval import Hints, IntervalMask
from cupy_dma.masks.windows import clipped, widest

ROWS, MAX_SLOTS = 64, 2**17  # of the kernels
GATHER_THREADS, STOP_THREADS, STORE_THREADS = 256, 256, 512
UNITS = {16: "uint4", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}  # in which rows are copied, by bytes

argument_type(CacheState, without=("tickets", "workspace"))
argument_type(ExtendCall, without=("return_lse", "out", "lse", "stored"))
argument_type(Segments, without=("sizes", "order"))


@dataclass(frozen=True)
class ChunkConfig(jit.Config):
    source = "decode/chunk.cu"
    unit: str
    storage: int  # STORAGE
    element: str = "void"  # of queries, with storage


def serves(state: CacheState, call: ExtendCall) -> bool:
    """Whether ``extend`` supports the call."""
    attends = call.query is not None
    return (state.dtype in ELEMENTS and call.length > 0 and call.batch > 0 and state.rows <= MAX_SLOTS
            and (attends or call.commits)
            and not (isinstance(state.window, tuple) and len(state.window) > MAX_HEADS)
            and not (attends and (state.head_dim != state.value_dim or call.bias_delay > 0 and call.is_biased)))


def extend(build: Builder, state: CacheState, call: ExtendCall) -> tuple[Array, ...]:
    """Changes the state, if the call commits. ``out (n, L, H, D)`` and ``lse (n, H, L)``, if there are queries."""
    n, rows, (axis, length, kv_heads, _) = call.batch, state.rows, call.key.shape  # axis: 1 of packed tokens, else n
    pairs, keys = n * kv_heads, n // axis * rows + length
    position, place = build.empty((axis, kv_heads, keys), "int64"), build.empty((n, kv_heads, rows), "int32")
    ranked = build.empty((axis, kv_heads, keys), "float32")
    raw = build.empty(ranked.shape, "float32") if call.is_biased and state.threshold > -inf else ranked
    unit, fields = _operands(build, state, call)
    fields |= {"history_position": position.ref, "place": place.ref, "before": build.empty((n,), "int64").ref,
               "ranked_score": ranked.ref, "raw_score": 0 if raw is ranked else raw.ref}
    first = document = None
    if call.cu_seqlens is not None:
        first, document = build.empty((n + 1,), "int32"), build.empty((1, keys), "int32")
        fields |= {"first": first.ref, "document": document.ref}
    history = []
    if call.query is not None:
        history = [build.empty((axis, keys, kv_heads, state.head_dim), state.dtype) for _ in range(2)]
        fields |= {"history_key": history[0].ref, "history_value": history[1].ref}
    storage = STORAGE[state.storage]
    config = ChunkConfig(UNITS[unit], storage, *([ELEMENTS[state.dtype]] if storage else []))

    def launch(entry: str, grid: int, threads: int) -> None:
        params = jit.params(config.source, "ChunkParams").pack_some(fields)
        build.launch(build.load(config, entry), pairs * grid, threads, params)

    launch("gather_history", blocks(rows, ROWS) + blocks(length, ROWS), GATHER_THREADS)
    top = prefix_stop(build, build.describe(ranked, "scores"), clipped(state.window, keys), None,
                      None if document is None else build.describe(document, "documents"))
    fields["top"] = top.ref
    results: tuple[Array, ...] = ()
    if call.query is not None:
        start, stop = build.empty((keys,), "int32"), build.empty(top.shape, "int32")
        fields |= {"start": start.ref, "stop": stop.ref}
        launch("visible_stops", blocks(rows + length, STOP_THREADS), STOP_THREADS)
        # At most R keys are visible at a position, and each next position adds one.
        mask = IntervalMask._make(build, start, stop, Hints("key", (rows, 1)))  # type: ignore[arg-type]
        bias = key_bias(build.describe(raw, "bias")) if call.is_biased else None
        key, value = (build.describe(x, name) for x, name in zip(history, ("key", "value")))
        sequences = None
        if first is not None:
            given = call.cu_seqlens, build.describe(first, "cu_seqlens_k"), None, None
            sequences = with_own_bounds(build, Sequences(n + 1, given[1], keys, None, 0, given), given, length)
        results = attention(build, AttentionCall(call.query, key, value, mask, None, bias, False, call.scale,
                                                 call.softcap, False, sequences=sequences))
    if call.commits:
        fields["splits"] = max(1, min(blocks(length, STORE_THREADS), build.num_sms // pairs))
        launch("store_tokens", fields["splits"], STORE_THREADS)
    return results


def _operands(build: Builder, state: CacheState, call: ExtendCall) -> tuple[int, dict[str, Any]]:
    """Bytes of a unit in which rows are copied, and the parameters that describe the state and the call."""
    names = {"scores": "score", "positions": "position"}
    fields: dict[str, Any] = {
        "new_key": call.key.pointer, "new_value": call.value.pointer, "new_score": call.scores.pointer,
        **{names.get(name, name): getattr(state, name).pointer for name in state.arrays},
        "sequences": call.batch, "kv_heads": state.kv_heads, "slots": state.rows, "length": call.key.shape[1],
        "window": widest(state.window), "sinks": state.sinks, "recent": state.recent, "threshold": state.threshold}
    for name, operand in (("key", call.key), ("value", call.value)):
        fields |= dict(zip((f"{name}_batch", f"{name}_row", f"{name}_head"), operand.strides))
    fields |= dict(zip(("score_batch", "score_head", "score_token"), call.scores.strides))
    if state.storage:
        fields |= codes.launch(build, state, call)
    unit, size = _unit(state, call)
    for name in ("key_batch", "key_row", "key_head", "value_batch", "value_row", "value_head"):
        fields[name] = fields[name] * size // unit
    fields |= {"key_units": state.head_dim * size // unit, "value_units": state.value_dim * size // unit}
    for name, words, given in (("counts", "count_words", call.lengths), ("bounds", "bound_words", call.cu_seqlens)):
        if given is not None:
            fields |= {name: given.pointer, words: 2 if given.dtype == "int64" else 1}
    if call.slots is not None:
        fields["slots_of"] = call.slots.pointer
    if state.segments is not None:
        fields |= {"segment_start": state.segments.start.pointer, "segment_slots": state.segments.count.pointer}
    return unit, fields


def _unit(state: CacheState, call: ExtendCall) -> tuple[int, int]:
    """Bytes of a unit in which rows are copied, and of a number in a row."""
    if state.storage:
        widths = (state.head_dim, state.value_dim)
        return next(unit for unit in (16, 4, 1) if not any(width % unit for width in widths)), 1
    size = ELEMENT_BYTES[ELEMENTS[state.dtype]]
    aligned = rows_aligned(call.key, call.value) and not any(x.pointer % 16 for x in (state.key, state.value))
    return 16 if aligned else size, size
