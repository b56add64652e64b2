"""Compile the kernels of the GPU tests on a machine without a GPU, since NVRTC takes most of a GPU run's time.

    CUPY_DMA_CACHE_DIR=cubins python -m tests.gpu.precompile --arch sm_90a
    ... --tune                                        also kernels that benchmarks/routines/tune_*.py measure

Copy the files into the cache directory of the tests. They are used if both machines have the same versions of NVRTC and
the CUDA headers; otherwise the tests compile again.

To find the configurations, the calls of the tests' grids run on CPU arrays, with a device whose kernels do nothing.
"""
import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest import mock

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention import sm90
from cupy_dma.backends.cuda.runtime import disk_cache, jit
from cupy_dma.backward import attention_backward, dynamic_mask_attention_backward
from tests import emulator
from tests.emulator.memory import Session
from tests.gpu import test_sm90
from tests.gpu.sm90_tiles import TILES, taken
from tests.oracle import cases, schedule_cases, varlen_cases


class Nothing:
    """A kernel that does nothing."""

    def launch(self, *arguments: Any, **options: Any) -> None:
        pass


class Unwatched(Session):
    """A memory session for calls that touch no memory."""

    def operand(self, operand: Operand, writable: bool = False) -> Operand:
        return operand


class UnwatchedMemory:
    """Opens such sessions."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        yield Unwatched()


class Recorder(emulator.EmulatorRuntime):
    """A device of 132 SMs that records the configurations of requested kernels."""

    def __init__(self, is_hopper: bool = False):
        super().__init__(build="plain", is_hopper=is_hopper)
        self.memory = UnwatchedMemory()
        self.configs: dict[jit.Config, None] = {}

    def load(self, config: jit.Config, entry: str, index: int, shared_bytes: int = 0) -> Any:
        self.configs[config] = None
        return Nothing()

    def num_sms(self, index: int) -> int:
        return 132

    def check_layout(self, index: int) -> None:
        pass

    def clear(self, pointer: int, size: int, stream: int) -> None:
        pass


def hopper_configs() -> dict[jit.Config, None]:
    """Configurations of tests/gpu/test_sm90.py and of the other grids."""
    forward, packed = test_sm90.FORWARD, test_sm90.VARLEN
    with emulator.hopper_gpu(Recorder) as runtime:
        for one_pass in (False, True):
            with schedule_cases.hopper_gradients(one_pass):
                run_all(functools.partial(cases.run_backward, with_dlse=True), cases.CASES)
                run_all(varlen_cases.run_backward, varlen_cases.CASES + varlen_cases.SUPERS)
        run_all(cases.run, cases.CASES)  # where the library itself chooses the Hopper kernel
        run_all(varlen_cases.run, varlen_cases.CASES + varlen_cases.LONG)
        for name, (tile, head_dims) in TILES.items():
            with taken(tile, head_dims):
                run_all(cases.run, forward)
                run_all(varlen_cases.run, packed)
                for split in (False, True):
                    with schedule_cases.scheduled(split):
                        for case, heads in itertools.product(schedule_cases.CASES, schedule_cases.HEADS):
                            schedule_cases.run(case, *heads, head_dims[-1], np.ascontiguousarray, backend="emulator")
                        if split and name in test_sm90.GRID_IN_SPLITS:
                            run_all(cases.run, forward)
                if name == "128x128":
                    with mock.patch.object(sm90, "_maps", lambda call, block: None):
                        run_all(cases.run, [case for case in forward if case.mask in ("none", "causal")])
                if name == "192x64":
                    with mock.patch.object(sm90, "queries_map", lambda *arguments: None):
                        run_all(cases.run, [case for case in forward if case.mask in ("top_w", "causal")])
    return runtime.configs


def portable_configs() -> dict[jit.Config, None]:
    """Configurations of portable kernels for the same grids, forward and backward."""
    with emulator.using(Recorder) as runtime:
        run_all(cases.run, cases.CASES)
        run_all(functools.partial(cases.run_backward, with_dlse=True), cases.CASES)
        run_all(varlen_cases.run, varlen_cases.CASES + varlen_cases.PAGES + varlen_cases.LONG)
        run_all(varlen_cases.run_backward, varlen_cases.CASES + varlen_cases.SUPERS)
    return runtime.configs


def tuning_configs(head_dims: Sequence[int] = (64, 96, 128, 192, 256)) -> dict[jit.Config, None]:
    """Configurations of the routine tune_sm90, from shorter calls of the same kinds."""
    from benchmarks.routines import tune_sm90

    with emulator.hopper_gpu(Recorder) as runtime:
        for case in tune_sm90.cases(list(tune_sm90.KINDS), list(head_dims)):
            short = case._replace(length=1024, window=min(case.window, 128))
            call = tune_sm90.calls(short, device="cpu", backend="emulator")
            for tile in (None, *tune_sm90.tiles(case)):
                with tune_sm90.forced(tile):
                    call()
    return runtime.configs


def backward_tuning_configs() -> dict[jit.Config, None]:
    """Configurations of the routine tune_sm90_backward, from shorter calls, and of the whole chain in the routine
    backward."""
    import torch

    from benchmarks.routines import backward, tune_sm90_backward

    with emulator.hopper_gpu(Recorder) as runtime:
        for case in dict.fromkeys(backward.cases("all") + tune_sm90_backward.cases()):
            heads = case.heads, case.kv_heads, case.kv_heads
            q, k, v = (torch.randn(1, 1024, h, case.head_dim, dtype=torch.bfloat16) for h in heads)
            scores = torch.randn(1, case.kv_heads, 1024)
            options: dict[str, Any] = {"causal": case.pattern == "causal"}
            if case.set != "plain":
                options = {"mask": dma.IntervalMask.top_w(scores, 128), "bias": scores}
                made = {"dt_proj": torch.randn(case.kv_heads, case.kv_heads * case.head_dim, dtype=torch.bfloat16),
                        "A": torch.ones(case.kv_heads), "window": 128, "backend": "emulator"}
                out, lse = dma.dynamic_mask_attention(q, k, v, **made, return_lse=True)
                dynamic_mask_attention_backward(out, q, k, v, out, lse, **made)
            if case.set == "dense":
                options["mask"] = options["mask"].to_dense(1024)
            out, lse = dma.attention(q, k, v, **options, return_lse=True, backend="emulator")
            for way in tune_sm90_backward.ways(case):
                with tune_sm90_backward.forced(way):
                    attention_backward(out, q, k, v, out, lse, **options, backend="emulator")
    return runtime.configs


def run_all(run: Callable[..., Any], chosen: list[Any]) -> None:
    for case in chosen:
        if case.dtype != "float64":
            run(case, np.ascontiguousarray, backend="emulator")


def compile_one(config: jit.Config, arch: str) -> float:
    return jit.compile(config, arch).seconds


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--arch", default="sm_90a", help="of the GPU that will run the tests (sm_90a)")
    options.add_argument("--tune", action="store_true", help="also what benchmarks/tune_* measure (sm_90a)")
    options.add_argument("--jobs", type=int, help="processes (one for each core)")
    args = options.parse_args(arguments)
    from tqdm import tqdm

    found = portable_configs() | (hopper_configs() if args.arch == "sm_90a" else {})
    if args.tune:
        found |= tuning_configs() | backward_tuning_configs()
    # spawn, not fork: a fork of a process with threads, such as jax's, may hang.
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        seconds = list(tqdm(pool.map(functools.partial(compile_one, arch=args.arch), found), total=len(found),
                            unit="kernel", disable=None))
    print(f"{len(found)} kernels for {args.arch} in {disk_cache.directory()}, "
          f"{sum(x > 0 for x in seconds)} of them new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
