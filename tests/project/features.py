"""Writes which function runs on which backend, forward and backward, from the tests' marks.

    @pytest.mark.feature("cuda numpy forward backward", "torch", "autograd")    backends and directions; group; rows

``python -m tests.project.features`` writes docs/features.md; ``test_features.py`` compares the two. The start of a
row's name selects all rows that begin with it. ``case="..."`` is the start of the test's case names, in which
``{backend}`` is the backend and ``{case}`` the text beside the row in ``ROWS``. ``EVERY`` means all rows with such a
case, except those whose case contains a word of ``but``. Marks are read from the sources, so no test's packages need be
installed.
"""
import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "features.md"
BACKENDS, DIRECTIONS = ("cuda", "numpy", "triton", "flex"), ("forward", "backward", "")
EVERY = "every case"

ROWS: dict[str, dict[str, str]] = {
    "Scores and selection": dict.fromkeys((
        "key_scores", "IntervalMask.top_w, padding, documents", "a window per kv head",
        "masks of eviction policies, IntervalMask.from_stop"), ""),
    "attention": {
        "without a mask, causal": "heads-4/2-causal", "interval masks, key bias": "mask-", "dense masks": "mask-dense",
        "dense biases": "bias-full", "dense masks of every broadcast shape": "dense-mask-",
        "dense biases of every broadcast shape": "dense-bias-",
        "dense masks, intervals and dense bias at once": "dense-both-", "softcap, scale": "softcap-key",
        "bias_delay": "delay-", "sink_logits": "sinks-", "values of another head dim than keys": "value-dim-",
        "GQA": "heads-6/2", "any lengths, more queries than keys, 0": "lengths-", "head dims 1 to 256": "bfloat16-D",
        "float16, bfloat16": "float16-D", "float32 (`cuda`: TF32)": "float32-D",
        "float64 (`flex`: on the CPU, rejected on CUDA)": "float64-D", "any strides": "layout-",
        "keys that no query sees change nothing": "", "a NaN propagates only to queries that see its key": "",
        "bitwise reproducible (`flex`, and `cuda` on Hopper: deterministic=True)": ""},
    "dynamic_mask_attention": {"from scores or values": ""},
    "varlen and paged": dict.fromkeys((
        "varlen_attention", "varlen_dynamic_mask_attention", "float64", "block_table", "torch.compile",
        "CUDA graphs"), ""),
    "DynamicCache": dict.fromkeys((
        "extend, one token at a time", "extend, pieces of any lengths", "extend, every split of a prompt",
        "lengths, cu_seqlens", "update", "reorder, select_batch, clone, state_dict",
        "10^4 steps (`cuda`: 10^5) keep the right keys", "CUDA graphs", "stops, replayed",
        "slots, attend, commit", "8-bit rows"), ""),
    "GatedCache": {"extend, stops, replayed": "", "slots, attend, commit": "", "8-bit rows": ""},
    "torch": dict.fromkeys((
        "autograd", "torch.compile", "autocast", "CUDA graphs",
        "DynamicMaskAttention: sinks, recent, padding, documents, packed", "DynamicMaskAttention.extend",
        "DynamicMaskAttention, scores of the layer's input",
        "DynamicMaskSelfAttention", "DynamicMaskSelfAttention, with a cache", "RetentionGate"), ""),
    "distributed": {
        "context_parallel_attention, any shards, GQA": "lengths-", "sinks, recent": "kept-", "padding": "padding-",
        "documents that cross ranks": "documents-", "softcap, scale": "softcap",
        "without scores: a sliding window": "scores-none", "CUDA graphs, no host synchronization": "",
        "layers, DDP and FSDP2 on a mesh": "", "retrofit, DDP and FSDP2": "", "fill_cache, prefill": ""},
    "jax": dict.fromkeys((
        "attention: masks, biases, types", "dynamic_mask_attention under jit", "checkpoint", "vmap", "shard_map",
        "DynamicMaskAttention of flax.nnx", "key_scores", "top_w, padding, documents", "command buffers"), ""),
    "cupy_dma.flash_dmattn": {
        **{name: name for name in ("flash_dmattn_func", "flash_dmattn_qkvpacked_func", "flash_dmattn_kvpacked_func")},
        **{name + meaning: name + suffix
           for name in ("flash_dmattn_varlen_func", "flash_dmattn_varlen_qkvpacked_func",
                        "flash_dmattn_varlen_kvpacked_func")
           for meaning, suffix in ((", mask or bias with a query axis", ""), (", per key or without", "-per-key"))},
        "apply_dynamic_mask_attention": "apply_dynamic_mask_attention", "fwd": "fwd",
        "flash_dmattn_varlen_func, block_table": ""},
}

# Why "group: row direction" (alternatives: |) has no test on these backends; the first match counts. A pattern without
# * adds its row.
WHY = (
    ("Scores and selection: IntervalMask.top_w, padding, documents backward", "cuda numpy triton flex",
     "piecewise constant, has no gradient"),
    ("varlen and paged: block_table backward|cupy_dma.flash_dmattn: flash_dmattn_varlen_func, block_table backward",
     "cuda numpy triton flex", "a paged KV cache gets no gradient"),
    ("*IntervalMask.from_stop *", "numpy triton flex", "not tested; an interval mask like any other"),
    ("*: float64*", "cuda", "rejected: the tensor cores used by the kernels do not take float64"),
    ("attention: float64*", "triton", "rejected: the kernels accumulate in float32"),
    ("attention: a NaN*", "flex", "FlexAttention multiplies whole tiles: a NaN that some queries see may reach others"),
    ("varlen and paged: *|cupy_dma.*", "triton", "rejected: packed sequences are supported by `cuda` and `numpy`"),
    ("varlen and paged: *|cupy_dma.*", "flex", "rejected: FlexAttention takes sequences of equal length"),
    ("*CUDA graphs*|jax: command buffers*", "numpy", "computes on the host"),
    ("*Cache: *|torch: *.extend *|torch: *with a cache *|distributed: fill_cache*", "triton flex",
     "has no decode cache: `extend` raises NotImplementedError"),
    ("torch: CUDA graphs*", "triton flex",
     "not tested; the first call of a configuration compiles, which no capture allows"),
    ("torch: *|distributed: layers*|distributed: retrofit*", "cuda triton flex",
     "not tested; a layer calls `attention` and `key_scores`, which are"),
    ("distributed: fill_cache*", "cuda", "not tested; made of torch operations and of `top_w`, which is"),
    ("distributed: *", "triton flex", "not tested; the attention of a rank is one call of `attention`"),
    ("jax: *", "triton flex", "not tested with jax"),
)


class Tested(NamedTuple):
    """A test of a row, on a backend in a direction."""

    file: str  # below tests/
    function: str
    case: str  # start of its case names
    group: str
    row: str
    backend: str
    direction: str

    def __str__(self) -> str:
        return f"`tests/{self.file}::{self.function}{f'[{self.case}...]' if self.case else ''}`"


def marked() -> Iterator[Tested]:
    """Tests from the marks: first those that need no GPU, last those of the emulator."""
    files = sorted(TESTS.rglob("test_*.py"), key=lambda path: ("emulator" in path.parts, "gpu" in path.parts, path))
    for path in files:
        for node in ast.parse(path.read_text()).body:
            for mark in getattr(node, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.feature("):
                    given = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
                    yield from _rows_of(path.relative_to(TESTS).as_posix(), node.name,
                                        *map(ast.literal_eval, mark.args), **given)


def _rows_of(file: str, function: str, where: str, group: str, *given: str, case: str | None = None,
             but: tuple[str, ...] = ()) -> Iterator[Tested]:
    words, own = where.split(), ROWS[group]
    if given == (EVERY,):
        rows = [row for row in own if own[row] and not any(word in own[row] for word in but)]
        case = "{case}" if case is None else case
    else:
        found = {word: [word] if word in own else [row for row in own if row.startswith(word)] for word in given}
        rows = [row for one in found.values() for row in one]
        if not all(found.values()) or not {*words} <= {*BACKENDS, *DIRECTIONS}:
            raise LookupError(f"{file}::{function}: no such backend, direction or row of {group}: {words}, {given}")
    for row in rows:
        for backend in (word for word in words if word in BACKENDS):
            for direction in [word for word in words if word in DIRECTIONS] or [""]:
                yield Tested(file, function, (case or "").format(case=own[row], backend=backend), group, row,
                             backend, direction)


def cells() -> dict[tuple[str, str, str], dict[str, list[Tested] | str]]:
    """The page's cells by group, row and direction, in order: the tests on each backend, or why there is none."""
    found = list(marked())
    exact = {key for keys, *_ in WHY if "*" not in keys for key in keys.split("|")}
    table: dict[tuple[str, str, str], dict[str, list[Tested] | str]] = {}
    for group, rows in ROWS.items():
        for row in rows:
            own = [test for test in found if (test.group, test.row) == (group, row)]
            for direction in DIRECTIONS:
                key = f"{group}: {row} {direction}"
                if key in exact or any(test.direction == direction for test in own):
                    table[group, row, direction] = {
                        backend: [test for test in own if (test.backend, test.direction) == (backend, direction)]
                        or why(key, backend) for backend in BACKENDS}
    return table


def why(key: str, backend: str) -> str:
    """The reason from ``WHY``; raises LookupError if there is none."""
    for keys, backends, reason in WHY:
        if backend in backends.split() and any(fnmatchcase(key, one) for one in keys.split("|")):
            return reason
    raise LookupError(f"neither a test nor a reason: {key}, {backend}")


def page() -> str:
    """docs/features.md."""
    lines = ["# What runs where", "",
             "How many of the functions, forward and backward, are tested on each backend. A tick below is a test that",
             "compares with the float64 oracle or the exact selection, or with a backend or function that another test",
             "compares with them. Every other cell says why there is none. This page is written by",
             "`python -m tests.project.features` from the marks of the tests.", "",
             "| | " + " | ".join(BACKENDS) + " |", "|---|" + "--:|" * len(BACKENDS)]
    table = cells()
    for group in ROWS:
        rows = [row for key, row in table.items() if key[0] == group]
        ticks = (sum(not isinstance(row[backend], str) for row in rows) for backend in BACKENDS)
        lines.append(f"| {group} | {' | '.join(f'{count} of {len(rows)}' for count in ticks)} |")
    reasons = list(dict.fromkeys(cell for row in table.values() for cell in row.values() if isinstance(cell, str)))

    def shown(cell: list[Tested] | str) -> str:
        return f"– ({reasons.index(cell) + 1})" if isinstance(cell, str) else "✓"

    for group in ROWS:
        lines += _folded(group, ["| | | " + " | ".join(BACKENDS) + " |", "|---|---|" + ":-:|" * len(BACKENDS), *(
            f"| {row} | {direction} | " + " | ".join(map(shown, found.values())) + " |"
            for (own, row, direction), found in table.items() if own == group)])
    lines += _folded("Why not", [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)])
    return "\n".join(lines + _folded("The tests", [
        "Tests in `tests/gpu` need a GPU, those of `test_sm90.py` a Hopper GPU; `tests/emulator/tests` runs the same",
        "kernels on the CPU ([emulator.md](emulator.md)). Tests of `triton` run on a GPU, and some of them on the CPU,",
        "in Triton's interpreter (`test_in_the_interpreter`). Those of the drop-in and of the cache on `numpy` and",
        "`cuda` are mostly the same, run with the arrays of every library. `tests/gpu_results.json` records the last",
        "run on a GPU.", "",
        *(f"- {group}, {row}, {direction}, {backend}: {', '.join(map(str, cell))}"
          for (group, row, direction), found in table.items() for backend, cell in found.items()
          if not isinstance(cell, str))])) + "\n"


def _folded(title: str, lines: list[str]) -> list[str]:
    """A collapsible part of the page, on the site and in plain Markdown viewers."""
    return ["", '<details markdown="1">', f"<summary>{title}</summary>", "", *lines, "", "</details>"]


if __name__ == "__main__":
    PAGE.write_text(page())
