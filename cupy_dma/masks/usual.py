"""The runs of the usual masks, from checked arguments. ``IntervalMask`` has a constructor for each, with its meaning.

All arrays are int32 and linear in the keys; ``like``, an array or None for NumPy, sets their library and device.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from cupy_dma import checks
from cupy_dma.arrays import CPU, Device, Library, Operand, describe, library_named
from cupy_dma.masks.runs import EVER, NEVER, Hints, Runs, covers


def library_and_device(like: Any) -> tuple[Library, Device]:
    """Those of the array ``like``; NumPy's without one."""
    if like is None:
        return library_named("numpy"), CPU
    operand = describe(like, "like")
    return operand.library, operand.device


def causal(key_length: int, like: Any) -> tuple[Library, Runs]:
    n = checks.whole(key_length, "key_length", 0)
    library, device = library_and_device(like)
    return library, Runs(library.arange(0, n, device), library.full((n,), NEVER, "int32", device),
                         Hints("key", causal_only=True))


def sliding_window(key_length: int, window: int, like: Any) -> tuple[Library, Runs]:
    n, w = checks.whole(key_length, "key_length", 0), checks.whole(window, "window", 1)
    library, device = library_and_device(like)
    with library.on(device):
        start = library.arange(0, n, device)
        stop = start + w if w + n < NEVER else library.full((n,), NEVER, "int32", device)
    return library, Runs(start, stop, Hints("key", (w, 1), covers(w, n)))


def sinks(key_length: int, count: int, like: Any) -> tuple[Library, Runs]:
    n, c = checks.whole(key_length, "key_length", 0), checks.whole(count, "count", 0)
    library, device = library_and_device(like)
    with library.on(device):
        start = library.arange(0, n, device)
        stop = library.xp.where(start < min(c, NEVER), library.full((n,), NEVER, "int32", device), start)
    return library, Runs(start, stop, Hints("key", (c, 0), covers(c, n)))


def prefix_lm(key_length: int, prefix_length: Any, like: Any) -> tuple[Library, Runs]:
    n = checks.whole(key_length, "key_length", 0)
    lengths = describe(prefix_length, "prefix_length") if getattr(prefix_length, "shape", ()) else None
    library, device = library_and_device(prefix_length if lengths and like is None else like)
    if lengths:
        checks.one_of_types(lengths, checks.INTEGERS)
        if lengths.ndim != 1:
            raise ValueError(f"prefix_length must be an int or have shape (B,), got shape {lengths.shape}")
        if (lengths.library.name, lengths.device) != (library.name, device):
            raise ValueError(f"prefix_length must be of like's library and device, {library.name} on {device}, got "
                             f"{lengths.library.name} on {lengths.device}")
        limit = lengths.array[:, None, None]
    else:
        limit = min(checks.whole(prefix_length, "prefix_length", 0), NEVER)
    with library.on(device):
        key = library.arange(0, n, device)
        start = library.xp.where(key[None, None] < limit, library.full((1, 1, n), EVER, "int32", device), key)
    return library, Runs(start, library.full((n,), NEVER, "int32", device))


def padding(padding: Any) -> tuple[Library, Runs]:
    real = checks.real_keys(describe(padding, "padding"))
    if real.ndim != 2:
        raise ValueError(f"padding must have shape (B, Lk), got {real.shape}")
    library, device, n = real.library, real.device, real.shape[1]
    with library.on(device):
        start = library.full((n,), EVER, "int32", device)
        stop = library.xp.where(real.array, library.full((n,), NEVER, "int32", device), start)
    return library, Runs(start, stop[:, None], Hints("open"))


def from_stop(stop: Any, window: int | None) -> tuple[Library, Runs]:
    given = describe(stop, "stop")
    checks.one_of_types(given, checks.INTEGERS)
    if not 1 <= given.ndim <= 3:
        raise ValueError(f"stop must have 1 to 3 axes (B, H, Lk), got shape {given.shape}")
    library, device, n = given.library, given.device, given.shape[-1]
    limit = None if window is None else checks.whole(window, "window", 1)
    with library.on(device):
        start = library.arange(0, n, device)
        end = given.array
        if given.dtype == "int64":  # a stop past every position is as good as the last int32
            bounds = library.full((1,), NEVER, "int32", device), library.full((1,), EVER, "int32", device)
            end = library.astype(library.xp.maximum(library.xp.minimum(end, bounds[0]), bounds[1]), "int32")
        end = checks.in_rows(library.operand(end, "stop")).array
        if limit is None:
            return library, Runs(start, end, Hints("key"))
        if checks.values_known(given):
            _check_window(library, library.operand(end, "stop"), limit)
    return library, Runs(start, end, Hints("key", (limit, 1)))


def _check_window(library: Library, stop: Operand, window: int) -> None:
    """ValueError if some position sees more than ``window`` of the keys that are visible until ``stop``."""
    n = stop.shape[-1]
    key = np.arange(n)
    for row in library.to_numpy(stop.array).reshape(-1, n) if n else ():
        gone = np.bincount(np.clip(row, key, n), minlength=n + 1)[:n]  # keys that end at each position
        seen = key + 1 - np.cumsum(gone)
        if seen.max() > window:
            raise ValueError(f"window must be at least the number of keys that any position sees, {seen.max()} at "
                             f"position {seen.argmax()}, got {window}")
