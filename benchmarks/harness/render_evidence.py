"""What mqar.py, language_model.py and needle.py make of their results. Needs no torch.

A page shows what is recorded: the text between the marks of a report is its table, or ``Report.pending`` where there is
no file of results yet.
"""
from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import charts
from benchmarks.harness.charts import Panel
from benchmarks.harness.folders import EVIDENCE, ROOT
from benchmarks.harness.render import Marked

Row = dict[str, Any]
DOCS = ROOT / "docs" / "evidence.md"
COLOURS = {"full": "black", "window": "tab:gray", "random": "tab:olive", "bias": "tab:brown", "selection": "tab:purple",
           "dynamic": "tab:blue", "global": "tab:green"}


@dataclass(frozen=True)
class Report(Marked):
    """``name`` is that of the file of results and of the script, too."""

    table: Callable[[dict[str, Any]], str]  # of the page
    text: Callable[[dict[str, Any]], str]  # what a run prints at its end
    panels: Callable[[dict[str, Any]], list[Panel]]  # of the chart
    shows: str  # the chart

    @property
    def pending(self) -> str:
        return (f"**Not recorded yet.** `python benchmarks/{self.name}.py` writes "
                f"`benchmarks/results/evidence/{self.name}.json`, from which this part is made.")

    def part(self, result: dict[str, Any] | None) -> str:
        """The text between the marks."""
        if result is None:
            return self.pending
        chart = f"results/{self.name}.png"
        summary = f"<summary>Chart, and all settings of {len(result['rows'])} models</summary>"
        return (f'<details markdown="1">\n{summary}\n\n'
                f"[![{self.shows}]({chart})]({chart})\n\n{self.table(result)}\n\n{where(result)}\n\n</details>")

    def recorded(self) -> dict[str, Any] | None:
        path = EVIDENCE / f"{self.name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def update(self, result: dict[str, Any] | None, path: Path = DOCS) -> None:
        self.put(path, self.part(result))

    def chart(self, result: dict[str, Any], path: Path) -> None:
        charts.save(self.panels(result), self.shows, path, across=2)


def where(result: dict[str, Any]) -> str:
    """On what the rows were recorded, and what they cost."""
    rows = result["rows"]
    devices, commits, dates = (sorted({row[name] for row in rows}) for name in ("device", "commit", "date"))
    minutes = sum(row["seconds"] for row in rows) / 60
    return (f"{len(rows)} models in {minutes:.1f} minutes on {', '.join(devices)}, {dates[0][:10]} to "
            f"{dates[-1][:10]}, commit {', '.join(one[:12] or '?' for one in commits)}.")


def spread(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """The mean of the seeds and, in brackets, the least and the greatest where they differ; how many are NaN."""
    lost, values = sum(map(math.isnan, values)), [x for x in values if not math.isnan(x)]
    if lost:
        return f"{spread(values, scale, digits)}, {lost} NaN" if values else "NaN"
    if not values:
        return "–"
    low, mean, high = (f"{scale * x:.{digits}f}" for x in (min(values), statistics.mean(values), max(values)))
    return mean if low == high else f"{mean} ({low}–{high})"


def grouped(rows: list[Row], without: tuple[str, ...]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows whose settings differ in nothing but ``without``."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(sorted((name, x) for name, x in row["settings"].items()
                           if name not in without and not isinstance(x, list)))
        found.setdefault(key, []).append(row)
    return found


def words(one: dict[str, Any]) -> str:
    """The attention of a row's settings."""
    kind = one["kind"]
    if kind in ("full", "window", "random"):
        return {"full": "full attention", "window": "sliding window", "random": "random keys"}[kind]
    start = f"A {'drawn ±' if one['drawn'] else ''}{one['start']:g}{', fixed' if one['fixed'] else ''}"
    name = {"bias": "all keys, scores as bias", "selection": "selected, no bias", "dynamic": "dynamic mask",
            "global": "dynamic mask, global"}[kind]
    extra = "".join(f", {one[what]} {word}" for what, word in (("recent", "recent"), ("sinks", "sinks")) if one[what])
    rate = f", scores' rate ×{one['scores_rate']:g}" if one["scores_rate"] != 1 else ""
    frozen = ", then frozen" if one.get("frozen") else ""
    return f"{name}, {one['form']}, {start}{rate}{extra}{frozen}"


def named(one: dict[str, Any]) -> str:
    """For the progress of a run."""
    return f"w {budget(one)}, {words(one)}" if budget(one) else words(one)


def markdown(head: list[str], lines: list[list[str]], words: int = 1) -> str:
    """A table whose first columns hold ``words``."""
    rule = "|---" * words + "|--:" * (len(head) - words) + "|"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(cells)} |" for cells in lines)])


def budget(one: dict[str, Any]) -> int:
    return 0 if one["kind"] in ("full", "bias") else one["window"] + one["recent"] + one["sinks"]
