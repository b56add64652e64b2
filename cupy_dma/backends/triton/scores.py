"""Key scores and their gradients (SPEC sections 2 and 6) in torch operations, some thousand keys at a time.

    dt = value @ dt_proj^T + dt_bias        state = A * softplus(dt)        score = exp(state), or state
    dstate = dscore * score, or dscore      ddt = dstate * A * sigmoid(dt)
    dA = sum dstate * softplus(dt)      ddt_bias = sum ddt      ddt_proj = ddt^T @ value      dvalue = ddt @ dt_proj

Products and sums are made in float64, so that no setting of TF32 reaches them; there are few of them. A key whose score
has no gradient may hold NaN or infinity: it reaches nothing.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cupy_dma.arrays import Operand
from cupy_dma.backends.triton.arrays import delivered, on_stream_of, tensor

SCORE_CHUNK = 8192  # keys whose values are widened at a time


def _spans(batch: int, length: int) -> Iterator[tuple[int, slice]]:
    for b in range(batch):
        for begin in range(0, length, SCORE_CHUNK):
            yield b, slice(begin, begin + SCORE_CHUNK)


def _wide(operand: Operand | None) -> Any:
    return 0.0 if operand is None else tensor(operand).double()


def key_scores(value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None, form: str) -> Any:
    """Scores ``(B, Hkv, Lk)`` of ``value (B, Lk, Hkv, D)``; float32, or float64 if value is."""
    batch, length, heads, size = value.shape
    with on_stream_of(value):
        values, projection, a, offset = tensor(value), _wide(dt_proj), _wide(A), _wide(dt_bias)
        kind = torch.float64 if value.dtype == "float64" else torch.float32
        scores = torch.empty((batch, heads, length), dtype=kind, device=values.device)
        for b, span in _spans(batch, length):
            dt = values[b, span].double().reshape(-1, heads * size) @ projection.T + offset
            state = a * _softplus(dt)
            scores[b, :, span] = (state.exp() if form == "exp" else state).T
        return delivered(scores, value)


def key_scores_backward(dscores: Operand, value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None,
                        form: str, needs: frozenset[str], dvalue: Operand | None = None) -> tuple[Any, ...]:
    """``(dvalue, ddt_proj, dA, ddt_bias)``, None for what is not in ``needs``; see ``cupy_dma.backends``."""
    batch, length, heads, size = value.shape
    with on_stream_of(value):
        values, projection, a, offset = tensor(value), _wide(dt_proj), _wide(A), _wide(dt_bias)
        upstream, added = tensor(dscores), None if dvalue is None else tensor(dvalue)
        dv = torch.empty(value.shape, dtype=values.dtype, device=values.device) if "value" in needs else None
        d_projection, da, d_offset = torch.zeros_like(projection), torch.zeros_like(a), torch.zeros_like(a)
        for b, span in _spans(batch, length):
            rows = values[b, span].double().reshape(-1, heads * size)
            dt = rows @ projection.T + offset
            softplus = _softplus(dt)
            dscore = upstream[b, :, span].T.double()  # (keys, Hkv)
            used = dscore != 0  # a key that nobody sees may hold NaN, and then so does its score
            dstate = torch.where(used, dscore * (a * softplus).exp() if form == "exp" else dscore, 0.0)
            ddt = torch.where(used, dstate * a * torch.sigmoid(dt), 0.0)
            da += torch.where(used, dstate * softplus, 0.0).sum(0)
            d_offset += ddt.sum(0)
            if "dt_proj" in needs:
                bad = ~torch.isfinite(rows)
                spoiled = used.T.double() @ bad.double() > 0
                clean = ddt.T @ torch.where(bad, 0.0, rows)
                d_projection += torch.where(spoiled, torch.nan, clean)
            if dv is not None:
                part = (ddt @ projection).reshape(-1, heads, size)
                dv[b, span] = (part if added is None else part + added[b, span].double()).to(dv.dtype)
        found = (("value", dv, value), ("dt_proj", d_projection, dt_proj), ("A", da, A), ("dt_bias", d_offset, dt_bias))
        return tuple([delivered(x.to(tensor(like).dtype), like) if name in needs and x is not None and like is not None
                      else None for name, x, like in found])


def _softplus(dt: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(dt, torch.zeros_like(dt))
