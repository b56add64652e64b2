"""Examples: those in docstrings run and print what they say, and every public name is used in one that runs."""
import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cupy_dma as dma

ROOT = Path(__file__).resolve().parents[2]


def public() -> Iterator[tuple[str, object]]:
    """Every public function, class and method, by the name that a caller writes last."""
    for name in dma.__all__:
        if name not in ("backward", "flash_dmattn"):
            yield name, getattr(dma, name)
    for kind in (dma.IntervalMask, dma.DynamicCache):
        for name in dir(kind):
            member = inspect.getattr_static(kind, name)
            if not name.startswith("_") and isinstance(member, (classmethod, property)) or inspect.isfunction(member):
                if not name.startswith("_"):
                    yield f"{kind.__name__}.{name}", getattr(kind, name)
    for name in dma.policies.__all__:
        if inspect.isfunction(getattr(dma.policies, name)):
            yield f"policies.{name}", getattr(dma.policies, name)
    for name in dir(dma.backward):
        if name.endswith("_backward") and getattr(dma.backward, name).__module__ == "cupy_dma.backward":
            yield f"backward.{name}", getattr(dma.backward, name)


NAMES = dict(public())


def with_examples() -> list[str]:
    return [name for name, what in NAMES.items() if ">>>" in (inspect.getdoc(what) or "")]


@pytest.mark.parametrize("name", with_examples())
def test_examples_in_docstrings(name):
    globs = {"np": np, "dma": dma, "IntervalMask": dma.IntervalMask, "DynamicCache": dma.DynamicCache}
    text = inspect.getdoc(NAMES[name])
    test = doctest.DocTestParser().get_doctest(text, globs, name, None, None)
    assert test.examples
    said = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not failed, "".join(said)


def test_there_are_examples_in_docstrings():
    assert {"attention", "dynamic_mask_attention", "key_scores", "varlen_attention", "IntervalMask",
            "IntervalMask.top_w", "IntervalMask.from_stop", "DynamicCache", "backward.attention_backward", "explain",
            "get_available_backends", "jit"} <= set(with_examples())


def code_that_runs() -> str:
    """Python blocks of the README and the pages, which tests run, and the examples; without comments."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    blocks += [path.read_text() for path in (ROOT / "examples").rglob("*.py")]
    for name in with_examples():
        blocks += re.findall(r"(?:>>>|\.\.\.) .*", inspect.getdoc(NAMES[name]))
    return re.sub(r"#.*", "", "\n".join(blocks))


def test_every_public_name_has_an_example_that_runs():
    code = code_that_runs()
    missing = [name for name in NAMES if not re.search(rf"\b{name.rpartition('.')[2]}\b", code)]
    assert not missing, f"no example uses {', '.join(missing)}"


def test_every_public_name_is_documented():
    assert not [name for name, what in NAMES.items() if not inspect.getdoc(what)]
