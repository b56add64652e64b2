"""Key scores: the zero-order-hold states that decide which keys are kept (SPEC section 2).

    dt[b, j, g] = sum over (g', d) of value[b, j, g', d] * dt_proj[g, g' * D + d]  (+ dt_bias[g])
    score[b, g, j] = exp(A[g] * softplus(dt[b, j, g]))       form="exp"
                   = A[g] * softplus(dt[b, j, g])            form="linear"

One number per key and kv head, the same for every query. A layer may compute them from its input instead.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe

FORMS = ("exp", "linear")
SOURCES = ("value", "input")  # of a layer's scores
Recipe = tuple[Operand, Operand, Operand, Operand | None, str]  # value, dt_proj, A, dt_bias, form


def width_of(scores: str, width: int | None) -> int | None:
    """The checked width of the input that a layer's scores are computed from; None: they are computed from values."""
    checks.choice(scores, "scores", SOURCES)
    if (width is None) != (scores == "value"):
        raise ValueError(f"width must be given with scores='input' and only then, got width={width} and "
                         f"scores={scores!r}")
    return None if width is None else checks.whole(width, "width", 1)


def check_option(width: int | None, name: str, value: Any) -> None:
    """ValueError if a layer's option does not fit what its scores are computed from."""
    if width is not None and (name == "form" and value != "linear" or name == "A_init" and value):
        raise ValueError(f"{name} needs scores='value', got {name}={value!r} and scores='input'")


def recipe_of(value: Any, dt_proj: Any, A: Any, dt_bias: Any, form: str) -> Recipe:
    """The checked arguments of a backend's ``key_scores``."""
    v, projection, a = describe(value, "value"), describe(dt_proj, "dt_proj"), describe(A, "A")
    offset = None if dt_bias is None else describe(dt_bias, "dt_bias")
    operands = (v, projection, a, offset)
    for operand in operands:
        if operand is not None:
            checks.one_of_types(operand)
    if len(v.shape) != 4:
        raise ValueError(f"value must have shape (B, Lk, Hkv, D), got {v.shape}")
    heads, size = v.shape[2], v.shape[3]
    if not 1 <= size <= 256:
        raise ValueError(f"value must have a head dim D (last axis) of 1 to 256, got shape {v.shape}")
    if heads < 1:
        raise ValueError(f"value must have at least one kv head, got shape {v.shape}")
    checks.has_shape(projection, "(Hkv, Hkv*D)", ((heads,), (heads * size,)))
    checks.has_shape(a, "(Hkv,)", ((heads,),))
    if offset is not None:
        checks.has_shape(offset, "(Hkv,)", ((heads,),))
    for operand in operands:
        if operand is not None:
            checks.rows_contiguous(operand)
    checks.require_same_device(operands)
    checks.choice(form, "form", FORMS)
    return v, projection, a, offset, form
