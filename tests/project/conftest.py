"""The wheel, for tests that inspect or install it."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps",
                           "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "tree")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))
