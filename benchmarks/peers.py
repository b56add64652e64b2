"""The other ways to do the same attention, and the dense attention that the dynamic mask saves.

Shapes are those of the library: query (B, Lq, H, D), key and value (B, Lk, Hkv, D). Each maker does what is not to be
timed (views, masks that are given) and returns the call that is; it raises where the peer cannot run.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], Any]


def bhsd(query, key, value):
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def dense(backend: SDPBackend | None, query, key, value) -> tuple[Call, str]:
    """scaled_dot_product_attention, causal (one query: everything is visible). Returns the call and a note."""
    q, k, v = bhsd(query, key, value)
    causal = q.shape[2] > 1
    group = q.shape[1] // k.shape[1]

    def call(k=k, v=v, enable_gqa=group > 1):
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=enable_gqa)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=enable_gqa)

    try:
        call()
        return call, ""
    except RuntimeError:
        if group == 1:
            raise
    wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    call(wide_k, wide_v, False)
    return lambda: call(wide_k, wide_v, False), "kv heads expanded beforehand"


def dense_mask(scores: torch.Tensor, query_length: int, window: int, dtype: torch.dtype, group: int) -> torch.Tensor:
    """The additive mask (B, H, Lq, Lk) that a model without this library builds: causal, topk per row, bias where kept
    and -inf elsewhere."""
    batch, kv_heads, key_length = scores.shape
    rows = scores[:, :, None, :].expand(batch, kv_heads, query_length, key_length)
    position = torch.arange(query_length, device=scores.device) + key_length - query_length
    hidden = torch.arange(key_length, device=scores.device)[None] > position[:, None]
    rows = rows.masked_fill(hidden, float("-inf"))
    if window < key_length:
        best = rows.topk(window, dim=-1, sorted=False)
        rows = torch.full_like(rows, float("-inf")).scatter_(-1, best.indices, best.values)
    return rows.to(dtype).repeat_interleave(group, dim=1)


def masked(query, key, value, mask: Callable[[], torch.Tensor]) -> Call:
    """scaled_dot_product_attention with the dense additive mask (B, H, Lq, Lk) that ``mask()`` gives in the call."""
    q, k, v = bhsd(query, key, value)
    group = q.shape[1] // k.shape[1]
    if group > 1:  # with a mask and grouped heads only the slow, materializing kernel would remain
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask())


def interval_blocks(start: torch.Tensor, stop: torch.Tensor, query_length: int, block: int):
    """Which blocks of the mask hold a visible pair, and which only visible pairs.

    ``start``, ``stop``: (B, H, Lk) int. Returns bool ``any`` and ``all``, (B, H, Lq/block, Lk/block); lengths must be
    multiples of the block. In O(Lk * Lq / block), not through the dense mask.
    """
    batch, heads, key_length = start.shape
    first = torch.arange(0, query_length, block, device=start.device) + key_length - query_length
    first = first[:, None]
    start, stop = start[:, :, None], stop[:, :, None]
    seen = (start < stop) & (start < first + block) & (stop > first)
    full = (start <= first) & (stop >= first + block)
    split = (batch, heads, len(first), key_length // block, block)
    return seen.reshape(split).any(-1), full.reshape(split).all(-1)


def flex(query, key, value, start, stop, bias, block: int = 128, compiled: bool = True) -> Call:
    """Compiled FlexAttention with the same interval mask (as block mask and mask_mod) and the key bias as score_mod.

    ``start``, ``stop``: (B, Hkv, Lk) int32; ``bias``: (B, Hkv, Lk) float32. The block mask is given, not timed.
    Not ``compiled`` it runs anywhere, slowly, with dense scores.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    q, k, v = (x.contiguous() for x in bhsd(query, key, value))
    heads, query_length = q.shape[1], q.shape[2]
    group = heads // k.shape[1]
    offset = k.shape[2] - query_length

    def visible(b, h, i, j):
        position = i + offset
        return (start[b, h // group, j] <= position) & (position < stop[b, h // group, j])

    def add_bias(s, b, h, i, j):
        return s + bias[b, h // group, j]

    seen, full = (x.repeat_interleave(group, dim=1) for x in interval_blocks(start, stop, query_length, block))
    partial = seen & ~full

    def ordered(blocks):
        order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
        return blocks.sum(-1, dtype=torch.int32), order

    block_mask = BlockMask.from_kv_blocks(*ordered(partial), *ordered(full), BLOCK_SIZE=block, mask_mod=visible)
    attend = flex_attention
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(q, k, v, score_mod=add_bias, block_mask=block_mask, enable_gqa=group > 1)
