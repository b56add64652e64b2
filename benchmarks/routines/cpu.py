"""The NumPy backend beside torch's SDPA on the same CPU, forward and backward, in one run.

    python -m benchmarks cpu                  both sizes, two minutes on two cores
    python -m benchmarks cpu --set small --repeats 101 --out /tmp/small
    python -m benchmarks cpu --update-docs    put the table of the recorded results into docs/lab/numpy.md

Inputs: float32, independent normal numbers (numpy.random.default_rng of a number made from the case), 4/2 heads, D 32.
small: B 8, N 256, w 64 and 256 (as many pairs as causal attention); large: B 1, N 16384, w 512. ``smoke``: tiny.

cupy_dma: NumPy arrays; IntervalMask.top_w, attention with the scores as bias, attention_backward with all four
gradients. all BLAS threads: the same without the limit to one thread, to show what it is for. sdpa: causal
scaled_dot_product_attention with enable_gqa and its three gradients, contiguous (B, H, N, D) tensors, torch's own
number of threads.

Timing: wall time, cupy_dma and sdpa by turns, ``--repeats`` times after a warm-up, then all BLAS threads (which take
time from others for a while after their work); medians, and the fastest. Where other programs want the cores too, only
these numbers of one run can be compared with each other: the load average and the numbers of threads stand beside them.

Check: sampled rows and keys of every batch entry against float64, as in forward.py and backward.py. If any check fails
the run exits with 1 and leaves the recorded results alone. Times have no part in that.
"""
from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import numpy as np
from threadpoolctl import ThreadpoolController, threadpool_info

import cupy_dma as dma
from benchmarks.harness import render
from benchmarks.harness.folders import ROOT, output, write
from benchmarks.harness.suite import Case, add_record_options, parser_of
from cupy_dma.backends.numpy import threads

DOCS = ROOT / "docs" / "lab" / "numpy.md"
REPEATS = {"small": 41, "large": 5, "smoke": 2}
WANTED = {"small": 0.5, "large": 3.0, "smoke": 0.0}  # times as fast as SDPA


def cases(which: str) -> list[Case]:
    found = [Case("small", 4, 2, 32, 256, 256, window, batch=8) for window in (64, 256)]
    found += [Case("large", 4, 2, 32, 16384, 16384, 512), Case("smoke", 4, 2, 16, 70, 70, 20, batch=2)]
    return [case for case in found if case.set == which or which == "all" and case.set != "smoke"]


def by_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each turn; the first turn does not count."""
    ms: dict[str, list[float]] = {who: [] for who in calls}
    for turn in range(repeats + 1):
        for who, call in calls.items():
            started = time.perf_counter()
            call()
            if turn:
                ms[who].append(1e3 * (time.perf_counter() - started))
    return ms


class Benchmark:
    """One case: its inputs, and what is timed and checked."""

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
        import torch

        q, k, v, do = (torch.from_numpy(np.ascontiguousarray(x.swapaxes(1, 2)))
                       for x in (self.query, self.key, self.value, self.dout))
        inputs = [x.requires_grad_() for x in (q, k, v)]

        def call() -> Any:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return torch.autograd.grad(out, inputs, do)

        return call

    def rows(self, repeats: int) -> list[dict[str, Any]]:
        ms = {**by_turns({"cupy_dma": self.ours, "sdpa": self.sdpa()}, repeats),
              **by_turns({"all BLAS threads": self.unlimited}, repeats)}
        return [{"who": who, "stage": "forward+backward", "ms": statistics.median(found), "fastest_ms": min(found),
                 "repeats": repeats} for who, found in ms.items()]

    def check(self) -> dict[str, Any]:
        """Sampled rows of the output and the mask, sampled gradients; of each batch entry."""
        import torch

        from benchmarks.harness.check import check_interval_gradients
        from cupy_dma.cli.exact_rows import check_rows

        case, (mask, out, lse, gradients) = self.case, self.ours()
        sampled = np.random.default_rng(case.seed).integers(0, case.query_length, 4).tolist()
        entries = []
        for b in range(case.batch):
            one = slice(b, b + 1)
            start, stop = (np.broadcast_to(x, self.scores.shape)[one] for x in (mask.start, mask.stop))
            found = check_rows(out[b], lse[b], self.query[b], self.key[b], self.value[b], self.scores[b], case.window,
                               sorted({0, case.query_length - 1, *sampled}), start=start[0], stop=stop[0])
            given = (self.dout, self.query, self.key, self.value, out, lse, self.scores)
            backward = check_interval_gradients(
                [torch.from_numpy(x[one]) for x in gradients], *(torch.from_numpy(x[one]) for x in given),
                *(torch.from_numpy(x.copy()) for x in (start, stop)), seed=case.seed)
            entries.append({"forward": asdict(found), "backward": asdict(backward), "ok": found.ok and backward.ok})
        return {"ok": all(entry["ok"] for entry in entries), "entries": entries}


def machine() -> dict[str, Any]:
    """What ``measure.machine`` says, and the cores, threads and load of this process's machine."""
    import torch

    from benchmarks.harness import measure

    libraries = [{name: found[name] for name in ("user_api", "internal_api", "version", "num_threads")}
                 for found in threadpool_info()]
    return {**measure.machine(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads(),
            "thread_pools": libraries, "load": os.getloadavg()}


def table(result: dict[str, Any]) -> str:
    lines = ["| batch, N, heads, head dim, window | SDPA | all BLAS threads | cupy_dma | times as fast | of the "
             "fastest turns | wanted |", "|---|--:|--:|--:|--:|--:|--:|"]
    for case in result["cases"]:
        ms, fastest = ({who: render.value(case, who, "forward+backward", field) or 0.0
                        for who in ("sdpa", "all BLAS threads", "cupy_dma")} for field in ("ms", "fastest_ms"))
        cells = [f"{case['batch']}, {render.label(case)}", *map(render.milliseconds, ms.values()),
                 *(render.times(found["sdpa"] / found["cupy_dma"]) for found in (ms, fastest)),
                 f"≥ {render.times(WANTED[case['set']])}"]
        lines.append("| " + " | ".join(cells) + " |")
    pools = ", ".join(f"{found['internal_api']} {found['num_threads']}" for found in result["thread_pools"])
    versions = result["versions"]
    return "\n".join([*lines, "", f"Milliseconds, medians, {result['cores']} cores, threads: torch "
                                  f"{result['torch_threads']}, {pools}; load {result['load'][0]:.1f}; NumPy",
                      f"{versions['numpy']}, torch {versions['torch']}, {result['date'][:10]}."])


REPORT = render.Report("cpu", "NumPy backend", table, table, ())


def main(arguments: list[str] | None = None) -> int:
    options = parser_of(__name__, __doc__)
    options.add_argument("--set", choices=["all", *REPEATS], default="all")
    options.add_argument("--repeats", type=int, help=f"timed turns (default: {REPEATS})")
    add_record_options(options)
    options.add_argument("--update-docs", action="store_true",
                         help="put the table of the recorded results into docs/lab")
    args = options.parse_args(arguments)
    path = output(args.out, "cpu") / "cpu_performance.json"
    if args.update_docs:
        REPORT.update(DOCS, json.loads(path.read_text()))
        return 0
    if args.repeats is not None and args.repeats < 1:
        options.error(f"argument --repeats: must be at least 1, got {args.repeats}")
    result = {"method": __doc__, "arguments": {"set": args.set, "repeats": args.repeats}, **machine(), "cases": []}
    result["commit"] = args.commit or result["commit"]
    for case in cases(args.set):
        bench = Benchmark(case)
        result["cases"].append({**asdict(case), "name": case.name, "check": bench.check(),
                                "rows": bench.rows(args.repeats or REPEATS[case.set])})
    result["load"] = os.getloadavg()
    ok = all(case["check"]["ok"] for case in result["cases"])
    path = path if ok else path.with_suffix(".failed.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, result)
    print(f"{table(result)}\nwrote {path}")
    return 0 if ok else 1
