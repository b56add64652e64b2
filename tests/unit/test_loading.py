"""Kernels that share a driver function, and cubins that are cleared while they are loaded. CuPy and the compiler are
stand-ins: modules are memoized by path and device, as in CuPy, and functions have limits, as in the driver."""
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupy_dma.backends.cuda.runtime import configs, disk_cache, jit, launch

DEVICE_BYTES = 227 * 1024


class Function:
    """Stands in for RawKernel and its Function; functions of one module share the driver's limit."""

    def __init__(self, cupy, key):
        self._cupy, self._key = cupy, key
        self.kernel = SimpleNamespace(ptr=1 + [*cupy.limits].index(key))

    @property
    def max_dynamic_shared_size_bytes(self):
        return self._cupy.limits[self._key]

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value):
        if value > DEVICE_BYTES:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        self._cupy.limits[self._key] = value


class Cupy:
    def __init__(self):
        self.limits, self.current, self.before_load = {}, 0, lambda path: None
        outer = self

        class Device:
            compute_capability = "90"

            def __init__(self, index):
                self.index = index

            def __enter__(self):
                outer.current = self.index
                return self

            def __exit__(self, *error):
                pass

            def use(self):
                pass

        class RawModule:
            def __init__(self, path):
                self.path = path

            def get_function(self, entry):
                outer.before_load(Path(self.path))
                if not Path(self.path).exists():
                    raise RuntimeError("CUDA_ERROR_FILE_NOT_FOUND")
                key = self.path, entry, outer.current
                outer.limits.setdefault(key, 48 * 1024)
                return Function(outer, key)

        self.RawModule, self.cuda = RawModule, SimpleNamespace(Device=Device)


@pytest.fixture
def cupy(monkeypatch, compiled):
    found = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", found)
    monkeypatch.setattr(jit, "device_arch", lambda index: "sm_90a")
    monkeypatch.setattr(launch, "_limits", {})
    monkeypatch.setattr(launch, "library", lambda: SimpleNamespace(cuLaunchKernelEx=None, cuDriverGetVersion=None))
    monkeypatch.setattr(launch, "supports_pdl", lambda capability: False)
    return found


CONFIG, OTHER = configs.LayoutConfig("__half"), configs.LayoutConfig("float")


def kernel(shared_bytes, config=CONFIG, entry="f", index=0):
    return jit.Kernel(config, entry, index, shared_bytes)


@pytest.mark.parametrize("order", [(100_000, 60_000), (60_000, 100_000), (100_000, 1000, 60_000), (60_000, 70_000, 0)])
def test_kernels_of_one_function_have_the_limit_of_the_largest(cupy, order):
    kernels = [kernel(size) for size in order]
    assert {*cupy.limits.values()} == {max(order)} and len(cupy.limits) == 1
    assert [made.shared_bytes for made in kernels] == [*order]  # each launch requests its own size


def test_limits_belong_to_cubin_entry_and_device(cupy):
    kernel(100_000)
    for other in ({"config": OTHER}, {"entry": "g"}, {"index": 1}):
        kernel(60_000, **other)
        kernel(10, **other)
    assert [*cupy.limits.values()] == [100_000, *[60_000] * 3]


def test_no_limit_where_none_is_needed(cupy):
    kernel(48 * 1024)
    assert [*cupy.limits.values()] == [48 * 1024] and not launch._limits


def test_what_the_device_does_not_have_is_not_remembered(cupy):
    kernel(60_000)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        kernel(DEVICE_BYTES + 1)
    kernel(70_000)
    assert [*cupy.limits.values()] == [70_000]


def test_modules_loaded_anew_get_the_largest_limit(cupy):
    """Clearing CuPy's memo gives a new driver function with the initial limit."""
    kernel(100_000)
    cupy.limits.clear()
    kernel(60_000)
    assert [*cupy.limits.values()] == [100_000]


def test_threads_set_one_limit_at_a_time(cupy):
    """A thread that reads the limit and is then delayed must not lower it afterwards."""
    inside, at_once = [], []

    class Slow:
        def __setattr__(self, name, value):
            inside.append(value)
            at_once.append(len(inside))
            time.sleep(0.02)
            object.__setattr__(self, name, value)
            inside.remove(value)

    slow = Slow()
    sizes = [50_000 + 1000 * i for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda size: launch.allow_shared(slow, ("path", "f", 0), size), reversed(sizes)))
    assert {*at_once} == {1} and slow.max_dynamic_shared_size_bytes == max(sizes)


# ---- cubins that are cleared ----
@pytest.mark.parametrize("how", ["clear", "remove the folder"])
def test_a_cleared_cubin_is_made_again(cupy, compiled, how):
    """For another entry, or another device, in a running process."""
    kernel(0)
    disk_cache.clear() if how == "clear" else shutil.rmtree(disk_cache.directory())
    kernel(0, entry="g")
    kernel(0, index=1)
    assert compiled == {CONFIG: 2} and jit.compile(CONFIG, "sm_90a").path.exists()


def test_a_cubin_that_is_cleared_between_compiling_and_loading(cupy, compiled):
    cleared = []

    def clear(path):
        if len(cleared) < 3:
            cleared.append(disk_cache.clear())

    cupy.before_load = clear
    kernel(0)
    assert cleared == [(2, cleared[0][1])] * 3 and compiled == {CONFIG: 4}


def test_other_errors_of_loading_are_raised(cupy, compiled):
    def fail(path):
        raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")

    cupy.before_load = fail
    with pytest.raises(RuntimeError, match="INVALID_IMAGE"):
        kernel(0)
    assert compiled == {CONFIG: 1}
