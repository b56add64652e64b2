"""The benchmark context_parallel on the ranks of ``ranks.py``."""
import argparse
from typing import Any

import torch

from benchmarks.__main__ import shared_options
from benchmarks.harness.shards import Problem
from benchmarks.routines import context_parallel as benchmark
from cupy_dma import distributed


def measured(group: Any, arguments: list[str]) -> tuple[list[dict[str, Any]], bool]:
    """Run the benchmark: its rows, and whether they are right."""
    options = argparse.ArgumentParser(parents=[shared_options("context_parallel")])
    benchmark.add_options(options)
    args = benchmark.checked(options.parse_args(arguments))
    rows = benchmark.Bench(args, group, group).run()
    return rows, benchmark.is_right(rows, args)


def spoiled(group: Any, arguments: list[str], what: str) -> tuple[list[dict[str, Any]], bool]:
    """Run it with slightly wrong outputs, gradients or byte counts."""
    real, formula = distributed.context_parallel_attention, distributed.exchanged_bytes

    def attend(*given: Any, **options: Any) -> torch.Tensor:
        out = real(*given, **options)
        if what == "output":
            return out + 0.1
        return out * 1.1 - 0.1 * out.detach() if what == "gradients" else out

    vars(distributed)["context_parallel_attention"] = attend
    if what == "bytes":
        vars(distributed)["exchanged_bytes"] = lambda *given, **options: tuple(
            x + 8 for x in formula(*given, **options))
    try:
        return measured(group, arguments)
    finally:
        vars(distributed).update(context_parallel_attention=real, exchanged_bytes=formula)


def failing(group: Any, arguments: list[str]) -> tuple[list[dict[str, Any]], bool]:
    real = Problem.inputs

    def inputs(self: Problem, *_: Any) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to ...")

    Problem.inputs = inputs  # type: ignore[method-assign]
    try:
        return measured(group, arguments)
    finally:
        Problem.inputs = real  # type: ignore[method-assign]
