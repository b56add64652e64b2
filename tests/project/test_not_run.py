"""A run that skipped tests says at its end which and why, with a summary as its last line."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.not_run import SHOWN, missing_package

ROOT = Path(__file__).resolve().parents[2]
WHOLE_FILE = 'import pytest\npytest.importorskip("{package}")\ndef test_a(): pass\n'
SOME = """
import pytest
@pytest.mark.parametrize("i", range(3))
def test_b(i): pytest.importorskip("no_such_torch")
def test_c(): pytest.skip("CuPy is not installed: pip install 'cupy_dma[cuda12]'")
@pytest.mark.skip(reason="needs a CUDA GPU: no CUDA device")
def test_d(): pass
def test_e(): pass
"""


def end_of_run(tmp_path: Path, *options: str, **files: str) -> list[str]:
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").touch()
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "tests.not_run", "-p", "no:cacheprovider", "-rfExXw",
                           *options, tmp_path], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_the_last_line_counts_what_did_not_run(tmp_path, workers):
    if workers:
        pytest.importorskip("xdist")
    lines = end_of_run(tmp_path, *workers, some=SOME, one=WHOLE_FILE.format(package="no_such_torch"),
                       two=WHOLE_FILE.format(package="no_such_torch"), three=WHOLE_FILE.format(package="no_such_jax"))
    assert lines[-1].split("; ") == [
        "3 TESTS AND 2 WHOLE FILES NOT RUN: NO_SUCH_TORCH IS MISSING", "1 TEST NOT RUN: CUPY IS MISSING",
        "1 TEST NOT RUN: THERE IS NO CUDA GPU", "1 WHOLE FILE NOT RUN: NO_SUCH_JAX IS MISSING"]
    assert "1 passed" in lines[-2] and not any(line.startswith("SKIPPED") for line in lines)
    (files,) = (line for line in lines if line.startswith("not run, no_such_torch is missing: "))
    assert "test_one.py, " in files and files.endswith("test_two.py")


def test_other_reasons_are_shown_and_bounded(tmp_path):
    many = SHOWN + 3
    lines = end_of_run(tmp_path, some=f"import pytest\n@pytest.mark.parametrize('i', range({many}))\n"
                                      "def test_a(i): pytest.skip(f'reason {i}')\n"
                                      "@pytest.mark.parametrize('i', range(4))\n"
                                      "def test_b(i): pytest.skip('the usual one')")
    assert lines[-1] == f"{many + 4} TESTS NOT RUN: OTHER REASONS, SEE ABOVE"
    shown = [line for line in lines if line.startswith("not run")]
    assert shown[0] == "not run, 4 times: the usual one" and len(shown) == SHOWN + 1
    assert shown[-1] == "not run: 4 more reasons"


def test_the_projects_own_runs_end_so():
    assert "-rfExXw" in (ROOT / "pyproject.toml").read_text()
    done = subprocess.run([sys.executable, "-m", "pytest", "tests/unit/test_user_kernel.py", "-k", "on_a_gpu"],
                          capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout.strip().splitlines()[-1] == "2 TESTS NOT RUN: THERE IS NO CUDA GPU"


@pytest.mark.parametrize(("reason", "package"), [
    ("could not import 'torch': No module named 'torch'", "torch"), ("No module named 'flax'", "flax"),
    ("needs a C++ compiler", "g++"), ("needs a CUDA GPU: no CUDA device", None), ("needs fork", None)])
def test_missing_packages(reason, package):
    assert missing_package(reason) == package
