"""Programs: a task for operands of fixed shapes and types, as a function of jax arrays.

``jax.experimental.buffer_callback`` passes the buffers of operands and results, on a CPU and on a GPU alike, so both
share this code down to the backend. (``jax.pure_callback`` copies the results and has no GPU side.) Everything possible
is decided when the program is made, that is when a function is traced:

    on a GPU    the task is built as a program of the CUDA backend (``cuda/runtime/program.py``). The callback collects
                addresses and launches on XLA's stream. The workspace is one more result, so XLA owns all memory and
                may capture the launches in a command buffer, whose replays do not call Python.
    otherwise   tasks that need the array library, and all tasks of the numpy backend, run on views of the buffers, and
                their results are copied into the result buffers. On a GPU this allocates from CuPy's pool and keeps the
                call out of command buffers.

XLA never lets a result share memory with an operand here, even if it is donated: no aliases are declared. An exception
in a callback becomes the call's ``JaxRuntimeError``, with its message and traceback.
"""
from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.buffer_callback import buffer_callback

from cupy_dma import backends, checks
from cupy_dma.arrays import ALIGNMENT, CPU, Device, Library, Operand, library_named, numpy_dtype, packed_strides
from cupy_dma.jax import batching
from cupy_dma.jax.arguments import on_gpu
from cupy_dma.jax.tasks import NAMES, ArraySpec, Task, results_of, run

_DLPACK_CPU = 1


def run_program(task: Task, arrays: dict[str, Any]) -> dict[str, Any]:
    """The results of a task by name; operands that are None are left out."""
    given = {name: arrays[name] for name in NAMES[task.operation] if arrays.get(name) is not None}
    program = program_of(task, tuple((name, tuple(x.shape), x.dtype.name) for name, x in given.items()), on_gpu())
    return dict(zip(program.results, program.run(*given.values())))


@functools.lru_cache(maxsize=4096)
def program_of(task: Task, operands: tuple[tuple[str, tuple[int, ...], str], ...], for_gpu: bool) -> Program:
    """The program of a task for operands of these names, shapes and types, one for each combination: jax compiles eager
    calls once per callback. ``for_gpu``: whether it is expected to run on a GPU; if not it runs without one."""
    return Program(task, operands, for_gpu)


class Program:
    """A task for operands of fixed shapes and types."""

    def __init__(self, task: Task, operands: tuple[tuple[str, tuple[int, ...], str], ...], for_gpu: bool):
        self.task = task
        self.specs: dict[str, ArraySpec] = {name: (shape, dtype) for name, shape, dtype in operands}
        self.results = dict(results_of(task, self.specs))
        self._programs = {} if checks.wants_values_checked() else self._build_all(for_gpu)
        self.built = bool(self._programs)
        self.workspace = max((built.workspace for built, _ in self._programs.values()), default=0)  # bytes
        self.run = custom_vmap(self._call)
        self.run.def_vmap(functools.partial(batching.rule, self, run_program))

    # ---- when a function is traced ----------------------------------------------------------------------------------

    def _call(self, *arrays: Any) -> tuple[Any, ...]:
        specs = [jax.ShapeDtypeStruct(shape, numpy_dtype(dtype)) for shape, dtype in self._filled()]
        call = buffer_callback(self._fill, specs, command_buffer_compatible=self.built)
        axes = batching.manual_axes(arrays)
        return tuple([batching.varying(x, axes) for x in call(*arrays)[:len(self.results)]])

    def _filled(self) -> list[ArraySpec]:
        """What the callback fills: the results, and the workspace if there is one."""
        return [*self.results.values(), *([((self.workspace,), "uint8")] if self.workspace else [])]

    def _build_all(self, for_gpu: bool) -> dict[Device, Any]:
        """The programs for all devices of this process, or none. All are made now, because a captured call must not
        load kernels. Problems of the backend are reported when the call runs."""
        devices = [CPU]
        if for_gpu:
            if self.task.backend not in (None, "cuda") or backends.why_not("cuda") is not None:
                return {}
            devices = [Device("cuda", x.local_hardware_id) for x in jax.local_devices(backend="gpu")]
        found = {device: self._build_on(device) for device in devices}
        return {} if None in found.values() else found

    def _build_on(self, device: Device) -> Any:
        """The program on a device, and what launches it."""
        library = library_named("numpy" if device == CPU else "cupy")
        operands = {name: Operand(name, SimpleNamespace(shape=shape), library, shape, packed_strides(shape), dtype,
                                  device, ALIGNMENT) for name, (shape, dtype) in self.specs.items()}
        module: Any = backends.choose(self.task.backend, operands.values())
        make = getattr(module, "build_program", None)
        if make is None or not module.keeps_programs():
            return None
        names = list(self.specs)

        def function(functions: Any, *stand_ins: Operand) -> tuple[Any, ...]:
            return run(self.task, functions, dict(zip(names, stand_ins)))

        built = make(function, list(operands.values()))
        return None if built is None else (built, module.launch)

    # ---- when it runs -----------------------------------------------------------------------------------------------

    def _fill(self, context: Any, results: Any, *operands: Any) -> None:
        """The callback: fill the buffers of the results."""
        kind, index = operands[0].__dlpack_device__()
        if kind == _DLPACK_CPU:
            arrays = [np.asarray(x) for x in (*operands, *results)]
            self.fill(CPU, 0, [x.ctypes.data for x in arrays], lambda: arrays)
        else:
            addresses = [x.__cuda_array_interface__["data"][0] for x in (*operands, *results)]
            device = Device("cuda", index)
            self.fill(device, context.stream, addresses, lambda: self._cupy_arrays(addresses, device))

    def fill(self, device: Device, stream: int, addresses: list[int], arrays: Any) -> None:
        """Fill the results, at the last of these addresses, from the operands at the first. ``arrays()`` views them."""
        program = self._programs.get(device)
        if program is not None:
            bits = 0
            for address in addresses:
                bits |= address
            if not bits % ALIGNMENT:
                built, launch = program
                launch(built, addresses if built.workspace or not self.workspace else addresses[:-1], stream, arrays)
                return
        if device == CPU:
            self._fill_directly(library_named("numpy"), device, arrays())
            return
        import cupy

        with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(_Stream(stream)):
            if self.built and cupy.cuda.runtime.streamIsCapturing(stream):
                raise RuntimeError("a captured call needs operands at multiples of 16 bytes; set "
                                   "XLA_FLAGS=--xla_gpu_enable_command_buffer= to disable command buffers")
            self._fill_directly(library_named("cupy"), device, arrays())

    def _fill_directly(self, library: Library, device: Device, arrays: list[Any]) -> None:
        given = {name: Operand(name, array, library, shape, packed_strides(shape), dtype, device,
                               library.pointer(array))
                 for (name, (shape, dtype)), array in zip(self.specs.items(), arrays)}
        module = backends.choose(self.task.backend, given.values())
        for result, found in zip(arrays[len(given):], run(self.task, module, given)):
            if result.size:
                result[...] = found

    def _cupy_arrays(self, addresses: list[int], device: Device) -> list[Any]:
        import cupy

        found = []
        for address, (shape, dtype) in zip(addresses, (*self.specs.values(), *self._filled())):
            kind = numpy_dtype(dtype)
            size = int(np.prod(shape)) * kind.itemsize
            memory = cupy.cuda.UnownedMemory(address, size, None, device.index)
            found.append(cupy.ndarray(shape, kind, cupy.cuda.MemoryPointer(memory, 0)))
        return found


class _Stream:
    """XLA's stream, for ``cupy.cuda.Stream.from_external``."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
