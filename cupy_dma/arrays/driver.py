"""Streams as the CUDA driver knows them: identity, capture status and progress.

A handle does not identify a stream: handle 2 is the calling thread's default stream (``CU_STREAM_PER_THREAD``), and the
handle of a destroyed stream is reused. ``stream_id`` (``cuStreamGetId``) is unique within a process.

CuPy has no memory pools for graphs, so memory allocated during a capture must be held until the graph and every
executable made from it are destroyed. ``hold_for_graph`` ties the memory to the graph with a CUDA user object, whose
destructor is the C library's ``sem_post``: the driver may call it from any thread, at any time, without the
interpreter. Windows has no ``sem_post``; there the memory is held until the process ends.
"""
from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread has no context
LEGACY = (0, 1)  # handles of a device's default stream, which cannot be captured and is never destroyed
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
    raise RuntimeError(f"cannot load the CUDA driver's library ({' or '.join(names)}): install the driver; start a "
                       "container with --gpus (or --nv)")


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


@functools.cache
def _function(name: str) -> Any:
    """A function of a stream and an address. Declaring its argument types makes their conversion faster."""
    found = getattr(library(), name)
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return found


def _ask(name: str, stream: int, index: int, result: Any) -> int:
    function = _function(name)
    status = function(stream, ctypes.byref(result))
    if status == INVALID_CONTEXT:
        _checked("cuCtxSetCurrent", library().cuCtxSetCurrent(_context(index)))
        status = function(stream, ctypes.byref(result))
    return status


# ---- streams --------------------------------------------------------------------------------------------------------


def stream_id(stream: int, index: int) -> int:
    """The id of the raw ``stream`` on device ``index``: no other stream of the process ever has it."""
    if stream in LEGACY:
        return -1
    found = ctypes.c_ulonglong()
    status = _ask("cuStreamGetId", stream, index, found)
    if status:
        _checked("cuStreamGetId", status)
    return found.value


def is_capturing(stream: int, index: int) -> bool:
    """Whether a graph is being captured from the raw ``stream``."""
    if stream in LEGACY:
        return False
    found = ctypes.c_int()
    status = _ask("cuStreamIsCapturing", stream, index, found)
    if status and status != _CAPTURE_IMPLICIT:
        _checked("cuStreamIsCapturing", status)
    return found.value != 0


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let the calling thread load modules, allocate and wait while a stream is being captured."""
    mode = ctypes.c_int(_RELAXED)
    library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class Event:
    """A point in a stream."""

    def __init__(self, stream: int, index: int):
        """Recorded after all work queued so far on the raw ``stream`` of device ``index``."""
        self._handle, self._destroy = ctypes.c_void_p(), library().cuEventDestroy_v2
        _checked("cuCtxPushCurrent", library().cuCtxPushCurrent_v2(_context(index)))
        try:
            _checked("cuEventCreate", library().cuEventCreate(ctypes.byref(self._handle), _DISABLE_TIMING))
            _checked("cuEventRecord", library().cuEventRecord(self._handle, ctypes.c_void_p(stream)))
        finally:
            library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def is_complete(self) -> bool:
        """Whether that work has finished."""
        with relaxed_capture():
            return library().cuEventQuery(self._handle) == 0

    def __del__(self) -> None:
        if self._handle:
            self._destroy(self._handle)


# ---- memory of captured graphs --------------------------------------------------------------------------------------


class _GraphMemory:
    """The memory held for one graph."""

    def __init__(self, graph: ctypes.c_void_p):
        self.held: list[Any] = []
        self._value: Any = None
        if sys.platform == "win32":
            return
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
        """Whether the graph and all executables made from it have been destroyed."""
        value = ctypes.c_int()
        if self._value is None:
            return False
        self._value(self._semaphore, ctypes.byref(value))
        return value.value > 0


_graphs: dict[int, _GraphMemory] = {}  # by the id of a capture, which is unique in a process
_lock = threading.Lock()


def hold_for_graph(stream: int, memory: Any) -> None:
    """Hold ``memory`` for the life of the graph that is being captured from the raw ``stream``. Also releases the
    memory of graphs that have been destroyed."""
    status, capture, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
    _checked("cuStreamGetCaptureInfo", library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture), ctypes.byref(graph), None, None))
    with _lock:
        for ended in [number for number, found in _graphs.items() if found.is_over()]:
            del _graphs[ended]
        if capture.value not in _graphs:
            _graphs[capture.value] = _GraphMemory(graph)
        _graphs[capture.value].held.append(memory)
