"""Code shared by routines that measure case by case: cases, inputs, recording of rows, the run and its options.

Such a routine is a ``Suite``: its cases, a subclass of ``Benchmark`` that measures one of them, and a report.
"""
import argparse
import gc
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

import cupy_dma as dma
from benchmarks.harness import measure
from benchmarks.harness.command import conclude, why_not


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
    pattern: str = ""  # of scores that are not made from values; in "plain", the mask

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
        """Visible pairs of the case's dense peer, over all query heads: causal except for "none"."""
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


def cases(which: str) -> list[Case]:
    """The cases of forward, or a few small ones ("smoke")."""
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
    return table + models


class Benchmark:
    """Inputs of one case and the rows measured on them. Subclasses define ``ours()``, which measures this library,
    ``check()``, whose "ok" says whether all results are right, and ``peers(deadline, flex)``, which measures
    FlexAttention or the other peers and starts none after ``deadline``."""

    ours: Callable[[], None]
    check: Callable[[], dict[str, Any]]
    peers: Callable[[float, bool], None]

    def __init__(self, case: Case):
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
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device).normal_(generator=self._generator)

    def score(self) -> Any:
        return dma.key_scores(self.value, self.dt_proj, self.A, form="exp")

    def select(self) -> Any:
        return dma.IntervalMask.top_w(self.scores, window=self.case.window, keys=self.case.keys)

    def prepare(self) -> None:
        """Make the scores and the mask for rows that measure a single stage."""
        self.scores = self.score()
        self.mask = self.select()

    def forget_lists(self) -> None:
        self.mask._cache.clear()

    def intervals(self) -> tuple[Any, Any]:
        """``start`` and ``stop`` of the mask, (1, Hkv, Lk) each, of the first batch entry."""
        shape = 1, self.case.kv_heads, self.case.key_length
        return self.mask.start[:1].expand(shape), self.mask.stop[:1].expand(shape)

    def record(self, who: str, stage: str, call: Any, setup: Any = None, note: str = "") -> None:
        ms, how = measure.gpu_ms(call, setup)
        row = {"who": who, "stage": stage, "ms": ms, "timing": how, "note": note}
        (setup or call)()  # builds what calls keep, unless the setup discards it
        row["peak_bytes"] = measure.peak_bytes(call)
        self.rows.append(row)

    def peer(self, who: str, make: Any, deadline: float, stage: str, check: Any = None) -> None:
        """Record the call, or the call and note, that ``make()`` returns; if it cannot run, record why. The verdict of
        ``check`` on its result goes to the note and never fails the run."""
        if time.monotonic() > deadline:
            self.failed(who, stage, "no time left")
            return
        try:
            made = make()
            call, note = made if isinstance(made, tuple) else (made, "")
            if check is not None:
                note = with_verdict(note, check(call()))
            self.record(who, stage, call, note=note)
        except Exception as error:
            self.failed(who, stage, why_not(error))
        made = call = None
        measure.free_memory()

    def failed(self, who: str, stage: str, words: str, **more: Any) -> None:
        measure.synchronize()
        self.rows.append({"who": who, "stage": stage, "ms": None, "timing": "", "note": words, **more})


class Checked(Benchmark):
    """A benchmark that checks its stages while it measures them."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.checks: dict[str, Any] = {}

    def check(self) -> dict[str, Any]:
        return {"stages": self.checks, "worst": max((found["worst"] for found in self.checks.values()), default=0.0),
                "ok": all(found["ok"] for found in self.checks.values())}


def with_verdict(note: str, found: dict[str, Any]) -> str:
    """A peer's note with the verdict on its result, which never fails the run."""
    word = "right" if found["ok"] else f"NOT WITHIN THE RULE ({found['worst']:.2f} of what is allowed)"
    return "; ".join(filter(None, (note, word)))


@dataclass(frozen=True)
class Suite:
    """A routine that measures cases one by one: its options and its run."""

    name: str  # of the routine
    method: str | None  # its docstring
    cases: Callable[[str], list[Case]]  # of the set "all" or "smoke"
    benchmark: Callable[[Case], Benchmark]
    seconds: float  # no peer starts later
    extra: Callable[[], dict[str, Any]] = dict  # more for the record

    def add_options(self, options: argparse.ArgumentParser) -> None:
        options.add_argument("--set", choices=("all", "smoke"), default="all")
        options.add_argument("--seconds", type=float, default=self.seconds,
                             help="start no peer after this time (default: %(default)g)")

    def run(self, args: argparse.Namespace) -> int:
        measure.free_memory()
        gc.freeze()  # every graph capture collects garbage and would walk all modules each time
        started = time.monotonic()
        deadline = started + args.seconds
        chosen, extra = self.cases(args.set), self.extra()
        # FlexAttention compiles for every shape: last, so that a short time limit cuts it off first.
        compiled = [case for case in chosen if case.flex]
        done: dict[str, dict[str, Any]] = {}
        for case in tqdm(chosen + compiled, unit="case", disable=None):
            bench = self.benchmark(case)
            bench.prepare()
            if case.name not in done:
                bench.ours()
                done[case.name] = {**asdict(case), "name": case.name, "kept_pairs": case.kept_pairs,
                                   "causal_pairs": case.causal_pairs, "check": bench.check(), "rows": bench.rows}
                bench.peers(deadline, flex=False)
            else:
                bench.peers(deadline, flex=True)
                done[case.name]["rows"] += bench.rows
            del bench
            measure.free_memory()
        ok = all(entry["check"]["ok"] for entry in done.values())
        return conclude(self.name, args, self.method, ok, timing=measure.__doc__, **extra, cases=list(done.values()),
                        seconds=time.monotonic() - started)
