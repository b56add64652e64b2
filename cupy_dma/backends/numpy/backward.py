"""Gradients of attention over the same gathered keys (SPEC section 6; formulas in ``cupy_dma.backward``).

Tile by tile, the probabilities of a chunk of keys are recomputed from ``lse`` and every gradient is accumulated. The
gradients of key, value and bias have float32 (float64) accumulators of full size, rounded once at the end.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from cupy_dma.backends.numpy.host import host, rounded, widened
from cupy_dma.backends.numpy.tiles import (
    Row,
    Scratch,
    Tile,
    chunks,
    entry,
    for_each_tile,
    hide,
    logits,
    nonfinite_rows,
    weighted_sum,
    with_columns,
)
from cupy_dma.calls.types import AttentionBackwardCall


def attention_backward(call: AttentionBackwardCall) -> tuple[Any, Any, Any, Any]:
    """``(dquery, dkey, dvalue, dbias)``, None for what is not in ``call.needs``; see ``cupy_dma.backends``."""
    forward = call.forward
    arguments = {"query": forward.query, "key": forward.key, "value": forward.value, "bias": forward.bias}
    total, bias = _Accumulators(call), forward.bias
    for_each_tile(forward, total.add, alone="bias" in call.needs and bias is not None and (
        bias.shape[0] < forward.batch or bias.shape[1] < forward.kv_heads))
    with np.errstate(all="ignore"):
        dq, dk, dv, dbias = (rounded(total.found[name], operand) if name in call.needs and operand is not None else None
                             for name, operand in arguments.items())
    return dq, dk, dv, dbias


class _Accumulators:
    """Running sums of the gradients."""

    def __init__(self, call: AttentionBackwardCall):
        forward = call.forward
        self.call, self.kind = call, widened(forward.query.dtype).type
        self.query, self.dout, self.out, self.lse = (host(x) for x in (forward.query, call.dout, call.out, call.lse))
        self.dlse = None if call.dlse is None else host(call.dlse)
        shapes = {"query": forward.query.shape, "key": forward.key.shape, "value": forward.value.shape,
                  "bias": () if forward.bias is None else forward.bias.shape}
        self.found = {name: np.zeros(shapes[name], self.kind) for name in call.needs}

    def add(self, row: Row, tile: Tile, for_p: Scratch, for_ds: Scratch) -> None:
        """Add the contributions of one tile's queries."""
        call, kind, found, b = self.call.forward, self.kind, self.found, row.batch
        here, there = (b, slice(tile.begin, tile.end), row.heads), (b, row.heads, slice(tile.begin, tile.end))
        lse = self.lse[there]
        alive = (lse != -np.inf)[..., None]  # a row with no visible keys contributes nothing, even if it holds NaN
        q, do, out = (x[here].swapaxes(0, 1).astype(kind, order="C")
                      for x in (self.query, self.dout, self.out))
        shift = lse[..., None].astype(kind)
        delta = (do * out).sum(axis=2, keepdims=True)
        if self.dlse is not None:
            delta -= self.dlse[there][..., None]
        some_dead = not alive.all()
        if some_dead:
            for x in (q, do, shift, delta):
                hide(x, alive)
        q *= kind(call.scale)
        dq = np.zeros(q.shape, kind)
        nonfinite_q, nonfinite_do = (nonfinite_rows(x).reshape(-1) for x in (q, do))
        q, do = with_columns(q, 1, -shift[..., 0]), with_columns(do, -delta[..., 0])
        bias_of_keys = "bias" in found and row.bias is None  # summed by the product that computes the keys' gradient
        for keys, full in chunks(tile):
            s, visible, tanh = logits(q, row, tile, keys, full, call.softcap, for_p)
            p = np.exp(s, out=s)
            if visible is not None:
                hide(p, visible)  # lse may be NaN
            if "value" in found:
                found["value"][b, keys, row.kv_head] += _transposed_sum(p, do[..., :-1], nonfinite_do, visible)
            if found.keys() == {"value"}:
                continue
            ds = for_ds.product(do, row.keys.v[keys])  # dp - delta
            ds *= p
            if visible is not None:
                hide(ds, visible)
            if some_dead:
                hide(ds, alive)
            if "bias" in found and not bias_of_keys:
                far = row.far(tile, keys)
                counted = ds if far is None else np.where(far, ds, kind(0))
                _add_bias(entry(found["bias"], row, call), counted, tile, keys)
            if tanh is not None:
                ds = np.where(ds == 0, kind(0), ds * (1 - tanh * tanh))  # an invisible logit may be NaN
            if "query" in found:
                dq += weighted_sum(ds, row.keys.k[keys, :-2], row.keys.nonfinite_k[keys], visible)
            if "key" in found or bias_of_keys:
                added = _transposed_sum(ds, q[..., :-1], nonfinite_q, visible)
                if "key" in found:
                    found["key"][b, keys, row.kv_head] += added[:, :-1]
                if bias_of_keys:
                    _add_bias(entry(found["bias"], row, call), added[None, None, :, -1], tile, keys)
        if "query" in found:
            found["query"][here] = dq.swapaxes(0, 1) * kind(call.scale)


def _transposed_sum(weights: np.ndarray, rows: np.ndarray, nonfinite: np.ndarray,
                    visible: np.ndarray | None) -> np.ndarray:
    """``(keys, D)``: the sum over heads and queries of ``weights (heads, queries, keys)`` times ``rows (..., D)``."""
    flat = weights.reshape(-1, weights.shape[2]).T
    sees = None if visible is None or not nonfinite.any() else np.tile(visible, (weights.shape[0], 1)).T
    return weighted_sum(flat[None], rows.reshape(-1, rows.shape[2]), nonfinite, sees)[0]


def _add_bias(target: np.ndarray, ds: np.ndarray, tile: Tile, keys: np.ndarray) -> None:
    """Add ``ds (heads, queries, keys)`` to the gradient ``(1|Lq, 1|Lk)`` of a bias that these heads share."""
    added = ds.sum(axis=0)
    if target.shape[0] == 1:
        added = added.sum(axis=0, keepdims=True)
    else:
        target = target[tile.begin:tile.end]
    if target.shape[1] == 1:
        target += added.sum(axis=1, keepdims=True)
    else:
        target[:, keys] += added
