"""Compiled kernels on disk: NAME.cubin, and NAME.json with the assembler's resource counts and the cubin's checksum.

Nothing read from disk is trusted: an incomplete, unreadable or damaged pair counts as absent and is compiled again.
File modes follow the umask, so users may share a directory. If nothing can be written, a warning says so and kernels
are kept for this process only.
"""
from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import tempfile
import uuid
import warnings
from pathlib import Path

RESOURCES = ("registers", "spill_bytes", "stack_bytes")
DEFAULT = "~/.cache/cupy_dma"
ATTEMPTS = 20  # at writing a file, which another process may clear before it is complete


class NotKeptWarning(RuntimeWarning):
    """Compiled kernels cannot be kept on disk."""


def directory() -> Path:
    """Where cubins are kept: ``CUPY_DMA_CACHE_DIR`` or the default (it need not exist yet)."""
    try:
        return Path(os.environ.get("CUPY_DMA_CACHE_DIR") or Path.home() / ".cache" / "cupy_dma")
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no home directory", DEFAULT) from error


def read(name: str) -> tuple[Path, dict[str, int]] | None:
    """The cubin of a kernel and its ``RESOURCES``; None unless both are there, undamaged."""
    try:
        path = directory() / f"{name}.cubin"
        record = json.loads(path.with_suffix(".json").read_bytes())
        if record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest():
            return path, {resource: record[resource] for resource in RESOURCES}
    except (OSError, ValueError, KeyError, TypeError):  # absent, not readable by this user, or truncated by a crash
        pass
    return None


def write(name: str, cubin: bytes, resources: dict[str, int]) -> Path:
    """Store a cubin; returns its path. ``NotKeptWarning`` if it is kept for this process only."""
    record = json.dumps({**resources, "sha256": hashlib.sha256(cubin).hexdigest()}).encode()
    files = {f"{name}.cubin": cubin, f"{name}.json": record}
    try:
        folder = directory()
        _write_files(folder, files)
    except OSError as error:
        warnings.warn(_not_kept(error), stacklevel=2)
        folder = _own_directory(os.getpid())
        _write_files(folder, files)
    return folder / f"{name}.cubin"


def require_writable() -> None:
    """Raise ``NotKeptWarning`` ahead of a long compilation if nothing can be stored."""
    try:
        folder = directory()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _not_kept(error) from error


def clear() -> tuple[int, int]:
    """Delete all cached cubins. Returns (files, bytes) removed."""
    sizes = []
    for file in directory().glob("*"):
        if file.suffix in (".cubin", ".json", ".tmp"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed or renamed it
                size = file.stat().st_size
                file.unlink()
                sizes.append(size)
    return len(sizes), sum(sizes)


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        for attempts_left in reversed(range(ATTEMPTS)):
            unfinished = folder / f"{name}.{uuid.uuid4().hex}.tmp"  # readers see a whole file or none
            try:
                folder.mkdir(parents=True, exist_ok=True)
                unfinished.write_bytes(content)
                os.replace(unfinished, folder / name)
                break
            except FileNotFoundError:  # cleared meanwhile
                if not attempts_left:
                    raise
            finally:
                unfinished.unlink(missing_ok=True)


def _not_kept(error: OSError) -> NotKeptWarning:
    folder = os.environ.get("CUPY_DMA_CACHE_DIR") or DEFAULT
    return NotKeptWarning(f"compiled kernels cannot be stored in {folder} ({error.strerror}): every process compiles "
                          "them anew. Set CUPY_DMA_CACHE_DIR to a writable directory")


@functools.cache
def _own_directory(process: int) -> Path:
    """A directory of this process, removed at its end; a forked process gets another one."""
    folder = Path(tempfile.mkdtemp(prefix="cupy_dma-"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # forked processes inherit the exit handler
        shutil.rmtree(folder, ignore_errors=True)
