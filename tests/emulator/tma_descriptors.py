"""The driver's part in describing tensors for TMA: ``cuTensorMapEncodeTiled``.

It does not write the hardware's map but the relevant arguments (``TensorDescription`` in driver/state.h), checked like
the driver does.
"""
import ctypes
from typing import Any

from cupy_dma.backends.cuda.attention.tma import MAP_BYTES

_SWIZZLE_128 = 3
_SWIZZLED_COLUMNS = 64  # of 16 bit


def encode(target: Any, kind: int, rank: int, pointer: Any, shape: Any, strides: Any, tile: Any, steps: Any,
           interleave: int, swizzle: int, promotion: int, fill: int) -> int:
    """0, or 1 (CUDA_ERROR_INVALID_VALUE)."""
    valid = (target.value % 64 == 0 and pointer.value % 16 == 0 and rank in (4, 5) and swizzle == _SWIZZLE_128
             and all(0 < x < 2**32 for x in shape) and all(0 < x < 2**40 and x % 16 == 0 for x in strides)
             and all(0 < x <= 256 for x in tile) and tile[0] == _SWIZZLED_COLUMNS and all(x == 1 for x in steps))
    if not valid:
        return 1
    pad = (0,) * (5 - rank)
    words = (ctypes.c_uint64 * (MAP_BYTES // 8))(rank, pointer.value, *shape, *pad, *strides, *pad, *tile, *pad)
    ctypes.memmove(target.value, words, MAP_BYTES)
    return 0
