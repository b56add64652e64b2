"""Which function runs on which backend, forward and backward, and the test that stands behind each tick.

``python -m tests.project.features`` writes docs/features.md from this table; tests/project/test_features.py compares
the two and checks that every test exists and is run with the cases that are named.

A cell is a test's name, ``folder/file::function`` or ``file::function[start of a case's name]`` (several: separated by
blanks), or a sentence that says why there is no tick. Files are those of tests/, without ``test_`` and ``.py``.
"""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BACKENDS = ("cuda", "numpy", "triton", "flex")
PENDING = "filled in when this part is merged"
NO_GRADIENT = "piecewise constant, has no gradient"
NO_PAGES = "a paged KV cache gets no gradient"
ON_THE_HOST = "computes on the host"
CAPTURE = "not tested; the first call of a configuration compiles, which no capture allows"
PACKED_TRITON = "rejected: packed sequences are supported by `cuda` and `numpy`"
PACKED_FLEX = "rejected: FlexAttention takes sequences of equal length"
LAYERS = "not tested; a layer calls `attention` and `key_scores`, which are"
NO_CACHE = "has no decode cache: `extend` raises NotImplementedError"
NOT_IN_JAX = "not tested with jax"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"


class Feature(NamedTuple):
    group: str
    name: str
    direction: str  # "forward", "backward" or "" where there is no such difference
    cells: tuple[str, ...]  # in the order of BACKENDS


def is_test(cell: str) -> bool:
    return "::" in cell


def _grid(case: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The cells, forward and backward, of what the tests' grid covers."""
    return ((f"gpu/forward::test_forward_grid[{case} emulator/forward::test_forward_grid[{case}",
             f"unit/attention::test_forward_grid[{case}", f"backends/triton::test_grid[{case}",
             f"backends/flex::test_forward_grid[{case} gpu/flex::test_forward"),
            (f"gpu/backward::test_backward_grid[{case} emulator/backward::test_backward_grid[{case}",
             f"unit/backward::test_backward_grid[{case}", f"backends/triton::test_grid[{case}",
             f"backends/flex::test_backward_grid[{case} gpu/flex::test_backward"))


def _both(group: str, name: str, cells: tuple[tuple[str, ...], tuple[str, ...]],
          **other: str) -> Iterator[Feature]:
    """Two rows; ``other``: cells to replace, by backend."""
    for direction, row in zip(("forward", "backward"), cells):
        yield Feature(group, name, direction, tuple([
            other.get(f"{backend}_{direction}", other.get(backend, cell)) for backend, cell in zip(BACKENDS, row)]))


def _features() -> Iterator[Feature]:
    yield from _selection()
    yield from _attention()
    yield from _varlen()
    yield from _cache()
    yield from _torch()
    yield from _distributed()
    yield from _jax()
    yield from _drop_in()


def _selection() -> Iterator[Feature]:
    group = "Scores and selection"
    yield Feature(group, "key_scores", "forward", (
        "gpu/forward::test_key_scores emulator/forward::test_key_scores", "unit/scores::test_types",
        "backends/triton::test_key_scores",
        "backends/flex::test_scores_and_their_gradients gpu/flex::test_selection_and_scores"))
    yield Feature(group, "key_scores", "backward", (
        "gpu/backward::test_key_scores_backward emulator/backward::test_key_scores_backward",
        "unit/backward::test_key_scores_backward", "backends/triton::test_key_scores",
        "backends/flex::test_scores_and_their_gradients"))
    yield Feature(group, "IntervalMask.top_w, padding, documents", "forward", (
        "gpu/forward::test_selection_is_the_definition emulator/forward::test_selection_is_the_definition",
        "unit/selection::test_top_w_is_the_definition", "backends/triton::test_selection_is_the_definition",
        "backends/flex::test_selection gpu/flex::test_selection_and_scores"))
    yield Feature(group, "IntervalMask.top_w, padding, documents", "backward", (NO_GRADIENT,) * 4)
    yield Feature(group, "a window per kv head", "forward", (
        "emulator/forward::test_selection_is_the_definition", "unit/windows::test_masks",
        "backends/triton::test_selection_is_the_definition", "backends/flex::test_selection"))
    like_any = "not tested; an interval mask like any other"
    for direction in ("forward", "backward"):
        yield Feature(group, "masks of eviction policies, IntervalMask.from_stop", direction, (
            "emulator/eviction_masks::test_masks_from_stops",
            "project/examples::test_an_evicted_key_is_hidden_and_no_other" if direction == "forward" else like_any,
            like_any, like_any))


def _attention() -> Iterator[Feature]:
    group = "attention"
    yield from _both(group, "without a mask, causal", _grid("heads-4/2-causal"))
    yield from _both(group, "interval masks, key bias", _grid("mask-"))
    yield from _both(group, "dense masks", _grid("mask-dense"))
    yield from _both(group, "dense biases", _grid("bias-full"))
    yield from _both(group, "dense masks of every broadcast shape", _grid("dense-mask-"))
    yield from _both(group, "dense biases of every broadcast shape", _grid("dense-bias-"))
    shapes = "backends/flex::test_every_broadcast_shape[flex"
    yield from _both(group, "dense masks, intervals and dense bias at once", _grid("dense-both-"),
                     flex_forward=f"backends/flex::test_forward_grid[dense-both- {shapes}",
                     flex_backward=f"backends/flex::test_backward_grid[dense-both- {shapes}")
    yield from _both(group, "softcap, scale", _grid("softcap-key"))
    yield from _both(group, "bias_delay", _grid("delay-"),
                     cuda="gpu/bias_delay::test_the_oracles_cases emulator/bias_delay::test_attention",
                     numpy_forward="unit/bias_delay::test_forward[delay-",
                     numpy_backward="unit/bias_delay::test_backward[delay-",
                     flex_forward="backends/flex::test_forward_grid[delay-",
                     flex_backward="backends/flex::test_backward_grid[delay-")
    yield from _both(group, "sink_logits", _grid("sinks-"))
    yield from _both(group, "values of another head dim than keys", _grid("value-dim-"))
    yield from _both(group, "GQA", _grid("heads-6/2"))
    yield from _both(group, "any lengths, more queries than keys, 0", _grid("lengths-"))
    yield from _both(group, "head dims 1 to 256", _grid("bfloat16-D"))
    yield from _both(group, "float16, bfloat16", _grid("float16-D"), cuda_forward=(
        "gpu/forward::test_forward_grid[float16-D emulator/forward::test_forward_grid[float16-D "
        "gpu/sm90::test_forward_grid[float16-D"))
    yield from _both(group, "float32 (`cuda`: TF32)", _grid("float32-D"))
    yield from _both(group, "float64 (`flex`: on the CPU, rejected on CUDA)", _grid("float64-D"),
                     cuda="rejected: the tensor cores used by the kernels do not take float64",
                     triton="rejected: the kernels accumulate in float32",
                     flex_forward="backends/flex::test_forward_grid[float64-D",
                     flex_backward="backends/flex::test_backward_grid[float64-D")
    yield from _both(group, "any strides", _grid("layout-"))
    yield from _both(group, "keys that no query sees change nothing", (
        ("gpu/forward::test_a_key_nobody_sees_changes_no_bit", "unit/attention::test_a_key_nobody_sees_changes_no_bit",
         "backends/triton::test_what_nobody_sees_changes_no_bit",
         "backends/flex::test_what_nobody_sees_changes_no_bit gpu/flex::test_what_nobody_sees_changes_no_bit"),
        ("gpu/backward::test_what_nobody_sees_changes_no_bit",
         "unit/backward::test_rows_that_see_nothing_and_keys_nobody_sees_get_exact_zeros",
         "backends/triton::test_what_nobody_sees_changes_no_bit",
         "backends/flex::test_what_nobody_sees_changes_no_bit gpu/flex::test_what_nobody_sees_changes_no_bit")))
    tiles = "FlexAttention multiplies whole tiles: a NaN that some queries see may reach others"
    bad_row = "test_a_bad_row_reaches_only_the_queries_that_see_it"
    yield from _both(group, "a NaN propagates only to queries that see its key", (
        (f"gpu/forward::{bad_row} emulator/forward::{bad_row}", f"unit/attention::{bad_row}",
         f"backends/triton::{bad_row}", tiles),
        ("emulator/forward::test_a_bad_row_of_float32 "
         "emulator/backward::test_a_bad_row_reaches_no_gradient_behind_a_dense_mask",
         "unit/backward::test_a_bad_row_reaches_only_what_meets_it",
         f"backends/triton::{bad_row} backends/triton::test_a_bad_query_reaches_only_the_keys_that_it_sees", tiles)))
    triton = "backends/triton::test_the_same_bits_every_time_and_on_every_stream"
    flex = "backends/flex::test_deterministic_gradients gpu/flex::test_deterministic"
    yield from _both(group, "bitwise reproducible (`flex`, and `cuda` on Hopper: deterministic=True)", (
        ("gpu/forward::test_the_same_bits_every_time", "unit/attention::test_the_same_bits_every_time", triton, flex),
        ("gpu/backward::test_the_same_bits_every_time", "unit/backward::test_the_same_bits_every_time", triton, flex)))

    yield from _both("dynamic_mask_attention", "from scores or values", (
        ("gpu/backward::test_the_whole_chain", "unit/attention::test_dynamic_mask_attention_equals_its_steps",
         "backends/triton::test_autograd_and_the_whole_chain", "backends/flex::test_the_whole_chain"),
        ("gpu/backward::test_the_whole_chain", "unit/backward::test_dynamic_mask_attention_backward_equals_its_steps",
         "backends/triton::test_autograd_and_the_whole_chain", "backends/flex::test_the_whole_chain")))


def _varlen() -> Iterator[Feature]:
    group = "varlen and paged"

    def cells(cuda: str, numpy: str) -> tuple[str, ...]:
        return (cuda, numpy, PACKED_TRITON, PACKED_FLEX)

    yield from _both(group, "varlen_attention", (
        cells("gpu/varlen::test_forward emulator/varlen::test_forward", "unit/varlen::test_forward"),
        cells("gpu/varlen::test_backward emulator/varlen::test_backward", "unit/varlen::test_backward")))
    yield from _both(group, "varlen_dynamic_mask_attention", (
        cells("gpu/varlen::test_forward[bfloat16-top_w emulator/varlen::test_forward[bfloat16-top_w",
              "unit/varlen::test_forward[bfloat16-top_w"),
        cells("gpu/varlen::test_long_sequences_are_as_calls_of_their_own",
              "unit/varlen::test_gradients_are_derivatives")))
    yield from _both(group, "float64", (
        cells("", "unit/varlen::test_forward[float64-"), cells("", "unit/varlen::test_backward[float64-")),
        cuda="rejected: the tensor cores used by the kernels do not take float64")
    yield Feature(group, "block_table", "forward", cells(
        "gpu/varlen::test_forward[pages- emulator/varlen::test_forward[pages-", "unit/varlen::test_forward[pages-"))
    yield Feature(group, "block_table", "backward", (NO_PAGES,) * 4)
    yield from _both(group, "torch.compile", (
        cells("gpu/varlen::test_compile_in_one_graph", "unit/varlen::test_compile_in_one_graph"),) * 2)
    yield Feature(group, "CUDA graphs", "forward", cells("gpu/varlen::test_a_graph_takes_other_lengths", ON_THE_HOST))


def _cache() -> Iterator[Feature]:
    for name, cuda, numpy in (
            ("extend, one token at a time", "", "step_by_step"),
            ("extend, pieces of any lengths", "emulator/cache::test_chunks", "against_the_oracle"),
            ("extend, every split of a prompt", "unit/cache::test_against_the_oracle", "every_split_equals_one_shot"),
            ("lengths, cu_seqlens", "emulator/cache::test_packed_chunks", "sequences_of_different_lengths"),
            ("update", "", "update_is_extend_without_queries"),
            ("reorder, select_batch, clone, state_dict", "", "reorder_select_clone_save_in_the_middle"),
            ("10^4 steps (`cuda`: 10^5) keep the right keys",
             "gpu/cache::test_the_kept_set_does_not_drift_in_100000_steps", "the_kept_set_does_not_drift"),
            ("CUDA graphs", "gpu/cache::test_torch_graph_replay_equals_eager "
                            "gpu/cache::test_the_first_step_is_captured_by_cupy", "")):
        test = f"unit/cache::test_{numpy}"
        on_gpu = cuda if "gpu/" in cuda or "oracle" in cuda else f"{test} {cuda}".strip()
        yield Feature("DynamicCache", name, "forward", (on_gpu, test if numpy else ON_THE_HOST, NO_CACHE, NO_CACHE))
    test = "unit/gated_cache::test_against_the_mask_written_out"
    yield Feature("GatedCache", "extend, stops, replayed", "forward", (
        f"{test} emulator/cache::test_gates", f"{test} unit/gated_cache::test_any_appends_batches_and_bounds",
        NO_CACHE, NO_CACHE))
    test = "unit/stops::test_stops_are_what_was_seen"
    yield Feature("DynamicCache", "stops, replayed", "forward", (test, test, NO_CACHE, NO_CACHE))


def _torch() -> Iterator[Feature]:
    group = "torch"
    flex = "backends/flex::test_torch_gradients gpu/flex::test_autograd_and_compile"
    yield from _both(group, "autograd", ((
        "gpu/torch::test_autograd_has_the_bits_of_the_manual_functions",
        "torch/torch::test_autograd_has_the_bits_of_the_manual_functions",
        "backends/triton::test_autograd_and_the_whole_chain",
        flex),) * 2)
    yield from _both(group, "torch.compile", ((
        "gpu/torch::test_compiled_and_eager_training_agree", "torch/compile::test_compile_in_one_graph",
        "backends/triton::test_compile_and_autocast", flex),) * 2)
    yield Feature(group, "autocast", "forward", (
        "gpu/torch::test_autocast", "torch/compile::test_autocast", "backends/triton::test_compile_and_autocast",
        "backends/flex::test_torch_gradients"))
    yield from _both(group, "CUDA graphs", (
        ("gpu/forward::test_torch_cuda_graph", ON_THE_HOST, CAPTURE, CAPTURE),
        ("gpu/torch::test_a_cuda_graph_of_forward_and_backward", ON_THE_HOST, CAPTURE, CAPTURE)))
    core, whole = "test_what_the_kernels_are_tested_with", "test_decoding_is_forward"
    yield from _both(group, "DynamicMaskAttention: sinks, recent, padding, documents, packed", (
        (f"gpu/torch::{core} emulator/layers::test_the_core", f"torch/module::{core}", LAYERS, LAYERS),) * 2)
    yield Feature(group, "DynamicMaskAttention.extend", "forward", (
        f"gpu/torch::{core} emulator/layers::test_the_core", "torch/module::test_extend_is_forward", NO_CACHE,
        NO_CACHE))
    yield Feature(group, "DynamicMaskSelfAttention", "forward", (
        f"gpu/torch::{whole}", "torch/self_attention::test_forward_and_gradients_are_the_definition", LAYERS, LAYERS))
    yield Feature(group, "DynamicMaskSelfAttention", "backward", (
        LAYERS, "torch/self_attention::test_forward_and_gradients_are_the_definition", LAYERS, LAYERS))
    yield Feature(group, "DynamicMaskSelfAttention, with a cache", "forward", (
        f"gpu/torch::{whole}", f"torch/self_attention::{whole}", NO_CACHE, NO_CACHE))
    gates = "torch/gate::test_attention_and_gradients"
    yield from _both(group, "RetentionGate", ((LAYERS, gates, LAYERS, LAYERS),) * 2)


def _distributed() -> Iterator[Feature]:
    group, file = "distributed", "distributed/attention::test_is_the_oracle"
    elsewhere = "not tested; the attention of a rank is one call of `attention`"
    for name, case in (("context_parallel_attention, any shards, GQA", "lengths-"), ("sinks, recent", "kept-"),
                       ("padding", "padding-"), ("documents that cross ranks", "documents-"),
                       ("softcap, scale", "softcap"), ("without scores: a sliding window", "scores-none")):
        gpu = f"gpu/distributed::test_is_the_oracle[{case}"
        if case in ("padding-", "kept-", "documents-"):
            gpu += " emulator/distributed::test_the_last_rank"
        yield from _both(group, name, ((gpu, f"{file}[{case}", elsewhere, elsewhere),) * 2)
    yield from _both(group, "CUDA graphs, no host synchronization", (
        ("gpu/distributed::test_the_host_does_not_wait_and_graphs_capture", ON_THE_HOST, elsewhere, elsewhere),) * 2)
    yield from _both(group, "layers, DDP and FSDP2 on a mesh", (
        (LAYERS, "distributed/layers::test_training distributed/layers::test_on_a_mesh_of_data_and_sequences", LAYERS,
         LAYERS),) * 2)
    yield Feature(group, "fill_cache, prefill", "forward", (
        "not tested; made of torch operations and of `top_w`, which is",
        "distributed/sequence::test_a_cache_of_shards_is_that_of_the_whole "
        "distributed/layers::test_decoding_after_a_sharded_prompt", NO_CACHE, NO_CACHE))


def _jax() -> Iterator[Feature]:
    group = "jax"
    same = "jax/functions::test_jit_is_eager_and_numpy["
    for name, cuda, numpy in (
            ("attention: masks, biases, types", "gpu/jax::test_grid", "jax/functions::test_grid"),
            ("dynamic_mask_attention under jit", "gpu/jax::test_jit_is_eager_and_checkpoint",
             f"{same}scores {same}recipe"),
            ("checkpoint", "gpu/jax::test_jit_is_eager_and_checkpoint", "jax/transforms::test_checkpoint"),
            ("vmap", "gpu/jax::test_vmap_scan_and_donation", "jax/transforms::test_vmap"),
            ("shard_map", "gpu/jax::test_shard_map_over_all_gpus", "jax/transforms::test_shard_map"),
            ("DynamicMaskAttention of flax.nnx", "gpu/jax::test_the_layer_trains",
             "jax/layer::test_the_layer_is_the_function jax/layer::test_it_trains_under_jit")):
        for direction in ("forward", "backward"):
            yield Feature(group, name, direction, (cuda, numpy, NOT_IN_JAX, NOT_IN_JAX))
    scores = "jax/functions::test_scores_and_their_gradients_are_the_definition"
    for direction in ("forward", "backward"):
        yield Feature(group, "key_scores", direction, (
            "gpu/jax::test_jit_is_eager_and_checkpoint", scores, NOT_IN_JAX, NOT_IN_JAX))
    yield Feature(group, "top_w, padding, documents", "forward", (
        "gpu/jax::test_selection_is_the_definition", "jax/functions::test_selection_is_the_definition",
        NOT_IN_JAX, NOT_IN_JAX))
    yield Feature(group, "command buffers", "", (
        "gpu/jax::test_command_buffers", ON_THE_HOST, NOT_IN_JAX, NOT_IN_JAX))


def _drop_in() -> Iterator[Feature]:
    """For every function the tests against the oracle: forward (any library, also on CUDA), and backward (on NumPy)."""
    every = "flash_dmattn/backends::test_on_the_cpu[numpy-"
    packed, varlen = "flash_dmattn/functions::test_packed", "flash_dmattn/varlen::test_every_shape_of_mask_and_bias"
    varlen_packed, varlen_gradients = "flash_dmattn/varlen::test_packed", "flash_dmattn/varlen::test_gradients"
    for name, forward, backward in (
            ("flash_dmattn_func", "flash_dmattn/functions::test_every_broadcast_shape",
             "flash_dmattn/functions::test_gradients_are_those_of_attention"),
            ("flash_dmattn_qkvpacked_func", packed,
             "flash_dmattn/functions::test_packed_gradients_go_to_the_packed_array"),
            ("flash_dmattn_kvpacked_func", packed, f"{every}flash_dmattn_kvpacked_func"),
            ("flash_dmattn_varlen_func", varlen, varlen_gradients),
            ("flash_dmattn_varlen_qkvpacked_func", varlen_packed, f"{every}flash_dmattn_varlen_qkvpacked_func"),
            ("flash_dmattn_varlen_kvpacked_func", varlen_packed, f"{every}flash_dmattn_varlen_kvpacked_func"),
            ("apply_dynamic_mask_attention", "flash_dmattn/masks::test_apply_dynamic_mask_attention",
             "flash_dmattn/masks::test_apply_dynamic_mask_attention_has_gradients"),
            ("fwd", "flash_dmattn/masks::test_fwd", f"{every}fwd")):
        for suffix, meaning in (("", ", mask or bias with a query axis"), ("-per-key", ", per key or without")) if (
                "varlen" in name) else (("", ""),):
            cuda, triton, flex = (f"flash_dmattn/backends::test_on_a_gpu[{backend}-{name}{suffix}"
                                  for backend in ("cuda", "triton", "flex"))
            flex = f"flash_dmattn/backends::test_on_the_cpu[flex-{name} {flex}"
            if suffix:
                triton, flex = PACKED_TRITON, PACKED_FLEX
            yield from _both("cupy_dma.flash_dmattn", name + meaning, (
                (f"{forward} {cuda}", forward, triton, flex), (cuda, backward, triton, flex)))
    yield Feature("cupy_dma.flash_dmattn", "flash_dmattn_varlen_func, block_table", "forward", (
        "flash_dmattn/varlen::test_paged_kv_cache",) * 2 + (PACKED_TRITON, PACKED_FLEX))
    yield Feature("cupy_dma.flash_dmattn", "flash_dmattn_varlen_func, block_table", "backward", (NO_PAGES,) * 4)


FEATURES = tuple(_features())


def page() -> str:
    """docs/features.md."""
    lines = ["# What runs where", "",
             "How many of the functions, forward and backward, are tested on each backend. A tick below is a test that",
             "compares with the float64 oracle or the exact selection, or with a backend or function that another test",
             "compares with them. Every other cell says why there is none. This page is written by",
             "`python -m tests.project.features` from `tests/project/features.py`.", "",
             "| | " + " | ".join(BACKENDS) + " |", "|---|" + "--:|" * len(BACKENDS)]
    groups = list(dict.fromkeys(feature.group for feature in FEATURES))
    for group in groups:
        rows = [feature.cells for feature in FEATURES if feature.group == group]
        tested = (f"{sum(map(is_test, column))} of {len(rows)}" for column in zip(*rows))
        lines.append(f"| {group} | {' | '.join(tested)} |")
    reasons: list[str] = []

    def shown(cell: str) -> str:
        if is_test(cell):
            return "✓"
        if cell not in reasons:
            reasons.append(cell)
        return f"– ({reasons.index(cell) + 1})"

    for group in groups:
        lines += _folded(group, ["| | | " + " | ".join(BACKENDS) + " |", "|---|---|" + ":-:|" * len(BACKENDS), *(
            f"| {feature.name} | {feature.direction} | " + " | ".join(map(shown, feature.cells)) + " |"
            for feature in FEATURES if feature.group == group)])
    lines += _folded("Why not", [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)])
    tests = [
        "Tests in `tests/gpu` need a GPU, those of `test_sm90.py` a Hopper GPU; `tests/emulator/tests` runs the same",
        "kernels on the CPU ([emulator.md](emulator.md)). Tests of `triton` run on a GPU, and some of them on the CPU,",
        "in Triton's interpreter (`test_in_the_interpreter`). Those of the drop-in and of the cache on `numpy` and",
        "`cuda` are mostly the same, run with the arrays of every library. `tests/gpu_results.json` records the last",
        "run on a GPU.", ""]
    for feature in FEATURES:
        for backend, cell in zip(BACKENDS, feature.cells):
            if is_test(cell):
                names = ", ".join(f"`{name}{']' if '[' in name else ''}`" for name in map(full_name, cell.split()))
                tests.append(f"- {feature.group}, {feature.name}, {feature.direction}, {backend}: {names}")
    return "\n".join(lines + _folded("The tests", tests)) + "\n"


def _folded(title: str, lines: list[str]) -> list[str]:
    """A part of the page to unfold, on the site and where Markdown is shown as it is."""
    return ["", '<details markdown="1">', f"<summary>{title}</summary>", "", *lines, "", "</details>"]


def full_name(name: str) -> str:
    """``tests/test_file.py::function[...``."""
    file, function = name.split("::")
    return f"{module_of(file).replace('.', '/')}.py::{function}{'...' if '[' in function else ''}"


def module_of(file: str) -> str:
    """``tests.folder.test_file`` of ``folder/file``; the emulator's tests are beside its device."""
    folder, name = file.split("/")
    return f"tests.{'emulator.tests' if folder == 'emulator' else folder}.test_{name}"


if __name__ == "__main__":
    PAGE.write_text(page())
