"""The command line, run in this process."""
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_dma import __main__ as cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def without_cupy(monkeypatch):
    """As if CuPy were not installed."""
    for name in [name for name in sys.modules if name == "cupy" or name.startswith("cupy.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)


def test_info_says_why_a_backend_cannot_run(capsys):
    assert cli.main(["info"]) == 0
    lines = dict(line.split(None, 1) if not line.startswith("backend") else (line[:14].strip(), line[14:].strip())
                 for line in capsys.readouterr().out.splitlines())
    assert "available" in lines["backend numpy"]
    assert lines["numpy"][0].isdigit()
    assert any(name.startswith("backend cuda") for name in lines)


def test_info_without_cupy(capsys, without_cupy):
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "cupy_dma[cuda12]" in shown
    assert "Traceback" not in shown


def test_warmup_without_cupy_says_what_to_install(capsys, without_cupy):
    assert cli.main(["warmup"]) == 2
    assert "cupy_dma[cuda12]" in capsys.readouterr().err


def test_warmup_for_another_architecture(capsys, monkeypatch, tmp_path):
    pytest.importorskip("cupy")
    cuda = pytest.importorskip("cupy_dma.backends.cuda")
    compiled = []
    monkeypatch.setattr(cuda, "warmup_jobs", lambda head_dims, dtypes, groups, arch: [
        (f"{size} {dtype} {group}", lambda job=(size, dtype, group): compiled.append((job, arch)))
        for size in head_dims for dtype in dtypes for group in groups])
    assert cli.main(["warmup", "--head-dim", "64", "--dtype", "bfloat16", "--group", "1", "2",
                     "--arch", "sm_90a"]) == 0
    assert compiled == [((64, "bfloat16", 1), "sm_90a"), ((64, "bfloat16", 2), "sm_90a")]
    assert "2 kernels are ready for sm_90a" in capsys.readouterr().out


def test_warmup_passes_on_what_the_compiler_says(capsys, monkeypatch):
    pytest.importorskip("cupy")
    from cupy_dma.backends import cuda
    from cupy_dma.backends.cuda.runtime import jit

    def job(arch):
        raise jit.CompileError(f"no such architecture as {arch}")

    monkeypatch.setattr(cuda, "warmup_jobs", lambda *given: [("a kernel", lambda: job(given[-1]))])
    assert cli.main(["warmup", "--arch", "sm_1"]) == 2
    assert "no such architecture as sm_1" in capsys.readouterr().err


def test_clear_cache_counts_what_it_removes(capsys, monkeypatch, tmp_path):
    pytest.importorskip("cupy_dma.backends.cuda.runtime.disk_cache")
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path))
    (tmp_path / "a.cubin").write_bytes(b"12345")
    (tmp_path / "notes.txt").write_text("not ours")
    assert cli.main(["clear-cache"]) == 0
    assert "removed 1 files, 5 bytes" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_command_is_required(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_module_is_executable(tmp_path):
    done = subprocess.run([sys.executable, "-m", "cupy_dma", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("info", "demo", "warmup", "clear-cache"):
        assert command in done.stdout
