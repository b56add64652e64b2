"""docs/features.md matches the marks of the tests; the cases that they name exist, and every reason is needed."""
from importlib import import_module

import pytest

from tests.project.features import PAGE, WHY, cells, marked, page

CASES = sorted({(test.file, test.function, test.case) for test in marked() if test.case})


def test_the_page_is_what_the_marks_say():
    assert PAGE.read_text() == page(), "run: python -m tests.project.features"


@pytest.mark.parametrize(("file", "function", "case"), CASES)
def test_the_named_cases_exist(file, function, case):
    pytest.importorskip("torch")  # some of these files need torch
    if "jax" in file:
        pytest.importorskip("jax", minversion="0.9")
        pytest.importorskip("flax")
    test = getattr(import_module(f"tests.{file.removesuffix('.py').replace('/', '.')}"), function)
    values = [value for mark in test.pytestmark if mark.name == "parametrize" for value in mark.args[1]]
    firsts = [str(value[0] if isinstance(value, tuple) else value) for value in values]
    assert any(first.startswith(case) for first in firsts), f"no such case among {firsts}"


def test_every_reason_is_needed():
    assert {reason for _, _, reason in WHY} == {cell for row in cells().values() for cell in row.values()
                                                if isinstance(cell, str)}
    assert all(test.function.startswith("test_") for test in marked())
