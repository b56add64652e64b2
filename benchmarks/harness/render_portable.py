"""Results of portable.py as text and as the table of docs/performance.md. Needs no GPU and no torch."""
from __future__ import annotations

from typing import Any

from benchmarks.harness.render import Report, milliseconds, value

CARDS = ("own", "A100", "RTX")


def _rows(result: dict[str, Any]) -> list[list[str]]:
    """Of each case and stage: what, FlashAttention's time, and how many times as fast the kernels are on each card."""
    found = []
    for case in result["cases"]:
        mask = "causal" if case["set"] == "plain" else f"w {case['window']}"
        for stage in ("forward", "backward"):
            other = value(case, "flash", stage)
            ours = [value(case, card, stage) for card in CARDS]
            found.append([f"{case['key_length'] // 1024}K, D {case['head_dim']}, {mask}", stage, milliseconds(other),
                          *("–" if ms is None or other is None else f"{other / ms:.2f}" for ms in ours)])
    return found


def _table(result: dict[str, Any]) -> str:
    lines = ["| N, head dim, mask | | FlashAttention, ms | 227 KiB | 163 KiB (A100) | 99 KiB (RTX) |",
             "|---|---|--:|--:|--:|--:|", *("| " + " | ".join(row) + " |" for row in _rows(result))]
    return "\n".join([*lines, "", f"How many times as fast as dense causal FlashAttention-2 the portable kernels are, "
                      f"16/8 heads, bfloat16, on one {result['device']} with the occupancy of other cards, "
                      f"{result['date'][:10]}: see `python -m benchmarks portable --help`. All gradients were checked "
                      f"against float64 in the same run."])


def _text(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, {result['versions']}, commit {result['commit'][:12]}",
             f"{'':30}{'FA2, ms':>10}" + "".join(f"{card:>8}" for card in CARDS)]
    lines += [f"{what:<20}{stage:<10}{ms:>10}" + "".join(f"{x:>8}" for x in ours)
              for what, stage, ms, *ours in _rows(result)]
    worst = max(case["check"]["worst"] for case in result["cases"])
    failed = [case["name"] for case in result["cases"] if not case["check"]["ok"]]
    return "\n".join([*lines, f"check FAILED: {failed}" if failed else f"check: {worst:.2f} of what is allowed"])


PORTABLE = Report("portable", "Portable kernels", _table, _text, ())
