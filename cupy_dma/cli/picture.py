"""The demo's picture: which keys the queries of each kv head attend to."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

MAX_HEADS = 4  # in one picture
NEEDED = "matplotlib is missing (pip install matplotlib, or the extra plot of cupy_dma)"


def why_not(output: str) -> str:
    """Why no picture can be written to ``output``, as far as that is known ahead; empty if it can."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return NEEDED
    path, endings = Path(output), FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        return f"its name must end in one of .{', .'.join(sorted(endings))}"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        return "it cannot be written"
    return ""


def make(masks: list[Any], sliding: list[bool], length: int, window: int, title: str) -> Any:
    """The matplotlib Figure of masks ``(1, heads, N)``, whose heads together are the kv heads; of many heads the first
    ones and the last. ``sliding`` says which heads have scores that all tie."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heads = [(mask, head) for mask in masks for head in range(mask.shape[1])]
    shown = [*range(min(len(heads), MAX_HEADS) - 1), len(heads) - 1]
    figure = Figure(figsize=(5.5 * len(shown), 6.2), layout="constrained")
    for g, ax in zip(shown, figure.subplots(1, len(shown), squeeze=False)[0]):
        mask, head = heads[g]
        mask.plot(length, head=head, ax=ax)
        ax.set_title(f"kv head {g}: a sliding window, the newest {window} keys (A = 0)" if sliding[g] else
                     f"kv head {g}: the {window} keys with the highest scores", fontsize="medium")
    figure.suptitle(title, wrap=True)
    colors = figure.axes[0].images[0].cmap
    figure.legend(handles=[
        Patch(facecolor=colors(part), edgecolor="gray", label=label)
        for part, label in ((1.0, "visible"), (0.5, "half of the pairs in the cell are visible"), (0.0, "hidden"))],
        loc="outside lower center", ncols=3, frameon=False)
    return figure
