"""Every test gets its own emulated device, or is skipped if no kernel can be compiled."""
import pytest

from cupy_dma.backends.cuda.decode import step
from tests import emulator
from tests.emulator import build


@pytest.fixture(autouse=True)
def own_device():
    if build.unavailable():
        pytest.skip(str(build.unavailable()))
    step.split.cache_clear()  # a test may have patched what it calls
    with emulator.using() as runtime:
        yield runtime
    step.split.cache_clear()


@pytest.fixture
def device(own_device):
    return own_device
