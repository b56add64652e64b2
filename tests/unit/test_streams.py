"""The library's queries about streams, and data that backends keep on a mask per stream, with fake CUDA drivers."""
import ctypes
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_dma.arrays import CPU, Device, driver
from cupy_dma.masks import derived
from cupy_dma.masks.derived import History, kept


class FakeLibrary:
    """One stream, 7, which may be captured; contexts are counted."""

    def __init__(self) -> None:
        self.capturing, self.capture, self.mode = 0, 1, 0
        self.bound, self.status, self.complete = True, 0, False
        self.objects: list[tuple[int, int]] = []  # destructors and their arguments
        self.modes: list[int] = []

    def cuStreamIsCapturing(self, stream: int, found: Any) -> int:
        found._obj.value = self.capturing
        return self.status if self.bound else driver.INVALID_CONTEXT

    def cuStreamGetId(self, stream: int, found: Any) -> int:
        found._obj.value = 1000 + stream
        return self.status if self.bound else driver.INVALID_CONTEXT

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.bound = True
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        self.modes.append(self.mode)
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, capture: Any, graph: Any, *rest: Any) -> int:
        status._obj.value, capture._obj.value, graph._obj.value = 1, self.capture, 4096
        return 0

    def cuUserObjectCreate(self, found: Any, argument: Any, destructor: Any, *rest: Any) -> int:
        self.objects.append((destructor.value, argument.value))
        return 0

    def cuGraphRetainUserObject(self, *arguments: Any) -> int:
        return 0

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_OF_TESTS"
        return 0

    cuGetErrorString = cuGetErrorName
    cuDeviceGet = cuDevicePrimaryCtxRetain = cuCtxPushCurrent_v2 = cuCtxPopCurrent_v2 = lambda *_: 0
    cuEventCreate = cuEventRecord = cuEventDestroy_v2 = lambda *_: 0

    def cuEventQuery(self, event: Any) -> int:
        assert self.mode == 2, "a query ends captures of other threads unless this thread is relaxed"
        return 0 if self.complete else 600


@pytest.fixture
def library(monkeypatch):
    found = FakeLibrary()
    monkeypatch.setattr(driver, "library", lambda: found)
    monkeypatch.setattr(driver, "_function", lambda name: getattr(found, name))
    monkeypatch.setattr(driver, "_graphs", {})
    driver._context.cache_clear()
    yield found
    driver._context.cache_clear()


def test_a_thread_without_a_context_gets_one(library):
    library.bound = False
    assert driver.stream_id(7, 0) == 1007 and library.bound
    library.bound = False
    assert not driver.is_capturing(7, 0) and library.bound


def test_the_legacy_stream_is_known(library):
    library.status = 1  # every query fails
    for handle in (0, 1):
        assert driver.stream_id(handle, 0) == -1 and not driver.is_capturing(handle, 0)


def test_errors_are_named(library):
    library.status = 1
    for ask in (driver.stream_id, driver.is_capturing):
        with pytest.raises(RuntimeError, match=r"cuStream\w+ failed: CUDA_ERROR_OF_TESTS"):
            ask(7, 0)
    library.status = 906  # another stream's capture: this one is not captured
    assert not driver.is_capturing(7, 0)


def test_a_relaxed_thread_is_as_before_afterwards(library):
    with pytest.raises(ZeroDivisionError), driver.relaxed_capture():
        assert library.mode == 2
        _ = 1 / 0
    assert library.mode == 0 and library.modes == [2, 0]


def test_events_are_queried_by_a_relaxed_thread(library):
    event = driver.Event(7, 0)
    assert not event.is_complete()
    library.complete = True
    assert event.is_complete() and library.mode == 0


class Memory:
    pass


def test_memory_is_held_until_its_graph_is_gone(library):
    first, second, third = Memory(), Memory(), Memory()
    seen = [weakref.ref(x) for x in (first, second, third)]
    driver.hold_for_graph(7, first)
    driver.hold_for_graph(7, second)
    library.capture = 2  # another graph
    driver.hold_for_graph(7, third)
    del first, second, third
    gc.collect()
    assert [x() is not None for x in seen] == [True] * 3 and len(library.objects) == 2
    destructor, argument = library.objects[0]
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(destructor)(argument)  # as the driver does when a graph is gone
    driver.hold_for_graph(7, Memory())
    gc.collect()
    assert [x() is not None for x in seen] == [False, False, True] and list(driver._graphs) == [2]


# ---- what is kept on a mask: per stream, complete, bounded, and never from a capture ----
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
