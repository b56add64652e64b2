"""Every test has an emulated device of its own, or is skipped where no kernel can be compiled."""
import pytest

from tests import emulator
from tests.emulator import build


@pytest.fixture(autouse=True)
def own_device():
    if build.unavailable():
        pytest.skip(str(build.unavailable()))
    with emulator.using() as runtime:
        yield runtime


@pytest.fixture
def device(own_device):
    return own_device
