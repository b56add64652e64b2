"""Packed sequences on the device (``kernels/common/varlen.cuh``): tiles that do not cross them, masks of query rows."""
from __future__ import annotations

from collections.abc import Sequence

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder, NotBuildable
from cupy_dma.backends.cuda.runtime.configs import SEQUENCE_THREADS, SUPER_UNIT, SequenceConfig, blocks
from cupy_dma.calls.sequences import Sequences
from cupy_dma.masks.interval import Hints, IntervalMask


def tile_count(length: int, size: int, sequences: int) -> int:
    """Tiles of ``size`` that cover ``length``; with packed ``sequences``, the number of tile indices."""
    return length // size + sequences if sequences else blocks(length, size)


def super_entries(query_length: int, queries: int, capacity: int, sequences: Sequences) -> int:
    """Entries of the lists of all super-tiles of a mask row."""
    first = (sequences.key_length // SUPER_UNIT + sequences.count) * SUPER_UNIT
    return first + query_length // queries * capacity


def with_own_bounds(build: Builder, sequences: Sequences, given: Sequence[Operand | None],
                    query_length: int) -> Sequences:
    """The sequences of a call whose bounds the program itself makes, from ``sequences.given`` as its arguments."""
    query, key, used, pages = given
    for operand in given:
        if operand is not None:
            build.contiguous(operand.array)
    table = None if pages is None else build.describe(build.astype(pages.array, "int32"), "block_table")
    if table is not None and not table.shape[1]:
        raise NotBuildable("sequences without pages")
    bounds = build.empty((4, sequences.count), "int32")
    fields = {"bounds": bounds.ref, "sequences": sequences.count, "query_length": query_length,
              "page_keys": 0 if table is None else table.shape[1] * sequences.page_size}
    for name, field, x in (("query_lengths", "query_int64", query), ("key_lengths", "key_int64", key),
                           ("used", "used_int64", used)):
        fields |= {name: 0 if x is None else x.pointer, field: int(x is not None and x.dtype == "int64")}
    params = jit.params("lists/varlen.cu", "BoundsParams").pack(**fields)
    build.launch(build.load(SequenceConfig(causal=False), "sequence_bounds"),
                 blocks(sequences.count, SEQUENCE_THREADS), SEQUENCE_THREADS, params)
    return Sequences(sequences.count, build.describe(bounds, "bounds"), sequences.key_length, table,
                     sequences.page_size, ())


def first_keys(build: Builder, sequences: Sequences) -> Operand:
    """The first key of each sequence, which are their keys' cumulative lengths."""
    at = sequences.bounds.pointer + 4 * 2 * sequences.count
    return build.describe(Array(at, (sequences.count,), "int32"), "documents")  # type: ignore[arg-type]


def mask_of_rows(build: Builder, mask: IntervalMask, sequences: Sequences, causal: bool) -> IntervalMask:
    """The mask (1, heads, Lk) with the rows of query that see a key in place of the positions, ``causal`` applied; one
    for all passes of a call.

    Consecutive rows of one sequence see as many keys as consecutive positions, so the bound holds for its tiles.
    """
    known, identity = build.derived(mask), ("rows", causal)
    if identity not in known:
        known[identity] = _mask_of_rows(build, mask, sequences, causal)
    return known[identity]


def _mask_of_rows(build: Builder, mask: IntervalMask, sequences: Sequences, causal: bool) -> IntervalMask:
    _, heads, length = mask.shape
    start, stop = (build.empty((1, heads, length), "int32") for _ in range(2))
    if heads * length:
        params = jit.params("lists/varlen.cu", "SequenceParams").pack(
            start=mask._start.pointer, stop=mask._stop.pointer, bounds=sequences.bounds.pointer, row_start=start.ref,
            row_stop=stop.ref, start_head=mask._start.strides[1], stop_head=mask._stop.strides[1], heads=heads,
            key_length=length, sequences=sequences.count)
        build.launch(build.load(SequenceConfig(causal=causal), "mask_of_rows"), blocks(length, SEQUENCE_THREADS),
                     SEQUENCE_THREADS, params)
    return IntervalMask._make(build, start, stop, Hints(bound=mask._bound))  # type: ignore[arg-type]
