"""Forward pass: this library, dense attention, and the other ways to do the same masked attention, in one run.

    python benchmarks/forward_performance.py                       everything, below five minutes on an H200
    python benchmarks/forward_performance.py --set model --quick
    python benchmarks/forward_performance.py --table                         print the README's table from the results
    python benchmarks/forward_performance.py --update-readme                 put it into README.md

Inputs: bfloat16, query, key, value and dt_proj independent normal numbers (torch.manual_seed of a number made from the
case), A = 1, so scores are independent and identically distributed. Timing, L2 policy, medians, host time and peak
memory: see measure.py. Peers that find no time within ``--seconds`` are left out and listed as such; the library's
own rows are always measured.

Sets. ``table``, the original package's (B1 H2/1 D64): "train" N = 256 ... 32768 with w = 1024, "window" w = 32 ...
32768 at N = 32768 (and 256 at N = 1024), "infer" one query against 256 ... 524288 keys, w = 1024. ``model``: 16 or 32
heads over 8, D 64 and 128, N = 4096 ... 1048576, w 1024 and 2048. ``smoke``: tiny, runs without a GPU, for trying the
script.

Stages. key_scores; selection (IntervalMask.top_w); attention (mask and key lists prepared); lists+attention (mask
prepared, its cache emptied before the capture), lists = the difference; total = dynamic_mask_attention from dt_proj and
A on. One query (infer) selects with keys="global".

Peers. cudnn, flash: dense causal scaled_dot_product_attention (more work: all pairs). masked: the same function with
the dense additive mask; masked+build: with the time to build it by topk. flex: compiled FlexAttention with the same
interval mask as block mask and the bias as score_mod, block mask given.

Throughput: effective = dense causal operations / time; needed = operations of the kept pairs / time (4*D per pair).

Check: rows of every case (first, last, random) are compared with a float64 computation of the definition under the rule
"at most twice the error of the plain same-precision computation plus one rounding of the output"; the mask must equal
the exact selection in those rows. If any check fails the run exits with 1 and leaves the recorded results alone.
"""
from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Case:
    set: str  # "train", "window", "infer", "model" or "smoke"
    heads: int
    kv_heads: int
    head_dim: int
    query_length: int
    key_length: int
    window: int
    flex: bool = False  # compiling takes long: few cases
    masked: bool = False  # needs the Lq x Lk mask

    @property
    def name(self) -> str:
        length = f"N{self.key_length}" if self.query_length == self.key_length else f"1x{self.key_length}"
        return f"{self.set} H{self.heads}/{self.kv_heads} D{self.head_dim} {length} w{self.window}"

    @property
    def keys(self) -> str:
        return "global" if self.query_length == 1 else "prefix"

    @property
    def causal_pairs(self) -> int:
        """Visible pairs of causal attention, over all query heads."""
        if self.query_length == 1:
            return self.heads * self.key_length
        return self.heads * self.key_length * (self.key_length + 1) // 2

    @property
    def kept_pairs(self) -> int:
        """Pairs of the dynamic mask, over all query heads."""
        n, w = self.key_length, min(self.window, self.key_length)
        if self.query_length == 1:
            return self.heads * w
        return self.heads * (n * w - w * (w - 1) // 2)

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


class OnDevice:
    """A torch tensor that hands out single slices as NumPy arrays: all that the row check reads."""

    def __init__(self, tensor: Any):
        from cupy_dma.arrays import library, numpy_dtype

        self.tensor, self.shape = tensor, tuple(tensor.shape)
        self.dtype = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
        self._library = library("torch")

    def __getitem__(self, index: Any) -> Any:
        import numpy as np
        import torch

        if isinstance(index, tuple):
            index = tuple(torch.from_numpy(i).to(self.tensor.device) if isinstance(i, np.ndarray) else i for i in index)
        return self._library.to_numpy(self.tensor[index])


class Benchmark:
    """All measurements of one case."""

    def __init__(self, case: Case):
        import torch

        self.case = case
        self.rows: list[dict[str, Any]] = []
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(case.seed)

        def normal(*shape: int) -> Any:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

        self.query = normal(1, case.query_length, case.heads, case.head_dim)
        self.key = normal(1, case.key_length, case.kv_heads, case.head_dim)
        self.value = normal(1, case.key_length, case.kv_heads, case.head_dim)
        width = case.kv_heads * case.head_dim
        self.dt_proj = normal(case.kv_heads, width) * width**-0.5
        self.A = torch.ones(case.kv_heads, device=device)

    def record(self, who: str, stage: str, call: Any, setup: Any = None, note: str = "") -> None:
        from benchmarks import measure

        ms, how = measure.gpu_ms(call, setup)
        row = {"who": who, "stage": stage, "ms": ms, "timing": how, "note": note}
        (setup or call)()  # what is kept between calls is there before, unless the setup takes it away
        row["peak_bytes"] = measure.peak_bytes(call)
        if stage in ("attention", "lists+attention", "total"):
            flop = 4 * self.case.head_dim / ms / 1e9
            row |= {"effective_tflops": flop * self.case.causal_pairs, "needed_tflops": flop * self.case.kept_pairs}
        self.rows.append(row)

    def ours(self) -> None:
        import cupy_dma as dma

        case, q, k, v = self.case, self.query, self.key, self.value

        def score() -> Any:
            return dma.key_scores(v, self.dt_proj, self.A, form="exp")

        def select() -> Any:
            return dma.IntervalMask.top_w(self.scores, window=case.window, keys=case.keys)

        def attend() -> Any:
            return dma.attention(q, k, v, mask=self.mask, bias=self.scores)

        def everything() -> Any:
            return dma.dynamic_mask_attention(q, k, v, dt_proj=self.dt_proj, A=self.A, window=case.window,
                                              keys=case.keys)

        def forget_lists() -> None:
            self.mask._cache.clear()

        self.scores = score()
        self.mask = select()
        self.record("cupy_dma", "key_scores", score)
        self.record("cupy_dma", "selection", select)
        forget_lists()
        self.record("cupy_dma", "lists+attention", attend, forget_lists)
        forget_lists()
        self.record("cupy_dma", "attention", attend)
        self.record("cupy_dma", "total", everything)
        forget_lists()
        ms = {row["stage"]: row["ms"] for row in self.rows}
        self.rows.append({"who": "cupy_dma", "stage": "lists", "ms": ms["lists+attention"] - ms["attention"],
                          "timing": "difference", "note": ""})

    def check(self) -> dict[str, Any]:
        """Sampled rows against float64; see rowcheck.py."""
        import numpy as np

        import cupy_dma as dma
        from cupy_dma.rowcheck import check_rows

        case = self.case
        out, lse = dma.attention(self.query, self.key, self.value, mask=self.mask, bias=self.scores, return_lse=True)
        n = case.query_length
        drawn = np.random.default_rng(case.seed).integers(0, n, 3 if case.key_length > 2**18 else 8).tolist()
        rows = sorted({0, n // 2, n - 1, *drawn})
        start, stop = (x.expand(1, case.kv_heads, case.key_length)[0].cpu().numpy()
                       for x in (self.mask.start, self.mask.stop))
        found = check_rows(OnDevice(out[0]), OnDevice(lse[0]), OnDevice(self.query[0]), OnDevice(self.key[0]),
                           OnDevice(self.value[0]), self.scores[0].cpu().numpy(), case.window, rows, start=start,
                           stop=stop)
        total = dma.dynamic_mask_attention(self.query, self.key, self.value, dt_proj=self.dt_proj, A=self.A,
                                           window=case.window, keys=case.keys)
        same = bool((total == out).all())
        return {**asdict(found), "total_equals_stages": same, "ok": found.ok and same}

    def peers(self, deadline: float, flex: bool) -> None:
        import torch
        from torch.nn.attention import SDPBackend

        from benchmarks import measure, peers

        case, q, k, v = self.case, self.query, self.key, self.value
        group = case.heads // case.kv_heads

        def one(who: str, make: Any, stage: str = "attention") -> None:
            if time.monotonic() > deadline:
                self.rows.append({"who": who, "stage": stage, "ms": None, "timing": "", "note": "no time left"})
                return
            try:
                made = make()
                call, note = made if isinstance(made, tuple) else (made, "")
                call()
                self.record(who, stage, call, note=note)
            except Exception as error:  # a peer that cannot run is a result too
                measure.synchronize()
                words = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                self.rows.append({"who": who, "stage": stage, "ms": None, "timing": "", "note": words})
            measure.free_memory()

        if flex:
            if case.flex and measure.on_gpu():
                start, stop = (x.expand(1, case.kv_heads, case.key_length).contiguous()
                               for x in (self.mask.start, self.mask.stop))
                one("flex", lambda: peers.flex(q, k, v, start, stop, self.scores))
            return
        if case.set != "window" and case.key_length <= 2**19:
            backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
            if not measure.on_gpu():
                backends = {"dense": None}
            for who, backend in backends.items():
                if who == "flash" and case.causal_pairs > 2e11:
                    continue
                one(who, functools.partial(peers.dense, backend, q, k, v))
        if case.masked:
            def build() -> Any:
                return peers.dense_mask(self.scores, case.query_length, case.window, q.dtype, group)

            mask = build() if time.monotonic() < deadline else torch.empty(0)
            one("masked", lambda: peers.masked(q, k, v, lambda: mask))
            del mask
            one("masked+build", lambda: peers.masked(q, k, v, build))


def host_times() -> dict[str, float]:
    """Host microseconds per call at N = 1024, H2/1, D64: the prepared call and the whole chain."""
    import cupy_dma as dma
    from benchmarks import measure

    bench = Benchmark(Case("host", 2, 1, 64, 1024, 1024, 256))
    scores = dma.key_scores(bench.value, bench.dt_proj, bench.A)
    mask = dma.IntervalMask.top_w(scores, window=256)
    q, k, v = bench.query, bench.key, bench.value
    calls = 100 if measure.on_gpu() else 2
    return {
        "attention, mask and lists prepared":
            measure.host_us(lambda: dma.attention(q, k, v, mask=mask, bias=scores), calls),
        "from scores: selection, lists, attention":
            measure.host_us(lambda: dma.dynamic_mask_attention(q, k, v, scores, window=256), calls),
        "from values: scores, selection, lists, attention":
            measure.host_us(lambda: dma.dynamic_mask_attention(q, k, v, dt_proj=bench.dt_proj, A=bench.A, window=256),
                            calls),
    }


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from benchmarks import measure, render

    gc.collect()
    gc.freeze()  # every graph capture collects garbage, which must not walk all modules each time
    started = time.monotonic()
    deadline = started + args.seconds
    chosen = cases(args.set, args.quick)
    result: dict[str, Any] = {"method": __doc__, "timing": measure.__doc__, "arguments": vars(args),
                              **measure.machine(), "cases": []}
    result["commit"] = args.commit or result["commit"]
    result["host_us"] = host_times()
    # FlexAttention compiles for every shape: last, so that a short time limit cuts it off first.
    compiled = [case for case in chosen if case.flex and not args.quick]
    done: dict[str, dict[str, Any]] = {}
    for case in tqdm(chosen + compiled, unit="case", disable=None):
        bench = Benchmark(case)
        if case.name not in done:
            bench.ours()
            entry = {**asdict(case), "name": case.name, "kept_pairs": case.kept_pairs,
                     "causal_pairs": case.causal_pairs, "check": bench.check(), "rows": bench.rows}
            done[case.name] = entry
            result["cases"].append(entry)
            bench.peers(deadline, flex=False)
        else:
            import cupy_dma as dma

            bench.scores = dma.key_scores(bench.value, bench.dt_proj, bench.A)
            bench.mask = dma.IntervalMask.top_w(bench.scores, window=case.window)
            bench.peers(deadline, flex=True)
            done[case.name]["rows"] += bench.rows
        del bench
        measure.free_memory()
    result["seconds"] = time.monotonic() - started

    ok = all(entry["check"]["ok"] for entry in result["cases"])
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / ("forward_performance.json" if ok else "forward_performance.failed.json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    render.chart(result, path.with_suffix(".png"))
    print(render.text_table(result))
    print(f"wrote {path} and {path.with_suffix('.png')} after {result['seconds']:.0f} s")
    return 0 if ok else 1


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--set", choices=["table", "model", "all", "smoke"], default="all")
    options.add_argument("--quick", action="store_true", help="few cases, no FlexAttention")
    options.add_argument("--seconds", type=float, default=240, help="after this time no peer is started (default: 240)")
    options.add_argument("--out", default=str(RESULTS), help="folder of the JSON and the chart")
    options.add_argument("--commit", help="recorded as the commit where the tree is a copy without its history")
    options.add_argument("--table", action="store_true", help="print the README's table from the recorded results")
    options.add_argument("--update-readme", action="store_true", help="put that table into README.md")
    args = options.parse_args(arguments)
    sys.path.insert(0, str(ROOT))  # the tree itself, installed or not
    if args.table or args.update_readme:
        from benchmarks import render

        result = json.loads((Path(args.out) / "forward_performance.json").read_text())
        if args.update_readme:
            render.update_readme(ROOT / "README.md", result)
        else:
            print(render.markdown_table(result))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
