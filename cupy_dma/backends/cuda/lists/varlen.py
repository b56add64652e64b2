"""Packed sequences on the device (``kernels/common/varlen.cuh``): tiles that do not cross them, masks of query rows."""
from __future__ import annotations

from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Builder
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


def mask_of_rows(build: Builder, mask: IntervalMask, sequences: Sequences, causal: bool) -> IntervalMask:
    """The mask (1, heads, Lk) with rows of query in place of positions, ``causal`` applied.

    Consecutive rows of one sequence see as many keys as consecutive positions, so the bound holds for its tiles.
    """
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
