"""The results of decode.py as text, as tables of docs/performance.md and as a chart. Needs no GPU and no torch."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness.charts import Panel, by_size, by_value
from benchmarks.harness.render import Report, milliseconds, times, value

OURS = "cupy_dma"
STEP_US, REPLAY_US, BANDWIDTH, STATELESS_US, SPEEDUP, MEMORY = 12.0, 15.0, 0.70, 40.0, 20.0, 1 / 64  # what is wanted


def cases_of(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [case for case in result["cases"] if case["set"] == name]


def micro(ms: float | None) -> str:
    """Microseconds, three digits."""
    return milliseconds(None if ms is None else 1e3 * ms)


def length(n: int) -> str:
    return f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 1024}K" if n % 1024 == 0 else str(n)


def size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def dense(case: dict[str, Any]) -> float | None:
    """The fastest attention over all keys, in ms."""
    found = [ms for who in ("cudnn", "flash", "sdpa") if (ms := value(case, who, "dense")) is not None]
    return min(found, default=None)


def history_bytes(case: dict[str, Any]) -> int:
    """Keys and values of the whole history in bfloat16."""
    return 4 * case["batch"] * case["key_length"] * case["kv_heads"] * case["head_dim"]


def windows(case: dict[str, Any]) -> list[int]:
    return [case["window"] // 2, case["window"]] if case["set"] == "serving" else [case["window"]]


def bandwidth(result: dict[str, Any], case: dict[str, Any], window: int) -> float | None:
    """Bytes of the kept rows by the time of a step, in parts of the copy bandwidth."""
    ms, kept = (value(case, OURS, f"step w{window}", field) for field in ("ms", "kept_bytes"))
    return kept / ms / 1e9 / result["copy_tb_s"] if ms and kept else None


def speedup(case: dict[str, Any]) -> float | None:
    """Attention over all keys against a step of the whole window."""
    slow, step = dense(case), value(case, OURS, f"step w{case['window']}")
    return slow / step if slow and step else None


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What is wanted: name, what was found (None: not measured), the limit, and whether it is a least or a most."""
    found: list[dict[str, Any]] = []

    def add(name: str, numbers: Any, limit: float, unit: str, least: bool = False) -> None:
        known = [x for x in numbers if x is not None]
        worst = (min if least else max)(known, default=None)
        ok = None if worst is None else worst >= limit if least else worst <= limit
        found.append({"name": name, "found": worst, "limit": limit, "unit": unit, "least": least, "ok": ok})

    def us(members: list[dict[str, Any]], stage: str, field: str = "ms") -> Iterator[float | None]:
        return (None if (ms := value(case, OURS, stage, field)) is None else 1e3 * ms for case in members)

    original = cases_of(result, "original")
    full = [case for case in original if case["key_length"] > case["window"]]
    add("step, 1 sequence, 2/1 heads, D 64, w 1024, longest of all histories", us(full, "step w1024"), STEP_US, "µs")
    add("the same as a graph replay, between GPU events, nothing in the L2 cache", us(full, "step w1024", "cold_ms"),
        REPLAY_US, "µs")
    add("the same, replays queued", us(full, "step w1024 replay", "queued_ms"), REPLAY_US, "µs")
    add("the same, from the call to the end of the wait for it", us(full, "step w1024 replay"), REPLAY_US, "µs")
    add("stateless, 1 query, 512K keys, with selection",
        us([case for case in original if case["key_length"] == 524288], "stateless"), STATELESS_US, "µs")

    def serving(batch: int, heads: int, keys: int | None = None) -> list[dict[str, Any]]:
        return [case for case in cases_of(result, "serving") if (case["batch"], case["heads"]) == (batch, heads)
                and keys in (None, case["key_length"])]

    add("step, batch 32, 16/8 heads, D 128, w 2048, part of the copy bandwidth",
        (bandwidth(result, case, 2048) for case in serving(32, 16)), BANDWIDTH, "", least=True)
    long = serving(8, 32, 131072)
    add("step, batch 8, 32/8 heads, D 128, w 2048, times as fast as SDPA over 128K", map(speedup, long), SPEEDUP, "×",
        least=True)
    kept = ((value(case, OURS, "step w2048", "kept_bytes"), history_bytes(case)) for case in long)
    add("its keys and values, part of those of the history", (part / whole for part, whole in kept if part), MEMORY, "")
    return found


def _number(goal: dict[str, Any], x: float | None) -> str:
    if x is None:
        return "–"
    shown = f"{x:.4f}" if goal["limit"] < 0.1 else f"{x:.2f}" if goal["limit"] < 1 else f"{x:.1f}"
    return f"{shown} {goal['unit']}".strip()


def _original_table(result: dict[str, Any]) -> list[str]:
    lines = ["| 1 query, keys | all keys: cuDNN | FlashAttention | masked SDPA | with its mask built | FlexAttention "
             "| stateless | interval mask given | cache step | replay, end to end |",
             "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    columns = [("cudnn", "dense"), ("flash", "dense"), ("masked", "attention"), ("masked+build", "attention"),
               ("flex", "attention"), (OURS, "stateless"), (OURS, "prepared"), (OURS, "step w{window}"),
               (OURS, "step w{window} replay")]
    for case in cases_of(result, "original"):
        cells = [length(case["key_length"]), *(micro(value(case, who, stage.format(**case))) for who, stage in columns)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _serving_table(result: dict[str, Any]) -> list[str]:
    lines = ["| batch, heads, history | SDPA over all keys | its memory | step, half the window | step "
             "| of copy bandwidth | times as fast | memory of the cache |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for case in cases_of(result, "serving"):
        half, window = windows(case)
        ms, part = value(case, OURS, f"step w{window}"), bandwidth(result, case, window)
        memory = value(case, OURS, f"step w{window}", "cache_bytes")
        cells = [f"{case['batch']}, {case['heads']}/{case['kv_heads']}, {length(case['key_length'])}",
                 micro(dense(case)), size(history_bytes(case)), micro(value(case, OURS, f"step w{half}")), micro(ms),
                 "–" if part is None else f"{100 * part:.0f} %", times(speedup(case)),
                 "–" if memory is None else size(memory)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _table(result: dict[str, Any]) -> str:
    versions, copy = result["versions"], result["copy_tb_s"]
    lines = [*_original_table(result), "", *_serving_table(result), "", "| what | found | wanted |", "|---|--:|--:|"]
    for goal in goals(result):
        sign = "≥" if goal["least"] else "≤"
        lines.append(f"| {goal['name']} | {_number(goal, goal['found'])} | {sign} {_number(goal, goal['limit'])} |")
    lines += ["", f"Microseconds, medians, bfloat16, independent scores, on one {result['device']} (CUDA "
                  f"{versions.get('torch_cuda', '?')}, torch {versions.get('torch', '?')}, CuPy "
                  f"{versions.get('cupy', '?')}; copy bandwidth {copy:.2f} TB/s), {result['date'][:10]}. First table: "
                  f"batch 1, 2/1 heads, D 64, w 1024; second: D 128, w 2048 and its half. *Stateless* includes the "
                  f"selection; *end to end* is the wall time of a replayed step and the wait for it "
                  f"({result['empty_replay_us']:.1f} for one tiny kernel); the others are GPU times. *SDPA over all "
                  f"keys* is the faster of cuDNN and FlashAttention. Every output was checked against float64 in "
                  f"the same run. All numbers and the method: [benchmarks/results](../benchmarks/results)."]
    return "\n".join(lines)


def _text(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, {result['versions']}, commit {result['commit'][:12]}",
             f"copy bandwidth: {result['copy_tb_s']:.2f} TB/s; empty replay: {result['empty_replay_us']:.1f} us"]
    for case in result["cases"]:
        check = case["check"]
        lines.append(f"{case['name']}: " + (f"check: {check['worst']:.2f} of what is allowed" if check["ok"]
                                            else f"check FAILED: {check}"))
        for row in case["rows"]:
            more = [f"{words} {micro(row[field])}" for field, words in (("cold_ms", "cold"), ("queued_ms", "queued"))
                    if field in row]
            if row["ms"] and "kept_bytes" in row:
                speed = row["kept_bytes"] / row["ms"] / 1e9
                more.append(f"{speed:.2f} TB/s, {100 * speed / result['copy_tb_s']:.0f} % of copy")
            if "cache_bytes" in row:
                more.append(size(row["cache_bytes"]))
            more += filter(None, [row["note"]])
            lines.append(f"  {row['who']:<14}{row['stage']:<20}{micro(row['ms']):>9} us  " + "; ".join(more))
    for goal in goals(result):
        word = {None: "", True: "reached", False: "NOT REACHED"}[goal["ok"]]
        bound = "at least" if goal["least"] else "at most"
        lines.append(f"{goal['name']:<80}{_number(goal, goal['found']):>9} of {bound} {_number(goal, goal['limit'])}  "
                     + word)
    return "\n".join(lines)


LINES = (("cudnn", "dense", "cuDNN, all keys", "tab:red"), ("flash", "dense", "FlashAttention, all keys", "tab:orange"),
         ("masked", "attention", "SDPA, mask given", "tab:pink"),
         ("masked+build", "attention", "SDPA, mask built", "tab:brown"),
         ("flex", "attention", "FlexAttention, block mask given", "tab:purple"),
         (OURS, "stateless", "stateless, with selection", "tab:cyan"), (OURS, "step", "cache step", "tab:blue"))


class DecodeReport(Report):
    @property
    def script(self) -> str:
        return "benchmarks/routines/decode.py"

    def panels(self, result: dict[str, Any]) -> list[Panel]:
        """Time against history: the original's table, then a panel for each batch and number of heads."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for case in result["cases"]:
            title = (f"batch {case['batch']}, {case['heads']}/{case['kv_heads']} heads, D {case['head_dim']}, "
                     f"w {case['window']}")
            groups.setdefault(title, []).append(case)

        def drawn(members: list[dict[str, Any]]) -> Callable[[Any], None]:
            def draw(ax: Any) -> None:
                for who, stage, name, colour in self.lines:
                    points = [(case["key_length"], 1e3 * ms) for case in members if (ms := value(
                        case, who, f"step w{case['window']}" if stage == "step" else stage)) is not None]
                    if points:
                        ax.plot(*zip(*sorted(points)), marker="o", markersize=3, label=name, color=colour)
                by_size(ax, "keys in the history")
                by_value(ax, "microseconds")
                ax.grid(alpha=0.3)

            return draw

        return [Panel(title, drawn(members)) for title, members in groups.items()]


DECODE = DecodeReport("decode", "One query at the end of a history", _table, _text, LINES)
