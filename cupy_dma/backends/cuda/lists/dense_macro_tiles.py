"""Key lists of super-tiles under a dense mask, for the gradients of keys and values.

See ``kernels/lists/dense_macro_tiles.cu``.
"""
from __future__ import annotations

from dataclasses import dataclass

from cupy_dma.backends.cuda.lists.dense_mask import PackedMask
from cupy_dma.backends.cuda.lists.intervals import Fields, Workspace
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import LIST_THREADS, PACK_KEYS, STATE_KEYS, DenseSupersConfig, blocks

UNIT_QUERIES = 512  # of the smallest super-tile, a multiple of 64
TILE_KEYS = 128  # the most keys of a list that a kernel reads at once, a multiple of STATE_KEYS


@dataclass(frozen=True, slots=True)
class DenseSupers:
    """The lists of one call."""

    entries: int  # of all lists of a list row, a multiple of TILE_KEYS
    partial: bool  # a key's sums may come from several super-tiles
    fields: Fields
    workspace: Array


def list_entries(key_length: int, units: int) -> int:
    """Entries for the lists of all super-tiles, each list a multiple of TILE_KEYS.

    Room for every key once, and 0.45 times as many again: a top-w mask fits with super-tiles of about w queries, while
    a mask without much structure (all visible, or causal: 1.5 with two super-tiles) gets one, which needs no sums.
    """
    return TILE_KEYS * blocks(key_length if units == 1 else key_length + key_length * 9 // 20, TILE_KEYS)


def dense_supers(build: Builder, packed: PackedMask, mask_heads: int, kv_heads: int) -> DenseSupers:
    """Lists of the keys that the queries of each super-tile see, chosen on the device; lengths are not 0."""
    heads = 1 if mask_heads == 1 else kv_heads  # of lists
    share = mask_heads // heads
    rows, stride, words = packed.rows // share, packed.fields["key_stride"], packed.fields["query_words"]
    units = blocks(packed.query_length, UNIT_QUERIES)
    nodes = sum(blocks(units, 2**level) for level in range((units - 1).bit_length() + 1))
    entries = list_entries(packed.key_length, units)
    list_blocks = entries // STATE_KEYS
    space = Workspace(build, seen=rows * units * stride // 32, counts=rows * nodes, list=rows * entries,
                      blocks=4 * rows * list_blocks, slots=rows * units * packed.key_length, super_counts=rows,
                      states=blocks(packed.rows * list_blocks * words, 2))
    at, chunks = space.refs, blocks(stride, PACK_KEYS * LIST_THREADS)
    params = jit.params("lists/dense_macro_tiles.cu", "SuperParams").pack_some(at, {
        "columns": packed.fields["columns"], "query_length": packed.query_length, "key_length": packed.key_length,
        "query_words": words, "key_stride": stride, "key_chunks": chunks, "unit_queries": UNIT_QUERIES, "units": units,
        "nodes": nodes, "entries": entries, "share": share})
    for entry, grid in (("seen_keys", rows * units * chunks), ("count_keys", rows * nodes),
                        ("super_keys", rows * units), ("list_states", packed.rows * list_blocks)):
        build.launch(build.load(DenseSupersConfig(), entry), grid, LIST_THREADS, params)
    batch = packed.rows // mask_heads
    return DenseSupers(entries, units > 1, {
        "super_list": at["list"], "super_blocks": at["blocks"], "super_states": at["states"], "slots": at["slots"],
        "super_counts": at["super_counts"], "super_units": units, "super_entries": entries,
        "list_batch": heads if batch > 1 else 0, "list_group": int(heads > 1)}, space.workspace)
