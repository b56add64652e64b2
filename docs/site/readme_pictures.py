"""The two pictures of the README: keys as intervals, and times over the length from the recorded results.

    python docs/site/readme_pictures.py        writes docs/assets/readme-intervals.png and readme-speed.png

The chart carries a digest of the results that it shows, by which tests/project/test_readme.py notices that it is old.
"""
from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tree, installed or not

import cupy_dma as dma  # noqa: E402
from benchmarks.harness import folders, pages, report  # noqa: E402

KEYS, WINDOW, QUERY = 48, 8, 36
# Panel, results, stage of cupy_dma, stage of the dense kernels.
PANELS = (("forward: scores, selection and attention", "forward", "total", "attention"),
          ("forward and backward", "backward", "forward+backward", "forward+backward"))


def intervals(size: tuple[float, float] = (9, 4), notes: bool = True) -> Figure:
    """Keys as bars from start to stop, and one query that crosses those that it sees."""
    scores = np.random.default_rng(5).standard_normal((1, 1, KEYS), np.float32)
    mask = dma.IntervalMask.top_w(scores, WINDOW)
    figure = Figure(figsize=size, layout="constrained")
    ax = mask.plot_lifetimes(scores, ax=figure.subplots())
    ax.axvline(QUERY + 0.5, color="tab:red", linewidth=1.2)
    if not notes:
        return figure
    seen = int(mask.to_dense(KEYS)[0, 0, QUERY].sum())
    ax.annotate(f"query {QUERY} sees the {seen} keys\nwhose bars it crosses", (QUERY + 0.5, 1), (QUERY + 1.2, 19),
                color="tab:red", fontsize=9)
    ax.annotate("a key's bar begins at its own position (start)\nand ends when 8 better ones have come (stop)",
                (1, 30), (1, 40), fontsize=9)
    ax.annotate("dots: keys that no query sees", (1, 30), (1, 46), fontsize=9, color="0.4")
    return figure


def points(result: dict[str, Any], ours: str, dense: str) -> dict[int, list[tuple[int, float, float]]]:
    """Window -> (N, ours, the fastest dense kernel), milliseconds, of 16 query heads over 8 kv heads of size 128."""
    found: dict[int, list[tuple[int, float, float]]] = {}
    for case in filter(pages.in_tables, result["cases"]):
        if (case["set"], case["heads"], case["kv_heads"], case["head_dim"]) == ("model", 16, 8, 128):
            peers = [ms for who in ("cudnn", "flash") if (ms := report.value(case, who, dense))]
            mine = report.value(case, "cupy_dma", ours)
            if peers and mine:
                found.setdefault(case["window"], []).append((case["key_length"], mine, min(peers)))
    return {window: sorted(row) for window, row in found.items()}


def speed(results: dict[str, dict[str, Any]]) -> Figure:
    """Milliseconds over the length, forward and with the backward pass, with the GPU and the date of each."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for ax, (title, name, ours, dense) in zip(figure.subplots(1, 2), PANELS):
        result = results[name]
        found = points(result, ours, dense)
        peers = {n: ms for row in found.values() for n, _, ms in row}
        ax.plot(sorted(peers), [peers[n] for n in sorted(peers)], "o-", color="tab:red", markersize=4,
                label="fastest dense kernel (cuDNN or FlashAttention), causal")
        for (window, row), colour, below in zip(sorted(found.items()), ("tab:blue", "darkcyan"), (-13, 7)):
            ax.plot([n for n, _, _ in row], [ms for _, ms, _ in row], "o-", color=colour, markersize=4,
                    label=f"cupy_dma, window {window}")
            for n, ms, peer in row:
                ax.annotate(report.times(peer / ms), (n, ms), (0, below), textcoords="offset points", ha="center",
                            fontsize=8, color=colour)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.margins(y=0.16, x=0.08)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}K"))
        ax.set_xlabel("tokens")
        ax.set_ylabel("milliseconds")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
        ax.set_title(f"{title}\n{result['device']}, {result['date'][:10]}", fontsize=10)
    figure.suptitle("16 query heads over 8 kv heads, head dim 128, bfloat16, batch 1; numbers: times as fast as dense",
                    fontsize=10)
    return figure


def digest() -> str:
    """Of the numbers that the chart shows."""
    shown = [points(result, ours, dense) for result, (_, _, ours, dense) in zip(recorded().values(), PANELS)]
    dates = [(result["device"], result["date"]) for result in recorded().values()]
    return hashlib.sha256(json.dumps([shown, dates]).encode()).hexdigest()[:16]


def recorded() -> dict[str, dict[str, Any]]:
    return {name: folders.read(f"{name}_performance.json") for _, name, _, _ in PANELS}


def main(folder: Path = ROOT / "docs" / "assets") -> None:
    intervals().savefig(folder / "readme-intervals.png", dpi=110)
    speed(recorded()).savefig(folder / "readme-speed.png", dpi=110, metadata={"Results": digest()})


if __name__ == "__main__":
    main()
