"""The only path from a checked call to a backend, and back to the caller's arrays."""
from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from cupy_dma.arrays import Operand
from cupy_dma.calls.head_dims import narrowed, with_equal_dims
from cupy_dma.calls.sequences import packed_mask
from cupy_dma.calls.sinks import add_sinks
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias, with_mask
from cupy_dma.masks.interval import IntervalMask


def run(call: AttentionCall, return_lse: bool, module: ModuleType) -> Any:
    """``out`` or ``(out, lse)`` of a call on the backend ``module``, as arrays of the caller's library."""
    return _delivered(call, attend(call, module), return_lse)


def run_dynamic(call: DynamicCall, return_lse: bool, module: ModuleType) -> Any:
    """The same for a dynamic call."""
    return _delivered(call.attention, attended(call, module)[:2], return_lse)


def attend(call: AttentionCall, module: ModuleType) -> tuple[Any, Any]:
    """``out, lse`` of a call on the backend ``module``. Head dims are padded if it needs them equal; sinks are added
    here."""
    own = call if call.sinks is None else replace(call, sinks=None)
    if call.value_dim != call.head_dim and not takes_value_dim(own, module):
        own = with_equal_dims(own)
    return _finished(call, *module.attention(own))


def takes_value_dim(call: Any, module: ModuleType) -> bool:
    """Whether a backend supports ``Dv != D`` for this call (forward or backward)."""
    takes = getattr(module, "takes_value_dim", None)
    return takes is not None and takes(call)


def _finished(call: AttentionCall, out: Any, lse: Any) -> tuple[Any, Any]:
    query = call.query
    out = narrowed(query.library, out, call.value_dim, query.dtype, query.device)
    if call.sinks is None:
        return out, lse
    with query.library.on(query.device), np.errstate(all="ignore"):
        return add_sinks(query.library, out, lse, call.sinks, query.dtype)


def attended(call: DynamicCall, module: ModuleType) -> tuple[Any, Any, bool]:
    """``out, lse`` of a dynamic call, and whether a mask was built: for few queries a backend may not need one."""
    scores = scores_of(call, module)
    attend_last = getattr(module, "attend_last", None)
    if attend_last is not None and call.attention.sequences is None:
        results = attend_last(call, scores)
        if results is not None:
            return *_finished(call.attention, *results), False
    return *attend(masked(call, scores, module), module), True


def attention_of(call: DynamicCall, module: ModuleType) -> AttentionCall:
    """The attention call of a dynamic call, with the mask that its scores select."""
    return masked(call, scores_of(call, module), module)


def scores_of(call: DynamicCall, module: ModuleType) -> Operand:
    """The scores, computed from the call's recipe unless they are given."""
    if call.recipe is None:
        assert call.scores is not None
        return call.scores
    return call.recipe[0].library.operand(module.key_scores(*call.recipe), "scores")


def masked(call: DynamicCall, scores: Operand, module: ModuleType) -> AttentionCall:
    """The attention call with the mask that these scores select, and the scores as key bias."""
    mask = IntervalMask._selected(scores, call.window, call.keys, call.candidates, module)
    attention = call.attention
    if attention.sequences is not None and attention.sequences.page_table is not None:
        mask = packed_mask(mask, attention.sequences.batch)
    return with_mask(attention, mask, key_bias(scores) if attention.bias is None else attention.bias)


def _delivered(call: AttentionCall, results: tuple[Any, Any], return_lse: bool) -> Any:
    """Results in the caller's library and shape; those of packed sequences have no batch axis."""
    export, (out, lse) = call.query.library.export, results
    if call.sequences is not None:
        out, lse = out[0], lse[0]
    return (export(out), export(lse)) if return_lse else export(out)
