"""The derivatives of the operators: a kernel for the dispatcher's Autograd key each.

Written by hand instead of with ``torch.library.register_autograd``, which costs 75 us a call for operators with so many
arguments. Gradients run the backward operator where somebody may look at it (a tracer, or autograd itself), otherwise
the function under it.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cupy_dma.backward import AttentionGradients, ScoreGradients
from cupy_dma.torch.operators import (
    LIBRARY,
    MaskParts,
    attention_backward_kernel,
    key_scores_backward_kernel,
    mask_alive,
)

_operators = torch.ops.cupy_dma
_BIAS = 9  # its place among the arguments of attention; query, key and value are the first three


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not torch.is_grad_enabled()


class _KeyScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:4])
        ctx.rest = arguments[4:]
        return _below(_operators.key_scores.default, keys, arguments)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Any, ...]:
        names = [name for name, needed in zip(ScoreGradients._fields, ctx.needs_input_grad[1:]) if needed]
        run: Any = key_scores_backward_kernel if _is_plain(dscores) else _operators.key_scores_backward
        found = dict(zip(names, run(dscores, *ctx.saved_tensors, *ctx.rest, names)))
        return None, *ScoreGradients(**found), None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = _below(_operators.attention.default, keys, arguments)
        parts = MaskParts(*arguments[3:_BIAS])
        ctx.save_for_backward(out, lse, *arguments[:3], parts.start, parts.stop, parts.dense, arguments[_BIAS])
        ctx.hints, ctx.options = parts[2:5], arguments[_BIAS + 1:]
        ctx.mask = mask_alive(parts)  # keeps it, and its key lists, until the backward pass
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        found: list[Tensor | None] = [None] * (_BIAS + 7)  # the dispatch keys come before the arguments
        if dout is None and dlse is None:
            return tuple(found)
        out, lse, query, key, value, start, stop, dense, bias = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        places = [place for place in (0, 1, 2, _BIAS) if ctx.needs_input_grad[place + 1]]
        names = [AttentionGradients._fields[min(place, 3)] for place in places]
        run: Any = attention_backward_kernel if _is_plain(dout) else _operators.attention_backward
        gradients = run(dout, dlse, out, lse, query, key, value, start, stop, *ctx.hints, dense, bias, *ctx.options,
                        names)
        for place, gradient in zip(places, gradients):
            found[place + 1] = gradient
        return tuple(found)


class _SecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, keys: Any, *arguments: Any) -> Any:
        return tuple(_below(operator, keys, arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("cupy_dma has no second derivatives: do not differentiate a gradient of attention or "
                                  "key_scores (create_graph=True)")


def _below(operator: Any, keys: Any, arguments: Any) -> Any:
    """The operator without autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def _autograd_kernel(operator: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
    """The operator under the Autograd key: by ``apply`` where a gradient may be asked for."""

    def kernel(keys: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return apply(keys, *arguments)
        return _below(operator, keys, arguments)

    return kernel


def _refusing(operator: Any) -> Callable[..., Any]:
    return lambda keys, *arguments: list(_SecondDerivative.apply(operator, keys, *arguments))


for _name, _apply in (("key_scores", _KeyScores.apply), ("attention", _Attention.apply),
                      ("key_scores_backward", _refusing(_operators.key_scores_backward.default)),
                      ("attention_backward", _refusing(_operators.attention_backward.default))):
    LIBRARY.impl(_name, _autograd_kernel(getattr(_operators, _name).default, _apply), "Autograd", with_keyset=True)
