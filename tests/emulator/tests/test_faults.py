"""The emulator itself, on the small kernels of tests/emulator/faulty.cu: right kernels run, and faults are reported
with thread and line."""
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupy_dma.arrays import CPU, library_named, numpy_dtype
from cupy_dma.backends.cuda.runtime import jit
from tests.emulator import EmulatorError, EmulatorRuntime, Order, build
from tests.emulator.memory import WatchedLibrary
from tests.oracle import reference

FILE = Path(__file__).parents[1] / "faulty.cu"


def source() -> str:
    first, _, rest = FILE.read_text().partition('#include "sm90/ptx.cuh"')
    line = first.count("\n") + 2
    rest = re.sub(r"^KERNEL\((\w+)\) {",
                  r'extern "C" __global__ void \1(const Arguments p) { wait_for_earlier_kernels();', rest, flags=re.M)
    return f'{first}{build.with_twins(jit.source_text("sm90/ptx.cuh"))}#line {line} "faulty.cu"{rest}'


def launch(name: str, out: np.ndarray, inputs: np.ndarray, threads: int = 32, grid: int = 1, shared: int = 0,
           initialised: bool = False, **options) -> None:
    runtime = EmulatorRuntime(**options)
    packed = struct.pack("@PPi0q", out.ctypes.data, inputs.ctypes.data, inputs.size)
    with runtime.memory.session() as session:
        session.readable(inputs, "in")
        region = session.writable(out, "out")
        if initialised:
            build.driver().initialise_region(region)
        runtime.load_text(source(), name, shared).launch(grid, threads, packed)


ORDERS = [Order(), Order("backward", "backward"), Order("random", "random", 1), Order("random", "random", 2)]


# ---- right kernels ----
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("build_name", ["watched", "plain"])
def test_collectives(order, build_name, rng):
    x = rng.integers(-50, 50, 32).astype(np.int32)
    out = np.zeros((12, 32), np.int32)
    launch("collectives", out, x, order=order, build=build_name)
    lanes = np.arange(32)
    expected = [x[lanes ^ 5], x[np.where(lanes < 3, lanes, lanes - 3)], x[np.where(lanes > 28, lanes, lanes + 3)],
                np.full(32, x[7]), np.full(32, np.int64((x & 1) @ (1 << lanes)).astype(np.int32)),
                np.full(32, x.min()), np.full(32, x.max()), np.full(32, x.sum()), np.ones(32),
                np.full(32, (x == x[3]).all()), x[lanes ^ 1],
                np.where(lanes < 16, x[:16].sum(), x[16:].max())]
    assert np.array_equal(out, np.stack(expected))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_tickets_hand_over_what_other_blocks_did(order, rng):
    x = rng.integers(-50, 50, 32).astype(np.int32)
    out = np.zeros(4 + 4 + 6 + 64, np.int32)
    for _ in range(2):  # the counters reset themselves
        out[[*range(4), *range(8, 78)]] = -1
        launch("tickets", out, x, grid=6, order=order, initialised=True)
        assert out[:4].tolist() == [*x[:6].reshape(3, 2).sum(1), x[:6].sum()] and not out[4:8].any()


RIGHT = {  # kernel: threads, inputs (0, 1, ...), results, bytes of shared memory
    "barriers": (64, 64, lambda x: np.full(40, 36 + 1000 + 2000), 0),
    "neighbours": (32, 32, lambda x: (x ^ 1) + 32, 0),  # by shared memory and atomics
    "copies": (32, 128, lambda x: np.append(x[::4], np.zeros(32)), 0),  # asynchronous ones
    "pipeline": (128, 64, lambda x: 6 * x[63 - (x ^ 1)], 0),  # mbarriers, named ones: two warps produce, two consume
    "majors": (128, 1536, lambda x: np.tile(x[:1024].reshape(64, 16) @ x[1024:].reshape(16, 32), (4, 1)), 12288)}


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("build_name", ["watched", "plain"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels(name, build_name, order):
    threads, size, result, shared = RIGHT[name]
    x = np.arange(size, dtype=np.int32) % 97
    expected = result(x).ravel()
    out = np.full(expected.size, -1, np.int32)
    launch(name, out, x, threads=threads, shared=shared, order=order, build=build_name)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_reductions(order):
    """Vector and bulk reductions of two blocks into the same numbers."""
    out = np.zeros(128, np.float32)
    runtime = EmulatorRuntime(order=order, build="plain")
    packed = struct.pack("@P", out.ctypes.data)
    runtime.load_text(source(), "reductions").launch(2, 32, packed)
    assert np.array_equal(out, 4.0 * np.tile(np.arange(1, 5), 32))


def test_conversions_round_to_nearest_even(rng):
    """Every float16 and bfloat16 number, midpoints of neighbours, numbers next to midpoints, and random floats."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    brains = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    middle = (brains.view(np.uint32) | 0x8000).view(np.float32)
    with np.errstate(all="ignore"):
        steps = np.nextafter(halves, np.float32(np.inf))
        below = np.nextafter(middle, np.float32(0))
        between = (halves[:-1] + halves[1:]) / 2
    x = np.concatenate([halves, brains, middle, below, steps, between,
                        rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)])
    codes, back = np.zeros((2, x.size), np.uint16), np.zeros((2, x.size), np.float32)
    runtime = EmulatorRuntime(build="plain")
    packed = struct.pack("@PPPPPi0q", x.ctypes.data, *(a.ctypes.data for a in (*codes, *back)), x.size)
    runtime.load_text(source(), "conversions").launch(1, 32, packed)
    for code, wide, name in zip(codes, back, ("float16", "bfloat16")):
        with np.errstate(all="ignore"):
            expected = x.astype(numpy_dtype(name))
        number = ~np.isnan(x)
        assert np.array_equal(code[number], expected.view(np.uint16)[number])
        assert np.array_equal(wide, expected.astype(np.float32), equal_nan=True)


def test_tf32(rng):
    """Random floats, midpoints of neighbouring TF32 numbers, numbers next to midpoints, and a product."""
    x = rng.standard_normal(200).astype(np.float32)
    half = (rng.integers(0, 2**32, 10_000, dtype=np.uint32) & np.uint32(0xffffe000)) | np.uint32(0x1000)
    x = np.concatenate([x, *(bits.view(np.float32) for bits in (half, half - 1, half + 1)),
                        rng.integers(0, 2**32, 10_000, dtype=np.uint32).view(np.float32)])
    rounded, product = np.zeros_like(x), np.zeros((16, 8), np.float32)
    packed = struct.pack("@PPPi0q", *(array.ctypes.data for array in (x, rounded, product)), x.size)
    EmulatorRuntime(build="plain").load_text(source(), "tf32").launch(1, 32, packed)
    assert np.array_equal(rounded, reference.rounded_tf32(x), equal_nan=True)
    a, b = rounded[:128].reshape(16, 8).astype(np.float64), rounded[128:192].reshape(8, 8).astype(np.float64)
    np.testing.assert_allclose(product, a @ b, rtol=1e-5, atol=1e-6)


# ---- faults ----
FAULTS = {  # kernel: what the report must say, threads, blocks
    "divergent_barrier": ("threads diverge: some wait for __syncthreads at", 32, 1),
    "missing_lane": ("deadlock", 32, 1),
    "deadlock": ("deadlock", 32, 1),
    "different_collectives": ("lanes of warp 0 diverge: .* wait for .*, lane 1 comes to a vote", 32, 1),
    "exited_lane": ("a shuffle from a lane that does not take part", 32, 1),
    "unrounded_operand": ("lane 9 has an operand that was not rounded to TF32", 32, 1),
    "not_in_mask": ("lane 31 is not in its own mask", 32, 1),
    "mbarrier_deadlock": ("deadlock(.|\n)*wait for an mbarrier", 32, 1),
    "mbarrier_not_made": ("it has not been initialised", 32, 1),
    "named_barrier_short": ("deadlock(.|\n)*wait for a named barrier", 64, 1),
    "bulk_not_waited": ("exits without having waited", 1, 1),
    "mmas_not_waited": ("wgmma .* exits without having waited", 32, 1),
    "register_changed": ("lane 5 has changed a register that it reads", 32, 1),
    "different_mmas": ("the lanes of a warp have issued different MMAs", 32, 1),
    "tma_not_waited": ("the block ends before its bytes have come", 32, 1),
    "tma_read_early": ("an asynchronous copy to it has not been waited for", 32, 1),
    "tma_of_fewer_bytes": ("deadlock(.|\n)*wait for an mbarrier", 32, 1),
    "tma_between_rows": ("its place in dynamic shared memory must be a multiple of 128 bytes", 32, 1),
    "arrival_too_many": ("an arrival at a barrier that has had all of its phase", 32, 1),
    "store_not_waited": ("cp.async.bulk.tensor .* exits without having waited", 32, 1),
    "pipeline_race": ("race on shared memory", 64, 1),
    "barrier_of_others": ("race on shared memory", 96, 1),
    "shared_race": ("race on shared memory", 64, 1),
    "warp_race": ("race on shared memory", 32, 1),
    "write_after_read": ("race on shared memory .* read .*, thread .* writes", 64, 1),
    "block_race": ("race on out .* thread .* of block 0 wrote .*, thread .* of block 1 writes", 32, 2),
    "ticket_too_early": ("race on out .* thread 1 of block .* wrote .*, thread 0 of block .* reads", 32, 2),
    "ticket_of_another": ("race on out .* thread 0 of block 0 wrote .*, thread 1 of block 1 reads", 32, 2),
    "copy_too_early": ("read of in .*: the thread has not waited for earlier kernels", 32, 1),
    "tma_too_early": ("cp.async.bulk.tensor at .*: the thread has not waited for earlier kernels", 32, 1),
    "write_too_early": ("write of out .*: the thread has not waited for earlier kernels", 32, 1),
    "exit_too_early": ("exits without having waited for earlier kernels", 32, 1),
    "read_behind": ("read of 4 bytes out of bounds .* 0 bytes behind the end of in", 32, 1),
    "write_behind": ("write of 4 bytes out of bounds .* 0 bytes behind the end of out", 32, 1),
    "write_input": ("write of read-only in", 32, 1),
    "shared_behind": ("write of 4 bytes out of bounds .* dynamic shared memory", 32, 1),
    "uninitialised": ("read of uninitialised shared memory", 32, 1),
    "uninitialised_output": ("read of uninitialised out", 32, 1),
    "missing_wait": ("an asynchronous copy to it has not been waited for", 32, 1),
    "missing_barrier_after_wait": ("race on shared memory", 32, 1),
    "misaligned": ("undefined behaviour", 1, 1),
    "misaligned_copy": ("asynchronous copy of 16 bytes .* must be multiples", 1, 1),
    "overflow": ("undefined behaviour", 32, 1),
    "wrong_index": ("undefined behaviour", 32, 1),
    "null_pointer": ("read of 4 bytes out of bounds at .*: no array is near", 32, 1),
    "endless_recursion": ("stack is full", 1, 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_reported(name):
    text, threads, grid = FAULTS[name]
    size = {"missing_wait": 128, "missing_barrier_after_wait": 128}.get(name, max(threads, 32))
    out, x = np.zeros(max(threads, 32), np.int32), np.full(size, 5, np.int32)
    with pytest.raises(EmulatorError, match=text) as caught:
        launch(name, out, x, threads=threads, grid=grid, shared=64 if name == "shared_behind" else 1024,
               initialised=name.startswith("ticket"))
    message = str(caught.value)
    assert f"kernel {name}, block" in message
    marked = [number for number, line in enumerate(FILE.read_text().splitlines(), 1) if f"(at {name})" in line]
    assert all(f"faulty.cu:{number}" in message for number in marked), message


@pytest.mark.parametrize("name", ["write_behind", "shared_behind", "stack_behind"])
def test_address_sanitizer(name):
    """In an interpreter of its own: AddressSanitizer must be loaded first, and ends the process."""
    files = [subprocess.run(["g++", f"-print-file-name={file}"], capture_output=True, text=True).stdout.strip()
             for file in ("libasan.so", "libstdc++.so.6")]
    if not all(Path(file).is_absolute() for file in files):
        pytest.skip("g++ has no AddressSanitizer here")
    code = ("import numpy as np; from tests.emulator.tests.test_faults import launch; "
            f"launch({name!r}, np.zeros(32, np.int32), np.zeros(32, np.int32), shared=64, build='address')")
    environment = {**os.environ, "LD_PRELOAD": " ".join(files), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=FILE.parents[2], capture_output=True,
                          text=True)
    assert done.returncode and "ERROR: AddressSanitizer" in done.stderr, done.stderr
    assert f" in {name}" in done.stderr


def test_the_emulator_goes_on_after_a_fault():
    for name in ("deadlock", "overflow", "endless_recursion"):
        with pytest.raises(EmulatorError):
            launch(name, np.zeros(32, np.int32), np.full(32, 5, np.int32))
    test_right_kernels("copies", "watched", ORDERS[0])


def test_a_race_is_found_in_every_order():
    for order in ORDERS:
        with pytest.raises(EmulatorError, match="race on shared memory"):
            launch("shared_race", np.zeros(64, np.int32), np.ones(64, np.int32), threads=64, order=order)


@pytest.mark.parametrize(("name", "text"), [("half_written", "element 20 of out was not written"),
                                            ("written_twice", "element 0 of out was written more than 1 times")])
def test_results_are_written_once(name, text):
    runtime, x = EmulatorRuntime(), np.ones(32, np.int32)
    with runtime.memory.session() as session:
        out = WatchedLibrary(library_named("numpy"), session).empty((32,), "int32", CPU)
        assert (out.view(np.uint8) == 0xab).all()
        session.readable(x, "in")
        packed = struct.pack("@PPi0q", out.ctypes.data, x.ctypes.data, 32)
        runtime.load_text(source(), name).launch(1, 32, packed)
        with pytest.raises(AssertionError, match=text):
            session.check_written(out.ctypes.data, "out", 4)


@pytest.mark.parametrize("library_name", ["numpy", "torch"])
def test_gaps_between_rows_are_out_of_bounds(library_name):
    pytest.importorskip(library_name)
    library = library_named(library_name)
    base = library.from_numpy(np.ones(64, np.int32), CPU)
    rows = base.reshape(4, 16)[:, :8]
    runtime, out = EmulatorRuntime(), np.zeros(32, np.int32)
    with runtime.memory.session() as session:
        seen = session.operand(library.describe(rows, "rows"))
        session.writable(out, "out")
        packed = struct.pack("@PPi0q", out.ctypes.data, seen.pointer, 32)
        with pytest.raises(EmulatorError, match="it is in a gap of rows"):
            runtime.load_text(source(), "read_behind").launch(1, 32, packed)


def test_reports_name_kernel_files():
    assert re.search(r'#line 1 "common/arch.cuh"', jit.source_text("common/arch.cuh"))
