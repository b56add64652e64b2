"""Marks tests that only ``make test-all`` runs as ``slow``, and those of them that only ``make test-rare`` runs also as
``rare``.

``make test`` must find in minutes what a change breaks. Most of the time goes into compiling kernels, for the emulator
with g++ and for GPUs with NVRTC. It therefore runs only a share of the long grids over kernels: for each test function,
the cases with the smallest checksums of their names, the same on every machine. Tests whose cases cover different
things mark single cases with ``pytest.mark.slow``. Mutations run for kernel files that differ from the last commit
(``CUPY_DMA_BASE`` names another), and for files that include them; generated mutants for the files alone. The
emulator's tests of single properties (``OF_KERNELS``) run only if kernels or the CUDA backend differ from that commit.

``make test-all`` should take about an hour on two cores, so it also runs only a share of the largest grids. ``make
test-gpu`` runs all their cases on a GPU; ``make test-rare`` runs the rest on a CPU, for changes of kernels.
``CUPY_DMA_SLOW_SHARE=2/4`` runs the second quarter of the slow tests: continuous integration takes the next quarter
with each commit.
"""
import functools
import itertools
import math
import os
import re
import subprocess
import zlib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

FAULTS = "tests/emulator/mutations/test_mutations.py::test_faults_are_caught"
GENERATED = "tests/emulator/mutations/test_generated.py::test_generated_mutants_are_caught"
# Node id without parameters -> n: make test runs one of n cases (at least one of each function; None: no case). The
# first matching pattern counts.
SHARES: dict[str, int | None] = {
    "tests/emulator/mutations/*::test_sound_kernels_pass": None,  # 5 to 20 s each
    FAULTS: None,  # see above
    GENERATED: None,
    "tests/emulator/mutations/test_generated.py::*": 1,
    "tests/emulator/tests/test_faults.py::*": 2,
    "tests/emulator/tests/test_sm90.py::*every_length*": None,  # 10 to 40 s each
    "tests/emulator/tests/test_sm90.py::*follow_each_other*": None,
    "tests/emulator/tests/test_sm90.py::*finite*": None,
    "tests/emulator/tests/test_sm90_backward.py::test_steps_of_dense_masks": None,
    "tests/emulator/tests/test_sm90_backward.py::test_tiles_in_bands": None,
    "tests/emulator/tests/test_forward.py::test_short_tiles_cover_all_queries": None,
    "tests/emulator/tests/test_residues.py::*": 1,
    "tests/emulator/tests/test_strides_and_reuse.py::*strides*": 1,
    "tests/emulator/tests/test_decode.py::test_more_splits_than_are_combined_at_a_time": 1,
    "tests/emulator/*": 10,
    "tests/project/test_examples.py::test_training_on_a_text_of_ones_own": None,
    "tests/project/test_benchmark_routines.py::test_training_of_every_peer_in_every_mode": None,
    "tests/project/test_benchmark_routines.py::test_a_wrong_loss_is_noticed": None,
    "tests/project/test_benchmark_tuning.py::test_each_way_is_the_one_that_calls_take": None,
    "tests/transformers/test_generation.py::test_the_same_tokens*": 3,
    "tests/transformers/test_gates.py::test_cached_is_uncached": 3,
    "tests/unit/test_bias_delay.py::test_*ward": 3,
    "tests/unit/test_attention.py::test_backward_grid": 2,
    "tests/backends/test_flex.py::test_traced_path": 3,
    "tests/project/test_precompile.py::test_the_grids_reach_every_kernel": None,
    "tests/backends/test_flex.py::test_*_grid": 3,
}

OF_KERNELS = tuple(f"tests/emulator/tests/test_{name}.py::*" for name in (
    "bias_delay", "call_keys", "documents", "hidden_keys", "lifetimes", "numerics", "residues", "scales",
    "several_tokens", "sm90", "sm90_backward", "sm90_stored", "strides_and_reuse"))

# The same for ``make test-all``.
SHARES_OF_ALL: dict[str, int | None] = {
    GENERATED: 4,
    "tests/emulator/tests/test_*ward.py::test_*_grid": 2,
    "tests/emulator/tests/test_*ward.py::test_tiles_of_smaller_gpus": 2,
    "tests/emulator/tests/test_forward.py::test_selection_in_both_ways": 2,
    "tests/emulator/tests/test_varlen.py::test_*ward": 2,
    "tests/emulator/tests/test_numerics.py::*low_biases*": 2,
    "tests/emulator/tests/test_numerics.py::test_softcaps_of_any_size": 2,
    "tests/emulator/tests/test_scales.py::test_forward_and_backward": 2,
    "tests/emulator/tests/test_bias_delay.py::test_more*": 2,
    "tests/emulator/tests/test_lifetimes.py::test_gradients_of_other_lengths": 2,
    "tests/backends/test_flex.py::test_*_grid": 2,
    "tests/jax/test_functions.py::test_grid": 2,
}


KERNELS = Path(__file__).resolve().parents[1] / "kernels"
CUDA = KERNELS.parent / "cupy_dma" / "backends" / "cuda"


def changed_files(folder: Path) -> set[str]:
    """Files of a folder that have changed; none without git."""
    command = ["git", "diff", "--name-only", "--relative", os.environ.get("CUPY_DMA_BASE", "HEAD"), "--", "."]
    try:
        return set(subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.split())
    except OSError:
        return set()


@functools.cache
def changed_kernels() -> set[str]:
    """Files of ``kernels/`` that have changed, and those that include them."""
    return including(changed_files(KERNELS), {path.relative_to(KERNELS).as_posix(): path.read_text()
                                              for path in KERNELS.rglob("*.cu*")})


def including(changed: set[str], texts: dict[str, str]) -> set[str]:
    """The files, and all files that include one of them, directly or indirectly."""
    includes = {name: set(re.findall(r'#include "([^"]+)"', text)) for name, text in texts.items()}
    while more := {name for name, others in includes.items() if others & changed} - changed:
        changed = changed | more
    return changed


def in_share(nodeid: str, share: str) -> bool:
    """Whether a test belongs to this share, such as ``2/4``, of all."""
    part, count = map(int, share.split("/"))
    if not 1 <= part <= count:
        raise pytest.UsageError(f"CUPY_DMA_SLOW_SHARE must be i/n with 1 <= i <= n, got {share}")
    return zlib.crc32(f"share {nodeid}".encode()) % count == part - 1


def mark(items: list[pytest.Item]) -> None:
    def function(item: pytest.Item) -> str:
        return item.nodeid.partition("[")[0]

    faults = [item for item in items if function(item) == FAULTS]
    chosen = {item for item in faults if item.callspec.params["fault"].file in changed_kernels()}
    changed = changed_files(KERNELS)
    chosen |= {item for item in items
               if function(item) == GENERATED and item.callspec.params["mutant"].file in changed}
    if not changed and not changed_files(CUDA):
        for item in items:
            if any(fnmatchcase(item.nodeid, pattern) for pattern in OF_KERNELS):
                item.add_marker(pytest.mark.slow)

    for name, cases in itertools.groupby(sorted(items, key=function), function):
        ordered = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
        for shares, marker in ((SHARES, pytest.mark.slow), (SHARES_OF_ALL, pytest.mark.rare)):
            share = next((share for pattern, share in shares.items() if fnmatchcase(name, pattern)), 1)
            kept = 0 if share is None else math.ceil(len(ordered) / share)
            for item in ordered[kept:]:
                if item not in chosen:
                    item.add_marker(marker)

    share = os.environ.get("CUPY_DMA_SLOW_SHARE")
    for item in items:
        if share and item.get_closest_marker("slow") and not in_share(item.nodeid, share):
            item.add_marker(pytest.mark.rare)
