"""Argument checks of ``DynamicCache``: plain comparisons of shapes and types, which never read GPU memory.

Values of lengths are checked in host memory; with ``CUPY_DMA_CHECK=1`` values of lengths and scores on any device.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_dma import checks
from cupy_dma.arrays import Library, Operand, describe
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.calls.sequences import check_bounds, known_values, shown


def type_name(dtype: Any) -> str:
    """The name of a type that is passed by name, or as a NumPy, CuPy or torch dtype."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name not in checks.FLOATS:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            pass
    if name not in checks.FLOATS:
        raise TypeError(f"dtype must be {' or '.join(checks.FLOATS)}, got {dtype!r}")
    return name


def given(query: Any) -> Any:
    if query is None:
        raise TypeError("query must be an array, got None (update appends tokens without queries)")
    return query


def extend_call(state: CacheState, query: Any, key: Any, value: Any, scores: Any, scale: float | None, softcap: float,
                lengths: Any, cu_seqlens: Any, return_lse: bool, out: Any,
                tail_padding: bool = False, bias_delay: Any = 0, name: str = "scores", slots: Any = None) -> ExtendCall:
    """The checked arguments of ``extend``, or of ``update`` where ``query`` is None. Raises what they document."""
    packed = cu_seqlens is not None
    if packed and lengths is not None:
        raise ValueError("give either lengths (for padded rows) or cu_seqlens (for packed rows), got both")
    k, v, s = describe(key, "key"), describe(value, "value"), describe(scores, name)
    q = None if query is None else describe(query, "query")
    named = None if slots is None else checked_slots(state, slots)
    batch, letter = (state.batch, "B") if named is None else (named.shape[0], "n")
    lead: tuple[tuple[int, ...], ...] = () if packed else ((batch,),)
    axes = "(total, " if packed else f"({letter}, L, "
    length = k.shape[len(lead)] if len(k.shape) == len(lead) + 3 else -1
    for operand, meaning, sizes in ((k, "Hkv, D)", (state.kv_heads, state.head_dim)),
                                    (v, "Hkv, Dv)", (state.kv_heads, state.value_dim))):
        _require(operand, state.dtype, axes + meaning, (*lead, (length,), *((size,) for size in sizes)), state)
    if q is not None:
        heads = q.shape[-2] if len(q.shape) == len(lead) + 3 else state.kv_heads
        if heads < 1 or heads % state.kv_heads:
            raise ValueError(f"query must have a multiple of the cache's heads (H % Hkv == 0), got {heads} query heads "
                             f"and {state.kv_heads} kv heads")
        _require(q, state.dtype, axes + "H, D)", (*lead, (length,), (heads,), (state.head_dim,)), state)
    _require(s, None, "(Hkv, total)" if packed else f"({letter}, Hkv, L)", (*lead, (state.kv_heads,), (length,)), state)
    operands = [operand for operand in (q, k, v, s) if operand is not None]
    checks.require_same_device((state.key, *operands))
    for operand in operands:
        _require_no_grad(operand)
    scale = state.head_dim ** -0.5 if scale is None else checks.factor(
        scale, "scale", state.dtype)
    softcap, return_lse = checks.softcap_of(softcap, state.dtype), checks.flag(return_lse, "return_lse")
    real = None if lengths is None else counts(state, lengths, "lengths", (batch,), f"({letter},)", length)
    bounds = None
    if packed:
        bounds = counts(state, cu_seqlens, "cu_seqlens", (batch + 1,), f"({letter} + 1,)", length,
                         checks.flag(tail_padding, "tail_padding"))
    s = _in_cache_type(state, checks.in_rows(s))
    if packed:
        k, v, s = (state.library.operand(x.array[None], x.name) for x in (k, v, s))
        q = None if q is None else state.library.operand(q.array[None], "query")
    call = ExtendCall(q, k, v, s, scale, softcap, real, bounds, return_lse,
                      bias_delay=checks.delay(bias_delay), slots=named)
    if out is not None:
        _take_out(state, call, out)
    return call


def _require(operand: Operand, dtype: str | None, meaning: str, sizes: Sequence[Sequence[int]],
             state: CacheState) -> None:
    checks.has_memory(operand)
    if len(operand.shape) != len(sizes):
        raise ValueError(f"{operand.name} must have shape {meaning}, got {operand.shape}")
    checks.has_shape(operand, meaning, sizes)
    if dtype is None:
        allowed = checks.FLOATS if state.scores.dtype == "float64" else checks.FLOATS[:3]
        checks.one_of_types(operand, allowed)
        return
    checks.rows_contiguous(operand)
    if operand.dtype != dtype:
        raise TypeError(f"{operand.name} must have the cache's type {dtype}, got {operand.dtype}")


def _require_no_grad(operand: Operand) -> None:
    if operand.library.requires_grad(operand.array):
        raise NotImplementedError(f"{operand.name} requires grad, but a cache carries no gradient: call under "
                                  f"torch.no_grad() or pass {operand.name}.detach()")


def _in_cache_type(state: CacheState, scores: Operand) -> Operand:
    """Scores in the type in which the cache keeps them."""
    checked = scores.name == "scores" and checks.wants_values_checked()  # gates may be closed: -inf
    if checked and not bool(scores.library.xp.isfinite(scores.array).all()):
        raise ValueError("scores must be finite (CUPY_DMA_CHECK=1), got NaN or infinity")
    if scores.dtype == state.scores.dtype:
        return scores
    return state.library.operand(state.library.astype(scores.array, state.scores.dtype), "scores")


def counts(state: CacheState, array: Any, name: str, shape: tuple[int, ...], meaning: str, most: int,
            tail_padding: bool = False) -> Operand:
    """The checked ``lengths``, ``cu_seqlens`` or ``n``, contiguous; ``most`` is the largest allowed value."""
    operand = checks.integers(array, name, state.key)
    checks.has_shape(operand, meaning, tuple((size,) for size in shape))
    found = known_values(operand, array)
    if found is not None:
        if name == "cu_seqlens":
            check_bounds(found, name, most, "the total", tail_padding)
        elif ((found < 0) | (found > most)).any():
            raise ValueError(f"{name} must lie between 0 and L = {most}, got {shown(found)}")
    if operand.strides != (1,) and shape[0] > 1:
        return state.library.operand(state.library.contiguous(operand.array), name)
    return operand


def checked_slots(state: CacheState, slots: Any) -> Operand:
    """``slots`` as a call has them: int32 ``(n,)``, contiguous."""
    library, operand = state.library, checks.integers(slots, "slots", state.key)
    if operand.ndim != 1:
        raise ValueError(f"slots must have shape (n,), got {operand.shape}")
    if operand.shape[0] > state.batch:
        raise ValueError(f"slots must name each of the cache's {state.batch} sequences at most once, got "
                         f"{operand.shape[0]} slots")
    found = known_values(operand, slots)
    if found is not None:
        if ((found < -1) | (found >= state.batch)).any():
            raise ValueError(f"slots must lie between -1 (none) and {state.batch - 1} (the cache has a batch of "
                             f"{state.batch}), got {shown(found)}")
        named = found[found >= 0]
        if len(np.unique(named)) < len(named):
            raise ValueError(f"slots must name no sequence twice, got {shown(found)}")
    with library.on(state.device):
        return library.operand(library.contiguous(library.astype(operand.array, "int32")), "slots")


def _take_out(state: CacheState, call: ExtendCall, out: Any) -> None:
    """Check ``out``, or the pair ``(out, lse)``, and make the call write its results there."""
    assert call.query is not None
    pair = isinstance(out, (tuple, list))
    if pair != call.return_lse or (pair and len(out) != 2):
        raise TypeError(f"out must be {'a pair (out, lse)' if call.return_lse else 'one array'} with "
                        f"return_lse={call.return_lse}, got {type(out).__name__}")
    batch, length, heads, _ = call.query.shape
    wanted = ((batch, length, heads, state.value_dim), state.dtype), ((batch, heads, length), state.scores.dtype)
    names = ("out", "out[1] (lse)") if pair else ("out",)
    made = []
    for array, name, (shape, dtype) in zip(out if pair else (out,), names, wanted):
        operand = describe(array, name)
        if operand.library.name == "torch" and operand.array is not array:
            raise ValueError(f"{name} must be an ordinary tensor, got one whose negative bit is set: what is written "
                             f"to its memory would be read with the opposite sign")
        if call.cu_seqlens is not None:
            shape = shape[1:]
        checks.has_shape(operand, "of the result", tuple((size,) for size in shape))
        if operand.dtype != dtype:
            raise TypeError(f"{name} must have the result's type {dtype}, got {operand.dtype}")
        if not _contiguous(operand):
            raise ValueError(f"{name} must be contiguous, got strides {operand.strides} with shape {operand.shape}")
        checks.require_same_device((state.key, operand))
        _require_no_grad(operand)
        if call.cu_seqlens is not None:
            operand = state.library.operand(operand.array[None], name)
        made.append(operand)
    call.out, call.lse = made[0], made[1] if pair else None


def _contiguous(operand: Operand) -> bool:
    expected = 1
    for size, stride in zip(reversed(operand.shape), reversed(operand.strides)):
        if size != 1 and stride != expected and 0 not in operand.shape:
            return False
        expected *= size
    return True


def batch_rows(indices: Any, like: Operand, batch: int, count: int | None = None) -> Any:
    """``indices`` into the batch, an integer array or ints, as an int64 array of ``like``'s library and device.

    ``count``: how many there must be, if that is fixed.
    """
    library: Library = like.library
    if isinstance(indices, (list, tuple, range)):
        numbers = [checks.whole(number, f"indices[{i}]", 0) for i, number in enumerate(indices)]
        array: Any = library.from_numpy(np.array(numbers, np.int64), like.device)
        values: Any = np.array(numbers, np.int64)
    else:
        operand = describe(indices, "indices")
        checks.one_of_types(operand, checks.INTEGERS)
        if operand.ndim != 1:
            raise ValueError(f"indices must have shape (n,), got {operand.shape}")
        checks.require_same_device((like, operand))
        array = library.astype(operand.array, "int64")
        known = like.device.kind == "cpu" or checks.wants_values_checked()
        values = library.to_numpy(array) if known else None
    if values is not None and ((values < 0) | (values >= batch)).any():
        raise ValueError(f"indices must lie between 0 and {batch - 1} (the cache has a batch of {batch}), got "
                         f"{values.tolist()[:16]}")
    if count is not None and array.shape[0] != count:
        raise ValueError(f"indices must name {count} rows, one for each of the batch, got {array.shape[0]} "
                         f"(select_batch makes a cache of another size)")
    return array
