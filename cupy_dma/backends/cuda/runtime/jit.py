"""Kernels at run time: configuration -> prelude + source -> cubin -> launch.

A configuration is a frozen dataclass whose fields become ``#define`` lines (the prelude) in front of a plain CUDA C
file of ``kernels/``. Own ``#include "..."`` files are inlined, so source text, options, compiler version and CUDA's
headers together identify a cubin, which is stored on disk under their digest (disk_cache.py). Compiling needs NVRTC and
the CUDA headers but no GPU; loading goes through ``cupy.RawModule``, launching through launch.py.

Environment: ``CUPY_DMA_CACHE_DIR`` (disk_cache.py), ``CUPY_DMA_DEBUG=1`` (prints every kernel's configuration, compile
time, registers, spills and launch shape), ``CUDA_HOME``/``CUDA_PATH`` (headers), ``CUPY_DMA_EARLY=0`` (launch.py).
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cupy_dma.backends.cuda.runtime import disk_cache, launch
from cupy_dma.backends.cuda.runtime.params import Params

# What kernels include, and the version.
HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "mma.h", "crt/mma.h", "cuda_runtime_api.h")
DEBUG = os.environ.get("CUPY_DMA_DEBUG", "") not in ("", "0")


class CompileError(RuntimeError):
    """A kernel could not be compiled; the message holds the compiler's log or what to install."""


@dataclass(frozen=True)
class Config:
    """One source file, specialised. Subclasses add fields; each becomes ``#define NAME value`` (bool as 0 or 1)."""

    source: ClassVar[str]  # file under kernels/

    def prelude(self) -> str:
        fields = [(f.name.upper(), getattr(self, f.name)) for f in dataclasses.fields(self)]
        size = getattr(self, "shared_bytes", None)  # of a launch; a method if it depends on the launch's arguments
        return defines([*fields, ("SHARED_BYTES", size)] if isinstance(size, int) else fields)

    def text(self) -> str:
        """The complete source text for the compiler."""
        return self.prelude() + source_text(self.source)


@dataclass(frozen=True)
class SourceConfig(Config):
    """A source text that is not a file of ``kernels/``; it may include those."""

    source: ClassVar[str] = "user.cu"
    name: str  # in messages
    body: str = field(repr=False)
    definitions: tuple[tuple[str, Any], ...] = ()

    def prelude(self) -> str:
        return defines(self.definitions)

    def text(self) -> str:
        return self.prelude() + inlined(self.name, self.body)


def defines(pairs: Iterable[tuple[str, Any]]) -> str:
    """``#define`` lines; bool as 0 or 1."""
    return "".join(f"#define {name} {int(value) if isinstance(value, bool) else value}\n" for name, value in pairs)


@dataclass(frozen=True)
class Compiled:
    """A cubin on disk and the assembler's resource counts (the largest over its kernels)."""

    path: Path
    registers: int
    spill_bytes: int  # spill stores and loads together
    stack_bytes: int
    seconds: float  # compile time, 0.0 when it came from the cache


# ---- where things are ----
def kernels_directory() -> Path:
    """The directory of the ``.cu`` files: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[3]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "common" / "arch.cuh").is_file():
            return folder
    raise FileNotFoundError(f"no kernels/common/arch.cuh in {package} or {package.parent}: the installation is "
                            "incomplete")


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that CuPy uses."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise CompileError("CuPy is not installed: pip install 'cupy_dma[cuda12]' (CUDA 12 drivers) or "
                           "'cupy_dma[cuda13]' (CUDA 13 drivers)") from error
    try:
        return tuple(nvrtc.getVersion())
    except (RuntimeError, OSError) as error:
        raise CompileError(f"CuPy cannot load NVRTC ({error}): pip install 'cuda-toolkit[nvrtc,cudart]'") from error


def _header_candidates() -> list[Path]:
    """Include directories that may hold CUDA headers, likeliest first."""
    found: list[Path] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found.append(Path(os.environ[variable]) / "include")
    for entry in sys.path:
        wheels = Path(entry or ".") / "nvidia"
        if wheels.is_dir():
            found += [wheels / f"cu{nvrtc_version()[0]}" / "include"]
            found += [wheels / part / "include" for part in ("cuda_runtime", "cuda_nvcc", "cuda_crt")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        found.append(Path(nvcc).resolve().parent.parent / "include")
    found += [Path("/usr/local/cuda/include"), Path("/opt/cuda/include")]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def _header_version(include: Path) -> tuple[int, int] | None:
    """CUDA version of a directory with cuda_runtime_api.h or cuda.h."""
    for name, pattern in (("cuda_runtime_api.h", r"#define\s+CUDART_VERSION\s+(\d+)"),
                          ("cuda.h", r"#define\s+CUDA_VERSION\s+(\d+)")):
        if (include / name).is_file():
            match = re.search(pattern, (include / name).read_text(errors="replace"))
            if match:
                return int(match[1]) // 1000, int(match[1]) % 1000 // 10
    return None


@functools.cache
def find_headers() -> tuple[Path, ...]:
    """Include directories that together hold cuda_fp16.h, mma.h and crt/mma.h.

    One directory (or pair of wheels) of NVRTC's own major version is preferred, then of its minor version.

    Raises
    ------
    CompileError
        If there are none; says what to install.
    """
    wanted = nvrtc_version()
    candidates = _header_candidates()

    def distance(folder: Path) -> tuple[bool, int]:
        version = _header_version(folder)
        return (version is None or version[0] != wanted[0], abs((version or wanted)[1] - wanted[1]))

    runtimes = sorted((p for p in candidates if (p / "cuda_fp16.h").is_file() and (p / "mma.h").is_file()
                       and not distance(p)[0]), key=distance)
    for runtime in runtimes:
        if (runtime / "crt" / "mma.h").is_file():
            return (runtime,)
    for runtime in runtimes:
        for other in candidates:
            if (other / "crt" / "mma.h").is_file():
                return (runtime, other)
    major = wanted[0]
    part = "crt" if major >= 13 else "nvcc"
    raise CompileError(
        f"the CUDA headers mma.h and crt/mma.h for CUDA {major} were not found (NVRTC is {wanted[0]}.{wanted[1]}). "
        f"Install them with: pip install 'cuda-toolkit[cudart,{part}]=={major}.*', or set CUDA_HOME to a CUDA {major} "
        f"toolkit. Looked in: {', '.join(map(str, candidates)) or 'no directory at all'}")


@functools.cache
def headers_digest() -> str:
    """Of the contents of ``HEADERS``; where they lie does not matter."""
    found = hashlib.sha256()
    for name in HEADERS:
        path = next((folder / name for folder in find_headers() if (folder / name).is_file()), None)
        found.update(path.read_bytes() if path else b"")
    return found.hexdigest()


# ---- source ----
@functools.cache
def source_text(name: str) -> str:
    """A kernel file with its own includes inlined, each once; system includes stay. Lines keep their numbers."""
    return inlined(name, (kernels_directory() / name).read_text())


def inlined(name: str, text: str) -> str:
    """A source text with the included files of ``kernels/`` inlined."""
    seen: set[str] = set()

    def inline(file: str, text: str) -> str:
        seen.add(file)
        lines = [f'#line 1 "{file}"']
        for number, line in enumerate(text.splitlines(), 1):
            include = re.fullmatch(r'#include "([^"]+)"', line)
            if include and include[1] not in seen:
                inner = inline(include[1], (kernels_directory() / include[1]).read_text())
                lines += [inner.rstrip("\n"), f'#line {number + 1} "{file}"']
            else:
                lines.append("" if include or line == "#pragma once" else line)
        return "\n".join(lines) + "\n"

    return inline(name, text)


@functools.cache
def params(source: str, name: str) -> Params:
    """The parameter struct ``name`` of a kernel file."""
    return Params(source_text(source), name)


# ---- compiling ----
def _options(arch: str) -> tuple[str, ...]:
    return f"-arch={arch}", "-std=c++17", "--device-as-default-execution-space", "-lineinfo", "-Xptxas=-v"


def compile(config: Config, arch: str) -> Compiled:
    """The cubin of ``config`` for ``arch`` ("sm_80", "sm_90a", ...), from the disk cache if it is there; compiled again
    if its file has been cleared since the last call."""
    found = _compiled(config, arch)
    if not found.path.exists():
        _compiled.cache_clear()
        found = _compiled(config, arch)
    return found


@functools.cache
def _compiled(config: Config, arch: str) -> Compiled:
    text = config.text()
    identity = json.dumps([text, _options(arch), nvrtc_version(), headers_digest()])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:24]
    name = f"{Path(config.source).stem}-{arch}-{digest}"
    if found := disk_cache.read(name):
        path, resources = found
        return Compiled(path=path, seconds=0.0, **resources)

    started = time.perf_counter()
    cubin, log = _run_nvrtc(text, config, arch)
    resources = _read_resources(log)
    seconds = time.perf_counter() - started
    compiled = Compiled(path=disk_cache.write(name, cubin, resources), seconds=seconds, **resources)
    if DEBUG:
        print(f"cupy_dma: {config} {arch}: {compiled.seconds:.2f} s, {compiled.registers} registers, "
              f"{compiled.spill_bytes} bytes spilled", file=sys.stderr)
    return compiled


compile.cache_clear = _compiled.cache_clear  # type: ignore[attr-defined]  # to look on the disk again


def _run_nvrtc(text: str, config: Config, arch: str) -> tuple[bytes, str]:
    options = (*_options(arch), *(f"-I{folder}" for folder in find_headers()))
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, config.source, (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise CompileError(f"{config} does not compile for {arch} ({error}):\n"
                               f"{nvrtc.getProgramLog(program)}") from error
        # CuPy strips the last byte as if it ended a string; an ELF file needs it.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def _read_resources(log: str) -> dict[str, int]:
    def number(pattern: str) -> int:
        return max(map(int, re.findall(pattern, log)), default=0)

    return {"registers": number(r"Used (\d+) registers"), "stack_bytes": number(r"(\d+) bytes stack frame"),
            "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")}


def arch_name(capability: int) -> str:
    """"sm_90a" and the like for a compute capability such as 90."""
    return f"sm_{capability}" + ("a" if capability == 90 else "")


def architectures() -> list[str]:
    """The architecture for which this NVRTC compiles the kernels."""
    nvrtc_version()  # says what is missing
    from cupy.cuda import nvrtc

    return [arch_name(capability) for capability in nvrtc.getSupportedArchs() if capability >= 80]


# ---- loading and launching ----
@functools.cache
def device_arch(index: int) -> str:
    """The architecture of CUDA device ``index``."""
    import cupy

    return arch_name(int(cupy.cuda.Device(index).compute_capability))


class Kernel:
    """A loaded kernel of one device. ``launch`` needs that device to be current."""

    def __init__(self, config: Config, entry: str, index: int, shared_bytes: int):
        import cupy

        self.entry = entry
        self.shared_bytes = shared_bytes
        with cupy.cuda.Device(index) as device:
            path, module, function = _loaded(config, entry, index)
            if shared_bytes > 48 * 1024:
                launch.allow_shared(function, (path, entry, index), shared_bytes)
            self._loaded = module, function.kernel  # for as long as the driver has their handle
            self.function = launch.Function(entry, function.kernel.ptr, shared_bytes,
                                            launch.supports_pdl(int(device.compute_capability)), device.use)

    def launch(self, grid: int, threads: int, params: bytes, stream: int, pdl: bool = True) -> None:
        """Launch ``grid`` blocks of ``threads`` threads on the raw ``stream``; ``params`` is their struct.

        ``pdl``: programmatic dependent launch, if the device supports it: blocks may start while the previous kernel
        still runs, and wait. They then gather where there is room, several on the SMs that finish first; without PDL
        they are spread evenly. PDL saves 1 us per launch, but gathered blocks of long work may run at half the speed.
        """
        if DEBUG:
            print(f"cupy_dma: {self.entry}: {grid} blocks of {threads} threads, {self.shared_bytes} bytes",
                  file=sys.stderr)
        self.function.launch(grid, threads, params, stream, pdl)


def _loaded(config: Config, entry: str, index: int) -> tuple[str, Any, Any]:
    """A cubin's path, its module on the current device ``index``, and the module's function ``entry``."""
    import cupy

    while True:
        path = compile(config, device_arch(index)).path
        try:
            module = cupy.RawModule(path=str(path))
            return str(path), module, module.get_function(entry)
        except Exception:
            if path.exists():
                raise  # otherwise it has been cleared in the meantime


@functools.cache
def load(config: Config, entry: str, index: int, shared_bytes: int = 0) -> Kernel:
    """The ``__global__`` function ``entry`` of ``config`` on CUDA device ``index``, compiled on first use."""
    return Kernel(config, entry, index, shared_bytes)
