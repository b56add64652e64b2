"""The disk cache of compiled kernels serves other users, repairs damaged files, and reports where it cannot write. The
compiler is a stand-in that counts its calls."""
from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cupy_dma.backends.cuda.runtime import configs, disk_cache, jit

CUBIN = b"\x7fELF and so on"
CONFIG = configs.LayoutConfig("__half")


def compile_anew() -> jit.Compiled:
    """Compile as another process would."""
    jit.compile.cache_clear()
    found = jit.compile(CONFIG, "sm_80")
    assert found.path.read_bytes() == CUBIN
    assert (found.registers, found.stack_bytes, found.spill_bytes) == (17, 8, 7)
    return found


def test_what_is_kept_is_found_again(compiled):
    first, again = compile_anew(), compile_anew()
    assert sum(compiled.values()) == 1
    assert first.path == again.path and again.seconds == 0


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_mode_that_the_umask_gives(compiled, umask):
    before = os.umask(umask)
    try:
        folder = compile_anew().path.parent
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666 & ~umask}
    assert {path.suffix for path in folder.iterdir()} == {".cubin", ".json"}


@pytest.mark.parametrize(("suffix", "damaged"), [
    *((".json", text) for text in (b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"registers": 17}',
                                   b'{"registers": 17, "stack_bytes": 8, "spill_bytes": 7}', None)),
    *((".cubin", text) for text in (b"", CUBIN[:-1], bytes(len(CUBIN)), None))])
def test_a_damaged_file_is_made_anew(compiled, suffix, damaged):
    path = compile_anew().path.with_suffix(suffix)
    whole = path.read_bytes()
    path.unlink() if damaged is None else path.write_bytes(damaged)
    compile_anew()
    compile_anew()
    assert sum(compiled.values()) == 2
    assert path.read_bytes() == whole


def test_files_of_another_user_are_replaced(compiled, monkeypatch):
    path = compile_anew().path
    read = Path.read_bytes

    def refuse(self):
        if self.parent == path.parent:
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    with monkeypatch.context() as closed:
        closed.setattr(Path, "read_bytes", refuse)
        jit.compile.cache_clear()
        assert jit.compile(CONFIG, "sm_80").path == path
    compile_anew()
    assert sum(compiled.values()) == 2


def test_a_directory_that_cannot_be_written_is_named_once_and_the_kernel_kept(compiled, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        folder = compile_anew().path.parent
        jit.compile(configs.LayoutConfig("float"), "sm_80")
    assert [warning.category for warning in said] == [disk_cache.NotKeptWarning]
    assert re.search(r"cannot be stored in .*file/cache.*Set CUPY_DMA_CACHE_DIR", str(said[0].message))
    assert folder not in tmp_path.parents and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_full_disk_leaves_nothing_unfinished(compiled, monkeypatch, tmp_path):
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


def test_no_home_directory(compiled, monkeypatch):
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


def test_clearing_removes_our_files_alone(compiled):
    folder = compile_anew().path.parent
    (folder / "of a crash.cubin.0123.tmp").touch()
    (folder / "notes.txt").touch()
    files, size = disk_cache.clear()
    assert files == 3 and size > len(CUBIN)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("change", [
    ("_options", lambda arch: (f"-arch={arch}", "--use_fast_math")), ("nvrtc_version", lambda: (12, 8)),
    ("source_text", lambda name: "// changed"),
    ("headers_digest", lambda: "others")], ids=lambda change: change[0])
def test_the_digest_covers_what_the_compiler_gets(compiled, monkeypatch, change):
    before = compile_anew().path
    with monkeypatch.context() as changed:
        changed.setattr(jit, *change)
        assert compile_anew().path != before
    assert compile_anew().path == before and sum(compiled.values()) == 2


def test_headers_count_by_content_not_by_place(tmp_path, monkeypatch):
    def digest(name, **texts):
        for file in ("mma.h", "crt/mma.h", "cuda_fp16.h"):
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts.get(Path(file).stem, file))
        monkeypatch.setattr(jit, "find_headers", lambda: (tmp_path / name,))
        return jit.headers_digest.__wrapped__()

    assert digest("here") == digest("there")
    assert len({digest("here"), digest("mma", mma="changed"), digest("half", cuda_fp16="changed")}) == 3


def test_clearing_beside_writers(compiled, monkeypatch):
    """Neither disturbs the other, although every unfinished file is removed a few times before it is complete."""
    write, cleared = Path.write_bytes, []

    def interrupted(self, content):
        write(self, content)
        if len(cleared) % 3 < 2:
            cleared.append(disk_cache.clear())
        else:
            cleared.append(None)

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = disk_cache.write("name", CUBIN, dict.fromkeys(disk_cache.RESOURCES, 0))
    assert path.parent == disk_cache.directory() and [*map(bool, cleared)] == [True, True, False] * 2


def test_clearing_beside_those_who_clear(compiled, monkeypatch):
    folder = compile_anew().path.parent
    unlink, others = Path.unlink, []

    def late(self, **options):
        if not others:
            others.append(1)
            for path in folder.iterdir():
                unlink(path)
        unlink(self, **options)

    monkeypatch.setattr(Path, "unlink", late)
    assert disk_cache.clear() == (0, 0) and not [*folder.iterdir()]


OWN = """
import os, sys, warnings
from cupy_dma.backends.cuda.runtime import disk_cache
warnings.simplefilter("ignore")
def write(name):
    return disk_cache.write(name, b"cubin", dict.fromkeys(disk_cache.RESOURCES, 0))
path, (read, end) = write("parent"), os.pipe()
if not os.fork():
    os.write(end, str(write("child").parent).encode())
    sys.exit()
os.wait()
child = os.read(read, 1000).decode()
print(path.exists(), child != str(path.parent), os.path.exists(child), path.parent)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_processes_leave_their_parents_directory(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, check=True,
                          env={**os.environ, "CUPY_DMA_CACHE_DIR": str(tmp_path / "file" / "cache"),
                               "TMPDIR": str(tmp_path)})
    *facts, folder = done.stdout.split()
    assert facts == ["True", "True", "False"]
    assert Path(folder).parent == tmp_path and not Path(folder).exists()  # the process has ended
