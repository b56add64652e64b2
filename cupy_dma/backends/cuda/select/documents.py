"""Selections within documents, and of one set of keys for all queries, as masks (``kernels/select/documents.cu``)."""
from __future__ import annotations

from cupy_dma import checks
from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import DOCUMENT_CHUNK, DOCUMENT_THREADS, DocumentConfig, blocks
from cupy_dma.backends.cuda.select.prefix import prefix_run, prefix_stop
from cupy_dma.masks.windows import Window

_IDS = {"int32": "int", "int64": "long long"}


def selected_run(build: Builder, scores: Operand, window: Window | None, keys: str, padding: Operand | None,
                 documents: Operand | None, apart: bool) -> tuple[Array, Array]:
    """Start and stop of the selection's mask; see ``cupy_dma.backends``."""
    batch, kv_heads, length = scores.shape
    runs = None if documents is None or window is None else document_runs(build, documents, length)
    of_key = None if runs is None else checks.with_axes(build.describe(runs[0], "documents"), 2)
    if keys == "prefix":
        assert window is not None
        start, stop = prefix_run(build, scores, window, padding, of_key)
        if runs is None or apart:
            return start, stop
    elif window is None:
        stop = build.empty(scores.shape, "int32")
    else:
        stop = prefix_stop(build, scores, window, padding, of_key)
    rows = 1 if runs is None else runs[0].shape[0]
    if keys == "global":
        start = build.empty((1 if apart else rows, 1, length), "int32")
    fields = {"first": runs[0].ref if runs else 0, "end": runs[1].ref if runs else 0, "stop": stop.ref,
              "start": start.ref if keys == "global" else 0, "padding": padding.pointer if padding else 0,
              "padding_batch": padding.strides[0] if padding else 0, "document_batch": length if rows > 1 else 0,
              "kv_heads": kv_heads, "key_length": length, "global": keys == "global", "apart": apart,
              "everything": window is None}
    params = jit.params("select/documents.cu", "RunParams").pack_some(fields)
    build.launch(build.load(DocumentConfig(), "finish_runs"),
                 batch * kv_heads * blocks(length, DOCUMENT_THREADS), DOCUMENT_THREADS, params)
    return start, stop


def document_runs(build: Builder, documents: Operand, length: int) -> tuple[Array, Array]:
    """First key and end of every key's document, int32 ``(1|B, Lk)``."""
    by_id = len(documents.shape) == 2
    rows = documents.shape[0] if by_id else 1
    first, end = (build.empty((rows, length), "int32") for _ in range(2))
    params = jit.params("select/documents.cu", "DocumentParams").pack(
        documents=documents.pointer, first=first.ref, end=end.ref, row_stride=documents.strides[0] if by_id else 0,
        stride=documents.strides[-1], count=documents.shape[-1], key_length=length)
    kernel = build.load(DocumentConfig(_IDS[documents.dtype]), "runs_of_ids" if by_id else "runs_of_lengths")
    grid = rows * blocks(length, DOCUMENT_CHUNK) if by_id else blocks(length, DOCUMENT_THREADS)
    build.launch(kernel, grid, DOCUMENT_THREADS, params)
    return first, end
