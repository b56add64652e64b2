"""Learned sink logits (SPEC section 5): a key without a row, seen by every query, whose value is zero.

    lse'_i = log(exp(lse_i) + exp(sink))        out'_i = out_i * exp(lse_i - lse'_i)
    dsink  = sum over i of p_i * (dlse'_i - dout_i . out'_i),        p_i = exp(sink - lse'_i)

This correction follows the attention of any backend. The backward pass needs none: given ``out'`` and ``lse'`` in place
of ``out`` and ``lse``, its formulas yield the gradients of query, key, value and bias. Axes: ``lse (..., H, Lq)``,
``out (..., Lq, H, Dv)``.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Library, Operand, describe


def check_sinks(sink_logits: Any, q: Operand) -> Operand | None:
    """The checked ``sink_logits`` for a query ``(..., H, D)``."""
    if sink_logits is None:
        return None
    operand = describe(sink_logits, "sink_logits")
    checks.one_of_types(operand)
    checks.has_shape(operand, "(H,)", ((q.shape[-2],),))
    checks.require_same_device((q, operand))
    return operand


def shares(xp: Any, lse: Any, sinks: Any) -> tuple[Any, Any, Any]:
    """The shares of the keys and of the sink in each row's probability, and ``lse'``; ``lse`` excludes the sink. A sink
    of -inf does not exist."""
    sinks = sinks[:, None]
    distance = lse - sinks
    ratio = xp.exp(-xp.abs(distance))
    smaller, larger = ratio / (1 + ratio), 1 / (1 + ratio)
    keys, sink = xp.where(distance > 0, larger, smaller), xp.where(distance > 0, smaller, larger)
    absent = xp.isinf(sinks) & (sinks < 0)
    total = xp.maximum(lse, sinks) + xp.log1p(ratio)
    return xp.where(absent, 1.0, keys), xp.where(absent, 0.0, sink), xp.where(absent, lse, total)


def of_rows(x: Any) -> Any:
    """``(..., H, Lq)`` as ``(..., Lq, H, 1)``."""
    return x.swapaxes(-1, -2)[..., None]


def add_sinks(library: Library, out: Any, lse: Any, sinks: Operand, dtype: str) -> tuple[Any, Any]:
    """``out'`` of this type, and ``lse'``."""
    wide = sinks_like(library, sinks, dtype)
    keys, _, total = shares(library.xp, lse, wide)
    return library.astype(library.astype(out, _wide(dtype)) * of_rows(keys), dtype), total


def sink_gradient(library: Library, dout: Any, out: Any, lse: Any, dlse: Any, sinks: Operand, dtype: str) -> Any:
    """``dsink`` of the type of ``sinks``, from ``out'`` and ``lse'``; ``dlse`` may be None."""
    xp, wide = library.xp, sinks_like(library, sinks, dtype)[:, None]
    lse, dlse = (x if x is None else library.astype(x, _wide(dtype)) for x in (lse, dlse))
    probability = xp.where(xp.isinf(wide) & (wide < 0), 0.0, xp.exp(wide - lse))
    ds = probability * ((0 if dlse is None else dlse) - row_products(library, dout, out, dtype))
    return library.astype(summed(ds), sinks.dtype)


def row_products(library: Library, dout: Any, out: Any, dtype: str) -> Any:
    """``dout . out`` of each row, ``(..., H, Lq)``; a row of zeros has 0, whatever its ``dout``."""
    out, dout = library.astype(out, _wide(dtype)), library.astype(dout, _wide(dtype))
    return library.xp.where(out == 0, 0.0, dout * out).sum(-1).swapaxes(-1, -2)


def summed(ds: Any) -> Any:
    """``(..., H, Lq)`` summed over all axes but heads."""
    ds = ds.sum(-1)
    return ds if ds.ndim == 1 else ds.sum(0)


def sinks_like(library: Library, sinks: Operand, dtype: str) -> Any:
    """The sinks in the type of ``lse``, for queries of this type."""
    return library.astype(sinks.array, _wide(dtype))


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"
