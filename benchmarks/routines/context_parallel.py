"""Dynamic mask attention of one sequence over several GPUs, beside one GPU and ring attention.

``--ranks`` starts one process per GPU; alternatively run ``torchrun --nproc_per_node 8 -m benchmarks
context_parallel``.

Sizes: B = 1, 16/8 heads, D 128, w 2048, bfloat16, 65536 to 8388608 tokens in equal shards. Queries, keys, values and
scores are independent normal numbers, seeded by shard.

Peers. ours: ``context_parallel_attention`` with room ahead of keys and values. copies: the same without that room, so
keys and values are copied. one: ``dynamic_mask_attention`` of the whole sequence on the GPU of rank 0. ring: torch's
context parallel SDPA, a causal attention that passes every key and value around (more work: all pairs).

Passes. forward. training: forward and the gradients of query, key, value and scores. model (ours and one): a training
step of the decoder of the routine ``training`` on one sequence, with each layer recomputed in the backward pass. mesh:
data and context parallelism together, half as many sequences as ranks, each split over two ranks; needs four ranks or
more. model and mesh are measured only at ``--model-lengths``, which count the tokens of all sequences together.

Timing: two calls compile the kernels, then ``--steps`` calls are queued without waiting, with CUDA events between them;
the median of the slowest rank counts. A shard is larger than the L2 cache. A peer is left out if it would not fit into
memory, or if a call would take longer than ``--longest`` seconds, estimated from the previous length.

Check. ours and copies: rows of every shard against float64 attention over the exact selection, with at most twice the
error of the plain computation plus one rounding. Gradients of rank 0's shard, which include what later ranks have
returned, must match those of one GPU; a model's losses must be within 5e-3 nats of one GPU's. The number of bytes
received must follow the formula and be the same for all lengths.
"""
import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import cupy_dma as dma
from benchmarks.harness import decoder, measure, shards
from benchmarks.harness.command import Refused, at_least_1, conclude, listed, why_not, write_record
from benchmarks.harness.report import line
from benchmarks.harness.shards import Problem, differ, gradients_differ
from cupy_dma import distributed

LENGTHS = (65536, 131072, 262144, 524288, 1048576, 2097152, 4194304, 8388608)
PEERS = ("one", "ours", "copies", "ring")
PASSES = ("forward", "training", "model", "mesh")
MODELS = ("model", "mesh")
SMOKE = {"lengths": [96, 161], "heads": 4, "kv_heads": 2, "head_dim": 16, "window": 24, "steps": 1, "model": "tiny",
         "model_lengths": [96]}


class Bench:
    """The work of one rank of ``group``. ``control``: a gloo group of the same ranks for untimed communication."""

    def __init__(self, args: argparse.Namespace, group: Any, control: Any):
        self.args, self.rank, self.world = args, dist.get_rank(group), dist.get_world_size(group)
        self.group, self.control = group, control
        self.seconds: dict[tuple[str, str], tuple[int, float]] = {}  # per call, at the previous length
        self.kept: dict[str, Any] = {}  # gradients of one GPU
        self.losses: dict[tuple[str, int], list[float]] = {}  # of one GPU's model, by pass and length
        self.mesh: Any = None
        if "mesh" in args.passes and self.world >= 4 and self.world % 2 == 0:
            self.mesh = dist.device_mesh.init_device_mesh(args.device, (self.world // 2, 2),
                                                          mesh_dim_names=("data", "sequence"))

    def everywhere(self, x: Any) -> list[Any]:
        """The value of every rank, in rank order."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, x, group=self.control)
        return found

    def run(self) -> list[dict[str, Any]]:
        """Measure all rows, which are the same on every rank; rank 0 prints and writes each row when it is ready."""
        args, rows, started = self.args, [], time.monotonic()
        for length, what, peer in itertools.product(args.lengths, args.passes, args.peers):
            if what in MODELS and (length not in args.model_lengths or peer not in ("one", "ours")):
                continue
            if what == "mesh" and self.mesh is None:
                continue
            late = any(self.everywhere(time.monotonic() - started > args.seconds))
            rows.append(self.row(length, what, peer) if not late else {
                "length": length, "pass": what, "peer": peer, "ranks": self.world, "ms": None, "note": "no time left",
                "ok": True})
            if self.rank == 0:
                print(line(rows[-1]), flush=True)
                write_record("context_parallel.partial.json", args, __doc__, rows=rows)
        if not rows:
            raise SystemExit("nothing to measure: model and mesh need --model-lengths, mesh an even number "
                             "of ranks from 4 on")
        return rows

    def row(self, length: int, what: str, peer: str) -> dict[str, Any]:
        """Measure one row, which is the same on every rank."""
        args = self.args
        row = {"length": length, "pass": what, "peer": peer, "ranks": self.world, "ms": None, "note": "", "ok": True}
        before, seconds = self.seconds.get((what, peer), (length, 0.0))
        if seconds == float("inf"):
            return {**row, "note": f"could not run at {before} tokens"}
        if seconds * (length / before) ** (2 if peer == "ring" else 1) > args.longest:
            return {**row, "note": "left out: too long"}
        device = "cpu" if args.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
        problem = Problem(length, self.world, args.heads, args.kv_heads, args.head_dim, args.window, torch.bfloat16,
                          device)
        if args.device == "cuda" and peer != "one" and what not in MODELS:  # out of memory, a rank blocks all
            memory = torch.cuda.get_device_properties(device).total_memory
            if problem.bytes_needed(peer, what == "training") > 0.95 * memory:
                return {**row, "note": "left out: too large"}
        measure.free_memory()
        mine: dict[str, Any] = {}
        if peer != "one" or self.rank == 0:
            try:
                mine = self.model(length, what, peer) if what in MODELS else self.measured(problem, what, peer)
            except Exception as error:  # a peer that cannot run is a result too
                mine = {"note": why_not(error)}
        found = [x for x in self.everywhere(mine) if x]
        notes = [x["note"] for x in found if x.get("note")]
        if notes:
            self.seconds[what, peer] = length, float("inf")
            return {**row, "note": notes[0], "ok": peer not in ("ours", "copies")}
        times = [max(each) for each in zip(*(x["all_ms"] for x in found))]
        ms = statistics.median(times)
        self.seconds[what, peer] = length, ms / 1e3
        row.update(ms=ms, all_ms=times, peak_bytes=max(x["peak_bytes"] for x in found), how=found[0].get("how", ""))
        if "losses" in found[0]:
            self.compare(row, [statistics.mean(each) for each in zip(*(x["losses"] for x in found))])
        if "check" in found[0]:
            row["checks"] = [x["check"] for x in found]
            row["bytes"] = [x["bytes"] for x in found]
            row["ok"] = all(check["ok"] for check in row["checks"])
        return row

    def measured(self, problem: Any, what: str, peer: str) -> dict[str, Any]:
        """Time a peer on this rank, and check this library's results."""
        grad, rank = what == "training", None if peer == "one" else self.rank
        inputs = problem.inputs(rank, peer == "ours", grad)
        dout = None if not grad else problem.whole("dout") if rank is None else problem.shard("dout", rank)
        if peer == "ring":
            inputs, call, how = shards.ring(problem, inputs)
        else:
            call, how = self.call_of(problem, peer, inputs), ""

        def step() -> list[Any]:
            with shards.as_ring(problem) if peer == "ring" else nullcontext(), torch.set_grad_enabled(grad):
                out = call()
                return [out.detach(), *(torch.autograd.grad(out, inputs, dout) if grad else ())]

        ours, moved = peer in ("ours", "copies"), []
        with shards.Counting(moved if ours else None):
            found = step()
        result: dict[str, Any] = {"how": how}
        if ours:
            result.update(self.checks(problem, inputs[0], found, grad, moved))
        elif peer == "one" and grad:
            n = problem.lengths[0]
            self.kept = {"length": problem.length, "gradients": [
                x[:, :n].clone() if x.ndim == 4 else x[..., :n].clone() for x in found[1:]]}
        del found
        step()
        return {**result, **measure.timed(step, self.args.steps, problem.device)}

    def model(self, length: int, what: str, peer: str) -> dict[str, Any]:
        batch = self.world // 2 if what == "mesh" else 1
        shared: dict[str, Any] = {}
        if peer != "one":
            shared = {"group": self.group, "everyone": self.group}
            if what == "mesh":
                own = self.mesh["data"].get_local_rank()
                shared |= {"group": self.mesh["sequence"].get_group(), "row": slice(own, own + 1)}
        return shards.model_steps(decoder.MODELS[self.args.model], batch, length // batch, self.args.steps,
                                  self.args.device, **shared)

    def compare(self, row: dict[str, Any], losses: list[float]) -> None:
        """Compare a model's losses with those of one GPU, if that has run already."""
        row["losses"], one = losses, self.losses.setdefault((row["pass"], row["length"]), losses)
        worst, allowed = differ(losses, one)
        row.update(loss_differs=worst, ok=worst <= allowed)

    def checks(self, problem: Any, query: Any, found: list[Any], grad: bool,
               moved: list[tuple[str, int]]) -> dict[str, Any]:
        check = problem.check(found[0], self.rank, query)
        if grad and self.rank == 0 and self.kept.get("length") == problem.length:
            worst, allowed = gradients_differ(found[1:], self.kept["gradients"])
            check.update(gradients=worst, gradients_allowed=allowed, ok=check["ok"] and worst <= allowed)
        expected = distributed.exchanged_bytes(1, problem.kv_heads, problem.head_dim, problem.dtype, problem.window,
                                               world=self.world, rank=self.rank)[:1 + grad]
        counted = [size for name, size in moved if size != 8 * (self.world - 1)]  # without digests
        check["ok"] = check["ok"] and (self.world == 1 or counted == list(expected))
        return {"check": check, "bytes": counted}

    def call_of(self, problem: Any, peer: str, inputs: list[Any]) -> Callable[[], Any]:
        query, key, value, scores = inputs
        if peer == "one":
            return lambda: dma.dynamic_mask_attention(query, key, value, scores, window=problem.window)
        return lambda: dma.distributed.context_parallel_attention(
            query, key, value, scores, window=problem.window, group=self.group, room=peer == "ours")


def is_right(rows: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Whether all checks pass and the bytes of a pass are the same at all lengths."""
    moved = {(row["pass"], *map(tuple, row["bytes"])) for row in rows if row.get("bytes")}
    return all(row["ok"] for row in rows) and len(moved) <= len(args.passes)


def work(args: argparse.Namespace) -> int:
    """The work of every process; rank 0 writes the results."""
    on_gpu = args.device != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10))
    bench = Bench(args, dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(hours=2)))
    rows = bench.run()
    ok = is_right(rows, args)
    if bench.rank == 0:
        conclude("context_parallel", args, __doc__, ok, f"context_parallel_{bench.world}.json", rows=rows)
    dist.destroy_process_group()
    return 0 if ok else 1


def _spawned(rank: int, args: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=os.environ.get("MASTER_PORT", "29541"))
    if args.device == "cpu":
        torch.set_num_threads(1)
    Path(folder, str(rank)).write_text(str(work(args)))


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--ranks", type=int, default=2, help="processes; ignored under torchrun (default: 2)")
    options.add_argument("--lengths", type=listed(None, int), default=list(LENGTHS))
    options.add_argument("--passes", type=listed(PASSES), default=list(PASSES))
    options.add_argument("--model-lengths", type=listed(None, int), default=[262144], help="for model and mesh")
    options.add_argument("--peers", type=listed(PEERS), default=list(PEERS))
    for name, usual in (("heads", 16), ("kv-heads", 8), ("head-dim", 128), ("window", 2048), ("steps", 10)):
        options.add_argument(f"--{name}", type=int, default=usual, help=f"(default: {usual})")
    options.add_argument("--model", choices=decoder.MODELS, default="80m", help="the decoder of model and mesh")
    options.add_argument("--longest", type=float, default=5.0, help="leave out a peer whose call takes more seconds")
    options.add_argument("--seconds", type=float, default=1500, help="start nothing after this time")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--smoke", action="store_true", help="a tiny size")


def checked(args: argparse.Namespace) -> argparse.Namespace:
    if args.smoke:
        vars(args).update(SMOKE)
    at_least_1(args, "ranks", "heads", "kv_heads", "window", "steps")
    if min(args.lengths) < args.ranks:
        raise Refused(f"--lengths must be at least --ranks {args.ranks}, got {min(args.lengths)}")
    return args


def run(args: argparse.Namespace) -> int:
    checked(args)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return work(args)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_spawned, (args, folder), args.ranks)
        return max(int(Path(folder, str(rank)).read_text()) for rank in range(args.ranks))
