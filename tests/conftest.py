"""Markers, shared fixtures and the summary of a run.

``gpu``: needs a CUDA device and CuPy; skipped elsewhere. ``slow``: only in ``make test-all`` (``slow.py`` chooses).
``rare``: only in ``make test-rare``. ``not_run.py`` reports skipped tests.
"""
import os
import sys
from glob import glob

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the cores, and idle threads of NumPy and torch would spin on them. Both read this when
    # they are imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # They share the GPUs too, so each starts with a different one. CUDA reads this when it is first used.
    count = len(glob("/dev/nvidia[0-9]*"))
    if count > 1:
        first = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % count
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str((first + i) % count) for i in range(count)))
# jax would take three quarters of a GPU's memory at once. It reads this when it first uses a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import pytest

from tests import not_run, slow


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def one_thread(torch):
    """For tests on tensors too small for several threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def same_numbers(one_thread, torch):
    """For tests that draw from torch's generator: the same numbers in each, and no compiled code from earlier tests."""
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def own_path(monkeypatch):
    """For tests of scripts that add the tree to ``sys.path``."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def uncollected():
    """For tests that capture CUDA graphs: collect garbage of earlier tests first, so that none is freed during a
    capture."""
    from cupy_dma.torch.capture import uncollected

    with uncollected():
        yield


def _why_no_gpu() -> str | None:
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() > 0 else "no CUDA device"
    except Exception as error:  # no CuPy, no driver, no permission: each is a reason to skip
        return f"{type(error).__name__}: {error}"


def pytest_collection_modifyitems(items):
    slow.mark(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU: {reason}"))


def pytest_configure(config):
    config.pluginmanager.register(not_run, "not_run")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item):
    """Fail a test that leaves overrides behind, instead of the tests after it."""
    found = yield
    program = sys.modules.get("cupy_dma.backends.cuda.runtime.program")
    if program is not None and not program.keeps_programs():
        program._kept, program._overrides = True, program.NONE
        raise AssertionError("contexts of overridden() or fresh() were not left in the order they were entered")
    return found


def pytest_terminal_summary(terminalreporter):
    """List what detected each fault of tests/emulator/mutations (pytest-xdist drops what tests print)."""
    caught = [dict(report.user_properties) for report in terminalreporter.stats.get("passed", ())]
    caught = [found for found in caught if "fault" in found]
    if caught:
        terminalreporter.section("faults put into the kernels, and what caught them")
    for found in caught:
        terminalreporter.write_line(f"{found['fault']:<50} {found['caught']}")


@pytest.fixture
def fresh_programs():
    """For tests that change which kernels a call uses: no call reuses programs of earlier calls."""
    from cupy_dma.backends.cuda.runtime.program import fresh

    with fresh():
        yield


@pytest.fixture
def calls_of(monkeypatch):
    """A function that records the arguments of all later calls of another function and lets them through."""
    def noted(owner, name):
        calls, function = [], getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: calls.append(given) or function(*given, **named))
        return calls

    return noted


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


LIBRARIES = ["numpy", "torch", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cupy", "torch-cuda"))]


@pytest.fixture(params=LIBRARIES)
def convert(request):
    """A function from NumPy arrays to arrays of one library; its attribute ``back`` converts them back."""
    from cupy_dma.arrays import CPU, Device, library_named

    pytest.importorskip(request.param.removesuffix("-cuda"))
    library = library_named(request.param.removesuffix("-cuda"))
    device = CPU if request.param in ("numpy", "torch") else Device("cuda", 0)

    def to_library(array: np.ndarray):
        return library.from_numpy(np.ascontiguousarray(array), device)

    to_library.back = library.to_numpy
    to_library.name = request.param
    to_library.gpu = request.param in ("cupy", "torch-cuda")
    return to_library
