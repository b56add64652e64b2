"""How docs/evidence.md shows mqar, language_model and needle. Needs no torch."""
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.harness.charts import Panel, colormaps
from benchmarks.harness.folders import EVIDENCE
from benchmarks.harness.report import NONE, Line, Piece, Report, Table, lines, markdown

Row = dict[str, Any]
COLOURS = {"full": "black", "window": "tab:gray", "random": "tab:olive", "bias": "tab:brown", "selection": "tab:purple",
           "dynamic": "tab:blue", "global": "tab:green"}


def where(result: dict[str, Any]) -> str:
    """The machines on which the rows were recorded, and their cost."""
    rows = result["rows"]
    devices, commits, dates = (sorted({row[name] for row in rows}) for name in ("device", "commit", "date"))
    minutes = sum(row["seconds"] for row in rows) / 60
    return (f"{len(rows)} models in {minutes:.1f} minutes on {', '.join(devices)}, {dates[0][:10]} to "
            f"{dates[-1][:10]}, commit {', '.join(one[:12] or '?' for one in commits)}.")


def spread(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """The mean over seeds, with minimum and maximum in brackets if they differ, and the number of NaNs."""
    lost, values = sum(map(math.isnan, values)), [x for x in values if not math.isnan(x)]
    if lost:
        return f"{spread(values, scale, digits)}, {lost} NaN" if values else "NaN"
    if not values:
        return NONE
    low, mean, high = (f"{scale * x:.{digits}f}" for x in (min(values), statistics.mean(values), max(values)))
    return mean if low == high else f"{mean} ({low}–{high})"


def grouped(rows: list[Row], without: tuple[str, ...]) -> dict[tuple[Any, ...], list[Row]]:
    """Groups of rows whose settings differ only in ``without``."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(sorted((name, x) for name, x in row["settings"].items()
                           if name not in without and not isinstance(x, list)))
        found.setdefault(key, []).append(row)
    return found


def ordered(stacks: Iterable[list[Row]], key: Callable[[Row], Any]) -> list[list[Row]]:
    """Sorted by ``key(settings)``."""
    return sorted(stacks, key=lambda rows: key(rows[0]["settings"]))


def rank(one: Row) -> int:
    return list(COLOURS).index(one["kind"])


def words(one: dict[str, Any]) -> str:
    """The attention in a row's settings, in words."""
    kind = one["kind"]
    if kind in ("full", "window", "random"):
        return {"full": "full attention", "window": "sliding window", "random": "random keys"}[kind]
    start = f"A {'drawn ±' if one['drawn'] else ''}{one['start']:g}{', fixed' if one['fixed'] else ''}"
    name = {"bias": "all keys, scores as bias", "selection": "selected, no bias", "dynamic": "dynamic mask",
            "global": "dynamic mask, global"}[kind]
    extra = "".join(f", {one[what]} {word}" for what, word in (("recent", "recent"), ("sinks", "sinks")) if one[what])
    rate = f", scores' rate ×{one['scores_rate']:g}" if one["scores_rate"] != 1 else ""
    frozen = ", then frozen" if one.get("frozen") else ""
    return f"{name}, {one['form']}, {start}{rate}{extra}{frozen}"


def named(one: dict[str, Any]) -> str:
    """A name for a run's progress messages."""
    return f"w {budget(one)}, {words(one)}" if budget(one) else words(one)


def budget(one: dict[str, Any]) -> int:
    return 0 if one["kind"] in ("full", "bias") else one["window"] + one["recent"] + one["sinks"]


# ---- recall ----------------------------------------------------------------------------------------------------------
LEARNED = 0.95  # right answers of a model that has learned the task


def right(row: Row) -> float:
    """The best of a model's checks."""
    return max(row["curve"])


def shown(rows: list[Row]) -> str:
    """Mean and range over seeds, and the mean at the end if that is worse by a point or more."""
    best, last = (statistics.mean(one) for one in ([right(row) for row in rows], [row["curve"][-1] for row in rows]))
    return spread([right(row) for row in rows], 100) + (f" → {100 * last:.0f}" if last <= best - 0.01 else "")


def best(rows: list[Row]) -> list[Row]:
    """Among rows that differ in rate and seed, those of the rate with the highest mean accuracy."""
    rates = grouped(rows, ("seed",)).values()
    return max(rates, key=lambda own: statistics.mean(map(right, own)))


def recall_stacks(result: dict[str, Any]) -> list[list[Row]]:
    """The rows of each setting at its best rate, in the order of the settings' sizes."""
    found = [best(rows) for rows in grouped(result["rows"], ("seed", "rate")).values()]
    return ordered(found, lambda one: (one["width"], one["length"], one["pairs"], not one["grow"], rank(one),
                                       words(one), budget(one)))


def name_of(one: dict[str, Any]) -> str:
    """The attention in a row's settings, with recent keys as a share of all keys that a query sees."""
    name = words({**one, "recent": 0, "sinks": 0})
    if one["recent"]:
        name += f", {one['recent'] / budget(one):.2g} of w recent" + ", a sink" * one["sinks"]
    return name


def task_of(one: dict[str, Any]) -> str:
    return f"{one['pairs']} pairs in {one['length']} tokens, width {one['width']}"


def by_task(result: dict[str, Any]) -> str:
    """A table per task, the task with most settings first: a line per attention, a column per number of keys."""
    tasks: dict[str, dict[str, dict[float, str]]] = {}
    for rows in recall_stacks(result):
        one = rows[0]["settings"]
        own = tasks.setdefault(task_of(one) + ", full length from the first step" * (not one["grow"]), {})
        own.setdefault(name_of(one), {})[budget(one) / one["pairs"]] = shown(rows)
    parts = []
    for task, own in sorted(tasks.items(), key=lambda item: -len(item[1])):
        columns = sorted({part for cells in own.values() for part in cells if part}) or [0]
        head = [task, *(f"w = {part:g} pairs" if part else "all keys" for part in columns)]
        parts.append(markdown(head, [[name, *(cells.get(part, cells.get(0, NONE)) for part in columns)]
                                     for name, cells in own.items()]))
    return "\n\n".join(parts)


def often(result: dict[str, Any]) -> str:
    """How many models learned the task, with one key per pair or with all keys. Includes earlier runs with the same
    settings, seeds and data (``mqar_earlier.json``). Each run counts at its best rate."""
    earlier = json.loads((EVIDENCE / "mqar_earlier.json").read_text())["models"]
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for rows in recall_stacks(result):
        one = rows[0]["settings"]
        if one["grow"] and one["kind"] in ("full", "dynamic") and budget(one) in (0, one["pairs"]):
            name, task = name_of(one), task_of(one)
            learned, count = earlier.get(name, {}).get(task, (0, 0))
            learned += sum(right(row) >= LEARNED for row in rows)
            found.setdefault(name, {})[task] = learned, count + len(rows)
    tasks = list(dict.fromkeys(task_of(rows[0]["settings"]) for rows in recall_stacks(result)))
    tasks = [task for task in tasks if sum(task in own for own in found.values()) > 1]
    return markdown([f"models with {100 * LEARNED:.0f} % or more, w = pairs", *tasks], [
        [name, *("{} of {}".format(*own[task]) if task in own else NONE for task in tasks)]
        for name, own in found.items()])


def recall_table(result: dict[str, Any]) -> str:
    return f"{by_task(result)}\n\n{often(result)}"


def recall_panels(result: dict[str, Any]) -> list[Panel]:
    """Accuracy against the number of keys, of the task that has most settings; bars: the range of the seeds."""
    by_task: dict[tuple[int, ...], list[list[Row]]] = {}
    for rows in recall_stacks(result):
        one = rows[0]["settings"]
        if one["grow"]:
            by_task.setdefault((one["length"], one["pairs"], one["width"]), []).append(rows)
    (length, pairs, width), chosen = max(by_task.items(), key=lambda item: len(item[1]))
    curves: dict[str, list[tuple[float, ...]]] = {}
    kinds: dict[str, Row] = {}
    for rows in chosen:
        one, answered = rows[0]["settings"], [100 * right(row) for row in rows]
        name = words({**one, "recent": 0, "sinks": 0})
        if not one["recent"] and not one["sinks"]:
            curves.setdefault(name, []).append((budget(one), statistics.mean(answered), min(answered), max(answered)))
            kinds[name] = one
    curves = {name: points for name, points in curves.items() if len(points) > 1 or not points[0][0]}
    dynamic = iter(colormaps()["tab10"]([0, 1, 3, 9, 6, 8] * 6))
    colours = {name: next(dynamic) if kinds[name]["kind"] == "dynamic" else COLOURS[kinds[name]["kind"]]
               for name in curves}
    ends = sorted({int(w) for points in curves.values() for w, *_ in points if w} or {pairs})

    def found() -> Iterator[Line]:
        for i, (name, points) in enumerate(curves.items()):
            linear = kinds[name]["kind"] in ("dynamic", "global") and kinds[name]["form"] == "linear"
            beside = 1.012**(i - len(curves) / 2)  # bars of equal numbers of keys side by side
            yield Line([(w * beside, *rest) for w, *rest in points if w], name, colours[name],
                       *((":", "s") if linear else ("-", "o")))

    def more(ax: Any) -> None:
        for name, ((w, mean, low, high), *_) in curves.items():
            if not w:  # all keys
                ax.axhspan(low, high, color=colours[name], alpha=0.2)
                ax.axhline(mean, color=colours[name], linestyle="--", label=name)
        ax.axvline(pairs, color="tab:red", linewidth=0.7, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set_xticks(ends, map(str, ends))

    return [lines(f"{pairs} pairs in {length} tokens, width {width}; mean and range of seeds", found(),
                  f"keys that a query sees (dotted: {pairs} pairs)", "right answers, %", "", more, 4.2)]


# ---- language models -------------------------------------------------------------------------------------------------
BINS = (0, 64, 256, 1024, 4096)  # start of each column of the table
RATE = 1e-3  # except in rows that try another rate
LIVES = ("never seen", "to w / 4", "to w", "to 4 w", "longer", "to the end")


def language_stacks(result: dict[str, Any]) -> list[list[Row]]:
    """The seeds of each setting, by length, keys and kind."""
    return ordered(grouped(result["rows"], ("seed",)).values(),
                   lambda one: (one["length"], rank(one), budget(one), words(one), one["rate"]))


def between(row: Row, low: int, high: int) -> float | None:
    """Nats per byte at positions ``low`` to ``high``, which must be edges of bins."""
    edges = row["edges"]
    bins = [(b - a, x) for a, b, x in zip(edges, edges[1:], row["by_position"]) if low <= a and b <= high]
    return sum(n * x for n, x in bins) / sum(n for n, _ in bins) if bins else None


def columns(rows: list[Row]) -> list[tuple[int, int]]:
    longest = max(row["edges"][-1] for row in rows)
    ends = [b for b in (*BINS[1:], longest) if b <= longest]
    return list(dict.fromkeys(zip(BINS, ends)))


def language_table(result: dict[str, Any]) -> str:
    """Nats per byte by position; then how long keys live at the end of training, over all layers and heads."""
    losses, lives = [], []
    spans = columns(result["rows"])
    for rows in language_stacks(result):
        one = rows[0]["settings"]
        about = [str(one["length"]), words(one) + f", rate {one['rate']:g}" * (one["rate"] != RATE)]
        parts = [[x for row in rows if (x := between(row, a, b)) is not None]
                 for a, b in ((0, rows[0]["edges"][-1]), *spans)]
        losses.append([*about, str(budget(one) or "all"), *(spread(part, digits=3) for part in parts)])
        if rows[0]["lives"]:
            shares = [shares_of(row["lives"][-1]["counts"]) for row in rows]
            lives.append([*about, str(budget(one)), *(f"{100 * statistics.mean(x):.0f} %" for x in zip(*shares))])
    tables = [markdown(["bytes", "attention", "w", "all positions", *(f"{a} to {b}" for a, b in spans)], losses, 2)]
    return "\n\n".join(tables + [markdown(["bytes", "keys that live", "w", *LIVES], lives, words=2)] * bool(lives))


def shares_of(counts: list[list[str]]) -> list[float]:
    """The share of keys in each class of lives, over layers and heads."""
    heads = [list(map(int, head.split())) for layer in counts for head in layer]
    total = [sum(x) for x in zip(*heads)]
    return [x / sum(total) for x in total]


def language_panels(result: dict[str, Any]) -> list[Panel]:
    """Loss of each attention above full attention's, by position; and lives over training, by layer."""
    found = [rows for rows in language_stacks(result) if rows[0]["settings"]["rate"] == RATE
             and not any(math.isnan(x) for row in rows for x in row["by_position"])]
    length = min(rows[0]["settings"]["length"] for rows in found)
    own = [rows for rows in found if rows[0]["settings"]["length"] == length]
    bars = []  # height, step, shares: a group for each setting, below its name
    names = []  # height, setting
    height = 0
    for rows in (rows for rows in own if rows[0]["lives"]):
        names.append((height, f"w {budget(rows[0]['settings'])}, {words(rows[0]['settings'])}"))
        for life in rows[0]["lives"]:
            height += 1
            bars.append((height, life["step"], shares_of(life["counts"])))
        height += 1

    full = next((rows for rows in own if rows[0]["settings"]["kind"] == "full"), own[0])
    middle = [(a + b) / 2 for a, b in itertools.pairwise(full[0]["edges"])]
    styles = dict(zip(sorted({budget(rows[0]["settings"]) for rows in own}), itertools.cycle(("-", "--", "-.", ":"))))

    def losses() -> Iterator[Line]:
        colours = iter(colormaps()["tab10"]([0, 1, 2, 3, 4, 6, 8, 9] * 6))
        for rows in own:
            one = rows[0]["settings"]
            apart = [[x - y for x, y in zip(row["by_position"], other["by_position"])]
                     for row, other in zip(rows, full)]
            yield Line([(at, statistics.mean(x), min(x), max(x)) for at, x in zip(middle, zip(*apart))],
                       f"w {budget(one) or 'all'}, {words(one)}",
                       next(colours) if one["kind"] == "dynamic" else COLOURS[one["kind"]], styles[budget(one)])

    def lives(ax: Any) -> None:
        heights, steps, shares = zip(*bars)
        left = [0.0] * len(bars)
        for i, (name, colour) in enumerate(zip(LIVES, colormaps()["viridis"]([i / 5 for i in range(6)]))):
            width = [share[i] for share in shares]
            ax.barh(heights, width, left=left, color=colour, label=name)
            left = [a + b for a, b in zip(left, width)]
        for at, name in names:
            ax.text(0, at, name, fontsize=7, va="center", in_layout=False)
        ax.set_yticks(heights, map(str, steps), fontsize=6)
        ax.set_ylim(height, -1)
        ax.set_ylabel("training step")
        ax.set_xlabel("share of keys by how long they stay visible")

    made = [lines(f"{length} bytes; mean and range of the seeds", losses(), "position in the file, bytes",
                  "nats per byte more than full attention", "x", height=4.5)]
    return made + ([Panel("How long keys live, by layer", lives, 1 + 0.13 * height)] if bars else [])


# ---- needles ---------------------------------------------------------------------------------------------------------
OF = {False: "text alone", True: "with needles"}


def needle_stacks(result: dict[str, Any]) -> list[list[Row]]:
    return ordered(grouped(result["rows"], ("seed",)).values(), lambda one: (one["planted"], rank(one), words(one)))


def share(row: Row, what: str, length: int, of: str = "needles") -> float | None:
    """Shares of needles of one length, over all depths."""
    cells = [cell for cell in row["cells"] if cell["length"] == length]
    total = row["settings"]["needles"] * len(cells) if of == "needles" else sum(cell[of] for cell in cells)
    return sum(cell[what] for cell in cells) / total if total else None


def needle_table(result: dict[str, Any]) -> str:
    """A line per attention; for each length: found, survived, and the share of survivors that were found."""
    def shares(length: int) -> Callable[[list[Row]], str]:
        return lambda rows: " / ".join(
            spread([x for row in rows if (x := share(row, what, length, of)) is not None], 100, 0)
            for what, of in (("found", "needles"), ("survived", "needles"), ("both", "survived")))

    lengths = sorted({cell["length"] for row in result["rows"] for cell in row["cells"]})
    return Table((("trained", lambda rows: OF[rows[0]["settings"]["planted"]]),
                  ("attention", lambda rows: words(rows[0]["settings"])),
                  *((f"{length} bytes", shares(length)) for length in lengths)), words=2).of(needle_stacks(result))


def needle_panels(result: dict[str, Any]) -> list[Panel]:
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
            for rows in needle_stacks(result) for what in ("found", "survived")]


# ---- all ------------------------------------------------------------------------------------------------------------
def of_evidence(name: str, shows: str, table: Callable[[Any], str], panels: Callable[[Any], list[Panel]]) -> Report:
    def part(result: dict[str, Any]) -> str:
        models = len(result["rows"])
        return (f'<details markdown="1">\n<summary>Chart, and all settings of {models} models</summary>\n\n'
                f"[![{shows}](results/{name}.png)](results/{name}.png)\n\n{table(result)}\n\n{where(result)}\n\n"
                f"</details>")

    return Report(name, f"{name}.json", (Piece(name, "docs/evidence.md", part),), text=table, title=lambda _: shows,
                  panels=panels, across=2)


REPORTS = (
    of_evidence("mqar", "Right answers against the number of keys that a query sees", recall_table, recall_panels),
    of_evidence("language_model", "Loss by position, and how long keys live", language_table, language_panels),
    of_evidence("needle", "Needles found, and needles that survived the selection", needle_table, needle_panels))
