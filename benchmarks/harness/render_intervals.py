"""Results of intervals.py as text and as the table of docs/performance.md. Needs no GPU and no torch."""
from __future__ import annotations

from typing import Any

from benchmarks.harness.render import Report, milliseconds, value


def _rows(result: dict[str, Any]) -> list[list[str]]:
    """Of each case: its name, our times, cuDNN's, FlexAttention's, how many times as fast as cuDNN, and what the pairs
    allow."""
    dense: dict[tuple[int, int], dict[str, Any]] = {}  # cuDNN is measured once for each length and head dim
    for case in result["cases"]:
        if value(case, "cudnn", "backward") is not None:
            dense.setdefault((case["key_length"], case["head_dim"]), case)
    found = []
    for case in result["cases"]:
        peer = dense.get((case["key_length"], case["head_dim"]), case)
        backward, both = (value(case, "cupy_dma", stage) for stage in ("backward", "forward+backward"))
        other, other_both = (value(peer, "cudnn", stage) for stage in ("backward", "forward+backward"))
        kept = case["check"]["kept_pairs"]
        found.append([f"{case['key_length'] // 1024}K, D {case['head_dim']}, {case['pattern']}",
                      *(milliseconds(value(case, "cupy_dma", stage)) for stage in ("forward with lists", "forward")),
                      milliseconds(backward), milliseconds(both), milliseconds(other), milliseconds(other_both),
                      *(milliseconds(value(case, "flex", stage)) for stage in ("backward", "forward+backward")),
                      *("–" if not a or not b else f"{b / a:.1f}" for a, b in ((backward, other), (both, other_both))),
                      f"{case['causal_pairs'] / kept:.1f}" if kept else "–"])
    return found


COLUMNS = ("forward with lists", "forward", "backward", "both", "cuDNN backward", "cuDNN both", "Flex backward",
           "Flex both", "backward, times cuDNN", "both, times cuDNN", "allowed")


def _table(result: dict[str, Any]) -> str:
    lines = ["| N, head dim, mask | " + " | ".join(COLUMNS) + " |", "|---|" + "--:|" * len(COLUMNS),
             *("| " + " | ".join(row) + " |" for row in _rows(result))]
    return "\n".join([*lines, "", f"Milliseconds, medians, batch 1, 16/8 heads, bfloat16, on one {result['device']}, "
                      f"{result['date'][:10]}; masks and method: `python -m benchmarks intervals --help`. All "
                      f"gradients were checked against float64 in the same run."])


def _text(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, {result['versions']}, commit {result['commit'][:12]}",
             f"{'':26}" + "".join(f"{name.replace(', times cuDNN', ' x'):>20.19}" for name in COLUMNS)]
    lines += [f"{row[0]:<26}" + "".join(f"{x:>20}" for x in row[1:]) for row in _rows(result)]
    failed = [case["name"] for case in result["cases"] if not case["check"]["ok"]]
    worst = max(case["check"]["worst"] for case in result["cases"])
    return "\n".join([*lines, f"check FAILED: {failed}" if failed else f"check: {worst:.2f} of what is allowed"])


INTERVALS = Report("intervals", "Masks without a bound", _table, _text, ())
