"""Dynamic mask attention of the last few queries of a long history (SPEC sections 3 and 5).

Which keys they see is found from the scores alone (``select/last_queries.py``), without a mask over the history.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention import flash_decode
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.select.last_queries import select_last
from cupy_dma.calls.types import DynamicCall, key_bias, with_mask


def attend_last(runtime: Runtime, call: DynamicCall, scores: Operand) -> tuple[Any, Any] | None:
    """``out`` and ``lse`` of a dynamic call with these scores; None for a call that is better served by a mask."""
    attention = call.attention
    queries, keys = attention.query_length, attention.key_length
    rows = queries * (attention.heads // attention.kv_heads)
    if (call.keys != "prefix" or call.candidates.padding is not None or call.candidates.runs is not None
            or not 1 <= rows <= flash_decode.MAX_ROWS or keys - queries + 1 <= call.window
            or scores.dtype == "float64" or scores.shape[1] != attention.kv_heads or checks.wants_values_checked()):
        return None
    query, library, device = attention.query, attention.query.library, attention.query.device
    if scores.dtype != "float32":
        scores = library.describe(library.astype(scores.array, "float32"), "scores")
    attention = with_mask(attention, None, key_bias(scores))
    problem = Problem(attention)
    if attention.batch == 0 or not flash_decode.can_serve(runtime, device.index, attention, problem):
        return None
    out = library.empty((*query.shape[:3], attention.value_dim), query.dtype, device)
    lse = library.empty((attention.batch, attention.heads, queries), "float32", device)
    sets = flash_decode.sets_of(rows, max(attention.head_dim, attention.value_dim) * problem.size)
    with runtime.on(device):
        listed = select_last(runtime, scores, call.window, queries, sets)
        flash_decode.attention(runtime, attention, problem, out, lse, listed)
    return out, lse
