"""Differentiable functions: the public functions of ``cupy_dma`` as torch sees them.

``cupy_dma.attention`` and its sisters come here by themselves when a tensor requires grad, under autocast and under
``torch.compile``; calling these directly is the same. Under autocast query, key and value are cast to its type, float64
excepted; scores, biases and score parameters keep theirs. ``torch.use_deterministic_algorithms`` is obeyed.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupy_dma import checks
from cupy_dma.arrays import library_named
from cupy_dma.calls.attention import attention_call, dynamic_call
from cupy_dma.calls.mask import intersect, parts_of
from cupy_dma.calls.scores import prepare
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.selection import selection_hints
from cupy_dma.torch import autograd as _autograd  # noqa: F401 - gives the operators their derivatives
from cupy_dma.torch.operators import MaskParts, Options, share

_operators = torch.ops.cupy_dma


def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Any = None,
              bias: Tensor | None = None, causal: bool = False, scale: float | None = None, softcap: float = 0.0,
              deterministic: bool = False, return_lse: bool = False, backend: str | None = None) -> Any:
    """``cupy_dma.attention`` with gradients for ``query, key, value`` and ``bias``, through ``out`` and ``lse``."""
    query, key, value = _cast(query, key, value)
    given = parts_of(mask)
    dense = [part for part in given if not isinstance(part, IntervalMask)]
    is_torch = all(part.library.name == "torch" for part in given if isinstance(part, IntervalMask))
    interval, several = None, len(given) > 1
    if not (is_torch and _are_tensors(query, key, value, bias, *dense)) or (
            several and not torch.compiler.is_compiling()):  # all else the operator checks
        attention_call(query, key, value, mask, bias, causal, scale, softcap, deterministic)
    if several:
        interval, array = intersect(given, key.shape[1], key.shape[2], query.shape[2])
    else:
        interval, array = (None, dense[0]) if dense else (given[0] if given else None, None)
    parts = (MaskParts() if interval is None else share(interval))._replace(dense=array)
    options = _options(causal, scale, softcap, deterministic, backend)
    out, lse = _operators.attention(query, key, value, *parts, bias, *options)
    return (out, lse) if return_lse else out


def dynamic_mask_attention(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None, *, window: int,
                           dt_proj: Tensor | None = None, A: Tensor | None = None, dt_bias: Tensor | None = None,
                           form: str = "exp", keys: str = "prefix", padding: Tensor | None = None,
                           documents: Tensor | None = None, causal: bool = True, scale: float | None = None,
                           softcap: float = 0.0, deterministic: bool = False, return_lse: bool = False,
                           backend: str | None = None) -> Any:
    """``cupy_dma.dynamic_mask_attention`` with gradients for ``query, key, value`` and ``scores``, or through the
    scores for ``value`` (both parts), ``dt_proj``, ``A`` and ``dt_bias``."""
    query, key, value = _cast(query, key, value)
    if not torch.compiler.is_compiling():
        window = dynamic_call(query, key, value, scores, window, dt_proj, A, dt_bias, form, keys, padding, documents,
                              causal, scale, softcap, deterministic).window
    if scores is None:
        scores = _operators.key_scores(value, dt_proj, A, dt_bias, form, backend)
    start, stop = _operators.top_w(scores.detach(), window, keys, padding, documents, backend)
    hints = selection_hints(window, key.shape[1], keys, padding is not None, documents is not None)
    if torch.compiler.is_compiling():
        parts, mask = MaskParts(start, stop, *hints), None
    else:  # the mask lives until the backward pass, and so do the key lists on it
        mask = IntervalMask._make(library_named("torch"), start, stop, hints)
        parts = share(mask)
    options = _options(causal and keys == "global", scale, softcap, deterministic, backend)
    out, lse = _operators.attention(query, key, value, *parts, scores, *options)
    return (out, lse) if return_lse else out


def traced_top_w(scores: Tensor, window: int, keys: str, padding: Tensor | None, documents: Tensor | None,
                 backend: str | None) -> IntervalMask:
    """``IntervalMask.top_w`` as ``torch.compile`` sees it: one operator, which checks its arguments when it runs."""
    start, stop = _operators.top_w(scores.detach(), window, keys, padding, documents, backend)
    hints = selection_hints(window, scores.shape[2], keys, padding is not None, documents is not None)
    return IntervalMask._make(library_named("torch"), start, stop, hints)


def key_scores(value: Tensor, dt_proj: Tensor, A: Tensor, *, dt_bias: Tensor | None = None, form: str = "exp",
               backend: str | None = None) -> Tensor:
    """``cupy_dma.key_scores`` with gradients for ``value``, ``dt_proj``, ``A`` and ``dt_bias``."""
    (value,) = _cast(value)
    if not torch.compiler.is_compiling():
        prepare(value, dt_proj, A, dt_bias, form)
    return _operators.key_scores(value, dt_proj, A, dt_bias, form, backend)


def _options(causal: bool, scale: float | None, softcap: float, deterministic: bool, backend: str | None) -> Options:
    fixed = checks.flag(deterministic, "deterministic") or torch.are_deterministic_algorithms_enabled()
    return Options(checks.flag(causal, "causal"), None if scale is None else checks.real(scale, "scale"),
                   checks.real(softcap, "softcap", 0.0), fixed, backend)


def _are_tensors(*arguments: Any) -> bool:
    for x in arguments:
        if x is not None and not isinstance(x, Tensor):
            return False
    return True


def _cast(*tensors: Any) -> tuple[Any, ...]:
    """Tensors in the type of autocast, where it is on for their device."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    kind = torch.get_autocast_dtype(first.device.type)
    return tuple([x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
                  for x in tensors])
