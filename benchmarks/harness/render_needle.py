"""The table and the chart of benchmarks/needle.py."""
from __future__ import annotations

from pathlib import Path
from typing import Any

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


def draw(result: dict[str, Any], plt: Any, path: Path) -> None:
    """Found and survived by length and depth, mean of the seeds: a map for each attention."""
    found = stacks(result)
    figure, axes = plt.subplots(len(found), 2, figsize=(7, 1.7 * len(found) + 1), squeeze=False, layout="constrained")
    for (left, right), rows in zip(axes, found):
        one = rows[0]["settings"]
        for ax, what in ((left, "found"), (right, "survived")):
            cells = {(cell["length"], cell["depth"]): 0.0 for cell in rows[0]["cells"]}
            for row in rows:
                for cell in row["cells"]:
                    cells[cell["length"], cell["depth"]] += cell[what] / one["needles"] / len(rows)
            lengths, depths = (sorted({key[i] for key in cells}) for i in (0, 1))
            ax.imshow([[cells[n, depth] for depth in depths] for n in lengths], vmin=0, vmax=1, cmap="RdYlGn",
                      aspect="auto")
            ax.set_xticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=6)
            ax.set_yticks(range(len(lengths)), map(str, lengths), fontsize=6)
            ax.set_title(f"{what}: {words(one)}, {OF[one['planted']]}", fontsize=6)
    axes[-1][0].set_xlabel("depth", fontsize=7)
    axes[-1][0].set_ylabel("context", fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


REPORT = Report("needle", table, table, draw, "Needles found, and needles that survived the selection")
