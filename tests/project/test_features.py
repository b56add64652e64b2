"""docs/features.md is the table of tests/project/features.py; every test named there exists and runs what it says."""
from importlib import import_module

import pytest

from tests.project.features import BACKENDS, FEATURES, PAGE, PENDING, is_test, module_of, page

NAMES = sorted({name for feature in FEATURES for cell in feature.cells if is_test(cell) for name in cell.split()})


def test_the_page_is_the_table():
    assert PAGE.read_text() == page(), "run: python -m tests.project.features"


def test_no_cell_is_empty():
    assert len({feature[:3] for feature in FEATURES}) == len(FEATURES)
    for feature in FEATURES:
        assert len(feature.cells) == len(BACKENDS)
        assert all(cell.strip() for cell in feature.cells)


@pytest.mark.parametrize("name", NAMES)
def test_the_named_test_exists(name):
    """It is collected by pytest, and with a case whose name starts as the table says."""
    pytest.importorskip("torch")  # some of these files need it
    file, function = name.split("::")
    if "jax" in file:
        pytest.importorskip("jax", minversion="0.9")
        pytest.importorskip("flax")
    function, _, case = function.partition("[")
    test = getattr(import_module(module_of(file)), function)
    assert function.startswith("test_")
    if case:
        marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        values = [value for mark in marks for value in mark.args[1]]
        firsts = [str(value[0] if isinstance(value, tuple) else value) for value in values]
        assert any(first.startswith(case) for first in firsts), f"{name}: no such case"


def test_nothing_is_pending():
    assert [feature[:3] for feature in FEATURES if PENDING in feature.cells] == []
