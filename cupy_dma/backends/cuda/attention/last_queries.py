"""Dynamic mask attention of the last few queries of a long history (SPEC sections 3 and 5).

``select/last_queries.py`` finds their keys from the scores alone, without a mask over the history.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention import flash_decode
from cupy_dma.backends.cuda.attention.problem import Problem, with_known_bias
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.select.last_queries import select_last
from cupy_dma.backends.cuda.select.scores import as_float32
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias, with_mask


def attend_last(run: Callable[..., Any], runtime: Runtime, call: DynamicCall,
                scores: Operand) -> tuple[Any, Any] | None:
    """``out`` and ``lse`` of a dynamic call with these scores; None if a mask is faster. ``run`` runs a program."""
    attention = call.attention
    queries, keys = attention.query_length, attention.key_length
    rows = queries * (attention.heads // attention.kv_heads)
    if (isinstance(call.window, tuple) or call.keys != "prefix" or call.candidates.padding is not None
            or call.candidates.documents is not None or not 1 <= rows <= flash_decode.MAX_ROWS
            or keys - queries + 1 <= call.window
            or scores.dtype == "float64" or scores.shape[1] != attention.kv_heads or checks.wants_values_checked()):
        return None
    attention = with_known_bias(with_mask(attention, None, key_bias(as_float32(scores))))
    if attention.batch == 0 or not flash_decode.can_serve(runtime, attention.query.device.index, attention,
                                                          Problem(attention)):
        return None
    return run(_attend_last, attention, call.window)


def _attend_last(build: Builder, call: AttentionCall, window: int) -> tuple[Array, Array]:
    """Of a call whose scores are its bias."""
    problem, query, bias = Problem(call), call.query, call.bias
    assert bias is not None
    (batch, heads, _, length), (each_batch, head, _, key) = bias.shape, bias.strides
    scores = dataclasses.replace(bias, shape=(batch, heads, length), strides=(each_batch, head, key))
    out = build.empty((*query.shape[:3], call.value_dim), query.dtype)
    lse = build.empty((call.batch, call.heads, call.query_length), "float32")
    sets = flash_decode.sets_of(call.query_length * (call.heads // call.kv_heads),
                                max(call.head_dim, call.value_dim) * problem.size)
    listed = select_last(build, scores, window, call.query_length, sets)
    flash_decode.attention(build, call, problem, out, lse, listed)
    return out, lse
