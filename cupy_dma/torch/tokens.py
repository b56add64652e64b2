"""The tokens of one call of a self-attention layer (padded, packed or appended to a cache) and their positions."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cupy_dma import checks
from cupy_dma.arrays import describe
from cupy_dma.cache import DynamicCache


@dataclass(slots=True, eq=False)
class Tokens:
    """The input of a layer. Padding is all zeros; with a cache, real tokens come first in each row."""

    x: Tensor  # (B, N, width), or packed (total, width)
    positions: Tensor  # int64 (N,), (B, N) or (total,)
    padding: Tensor | None = None  # bool (B, N), True = a real token; None with a cache
    lengths: Tensor | None = None  # int64 (B,), with padding and a cache: how many real tokens each row begins with
    cu_seqlens: Tensor | None = None  # (B + 1,)
    documents: Tensor | None = None  # (1|B, N), of a shard
    real: Tensor | None = None  # bool (B, N): the caller's padding
    place: Tensor | None = None  # int64 (B, N): where the caller's tokens are in x, if they were moved
    batch_first: bool = True

    @classmethod
    def of(cls, x: Tensor, width: int, batch_first: bool, padding: Any, cu_seqlens: Any, positions: Any,
           cache: Any) -> Tokens:
        """The checked arguments of ``DynamicMaskSelfAttention.forward``. Raises what it documents."""
        _check_x(x, width, batch_first, cu_seqlens)
        if cache is not None and not isinstance(cache, DynamicCache):
            raise TypeError(f"cache must be a DynamicCache, as make_cache makes it, got {type(cache).__name__}")
        if cu_seqlens is not None:
            if padding is not None:
                raise ValueError("give either padding (for padded rows) or cu_seqlens (for packed rows), got both")
            bounds = bounds_of(cu_seqlens, x)
            return cls(x, _given(positions, x) if positions is not None else packed_positions(x, bounds, cache),
                       cu_seqlens=bounds)
        if not batch_first:
            x = x.transpose(0, 1)
        if cache is not None and cache.batch != x.shape[0]:
            raise ValueError(f"cache must be for x's batch of {x.shape[0]}, got one made for a batch of {cache.batch}")
        found = cls(x, torch.arange(x.shape[1], device=x.device), batch_first=batch_first)
        if padding is not None:
            found._pad(_real(padding, x))
        if positions is not None:
            found.positions = _given(positions, x)
        elif cache is not None:
            found.positions = found.positions + lengths_of(cache, x)[:, None]
        if padding is not None and cache is not None:
            found._real_first()
        return found

    def restored(self, out: Tensor) -> Tensor:
        """The layer's ``out`` in the caller's layout and token order, 0 at padding."""
        if self.place is not None:
            out = taken(out, self.place)
        if self.real is not None:
            out = out.masked_fill(~self.real[..., None], 0)
        return out if self.batch_first else out.transpose(0, 1)

    def _pad(self, real: Tensor) -> None:
        self.real = self.padding = real
        self.x = self.x.masked_fill(~real[..., None], 0)
        self.positions = (real.long().cumsum(1) - 1).clamp(min=0)

    def _real_first(self) -> None:
        """Move each row's real tokens to its front, as a cache expects them."""
        assert self.real is not None
        order = real_first(self.real)
        self.x, self.place = taken(self.x, order), order.argsort(1)
        self.positions = self.positions.expand_as(order).gather(1, order)
        self.padding, self.lengths = None, self.real.sum(1)


def real_first(real: Tensor) -> Tensor:
    """The order ``(B, N)`` that puts the real tokens of each row first, in their own order."""
    return real.logical_not().long().argsort(dim=1, stable=True)


def taken(x: Tensor, order: Tensor) -> Tensor:
    """Rows ``order (B, N)`` of ``x (B, N, ...)``."""
    return x.gather(1, order.reshape(*order.shape, *(1,) * (x.ndim - 2)).expand_as(x))


def _check_x(x: Any, width: int, batch_first: bool, cu_seqlens: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch tensor, got {type(x).__name__}")
    axes = "(B, N, width)" if batch_first else "(N, B, width)"
    if cu_seqlens is not None:
        axes = "(total, width) with cu_seqlens"
    if x.ndim != (3 if cu_seqlens is None else 2) or x.shape[-1] != width:
        hint = ", or (total, width) with cu_seqlens" if cu_seqlens is None and x.ndim == 2 else ""
        raise ValueError(f"x must have shape {axes}{hint}, where the layer was made with width={width}, got "
                         f"{tuple(x.shape)}")


def _integers(array: Any, name: str, x: Tensor) -> Tensor:
    """An integer tensor on ``x``'s device; lists are moved there."""
    return checks.integers(array, name, describe(x, "x")).array


def _given(positions: Any, x: Tensor) -> Tensor:
    positions, tokens = _integers(positions, "positions", x), x.shape[:-1]
    if tuple(positions.shape) not in (tuple(tokens), tuple(tokens[-1:])):
        raise ValueError(f"positions must have shape {' or '.join(map(str, {tuple(tokens), tuple(tokens[-1:])}))}, one "
                         f"for each token of x, got {tuple(positions.shape)}")
    return positions


def bounds_of(cu_seqlens: Any, x: Tensor) -> Tensor:
    """The checked ``cu_seqlens``; its values are read in host memory, or on request."""
    bounds = _integers(cu_seqlens, "cu_seqlens", x)
    if bounds.ndim != 1 or len(bounds) < 2:
        raise ValueError(f"cu_seqlens must have shape (B + 1,) with at least one sequence, got {tuple(bounds.shape)}")
    if (x.device.type == "cpu" or checks.wants_values_checked()) and not torch.compiler.is_compiling():
        values = bounds.tolist()
        if values[0] != 0 or values != sorted(values) or values[-1] != len(x):
            raise ValueError(f"cu_seqlens must be cumulative lengths that start at 0, never decrease and end at x's "
                             f"length {len(x)}, got {values[:16]}{' ...' if len(values) > 16 else ''}")
    return bounds


def packed_positions(x: Tensor, bounds: Tensor, cache: DynamicCache | None) -> Tensor:
    place = torch.arange(len(x), device=x.device)
    sequence = (torch.searchsorted(bounds.long(), place, right=True) - 1).clamp(0, len(bounds) - 2)
    place = place - bounds.long()[sequence]
    return place if cache is None else place + lengths_of(cache, x, len(bounds) - 1)[sequence]


def lengths_of(cache: DynamicCache, x: Tensor, sequences: int | None = None) -> Tensor:
    """int64 ``(B,)``: tokens that each sequence of the cache has seen."""
    if sequences not in (None, cache.batch):
        raise ValueError(f"cu_seqlens must have the {cache.batch} sequences of the cache, got {sequences}")
    found = cache.length
    if not isinstance(found, Tensor) or found.device != x.device:
        raise ValueError(f"cache must hold torch tensors on x's device {x.device}, got {cache!r}")
    return found


def _real(padding: Any, x: Tensor) -> Tensor:
    """The checked padding as a boolean tensor."""
    described = describe(padding, "padding")
    if described.shape != tuple(x.shape[:2]):
        raise ValueError(f"padding must have shape (B, N) = {tuple(x.shape[:2])}, one for each token of x, got "
                         f"{described.shape}")
    checks.require_same_device((describe(x, "x"), described))
    return checks.real_keys(described).array
