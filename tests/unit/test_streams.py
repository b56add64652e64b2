"""The library's queries about streams, with a fake CUDA driver."""
import ctypes
import gc
import weakref
from typing import Any

import pytest

from cupy_dma.arrays import driver


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
