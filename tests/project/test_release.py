"""Parts of a release: sdist and wheel that install in a clean environment, matching versions, and types that pass mypy
--strict."""
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import cupy_dma
from tests.project.pages import ROOT, said_by

USE = ("import numpy as np, cupy_dma as dma; x = np.ones((1, 8, 2, 4)); "
       "print(dma.attention(x, x, x, mask=dma.IntervalMask.top_w(np.zeros((1, 2, 8)), 3)).shape, dma.__file__)")


def test_versions_and_citation_agree():
    version = cupy_dma.__version__
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation and "arXiv:2508.02124" in citation
    assert "\nlicense: BSD-3-Clause\n" in citation and "BSD 3-Clause" in (ROOT / "LICENSE").read_text()


def test_the_changelog_names_every_public_name():
    text = (ROOT / "CHANGELOG.md").read_text()
    for name in set(cupy_dma.__all__) - {"get_available_backends"}:
        assert f"`{name}`" in text or f"cupy_dma.{name}`" in text, name


USERS = [pytest.param("typed_user.py", (), marks=pytest.mark.slow, id="numpy"),
         pytest.param("typed_torch_user.py", ("torch",), marks=pytest.mark.slow, id="torch")]  # reads all of torch


@pytest.mark.parametrize(("file", "needs"), USERS)
def test_types_of_a_strict_user(tmp_path, file, needs):
    for package in ("mypy", *needs):
        pytest.importorskip(package)
    text = (ROOT / "tests" / "project" / file).read_text()
    (tmp_path / "right.py").write_text(text)
    (tmp_path / "wrong.py").write_text(text + "    dma.attention([1.0], *3 * [dma.IntervalMask.causal(3)])\n"
                                              "    dma.IntervalMask.sliding_window(8, window='8')\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent",
               f"--cache-dir={ROOT / 'build' / 'mypy'}", "right.py", "wrong.py"]
    said = subprocess.run(command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True,
                          text=True).stdout
    assert 'incompatible type "list[float]"; expected "Array"' in said, said
    assert 'incompatible type "str"; expected "int | Array | Sequence[int]"' in said
    assert 'incompatible type "*list[IntervalMask]"; expected "Array"' in said
    assert all(line.startswith(("wrong.py:", "Found ")) for line in said.splitlines()), said


@pytest.mark.parametrize(("file", "needs"), USERS)
def test_the_file_of_a_strict_user_runs(file, needs):
    for package in needs:
        pytest.importorskip(package)
    assert "(1, 32, 4, 8)" in said_by(sys.executable, ROOT / "tests" / "project" / file, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """The folder of sdist and wheel, built and checked by the usual tools."""
    folder = tmp_path_factory.mktemp("release")
    tools = folder / "tools"
    said_by(sys.executable, "-m", "venv", tools)
    python = tools / "bin" / "python"
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", "build", "twine"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"build and twine cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "site",
                                                              "__pycache__"))
    said = said_by(python, "-m", "build", "--outdir", folder / "dist", tree)
    assert "Successfully built" in said and "would be ignored" not in said
    assert said_by(python, "-m", "twine", "check", "--strict", *(folder / "dist").iterdir()).count("PASSED") == 2
    return folder / "dist"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="paths of environments are written for POSIX")
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_a_clean_environment_takes_it(built, tmp_path, kind):
    said_by(sys.executable, "-m", "venv", tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    said_by(python, "-m", "pip", "install", "--quiet", next(built.glob(kind)))
    shape, _, place = said_by(python, "-c", USE, cwd=tmp_path).strip().rpartition(" ")
    assert shape == "(1, 8, 2, 4)" and Path(place).is_relative_to(tmp_path / "clean")
    assert "backend numpy" in said_by(python, "-m", "cupy_dma", "info", cwd=tmp_path)
    assert f"cupy_dma-{cupy_dma.__version__}" in next(built.glob(kind)).name


@pytest.mark.slow
def test_the_sdist_holds_the_tests_and_the_documentation(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    wanted = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "mkdocs.yml", "docs/concepts.md",
              "docs/assets/intervals.js", "examples/ladder/step4_kernel.cu", "kernels/sm90/forward.cu",
              "tests/emulator/driver/driver.cpp", "benchmarks/results/h200/forward_performance.json"}
    assert wanted <= names
    assert not {name for name in names if name.endswith((".pyc", ".so")) or "/.venv/" in name}
