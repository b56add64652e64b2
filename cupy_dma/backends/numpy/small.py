"""Attention of short sequences: batch entries and kv heads in the same NumPy operations.

With up to 128 queries and keys or so, the operations on a tile take less time than the interpreter between them. Here
one operation takes ``BLOCK`` logits, of all batch entries and kv heads whose logits are small (forward.py); those of
others, and calls with a dense mask or bias, a softcap or a delay, are left to tiles. Which way a row goes depends only
on its own queries and the keys that they see.
"""
from __future__ import annotations

import itertools

import numpy as np

from cupy_dma.arrays import describe
from cupy_dma.backends.numpy.host import host, widened
from cupy_dma.backends.numpy.threads import one_blas_thread
from cupy_dma.backends.numpy.tiles import are_small, hide, normalized, norms, with_columns
from cupy_dma.calls.types import AttentionCall

MOST = 1 << 15  # logits of a batch entry and kv head
BLOCK = 1 << 18  # logits at a time, which caches hold


def serves(call: AttentionCall) -> bool:
    """Whether to try ``attend``."""
    logits = call.query_length * call.key_length * (call.heads // call.kv_heads)
    plain = call.dense is None and call.softcap == 0 and call.bias_delay == 0
    per_key = call.bias is None or call.bias.shape[2] == 1
    shared = all(x is None or x.shape[1] in (1, call.kv_heads) for x in (call.mask, call.bias))
    return 0 < logits <= MOST and call.batch * call.kv_heads > 1 and plain and per_key and shared


def attend(call: AttentionCall, out: np.ndarray, lse: np.ndarray) -> list[tuple[int, int]]:
    """Write ``out`` and ``lse`` for rows with small logits; returns the (batch entry, kv head) pairs that remain."""
    kind, group, own = widened(call.query.dtype), call.heads // call.kv_heads, (call.batch, call.kv_heads)
    with np.errstate(all="ignore"), one_blas_thread():
        q = host(call.query).reshape(call.batch, call.query_length, call.kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
        q = q.astype(kind) * kind.type(call.scale)
        k, v = (host(x).swapaxes(1, 2).astype(kind) for x in (call.key, call.value))
        bias = np.zeros((1, 1, 1), kind) if call.bias is None else host(call.bias)[:, :, 0].astype(kind)
        visible = np.broadcast_to(_visible(call, bias), (*own, call.query_length, call.key_length))
        seen = visible.any(axis=2)
        sizes = [np.where(seen, x, 0).max(axis=-1) for x in (norms(k), np.abs(bias), norms(v))]
        of_queries = norms(q)
        small = are_small(of_queries.max(axis=(2, 3)), *sizes)
        if not small.all():  # what queries that see nothing hold must change nothing
            see = np.logical_or.reduce(visible, axis=3)[:, :, None]
            small = are_small(np.where(see, of_queries, 0).max(axis=(2, 3)), *sizes)
        k, v = with_columns(k, bias), with_columns(v, 1)
        k[~seen], v[~seen] = 0, 0
        q = with_columns(q, 1).reshape(*own, -1, k.shape[-1])

        outs = out.reshape(call.batch, call.query_length, *own[1:], group, -1).transpose(0, 2, 3, 1, 4)
        lses = lse.reshape(*own, group, -1)
        pairs, size = np.argwhere(small), max(1, BLOCK // (q.shape[2] * k.shape[2]))
        for first in range(0, len(pairs), size):
            rows = tuple(pairs[first:first + size].T)
            s = q[rows] @ k[rows].swapaxes(1, 2)
            p = np.exp(s, out=s)
            hide(p.reshape(len(p), group, *visible.shape[2:]), visible[rows][:, None])
            found = normalized((p @ v[rows]).reshape(len(p), group, call.query_length, -1), kind.type(0))
            outs[rows], lses[rows] = found
    return [pair for pair in itertools.product(range(own[0]), range(own[1])) if not small[pair]]


def _visible(call: AttentionCall, bias: np.ndarray) -> np.ndarray:
    """The visible pairs, bool ``(1|B, 1|Hkv, Lq, Lk)``."""
    seen = ~np.isneginf(bias)[:, :, None]
    if call.mask is not None:
        seen = seen & host(describe(call.mask.to_dense(call.query_length), "mask"))
    if call.causal:
        n = call.key_length
        seen = seen & (np.arange(n) <= np.arange(n - call.query_length, n)[:, None])
    return seen
