"""Launches through the CUDA driver: with an attribute that CuPy lacks, and in less host time.

The attribute is programmatic dependent launch (PDL): a kernel's blocks may start while the last blocks of the previous
kernel in the stream still run, and wait until it has ended (``wait_for_earlier_kernels`` in kernels/common/arch.cuh).
It needs an sm_90 and a driver that captures such launches into graphs (CUDA 12.3). ``CUPY_DMA_EARLY=0`` disables it.
"""
from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

from cupy_dma.arrays.driver import INVALID_CONTEXT, error_text, library

# ---- structs of cuda.h that the driver reads ----
_CONFIG = struct.Struct("@7IPPI0P")  # CUlaunchConfig: grid and block (x, y, z), shared bytes; stream, attributes, count
_ATTRIBUTE = struct.Struct("@I4xi60x")  # CUlaunchAttribute: its number; the value, padded to the largest of the union
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_PDL = ctypes.create_string_buffer(_ATTRIBUTE.pack(_STREAM_SERIALIZATION, 1), _ATTRIBUTE.size)
_PDL_ADDRESS = ctypes.addressof(_PDL)
CONFIG_BYTES, STREAM_WORD = _CONFIG.size, 4  # STREAM_WORD: which of its 8-byte words is the stream
_Arguments = ctypes.c_char_p * 1  # the address of each argument of a kernel
_ZERO = ctypes.c_ubyte(0)
_limits: dict[tuple[str, str, int], int] = {}  # of dynamic shared memory, see allow_shared
_limits_lock = threading.Lock()

FIRST_CAPABILITY, _FIRST_VERSION = 90, 12030  # that support PDL


@functools.cache
def supports_pdl(capability: int) -> bool:
    """Whether PDL can be used on a device of compute ``capability`` (90 for 9.0)."""
    if capability < FIRST_CAPABILITY or os.environ.get("CUPY_DMA_EARLY", "") == "0":
        return False
    version = ctypes.c_int()
    return library().cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= _FIRST_VERSION


class Function:
    """A loaded kernel whose only argument is a struct. Threads may launch it at the same time."""

    def __init__(self, name: str, handle: int, shared_bytes: int, pdl: bool, bind: Callable[[], None]):
        """``handle``: its CUfunction; ``pdl``: the device supports PDL; ``bind()`` binds the device's context to the
        calling thread."""
        self.name, self._shared_bytes, self._bind = name, shared_bytes, bind
        self._handle = ctypes.c_void_p(handle)
        self._pdl_attributes = int(pdl)
        self._call = library().cuLaunchKernelEx

    def launch(self, grid: int, threads: int, params: bytes, stream: int, pdl: bool = True) -> None:
        """Launch ``grid`` blocks of ``threads`` threads on the raw ``stream``; see ``jit.Kernel.launch``."""
        # Everything is local to the call, because other threads may run meanwhile. The attribute is constant.
        self.launch_at(self.config(grid, threads, pdl, stream), _Arguments(params))

    def config(self, grid: int, threads: int, pdl: bool, stream: int = 0) -> bytes:
        """The structs of a launch that the driver reads, except its arguments."""
        return _CONFIG.pack(grid, 1, 1, threads, 1, 1, self._shared_bytes, stream, _PDL_ADDRESS,
                            self._pdl_attributes if pdl else 0)

    def launch_at(self, config: Any, arguments: Any) -> None:
        """Launch with structs from ``config`` and an array with the parameters' address, both as ctypes passes them."""
        status = self._call(config, self._handle, arguments, None)
        if status == INVALID_CONTEXT:
            self._bind()
            status = self._call(config, self._handle, arguments, None)
        if status:
            grid, _, _, threads, *_ = _CONFIG.unpack(ctypes.string_at(config, _CONFIG.size))
            raise RuntimeError(f"cannot launch the kernel {self.name} ({grid} blocks of {threads} threads, "
                               f"{self._shared_bytes} bytes of dynamic shared memory): {error_text(status)}")


def allow_shared(function: Any, key: tuple[str, str, int], shared_bytes: int) -> None:
    """Allow launches of CuPy's ``function`` this much dynamic shared memory.

    CuPy memoizes modules by path and device, so loading the same ``key`` (path, entry, device) twice yields one
    function of the driver, whose limit must be the largest that any of its launches needs.
    """
    with _limits_lock:
        limit = max(shared_bytes, _limits.get(key, 0))
        function.max_dynamic_shared_size_bytes = limit  # raises where the device has less
        _limits[key] = limit


def clear(pointer: int, size: int, stream: int, bind: Callable[[], None]) -> None:
    """Set ``size`` bytes to zero, in the order of the raw ``stream``; ``bind`` as above."""
    clear_at(ctypes.c_uint64(pointer), ctypes.c_void_p(stream), ctypes.c_size_t(size), bind)


def clear_at(pointer: Any, stream: Any, size: Any, bind: Callable[[], None]) -> None:
    """Likewise, with arguments as ctypes passes them."""
    call = library().cuMemsetD8Async
    status = call(pointer, _ZERO, size, stream)
    if status == INVALID_CONTEXT:
        bind()
        status = call(pointer, _ZERO, size, stream)
    if status:
        raise RuntimeError(f"cannot set {size.value} bytes at {pointer.value:#x} to zero: {error_text(status)}")
