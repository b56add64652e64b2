"""The command line, run in this process."""
import os
import re
import signal
import subprocess
import sys
from unittest import mock

import pytest

import cupy_dma
from cupy_dma import __main__ as cli
from cupy_dma.cli import devices
from tests.project.pages import ROOT, said_by


def one_line(capsys) -> str:
    """The text on stderr, in one line."""
    said = capsys.readouterr().err
    assert re.fullmatch("cupy_dma: .+\n", said), said
    return said


def test_info_says_why_a_backend_cannot_run(capsys):
    assert cli.main(["info"]) == 0
    lines = dict(line.split(None, 1) if not line.startswith("backend") else (line[:14].strip(), line[14:].strip())
                 for line in capsys.readouterr().out.splitlines())
    assert "available" in lines["backend numpy"]
    assert lines["numpy"][0].isdigit()
    assert {"torch", "triton", "jax", "flax", "transformers"} <= set(lines)
    assert any(name.startswith("backend cuda") for name in lines)


def test_info_without_cupy(capsys, without):
    without("cupy")
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "cupy_dma[cuda12]" in shown
    assert "Traceback" not in shown


def test_warmup_without_cupy_says_what_to_install(capsys, without):
    without("cupy")
    assert cli.main(["warmup"]) == 2
    assert "cupy_dma[cuda12]" in capsys.readouterr().err


def test_warmup_for_another_architecture(capsys, monkeypatch, tmp_path):
    pytest.importorskip("cupy")
    cuda = pytest.importorskip("cupy_dma.backends.cuda")
    compiled = []
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda.jit, "architectures", lambda: ["sm_90a"])
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
    monkeypatch.setattr(jit, "architectures", lambda: ["sm_80"])
    assert cli.main(["warmup", "--arch", "sm_80"]) == 2
    assert "no such architecture as sm_80" in capsys.readouterr().err


def test_clear_cache_counts_what_it_removes(capsys, monkeypatch, tmp_path):
    pytest.importorskip("cupy_dma.backends.cuda.runtime.disk_cache")
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path))
    (tmp_path / "a.cubin").write_bytes(b"12345")
    (tmp_path / "notes.txt").write_text("not ours")
    assert cli.main(["clear-cache"]) == 0
    assert "removed 1 files, 5 bytes" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_command_is_required(capsys):
    assert cli.main([]) == 2
    assert "COMMAND" in one_line(capsys)


def test_module_is_executable():
    said = said_by(sys.executable, "-m", "cupy_dma", "--help")
    assert all(command in said for command in ("info", "demo", "warmup", "clear-cache"))


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(capsys, option):
    assert cli.main([option]) == 0
    assert capsys.readouterr().out == f"cupy_dma {cupy_dma.__version__}\n"


@pytest.mark.parametrize(("arguments", "message"), [
    ("warmup --arch sm_80 --head-dim 300", "argument --head-dim: must be from 1 to 256, got 300"),
    ("warmup --arch sm_80 --head-dim 64 0", "argument --head-dim: must be from 1 to 256, got 0"),
    ("warmup --arch sm_80 --head-dim x", "argument --head-dim: must be a whole number from 1 to 256, got 'x'"),
    ("warmup --arch sm_80 --group -1", "argument --group: must be at least 1, got -1"),
    ("warmup --arch sm_80 --dtype float64", "argument --dtype: invalid choice: 'float64' (choose from"),
    ("warmup --arch", "argument --arch: expected one argument"),
    ("warmup --jobs 4", "unrecognized arguments: --jobs 4"),
    ("bench --heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads, got 3 and 2"),
    ("bench --head-dim 300", "argument --head-dim: must be from 1 to 256, got 300"),
    ("bench --seconds 0", "argument --seconds: must be at least 1, got 0"),
    ("bench --output x.txt", "--output x.txt: its name must end in one of"),
    ("demo --window 0", "argument --window: must be at least 1, got 0"),
    ("demo --length -5", "argument --length: must be at least 1, got -5"),
    ("demo --seed -1", "argument --seed: must be at least 0, got -1"),
    ("demo --heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads, got 3 and 2"),
    ("demo --head-dim 257", "argument --head-dim: must be from 1 to 256, got 257"),
    ("demo --file /no/such/file", "/no/such/file"), ("demo --file /", "'/'"), ("demo --file /dev/null", "is empty"),
    ("demo --output /no/such/folder/mask.png", "--output /no/such/folder/mask.png: there is no folder /no/such/folder"),
    ("demo --output mask.gif.txt", "--output mask.gif.txt: its name must end in one of ."),
    ("demo --output mask", "--output mask: its name must end in one of .")])
def test_misuse(capsys, tmp_path, monkeypatch, arguments, message):
    if "--output" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    command, *options = arguments.split()
    backend = [] if command == "warmup" else ["--backend", "numpy"]
    assert cli.main([command, *backend, *options]) == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_90", "sm_1", "90a", ""])
def test_architectures_of_warmup(capsys, arch):
    jit = pytest.importorskip("cupy_dma.backends.cuda.runtime.jit")
    try:
        jit.architectures()
    except jit.CompileError as error:
        pytest.skip(str(error))
    assert cli.main(["warmup", "--arch", arch]) == 2
    said = one_line(capsys)
    assert "--arch must be one of sm_80, sm_86" in said and "sm_90a" in said and f"got {arch}\n" in said


def test_warmup_says_ahead_that_nothing_can_be_kept(capsys, monkeypatch, tmp_path):
    pytest.importorskip("cupy")
    from cupy_dma.backends import cuda

    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(cuda.jit, "architectures", lambda: ["sm_80"])
    monkeypatch.setattr(cuda, "warmup_jobs", lambda *given: [("a kernel", lambda: pytest.fail("was compiled"))])
    assert cli.main(["warmup", "--arch", "sm_80"]) == 1
    assert "Set CUPY_DMA_CACHE_DIR" in one_line(capsys)


@pytest.mark.parametrize(("error", "status", "message"), [
    (KeyboardInterrupt(), 130, "interrupted"),
    (MemoryError("Unable to allocate 2 EiB"), 2, "not enough memory: Unable to allocate 2 EiB")], ids=str)
def test_errors_of_a_command(error, status, message, capsys, monkeypatch):
    monkeypatch.setattr(cli.info, "main", mock.Mock(side_effect=error))
    assert cli.main(["info"]) == status
    assert one_line(capsys) == f"cupy_dma: {message}\n"


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_a_backend_that_cannot_run(command, capsys, monkeypatch):
    monkeypatch.setattr(devices, "why_not", lambda name: "no GPU" if name == "cuda" else None)
    assert cli.main([command, "--backend", "cuda"]) == 2
    assert "--backend cuda cannot run here: no GPU" in one_line(capsys)


@pytest.mark.parametrize("command", ["demo", "bench --seconds 1"])
def test_a_wrong_output_fails_the_check(command, tmp_path, capsys, monkeypatch):
    right = cupy_dma.attention

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return (found[0] + 0.1, found[1]) if options.get("return_lse") else found

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cupy_dma, "attention", wrong)
    assert cli.main([*command.split(), "--backend", "numpy", "--length", "64", "--window", "8"]) == 1
    assert "check       FAILED" in capsys.readouterr().out


def command(*arguments: str, shell: str = "", **options) -> subprocess.Popen:
    """Start the command line in a process, with shell redirections."""
    return subprocess.Popen(["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-m", "cupy_dma", *arguments],
                            cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


def test_control_c_of_a_process(tmp_path):
    os.mkfifo(tmp_path / "text")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    try:
        with command("demo", "--backend", "numpy", "--file", str(tmp_path / "text")) as process:
            with open(tmp_path / "text", "wb"):  # the process blocks on reading it once it is open
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (process.returncode, said) == (130, "cupy_dma: interrupted\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("argument", ["info", "--version"])
@pytest.mark.parametrize(("shell", "reason"), [
    (">&-", "standard output is closed"), (">/dev/full", "No space left on device")])
def test_output_that_cannot_be_written(argument, unbuffered, shell, reason):
    if "full" in shell and not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with command(argument, shell=shell, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}) as process:
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, f"cupy_dma: cannot write the output: {reason}\n")


def test_reader_that_went_away():
    with command("info", stdout=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (1, "cupy_dma: cannot write the output: Broken pipe\n")
