"""What a ``DynamicCache`` holds, and one call of ``extend`` as a backend gets it (SPEC section 7).

The token at position ``p`` (0, 1, 2, ... in each sequence) attends to

    top_w(all keys so far, window) | keys of positions < sinks | keys of positions > p - recent

Rank of a key: ``(score, position)``, NaN above everything, of equal scores the newest first. Once a key is in none of
the three it never comes back, so ``R = window + sinks + recent`` rows hold all that any later query can see.

A slot is *needed* at ``p`` if it is not empty and it is in the top, a sink, or recent at ``p``. What is not needed may
stay in its slot, with its position, until it is overwritten.

Invariants between two calls, for every sequence (``p = lengths[b]`` is the position that comes next) and kv head:

- ``in_top`` marks exactly the best ``min(window, p)`` keys seen so far; the slots needed at ``p - 1`` hold all that is
  visible there, each position once;
- ``lowest`` is the slot of the lowest-ranked key of the top, -1 while ``p < window``; ``lowest_score`` is its score
  (anything while there is none);
- ``free`` is a slot that is not needed at ``p``, so that the next token may take it whatever its score; -1 if all of
  the others are needed. This happens with ``recent == 0`` only, and then ``lowest`` is no sink: the next token takes
  the place of ``lowest`` or is not stored.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cupy_dma.arrays import Device, Library, Operand


@dataclass(slots=True, eq=False)
class CacheState:
    """Arrays of one library and device, contiguous, made once and changed in place. The addresses never change."""

    key: Operand  # (B, Hkv, R, D) of the cache's type
    value: Operand  # (B, Hkv, R, Dv)
    scores: Operand  # (B, Hkv, R) float32 (float64 in a float64 cache)
    positions: Operand  # (B, Hkv, R) int64, -1 = empty
    in_top: Operand  # (B, Hkv, R) uint8, 0 or 1; 0 where empty
    lengths: Operand  # (B,) int64: tokens seen
    lowest: Operand  # (B, Hkv) int32
    lowest_score: Operand  # (B, Hkv) of the type of scores
    free: Operand  # (B, Hkv) int32
    window: int
    sinks: int
    recent: int
    workspace: dict[Any, Any] = field(default_factory=dict)  # what a backend keeps from call to call; never saved

    @property
    def library(self) -> Library:
        return self.key.library

    @property
    def device(self) -> Device:
        return self.key.device

    @property
    def batch(self) -> int:
        return self.key.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def rows(self) -> int:
        """``R = window + sinks + recent``."""
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        return self.key.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]


@dataclass(slots=True, eq=False)
class ExtendCall:
    """Arguments of ``extend`` and ``update`` that have passed every check.

    Query, key and value have any strides of B, L and head, and contiguous last axes; scores too. With ``cu_seqlens``
    all of them are packed, as arrays of B = 1 and L = total.
    """

    query: Operand | None  # (B, L, H, D) of the cache's type; None: update only
    key: Operand  # (B, L, Hkv, D)
    value: Operand  # (B, L, Hkv, Dv)
    scores: Operand  # (B, Hkv, L) of the type of the cache's scores
    scale: float
    softcap: float  # 0 = none
    lengths: Operand | None = None  # (B,) int32 or int64, contiguous: tokens of each row that are real, the first ones
    cu_seqlens: Operand | None = None  # (cache's B + 1,) int32 or int64, contiguous
    return_lse: bool = False  # whether anybody wants lse; a backend may return None for it otherwise
    out: Operand | None = None  # (B, L, H, Dv) of query's type, contiguous: where to write; None: make it
    lse: Operand | None = None  # (B, H, L) float32 (float64), contiguous: where to write, with return_lse

    @property
    def length(self) -> int:
        """``L``, with ``cu_seqlens`` the total."""
        return self.key.shape[1]
