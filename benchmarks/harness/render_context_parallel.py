"""Results of the routine context_parallel as text and as the tables of docs/distributed.md. Needs no torch."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.render import Marked, times

PENDING = "**Not measured yet.**"
MARKED = Marked("context_parallel")
Cases = dict[tuple[int, str], dict[str, dict[str, Any]]]


def length_of(n: int) -> str:
    return f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 1024}K" if n % 1024 == 0 else str(n)


def is_right(row: dict[str, Any] | None) -> bool:
    return row is not None and row["ms"] is not None and row["ok"]


def cases(result: dict[str, Any]) -> Cases:
    """(length, pass) -> peer -> row."""
    found: Cases = {}
    for row in result["rows"]:
        found.setdefault((row["length"], row["pass"]), {})[row["peer"]] = row
    return found


def milliseconds(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['ms']:.2f}" if is_right(row) else row["note"] if row["note"] == "out of memory" else "–"


def ratio(slower: dict[str, Any] | None, faster: dict[str, Any] | None) -> str:
    if slower is None or faster is None or not (is_right(slower) and is_right(faster)):
        return "–"
    return times(slower["ms"] / faster["ms"])


def received(row: dict[str, Any] | None) -> str:
    """MiB, of the rank that receives most."""
    if row is None or not row.get("bytes"):
        return "–"
    return f"{max(map(sum, row['bytes'])) / 2**20:.1f}"


def table(result: dict[str, Any]) -> str:
    lines = ["| tokens, pass | several GPUs | with copies | one GPU | ring attention | over one GPU | over ring | "
             "received, MiB |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for (length, what), peers in cases(result).items():
        ours, one, ring = peers.get("ours"), peers.get("one"), peers.get("ring")
        cells = [f"{length_of(length)}, {what}", milliseconds(ours), milliseconds(peers.get("copies")),
                 milliseconds(one), milliseconds(ring), ratio(one, ours), ratio(ring, ours), received(ours)]
        lines.append(f"| {' | '.join(cells)} |")
    sizes, versions = result["arguments"], result["versions"]
    ranks = max(row["ranks"] for row in result["rows"])
    lines += ["", f"Milliseconds of a call, medians, on {ranks} x {result['device']} (CUDA "
                  f"{versions.get('torch_cuda', '?')}, torch {versions.get('torch', '?')}), bfloat16, "
                  f"{sizes['heads']}/{sizes['kv_heads']} heads, D {sizes['head_dim']}, w {sizes['window']}, "
                  f"{result['date'][:10]}. *received*: by a rank from others in a call. All numbers and the method: "
                  f"[benchmarks/results](../benchmarks/results), `python -m benchmarks context_parallel`."]
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    name = f"{length_of(row['length']):>5} {row['pass']:9}{row['peer']:7}"
    if row["ms"] is None:
        return f"{name}{row['note']}"
    checks = row.get("checks", [])
    error = f"  error {max(x['error'] for x in checks):.2e}" if checks else ""
    gradients = [f"  gradients {x['gradients']:.2e}" for x in checks if "gradients" in x]
    return (f"{name}{row['ms']:10.3f} ms  received {received(row):>6} MiB{error}{''.join(gradients)}"
            f"{'' if row['ok'] else '  WRONG'}")


def page(results: list[dict[str, Any]]) -> str:
    """A table for each machine."""
    return "\n\n".join(map(table, results)) if results else PENDING


def update(path: Path, results: list[dict[str, Any]]) -> None:
    """Put the tables between the marks of ``path``."""
    MARKED.put(path, page(results))
