"""The one way from a checked call to a backend, and back to the caller's arrays."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupy_dma.arrays import Operand, describe
from cupy_dma.calls.types import AttentionCall, DynamicCall


def scores_of(call: DynamicCall, module: Any) -> Operand:
    """The scores of a call: those given, or made on the backend ``module`` by the call's recipe."""
    if call.recipe is None:
        assert call.scores is not None
        return call.scores
    return replace(describe(module.key_scores(*call.recipe), "scores"), library=call.value.library)


def run(call: AttentionCall, return_lse: bool, module: Any) -> Any:
    """``out``, or ``(out, lse)``, of a checked call on the backend ``module``."""
    return delivered(call, module.attention(call), return_lse)


def delivered(call: AttentionCall | DynamicCall, results: tuple[Any, Any], return_lse: bool) -> Any:
    """``out``, or ``(out, lse)``, as the caller gets them."""
    export, (out, lse) = call.query.library.export, results
    return (export(out), export(lse)) if return_lse else export(out)


def run_varlen(call: AttentionCall, return_lse: bool, module: Any) -> Any:
    """``out (total_q, H, D)``, or ``(out, lse)``, of a checked call on the backend ``module``."""
    out, lse = module.attention(call)
    export = call.query.library.export
    return (export(out[0]), export(lse[0])) if return_lse else export(out[0])
