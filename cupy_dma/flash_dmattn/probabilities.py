"""The attention probabilities, for ``return_attn_probs``: ``p[i, j] = exp(s[i, j] - lse_i)`` at visible keys, else 0.

Dense, in the arrays' own library, in float32 (float64 for float64): to look at, not to compute with.
"""
from __future__ import annotations

from typing import Any

from cupy_dma.arrays import describe
from cupy_dma.masks.interval import IntervalMask


def probabilities(query: Any, key: Any, lse: Any, *, mask: Any, bias: Any, causal: bool, scale: float | None,
                  softcap: float) -> Any:
    """(B, H, Lq, Lk) of query's type, of a call that returned ``lse (B, H, Lq)``. It has no gradient."""
    q, k = describe(query, "query"), describe(key, "key")
    library, xp = q.library, q.library.xp
    batch, length, heads, size = q.shape
    keys, groups = k.shape[1:3]
    kind = "float64" if q.dtype == "float64" else "float32"

    def plain(array: Any) -> Any:
        array = describe(array, "array").array
        return array.detach() if library.name == "torch" else array

    def grouped(array: Any) -> Any:
        """(1|B, 1|Hkv|H, Lq, Lk) as (1|B, 1|Hkv, 1|G, Lq, Lk)."""
        array = array[:, :, None] if len(array.shape) == 3 else array
        per_group = array.shape[1] // groups if array.shape[1] > groups else 1
        return array.reshape(array.shape[0], array.shape[1] // per_group, per_group, *array.shape[2:])

    with library.on(q.device):
        rows = library.astype(plain(query), kind).reshape(batch, length, groups, heads // groups, size)
        columns = library.astype(plain(key), kind)
        s = xp.matmul(rows.swapaxes(1, 2).swapaxes(2, 3), columns.swapaxes(1, 2).swapaxes(2, 3)[:, :, None])
        s = s * (size**-0.5 if scale is None else scale)
        if softcap:
            s = softcap * xp.tanh(s / softcap)
        if bias is not None:
            s = s + grouped(library.astype(plain(bias), kind))
        total = grouped(plain(lse)[..., None])
        seen = total > -float("inf")
        for part in mask if isinstance(mask, (tuple, list)) else (mask,):
            if part is not None:
                seen = seen & grouped(plain(part.to_dense(length) if isinstance(part, IntervalMask) else part))
        if causal:
            position = library.arange(keys - length, keys, q.device)
            seen = seen & (library.arange(0, keys, q.device) <= position[:, None])
        seen = xp.broadcast_to(seen, s.shape)
        p = xp.exp(xp.where(seen, s - total, s * 0))
        return library.export(library.astype(xp.where(seen, p, p * 0), q.dtype).reshape(batch, heads, length, keys))
