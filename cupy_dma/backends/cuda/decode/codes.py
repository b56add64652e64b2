"""Codes of a call's new rows, for a cache with 8-bit rows (``cupy_dma/cache/storage.py``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Builder
from cupy_dma.backends.cuda.runtime.configs import ELEMENTS, blocks
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
    name, widths = f"codes {call.batch} {call.length}", (state.head_dim, state.value_dim)
    rows = call.batch * call.length * state.kv_heads
    ends = [blocks(rows * width, 16) * 16 for width in widths]  # of keys and of values
    kept: list[Operand] = [state.workspace[name + x] for x in (" rows", " scales") if name + x in state.workspace]
    arrays = kept or [made(state, name + " rows", sum(ends), "uint8"), made(state, name + " scales", 2 * rows)]
    if not kept and not state.library.is_capturing(state.device):
        state.workspace.update({array.name: array for array in arrays})
    codes, scales = (array.pointer for array in arrays)
    return Codes(arrays, *_fields(state, call, (codes, codes + ends[0], scales, scales + 4 * rows)))


def launch(build: Builder, state: CacheState, call: ExtendCall) -> dict[str, Any]:
    """The same in a program: the parameters of kernels that read the codes."""
    size = call.key.shape[0] * call.length * state.kv_heads
    arrays = [build.empty((size * width,), "uint8") for width in (state.head_dim, state.value_dim)]
    arrays += [build.empty((size,), "float32") for _ in range(2)]
    params, fields = _fields(state, call, tuple(array.ref for array in arrays))
    config = QuantizeConfig(ELEMENTS[state.dtype], state.head_dim, state.value_dim, STORAGE[state.storage])
    build.launch(build.load(config, "quantize_rows"), blocks(2 * size, WARPS), 32 * WARPS,
                 jit.params(config.source, "QuantizeParams").pack_some(params))
    return fields


def _fields(state: CacheState, call: ExtendCall, pointers: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of the kernel that makes the codes, and of those that read them. ``pointers``: to codes of keys
    and of values, and to their scales."""
    fields: dict[str, Any] = dict(zip(("new_key", "new_value", "new_key_scale", "new_value_scale"), pointers))
    params: dict[str, Any] = dict(zip(("key_codes", "value_codes", "key_scale", "value_scale"), pointers))
    params |= {"key": call.key.pointer, "value": call.value.pointer, "length": call.length, "kv_heads": state.kv_heads,
               "rows": call.key.shape[0] * call.length * state.kv_heads}
    for which, operand, width in (("key", call.key, state.head_dim), ("value", call.value, state.value_dim)):
        params |= dict(zip((f"{which}_batch", f"{which}_row", f"{which}_head"), operand.strides))
        fields |= {f"{which}_batch": call.length * state.kv_heads * width, f"{which}_row": state.kv_heads * width,
                   f"{which}_head": width}
    assert state.key_scale is not None and state.value_scale is not None
    return params, fields | {"key_scale": state.key_scale.pointer, "value_scale": state.value_scale.pointer}


def made(state: CacheState, name: str, size: int, dtype: str = "int32") -> Operand:
    """An array without initial values."""
    library = state.library
    return library.describe(library.empty((max(size, 2),), dtype, state.device), name)
