"""Tiles of keys of the Hopper key pass (``sm90_backward.launch_dkv``) that are split along their queries, because there
are few of them, or because few of them have most of the steps.

The host knows the steps of tiles of keys in their own order and chooses their splits (``query_splits_of``). Under a
mask without a bound, whose keys are in the order of their lifetimes, only the device knows them:
``kernels/sm90/backward_dkv_plan.cu`` splits tiles that have more than an SM's share of all steps, and the host makes
room for their sums (``key_plan_of``).
"""
from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_dma.backends.cuda.attention import sm90_backward
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.runtime.builder import Builder
from cupy_dma.backends.cuda.runtime.configs import blocks
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.runtime.params import Packed, pack_pointer
from cupy_dma.masks.interval import NEVER

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionBackwardCall

#: costs in steps: overhead of a tile or query split, of a split without steps, of summing splits, and per number of a
#: split's dk and dv (docs/lab/backward.md, generation 47)
TILE_STEPS, EMPTY_STEPS, SUM_STEPS, NUMBER_STEPS = 4.7, 1.7, 0.5, 0.57e-6
MAX_QUERY_SPLITS, MIN_STEPS = 16, 2
MIN_PLANNED = 4  # MIN_STEPS of backward_dkv_plan.cu


@dataclass(frozen=True, slots=True)
class QuerySplits:
    """Tiles of keys in their own order are split along their queries into ``count`` of ``steps`` steps. The sums of
    splits are added afterwards; 1 and 0: not split."""

    count: int = 1
    steps: int = 0


def query_splits_of(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, entries: int,
                    one_pass: bool) -> QuerySplits:
    """How ``launch_dkv`` splits tiles; ``entries`` and ``one_pass`` as there."""
    query, key, mask = call.forward.query, call.forward.key, problem.mask
    if entries or problem.count:
        return QuerySplits()
    from_key = problem.causal or mask is not None and mask._starts == "key"  # no query sees a key that comes later
    return _best_splits(query.shape[1], key.shape[1], key.shape[0] * key.shape[2], query.shape[2] // key.shape[2],
                        key.shape[3], sm90_backward.block_q(key.shape[3], one_pass, problem.delay), from_key,
                        runtime.num_sms(query.device.index))


@functools.lru_cache(maxsize=1024)
def _best_splits(query_length: int, key_length: int, rows: int, group: int, head_dim: int, per_step: int,
                 from_key: bool, sms: int) -> QuerySplits:
    """The splits with the least makespan. ``rows``: kv heads of all batch entries; ``per_step``: queries of a step."""
    size = sm90_backward.block_n(head_dim)
    tiles, most_tickets = blocks(key_length, size), 4 * sms  # more were not the best of any call that was measured
    unit, shift = sm90_backward.UNIT_QUERIES, key_length - query_length
    firsts = [max(0, i * size - shift) // unit * unit if from_key else 0 for i in range(tiles)]
    if 2 * rows * tiles > most_tickets:
        return QuerySplits()
    steps = [group * blocks(max(0, query_length - first), per_step) for first in firsts]
    sums = NUMBER_STEPS * 2 * rows * key_length * head_dim
    least, best = _makespan(steps, rows, max(steps), sms), QuerySplits()
    # Not only even splits: what is left of a tile that has fewer steps than others may be the whole of it.
    for split in sorted({blocks(4 * max(steps), quarters) for quarters in range(5, 4 * MAX_QUERY_SPLITS + 1)}):
        count = blocks(max(steps), split)
        if split >= MIN_STEPS and count > 1 and count * rows * tiles <= most_tickets:
            time = _makespan(steps, rows, split, sms) + SUM_STEPS + count * sums
            if time < least:
                least, best = time, QuerySplits(count, split)
    return best


def _makespan(steps: list[int], rows: int, split: int, sms: int) -> float:
    """Predicted time, in steps, if SMs take the splits of these tiles one after another as they become free."""
    busy = [0.0] * sms
    for first in range(0, max(steps), split):
        for of_tile in steps:
            own = min(split, of_tile - first)
            for _ in range(rows):
                heapq.heapreplace(busy, busy[0] + (own + TILE_STEPS if own > 0 else EMPTY_STEPS))
    return max(busy)


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """Room for what the device plans. It depends on shapes alone, so a program serves every mask."""

    slots: int  # for the sums of splits
    rows: int  # of keys, in all slots
    packed: Packed  # KeyPlan in kernels/sm90/key_plan.cuh


def key_plan_of(build: Builder, call: AttentionBackwardCall, problem: Problem, one_pass: bool) -> KeyPlan:
    """Of a call whose keys are in the order of their lifetimes. ``Overrides.query_splits``: the steps of a split."""
    query, key, given = call.forward.query, call.forward.key, build.overrides.query_splits
    head_dim, tiles = key.shape[3], sm90_backward.key_tiles(call, problem, 0)
    per_head = blocks(query.shape[1], sm90_backward.block_q(head_dim, one_pass, True))
    most = query.shape[2] // key.shape[2] * per_head  # steps of a tile
    steps = 0 if given is None else given.steps or NEVER  # 0: as the device finds
    splits = blocks(most, steps or MIN_PLANNED)
    slots = tiles * splits if splits > 1 else 0
    if not steps:
        slots = min(slots, 2 * build.num_sms)  # tiles of more than one share have less than two splits a share
    packed = Packed(b"")
    for size in (4 * (tiles + slots), 4 * max(1, slots // 2), 2):
        packed += pack_pointer(build.empty((size,), "int32").ref)
    packed += steps.to_bytes(4, "little") + build.num_sms.to_bytes(4, "little")
    return KeyPlan(slots, slots * sm90_backward.block_n(head_dim), packed)
