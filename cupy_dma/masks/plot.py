"""Pictures of masks, drawn from the intervals: memory is linear in the picture and the keys, never ``Lq * Lk``.

Each returns the matplotlib Axes that it drew into and, with ``path``, saves the picture. Figures are made without
matplotlib's global state: no window opens, and nothing has to be closed.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_dma import checks
from cupy_dma.arrays import Array, Library, Operand
from cupy_dma.masks import plot_data

ALIVE, EVICTED, HIDDEN = "tab:blue", "tab:orange", "0.93"  # colours; hidden keys are light grey
FLOOR = 1e-4  # the smallest attention weight that has a colour of its own


class Pictures:
    """What an ``IntervalMask`` can draw. matplotlib is optional: it comes with the extra ``plot``."""

    __slots__ = ()

    _start: Operand
    _stop: Operand
    shape: tuple[int, int, int]
    key_length: int
    library: Library

    def plot(self, query_length: int | None = None, *, batch: int = 0, head: int = 0, ax: Any = None,
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
        matplotlib.axes.Axes

        Raises
        ------
        ImportError
            matplotlib is not installed; it comes with the extra ``plot``.
        ValueError
            ``batch`` or ``head`` is out of range, a length is not positive, or the mask has no keys.
        """
        length = self.key_length if query_length is None else checks.whole(query_length, "query_length", 1)
        checks.whole(max_size, "max_size", 1)
        batch, head = plot_data.row(self, batch, head)
        ax = _axes(ax, (6, 6))
        ax.imshow(plot_data.density(self, length, batch, head, max_size), cmap="Blues", vmin=0, vmax=1, aspect="auto",
                  interpolation="nearest", extent=(0, self.key_length, length, 0))
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        return _saved(ax, path)

    def plot_lifetimes(self, scores: Array | None = None, *, batch: int = 0, head: int = 0, ax: Any = None,
                       path: Any = None, max_keys: int = 256) -> Any:
        """Plot every key as a bar from its ``start`` to its ``stop``, coloured by its score.

        Parameters
        ----------
        scores : float array ``(Lk,)`` or ``(1|B, 1|Hkv|H, Lk)``, optional
            The number that colours each key. NaN is drawn in red. Without scores all bars have one colour.
        batch, head
            The row of the mask, and of scores with three axes, to draw (0 where they broadcast).
        ax, path
            As for ``plot``.
        max_keys
            The most keys to draw; of more keys, evenly spaced ones are drawn.

        Returns
        -------
        matplotlib.axes.Axes
            Keys that no position sees have a dot at their own position and no bar.

        Raises
        ------
        ImportError
            matplotlib is not installed; it comes with the extra ``plot``.
        TypeError, ValueError
            ``scores`` has the wrong type or shape, ``batch`` or ``head`` is out of range, or the mask has no keys.
        """
        checks.whole(max_keys, "max_keys", 1)
        index = plot_data.row(self, batch, head)
        shade = None if scores is None else plot_data.of_row(scores, self, index)
        start, stop = plot_data.lifetimes(self, index)
        key = np.unique(np.linspace(0, self.key_length - 1, min(self.key_length, max_keys)).round().astype(int))
        shown, unseen = key[stop[key] > start[key]], key[stop[key] <= start[key]]
        ax = _axes(ax, (8, 5))
        from matplotlib.collections import LineCollection

        bars = LineCollection([((start[j], j), (stop[j], j)) for j in shown], capstyle="butt",
                              linewidths=max(0.8, min(6.0, 200 / len(key))))
        if shade is None:
            bars.set_color(ALIVE)
        else:
            bars.set_cmap(_colours("viridis", bad="red"))
            bars.set_array(np.ma.masked_invalid(shade[shown]))
            finite = shade[shown][np.isfinite(shade[shown])]
            bars.set_clim(*((finite.min(), finite.max()) if finite.size else (0, 1)))
            ax.figure.colorbar(bars, ax=ax, label="score")
        ax.add_collection(bars)
        ax.plot(unseen, unseen, ".", color="0.6", markersize=3, label="never visible")
        ax.set_xlim(0, self.key_length)
        ax.set_ylim(self.key_length, -1)
        ax.set_xlabel("position of the query")
        ax.set_ylabel("key")
        if len(key) < self.key_length:
            ax.set_title(f"{len(key)} of {self.key_length:,} keys", fontsize="medium")
        return _saved(ax, path)

    def plot_survival(self, *, batch: int = 0, head: int = 0, ax: Any = None, path: Any = None, bins: int = 40) -> Any:
        """Plot a histogram of how many positions see each key.

        Keys still visible at the last position are stacked in a second colour: they may live longer. The title counts
        the keys of each kind.

        Parameters
        ----------
        batch, head
            The row of the mask to draw (0 where the mask broadcasts).
        ax, path
            As for ``plot``.
        bins
            The most bars; their widths grow with the lifetime, on a logarithmic axis.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ImportError
            matplotlib is not installed; it comes with the extra ``plot``.
        ValueError
            ``batch`` or ``head`` is out of range, or the mask has no keys.
        """
        checks.whole(bins, "bins", 1)
        start, stop = plot_data.lifetimes(self, plot_data.row(self, batch, head))
        ax = _axes(ax, (7, 4))
        lived, alive = stop - start, (stop == self.key_length) & (stop > start)
        gone = (lived > 0) & ~alive
        edges = np.unique(np.geomspace(1, self.key_length + 1, bins + 1).round())
        ax.hist([lived[gone], lived[alive]], edges, stacked=True, color=[EVICTED, ALIVE],
                label=["evicted", "still visible at the end"])
        ax.set_xscale("log")
        ax.set_xlabel("positions that see the key")
        ax.set_ylabel("keys")
        ax.legend(loc="upper right")  # "best" is slow with many keys, and warns
        ax.set_title(f"{self.key_length:,} keys: {(lived <= 0).sum():,} never visible, {gone.sum():,} evicted, "
                     f"{alive.sum():,} still visible", fontsize="medium")
        return _saved(ax, path)

    def plot_attention(self, query: Array, key: Array, *, bias: Array | None = None, rows: Sequence[int] | None = None,
                       scale: float | None = None, softcap: float = 0.0, batch: int = 0, head: int = 0, ax: Any = None,
                       path: Any = None, max_size: int = 512) -> Any:
        """Plot the attention weights of a few queries, each as a strip over all keys; keys they do not see are grey.

        The weights are computed here, in float64 on the host, for these rows alone.

        Parameters
        ----------
        query, key : float arrays ``(B, Lq, H, D)`` and ``(B, Lk, Hkv, D)``
        bias : float array ``(Lk,)`` or ``(1|B, 1|Hkv|H, Lk)``, optional
            A key bias, such as the scores.
        rows
            The queries to draw; default: eight, evenly spaced, with the last one.
        scale, softcap
            As for ``cupy_dma.attention``.
        batch, head
            The batch entry and the query head.
        ax, path
            As for ``plot``.
        max_size
            The most columns; of more keys a column shows the largest weight.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ImportError
            matplotlib is not installed; it comes with the extra ``plot``.
        TypeError, ValueError
            An argument has the wrong type, shape or value.
        """
        checks.whole(max_size, "max_size", 1)
        chosen, weight, visible = plot_data.attention(self, query, key, bias, rows, scale, softcap, batch, head)
        n = self.key_length
        edges = np.linspace(0, n, min(n, max_size) + 1).astype(int)[:-1]
        weight = np.maximum.reduceat(weight, edges, axis=1)
        seen = np.logical_or.reduceat(visible, edges, axis=1)
        ax = _axes(ax, (9, 0.45 * len(chosen) + 1.6))
        from matplotlib.colors import LogNorm

        strips = ax.imshow(np.ma.masked_where(~seen, np.maximum(weight, FLOOR)), cmap=_colours("magma_r", bad=HIDDEN),
                           norm=LogNorm(FLOOR, 1.0), aspect="auto", interpolation="nearest",
                           extent=(0, n, len(chosen), 0))
        ax.hlines(range(1, len(chosen)), 0, n, color="white", linewidth=3)
        ax.set_yticks(np.arange(len(chosen)) + 0.5, [f"{row:,}" for row in chosen])
        ax.set_xlabel("key (grey: hidden)")
        ax.set_ylabel("query")
        ax.figure.colorbar(strips, ax=ax, label="attention weight")
        return _saved(ax, path)


def _colours(name: str, bad: str) -> Any:
    from matplotlib import colormaps

    return colormaps[name].with_extremes(bad=bad)


def _axes(ax: Any, size: tuple[float, float]) -> Any:
    """``ax``, or the Axes of a new figure: no global state, no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a mask needs matplotlib; install the extra: pip install 'cupy-dma[plot]'") from error
    return Figure(figsize=size, layout="constrained").subplots() if ax is None else ax


def _saved(ax: Any, path: Any) -> Any:
    if path is not None:
        ax.figure.savefig(path, dpi=150)
    return ax
