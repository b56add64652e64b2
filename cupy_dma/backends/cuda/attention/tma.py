"""TMA descriptors (``CUtensorMap``) of the tensors of a program, encoded by the driver on the host.

A descriptor differs between calls only in the word with its address, which is found by comparing two descriptors that
differ in their address alone.
"""
from __future__ import annotations

import ctypes
import struct
from typing import Any, cast

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import launch
from cupy_dma.backends.cuda.runtime.device import bind
from cupy_dma.backends.cuda.runtime.params import Packed, Ref

MAP_BYTES = 128  # of a descriptor, which must lie at a multiple of 64
CHUNK_COLUMNS = 64  # of a TMA tile: 128 bytes, the width of the swizzle (kernels/sm90/ptx.cuh)
_KINDS = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZERO = 0, 3, 3, 0
_INVALID_VALUE = 1  # the driver's status for what TMA cannot read
_ADDRESSES = 2**40 + 16, 2**46 + 2**41 + 48  # made up; aligned no better than arrays are


def rows_map(rows: Operand, block: int) -> Packed | None:
    """The descriptor of ``rows (B, L, H, D)``, 16-bit elements in aligned rows, with axes D, L, H, B; a TMA tile is
    ``block`` rows of one head. None if TMA cannot read it."""
    return _map(rows, (1, 2, 0), (block, 1))


def queries_map(rows: Operand, queries: int, heads: int) -> Packed | None:
    """The same with axes D, H, L, B: a TMA tile has ``heads`` heads of each of ``queries`` rows, heads first."""
    return _map(rows, (2, 1, 0), (heads, queries))


def runs_map(rows: Operand) -> Packed | None:
    """The descriptor of ``rows (B, L, H, D)`` whose TMA tile is 32 rows of one head, starting at a multiple of 8, in
    the order of gathered keys (``row_of_key`` in kernels/sm90/smem.cuh): 0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, ... Its
    axes are D, row % 2, row / 8, row % 8 / 2, and the offset of a head's first row in units of 16 bytes. It does not
    include rows behind the last multiple of 8."""
    (batch, length, heads, dim), strides = rows.shape, rows.strides
    row = 2 * strides[1]
    ends = strides[0] * (batch - 1), strides[2] * (heads - 1)
    last = sum(ends) // 8
    if min(ends) < 0 or last >= 2**31:
        return None
    return _relocated(rows, (dim, 2, length // 8, 4, last + 1), (row, 8 * row, 2 * row, 16), (2, 4, 4, 1))


def _map(rows: Operand, axes: tuple[int, ...], tile: tuple[int, int]) -> Packed | None:
    shape, steps = rows.shape, tuple(2 * rows.strides[axis] if rows.shape[axis] > 1 else 16 for axis in axes)
    return _relocated(rows, (shape[3], *(shape[axis] for axis in axes)), steps, (*tile, 1))


def _relocated(rows: Operand, shape: tuple[int, ...], strides: tuple[int, ...],
               tile: tuple[int, ...]) -> Packed | None:
    """The descriptor, still without the address of ``rows``."""
    encode = cast(Any, rows.library).runtime.tensor_map_encoder()
    first, second = (_encode(encode, _KINDS[rows.dtype], address, shape, strides, tile) for address in _ADDRESSES)
    if first is None or second is None:
        return None
    words = [struct.unpack(f"{MAP_BYTES // 8}Q", x) for x in (first, second)]
    places = [i for i, pair in enumerate(zip(*words)) if pair[0] != pair[1]]
    if len(places) != 1 or tuple(x[places[0]] for x in words) != _ADDRESSES:
        raise RuntimeError("this driver stores addresses in TMA descriptors in an unknown way; please report it")
    at = 8 * places[0]
    return Packed(first[:at] + bytes(8) + first[at + 8:], ((at, cast(Ref, rows.pointer)),))


def _encode(encode: Any, kind: int, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...],
            tile: tuple[int, ...]) -> bytes | None:
    """``encode``: as ``Runtime.tensor_map_encoder`` gives it."""
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
    if status == launch.INVALID_CONTEXT:  # autograd's thread, before its first CUDA call
        bind()
        status = encode(*arguments)
    if status not in (0, _INVALID_VALUE):
        raise RuntimeError(f"cannot make a TMA descriptor of {shape} at {pointer:#x}: {launch.error_text(status)}")
    return space.raw[skip:skip + MAP_BYTES] if status == 0 else None
