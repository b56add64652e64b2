"""Variants of the Hopper backward beside cuDNN's dense backward: one pass or two, and queries per step.

Cases: those of backward.py up to 32768 keys, of ``train`` only three; short ones with few tiles; ``dense``, a top-w
mask as a dense one, which every call packs and lists. Variants: the portable kernels; two passes; two passes with the
portable kernel for keys; and one pass, up to head dim 128 and without dense masks. Up to head dim 64 each runs with 64
and with 128 queries per step. All four gradients are computed, with prepared interval lists. A gradient that differs
from the portable kernels' by more than 1 % of its norm is not right, and the exit status is 1.

The results go to ``hopper_backward.json`` in the folder of the GPU.
"""
import argparse
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from torch.nn.attention import SDPBackend

from benchmarks.harness import measure, peers
from benchmarks.harness.command import conclude, needs_hopper
from benchmarks.harness.report import line
from benchmarks.harness.suite import Case
from benchmarks.routines import backward
from benchmarks.routines.tune_sm90 import marked
from cupy_dma.backends.cuda.attention import sm90_backward
from cupy_dma.backends.cuda.runtime.program import fresh


class Way(NamedTuple):
    one_pass: bool = False
    block_q: int = 0  # 0: the kernels' choice
    portable: bool = False
    portable_keys: bool = False

    def __str__(self) -> str:
        steps = f", {self.block_q} queries a step" if self.block_q else ""
        if self.portable_keys:
            return "portable for keys"
        return "portable" if self.portable else f"{'one pass' if self.one_pass else 'two passes'}{steps}"


def cases() -> list[Case]:
    short = [Case("short", *sizes, n, n, min(w, n)) for sizes in ((2, 1, 64), (6, 3, 128), (16, 8, 64), (16, 8, 128))
             for n, w in ((1024, 256), (2048, 1024), (4096, 1024), (8192, 1024))]
    dense = [Case("dense", *sizes, n, n, 1024) for *sizes, n in (
        (6, 3, 128, 4096), (16, 8, 64, 8192), (16, 8, 128, 8192), (16, 2, 256, 8192))]
    return short + dense + [c for c in backward.cases("all") if c.key_length <= 32768 and c.set != "window"
                            and (c.set != "train" or c.key_length in (4096, 16384, 32768))]


def ways(case: Case) -> list[Way]:
    some = [Way(portable=True), Way(portable_keys=True)]
    if case.head_dim > sm90_backward.MAX_NARROW_DIM or case.set == "dense":
        return [*some, Way()]
    steps = (64, 128) if case.head_dim <= 64 else (0,)
    return [*some, *(Way(one_pass, block_q) for one_pass in (False, True) for block_q in steps)]


@contextlib.contextmanager
def forced(way: Way) -> Iterator[None]:
    """Inside the context, calls use this variant."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(fresh(one_pass=way.one_pass, hopper=False if way.portable else None))
        stack.enter_context(mock.patch.object(sm90_backward, "MIN_TILES", 0.0))
        if way.portable_keys:
            stack.enter_context(mock.patch.object(sm90_backward, "reasons_keys", lambda *arguments: ["tuning"]))
        if way.block_q:
            stages = 1 if way.one_pass and way.block_q == 128 else 2
            stack.enter_context(mock.patch.object(sm90_backward, "block_q", lambda *facts: way.block_q))
            stack.enter_context(mock.patch.object(sm90_backward, "key_stages", lambda head_dim, one_pass: stages))
        yield


def measured(case: Case) -> list[dict[str, Any]]:
    bench = backward.Benchmark(case)
    bench.prepare()
    if case.set == "dense":
        bench.options["mask"] = bench.mask.to_dense(case.key_length)
    rows: list[dict[str, Any]] = []
    expected: Any = None
    for way in ways(case):
        with forced(way):
            bench.forget_lists()  # variants keep different lists on the mask
            found = bench.backward()
            expected = found if expected is None else expected
            ms, how = measure.gpu_ms(bench.backward)
            rows.append({"way": str(way), "ms": ms, "timing": how, "peak_bytes": measure.peak_bytes(bench.backward),
                         "right": all(x is None or bool((x.float() - y.float()).norm() <= 0.01 * y.float().norm())
                                      for x, y in zip(found, expected))})
    call, note = peers.dense_backward(SDPBackend.CUDNN_ATTENTION, bench.query, bench.key, bench.value, bench.dout,
                                      causal=case.pattern != "none")
    ms, how = measure.gpu_ms(call)
    return [*marked(rows), {"way": "cudnn", "ms": ms, "timing": how, "note": note, "right": True}]


def run(args: argparse.Namespace) -> int:
    needs_hopper()
    done = []
    for case in cases():
        done.append({"name": case.name, "rows": measured(case)})
        measure.free_memory()
        print(case.name, *map(line, done[-1]["rows"]), sep="\n    ", flush=True)
    return conclude("tune_sm90_backward", args, __doc__, all(row["right"] for one in done for row in one["rows"]),
                    cases=done)
