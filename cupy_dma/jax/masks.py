"""Masks of jax arrays.

``cupy_dma.IntervalMask`` holds described arrays: addresses, strides, a device, and key lists cached by backends. A
traced value has none of these, and jax rebuilds a pytree around whatever replaces its leaves. So jax has a mask of its
own, which holds two arrays and the static hints only; ``masks/runs.py`` defines how two masks combine. The attention
functions accept both kinds, and ``IntervalMask.of`` converts.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cupy_dma import checks
from cupy_dma.arrays import Windows
from cupy_dma.jax.arguments import Array, as_array, is_traced
from cupy_dma.masks import interval
from cupy_dma.masks.operators import MaskOperators
from cupy_dma.masks.runs import EVER, NEVER, UNKNOWN, Hints, Runs, gated, intersection, union


@jax.tree_util.register_pytree_with_keys_class
class IntervalMask(MaskOperators):
    """A mask under which every key is visible to one run of consecutive positions, as a pytree of two jax arrays.

    Parameters
    ----------
    start, stop : int32 array, ``(1|B, 1|Hkv|H, Lk)``
        First position that sees the key, and the first position after it that does not. Missing leading axes
        broadcast.

    Raises
    ------
    TypeError, ValueError
        ``start`` or ``stop`` is not an int32 array, or their shapes do not broadcast.

    See Also
    --------
    top_w, of, causal, sliding_window, sinks, padding, from_gate : selections, masks of other libraries, common masks,
    learned eviction.
    """

    __slots__ = ("_hints", "start", "stop")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, start: Array, stop: Array):
        runs = as_array(start, "start"), as_array(stop, "stop")
        for run, name in zip(runs, ("start", "stop")):
            if run.dtype != jnp.int32:
                raise TypeError(f"{name} must be int32, got {run.dtype}")
            if not 1 <= run.ndim <= 3:
                raise ValueError(f"{name} must have 1 to 3 axes (B, H, Lk), got shape {run.shape}")
        a, b = ((1, 1, *run.shape)[-3:] for run in runs)
        if a[2] != b[2] or any(x != y and 1 not in (x, y) for x, y in zip(a, b)):
            raise ValueError(f"start and stop must broadcast to one shape (B, H, Lk), got start {runs[0].shape} and "
                             f"stop {runs[1].shape}")
        self.start, self.stop = runs[0].reshape(a), runs[1].reshape(b)
        self._hints = UNKNOWN

    @classmethod
    def _make(cls, start: Any, stop: Any, hints: Hints) -> IntervalMask:
        """From arrays with three axes, or whatever jax puts in their place."""
        mask = cls.__new__(cls)
        mask.start, mask.stop, mask._hints = start, stop, hints
        return mask

    @classmethod
    def _of(cls, runs: Runs) -> IntervalMask:
        start, stop = (x.reshape((1, 1, *x.shape)[-3:]) for x in runs[:2])
        return cls._make(start, stop, runs.hints)

    def tree_flatten_with_keys(self) -> tuple[Any, Hints]:
        return ((jax.tree_util.GetAttrKey("start"), self.start), (jax.tree_util.GetAttrKey("stop"), self.stop)), \
            self._hints

    @classmethod
    def tree_unflatten(cls, hints: Hints, leaves: Any) -> IntervalMask:
        start, stop = leaves
        return cls._make(start, stop, hints)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(1|B, 1|Hkv|H, Lk)``."""
        return np.broadcast_shapes(self.start.shape, self.stop.shape)

    @property
    def key_length(self) -> int:
        return self.stop.shape[2]

    def __repr__(self) -> str:
        return f"cupy_dma.jax.IntervalMask(start={self.start!r}, stop={self.stop!r})"

    # ---- constructors -----------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, mask: Any) -> IntervalMask:
        """The mask of a ``cupy_dma.IntervalMask``, whose arrays are copied.

        Raises
        ------
        TypeError
            ``mask`` is something else.
        """
        if isinstance(mask, IntervalMask):
            return mask
        if not isinstance(mask, interval.IntervalMask):
            raise TypeError(f"mask must be an IntervalMask, got {type(mask).__name__}")
        start, stop = (jnp.array(mask.library.to_numpy(run.array)) for run in (mask._start, mask._stop))
        return cls._of(Runs(start, stop, mask._hints))

    @classmethod
    def causal(cls, key_length: int) -> IntervalMask:
        """Every position sees its own key and all earlier ones."""
        return cls.of(interval.IntervalMask.causal(key_length))

    @classmethod
    def sliding_window(cls, key_length: int, window: Windows) -> IntervalMask:
        """Every position sees the last ``window`` keys, including its own. Several ints: one window per head."""
        return cls.of(interval.IntervalMask.sliding_window(key_length, window))

    @classmethod
    def sinks(cls, key_length: int, count: int) -> IntervalMask:
        """The first ``count`` keys, visible from their own position on, and no others. For unions."""
        return cls.of(interval.IntervalMask.sinks(key_length, count))

    @classmethod
    def from_gate(cls, bias: Array, *, delay: int, threshold: Any, sinks: int = 0) -> IntervalMask:
        """Learned eviction: if ``bias[j] < threshold`` and ``j >= sinks``, key ``j`` is visible at ``delay`` positions,
        starting with its own; otherwise from its own on. ``bias``: float ``(Lk,)``, ``(1|Hkv|H, Lk)`` or
        ``(1|B, 1|Hkv|H, Lk)``; ``threshold`` may be traced."""
        gate = as_array(bias, "bias")
        if not jnp.issubdtype(gate.dtype, jnp.floating):
            raise TypeError(f"bias must be a float array, got {gate.dtype}")
        if not 1 <= gate.ndim <= 3:
            raise ValueError(f"bias must have 1 to 3 axes (B, H, Lk), got shape {gate.shape}")
        distance, first = checks.whole(delay, "delay", 1), checks.whole(sinks, "sinks", 0)
        key = jnp.arange(gate.shape[-1], dtype=jnp.int32)
        least = threshold if is_traced(threshold) else checks.real(threshold, "threshold")
        return cls._of(Runs(key, gated(jnp, gate, key, jnp.int32(NEVER), distance, least, first), Hints("key")))

    @classmethod
    def padding(cls, padding: Array) -> IntervalMask:
        """Real keys are visible at every position, padding at none. ``padding (B, Lk)``: bool, or integers 0 and 1;
        True or 1 = real."""
        real = real_keys(padding)
        return key_mask(real[:, None, None], real.shape[1])

    # ---- algebra ----------------------------------------------------------------------------------------------------

    def __and__(self, other: IntervalMask) -> IntervalMask:
        """Visible under both: the later start and the earlier stop."""
        if not isinstance(other, IntervalMask):
            return self._with(other, "&")
        self._meet(other, "&")
        return self._of(intersection(jnp, self._runs, other._runs))

    def __or__(self, other: IntervalMask) -> IntervalMask:
        """Visible under either, where the two runs of every key touch or overlap.

        ValueError where they do not. Masks whose runs start at their keys, such as those of ``top_w`` and
        ``sliding_window``, always touch; for others the values decide, which cannot be read under ``jit``.
        """
        if not isinstance(other, IntervalMask):
            return self._with(other, "|")
        self._meet(other, "|")
        known = self._hints.starts is not None and self._hints.starts == other._hints.starts
        if not known and is_traced(self.start, self.stop, other.start, other.stop):
            raise ValueError("mask | mask needs masks whose runs are known to touch at trace time, such as top_w and "
                             "sliding_window; combine others outside jit, or as dense masks")
        return self._of(union(jnp, self._runs, other._runs))

    @property
    def _runs(self) -> Runs:
        return Runs(self.start, self.stop, self._hints)

    def _meet(self, other: IntervalMask, sign: str) -> None:
        a, b = self.shape, other.shape
        if a[2] != b[2] or any(x != y and 1 not in (x, y) for x, y in zip(a, b)):
            raise ValueError(f"mask {sign} mask needs shapes that broadcast and equal key lengths, got {a} and {b}")

    def to_dense(self, query_length: int) -> jax.Array:
        """bool ``(1|B, 1|Hkv|H, Lq, Lk)``, True = visible; query ``i`` stands at ``i + Lk - Lq``."""
        count = checks.whole(query_length, "query_length", 0)
        position = jnp.arange(self.key_length - count, self.key_length, dtype=jnp.int32)[:, None]
        return (self.start[:, :, None] <= position) & (position < self.stop[:, :, None])


# ---- the argument ``mask`` ------------------------------------------------------------------------------------------

_OneMask: TypeAlias = "IntervalMask | interval.IntervalMask | Array"
Mask: TypeAlias = "_OneMask | Sequence[_OneMask]"


def real_keys(padding: Any) -> jax.Array:
    """A padding mask as booleans; any integer but 0 is a real key."""
    real = as_array(padding, "padding")
    if real.dtype != jnp.bool_ and real.dtype.name not in checks.ZERO_ONE:
        raise TypeError(f"padding must be bool, or integers 1 (a real key) and 0, got {real.dtype}")
    if real.ndim != 2:
        raise ValueError(f"padding must have shape (1|B, Lk), got {real.shape}")
    return real if real.dtype == jnp.bool_ else real != 0


def key_mask(dense: jax.Array, key_length: int) -> IntervalMask:
    """A dense mask ``(1|B, 1|Hkv|H, 1, 1|Lk)``: each key is visible at every position or at none."""
    rows = jnp.broadcast_to(dense[:, :, 0], (*dense.shape[:2], key_length))
    start = jnp.full((1, 1, key_length), EVER, jnp.int32)
    return IntervalMask._make(start, jnp.where(rows, jnp.int32(NEVER), jnp.int32(EVER)), Hints("open"))


def intersect(masks: Sequence[Any], key_length: int, kv_heads: int,
              heads: int) -> tuple[IntervalMask | None, jax.Array | None]:
    """The intersection of checked masks as one IntervalMask or None, and one dense array of four axes or None."""
    found: IntervalMask | None = None
    dense: jax.Array | None = None
    for mask in masks:
        if not isinstance(mask, IntervalMask):
            array = mask.reshape((1, 1, *mask.shape)[-4:])
            if array.shape[2] != 1:
                dense = array if dense is None else jnp.logical_and(*_per_head((dense, array), kv_heads, heads))
                continue
            mask = key_mask(array, key_length)
        found = mask if found is None else _meeting(found, mask, kv_heads, heads)
    return found, dense


def _meeting(a: IntervalMask, b: IntervalMask, kv_heads: int, heads: int) -> IntervalMask:
    """``a & b``, where one may be per kv head and the other per query head."""
    start, stop, other_start, other_stop = _per_head((a.start, a.stop, b.start, b.stop), kv_heads, heads)
    return IntervalMask._make(start, stop, a._hints) & IntervalMask._make(other_start, other_stop, b._hints)


def _per_head(arrays: Sequence[jax.Array], kv_heads: int, heads: int) -> list[jax.Array]:
    """The arrays; if one is per query head, those per kv head are expanded to query heads."""
    if heads not in {x.shape[1] for x in arrays} or kv_heads in (1, heads):
        return list(arrays)
    return [jnp.repeat(x, heads // kv_heads, axis=1) if x.shape[1] == kv_heads else x for x in arrays]
