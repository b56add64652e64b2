"""Plots of masks, drawn from the intervals: memory is linear in the picture and the keys, never ``Lq * Lk``."""
from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from cupy_dma import checks


def mask_density(mask: Any, query_length: int, batch: int, head: int, max_size: int) -> np.ndarray:
    """float64 ``(rows, columns)``, each at most ``max_size``: the visible fraction of each cell's (query, key) pairs.

    Key ``j`` is visible to the queries ``[begin_j, end_j)``. ``clip(x, begin_j, end_j) - begin_j`` of them come before
    query ``x``, so the visible pairs of a cell are the difference of that count at its two edges, summed over its keys.
    """
    n, offset = mask.key_length, mask.key_length - query_length
    start, stop = (np.broadcast_to(mask.library.to_numpy(run.array), mask.shape)[batch, head].astype(np.int64)
                   for run in (mask._start, mask._stop))
    begin = np.clip(start - offset, 0, query_length)
    end = np.maximum(np.clip(stop - offset, 0, query_length), begin)
    query_edges, key_edges = (np.linspace(0, size, min(size, max_size) + 1).astype(np.int64)
                              for size in (query_length, n))
    density = np.zeros((len(query_edges) - 1, len(key_edges) - 1))
    for column, (left, right) in enumerate(pairwise(key_edges)):
        b, e = begin[left:right], end[left:right]
        before = [int((np.clip(edge, b, e) - b).sum()) for edge in query_edges]
        density[:, column] = np.diff(before) / (np.diff(query_edges) * (right - left))
    return density


def plot_mask(mask: Any, query_length: int | None = None, *, batch: int = 0, head: int = 0, ax: Any = None,
              path: Any = None, max_size: int = 512) -> Any:
    """Plot which queries (rows) see which keys (columns); darker cells have a larger fraction of visible pairs.

    Parameters
    ----------
    query_length
        Default: the key length.
    batch, head
        The row of the mask to draw (0 where the mask broadcasts).
    ax
        matplotlib Axes to draw into; default: a new figure.
    path
        Also save the picture to this file.
    max_size
        Maximum number of cells per side; longer masks are averaged.

    Returns
    -------
    The matplotlib Axes.

    Raises
    ------
    ImportError
        matplotlib is not installed; it comes with the extra ``plot``.
    ValueError
        ``batch`` or ``head`` is out of range, or a length is not positive.
    """
    length = mask.key_length if query_length is None else checks.whole(query_length, "query_length", 1)
    if mask.key_length < 1:
        raise ValueError(f"mask must have at least one key to draw, got shape {mask.shape}")
    checks.whole(max_size, "max_size", 1)
    row = []
    for name, index, size in (("batch", batch, mask.shape[0]), ("head", head, mask.shape[1])):
        index = checks.whole(index, name, 0)
        if size == 1:
            index = 0
        elif index >= size:
            raise ValueError(f"{name} must be below {size}, got {index}")
        row.append(index)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a mask needs matplotlib; install the extra: pip install 'cupy-dma[plot]'") from error
    density = mask_density(mask, length, row[0], row[1], max_size)
    if ax is None:
        ax = Figure(figsize=(6, 6), layout="constrained").subplots()  # no global state, no window
    ax.imshow(density, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest",
              extent=(0, mask.key_length, length, 0))
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    if path is not None:
        ax.figure.savefig(path, dpi=150)
    return ax
