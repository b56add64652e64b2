"""``python -m cupy_dma demo --ranks N``: one text over N processes, each of which sees its shard and, of what comes
before it, ``window`` rows per kv head.

    shard of q, k, v --key_scores--> scores --exchange--> out          (and back: gradients)

Checked against float64 rows, those at the edges of shards among them, and against the gradients of one process.
"""
from __future__ import annotations

import importlib.util
import tempfile
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from cupy_dma.arrays import library_named
from cupy_dma.cli import demo
from cupy_dma.cli.exact_rows import RowCheck, check_rows
from cupy_dma.cli.exit import FAILED, complain

TIMEOUT = timedelta(seconds=300)
NEAR = {2: 4.0, 4: 32.0, 8: 32.0}  # roundings of its type by which a gradient may differ, by bytes of an element


def main(args: Namespace) -> int:
    """0 if the check passes, 1 if it fails, 2 if the demo cannot run as asked."""
    if args.output:
        return complain("--output is for one process: with --ranks there is no picture")
    if importlib.util.find_spec("torch") is None:
        return complain("--ranks needs torch, whose processes exchange the rows: pip install torch")
    if args.heads % args.kv_heads:
        return complain(f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}")
    try:
        why = _unusable(args)
        text, name = demo.read_text(args.file, args.length or 8192)
    except (ValueError, OSError) as problem:
        return complain(str(problem))
    if why:
        return complain(why)
    args.dtype = args.dtype or ("bfloat16" if args.backend == "cuda" else "float32")
    with tempfile.TemporaryDirectory() as folder:
        found = _spawned(text, args, folder)
    alone = _attend(text, args, None)
    lines, ok = report(text, name, args, found, alone)
    print("\n".join(lines))
    return 0 if ok else FAILED


def _unusable(args: Namespace) -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return "--ranks needs torch.distributed, which this torch is built without"
    if args.backend == "cuda" and torch.cuda.device_count() < args.ranks:
        return (f"--backend cuda needs a GPU for each of --ranks {args.ranks}, but there are "
                f"{torch.cuda.device_count()}; --backend numpy runs anywhere")
    return ""


def _spawned(text: bytes, args: Namespace, folder: str) -> list[dict[str, Any]]:
    """What each rank has found."""
    import torch
    import torch.distributed as dist
    from torch import multiprocessing

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = Namespace(**{name: x for name, x in vars(args).items() if name != "run"})  # what can be pickled
    multiprocessing.spawn(_rank, (text, options, folder, store.port), args.ranks)
    return [torch.load(Path(folder) / str(rank), weights_only=True) for rank in range(args.ranks)]


def _rank(rank: int, text: bytes, args: Namespace, folder: str, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if args.backend == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if args.backend == "cuda" else "gloo", rank=rank, world_size=args.ranks,
                            store=dist.TCPStore("127.0.0.1", port, is_master=False), timeout=TIMEOUT)
    torch.save(_attend(text, args, dist.group.WORLD), Path(folder) / str(rank))
    dist.destroy_process_group()


def _attend(text: bytes, args: Namespace, group: Any) -> dict[str, Any]:
    """``out``, ``lse``, gradients of key and value, and seconds: of this rank's shard, or without a group of all."""
    import torch
    import torch.distributed as dist

    from cupy_dma import distributed
    from cupy_dma.torch import dynamic_mask_attention, key_scores

    device = "cuda" if args.backend == "cuda" else "cpu"
    problem = demo.embed(text, args.heads, args.kv_heads, args.head_dim, "float32", args.seed, np)
    whole = [torch.from_numpy(x).to(device, getattr(torch, args.dtype))
             for x in (problem.query, problem.key, problem.value)]
    dt_proj, A = (torch.from_numpy(np.array(x)).to(device) for x in (problem.dt_proj, problem.A))
    query, key, value = ((x if group is None else distributed.shard_sequence(x, group)).clone().requires_grad_()
                         for x in whole)
    if group is not None:
        dist.barrier(group)
    started = time.perf_counter()
    scores = key_scores(value.detach(), dt_proj, A)
    if group is None:
        out, lse = dynamic_mask_attention(query, key, value, scores, window=args.window, return_lse=True)
    else:
        out, lse = distributed.context_parallel_attention(query, key, value, scores, window=args.window,
                                                          group=group, return_lse=True)
    (out * query.detach()).sum().backward()
    seconds = time.perf_counter() - started
    found = {"out": out.detach(), "lse": lse, "scores": scores, "dkey": key.grad, "dvalue": value.grad}
    return {"seconds": seconds, **{name: x.detach().cpu() for name, x in found.items() if x is not None},
            **{name: x.cpu() for name, x in zip(("query", "key", "value"), whole) if group is None}}


def report(text: bytes, name: str, args: Namespace, found: list[dict[str, Any]],
           alone: dict[str, Any]) -> tuple[list[str], bool]:
    """The table that the command prints, and whether all is right."""
    import torch

    from cupy_dma.distributed import exchanged_bytes, shard_lengths

    def joined(field: str, axis: int) -> Any:
        return torch.cat([result[field] for result in found], axis)

    lengths, kind = shard_lengths(len(text), args.ranks), getattr(torch, args.dtype)
    edges = np.cumsum(lengths)[:-1].tolist()
    rows = sorted({*demo.sample_rows(len(text), args.seed), *(row + step for row in edges for step in (-1, 0, 1)
                                                              if 0 <= row + step < len(text))})
    check = _checked(joined, alone, args.window, rows)
    apart = {field: _apart(joined(field, 1), alone[field]) for field in ("dkey", "dvalue")}
    near = all(error <= allowed for error, allowed in apart.values())
    moved = [exchanged_bytes(1, args.kv_heads, args.head_dim, kind, args.window, world=args.ranks, rank=rank)
             for rank in range(args.ranks)]
    ring = 2 * (len(text) - min(lengths)) * args.kv_heads * args.head_dim * kind.itemsize
    lines = [
        f"text        {len(text):,} bytes of {name}, in shards of {', '.join(f'{n:,}' for n in lengths)}",
        f"attention   {args.ranks} processes, {args.dtype}, {args.heads} heads over {args.kv_heads}, head dim "
        f"{args.head_dim}, window {args.window}", "",
        "rank   seconds   received forward   received backward",
        *(f"{rank:>4}{result['seconds']:>10.3f}{forward:>19,}{backward:>20,}"
          for rank, (result, (forward, backward)) in enumerate(zip(found, moved))), "",
        f"one process {alone['seconds']:.3f} s; processes share this machine's cores, so their times say little",
        f"exchange    bytes that no length changes; passing all keys and values around would be {ring:,} forward",
        f"output      error {check.error:.2e}, allowed {check.allowed:.2e} (float64 check of {check.rows} rows)",
        f"lse         error {check.lse_error:.2e}, allowed {check.lse_allowed:.2e}",
        *(f"{field:<11} differs from one process by {error:.2e}, allowed {allowed:.2e}"
          for field, (error, allowed) in apart.items()),
        f"check       {'passed' if check.ok and near else 'FAILED'}"]
    return lines, check.ok and near


def _checked(joined: Any, alone: dict[str, Any], window: int, rows: list[int]) -> RowCheck:
    def array(x: Any) -> np.ndarray:
        return library_named("torch").to_numpy(x)[0]

    query, key, value = (array(alone[field]) for field in ("query", "key", "value"))
    return check_rows(array(joined("out", 1)), array(joined("lse", 2)), query, key, value, array(joined("scores", 2)),
                      window, rows, tf32=False)


def _apart(x: Any, y: Any) -> tuple[float, float]:
    """The largest difference, and what rounding explains."""
    import torch

    largest = float(y.abs().max()) if y.numel() else 0.0
    difference = float((x.double() - y.double()).abs().max()) if y.numel() else 0.0
    return difference, NEAR[y.element_size()] * torch.finfo(y.dtype).eps * largest
