"""A ``DynamicCache`` or ``GatedCache`` in memory that somebody else has allocated.

One sequence's cache is a *page* of bytes, and ``N`` pages are a cache of batch ``N``:

    | key of all sequences | value of all sequences | scores of all | ... |        each part in its own order (B, ...)

A sequence's bytes are therefore not contiguous, but every array of the cache is, as its kernels need. Parts start at
multiples of 16 bytes. The counters of kernels (``tickets``, 4 bytes per kv head and as many besides) stay outside: they
must be 0 between calls, whatever happens to the memory.
"""
from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma.arrays import numpy_dtype
from cupy_dma.cache import DynamicCache, GatedCache
from cupy_dma.cache.segments import segments_of
from cupy_dma.transformers.layers import DynamicMask, GateMask

Cache = DynamicCache | GatedCache
ALIGNMENT = 16  # bytes; the widest load of a kernel


class Part(NamedTuple):
    """An array of a cache of one sequence."""

    name: str
    shape: tuple[int, ...]  # for N sequences the first axis is N times as long
    dtype: str
    size: int  # bytes
    padded: int  # bytes


def single(how: DynamicMask | GateMask, kv_heads: int, head_dim: int, like: Tensor,
           storage: str | None = None) -> Cache:
    """A cache of one sequence for a layer with this selection, of ``like``'s type and device. ``storage``: of its rows.

    Raises
    ------
    TypeError, ValueError
        As the caches do; or the layer's gates have no capacity, so that its cache would grow.
    """
    options: dict[str, Any] = {"like": like, "sinks": how.sinks, "storage": storage}
    if isinstance(how, DynamicMask):
        return DynamicCache(1, kv_heads, how.window, head_dim, recent=how.recent, **options)
    if how.capacity is None:
        raise ValueError("a model with gates needs a capacity, so that its caches have a constant size: give convert() "
                         "one, or set config.dynamic_mask['capacity']")
    return GatedCache(1, kv_heads, head_dim, delay=how.delay, threshold=how.threshold, capacity=how.capacity, **options)


def parts(cache: Cache) -> list[Part]:
    """Those of a page; ``cache``: of one sequence."""
    found = []
    for name in cache._state.arrays:
        operand = getattr(cache._state, name)
        size = prod(operand.shape) * numpy_dtype(operand.dtype).itemsize
        found.append(Part(name, tuple(operand.shape), operand.dtype, size, -(-size // ALIGNMENT) * ALIGNMENT))
    return found


def page_bytes(cache: Cache) -> int:
    """Bytes of one sequence; ``cache``: of one sequence."""
    return sum(part.padded for part in parts(cache))


def placed(cache: Cache, memory: Tensor) -> Cache:
    """``cache``, of one sequence, as a cache of as many empty sequences as there are pages in ``memory``.

    Parameters
    ----------
    cache
        Changed in place, and returned.
    memory : int8 Tensor ``(pages * page_bytes(cache),)``
        Contiguous, on the cache's device, aligned to 16 bytes. Its contents are overwritten.

    Raises
    ------
    ValueError
        The memory has another size, type, device or alignment.
    """
    state, page = cache._state, page_bytes(cache)
    library, heads = state.library, state.kv_heads
    wrong = memory.dtype != torch.int8 or memory.ndim != 1 or not memory.is_contiguous()
    if wrong or memory.numel() % page or memory.data_ptr() % ALIGNMENT:
        raise ValueError(f"memory must be a contiguous int8 tensor of whole pages of {page} bytes, aligned to "
                         f"{ALIGNMENT}, got {memory.dtype} {tuple(memory.shape)} at {memory.data_ptr():#x}")
    if memory.device != state.key.array.device:
        raise ValueError(f"memory must be on the cache's device {state.key.array.device}, got {memory.device}")
    pages, offset, found = memory.numel() // page, 0, {}
    for name, shape, _, size, padded in parts(cache):
        array = memory[offset:offset + pages * size].view(getattr(state, name).array.dtype)
        found[name] = library.operand(array.view(pages * shape[0], *shape[1:]), name)
        offset += pages * padded
    with library.on(state.device):
        counters = library.full((pages * heads + pages,), 0, "int32", state.device)
        found["tickets"] = library.operand(counters, "tickets")
        new = state.having(found)
        if state.segments is not None:
            new.segments = segments_of(library, state.device, state.segments.sizes * pages, pages, heads)
        new.workspace = {}
    cache._state = new
    cache.reset()
    return cache
