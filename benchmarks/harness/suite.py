"""What the forward and the backward benchmark share: cases, inputs, how a row is recorded, the run, its options.

A benchmark is a ``Suite``: its cases, a subclass of ``Benchmark`` that measures one of them, and how results are shown.
Nothing here imports an array library before a run begins, so that tables can be made from recorded results anywhere.
"""
from __future__ import annotations

import argparse
import gc
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.harness.folders import ROOT, output, read, write
from benchmarks.harness.render import Report


@dataclass(frozen=True)
class Case:
    set: str  # "train", "window", "infer", "model", "plain" or "smoke"
    heads: int
    kv_heads: int
    head_dim: int
    query_length: int
    key_length: int
    window: int
    flex: bool = False  # compiling takes long: few cases
    masked: bool = False  # needs the Lq x Lk mask
    batch: int = 1
    pattern: str = ""  # of the scores, instead of those made from the values; of the set "plain": the mask

    @property
    def name(self) -> str:
        length = f"N{self.key_length}" if self.query_length == self.key_length else f"1x{self.key_length}"
        batch = f" B{self.batch}" if self.batch > 1 else ""
        pattern = f" {self.pattern}" if self.pattern else ""
        return f"{self.set}{pattern}{batch} H{self.heads}/{self.kv_heads} D{self.head_dim} {length} w{self.window}"

    @property
    def keys(self) -> str:
        return "global" if self.query_length == 1 else "prefix"

    @property
    def causal_pairs(self) -> int:
        """Visible pairs of the dense attention that a case is compared with, causal but for "none", over all query
        heads."""
        if self.pattern == "none":
            return self.kept_pairs
        if self.query_length == 1:
            return self.batch * self.heads * self.key_length
        return self.batch * self.heads * self.key_length * (self.key_length + 1) // 2

    @property
    def kept_pairs(self) -> int:
        """Pairs of the dynamic mask, over all query heads."""
        n, w = self.key_length, min(self.window, self.key_length)
        if self.pattern == "none":
            return self.batch * self.heads * n * n
        if self.query_length == 1:
            return self.batch * self.heads * w
        return self.batch * self.heads * (n * w - w * (w - 1) // 2)

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode()) % 2**31


def cases(which: str, quick: bool = False) -> list[Case]:
    """The cases of a set; ``quick`` keeps a few."""
    if which == "smoke":
        return [Case("smoke", 4, 2, 32, 300, 300, 64, masked=True), Case("smoke", 2, 1, 64, 1, 512, 100, masked=True)]

    def train(n: int, w: int = 1024, name: str = "train") -> Case:
        return Case(name, 2, 1, 64, n, n, w, flex=name == "train" and n in (4096, 32768), masked=n <= 16384)

    def model(heads: int, dim: int, n: int, w: int, flex: bool = False) -> Case:
        return Case("model", heads, 8, dim, n, n, w, flex=flex, masked=n <= 16384 and heads == 16)

    table = ([train(2**k) for k in range(8, 16)]
             + [train(1024, 256, "window")] + [train(32768, 2**k, "window") for k in range(5, 16)]
             + [Case("infer", 2, 1, 64, 1, 2**k, 1024, masked=True) for k in range(8, 20)])
    models = [model(16, 128, 4096, 1024), model(16, 128, 16384, 1024, flex=True),
              model(16, 128, 32768, 1024, flex=True), model(16, 128, 32768, 2048), model(16, 128, 65536, 2048),
              model(16, 128, 131072, 2048), model(16, 128, 1048576, 2048),
              model(16, 64, 16384, 1024), model(16, 64, 32768, 1024), model(16, 64, 131072, 2048),
              model(32, 128, 16384, 1024), model(32, 128, 32768, 1024), model(32, 128, 131072, 2048),
              model(32, 64, 32768, 1024)]
    if quick:
        table = [train(1024), train(32768), train(32768, 128, "window"),
                 Case("infer", 2, 1, 64, 1, 65536, 1024, masked=True)]
        models = [models[2], models[5]]
    return {"table": table, "model": models, "all": table + models}[which]


class Benchmark:
    """Inputs of one case and the rows that were measured on them."""

    flops: ClassVar[dict[str, int]] = {}  # stage -> operations per pair and head dim; other stages have no throughput

    def __init__(self, case: Case):
        import torch

        self.case = case
        self.rows: list[dict[str, Any]] = []
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self._device).manual_seed(case.seed)
        self.query = self.normal(case.batch, case.query_length, case.heads, case.head_dim)
        self.key = self.normal(case.batch, case.key_length, case.kv_heads, case.head_dim)
        self.value = self.normal(case.batch, case.key_length, case.kv_heads, case.head_dim)
        width = case.kv_heads * case.head_dim
        self.dt_proj = self.normal(case.kv_heads, width) * width**-0.5
        self.A = torch.full((case.kv_heads,), 0.1, device=self._device)  # larger ones let one key win every row

    def normal(self, *shape: int) -> Any:
        import torch

        return torch.empty(shape, dtype=torch.bfloat16, device=self._device).normal_(generator=self._generator)

    def score(self) -> Any:
        import cupy_dma as dma

        return dma.key_scores(self.value, self.dt_proj, self.A, form="exp")

    def select(self) -> Any:
        import cupy_dma as dma

        return dma.IntervalMask.top_w(self.scores, window=self.case.window, keys=self.case.keys)

    def prepare(self) -> None:
        """The scores and the mask that rows of single stages are given."""
        self.scores = self.score()
        self.mask = self.select()

    def forget_lists(self) -> None:
        self.mask._cache.clear()

    def intervals(self) -> tuple[Any, Any]:
        """``start`` and ``stop`` of the mask, (1, Hkv, Lk) each, of the first batch entry."""
        shape = 1, self.case.kv_heads, self.case.key_length
        return self.mask.start[:1].expand(shape), self.mask.stop[:1].expand(shape)

    def record(self, who: str, stage: str, call: Any, setup: Any = None, note: str = "") -> None:
        from benchmarks.harness import measure

        ms, how = measure.gpu_ms(call, setup)
        row = {"who": who, "stage": stage, "ms": ms, "timing": how, "note": note}
        (setup or call)()  # what is kept between calls is there before, unless the setup takes it away
        row["peak_bytes"] = measure.peak_bytes(call)
        if stage in self.flops:
            flop = self.flops[stage] * self.case.head_dim / ms / 1e9
            row |= {"effective_tflops": flop * self.case.causal_pairs, "needed_tflops": flop * self.case.kept_pairs}
        self.rows.append(row)

    def peer(self, who: str, make: Any, deadline: float, stage: str) -> None:
        """Record what ``make()`` returns, a call or a call and a note; why not, if it cannot run."""
        from benchmarks.harness import measure

        if time.monotonic() > deadline:
            self.rows.append({"who": who, "stage": stage, "ms": None, "timing": "", "note": "no time left"})
            return
        try:
            made = make()
            call, note = made if isinstance(made, tuple) else (made, "")
            self.record(who, stage, call, note=note)
        except Exception as error:  # a peer that cannot run is a result too
            measure.synchronize()
            words = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            self.rows.append({"who": who, "stage": stage, "ms": None, "timing": "", "note": words})
        made = call = None
        measure.free_memory()

    def ours(self) -> None:
        """Measure this library; ``prepare`` has been called."""
        raise NotImplementedError

    def check(self) -> dict[str, Any]:
        """What was compared with float64; "ok" says whether all of it was right."""
        raise NotImplementedError

    def peers(self, deadline: float, flex: bool) -> None:
        """Measure FlexAttention or the other peers. After ``deadline`` none is started."""
        raise NotImplementedError


@dataclass(frozen=True)
class Suite:
    method: str  # the docstring of the script
    cases: Callable[[str, bool], list[Case]]
    benchmark: Callable[[Case], Benchmark]
    report: Report
    seconds: float  # after which no peer is started
    extra: Callable[[], dict[str, Any]] = dict  # more for the record
    sets: tuple[str, ...] = ("table", "model", "all", "smoke")


def parser_of(module: str, method: str | None) -> argparse.ArgumentParser:
    """The options of a routine, which its module's name and docstring describe."""
    first, _, rest = (method or "").partition("\n")
    return argparse.ArgumentParser(prog=f"python -m benchmarks {module.rpartition('.')[2]}", description=first,
                                   epilog=rest.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)


def add_record_options(options: argparse.ArgumentParser) -> None:
    """Those of every script that writes results."""
    options.add_argument("--out", help="folder of what is recorded (default: that of the GPU in benchmarks/results)")
    options.add_argument("--commit", help="recorded as the commit where the tree is a copy without its history")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What a run was asked for, without where it writes."""
    return {name: x for name, x in vars(args).items() if name != "out"}


def write_record(name: str, args: argparse.Namespace, method: str | None, **result: Any) -> Path:
    """Write a result with its method and machine to ``name`` in the folder of this run; where it is."""
    from benchmarks.harness import measure

    record = {"method": method, **measure.machine(), **result}
    record["commit"] = args.commit or record["commit"]
    out = output(args.out, record["device"])
    out.mkdir(parents=True, exist_ok=True)
    write(out / name, record)
    return out / name


def run(suite: Suite, args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from benchmarks.harness import measure

    gc.collect()
    gc.freeze()  # every graph capture collects garbage, which must not walk all modules each time
    started = time.monotonic()
    deadline = started + args.seconds
    chosen = suite.cases(args.set, args.quick)
    result: dict[str, Any] = {"method": suite.method, "timing": measure.__doc__, "arguments": options_of(args),
                              **measure.machine(), "cases": []}
    result["commit"] = args.commit or result["commit"]
    result |= suite.extra()
    # FlexAttention compiles for every shape: last, so that a short time limit cuts it off first.
    compiled = [case for case in chosen if case.flex and not args.quick]
    done: dict[str, dict[str, Any]] = {}
    for case in tqdm(chosen + compiled, unit="case", disable=None):
        bench = suite.benchmark(case)
        bench.prepare()
        if case.name not in done:
            bench.ours()
            entry = {**asdict(case), "name": case.name, "kept_pairs": case.kept_pairs,
                     "causal_pairs": case.causal_pairs, "check": bench.check(), "rows": bench.rows}
            done[case.name] = entry
            result["cases"].append(entry)
            bench.peers(deadline, flex=False)
        else:
            bench.peers(deadline, flex=True)
            done[case.name]["rows"] += bench.rows
        del bench
        measure.free_memory()
    result["seconds"] = time.monotonic() - started

    ok = all(entry["check"]["ok"] for entry in result["cases"])
    out = output(args.out, result["device"])
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{suite.report.name}_performance{'' if ok else '.failed'}.json"
    write(path, result)
    suite.report.chart(result, path.with_suffix(".png"))
    print(suite.report.text(result))
    chart = f" and {path.with_suffix('.png')}" if path.with_suffix(".png").exists() else ""
    print(f"wrote {path}{chart} after {result['seconds']:.0f} s")
    return 0 if ok else 1


def main(suite: Suite, arguments: list[str] | None = None) -> int:
    options = parser_of(suite.report.name, suite.method)
    options.add_argument("--set", choices=suite.sets, default="all")
    options.add_argument("--quick", action="store_true", help="few cases, no FlexAttention")
    options.add_argument("--seconds", type=float, default=suite.seconds,
                         help=f"after this time no peer is started (default: {suite.seconds:g})")
    add_record_options(options)
    options.add_argument("--table", action="store_true", help="print the table from the recorded results")
    options.add_argument("--update-docs", action="store_true",
                         help="put that table into docs/performance.md")
    args = options.parse_args(arguments)
    if args.table or args.update_docs:
        result = read(f"{suite.report.name}_performance.json", args.out)
        if args.update_docs:
            suite.report.update(ROOT / "docs" / "performance.md", result)
        else:
            print(suite.report.table(result))
        return 0
    return run(suite, args)
