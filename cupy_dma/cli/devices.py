"""What the demo runs on: the array module, waiting for the device, and the peak of extra memory."""
from __future__ import annotations

import tracemalloc
from contextlib import contextmanager
from typing import Any

import numpy as np

from cupy_dma.backends import why_not


class HostDevice:
    """The CPU, with NumPy."""

    name = "numpy"
    xp: Any = np

    def wait(self) -> None:
        pass

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    @contextmanager
    def peak_memory(self, sink: list[int]):
        """Append the largest number of extra bytes that was allocated at once inside the block."""
        tracemalloc.start()
        try:
            yield
        finally:
            sink.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()


class CudaDevice(HostDevice):
    """The current GPU, with CuPy."""

    name = "cuda"

    def __init__(self) -> None:
        import cupy

        self.xp = cupy

    def wait(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def to_host(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)

    @contextmanager
    def peak_memory(self, sink: list[int]):
        class Peak(self.xp.cuda.MemoryHook):  # type: ignore[name-defined]
            name = "cupy_dma peak"
            peak = 0

            def __init__(self):
                self.held: dict[int, int] = {}  # bytes of each block that was allocated since, by its id

            def malloc_postprocess(self, device_id, size, mem_size, mem_ptr, pmem_id):
                self.held[pmem_id] = mem_size
                self.peak = max(self.peak, sum(self.held.values()))

            def free_postprocess(self, device_id, mem_size, mem_ptr, pmem_id):
                self.held.pop(pmem_id, None)

        with Peak() as hook:
            yield
        sink.append(hook.peak)


def choose_device(backend: str | None) -> HostDevice:
    """cuda where there is a GPU, numpy otherwise; an explicit choice that cannot run raises."""
    if backend is None:
        backend = "numpy" if why_not("cuda") else "cuda"
    reason = why_not(backend)
    if reason:
        raise RuntimeError(f"--backend {backend} cannot run here: {reason}")
    return HostDevice() if backend == "numpy" else CudaDevice()
