"""Which function runs on which backend, forward and backward, and the test that stands behind each tick.

``python -m tests.features`` writes docs/features.md from this table; tests/test_features.py compares the two and checks
that every test exists and is run with the cases that are named.

A cell is a test's name, ``file::function`` or ``file::function[start of a case's name]`` (several: separated by
blanks), or a sentence that says why there is no tick. Files are those of tests/, without ``test_`` and ``.py``.
"""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BACKENDS = ("cuda", "numpy", "triton", "flex")
PENDING = "filled in when this part is merged"
NO_GRADIENT = "piecewise constant, has no gradient"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "features.md"


class Feature(NamedTuple):
    group: str
    name: str
    direction: str  # "forward", "backward" or "" where there is no such difference
    cells: tuple[str, ...]  # in the order of BACKENDS


def is_test(cell: str) -> bool:
    return "::" in cell


def _grid(case: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The cells, forward and backward, of what the tests' grid covers."""
    return ((f"cuda::test_forward_grid[{case}", f"attention::test_forward_grid[{case}", PENDING,
             f"flex::test_forward_grid[{case} flex_cuda::test_forward"),
            (f"cuda_backward::test_backward_grid[{case}", f"backward::test_backward_grid[{case}", PENDING,
             f"flex::test_backward_grid[{case} flex_cuda::test_backward"))


def _both(group: str, name: str, cells: tuple[tuple[str, ...], tuple[str, ...]],
          **other: str) -> Iterator[Feature]:
    """Two rows; ``other``: cells to replace, by backend."""
    for direction, row in zip(("forward", "backward"), cells):
        yield Feature(group, name, direction, tuple([
            other.get(f"{backend}_{direction}", other.get(backend, cell)) for backend, cell in zip(BACKENDS, row)]))


def _features() -> Iterator[Feature]:
    group = "Scores and selection"
    yield Feature(group, "key_scores", "forward", (
        "cuda::test_key_scores", "scores::test_types", PENDING, "flex::test_scores_and_their_gradients"))
    yield Feature(group, "key_scores", "backward", (
        "cuda_backward::test_key_scores_backward", "backward::test_key_scores_backward", PENDING,
        "flex::test_scores_and_their_gradients"))
    yield Feature(group, "IntervalMask.top_w, padding, documents", "forward", (
        "cuda::test_selection_is_the_definition", "selection::test_top_w_is_the_definition", PENDING,
        "flex::test_selection flex_cuda::test_selection_and_scores"))
    yield Feature(group, "IntervalMask.top_w, padding, documents", "backward", (NO_GRADIENT,) * 4)

    group = "attention"
    yield from _both(group, "without a mask, causal", _grid("heads-4/2-causal"))
    yield from _both(group, "interval masks, key bias", _grid("mask-"))
    yield from _both(group, "dense masks", _grid("mask-dense"), cuda=PENDING)
    yield from _both(group, "dense biases", _grid("bias-full"), cuda=PENDING)
    yield from _both(group, "dense mask, intervals and dense bias at once", (
        (PENDING, "flex::test_every_broadcast_shape[numpy", PENDING, "flex::test_every_broadcast_shape[flex"),) * 2)
    yield from _both(group, "softcap, scale", _grid("softcap-key"))
    yield from _both(group, "grouped heads", _grid("heads-6/2"))
    yield from _both(group, "any lengths, more queries than keys, 0", _grid("lengths-"))
    yield from _both(group, "head dims 1 to 256", _grid("bfloat16-D"))
    yield from _both(group, "float16, bfloat16", _grid("float16-D"))
    yield from _both(group, "float32", _grid("float32-D"), cuda=PENDING)
    yield from _both(group, "float64", _grid("float64-D"), cuda="refused: the tensor cores take no float64",
                     triton="refused: the kernels accumulate in float32",
                     flex_forward="flex::test_forward_grid[float64-D",
                     flex_backward="flex::test_backward_grid[float64-D")
    yield from _both(group, "any strides", _grid("layout-"))
    yield from _both(group, "what nobody sees changes nothing", (
        ("cuda::test_a_key_nobody_sees_changes_no_bit", "attention::test_a_key_nobody_sees_changes_no_bit", PENDING,
         "flex::test_what_nobody_sees_changes_no_bit flex_cuda::test_what_nobody_sees_changes_no_bit"),
        ("cuda_backward::test_what_nobody_sees_changes_no_bit",
         "backward::test_rows_that_see_nothing_and_keys_nobody_sees_get_exact_zeros", PENDING,
         "flex::test_what_nobody_sees_changes_no_bit flex_cuda::test_what_nobody_sees_changes_no_bit")))
    tiles = "FlexAttention multiplies whole tiles: a NaN that some queries see may reach others"
    yield from _both(group, "a NaN reaches only those who see it", (
        ("cuda::test_a_bad_row_reaches_only_the_queries_that_see_it",
         "attention::test_a_bad_row_reaches_only_the_queries_that_see_it", PENDING, tiles),
        ("cuda_backward::test_what_nobody_sees_changes_no_bit", "backward::test_a_bad_row_reaches_only_what_meets_it",
         PENDING, tiles)))
    yield from _both(group, "the same bits every time", (
        ("cuda::test_the_same_bits_every_time", "attention::test_the_same_bits_every_time", PENDING,
         "flex::test_deterministic_gradients flex_cuda::test_deterministic"),
        ("cuda_backward::test_the_same_bits_every_time", "backward::test_the_same_bits_every_time", PENDING,
         "flex::test_deterministic_gradients flex_cuda::test_deterministic")))

    group = "dynamic_mask_attention"
    yield from _both(group, "from scores or values", (
        ("cuda_backward::test_the_whole_chain", "attention::test_dynamic_mask_attention_is_its_parts", PENDING,
         "flex::test_the_whole_chain"),
        ("cuda_backward::test_the_whole_chain", "backward::test_dynamic_mask_attention_backward_is_its_parts", PENDING,
         "flex::test_the_whole_chain")))

    group = "varlen and paged"
    refused = "refused: FlexAttention takes equally long sequences"
    for name in ("varlen_attention", "varlen_dynamic_mask_attention"):
        yield from _both(group, name, ((PENDING,) * 4,) * 2, flex=refused)
    yield Feature(group, "block_table", "forward", (PENDING, PENDING, PENDING, refused))
    yield Feature(group, "block_table", "backward", ("there is no gradient through pages",) * 4)

    group = "torch"
    yield from _both(group, "autograd", ((
        "torch_cuda::test_autograd_has_the_bits_of_the_manual_functions",
        "torch::test_autograd_has_the_bits_of_the_manual_functions", PENDING,
        "flex::test_torch_gradients flex_cuda::test_autograd_and_compile"),) * 2)
    yield from _both(group, "torch.compile", ((
        "torch_cuda::test_compiled_and_eager_training_agree", "torch_compile::test_compile_in_one_graph", PENDING,
        "flex::test_torch_gradients flex_cuda::test_autograd_and_compile"),) * 2)
    yield Feature(group, "autocast", "forward", ("torch_cuda::test_autocast", "torch_compile::test_autocast", PENDING,
                                                 "flex::test_torch_gradients"))
    yield from _both(group, "CUDA graphs", (
        ("cuda::test_torch_cuda_graph", "computes on the host", PENDING,
         "not tested; the first call of a configuration compiles, which no capture allows"),
        ("torch_cuda::test_a_cuda_graph_of_forward_and_backward", "computes on the host", PENDING,
         "not tested; the first call of a configuration compiles, which no capture allows")))

    group = "cupy_dma.flash_dmattn"
    for name in ("flash_dmattn_func", "flash_dmattn_qkvpacked_func", "flash_dmattn_kvpacked_func",
                 "flash_dmattn_varlen_func", "flash_dmattn_varlen_qkvpacked_func", "flash_dmattn_varlen_kvpacked_func",
                 "apply_dynamic_mask_attention", "fwd"):
        cells = (PENDING, PENDING, PENDING, refused if "varlen" in name else PENDING)
        yield from _both(group, name, (cells, cells))


FEATURES = tuple(_features())


def page() -> str:
    """docs/features.md."""
    lines = ["# What runs where", "",
             "A tick is a test that compares this function, backend and direction with the float64 oracle or the exact",
             "selection; the list below names it. Every other cell says why there is none. This page is written by",
             "`python -m tests.features` from `tests/features.py`, and `tests/test_features.py` checks it."]
    reasons: list[str] = []

    def shown(cell: str) -> str:
        if is_test(cell):
            return "✓"
        if cell not in reasons:
            reasons.append(cell)
        return f"– ({reasons.index(cell) + 1})"

    group = None
    for feature in FEATURES:
        if feature.group != group:
            group = feature.group
            lines += ["", f"## {group}", "", "| | | " + " | ".join(BACKENDS) + " |",
                      "|---|---|" + ":-:|" * len(BACKENDS)]
        lines.append(f"| {feature.name} | {feature.direction} | " + " | ".join(map(shown, feature.cells)) + " |")
    lines += ["", "## Why not", "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), "",
              "## The tests", "", "Tests of `cuda` and those in files that end in `_cuda.py` need a GPU;",
              "`tests/gpu_results.json` records their last run.", ""]
    for feature in FEATURES:
        for backend, cell in zip(BACKENDS, feature.cells):
            if is_test(cell):
                names = ", ".join(f"`{name}{']' if '[' in name else ''}`" for name in map(full_name, cell.split()))
                lines.append(f"- {feature.group}, {feature.name}, {feature.direction}, {backend}: {names}")
    return "\n".join(lines) + "\n"


def full_name(name: str) -> str:
    """``tests/test_file.py::function[...``."""
    file, function = name.split("::")
    return f"tests/test_{file}.py::{function}{'...' if '[' in function else ''}"


if __name__ == "__main__":
    PAGE.write_text(page())
