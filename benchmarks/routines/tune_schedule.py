"""What tiles of the Hopper forward cost, and whether the tile scheduler picks the fastest schedule from these costs.

Costs, for every kind of keys in ``sm90_tiles.TILES``, every head dim and tile in use, and a few numbers of keys:
microseconds per wave of one tile on each SM (a third of the difference between four waves and one), and the fixed time
of a launch. Also measured are waves of tiles cut into slices of 64 rows or into halves of 64 and 128 rows, waves of
short tiles, and tiles split along their keys, including the combination of the splits. All have one kv head with two
query heads. Three numbers are fitted to the extra time of splits: a constant, one per CTA and one per split.

Choices: each call runs with every schedule that the scheduler may choose (``sm90_schedule.candidates`` of each tile),
beside the one it does choose. An output that differs from the first schedule's by more than two roundings of the
largest element is marked WRONG, and the exit status is 1.

Inputs: bfloat16, batch 1, independent normal elements. intervals: top-w masks of independent scores, which are the
bias, with prepared lists. bits: a dense bias without a mask, because calls with a dense mask have only one schedule.
Softcaps are 30.

``schedule.json`` is recorded only if all kinds and head dims ran. ``--write`` puts the costs into the library's
``sm90_costs.json``.
"""
import argparse
import contextlib
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.harness import measure
from benchmarks.harness.command import needs_hopper, write_record
from benchmarks.routines.tune_sm90 import HEAD_DIMS, KINDS, ROUNDING, WINDOWS, Case, calls, is_whole
from cupy_dma.backends.cuda.attention import sm90, sm90_costs, sm90_schedule, sm90_tiles
from cupy_dma.backends.cuda.attention.sm90_schedule import Schedule
from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile, ScheduleKey
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import BIAS_DENSE
from cupy_dma.backends.cuda.runtime.program import fresh

TILE_HEADS = 2
KEYS = {"short intervals": (32, 128, 192), "intervals": (256, 1024, 4096), "contiguous": (256, 2048, 8192),
        "bits": (256, 2048, 4096)}
SPLITS = ((1, 8), (1, 16), (1, 32), (1, 64), (1, 96), (4, 8), (4, 32), (16, 2), (16, 4), (16, 8), (33, 2), (33, 4),
          (66, 2))  # tiles, splits of each
MANY_KEYS = 32768  # measured only with splits


def prepared(case: Case) -> Callable[[], Any]:
    """The call of a case."""
    if case.kind != "bits":
        return calls(case)
    bias = torch.randn(1, 1, case.queries or case.length, case.length, device="cuda", dtype=torch.bfloat16)
    return calls(case, bias=bias)


def num_sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def keys_of(kind: str) -> tuple[int, ...]:
    return KEYS.get(kind) or KEYS["intervals" if "intervals" in kind else "contiguous"]


def choices(kinds: list[str], head_dims: list[int]) -> list[Case]:
    """Calls with several possible schedules, for every kind and head dim; less common ones get a quarter of the
    cases."""
    found: list[Case] = []
    for kind in kinds:
        for d in head_dims:
            pieces: list[tuple[int, int, int, int]] = []  # of prompts
            if kind == "short intervals":
                sizes = [(1, 2048, 128), (1, 8192, 64), (1, 16384, 32), (1, 32768, 32), (1, 32768, 128), (8, 2048, 64),
                         (8, 4096, 128), (8, 16384, 128)]
            elif kind in WINDOWS:
                sizes = [(1, 2048, 1024), (1, 4096, 1024), (1, 8192, 256), (1, 8192, 1024), (1, 16384, 1024),
                         (1, 32768, 256), (1, 32768, 1024), (1, 32768, 4096), (3, 4096, 1024), (8, 1024, 256),
                         (8, 2048, 1024), (8, 4096, 512), (8, 4096, 1024), (8, 8192, 1024), (8, 16384, 1024),
                         (8, 32768, 1024), (8, 32768, 2048)]
                pieces = [(8, 128, 32768, 1024), (8, 128, 65536, 512), (8, 128, 131072, 2048), (8, 256, 65536, 4096),
                          (8, 512, 131072, 2048), (1, 128, 32768, 1024), (1, 1024, 65536, 2048), (8, 2048, 32768, 1024)]
            else:
                sizes = [(1, 1024, 0), (1, 2048, 0), (1, 4096, 0), (1, 12288, 0), (3, 2048, 0), (8, 512, 0),
                         (8, 1024, 0), (8, 2048, 0), (8, 4096, 0), (8, 8192, 0)]
                pieces = [(8, 128, 32768, 0), (8, 512, 65536, 0), (1, 128, 65536, 0), (1, 12, 65536, 0)]
            pieces += [(g, n, n, w) for g, n, w in sizes]
            some = pieces[::1 if d in (64, 128) and kind in KEYS and kind != "bits" else 4]
            found += [Case(kind, d, TILE_HEADS * g, g, n, w, causal, m)
                      for causal in (False, True)[:1 + (kind == "contiguous")] for g, m, n, w in some]
    return [case for case in found if sm90_tiles.tiles_of(case.kind, case.head_dim)]


@contextlib.contextmanager
def forced(tile: HopperTile, work: Schedule) -> Iterator[None]:
    """Inside the context, calls use this tile and this schedule."""
    with fresh(tile=tile, schedule=work, hopper=True):
        yield


def schedule_key(call: Callable[[], Any]) -> tuple[ScheduleKey, HopperTile, Schedule]:
    """The schedule key of a call, and the tile and schedule that it uses."""
    found: list[Any] = []

    def best_schedule(facts: ScheduleKey, tile: HopperTile, num_sms: int) -> Schedule:
        found[:] = facts, tile, sm90_schedule.best_schedule(facts, tile, num_sms)
        return found[2]

    with fresh(hopper=True), mock.patch.object(sm90, "best_schedule", best_schedule):
        call()
    return found[0], found[1], found[2]


def configs(kinds: list[str], head_dims: list[int]) -> list[jit.Config]:
    """The kernels of these calls."""
    found: list[jit.Config] = []
    for kind in kinds:
        for d in head_dims:
            for tile in sm90_tiles.tiles_of(kind, d):
                found.append(sm90.CombineConfig(element="__nv_bfloat16", head_dim=d, heads=TILE_HEADS,
                                                block_m=tile.block_m))
                found += [sm90.HopperForwardConfig(
                    element="__nv_bfloat16", head_dim=d, heads=TILE_HEADS, **tile._asdict(),
                    keys="KEYS_LISTED" if kind in WINDOWS else "KEYS_CONTIGUOUS", causal=causal,
                    bias=BIAS_DENSE if kind == "bits" else int(kind in WINDOWS or "bias" in kind),
                    softcap="softcap" in kind, bits=False, bias_element="__nv_bfloat16" if kind == "bits" else "float",
                    sequences=False, kv_tma=kind not in WINDOWS and kind != "bits", query_tma=True, runs=kind == "bits",
                    split=split) for split in (False, True) for causal in (False, True)[:1 + (kind == "contiguous")]]
    return list(dict.fromkeys(found))


def compile_all(found: list[jit.Config]) -> None:
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in tqdm(pool.map(jit.compile, found, ["sm_90a"] * len(found)), total=len(found), unit="kernel",
                      disable=None):
            pass


# ---- costs ----------------------------------------------------------------------------------------------------------
def of_tiles(kind: str, head_dim: int, tile: HopperTile, tiles: int, keys: int, work: dict[str, int] | None = None,
             short: bool = False) -> float:
    """Microseconds of a call of ``tiles`` tiles, each with ``keys`` keys plus those that enter within the tile."""
    queries = tiles * (128 if short else tile.block_m) // TILE_HEADS
    length = queries + 4 * keys if kind in WINDOWS else keys
    call = prepared(Case(kind, head_dim, TILE_HEADS, 1, length, keys if kind in WINDOWS else 0, queries=queries))
    slices = 1 if short else tile.block_m // 64
    with forced(tile, Schedule(tiles, min(slices * tiles, num_sms()), 1, 0)._replace(**work or {})):
        ms = measure.gpu_ms(call)[0]
    del call
    measure.free_memory()
    return 1e3 * ms


def costs(kind: str, head_dim: int, tile: HopperTile) -> dict[str, Any]:
    """Costs of waves and splits of a tile, by the number of keys in its list."""
    sms = num_sms()
    found: dict[str, Any] = {"kind": kind, "head_dim": head_dim, "tile": list(tile), "waves": [], "splits": []}
    for keys in keys_of(kind):
        one, four = (of_tiles(kind, head_dim, tile, waves * sms, keys) for waves in (1, 4))
        wave = (four - one) / 3
        launch = one - wave
        entry = {"keys": keys + (kind in WINDOWS) * tile.block_m // TILE_HEADS, "whole": wave, "launch": launch}
        slices = tile.block_m // 64
        entry["slices"] = of_tiles(kind, head_dim, tile, sms // slices, keys) - launch
        if slices == 3:
            entry["halves"] = of_tiles(kind, head_dim, tile, sms // 2, keys) - launch
            short = {"tail_tiles": sms, "short_tiles": sms}
            entry["short"] = of_tiles(kind, head_dim, tile, sms, keys, short, short=True) - launch
        found["waves"].append(entry)
    for keys in (*keys_of(kind), *([MANY_KEYS] if "contiguous" in kind else [])):
        own = keys + (kind in WINDOWS) * tile.block_m // TILE_HEADS
        for tiles, count in SPLITS:
            if own >= count * sm90_schedule.SPLIT_BLOCKS * tile.block_n:
                us = of_tiles(kind, head_dim, tile, tiles, keys, {"grid": tiles * count, "num_splits": count})
                found["splits"].append({"keys": own, "tiles": tiles, "count": count, "us": us})
    return found


def fitted(tile: dict[str, Any]) -> dict[str, Any]:
    """Costs in the form of the library's data file, with splits fitted by relative error."""
    waves = [{name: round(x, 2) for name, x in wave.items()} for wave in tile["waves"]]
    alone = sm90_costs.Costs({**tile, "splits": [0, 0, 0]})
    rows = [(1 / row["us"], 1, row["tiles"] * row["count"], row["count"], row["us"] - alone.wave("launch", row["keys"])
             - alone.wave("whole", row["keys"] / row["count"])) for row in tile["splits"]]
    weight, *terms, beside = np.array(rows, float).T
    splits = np.linalg.lstsq((np.array(terms) * weight).T, beside * weight, rcond=None)[0]
    return {**tile, "waves": waves, "splits": [round(max(0.0, float(x)), 3) for x in splits]}


def write_costs(about: dict[str, str], tiles: list[dict[str, Any]]) -> None:
    """Write the costs into the library, which uses them from now on."""
    rows = ",\n".join(json.dumps(fitted(tile)) for tile in tiles)
    sm90_costs.PATH.write_text(json.dumps(about)[:-1] + f', "tiles": [\n{rows}]}}\n')
    for cache in (sm90_costs._all_costs, sm90_costs.costs_of, sm90_schedule.tile_shape, sm90_schedule.best_schedule):
        cache.cache_clear()


# ---- choices --------------------------------------------------------------------------------------------------------
def measured(case: Case) -> dict[str, Any]:
    """Times of a call with every schedule."""
    call = prepared(case)
    facts, tile_taken, work_taken = schedule_key(call)
    rows: list[dict[str, Any]] = []
    expected: Any = None
    for tile in sm90_tiles.tiles_of(facts.keys, facts.head_dim):
        for work in sm90_schedule.candidates(facts, tile, num_sms()):
            with forced(tile, work):
                out = call().float()
                expected = out if expected is None else expected
                error = (out - expected).abs().max().item()
                rows.append({"tile": list(tile), "work": list(work), "us": 1e3 * measure.gpu_ms(call)[0],
                             "taken": (tile, work) == (tile_taken, work_taken),
                             "right": error <= 2 * ROUNDING * expected.abs().max().item()})
    del call, out, expected
    measure.free_memory()
    return {"name": str(case), **case._asdict(), "facts": facts._asdict(), "rows": rows}


def losses(result: dict[str, Any]) -> list[tuple[float, str]]:
    """How much slower the chosen schedule is than the fastest, for each call, the largest loss first."""
    found = []
    for call in result["calls"]:
        taken = next(row["us"] for row in call["rows"] if row["taken"])
        found.append((taken / min(row["us"] for row in call["rows"]) - 1, call["name"]))
    return sorted(found, reverse=True)


def table(result: dict[str, Any]) -> str:
    lost = losses(result)
    lines = [f"{len(lost)} calls, {100 * sum(loss for loss, _ in lost) / max(1, len(lost)):.2f} % over the fastest way"]
    lines += [f"    {100 * loss:5.1f} %  {name}" for loss, name in lost[:25]]
    lines += [f"WRONG: {call['name']}, {row['tile']}, {row['work']}" for call in result["calls"]
              for row in call["rows"] if not row["right"]]
    return "\n".join(lines)


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument("--head-dim", nargs="+", type=int, default=list(HEAD_DIMS), choices=HEAD_DIMS)
    options.add_argument("--write", action="store_true", help=f"put the costs into {sm90_costs.PATH.name}")


def run(args: argparse.Namespace) -> int:
    needs_hopper()
    compile_all(configs(args.kind, args.head_dim))
    tiles = [(kind, d, tile) for kind in args.kind for d in args.head_dim for tile in sm90_tiles.tiles_of(kind, d)]
    whole = is_whole(args)
    result: dict[str, Any] = {"tiles": [costs(*one) for one in tqdm(tiles, unit="tile", disable=None)]}
    if whole and args.write:
        machine = measure.machine()
        write_costs({"device": machine["device"], "commit": args.commit or machine["commit"], "date": machine["date"]},
                    result["tiles"])
    result["calls"] = [measured(call) for call in tqdm(choices(args.kind, args.head_dim), unit="call", disable=None)]
    if whole:
        write_record("schedule.json", args, __doc__, **result)
    print(table(result))
    return 0 if all(row["right"] for call in result["calls"] for row in call["rows"]) else 1
