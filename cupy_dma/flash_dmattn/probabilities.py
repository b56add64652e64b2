"""The attention probabilities, for ``return_attn_probs``: ``p[i, j] = exp(s[i, j] - lse_i)`` at visible keys, else 0.

Dense, in the arrays' own library, in float32 (float64 for float64): for inspection, not for computing with.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from cupy_dma.arrays import describe
from cupy_dma.calls.mask import masks_in
from cupy_dma.masks.interval import IntervalMask


def probabilities(query: Any, key: Any, lse: Any, *, mask: Any, bias: Any, causal: bool, scale: float | None,
                  softcap: float) -> Any:
    """The probabilities (B, H, Lq, Lk), in query's type, of a call that returned ``lse (B, H, Lq)``. No gradient."""
    q, k = describe(query, "query"), describe(key, "key")
    library, xp = q.library, q.library.xp
    batch, length, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    kind = "float64" if q.dtype == "float64" else "float32"

    def plain(array: Any) -> Any:
        array = describe(array, "array").array
        return array.detach() if library.name == "torch" else array

    def by_group(array: Any) -> Any:
        """(1|B, 1|Hkv|H, Lq, Lk) as (1|B, 1|Hkv, 1|G, Lq, Lk)."""
        array = array[:, :, None] if len(array.shape) == 3 else array
        per_group = array.shape[1] // kv_heads if array.shape[1] > kv_heads else 1
        return array.reshape(array.shape[0], array.shape[1] // per_group, per_group, *array.shape[2:])

    with library.on(q.device), np.errstate(all="ignore"):
        nothing = library.full((1,), 0, kind, q.device)  # x * 0 is NaN where x is not finite
        rows = library.astype(plain(query), kind).reshape(batch, length, kv_heads, heads // kv_heads, size)
        columns = library.astype(plain(key), kind)
        s = xp.matmul(rows.swapaxes(1, 2).swapaxes(2, 3), columns.swapaxes(1, 2).swapaxes(2, 3)[:, :, None])
        s = s * (size**-0.5 if scale is None else scale)
        if softcap:
            s = softcap * xp.tanh(s / softcap)
        if bias is not None:
            s = s + by_group(library.astype(plain(bias), kind))
        total = by_group(plain(lse)[..., None])
        seen = total != -float("inf")
        for item in masks_in(mask):
            seen = seen & by_group(plain(item.to_dense(length) if isinstance(item, IntervalMask) else item))
        if causal:
            position = library.arange(keys - length, keys, q.device)
            seen = seen & (library.arange(0, keys, q.device) <= position[:, None])
        seen = xp.broadcast_to(seen, s.shape)
        p = xp.where(seen, xp.exp(s - total), nothing)
        return library.export(library.astype(p, q.dtype).reshape(batch, heads, length, keys))
