"""Key scores, their gradients and the prefix selection in torch operations, for backends that compute with torch.

    dt = value @ dt_proj^T + dt_bias        state = A * softplus(dt)        score = exp(state), or state
    dstate = dscore * score, or dscore      ddt = dstate * A * sigmoid(dt)
    dA = sum dstate * softplus(dt)      ddt_bias = sum ddt      ddt_proj = ddt^T @ value      dvalue = ddt @ dt_proj

Selection: let ``t_p`` be the rank of the w-th best key among the candidates up to position ``p``. It only rises, so
``stop_j`` is the first ``p >= j`` with ``t_p`` above the rank of ``j``: one binary search a key. All ``t_p`` come at
once from a descent through the bits of the ranks (a wavelet matrix, one level in memory at a time): ``log2(Lk)`` rounds
of elementwise operations over ``(B, Hkv, Lk)``, the same on a CPU and on a GPU, in linear memory.

Also here: Operands as torch tensors, and tensors as arrays of the caller's library. Memory comes from torch's allocator
also where the caller's arrays are CuPy's. torch is imported when a function runs.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cupy_dma.arrays import CPU, Operand, library, numpy_dtype
from cupy_dma.masks import NEVER

# ---- arrays -------------------------------------------------------------------------------------------------------


def tensor(operand: Operand) -> Any:
    """The operand as a torch tensor of its (possibly extended) shape, without its autograd history; no copy. A run of
    an interval mask is a view with stride 0 where it broadcasts."""
    array = operand.array
    if operand.library.name == "torch":
        found = array.detach()
    elif operand.library.name == "numpy":
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):  # torch knows neither
            array = array.copy()
        found = library("torch").from_numpy(array, CPU)
    else:
        torch = library("torch").xp
        raw = {"bfloat16": np.int16, "bool": np.uint8}.get(operand.dtype)  # types that not every DLPack carries
        found = torch.from_dlpack(array if raw is None else array.view(raw))
        if raw is not None:
            found = found.view(getattr(torch, operand.dtype))
    return found.expand(operand.shape) if found.ndim == operand.ndim else found.reshape(operand.shape)


def deliver(result: Any, like: Operand) -> Any:
    """A tensor as an array of ``like``'s library; no copy."""
    result = result.detach()
    if like.library.name == "torch":
        return result
    if like.library.name == "numpy":
        return library("torch").to_numpy(result)
    if result.dtype == library("torch").xp.bfloat16:
        view = like.library.xp.from_dlpack(result.view(library("torch").xp.int16))
        return view.view(numpy_dtype("bfloat16"))
    return like.library.xp.from_dlpack(result)


def rounded(result: Any, like: Operand) -> Any:
    """A gradient of the shape, type and library of its argument."""
    return deliver(result.to(getattr(library("torch").xp, like.dtype)).reshape(like.shape), like)


@contextmanager
def on_stream_of(operand: Operand) -> Iterator[None]:
    """Work on the caller's device and on the stream that is current in the caller's library."""
    torch = library("torch").xp
    device = operand.device
    if device.kind == "cpu":
        yield
        return
    with torch.cuda.device(device.index):
        if operand.library.name == "torch":
            yield
            return
        handle = operand.library.stream(device)
        stream = torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            yield


@contextmanager
def _full_precision() -> Iterator[None]:
    """float32 matrix products without TF32, whatever the caller has set."""
    torch = library("torch").xp
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---- scores -------------------------------------------------------------------------------------------------------


def key_scores(value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None, form: str) -> Any:
    """Scores ``(B, Hkv, Lk)`` of ``value (B, Lk, Hkv, D)``; float32, or float64 if value is."""
    torch = library("torch").xp
    with on_stream_of(value), torch.no_grad(), _full_precision():
        rows, projection, a, offset = _widened(value, dt_proj, A, dt_bias)
        state = a * torch.logaddexp(rows @ projection.T + offset, rows.new_zeros(()))
        scores = torch.exp(state) if form == "exp" else state
        return deliver(scores.transpose(1, 2).contiguous(), value)


def key_scores_backward(dscores: Operand, value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None,
                        form: str, needs: frozenset[str], dvalue: Operand | None = None) -> tuple[Any, ...]:
    """``(dvalue, ddt_proj, dA, ddt_bias)``, None for what is not in ``needs``; see ``cupy_dma.backends``."""
    torch = library("torch").xp
    found: dict[str, Any] = {}
    with on_stream_of(value), torch.no_grad(), _full_precision():
        rows, projection, a, offset = _widened(value, dt_proj, A, dt_bias)
        dscore = tensor(dscores).transpose(1, 2)  # (B, Lk, Hkv)
        used, zero = dscore != 0, rows.new_zeros(())  # a key that nobody sees may hold NaN, and then so does its score
        dt = rows @ projection.T + offset
        softplus = torch.logaddexp(dt, zero)
        dstate = torch.where(used, dscore * torch.exp(a * softplus) if form == "exp" else dscore, zero)
        ddt = torch.where(used, dstate * a * torch.sigmoid(dt), zero)
        if "A" in needs:
            found["A"] = torch.where(used, dstate * softplus, zero).sum((0, 1))
        if "dt_bias" in needs:
            found["dt_bias"] = ddt.sum((0, 1))
        if "dt_proj" in needs:  # head by head: a NaN in a value reaches only the heads that use its score
            found["dt_proj"] = torch.stack([
                (ddt[..., g].unsqueeze(-2) @ torch.where(used[..., g, None], rows, zero)).sum((0, 1))
                for g in range(projection.shape[0])])
        if "value" in needs:
            found["value"] = (ddt @ projection).reshape(value.shape)
            if dvalue is not None:
                found["value"] += tensor(dvalue)
        likes = ("value", value), ("dt_proj", dt_proj), ("A", A), ("dt_bias", dt_bias)
        return tuple([rounded(found[name], like) if like is not None and name in found else None
                      for name, like in likes])


def _widened(value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None) -> tuple[Any, ...]:
    """``value (B, Lk, Hkv * D)``, ``dt_proj``, ``A`` and ``dt_bias`` (or 0) in the type of the computation."""
    torch = library("torch").xp
    wide = torch.float64 if value.dtype == "float64" else torch.float32
    batch, length, heads, size = value.shape
    rows, *rest = (None if x is None else tensor(x).to(wide) for x in (value, dt_proj, A, dt_bias))
    assert rows is not None
    return rows.reshape(batch, length, heads * size), *(rows.new_zeros(()) if x is None else x for x in rest)


# ---- selection ----------------------------------------------------------------------------------------------------


def prefix_stop(scores: Operand, window: int, padding: Operand | None, document: Operand | None) -> Any:
    """int32 ``(B, Hkv, Lk)``: the first position at which ``window`` better keys exist.

    ``padding`` bool ``(1|B, Lk)``, True = a real key; ``document`` int32 ``(1|B, Lk)``: first key of its document. The
    rank is ``(document, score, j)``, highest first. ``NEVER`` if that position does not exist, ``j`` if the key is
    hidden or at once outranked.
    """
    torch = library("torch").xp
    with on_stream_of(scores), torch.no_grad():
        batch, heads, length = scores.shape
        values = tensor(scores)
        position = torch.arange(length, device=values.device)
        if length == 0:
            return deliver(torch.empty(scores.shape, dtype=torch.int32, device=values.device), scores)
        group = None if document is None else tensor(document)[:, None]
        if padding is not None:
            real = tensor(padding)[:, None].expand(batch, heads, length)
            group = torch.where(real, 0 if group is None else group, -1)  # below every real key
        rank = _ranks(values, group)
        limit = _running_best(rank.reshape(-1, length), window).reshape(rank.shape)
        enough = (position + 1 if padding is None else real.cumsum(-1)) >= window
        limit = torch.where(enough, limit, -1)
        stop = torch.searchsorted(limit, rank, right=True)
        stop = torch.where(stop == length, NEVER, torch.maximum(stop, position))
        if padding is not None:
            stop = torch.where(real, stop, position)
        return deliver(stop.to(torch.int32), scores)


def _ranks(scores: Any, group: Any) -> Any:
    """int64 0, 1, ... of ``(group, score, j)`` in every row, lowest first: -0 equals +0, NaN is above everything."""
    torch = library("torch").xp
    bits = (scores + 0).view(torch.int64 if scores.dtype == torch.float64 else torch.int32)  # -0 + 0 is +0
    top = torch.iinfo(bits.dtype).max
    ordered = torch.where(bits < 0, bits ^ top, bits)
    by_rank = torch.where(torch.isnan(scores), top, ordered).argsort(dim=-1, stable=True)
    if group is not None:
        order = group.expand(scores.shape).gather(-1, by_rank).argsort(dim=-1, stable=True)
        by_rank = by_rank.gather(-1, order)
    places = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    return torch.empty_like(by_rank).scatter_(-1, by_rank, places)


def _running_best(rank: Any, window: int) -> Any:
    """int64 ``(rows, n)``: the ``window``-th largest of ``rank[:, :p + 1]``, which are different numbers below n.

    Of prefixes that are shorter than ``window`` the result has no meaning. Level by level from the highest bit, the
    numbers are kept in stable order of the bits above; a prefix is then one run ``[first, last)`` of them.
    """
    torch = library("torch").xp
    rows, n = rank.shape
    found = torch.zeros_like(rank)
    first = torch.zeros_like(rank)
    last = torch.arange(1, n + 1, device=rank.device).expand(rows, n).contiguous()
    wanted = torch.full_like(rank, window)  # the how many-th largest of the run
    sequence, before = rank, rank.new_zeros((rows, n + 1))  # before[x]: ones among the first x
    for level in reversed(range(max(1, (n - 1).bit_length()))):
        bit = (sequence >> level) & 1
        before[:, 1:] = bit.cumsum(-1)
        zeros = n - before[:, -1:]
        low, high = before.gather(-1, first), before.gather(-1, last)
        above = (high - low) >= wanted
        found |= above.to(rank.dtype) << level
        wanted = torch.where(above, wanted, wanted - (high - low))
        first = torch.where(above, zeros + low, first - low)
        last = torch.where(above, zeros + high, last - high)
        place = torch.where(bit == 1, zeros + before[:, :-1], torch.arange(n, device=rank.device) - before[:, :-1])
        sequence = torch.empty_like(sequence).scatter_(-1, place, sequence)
    return found
