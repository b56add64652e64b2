"""8-bit rows in a cache (SPEC section 18): codes, and a scale per row of keys and of values.

A row is rounded once, when its token comes, and every query, its own included, reads the rounded row: what a cache
returns does not depend on how tokens are split into calls. Which rows are kept depends on scores alone, and these are
not rounded.

    scale = max |x| / largest      code = x / scale, rounded, ties to even      read: code * scale, in the call's type

A scale is rounded to the call's type, so that 16-bit arithmetic reads what float32 would, and is at least ``2**-17`` in
float16.

- ``int8``: ``largest`` is 127, and no number is off by more than ``max |x| / 254``.
- ``fp8``, E4M3 with the bits of ``torch.float8_e4m3fn``: ``largest`` is 448, and ``x`` is off by at most ``|x| / 16``
  or ``max |x| / 458752``, whichever is more.

The rounded scale makes these bounds larger by a factor of at most ``1 + 2**-8``, and in float16 ``max |x|`` counts as
at least ``largest * 2**-17``. Rounding to the call's type comes on top. In 16 bits, rounding these numbers again
changes nothing. A row with a number that is not finite reads as NaN throughout.

These are elementwise operations in float32, the same for NumPy, CuPy and torch, and kernels/decode/quantized_rows.cuh
has them too: all give equal bits. Call within ``state.library.on(state.device)``.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupy_dma.arrays import Library, Operand
from cupy_dma.cache.state import CODES, CacheState, ExtendCall
from cupy_dma.calls.head_dims import movable

LARGEST = {"int8": 127.0, "fp8": 448.0}
SMALLEST = 2.0**-17  # the least scale in float16; lower ones would be too coarse
_ROUND = 1.5 * 2**23  # added and subtracted: a float32 below 2**22 becomes the nearest whole number


def checked_storage(storage: Any, dtype: str = "") -> str | None:
    """The argument ``storage`` of a cache for calls of type ``dtype``."""
    if storage is None or isinstance(storage, str) and storage in CODES:
        if storage and dtype == "float64":
            raise TypeError(f"dtype must be float16, bfloat16 or float32 with storage={storage!r}, got float64")
        return storage
    raise ValueError(f"storage must be None, {' or '.join(map(repr, CODES))}, got {storage!r}")


def quantized_call(state: CacheState, call: ExtendCall) -> ExtendCall:
    """The call with the rows that the cache will read, and their codes."""
    if state.storage is None:
        return call
    library = state.library
    found: dict[str, Operand] = {}
    for name in ("key", "value"):
        codes, scale = quantized(library, getattr(call, name).array, state.storage, state.dtype)
        found |= {name: library.operand(codes, name), f"{name}_scale": library.operand(scale, f"{name}_scale")}

    def as_read(name: str) -> Operand:
        codes, scale = found[name].array, found[f"{name}_scale"].array
        return library.operand(dequantized(library, codes, scale, state.dtype), name)

    return replace(call, key=as_read("key"), value=as_read("value"), stored=found)


def read(state: CacheState, name: str, place: Any) -> Any:
    """Keys or values at an index of the cache's arrays, as numbers of the cache's type that every copy supports."""
    library, dtype = state.library, state.dtype
    rows = movable(library, getattr(state, name).array, getattr(state, name).dtype)[place]
    if state.storage is None:
        return rows
    return movable(library, dequantized(library, rows, getattr(state, f"{name}_scale").array[place], dtype), dtype)


def quantized(library: Library, rows: Any, storage: str, dtype: str) -> tuple[Any, Any]:
    """Codes ``(..., d)`` and scales float32 ``(...)`` of ``rows (..., d)``, for calls of type ``dtype``."""
    xp, x = library.xp, library.astype(rows, "float32")
    most = xp.amax(abs(x), -1)
    # By an array: torch multiplies by the reciprocal of a number.
    scale = xp.where(xp.isfinite(most), most, float("nan")) / xp.full_like(most, LARGEST[storage])
    if dtype == "float16":
        scale = xp.clip(scale, SMALLEST, float("inf"))
    scale = library.astype(library.astype(scale, dtype), "float32")
    y = xp.where((scale > 0)[..., None], x / xp.where(scale > 0, scale, 1)[..., None], 0)
    y = xp.clip(y, -LARGEST[storage], LARGEST[storage])
    if storage == "int8":
        return library.astype((y + _ROUND) - _ROUND, "int8"), scale
    size = abs(y)
    bits = library.contiguous(size).view(xp.int32)
    normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - 960  # 3 bits of the mantissa, and a bias of 7, not 127
    small = library.astype((size * 512 + _ROUND) - _ROUND, "int32")  # below 2**-6: in steps of 2**-9
    code = xp.where(size < 2.0**-6, small, normal)
    return library.astype(xp.where(y < 0, code + 128, code), "uint8"), scale


def dequantized(library: Library, codes: Any, scale: Any, dtype: str) -> Any:
    """The rows of these codes, of type ``dtype``."""
    xp = library.xp
    if codes.dtype == xp.int8:
        x = library.astype(codes, "float32")
    else:  # as float16, whose exponent has a bias of 15, not 7
        code = library.astype(library.contiguous(codes).view(xp.int8), "int16")
        x = library.astype(((code << 7) & ~0x4000).view(xp.float16), "float32") * 256
    return library.astype(x * scale[..., None], dtype)


def fake_quantized(library: Library, rows: Any, storage: str, dtype: str) -> Any:
    """Quantized and dequantized: what is read in place of these rows."""
    return dequantized(library, *quantized(library, rows, storage, dtype), dtype)
