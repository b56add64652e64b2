"""Results of the routine training as text, as the tables of docs/training.md and the README and as a chart. Needs no
torch."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import charts
from benchmarks.harness.charts import Panel, by_size, by_value
from benchmarks.harness.render import Marked, times

MARKED, SUMMARY = Marked("training"), Marked("training-summary")
NAMES = {"80m": "80M, 12 layers", "1.7b": "1.7B, 4 of its layers", "tiny": "tiny"}
PEERS = {"none": "without attention", "dma": "cupy_dma", "sdpa": "dense SDPA", "flex": "FlexAttention"}
COLOURS = {"none": "tab:gray", "dma": "tab:blue", "sdpa": "tab:red", "flex": "tab:purple"}
STYLES = {"eager": ":", "compile": "-", "checkpoint": "-.", "compile+checkpoint": "--"}


def length_of(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def is_right(row: dict[str, Any]) -> bool:
    return row["ms"] is not None and row.get("ok", True)


def speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['tokens_per_second'] / 1e3:.1f}" if is_right(row) else (
        row["note"] if row["note"] == "out of memory" else "–")


def memory(row: dict[str, Any] | None) -> str:
    return "–" if row is None or not is_right(row) or row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"


def share(row: dict[str, Any] | None) -> str:
    known = row is not None and is_right(row) and row.get("attention_share") is not None
    return f"{100 * row['attention_share']:.0f} %" if row is not None and known else "–"


def cases(result: dict[str, Any]) -> dict[tuple[str, int, str], dict[str, dict[str, Any]]]:
    """(model, length, mode) -> peer -> row."""
    found: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault((row["model"], row["length"], row["mode"]), {})[row["peer"]] = row
    return found


def against_dense(peers: dict[str, dict[str, Any]]) -> str:
    """How many times dense attention's tokens per second."""
    pair = [peers[peer]["ms"] for peer in ("sdpa", "dma") if peer in peers and is_right(peers[peer])]
    return times(pair[0] / pair[1] if len(pair) == 2 else None)


def summary(result: dict[str, Any]) -> str:
    """The table of the README."""
    found = cases(result)
    lengths = sorted({length for _, length, _ in found})
    lines = [f"| tokens per sequence | {' | '.join(map(length_of, lengths))} |", f"|---|{'--:|' * len(lengths)}"]
    for model, mode in dict.fromkeys((model, mode) for model, _, mode in found if mode in ("eager", "compile")):
        cells = [against_dense(found.get((model, length, mode), {})) for length in lengths]
        lines.append(f"| {NAMES[model]}, {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    lines = ["| model, tokens per sequence, mode | cupy_dma | dense SDPA | FlexAttention | against dense | attention, "
             "cupy_dma | attention, dense | memory, cupy_dma | memory, dense |",
             "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for (model, length, mode), peers in cases(result).items():
        ours, dense = peers.get("dma"), peers.get("sdpa")
        cells = [f"{NAMES[model]}, {length_of(length)}, {mode}", speed(ours), speed(dense), speed(peers.get("flex")),
                 against_dense(peers), share(ours), share(dense), memory(ours), memory(dense)]
        lines.append(f"| {' | '.join(cells)} |")
    versions = result["versions"]
    by = sorted({row["note"] for row in result["rows"] if row["peer"] == "sdpa" and is_right(row)})
    lines += ["", f"Thousands of tokens per second in training steps (forward, backward, AdamW), medians, bfloat16, "
                  f"w 1024; memory: the peak in GiB, model and optimizer included; *attention*: its part of the step. "
                  f"On one {result['device']} (CUDA {versions.get('torch_cuda', '?')}, torch "
                  f"{versions.get('torch', '?')}, CuPy {versions.get('cupy', '?')}), {result['date'][:10]}; dense by "
                  f"{' or '.join(by) or 'nothing'}. All numbers and the method: "
                  f"[benchmarks/results](../benchmarks/results), `python -m benchmarks training`."]
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    name = f"{row['model']:5}{length_of(row['length']):>5} x{row['batch']:<4}{row['mode']:20}{row['peer']:6}"
    if row["ms"] is None:
        return f"{name}{row['note']}"
    part = f"{share(row):>8}" if "attention_share" in row else " " * 8
    return (f"{name}{row['ms']:9.1f} ms{row['tokens_per_second'] / 1e3:9.1f} k/s{part}{memory(row):>7} GiB  loss "
            f"{row['losses'][-1]:.4f}  warm-up {row['warm_up_s']:.1f} s  {row['note']}")


def text(result: dict[str, Any]) -> str:
    head = f"{result['device']}, {result['versions']}, commit {result['commit'][:12]}"
    return "\n".join([head, *map(line, result["rows"])])


def update(path: Path, readme: Path, result: dict[str, Any]) -> None:
    """Put the tables between the marks of these pages."""
    MARKED.put(path, table(result))
    SUMMARY.put(readme, summary(result))


def panels(result: dict[str, Any]) -> list[Panel]:
    """Tokens per second and peak memory against the length, of each model."""
    def drawn(name: str, field: str, unit: float, label: str) -> Callable[[Any], None]:
        def draw(ax: Any) -> None:
            for peer, mode in ((p, m) for p in PEERS for m in STYLES):
                points = sorted((row["length"], row[field] / unit) for row in result["rows"] if is_right(row)
                                and (row["model"], row["peer"], row["mode"]) == (name, peer, mode) and row[field])
                if points:
                    ax.plot(*zip(*points), marker="o", markersize=3, color=COLOURS[peer], linestyle=STYLES[mode],
                            label=f"{PEERS[peer]}, {mode}")
            by_size(ax, "tokens per sequence")
            if ax.lines:
                by_value(ax, label)
            ax.grid(alpha=0.3)

        return draw

    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    fields = (("throughput", "tokens_per_second", 1e3, "thousand tokens per second"),
              ("memory", "peak_bytes", 2**30, "peak memory, GiB"))
    return [Panel(f"{NAMES[name]}: {what}", drawn(name, *field)) for what, *field in fields for name in names]


def chart(result: dict[str, Any], path: Path) -> None:
    charts.save(panels(result), f"Training steps, bfloat16, {result['device']}", path,
                across=len({row["model"] for row in result["rows"]}))
