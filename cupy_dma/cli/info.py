"""What this machine offers and what cupy_dma makes of it: ``python -m cupy_dma info``.

Every line is found on its own and reports its own failure, since this is what a user runs when something is broken.
Nothing here needs CuPy, torch or a GPU.
"""
from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cupy_dma.backends import NAMES, why_not

INSTALL_CUDA = ("pip install 'cupy_dma[cuda12]' for a CUDA 12 driver, 'cupy_dma[cuda13]' for a CUDA 13 driver "
                "(one of the two, never both)")


def describe() -> Iterator[tuple[str, str]]:
    """Pairs of a label and what was found."""
    yield "cupy_dma", own_version()
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in ("numpy", "ml_dtypes"):
        yield package, installed_version(package)
    yield "cupy", _try(lambda: __import__("cupy").__version__, missing=f"not installed: {INSTALL_CUDA}")
    for package in ("torch", "triton", "jax", "flax", "transformers"):
        yield package, installed_version(package)
    yield "CUDA driver", _try(lambda: cuda_version(_runtime().driverGetVersion()) or "none")
    yield "CUDA runtime", _try(lambda: cuda_version(_runtime().runtimeGetVersion()))
    yield "NVRTC", _try(nvrtc_version)
    yield from _devices()
    yield "kernels", _try(lambda: kernels(_jit().kernels_directory()))
    yield "crt/mma.h", _try(lambda: headers(_jit().find_headers()))
    yield "cache", _try(lambda: cache(_disk_cache().directory()))
    yield "stored dS", _try(stored)
    for backend, reason in backends():
        yield f"backend {backend}", reason or "available"


def own_version() -> str:
    here = Path(__file__).parent.parent
    try:
        return f"{importlib.metadata.version('cupy_dma')} in {here}"
    except importlib.metadata.PackageNotFoundError:
        return f"not installed, run from {here}"


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cuda_version(number: int) -> str:
    """12090 -> 12.9; empty for 0, which is what the runtime answers where there is no driver."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def nvrtc_version() -> str:
    from cupy.cuda import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


def kernels(directory: Any) -> str:
    found = sum(1 for path in Path(directory).rglob("*.cu*"))
    return f"{found} sources in {directory}"


def headers(found: Any) -> str:
    return ", ".join(map(str, found)) if isinstance(found, (list, tuple)) else str(found)


def cache(directory: Path) -> str:
    files = [path for path in directory.rglob("*") if path.is_file()] if directory.is_dir() else []
    return f"{directory} ({len(files)} files, {sum(path.stat().st_size for path in files):,} bytes)"


def stored() -> str:
    from cupy_dma.backends.cuda.attention import sm90_stored

    return f"at most {sm90_stored.max_stored() >> 20} MiB in a backward pass ({sm90_stored.VARIABLE})"


def backends() -> list[tuple[str, str]]:
    """Every backend with the reason why it cannot run here, empty if it can."""
    return [(name, why_not(name) or "") for name in NAMES]


def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


def _jit() -> Any:
    from cupy_dma.backends.cuda.runtime import jit

    return jit


def _disk_cache() -> Any:
    from cupy_dma.backends.cuda.runtime import disk_cache

    return disk_cache


def _devices() -> Iterator[tuple[str, str]]:
    try:
        runtime = _runtime()
        count = runtime.getDeviceCount()
    except ModuleNotFoundError:
        yield "device", "unknown without cupy"
        return
    except Exception as error:
        yield "device", f"none ({_words(error)})"
        return
    for index in range(count):
        properties = runtime.getDeviceProperties(index)
        yield f"device {index}", (f"{properties['name'].decode()}, sm_{properties['major']}{properties['minor']}, "
                                  f"{properties['multiProcessorCount']} SMs, "
                                  f"{properties['totalGlobalMem'] / 2**30:.0f} GiB")


def _try(question: Callable[[], str], missing: str = "") -> str:
    try:
        return question()
    except ModuleNotFoundError as error:
        return missing or f"unknown without {error.name}"
    except Exception as error:
        return _words(error)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def main(shape: str | None = None, arch: str = "sm_90a") -> int:
    """``shape``: of a call to explain instead."""
    if shape is not None:
        from cupy_dma.backends.cuda.explain import DescribedDevice, explain

        print(explain(shape, DescribedDevice(arch)))
        return 0
    found = list(describe())
    width = max(len(label) for label, _ in found)
    for label, text in found:
        print(f"{label:<{width}}  {text}")
    return 0
