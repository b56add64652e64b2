"""An attention call as the kernels see it: pointers, strides, flags and tile shapes, shared by forward and backward."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from cupy_dma.arrays import Operand
from cupy_dma.backends.torch_common.arrays import strides_of, tensor
from cupy_dma.backends.triton.lists import tile_keys
from cupy_dma.calls.types import AttentionCall

MAX_HEADS = 16  # query heads of a GQA group that share a tile
INTERPRETER_LIMIT = 227 * 1024


class Shape(NamedTuple):
    """The block sizes and launch options of a kernel."""

    block_m: int  # rows, or queries per step of backward_dkv
    block_n: int  # keys
    warps: int
    stages: int


class Problem:
    """A checked call that this backend supports; NotImplementedError for others.

    ``mask`` is None where no runs are needed: without a mask, or under plain causality, which ``causal`` then states.
    ``causal`` is False where the mask itself hides keys from earlier positions.
    """

    def __init__(self, call: AttentionCall):
        query, key, value = call.query, call.key, call.value
        if query.dtype not in ("float16", "bfloat16", "float32"):
            _refuse(f"query must be float16, bfloat16 or float32, got {query.dtype}")
        if call.sequences is not None:
            _refuse("packed sequences (cu_seqlens) are supported by backend='cuda' and 'numpy'")
        self.call, self.dense, self.bias, self.causal = call, call.dense, call.bias, call.causal
        mask = self.mask = call.mask
        if mask is not None:
            if mask._causal_only:
                self.mask, self.causal = None, True
            elif mask._starts == "key":
                self.causal = False
        if key.shape[1] == 0:
            self.mask = self.dense = self.bias = None
        heads, self.kv_heads = query.shape[2], key.shape[2]
        self.heads, self.group_size = heads, heads // self.kv_heads
        #: whether some query may not see all keys
        self.hides = self.causal or self.mask is not None or self.dense is not None
        masked = 1 if self.mask is None else self.mask.shape[1]
        shared = (1, self.kv_heads)
        #: whether the query heads of a GQA group differ in their runs; and in runs, dense masks or biases
        self.runs_by_head = masked not in shared
        self.by_head = self.runs_by_head or any(
            x is not None and x.shape[1] not in shared for x in (self.dense, self.bias))
        self.tile_heads = 1 if self.by_head else min(self.group_size & -self.group_size, MAX_HEADS)
        #: 1: one bias per key, 2: one per pair, 3: a delayed one per key
        self.bias_kind = 0 if self.bias is None else 3 if call.bias_delay else 1 if self.bias.shape[2] == 1 else 2

        self.arguments: dict[str, Any] = {
            "heads": heads, "kv_heads": self.kv_heads, "query_length": query.shape[1], "key_length": key.shape[1],
            "scale": call.scale, "softcap": call.softcap, "delay": call.bias_delay, "HEAD_DIM": query.shape[3],
            "BLOCK_D": padded(query.shape[3]), "INTERVALS": self.mask is not None, "CAUSAL": self.causal,
            "DENSE": self.dense is not None, "BIAS": self.bias_kind, "SOFTCAP": call.softcap > 0.0,
            # three TF32 MMAs have the precision of float32; MMAs of 16-bit types ignore this
            "PRECISION": "tf32x3"}
        for name, operand in (("query", query), ("key", key), ("value", value)):
            self.add_rows(name, operand)
        for name, extra in (("dense", self.dense), ("bias", self.bias)):
            self._add_pairs(name, extra)
        self._add_runs()

    def add_rows(self, name: str, operand: Operand) -> None:
        """Kernel arguments of an operand (B, L, heads, D)."""
        array = tensor(operand)
        batch, row, head, _ = strides_of(operand, array)
        self.arguments.update({name: array, f"{name}_batch": batch, f"{name}_row": row, f"{name}_head": head})

    def _add_pairs(self, name: str, operand: Operand | None) -> None:
        """Kernel arguments of an operand (1|B, 1|Hkv|H, 1|Lq, 1|Lk)."""
        array: torch.Tensor | None = None
        strides: tuple[int, ...] = (0, 0, 0, 0)
        share = 1
        if operand is not None:
            array = tensor(operand)
            strides, share = strides_of(operand, array), self._share(operand.shape[1])
            array = array.view(torch.uint8) if array.dtype == torch.bool else array
        self.arguments.update(zip((name, f"{name}_batch", f"{name}_head", f"{name}_row", f"{name}_key",
                                   f"{name}_share"), (array, *strides, share)))

    def _add_runs(self) -> None:
        names = ("start", "stop", "start_batch", "start_head", "stop_batch", "stop_head", "mask_batch", "mask_head",
                 "mask_share")
        values: tuple[Any, ...] = (None, None, 0, 0, 0, 0, 0, 0, 1)
        if self.mask is not None:
            start, stop, (batch, heads, _) = self.mask._start, self.mask._stop, self.mask.shape
            arrays = tensor(start), tensor(stop)
            (start_batch, start_head, _), (stop_batch, stop_head, _) = (
                strides_of(run, array) for run, array in zip((start, stop), arrays))
            values = (*arrays, start_batch, start_head, stop_batch, stop_head, heads if batch > 1 else 0,
                      int(heads > 1), self._share(heads))
        self.arguments.update(zip(names, values))

    def _share(self, heads: int) -> int:
        """Query heads per head of an array with this many heads (1, Hkv or H; if 1, its stride is 0 anyway)."""
        return self.group_size if heads == self.kv_heads else 1

    def shape(self, kernel: str) -> Shape:
        query = self.call.query
        size, width = padded(query.shape[3]), 8 if query.dtype == "float32" else 2  # 3xTF32 keeps two TF32 numbers
        return _shape(kernel, size, width, _shared_memory(query.device.index), query.shape[1] * self.tile_heads)

    def query_tiles(self, kernel: str) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and arguments of a kernel with one program per tile of queries."""
        batch, query_length = self.call.query.shape[:2]
        shape = self.shape(kernel)
        queries = shape.block_m // self.tile_heads
        tiles = -(-query_length // queries)
        listed, capacity, meta = None, 0, None
        if self.mask is not None:
            listed, capacity, meta = tile_keys(self.mask, query_length, queries, shape.block_n, self.causal)
        return (tiles * (self.heads // self.tile_heads) * batch,), {
            **self.arguments, "listed": listed, "capacity": capacity, "meta": meta, "tiles": tiles,
            "LISTED": listed is not None, "HEADS": self.tile_heads, "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n,
            "num_warps": shape.warps, "num_stages": shape.stages}

    @staticmethod
    def for_repair(arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments for a kernel's REPAIR launch, which is rare: small blocks, which need few registers."""
        return {**arguments, "BLOCK_N": 16, "num_warps": 8 if arguments["BLOCK_M"] > 64 else 4, "num_stages": 1}


def _refuse(why: str) -> None:
    raise NotImplementedError(f"backend='triton' cannot do this: {why}")


def padded(size: int) -> int:
    """The head dim padded to BLOCK_D: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@functools.cache
def _shared_memory(index: int) -> int:
    """Bytes of shared memory available to a CTA."""
    if not torch.cuda.is_available():
        return INTERPRETER_LIMIT
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


@functools.cache
def _shape(kernel: str, size: int, width: int, limit: int, rows: int) -> Shape:
    """Block sizes that fit into shared memory, for ``rows`` query rows of ``size`` numbers with ``width`` bytes each;
    chosen for few register spills."""
    wide = size > 128 or width == 8
    shape = {"forward": Shape(128, 32 if size > 128 else 64, 8, 3),
             "dq": Shape(64 if wide else 128, 32 if size > 128 else 64, 8, 2),
             "dkv": Shape(32 if wide else 64, 64 if wide else 128, 8, 2),
             "dbias": Shape(64, 64, 4, 1)}[kernel]
    if width == 8:
        shape = Shape(min(shape.block_m, 64), 32, 4 if size <= 64 else 8, min(shape.stages, 2))

    def needed(s: Shape) -> int:
        own, moving = (s.block_n, s.block_m) if kernel == "dkv" else (s.block_m, s.block_n)
        held = 1 if kernel == "forward" else 2
        return size * width * (held * own + 2 * s.stages * moving) + 4 * s.block_m * s.block_n

    while needed(shape) > limit and shape.stages > 1:
        shape = shape._replace(stages=shape.stages - 1)
    while needed(shape) > limit and shape.block_n > 16:
        shape = shape._replace(block_n=shape.block_n // 2, block_m=max(16, shape.block_m // 2))
    while needed(shape) > limit and shape.block_m > 16:
        shape = shape._replace(block_m=shape.block_m // 2)
    if kernel != "dkv" and rows < shape.block_m:  # few queries: decoding
        shape = shape._replace(block_m=max(16, 1 << (rows - 1).bit_length()), warps=4)
    return shape
