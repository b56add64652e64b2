"""Runs of positions: for every key the first position that sees it and the first later one that does not.

Two int32 arrays that broadcast to ``(B, H, Lk)``, and hints: what is known about them without reading their values.
This module defines how two masks combine; ``IntervalMask`` wraps it. Call within ``library.on(device)``.
"""
from __future__ import annotations

from typing import Any, NamedTuple

from cupy_dma.arrays import Device, Library, Operand, is_exported

EVER, NEVER = -(2**31), 2**31 - 1  # before every position, after every position
Bound = tuple[int, int]


class Hints(NamedTuple):
    """What is known about a mask without reading its values."""

    starts: str | None = None  # "key" if every start is j, "open" if every start is EVER
    bound: Bound | None = None  # (base, per_position): any T consecutive positions together see at most base +
    #                             per_position * (T - 1) keys
    causal_only: bool = False  # the mask equals plain causality


UNKNOWN = Hints()


class Runs(NamedTuple):
    """A mask's arrays and hints."""

    start: Any
    stop: Any
    hints: Hints = UNKNOWN


def covers(window: int, length: int) -> bool:
    """Whether a window holds all keys. False under ``torch.export``, where the length is unknown."""
    return not is_exported() and window >= length


def spread(library: Library, array: Any, name: str, shape: tuple[int, ...]) -> Operand:
    """The Operand of a run's array, viewed in the mask's full shape: stride 0 on axes that broadcast."""
    if len(array.shape) < 3:
        array = array[(None,) * (3 - len(array.shape))]
    seen = library.describe(array, name)
    (b, h, n), (batch, head, key) = seen.shape, seen.strides
    strides = (0 if b == 1 else batch, 0 if h == 1 else head, 0 if n == 1 else key)
    return Operand(name, array, library, shape, strides, "int32", seen.device, seen.pointer)


def gated(xp: Any, bias: Any, key: Any, never: Any, delay: int, threshold: Any, sinks: int) -> Any:
    """Stops of keys at positions ``key`` whose gates have the logarithms ``bias``; ``never``: an array of NEVER."""
    forgotten = key + delay if delay + key.shape[0] < NEVER else never
    closed = bias < threshold
    return xp.where(closed & (key >= min(sinks, NEVER)) if sinks else closed, forgotten, never)


def intersection(xp: Any, a: Runs, b: Runs) -> Runs:
    """Visible under both: the later start and the earlier stop."""
    kinds = {a.hints.starts, b.hints.starts}
    if None in kinds:
        start = xp.maximum(a.start, b.start)
    else:
        start = b.start if a.hints.starts == "open" else a.start
    starts = None if None in kinds else "key" if "key" in kinds else "open"
    bounds = [hints.bound for hints in (a.hints, b.hints) if hints.bound is not None]
    return Runs(start, xp.minimum(a.stop, b.stop),
                Hints(starts, min(bounds, default=None), a.hints.causal_only and b.hints.causal_only))


def union(xp: Any, a: Runs, b: Runs) -> Runs:
    """Visible under either. ValueError if some key has two separate runs; this reads the values, which synchronizes on
    CUDA, unless the hints rule it out."""
    bound = None
    if a.hints.bound is not None and b.hints.bound is not None:
        bound = a.hints.bound[0] + b.hints.bound[0], a.hints.bound[1] + b.hints.bound[1]
    if a.hints.starts is not None and a.hints.starts == b.hints.starts:
        return Runs(a.start, xp.maximum(a.stop, b.stop),
                    Hints(a.hints.starts, bound, a.hints.causal_only or b.hints.causal_only))
    no_a, no_b = a.stop <= a.start, b.stop <= b.start
    apart = ~no_a & ~no_b & ((a.start > b.stop) | (b.start > a.stop))
    if bool(apart.any()):
        raise ValueError("mask | mask needs runs that touch or overlap, but some key is visible in two separate runs, "
                         "which no interval can express; use dense masks, a.to_dense(n) | b.to_dense(n)")
    return Runs(xp.where(no_a, b.start, xp.where(no_b, a.start, xp.minimum(a.start, b.start))),
                xp.where(no_a, b.stop, xp.where(no_b, a.stop, xp.maximum(a.stop, b.stop))), Hints(bound=bound))


def equal(library: Library, device: Device, key_length: int, a: Runs, b: Runs) -> bool:
    """Whether both show the same keys at every position that a query can have (below ``Lk``)."""
    xp = library.xp
    end = library.full((1, 1, 1), key_length, "int32", device)
    a_stop, b_stop = xp.minimum(a.stop, end), xp.minimum(b.stop, end)
    same = ((a.start == b.start) & (a_stop == b_stop)) | ((a_stop <= a.start) & (b_stop <= b.start))
    return bool(same.all())
