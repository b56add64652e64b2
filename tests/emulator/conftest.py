"""Every test gets its own emulated device, or is skipped if no kernel can be compiled."""
import pytest

from cupy_dma.backends.cuda.chain import Chain
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


@pytest.fixture
def chain_runs(monkeypatch):
    """Counts the forward and backward passes of torch calls that are run by chains; none is known yet."""
    from cupy_dma.torch import entry

    count = {"forward": 0, "backward": 0}

    def counted(name):
        run = getattr(Chain, name)

        def call(*arguments):
            found = run(*arguments)
            count[name] += found is not None
            return found

        return call

    for name in count:
        monkeypatch.setattr(Chain, name, counted(name))
    monkeypatch.setattr(entry, "_known", {})
    return count
