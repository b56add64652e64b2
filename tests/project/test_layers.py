"""The layers of cupy_dma: which modules may import which, read from the sources, and limits on file sizes."""
import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "cupy_dma"

# Bottom to top. A unit imports only from layers below its own, not from other units of its layer. A name that ends with
# ".*" stands for each package in it, as a unit of its own.
LAYERS = (
    ("cupy_dma.arrays",),
    ("cupy_dma.checks",),
    ("cupy_dma.backends",),  # the registry, __init__.py alone
    ("cupy_dma.masks",),
    ("cupy_dma.calls",),
    ("cupy_dma.backends.torch_common", "cupy_dma.cache"),
    ("cupy_dma.backends.*",),
    ("cupy_dma.torch", "cupy_dma.jax"),  # torch: the operators
    ("cupy_dma.distributed",),
    ("cupy_dma.torch.module", "cupy_dma.torch.gate"),  # the layers
    ("cupy_dma.torch.self_attention",),
    ("cupy_dma.api", "cupy_dma.backward"),
    ("cupy_dma",),  # what is exported: __init__.py alone
    ("cupy_dma.flash_dmattn", "cupy_dma.retrofit", "cupy_dma.transformers"),
    ("cupy_dma.vllm",),
    ("cupy_dma.cli",),
    ("cupy_dma.__main__",),
)
OPTIONAL = {"cupy", "cupyx", "torch", "triton", "ml_dtypes", "matplotlib", "tqdm", "transformers", "jax",
            "flax", "vllm"}
# Optional packages: imported where they are used.
NEEDS_OPTIONAL = ("cupy_dma.torch", "cupy_dma.distributed", "cupy_dma.jax", "cupy_dma.backends.cuda",
                  "cupy_dma.backends.flex", "cupy_dma.backends.triton", "cupy_dma.backends.torch_common",
                  "cupy_dma.transformers", "cupy_dma.retrofit")


class Import(NamedTuple):
    module: str  # the importing module
    target: str
    line: int
    deferred: bool  # inside a function
    typing: bool  # only for type checkers

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> Iterator[Import]:
    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
        name = node.module or ""
        yield from (f"{name}.{alias.name}" if f"{name}.{alias.name}" in modules() else name for alias in node.names)

    def walk(node: ast.AST, deferred: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from (Import(module, target, child.lineno, deferred, typing) for target in targets(child))
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, deferred, True)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, deferred or inside, typing)

    yield from walk(ast.parse(path.read_text()), False, False)


@functools.cache
def imports() -> list[Import]:
    return [found for module, path in modules().items() for found in imports_of(module, path)]


def own_imports() -> list[Import]:
    """Imports within cupy_dma. Exceptions: a package's __init__ imports for type checkers what it loads on demand, the
    registry loads any backend, and torch/__init__.py exports operators and layers, although these units are below what
    they import."""
    return [found for found in imports() if found.target.partition(".")[0] == "cupy_dma"
            and not (found.typing and found.module == "cupy_dma")
            and found.module != "cupy_dma.torch"
            and not (found.deferred and found.module == "cupy_dma.backends")]


def unit_and_layer(module: str) -> tuple[str, int]:
    """The unit of a module, and the number of its layer."""
    exact = {name: layer for layer, names in enumerate(LAYERS) for name in names}
    parts = module.split(".")
    for depth in range(len(parts), 0, -1):
        name = ".".join(parts[:depth])
        if name in exact and (depth == len(parts) or name not in ("cupy_dma", "cupy_dma.backends")):
            return name, exact[name]
        parent = f"{name.rpartition('.')[0]}.*"
        if parent in exact:
            return name, exact[parent]
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


def test_every_module_has_a_layer():
    for module in modules():
        unit_and_layer(module)
    assert unit_and_layer("cupy_dma.backends.cuda.runtime.jit")[0] == "cupy_dma.backends.cuda"
    assert unit_and_layer("cupy_dma.backends")[1] < unit_and_layer("cupy_dma.backends.numpy")[1]


def test_imports_go_down():
    wrong = []
    for found in own_imports():
        (unit, layer), (other, below) = unit_and_layer(found.module), unit_and_layer(found.target)
        if unit != other and below >= layer:
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other():
    """A package's __init__ runs before its modules, but does not count as their import."""
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in own_imports():
        if not found.typing and found.target != found.module:
            graph[found.module].add(found.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_what_is_optional_is_imported_inside_functions():
    wrong = [str(found) for found in imports() if found.deferred and not (
        found.target.partition(".")[0] in OPTIONAL
        or any(found.target == name or found.target.startswith(name + ".") for name in NEEDS_OPTIONAL))]
    assert not wrong, "\n".join(wrong)


def test_the_package_is_seen_at_a_glance():
    entries = {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "py.typed", "__pycache__", "kernels"}
    assert len(entries) <= 17, sorted(entries)  # 8 of them doors: flash_dmattn, torch, jax, transformers, vllm, ...


@pytest.mark.parametrize(("folder", "patterns", "most"), [("cupy_dma", ("*.py",), 350),
                                                          ("kernels", ("*.cu", "*.cuh"), 500)])
def test_no_file_is_too_long(folder, patterns, most):
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines())
               for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
    assert lengths
    assert not {name: length for name, length in lengths.items() if length > most}
