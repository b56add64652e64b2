"""The wheel, for tests that inspect or install it, and packages that are missing."""
import shutil
import sys
from pathlib import Path

import pytest

from tests.project.pages import ROOT, said_by


@pytest.fixture
def without(monkeypatch):
    """Make it look as if packages were not installed."""
    def hide(*packages: str) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            monkeypatch.delitem(sys.modules, name)
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the tree, built by the installed setuptools (no network)."""
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("kernels", "cupy_dma"):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree")
    said_by(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
            "--wheel-dir", folder, folder / "tree")
    return next(folder.glob("*.whl"))
