"""Programs on a device whose kernels record their arguments."""
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_dma.arrays import CPU, describe, library_named
from cupy_dma.arrays.library import NO_CONTEXT
from cupy_dma.backends.cuda.runtime.builder import Arguments, Builder, NotBuildable, argument_type
from cupy_dma.backends.cuda.runtime.params import Packed, Params, Ref, pack_pointer
from cupy_dma.backends.cuda.runtime.program import Program, builder, forget_least_used, run

PARAMS = Params("struct P {\n const float* in;\n int length;\n float* out;\n float* space;\n};", "P")


class Device:
    """Records (entry, in, length, out, space) of launches, and cleared buffers."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.cleared: list[tuple[int, int]] = []

    def load(self, config: Any, entry: str, index: int, shared_bytes: int = 0) -> Any:
        return SimpleNamespace(launch=lambda grid, threads, params, stream, pdl: self.launched.append(
            (entry, grid, *struct.unpack("PiPP", params))))

    def on(self, device: Any) -> Any:
        return NO_CONTEXT

    def clear(self, pointer: int, size: int, stream: int) -> None:
        self.cleared.append((pointer, size))


@pytest.fixture
def device() -> Device:
    return Device()


def doubled(build: Builder, x: Any, factor: int = 2) -> Any:
    out, space = build.empty(x.shape, x.dtype), build.zeros((3,), "float32")
    build.launch(build.load(None, "double"), factor, 32, PARAMS.pack(
        **{"in": x.pointer, "length": x.shape[0], "out": out.ref, "space": space.ref + 4}))
    return out


def test_calls_of_one_kind_have_one_program(device):
    for n in (5, 5, 6, 5):
        x = np.zeros(n, np.float32)
        out = run(device, doubled, describe(x, "x"))
        entry, grid, given, length, made, space = device.launched[-1]
        assert (entry, grid, length) == ("double", 2, n) and out.shape == (n,) and out.dtype == np.float32
        assert (given, made) == (x.ctypes.data, out.ctypes.data) and device.cleared[-1] == (space - 4, 12)


def test_what_makes_a_kind(device):
    x = np.zeros((4, 6), np.float32)
    calls = [(x,), (x[:, :5],), (x[:, ::2],), (x.astype(np.float64),), (x.ravel()[1:5],), (x.ravel()[:4],), (x, 3)]
    keys = [Arguments(doubled, (describe(y, "x"), *more)).key for y, *more in calls]
    assert len(set(keys)) == len(keys)
    assert Arguments(doubled, (describe(x[:1, :3], "x"),)).key == Arguments(
        doubled, (describe(np.zeros((1, 3), np.float32)[:, :], "x"),)).key  # the stride of an axis of length 1
    with pytest.raises(TypeError, match="argument of type object"):
        Arguments(doubled, (describe(x, "x"), object()))


def test_arguments_need_not_be_aligned(device):
    x = np.zeros(9, np.float32)
    begin = next(i for i in range(4) if x[i:].ctypes.data % 16 == 4)
    for _ in range(2):
        run(device, doubled, describe(x[begin:begin + 5], "x"))
        assert device.launched[-1][2] == x[begin:].ctypes.data


def test_results_and_workspaces_lie_apart(device):
    def several(build: Builder, x: Any) -> Any:
        first, second = doubled(build, x), doubled(build, x)
        return (first, None, second.reshape(1, 5))

    first, nothing, second = run(device, several, describe(np.zeros(5, np.float32), "x"))
    assert nothing is None and first.shape == (5,) and second.shape == (1, 5)
    (*_, out_1, space_1), (*_, out_2, space_2) = device.launched
    assert (out_1, out_2) == (first.ctypes.data, second.ctypes.data) and abs(space_1 - space_2) >= 12


def test_a_later_program_finds_what_an_earlier_one_keeps(device):
    build = builder(device, "numpy", CPU)  # type: ignore[arg-type]
    x = build.argument(describe(np.zeros(5, np.float32), "x"))
    kept, out = build.empty((7,), "int32"), doubled(build, x)
    first = Program(build, (out,), keep={kept.ref.buffer})
    assert first.results == 1 and first.keeps and first.workspace == 256 * 2
    after, begin = build.following(), len(build.buffers)
    result = after.empty((2,), "float32")
    after.launch(after.load(None, "later"), 1, 32, PARAMS.pack(
        **{"in": kept.ref + 8, "length": 1, "out": result.ref, "space": 0}))
    second = Program(after, (result,), places={kept.ref.buffer: first.places[kept.ref.buffer]._replace(at=0)},
                     first=begin)
    made = second.run(library_named("numpy"), [1 << 20], [])
    assert device.launched[-1] == ("later", 1, (1 << 20) + 8, 1, made[0].ctypes.data, 0)


def test_a_builder_refuses_the_work_of_array_libraries(device):
    build = builder(device, "numpy", CPU)  # type: ignore[arg-type]
    x = build.argument(describe(np.zeros((4, 6), np.float32)[:, :3], "x"))
    for refused in (lambda: build.astype(x.array, "float16"), lambda: build.contiguous(x.array),
                    lambda: x.array.reshape(12), lambda: build.xp, lambda: build.empty((3,), "int32")[0]):
        with pytest.raises(NotBuildable):
            refused()
    values = build.full((5,), 7, "int32", CPU)
    for result in (x.array, values):
        with pytest.raises(NotBuildable, match="no kernel writes"):
            Program(build, (result,))
    with pytest.raises(NotBuildable, match="no kernel writes"):
        build.launch(build.load(None, "reader"), 1, 32, pack_pointer(values.ref + 4))


def test_packing():
    packed = PARAMS.pack_some({"in": Ref(3, 4) + 8, "length": 7}, {"out": Ref(1)})
    assert packed.refs == ((0, Ref(3, 12)), (16, Ref(1))) and struct.unpack("PiPP", packed.data) == (0, 7, 0, 0)
    assert PARAMS.pack_some({"length": 7}) == struct.pack("PiPP", 0, 7, 0, 0)
    joined = Packed(b"abcdefgh") + pack_pointer(Ref(5)) + pack_pointer(9)
    assert joined.refs == ((8, Ref(5)),) and len(joined.padded(64).data) == 64
    assert [Ref(0, 24) % n for n in (2, 16)] == [0, 8]
    with pytest.raises(AssertionError):
        Ref(0, 24) % 32


def test_argument_types_of_dataclasses_leave_out_fields():
    from dataclasses import dataclass

    @argument_type
    @dataclass
    class Plain:
        a: int
        x: Any

    x = describe(np.zeros(3, np.float32), "x")
    found = [Arguments(doubled, (Plain(a, x),)) for a in (1, 2, 1)]
    assert found[0].key != found[1].key and found[0].key == found[2].key and len(found[0].addresses) == 1


def test_an_eighth_is_forgotten():
    programs = {i: SimpleNamespace(last_used=-i) for i in range(17)}
    forget_least_used(programs, 16)
    assert sorted(programs) == [*range(15)]
