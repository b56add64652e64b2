"""Dense boolean masks on the device: packed to bits together with everything else that hides keys, and key lists."""
from __future__ import annotations

from dataclasses import dataclass

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.lists.intervals import Fields, KeyLists
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Builder
from cupy_dma.backends.cuda.runtime.configs import LIST_THREADS, PACK_KEYS, STATE_KEYS, DenseConfig, blocks
from cupy_dma.masks.interval import IntervalMask


@dataclass(frozen=True, slots=True)
class PackedMask:
    """The mask of one call, a bit per pair: see kernels/lists/dense_mask.cu."""

    rows: int
    query_length: int
    key_length: int
    fields: Fields  # columns, states, query_words, key_stride


def mask_rows(dense: Operand, mask: IntervalMask | None) -> tuple[int, int]:
    """Batch entries and heads of a dense mask that is combined with an interval mask."""
    shapes = [dense.shape[:2]] + ([] if mask is None else [mask.shape[:2]])
    return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)


def pack_mask(build: Builder, dense: Operand, mask: IntervalMask | None, causal: bool, query_length: int,
              key_length: int) -> PackedMask:
    """The bits of ``dense``, of the interval mask and of causality; lengths must not be 0.

    Made anew for every call: unlike an IntervalMask, an array may have been written to since.
    """
    batch, heads = mask_rows(dense, mask)
    words, stride = 4 * blocks(query_length, 128), blocks(key_length, STATE_KEYS) * STATE_KEYS
    length = batch * heads * words * stride
    columns, states = build.empty((length,), "int32"), build.empty((length // STATE_KEYS,), "int16")
    fields = {"columns": columns.ref, "states": states.ref, "query_words": words, "key_stride": stride}
    d_batch, d_head, d_query, d_key = dense.strides
    more: Fields = {}
    if mask is not None:
        start, stop = mask._start, mask._stop
        more = {"start": start.pointer, "stop": stop.pointer, "start_batch": start.strides[0],
                "start_head": start.strides[1], "stop_batch": stop.strides[0], "stop_head": stop.strides[1]}
    chunks = blocks(stride, PACK_KEYS * LIST_THREADS)
    params = jit.params("lists/dense_mask.cu", "DenseParams").pack_some(fields, more, {
        "dense": dense.pointer, "dense_batch": d_batch, "dense_head": d_head, "dense_query": d_query,
        "dense_key": d_key, "mask_heads": heads, "dense_share": heads // dense.shape[1],
        "start_share": 1 if mask is None else heads // mask.shape[1], "query_length": query_length,
        "key_length": key_length, "key_chunks": chunks})
    vector = d_key == 1 and not any(x % PACK_KEYS for x in (dense.pointer, d_batch, d_head, d_query))
    config = DenseConfig(queries=32, vector=vector, intervals=mask is not None, causal=causal)
    build.launch(build.load(config, "pack_mask"), batch * heads * words * chunks, LIST_THREADS, params)
    return PackedMask(batch * heads, query_length, key_length, fields)


def dense_lists(build: Builder, packed: PackedMask, queries: int) -> KeyLists:
    """Per tile of ``queries`` queries the keys that any of them sees."""
    capacity = packed.key_length
    tiles = blocks(packed.query_length, queries)
    entries = packed.rows * tiles
    space = build.empty((entries * (capacity + 2),), "int32")
    lists = {"list": space.ref + 8 * entries, "list_lengths": space.ref, "capacity": capacity}
    params = jit.params("lists/dense_mask.cu", "DenseParams").pack_some(packed.fields, lists, {
        "query_length": packed.query_length, "key_length": packed.key_length, "tiles": tiles})
    build.launch(build.load(DenseConfig(queries=queries), "dense_lists"), entries, LIST_THREADS, params)
    return KeyLists("KEYS_LISTED", {**lists, **packed.fields}, space)
