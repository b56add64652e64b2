"""Key scores and their gradient on the device (SPEC sections 2 and 6)."""
from __future__ import annotations

import math
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import (
    ELEMENTS,
    SCORE_BLOCK_KEYS,
    SCORE_MAX_SLICE,
    SCORE_THREADS,
    ScoreBackwardConfig,
    ScoreConfig,
    blocks,
)

#: The names of the results in ``ScoreBackwardParams``.
_RESULTS = {"value": "dvalue", "dt_proj": "ddt_proj", "A": "dA", "dt_bias": "ddt_bias"}


def key_scores(build: Builder, value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None,
               form: str) -> Array:
    """Scores ``(B, Hkv, Lk)`` float32 of ``value (B, Lk, Hkv, D)``."""
    batch, length, kv_heads, _ = value.shape
    out = build.empty((batch, kv_heads, length), "float32")
    if batch and length:
        _run(build, value, dt_proj, A, dt_bias, form, score=out.ref)
    return out


def key_scores_backward(build: Builder, dscores: Operand, value: Operand, dt_proj: Operand, A: Operand,
                        dt_bias: Operand | None, form: str, needs: frozenset[str],
                        dvalue: Operand | None = None) -> tuple[Array | None, ...]:
    """``(dvalue, ddt_proj, dA, ddt_bias)``, None for what is not in ``needs``; see ``cupy_dma.backends``."""
    batch, length, kv_heads, head_dim = value.shape
    channels = kv_heads * head_dim
    slice_keys = _slice_keys(batch * length)
    slices = blocks(length, slice_keys)
    key_blocks, channel_blocks = blocks(length, SCORE_BLOCK_KEYS), blocks(channels, SCORE_THREADS)
    ddt, dA_partial = (build.empty((batch, kv_heads, length), "float32") for _ in range(2))
    partial = build.empty((batch * slices, kv_heads, channels), "float32")
    made = {name: build.empty(like.shape, like.dtype) for name, like in (
        ("value", value), ("dt_proj", dt_proj), ("A", A), ("dt_bias", dt_bias)) if name in needs and like is not None}
    if batch and length:
        _run(build, value, dt_proj, A, dt_bias, form, dscore=dscores.pointer, ddt=ddt.ref, dA_partial=dA_partial.ref)
    config = ScoreBackwardConfig(value=ELEMENTS[value.dtype], weight=ELEMENTS[dt_proj.dtype],
                                 parameter=ELEMENTS[A.dtype], head_dim=head_dim, kv_heads=kv_heads,
                                 head_tile=min(kv_heads, 8))
    fields = {
        "ddt": ddt.ref, "dA_partial": dA_partial.ref, "value": value.pointer, "dt_proj": dt_proj.pointer,
        "partial": partial.ref, "value_batch": value.strides[0], "value_row": value.strides[1],
        "value_head": value.strides[2], "weight_row": dt_proj.strides[0], "batch": batch, "key_length": length,
        "key_blocks": key_blocks, "channel_blocks": channel_blocks, "slice_keys": slice_keys, "slices": slices,
        "all_slices": batch * slices, **_added(dvalue),
        **{field: made[name].ref if name in made else 0 for name, field in _RESULTS.items()}}

    def launch(entry: str, weight_blocks: int, others: int, pdl: bool) -> None:
        weight_blocks *= "dt_proj" in made
        if weight_blocks + others:
            params = jit.params(config.source, "ScoreBackwardParams").pack(weight_blocks=weight_blocks, **fields)
            build.launch(build.load(config, entry), weight_blocks + others, SCORE_THREADS, params, pdl)

    # Its blocks have long work and would gather behind those of key_scores with PDL (100 us instead of 71).
    launch("score_gradients", batch * slices * channel_blocks,
           batch * key_blocks * channel_blocks * ("value" in made), pdl=False)
    launch("add_score_gradients", blocks(kv_heads * channels, SCORE_THREADS),
           kv_heads * (("A" in made) + ("dt_bias" in made)), pdl=True)
    return tuple([made.get(name) for name in _RESULTS])


def _slice_keys(keys: int) -> int:
    """Keys per block for the gradient of weights, so that its slices and the sums over them take about equally long."""
    return min(SCORE_MAX_SLICE, 32 * max(1, blocks(math.isqrt(2 * keys), 32)))


def with_known_types(value: Operand, dt_proj: Operand, A: Operand,
                     dt_bias: Operand | None) -> tuple[Operand, Operand, Operand | None]:
    """Parameters in types that the kernels support: ``A`` and ``dt_bias`` share one."""
    if value.dtype not in ELEMENTS:
        raise TypeError(f"value must be float16, bfloat16 or float32 on CUDA, got {value.dtype}")
    if A.dtype not in ELEMENTS or dt_bias is not None and dt_bias.dtype != A.dtype:
        A, dt_bias = as_float32(A), None if dt_bias is None else as_float32(dt_bias)
    return dt_proj if dt_proj.dtype in ELEMENTS else as_float32(dt_proj), A, dt_bias


def as_float32(operand: Operand) -> Operand:
    """The operand, converted by its library."""
    if operand.dtype == "float32":
        return operand
    return operand.library.describe(operand.library.astype(operand.array, "float32"), operand.name)


def _added(dvalue: Operand | None) -> dict[str, Any]:
    """The existing gradient of value, which value_gradient adds."""
    if dvalue is None:
        return {"dvalue_in": 0, "in_batch": 0, "in_row": 0, "in_head": 0}
    return {"dvalue_in": dvalue.pointer, "in_batch": dvalue.strides[0], "in_row": dvalue.strides[1],
            "in_head": dvalue.strides[2]}


def _run(build: Builder, value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None, form: str,
         score: Any = 0, dscore: Any = 0, ddt: Any = 0, dA_partial: Any = 0) -> None:
    """Launches kernels/select/key_scores.cu: scores, or with ``dscore`` their gradients."""
    batch, length, kv_heads, head_dim = value.shape
    size = 4 if value.dtype == "float32" else 2

    def in_pieces(operand: Operand, elements: int) -> bool:
        """Whether each row can be read ``elements`` elements at a time."""
        return head_dim % elements == 0 and operand.pointer % (elements * size) == 0 and not any(
            stride % elements for stride, extent in zip(operand.strides, operand.shape[:-1]) if extent > 1)

    tensor_cores = size == 2 and value.dtype == dt_proj.dtype and in_pieces(value, 8) and in_pieces(dt_proj, 8)
    config = ScoreConfig(value=ELEMENTS[value.dtype], weight=ELEMENTS[dt_proj.dtype],
                         parameter=ELEMENTS[A.dtype], head_dim=head_dim, kv_heads=kv_heads,
                         head_tile=max(tile for tile in (1, 2, 4, 8) if tile <= kv_heads),
                         vector=in_pieces(value, 4), exp_form=form == "exp", gradient=dscore != 0,
                         tensor_cores=tensor_cores)
    key_blocks, head_tiles = blocks(length, config.block_keys), config.head_tiles
    params = jit.params(config.source, "ScoreParams").pack(
        value=value.pointer, dt_proj=dt_proj.pointer, A=A.pointer, dt_bias=dt_bias.pointer if dt_bias else 0,
        score=score, dscore=dscore, ddt=ddt, dA_partial=dA_partial, value_batch=value.strides[0],
        value_row=value.strides[1], value_head=value.strides[2], weight_row=dt_proj.strides[0], key_length=length,
        key_blocks=key_blocks, head_tiles=head_tiles)
    # With PDL, blocks of many keys gather behind an attention kernel (60 us, not 52); a step's few keys gain 1 us.
    build.launch(build.load(config, "key_scores"), batch * key_blocks * head_tiles, SCORE_THREADS, params,
                 pdl=key_blocks == 1)
