"""Which tests ``make test`` leaves to ``make test-all``: they get the marker ``slow``.

``make test`` has to find in minutes what a change breaks. Most of the time goes into compiling kernels, for the
emulator with g++ and for GPUs with NVRTC, so of the long grids over kernels it runs a fixed choice, the same on every
machine: a share of the cases of each test function, those with the smallest checksums of their names. Tests whose
cases differ in what they look at choose for themselves, with ``pytest.mark.slow`` beside the case.
"""
from __future__ import annotations

import itertools
import math
import zlib
from fnmatch import fnmatchcase

import pytest

# Node id without parameters -> of how many cases make test runs one (at least one of each function; None: no case).
# The first pattern that fits counts.
SHARES: dict[str, int | None] = {
    "tests/emulator/mutations/*::test_sound_kernels_pass": 10,
    "tests/emulator/mutations/*": 8,
    "tests/emulator/tests/test_faults.py::*": 2,
    "tests/emulator/tests/test_sm90.py::*every_length*": None,  # 10 to 40 s each
    "tests/emulator/tests/test_sm90.py::*follow_each_other*": None,
    "tests/emulator/tests/test_sm90.py::*finite*": None,
    "tests/emulator/tests/test_sm90_backward.py::test_steps_of_dense_masks": None,
    "tests/emulator/tests/test_residues.py::*": 1,
    "tests/emulator/tests/test_strides_and_reuse.py::*strides*": 1,
    "tests/emulator/tests/test_decode.py::test_more_splits_than_are_combined_at_a_time": 1,
    "tests/emulator/*": 10,
    "tests/project/test_precompile.py::test_the_grids_reach_every_kernel": None,
    "tests/backends/test_flex.py::test_*_grid": 3,
}


def mark(items: list[pytest.Item]) -> None:
    def function(item: pytest.Item) -> str:
        return item.nodeid.partition("[")[0]

    for name, cases in itertools.groupby(sorted(items, key=function), function):
        share = next((share for pattern, share in SHARES.items() if fnmatchcase(name, pattern)), 1)
        if share == 1:
            continue
        ordered = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
        kept = 0 if share is None else math.ceil(len(ordered) / share)
        for item in ordered[kept:]:
            item.add_marker(pytest.mark.slow)
