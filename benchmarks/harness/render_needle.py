"""The table and the chart of benchmarks/routines/needle.py."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness.charts import Panel
from benchmarks.harness.render_evidence import COLOURS, Report, Row, grouped, markdown, spread, words

OF = {False: "text alone", True: "with needles"}


def stacks(result: dict[str, Any]) -> list[list[Row]]:
    def order(rows: list[Row]) -> tuple[Any, ...]:
        one = rows[0]["settings"]
        return one["planted"], list(COLOURS).index(one["kind"]), words(one)

    return sorted(grouped(result["rows"], ("seed",)).values(), key=order)


def share(row: Row, what: str, length: int, of: str = "needles") -> float | None:
    """Of the needles of one length, at all depths."""
    cells = [cell for cell in row["cells"] if cell["length"] == length]
    total = row["settings"]["needles"] * len(cells) if of == "needles" else sum(cell[of] for cell in cells)
    return sum(cell[what] for cell in cells) / total if total else None


def table(result: dict[str, Any]) -> str:
    """A line for each attention, and for each length found, survived, found of those that survived."""
    lengths = sorted({cell["length"] for row in result["rows"] for cell in row["cells"]})
    lines = []
    for rows in stacks(result):
        one = rows[0]["settings"]
        cells = [" / ".join(spread([x for row in rows if (x := share(row, what, length, of)) is not None], 100, 0)
                            for what, of in (("found", "needles"), ("survived", "needles"), ("both", "survived")))
                 for length in lengths]
        lines.append([OF[one["planted"]], words(one), *cells])
    return markdown(["trained", "attention", *(f"{length} bytes" for length in lengths)], lines, words=2)


def panels(result: dict[str, Any]) -> list[Panel]:
    """Found and survived by length and depth, mean of the seeds: a map for each attention."""
    def drawn(rows: list[Row], what: str) -> Callable[[Any], None]:
        def draw(ax: Any) -> None:
            one = rows[0]["settings"]
            cells = {(cell["length"], cell["depth"]): 0.0 for cell in rows[0]["cells"]}
            for row in rows:
                for cell in row["cells"]:
                    cells[cell["length"], cell["depth"]] += cell[what] / one["needles"] / len(rows)
            lengths, depths = (sorted({key[i] for key in cells}) for i in (0, 1))
            ax.imshow([[cells[n, depth] for depth in depths] for n in lengths], vmin=0, vmax=1, cmap="RdYlGn",
                      aspect="auto")
            ax.set_xticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
            ax.set_yticks(range(len(lengths)), map(str, lengths), fontsize=8)
            ax.set_xlabel("depth", fontsize=8)
            ax.set_ylabel("context", fontsize=8)

        return draw

    return [Panel(f"{what}, {OF[rows[0]['settings']['planted']]}\n{words(rows[0]['settings'])}", drawn(rows, what), 2)
            for rows in stacks(result) for what in ("found", "survived")]


REPORT = Report("needle", table, table, panels, "Needles found, and needles that survived the selection")
