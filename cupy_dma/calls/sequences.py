"""Packed sequences of different lengths (varlen, SPEC section 8): where each begins and ends, and page tables.

Sequence ``b`` has the queries ``cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1]`` and the keys ``key_first[b] <= j <
key_end[b]``. Its query ``i`` stands at the packed key position ``i + key_end[b] - query_end[b]`` (bottom-right
alignment) and sees only keys of its own sequence. Everything is computed on the arrays' device, without reading values
on the host.

The keys of a paged KV cache are numbered as if every sequence used all its pages: key ``j`` of sequence ``b`` is the
packed key ``b * max_pages * page_size + j``.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.runs import EVER, NEVER, Hints


@dataclass(slots=True, eq=False)
class Sequences:
    """The sequences of a call and one more without keys: the query rows after the last sequence (often none)."""

    count: int  # sequences, including that last one: B + 1
    bounds: Operand  # int32 (4, count), contiguous: query_first, query_end, key_first, key_end
    key_length: int  # packed keys
    page_table: Operand | None  # int32 (B, max_pages), contiguous: physical pages; entries past the used keys are junk
    page_size: int  # 0: not paged
    given: tuple[Operand | None, ...]  # the caller's cu_seqlens_q, cu_seqlens_k, seqused_k, block_table

    @property
    def batch(self) -> int:
        return self.count - 1


def sequences_of(q: Operand, k: Operand, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, block_table: Any,
                 tail_padding: bool = True) -> Sequences:
    """The checked sequences of ``q (1, total_q, H, D)`` and of ``k (1, total_k, Hkv, D)`` or a paged ``k``."""
    cu_q = checks.integers(cu_seqlens_q, "cu_seqlens_q", q)
    if len(cu_q.shape) != 1 or cu_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must have shape (B + 1,), got {cu_q.shape}")
    batch = cu_q.shape[0] - 1
    cu_k = used = table = None
    if cu_seqlens_k is not None:
        cu_k = cu_q if cu_seqlens_k is cu_seqlens_q else checks.integers(cu_seqlens_k, "cu_seqlens_k", q)
        checks.has_shape(cu_k, "cu_seqlens_q's shape (B + 1,)", ((batch + 1,),))
    if seqused_k is not None:
        used = checks.integers(seqused_k, "seqused_k", q)
        checks.has_shape(used, "(B,)", ((batch,),))
    if block_table is None:
        if cu_k is None:
            raise TypeError("cu_seqlens_k must be an array, got None: it is optional only with a block_table")
        length, page_size = k.shape[1], 0
        if cu_k is cu_q and q.shape[1] != length and not tail_padding:
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be different arrays where query and key have "
                             f"different lengths, got one for total_q={q.shape[1]} and total_k={length} (tail_padding="
                             f"True allows rows after the last sequence)")
    else:
        if cu_k is None and used is None:
            raise TypeError("seqused_k or cu_seqlens_k must be given with block_table, got None for both")
        table = checks.integers(block_table, "block_table", q)
        if len(table.shape) != 2 or table.shape[0] != batch:
            raise ValueError(f"block_table must have shape (B, max_pages) = ({batch}, any), got {table.shape}")
        page_size = k.shape[1]
        length = batch * table.shape[1] * page_size
        if length > NEVER:
            raise ValueError(f"block_table may address at most 2**31 - 1 keys, got shape {table.shape} and pages of "
                             f"{page_size} keys")
    known = [known_values(operand, given) for operand, given in (
        (cu_q, cu_seqlens_q), (cu_k, cu_seqlens_k), (used, seqused_k), (table, block_table))]
    if any(values is not None for values in known):
        _check_values(q, k, known, page_size, tail_padding)
    return _made(q, cu_q, cu_k, used, table, length, page_size)


def known_values(operand: Operand | None, given: Any) -> Any:
    """The values, if the host can read them without waiting (lists, host arrays) or ``CUPY_DMA_CHECK=1``; else None."""
    if operand is None or not (isinstance(given, (list, tuple)) or checks.values_known(operand)):
        return None
    return operand.library.to_numpy(operand.array)


def shown(found: Any) -> str:
    return f"{found.tolist()[:16]}{' ...' if len(found) > 16 else ''}"


def check_bounds(found: Any, name: str, length: int, whose: str, tail_padding: bool) -> None:
    """ValueError unless these cumulative lengths divide all ``length`` rows into sequences; with ``tail_padding`` rows
    may be left over."""
    if found[0] != 0 or (found[1:] < found[:-1]).any() or found[-1] > length:
        raise ValueError(f"{name} must be cumulative lengths that start at 0, never decrease and end at {whose} length "
                         f"{length}{' at most' if tail_padding else ''}, got {shown(found)}")
    if found[-1] < length and not tail_padding:
        raise ValueError(f"{name} must end at {whose} length {length}, got {shown(found)}: rows {found[-1]} to "
                         f"{length - 1} belong to no sequence (tail_padding=True allows that)")


def _check_values(q: Operand, k: Operand, known: list[Any], page_size: int, tail_padding: bool) -> None:
    cu_q, cu_k, used, table = known
    if cu_q is not None:
        check_bounds(cu_q, "cu_seqlens_q", q.shape[1], "query's", tail_padding)
    if cu_k is not None:
        if page_size == 0:
            check_bounds(cu_k, "cu_seqlens_k", k.shape[1], "key's", tail_padding)
        else:
            check_bounds(cu_k, "cu_seqlens_k", NEVER, "a", True)
    lengths = None if cu_k is None else cu_k[1:] - cu_k[:-1]
    if used is not None:
        if (used < 0).any() or (table is None and lengths is not None and (used > lengths).any()):
            raise ValueError(f"seqused_k must lie between 0 and the lengths of cu_seqlens_k, "
                             f"got {shown(used)}{'' if lengths is None else f' for lengths {shown(lengths)}'}")
        lengths = used
    if table is not None and lengths is not None:
        _check_pages(table, lengths, page_size, k.shape[0])


def _check_pages(pages: Any, lengths: Any, page_size: int, num_pages: int) -> None:
    capacity = pages.shape[1] * page_size
    if (lengths > capacity).any():
        raise ValueError(f"seqused_k (or cu_seqlens_k) must give each sequence at most max_pages * page_size = "
                         f"{capacity} keys, got {shown(lengths)}")
    for b, length in enumerate(lengths):
        needed = pages[b, :-(-int(length) // page_size) if length else 0]
        if ((needed < 0) | (needed >= num_pages)).any():
            raise ValueError(f"block_table must hold page numbers of key, 0 to {num_pages - 1}, for all keys in use, "
                             f"got {shown(needed)} for sequence {b} with {length} keys")


def _made(q: Operand, cu_q: Operand, cu_k: Operand | None, used: Operand | None, table: Operand | None, length: int,
          page_size: int) -> Sequences:
    library, device, batch = q.library, q.device, cu_q.shape[0] - 1
    xp = library.xp
    with library.on(device):
        query_first = library.astype(cu_q.array, "int32")
        last_row = library.full((1,), q.shape[1], "int32", device)
        query_end = xp.concatenate((query_first[1:], last_row))
        counted = None if cu_k is None else library.astype(cu_k.array, "int32")
        lengths = None if used is None else library.astype(used.array, "int32")
        if table is None:
            assert counted is not None
            key_first = counted
        else:
            capacity = table.shape[1] * page_size
            key_first = library.arange(0, batch + 1, device) * capacity
            if lengths is None:
                assert counted is not None
                lengths = counted[1:] - counted[:-1]
        end = key_first[1:] if lengths is None else key_first[:-1] + lengths
        bounds = xp.stack((query_first, query_end, key_first, xp.concatenate((end, key_first[-1:]))))
        page_table = None
        if table is not None:
            page_table = library.operand(library.contiguous(library.astype(table.array, "int32")), "block_table")
    return Sequences(batch + 1, library.operand(bounds, "bounds"), length, page_table, page_size,
                     (cu_q, cu_k, used, table))


def sequences_in(bounds: Operand, key_length: int) -> Sequences:
    """The sequences without pages that have these ``bounds``."""
    first_row, _, first_key, end = bounds.array
    used = (end - first_key)[:-1]
    given = [bounds.library.operand(x, name) for x, name in (
        (first_row, "cu_seqlens_q"), (first_key, "cu_seqlens_k"), (used, "seqused_k"))]
    return Sequences(bounds.shape[1], bounds, key_length, None, 0, (*given, None))


# ---- from positions within a paged sequence to packed ones ----


def packed_rows(array: Any, batch: int, xp: Any) -> Any:
    """``(1|B, heads, capacity)`` as ``(1, heads, B * capacity)``."""
    _, heads, capacity = array.shape
    whole = xp.broadcast_to(array, (batch, heads, capacity))
    return whole.swapaxes(0, 1).reshape(1, heads, batch * capacity)


def packed_mask(mask: IntervalMask, batch: int) -> IntervalMask:
    """A mask ``(1|B, heads, capacity)``, with positions counted within each sequence, in packed positions."""
    library, device, capacity = mask.library, mask.device, mask.key_length
    half = -(2**30)  # before every position
    with library.on(device):
        ever = library.full((1, 1, 1), EVER, "int32", device)
        never = library.full((1, 1, 1), NEVER, "int32", device)
        end = library.full((1, 1, 1), capacity, "int32", device)  # after every position
        offset = (library.arange(0, batch, device) * capacity)[:, None, None]
        where, start, stop = library.xp.where, mask._start.array, mask._stop.array
        starts = where(start <= half, ever, library.xp.minimum(start, end) + offset)
        stops = where(stop >= end, never, where(stop <= half, ever, stop + offset))
        starts, stops = (packed_rows(run, batch, library.xp) for run in (starts, stops))
        return IntervalMask._make(library, library.contiguous(starts), library.contiguous(stops),
                                  Hints(mask._starts, mask._bound, mask._causal_only))
