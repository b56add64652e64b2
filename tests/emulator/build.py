"""Compiling the emulator's driver and the kernels with g++, on first use, into the user's cache directory.

A kernel is compiled from the text that a GPU would get (prelude and source), behind ``include/cuda_host.h``, in one of
three builds:

- ``watched``: every load and store is reported to the driver (g++ -fsanitize=thread without its library), which finds
  races, accesses out of bounds and reads of uninitialised memory; undefined behaviour traps.
- ``plain``: undefined behaviour traps, nothing is reported: several times faster.
- ``address``: AddressSanitizer; the interpreter must run with ``LD_PRELOAD`` of libasan (``make test-sanitize``).

The output file is named by a digest of all inputs. ``CUPY_DMA_EMULATOR_FLAGS`` adds compiler flags (``-g -O0`` for a
debugger).
"""
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cupy_dma.backends.cuda.runtime import disk_cache, jit

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
# Debug information has only lines and inlining, which messages of faults name: records of variables make g++ slow. With
# -g -O0 in CUPY_DMA_EMULATOR_FLAGS a debugger gets them.
_COMMON = ("-std=c++17", "-gdwarf-4", "-g1", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off",
           "-U_FORTIFY_SOURCE")
_DRIVER = (*_COMMON, "-O2", "-Wall", "-Wextra")
# Uninitialised variables hold a pattern: -1.7e38 as float. -Og, because most test kernels take longer to compile than
# to run: compared with -O1, it compiles in two thirds of the time and its code takes 1.2 times as long.
_KERNEL = (*_COMMON, "-Og", "-w", "-ftrivial-auto-var-init=pattern", "-DCUPY_DMA_HOST", f"-I{INCLUDE}")
_TRAPS = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
# These checks look for wrong addresses, which accesses reveal anyway, and take a quarter of g++'s time.
_WATCHED = "-fno-sanitize=null,object-size,pointer-overflow"
BUILDS = {
    "watched": ("-fsanitize=thread", *_TRAPS, _WATCHED),
    "plain": _TRAPS,
    "address": ("-fsanitize=address", *_TRAPS),
}
# The dynamic shared memory of every kernel: the most that any GPU gives a block. Static shared memory is added.
_DYNAMIC_BYTES = 227 * 1024
_EPILOGUE = f"""
#line 1 "generated"
alignas(1024) thread_local unsigned char shared_memory[{_DYNAMIC_BYTES}];
extern "C" unsigned char* dynamic_shared_memory() {{ return shared_memory; }}
extern "C" const size_t dynamic_shared_size = {_DYNAMIC_BYTES};
#ifndef CLUSTER
#define CLUSTER 1
#endif
extern "C" const unsigned cluster_size = CLUSTER;
"""


def unavailable() -> str | None:
    """Why this machine cannot compile kernels, or None."""
    if shutil.which(_compiler()) is None:
        return f"the emulator needs a C++ compiler: {_compiler()} was not found (install g++, or set CXX)"
    if importlib.util.find_spec("pybind11") is None:
        return "the emulator needs pybind11: pip install pybind11"
    return None


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def _identity() -> str:
    """All inputs of every library besides its own text and flags."""
    version = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    headers = "".join(path.read_text() for path in sorted(INCLUDE.glob("*.h")))
    return version + headers


def _digest(text: str, flags: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join((_identity(), text, *flags)).encode()).hexdigest()[:24]


@contextmanager
def _making(path: Path) -> Iterator[Path]:
    """A directory in which to make the file. It is moved to its place at the end, so readers see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        yield Path(work)
        os.replace(Path(work) / path.name, path)


def _run_compiler(name: str, *arguments: str | Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # without AddressSanitizer
    done = subprocess.run([_compiler(), *arguments], env=plain, capture_output=True, text=True)
    if done.returncode:
        raise jit.CompileError(f"{name} does not compile for the emulator:\n{done.stderr}")


def _headers(flags: tuple[str, ...]) -> Path:
    """A directory with the kernels' headers, precompiled with these flags; g++ must search it before ``include/``."""
    path = disk_cache.directory() / "emulator" / f"headers-{_digest('', flags)}" / "cuda_host.h.gch"
    if not path.is_file():
        with _making(path) as work:
            _run_compiler("cuda_host.h", "-x", "c++-header", INCLUDE / "cuda_host.h", "-o", work / path.name, *flags)
    return path.parent


def _compiled(name: str, text: str, flags: tuple[str, ...], link: tuple[str, ...], headers: Path | None = None) -> Path:
    """The shared object of a source text; ``text`` is compiled as C++ from a file beside it, which debuggers find."""
    path = disk_cache.directory() / "emulator" / f"{name}-{_digest(text, flags)}.so"
    if path.is_file():
        return path
    with _making(path) as work:
        source, compiled = work / f"{name}.cpp", work / f"{name}.o"
        source.write_text(text)
        ahead = () if headers is None else (f"-I{headers}", "-include", "cuda_host.h")
        # In two steps, because -fsanitize=thread would link the sanitizer's library.
        _run_compiler(name, source, "-c", "-o", compiled, *ahead, *flags)
        _run_compiler(name, compiled, "-shared", "-o", work / path.name, *link)
    return path


def kernel_library(config: jit.Config, build: str) -> Path:
    """The kernels of a configuration, compiled for the CPU."""
    return compile_text(Path(config.source).stem, with_twins(config.text()), build)


def with_twins(text: str) -> str:
    """A source text in which the twins of include/sm90_host.h replace the inline assembly of sm90/ptx.cuh."""
    def replace(match: re.Match) -> str:
        paragraphs, twins = [], "#include <sm90_host.h>"
        for paragraph in match[2].split("\n\n"):
            if re.search(r"\basm\b", paragraph):
                paragraph, twins = twins + "\n" * paragraph.count("\n"), ""
            paragraphs.append(paragraph)
        return match[1] + "\n\n".join(paragraphs)

    return re.sub(r'(#line \d+ "sm90/ptx\.cuh"\n)(.*?)(?=#line|\Z)', replace, text, flags=re.DOTALL)


def compile_text(name: str, text: str, build: str) -> Path:
    """The kernels of a source text."""
    entries = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", text)
    text += _EPILOGUE + "".join(f"KERNEL_ENTRY({entry})\n" for entry in entries)
    flags = (*_KERNEL, *BUILDS[build], *os.environ.get("CUPY_DMA_EMULATOR_FLAGS", "").split())
    # Kernels need few of the libraries that g++ would search.
    link = ("-fsanitize=address",) if build == "address" else ("-nostartfiles", "-nodefaultlibs", "-lgcc", "-lm", "-lc")
    return _compiled(name, text, flags, link, _headers(flags))


@functools.cache
def driver() -> Any:
    """The extension module that runs kernels."""
    import pybind11

    name = "cupy_dma_emulator"
    parts = "".join(path.read_text() for path in sorted((HERE / "driver").iterdir()))
    text = f"// {hashlib.sha256(parts.encode()).hexdigest()}\n#include \"{HERE / 'driver' / 'driver.cpp'}\"\n"
    includes = (pybind11.get_include(), sysconfig.get_path("include"))
    path = _compiled(f"driver-{sys.implementation.cache_tag}", text,
                     (*_DRIVER, f"-DDRIVER_NAME={name}", *(f"-I{place}" for place in includes)), ("-ldl",))
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
