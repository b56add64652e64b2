"""The device as the CUDA backend sees it: kernels by configuration, a few limits, and the current device."""
from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from cupy_dma.arrays import Device
from cupy_dma.arrays.driver import relaxed_capture
from cupy_dma.backends.cuda.runtime import jit, launch
from cupy_dma.backends.cuda.runtime.configs import ELEMENTS, LayoutConfig

_STAY = nullcontext()


class LoadedKernel(Protocol):
    def launch(self, grid: int, threads: int, params: bytes, stream: int, pdl: bool = True) -> None: ...


class Runtime(Protocol):
    """What the backend needs of a device. Kernels launched inside ``on(device)`` go to that device."""

    def __hash__(self) -> int: ...

    def load(self, config: jit.Config, entry: str, index: int, shared_bytes: int = 0) -> LoadedKernel: ...

    def on(self, device: Device) -> AbstractContextManager: ...

    def clear(self, pointer: int, size: int, stream: int) -> None: ...

    def shared_memory_limit(self, index: int) -> int: ...

    def num_sms(self, index: int) -> int: ...

    def hopper(self, index: int) -> bool: ...

    def check_layout(self, index: int) -> None: ...

    def tensor_map_encoder(self) -> Any: ...


def bind() -> None:
    """Give the context of the current device to a thread that has none."""
    _cupy().cuda.Device(_current_device()).use()


class CudaRuntime:
    """A GPU through CuPy. Kernels may be loaded during a capture."""

    def load(self, config: jit.Config, entry: str, index: int, shared_bytes: int = 0) -> LoadedKernel:
        with relaxed_capture():
            return jit.load(config, entry, index, shared_bytes)

    def on(self, device: Device) -> AbstractContextManager:
        return _STAY if _current_device() == device.index else _cupy().cuda.Device(device.index)

    def clear(self, pointer: int, size: int, stream: int) -> None:
        """Set ``size`` bytes to zero, on the current device."""
        launch.clear(pointer, size, stream, bind)

    def bind(self) -> None:
        """Give the context of the current device to a thread that has none."""
        bind()

    @functools.cache  # noqa: B019 - one runtime for the life of the process
    def shared_memory_limit(self, index: int) -> int:
        """Bytes of shared memory a block may have."""
        return _cupy().cuda.Device(index).attributes["MaxSharedMemoryPerBlockOptin"]

    @functools.cache  # noqa: B019
    def num_sms(self, index: int) -> int:
        return _cupy().cuda.Device(index).attributes["MultiProcessorCount"]

    @functools.cache  # noqa: B019
    def hopper(self, index: int) -> bool:
        """Whether the device runs the kernels of ``kernels/sm90``."""
        return _cupy().cuda.Device(index).compute_capability == "90"

    def tensor_map_encoder(self) -> Any:
        """``cuTensorMapEncodeTiled``, or None if the driver lacks it."""
        try:
            return launch.library().cuTensorMapEncodeTiled
        except (RuntimeError, AttributeError):
            return None

    @functools.cache  # noqa: B019
    def check_layout(self, index: int) -> None:
        """Verify, once per device, the register layout that kernels/common/arch.cuh assumes; the only call that waits
        for the device."""
        cupy = _cupy()
        for dtype in ELEMENTS:
            with relaxed_capture(), cupy.cuda.Device(index), cupy.cuda.Stream(non_blocking=True) as stream:
                # Small integers, exact in all types; bfloat16 is the upper half of a float32.
                x = cupy.arange(256, dtype=cupy.float32) - 128
                bits = x.view(cupy.uint16)[1::2].copy() if dtype == "bfloat16" else x.astype(dtype)
                ok = cupy.zeros(1, cupy.int32)
                config = LayoutConfig(element=ELEMENTS[dtype])
                params = jit.params(config.source, "LayoutParams").pack(x=bits.data.ptr, ok=ok.data.ptr)
                self.load(config, "fragment_layout", index).launch(1, 32, params, stream.ptr)
                found = int(ok.get()[0])
            if found != 32:
                raise RuntimeError(f"this GPU (cuda:{index}) has a layout of matrix fragments that the kernels do not "
                                   f"know ({dtype}: {found} of 32 lanes as expected); please report it")


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy


def _current_device() -> int:
    return _cupy().cuda.runtime.getDevice()
