"""TMA descriptors, with a driver that only answers."""
from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from cupy_dma.backends.cuda.attention import tma


@pytest.fixture
def answers(monkeypatch):
    """What the driver answers, one after the other, and how often a context was bound."""
    found = SimpleNamespace(statuses=[], bound=0)

    def bind():
        found.bound += 1

    monkeypatch.setattr(tma, "bind", bind)
    monkeypatch.setattr(tma, "_driver_function", lambda: lambda *arguments: found.statuses.pop(0))
    monkeypatch.setattr(tma.launch, "error_text", lambda status: f"error {status}")
    tma._map.cache_clear()
    yield found
    tma._map.cache_clear()


def descriptor():
    rows = mock.Mock(dtype="float16", pointer=256, shape=(1, 64, 2, 64), strides=(8192, 128, 64, 1))
    return tma.queries_map(rows, 64, 1)


def test_a_thread_without_a_context_gets_one(answers):
    """Such as that of autograd; the kernels for aligned rows are not given up for it."""
    answers.statuses = [201, 0]
    assert len(descriptor()) == tma.MAP_BYTES and answers.bound == 1 and not answers.statuses


def test_what_tma_cannot_read(answers):
    answers.statuses = [1]
    assert descriptor() is None and not answers.bound


def test_other_errors_raise(answers):
    answers.statuses = [700]
    with pytest.raises(RuntimeError, match=r"no TMA descriptor of .* error 700"):
        descriptor()
