"""Presentation of results: formatted numbers, tables, line charts and the pieces of pages that they fill. Needs neither
a GPU nor torch. A ``Report`` says how a routine's record is shown; pages.py has one for each.
"""
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import charts, folders
from benchmarks.harness.charts import Panel, by_size, by_value

Entry = dict[str, Any]  # a result, or one of its cases or rows
Cell = Callable[[Any], str]
NONE = "–"


# ---- numbers --------------------------------------------------------------------------------------------------------
def value(case: Entry, who: str, stage: str, field: str = "ms") -> float | None:
    """One number of a case; None if it was not measured."""
    return next((row.get(field) for row in case["rows"] if (row["who"], row["stage"]) == (who, stage)), None)


def number(x: float | None, form: str, unit: float = 1.0) -> str:
    return NONE if x is None else form.format(x / unit)


def milliseconds(ms: float | None) -> str:
    """Three significant digits."""
    digits = max(0, 2 - math.floor(math.log10(abs(ms)))) if ms else 0
    return number(ms, f"{{:.{min(digits, 4)}f}}")


def microseconds(ms: float | None) -> str:
    return milliseconds(None if ms is None else 1e3 * ms)


def times(ratio: float | None) -> str:
    return number(ratio, f"{{:.{0 if (ratio or 0) >= 10 else 1 if (ratio or 0) >= 1 else 2}f}}×")


def ratio(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow and fast else None


def length(n: int) -> str:
    return f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 1024}K" if n % 1024 == 0 else str(n)


def mebibytes(size: float | None) -> str:
    return number(size, "{:.0f} MiB", 2**20)


def gibibytes(size: float | None) -> str:
    return number(size, "{:.1f}", 2**30)


def label(case: Entry) -> str:
    span = length(case["key_length"])
    if case["query_length"] == 1:
        span = f"1 query, {span} keys"
    return f"{span}, {case['heads']}/{case['kv_heads']} heads, D {case['head_dim']}, w {case['window']}"


def machine(result: Entry, *names: str, more: str = "") -> str:
    """The device, the versions of these packages, and the date."""
    known = {"CUDA": "torch_cuda", "CuPy": "cupy"}
    versions = ", ".join(f"{name} {result['versions'].get(known.get(name, name), '?')}" for name in names)
    return f"{result['device']}" + f" ({versions}{more})" * bool(names) + f", {result['date'][:10]}"


# ---- tables ---------------------------------------------------------------------------------------------------------
def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table whose first columns hold ``words`` and the others numbers."""
    rule = "|---" * words + "|--:" * (len(head) - words) + "|"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(cells)} |" for cells in lines)])


class Table(NamedTuple):
    """Columns: a title and a function from an entry to its cell."""

    columns: Sequence[tuple[str, Cell]]
    words: int = 1

    def of(self, entries: Iterable[Any]) -> str:
        return markdown([title for title, _ in self.columns],
                        [[cell(entry) for _, cell in self.columns] for entry in entries], self.words)


def ms(who: str, stage: str) -> Cell:
    return lambda case: milliseconds(value(case, who, stage))


def gain(slow: tuple[str, str], fast: tuple[str, str]) -> Callable[[Entry], float | None]:
    """How many times as fast as the peer."""
    return lambda case: ratio(value(case, *slow), value(case, *fast))


def against(slow: tuple[str, str], fast: tuple[str, str]) -> Cell:
    return lambda case: times(gain(slow, fast)(case))


# ---- what a run prints ----------------------------------------------------------------------------------------------
def head(result: Entry) -> str:
    return f"{result['device']}, {result['versions']}, commit {result['commit'][:12]}"


def verdict(check: Entry) -> str:
    if not check["ok"]:
        return f"check FAILED: {check}"
    worst = check["error"] / check["allowed"] if "error" in check else check.get("worst")
    return "check: right" if worst is None else f"check: {worst:.2f} of what is allowed"


def line(row: Entry) -> str:
    """The words and the numbers of a row, these with their names."""
    words = []
    for name, x in row.items():
        if isinstance(x, bool):
            words.append(name if x else f"NOT {name}")
        elif isinstance(x, (int, float)):
            words.append(f"{name} {length(x) if isinstance(x, int) else milliseconds(x)}")
        elif isinstance(x, str) and x:
            words.append(x)
    return "  ".join(words)


def text(result: Entry) -> str:
    """Every case, its check and its rows."""
    lines = [head(result)]
    for case in result.get("cases", [result]):
        lines += [f"{case['name']}: {verdict(case['check'])}"] if "check" in case else [case.get("name", "")]
        lines += [f"  {line(row)}" for row in case["rows"]]
    return "\n".join(filter(None, lines))


# ---- charts ---------------------------------------------------------------------------------------------------------
class Line(NamedTuple):
    points: Sequence[tuple[float, ...]]  # x, y and perhaps the least and the greatest y
    label: str
    colour: Any
    style: str = "-"
    marker: str = "o"


def lines(title: str, found: Iterable[Line], across: str, up: str, logarithmic: str = "xy",
          more: Callable[[Any], None] = lambda ax: None, height: float = charts.HEIGHT) -> Panel:
    """Lines over a length or a window. ``more`` draws on."""
    drawn = [line for line in found if line.points]

    def draw(ax: Any) -> None:
        for line in drawn:
            x, y, *ends = zip(*sorted(line.points))
            bars = [[m - low for m, low in zip(y, ends[0])], [top - m for m, top in zip(y, ends[1])]] if ends else None
            ax.errorbar(x, y, yerr=bars, capsize=2, marker=line.marker, markersize=3, label=line.label,
                        color=line.colour, linestyle=line.style)
        if "x" in logarithmic:
            by_size(ax, across)
        if "y" in logarithmic and drawn:
            by_value(ax, up)
        ax.set_xlabel(across)
        ax.set_ylabel(up)
        ax.grid(alpha=0.3)
        more(ax)

    return Panel(title, draw, height)


# ---- pages ----------------------------------------------------------------------------------------------------------
class Piece(NamedTuple):
    """A piece of a page generated from results, between two marker lines with its name."""

    name: str
    page: str  # from the root of the repository
    table: Callable[[Entry], str]

    @property
    def begin(self) -> str:
        return f"<!-- table:{self.name} -->"

    @property
    def end(self) -> str:
        return f"<!-- /table:{self.name} -->"

    def shown(self, root: Path = folders.ROOT) -> str:
        return (root / self.page).read_text().split(self.begin)[1].split(self.end)[0].strip()

    def put(self, words: str, root: Path = folders.ROOT) -> None:
        path = root / self.page
        before, rest = path.read_text().split(self.begin)
        path.write_text(f"{before}{self.begin}\n{words}\n{self.end}{rest.split(self.end)[1]}")


@dataclass(frozen=True)
class Report:
    """How a routine's records are shown."""

    name: str
    record: str  # pattern of the names of files
    pieces: tuple[Piece, ...] = ()
    text: Callable[[Entry], str] = text
    title: Callable[[Entry], str] = head  # of the chart
    panels: Callable[[Entry], list[Panel]] | None = None
    across: int = 3  # panels of the chart
    unrecorded: str | None = None  # what pages show without a record

    @property
    def pending(self) -> str:
        if self.unrecorded is not None:
            return self.unrecorded
        return f"**Not recorded yet.** `python -m benchmarks {self.name}` does."

    def paths(self, out: str | None = None) -> list[Path]:
        return sorted(folders.newest(self.record, out), key=lambda path: (len(path.name), path.name))

    def results(self, out: str | None = None) -> list[Entry]:
        return [json.loads(path.read_text()) for path in self.paths(out)]

    def made(self, piece: Piece, results: list[Entry]) -> str:
        return "\n\n".join(map(piece.table, results)) if results else self.pending

    def show(self, out: str | None = None) -> None:
        results = self.results(out)
        print("\n".join(map(self.text, results)) if results else f"{self.record} is not recorded in "
              f"{out or folders.RESULTS}")

    def update(self, out: str | None = None, root: Path = folders.ROOT) -> None:
        """Put the tables into the pages and draw the chart."""
        results = self.results(out)
        for piece in self.pieces:
            piece.put(self.made(piece, results), root)
        for path, result in zip(self.paths(out), results):
            self.chart(result, path.with_suffix(".png"))

    def chart(self, result: Entry, path: Path) -> None:
        if self.panels is not None:
            charts.save(self.panels(result), self.title(result), path, self.across)
