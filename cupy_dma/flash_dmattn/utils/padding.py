"""Between padded batches ``(B, L, ...)`` and packed sequences ``(total, ...)``.

An attention mask is ``(B, L)``, bool or 0/1, True = a real token. The number of real tokens depends on its values, so
all functions but ``index_first_axis`` and ``pad_input`` synchronize with the GPU.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.flash_dmattn.arguments import truth


def index_first_axis(tensor: Any, indices: Any) -> Any:
    """The rows ``indices`` of ``tensor (B, L, ...)``, counted over both axes."""
    return tensor.reshape(-1, *tensor.shape[2:])[indices]


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """The real tokens of a padded batch.

    Parameters
    ----------
    hidden_states : array ``(B, L, ...)``
    attention_mask : bool or integer array ``(B, L)``
    unused_mask : bool or integer array ``(B, L)``, optional
        Tokens that are allocated but not used; they are kept as well.

    Returns
    -------
    hidden_states : array ``(total, ...)``
    indices : int64 array ``(total,)``
        Where the tokens came from, counted over both axes.
    cu_seqlens : int32 array ``(B + 1,)``
    max_seqlen : int
    seqused : int32 array ``(B,)``
        Number of tokens in ``attention_mask`` alone.
    """
    used = _mask(attention_mask, "attention_mask")
    every = used
    if unused_mask is not None:
        other = _mask(unused_mask, "unused_mask")
        if other.shape != used.shape:
            raise ValueError(f"unused_mask must have attention_mask's shape {used.shape}, got {other.shape}")
        checks.require_same_device((used, other))
        every = Operand(used.name, used.array | other.array, used.library, used.shape, (), "bool", used.device, 0)
    _like(hidden_states, "hidden_states", used.shape)
    indices, cu_seqlens, longest = _unpad_data(every)
    return (index_first_axis(hidden_states, indices), indices, cu_seqlens, longest,
            used.library.astype(used.array.sum(-1), "int32"))


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """The inverse of ``unpad_input``: packed rows ``(total, ...)`` as a batch ``(batch, seqlen, ...)``, 0 elsewhere."""
    packed = describe(hidden_states, "hidden_states")
    rows = checks.whole(batch, "batch", 0), checks.whole(seqlen, "seqlen", 0)
    with packed.library.on(packed.device):
        padded = packed.library.full((rows[0] * rows[1], *packed.shape[1:]), 0, packed.dtype, packed.device)
        padded[indices] = hidden_states
        return padded.reshape(*rows, *packed.shape[1:])


def get_unpad_data(attention_mask: Any) -> tuple[Any, Any, int]:
    """``indices``, ``cu_seqlens`` and ``max_seqlen`` of ``unpad_input``."""
    return _unpad_data(_mask(attention_mask, "attention_mask"))


def upad_input(query_layer: Any, key_layer: Any, value_layer: Any, attention_mask: Any, query_length: int,
               unpad_input_func: Callable[..., Any] = unpad_input) -> tuple[Any, ...]:
    """The real tokens of a padded query, key and value, ``(B, L, heads, D)`` each.

    ``attention_mask`` covers the keys; keys past its length are dropped. The queries are the newest tokens: all of
    them, one per sequence, or the last ``query_length``, of which the mask says which are real.

    Returns
    -------
    query, key, value : arrays ``(total, heads, D)``
    indices_q : where the queries came from
    (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    """
    real = _mask(attention_mask, "attention_mask")
    indices_k, cu_seqlens_k, longest_k = _unpad_data(real)
    length = real.shape[1]
    key_layer, value_layer = key_layer[:, :length], value_layer[:, :length]
    _like(key_layer, "key_layer", real.shape)
    _like(value_layer, "value_layer", real.shape)
    key, value = index_first_axis(key_layer, indices_k), index_first_axis(value_layer, indices_k)
    if query_length == length:
        indices_q, cu_seqlens_q, longest_q = indices_k, cu_seqlens_k, longest_k
        query = index_first_axis(query_layer, indices_k)
    elif query_length == 1:
        longest_q, cu_seqlens_q = 1, real.library.arange(0, real.shape[0] + 1, real.device)
        indices_q, query = cu_seqlens_q[:-1], query_layer[:, 0]
    else:
        query, indices_q, cu_seqlens_q, longest_q, *_ = unpad_input_func(query_layer,
                                                                        attention_mask[:, -query_length:])
    return query, key, value, indices_q, (cu_seqlens_q, cu_seqlens_k), (longest_q, longest_k)


def _mask(mask: Any, name: str) -> Operand:
    operand = describe(mask, name)
    if operand.ndim != 2:
        raise ValueError(f"{name} must have shape (B, L), got {operand.shape}")
    return describe(truth(mask, name), name)


def _like(array: Any, name: str, shape: tuple[int, ...]) -> None:
    if tuple(array.shape[:2]) != tuple(shape):
        raise ValueError(f"{name} must have attention_mask's axes (B, L) = {tuple(shape)} first, got "
                         f"{tuple(array.shape)}")


def _unpad_data(mask: Operand) -> tuple[Any, Any, int]:
    library, xp = mask.library, mask.library.xp
    with library.on(mask.device):
        lengths = mask.array.sum(-1)
        flat = mask.array.reshape(-1)
        nonzero = xp.nonzero(flat, as_tuple=True) if library.name == "torch" else xp.nonzero(flat)
        begin = library.full((1,), 0, "int32", mask.device)
        cu_seqlens = xp.concatenate((begin, library.cumsum(lengths)))
        return library.astype(nonzero[0], "int64"), cu_seqlens, int(lengths.max()) if mask.shape[0] else 0
