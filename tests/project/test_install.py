"""What docs/get-started.md says of installing is true: every extra of pyproject.toml can be resolved, and the commands
of its table give torch and CuPy for one CUDA. The slow tests ask the package index: uv for metadata alone; pip, whose
dry run downloads wheels where the index keeps no metadata beside them, only where these are small."""
from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")  # pytest brings tomli

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "get-started.md").read_text()
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ["", *PROJECT["optional-dependencies"]]  # "": the package alone
TABLE = re.findall(r'^\| .* \| CUDA (\d+) \| .*`pip install "\.\[([^`\]]+)\]"([^`]*)` \|$', PAGE, re.MULTILINE)
MOST_BYTES = 400 * 2**20  # that pip may download for a dry run


@pytest.fixture(scope="session")
def tools(tmp_path_factory) -> Path:
    """The folder of ``python``, ``pip`` and ``uv`` of an environment with nothing else in it."""
    folder = tmp_path_factory.mktemp("install")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    tools = folder / ("Scripts" if sys.platform == "win32" else "bin")
    done = subprocess.run([tools / "python", "-m", "pip", "install", "--quiet", "uv"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"uv cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return tools


def resolve(tools: Path, extras: Sequence[str] = (), bounds: Sequence[str] = ()) -> dict[str, dict]:
    """What uv would install on Linux, by name; raises AssertionError with uv's words."""
    constraints = tools.parent / "constraints.txt"
    constraints.write_text("\n".join(bounds))
    done = subprocess.run(
        [tools / "uv", "--system-certs", "pip", "compile", "--quiet", "--format", "pylock.toml",
         "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28", "--constraint", constraints,
         ROOT / "pyproject.toml", *(f"--extra={extra}" for extra in extras)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {package["name"]: package for package in tomllib.loads(done.stdout)["packages"]}


def cuda_majors(packages: dict[str, dict]) -> set[int]:
    """The CUDA versions that packages are made for."""
    named = (re.search(r"-cu(?:da)?(\d\d)(?:x|-|$)", name) for name in packages)
    kits = (packages[name]["version"] for name in ("cuda-toolkit", "nvidia-cuda-runtime") if name in packages)
    return {int(found[1]) for found in named if found} | {int(version.split(".")[0]) for version in kits}


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra or "base")
def test_every_extra_resolves(tools, wheel, extra):
    found = resolve(tools, [extra] if extra else [])
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, [])
    assert {name_of(requirement) for requirement in wanted} <= set(found)
    assert len(cuda_majors(found)) <= 1, sorted(found)
    size = sum(max((file["size"] for file in package.get("wheels", ())), default=0) for package in found.values())
    if size > MOST_BYTES:
        return
    done = subprocess.run([tools / "python", "-m", "pip", "install", "--dry-run",
                           f"{wheel}[{extra}]" if extra else wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Would install" in done.stdout and f"cupy_dma-{PROJECT['version']}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("cuda", "extras", "bounds"), TABLE)
def test_commands_of_the_table(tools, cuda, extras, bounds):
    found = resolve(tools, extras.split(","), shlex.split(bounds))
    assert cuda_majors(found) == {int(cuda)}, sorted(found)


@pytest.mark.slow
def test_cuda_12_does_not_fit_a_torch_for_cuda_13(tools):
    with pytest.raises(AssertionError, match=r"(?s)cuda-toolkit.*12.*unsatisfiable"):
        resolve(tools, ["cuda12", "torch"], ["torch>=2.11"])


def test_the_table_has_both_versions():
    assert {cuda for cuda, _, _ in TABLE} == {"12", "13"}
    assert [(extras, bounds.strip()) for _, extras, bounds in TABLE if bounds] == [
        ("cuda13,torch", '"torch>=2.11"'), ("cuda12,torch", '"torch<2.11"')]


def test_readme_and_page_name_extras_and_the_wheel_as_they_are():
    for text in (README, PAGE):
        for extras in re.findall(r"(?:\.|whl|cupy_dma)\[([\w,]+)\]", text):
            assert set(extras.split(",")) <= set(EXTRAS)
        assert not re.search(r'pip install "?cupy_dma(?!\[plot\])', text)  # as if it were on an index
    assert set(re.findall(r"cupy_dma-([\d.]+)-py3", PAGE)) == {PROJECT["version"]}
