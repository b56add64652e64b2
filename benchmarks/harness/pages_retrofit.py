"""What docs/evidence.md shows of retrofit, and docs/retrofit.md of its speed. Needs no torch.

Nothing is claimed before it is recorded: without a record the piece of the page is empty.
"""
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness.charts import Panel, colormaps
from benchmarks.harness.pages_evidence import Row, spread, where
from benchmarks.harness.report import (
    NONE,
    Line,
    Piece,
    Report,
    length,
    lines,
    markdown,
    mebibytes,
    milliseconds,
    ratio,
    times,
)

KINDS = {"full": "full attention", "int8": "full attention, rows in INT8", "fp8": "full attention, rows in FP8",
         "window": "window and sinks", "random": "random", "h2o": "H2O", "snapkv": "SnapKV",
         "value": "scores of the value", "input": "scores of the layer's input",
         "aged": "scores of the layer's input that age", "gates": "gates, base frozen",
         "enforced": "gates, base frozen, budget enforced", "longer": "gates, budget enforced, three times the steps",
         "warm": "gates that start from scores", "tuned": "gates, base tuned", "oracle": "oracle (sees the future)"}
EVERYTHING = ("full", "int8", "fp8")  # kinds that keep all keys
ADAPTIVE = " adaptive"  # heads have different numbers of rows
KINDS |= {kind + ADAPTIVE: f"{KINDS[kind]}, adaptive budgets" for kind in ("value", "input", "gates", "enforced",
                                                                         "longer", "warm", "tuned", "oracle")}
LEARNED = ("input", "aged", "gates", "enforced", "longer", "warm", "tuned")  # what the goal is about
LEARNED += tuple(kind + ADAPTIVE for kind in LEARNED if kind + ADAPTIVE in KINDS)
TEXTS = ("text", "code")
LATE, GOAL, AT = 1024, 25, 256  # positions from which on losses count; per cent of the window's loss, at so many rows


def late(row: Row, text: str) -> float | None:
    """Nats per token from position ``LATE`` on; of texts that are shorter, of the last bin."""
    if text not in row["by_position"]:
        return None
    edges = row["edges"]
    bins = [(b - a, x) for a, b, x in zip(edges, edges[1:], row["by_position"][text]) if a >= LATE]
    bins = bins or [(1, row["by_position"][text][-1])]
    return sum(n * x for n, x in bins) / sum(n for n, _ in bins)


def needles(row: Row) -> float:
    return statistics.mean(one["found"] / row["settings"]["needles"] for one in row["needles"])


def policy_of(row: Row) -> str:
    return row["settings"]["kind"] + (ADAPTIVE if row["settings"].get("shared") else "")


def rows_of(result: dict[str, Any], kind: str, rows: int) -> list[Row]:
    return [row for row in result["rows"] if policy_of(row) == kind and row["settings"]["rows"] == rows]


def budgets(result: dict[str, Any]) -> list[int]:
    return sorted({row["settings"]["rows"] for row in result["rows"] if row["settings"]["kind"] in KINDS} - {0})


def closed(result: dict[str, Any], kind: str, rows: int, text: str) -> list[float]:
    """Of what the window loses to full attention, how many per cent each seed of a policy wins back."""
    full, window = (rows_of(result, name, at) for name, at in (("full", 0), ("window", rows)))
    if not full or not window:
        return []
    low, high = late(full[0], text), late(window[0], text)
    found = [late(row, text) for row in rows_of(result, kind, rows)]
    return [100 * (high - x) / (high - low) for x in found if x is not None and high and low and high > low]


def best(result: dict[str, Any], rows: int) -> tuple[str, dict[str, float]] | None:
    """The learned policy that wins most back with so many rows, of the text where it wins least, mean of its seeds."""
    means = {kind: {text: statistics.mean(found) for text in TEXTS if (found := closed(result, kind, rows, text))}
             for kind in LEARNED}
    whole = {kind: own for kind, own in means.items() if len(own) == len(TEXTS)}
    if not whole:
        return None
    kind = max(whole, key=lambda kind: min(whole[kind].values()))
    return kind, whole[kind]


def by_rows(result: dict[str, Any], title: str, cell: Callable[[list[Row], str, int], str]) -> str:
    """A line for each policy, a column for each number of rows: ``cell(its recorded rows, policy, rows)``."""
    found = budgets(result)
    cells = {name: [cell(rows_of(result, kind, 0 if kind in EVERYTHING else rows), kind, rows) for rows in found]
             for kind, name in KINDS.items()}
    return markdown([title, *(f"{rows} rows" for rows in found)],
                    [[name, *own] for name, own in cells.items() if set(own) != {NONE}])


def loss_table(result: dict[str, Any], text: str) -> str:
    """Nats per token of late positions and what is won back of the window's loss, by rows."""
    def cell(own: list[Row], kind: str, rows: int) -> str:
        share = closed(result, kind, rows, text) if kind not in (*EVERYTHING, "window") else []
        nats = spread([x for row in own if (x := late(row, text)) is not None], digits=3)
        return nats + (f", {statistics.mean(share):+.0f} %" if share else "")

    return by_rows(result, f"{text}: nats per token, share won back", cell)


def ending_table(result: dict[str, Any]) -> str:
    """The last tokens, where SnapKV can be compared, and needles."""
    def cell(own: list[Row], *_: Any) -> str:
        nats = [spread([row["ending"][text] for row in own], digits=3) for text in TEXTS]
        return f"{' / '.join(nats)} / {spread([needles(row) for row in own], 100, 0)}" if own else NONE

    return by_rows(result, "last tokens: text / code / needles found, %", cell)


def training_table(result: dict[str, Any]) -> str:
    found = {kind: {row["settings"]["seed"]: row["training"] for row in result["rows"]
                    if policy_of(row) == kind and ADAPTIVE not in kind and "training" in row} for kind in KINDS}
    return markdown(["trained", "seeds", "million tokens a seed", "minutes a seed"], [
        [KINDS[kind], str(len(own)), *(f"{statistics.mean(x[name] for x in own.values()) / unit:.1f}"
                                       for name, unit in (("tokens", 1e6), ("seconds", 60)))]
        for kind, own in found.items() if own])


def verdict(result: dict[str, Any]) -> str:
    """For whom the method is and for whom it is not, by what was measured."""
    found = {rows: own for rows in budgets(result) if (own := best(result, rows))}
    if AT not in found:
        return "The record does not hold all policies yet: the tables show what it holds."

    def won(rows: int) -> str:
        kind, shares = found[rows]
        each = " and ".join(f"{share:.0f} % on {text}" for text, share in shares.items())
        return f"with {rows} rows {KINDS[kind]} win back {each}"

    def needles_of(kind: str, rows: int) -> str:
        return f"{100 * statistics.mean(map(needles, rows_of(result, kind, rows))):.0f} %"

    good = [rows for rows, (_, shares) in found.items() if min(shares.values()) >= GOAL]
    missed = "" if AT in good else f" The goal was {GOAL} % with {AT} rows: {won(AT)}."
    if not good:
        whose = (f"**For nobody yet who can use a window:** no learned policy wins back {GOAL} % of what it loses to "
                 f"full attention.{missed}")
    else:
        whose = (f"**For** models that read long texts and code with a cache of constant size. Of what a window of as "
                 f"many rows loses to full attention, {', '.join(map(won, good))}.{missed}")
    at = AT if AT in good or not good else good[0]
    return (f"{whose}\n\n**Not for** short contexts: within the kept rows every policy is full attention. **Details** "
            f"that a text mentions once may be lost, because which one matters is known only with the question. Of the "
            f"needles that were hidden, full attention finds {needles_of('full', 0)}, the same policy with {at} rows "
            f"{needles_of(found[at][0], at)}, and a window of as many {needles_of('window', at)}.")


METHOD = """SmolLM2-135M-Instruct (GGUF Q4_1), 8192 tokens, held-out documents of text and of code
(`python -m benchmarks retrofit`). *Rows*: how many keys a query of a kv head sees, including sinks, recent keys and its
own. *Adaptive budgets*: heads have different numbers of rows with that mean over all kv heads and layers, set by one
score threshold. *Nats* are those of positions from 1024 on. *Won back*: the share of what the window loses to full
attention. Three seeds: mean and range. SnapKV reads its prompt with full attention, so compare only its last tokens.
Other jobs may have shared the GPU, so minutes of training are upper bounds."""
APPENDIX = """## Appendix: small models from scratch

What follows are models of up to 30 M parameters, trained here from their first step, in which scores of the value
select the keys."""


def page(result: dict[str, Any]) -> str:
    chart = "[![What is won back, by kept rows and by position](results/retrofit.png)](results/retrofit.png)"
    parts = [verdict(result), METHOD, chart, *(loss_table(result, text) for text in TEXTS), ending_table(result),
             training_table(result), where(result), APPENDIX]
    return "\n\n".join(parts)


def text(result: dict[str, Any]) -> str:
    return "\n\n".join([*(loss_table(result, name) for name in TEXTS), ending_table(result), training_table(result)])


def panels(result: dict[str, Any]) -> list[Panel]:
    """Nats above full attention by kept rows, of text and of code; then by position at ``AT`` rows."""
    shown = [kind for kind in KINDS if kind not in (*EVERYTHING, "snapkv")]
    colours = dict(zip((kind for kind in shown if ADAPTIVE not in kind),
                       colormaps()["tab20"]([14, 16, 10, 18, 8, 12, 0, 2, 3, 4, 6, 19])))

    full = rows_of(result, "full", 0)

    def drawn(points: Callable[[str, str], list[tuple[float, ...]]], name: str) -> Iterator[Line]:
        for kind in shown if full else ():
            solid = ADAPTIVE in kind or kind + ADAPTIVE not in KINDS
            yield Line(points(kind, name), KINDS[kind], colours[kind.removesuffix(ADAPTIVE)], "-" if solid else ":")

    def by_rows(kind: str, name: str) -> list[tuple[float, ...]]:
        return [(rows, statistics.mean(found) - (late(full[0], name) or 0)) for rows in budgets(result)
                if (found := [x for row in rows_of(result, kind, rows) if (x := late(row, name)) is not None])]

    def by_position(kind: str, name: str) -> list[tuple[float, ...]]:
        own = rows_of(result, kind, AT) or rows_of(result, kind, min(budgets(result), default=0))
        found = zip(full[0]["by_position"][name], *(row["by_position"][name] for row in own))
        return [(edge, statistics.mean(x) - dense) for edge, (dense, *x) in zip(full[0]["edges"][1:], found) if x]

    return [lines(f"{name}, {what}", drawn(points, name), across, "nats per token more than full attention", "x")
            for what, points, across in (("by kept rows", by_rows, "kept rows"),
                                         (f"{AT} rows, by position", by_position, "position, to")) for name in TEXTS]


# ---- speed ----------------------------------------------------------------------------------------------------------
def speed_table(result: dict[str, Any]) -> str:
    """A line per part, length, batch and way to run. The speedup of gates is over the fastest dense peer."""
    runs: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result["rows"]:
        of, (peer, _, way) = row["settings"], row["settings"]["peer"].partition(", ")
        if of["part"] != "check":
            named = (f"{peer}, open", "") if way == "open" else (peer, way)
            runs.setdefault((of["part"], named[1], of["length"], of["batch"]), {})[named[0]] = row

    def memory(row: Row | None) -> str:
        return mebibytes(row and row.get("cache_bytes", row.get("peak_bytes")))

    found = []
    for (part, way, n, batch), peers in runs.items():
        ms = {name: row["ms"] for name, row in peers.items()}
        dense = min((ms[name] for name in DENSE if ms.get(name)), default=None)
        found.append([f"{part}, {way}" if way else part, length(n), str(batch),
                      *(milliseconds(ms.get(name)) for name in PEERS), times(ratio(dense, ms.get("gates"))),
                      memory(peers.get("gates")), memory(peers.get("sdpa"))])
    table = markdown(["", "tokens", "batch", *PEERS, "gates over dense", "memory, gates", "memory, dense"], found)
    commits = ", ".join(sorted({row["commit"][:7] for row in result["rows"]}))
    return (f"{table}\n\nMilliseconds on one {result['device']}, medians, bfloat16, random weights of "
            f"SmolLM2-135M's shape, commits {commits}. Memory: that of the cache in decoding, elsewhere the peak "
            "beyond what was there before.")


PEERS, DENSE = ("gates", "gates, open", "window", "sdpa", "flash"), ("sdpa", "flash")

REPORTS = (
    Report("retrofit", "retrofit.json", (Piece("retrofit", "docs/evidence.md", page),), text=text,
           title=lambda _: "What kept rows lose against full attention, SmolLM2-135M", panels=panels, across=2,
           unrecorded=""),
    Report("retrofit_speed", "retrofit_speed.json", (Piece("retrofit_speed", "docs/retrofit.md", speed_table),),
           text=speed_table, title=lambda _: "Speed of a retrofitted model", unrecorded=""))
