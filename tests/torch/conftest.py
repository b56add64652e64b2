"""Every test draws the same numbers."""
import pytest


@pytest.fixture(autouse=True)
def _same_numbers(same_numbers):
    pass
