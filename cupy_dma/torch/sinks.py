"""Learned sink logits: their checks, and adding them to the results of an attention."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from cupy_dma import checks
from cupy_dma.backends.torch_common.sinks import AddSinks


def check_sinks(sink_logits: Any, query: Any) -> None:
    """Raise unless they are floats ``(H,)`` for this query ``(..., H, D)``."""
    if not isinstance(sink_logits, Tensor):
        raise TypeError(f"sink_logits must be a Tensor, got {type(sink_logits).__name__}")
    kind = str(sink_logits.dtype).removeprefix("torch.")
    if kind not in checks.FLOATS:
        raise TypeError(f"sink_logits must be {' or '.join(checks.FLOATS)}, got {kind}")
    if not isinstance(query, Tensor) or query.ndim < 2:
        return  # the checks of query will raise
    if tuple(sink_logits.shape) != (query.shape[-2],):
        raise checks.wrong_shape("sink_logits", "(H,)", ((query.shape[-2],),), tuple(sink_logits.shape))
    if sink_logits.device != query.device:
        raise ValueError(f"all arrays must be on one device: query is on {query.device}, sink_logits is on "
                         f"{sink_logits.device}")


def delivered(out: Tensor, lse: Tensor, return_lse: bool, sink_logits: Tensor | None) -> Any:
    """Results in the caller's form, from those of an attention without sinks."""
    if sink_logits is not None:
        out, lse = AddSinks.apply(out, lse, sink_logits)
    return (out, lse) if return_lse else out
