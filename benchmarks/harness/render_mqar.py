"""The tables and the chart of benchmarks/routines/mqar.py."""
from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.harness.charts import Panel, colormaps
from benchmarks.harness.folders import EVIDENCE
from benchmarks.harness.render_evidence import COLOURS, Report, Row, budget, grouped, markdown, spread, words

LEARNED = 0.95  # right answers of a model that has learned the task


def right(row: Row) -> float:
    """The best of a model's checks."""
    return max(row["curve"])


def shown(rows: list[Row]) -> str:
    """Mean and range of the seeds, and their mean at the end where that is worse by a point or more."""
    best, last = (statistics.mean(one) for one in ([right(row) for row in rows], [row["curve"][-1] for row in rows]))
    return spread([right(row) for row in rows], 100) + (f" → {100 * last:.0f}" if last <= best - 0.01 else "")


def best(rows: list[Row]) -> list[Row]:
    """Of rows that differ in rate and seed, those of the rate whose mean accuracy is the highest."""
    rates = grouped(rows, ("seed",)).values()
    return max(rates, key=lambda own: statistics.mean(map(right, own)))


def stacks(result: dict[str, Any]) -> list[list[Row]]:
    """The rows of each setting at its best rate, in the order of the settings' sizes."""
    found = [best(rows) for rows in grouped(result["rows"], ("seed", "rate")).values()]

    def order(rows: list[Row]) -> tuple[Any, ...]:
        one = rows[0]["settings"]
        task = one["width"], one["length"], one["pairs"], not one["grow"]
        return *task, list(COLOURS).index(one["kind"]), words(one), budget(one)

    return sorted(found, key=order)


def name_of(one: dict[str, Any]) -> str:
    """The attention of a row's settings, its recent keys as a share of all that a query sees."""
    name = words({**one, "recent": 0, "sinks": 0})
    if one["recent"]:
        name += f", {one['recent'] / budget(one):.2g} of w recent" + ", a sink" * one["sinks"]
    return name


def task_of(one: dict[str, Any]) -> str:
    return f"{one['pairs']} pairs in {one['length']} tokens, width {one['width']}"


def by_task(result: dict[str, Any]) -> str:
    """A table for each task, the one with most settings first: a line for each attention, a column for each number of
    keys."""
    tasks: dict[str, dict[str, dict[float, str]]] = {}
    for rows in stacks(result):
        one = rows[0]["settings"]
        lines = tasks.setdefault(task_of(one) + ", full length from the first step" * (not one["grow"]), {})
        lines.setdefault(name_of(one), {})[budget(one) / one["pairs"]] = shown(rows)
    parts = []
    for task, lines in sorted(tasks.items(), key=lambda item: -len(item[1])):
        columns = sorted({part for cells in lines.values() for part in cells if part}) or [0]
        head = [task, *(f"w = {part:g} pairs" if part else "all keys" for part in columns)]
        parts.append(markdown(head, [[name, *(cells.get(part, cells.get(0, "–")) for part in columns)]
                                     for name, cells in lines.items()]))
    return "\n\n".join(parts)


def often(result: dict[str, Any]) -> str:
    """How many models learned the task that see as many keys as there are pairs, or all; those of earlier runs with the
    same settings, seeds and data count, too (``mqar_earlier.json``). Of each run, the rate that is best in it."""
    earlier = json.loads((EVIDENCE / "mqar_earlier.json").read_text())["models"]
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for rows in stacks(result):
        one = rows[0]["settings"]
        if one["grow"] and one["kind"] in ("full", "dynamic") and budget(one) in (0, one["pairs"]):
            name, task = name_of(one), task_of(one)
            learned, count = earlier.get(name, {}).get(task, (0, 0))
            learned += sum(right(row) >= LEARNED for row in rows)
            found.setdefault(name, {})[task] = learned, count + len(rows)
    tasks = list(dict.fromkeys(task_of(rows[0]["settings"]) for rows in stacks(result)))
    tasks = [task for task in tasks if sum(task in lines for lines in found.values()) > 1]
    head = [f"models with {100 * LEARNED:.0f} % or more, w = pairs", *tasks]
    cells = [[f"{lines[task][0]} of {lines[task][1]}" if task in lines else "–" for task in tasks]
             for lines in found.values()]
    return markdown(head, [[name, *row] for name, row in zip(found, cells)])


def table(result: dict[str, Any]) -> str:
    return f"{by_task(result)}\n\n{often(result)}"


def line(rows: list[Row]) -> str:
    one = rows[0]["settings"]
    kept = ", ".join(spread([row["kept"][i] for row in rows], 100, 0) for i in range(len(rows[0]["kept"])))
    return (f"{one['length']:5}/{one['pairs']:<4}{one['width']:4} w {budget(one):4}  "
            f"{shown(rows):26} rate {one['rate']:g}, {rows[0]['steps']} steps"
            f"{'' if one['grow'] else ' of full length'}, kept {kept or '–'}  {words(one)}")


def text(result: dict[str, Any]) -> str:
    return "\n".join(map(line, stacks(result)))


def panels(result: dict[str, Any]) -> list[Panel]:
    """Accuracy against the number of keys, of the task that has most settings; bars: the range of the seeds."""
    by_task: dict[tuple[int, ...], list[list[Row]]] = {}
    for rows in stacks(result):
        one = rows[0]["settings"]
        if one["grow"]:
            by_task.setdefault((one["length"], one["pairs"], one["width"]), []).append(rows)
    (length, pairs, width), chosen = max(by_task.items(), key=lambda item: len(item[1]))
    curves: dict[str, list[tuple[int, float, float, float]]] = {}
    kinds: dict[str, Row] = {}
    for rows in chosen:
        one, answered = rows[0]["settings"], [100 * right(row) for row in rows]
        name = words({**one, "recent": 0, "sinks": 0})
        if not one["recent"] and not one["sinks"]:
            curves.setdefault(name, []).append((budget(one), statistics.mean(answered), min(answered), max(answered)))
            kinds[name] = one
    curves = {name: points for name, points in curves.items() if len(points) > 1 or not points[0][0]}
    ends = sorted({w for points in curves.values() for w, *_ in points if w} or {pairs})

    def draw(ax: Any) -> None:
        dynamic = iter(colormaps()["tab10"]([0, 1, 3, 9, 6, 8] * 6))
        for i, (name, points) in enumerate(curves.items()):
            colour = next(dynamic) if kinds[name]["kind"] == "dynamic" else COLOURS[kinds[name]["kind"]]
            if points[0][0] == 0:
                ax.axhspan(points[0][2], points[0][3], color=colour, alpha=0.2)
                ax.axhline(points[0][1], color=colour, linestyle="--", label=name)
            else:
                w, mean, low, high = zip(*points)
                bars = [[m - a for m, a in zip(mean, low)], [b - m for m, b in zip(mean, high)]]
                beside = [x * 1.012**(i - len(curves) / 2) for x in w]  # bars of equal numbers of keys side by side
                linear = kinds[name]["kind"] in ("dynamic", "global") and kinds[name]["form"] == "linear"
                ax.errorbar(beside, mean, yerr=bars, marker="s" if linear else "o", linestyle=":" if linear else "-",
                            markersize=3, capsize=2, color=colour, label=name)
        ax.axvline(pairs, color="tab:red", linewidth=0.7, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set_xticks(ends, map(str, ends))
        ax.set_xlabel(f"keys that a query sees (dotted: {pairs} pairs)")
        ax.set_ylabel("right answers, %")
        ax.grid(alpha=0.3)

    return [Panel(f"{pairs} pairs in {length} tokens, width {width}; mean and range of seeds", draw, 4.2)]


REPORT = Report("mqar", table, text, panels, "Right answers against the number of keys that a query sees")
