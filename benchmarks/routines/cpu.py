"""The NumPy backend beside torch's SDPA on the same CPU, forward and backward, in one run.

Inputs: float32, independent normal numbers (numpy.random.default_rng seeded by the case), 4/2 heads, D 32. small: B 8,
N 256, w 64 and 256 (w = 256 keeps as many pairs as causal attention). large: B 1, N 16384, w 512.

cupy_dma: NumPy arrays; IntervalMask.top_w, attention with the scores as bias, attention_backward with all four
gradients. all BLAS threads: the same without the limit to one thread, to show why the limit exists. sdpa: causal
scaled_dot_product_attention with enable_gqa and its three gradients, on contiguous (B, H, N, D) tensors, with torch's
default number of threads.

Timing: wall time. After a warm-up, cupy_dma and sdpa alternate ``--repeats`` times; all BLAS threads comes last,
because its threads keep cores busy for a while. Shows medians and the fastest times. If other programs use the cores,
compare only numbers of one run; the load average and the thread counts are recorded with them.

Check: sampled rows and keys of every batch entry against float64, as in forward.py and backward.py. The check ignores
times.
"""
import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import numpy as np
import torch
from threadpoolctl import ThreadpoolController, threadpool_info

import cupy_dma as dma
from benchmarks.harness import measure
from benchmarks.harness.check import TokenCheck, check_interval_gradients
from benchmarks.harness.command import at_least_1, conclude
from benchmarks.harness.folders import output
from benchmarks.harness.suite import Case
from cupy_dma.backends.numpy import threads

REPEATS = {"small": 41, "large": 5, "smoke": 2}


def cases(which: str) -> list[Case]:
    found = [Case("small", 4, 2, 32, 256, 256, window, batch=8) for window in (64, 256)]
    found += [Case("large", 4, 2, 32, 16384, 16384, 512), Case("smoke", 4, 2, 16, 70, 70, 20, batch=2)]
    return [case for case in found if case.set == which or which == "all" and case.set != "smoke"]


class Benchmark:
    """The inputs, timed calls and checks of one case."""

    def __init__(self, case: Case):
        self.case, rng = case, np.random.default_rng(case.seed)
        queries = case.batch, case.query_length, case.heads, case.head_dim
        keys = case.batch, case.key_length, case.kv_heads, case.head_dim
        self.query, self.dout = rng.standard_normal((2, *queries), np.float32)
        self.key, self.value = rng.standard_normal((2, *keys), np.float32)
        self.scores = rng.standard_normal((case.batch, case.kv_heads, case.key_length), np.float32)

    def ours(self) -> tuple[Any, Any, Any, Any]:
        """mask, out, lse, gradients"""
        mask = dma.IntervalMask.top_w(self.scores, window=self.case.window)
        out, lse = dma.attention(self.query, self.key, self.value, mask=mask, bias=self.scores, return_lse=True)
        return mask, out, lse, dma.backward.attention_backward(self.dout, self.query, self.key, self.value, out, lse,
                                                               mask=mask, bias=self.scores)

    def unlimited(self) -> None:
        nothing = ThreadpoolController().select(user_api="no API")
        with mock.patch.object(threads, "_blas", lambda: nothing):
            self.ours()

    def sdpa(self) -> Callable[[], Any]:
        q, k, v, do = (torch.from_numpy(np.ascontiguousarray(x.swapaxes(1, 2)))
                       for x in (self.query, self.key, self.value, self.dout))
        inputs = [x.requires_grad_() for x in (q, k, v)]

        def call() -> Any:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return torch.autograd.grad(out, inputs, do)

        return call

    def rows(self, repeats: int) -> list[dict[str, Any]]:
        ms = {who: times for calls in ({"cupy_dma": self.ours, "sdpa": self.sdpa()},
                                       {"all BLAS threads": self.unlimited})
              for who, times in measure.by_turns(calls, 1 + repeats, measure.wall_ms).items()}
        return [{"who": who, "stage": "forward+backward", "ms": statistics.median(found), "fastest_ms": min(found),
                 "repeats": repeats} for who, (_, *found) in ms.items()]

    def check(self) -> dict[str, Any]:
        """Check sampled rows of the output and the mask, and sampled gradients, of each batch entry."""
        case, (mask, out, lse, gradients) = self.case, self.ours()
        rows = sorted({0, case.query_length - 1,
                       *np.random.default_rng(case.seed).integers(0, case.query_length, 4).tolist()})
        start, stop = (np.broadcast_to(x, self.scores.shape).copy() for x in (mask.start, mask.stop))
        entries = []
        for b in range(case.batch):
            def of_entry(*arrays: Any, b: int = b) -> list[torch.Tensor]:
                return [torch.from_numpy(x[b:b + 1]) for x in arrays]

            inputs, forward = (self.query, self.key, self.value), TokenCheck()
            arrays = of_entry(out, lse, *inputs, self.scores, start, stop)
            forward.compare_rows(*(x[0] for x in arrays), case.window, rows)
            backward = check_interval_gradients(
                of_entry(*gradients), *of_entry(self.dout, *inputs, out, lse, self.scores, start, stop), seed=case.seed)
            found = forward.result()
            entries.append({"forward": found, "backward": backward, "ok": found["ok"] and backward["ok"]})
        return {"ok": all(entry["ok"] for entry in entries), "entries": entries}


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--set", choices=["all", *REPEATS], default="all")
    options.add_argument("--repeats", type=int, help=f"timed turns (default: {REPEATS})")


def run(args: argparse.Namespace) -> int:
    at_least_1(args, "repeats")
    pools = [{name: found[name] for name in ("user_api", "internal_api", "version", "num_threads")}
             for found in threadpool_info()]
    found = []
    for case in cases(args.set):
        bench = Benchmark(case)
        found.append({**asdict(case), "name": case.name, "check": bench.check(),
                      "rows": bench.rows(args.repeats or REPEATS[case.set])})
    ok = all(case["check"]["ok"] for case in found)
    args.out = args.out or str(output(None, "cpu"))
    return conclude("cpu", args, __doc__, ok, cores=os.cpu_count(), torch_threads=torch.get_num_threads(),
                    thread_pools=pools, load=os.getloadavg(), cases=found)
