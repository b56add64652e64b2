"""The attention function of ``attn_implementation="cupy_dma"``: what a layer of transformers calls.

    plain layers     attention(q, k, v, mask)               mask: ``Visibility``, as ``visibility`` makes it
    dynamic layers   s = exp(A softplus(v @ dt_proj))       or hidden_states @ score_proj: each query sees the
                     attention(q, k, v, top_w(s), bias=s)   ``window`` best of the keys that the mask shows, and s is
                                                            added to the logits
    gated layers     see ``gate.py``

Dynamic layers are Doge's (``doge.py``) and those of a converted model (``convert.py``); they have an attribute
``dynamic_mask``. As transformers requires, tensors come as ``(B, H, L, D)`` and leave as ``(B, L, H, D)``.
"""
from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from cupy_dma.masks.interval import IntervalMask
from cupy_dma.masks.windows import narrowest
from cupy_dma.torch import attention, dynamic_mask_attention
from cupy_dma.torch.kept import kept_keys
from cupy_dma.torch.registration import wide
from cupy_dma.torch.scores import input_scores, layer_scores, score_arguments
from cupy_dma.transformers.cache import DynamicMaskCache, DynamicMaskLayer
from cupy_dma.transformers.gate import gated_attention
from cupy_dma.transformers.layers import DynamicMask, GateMask
from cupy_dma.transformers.replay import replayed
from cupy_dma.transformers.visibility import Visibility


def attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *,
                      dropout: float = 0.0, scaling: float | None = None, softcap: float | None = None,
                      is_causal: bool | None = None, position_bias: Tensor | None = None,
                      s_aux: Tensor | None = None, sinks: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
                      cu_seq_lens_k: Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
    """Attention in the calling convention of transformers; ``register`` registers it there.

    Parameters
    ----------
    module
        The layer. Without a mask its ``is_causal`` applies, unless given; without the attribute it sees all keys.
    query : Tensor ``(B, H, Q, D)``
    key, value : Tensor ``(B, Hkv, K, D)``
    attention_mask
        None: the layer is causal (if it is a causal layer), with the last query at the last key. A ``Visibility``:
        decides about causality itself. Or a tensor ``(1|B, 1|H, Q, K)`` made by the caller: boolean (True = visible),
        or floating (added to the logits).
    dropout
        Must be 0.
    scaling, softcap
        Default: ``1 / sqrt(D)`` and none.
    position_bias : Tensor ``(1|B, H, Q, K)``, optional
        Added to the logits.
    s_aux : Tensor ``(H,)``, optional
        A logit per head that takes part in the softmax and adds nothing (GPT-OSS's attention sinks).
    sinks : Tensor ``(B, H, Q, 1)``, optional
        The same for each query (Inkling 2).
    cu_seq_lens_q, cu_seq_lens_k : int32 Tensor ``(sequences + 1,)``, optional
        Packed sequences in one row, if the mask is only causality.
    **others
        Unused: the mask contains it (``sliding_window``), or it is meant for other implementations.

    Returns
    -------
    out : Tensor ``(B, Q, H, D)``
    None
        In place of the attention weights, which are never computed.

    Raises
    ------
    NotImplementedError
        Dropout, a head mask, keys chosen per query, or arguments that a dynamic layer does not support.
    """
    if dropout:
        raise NotImplementedError(f"attn_implementation='cupy_dma' has no dropout of attention weights, got "
                                  f"dropout={dropout}: set the configuration's attention_dropout to 0")
    for name in ("head_mask", "indices", "block_indices"):
        if others.get(name) is not None:
            raise NotImplementedError(f"attn_implementation='cupy_dma' takes no {name}")
    if others.get("output_attentions"):
        warnings.warn("attn_implementation='cupy_dma' never computes attention weights: with output_attentions=True "
                      "they are None; use 'eager' to get them", stacklevel=2)
    if isinstance(attention_mask, Visibility) and attention_mask.is_plain:
        attention_mask, is_causal = None, attention_mask.causal
    if attention_mask is None and cu_seq_lens_k is not None:
        attention_mask = _packed(cu_seq_lens_q, cu_seq_lens_k, query, key, _is_causal(module, is_causal))
    settings: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0}
    how = getattr(module, "dynamic_mask", None)
    if how is not None:
        for name, given in (("position_bias", position_bias), ("sinks", sinks)):
            if given is not None:
                raise NotImplementedError(f"a layer with a dynamic mask takes no {name}")
        if attention_mask is None and is_causal is False:
            raise NotImplementedError("a layer with a dynamic mask is causal, got is_causal=False")
        return dynamic_attention(module, how, query, key, value, attention_mask, module.dynamic_cache,
                                 sink_logits=s_aux, **settings), None
    query, key, value = _bnhd(query, key, value)
    causal, mask = False, None
    if attention_mask is None:
        causal = _is_causal(module, is_causal)
    elif isinstance(attention_mask, Visibility):
        mask = attention_mask[..., :key.shape[1]].interval()
    elif isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
        attention_mask = attention_mask[..., :key.shape[1]]
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            position_bias = attention_mask if position_bias is None else attention_mask + position_bias
    else:
        raise NotImplementedError(f"attention_mask must be what the mask function of attn_implementation='cupy_dma' "
                                  f"makes, or a tensor (B, H, Q, K), got {_described(attention_mask)}")
    options = {"mask": mask, "bias": position_bias, "causal": causal, "sink_logits": s_aux, **settings}
    if sinks is None:
        return attention(query, key, value, **options), None
    out, lse = attention(query, key, value, return_lse=True, **options)
    weight = torch.sigmoid(lse[..., None] - sinks.to(lse.dtype)).transpose(1, 2)  # e^lse / (e^lse + e^sink)
    return (out * weight).to(out.dtype), None


def dynamic_attention(module: Any, how: DynamicMask | GateMask, query: Tensor, key: Tensor, value: Tensor, mask: Any,
                      cache: DynamicMaskCache | None, *, scale: float | None, softcap: float = 0.0,
                      sink_logits: Tensor | None = None) -> Tensor:
    """``out (B, Q, H, D)`` of a layer with a dynamic mask. ``cache``: the layer's own cache, unless key and value hold
    all tokens."""
    if mask is not None and not isinstance(mask, Visibility):
        raise NotImplementedError(f"a layer with a dynamic mask needs padding (B, K) as attention_mask, which the "
                                  f"model turns into its own kind of mask, got {_described(mask)}")
    if mask is not None and not mask.causal:
        raise NotImplementedError("a layer with a dynamic mask is causal, but its model asks for a bidirectional mask")
    seen: Visibility | None = None if mask is None or mask.is_plain else mask
    query, key, value = _bnhd(query, key, value)
    recorded = replayed(module, key, cache if not isinstance(how, GateMask) else module.gate_call.layer)
    if recorded is not None and seen is not None:
        if seen.documents or seen.window is not None:
            raise NotImplementedError("a replay takes no packed sequences and no sliding window")
        recorded = recorded & seen.interval()
    if isinstance(how, GateMask):
        return gated_attention(module, query, key, value, seen, recorded, scale=scale, softcap=softcap,
                               sink_logits=sink_logits)
    if sink_logits is not None and how.form == "exp":  # keys have the score exp(0) = 1 while A = 0; so do sinks
        sink_logits = sink_logits + 1
    settings: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits}
    layer = cache.layers[module.layer_idx] if cache is not None else None
    if isinstance(layer, DynamicMaskLayer):
        return _attend(layer, module, how, query, key, value, seen, **settings)
    padding = documents = None
    if seen is not None:
        padding, documents = seen.padding, seen.numbering
    if recorded is not None:
        kept = recorded
    elif seen is not None and seen.window is not None and seen.window < key.shape[1]:
        if narrowest(how.window) < seen.window:
            raise NotImplementedError(
                f"the best {how.window} keys within a sliding window of {seen.window} are not an interval mask: the "
                f"dynamic window must be at least the sliding one, or the sliding one at least the number of keys, "
                f"{key.shape[1]}")
        kept = seen.interval()
    elif how.form == "none" and seen is None:
        newest = IntervalMask.sliding_window(key.shape[1], how.window, like=value)
        kept = newest | IntervalMask.sinks(key.shape[1], how.sinks, like=value)
    elif how.sinks or how.recent or how.form == "none" or seen is not None and not seen.is_aligned:
        kept = None
    else:
        given = {"scores": _scores(module, how, value, padding)} if how.form == "input" else \
            score_arguments(value, module.dt_proj, module.A, form=how.form, padding=padding)
        return dynamic_mask_attention(query, key, value, window=how.window, padding=padding, documents=documents,
                                      **given, **settings)
    if kept is not None and how.form == "none":
        return attention(query, key, value, mask=kept, **settings)
    scores = _scores(module, how, value, padding)
    if kept is None:
        kept = kept_keys(scores, how.window, how.sinks, how.recent, padding, documents, None)
        kept = kept if seen is None else seen.placed(kept)
    return attention(query, key, value, mask=kept, bias=None if how.form == "none" else scores, **settings)


def _scores(module: Any, how: DynamicMask, value: Tensor, padding: Tensor | None) -> Tensor:
    """``(B, Hkv, K)``. Of equal scores the newest keys are kept."""
    if how.form == "none":
        return value.new_zeros((value.shape[0], value.shape[2], value.shape[1]), dtype=wide(value))
    if how.form != "input":
        return layer_scores(value, module.dt_proj, module.A, form=how.form, padding=padding)
    if module.score_input.shape[1] != value.shape[1]:
        raise NotImplementedError(f"a layer that scores its input needs the scores of earlier keys: give the model a "
                                  f"DynamicMaskCache, got {value.shape[1] - module.score_input.shape[1]} keys from "
                                  f"another cache")
    return input_scores(module.score_input, module.score_proj, value.shape[2], padding)


def _attend(layer: DynamicMaskLayer, module: Any, how: DynamicMask, query: Tensor, key: Tensor, value: Tensor,
            seen: Visibility | None, sink_logits: Tensor | None, **settings: Any) -> Tensor:
    """Append tokens to the layer's cache and attend from them."""
    if seen is not None and (seen.documents or seen.window is not None):
        raise NotImplementedError("a DynamicMaskCache takes no packed sequences and no sliding window: give one row "
                                  "per sequence")
    real = None if seen is None else seen.new_tokens()
    scores = _scores(module, how, value, real)
    return layer.attend(query, key, value, scores, how, real, settings, sink_logits)


def _is_causal(module: Any, given: bool | None) -> bool:
    """Whether a call without a mask is causal, by its argument, else by the module; no answer means cross-attention."""
    return bool(getattr(module, "is_causal", False) if given is None else given)


def _bnhd(*tensors: Tensor) -> list[Tensor]:
    """``(B, L, H, D)``, with a contiguous last axis, of ``(B, H, L, D)``."""
    turned = [x.transpose(1, 2) for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in turned]


def _packed(lengths_q: Tensor | None, lengths_k: Tensor, query: Tensor, key: Tensor, causal: bool) -> Visibility:
    """Sequences of a single row, by cumulative lengths."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"cu_seq_lens_q and cu_seq_lens_k need one row with as many queries as keys, got "
                                  f"query {tuple(query.shape)} and key {tuple(key.shape)}")
    if lengths_q is not None and lengths_q.shape != lengths_k.shape:
        raise NotImplementedError("cu_seq_lens_q must equal cu_seq_lens_k")
    place = torch.arange(key.shape[2], device=key.device)
    numbers = torch.searchsorted(lengths_k.long(), place, right=True)
    return Visibility(query.shape[2], key.shape[2], 0, key.device, causal, documents=[numbers[None]])


def _described(mask: Any) -> str:
    shape = f" of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else ""
    return f"{type(mask).__name__}{shape}"
