"""Key scores and their gradients (SPEC sections 2 and 6), a few thousand keys at a time.

    dt = value @ dt_proj^T + dt_bias        state = A * softplus(dt)        score = exp(state), or state
    dstate = dscore * score, or dscore      ddt = dstate * A * sigmoid(dt)
    dA = sum dstate * softplus(dt)      ddt_bias = sum ddt      ddt_proj = ddt^T @ value      dvalue = ddt @ dt_proj

The products of scores are summed in float64 and then rounded. BLAS orders a sum by the shapes of the call, but equal
values must get equal scores in a long call and in a call of a single key, or ties break differently in decoding.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from cupy_dma.arrays import Operand, numpy_dtype
from cupy_dma.backends.numpy.host import deliver, host, rounded, widened
from cupy_dma.backends.numpy.threads import one_blas_thread
from cupy_dma.backends.numpy.tiles import weighted_sum

SCORE_CHUNK = 4096  # keys whose values are converted at a time


def key_scores(value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None, form: str) -> Any:
    """Scores ``(B, Hkv, Lk)`` of ``value (B, Lk, Hkv, D)``; float32, or float64 if value is."""
    kind = widened(value.dtype)
    values, projection, a = host(value), host(dt_proj).astype(np.float64).T, host(A).astype(kind)
    offset = 0 if dt_bias is None else host(dt_bias).astype(np.float64)
    batch, length, heads, size = value.shape
    scores = np.empty((batch, heads, length), kind)
    with np.errstate(all="ignore"), one_blas_thread():
        for b in range(batch):
            for begin in range(0, length, SCORE_CHUNK):
                rows = values[b, begin:begin + SCORE_CHUNK].astype(np.float64).reshape(-1, heads * size)
                state = a * np.logaddexp(0, (rows @ projection + offset).astype(kind))
                scores[b, :, begin:begin + SCORE_CHUNK] = (np.exp(state) if form == "exp" else state).T
    return deliver(scores, value)


def key_scores_backward(dscores: Operand, value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None,
                        form: str, needs: frozenset[str], dvalue: Operand | None = None) -> tuple[Any, ...]:
    """``(dvalue, ddt_proj, dA, ddt_bias)``, None for what is not in ``needs``; see ``cupy_dma.backends``."""
    kind = widened(value.dtype)
    values, projection, a = host(value), host(dt_proj).astype(kind), host(A).astype(kind)
    offset = kind.type(0) if dt_bias is None else host(dt_bias).astype(kind)
    upstream, added = host(dscores), None if dvalue is None else host(dvalue)
    batch, length, heads, size = value.shape
    dv = np.zeros(value.shape, numpy_dtype(value.dtype)) if "value" in needs else None
    d_projection, da, d_offset = (np.zeros(x.shape, kind) for x in (projection, a, a))
    with np.errstate(all="ignore"), one_blas_thread():
        for b in range(batch):
            for begin in range(0, length, SCORE_CHUNK):
                span = slice(begin, begin + SCORE_CHUNK)
                rows = values[b, span].astype(kind).reshape(-1, heads * size)
                dt = rows @ projection.T + offset
                softplus = np.logaddexp(0, dt).astype(kind)
                dscore = upstream[b, :, span].T  # (keys, Hkv)
                used = dscore != 0  # a key that no query sees may hold NaN, as may its score
                dstate = np.where(used, dscore * np.exp(a * softplus) if form == "exp" else dscore, kind.type(0))
                ddt = np.where(used, dstate * a / (1 + np.exp(-dt)), kind.type(0))
                da += np.where(used, dstate * softplus, kind.type(0)).sum(axis=0)
                d_offset += ddt.sum(axis=0)
                if "dt_proj" in needs:
                    d_projection += weighted_sum(ddt.T[None], rows, ~np.isfinite(rows).all(axis=1), used.T)[0]
                if dv is not None:
                    through_scores = (ddt @ projection).reshape(-1, heads, size)
                    dv[b, span] = through_scores if added is None else through_scores + added[b, span].astype(kind)
    found = (("value", dv, value), ("dt_proj", d_projection, dt_proj), ("A", da, A), ("dt_bias", d_offset, dt_bias))
    return tuple([rounded(x, like) if name in needs and like is not None else None for name, x, like in found])
