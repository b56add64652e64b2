"""Compiled kernels on disk: NAME.cubin, and NAME.json with what the assembler said of it and its checksum.

Nothing here is ever trusted: a pair that is incomplete, unreadable or damaged counts as absent, and what is compiled
then takes its place. Files have the modes that the umask gives, so users may share a directory. Where nothing can be
written, a warning says so and kernels are kept for the process alone.
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
ATTEMPTS = 20  # at writing a file, which may be cleared before it is complete


class NotKeptWarning(RuntimeWarning):
    """Compiled kernels cannot be kept on disk."""


def directory() -> Path:
    """Where cubins are kept: ``CUPY_DMA_CACHE_DIR`` or the default (it need not exist yet)."""
    try:
        return Path(os.environ.get("CUPY_DMA_CACHE_DIR") or Path.home() / ".cache" / "cupy_dma")
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no home directory", DEFAULT) from error


def read(name: str) -> tuple[Path, dict[str, int]] | None:
    """The cubin of a kernel and its ``RESOURCES``; None if they are not there as they were written."""
    try:
        path = directory() / f"{name}.cubin"
        record = json.loads(path.with_suffix(".json").read_bytes())
        if record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest():
            return path, {resource: record[resource] for resource in RESOURCES}
    except (OSError, ValueError, KeyError, TypeError):  # absent, closed to this user, or cut off by a crash
        pass
    return None


def write(name: str, cubin: bytes, resources: dict[str, int]) -> Path:
    """Keep a cubin; returns where. A ``NotKeptWarning`` says if that is for this process alone."""
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
    """Raise ``NotKeptWarning`` if nothing can be kept, ahead of a long compilation."""
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
            unfinished = folder / f"{name}.{uuid.uuid4().hex}.tmp"  # readers see all of a file or none
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
    return NotKeptWarning(f"compiled kernels cannot be kept in {folder} ({error.strerror}): every process compiles "
                          "them anew. Set CUPY_DMA_CACHE_DIR to a directory that can be written")


@functools.cache
def _own_directory(process: int) -> Path:
    """Of this process, removed at its end; a process that it forks has another one."""
    folder = Path(tempfile.mkdtemp(prefix="cupy_dma-"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process has inherited what is to be done at exit
        shutil.rmtree(folder, ignore_errors=True)
