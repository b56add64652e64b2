"""Descriptions of tensors for the copy engine of Hopper GPUs (``CUtensorMap``), made by the driver on the host."""
from __future__ import annotations

import ctypes
import functools
from typing import Any

from cupy_dma.arrays import Operand

MAP_BYTES = 128  # of a map, which must lie at a multiple of 64
CHUNK_COLUMNS = 64  # of a box: 128 bytes, the width of the swizzle (kernels/sm90/arch.cuh)
_KINDS = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZERO = 0, 3, 3, 0


def rows_map(rows: Operand, block: int) -> bytes | None:
    """The map, with axes D, L, H, B, of ``rows (B, L, H, D)``, 16-bit elements in aligned rows; a box has ``block``
    rows of one head. None where the copy engine cannot read it."""
    return _map(rows, (1, 2, 0), (block, 1))


def queries_map(rows: Operand, queries: int, heads: int) -> bytes | None:
    """The same with axes D, H, L, B: a box has ``heads`` heads of each of ``queries`` rows, heads first."""
    return _map(rows, (2, 1, 0), (heads, queries))


def _map(rows: Operand, axes: tuple[int, int, int], box: tuple[int, int]) -> bytes | None:
    strides = tuple(2 * rows.strides[axis] if rows.shape[axis] > 1 else 16 for axis in axes)
    shape = (rows.shape[3], *(rows.shape[axis] for axis in axes))
    return _encode(_KINDS[rows.dtype], rows.pointer, shape, strides, box)


@functools.lru_cache(maxsize=1024)
def _encode(kind: int, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...],
            box: tuple[int, int]) -> bytes | None:
    encode = _driver_function()
    if encode is None or any(not 0 < stride < 2**40 or stride % 16 for stride in strides) or not all(shape):
        return None
    space = ctypes.create_string_buffer(MAP_BYTES + 64)
    skip = -ctypes.addressof(space) % 64
    status = encode(ctypes.c_void_p(ctypes.addressof(space) + skip), kind, 4, ctypes.c_void_p(pointer),
                    (ctypes.c_uint64 * 4)(*shape), (ctypes.c_uint64 * 3)(*strides),
                    (ctypes.c_uint32 * 4)(CHUNK_COLUMNS, *box, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1),
                    _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZERO)
    return space.raw[skip:skip + MAP_BYTES] if status == 0 else None


@functools.cache
def _driver_function() -> Any:
    """``cuTensorMapEncodeTiled``, or None where the driver has none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name).cuTensorMapEncodeTiled
        except (OSError, AttributeError):
            continue
    return None
