"""Data that backends keep on a mask: per stream, complete, bounded, and never from a capture."""
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_dma.arrays import CPU, Device, driver
from cupy_dma.masks import derived
from cupy_dma.masks.derived import History, kept


class FakeDriver:
    """Streams of a fake GPU: each thread's default stream has the handle 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.capturing, self.complete, self.ids = set[int](), True, dict[Any, int]()
        monkeypatch.setattr(driver, "is_capturing", lambda stream, index: stream in self.capturing)
        monkeypatch.setattr(driver, "stream_id", self._id)
        monkeypatch.setattr(driver, "Event", lambda *_: SimpleNamespace(is_complete=lambda: self.complete))

    def _id(self, stream: int, index: int) -> int:
        identity = (stream, threading.get_ident() if stream == 2 else None)
        return self.ids.setdefault(identity, len(self.ids))


@pytest.fixture
def gpu(monkeypatch):
    return FakeDriver(monkeypatch)


def mask_on(device: Device) -> Any:
    return SimpleNamespace(device=device, _cache={}, _history=History({}, []))


@pytest.fixture
def lists(gpu):
    """The lists that a mask keeps for a stream of a GPU."""
    mask = mask_on(Device("cuda", 0))

    def of(stream: int) -> Any:
        return kept(mask, ("lists",), stream, object)

    of.mask = mask
    return of


def test_each_stream_makes_its_own(lists):
    first = lists(7)
    assert lists(7) is first and lists(8) is not first
    assert kept(lists.mask, ("others",), 7, object) is not first


def test_the_default_stream_of_each_thread_is_a_stream_of_its_own(lists):
    first = lists(2)
    with ThreadPoolExecutor(1) as pool:
        assert lists(2) is first and pool.submit(lists, 2).result() is not first


def test_a_reused_handle_is_another_stream(lists, gpu):
    first = lists(7)
    gpu.ids[7, None] = 99  # the stream was destroyed, and a new one got its handle
    assert lists(7) is not first


def test_a_capture_keeps_nothing(lists, gpu):
    gpu.capturing.add(7)
    assert lists(7) is not lists(7)
    assert not lists.mask._cache and not lists.mask._history.events
    gpu.capturing.clear()
    assert lists(7) is lists(7)


def test_a_capture_reads_only_what_is_complete(lists, gpu):
    first = lists(7)
    gpu.capturing.add(8)
    gpu.complete = False
    assert lists(8) is not first
    gpu.complete = True
    assert lists(8) is first  # valid for any stream, since its work has ended
    lists.mask._cache.clear()
    assert lists(8) is not first


def test_what_a_graph_reads_stays(lists, gpu):
    first = lists(7)
    gpu.capturing.add(8)
    for _ in range(2):
        lists(8)
    for i in range(2 * derived.MAX_KEPT):
        kept(lists.mask, ("more", i), 7, object)
    assert ("lists", gpu.ids[7, None]) not in lists.mask._cache
    assert lists.mask._history.captured == [first]


@pytest.mark.parametrize("device", [CPU, Device("cuda", 0)], ids=str)
def test_a_mask_keeps_a_bounded_number(gpu, device):
    mask = mask_on(device)
    for i in range(3 * derived.MAX_KEPT):
        kept(mask, ("lists", i), 0, object)
        assert len(mask._cache) <= derived.MAX_KEPT and len(mask._history.events) <= derived.MAX_KEPT
    assert ("lists", 3 * derived.MAX_KEPT - 1, 0) in mask._cache


def test_threads_that_miss_at_once_share_what_the_first_has_kept():
    mask, both = mask_on(CPU), threading.Barrier(2)

    def make() -> object:
        both.wait(10)  # both threads are making it
        return object()

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(kept, mask, ("lists",), 0, make) for _ in range(2)]
        assert found[0].result() is found[1].result() is mask._cache["lists", 0]


def test_nothing_is_kept_of_what_failed():
    mask = mask_on(CPU)
    with pytest.raises(MemoryError):
        kept(mask, ("lists",), 0, lambda: (_ for _ in ()).throw(MemoryError()))
    assert not mask._cache and kept(mask, ("lists",), 0, lambda: 3) == 3
