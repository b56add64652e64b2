"""The disk cache of compiled kernels serves other users, heals what is damaged, and says where it cannot write. The
compiler is a stand-in that counts its calls."""
from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import pytest

from cupy_dma.backends.cuda.runtime import configs, disk_cache, jit

CUBIN = b"\x7fELF and so on"


class Compiler:
    """Stands in for NVRTC."""

    def __init__(self):
        self.calls = 0

    def __call__(self, text, config, arch):
        self.calls += 1
        return CUBIN, "Used 17 registers\n8 bytes stack frame, 3 bytes spill stores, 4 bytes spill loads"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    found = Compiler()
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(jit, "find_headers", lambda: ())
    monkeypatch.setattr(jit, "_run_nvrtc", found)
    yield found
    jit.compile.cache_clear()


def compile_anew() -> jit.Compiled:
    """As another process would."""
    jit.compile.cache_clear()
    compiled = jit.compile(configs.LayoutConfig("__half"), "sm_80")
    assert compiled.path.read_bytes() == CUBIN
    assert (compiled.registers, compiled.stack_bytes, compiled.spill_bytes) == (17, 8, 7)
    return compiled


def test_what_is_kept_is_found_again(compiler):
    first, again = compile_anew(), compile_anew()
    assert compiler.calls == 1
    assert first.path == again.path and again.seconds == 0


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_mode_that_the_umask_gives(compiler, umask):
    before = os.umask(umask)
    try:
        folder = compile_anew().path.parent
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666 & ~umask}
    assert {path.suffix for path in folder.iterdir()} == {".cubin", ".json"}


@pytest.mark.parametrize("damaged", [
    b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"registers": 17}',
    b'{"registers": 17, "stack_bytes": 8, "spill_bytes": 7}', None])
def test_a_damaged_record_is_made_anew(compiler, damaged):
    record = compile_anew().path.with_suffix(".json")
    whole = record.read_bytes()
    record.unlink() if damaged is None else record.write_bytes(damaged)
    compile_anew()
    compile_anew()
    assert compiler.calls == 2
    assert record.read_bytes() == whole


@pytest.mark.parametrize("damaged", [b"", CUBIN[:-1], bytes(len(CUBIN)), None])
def test_a_damaged_cubin_is_made_anew(compiler, damaged):
    path = compile_anew().path
    path.unlink() if damaged is None else path.write_bytes(damaged)
    compile_anew()
    compile_anew()
    assert compiler.calls == 2


def test_files_of_another_user_are_replaced(compiler, monkeypatch):
    path = compile_anew().path
    read = Path.read_bytes

    def refuse(self):
        if self.parent == path.parent:
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    with monkeypatch.context() as closed:
        closed.setattr(Path, "read_bytes", refuse)
        jit.compile.cache_clear()
        assert jit.compile(configs.LayoutConfig("__half"), "sm_80").path == path
    compile_anew()
    assert compiler.calls == 2


def test_a_directory_that_cannot_be_written_is_named_and_the_kernel_kept(compiler, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(disk_cache.NotKeptWarning, match=r"cannot be kept in .*file/cache.*Set CUPY_DMA_CACHE_DIR"):
        compiled = compile_anew()
    assert compiled.path.parent not in tmp_path.parents
    assert stat.S_IMODE(compiled.path.parent.stat().st_mode) == 0o700


def test_it_is_said_once(compiler, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        compile_anew()
        jit.compile(configs.LayoutConfig("float"), "sm_80")
    assert len(said) == 1


def test_a_full_disk_leaves_nothing_unfinished(compiler, monkeypatch, tmp_path):
    write = Path.write_bytes

    def fill(self, content):
        if self.parent != tmp_path / "cache":
            return write(self, content)
        write(self, content[:3])
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.warns(disk_cache.NotKeptWarning, match="No space left on device"):
        compile_anew()
    assert not list((tmp_path / "cache").iterdir())


def test_no_home_directory(compiler, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUPY_DMA_CACHE_DIR")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(disk_cache.NotKeptWarning, match="no home directory.*CUPY_DMA_CACHE_DIR"):
        compile_anew()


def test_writable_can_be_asked_for_ahead(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path / "new" / "cache"))
    disk_cache.require_writable()
    assert not list((tmp_path / "new" / "cache").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(disk_cache.NotKeptWarning, match=r"file \(File exists\).*CUPY_DMA_CACHE_DIR"):
        disk_cache.require_writable()


def test_clearing_removes_our_files_alone(compiler):
    folder = compile_anew().path.parent
    (folder / "of a crash.cubin.0123.tmp").touch()
    (folder / "notes.txt").touch()
    files, size = disk_cache.clear()
    assert files == 3 and size > len(CUBIN)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
