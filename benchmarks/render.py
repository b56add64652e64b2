"""Results of forward_performance.py as text, as the README's table and as a chart. Needs no GPU and no torch."""
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table:forward -->", "<!-- /table:forward -->"
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
    return "–" if ratio is None else f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×"


def label(case: dict[str, Any]) -> str:
    def length(n: int) -> str:
        return f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 1024}K" if n % 1024 == 0 else str(n)

    span = length(case["key_length"])
    if case["query_length"] == 1:
        span = f"1 query, {span} keys"
    return f"{span}, {case['heads']}/{case['kv_heads']} heads, D {case['head_dim']}, w {case['window']}"


def in_readme(case: dict[str, Any]) -> bool:
    """The README shows the model-sized cases with 16 heads, and the ends of the original's table."""
    if case["set"] == "model":
        return case["heads"] == 16
    return (case["set"], case["key_length"]) in (("train", 32768), ("infer", 524288))


def markdown_table(result: dict[str, Any]) -> str:
    lines = ["| N, heads, head dim, window | cuDNN dense | FlashAttention dense | FlexAttention, same mask "
             "| attention | all stages | against cuDNN | extra memory |",
             "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for case in filter(in_readme, result["cases"]):
        cudnn, total = value(case, "cudnn", "attention"), value(case, "cupy_dma", "total")
        memory = value(case, "cupy_dma", "total", "peak_bytes")
        cells = [label(case), *(milliseconds(value(case, who, "attention")) for who in ("cudnn", "flash", "flex")),
                 milliseconds(value(case, "cupy_dma", "lists+attention")), milliseconds(total),
                 times(cudnn / total if cudnn and total else None),
                 "–" if memory is None else f"{memory / 2**20:.0f} MiB"]
        lines.append("| " + " | ".join(cells) + " |")
    versions = result["versions"]
    lines += ["", f"Milliseconds, medians, batch 1, bfloat16, independent scores, on one {result['device']} "
                  f"(CUDA {versions.get('torch_cuda', '?')}, torch {versions.get('torch', '?')}, CuPy "
                  f"{versions.get('cupy', '?')}), {result['date'][:10]}. *Attention* includes the key lists; *all "
                  f"stages* adds key scores and selection. *FlexAttention* is given its block mask. Every case was "
                  f"checked against float64 in the same run. All numbers, the method and the chart: "
                  f"[benchmarks/results](benchmarks/results)."]
    return "\n".join(lines)


def update_readme(path: Path, result: dict[str, Any]) -> None:
    """Replace what stands between the two marker lines."""
    text = path.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{markdown_table(result)}\n{END}{after}")


def text_table(result: dict[str, Any]) -> str:
    """What a run prints at its end."""
    columns = [("scores", "cupy_dma", "key_scores"), ("select", "cupy_dma", "selection"),
               ("lists", "cupy_dma", "lists"), ("attend", "cupy_dma", "attention"), ("TOTAL", "cupy_dma", "total"),
               ("cudnn", "cudnn", "attention"), ("flash", "flash", "attention"), ("flex", "flex", "attention"),
               ("masked", "masked", "attention"), ("+build", "masked+build", "attention")]
    lines = [f"{result['device']}, {result['versions']}, commit {result['commit'][:12]}",
             f"{'milliseconds':<36}" + "".join(f"{name:>9}" for name, _, _ in columns)
             + f"{'needed':>9}{'eff.':>9}{'MiB':>8}  check"]
    for case in result["cases"]:
        memory = value(case, "cupy_dma", "total", "peak_bytes") or 0
        lines.append(f"{case['name']:<36}"
                     + "".join(f"{milliseconds(value(case, who, stage)):>9}" for _, who, stage in columns)
                     + "".join(f"{value(case, 'cupy_dma', 'attention', kind) or 0:>9.1f}"
                               for kind in ("needed_tflops", "effective_tflops"))
                     + f"{memory / 2**20:>8.1f}"
                     + (f"  {case['check']['error']:.1e} of {case['check']['allowed']:.1e}" if case["check"]["ok"]
                        else f"  FAILED {case['check']}"))
    for what, us in result["host_us"].items():
        lines.append(f"host time, {what}: {us:.1f} us")
    notes = {(row["who"], row["note"]) for case in result["cases"] for row in case["rows"] if row["note"]}
    lines += [f"note, {who}: {note}" for who, note in sorted(notes)]
    return "\n".join(lines)


def chart(result: dict[str, Any], path: Path) -> None:
    """Time against length, one panel for each shape, and against the window."""
    try:
        import matplotlib
    except ImportError:
        print("no chart: matplotlib is missing (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [("cudnn", "attention", "cuDNN dense", "tab:red"),
             ("flash", "attention", "FlashAttention dense", "tab:orange"),
             ("masked+build", "attention", "SDPA, dense mask by topk", "tab:brown"),
             ("flex", "attention", "FlexAttention, same mask", "tab:purple"),
             ("cupy_dma", "attention", "cupy_dma attention", "tab:cyan"),
             ("cupy_dma", "total", "cupy_dma all stages", "tab:blue")]
    panels: dict[str, tuple[str, list[dict[str, Any]]]] = {}
    for case in result["cases"]:
        shape = f"{case['heads']}/{case['kv_heads']} heads, D {case['head_dim']}"
        if case["set"] == "window":
            title, axis = f"N {case['key_length']}, {shape}, growing window", "window"
        elif case["query_length"] == 1:
            title, axis = f"one query, {shape}, w {case['window']}", "key_length"
        else:
            title, axis = f"{shape}, w {case['window']}", "key_length"
        panels.setdefault(title, (axis, []))[1].append(case)
    panels = {title: panel for title, panel in panels.items() if len(panel[1]) > 1} or panels
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(5.2 * across, 4 * down), squeeze=False, layout="constrained")
    for ax in axes.flat[len(panels):]:
        ax.set_visible(False)
    for ax, (title, (axis, members)) in zip(axes.flat, panels.items()):
        for who, stage, name, colour in lines:
            points = [(case[axis], value(case, who, stage)) for case in sorted(members, key=lambda case: case[axis])]
            points = [(x, y) for x, y in points if y is not None]
            if not points and axis == "window":  # dense attention does not know the window: one time for all
                for case in result["cases"]:
                    same = all(case[size] == members[0][size] for size in ("heads", "head_dim", "key_length"))
                    dense = value(case, who, stage) if same and who in ("cudnn", "flash") else None
                    if dense is not None and case["set"] == "train":
                        points = [(member[axis], dense) for member in members]
            if points:
                ax.plot(*zip(*points), marker="o", markersize=3, label=name, color=colour)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("window" if axis == "window" else "keys")
        ax.set_ylabel("milliseconds")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    figure.suptitle(f"Forward pass, bfloat16, {result['device']}", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)
