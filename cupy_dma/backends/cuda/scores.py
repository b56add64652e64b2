"""Key scores on the device (SPEC section 2)."""
from __future__ import annotations

from typing import Any

from cupy_dma import jit
from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.configs import ELEMENTS, SCORE_THREADS, ScoreConfig, blocks
from cupy_dma.backends.cuda.runtime import Runtime


def key_scores(runtime: Runtime, value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None,
               form: str) -> Any:
    """Scores ``(B, Hkv, Lk)`` float32 of ``value (B, Lk, Hkv, D)``."""
    if value.dtype not in ELEMENTS:
        raise TypeError(f"value must be float16, bfloat16 or float32 on CUDA, got {value.dtype}")
    place, device = value.library, value.device
    batch, length, kv_heads, head_dim = value.shape
    dt_proj = dt_proj if dt_proj.dtype in ELEMENTS else _as_float32(dt_proj)
    A, dt_bias = _as_float32(A), None if dt_bias is None else _as_float32(dt_bias)
    out = place.empty((batch, kv_heads, length), "float32", device)
    if batch == 0 or length == 0:
        return out
    size = 4 if value.dtype == "float32" else 2
    vector = (head_dim % 4 == 0 and value.pointer % (4 * size) == 0
              and all(stride % 4 == 0 for stride, extent in zip(value.strides, value.shape[:3]) if extent > 1))
    config = ScoreConfig(ELEMENTS[value.dtype], ELEMENTS[dt_proj.dtype], head_dim, kv_heads,
                         max(tile for tile in (1, 2, 4, 8) if tile <= kv_heads), vector, form == "exp")
    key_blocks, head_tiles = blocks(length, config.block_keys), blocks(kv_heads, config.head_tile)
    params = jit.params("scores.cu", "ScoreParams").pack(
        value=value.pointer, dt_proj=dt_proj.pointer, A=A.pointer, dt_bias=dt_bias.pointer if dt_bias else 0,
        score=place.pointer(out), value_batch=value.strides[0], value_row=value.strides[1],
        value_head=value.strides[2], weight_row=dt_proj.strides[0], key_length=length, key_blocks=key_blocks,
        head_tiles=head_tiles)
    with runtime.on(device):
        runtime.load(config, "key_scores", device.index).launch(batch * key_blocks * head_tiles, SCORE_THREADS, params,
                                                                place.stream(device))
    return out


def _as_float32(operand: Operand) -> Operand:
    if operand.dtype == "float32":
        return operand
    return operand.library.describe(operand.library.astype(operand.array, "float32"), operand.name)
