"""NumPy, and CuPy, which has its functions."""
from __future__ import annotations

from contextlib import contextmanager

import numpy as np

from cupy_dma.arrays import driver
from cupy_dma.arrays.library import CPU, NO_CONTEXT, Device, Library, Operand, numpy_dtype


class NumpyLibrary(Library):
    name = "numpy"
    xp = np

    def describe(self, array, name):
        size = array.itemsize
        return Operand(name, array, self, array.shape, tuple([s // size for s in array.strides]), array.dtype.name, CPU,
                       array.ctypes.data)

    def pointer(self, array):
        return array.ctypes.data

    def empty(self, shape, dtype, device):
        with self.on(device):
            return self.xp.empty(shape, numpy_dtype(dtype))

    def to_numpy(self, array):
        return np.asarray(array)

    def from_numpy(self, array, device):
        return array

    def astype(self, array, dtype):
        return array.astype(numpy_dtype(dtype), copy=False)

    def contiguous(self, array):
        return np.ascontiguousarray(array)

    def arange(self, start, stop, device):
        with self.on(device):
            return self.xp.arange(start, stop, dtype=np.int32)

    def full(self, shape, value, dtype, device):
        with self.on(device):
            return self.xp.full(shape, value, numpy_dtype(dtype))

    def cumsum(self, array):
        return self.xp.cumsum(array, axis=-1, dtype=np.int32)

    def search_right(self, boundaries, values):
        return self.xp.searchsorted(boundaries, values, side="right").astype(np.int32)


class CupyLibrary(NumpyLibrary):
    """NumPy's functions on CUDA arrays; call ``cumsum`` and ``search_right`` within ``on``. Memory allocated within
    ``on`` during a graph capture lives as long as the graph."""

    name = "cupy"

    def __init__(self):
        import cupy

        self.xp = cupy

    def on(self, device):
        if driver.is_capturing(stream := self.stream(device), device.index):
            return self._holding(device, stream)
        current = self.xp.cuda.runtime.getDevice()  # a query costs less than entering a context
        return NO_CONTEXT if current == device.index else self.xp.cuda.Device(device.index)

    @contextmanager
    def _holding(self, device, stream):
        allocate = self.xp.cuda.get_allocator()

        def hold(size):
            memory = allocate(size)
            driver.hold_for_graph(stream, memory.mem)
            return memory

        with self.xp.cuda.Device(device.index), self.xp.cuda.using_allocator(hold):
            yield

    def describe(self, array, name):
        size = array.itemsize
        return Operand(name, array, self, array.shape, tuple([s // size for s in array.strides]), array.dtype.name,
                       Device("cuda", array.device.id), array.data.ptr)

    def pointer(self, array):
        return array.data.ptr

    def to_numpy(self, array):
        with self.on(Device("cuda", array.device.id)):
            return self.xp.asnumpy(array)

    def from_numpy(self, array, device):
        if driver.is_capturing(self.stream(device), device.index):
            raise RuntimeError("cannot copy numbers from host memory while a CUDA graph is captured: pass an array on "
                               "the GPU")
        with self.on(device):
            return self.xp.asarray(array)

    def astype(self, array, dtype):
        with self.on(Device("cuda", array.device.id)):
            return array.astype(numpy_dtype(dtype), copy=False)

    def contiguous(self, array):
        with self.on(Device("cuda", array.device.id)):
            return self.xp.ascontiguousarray(array)

    def stream(self, device):
        return self.xp.cuda.get_current_stream(device.index).ptr
