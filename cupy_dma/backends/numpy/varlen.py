"""Attention and its gradients over packed sequences, each as a plain call with B = 1. Other calls pass through."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupy_dma.arrays import CPU, Operand, library_named, numpy_dtype
from cupy_dma.backends.numpy import backward, forward
from cupy_dma.backends.numpy.host import deliver, host, widened
from cupy_dma.calls.types import AttentionBackwardCall, AttentionCall
from cupy_dma.masks.interval import EVER, NEVER, IntervalMask


def attention(call: AttentionCall) -> tuple[Any, Any]:
    """``out`` and ``lse`` of any call; see ``cupy_dma.backends``."""
    if call.sequences is None:
        return forward.attention(call)
    out = np.zeros((*call.query.shape[:3], call.value_dim), numpy_dtype(call.query.dtype))
    lse = np.full((1, call.heads, call.query_length), -np.inf, widened(call.query.dtype))
    for one in _sequences(call):
        out[:, one.queries], lse[:, :, one.queries] = forward.attention(one.call)
    return deliver(out, call.query), deliver(lse, call.query)


def attention_backward(call: AttentionBackwardCall) -> tuple[Any, Any, Any, Any]:
    """``(dquery, dkey, dvalue, dbias)`` of any call; see ``cupy_dma.backends``."""
    packed = call.forward
    if packed.sequences is None:
        return backward.attention_backward(call)
    arguments = {"query": packed.query, "key": packed.key, "value": packed.value, "bias": packed.bias}
    found = {name: np.zeros(operand.shape, numpy_dtype(operand.dtype))
             for name, operand in arguments.items() if name in call.needs and operand is not None}
    dout, out, lse = (host(x) for x in (call.dout, call.out, call.lse))
    dlse = None if call.dlse is None else host(call.dlse)
    for one in _sequences(packed):
        rows, keys = one.queries, one.keys
        gradients = backward.attention_backward(AttentionBackwardCall(
            one.call, _operand(dout[:, rows], "dout"), _operand(out[:, rows], "out"),
            _operand(lse[:, :, rows], "lse"), None if dlse is None else _operand(dlse[:, :, rows], "dlse"),
            call.needs))
        own = np.s_[:, rows], np.s_[:, keys], np.s_[:, keys], np.s_[:, :, :, keys]
        for name, gradient, where in zip(arguments, gradients, own):
            if name in found:
                found[name][where] = gradient
    dq, dk, dv, dbias = (deliver(found[name], operand) if name in found and operand is not None else None
                         for name, operand in arguments.items())
    return dq, dk, dv, dbias


class _Sequence(NamedTuple):
    queries: slice  # its rows
    keys: slice  # its packed keys
    call: AttentionCall


def _sequences(call: AttentionCall) -> Iterator[_Sequence]:
    sequences, mask, bias = call.sequences, call.mask, call.bias
    assert sequences is not None
    query, key, value = (host(x) for x in (call.query, call.key, call.value))
    runs = None
    if isinstance(mask, IntervalMask):
        runs = [np.broadcast_to(mask.library.to_numpy(run.array), mask.shape) for run in (mask._start, mask._stop)]
    added = None if bias is None else host(bias)
    for number, (first_query, end_query, first_key, end_key) in enumerate(host(sequences.bounds).T.tolist()):
        rows, keys = slice(first_query, end_query), slice(first_key, end_key)
        k, v = ((key, value) if sequences.page_table is None else
                (_gathered(x, sequences.page_size, host(sequences.page_table), number, end_key - first_key)
                 for x in (key, value)))
        if sequences.page_table is None:
            k, v = k[:, keys], v[:, keys]
        yield _Sequence(rows, keys, replace(
            call, query=_operand(query[:, rows], "query"), key=_operand(k, "key"), value=_operand(v, "value"),
            mask=None if runs is None else _mask(runs, keys),
            bias=None if added is None else _operand(added[:, :, :, keys], "bias"), sequences=None))


def _operand(array: np.ndarray, name: str) -> Operand:
    return library_named("numpy").describe(array, name)


def _gathered(pages: np.ndarray, page_size: int, table: np.ndarray, number: int, length: int) -> np.ndarray:
    """The first ``length`` rows in the pages of sequence ``number``, ``(1, length, Hkv, D)``."""
    needed = table[number, :-(-length // page_size)] if length else table[:0, :0].reshape(-1)
    return pages[needed].reshape(1, -1, *pages.shape[2:])[:, :length]


def _mask(runs: list[np.ndarray], keys: slice) -> IntervalMask:
    """The mask of a sequence's keys, in positions within the sequence."""
    start, stop = (np.where((run <= EVER) | (run >= NEVER), run, run.astype(np.int64) - keys.start).clip(EVER, NEVER)
                   for run in (run[:, :, keys] for run in runs))
    library = library_named("numpy")
    return IntervalMask._make(library, library.from_numpy(start.astype(np.int32), CPU), stop.astype(np.int32))
