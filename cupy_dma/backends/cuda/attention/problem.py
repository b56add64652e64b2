"""An attention call in the kernels' terms, shared by the forward and the backward pass."""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention.tiles import heads_per_tile
from cupy_dma.backends.cuda.lists.dense_mask import PackedMask, dense_lists, mask_rows, pack_mask
from cupy_dma.backends.cuda.lists.intervals import NO_SHORT_TILES, KeyLists, ShortTiles, key_lists
from cupy_dma.backends.cuda.lists.varlen import mask_of_rows
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Builder
from cupy_dma.backends.cuda.runtime.configs import BIAS_DENSE, BIAS_NONE, BIAS_OF_KEYS, ELEMENT_BYTES, ELEMENTS
from cupy_dma.masks.interval import IntervalMask

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionCall


class Problem:
    """A checked call that this backend supports, with a bias from ``with_known_bias``; raises for others.

    ``mask`` is None if the kernels need no intervals: no mask, or plain causality, which ``causal`` then states.
    ``causal`` is False if the mask itself hides keys from positions before their own. With a ``dense`` mask the bits
    from ``pack_mask`` include the interval mask and causality, so kernels get neither (``tests_causality``,
    ``tests_intervals``).
    """

    __slots__ = ("bias", "bias_element", "bias_kind", "bits", "by_head", "causal", "delay", "dense", "key_length",
                 "mask", "packed", "page_size", "params", "sequences", "size", "tile_heads", "vector")

    def __init__(self, call: AttentionCall):
        query, key, value, mask = call.query, call.key, call.value, call.mask
        if query.dtype not in ELEMENTS:
            raise TypeError(f"query must be float16, bfloat16 or float32 on CUDA, got {query.dtype} (backend='numpy' "
                            f"takes it)")
        self.size = ELEMENT_BYTES[ELEMENTS[query.dtype]]  # bytes of an element
        self.bias = call.bias
        self.bias_kind = BIAS_NONE if call.bias is None else BIAS_OF_KEYS if call.bias.shape[2] == 1 else BIAS_DENSE
        self.bias_element = ELEMENTS[self.bias.dtype] if self.bias is not None else "float"
        #: whether the key bias has a delay
        self.delay = call.bias_delay > 0 and self.bias_kind == BIAS_OF_KEYS
        self.mask: IntervalMask | None = mask
        self.causal = call.causal
        self.sequences, self.key_length = call.sequences, call.key_length
        self.page_size = 0 if call.sequences is None else call.sequences.page_size
        if mask is not None:
            if mask._causal_only:
                self.mask, self.causal = None, True
            elif mask._starts == "key":
                self.causal = False
        #: dense mask, and what is packed into its bits besides
        self.dense = call.dense
        self.packed: PackedMask | None = None
        self.bits = call.dense is not None
        rows = None if self.mask is None else self.mask.shape[:2]
        if call.dense is not None:
            rows = mask_rows(call.dense, self.mask)
        heads, kv_heads = query.shape[2], key.shape[2]
        shared = (1, kv_heads)
        #: whether query heads of one group have their own masks or biases
        self.by_head = (rows is not None and rows[1] not in shared) or (
            self.bias is not None and self.bias.shape[1] not in shared)
        self.tile_heads = 1 if self.by_head else heads_per_tile(heads // kv_heads, self.bits)
        self.vector = rows_aligned(query, key, value)
        self.params: dict[str, Any] = {
            "query": query.pointer, "key": key.pointer, "value": value.pointer,
            "query_batch": query.strides[0], "query_row": query.strides[1], "query_head": query.strides[2],
            "key_batch": key.strides[0], "key_row": _row_stride(key), "key_head": key.strides[2],
            "value_batch": value.strides[0], "value_row": _row_stride(value), "value_head": value.strides[2],
            "batch": query.shape[0], "query_length": query.shape[1], "key_length": self.key_length, "heads": heads,
            "kv_heads": kv_heads, "mask_heads": 1, "scale": call.scale, "softcap": call.softcap,
            "bias_delay": min(call.bias_delay, self.key_length)}  # no query is further from a key
        if self.bias is not None:
            batch, head, each_query, each = self.bias.strides
            group = self.bias.shape[1] == kv_heads
            self.params.update(bias_batch=batch, bias_query=each_query, bias_key=each,
                               bias_group=head if group else 0, bias_head=0 if group else head)
            if self.bias_kind == BIAS_OF_KEYS:
                self.params["bias"] = self.bias.pointer
            else:
                size = ELEMENT_BYTES[self.bias_element]
                self.params.update(bias_rows=self.bias.pointer, bias_aligned=int(each == 1 and not any(
                    x * size % 16 for x in (batch, head, each_query)) and self.bias.pointer % 16 == 0))
        if self.sequences is not None:
            pages = self.sequences.page_table
            self.params.update(bounds=self.sequences.bounds.pointer, sequences=self.sequences.count)
            if pages is not None:
                self.params.update(page_table=pages.pointer, key_batch=0, value_batch=0, key_page=key.strides[0],
                                   value_page=value.strides[0])
        if rows is not None:
            mask_batch, mask_heads = rows
            self.params.update(mask_heads=mask_heads, mask_batch=mask_heads if mask_batch > 1 else 0,
                               mask_group=int(1 < mask_heads == kv_heads), mask_head=int(mask_heads not in shared))
        if self.mask is not None:
            self._use_mask(self.mask)

    def _use_mask(self, mask: IntervalMask) -> None:
        self.mask = mask
        start, stop = mask._start, mask._stop
        self.params.update(
            start=start.pointer, stop=stop.pointer, start_batch=start.strides[0], start_head=start.strides[1],
            stop_batch=stop.strides[0], stop_head=stop.strides[1])

    @property
    def tests_causality(self) -> bool:
        """Whether kernels compare positions of queries and keys: not if bits include causality."""
        return self.causal and not self.bits

    @property
    def tests_intervals(self) -> bool:
        """Whether kernels read the intervals of keys: not if bits include them."""
        return self.mask is not None and not self.bits

    @property
    def count(self) -> int:
        """Packed sequences; 0 if there are none."""
        return 0 if self.sequences is None else self.sequences.count

    @property
    def bias_of_tiles(self) -> str | None:
        """The kernels' type of a dense bias, whose tiles must fit into shared memory."""
        return self.bias_element if self.bias_kind == BIAS_DENSE else None

    def move_mask_to_rows(self, build: Builder) -> None:
        """For sequences: express the mask, with causality, in rows of query, as the kernels need it."""
        if self.sequences is not None and self.mask is not None and self.key_length:
            self._use_mask(mask_of_rows(build, self.mask, self.sequences, self.causal))
            self.causal = False

    def key_lists(self, build: Builder, queries: int, block_n: int,
                  short_tiles: ShortTiles = NO_SHORT_TILES) -> KeyLists | None:
        """Key lists for tiles of ``queries`` queries, the first ``short_tiles`` with fewer; None if kernels read all
        keys. Lengths are not 0."""
        packed = self.packed_mask(build)
        if packed is not None:
            return dense_lists(build, packed, queries)
        if self.mask is None:
            return None
        return key_lists(build, self.mask, self.params["query_length"], queries, block_n, self.causal, self.sequences,
                         short_tiles)

    def packed_mask(self, build: Builder) -> PackedMask | None:
        """The bits of a dense mask and everything else that hides keys; made once for all passes of a call."""
        if self.dense is not None and self.packed is None:
            self.packed = pack_mask(build, self.dense, self.mask, self.causal, self.params["query_length"],
                                    self.key_length)
        return self.packed

    def pack(self, lists: KeyLists | None = None, **fields: Any) -> Any:
        """The kernels' parameters, extended by ``fields``."""
        params = jit.params("common/params.cuh", "AttentionParams")
        return params.pack_some(self.params, lists.fields if lists else {}, fields)


def with_known_bias(call: AttentionCall) -> AttentionCall:
    """The call with a bias in a type that the kernels read: float32 per key, or dense in its own type (float32 for
    float64); converted by its library."""
    bias = call.bias
    if bias is None or bias.dtype == "float32" or bias.shape[2] != 1 and bias.dtype in ELEMENTS:
        return call
    library = bias.library
    seen = library.describe(library.astype(bias.array, "float32"), "bias")
    strides = seen.strides
    if len(strides) < 4:  # a key bias of packed sequences, without a batch axis
        strides = (*(0,) * (3 - len(strides)), *strides[:-1], 0, strides[-1])
    strides = tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, strides))
    return dataclasses.replace(call, bias=Operand("bias", seen.array, library, bias.shape, strides, "float32",
                                                  bias.device, seen.pointer))


def _row_stride(operand: Operand) -> int:
    stride = operand.strides[1] if operand.shape[1] > 1 else 0
    if abs(stride) >= 2**31:
        raise NotImplementedError(f"{operand.name} must have a row stride below 2^31 elements on CUDA, got {stride}")
    return stride


def rows_aligned(*operands: Operand) -> bool:
    """Whether every row can be read 16 bytes at a time (strides of axes of size 1 do not matter)."""
    for operand in operands:
        (b, n, h, d), (batch, row, head, _) = operand.shape, operand.strides
        piece = 16 // ELEMENT_BYTES[ELEMENTS[operand.dtype]]
        if (d % piece or operand.pointer % 16 or (batch % piece and b > 1) or (row % piece and n > 1)
                or (head % piece and h > 1)):
            return False
    return True
