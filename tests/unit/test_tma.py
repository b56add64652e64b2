"""TMA descriptors, with a fake driver."""
import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest

from cupy_dma.backends.cuda.attention import tma
from cupy_dma.backends.cuda.runtime.params import Ref


@pytest.fixture
def answers(monkeypatch):
    """The fake driver's answers in turn, and how often a context was bound."""
    found = SimpleNamespace(statuses=[], bound=0)

    def bind():
        found.bound += 1

    monkeypatch.setattr(tma, "bind", bind)
    def encode(target, kind, rank, pointer, *more):
        ctypes.memmove(target.value + 24, pointer.value.to_bytes(8, "little"), 8)
        return found.statuses.pop(0)

    found.encode = encode
    monkeypatch.setattr(tma.launch, "error_text", lambda status: f"error {status}")
    return found


def descriptor(encode):
    library = SimpleNamespace(runtime=SimpleNamespace(tensor_map_encoder=lambda: encode))
    rows = mock.Mock(library=library, dtype="float16", pointer=Ref(7, 32), shape=(1, 64, 2, 64),
                     strides=(8192, 128, 64, 1))
    return tma.queries_map(rows, 64, 1)


def test_a_thread_without_a_context_gets_one(answers):
    """Autograd's thread, for example; it still uses the kernels for aligned rows."""
    answers.statuses = [201, 0, 0]
    data, refs = descriptor(answers.encode)
    assert len(data) == tma.MAP_BYTES and answers.bound == 1 and not answers.statuses
    assert refs == ((24, Ref(7, 32)),)


def test_what_tma_cannot_read(answers):
    answers.statuses = [1, 1]
    assert descriptor(answers.encode) is None and not answers.bound


def test_descriptors_that_hold_addresses_in_another_way_raise():
    with pytest.raises(RuntimeError, match="stores addresses in TMA descriptors in an unknown way"):
        descriptor(lambda *arguments: 0)


def test_other_errors_raise(answers):
    answers.statuses = [700]
    with pytest.raises(RuntimeError, match=r"cannot make a TMA descriptor of .* error 700"):
        descriptor(answers.encode)
