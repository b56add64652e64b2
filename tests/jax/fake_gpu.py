"""A fake GPU for the callbacks of ``cupy_dma.jax``: buffers with ``__cuda_array_interface__`` in host memory, the few
CuPy functions that the callback calls, and a backend "cuda" that the test chooses."""
import ctypes
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupy_dma import backends
from cupy_dma.arrays import library_named
from cupy_dma.jax import programs
from cupy_dma.jax.tasks import NAMES, Task

STREAM = 0x5eed


class Buffer:
    """A buffer as ``jax.experimental.buffer_callback`` passes it on a GPU: 16-bit floats unknown to NumPy have type
    void."""

    def __init__(self, array: np.ndarray, device: int = 0):
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.array.shape, "typestr": f"<V{self.array.itemsize}", "version": 3,
                "data": (self.array.ctypes.data, False)}

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a GPU's buffer has been read by the host")


class Entered:
    """A context that counts how often it is open."""

    opened: list[Any] = []  # noqa: RUF012

    def __init__(self, what: Any):
        self.what = what

    def __enter__(self) -> None:
        self.opened.append(self.what)

    def __exit__(self, *_: Any) -> None:
        assert self.opened.pop() == self.what


def install(monkeypatch: Any, backend: Any, capturing: bool = False) -> None:
    """Let the callback find this GPU, with ``backend`` as its CUDA backend."""

    def array(shape: tuple[int, ...], dtype: np.dtype, pointer: Any) -> np.ndarray:
        assert Entered.opened == [("device", 0), ("stream", STREAM)] or not Entered.opened
        data = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(pointer.address)
        return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)

    cuda = SimpleNamespace(
        Device=lambda index: Entered(("device", index)),
        Stream=SimpleNamespace(from_external=lambda stream: Entered(("stream", stream.__cuda_stream__()[1]))),
        UnownedMemory=lambda address, size, owner, device: SimpleNamespace(address=address),
        MemoryPointer=lambda memory, offset: memory,
        runtime=SimpleNamespace(streamIsCapturing=lambda stream: capturing and stream == STREAM))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=array))
    monkeypatch.setattr(programs, "library_named", lambda name: library_named("numpy"))
    gpus = [SimpleNamespace(local_hardware_id=index) for index in (0, 1)]
    monkeypatch.setattr(programs.jax, "local_devices", lambda **_: gpus)
    monkeypatch.setitem(backends._loaded, "cuda", backend)
    monkeypatch.setattr(Entered, "opened", [])


def aligned(shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
    """An array ``offset`` bytes after a multiple of 16, filled with a value that no kernel writes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    space = np.full(size + 32, 0xab, np.uint8)
    begin = -space.ctypes.data % 16 + offset
    return space[begin:begin + size].view(dtype).reshape(shape)


def call(task: Task, arrays: dict[str, Any], offset: int = 0, device: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    """The program of a task as built for a GPU, and the results that its callback writes. ``offset``: distance of
    operand addresses from multiples of 16."""
    given = {name: arrays[name] for name in NAMES[task.operation] if arrays.get(name) is not None}
    program = programs.Program(task, tuple((name, x.shape, x.dtype.name) for name, x in given.items()), True)
    operands = []
    for x in given.values():
        operands.append(aligned(x.shape, x.dtype, offset))
        operands[-1][...] = x
    results = {name: aligned(shape, programs.numpy_dtype(dtype)) for name, (shape, dtype) in program.results.items()}
    outs = [*results.values()] + ([aligned((program.workspace,), np.uint8)] if program.workspace else [])
    program._fill(SimpleNamespace(stream=STREAM), [Buffer(x, device) for x in outs],
                  *[Buffer(x, device) for x in operands])
    assert not Entered.opened
    return program, results
