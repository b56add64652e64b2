"""The keys that the last few queries of a long history see under prefix top-w (SPEC section 3), from the scores alone.

See ``kernels/select/last_queries_top_w.cu``. No mask over the history is made.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import blocks
from cupy_dma.backends.cuda.runtime.params import Ref

# As in the kernel file:
DIGIT_BITS, COLLECT_KEYS, MAX_CHUNKS = 11, 4096, 1024
THREADS = {"narrow": 512, "collect": 1024}
RANGE_WORDS = 6


@dataclass(frozen=True)
class LastQueriesConfig(jit.Config):
    source = "select/last_queries_top_w.cu"
    intervals: bool


@dataclass(frozen=True)
class KeyList:
    """The keys that a call's queries see, per kv head: ``list (B * Hkv, count)`` int32, and for each entry the
    positions that see it, ``interval (B * Hkv, count, 2)`` int32 (None: all)."""

    count: int
    list: Array
    interval: Array | None
    tickets: Ref  # (B * Hkv, sets) zeros


def select_last(build: Builder, scores: Operand, window: int, queries: int, sets: int) -> KeyList:
    """The keys that the last ``queries`` positions see of ``scores (B, Hkv, Lk)`` float32, and ``sets`` tickets per row
    for the attention. Up to the first of these positions there are more than ``window`` keys."""
    batch, kv_heads, keys = scores.shape
    rows, length = batch * kv_heads, keys - queries + 1
    chunk, shifts = plan(length)
    chunks, passes = blocks(length, chunk), len(shifts)
    count = window + queries - 1
    intervals = queries > 1
    # Two allocations: what must be zero, and the rest, arrays of 8-byte elements first.
    ranges = build.zeros((rows * (RANGE_WORDS + 1 + sets + (passes << DIGIT_BITS)),), "int32").ref
    survivors = build.empty((rows * (2 * chunks * chunk + chunks),), "int32").ref
    kept = build.empty((batch, kv_heads, count), "int32")
    interval = build.empty((batch, kv_heads, count, 2), "int32") if intervals else None
    tickets = ranges + 4 * rows * RANGE_WORDS
    counts = tickets + 4 * rows * (1 + sets)
    fields = {
        "score": scores.pointer, "counts": counts, "ranges": ranges, "tickets": tickets, "survivors": survivors,
        "survivor_count": survivors + 8 * rows * chunks * chunk, "list": kept.ref,
        "interval": 0 if interval is None else interval.ref,
        "score_batch": scores.strides[0], "score_head": scores.strides[1], "score_key": scores.strides[2],
        "kv_heads": kv_heads, "length": length, "window": window, "queries": queries, "chunk": chunk, "chunks": chunks,
        "passes": passes}
    pack = jit.params("select/last_queries_top_w.cu", "LastQueriesParams").pack_some
    config = LastQueriesConfig(intervals=intervals)
    for number, shift in enumerate(shifts):
        build.launch(build.load(config, "narrow"), rows * chunks, THREADS["narrow"],
                     pack(fields, {"pass": number, "shift": shift}))
    build.launch(build.load(config, "collect"), rows * chunks, THREADS["collect"], pack(fields))
    return KeyList(count, kept, interval, tickets + 4 * rows)


def last_keys(build: Builder, scores: Operand, window: int) -> Array:
    """The ``window`` best of more keys, as seen by the last position: int32 ``(B, Hkv, window)`` in any order, of
    ``scores (B, Hkv, Lk)`` float32."""
    return select_last(build, scores, window, 1, 0).list


@functools.lru_cache(maxsize=1024)
def plan(length: int) -> tuple[int, tuple[int, ...]]:
    """Keys of a chunk, and the shift of each pass's digit in bits; no passes if ``collect`` can take all keys."""
    chunk = COLLECT_KEYS * max(1, blocks(length, COLLECT_KEYS * MAX_CHUNKS))
    if length <= COLLECT_KEYS:
        return chunk, ()
    return chunk, (53, 42, 32, max(0, (length - 1).bit_length() - DIGIT_BITS))
