"""Launches by the driver and TMA descriptors, with fake drivers."""
import ctypes
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest

from cupy_dma.arrays import driver
from cupy_dma.backends.cuda.attention import tma
from cupy_dma.backends.cuda.runtime import launch
from cupy_dma.backends.cuda.runtime.builder import Clear, Launch
from cupy_dma.backends.cuda.runtime.params import Packed, Ref, pack_pointer
from cupy_dma.backends.cuda.runtime.replay import Launches, Place

HANDLE, STREAM = 0x7f0012345678, 0x7f00aabbccdd  # as wide as addresses


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int),
                ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint))


class Driver:
    """Records requested launches; they return ``statuses`` in turn, then 0."""

    def __init__(self, version: int = 12030):
        self.version, self.launches, self.cleared, self.statuses = version, [], [], []
        form = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        memset = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
        self.library = SimpleNamespace(cuLaunchKernelEx=form(self._launch), cuDriverGetVersion=self._get_version,
                                       cuMemsetD8Async=memset(self._clear),
                                       cuGetErrorName=self._text(b"CUDA_ERROR_INVALID_VALUE"),
                                       cuGetErrorString=self._text(b"invalid argument"))

    def _launch(self, config, function, arguments, extra):
        config = LaunchConfig.from_address(config)
        attributes = [(a.id, a.value) for a in config.attributes[:config.count]]
        params = ctypes.string_at(ctypes.c_void_p.from_address(arguments).value, 16)
        self.launches.append((function, [*config.grid], [*config.block], config.shared_bytes, config.stream or 0,
                              attributes, params))
        assert extra is None
        return self.statuses.pop(0) if self.statuses else 0

    def _clear(self, pointer, value, size, stream):
        self.cleared.append((pointer, value, size, stream or 0))
        return self.statuses.pop(0) if self.statuses else 0

    def _get_version(self, place):
        place._obj.value = self.version
        return 0

    def _text(self, text):
        def get(status, place):
            place._obj.value = text
            return 0
        return get


@pytest.fixture
def fake(monkeypatch):
    """A function that replaces the driver by a fake one of the given version."""
    def make(version: int = 12030) -> Driver:
        made = Driver(version)
        for module in (launch, driver):
            monkeypatch.setattr(module, "library", lambda: made.library)
        launch.supports_pdl.cache_clear()
        return made

    yield make
    launch.supports_pdl.cache_clear()


def function(pdl: bool = True, bind=lambda: None) -> launch.Function:
    return launch.Function("some_kernel", HANDLE, 70_000, pdl, bind)


PARAMS = bytes(range(16))


def test_the_structs_are_those_of_the_driver():
    assert launch._CONFIG.size == ctypes.sizeof(LaunchConfig) == 56
    assert launch._ATTRIBUTE.size == ctypes.sizeof(Attribute) == len(launch._PDL) == 72


@pytest.mark.parametrize("stream", [0, 1, 2, STREAM])
def test_a_launch_says_what_it_was_told(fake, stream):
    device = fake()
    function().launch(132, 384, PARAMS, stream)
    assert device.launches == [(HANDLE, [132, 1, 1], [384, 1, 1], 70_000, stream, [(6, 1)], PARAMS)]


@pytest.mark.parametrize(("device_can", "asked"), [(True, True), (True, False), (False, True), (False, False)])
def test_pdl_where_the_device_can_and_the_caller_may(fake, device_can, asked):
    device = fake()
    function(device_can).launch(1, 32, PARAMS, STREAM, pdl=asked)
    assert device.launches[0][5] == ([(6, 1)] if device_can and asked else [])


@pytest.mark.parametrize(("capability", "version", "setting", "expected"), [
    (90, 12030, "", True), (120, 13000, "1", True), (89, 13000, "", False), (90, 12020, "", False),
    (90, 13000, "0", False)])
def test_pdl_needs_the_device_the_driver_and_the_users_leave(fake, monkeypatch, capability, version, setting, expected):
    fake(version)
    monkeypatch.setenv("CUPY_DMA_EARLY", setting)
    assert launch.supports_pdl(capability) is expected


def test_an_error_names_the_kernel_and_its_launch(fake):
    fake().statuses = [1]
    with pytest.raises(RuntimeError, match=r"some_kernel .*5 blocks of 2000 threads, 70000 bytes.*"
                                           r"CUDA_ERROR_INVALID_VALUE: invalid argument"):
        function().launch(5, 2000, PARAMS, STREAM)


def test_a_thread_without_a_context_gets_it(fake):
    device, bound = fake(), []
    device.statuses = [201]
    function(bind=lambda: bound.append(1)).launch(3, 32, PARAMS, STREAM)
    assert bound == [1] and len(device.launches) == 2 and device.launches[0] == device.launches[1]
    device.statuses = [201, 201]
    with pytest.raises(RuntimeError, match="some_kernel"):
        function().launch(3, 32, PARAMS, STREAM)


def test_threads_launch_the_same_kernel_at_the_same_time(fake):
    device, kernel, each = fake(), function(), 300

    def work(number: int) -> None:
        for i in range(each):
            kernel.launch(1 + i, 32, bytes([number]) * 16, number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for number in range(4):
        own = [launch for launch in device.launches if launch[4] == number]
        assert [launch[1][0] for launch in own] == [*range(1, each + 1)]
        assert all(launch[6] == bytes([number]) * 16 for launch in own)


def test_a_machine_without_a_driver_is_told_so(monkeypatch):
    def refuse(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(RuntimeError, match=r"libcuda\.so\.1"):
        launch.library.__wrapped__()


# ---- the launches of a program ----
def test_a_program_launches_what_was_built(fake):
    """At new addresses: relocations, stream and launch configuration are written where the driver reads them."""
    device, kernels = fake(), [SimpleNamespace(function=function(pdl)) for pdl in (True, False)]
    array = Ref(0)
    plan = Launches([
        Launch(kernels[0], 5, 64, True, Packed(struct.pack("q", 7)) + pack_pointer(array)),
        Clear(array + 32, 8), Clear(array + 256, 4),
        Launch(kernels[1], 6, 96, True, pack_pointer(array + 4) + struct.pack("qi", 9, 3))], {0: Place(0, 0)}, 1)
    bound = []
    runtime = SimpleNamespace(bind=lambda: bound.append(1))
    for address in (0x7f0000001000, 0x7f0000002000):
        device.launches.clear()
        device.cleared.clear()
        plan.run(runtime, [address], STREAM)
        assert device.launches == [
            (HANDLE, [5, 1, 1], [64, 1, 1], 70_000, STREAM, [(6, 1)], struct.pack("2q", 7, address)),
            (HANDLE, [6, 1, 1], [96, 1, 1], 70_000, STREAM, [], struct.pack("2q", address + 4, 9))]
        assert device.cleared == [(address + 32, 0, 228, STREAM)]
    device.statuses = [0, 201, 0, 0]
    plan.run(runtime, [address], STREAM)
    assert device.cleared[1:] == device.cleared[:1] * 2 and bound == [1]
    device.statuses = [1]
    with pytest.raises(RuntimeError, match=r"some_kernel .*5 blocks of 64 threads"):
        plan.run(runtime, [address], STREAM)
    device.statuses = [0, 1]
    with pytest.raises(RuntimeError, match="cannot set 228 bytes at 0x7f0000002020 to zero: CUDA_ERROR"):
        plan.run(runtime, [address], STREAM)


# ---- TMA descriptors ----
@pytest.fixture
def answers(monkeypatch):
    """The fake driver's answers in turn, and how often a context was bound."""
    found = SimpleNamespace(statuses=[], bound=0)

    def bind():
        found.bound += 1

    monkeypatch.setattr(tma, "bind", bind)
    def encode(target, kind, rank, pointer, *more):
        ctypes.memmove(target.value + 24, pointer.value.to_bytes(8, "little"), 8)
        return found.statuses.pop(0)

    found.encode = encode
    monkeypatch.setattr(tma.launch, "error_text", lambda status: f"error {status}")
    return found


def descriptor(encode):
    library = SimpleNamespace(runtime=SimpleNamespace(tensor_map_encoder=lambda: encode))
    rows = mock.Mock(library=library, dtype="float16", pointer=Ref(7, 32), shape=(1, 64, 2, 64),
                     strides=(8192, 128, 64, 1))
    return tma.queries_map(rows, 64, 1)


def test_tma_in_a_thread_without_a_context(answers):
    """Autograd's thread, for example; it still uses the kernels for aligned rows."""
    answers.statuses = [201, 0, 0]
    data, refs = descriptor(answers.encode)
    assert len(data) == tma.MAP_BYTES and answers.bound == 1 and not answers.statuses
    assert refs == ((24, Ref(7, 32)),)


def test_what_tma_cannot_read(answers):
    answers.statuses = [1, 1]
    assert descriptor(answers.encode) is None and not answers.bound


def test_descriptors_that_hold_addresses_in_another_way_raise():
    with pytest.raises(RuntimeError, match="stores addresses in TMA descriptors in an unknown way"):
        descriptor(lambda *arguments: 0)


def test_other_errors_of_tma_raise(answers):
    answers.statuses = [700]
    with pytest.raises(RuntimeError, match=r"cannot make a TMA descriptor of .* error 700"):
        descriptor(answers.encode)
