"""Calls: checked arguments, as a backend gets them."""
from __future__ import annotations

from dataclasses import dataclass

from cupy_dma.arrays import Operand
from cupy_dma.calls.scores import Recipe
from cupy_dma.calls.sequences import Sequences
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.selection import Candidates
from cupy_dma.masks.windows import Window


@dataclass(slots=True, eq=False)  # immutable by convention: frozen=True is slow to construct
class AttentionCall:
    """The checked arguments of a backend's ``attention``."""

    query: Operand  # (B, Lq, H, D)
    key: Operand  # (B, Lk, Hkv, D)
    value: Operand  # (B, Lk, Hkv, Dv)
    # Bias and dense mask are (1|B, 1|Hkv|H, 1|Lq, 1|Lk) with stride 0 on every axis of size 1; their ``array`` is the
    # caller's, which may have fewer axes.
    mask: IntervalMask | None
    dense: Operand | None  # a key must be visible in both masks
    bias: Operand | None
    causal: bool  # query i sees only j <= p_i, in addition to the mask
    scale: float
    softcap: float  # 0 = none
    deterministic: bool
    # A key bias is added only where p_i - j >= bias_delay (SPEC section 16); 0: for every query, even those before j
    bias_delay: int = 0
    # (H,). run.py adds them to the forward's results; a backward that recomputes ``out`` and ``lse`` needs them
    sinks: Operand | None = None
    sequences: Sequences | None = None  # varlen: packed in arrays of B = 1; key and value may be a paged KV cache

    @property
    def options(self) -> tuple[bool, float, float, bool, int]:
        """causal, scale, softcap, deterministic, bias_delay."""
        return self.causal, self.scale, self.softcap, self.deterministic, self.bias_delay

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def query_length(self) -> int:
        return self.query.shape[1]

    @property
    def heads(self) -> int:
        return self.query.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def key_length(self) -> int:
        return self.key.shape[1] if self.sequences is None else self.sequences.key_length

    @property
    def kv_heads(self) -> int:
        return self.key.shape[2]


@dataclass(slots=True, eq=False)  # immutable by convention, as above
class AttentionBackwardCall:
    """The checked arguments of a backend's ``attention_backward``. ``dout`` and ``out`` have contiguous rows and any
    strides of B, L and head, including 0; ``lse`` and ``dlse`` are contiguous."""

    forward: AttentionCall
    dout: Operand  # (B, Lq, H, Dv), query's type
    out: Operand  # (B, Lq, H, Dv), query's type: what the forward returned
    lse: Operand  # (B, H, Lq) float32, float64 for float64
    dlse: Operand | None  # like lse
    needs: frozenset[str]  # some of "query", "key", "value", "bias"; not empty, "bias" only if there is a bias


@dataclass(slots=True, eq=False)  # immutable by convention, as above
class DynamicCall:
    """The checked arguments of ``dynamic_mask_attention`` and its varlen twin: the scores, or the recipe for them."""

    attention: AttentionCall  # without a mask; with the scores as key bias if they are given
    scores: Operand | None  # (B, Hkv|H, Lk), what the selection ranks; for a paged KV cache (1|B, Hkv, capacity)
    recipe: Recipe | None
    window: Window
    keys: str
    candidates: Candidates


def with_mask(call: AttentionCall, mask: IntervalMask | None, bias: Operand | None) -> AttentionCall:
    """The call with this mask and bias."""
    return AttentionCall(call.query, call.key, call.value, mask, None, bias, *call.options, call.sinks, call.sequences)


def key_bias(scores: Operand) -> Operand:
    """(B, H, Lk) as (B, H, 1, Lk), over the same memory: a query axis of size 1 and stride 0."""
    (b, h, n), (sb, sh, sn) = scores.shape, scores.strides
    strides = (0 if b == 1 else sb, 0 if h == 1 else sh, 0, 0 if n == 1 else sn)
    return Operand("bias", scores.array, scores.library, (b, h, 1, n), strides, scores.dtype, scores.device,
                   scores.pointer)
