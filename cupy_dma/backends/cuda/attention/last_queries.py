"""Dynamic mask attention of the last few queries of a long history (SPEC sections 3 and 5).

Which keys they see is found from the scores alone (``kernels/select/last_queries_top_w.cu``), without a mask over the history.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention import flash_decode
from cupy_dma.backends.cuda.attention.flash_decode import KeyList
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import blocks
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias

# As in the kernel file.
DIGIT_BITS, COLLECT_KEYS, MAX_CHUNKS = 11, 4096, 1024
THREADS = {"narrow": 512, "collect": 1024}
RANGE_WORDS = 6


@dataclass(frozen=True)
class LastQueriesConfig(jit.Config):
    source = "select/last_queries_top_w.cu"
    intervals: bool


def attend_last(runtime: Runtime, call: DynamicCall, scores: Operand) -> tuple[Any, Any] | None:
    """``out`` and ``lse`` of a dynamic call with these scores; None for a call that is better served by a mask."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    rows = queries * (call.query.shape[2] // call.key.shape[2])
    if (call.keys != "prefix" or call.candidates.padding is not None or call.candidates.runs is not None
            or not 1 <= rows <= flash_decode.MAX_ROWS or keys - queries + 1 <= call.window
            or scores.dtype == "float64" or scores.shape[1] != call.key.shape[2] or checks.wants_values_checked()):
        return None
    library, device = call.query.library, call.query.device
    if scores.dtype != "float32":
        scores = library.describe(library.astype(scores.array, "float32"), "scores")
    attention = AttentionCall(call.query, call.key, call.value, None, None, key_bias(scores), False, call.scale,
                              call.softcap, call.deterministic)
    problem = Problem(attention)
    if call.query.shape[0] == 0 or not flash_decode.can_serve(runtime, device.index, attention, problem):
        return None
    out = library.empty(call.query.shape, call.query.dtype, device)
    lse = library.empty((call.query.shape[0], call.query.shape[2], queries), "float32", device)
    sets = flash_decode.sets_of(rows, call.query.shape[3] * problem.size)
    with runtime.on(device):
        listed = select_last(runtime, scores, call.window, queries, sets)
        flash_decode.attention(runtime, attention, problem, out, lse, listed)
    return out, lse


def select_last(runtime: Runtime, scores: Operand, window: int, queries: int, sets: int) -> KeyList:
    """The keys that the last ``queries`` positions see of ``scores (B, Hkv, Lk)`` float32, and ``sets`` tickets a row
    for the attention. There are more than ``window`` keys up to the first of them."""
    library, device, (batch, kv_heads, keys) = scores.library, scores.device, scores.shape
    rows, length = batch * kv_heads, keys - queries + 1
    chunk, shifts = plan(length)
    chunks, passes = blocks(length, chunk), len(shifts)
    count = window + queries - 1
    intervals = queries > 1
    # In one allocation each: what must be zero, and the rest, arrays of 8 bytes first.
    zeros = library.full((rows * (RANGE_WORDS + 1 + sets + (passes << DIGIT_BITS)),), 0, "int32", device)
    space = library.empty((rows * (2 * chunks * chunk + chunks + count * (3 if intervals else 1)),), "int32", device)
    ranges, survivors = library.pointer(zeros), library.pointer(space)
    tickets = ranges + 4 * rows * RANGE_WORDS
    counts = tickets + 4 * rows * (1 + sets)
    interval = survivors + 8 * rows * chunks * chunk
    kept = interval + (8 * rows * count if intervals else 0)
    fields = {
        "score": scores.pointer, "counts": counts, "ranges": ranges, "tickets": tickets, "survivors": survivors,
        "survivor_count": kept + 4 * rows * count, "list": kept, "interval": interval,
        "score_batch": scores.strides[0], "score_head": scores.strides[1], "score_key": scores.strides[2],
        "kv_heads": kv_heads, "length": length, "window": window, "queries": queries, "chunk": chunk, "chunks": chunks,
        "passes": passes}
    pack, stream = jit.params("select/last_queries_top_w.cu", "LastQueriesParams").pack_some, library.stream(device)
    for number, shift in enumerate(shifts):
        _kernel(runtime, device.index, intervals, "narrow").launch(
            rows * chunks, THREADS["narrow"], pack(fields, {"pass": number, "shift": shift}), stream)
    _kernel(runtime, device.index, intervals, "collect").launch(rows * chunks, THREADS["collect"], pack(fields), stream)
    return KeyList(count, kept, interval if intervals else None, tickets + 4 * rows, (zeros, space))


@functools.lru_cache(maxsize=1024)
def plan(length: int) -> tuple[int, tuple[int, ...]]:
    """Keys of a chunk, and by how many bits the digit of each pass is shifted; none where all keys are few."""
    chunk = COLLECT_KEYS * max(1, blocks(length, COLLECT_KEYS * MAX_CHUNKS))
    if length <= COLLECT_KEYS:
        return chunk, ()
    return chunk, (53, 42, 32, max(0, (length - 1).bit_length() - DIGIT_BITS))


@functools.cache
def _kernel(runtime: Runtime, index: int, intervals: bool, entry: str) -> LoadedKernel:
    return runtime.load(LastQueriesConfig(intervals), entry, index)
