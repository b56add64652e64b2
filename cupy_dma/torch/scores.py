"""Key scores and selection in torch.

    key_scores -> scores            key_scores_backward -> the gradients named in ``needs``, in that order
    top_w -> start, stop            (no gradient: the selection is piecewise constant)
"""
from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cupy_dma import backends
from cupy_dma.arrays import library_named
from cupy_dma.calls.gradients import contiguous_floats
from cupy_dma.calls.layout import in_bhnd, is_bnhd
from cupy_dma.calls.scores import Recipe, recipe_of
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.selection import selection_hints
from cupy_dma.masks.windows import window_of
from cupy_dma.torch.registration import (
    as_tensor,
    cast,
    empty_like,
    from_list,
    in_rows,
    is_plain_gradient,
    listed,
    needs_grad,
    operators,
    own_type,
    register,
    register_derivative,
    takes_operators,
    wide,
)

PARAMETERS = ("value", "dt_proj", "A", "dt_bias")


def key_scores(value: Tensor, dt_proj: Tensor, A: Tensor, *, dt_bias: Tensor | None = None, form: str = "exp",
               layout: str | None = None, backend: str | None = None) -> Tensor:
    """``cupy_dma.key_scores`` of a value ``(B, Lk, Hkv, D)``, or ``(B, Hkv, Lk, D)`` with ``layout="bhnd"``, with
    gradients for ``value``, ``dt_proj``, ``A`` and ``dt_bias``."""
    if not is_bnhd(layout):
        return in_bhnd(key_scores, (("value", value),), dt_proj, A, dt_bias=dt_bias, form=form, backend=backend)
    (value,) = cast(value)
    if takes_operators(value, dt_proj, A, dt_bias):
        return operators.key_scores(value, dt_proj, A, dt_bias, form, backend)
    recipe = recipe_of(value, dt_proj, A, dt_bias, form)
    module = backends.choose(backend, recipe[:1])
    tensors = [None if x is None else x.array for x in recipe[:4]]
    if needs_grad(*tensors):
        return _KeyScores.apply(recipe, module, backend, *tensors)
    return module.key_scores(*recipe)


def top_w(scores: Tensor, window: Any, keys: str, padding: Tensor | None, documents: Tensor | None,
          backend: str | None) -> IntervalMask:
    """``IntervalMask.top_w`` under ``torch.compile``: a single operator, which checks its arguments when it runs."""
    scores, documents, window = in_rows(scores), as_tensor(documents, scores), window_of(window)
    start, stop = operators.top_w(scores.detach(), listed(window), keys, padding, documents, backend)
    hints = selection_hints(window, scores.shape[2], keys, padding is not None, documents is not None)
    return IntervalMask._make(library_named("torch"), start, stop, hints)


# ---- scores of a layer ----------------------------------------------------------------------------------------------


def layer_scores(value: Tensor, dt_proj: nn.Module, A: Tensor, *, form: str = "exp", padding: Tensor | None = None,
                 backend: str | None = None) -> Tensor:
    """``key_scores`` of a layer whose projection is the module ``dt_proj``: see ``score_arguments``."""
    given = score_arguments(value, dt_proj, A, form=form, padding=padding)
    if "scores" in given:
        return given["scores"]
    return key_scores(value, **given, backend=backend) if value.ndim == 4 else \
        key_scores(value[None], **given, backend=backend)[0]


def score_arguments(value: Tensor, dt_proj: nn.Module, A: Tensor, *, form: str = "exp",
                    padding: Tensor | None = None) -> dict[str, Any]:
    """The arguments of ``dynamic_mask_attention`` for the scores of a layer.

    Parameters
    ----------
    value : Tensor ``(B, Lk, Hkv, D)``, or ``(total, Hkv, D)``
    dt_proj : Module
        The kernels take weight and bias of an ``nn.Linear`` that computes just ``x @ weight.T + bias``. Any other
        module is called: adapters such as LoRA, quantized layers, modules with hooks or their own ``forward``. It maps
        ``(B, Lk, Hkv * D)``, in the type of its parameters, to ``(B, Lk, Hkv)``; for packed values both lack the first
        axis.
    A : Tensor ``(Hkv,)``
    form
        As for ``key_scores``.
    padding : Tensor ``(1|B, Lk)``, optional
        A called module gets zeros for padding, whose values may be NaN.

    Returns
    -------
    ``{"scores"}``, differentiable, or ``{"dt_proj", "A", "dt_bias", "form"}``.

    Raises
    ------
    TypeError, ValueError
        The module's result has the wrong type or shape.
    """
    if is_linear(dt_proj):
        return {"dt_proj": dt_proj.weight, "A": A, "dt_bias": dt_proj.bias, "form": form}
    (value,) = cast(value)
    dt = _projected(value.flatten(-2), dt_proj, "dt_proj", len(A), padding).to(wide(value))
    state = A.to(dt.dtype)[:, None] * torch.logaddexp(dt, dt.new_zeros(()))  # A softplus(dt)
    return {"scores": (state.exp() if form == "exp" else state).contiguous()}


def input_scores(x: Tensor, score_proj: nn.Module, heads: int, padding: Tensor | None = None) -> Tensor:
    """Scores of tokens, ``score_proj(x)``.

    Parameters
    ----------
    x : Tensor ``(B, Lk, width)``, or ``(total, width)``
        The layer's input.
    score_proj : Module
        Maps it to ``(B, Lk, Hkv)``. An ``nn.Linear`` is computed in float32 (float64 for float64), whatever its type
        and autocast: 16-bit scores would often be equal. Any other module is called, as for ``score_arguments``.
    heads : int
        ``Hkv``.
    padding : Tensor ``(1|B, Lk)``, optional
        Padding counts as zeros.

    Returns
    -------
    Tensor ``(B, Hkv, Lk)``, or ``(Hkv, total)``, differentiable

    Raises
    ------
    TypeError, ValueError
        The module's result has the wrong type or shape.
    """
    kind = wide(x)
    if not is_linear(score_proj):
        return _projected(x, score_proj, "score_proj", heads, padding).to(kind).contiguous()
    with torch.autocast(x.device.type, enabled=False):
        bias = None if score_proj.bias is None else score_proj.bias.to(kind)
        return nn.functional.linear(_without(x, padding).to(kind), score_proj.weight.to(kind), bias).mT.contiguous()


def _projected(x: Tensor, project: nn.Module, name: str, heads: int, padding: Tensor | None) -> Tensor:
    """``project(x)``, ``(B, Hkv, Lk)`` or ``(Hkv, total)``, by a call."""
    x, tokens = _without(x, padding), tuple(x.shape[:-1])
    if not torch.is_autocast_enabled(x.device.type):  # autocast casts the module's input itself
        x = x.to(own_type(project, x))
    found = project(x)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise TypeError(f"{name} must return a float tensor, got {getattr(found, 'dtype', type(found).__name__)} from "
                        f"{type(project).__name__}")
    if tuple(found.shape) != (*tokens, heads):
        raise ValueError(f"{name} must return a tensor of shape (B, Lk, Hkv) = {(*tokens, heads)}, got "
                         f"{tuple(found.shape)} from {type(project).__name__}")
    return found.mT


def _without(x: Tensor, padding: Tensor | None) -> Tensor:
    """``x`` with zeros for padding; a padding of the wrong shape is rejected later."""
    tokens = tuple(x.shape[:-1])
    if padding is None or tuple(padding.shape) not in (tokens, (1, *tokens[1:])):
        return x
    return x.masked_fill((padding == 0)[..., None], 0)


def is_linear(module: nn.Module) -> bool:
    """Whether calling the module computes just ``x @ weight.T + bias``, so that the kernels may do it."""
    if getattr(type(module), "forward", None) is not nn.Linear.forward or "forward" in module.__dict__:
        return False
    if (module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
            or modules._has_any_global_hook()):
        return False
    weight = module.weight
    return type(weight) is nn.Parameter or not is_traceable_wrapper_subclass(weight)  # quantized ones wrap tensors


class _KeyScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recipe: Recipe, module: ModuleType, backend: str | None, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.form, ctx.module, ctx.backend = recipe[4], module, backend
        return module.key_scores(*recipe)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Any, ...]:
        needs = [name for name, needed in zip(PARAMETERS, ctx.needs_input_grad[3:]) if needed]
        if is_plain_gradient(dscores):
            found = _gradients(dscores, ctx.saved_tensors, ctx.form, ctx.module, needs)
        else:
            found = operators.key_scores_backward(dscores, *ctx.saved_tensors, ctx.form, ctx.backend, needs)
        named = dict(zip(needs, found))
        return None, None, None, *(named.get(name) for name in PARAMETERS)


def _gradients(dscores: Tensor, tensors: tuple[Any, ...], form: str, module: ModuleType,
               needs: list[str]) -> list[Tensor]:
    """The gradients named in ``needs``; the forward has checked the parameters."""
    operand, (value, dt_proj, A, dt_bias) = library_named("torch").operand, tensors
    v, projection, a = operand(value, "value"), operand(dt_proj, "dt_proj"), operand(A, "A")
    offset = None if dt_bias is None else operand(dt_bias, "dt_bias")
    upstream = contiguous_floats(operand(dscores, "dscores"), v)
    found = module.key_scores_backward(upstream, v, projection, a, offset, form, frozenset(needs))
    return [gradient for name, gradient in zip(PARAMETERS, found) if name in needs]


# ---- operators ------------------------------------------------------------------------------------------------------


def _key_scores(value, dt_proj, A, dt_bias, form, backend):
    recipe = recipe_of(value, dt_proj, A, dt_bias, form)
    return backends.choose(backend, recipe[:1]).key_scores(*recipe)


def _key_scores_backward(dscores, value, dt_proj, A, dt_bias, form, backend, needs):
    recipe = recipe_of(value, dt_proj, A, dt_bias, form)
    with torch.no_grad():
        module = backends.choose(backend, recipe[:1])
        return _gradients(dscores, (value, dt_proj, A, dt_bias), form, module, needs)


def _top_w(scores, window, keys, padding, documents, backend):
    mask = IntervalMask.top_w(scores, from_list(window), keys=keys, padding=padding, documents=documents,
                              backend=backend)
    return mask._start.array, mask._stop.array


def _fake_key_scores(value, *rest):
    batch, length, heads, _ = value.shape
    return value.new_empty((batch, heads, length), dtype=wide(value))


def _fake_key_scores_backward(dscores, value, dt_proj, A, dt_bias, form, backend, needs):
    return empty_like({"value": value, "dt_proj": dt_proj, "A": A, "dt_bias": dt_bias}, needs)


def _fake_top_w(scores, window, keys, padding, documents, backend):
    rows = documents.shape[0] if keys == "global" and documents is not None and documents.ndim == 2 else 1
    return (scores.new_empty((rows, 1, scores.shape[2]), dtype=torch.int32),
            scores.new_empty(scores.shape, dtype=torch.int32))


_ARGUMENTS = "Tensor value, Tensor dt_proj, Tensor A, Tensor? dt_bias, str form, str? backend"
register(f"key_scores({_ARGUMENTS}) -> Tensor", _key_scores, _fake_key_scores)
register(f"key_scores_backward(Tensor dscores, {_ARGUMENTS}, str[] needs) -> Tensor[]", _key_scores_backward,
         _fake_key_scores_backward)
register("top_w(Tensor scores, SymInt[] window, str keys, Tensor? padding, Tensor? documents, str? backend) "
         "-> (Tensor start, Tensor stop)", _top_w, _fake_top_w)
register_derivative("key_scores", dict(enumerate(PARAMETERS)), keeps_outputs=False)
