"""Key scores: the zero-order-hold states that decide which keys are kept (SPEC section 2).

    dt[b, j, g] = sum over (g', d) of value[b, j, g', d] * dt_proj[g, g' * D + d]  (+ dt_bias[g])
    score[b, g, j] = exp(A[g] * softplus(dt[b, j, g]))       form="exp"
                   = A[g] * softplus(dt[b, j, g])            form="linear"

One number per key and kv head, the same for every query.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import backends, checks
from cupy_dma.arrays import Operand, belongs_to_torch, describe

FORMS = ("exp", "linear")
Recipe = tuple[Operand, Operand, Operand, Operand | None, str]  # value, dt_proj, A, dt_bias, form


def key_scores(value: Any, dt_proj: Any, A: Any, *, dt_bias: Any = None, form: str = "exp",
               backend: str | None = None) -> Any:
    """Scores of all keys.

    Parameters
    ----------
    value : float array ``(B, Lk, Hkv, D)``
        Any strides, the last axis contiguous. float64 on the numpy backend only.
    dt_proj : float array ``(Hkv, Hkv * D)``
    A : float array ``(Hkv,)``
    dt_bias : float array ``(Hkv,)``, optional
        The parameters may be of another float type than ``value``.
    form
        ``"exp"``: ``exp(A * softplus(dt))``, the original definition (Hugging Face Doge); ``"linear"``:
        ``A * softplus(dt)``, the later, numerically calmer one. They select the same keys but are different biases.
    backend
        See ``cupy_dma.get_available_backends``. ``"numpy"`` with CUDA arrays copies to the host and back.

    Returns
    -------
    float32 array ``(B, Hkv, Lk)`` of ``value``'s library (float64 if ``value`` is float64). The sum over ``(g', d)`` is
    accumulated in that type.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, shape or place.

    Notes
    -----
    Torch tensors that require grad get it (``cupy_dma.torch``). For other libraries see ``cupy_dma.backward``.
    """
    if belongs_to_torch(value, dt_proj, A, dt_bias):
        from cupy_dma.torch import functions

        return functions.key_scores(value, dt_proj, A, dt_bias=dt_bias, form=form, backend=backend)
    call = prepare(value, dt_proj, A, dt_bias, form)
    scores = backends.choose(backend, call[:1]).key_scores(*call)
    return call[0].library.export(scores)


def prepare(value: Any, dt_proj: Any, A: Any, dt_bias: Any, form: str) -> Recipe:
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
    checks.require_same_place(operands)
    checks.choice(form, "form", FORMS)
    return v, projection, a, offset, form
