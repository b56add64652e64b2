"""Codes of a call's new rows, for a cache with 8-bit rows (``cupy_dma/cache/storage.py``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import blocks
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.cache.state import CacheState, ExtendCall

STORAGE = {None: 0, "int8": 1, "fp8": 2}  # of kernels/decode/quantized_rows.cuh
WARPS = 4  # of a block, a row each


@dataclass(frozen=True)
class QuantizeConfig(jit.Config):
    source = "decode/quantize_rows.cu"
    element: str
    head_dim: int
    value_dim: int
    storage: int  # STORAGE


@functools.cache
def _kernel(runtime: Runtime, index: int, element: str, head_dim: int, value_dim: int, storage: int) -> LoadedKernel:
    return runtime.load(QuantizeConfig(element, head_dim, value_dim, storage), "quantize_rows", index)


@dataclass
class Codes:
    """Codes and scales of a call's new rows."""

    arrays: list[Operand]
    params: dict[str, Any]  # of the kernel that makes them
    fields: dict[str, Any]  # of those that read them

    def make(self, runtime: Runtime, index: int, element: str, head_dim: int, value_dim: int, storage: int,
             stream: int) -> None:
        kernel = _kernel(runtime, index, element, head_dim, value_dim, storage)
        kernel.launch(blocks(2 * self.params["rows"], WARPS), 32 * WARPS,
                      jit.params(QuantizeConfig.source, "QuantizeParams").pack_some(self.params), stream)


def codes_of(state: CacheState, call: ExtendCall) -> Codes:
    """Their arrays are kept with the state, unless a capture makes them."""
    key, value, name = call.key, call.value, f"codes {call.batch} {call.length}"
    rows, widths = call.batch * call.length * state.kv_heads, (state.head_dim, state.value_dim)
    ends = [blocks(rows * width, 16) * 16 for width in widths]  # of keys and of values
    kept: list[Operand] = [state.workspace[name + x] for x in (" rows", " scales") if name + x in state.workspace]
    arrays = kept or [made(state, name + " rows", sum(ends), "uint8"), made(state, name + " scales", 2 * rows)]
    if not kept and not state.library.is_capturing(state.device):
        state.workspace.update({array.name: array for array in arrays})
    codes, scales = (array.pointer for array in arrays)
    pointers = codes, codes + ends[0], scales, scales + 4 * rows
    targets = dict(zip(("key_codes", "value_codes", "key_scale", "value_scale"), pointers))
    fields: dict[str, Any] = dict(zip(("new_key", "new_value", "new_key_scale", "new_value_scale"), pointers))
    strides: dict[str, int] = {}
    for which, operand, width in (("key", key, widths[0]), ("value", value, widths[1])):
        strides |= dict(zip((f"{which}_batch", f"{which}_row", f"{which}_head"), operand.strides))
        fields |= {f"{which}_batch": call.length * state.kv_heads * width, f"{which}_row": state.kv_heads * width,
                   f"{which}_head": width}
    assert state.key_scale is not None and state.value_scale is not None
    fields |= {"key_scale": state.key_scale.pointer, "value_scale": state.value_scale.pointer}
    params = {"key": key.pointer, "value": value.pointer, "rows": rows, "length": call.length,
              "kv_heads": state.kv_heads, **targets, **strides}
    return Codes(arrays, params, fields)


def made(state: CacheState, name: str, size: int, dtype: str = "int32") -> Operand:
    """An array without initial values."""
    library = state.library
    return library.describe(library.empty((max(size, 2),), dtype, state.device), name)
