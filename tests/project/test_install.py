"""The install instructions of docs/get-started.md work: every extra of pyproject.toml can be resolved, and the commands
of its table give torch and CuPy for one CUDA. The slow tests query the package index: with uv for metadata alone, and
with pip only for small wheels, because its dry run downloads wheels whose metadata the index does not offer
separately."""
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import pytest

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")  # pytest brings tomli

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "get-started.md").read_text()
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ["", *PROJECT["optional-dependencies"]]  # "": the package alone
TABLE = re.findall(r'^\| .* \| CUDA (\d+) \| .*`pip install "\.\[([^`\]]+)\]"([^`]*)` \|$', PAGE, re.MULTILINE)
MAX_BYTES = 400 * 2**20  # maximum download of a pip dry run


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
    """What uv would install on Linux, by name; raises AssertionError with uv's message."""
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


PIP_TOO = "", "plot", "test"  # also resolved by pip, which takes ten times as long as uv


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra or "base")
def test_every_extra_resolves(tools, wheel, extra):
    found = resolve(tools, [extra] if extra else [])
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, [])
    assert {name_of(requirement) for requirement in wanted} <= set(found)
    assert len(cuda_majors(found)) <= 1, sorted(found)
    size = sum(max((file["size"] for file in package.get("wheels", ())), default=0) for package in found.values())
    if size > MAX_BYTES or extra not in PIP_TOO:
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


# ---- torch for the tests: make tries names and indexes in turn ----
CPU, CUDA = "2.13.0+cpu", "2.13.0"  # builds; tests/no-cuda-torch.txt rejects a dependency of the CUDA one


def index(folder: Path, *versions: str) -> str:
    """A simple index with these builds of torch, each of which needs NCCL if it is for CUDA."""
    for name in ("torch", "nvidia-nccl-cu13"):
        (folder / name).mkdir(parents=True)
    files = [wheel_file(folder / "torch", "torch", version, () if "+cpu" in version else ("nvidia-nccl-cu13",))
             for version in versions]
    files.append(wheel_file(folder / "nvidia-nccl-cu13", "nvidia_nccl_cu13", "2.0"))
    for name in ("torch", "nvidia-nccl-cu13"):
        links = (f'<a href="{quote(file.name)}">{file.name}</a>' for file in files if file.parent.name == name)
        (folder / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    return folder.as_uri()


def wheel_file(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> Path:
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {other}\n" for other in requires)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def make_torch(folder: Path, default: str, own: str, *arguments: str) -> tuple[str, set[str]]:
    """Run make with ``default`` as pip's index and ``own`` as PyTorch's; returns its output and the installed
    builds."""
    tools = folder / "venv" / "bin"
    tools.mkdir(parents=True)
    python = tools / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / "venv" / ".test").touch()
    options = [f"VENV={folder / 'venv'}", f"TORCH_INDEX={own}", "JAX=", "TRANSFORMERS=", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "TORCH"))}
    environment |= {"PIP_INDEX_URL": default, "PIP_TARGET": str(folder / "site"), "PIP_CONFIG_FILE": os.devnull,
                    "PATH": f"{no_gpu(folder)}:{environment['PATH']}"}
    target = subprocess.run(["make", "-pn", "test", *options], cwd=ROOT, env=environment, capture_output=True,
                            text=True)
    (ready,) = re.findall(r"^TORCH_READY := (\S+)$", target.stdout, re.MULTILINE)
    done = subprocess.run(["make", ready, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, {path.name.split("-")[1].removesuffix(".dist") for path in folder.glob("site/torch-*")}


def no_gpu(folder: Path) -> Path:
    """A folder with an nvidia-smi that finds no GPU, because with a GPU the choice of torch is the user's."""
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 1\n")
    smi.chmod(0o755)
    return folder


needs_make = pytest.mark.skipif(
    shutil.which("make") is None or subprocess.run([sys.executable, "-m", "pip", "--version"],
                                                   capture_output=True).returncode != 0,
    reason="needs make and pip")


@needs_make
@pytest.mark.parametrize(("default", "own", "tried", "installed"), [
    ((CPU, CUDA), (), 1, {CPU}), ((CUDA,), (CPU,), 3, {CPU}), ((), (), 3, set())],
    ids=["the default index has it", "PyTorch's has it", "neither has it"])
def test_make_finds_a_cpu_build_of_torch(tmp_path, default, own, tried, installed):
    said, found = make_torch(tmp_path, index(tmp_path / "default", *default), index(tmp_path / "own", *own))
    attempts = re.findall(r"^pip install (.*)$", said, re.MULTILINE)
    wanted = [f"torch=={CPU}", f"torch=={CUDA}",
              f"--retries 1 --index-url {(tmp_path / 'own').as_uri()} torch=={CPU}"]
    assert found == installed and attempts == wanted[:tried], said
    assert said.count("failed:\n    ERROR: ") == tried - bool(installed)
    assert ("nvidia-nccl-cu13" in said) == (default == (CUDA,))  # names the reason for rejecting the CUDA build
    assert ("none was installed" in said) == (not installed)


@needs_make
def test_make_takes_a_users_torch_as_it_stands(tmp_path):
    said, found = make_torch(tmp_path, index(tmp_path / "default", CUDA), index(tmp_path / "own", CPU),
                             f"TORCH=torch=={CUDA}")
    assert found == {CUDA} and re.findall(r"^pip install (.*)$", said, re.MULTILINE) == [f"torch=={CUDA}"]
