"""The gradient of the queries on Hopper from stored dS: the key pass (``sm90_backward.launch_dkv``) keeps dS of each of
its steps in 16 bits, and ``kernels/sm90/backward_dq_stored.cu`` makes ``dq = dS K`` of it, one product in place of the
three of the query pass. As there, every sum has one order, and results have the same bits on every run.

dS needs ``2 * 64 * 128`` bytes a step of 64 queries and 128 keys, as many steps as lists of super-tiles have room for:
2 GiB at 32768 tokens, 16 query and 8 kv heads and 1024 keys a query. So the two passes take turns over chunks of lists,
whose dS is at most ``max_stored()``; where a chunk ends changes no bit.

For two passes over lists of super-tiles up to head dim 128: not of packed sequences and dense masks, and only where
gradients of queries and of others are wanted.
"""
from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from cupy_dma.backends.cuda.attention import sm90_backward
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.attention.sm90_backward import MAX_NARROW_DIM, THREADS
from cupy_dma.backends.cuda.attention.sm90_splits import QuerySplits
from cupy_dma.backends.cuda.attention.tma import rows_map
from cupy_dma.backends.cuda.lists.intervals import Fields, SuperLists
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Builder
from cupy_dma.backends.cuda.runtime.configs import ELEMENTS, blocks
from cupy_dma.backends.cuda.runtime.params import Ref, pack_pointer

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionBackwardCall

NAME = "stored dS"
VARIABLE, DEFAULT_MIB, MOST_MIB = "CUPY_DMA_STORED_MIB", 4096, 1 << 17
MIN_HEAD_DIM = 65  # up to 64 the query pass is faster: its products cost less than reading dS
STEP_QUERIES, TILE_KEYS = 64, 128  # of a step of the key pass
STEP_BYTES = 2 * STEP_QUERIES * TILE_KEYS
ROW_UNITS = 4  # of a tile of backward_dq_stored.cu: steps of queries times heads
BLOCK_N = 64  # keys that it takes at a time


@dataclass(frozen=True)
class HopperBackwardDqStoredConfig(jit.Config):
    source = "sm90/backward_dq_stored.cu"
    element: str
    head_dim: int
    heads: int  # of a GQA group in one tile
    block_n: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in the kernel's file, rounded up, and room to align it."""
        rows = blocks(self.head_dim, 64) + ROW_UNITS
        return 1024 + self.stages * (128 * self.block_n * rows + 24) + 64


@functools.cache
def max_stored() -> int:
    """Bytes of dS at a time. The variable is read once a process: programs of both values would have the same key."""
    given = os.environ.get(VARIABLE) or str(DEFAULT_MIB)
    if not (given.isascii() and given.isdigit() and int(given) <= MOST_MIB):
        raise ValueError(f"{VARIABLE} must be a whole number of MiB from 0, which stores nothing, to {MOST_MIB}, got "
                         f"{given!r}")
    return int(given) << 20


@dataclass(frozen=True, slots=True)
class Chunks:
    """The key lists of super-tiles of all kv heads, ``count`` in all, of which ``size`` are taken at a time."""

    count: int
    size: int
    tiles: int  # of keys, of a list
    steps: int  # of queries, of a super-tile

    @property
    def number(self) -> int:
        return blocks(self.count, self.size)


def reasons(call: AttentionBackwardCall, problem: Problem, supers: SuperLists | None, wanted: bool) -> list[str]:
    """Why dS is not stored for a call whose key pass is the Hopper kernel, in two passes. ``wanted``: even if that is
    slower."""
    own = call.forward
    against = {
        f"a head dim above {MAX_NARROW_DIM}": own.head_dim > MAX_NARROW_DIM,
        f"a head dim below {MIN_HEAD_DIM}": own.head_dim < MIN_HEAD_DIM and not wanted,
        "packed sequences": problem.count > 0,
        "a dense mask": problem.bits, "no lists of super-tiles": supers is None,
        "no gradient of the queries": "query" not in call.needs}
    found = [reason for reason, holds in against.items() if holds]
    if not found and chunks_of(call, supers).size == 0:
        found.append(f"one super-tile needs more than {VARIABLE}={max_stored() >> 20}")
    return found


def chunks_of(call: AttentionBackwardCall, supers: SuperLists | None) -> Chunks:
    """How a call that is served is taken; of size 0 where not even one list is small enough."""
    assert supers is not None
    own, fields = call.forward, supers.fields
    steps, tiles = fields["super_queries"] // STEP_QUERIES, fields["super_capacity"] // TILE_KEYS
    count = own.batch * own.kv_heads * fields["supers"]
    most = max_stored() // (STEP_BYTES * tiles * steps * (own.heads // own.kv_heads))
    return Chunks(count, blocks(count, blocks(count, most)) if most else 0, tiles, steps)


def launch(build: Builder, call: AttentionBackwardCall, problem: Problem, chunks: Chunks, entries: int, fields: Fields,
           tickets: Ref) -> None:
    """Writes the gradient of the queries, and all that ``launch_dkv`` writes. ``entries`` and ``fields`` as there;
    ``tickets``: two counters for each chunk, 0 before."""
    query, key = call.forward.query, call.forward.key
    head_dim, group = key.shape[3], query.shape[2] // key.shape[2]
    heads = gcd(group, ROW_UNITS)
    config = HopperBackwardDqStoredConfig(ELEMENTS[query.dtype], head_dim, heads, BLOCK_N, stages(head_dim))
    kernel = build.load(config, "backward_dq_stored", config.shared_bytes)
    tile_steps = group * chunks.steps
    ds = build.empty((1, chunks.size * chunks.tiles * tile_steps * TILE_KEYS, 1, STEP_QUERIES), query.dtype)
    keys = build.empty((chunks.size * chunks.tiles * TILE_KEYS,), "int32").ref
    steps = build.empty((chunks.size * chunks.tiles, 2), "int32").ref
    for i, first in enumerate(range(0, chunks.count, chunks.size)):
        size = min(chunks.size, chunks.count - first)
        stored = pack_pointer(ds.ref) + pack_pointer(keys) + pack_pointer(steps)
        stored += b"".join(x.to_bytes(4, "little") for x in (first * chunks.tiles, chunks.steps, tile_steps, 0))
        counters = tickets + 8 * i
        sm90_backward.launch_dkv(build, call, problem, "KEYS_LISTED", entries, fields, counters,
                                 QuerySplits(), None, stored=(size * chunks.tiles, stored))
        found = rows_map(build.describe(ds, "ds"), BLOCK_N)
        assert found is not None
        packed = found + problem.pack(None, **fields) + stored + pack_pointer(counters + 4) + size.to_bytes(4, "little")
        tiles = size * (group // heads) * blocks(chunks.steps, ROW_UNITS // heads)
        build.launch(kernel, min(tiles, build.num_sms), THREADS, packed.padded(64), pdl=False)


def stages(head_dim: int) -> int:
    """Of blocks of keys and dS, as many as there is room for."""
    return 4 if head_dim > 64 else 5
