"""TMA descriptors (``CUtensorMap``) of tensors for Hopper GPUs, made by the driver on the host."""
from __future__ import annotations

import ctypes
import functools
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import launch
from cupy_dma.backends.cuda.runtime.device import bind

MAP_BYTES = 128  # of a descriptor, which must lie at a multiple of 64
CHUNK_COLUMNS = 64  # of a TMA tile: 128 bytes, the width of the swizzle (kernels/sm90/ptx.cuh)
_KINDS = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZERO = 0, 3, 3, 0
_INVALID_VALUE = 1  # the driver's answer to what TMA cannot read


def rows_map(rows: Operand, block: int) -> bytes | None:
    """The descriptor, with axes D, L, H, B, of ``rows (B, L, H, D)``, 16-bit elements in aligned rows; a TMA tile has
    ``block`` rows of one head. None where TMA cannot read it."""
    return _map(rows.dtype, rows.pointer, rows.shape, rows.strides, (1, 2, 0), (block, 1))


def queries_map(rows: Operand, queries: int, heads: int) -> bytes | None:
    """The same with axes D, H, L, B: a TMA tile has ``heads`` heads of each of ``queries`` rows, heads first."""
    return _map(rows.dtype, rows.pointer, rows.shape, rows.strides, (2, 1, 0), (heads, queries))


def runs_map(rows: Operand) -> bytes | None:
    """The descriptor of ``rows (B, L, H, D)`` whose TMA tile has 32 rows of one head, from a multiple of 8 on, in the
    order of gathered keys (``row_of_key`` in kernels/sm90/smem.cuh): 0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, ... Its axes
    are D, row % 2, row / 8, row % 8 / 2, and the offset of a head's first row in units of 16 bytes. Rows behind the
    last multiple of 8 are not in it."""
    return _runs(rows.dtype, rows.pointer, rows.shape, rows.strides)


@functools.lru_cache(maxsize=1024)
def _runs(dtype: str, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes | None:
    (batch, length, heads, dim), row = shape, 2 * strides[1]
    ends = strides[0] * (batch - 1), strides[2] * (heads - 1)
    last = sum(ends) // 8
    if min(ends) < 0 or last >= 2**31:
        return None
    return _encode(_KINDS[dtype], pointer, (dim, 2, length // 8, 4, last + 1), (row, 8 * row, 2 * row, 16),
                   (2, 4, 4, 1))


@functools.lru_cache(maxsize=1024)
def _map(dtype: str, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...],
         tile: tuple[int, int]) -> bytes | None:
    steps = tuple(2 * strides[axis] if shape[axis] > 1 else 16 for axis in axes)
    return _encode(_KINDS[dtype], pointer, (shape[3], *(shape[axis] for axis in axes)), steps, (*tile, 1))


def _encode(kind: int, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...],
            tile: tuple[int, ...]) -> bytes | None:
    encode = _driver_function()
    if encode is None or any(not 0 < stride < 2**40 or stride % 16 for stride in strides) or not all(shape):
        return None
    space = ctypes.create_string_buffer(MAP_BYTES + 64)
    skip = -ctypes.addressof(space) % 64
    rank = len(shape)
    arguments = (ctypes.c_void_p(ctypes.addressof(space) + skip), kind, rank, ctypes.c_void_p(pointer),
                 (ctypes.c_uint64 * rank)(*shape), (ctypes.c_uint64 * (rank - 1))(*strides),
                 (ctypes.c_uint32 * rank)(CHUNK_COLUMNS, *tile), (ctypes.c_uint32 * rank)(*[1] * rank),
                 _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZERO)
    status = encode(*arguments)
    if status == launch.INVALID_CONTEXT:  # autograd's thread, before anything else of CUDA
        bind()
        status = encode(*arguments)
    if status not in (0, _INVALID_VALUE):
        raise RuntimeError(f"no TMA descriptor of {shape} at {pointer:#x} can be made: {launch.error_text(status)}")
    return space.raw[skip:skip + MAP_BYTES] if status == 0 else None


@functools.cache
def _driver_function() -> Any:
    """``cuTensorMapEncodeTiled``, or None where the driver has none."""
    try:
        return launch.library().cuTensorMapEncodeTiled
    except (RuntimeError, AttributeError):
        return None
