"""Packed sequences with the original's masks and biases.

Masks and biases per key are passed on to ``cupy_dma.varlen_attention``. With a query axis the sequences are laid out as
a left-padded batch: query ``i`` of ``Lq`` in row ``max_q - Lq + i`` and key ``j`` of ``Lk`` in row ``max_k - Lk + j``,
so that bottom-right alignment, and with it causality, is that of the whole batch. This takes the memory of a padded
mask, which the caller's mask takes already.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma import checks
from cupy_dma.api import attention, varlen_attention
from cupy_dma.arrays import Operand, describe
from cupy_dma.calls.sequences import check_bounds
from cupy_dma.flash_dmattn.arguments import operand_of, rows, truth
from cupy_dma.flash_dmattn.probabilities import probabilities
from cupy_dma.masks.interval import EVER, NEVER, IntervalMask


@dataclass
class VarlenCall:
    """The arguments of ``flash_dmattn_varlen_func`` other than mask and bias."""

    query: Any
    key: Any
    value: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    causal: bool
    scale: float | None
    softcap: float
    deterministic: bool
    block_table: Any
    seqused_k: Any
    tail_padding: bool
    backend: str | None

    def run(self, mask: Any, bias: Any, with_probabilities: bool) -> Any:
        """What ``flash_dmattn_varlen_func`` returns."""
        if self.cu_seqlens_q is None:
            raise TypeError("cu_seqlens_q must be given, got None")
        if self.cu_seqlens_k is None and self.seqused_k is None:
            raise TypeError("cu_seqlens_k (or seqused_k, with block_table) must be given, got None")
        if self.block_table is not None:
            for given, name in ((mask, "attn_mask"), (bias, "attn_bias")):
                if _has_at_least_axes(given, name, 4):
                    raise NotImplementedError(f"{name} with a query axis cannot be used with block_table; per key it "
                                              f"has the shape (B, 1|Hkv|H, max_pages * page_size)")
            return self._per_key(_runs(mask, False), None if bias is None else rows(bias, "attn_bias"),
                                 with_probabilities)
        if with_probabilities or _has_at_least_axes(mask, "attn_mask", 3) or _has_at_least_axes(bias, "attn_bias", 3):
            return self._padded(mask, bias, with_probabilities)
        return self._per_key(_runs(mask, True), None if bias is None else rows(bias, "attn_bias"), False)

    def _per_key(self, mask: IntervalMask | None, bias: Any, with_probabilities: bool) -> Any:
        found = varlen_attention(
            self.query, self.key, self.value, self.cu_seqlens_q, self.cu_seqlens_k, mask=mask, bias=bias,
            causal=self.causal, scale=self.scale, softcap=self.softcap, deterministic=self.deterministic,
            return_lse=with_probabilities, block_table=self.block_table, seqused_k=self.seqused_k,
            max_seqlen_q=self.max_seqlen_q, max_seqlen_k=self.max_seqlen_k, tail_padding=self.tail_padding,
            backend=self.backend)
        return (*found, None) if with_probabilities else found

    def _padded(self, mask: Any, bias: Any, with_probabilities: bool) -> Any:
        for array, name, meaning in ((self.query, "query", "(total_q, H, D)"), (self.key, "key", "(total_k, Hkv, D)"),
                                     (self.value, "value", "(total_k, Hkv, D)")):
            if operand_of(array, name).ndim != 3:
                raise ValueError(f"{name} must have shape {meaning}, got {tuple(array.shape)}")
        q = _Layout(self.query, self.cu_seqlens_q, self.max_seqlen_q, "q", self.tail_padding)
        k = _Layout(self.key, self.cu_seqlens_k, self.max_seqlen_k, "k", self.tail_padding, self.seqused_k)
        if q.batch != k.batch:
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have one length, got {q.batch + 1} and {k.batch + 1}")
        query, key, value = q.padded(self.query), k.padded(self.key), k.padded(self.value)
        shown = _padded_mask(mask, q, k)
        options: dict[str, Any] = {"mask": shown, "bias": _laid_out(bias, "attn_bias", q, k), "causal": self.causal,
                                   "scale": self.scale, "softcap": self.softcap}
        out, lse = attention(query, key, value, **options, deterministic=self.deterministic, return_lse=True,
                             backend=self.backend)
        out = q.packed(out, 0.0)
        if not with_probabilities:
            return out
        seen = probabilities(query, key, lse, **options)
        return (out, q.packed(lse.swapaxes(1, 2), -float("inf")).swapaxes(0, 1),
                k.from_start(q.from_start(seen, 2), 3))


class _Layout:
    """Where the rows of packed sequences go in a padded batch with ``longest`` rows per sequence. Rows that belong to
    no sequence, or are not in use, go to one extra row after the batch."""

    def __init__(self, packed: Any, cu_seqlens: Any, longest: int | None, which: str, tail_padding: bool,
                 used: Any = None):
        self.name = name = f"cu_seqlens_{which}"
        if cu_seqlens is None:
            raise TypeError(f"{name} must be given, got None")
        self.operand = operand = describe(packed, which)
        bounds = checks.integers(cu_seqlens, name, operand)
        lengths = None if used is None else checks.integers(used, "seqused_k", operand)
        if bounds.ndim != 1 or bounds.shape[0] < 2:
            raise ValueError(f"{name} must have shape (B + 1,) with B of at least 1, got {bounds.shape}")
        library = operand.library
        self.total, self.batch = operand.shape[0], bounds.shape[0] - 1
        with library.on(operand.device):
            ends = library.astype(bounds.array, "int64")
            self.first = ends[:-1]
            self.lengths = ends[1:] - self.first
            if lengths is not None:
                checks.has_shape(lengths, "(B,)", ((self.batch,),))
                self.lengths = library.astype(lengths.array, "int64")
            if longest is None:
                longest = int(self.lengths.max())
            self.longest = checks.whole(longest, f"max_seqlen_{which}", 0)
            self._check_lengths(ends, tail_padding, all(isinstance(x, (list, tuple, type(None)))
                                                        for x in (cu_seqlens, used)))
            row = self._count(self.total)
            sequence = library.astype(library.search_right(ends[1:], row), "int64").clip(0, self.batch - 1)
            local = row - self.first[sequence]
            self.inside = local < self.lengths[sequence]
            start = sequence * self.longest + self.longest - self.lengths[sequence]
            self.target = library.xp.where(self.inside, start + local, local * 0 + self.batch * self.longest)
            local = self._count(self.longest) - (self.longest - self.lengths[:, None])
            self.real = local >= 0
            self.local = local.clip(0)  # (B, longest): index within its sequence
            self.source = (self.first[:, None] + self.local).clip(0, max(self.total - 1, 0))

    def _count(self, size: int) -> Any:
        library = self.operand.library
        return library.astype(library.arange(0, size, self.operand.device), "int64")

    def _check_lengths(self, ends: Any, tail_padding: bool, lists: bool) -> None:
        if self.operand.device.kind == "cuda" and not (lists or checks.wants_values_checked()):
            return
        library = self.operand.library
        values, lengths = library.to_numpy(ends), library.to_numpy(self.lengths)
        room = values[1:] - values[:-1]
        check_bounds(values, self.name, self.total, "query's" if self.name[-1] == "q" else "key's", tail_padding)
        if (lengths < 0).any() or (lengths > room).any():
            raise ValueError(f"seqused_k must be from 0 to the lengths in {self.name}, {room.tolist()[:16]}, got "
                             f"{lengths.tolist()[:16]}")
        if (lengths > self.longest).any():
            raise ValueError(f"max_seqlen_{self.name[-1]} must be at least the longest sequence, {lengths.max()}, got "
                             f"{self.longest}")

    def padded(self, packed: Any) -> Any:
        """(total, heads, D) as (B, longest, heads, D), padded with 0."""
        operand, rows_ = self.operand, self.batch * self.longest
        flat = operand.library.full((rows_ + 1, *packed.shape[1:]), 0, operand.dtype, operand.device)
        flat[self.target] = packed
        return flat[:rows_].reshape(self.batch, self.longest, *packed.shape[1:])

    def packed(self, padded: Any, elsewhere: float) -> Any:
        """(B, longest, ...) as (total, ...), with ``elsewhere`` in rows that belong to no sequence."""
        xp = self.operand.library.xp
        flat = padded.reshape(self.batch * self.longest, *padded.shape[2:])
        behind = self.operand.library.full((1, *flat.shape[1:]), elsewhere, describe(padded, "out").dtype,
                                           self.operand.device)
        return xp.concatenate((flat, behind))[self.target]

    def from_start(self, array: Any, axis: int) -> Any:
        """An array (B, ...) whose ``axis`` has this layout, shifted so that every sequence begins at 0; 0 after it."""
        xp, column = self.operand.library.xp, self._count(self.longest)
        inside = column < self.lengths[:, None]
        index = column + (self.longest - self.lengths[:, None])
        index = xp.where(inside, index, index * 0)
        shape = [self.batch, 1, 1, 1]
        shape[axis] = self.longest
        moved = array.swapaxes(1, axis)[self._count(self.batch)[:, None], index].swapaxes(1, axis)
        return xp.where(inside.reshape(shape), moved, moved * 0)


def _has_at_least_axes(array: Any, name: str, count: int) -> bool:
    return array is not None and not isinstance(array, IntervalMask) and operand_of(array, name).ndim >= count


def _runs(mask: Any, packed: bool) -> IntervalMask | None:
    """A mask per key as intervals: each key is visible everywhere or nowhere."""
    if mask is None or isinstance(mask, IntervalMask):
        return mask
    if packed and operand_of(mask, "attn_mask").ndim != 2:
        raise ValueError(f"attn_mask must have shape (1|Hkv|H, total_k), (total_q, 1|Hkv|H, max_seqlen_k) or "
                         f"(1|B, 1|Hkv|H, 1|max_seqlen_q, 1|max_seqlen_k), got {tuple(mask.shape)}")
    return _everywhere(truth(mask, "attn_mask"))


def _everywhere(seen: Any) -> IntervalMask:
    operand = describe(seen, "attn_mask")
    library, device = operand.library, operand.device
    with library.on(device):
        never = library.full((1,), NEVER, "int32", device)
        ever = library.full((1,), EVER, "int32", device)
        return IntervalMask(library.full((operand.shape[-1],), EVER, "int32", device),
                            library.xp.where(operand.array, never, ever))


def _padded_mask(mask: Any, q: _Layout, k: _Layout) -> Any:
    """The mask of the padded batch: the caller's mask, restricted to real keys."""
    real = IntervalMask.padding(k.real)
    if mask is None:
        return real
    if isinstance(mask, IntervalMask):
        return _moved(mask, k) & real
    seen = _laid_out(truth(mask, "attn_mask"), "attn_mask", q, k)
    return seen & k.real[:, None, None, :]


def _moved(mask: IntervalMask, k: _Layout) -> IntervalMask:
    """A mask in packed positions, converted to those of the padded batch."""
    library = k.operand.library
    if mask.shape[0] != 1 or mask.key_length != k.total:
        raise ValueError(f"attn_mask must have shape (1, 1|Hkv|H, total_k) with total_k={k.total}, got {mask.shape}")
    checks.require_same_device((k.operand, mask._start))
    shift = (k.longest - k.first - k.lengths)[:, None, None]
    ends = []
    for run in (mask._start.array, mask._stop.array):
        run = library.xp.broadcast_to(run, (1, run.shape[-2], k.total))[0]
        head = k._count(run.shape[0])[None, :, None]
        at = library.astype(run, "int64")[head, k.source[:, None, :]] + shift
        ends.append(library.astype(at.clip(EVER, NEVER), "int32"))
    return IntervalMask(*ends)


def _laid_out(array: Any, name: str, q: _Layout, k: _Layout) -> Any:
    """A mask or bias of any allowed shape as (B, h, max_q|1, max_k|1) of the padded batch."""
    if array is None:
        return None
    operand = describe(array, name)
    checks.require_same_device((k.operand, operand))
    if 0 in operand.shape:  # all sequences are empty: their rows would index unused elements
        array = operand.library.full(tuple(max(size, 1) for size in operand.shape), 0, operand.dtype, operand.device)

    def numbers(size: int, axis: int) -> Any:
        shape = [1] * 4
        shape[axis] = size
        return k._count(size).reshape(shape)

    def along(axis: int, index: Any, size: int) -> Any:
        return index if operand.shape[axis] != 1 or size == 1 else numbers(1, 0)

    if operand.ndim == 2:
        _require(operand, name, operand.shape[1:], (k.total,))
        return array[numbers(array.shape[0], 1), k.source[:, None, None, :]]
    query_rows, key_rows = (layout.local.reshape(shape) for layout, shape in (
        (q, (q.batch, 1, q.longest, 1)), (k, (k.batch, 1, 1, k.longest))))
    if operand.ndim == 3:
        _require(operand, name, (operand.shape[0], operand.shape[2]), (q.total, k.longest))
        return array[q.source.reshape(q.batch, 1, q.longest, 1), numbers(operand.shape[1], 1), key_rows]
    if operand.ndim == 4:
        sizes = (q.batch, q.longest, k.longest)
        _require(operand, name, (operand.shape[0], *operand.shape[2:]), sizes, or_one=True)
        return array[along(0, numbers(q.batch, 0), q.batch), numbers(operand.shape[1], 1),
                     along(2, query_rows, q.longest), along(3, key_rows, k.longest)]
    raise ValueError(f"{name} must have two to four axes, got shape {operand.shape}")


def _require(operand: Operand, name: str, given: tuple[int, ...], sizes: tuple[int, ...], or_one: bool = False) -> None:
    if any(size != wanted and not (or_one and size == 1) for size, wanted in zip(given, sizes)):
        raise ValueError(
            f"{name} must have shape (1|Hkv|H, total_k), (total_q, 1|Hkv|H, max_seqlen_k) or "
            f"(1|B, 1|Hkv|H, 1|max_seqlen_q, 1|max_seqlen_k), here with {sizes} where the heads are left out, got "
            f"{operand.shape}")
