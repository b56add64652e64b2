"""What the CUDA driver knows of streams: which one a handle means, whether it is being captured, and how far it is.

A handle does not identify a stream: 2 is the default stream of the calling thread (``CU_STREAM_PER_THREAD``), and the
handle of a destroyed stream is given out again. ``stream_id`` does (``cuStreamGetId``: unique in a process).

CuPy has no memory pools for graphs, so what is allocated during a capture must be held for as long as the graph or an
executable made from it lives. ``hold_for_graph`` ties memory to the graph by a user object, whose destructor is the C
library's ``sem_post``: the driver may call it from any thread, at any time, without the interpreter.
"""
from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread has no context
_CAPTURE_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: asked of the legacy stream while another one captures
_DISABLE_TIMING, _RELAXED = 2, 2  # CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_MODE_RELAXED
_NO_DESTRUCTOR_SYNC, _MOVE_REFERENCE = 1, 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CU_GRAPH_USER_OBJECT_MOVE


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's library.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    names = ("libcuda.so.1", "nvcuda.dll")
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"the library of the CUDA driver ({' or '.join(names)}) cannot be loaded: it comes with the "
                       "driver, and containers have it from --gpus (or --nv)")


def error_text(status: int) -> str:
    """"CUDA_ERROR_INVALID_VALUE: invalid argument" and the like."""
    texts = []
    for function in (library().cuGetErrorName, library().cuGetErrorString):
        text = ctypes.c_char_p()
        function(status, ctypes.byref(text))
        texts.append((text.value or b"").decode(errors="replace"))
    return ": ".join(filter(None, texts)) or f"error {status} of the driver"


def _checked(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed: {error_text(status)}")


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """The primary context of device ``index``."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _checked("cuDeviceGet", library().cuDeviceGet(ctypes.byref(device), index))
    _checked("cuDevicePrimaryCtxRetain", library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


def _ask(name: str, stream: int, index: int, result: Any) -> int:
    function = getattr(library(), name)
    status = function(ctypes.c_void_p(stream), ctypes.byref(result))
    if status == INVALID_CONTEXT:
        _checked("cuCtxSetCurrent", library().cuCtxSetCurrent(_context(index)))
        status = function(ctypes.c_void_p(stream), ctypes.byref(result))
    return status


# ---- streams --------------------------------------------------------------------------------------------------------


def stream_id(stream: int, index: int) -> int:
    """A number that no other stream of the process has or will have. ``stream``: a raw handle on device ``index``."""
    found = ctypes.c_ulonglong()
    _checked("cuStreamGetId", _ask("cuStreamGetId", stream, index, found))
    return found.value


def is_capturing(stream: int, index: int) -> bool:
    """Whether a graph is being captured from the raw ``stream``."""
    found = ctypes.c_int()
    status = _ask("cuStreamIsCapturing", stream, index, found)
    if status == _CAPTURE_IMPLICIT:
        return False
    _checked("cuStreamIsCapturing", status)
    return found.value != 0


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let the calling thread load modules, allocate and wait although a stream is being captured."""
    mode = ctypes.c_int(_RELAXED)
    library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class Event:
    """A point in a stream."""

    def __init__(self, stream: int, index: int):
        """Behind the work that has been queued on the raw ``stream`` of device ``index`` by now."""
        self._handle = ctypes.c_void_p()
        _checked("cuCtxPushCurrent", library().cuCtxPushCurrent_v2(_context(index)))
        try:
            _checked("cuEventCreate", library().cuEventCreate(ctypes.byref(self._handle), _DISABLE_TIMING))
            _checked("cuEventRecord", library().cuEventRecord(self._handle, ctypes.c_void_p(stream)))
        finally:
            library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def is_complete(self) -> bool:
        """Whether that work has ended."""
        with relaxed_capture():
            return library().cuEventQuery(self._handle) == 0

    def __del__(self) -> None:
        if self._handle:
            library().cuEventDestroy_v2(self._handle)


# ---- memory of captured graphs --------------------------------------------------------------------------------------


class _GraphMemory:
    """What is held for one graph."""

    def __init__(self, graph: ctypes.c_void_p):
        self.held: list[Any] = []
        libc = ctypes.CDLL(None)
        libc.calloc.restype = ctypes.c_void_p
        self._semaphore = ctypes.c_void_p(libc.calloc(1, 64))  # never freed: the driver may post late
        self._value = libc.sem_getvalue
        libc.sem_init(self._semaphore, 0, 0)
        user_object = ctypes.c_void_p()
        destructor = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        _checked("cuUserObjectCreate", library().cuUserObjectCreate(
            ctypes.byref(user_object), self._semaphore, destructor, 1, _NO_DESTRUCTOR_SYNC))
        _checked("cuGraphRetainUserObject", library().cuGraphRetainUserObject(graph, user_object, 1, _MOVE_REFERENCE))

    def is_over(self) -> bool:
        """Whether the graph and all that was made of it have been destroyed."""
        value = ctypes.c_int()
        self._value(self._semaphore, ctypes.byref(value))
        return value.value > 0


_graphs: dict[int, _GraphMemory] = {}  # by the id of a capture, which is unique in a process
_lock = threading.Lock()


def hold_for_graph(stream: int, memory: Any) -> None:
    """Hold ``memory`` for as long as the graph lives that is being captured from the raw ``stream``. Memory of graphs
    that are gone is let go by the next such call."""
    status, capture, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
    _checked("cuStreamGetCaptureInfo", library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture), ctypes.byref(graph), None, None))
    with _lock:
        for ended in [number for number, found in _graphs.items() if found.is_over()]:
            del _graphs[ended]
        if capture.value not in _graphs:
            _graphs[capture.value] = _GraphMemory(graph)
        _graphs[capture.value].held.append(memory)
