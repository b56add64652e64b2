"""The tables and the chart of benchmarks/routines/language_model.py."""
from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

from benchmarks.harness.charts import Panel, by_size, colormaps
from benchmarks.harness.render_evidence import COLOURS, Report, Row, budget, grouped, markdown, spread, words

BINS = (0, 64, 256, 1024, 4096)  # of the table: where its columns begin
RATE = 1e-3  # of all rows but those that try another
LIVES = ("never seen", "to w / 4", "to w", "to 4 w", "longer", "to the end")


def stacks(result: dict[str, Any]) -> list[list[Row]]:
    """The seeds of each setting, by length, keys and kind."""
    def order(rows: list[Row]) -> tuple[Any, ...]:
        one = rows[0]["settings"]
        return one["length"], list(COLOURS).index(one["kind"]), budget(one), words(one), one["rate"]

    return sorted(grouped(result["rows"], ("seed",)).values(), key=order)


def label(one: dict[str, Any]) -> str:
    return words(one) + (f", rate {one['rate']:g}" if one["rate"] != RATE else "")


def between(row: Row, low: int, high: int) -> float | None:
    """Nats per byte at the positions from ``low`` to ``high``, whose bins there must be."""
    edges = row["edges"]
    bins = [(b - a, x) for a, b, x in zip(edges, edges[1:], row["by_position"]) if low <= a and b <= high]
    return sum(n * x for n, x in bins) / sum(n for n, _ in bins) if bins else None


def columns(rows: list[Row]) -> list[tuple[int, int]]:
    longest = max(row["edges"][-1] for row in rows)
    ends = [b for b in (*BINS[1:], longest) if b <= longest]
    return list(dict.fromkeys(zip(BINS, ends)))


def table(result: dict[str, Any]) -> str:
    """Nats per byte by position; then how long keys live at the end of training, over all layers and heads."""
    found, spans = stacks(result), columns(result["rows"])
    lines = []
    for rows in found:
        one = rows[0]["settings"]
        parts = [[x for row in rows if (x := between(row, a, b)) is not None] for a, b in spans]
        whole = [between(row, 0, row["edges"][-1]) or 0.0 for row in rows]
        lines.append([str(one["length"]), label(one), str(budget(one) or "all"), spread(whole, digits=3),
                      *(spread(part, digits=3) for part in parts)])
    losses = markdown(["bytes", "attention", "w", "all positions", *(f"{a} to {b}" for a, b in spans)], lines, words=2)
    lives = []
    for rows in found:
        one = rows[0]["settings"]
        if rows[0]["lives"]:
            shares = [shares_of(row["lives"][-1]["counts"]) for row in rows]
            lives.append([str(one["length"]), label(one), str(budget(one)),
                          *(f"{100 * statistics.mean(x):.0f} %" for x in zip(*shares))])
    if not lives:
        return losses
    return losses + "\n\n" + markdown(["bytes", "keys that live", "w", *LIVES], lives, words=2)


def shares_of(counts: list[list[str]]) -> list[float]:
    """The share of keys in each class of lives, over layers and heads."""
    heads = [list(map(int, head.split())) for layer in counts for head in layer]
    total = [sum(x) for x in zip(*heads)]
    return [x / sum(total) for x in total]


def line(rows: list[Row]) -> str:
    one = rows[0]["settings"]
    whole = [between(row, 0, row["edges"][-1]) or 0.0 for row in rows]
    last = [row["by_position"][-1] for row in rows]
    return (f"{one['length']:6} w {budget(one):5}  {spread(whole, digits=4):24} last positions "
            f"{spread(last, digits=4):24} {sum(row['seconds'] for row in rows):6.0f} s  {label(one)}")


def text(result: dict[str, Any]) -> str:
    return "\n".join(map(line, stacks(result)))


def panels(result: dict[str, Any]) -> list[Panel]:
    """What each attention loses against full attention, by position; and lives over training by layer."""
    found = [rows for rows in stacks(result) if rows[0]["settings"]["rate"] == RATE
             and not any(math.isnan(x) for row in rows for x in row["by_position"])]
    length = min(rows[0]["settings"]["length"] for rows in found)
    own = [rows for rows in found if rows[0]["settings"]["length"] == length]
    bars = []  # height, step, shares: a group for each setting, below its name
    names = []  # height, setting
    height = 0
    for rows in (rows for rows in own if rows[0]["lives"]):
        names.append((height, f"w {budget(rows[0]['settings'])}, {words(rows[0]['settings'])}"))
        for life in rows[0]["lives"]:
            height += 1
            bars.append((height, life["step"], shares_of(life["counts"])))
        height += 1

    def losses(ax: Any) -> None:
        full = next((rows for rows in own if rows[0]["settings"]["kind"] == "full"), own[0])
        middle = [(a + b) / 2 for a, b in itertools.pairwise(full[0]["edges"])]
        colours = iter(colormaps()["tab10"]([0, 1, 2, 3, 4, 6, 8, 9] * 6))
        budgets = sorted({budget(rows[0]["settings"]) for rows in own})
        styles = dict(zip(budgets, itertools.cycle(("-", "--", "-.", ":"))))
        for rows in own:
            one = rows[0]["settings"]
            apart = [[x - y for x, y in zip(row["by_position"], other["by_position"])]
                     for row, other in zip(rows, full)]
            mean, low, high = ([kind(x) for x in zip(*apart)] for kind in (statistics.mean, min, max))
            colour = next(colours) if one["kind"] == "dynamic" else COLOURS[one["kind"]]
            ranges = [[m - a for m, a in zip(mean, low)], [b - m for m, b in zip(mean, high)]]
            ax.errorbar(middle, mean, yerr=ranges, marker="o", markersize=3, capsize=2, color=colour,
                        linestyle=styles[budget(one)], label=f"w {budget(one) or 'all'}, {words(one)}")
        by_size(ax, "position in the file, bytes")
        ax.set_ylabel("nats per byte more than full attention")
        ax.grid(alpha=0.3)

    def lives(ax: Any) -> None:
        heights, steps, shares = zip(*bars)
        left = [0.0] * len(bars)
        for i, (name, colour) in enumerate(zip(LIVES, colormaps()["viridis"]([i / 5 for i in range(6)]))):
            width = [share[i] for share in shares]
            ax.barh(heights, width, left=left, color=colour, label=name)
            left = [a + b for a, b in zip(left, width)]
        for at, name in names:
            ax.text(0, at, name, fontsize=7, va="center", in_layout=False)
        ax.set_yticks(heights, map(str, steps), fontsize=6)
        ax.set_ylim(height, -1)
        ax.set_ylabel("training step")
        ax.set_xlabel("share of keys by how long they stay visible")

    made = [Panel(f"{length} bytes; mean and range of the seeds", losses, 4.5)]
    return made + ([Panel("How long keys live, by layer", lives, 1 + 0.13 * height)] if bars else [])


REPORT = Report("language_model", table, text, panels, "Loss by position, and how long keys live")
