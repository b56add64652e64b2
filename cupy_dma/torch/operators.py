"""The operators ``torch.ops.cupy_dma``: what torch needs to know of this package's functions.

    key_scores -> scores                    key_scores_backward -> the gradients named in ``needs``, in that order
    top_w -> start, stop                    (no gradient: the selection is piecewise constant)
    attention -> out, lse                   attention_backward -> the gradients named in ``needs``, in that order

An operator checks its arguments and runs a backend on the caller's stream, like the public functions; results are
fresh and contiguous. An interval mask crosses as its two tensors and the hints of ``masks.Hints``. Fake kernels give
shapes and types, so that ``torch.compile`` can trace. ``autograd.py`` gives the operators their derivatives.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cupy_dma import backends, backward
from cupy_dma.arrays import library_named
from cupy_dma.calls.attention import attention_call
from cupy_dma.calls.run import run
from cupy_dma.calls.scores import prepare
from cupy_dma.masks.interval import Hints, IntervalMask
from cupy_dma.masks.selection import top_w as _select

_MASK = "Tensor? start, Tensor? stop, str? starts, SymInt[]? bound, bool causal_only, Tensor? dense"
_ATTENTION = (f"Tensor query, Tensor key, Tensor value, {_MASK}, Tensor? bias, bool causal, float? scale, "
              f"float softcap, bool deterministic, str? backend")
_SCORES = "Tensor value, Tensor dt_proj, Tensor A, Tensor? dt_bias, str form, str? backend"
_SCHEMAS = (
    f"key_scores({_SCORES}) -> Tensor",
    f"key_scores_backward(Tensor dscores, {_SCORES}, str[] needs) -> Tensor[]",
    "top_w(Tensor scores, SymInt window, str keys, Tensor? padding, Tensor? documents, str? backend) "
    "-> (Tensor start, Tensor stop)",
    f"attention({_ATTENTION}) -> (Tensor out, Tensor lse)",
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_ATTENTION}, str[] needs) -> Tensor[]",
)
# A compiler must not choose other strides for the inputs: the last axis has to stay contiguous.
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
LIBRARY = torch.library.Library("cupy_dma", "DEF")
for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag, _STRIDES))


class MaskParts(NamedTuple):
    """A mask as the operators take it."""

    start: Tensor | None = None
    stop: Tensor | None = None
    starts: str | None = None
    bound: Sequence[int] | None = None
    causal_only: bool = False
    dense: Tensor | None = None


class Options(NamedTuple):
    """The arguments after the bias."""

    causal: bool
    scale: float | None
    softcap: float
    deterministic: bool
    backend: str | None


# ---- masks --------------------------------------------------------------------------------------------------------

# Key lists are kept on the mask, and autograd hands the backward pass only tensors: masks that are alive are found
# again by the memory of theirs. An entry lasts as long as its mask, so the memory cannot have been given to another.
_alive: WeakValueDictionary[tuple[Any, ...], IntervalMask] = WeakValueDictionary()


def _identity(parts: MaskParts) -> tuple[Any, ...]:
    start, stop = parts.start, parts.stop
    assert start is not None and stop is not None
    bound = None if parts.bound is None else tuple(parts.bound)
    return (start.device, start.data_ptr(), stop.data_ptr(), tuple(start.shape), tuple(stop.shape), start.stride(),
            stop.stride(), parts.starts, bound, parts.causal_only)


def share(mask: IntervalMask) -> MaskParts:
    """The parts of a mask, from which the operators find it again while it lives."""
    parts = MaskParts(mask._start.array, mask._stop.array, *mask._hints)
    if not torch.compiler.is_compiling():
        _alive[_identity(parts)] = mask
    return parts


def mask_alive(parts: MaskParts) -> IntervalMask | None:
    """The mask of these parts, if somebody holds it. (Only plain tensors have memory, a tracer's have not.)"""
    return _alive.get(_identity(parts)) if type(parts.start) is Tensor and type(parts.stop) is Tensor else None


def _mask_of(parts: MaskParts) -> tuple[IntervalMask | Tensor, ...]:
    """The argument ``mask`` of the plain functions."""
    dense = () if parts.dense is None else (parts.dense,)
    if parts.start is None or parts.stop is None:
        return dense
    found = _alive.get(_identity(parts))
    if found is None:
        bound = None if parts.bound is None else (parts.bound[0], parts.bound[1])
        hints = Hints(parts.starts, bound, parts.causal_only)
        found = IntervalMask._make(library_named("torch"), parts.start, parts.stop, hints)
    return (found, *dense)


# ---- kernels ------------------------------------------------------------------------------------------------------


def _key_scores(value, dt_proj, A, dt_bias, form, backend):
    recipe = prepare(value, dt_proj, A, dt_bias, form)
    return backends.choose(backend, recipe[:1]).key_scores(*recipe)


def key_scores_backward_kernel(dscores, value, dt_proj, A, dt_bias, form, backend, needs):
    with torch.no_grad():
        found = backward.key_scores_backward(dscores, value, dt_proj, A, dt_bias=dt_bias, form=form, needs=needs,
                                             backend=backend)
    return [getattr(found, name) for name in needs]


def _top_w(scores, window, keys, padding, documents, backend):
    mask = _select(scores, window, keys, padding, documents, backend)
    return mask._start.array, mask._stop.array


def _attention(query, key, value, start, stop, starts, bound, causal_only, dense, bias, *options):
    mask, options = _mask_of(MaskParts(start, stop, starts, bound, causal_only, dense)), Options(*options)
    call = attention_call(query, key, value, mask, bias, *options[:4])
    return run(call, True, backends.choose(options.backend, (call.query,)))


def attention_backward_kernel(dout, dlse, out, lse, query, key, value, start, stop, starts, bound, causal_only, dense,
                              bias, causal, scale, softcap, deterministic, backend, needs):
    mask = _mask_of(MaskParts(start, stop, starts, bound, causal_only, dense))
    with torch.no_grad():
        found = backward.attention_backward(dout, query, key, value, out, lse, mask=mask, bias=bias, causal=causal,
                                            scale=scale, softcap=softcap, deterministic=deterministic, dlse=dlse,
                                            needs=needs, backend=backend)
    return [getattr(found, name) for name in needs]


# ---- shapes and types ---------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _new_like(named: dict[str, Tensor | None], needs: Sequence[str]) -> list[Tensor]:
    found = [named[name] for name in needs]
    return [x.new_empty(x.shape) for x in found if x is not None]


def _fake_key_scores(value, *rest):
    batch, length, heads, _ = value.shape
    return value.new_empty((batch, heads, length), dtype=_wide(value))


def _fake_key_scores_backward(dscores, value, dt_proj, A, dt_bias, form, backend, needs):
    return _new_like({"value": value, "dt_proj": dt_proj, "A": A, "dt_bias": dt_bias}, needs)


def _fake_top_w(scores, window, keys, padding, documents, backend):
    rows = documents.shape[0] if keys == "global" and documents is not None and documents.ndim == 2 else 1
    return (scores.new_empty((rows, 1, scores.shape[2]), dtype=torch.int32),
            scores.new_empty(scores.shape, dtype=torch.int32))


def _fake_attention(query, *rest):
    batch, length, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((batch, heads, length), dtype=_wide(query))


def _fake_attention_backward(dout, dlse, out, lse, query, key, value, *rest):
    return _new_like({"query": query, "key": key, "value": value, "bias": rest[6]}, rest[-1])


for _name, _kernel, _fake in (("key_scores", _key_scores, _fake_key_scores),
                              ("key_scores_backward", key_scores_backward_kernel, _fake_key_scores_backward),
                              ("top_w", _top_w, _fake_top_w), ("attention", _attention, _fake_attention),
                              ("attention_backward", attention_backward_kernel, _fake_attention_backward)):
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)
    torch.library.register_fake(f"cupy_dma::{_name}", _fake, lib=LIBRARY)
