"""Key scores, their gradients and the prefix selection in torch operations, for backends that compute with torch.

    dt = value @ dt_proj^T + dt_bias        state = A * softplus(dt)        score = exp(state), or state
    dstate = dscore * score, or dscore      ddt = dstate * A * sigmoid(dt)
    dA = sum dstate * softplus(dt)      ddt_bias = sum ddt      ddt_proj = ddt^T @ value      dvalue = ddt @ dt_proj

A few thousand keys at a time. Matrix products are computed in float64, so that torch's TF32 settings do not affect
them; they are small. A NaN or infinity in a key whose score has no gradient propagates to nothing.

Selection: let r_j be the rank of key j among all keys in the order (document, score, j), lowest first, with padding
below all other keys, and T_p the w-th highest rank among the keys 0 .. p (-1 while there are fewer). T never decreases,
and key j is kept at p >= j iff T_p <= r_j. So stop_j = max(j, first p with T_p > r_j), a binary search in T. All T_p
are found together by descending through the bits of the ranks (a wavelet matrix, one level in memory at a time):
log2(Lk) rounds of elementwise operations over (B, Hkv, Lk), the same on CPU and GPU, in linear memory.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from cupy_dma.arrays import Operand
from cupy_dma.backends.torch_common.arrays import delivered, on_stream_of, rounded, shaped, tensor
from cupy_dma.masks.interval import NEVER
from cupy_dma.masks.windows import Window, clipped

SCORE_CHUNK = 8192  # keys whose values are converted at a time


# ---- scores -------------------------------------------------------------------------------------------------------


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
            used = dscore != 0  # a key that no query sees may hold NaN, as may its score
            dstate = torch.where(used, dscore * (a * softplus).exp() if form == "exp" else dscore, 0.0)
            ddt = torch.where(used, dstate * a * torch.sigmoid(dt), 0.0)
            da += torch.where(used, dstate * softplus, 0.0).sum(0)
            d_offset += ddt.sum(0)
            if "dt_proj" in needs:
                nonfinite = ~torch.isfinite(rows)
                is_nan = used.T.double() @ nonfinite.double() > 0
                clean = ddt.T @ torch.where(nonfinite, 0.0, rows)
                d_projection += torch.where(is_nan, torch.nan, clean)
            if dv is not None:
                through_scores = (ddt @ projection).reshape(-1, heads, size)
                total = through_scores if added is None else through_scores + added[b, span].double()
                dv[b, span] = total.to(dv.dtype)
        found = (("value", dv, value), ("dt_proj", d_projection, dt_proj), ("A", da, A), ("dt_bias", d_offset, dt_bias))
        return tuple([rounded(x, like) if name in needs and x is not None and like is not None else None
                      for name, x, like in found])


def _softplus(dt: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(dt, torch.zeros_like(dt))


# ---- selection ----------------------------------------------------------------------------------------------------


def running_best(rank: torch.Tensor, window: int) -> torch.Tensor:
    """int32 ``(rows, n)``: T, the ``window``-th highest rank of every prefix of ``rank``, a permutation of 0 .. n - 1;
    -1 where the prefix is shorter than that.

    Level by level from the highest bit, the ranks are kept stably sorted by the bits above; those of a prefix that can
    still be T are then one run ``[first, last)``.
    """
    rows, n = rank.shape
    sequence = rank.long()
    found, first = torch.zeros_like(sequence), torch.zeros_like(sequence)
    index = torch.arange(n, device=rank.device)
    last = (index + 1).repeat(rows, 1)
    wanted = torch.full_like(sequence, window)  # T is the wanted-th highest of the run
    before = sequence.new_zeros((rows, n + 1))  # before[x]: ones among the first x
    for level in reversed(range(max(1, (n - 1).bit_length()))):
        bit = (sequence >> level) & 1
        before[:, 1:] = bit.cumsum(-1)
        zeros = n - before[:, -1:]
        low, high = before.gather(-1, first), before.gather(-1, last)
        above = (high - low) >= wanted
        found |= above.long() << level
        wanted = torch.where(above, wanted, wanted - (high - low))
        first = torch.where(above, zeros + low, first - low)
        last = torch.where(above, zeros + high, last - high)
        target = torch.where(bit == 1, zeros + before[:, :-1], index - before[:, :-1])
        sequence = torch.empty_like(sequence).scatter_(-1, target, sequence)
    found[:, :window - 1] = -1
    return found.int()


def prefix_stop(scores: Operand, window: Window, padding: Operand | None, document: Operand | None,
                best: Callable[[torch.Tensor, int], torch.Tensor] = running_best) -> Any:
    """int32 ``(B, Hkv, Lk)``: the first position at which ``window`` better keys exist; see ``cupy_dma.backends``.

    ``best``: a function equivalent to ``running_best``.
    """
    with on_stream_of(scores):
        values = tensor(scores)
        batch, heads, n = values.shape
        hidden, group = (None if x is None else shaped(x)[:, None].expand(batch, heads, n)
                         for x in (padding, document))
        if values.numel() == 0:
            return delivered(values.new_empty(values.shape, dtype=torch.int32), scores)
        hidden = None if hidden is None else ~hidden
        rank, window = _ranks(values, hidden, group), clipped(window, n)
        if isinstance(window, tuple):
            limit = torch.stack([best(rank[:, h].contiguous(), size) for h, size in enumerate(window)], 1)
        else:
            limit = best(rank.reshape(-1, n), window)
        rank, limit = rank.reshape(-1, n), limit.reshape(-1, n)
        stop = torch.searchsorted(limit, rank, right=True, out_int32=True).view(batch, heads, n)
        key = torch.arange(n, dtype=torch.int32, device=values.device)
        stop = torch.where(stop < n, torch.maximum(stop, key), NEVER)
        return delivered(stop if hidden is None else torch.where(hidden, key, stop), scores)


def _ordered(scores: torch.Tensor) -> torch.Tensor:
    """Signed integers that sort like the scores: -0 equals +0, and all NaN are equal and above everything."""
    wide = scores.dtype == torch.float64
    kind = torch.int64 if wide else torch.int32
    bits = (scores + 0.0).contiguous().view(kind)  # -0 + 0 is +0
    ordered = torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits)
    return torch.where(torch.isnan(scores), torch.iinfo(kind).max, ordered)


def _ranks(scores: torch.Tensor, hidden: torch.Tensor | None, group: torch.Tensor | None) -> torch.Tensor:
    """int32: the rank of every key in the order (document, score, j), padding first."""
    order = _ordered(scores).sort(dim=-1, stable=True).indices  # of equal scores the newest ranks highest
    if hidden is not None or group is not None:
        first = torch.zeros_like(order) if group is None else group.long()
        first = first if hidden is None else torch.where(hidden, -1, first)
        order = order.gather(-1, first.gather(-1, order).sort(dim=-1, stable=True).indices)
    n = order.shape[-1]
    index = torch.arange(n, dtype=torch.int32, device=order.device).expand(order.shape)
    return torch.empty_like(index, memory_format=torch.contiguous_format).scatter_(-1, order, index)
