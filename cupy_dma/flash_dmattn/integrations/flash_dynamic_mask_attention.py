"""The attention function that a ``transformers`` model calls. It imports torch, not transformers."""
from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from cupy_dma import checks
from cupy_dma.flash_dmattn.argument_names import any_names
from cupy_dma.flash_dmattn.arguments import added, truth, visible
from cupy_dma.flash_dmattn.flash_dmattn_interface import flash_dmattn_func, flash_dmattn_varlen_func
from cupy_dma.flash_dmattn.utils.mask import topk_mask
from cupy_dma.flash_dmattn.windows import best_keys, plain_padding
from cupy_dma.masks.interval import IntervalMask

_REFUSED = ("head_mask", "s_aux")  # arguments that would change the result and are not supported


@any_names
def flash_dynamic_mask_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None, scaling: float | None = None, window_size: int | None = None,
        softcap: float | None = None, *, is_causal: bool | None = None, deterministic: bool | None = None,
        position_ids: Tensor | None = None, cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None, max_length_k: int | None = None, dropout: float = 0.0,
        backend: str | None = None, **others: Any) -> tuple[Tensor, None]:
    """Attention in the calling convention of transformers.

    Parameters
    ----------
    module
        Supplies ``is_causal``, and ``window_size`` or ``keep_window_size``, if the call does not. float32 inputs are
        cast to the type of its first Linear layer if that is a 16-bit type, as is common with PEFT.
    query : ``(B, H, Lq, D)``
    key, value : ``(B, Hkv, Lk, D)``
    attention_mask, optional
        Padding ``(B, length)``, bool or 0/1; keys past its length are not used, and the output is 0 at queries that
        are padding. Or a mask as for ``flash_dmattn_func``: boolean, as transformers makes it for SDPA. One of 0 and
        -inf, as for eager attention, raises (write ``attention_mask == 0``), and so does one that holds a bias, as in
        Doge (pass it as ``attention_bias``).
    attention_bias : ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` or ``(B, Hkv, Lk)``, optional
    scaling, softcap, deterministic
        As for ``flash_dmattn_func``.
    window_size
        With a bias and more keys than this, every query sees the keys with the highest bias among those that it may
        see. For a bias per key this is an interval mask unless ``attention_mask`` is more than causality and padding.
    position_ids : ``(1, length)``, optional
        Packed sequences in one row: each begins at position 0 and attends only to itself.
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, optional
        The same by cumulative lengths, without mask or bias.
    dropout
        Must be 0.
    **others
        Ignored, as transformers passes arguments meant for other implementations; but ``head_mask`` and ``s_aux`` raise
        NotImplementedError, and ``output_attentions`` warns.

    Returns
    -------
    out : ``(B, Lq, H, D)``
    None
        In place of the attention weights.
    """
    for name in _REFUSED:
        if others.get(name) is not None:
            raise NotImplementedError(f"{name} must be None, got {type(others[name]).__name__}: it is not supported")
    if dropout:
        raise NotImplementedError(f"dropout must be 0, got {dropout}: dropout is not supported")
    if others.get("output_attentions"):
        warnings.warn("output_attentions=True has no effect: the attention weights are never computed", stacklevel=3)
    causal = checks.flag(module.is_causal if is_causal is None else is_causal, "is_causal")
    if window_size is None:
        window_size = getattr(module, "window_size", getattr(module, "keep_window_size", None))
    query, key, value, attention_bias = _cast(module, query, key, value, attention_bias)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap, "deterministic": deterministic,
                               "backend": backend}

    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if attention_mask is not None or attention_bias is not None:
            raise NotImplementedError("cu_seq_lens_q and cu_seq_lens_k cannot be combined with attention_mask or "
                                      "attention_bias; flash_dmattn_varlen_func takes them together")
        out = flash_dmattn_varlen_func(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), cu_seqlens_q=cu_seq_lens_q,
            cu_seqlens_k=cu_seq_lens_k, max_seqlen_q=max_length_q, max_seqlen_k=max_length_k, is_causal=causal,
            **options)
        return out.unflatten(0, query.shape[:2]), None

    if attention_mask is not None and attention_mask.dim() == 2:
        length = attention_mask.shape[1]
        if length < query.shape[1]:
            raise ValueError(f"attention_mask must cover the {query.shape[1]} queries, got "
                             f"{tuple(attention_mask.shape)}")
        key, value = key[:, :length], value[:, :length]
        if attention_bias is not None and attention_bias.shape[-1] > length:
            attention_bias = attention_bias[..., :length]
    documents = None
    if position_ids is not None and position_ids.shape == (1, key.shape[1]) and len(query) == 1 and \
            query.shape[1] == key.shape[1]:
        documents = (position_ids == 0).int().cumsum(1, dtype=torch.int32)
    bias = added(attention_bias, key.shape[1], "attention_bias")
    mask, causal = _mask(bias, attention_mask, window_size, causal, documents, query, key, backend)
    out = flash_dmattn_func(query, key, value, mask, bias, is_causal=causal, **options)
    if attention_mask is not None and attention_mask.dim() == 2:
        real = truth(attention_mask[:, attention_mask.shape[1] - query.shape[1]:], "attention_mask")
        out = torch.where(real[:, :, None, None], out, out.new_zeros(()))
    return out, None


def _mask(bias: Tensor | None, mask: Tensor | None, window: int | None, causal: bool, documents: Tensor | None,
          query: Tensor, key: Tensor, backend: str | None) -> tuple[Any, bool]:
    """The mask of the call, and whether causality is still to be applied."""
    length = key.shape[1]
    if mask is not None and mask.dim() == 2:
        seen = truth(mask, "attention_mask")
    else:
        seen = visible(None if mask is None else mask[..., :length], length, "attention_mask")
    if bias is None or not window or window >= length:
        own = None if documents is None else IntervalMask.documents(documents, causal=causal)
        if seen is None or own is None:
            if own is None and seen is not None:
                own = IntervalMask.padding(seen) if seen.dim() == 2 else seen
            return own, causal
        return (own & IntervalMask.padding(seen) if seen.dim() == 2 else (own, seen)), causal
    per_key = bias[:, :, 0] if bias.dim() == 4 and bias.shape[2] == 1 else bias
    if per_key.dim() == 3 and per_key.shape[-1] == length:
        if documents is None:
            return best_keys(per_key, window, seen, causal, query.shape[1], backend), False
        if seen is not None and seen.dim() == 4:
            seen = plain_padding(seen, causal, query.shape[1])
            if seen is None:
                raise NotImplementedError("attention_mask with four axes must be only causality and padding where "
                                          "position_ids hold several sequences and a window is selected")
        keys = "prefix" if causal else "global"
        return IntervalMask.top_w(per_key.detach(), window, keys=keys, padding=seen, documents=documents,
                                  backend=backend), False
    if documents is not None:
        raise NotImplementedError("position_ids that hold several sequences need an attention_bias per key where a "
                                  f"window is selected, got {tuple(bias.shape)}")
    if seen is not None and seen.dim() == 2:
        seen = seen[:, None, None]
    if causal:
        lower = IntervalMask.causal(length, like=query).to_dense(query.shape[1])
        seen = lower if seen is None else seen & lower
    return topk_mask(bias, seen, window), False


def _cast(module: Any, *tensors: Tensor | None) -> tuple[Any, ...]:
    """float32 inputs cast to the model's 16-bit type (for a quantized model, the one in its configuration)."""
    first = tensors[0]
    if first is None or first.dtype != torch.float32 or torch.is_autocast_enabled(first.device.type):
        return tensors
    kind = getattr(getattr(module, "config", None), "_pre_quantization_dtype", None)
    if kind is None and isinstance(module, torch.nn.Module):
        kind = next((layer.weight.dtype for layer in module.modules() if isinstance(layer, torch.nn.Linear)), None)
    if kind not in (torch.float16, torch.bfloat16):
        return tensors
    return tuple(None if x is None else x.to(kind) for x in tensors)
