"""Charts of equal panels: in one picture beside the results, and separately on the site, so a phone can stack them.
Needs matplotlib only to draw."""
import io
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 4.8, 3.6  # inches of a panel, without its legend


@dataclass(frozen=True)
class Panel:
    title: str
    draw: Callable[[Any], None]  # fills an Axes; labelled artists go into the legend
    height: float = HEIGHT


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files; without matplotlib, prints a message and returns None."""
    try:
        import matplotlib
    except ImportError:
        print("no chart: matplotlib is missing (pip install matplotlib)")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def colormaps() -> Any:
    from matplotlib import colormaps

    return colormaps


def size_of(n: float) -> str:
    """A size as a label: ``2K`` for 2048, ``1M`` for 1048576."""
    return f"{n / 2**20:g}M" if n >= 2**20 else f"{n / 1024:g}K" if n >= 1024 else f"{n:g}"


def by_size(ax: Any, label: str) -> None:
    """A logarithmic horizontal axis of lengths or windows, with ticks at powers of two."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda n, _: size_of(n))
    ax.set_xlabel(label)


def by_value(ax: Any, label: str) -> None:
    """A logarithmic vertical axis with plain numbers."""
    ax.set_yscale("log", subs=())
    ax.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylabel(label)


def save(panels: Sequence[Panel], title: str, path: Path, across: int = 3) -> None:
    """All panels in one picture, ``across`` of them side by side, with one legend."""
    plt = pyplot()
    if plt is None or not panels:
        return
    across = min(across, len(panels))
    down = -(-len(panels) // across)
    height = down * max(panel.height for panel in panels)
    figure, axes = plt.subplots(down, across, figsize=(WIDTH * across, height), squeeze=False, layout="constrained")
    for ax in axes.flat[len(panels):]:
        ax.set_visible(False)
    for ax, panel in zip(axes.flat, panels):
        panel.draw(ax)
        ax.set_title(panel.title, fontsize=10)
    rows = _legend(figure, across)
    figure.set_figheight(height + 0.4 + 0.2 * rows)
    figure.suptitle(title, fontsize=11)
    figure.savefig(buffer := io.BytesIO(), dpi=110)
    plt.close(figure)
    from PIL import Image  # matplotlib needs it too

    Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def svgs(panels: Sequence[Panel]) -> list[str]:
    """Each panel as an SVG element for a page."""
    plt = pyplot()
    found = []
    for i, panel in enumerate(panels if plt is not None else ()):
        with plt.rc_context({"font.size": 11}):
            figure = plt.figure(figsize=(WIDTH, panel.height), layout="constrained")
            panel.draw(ax := figure.subplots())
            ax.set_title(panel.title, fontsize=10)
            figure.set_figheight(panel.height + 0.22 * _legend(figure, 1))
            found.append(svg(figure, f"{panel.title} {i}"))
            plt.close(figure)
    return found


def svg(figure: Any, name: str) -> str:
    """A transparent SVG element as wide as its column; black lines take the colour of the page's text. ``name`` must be
    unique in a page."""
    import matplotlib

    for ax in figure.axes:
        if ax.get_legend() is not None:
            ax.get_legend().set_frame_on(False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg"):], flags=re.DOTALL)
    head = text.partition(">")[0]
    text = re.sub(r' (width|height)="[^"]*"', "", head) + text.removeprefix(head)
    text = text.replace("#000000", "currentColor")
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>c{zlib.crc32(name.encode())}-", text)


def _legend(figure: Any, columns: int) -> int:
    """Draw one entry per label of all panels, below the panels. Returns the number of rows."""
    handles = {name: handle for ax in figure.axes for handle, name in zip(*ax.get_legend_handles_labels())}
    if max(map(len, handles), default=0) > 45:
        columns = max(1, columns - 1)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=columns, fontsize=9,
                      frameon=False)
    return -(-len(handles) // columns)
