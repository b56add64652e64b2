"""``cupy_dma.jit``: a user's kernel, compiled and launched like this project's own.

On a GPU NVRTC compiles it, the disk cache keeps it, and it is launched on the caller's current stream. With CPU arrays
it runs on the emulator (docs/emulator.md), which is part of a checkout.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupy_dma import backends, checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.backends.cuda.runtime.jit import SourceConfig
from cupy_dma.backends.cuda.runtime.params import Params

# Types behind pointers, and the array types that they accept; other pointers are not checked.
_ELEMENTS = {"float": "float32", "double": "float64", "__half": "float16", "__nv_bfloat16": "bfloat16", "int": "int32",
             "long long": "int64", "unsigned char": "uint8", "bool": "bool"}
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*'
                    r"\(\s*(?:const\s+)?(?:__grid_constant__\s+)?(?:const\s+)?(\w+)\s+\w+\s*\)")


@dataclass(frozen=True)
class Launch:
    """One checked launch: the argument of a backend's ``run_kernel``."""

    config: SourceConfig
    entry: str
    shared_bytes: int
    grid: int
    threads: int
    params: bytes
    operands: tuple[Operand, ...]
    writable: frozenset[str]  # names of the operands that the kernel may write


class UserKernel:
    """A kernel made by ``cupy_dma.jit``; call it to launch it."""

    def __init__(self, config: SourceConfig, entry: str, params: Params, shared_bytes: int, backend: str | None):
        self.entry, self.shared_bytes, self.backend = entry, shared_bytes, backend
        self._config, self._params = config, params

    def __repr__(self) -> str:
        return f"<kernel {self.entry}({', '.join(self._params.names)})>"

    def __call__(self, grid: int, threads: int, /, **fields: Any) -> None:
        """Launch ``grid`` blocks of ``threads`` threads; ``fields`` are the members of the parameter struct by name.

        Raises
        ------
        TypeError
            A member is missing or unknown, or an array has another type than its pointer.
        ValueError
            An array is not contiguous, arrays are on different devices, or a number is out of range.
        RuntimeError
            The kernel cannot be compiled or run here.
        """
        grid, threads = checks.whole(grid, "grid", 1), checks.whole(threads, "threads", 1)
        types = self._params.types
        if fields.keys() != types.keys():
            raise TypeError(f"{self.entry} takes {', '.join(types)}, got {', '.join(fields) or 'nothing'}")
        operands = {name: _array(fields[name], name, kind) for name, kind in types.items() if kind.endswith("*")}
        if not operands:
            raise TypeError(f"{self.entry} must have a pointer among its parameters, got {', '.join(types)}")
        checks.require_same_device(operands.values())
        numbers = {name: checks.real(fields[name], name) if kind == "float" else _integer(fields[name], name, kind)
                   for name, kind in types.items() if name not in operands}
        params = self._params.pack(**numbers, **{name: operand.pointer for name, operand in operands.items()})
        writable = frozenset(name for name in operands if not types[name].startswith("const"))
        _backend(self.backend, operands.values()).run_kernel(Launch(
            self._config, self.entry, self.shared_bytes, grid, threads, params, tuple(operands.values()), writable))


def jit(source: str | Path, entry: str | None = None, *, defines: Mapping[str, int | float | bool | str] | None = None,
        shared_bytes: int = 0, backend: str | None = None) -> UserKernel:
    """A CUDA kernel from its source, compiled at its first launch.

    Parameters
    ----------
    source : str or Path
        CUDA C++, or the path of a file with it (a ``Path``, or a str that ends in ``.cu``). It may include this
        project's headers, such as ``#include "common/arch.cuh"``.
    entry
        The kernel's name, if the source has several. Kernels are ``extern "C" __global__`` and take one struct, whose
        members are ``int``, ``long long``, ``float``, and pointers, each in a statement of its own. The kernel
        writes through pointers that are not ``const``.
    defines
        ``#define`` lines ahead of the source: the kernel's compile-time options.
    shared_bytes
        Dynamic shared memory of a block, ``extern __shared__ unsigned char shared_memory[];``.
    backend
        ``"cuda"`` for CUDA arrays, ``"emulator"`` for CPU arrays, in a checkout after ``import tests.emulator``; by
        default the one that supports the arrays of the launch.

    Returns
    -------
    UserKernel
        Call it with the number of blocks, the threads of a block, and the members of the struct by name.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The source has no kernel of that name or form, or a struct with other members.

    Examples
    --------
    >>> scale = dma.jit('''
    ... struct Params {
    ...     const float* x;  // (n)
    ...     float* y;        // (n)
    ...     int n;
    ... };
    ... extern "C" __global__ void scale(const Params p) {
    ...     const int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...     if (i < p.n) p.y[i] = FACTOR * p.x[i];
    ... }''', defines={"FACTOR": 3})
    >>> scale
    <kernel scale(x, y, n)>

    With CuPy arrays, ``scale(blocks, 128, x=x, y=y, n=x.size)`` launches it on the current stream.
    """
    name, text = "user.cu", source
    if isinstance(source, Path) or source.endswith(".cu"):
        path = Path(source)
        name, text = path.name, path.read_text()
    kernels = dict(_ENTRY.findall(str(text)))
    if entry is None and len(kernels) == 1:
        entry = next(iter(kernels))
    if entry is None or entry not in kernels:
        raise ValueError(f'entry must name a kernel of the source, extern "C" __global__ void name(const Params p); '
                         f"it has {', '.join(kernels) or 'none of that form'}, got {entry!r}")
    if not re.search(rf"struct {kernels[entry]} \{{.*?\n\}};", str(text), re.DOTALL):
        raise ValueError(f"entry {entry} takes a struct {kernels[entry]}, which the source does not define")
    params = Params(str(text), kernels[entry])
    config = SourceConfig(name, str(text), tuple((defines or {}).items()))
    return UserKernel(config, entry, params, checks.whole(shared_bytes, "shared_bytes", 0), backend)


def _array(value: Any, name: str, kind: str) -> Operand:
    operand = describe(value, name)
    wanted = _ELEMENTS.get(kind.removeprefix("const").removesuffix("*").strip())
    if wanted is not None and operand.dtype != wanted:
        raise TypeError(f"{name} is a {kind} and must be {wanted}, got {operand.dtype}")
    step = 1
    for size, stride in zip(reversed(operand.shape), reversed(operand.strides)):
        if stride != step and size > 1:
            raise ValueError(f"{name} must be contiguous, got shape {operand.shape} and strides {operand.strides}")
        step *= size
    return operand


def _integer(value: Any, name: str, kind: str) -> int:
    bits = 64 if kind == "long long" else 32
    number = checks.whole(value, name, -(2 ** (bits - 1)))
    if number >= 2 ** (bits - 1):
        raise ValueError(f"{name} must be below 2**{bits - 1}, as {kind} holds it, got {number}")
    return number


def _backend(backend: str | None, operands: Any) -> Any:
    first = next(iter(operands))
    if backend is None and first.device.kind == "cpu":
        backend = "emulator"
        if not backends.is_registered(backend):
            raise RuntimeError(f"{first.name} is on the CPU, where kernels run on the emulator: in a checkout, import "
                               "tests.emulator first (it needs g++ and pybind11); otherwise pass CUDA arrays")
    module = backends.choose(backend, operands)
    if not hasattr(module, "run_kernel"):
        raise ValueError(f"backend must be 'cuda' or 'emulator', got {backend!r}")
    return module


def run_kernel(runtime: Any, launch: Launch) -> None:
    """On a GPU. Without PDL: user kernels need not wait for the previous kernel."""
    first = launch.operands[0]
    with runtime.on(first.device):
        runtime.load(launch.config, launch.entry, first.device.index, launch.shared_bytes).launch(
            launch.grid, launch.threads, launch.params, first.library.stream(first.device), pdl=False)
