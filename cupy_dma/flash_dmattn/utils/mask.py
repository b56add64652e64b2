"""Dense masks from biases, row by row: the ``window_size`` best keys, or all keys with a positive bias.

    kept[..., j] = visible[..., j] and fewer than window_size visible keys of the row rank above j        (topk)
    kept[..., j] = visible[..., j] and bias[..., j] > 0                                                  (relu)

Keys are ranked by ``(bias, j)``: higher biases first, the newest of equal keys first, NaN above everything, as
everywhere in this package. Results are dense boolean arrays, True = kept; ``cupy_dma.IntervalMask.top_w`` stores the
best keys of a growing prefix in two integers per key. Block smoothing never reveals a key that the mask hides.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.flash_dmattn.argument_names import any_names
from cupy_dma.flash_dmattn.arguments import truth


def topk_indices(attention_bias: Any, window_size: int) -> Any:
    """int64 indices of the ``window_size`` best keys of every row of ``(..., Lk)``, ascending; all if there are fewer.
    """
    window = checks.whole(window_size, "window_size", 1)
    ranked = _ranked(attention_bias)
    library, xp = ranked.library, ranked.library.xp
    with library.on(ranked.device):
        best = _order(ranked.array, xp)[..., max(ranked.shape[-1] - window, 0):]
        return library.export(library.astype(_sorted(best, xp), "int64"))


def block_smooth(attention_mask: Any, key_len: int, block_size: int) -> Any:
    """A mask ``(..., key_len)`` in which each block of ``block_size`` keys is kept entirely if more than half of it was
    kept, and dropped otherwise; the last block may be shorter. A new array."""
    operand = describe(attention_mask, "attention_mask")
    length = checks.whole(key_len, "key_len", 0)
    block = checks.whole(block_size, "block_size", 1)
    if operand.shape[-1] != length:
        raise ValueError(f"attention_mask must have key_len={length} keys in its last axis, got {operand.shape}")
    library, xp, kept = operand.library, operand.library.xp, truth(attention_mask, "attention_mask")
    if block == 1:
        return kept
    with library.on(operand.device):
        pieces = []
        for begin, end, size in ((0, length - length % block, block), (length - length % block, length,
                                                                      length % block)):
            if end > begin:
                blocks = kept[..., begin:end].reshape(*operand.shape[:-1], (end - begin) // size, size)
                whole = blocks.sum(-1)[..., None] * 2 > size
                pieces.append(xp.broadcast_to(whole, blocks.shape).reshape(*operand.shape[:-1], end - begin))
        return library.export(xp.concatenate(pieces, -1)) if pieces else kept


@any_names
def topk_mask(attention_bias: Any, attention_mask: Any, window_size: int, min_dtype: float | None = None,
              block_size: int | None = None) -> Any:
    """The ``window_size`` best visible keys of every row.

    Parameters
    ----------
    attention_bias : float array ``(1|B, 1|Hkv|H, 1|Lq, Lk)``
    attention_mask : bool array that broadcasts with it, or None
    window_size : int
        Keys kept per row, at least 1; a row with fewer visible keys keeps them all.
    min_dtype
        Keys with exactly this bias are hidden too.
    block_size
        Smooth the result, see ``block_smooth``.

    Returns
    -------
    bool array of the shape that both broadcast to
    """
    window = checks.whole(window_size, "window_size", 1)
    ranked, visible = _arguments(attention_bias, attention_mask, min_dtype)
    library, xp = ranked.library, ranked.library.xp
    with library.on(ranked.device):
        order = _order(ranked.array, xp)  # worst first
        seen = _along(visible, order, xp)
        count = xp.cumsum(seen, -1)
        better = count[..., -1:] - count  # visible keys that rank above this one
        kept = _along(seen & (better < window), _order(order, xp), xp)
        return library.export(_smoothed(kept, visible, block_size))


@any_names
def dynamic_mask(attention_bias: Any, attention_mask: Any, window_size: int, min_dtype: float | None = None,
                 block_size: int | None = None) -> Any:
    """``topk_mask`` under its name in 1.2.2."""
    return topk_mask(attention_bias, attention_mask, window_size, min_dtype, block_size)


def relu_mask(attention_bias: Any, attention_mask: Any, min_dtype: float | None = None, block_size: int | None = None,
              **unused: Any) -> Any:
    """The visible keys whose bias is positive; arguments as for ``topk_mask``. Takes and ignores ``window_size``."""
    unknown = unused.keys() - {"window_size", "keep_window_size"}
    if unknown:
        raise TypeError(f"relu_mask() got an unexpected keyword argument {min(unknown)!r}")
    ranked, visible = _arguments(attention_bias, attention_mask, min_dtype)
    with ranked.library.on(ranked.device):
        return ranked.library.export(_smoothed(visible & (ranked.array > 0), visible, block_size))


@any_names
def create_mask(attention_bias: Any, attention_mask: Any, batch_size: int, query_len: int, key_len: int,
                window_size: int, min_dtype: float | None = None, block_size: int | None = None, type: str = "topk"
                ) -> Any:
    """A dense mask from a bias and a mask.

    Parameters
    ----------
    attention_bias : float array ``(1|B, 1|Hkv|H, 1|Lq, Lk)`` or ``(1|B, 1|Hkv|H, Lk)``
    attention_mask : bool array, or None
        Of such a shape; or a padding mask ``(B, Lk)`` or ``(B, Lq)``, True = a real key. ``(B, Lq)`` covers only the
        newest keys; all earlier ones are real.
    batch_size, query_len, key_len
        ``B``, ``Lq``, ``Lk``.
    window_size, min_dtype, block_size
        As for ``topk_mask``.
    type
        ``"topk"`` or ``"relu"``.

    Returns
    -------
    bool array ``(1|B, 1|Hkv|H, 1|Lq, Lk)``
    """
    checks.choice(type, "type", ("topk", "relu"))
    bias = describe(attention_bias, "attention_bias")
    if bias.ndim not in (3, 4) or bias.shape[-1] != key_len:
        raise ValueError(f"attention_bias must have shape (1|B, 1|Hkv|H, 1|Lq, Lk) or (1|B, 1|Hkv|H, Lk) with "
                         f"Lk={key_len}, got {bias.shape}")
    if bias.ndim == 3:
        attention_bias = attention_bias[:, :, None]
    if attention_mask is not None and len(attention_mask.shape) == 2:
        attention_mask = _padding(attention_mask, batch_size, query_len, key_len)
    if type == "relu":
        return relu_mask(attention_bias, attention_mask, min_dtype, block_size)
    return topk_mask(attention_bias, attention_mask, window_size, min_dtype, block_size)


def _padding(mask: Any, batch: int, query_len: int, key_len: int) -> Any:
    """A padding mask of all keys, or only the newest ones, as (B, 1, 1, Lk)."""
    operand = describe(mask, "attention_mask")
    library = operand.library
    if operand.shape not in ((batch, key_len), (batch, query_len)):
        raise ValueError(f"attention_mask must have shape (B, Lk) = ({batch}, {key_len}), (B, Lq) = ({batch}, "
                         f"{query_len}) or four axes, got {operand.shape}")
    real = truth(mask, "attention_mask")
    if operand.shape[1] > key_len:
        raise ValueError(f"attention_mask must not have more keys than key_len={key_len}, got {operand.shape}")
    with library.on(operand.device):
        if operand.shape[1] < key_len:
            older = library.full((batch, key_len - query_len), True, "bool", operand.device)
            real = library.xp.concatenate((older, real), -1)
        return real[:, None, None]


def _ranked(bias: Any) -> Operand:
    """The bias without gradient, in a type that its library can sort."""
    operand = describe(bias, "attention_bias")
    checks.one_of_types(operand)
    if operand.ndim < 1:
        raise ValueError("attention_bias must have at least one axis, got shape ()")
    library, array = operand.library, operand.array
    array = array.detach() if library.name == "torch" else array
    if operand.dtype in ("float16", "bfloat16"):
        array = library.astype(array, "float32")
    return Operand("attention_bias", array, library, operand.shape, operand.strides, operand.dtype, operand.device, 0)


def _arguments(bias: Any, mask: Any, min_dtype: float | None) -> tuple[Operand, Any]:
    """The bias and which keys are visible, in one shape."""
    ranked = _ranked(bias)
    library, xp = ranked.library, ranked.library.xp
    hidden_too = None if min_dtype is None else checks.real(min_dtype, "min_dtype")
    if mask is not None:
        checks.require_same_device((ranked, describe(mask, "attention_mask")))
        mask = truth(mask, "attention_mask")
    with library.on(ranked.device):
        visible = library.full(ranked.shape, True, "bool", ranked.device)
        if hidden_too is not None:
            visible = ranked.array != hidden_too
        if mask is not None:
            if not _broadcasts(mask.shape, ranked.shape):
                raise ValueError(f"attention_mask must broadcast with attention_bias {ranked.shape}, got "
                                 f"{tuple(mask.shape)}")
            visible = visible & mask
        array = xp.broadcast_to(ranked.array, visible.shape)
    return Operand("attention_bias", array, library, tuple(visible.shape), (), ranked.dtype, ranked.device, 0), visible


def _broadcasts(a: Any, b: Any) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(tuple(a)[::-1], tuple(b)[::-1]))


def _smoothed(kept: Any, visible: Any, block_size: int | None) -> Any:
    if block_size is None:
        return kept
    return block_smooth(kept, kept.shape[-1], block_size) & visible


def _order(array: Any, xp: Any) -> Any:
    """Indices that sort the last axis, lowest first, NaN last; equal elements keep their order."""
    if hasattr(xp, "take_along_dim"):  # torch
        return xp.argsort(array, dim=-1, stable=True)
    return xp.argsort(array, axis=-1, kind="stable")


def _sorted(array: Any, xp: Any) -> Any:
    return _along(array, _order(array, xp), xp)


def _along(array: Any, order: Any, xp: Any) -> Any:
    if hasattr(xp, "take_along_dim"):
        return xp.take_along_dim(array, order, -1)
    return xp.take_along_axis(array, order, -1)
