"""Tile shapes of the Hopper forward, measured beside the portable kernel.

For every kind of keys in ``sm90_tiles.TILES``, head dim, group and length, measures each candidate tile (rows x keys x
stages of keys x stages of values x stages of queries) with and without ping-pong, and the portable kernel, whichever
kernel the library would choose. Inputs: bfloat16, batch 1, independent normal elements. intervals: top-w masks of
independent scores, which are the bias, with cached lists. bits: half of a dense mask visible, shared by all heads and
packed in every call. Softcaps are 30. An output that differs from the portable kernel's by more than two roundings of
the largest element is marked WRONG, and the exit status is 1.

The fastest tile of each group of rows is marked; ``in use`` marks the tiles from which the library chooses. The results
go to ``hopper_tiles.json`` in the folder of the GPU; those of other kernels or of a part of the cases are only
printed.
"""
import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cupy_dma as dma
from benchmarks.harness import measure
from benchmarks.harness.command import Refused, conclude, needs_hopper
from cupy_dma.backends.cuda.attention import sm90_tiles
from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.program import fresh

KINDS, HEAD_DIMS = tuple(sm90_tiles.TILES), (64, 96, 128, 192, 256)
SHORT_CANDIDATES = {  # for lists of few keys; by the largest head dim
    64: [HopperTile(192, 64, 6, 6, 3), HopperTile(192, 96, 5, 5, 3), HopperTile(128, 64, 6, 6, 3),
         HopperTile(128, 128, 4, 4, 2)],
    128: [HopperTile(192, 64, 2, 2, 3), HopperTile(192, 64, 4, 3, 2), HopperTile(128, 64, 3, 3, 3),
          HopperTile(128, 64, 4, 4, 2)]}
CANDIDATES = {  # for all other keys
    64: [HopperTile(192, 128, 3, 3, 2), HopperTile(192, 96, 5, 5, 2), HopperTile(192, 64, 6, 6, 2),
         HopperTile(128, 128, 4, 4, 2)],
    128: [HopperTile(192, 64, 4, 3, 2), HopperTile(128, 128, 2, 2, 2), HopperTile(128, 64, 4, 4, 2)],
    192: [HopperTile(128, 64, 2, 2, 2), HopperTile(128, 32, 3, 3, 2)],
    256: [HopperTile(128, 32, 2, 2, 2)]}
ROUNDING = 2.0**-8  # of bfloat16
WINDOWS = {  # (length, w)
    "short intervals": ((2048, 128), (32768, 32), (32768, 128)),
    "intervals": ((2048, 1024), (8192, 1024), (16384, 1024), (32768, 1024), (32768, 4096)),
    "intervals with softcap": ((32768, 1024),)}


class Case(NamedTuple):
    kind: str
    head_dim: int
    heads: int
    kv_heads: int
    length: int
    window: int = 0
    causal: bool = False
    queries: int = 0  # 0: the number of keys

    def __str__(self) -> str:
        length = f"{self.queries}x{self.length}" if self.queries else f"N{self.length}"
        more = f" w{self.window}" if self.window else " causal" if self.causal else ""
        return f"{self.kind}, D{self.head_dim} {self.heads}/{self.kv_heads} {length}{more}"


def cases(kinds: list[str], head_dims: list[int]) -> list[Case]:
    found = []
    for kind in kinds:
        for d in (d for d in head_dims if sm90_tiles.tiles_of(kind, d)):
            if kind in WINDOWS:
                found += [Case(kind, d, *heads, n, w) for heads in ((2, 1), (16, 8)) for n, w in WINDOWS[kind]]
            elif kind == "bits":
                found += [Case(kind, d, *heads, 8192) for heads in ((2, 1), (16, 8))]
            else:
                found += [Case(kind, d, 16, 8, 8192, causal=causal) for causal in (False, True)]
    return found


def tiles(case: Case) -> list[HopperTile]:
    """Candidate tiles; dense masks only support tiles of 128 rows."""
    candidates = SHORT_CANDIDATES if case.kind == "short intervals" else CANDIDATES
    largest = min(size for size in candidates if case.head_dim <= size)
    return [tile._replace(ping_pong=ping_pong) for tile in candidates[largest]
            if case.kind != "bits" or tile.block_m == 128 for ping_pong in (False, True)]


def name(tile: HopperTile) -> str:
    return "x".join(map(str, tile[:5])) + " ping-pong" * tile.ping_pong


@contextlib.contextmanager
def forced(tile: HopperTile | None) -> Iterator[None]:
    """Inside the context, calls use the Hopper kernel with this tile, or the portable kernel."""
    with fresh(tile=tile, hopper=tile is not None):
        yield


@contextlib.contextmanager
def kernels_of(folder: Path | None) -> Iterator[None]:
    """Inside the context, compile kernels from this folder or from the tree. Their parameters must be the tree's."""
    saved = jit.kernels_directory
    loaders = [function for name, module in list(sys.modules.items()) if name.startswith("cupy_dma.backends.cuda.")
               for function in vars(module).values()
               if hasattr(function, "cache_clear") and function.__name__.endswith("_kernel")]

    def forget() -> None:
        for cache in (jit.source_text, jit.compile, jit.load, *loaders):
            cache.cache_clear()

    if folder is not None:
        jit.kernels_directory = lambda: folder
        forget()
    try:
        with contextlib.nullcontext() if folder is None else fresh():
            yield
    finally:
        if folder is not None:
            jit.kernels_directory = saved
            forget()


def calls(case: Case, device: str = "cuda", **more: Any) -> Callable[[], Any]:
    """The call of a case, with ``more`` arguments; "bits" uses a dense mask, or the dense bias in ``more``."""
    torch.manual_seed(0)
    queries = case.queries or case.length
    q, k, v = (torch.randn(1, n, heads, case.head_dim, device=device, dtype=torch.bfloat16) for n, heads in (
        (queries, case.heads), (case.length, case.kv_heads), (case.length, case.kv_heads)))
    scores = torch.randn(1, case.kv_heads, case.length, device=device)
    options: dict[str, Any] = {"causal": case.causal, **more}
    if case.kind in WINDOWS:
        options["mask"] = dma.IntervalMask.top_w(scores, case.window)
    elif case.kind == "bits" and "bias" not in more:
        options["mask"] = torch.rand(1, 1, queries, case.length, device=device) < 0.5
    if case.kind in WINDOWS or "bias" in case.kind:
        options["bias"] = scores
    if "softcap" in case.kind:
        options["softcap"] = 30.0
    return lambda: dma.attention(q, k, v, **options)


def measured(case: Case, folders: Sequence[Path] = ()) -> list[dict[str, Any]]:
    call = calls(case)
    with forced(None):
        expected = call()
        rows = [{"tile": "portable", "ms": measure.gpu_ms(call)[0], "right": True}]
    in_use = sm90_tiles.tiles_of(case.kind, case.head_dim)
    for tile in tiles(case):
        for folder in (None, *folders):
            with kernels_of(folder), forced(tile):
                error = (call().float() - expected.float()).abs().max().item()
                ms, _ = measure.gpu_ms(call)
            rows.append({"tile": name(tile) + (f" of {folder}" if folder else ""), "ms": ms, "in_use": tile in in_use,
                         "right": error <= 2 * ROUNDING * expected.float().abs().max().item()})
    measure.free_memory()
    return marked(rows)


def marked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the fastest of the rows that are right."""
    fastest = min(row["ms"] for row in rows if row["right"])
    return [{**row, "fastest": row["right"] and row["ms"] == fastest} for row in rows]


def is_whole(args: argparse.Namespace) -> bool:
    return tuple(args.kind) == KINDS and tuple(args.head_dim) == HEAD_DIMS


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument("--head-dim", nargs="+", type=int, default=list(HEAD_DIMS))
    options.add_argument("--kernels", nargs="+", type=Path, default=[], help="other kernels/ folders to measure too")


def run(args: argparse.Namespace) -> int:
    if not all(1 <= d <= max(CANDIDATES) for d in args.head_dim):
        raise Refused(f"--head-dim must be 1 to {max(CANDIDATES)}, got {args.head_dim}")
    for folder in args.kernels:
        if not (folder / "common/arch.cuh").is_file():
            raise Refused(f"--kernels must be folders like kernels/, got {folder}, which has no arch.cuh")
    needs_hopper()
    done = [{**case._asdict(), "name": str(case), "rows": measured(case, args.kernels)}
            for case in cases(args.kind, args.head_dim)]
    return conclude("tune_sm90", args, __doc__, all(row["right"] for entry in done for row in entry["rows"]),
                    whole=is_whole(args) and not args.kernels, cases=done)
