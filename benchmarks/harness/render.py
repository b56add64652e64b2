"""Results of the benchmarks as text, as the tables of docs/performance.md and as charts. Needs no GPU and no torch.

``FORWARD`` and ``BACKWARD`` show the results of forward_performance.py and backward_performance.py.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import charts
from benchmarks.harness.charts import Panel, by_size, by_value, size_of

PENDING = "The benchmark has not been run on this version yet; its numbers will stand here."


def value(case: dict[str, Any], who: str, stage: str, field: str = "ms") -> float | None:
    """One number of a case; None if it was not measured."""
    for row in case["rows"]:
        if (row["who"], row["stage"]) == (who, stage):
            return row.get(field)
    return None


def milliseconds(ms: float | None) -> str:
    """Three significant digits."""
    if ms is None:
        return "–"
    digits = max(0, 2 - math.floor(math.log10(abs(ms)))) if ms else 0
    return f"{ms:.{min(digits, 4)}f}"


def times(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio:.2f}×" if ratio < 1 else f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×"


def label(case: dict[str, Any]) -> str:
    def length(n: int) -> str:
        return f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 1024}K" if n % 1024 == 0 else str(n)

    span = length(case["key_length"])
    if case["query_length"] == 1:
        span = f"1 query, {span} keys"
    return f"{span}, {case['heads']}/{case['kv_heads']} heads, D {case['head_dim']}, w {case['window']}"


def in_tables(case: dict[str, Any]) -> bool:
    """The tables show the model-sized cases with 16 heads, and the ends of the original's table; no batches, and
    independent scores."""
    if case["set"] == "model":
        return case["heads"] == 16 and case.get("batch", 1) == 1 and not case.get("pattern")
    return (case["set"], case["key_length"]) in (("train", 32768), ("infer", 524288))


def _machine(result: dict[str, Any]) -> str:
    versions = result["versions"]
    return (f"Milliseconds, medians, batch 1, bfloat16, independent scores, on one {result['device']} "
            f"(CUDA {versions.get('torch_cuda', '?')}, torch {versions.get('torch', '?')}, CuPy "
            f"{versions.get('cupy', '?')}), {result['date'][:10]}.")


_WHERE = ("Every case was checked against float64 in the same run. All numbers, the method and the chart: "
          "[benchmarks/results](../benchmarks/results).")


def _ratio(slow: float | None, fast: float | None) -> str:
    return times(slow / fast if slow and fast else None)


def _mebibytes(size: float | None) -> str:
    return "–" if size is None else f"{size / 2**20:.0f} MiB"


def _forward_table(result: dict[str, Any]) -> str:
    lines = ["| N, heads, head dim, window | cuDNN dense | FlashAttention dense | FlexAttention, same mask "
             "| attention | all stages | against cuDNN | extra memory |",
             "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for case in filter(in_tables, result["cases"]):
        total = value(case, "cupy_dma", "total")
        cells = [label(case), *(milliseconds(value(case, who, "attention")) for who in ("cudnn", "flash", "flex")),
                 milliseconds(value(case, "cupy_dma", "lists+attention")), milliseconds(total),
                 _ratio(value(case, "cudnn", "attention"), total),
                 _mebibytes(value(case, "cupy_dma", "total", "peak_bytes"))]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"{_machine(result)} *Attention* includes the key lists; *all stages* adds key scores and selection. "
                  f"*FlexAttention* is given its block mask. {_WHERE}"]
    return "\n".join(lines)


def _backward_table(result: dict[str, Any]) -> str:
    lines = ["| N, heads, head dim, window | cuDNN dense | FlashAttention dense | FlexAttention, same mask "
             "| backward | with lists | against cuDNN | forward and backward | against cuDNN | extra memory |",
             "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for case in filter(in_tables, result["cases"]):
        both = value(case, "cupy_dma", "forward+backward")
        lists = value(case, "cupy_dma", "backward+lists")
        cells = [label(case), *(milliseconds(value(case, who, "backward")) for who in ("cudnn", "flash", "flex")),
                 milliseconds(value(case, "cupy_dma", "backward")), milliseconds(lists),
                 _ratio(value(case, "cudnn", "backward"), lists), milliseconds(both),
                 _ratio(value(case, "cudnn", "forward+backward"), both),
                 _mebibytes(value(case, "cupy_dma", "forward+backward", "peak_bytes"))]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"{_machine(result)} *Backward* gives the gradients of query, key, value and bias; *with lists* also "
                  f"builds the key lists of the mask. *Forward and backward* is everything from the values on: key "
                  f"scores, selection, attention and the gradients of all of them. *FlexAttention* has the same mask "
                  f"and a learned bias. {_WHERE}"]
    return "\n".join(lines)


def _head(result: dict[str, Any]) -> str:
    return f"{result['device']}, {result['versions']}, commit {result['commit'][:12]}"


def _row(case: dict[str, Any], columns: list[tuple[str, str, str]], throughput: str, memory: str, width: int) -> str:
    peak = value(case, "cupy_dma", memory, "peak_bytes") or 0
    return (f"{case['name']:<36}"
            + "".join(f"{milliseconds(value(case, who, stage)):>{width}}" for _, who, stage in columns)
            + "".join(f"{value(case, 'cupy_dma', throughput, kind) or 0:>9.1f}"
                      for kind in ("needed_tflops", "effective_tflops"))
            + f"{peak / 2**20:>9.1f}  ")


def _columns(columns: list[tuple[str, str, str]], width: int) -> str:
    return (f"{'milliseconds':<36}" + "".join(f"{name:>{width}}" for name, _, _ in columns)
            + f"{'needed':>9}{'eff.':>9}{'MiB':>9}  check")


def _notes(result: dict[str, Any]) -> list[str]:
    notes = {(row["who"], row["note"]) for case in result["cases"] for row in case["rows"] if row["note"]}
    return [f"note, {who}: {note}" for who, note in sorted(notes)]


def _forward_text(result: dict[str, Any]) -> str:
    columns = [("scores", "cupy_dma", "key_scores"), ("select", "cupy_dma", "selection"),
               ("lists", "cupy_dma", "lists"), ("attend", "cupy_dma", "attention"), ("TOTAL", "cupy_dma", "total"),
               ("cudnn", "cudnn", "attention"), ("flash", "flash", "attention"), ("flex", "flex", "attention"),
               ("masked", "masked", "attention"), ("+build", "masked+build", "attention")]
    lines = [_head(result), _columns(columns, 9)]
    for case in result["cases"]:
        check = case["check"]
        lines.append(_row(case, columns, "attention", "total", 9)
                     + (f"{check['error']:.1e} of {check['allowed']:.1e}" if check["ok"] else f"FAILED {check}"))
    lines += [f"host time, {what}: {us:.1f} us" for what, us in result["host_us"].items()]
    return "\n".join(lines + _notes(result))


def _backward_text(result: dict[str, Any]) -> str:
    columns = [("backward", "cupy_dma", "backward"), ("+lists", "cupy_dma", "backward+lists"),
               ("determ.", "cupy_dma", "backward deterministic"), ("fwd+bwd", "cupy_dma", "forward+backward"),
               ("cudnn", "cudnn", "backward"), ("fwd+bwd", "cudnn", "forward+backward"),
               ("flash", "flash", "backward"), ("flex", "flex", "backward")]
    lines = [_head(result), _columns(columns, 10)]
    for case in result["cases"]:
        check = case["check"]
        lines.append(_row(case, columns, "backward", "forward+backward", 10)
                     + (f"{check['worst']:.2f} of what is allowed" if check["ok"] else f"FAILED {check}"))
    if published := result.get("published"):
        lines.append(f"{published['what']}: causal {published['causal']}, full {published['full']} at {published['N']}")
    return "\n".join(lines + _notes(result))


@dataclass(frozen=True)
class Marked:
    """A piece of a page that a script writes, between two lines with its name."""

    name: str

    @property
    def begin(self) -> str:
        return f"<!-- table:{self.name} -->"

    @property
    def end(self) -> str:
        return f"<!-- /table:{self.name} -->"

    def put(self, path: Path, text: str) -> None:
        """Replace it."""
        before, rest = path.read_text().split(self.begin)
        path.write_text(f"{before}{self.begin}\n{text}\n{self.end}{rest.split(self.end)[1]}")


@dataclass(frozen=True)
class Report(Marked):
    """How the results of one benchmark are shown. ``name`` is that of the files, too."""

    title: str
    table: Callable[[dict[str, Any]], str]  # of the page
    text: Callable[[dict[str, Any]], str]  # what a run prints at its end
    lines: tuple[tuple[str, str, str, str], ...]  # of the chart: who, stage, label, colour

    @property
    def script(self) -> str:
        return f"benchmarks/{self.name}_performance.py"

    def update(self, path: Path, result: dict[str, Any]) -> None:
        """Put the table into a page."""
        self.put(path, self.table(result))

    def panels(self, result: dict[str, Any]) -> list[Panel]:
        """Time against length for each shape, and against the window; none of a report without lines."""
        def drawn(axis: str, members: list[dict[str, Any]]) -> Callable[[Any], None]:
            def draw(ax: Any) -> None:
                for who, stage, name, colour in self.lines:
                    points = _points(result["cases"], members, axis, who, stage)
                    if points:
                        ax.plot(*zip(*points), marker="o", markersize=3, label=name, color=colour)
                by_size(ax, "window" if axis == "window" else "keys")
                by_value(ax, "milliseconds")
                ax.grid(alpha=0.3)

            return draw

        return [Panel(title, drawn(axis, members)) for title, (axis, members) in _grouped(result["cases"]).items()
                if self.lines]

    def chart(self, result: dict[str, Any], path: Path) -> None:
        charts.save(self.panels(result), f"{self.title}, bfloat16, {result['device']}", path)


def _grouped(cases: list[dict[str, Any]]) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Title of a panel -> what its horizontal axis shows, and its cases, which differ in nothing else."""
    panels: dict[str, tuple[str, list[dict[str, Any]]]] = {}
    for case in cases:
        shape = f"{case['heads']}/{case['kv_heads']} heads, D {case['head_dim']}"
        if case.get("batch", 1) > 1:
            shape = f"batch {case['batch']}, {shape}"
        if case.get("pattern"):
            shape += f", {case['pattern']} mask" if case["set"] == "plain" else f", {case['pattern']} scores"
        if case["set"] == "window":
            title, axis = f"N {size_of(case['key_length'])}, {shape}, growing window", "window"
        elif case["query_length"] == 1:
            title, axis = f"one query, {shape}, w {case['window']}", "key_length"
        else:
            title, axis = f"{shape}, w {case['window']}", "key_length"
        panels.setdefault(title, (axis, []))[1].append(case)
    several = {title: panel for title, panel in panels.items() if len({case[panel[0]] for case in panel[1]}) > 1}
    return several or panels


def _points(cases: list[dict[str, Any]], members: list[dict[str, Any]], axis: str, who: str,
            stage: str) -> list[tuple[int, float]]:
    members = sorted(members, key=lambda case: case[axis])
    points = [(case[axis], ms) for case in members if (ms := value(case, who, stage)) is not None]
    if not points and axis == "window" and who in ("cudnn", "flash"):
        # Dense attention does not know the window: one time for all.
        for case in cases:
            same = all(case[size] == members[0][size] for size in ("heads", "head_dim", "key_length"))
            ms = value(case, who, stage) if same and case["set"] == "train" else None
            if ms is not None:
                points = [(member[axis], ms) for member in members]
    return points


FORWARD = Report("forward", "Forward pass", _forward_table, _forward_text, (
    ("cudnn", "attention", "cuDNN dense", "tab:red"),
    ("flash", "attention", "FlashAttention dense", "tab:orange"),
    ("masked+build", "attention", "SDPA, dense mask by topk", "tab:brown"),
    ("flex", "attention", "FlexAttention, same mask", "tab:purple"),
    ("cupy_dma", "attention", "cupy_dma attention", "tab:cyan"),
    ("cupy_dma", "total", "cupy_dma all stages", "tab:blue")))

BACKWARD = Report("backward", "Backward pass", _backward_table, _backward_text, (
    ("cudnn", "backward", "cuDNN dense", "tab:red"),
    ("cudnn", "forward+backward", "cuDNN dense, forward and backward", "tab:pink"),
    ("flash", "backward", "FlashAttention dense", "tab:orange"),
    ("flex", "backward", "FlexAttention, same mask", "tab:purple"),
    ("cupy_dma", "backward", "cupy_dma backward", "tab:cyan"),
    ("cupy_dma", "forward+backward", "cupy_dma, forward and backward, all stages", "tab:blue")))
