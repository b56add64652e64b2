"""The prefix top-w selection on the device (SPEC section 3)."""
from __future__ import annotations

import struct

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import ARRIVALS, SELECT_THREADS, SelectConfig, blocks
from cupy_dma.masks.windows import Window, clipped, widest

MAX_HEADS = 128  # with a window each, as in the kernel file


def selection_chunk(length: int) -> int:
    """Keys per chunk: about N^(2/3), which balances the chunks' lists against merging them; a power of two."""
    return 1 << max(10, (int(1.5 * length ** (2 / 3)) - 1).bit_length())


def counts_pairs(rows: int, length: int) -> bool:
    """Whether one kernel compares each key with all others, in place of three kernels with less work
    (docs/lab/selection.md)."""
    return length <= 1024 or (length <= 4096 and rows * length**2 <= 2**27)


def prefix_stop(build: Builder, scores: Operand, window: Window, padding: Operand | None,
                document: Operand | None) -> Array:
    """First position that no longer keeps a key: int32 ``(B, Hkv, Lk)``."""
    stop = build.empty(scores.shape, "int32")
    if 0 not in scores.shape:
        _select(build, scores, window, padding, document, stop)
    return stop


def prefix_run(build: Builder, scores: Operand, window: Window, padding: Operand | None,
               document: Operand | None) -> tuple[Array, Array]:
    """Start, each key's own position, int32 ``(Lk)``, and the stop of ``prefix_stop``. One kernel writes both: another
    launch costs 2 us, the host 11. ``scores`` are not empty."""
    start, stop = build.empty(scores.shape[2:], "int32"), build.empty(scores.shape, "int32")
    _select(build, scores, window, padding, document, stop, start)
    return start, stop


def _select(build: Builder, scores: Operand, window: Window, padding: Operand | None, document: Operand | None,
            stop: Array, start: Array | None = None) -> None:
    batch, kv_heads, length = scores.shape
    rows = batch * kv_heads
    window = clipped(window, length)
    window, of_heads = widest(window), window if isinstance(window, tuple) else ()
    if len(of_heads) > MAX_HEADS:
        raise NotImplementedError(f"window must be an int for more than {MAX_HEADS} heads on CUDA, got one for each of "
                                  f"{kv_heads}")
    fields = {"score": scores.pointer, "padding": padding.pointer if padding else 0,
              "document": document.pointer if document else 0, "stop": stop.ref,
              "start": 0 if start is None else start.ref,
              "score_batch": scores.strides[0], "score_head": scores.strides[1], "score_key": scores.strides[2],
              "padding_batch": padding.strides[0] if padding else 0,
              "document_batch": document.strides[0] if document else 0,
              "kv_heads": kv_heads, "key_length": length, "window": window,
              "head_window": struct.pack(f"={len(of_heads)}i", *of_heads)}
    launches = [("count_better", rows * blocks(length, SELECT_THREADS["count_better"]), True)]  # blocks, and with PDL
    counted = build.overrides.counted
    if not (counts_pairs(rows, length) if counted is None else counted):
        chunk = selection_chunk(length)
        chunks = blocks(length, chunk)
        capacity = min(window, chunk)
        # Per chunk: local, kept and arrivals take 8 bytes an entry, two counts take 4.
        local = build.empty((rows * chunks * (2 * (capacity + window + chunk) + 2),), "int32").ref
        kept = local + 8 * rows * chunks * capacity
        arrivals = kept + 8 * rows * chunks * window
        kept_count = arrivals + 8 * rows * chunks * chunk
        fields |= {"local": local, "kept": kept, "kept_count": kept_count, "arrivals": arrivals,
                   "arrival_count": kept_count + 4 * rows * chunks, "chunk": chunk, "chunks": chunks,
                   "local_capacity": capacity}
        filters, sweeps = rows * chunks, rows * chunks * blocks(chunk, ARRIVALS)
        # Each of these blocks can have an SM to itself, but not beside the blocks ahead (35 us instead of 29).
        gathers = sweeps <= build.num_sms < filters + sweeps
        launches = [("local_top", filters if chunks > 1 else 0, True), ("filter_arrivals", filters, True),
                    ("sweep_arrivals", sweeps, not gathers)]
    params = jit.params("select/prefix_top_w.cu", "SelectParams").pack_some(fields)
    config = SelectConfig(documents=document is not None, padding=padding is not None, head_windows=bool(of_heads))
    for entry, grid, pdl in launches:
        if grid:
            build.launch(build.load(config, entry), grid, SELECT_THREADS[entry], params, pdl)
