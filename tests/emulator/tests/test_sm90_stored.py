"""The gradient of the queries from stored dS (kernels/sm90/stored_ds.cuh, backward_dq_stored.cu) on the CPU emulator:
against the oracle and the query pass, in chunks, and in other orders of threads and blocks."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from cupy_dma.backends.cuda.attention import sm90_backward, sm90_stored
from cupy_dma.backends.cuda.runtime import program

build = pytest.importorskip("tests.emulator.build")
pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

from tests import emulator  # noqa: E402
from tests.emulator.tests.test_forward import BUILD  # noqa: E402
from tests.emulator.tests.test_sm90_backward import check, gradients, near  # noqa: E402


@contextmanager
def stored(wanted: bool | None = True, **device: Any) -> Any:
    with (emulator.hopper_gpu(build=BUILD, **device), mock.patch.object(sm90_backward, "MIN_TILES", 0.0),
          program.fresh(one_pass=False, stored=wanted)):
        yield


@pytest.fixture
def launched():
    with mock.patch.object(sm90_stored, "launch", side_effect=sm90_stored.launch) as launch:
        yield launch


@contextmanager
def chunks_of(lists: int, **options: Any) -> Any:
    """At most so many lists at a time."""
    chosen = sm90_stored.chunks_of
    with mock.patch.object(sm90_stored, "chunks_of", lambda *arguments: sm90_stored.dataclasses.replace(
            chosen(*arguments), size=lists)):
        yield


OPTIONS: list[dict[str, Any]] = [
    {"head_dim": 32, "heads": (1, 1)}, {"head_dim": 64}, {"head_dim": 128, "dtype": "bfloat16", "heads": (4, 1)},
    {"head_dim": 40, "heads": (3, 1), "length": 501}, {"head_dim": 128, "heads": (8, 2), "length": 333},
    {"head_dim": 96, "softcap": 3.0, "heads": (6, 2)}, {"length": 900, "window": 300, "heads": (2, 2)},
    {"queries": 300, "length": 701}, {"batch": 2, "heads": (4, 2), "length": 600, "head_dim": 16}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_stored(options, launched):
    """As the oracle, and nearly as the query pass."""
    with stored():
        found = gradients("emulator", **options)
    check(found, **options)
    assert launched.called
    launched.reset_mock()
    with stored(None):
        expected = gradients("emulator", **options)
    assert not launched.called
    for ours, other in zip(found, expected):
        near(ours, other)
