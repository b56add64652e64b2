"""The gradients on Hopper GPUs (``kernels/sm90/backward_dq.cu`` and ``backward_dkv.cu``), with warpgroup MMAs (wgmma):
of queries query-major over the key lists of tiles; of keys, values and key biases key-stationary over the same
super-tile lists as the portable kernel.

They serve 16-bit elements in aligned rows of at most 128 columns without a dense mask or bias, and softcaps that are
not so large that their formula loses the logits; the portable kernels do the rest and give the same numbers within
rounding.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.attention.tma import queries_map
from cupy_dma.backends.cuda.lists.intervals import SuperLists
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import BIAS_DENSE, ELEMENTS, blocks
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionBackwardCall

MAX_HEAD_DIM = 128
MAX_SOFTCAP = 4096.0
BLOCK_N, KEY_STAGES, STAGES = 128, 2, 2  # of backward_dkv.cu: keys of a tile; stages of keys and of queries
BLOCK_M, DQ_STAGES = 128, 3  # of backward_dq.cu: rows of a tile, stages of keys
THREADS = 384  # of either


@dataclass(frozen=True)
class _Config(jit.Config):
    """What both kernels are specialised in."""

    element: str
    head_dim: int
    stages: int
    keys: str
    causal: bool
    bias: int  # BIAS_NONE or BIAS_OF_KEYS
    softcap: bool
    sequences: bool


@dataclass(frozen=True)
class HopperBackwardDqConfig(_Config):
    source = "sm90/backward_dq.cu"
    heads: int  # of a GQA group in one tile
    block_m: int
    block_n: int

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in the kernel's files, rounded up, and room to align it."""
        rows = 3 * self.block_m + 2 * self.stages * self.block_n
        return (1024 + blocks(self.head_dim, 64) * 128 * rows + self.stages * (12 * self.block_n + 32)
                + 8 * self.block_m + 96)


@dataclass(frozen=True)
class HopperBackwardDkvConfig(_Config):
    source = "sm90/backward_dkv.cu"
    block_q: int
    intervals: bool

    @property
    def shared_bytes(self) -> int:
        """As above."""
        rows = 2 * KEY_STAGES * BLOCK_N + 2 * self.stages * self.block_q
        return (1024 + blocks(self.head_dim, 64) * 128 * rows + 8 * self.stages * self.block_q
                + KEY_STAGES * (16 * BLOCK_N + 128) + 256)


def _serves(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, vector: bool) -> bool:
    """What both need. ``vector``: all rows are aligned."""
    query = call.forward.query
    return (runtime.hopper(query.device.index) and problem.size == 2 and vector and query.shape[3] <= MAX_HEAD_DIM
            and problem.bias_kind != BIAS_DENSE and problem.dense is None and call.forward.softcap <= MAX_SOFTCAP)


def serves_query(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, vector: bool) -> bool:
    """Whether ``launch_dq`` takes the gradient of a call's queries, or ``delta`` alone."""
    return (_serves(runtime, call, problem, vector) and BLOCK_M % problem.tile_heads == 0
            and _maps(call, BLOCK_M // problem.tile_heads, problem.tile_heads, out=True) is not None)


def serves_keys(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, vector: bool) -> bool:
    """Whether ``launch_dkv`` takes the gradients of a call's keys, values and bias: masks and biases are those of a GQA
    group, and packed sequences need no lists."""
    return (_serves(runtime, call, problem, vector) and not problem.by_head
            and not (problem.count > 0 and problem.mask is not None)
            and _maps(call, block_q(call.forward.head_dim), 1) is not None)


def block_q(head_dim: int) -> int:
    """Queries of a step of ``launch_dkv``."""
    return 128 if head_dim <= 64 else 64


def dq_block_n(head_dim: int) -> int:
    """Keys of a block of ``launch_dq``."""
    return 128 if head_dim <= 64 else 64


def launch_dq(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, fields: dict[str, Any]) -> None:
    """Writes ``delta`` and, if it is asked for, the gradient of the queries; ``fields``: what the call's launches
    share."""
    query = call.forward.query
    library, device, heads = query.library, query.device, problem.tile_heads
    queries, stream = BLOCK_M // heads, library.stream(device)
    wanted = "query" in call.needs
    lists = problem.key_lists(runtime, queries, dq_block_n(query.shape[3]), stream) if wanted else None
    tiles = tile_count(query.shape[1], queries, problem.count)
    kernel = _dq_kernel(runtime, device.index, ELEMENTS[query.dtype], query.shape[3], heads,
                        "KEYS_CONTIGUOUS" if lists is None else lists.keys, problem.causal, problem.bias_kind,
                        call.forward.softcap > 0.0, problem.count > 0)
    all_tiles = tiles * (query.shape[2] // heads) * query.shape[0]
    tickets = library.full((1,), 0, "int32", device)
    params = problem.pack(lists, tiles=tiles, **fields) + _tickets(library.pointer(tickets), all_tiles)
    kernel.launch(min(all_tiles, runtime.num_sms(device.index)), THREADS,
                  _packed(_maps(call, queries, heads, out=True), params), stream, pdl=False)


def launch_dkv(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, supers: SuperLists | None,
               fields: dict[str, Any]) -> None:
    """Writes the gradients of keys, values and bias, or with ``supers`` their sums over super-tiles; ``fields``: what
    the call's launches share, and where those sums go."""
    query, key = call.forward.query, call.forward.key
    batch, key_length, kv_heads, head_dim = key.shape
    library, device = query.library, query.device
    kernel = _dkv_kernel(runtime, device.index, ELEMENTS[query.dtype], head_dim,
                         "KEYS_CONTIGUOUS" if supers is None else "KEYS_LISTED", problem.mask is not None,
                         problem.causal, problem.bias_kind, call.forward.softcap > 0.0, problem.count > 0)
    tiles = batch * kv_heads * (tile_count(key_length, BLOCK_N, problem.count) if supers is None
                                else supers.entries // BLOCK_N)
    tickets = library.full((1,), 0, "int32", device)
    params = problem.pack(None, **fields) + _tickets(library.pointer(tickets), tiles)
    kernel.launch(min(tiles, runtime.num_sms(device.index)), THREADS,
                  _packed(_maps(call, block_q(head_dim), 1), params), library.stream(device), pdl=False)


def _maps(call: AttentionBackwardCall, queries: int, heads: int, out: bool = False) -> bytes | None:
    """The TMA descriptors of query, dout and, if asked for, ``out``; None where TMA cannot read them."""
    rows: tuple[Operand, ...] = (call.forward.query, call.dout, call.out) if out else (call.forward.query, call.dout)
    maps = [queries_map(operand, queries, heads) for operand in rows]
    return None if None in maps else b"".join(found for found in maps if found)


def _tickets(pointer: int, tiles: int) -> bytes:
    """The fields behind the attention's parameters."""
    return pointer.to_bytes(8, "little") + tiles.to_bytes(4, "little")


def _packed(maps: bytes | None, params: bytes) -> bytes:
    """A kernel's argument: the maps first, and all of it a multiple of their alignment."""
    assert maps is not None  # or the kernel would not have taken the call
    return maps + params + bytes(-len(maps + params) % 64)


@functools.cache  # by fields: they hash faster than a configuration
def _dq_kernel(runtime: Runtime, index: int, element: str, head_dim: int, heads: int, keys: str, causal: bool,
               bias: int, softcap: bool, sequences: bool) -> LoadedKernel:
    config = HopperBackwardDqConfig(element=element, head_dim=head_dim, heads=heads, block_m=BLOCK_M,
                                    block_n=dq_block_n(head_dim), stages=DQ_STAGES, keys=keys, causal=causal, bias=bias,
                                    softcap=softcap, sequences=sequences)
    return runtime.load(config, "backward_dq", index, config.shared_bytes)


@functools.cache
def _dkv_kernel(runtime: Runtime, index: int, element: str, head_dim: int, keys: str, intervals: bool, causal: bool,
                bias: int, softcap: bool, sequences: bool) -> LoadedKernel:
    config = HopperBackwardDkvConfig(element=element, head_dim=head_dim, block_q=block_q(head_dim), stages=STAGES,
                                     keys=keys, intervals=intervals, causal=causal, bias=bias, softcap=softcap,
                                     sequences=sequences)
    return runtime.load(config, "backward_dkv", index, config.shared_bytes)
