"""Results of dense.py as text, as the table of docs/performance.md and as a chart. Needs no GPU and no torch."""
from __future__ import annotations

from typing import Any

from benchmarks.harness.charts import Panel
from benchmarks.harness.render import Report, milliseconds, value

# What the ratios should not exceed.
FLEX, BLOCKS, COLUMNS, INTERVAL, VARLEN, PLAIN, CAPPED = 1.25, 1 / 4, 1 / 6, 1.3, 1 / 0.85, 1 / 0.9, 1 / 0.85


def _case(result: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((case for case in result["cases"] if case["set"] == name), None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every ratio that has a limit: name, our time, the time it is compared with (None: not measured), ratio, limit."""
    found: list[dict[str, Any]] = []

    def add(name: str, ours: float | None, other: float | None, limit: float) -> None:
        found.append({"name": name, "ours": ours, "other": other, "ratio": _ratio(ours, other), "limit": limit})

    if case := _case(result, "random"):
        for stage in ("forward", "backward"):
            add(f"half visible, dense bias, {stage}, against FlexAttention", value(case, "cupy_dma", stage),
                value(case, "flex", stage), FLEX)
    structures = ("blocks", "1/8 of the tiles visible", BLOCKS), ("columns", "1/16 of the keys", COLUMNS)
    for name, words, limit in structures:
        if case := _case(result, name):
            for shape in ("shared", "per head"):
                for stage in ("forward", "backward"):
                    add(f"{words}, mask {shape}, {stage}, against all visible",
                        *(value(case, "cupy_dma", f"{stage} {what}, {shape}") for what in ("sparse", "full")), limit)
    if case := _case(result, "interval"):
        read = value(case, "torch", "read")
        for stage in ("forward", "backward"):
            plain = value(case, "cupy_dma", f"{stage} interval")
            add(f"top-w mask as a dense boolean, {stage}, against intervals and a read of the mask",
                value(case, "cupy_dma", f"{stage} dense"), None if plain is None or read is None else plain + read,
                INTERVAL)
    for name in ("varlen causal", "varlen top-w"):
        if case := _case(result, name):
            for stage in ("forward", "backward"):
                pairs, equal = (value(case, "cupy_dma", f"{stage} {which}", "pairs") for which in
                                ("unequal", "equal, batch"))
                other = value(case, "cupy_dma", f"{stage} equal, batch")
                if other is not None and pairs and equal:
                    other *= pairs / equal
                add(f"{name.removeprefix('varlen ')}, 64 unequal sequences, {stage}, against equal ones, per pair",
                    value(case, "cupy_dma", f"{stage} unequal"), other, VARLEN)
    for case in (case for case in result["cases"] if case["set"] == "plain"):
        for words in ("all keys", "causal"):
            for more, limit, other in (("", PLAIN, ""), (", bias of keys and softcap", CAPPED, " without these")):
                add(f"D {case['head_dim']}, N {case['key_length']}, {words}{more}, forward, against cuDNN{other}",
                    value(case, "cupy_dma", f"forward {words}{more}"), value(case, "cudnn", f"forward {words}"), limit)
    return found


def _table(result: dict[str, Any]) -> str:
    lines = ["| what | ours, ms | against, ms | ratio | wanted |", "|---|--:|--:|--:|--:|"]
    for goal in goals(result):
        ratio = "–" if goal["ratio"] is None else f"{goal['ratio']:.2f}"
        cells = [goal["name"], milliseconds(goal["ours"]), milliseconds(goal["other"]), ratio,
                 f"≤ {goal['limit']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    versions = {name: result["versions"].get(name, "?") for name in ("torch_cuda", "torch", "cupy")}
    lines += ["", f"Medians, bfloat16, 16/8 heads, D 128 and N 8192 unless told (varlen: 64 sequences of 100 to 8000 "
                  f"tokens), on one {result['device']} (CUDA {versions['torch_cuda']}, torch {versions['torch']}, CuPy "
                  f"{versions['cupy']}), {result['date'][:10]}. Our times include packing a dense mask; "
                  f"FlexAttention's exclude building its block mask. Every output was checked against float64 in the "
                  f"same run. All numbers and the method: [benchmarks/results](../benchmarks/results)."]
    return "\n".join(lines)


def _text(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, {result['versions']}, commit {result['commit'][:12]}"]
    for case in result["cases"]:
        check = case["check"]
        lines.append(f"{case['name']}: " + (f"check: {check['worst']:.2f} of what is allowed" if check["ok"]
                                            else f"check FAILED: {check}"))
        lines += [f"  {row['who']:<10}{row['stage']:<28}{milliseconds(row['ms']):>9} ms  {row['note']}"
                  for row in case["rows"]]
    lines += [f"{goal['name']:<88}" + ("      –" if goal["ratio"] is None else f"{goal['ratio']:>7.2f}")
              + f" of {goal['limit']:.2f}" for goal in goals(result)]
    return "\n".join(lines)


class DenseReport(Report):
    def panels(self, result: dict[str, Any]) -> list[Panel]:
        """Each ratio as a bar in units of its limit, under its name."""
        measured = [goal for goal in goals(result) if goal["ratio"] is not None][::-1]

        def draw(ax: Any) -> None:
            parts = [goal["ratio"] / goal["limit"] for goal in measured]
            ax.barh(range(len(measured)), parts, height=0.4,
                    color=["tab:blue" if part <= 1 else "tab:orange" for part in parts])
            for at, goal in enumerate(measured):
                ax.text(0, at + 0.26, f"{goal['ratio']:.2f} of {goal['limit']:.2f}: {goal['name']}", fontsize=6.5,
                        in_layout=False)
            ax.axvline(1, color="black", linewidth=0.8)
            ax.set_yticks([])
            ax.margins(y=0.02)
            ax.set_xlabel("time in units of the limit (left of the line is better)")

        return [Panel("Ratios of times", draw, 0.8 + 0.32 * len(measured))] if measured else []


DENSE = DenseReport("dense", "Dense masks, dense biases and varlen", _table, _text, ())
