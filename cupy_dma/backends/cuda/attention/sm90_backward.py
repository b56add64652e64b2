"""The gradients of keys, values and key biases on Hopper GPUs (``kernels/sm90/backward_dkv.cu``): key-stationary, with
warpgroup MMAs (wgmma), over the same super-tile lists as the portable kernel.

It serves 16-bit elements in aligned rows of at most 128 columns under masks and biases that the heads of a GQA group
share; the portable kernel does the rest and gives the same numbers within rounding.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.attention.tma import queries_map
from cupy_dma.backends.cuda.lists.intervals import SuperLists
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import BIAS_DENSE, ELEMENTS
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionBackwardCall

BLOCK_N, KEY_STAGES, STAGES, THREADS = 128, 2, 2, 384  # as in the kernel file


@dataclass(frozen=True)
class HopperBackwardDkvConfig(jit.Config):
    source = "sm90/backward_dkv.cu"
    element: str
    head_dim: int
    block_q: int
    stages: int
    keys: str  # KEYS_CONTIGUOUS or KEYS_LISTED
    intervals: bool
    causal: bool
    bias: int  # BIAS_NONE or BIAS_OF_KEYS
    softcap: bool
    sequences: bool

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in the kernel file, rounded up, and room to align it."""
        row = -(-self.head_dim // 64) * 128
        rows = 2 * KEY_STAGES * BLOCK_N + 2 * self.stages * self.block_q
        return 1024 + row * rows + 8 * self.stages * self.block_q + KEY_STAGES * (16 * BLOCK_N + 128) + 256


def serves(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, vector: bool) -> bool:
    """Whether this kernel takes the gradients of a call: it can, and is faster. ``vector``: all rows are aligned."""
    query = call.forward.query
    return (runtime.hopper(query.device.index) and problem.size == 2 and vector and query.shape[3] <= 128
            and {"key", "value"} <= call.needs
            and problem.bias_kind != BIAS_DENSE and not problem.by_head and problem.dense is None
            and not (problem.count > 0 and problem.mask is not None)
            and queries_map(query, block_q(query.shape[3]), 1) is not None
            and queries_map(call.dout, block_q(query.shape[3]), 1) is not None)


def block_q(head_dim: int) -> int:
    """Queries of a step."""
    return 128 if head_dim <= 64 else 64


def launch(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, supers: SuperLists | None,
           fields: dict[str, Any]) -> None:
    """Writes the gradients, or with ``supers`` their sums over super-tiles; ``fields``: what the call's launches share,
    and where those sums go."""
    query, key = call.forward.query, call.forward.key
    batch, key_length, kv_heads, head_dim = key.shape
    library, device = query.library, query.device
    kernel = _kernel(runtime, device.index, ELEMENTS[query.dtype], head_dim,
                     "KEYS_CONTIGUOUS" if supers is None else "KEYS_LISTED", problem.mask is not None, problem.causal,
                     problem.bias_kind, call.forward.softcap > 0.0, problem.count > 0)
    tiles = batch * kv_heads * (tile_count(key_length, BLOCK_N, problem.count) if supers is None
                                else supers.entries // BLOCK_N)
    tickets = library.full((1,), 0, "int32", device)
    maps = [queries_map(rows, block_q(head_dim), 1) for rows in (query, call.dout)]
    assert None not in maps  # or ``serves`` would not have taken it
    packed = b"".join(found or b"" for found in maps) + problem.pack(None, **fields)
    packed += library.pointer(tickets).to_bytes(8, "little") + tiles.to_bytes(4, "little")
    packed += bytes(-len(packed) % 64)
    kernel.launch(min(tiles, runtime.num_sms(device.index)), THREADS, packed, library.stream(device), pdl=False)


@functools.cache  # by fields: they hash faster than a configuration
def _kernel(runtime: Runtime, index: int, element: str, head_dim: int, keys: str, intervals: bool, causal: bool,
            bias: int, softcap: bool, sequences: bool) -> LoadedKernel:
    config = HopperBackwardDkvConfig(element=element, head_dim=head_dim, block_q=block_q(head_dim), stages=STAGES,
                                     keys=keys, intervals=intervals, causal=causal, bias=bias, softcap=softcap,
                                     sequences=sequences)
    return runtime.load(config, "backward_dkv", index, config.shared_bytes)
