"""Context parallelism: one sequence over the ranks of a torch process group.

    out = cupy_dma.distributed.context_parallel_attention(query, key, value, scores, window=2048, group=group)

Each rank passes its shard, consecutive tokens, and gets the rows of its own queries. Of other ranks' keys it receives
``window`` rows per kv head and rank, whatever the length; see docs/distributed.md. Names are loaded on first use.

    survivors.py   which keys of earlier shards are needed, the mask of a rank's history: no communication
    rows.py        rows on the wire
    exchange.py    the collectives of a call, forward and backward
    arguments.py   checks of a rank's own arguments
    agreement.py   whether all ranks make the same call, and errors that name the rank
    attention.py   the public function
    sequence.py    shards of a batch: cut, gather, positions, losses
    cache.py       a decode cache from a sharded prompt
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupy_dma.distributed.agreement import RankError
    from cupy_dma.distributed.attention import context_parallel_attention, exchanged_bytes
    from cupy_dma.distributed.cache import fill_cache
    from cupy_dma.distributed.rows import empty_with_room
    from cupy_dma.distributed.sequence import (
        document_ids,
        gather_sequence,
        shard_lengths,
        shard_mean,
        shard_positions,
        shard_sequence,
    )

_MODULE_OF = {
    "RankError": "agreement",
    "context_parallel_attention": "attention",
    "document_ids": "sequence",
    "empty_with_room": "rows",
    "exchanged_bytes": "attention",
    "fill_cache": "cache",
    "gather_sequence": "sequence",
    "shard_lengths": "sequence",
    "shard_mean": "sequence",
    "shard_positions": "sequence",
    "shard_sequence": "sequence",
}
__all__ = ["RankError", "context_parallel_attention", "document_ids", "empty_with_room", "exchanged_bytes",
           "fill_cache", "gather_sequence", "shard_lengths", "shard_mean", "shard_positions", "shard_sequence"]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"cupy_dma.distributed.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
