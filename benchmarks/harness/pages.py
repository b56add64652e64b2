"""How pages show each routine's record: ``REPORTS``, by the routine's name. Needs neither a GPU nor torch."""
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.harness import pages_evidence, pages_models, pages_retrofit
from benchmarks.harness.charts import Panel, size_of
from benchmarks.harness.report import (
    Cell,
    Entry,
    Line,
    Piece,
    Report,
    Table,
    against,
    gain,
    label,
    length,
    line,
    lines,
    machine,
    markdown,
    mebibytes,
    microseconds,
    milliseconds,
    ms,
    number,
    ratio,
    text,
    times,
    value,
)

OURS = "cupy_dma"
CHECKED = "Every case was checked against float64 in the same run. All numbers, the method and the chart: "
WHERE = "[benchmarks/results](../benchmarks/results)."
Curves = tuple[tuple[str, str, str, str], ...]  # of a chart: who, stage, label, colour


# ---- forward and backward -------------------------------------------------------------------------------------------
def in_tables(case: Entry) -> bool:
    """Whether tables show a case: model-sized with 16 heads, or an end of the original's table; batch 1 and independent
    scores only."""
    if case["set"] == "model":
        return case["heads"] == 16 and case.get("batch", 1) == 1 and not case.get("pattern")
    return (case["set"], case["key_length"]) in (("train", 32768), ("infer", 524288))


def of_shapes(stage: str, whole: str, columns: tuple[tuple[str, Cell], ...], words: str, result: Entry) -> str:
    """Peers' times of a stage, more columns, and the memory of ``whole``."""
    peers = (("cuDNN dense", ms("cudnn", stage)), ("FlashAttention dense", ms("flash", stage)),
             ("FlexAttention, same mask", ms("flex", stage)))
    table = Table((("N, heads, head dim, window", label), *peers, *columns,
                   ("extra memory", lambda case: mebibytes(value(case, OURS, whole, "peak_bytes")))))
    return (f"{table.of(filter(in_tables, result['cases']))}\n\nMilliseconds, medians, batch 1, bfloat16, independent "
            f"scores, on one {machine(result, 'CUDA', 'torch', 'CuPy')}. {words} {CHECKED}{WHERE}")


def by_shape(curves: Curves, result: Entry) -> list[Panel]:
    """Panels of time against length for each shape, and against the window. Nothing else varies within a panel."""
    panels: dict[str, tuple[str, list[Entry]]] = {}
    for case in result["cases"]:
        shape = f"{case['heads']}/{case['kv_heads']} heads, D {case['head_dim']}"
        if case.get("batch", 1) > 1:
            shape = f"batch {case['batch']}, {shape}"
        if case.get("pattern"):
            shape += f", {case['pattern']} mask" if case["set"] == "plain" else f", {case['pattern']} scores"
        title, axis = f"{shape}, w {case['window']}", "key_length"
        if case["set"] == "window":
            title, axis = f"N {size_of(case['key_length'])}, {shape}, growing window", "window"
        elif case["query_length"] == 1:
            title = f"one query, {title}"
        panels.setdefault(title, (axis, []))[1].append(case)
    several = {title: panel for title, panel in panels.items() if len({case[panel[0]] for case in panel[1]}) > 1}
    return [lines(title, (Line(points(result["cases"], members, axis, who, stage), *rest)
                          for who, stage, *rest in curves), "window" if axis == "window" else "keys", "milliseconds")
            for title, (axis, members) in (several or panels).items()]


def points(cases: list[Entry], members: list[Entry], axis: str, who: str, stage: str) -> list[tuple[float, float]]:
    found = [(case[axis], x) for case in members if (x := value(case, who, stage)) is not None]
    if not found and axis == "window" and who in ("cudnn", "flash"):
        # Dense attention ignores the window: one time for all.
        for case in cases:
            same = all(case[size] == members[0][size] for size in ("heads", "head_dim", "key_length"))
            x = value(case, who, stage) if same and case["set"] == "train" else None
            if x is not None:
                found = [(member[axis], x) for member in members]
    return found


FORWARD = partial(of_shapes, "attention", "total", (
    ("attention", ms(OURS, "lists+attention")), ("all stages", ms(OURS, "total")),
    ("speedup over cuDNN", against(("cudnn", "attention"), (OURS, "total")))),
    "*Attention* includes the key lists; *all stages* adds key scores and selection. *FlexAttention* is given its "
    "block mask.")
BACKWARD = partial(of_shapes, "backward", "forward+backward", (
    ("backward", ms(OURS, "backward")), ("with lists", ms(OURS, "backward+lists")),
    ("speedup over cuDNN", against(("cudnn", "backward"), (OURS, "backward+lists"))),
    ("forward and backward", ms(OURS, "forward+backward")),
    ("speedup over cuDNN", against(("cudnn", "forward+backward"), (OURS, "forward+backward")))),
    "*Backward* gives the gradients of query, key, value and bias; *with lists* also builds the key lists of the mask. "
    "*Forward and backward* is everything from the values on: key scores, selection, attention and the gradients of "
    "all of them. *FlexAttention* has the same mask and a learned bias.")
FORWARD_CURVES: Curves = (
    ("cudnn", "attention", "cuDNN dense", "tab:red"), ("flash", "attention", "FlashAttention dense", "tab:orange"),
    ("masked+build", "attention", "SDPA, dense mask by topk", "tab:brown"),
    ("flex", "attention", "FlexAttention, same mask", "tab:purple"),
    (OURS, "attention", "cupy_dma attention", "tab:cyan"), (OURS, "total", "cupy_dma all stages", "tab:blue"))
BACKWARD_CURVES: Curves = (
    ("cudnn", "backward", "cuDNN dense", "tab:red"),
    ("cudnn", "forward+backward", "cuDNN dense, forward and backward", "tab:pink"),
    ("flash", "backward", "FlashAttention dense", "tab:orange"),
    ("flex", "backward", "FlexAttention, same mask", "tab:purple"), (OURS, "backward", "cupy_dma backward", "tab:cyan"),
    (OURS, "forward+backward", "cupy_dma, forward and backward, all stages", "tab:blue"))


# ---- decode ---------------------------------------------------------------------------------------------------------
def of_set(result: Entry, name: str) -> list[Entry]:
    return [case for case in result["cases"] if case["set"] == name]


def size(count: float | None) -> str:
    return number(count, "{:.1f} GiB", 2**30) if (count or 0) >= 2**30 else number(count, "{:.1f} MiB", 2**20)


def dense_ms(case: Entry) -> float | None:
    """The fastest attention over all keys."""
    return min((x for who in ("cudnn", "flash", "sdpa") if (x := value(case, who, "dense")) is not None), default=None)


def history_bytes(case: Entry) -> int:
    """Keys and values of the whole history in bfloat16."""
    return 4 * case["batch"] * case["key_length"] * case["kv_heads"] * case["head_dim"]


def of_step(case: Entry, field: str = "ms", parts: int = 1) -> float | None:
    """Whether a row is a step with the whole window, or a part of it."""
    return value(case, OURS, f"step w{case['window'] // parts}", field)


def bandwidth(result: Entry, case: Entry) -> float | None:
    """Bytes of the kept rows per time of a step, relative to the copy bandwidth."""
    spent, kept = of_step(case), of_step(case, "kept_bytes")
    return kept / spent / 1e9 / result["copy_tb_s"] if spent and kept else None


def speedup(case: Entry) -> float | None:
    """Speedup of a step with the whole window over attention over all keys."""
    return ratio(dense_ms(case), of_step(case))


def goals(result: Entry) -> list[Entry]:
    """The goals: name, measured value (None: not measured), limit, and whether it is a minimum."""
    def us(members: list[Entry], stage: str, field: str = "ms") -> Iterator[float | None]:
        return (None if (x := value(case, OURS, stage, field)) is None else 1e3 * x for case in members)

    def serving(batch: int, heads: int) -> list[Entry]:
        return [case for case in of_set(result, "serving") if (case["batch"], case["heads"]) == (batch, heads)]

    original = of_set(result, "original")
    full = [case for case in original if case["key_length"] > case["window"]]
    long = [case for case in serving(8, 32) if case["key_length"] == 131072]
    found = []
    for name, numbers, limit, unit, least in (
            ("step, 1 sequence, 2/1 heads, D 64, w 1024, slowest over all histories", us(full, "step w1024"), 12.0,
             "µs", False),
            ("the same as a graph replay with a cold L2 cache, GPU time", us(full, "step w1024", "cold_ms"), 15.0,
             "µs", False),
            ("the same, per replay when many are queued", us(full, "step w1024 replay", "queued_ms"), 15.0,
             "µs", False),
            ("the same, wall time until the result is ready", us(full, "step w1024 replay"), 15.0, "µs", False),
            ("stateless, 1 query, 512K keys, with selection",
             us([case for case in original if case["key_length"] == 524288], "stateless"), 40.0, "µs", False),
            ("step, batch 32, 16/8 heads, D 128, w 2048, share of the copy bandwidth",
             (bandwidth(result, case) for case in serving(32, 16)), 0.7, "", True),
            ("step, batch 8, 32/8 heads, D 128, w 2048, speedup over SDPA, 128K keys", map(speedup, long), 20.0, "×",
             True),
            ("the same, size of kept keys and values relative to the history",
             (part / history_bytes(case) for case in long if (part := of_step(case, "kept_bytes"))), 1 / 64, "",
             False)):
        worst = (min if least else max)((x for x in numbers if x is not None), default=None)
        found.append({"name": name, "found": worst, "limit": limit, "unit": unit, "least": least})
    return found


def goal_number(goal: Entry, x: float | None) -> str:
    digits = 4 if goal["limit"] < 0.1 else 2 if goal["limit"] < 1 else 1
    return number(x, f"{{:.{digits}f}} {goal['unit']}").strip()


def us_of(who: str, stage: str) -> Cell:
    return lambda case: microseconds(value(case, who, stage.format(**case)))


def decode_table(result: Entry) -> str:
    original = Table((
        ("1 query, keys", lambda case: length(case["key_length"])), ("all keys: cuDNN", us_of("cudnn", "dense")),
        ("FlashAttention", us_of("flash", "dense")), ("masked SDPA", us_of("masked", "attention")),
        ("masked SDPA, mask built", us_of("masked+build", "attention")), ("FlexAttention", us_of("flex", "attention")),
        ("stateless", us_of(OURS, "stateless")), ("interval mask given", us_of(OURS, "prepared")),
        ("cache step", us_of(OURS, "step w{window}")), ("replay, end to end", us_of(OURS, "step w{window} replay"))),
        words=0)
    serving = Table((
        ("batch, heads, history",
         lambda case: f"{case['batch']}, {case['heads']}/{case['kv_heads']}, {length(case['key_length'])}"),
        ("SDPA over all keys", lambda case: microseconds(dense_ms(case))),
        ("SDPA memory", lambda case: size(history_bytes(case))),
        ("step, half the window", lambda case: microseconds(of_step(case, parts=2))),
        ("step", lambda case: microseconds(of_step(case))),
        ("share of copy bandwidth", lambda case: number(bandwidth(result, case), "{:.0f} %", 0.01)),
        ("speedup over SDPA", lambda case: times(speedup(case))),
        ("cache memory", lambda case: size(of_step(case, "cache_bytes")))))
    wanted = Table((("goal", lambda goal: goal["name"]), ("measured", lambda goal: goal_number(goal, goal["found"])),
                    ("limit", lambda goal: f"{'≥' if goal['least'] else '≤'} {goal_number(goal, goal['limit'])}")))
    copy = f"; copy bandwidth {result['copy_tb_s']:.2f} TB/s"
    words = (f"Microseconds, medians, bfloat16, independent scores, on one "
             f"{machine(result, 'CUDA', 'torch', 'CuPy', more=copy)}. First table: batch 1, 2/1 heads, D 64, w 1024; "
             f"second: D 128, w 2048 and its half. *Stateless* includes the selection; *end to end* is the wall time "
             f"of a replayed step until its result is ready ({result['empty_replay_us']:.1f} for one tiny kernel); the "
             f"others are GPU times. *SDPA over all keys* is the faster of cuDNN and FlashAttention. Every output was "
             f"checked against float64 in the same run. All numbers and the method: {WHERE}")
    return "\n\n".join([original.of(of_set(result, "original")), serving.of(of_set(result, "serving")),
                        wanted.of(goals(result)), words])


DECODE_CURVES: Curves = (
    ("cudnn", "dense", "cuDNN, all keys", "tab:red"), ("flash", "dense", "FlashAttention, all keys", "tab:orange"),
    ("masked", "attention", "SDPA, mask given", "tab:pink"),
    ("masked+build", "attention", "SDPA, mask built", "tab:brown"),
    ("flex", "attention", "FlexAttention, block mask given", "tab:purple"),
    (OURS, "stateless", "stateless, with selection", "tab:cyan"), (OURS, "step w{window}", "cache step", "tab:blue"))


def by_history(result: Entry) -> list[Panel]:
    """Time against history: the original's table, then a panel for each batch and number of heads."""
    groups: dict[str, list[Entry]] = {}
    for case in result["cases"]:
        title = (f"batch {case['batch']}, {case['heads']}/{case['kv_heads']} heads, D {case['head_dim']}, "
                 f"w {case['window']}")
        groups.setdefault(title, []).append(case)
    return [lines(title, (Line([(case["key_length"], 1e3 * x) for case in members
                                if (x := value(case, who, stage.format(**case))) is not None], *rest)
                          for who, stage, *rest in DECODE_CURVES), "keys in the history", "microseconds")
            for title, members in groups.items()]


# ---- dense ----------------------------------------------------------------------------------------------------------
def ratios(result: Entry) -> list[Entry]:
    """Every ratio with an upper limit: name, our time, the peer's time (None: not measured), ratio, limit."""
    found: list[Entry] = []

    def add(name: str, limit: float, case: Entry, stage: str, other: float | None) -> None:
        ours = value(case, OURS, stage)
        found.append({"name": name, "ours": ours, "other": other, "ratio": ratio(ours, other), "limit": limit})

    stages = "forward", "backward"
    for case in of_set(result, "random"):
        for stage in stages:
            add(f"half visible, dense bias, {stage}, relative to FlexAttention", 1.25, case, stage,
                value(case, "flex", stage))
    for name, words, limit in (("blocks", "1/8 of the tiles visible", 1 / 4), ("columns", "1/16 of the keys", 1 / 6)):
        for case in of_set(result, name):
            for shape in ("shared", "per head"):
                for stage in stages:
                    add(f"{words}, mask {shape}, {stage}, relative to all visible", limit, case,
                        f"{stage} sparse, {shape}", value(case, OURS, f"{stage} full, {shape}"))
    for case in of_set(result, "interval"):
        read = value(case, "torch", "read")
        for stage in stages:
            plain = value(case, OURS, f"{stage} interval")
            add(f"top-w mask as a dense boolean, {stage}, relative to intervals and one read of the mask", 1.3, case,
                f"{stage} dense", None if plain is None or read is None else plain + read)
    for name in ("causal", "top-w"):
        for case in of_set(result, f"varlen {name}"):
            for stage in stages:
                pairs, equal = (value(case, OURS, f"{stage} {which}", "pairs") for which in ("unequal", "equal, batch"))
                other = value(case, OURS, f"{stage} equal, batch")
                if other is not None and pairs and equal:
                    other *= pairs / equal
                add(f"{name}, 64 unequal sequences, {stage}, relative to equal ones, per pair", 1 / 0.85, case,
                    f"{stage} unequal", other)
    for case in of_set(result, "plain"):
        for words in ("all keys", "causal"):
            for more, limit, other_words in (("", 1 / 0.9, ""),
                                             (", bias of keys and softcap", 1 / 0.85, " without these")):
                add(f"D {case['head_dim']}, N {case['key_length']}, {words}{more}, forward, relative to "
                    f"cuDNN{other_words}", limit, case, f"forward {words}{more}",
                    value(case, "cudnn", f"forward {words}"))
    return found


RATIOS = Table((("case", lambda goal: goal["name"]), ("ours, ms", lambda goal: milliseconds(goal["ours"])),
                ("peer, ms", lambda goal: milliseconds(goal["other"])),
                ("ratio", lambda goal: number(goal["ratio"], "{:.2f}")),
                ("goal", lambda goal: f"≤ {goal['limit']:.2f}")))


def dense_table(result: Entry) -> str:
    return (f"{RATIOS.of(ratios(result))}\n\nMedians, bfloat16, 16/8 heads, D 128 and N 8192 unless stated (varlen: 64 "
            f"sequences of 100 to 8000 tokens), on one {machine(result, 'CUDA', 'torch', 'CuPy')}. Our times include "
            f"packing a dense mask; FlexAttention's exclude building its block mask. Every output was checked against "
            f"float64 in the same run. All numbers and the method: {WHERE}")


def bars(result: Entry) -> list[Panel]:
    """Each ratio as a bar in units of its limit, under its name."""
    measured = [goal for goal in ratios(result) if goal["ratio"] is not None][::-1]

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


# ---- intervals and portable -----------------------------------------------------------------------------------------
def intervals_table(result: Entry) -> str:
    dense: dict[tuple[int, int], Entry] = {}  # cuDNN is measured once for each length and head dim
    for case in result["cases"]:
        if value(case, "cudnn", "backward") is not None:
            dense.setdefault((case["key_length"], case["head_dim"]), case)

    def other(case: Entry, stage: str) -> float | None:
        return value(dense.get((case["key_length"], case["head_dim"]), case), "cudnn", stage)

    def faster(stage: str) -> Cell:
        return lambda case: number(ratio(other(case, stage), value(case, OURS, stage)), "{:.1f}")

    table = Table((
        ("N, head dim, mask", lambda case: f"{case['key_length'] // 1024}K, D {case['head_dim']}, {case['pattern']}"),
        ("forward with lists", ms(OURS, "forward with lists")), ("forward", ms(OURS, "forward")),
        ("backward", ms(OURS, "backward")), ("both", ms(OURS, "forward+backward")),
        ("cuDNN backward", lambda case: milliseconds(other(case, "backward"))),
        ("cuDNN both", lambda case: milliseconds(other(case, "forward+backward"))),
        ("Flex backward", ms("flex", "backward")), ("Flex both", ms("flex", "forward+backward")),
        ("backward, speedup over cuDNN", faster("backward")), ("both, speedup over cuDNN", faster("forward+backward")),
        ("possible speedup", lambda case: number(ratio(case["causal_pairs"], case["check"]["kept_pairs"]), "{:.1f}"))))
    return (f"{table.of(result['cases'])}\n\nMilliseconds, medians, batch 1, 16/8 heads, bfloat16, on one "
            f"{machine(result)}; masks and method: `python -m benchmarks intervals --help`. All gradients were checked "
            f"against float64 in the same run.")


def portable_table(result: Entry) -> str:
    rows = [[f"{case['key_length'] // 1024}K, D {case['head_dim']}, "
             f"{'causal' if case['set'] == 'plain' else 'w ' + str(case['window'])}", stage, ms("flash", stage)(case),
             *(number(gain(("flash", stage), (card, stage))(case), "{:.2f}") for card in ("own", "A100", "RTX"))]
            for case in result["cases"] for stage in ("forward", "backward")]
    table = markdown(["N, head dim, mask", "", "FlashAttention, ms", "227 KiB", "163 KiB (A100)", "99 KiB (RTX)"], rows,
                     words=2).replace("|  |", "| |", 1)
    return (f"{table}\n\nSpeedup of the portable kernels over dense causal FlashAttention-2, 16/8 heads, "
            f"bfloat16, on one {result['device']} with the occupancy of other cards, {result['date'][:10]}: see "
            f"`python -m benchmarks portable --help`. All gradients were checked against float64 in the same run.")


# ---- grid -----------------------------------------------------------------------------------------------------------
def grid_text(result: Entry) -> str:
    """The cases that miss the goal, slowest first, and the number of those that meet it."""
    found = [f"WRONG: {name}" for name in result.get("wrong", ())]
    for stage in ("forward", "both"):
        chosen = [row for row in result["rows"] if row["stage"] == stage]
        slow = sorted((row for row in chosen if not row["ok"]), key=lambda row: row["dense"] / row["ours"])
        found.append(f"{stage}: {len(chosen) - len(slow)} of {len(chosen)} as fast as wanted")
        found += [f"  {line(row)}  {times(row['dense'] / row['ours'])}" for row in slow]
    return "\n".join(found)


# ---- all ------------------------------------------------------------------------------------------------------------
def of_suite(name: str, table: Callable[[Entry], str], title: str = "", **more: Any) -> Report:
    return Report(name, f"{name}_performance.json", (Piece(name, "docs/performance.md", table),),
                  text=lambda result: f"{text(result)}\n\n{table(result)}",
                  title=lambda result: f"{title}, bfloat16, {result['device']}", **more)


REPORTS = {report.name: report for report in (
    of_suite("forward", FORWARD, "Forward pass", panels=partial(by_shape, FORWARD_CURVES)),
    of_suite("backward", BACKWARD, "Backward pass", panels=partial(by_shape, BACKWARD_CURVES)),
    of_suite("decode", decode_table, "One query at the end of a history", panels=by_history),
    of_suite("dense", dense_table, "Dense masks, dense biases and varlen", panels=bars),
    of_suite("intervals", intervals_table), of_suite("portable", portable_table),
    Report("grid", "grid.json", text=grid_text), Report("tune_sm90", "hopper_tiles.json"),
    Report("tune_sm90_backward", "hopper_backward.json"),
    *pages_models.REPORTS, *pages_evidence.REPORTS, *pages_retrofit.REPORTS)}


def report_of(name: str) -> Report:
    """The report of a routine; without pages, if none shows it."""
    return REPORTS.get(name) or Report(name, f"{name}.json")
