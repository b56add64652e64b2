"""Contents of the wheel, and that the CUDA sources are found in a wheel, an editable install and the tree."""
import configparser
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.project.pages import ROOT, said_by

SOURCES = sorted(path.relative_to(ROOT / "kernels").as_posix() for path in (ROOT / "kernels").rglob("*.cu*"))
WHERE = "from cupy_dma.backends.cuda.runtime.jit import kernels_directory; print(kernels_directory())"


def python(code: str, cwd: Path, path: str = "") -> str:
    return said_by(sys.executable, "-c", code, cwd=cwd, PYTHONPATH=path).strip()


def test_wheel_is_pure_and_complete(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    files = {path.relative_to(ROOT).as_posix() for pattern in ("*.py", "*.json")
             for path in (ROOT / "cupy_dma").rglob(pattern)}
    assert "cupy_dma/backends/cuda/attention/sm90_costs.json" in files <= names
    assert {f"cupy_dma/kernels/{name}" for name in SOURCES} <= names
    assert "cupy_dma/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.split("/")[0] not in ("cupy_dma",) and ".dist-info/" not in name]


def test_installed_wheel_finds_its_kernels(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as content:  # a pure wheel is installed by unpacking it
        content.extractall(tmp_path / "site")
    found = python(WHERE, tmp_path, path=str(tmp_path / "site"))
    assert Path(found) == tmp_path / "site" / "cupy_dma" / "kernels"


def test_tree_finds_its_kernels(tmp_path):
    assert Path(python(WHERE, tmp_path, path=str(ROOT))) == ROOT / "kernels"


def test_editable_install_finds_its_kernels(tmp_path):
    try:
        importlib.metadata.version("cupy_dma")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("cupy_dma is not installed in this interpreter")
    assert Path(python(WHERE, tmp_path)) == ROOT / "kernels"


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    there = {path.parent.relative_to(ROOT).as_posix().replace("/", ".")
             for path in (ROOT / "cupy_dma").rglob("__init__.py")}
    assert listed == there | {"cupy_dma.kernels"}


def test_import_is_light(tmp_path):
    code = ("import sys, cupy_dma; "
            "print([name for name in ('torch', 'jax', 'triton', 'cupy', 'matplotlib', 'tqdm') if name in sys.modules])")
    assert python(code, tmp_path, path=str(ROOT)) == "[]"


def test_submodules_are_listed_and_loaded_when_used(tmp_path):
    code = ("import sys, cupy_dma; listed = set(dir(cupy_dma)); "
            "print({'backward', 'jax', 'retrofit', 'torch', 'transformers'} - listed, 'transformers' in sys.modules); "
            "from importlib.util import find_spec; "
            "print(not (find_spec('transformers') and find_spec('torch')) or callable(cupy_dma.transformers.convert))")
    assert python(code, tmp_path, path=str(ROOT)) == "set() False\nTrue"


@pytest.mark.skipif(shutil.which("make") is None, reason="could not find 'make'")
def test_make_names_its_targets_and_refuses_without_a_gpu_before_it_installs():
    def make(*arguments):
        return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True)

    shown = make("help").stdout
    targets = set(re.search(r"^\.PHONY: help gpu (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())
    assert targets == set(re.findall(r"^  make ([\w-]+) ", shown, re.MULTILINE))
    for target in ("bench", "evidence", "sanitize"):
        refused = make(target, "GPU=", "VENV=build/no-such-environment", "CUDA_EXTRA=")
        assert refused.returncode == 2 and "nvidia-smi shows none" in refused.stderr
    assert not (ROOT / "build" / "no-such-environment").exists()
