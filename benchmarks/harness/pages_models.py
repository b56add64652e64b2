"""How pages show training steps, several GPUs, the CPU, jax, transformers and serving. Needs neither a GPU nor
torch."""
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness.charts import Panel
from benchmarks.harness.report import (
    NONE,
    Cell,
    Entry,
    Line,
    Piece,
    Report,
    Table,
    gain,
    gibibytes,
    label,
    length,
    lines,
    machine,
    markdown,
    mebibytes,
    milliseconds,
    ms,
    number,
    ratio,
    times,
    value,
)

WHERE = "All numbers and the method: [benchmarks/results](../benchmarks/results)"
Rows = dict[str, Entry]  # by peer


def is_right(row: Entry | None) -> bool:
    return row is not None and row["ms"] is not None and row.get("ok", True)


def shown(row: Entry | None, words: Callable[[Entry], str]) -> str:
    """The value of a row that exists and is right; otherwise, why there is none."""
    if row is None:
        return NONE
    return words(row) if is_right(row) else row["note"] if row["note"] == "out of memory" else NONE


def faster(slow: Entry | None, fast: Entry | None) -> str:
    return times(slow["ms"] / fast["ms"] if slow and fast and is_right(slow) and is_right(fast) else None)


def by_peer(result: Entry, *names: str) -> dict[tuple[Any, ...], Rows]:
    """Rows by peer for each case; a case is the values of ``names``."""
    found: dict[tuple[Any, ...], Rows] = {}
    for row in result["rows"]:
        found.setdefault(tuple(row[name] for name in names), {})[row["peer"]] = row
    return found


def of(cell: Callable[[Entry | None], str], peer: str) -> Cell:
    """The cell of a peer in a line ``(case, rows by peer)``."""
    return lambda case: cell(case[1].get(peer))


def over(slow: str, fast: str) -> Cell:
    return lambda case: faster(case[1].get(slow), case[1].get(fast))


# ---- training -------------------------------------------------------------------------------------------------------
NAMES = {"80m": "80M, 12 layers", "1.7b": "1.7B, 4 of its layers", "tiny": "tiny"}
PEERS = {"none": ("without attention", "tab:gray"), "dma": ("cupy_dma", "tab:blue"), "sdpa": ("dense SDPA", "tab:red"),
         "flex": ("FlexAttention", "tab:purple")}
STYLES = {"eager": ":", "compile": "-", "checkpoint": "-.", "compile+checkpoint": "--"}


def memory(row: Entry | None) -> str:
    return gibibytes(row["peak_bytes"] if row and is_right(row) else None)


def share(row: Entry | None) -> str:
    return number(row.get("attention_share") if row and is_right(row) else None, "{:.0f} %", 0.01)


def speed(row: Entry | None) -> str:
    return shown(row, lambda row: f"{row['tokens_per_second'] / 1e3:.1f}")


def training_summary(result: Entry) -> str:
    """The table of the README."""
    found = by_peer(result, "model", "length", "mode")
    lengths = sorted({n for _, n, _ in found})
    kinds = dict.fromkeys((model, mode) for model, _, mode in found if mode in ("eager", "compile"))
    return markdown(["tokens per sequence", *map(length, lengths)], [
        [f"{NAMES[model]}, {mode}", *(over("sdpa", "dma")((n, found.get((model, n, mode), {}))) for n in lengths)]
        for model, mode in kinds])


def training_table(result: Entry) -> str:
    table = Table((
        ("model, tokens per sequence, mode", lambda case: f"{NAMES[case[0][0]]}, {length(case[0][1])}, {case[0][2]}"),
        ("cupy_dma", of(speed, "dma")), ("dense SDPA", of(speed, "sdpa")), ("FlexAttention", of(speed, "flex")),
        ("speedup over dense", over("sdpa", "dma")), ("attention, cupy_dma", of(share, "dma")),
        ("attention, dense", of(share, "sdpa")), ("memory, cupy_dma", of(memory, "dma")),
        ("memory, dense", of(memory, "sdpa"))))
    by = sorted({row["note"] for row in result["rows"] if row["peer"] == "sdpa" and is_right(row)})
    return (f"{table.of(by_peer(result, 'model', 'length', 'mode').items())}\n\nThousands of tokens per second in "
            f"training steps (forward, backward, AdamW), medians, bfloat16, w 1024; memory: the peak in GiB, model and "
            f"optimizer included; *attention*: its share of the step. On one {machine(result, 'CUDA', 'torch', 'CuPy')}"
            f"; dense by {' or '.join(by) or 'nothing'}. {WHERE}, `python -m benchmarks training`.")


def training_panels(result: Entry) -> list[Panel]:
    """Tokens per second and peak memory against the length, of each model."""
    rows = [row for row in result["rows"] if is_right(row)]

    def found(name: str, field: str, unit: float) -> Iterator[Line]:
        for peer, (words, colour) in PEERS.items():
            for mode, style in STYLES.items():
                yield Line([(row["length"], row[field] / unit) for row in rows if row[field]
                            and (row["model"], row["peer"], row["mode"]) == (name, peer, mode)],
                           f"{words}, {mode}", colour, style)

    return [lines(f"{NAMES[name]}: {what}", found(name, field, unit), "tokens per sequence", words)
            for what, field, unit, words in (("throughput", "tokens_per_second", 1e3, "thousand tokens per second"),
                                             ("memory", "peak_bytes", 2**30, "peak memory, GiB"))
            for name in dict.fromkeys(row["model"] for row in result["rows"])]


# ---- several GPUs ---------------------------------------------------------------------------------------------------
def received(row: Entry | None) -> str:
    """MiB received by the rank that receives most."""
    return number(max(map(sum, row["bytes"])) if row and row.get("bytes") else None, "{:.1f}", 2**20)


def ranks_table(result: Entry) -> str:
    def time(row: Entry | None) -> str:
        return shown(row, lambda row: f"{row['ms']:.2f}")

    table = Table((
        ("tokens, pass", lambda case: f"{length(case[0][0])}, {case[0][1]}"), ("several GPUs", of(time, "ours")),
        ("with copies", of(time, "copies")), ("one GPU", of(time, "one")), ("ring attention", of(time, "ring")),
        ("speedup over one GPU", over("one", "ours")), ("over ring", over("ring", "ours")),
        ("received, MiB", of(received, "ours"))))
    sizes, versions = result["arguments"], result["versions"]
    return (f"{table.of(by_peer(result, 'length', 'pass').items())}\n\nMilliseconds of a call, medians, on "
            f"{max(row['ranks'] for row in result['rows'])} x {result['device']} (CUDA "
            f"{versions.get('torch_cuda', '?')}, torch {versions.get('torch', '?')}), bfloat16, "
            f"{sizes['heads']}/{sizes['kv_heads']} heads, D {sizes['head_dim']}, w {sizes['window']}, "
            f"{result['date'][:10]}. *received*: what a rank gets from others in a call. {WHERE}, "
            f"`python -m benchmarks context_parallel`.")


# ---- CPU ------------------------------------------------------------------------------------------------------------
CPU_WANTED = {"small": 0.5, "large": 3.0, "smoke": 0.0}  # times as fast as SDPA


def cpu_table(result: Entry) -> str:
    stage = "forward+backward"

    def fastest(case: Entry) -> str:
        return times(ratio(*(value(case, who, stage, "fastest_ms") for who in ("sdpa", "cupy_dma"))))

    table = Table((("batch, N, heads, head dim, window", lambda case: f"{case['batch']}, {label(case)}"),
                   ("SDPA", ms("sdpa", stage)), ("all BLAS threads", ms("all BLAS threads", stage)),
                   ("cupy_dma", ms("cupy_dma", stage)),
                   ("speedup", lambda case: times(gain(("sdpa", stage), ("cupy_dma", stage))(case))),
                   ("speedup, fastest turns", fastest), ("goal", lambda case: f"≥ {times(CPU_WANTED[case['set']])}")))
    pools = ", ".join(f"{found['internal_api']} {found['num_threads']}" for found in result["thread_pools"])
    versions = result["versions"]
    return (f"{table.of(result['cases'])}\n\nMilliseconds, medians, {result['cores']} cores, threads: torch "
            f"{result['torch_threads']}, {pools}; load {result['load'][0]:.1f}; NumPy\n{versions['numpy']}, torch "
            f"{versions['torch']}, {result['date'][:10]}.")


# ---- jax ------------------------------------------------------------------------------------------------------------
def jax_table(result: Entry) -> str:
    rows, size = {row["name"]: row for row in result["rows"]}, result["size"]
    ours, theirs = rows["jax"]["ms"], rows["torch"]["ms"]
    host = (f"{rows[name]['median_us']:.0f} us" for name in ("jit(dynamic_mask_attention)", "jit(query + 1)"))
    table = markdown(["", ""], [
        [f"training step of one layer, {size['length']} tokens, {size['heads']}/{size['kv_heads']} heads, D "
         f"{size['head_dim']}, w {size['window']}: jax", f"{ours:.2f} ms"],
        ["the same in torch", f"{theirs:.2f} ms ({ours / theirs:.2f} times)"],
        ["host time of a warm jitted call, 256 tokens", next(host)], ["the same for `jit(query + 1)`", next(host)]])
    return (f"{table.replace('|  |  |', '| | |', 1)}\n\nbfloat16, medians, one {result['device']}, jax "
            f"{result['jax']}, torch {result['versions'].get('torch')}, {result['date'][:10]}; "
            f"`python -m benchmarks jax_steps`.")


# ---- transformers ---------------------------------------------------------------------------------------------------
def transformers_table(result: Entry) -> str:
    def cell(row: Entry | None) -> str:
        return NONE if row is None else milliseconds(row["ms"]) if row["ms"] else row["note"]

    found = []
    for (part, n), peers in by_peer(result, "part", "length").items():
        for name in ("cupy_dma", "cupy_dma graph")[:2 if part == "decode" else 1]:
            own, *others = rows = [peers.get(peer) for peer in (name, "sdpa", "eager")]
            found.append([part + " (CUDA graph)" * name.endswith("graph"), str(n), *map(cell, rows),
                          *(times(ratio(other and other["ms"], own and own["ms"])) for other in others),
                          *(mebibytes((row or {}).get("cache_bytes" if part == "decode" else "peak_bytes") or None)
                            for row in rows[:2])])
    table = markdown(["", "tokens", "cupy_dma", "sdpa", "eager", "speedup over sdpa", "over eager", "memory",
                      "sdpa memory"], found).replace("|  |", "| |", 1)
    return (f"{table}\n\nMilliseconds, medians (decode: of one token; its memory is the cache's), bfloat16, on one "
            f"{result['device']}, torch {result['versions'].get('torch')}, transformers\n{result['transformers']}, "
            f"{result['date'][:10]}.")


# ---- serving --------------------------------------------------------------------------------------------------------
SERVED = {"cupy_dma": ("cupy_dma", "tab:blue"), "full": ("full attention, same scheduler", "tab:cyan"),
          "sdpa": ("sdpa, paged", "tab:red"), "flash_attention_2": ("FlashAttention 2, paged", "tab:purple"),
          "flash_attention_3": ("FlashAttention 3, paged", "tab:orange")}


def serve_table(result: Entry) -> str:
    own = next(row for row in result["rows"] if row["peer"] == "cupy_dma")

    def cell(words: Callable[[Entry], str]) -> Cell:
        return lambda row: words(row) if row["ms"] else NONE

    table = Table((
        ("", lambda row: SERVED[row["peer"]][0]), ("tokens per second", cell(
            lambda row: f"{row['tokens_per_second']:.0f}")),
        ("speedup of cupy_dma", cell(lambda row: NONE if row is own else times(
            ratio(own.get("tokens_per_second"), row["tokens_per_second"])))),
        ("time per token, p50", cell(lambda row: milliseconds(row["ms"]))),
        ("p99", cell(lambda row: milliseconds(row["p99_ms"]))),
        ("first token, p50", cell(lambda row: f"{row['first_s'][0]:.1f} s")),
        ("memory, GiB", cell(lambda row: gibibytes(row["peak_bytes"] or None))), ("", lambda row: row["note"])))
    asked, lengths = result["arguments"], result["lengths"]
    return (f"{table.of(result['rows'])}\n\nGenerated tokens; time per token in milliseconds; the most memory, model "
            f"included. {len(lengths)} requests of {lengths[0]} to {lengths[-1]} tokens, {asked['slots']} at a time, w "
            f"{asked['window']}, bfloat16. On one {machine(result, 'CUDA', 'torch')}, transformers "
            f"{result['transformers']}. {WHERE}, `python -m benchmarks serve`.")


def serve_panels(result: Entry) -> list[Panel]:
    """Generated tokens and memory over time."""
    return [lines(title, (Line([(at, x / unit) for at, x in row[field]], *SERVED[row["peer"]], marker="")
                          for row in result["rows"] if row["ms"]), "seconds", "", logarithmic="",
                  more=lambda ax: ax.set_ylim(bottom=0))
            for title, field, unit in (("thousands of generated tokens", "said", 1e3),
                                       ("allocated memory, GiB", "memory", 2**30))]


# ---- all ------------------------------------------------------------------------------------------------------------
def of_table(name: str, record: str, page: str, table: Callable[[Entry], str], mark: str = "", **more: Any) -> Report:
    return Report(name, record, (Piece(mark or name, page, table),), **{"text": table, **more})


REPORTS = (
    Report("training", "training.json", (Piece("training", "docs/training.md", training_table),
                                         Piece("training-summary", "README.md", training_summary)),
           text=training_table, title=lambda result: f"Training steps, bfloat16, {result['device']}",
           panels=training_panels, across=2),
    of_table("context_parallel", "context_parallel_*.json", "docs/distributed.md", ranks_table),
    of_table("cpu", "cpu_performance.json", "docs/lab/numpy.md", cpu_table),
    of_table("jax_steps", "jax_steps.json", "docs/jax.md", jax_table, "jax"),
    of_table("transformers_models", "transformers_models.json", "docs/transformers.md", transformers_table,
             "transformers"),
    of_table("serve", "serve.json", "docs/serving.md", serve_table, panels=serve_panels, across=2,
             title=lambda result: f"Continuous batching, {len(result['lengths'])} requests, {result['device']}"))
