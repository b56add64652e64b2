"""What a ``DynamicCache`` holds, and one call of ``extend`` as a backend gets it (SPEC section 7).

The token at position ``p`` (0, 1, 2, ... in each sequence) attends to

    top_w(all keys so far, window) | keys of positions < sinks | keys of positions > p - recent

A key whose score is below ``threshold`` is never in the top, and takes no place of another there.
Keys are ranked by ``(score, position)``: NaN above everything, the newest of equal scores first. A key that has left
all three sets never returns, so ``R = window + sinks + recent`` rows hold everything that a later query can see. Kv
heads may have windows of their own, and then have rows of their own (``segments.py``).

A slot is *needed* at ``p`` if it is not empty and its key is in the top, a sink, or recent at ``p``. A key that is no
longer needed stays in its slot, with its position, until it is overwritten.

Invariants between two calls, for every sequence (``p = lengths[b]`` is the next position) and kv head:

- ``in_top`` marks exactly the best keys so far, ``window`` or all that may be in the top; the slots needed at ``p - 1``
  hold everything that is visible there, each position once;
- ``lowest`` is the slot of the lowest-ranked key of the top, and while there is room in the top, minus how much;
  ``lowest_score`` is that key's score (undefined while there is room);
- ``free`` is a slot that is not needed at ``p``, so the next token may take it whatever its score; -1 if every slot is
  needed. That happens only with ``recent == 0``, and then ``lowest`` is not a sink: the next token either replaces
  ``lowest`` or is not stored.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cupy_dma.arrays import Device, Library, Operand
from cupy_dma.masks.windows import Window, widest

PER_ROW = ("key", "value", "scores", "positions", "in_top")
SCALES = ("key_scale", "value_scale")
CODES = {"int8": "int8", "fp8": "uint8"}  # the type of the codes of a ``storage``


@dataclass(slots=True, eq=False)
class Segments:
    """How many rows each (sequence, kv head) has, and where they are in flat arrays."""

    sizes: tuple[int, ...]  # count, as the host knows it: all kv heads of the first sequence, then of the next
    count: Operand  # (B, Hkv) int32
    start: Operand  # (B, Hkv) int64
    order: Operand | None = None  # (B * Hkv,) int64: the (sequence, kv head) with the most rows first


@dataclass(slots=True, eq=False)
class CacheState:
    """Contiguous arrays of one library and device, allocated once and updated in place: addresses never change.

    With segments, ``(T, ...)`` stands for ``(B, Hkv, R, ...)``: the rows of all sequences and kv heads.
    """

    key: Operand  # (B, Hkv, R, D) of the cache's type, or int8 or uint8 codes (storage.py)
    value: Operand  # (B, Hkv, R, Dv)
    scores: Operand  # (B, Hkv, R) float32 (float64 in a float64 cache)
    positions: Operand  # (B, Hkv, R) int64, -1 = empty
    in_top: Operand  # (B, Hkv, R) uint8, 0 or 1; 0 where empty
    lengths: Operand  # (B,) int64: tokens seen so far
    lowest: Operand  # (B, Hkv) int32
    lowest_score: Operand  # (B, Hkv) of the type of scores
    free: Operand  # (B, Hkv) int32
    window: Window
    sinks: int
    recent: int
    threshold: float  # a key with a lower score is never in the top; -inf: none has one
    tickets: Operand  # (B * Hkv + B,) int32: counters of a backend's kernels, 0 between two calls
    segments: Segments | None = None  # where heads have different numbers of rows
    key_scale: Operand | None = None  # (B, Hkv, R) float32, of codes
    value_scale: Operand | None = None
    computed: str | None = None  # the cache's type, where keys and values are codes
    workspace: dict[Any, Any] = field(default_factory=dict)  # what a backend keeps between calls; never saved

    def having(self, arrays: Mapping[str, Operand]) -> CacheState:
        """The state with these arrays in place of its own."""
        return replace(self, **arrays)  # type: ignore[arg-type]

    @property
    def dtype(self) -> str:
        """The type of queries, and of keys and values as they are given."""
        return self.computed or self.key.dtype

    @property
    def storage(self) -> str | None:
        """How rows are stored: a key of ``CODES``, None for rows as they are given."""
        return None if self.computed is None else next(x for x, kind in CODES.items() if kind == self.key.dtype)

    @property
    def per_row(self) -> tuple[str, ...]:
        """Names of the arrays ``(B, Hkv, R, ...)``."""
        return PER_ROW if self.computed is None else PER_ROW + SCALES

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the arrays from which the others follow."""
        return (*self.per_row, "lengths")

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*self.saved, "lowest", "lowest_score", "free")

    @property
    def library(self) -> Library:
        return self.key.library

    @property
    def device(self) -> Device:
        return self.key.device

    @property
    def batch(self) -> int:
        return self.lowest.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.lowest.shape[1]

    @property
    def rows(self) -> int:
        """``R = window + sinks + recent``, of the widest window."""
        return self.key.shape[2] if self.key.ndim == 4 else widest(self.window) + self.sinks + self.recent

    @property
    def each_window(self) -> Any:
        """The window of each (sequence, kv head), an int or int32 ``(B, Hkv)``."""
        return (self.window if self.segments is None else
                self.segments.count.array - (self.sinks + self.recent))

    @property
    def head_dim(self) -> int:
        return self.key.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.value.shape[-1]


@dataclass(slots=True, eq=False)
class ExtendCall:
    """The checked arguments of ``extend`` and ``update``.

    Query, key, value and scores have contiguous last axes and otherwise any strides. With ``cu_seqlens`` all of them
    are packed, as arrays with B = 1 and L = total. With ``slots``, B is the number of these.
    """

    query: Operand | None  # (B, L, H, D) of the cache's type; None: update only
    key: Operand  # (B, L, Hkv, D)
    value: Operand  # (B, L, Hkv, Dv)
    scores: Operand  # (B, Hkv, L) of the type of the cache's scores
    scale: float
    softcap: float  # 0 = none
    lengths: Operand | None = None  # (B,) int32 or int64, contiguous: how many of each row's first tokens are real;
    # with cu_seqlens, at most so many of each sequence's
    cu_seqlens: Operand | None = None  # (B + 1,) int32 or int64, contiguous
    return_lse: bool = False  # whether the caller wants lse; a backend may return None for it otherwise
    out: Operand | None = None  # (B, L, H, Dv) of query's type, contiguous: where to write; None: allocate it
    lse: Operand | None = None  # (B, H, L) float32 (float64), contiguous: where to write, with return_lse
    bias_delay: int = 0  # a key's score is added for tokens at least so far behind it (SPEC section 16)
    is_biased: bool = True  # False: scores only select
    slots: Operand | None = None  # (B,) int32, contiguous: the cache's sequence that each of the call's is; -1: none,
    # its tokens are ignored as with lengths 0. None: all of them, in order. No sequence is named twice
    commits: bool = True  # False: the cache does not change
    stored: Mapping[str, Operand] | None = None  # what the cache stores of key and value, if not these: ``key`` and
    # ``value`` (B, L, Hkv, D), ``key_scale`` and ``value_scale`` (B, L, Hkv)

    @property
    def length(self) -> int:
        """``L``; with ``cu_seqlens`` the total."""
        return self.key.shape[1]

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.key.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
