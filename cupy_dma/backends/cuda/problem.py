"""An attention call as the kernels need it: shared by the forward and the backward pass."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_dma import jit
from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.configs import heads_per_tile
from cupy_dma.backends.cuda.lists import KeyLists
from cupy_dma.backends.cuda.runtime import Runtime
from cupy_dma.backends.cuda.sequences import mask_of_rows
from cupy_dma.masks import IntervalMask

if TYPE_CHECKING:
    from cupy_dma.attention import AttentionCall

class Problem:
    """A checked call that this backend serves; raises for what arrives later.

    ``mask`` is None where the kernels need no intervals: no mask, or plain causality, which ``causal`` then states.
    ``causal`` is False where the mask itself hides keys from positions before their own.
    """

    __slots__ = ("bias", "by_head", "causal", "key_length", "mask", "page_size", "params", "sequences", "tile_heads",
                 "vector")

    def __init__(self, call: AttentionCall):
        query, key, value, mask = call.query, call.key, call.value, call.mask
        if query.dtype not in ("float16", "bfloat16"):
            raise TypeError(f"query must be float16 or bfloat16 on CUDA, got {query.dtype} (backend='numpy' takes it; "
                            f"float32 through TF32 arrives with a later version)")
        if isinstance(mask, Operand):
            raise NotImplementedError("dense masks on CUDA arrive with a later version: mask must be an IntervalMask "
                                      "or None, got a dense array (backend='numpy' takes it)")
        self.bias = None if call.bias is None else _key_bias(call.bias)
        self.mask: IntervalMask | None = mask
        self.causal = call.causal
        self.sequences, self.key_length = call.sequences, call.key_length
        self.page_size = 0 if call.sequences is None else call.sequences.page_size
        if mask is not None:
            if mask._causal_only:
                self.mask, self.causal = None, True
            elif mask._starts == "key":
                self.causal = False
        heads, kv_heads = query.shape[2], key.shape[2]
        shared = (1, kv_heads)
        #: whether query heads of one group have masks or biases of their own
        self.by_head = (self.mask is not None and self.mask.shape[1] not in shared) or (
            self.bias is not None and self.bias.shape[1] not in shared)
        self.tile_heads = 1 if self.by_head else heads_per_tile(heads // kv_heads)
        self.vector = rows_aligned(query, key, value)
        self.params: dict[str, Any] = {
            "query": query.pointer, "key": key.pointer, "value": value.pointer,
            "query_batch": query.strides[0], "query_row": query.strides[1], "query_head": query.strides[2],
            "key_batch": key.strides[0], "key_row": _row_stride(key), "key_head": key.strides[2],
            "value_batch": value.strides[0], "value_row": _row_stride(value), "value_head": value.strides[2],
            "batch": query.shape[0], "query_length": query.shape[1], "key_length": self.key_length, "heads": heads,
            "kv_heads": kv_heads, "mask_heads": 1, "scale": call.scale, "softcap": call.softcap}
        if self.bias is not None:
            batch, head, _, each = self.bias.strides
            group = self.bias.shape[1] == kv_heads
            self.params.update(bias=self.bias.pointer, bias_batch=batch, bias_key=each,
                               bias_group=head if group else 0, bias_head=0 if group else head)
        if self.sequences is not None:
            pages = self.sequences.pages
            self.params.update(bounds=self.sequences.bounds.pointer, sequences=self.sequences.count)
            if pages is not None:
                self.params.update(pages=pages.pointer, key_batch=0, value_batch=0, key_page=key.strides[0],
                                   value_page=value.strides[0])
        if self.mask is not None:
            self._use_mask(self.mask)

    def _use_mask(self, mask: IntervalMask) -> None:
        self.mask = mask
        start, stop, (mask_batch, mask_heads, _) = mask._start, mask._stop, mask.shape
        kv_heads = self.params["kv_heads"]
        self.params.update(
            start=start.pointer, stop=stop.pointer, start_batch=start.strides[0], start_head=start.strides[1],
            stop_batch=stop.strides[0], stop_head=stop.strides[1], mask_heads=mask_heads,
            mask_batch=mask_heads if mask_batch > 1 else 0, mask_group=int(1 < mask_heads == kv_heads),
            mask_head=int(mask_heads not in (1, kv_heads)))

    def move_mask_to_rows(self, runtime: Runtime, stream: int) -> None:
        """Of sequences: bring the mask, and causality with it, into the rows of query that the kernels work in."""
        if self.sequences is not None and self.mask is not None and self.key_length:
            self._use_mask(mask_of_rows(runtime, self.mask, self.sequences, self.causal, stream))
            self.causal = False

    def pack(self, lists: KeyLists | None = None, **fields: Any) -> Any:
        """The kernels' parameters, with what ``fields`` adds."""
        return jit.params("params.cuh", "AttentionParams").pack_some(self.params, lists.fields if lists else {}, fields)


def _key_bias(bias: Operand) -> Operand:
    """A key bias (1|B, 1|Hkv|H, 1, 1|Lk) as float32; its array may have three or four axes."""
    if bias.shape[2] != 1:
        raise NotImplementedError(f"dense biases on CUDA arrive with a later version: bias must be one number per "
                                  f"key, (1|B, 1|Hkv|H, 1, 1|Lk), got {bias.shape} (backend='numpy' takes it)")
    if bias.dtype == "float32":
        return bias
    place = bias.library
    seen = place.describe(place.astype(bias.array, "float32"), "bias")
    strides = seen.strides if len(seen.strides) == 4 else (*seen.strides[:2], 0, seen.strides[2])
    strides = tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, strides))
    return Operand("bias", seen.array, place, bias.shape, strides, "float32", bias.device, seen.pointer)


def _row_stride(operand: Operand) -> int:
    stride = operand.strides[1] if operand.shape[1] > 1 else 0
    if abs(stride) >= 2**31:
        raise NotImplementedError(f"{operand.name} must have a row stride below 2^31 elements on CUDA, got {stride}")
    return stride


def rows_aligned(*operands: Operand) -> bool:
    """Whether every row can be read in pieces of 16 bytes (strides of axes of size 1 do not matter)."""
    for operand in operands:
        (b, n, h, d), (batch, row, head, _) = operand.shape, operand.strides
        if d % 8 or operand.pointer % 16 or (batch % 8 and b > 1) or (row % 8 and n > 1) or (head % 8 and h > 1):
            return False
    return True
