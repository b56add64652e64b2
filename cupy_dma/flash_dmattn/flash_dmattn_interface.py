"""The six functions of the original's interface, with its names and argument order.

    out = softmax(softcap(softmax_scale * query @ key^T) + attn_bias, over the keys visible under attn_mask and
                  is_causal) @ value

Fixed lengths go to ``cupy_dma.attention``, packed sequences to ``cupy_dma.varlen_attention``. Older argument names are
in ``argument_names.py``; as in the original, None stands for the default of every option.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import checks
from cupy_dma.api import attention
from cupy_dma.flash_dmattn.argument_names import any_names, in_either_order
from cupy_dma.flash_dmattn.arguments import added, operand_of, rows, visible
from cupy_dma.flash_dmattn.choice import choose_backend
from cupy_dma.flash_dmattn.probabilities import probabilities
from cupy_dma.flash_dmattn.varlen import VarlenCall


@any_names
def flash_dmattn_func(query: Any, key: Any, value: Any, attn_mask: Any = None, attn_bias: Any = None,
                      softmax_scale: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
                      deterministic: bool | None = None, return_attn_probs: bool | None = None, *,
                      backend: str | None = None) -> Any:
    """Attention over the keys that ``attn_mask`` makes visible.

    Parameters
    ----------
    query : float array ``(B, Lq, H, D)``
    key, value : float array ``(B, Lk, Hkv, D)``
        ``H`` is a multiple of ``Hkv``. Copied if the last axis is not contiguous.
    attn_mask : array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` or ``(1|B, 1|Hkv|H, 1|Lk)``, or IntervalMask, optional
        True or 1 = visible, False or 0 = hidden. Additive masks (0 and -inf) raise; the values of a float mask are read
        to rule that out, which synchronizes with a GPU. A tuple of masks is their intersection.
    attn_bias : float array of such a shape, optional
        Added after scale and softcap. An expanded key bias is treated as a key bias, in linear memory.
    softmax_scale
        Default ``1 / sqrt(D)``.
    is_causal
        Query ``i`` sees only keys ``j <= i + Lk - Lq``, in addition to the mask. Default False.
    softcap
        0 or None means none.
    deterministic
        Make the backward pass bitwise reproducible too. Default False.
    return_attn_probs
        Return ``(out, softmax_lse, S_dmask)``. S_dmask takes ``O(Lq * Lk)`` memory: for inspection only.
    backend
        Default: cuda, triton or flex for CUDA arrays, numpy for CPU arrays.

    Returns
    -------
    out : array ``(B, Lq, H, D)``
        0 for queries with no visible keys.
    softmax_lse : float32 array ``(B, H, Lq)``
    S_dmask : array ``(B, H, Lq, Lk)`` of query's type
        The probabilities, 0 at hidden keys. It has no gradient.

    Raises
    ------
    As ``cupy_dma.attention``; also TypeError for an argument passed under two names.
    """
    everything = bool_or(return_attn_probs, "return_attn_probs")
    found = attend(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic, backend,
                   3 if everything else 1)
    return found if everything else found[0]


def attend(query: Any, key: Any, value: Any, attn_mask: Any, attn_bias: Any, softmax_scale: float | None,
           is_causal: bool | None, softcap: float | None, deterministic: bool | None, backend: str | None,
           results: int) -> tuple[Any, ...]:
    """The first ``results`` of out, softmax_lse and S_dmask."""
    operand = operand_of(key, "key")
    length = operand.shape[1] if operand.ndim == 4 else 0
    query, key, value = rows(query, "query"), rows(key, "key"), rows(value, "value")
    options: dict[str, Any] = {
        "mask": visible(attn_mask, length), "bias": added(attn_bias, length),
        "causal": bool_or(is_causal, "is_causal"), "scale": softmax_scale, "softcap": softcap or 0.0}
    running: dict[str, Any] = {"deterministic": bool_or(deterministic, "deterministic"),
                               "backend": choose_backend(backend, query)}
    if results == 1:
        return (attention(query, key, value, **options, **running),)
    out, lse = attention(query, key, value, **options, **running, return_lse=True)
    if results == 2:
        return out, lse
    return out, lse, probabilities(query, key, lse, **options)


@any_names
def flash_dmattn_qkvpacked_func(qkv: Any, attn_mask: Any = None, attn_bias: Any = None, is_causal: bool | None = None,
                                softmax_scale: float | None = None, softcap: float | None = None,
                                deterministic: bool | None = None, return_attn_probs: bool | None = None, *,
                                backend: str | None = None) -> Any:
    """``flash_dmattn_func`` of ``qkv (B, L, 3, H, D)``. As in the original, ``is_causal`` comes before the scale."""
    _check_packed(qkv, "qkv", "(B, L, 3, H, D)", 3)
    return flash_dmattn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], attn_mask, attn_bias, softmax_scale, is_causal,
                             softcap, deterministic, return_attn_probs, backend=backend)


@any_names
def flash_dmattn_kvpacked_func(query: Any, kv: Any, attn_mask: Any = None, attn_bias: Any = None,
                               softmax_scale: float | None = None, is_causal: bool | None = None,
                               softcap: float | None = None, deterministic: bool | None = None,
                               return_attn_probs: bool | None = None, *, backend: str | None = None) -> Any:
    """``flash_dmattn_func`` of ``query (B, Lq, H, D)`` and ``kv (B, Lk, 2, Hkv, D)``."""
    _check_packed(kv, "kv", "(B, Lk, 2, Hkv, D)", 2)
    return flash_dmattn_func(query, kv[:, :, 0], kv[:, :, 1], attn_mask, attn_bias, softmax_scale, is_causal, softcap,
                             deterministic, return_attn_probs, backend=backend)


@in_either_order
@any_names
def flash_dmattn_varlen_func(query: Any, key: Any, value: Any, attn_mask: Any = None, attn_bias: Any = None,
                             cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
                             max_seqlen_k: int | None = None, softmax_scale: float | None = None,
                             is_causal: bool | None = None, softcap: float | None = None,
                             deterministic: bool | None = None, return_attn_probs: bool | None = None,
                             block_table: Any = None, *, seqused_k: Any = None, tail_padding: bool = False,
                             backend: str | None = None) -> Any:
    """Attention within packed sequences (varlen).

    Both argument orders after ``value`` are accepted: ``attn_mask, attn_bias, cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q, max_seqlen_k, ...`` (up to 1.0) and ``cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ...``
    (1.2). The rest is ``softmax_scale, is_causal, softcap, deterministic, return_attn_probs, block_table``.

    Parameters
    ----------
    query : float array ``(total_q, H, D)``
    key, value : float array ``(total_k, Hkv, D)``, or with ``block_table`` a paged cache ``(pages, page_size, Hkv, D)``
    cu_seqlens_q, cu_seqlens_k : integer array ``(B + 1,)``, or list
        First row of every sequence, and the end. Each sequence is bottom-right aligned: at its last query and last key.
    tail_padding
        Allow rows after the last sequence, see ``cupy_dma.varlen_attention``.
    max_seqlen_q, max_seqlen_k : int, optional
        Longest sequence. With a mask or bias per query they avoid a synchronization with the GPU.
    attn_mask, attn_bias
        Per key ``(1|Hkv|H, total_k)``, in linear memory; per query and key of its sequence
        ``(total_q, 1|Hkv|H, max_seqlen_k)``; or ``(1|B, 1|Hkv|H, 1|max_seqlen_q, 1|max_seqlen_k)``. The last two
        compute a padded batch. The mask may also be an IntervalMask in packed positions, see
        ``cupy_dma.varlen_attention``. Values mean the same as in ``flash_dmattn_func``.
        With ``block_table`` only per key, ``(B, 1|Hkv|H, max_pages * page_size)``.
    block_table : int32 array ``(B, max_pages)``, optional
        The page table.
    seqused_k : int32 array ``(B,)``, optional
        Lengths of the paged sequences, instead of ``cu_seqlens_k``.

    Returns
    -------
    out : array ``(total_q, H, D)``
    softmax_lse : float32 array ``(H, total_q)``
    S_dmask : array ``(B, H, max_seqlen_q, max_seqlen_k)``, 0 past the end of a sequence; None with ``block_table``
        Both only with ``return_attn_probs``.
    """
    call = VarlenCall(
        rows(query, "query"), rows(key, "key"), rows(value, "value"), cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, bool_or(is_causal, "is_causal"), softmax_scale, softcap or 0.0,
        bool_or(deterministic, "deterministic"), block_table, seqused_k, tail_padding,
        choose_backend(backend, query))
    return call.run(attn_mask, attn_bias, bool_or(return_attn_probs, "return_attn_probs"))


@any_names
def flash_dmattn_varlen_qkvpacked_func(qkv: Any, attn_mask: Any = None, attn_bias: Any = None, cu_seqlens: Any = None,
                                       max_seqlen: int | None = None, softmax_scale: float | None = None,
                                       is_causal: bool | None = None, softcap: float | None = None,
                                       deterministic: bool | None = None, return_attn_probs: bool | None = None, *,
                                       backend: str | None = None) -> Any:
    """``flash_dmattn_varlen_func`` of ``qkv (total, 3, H, D)``, ``cu_seqlens (B + 1,)`` for queries and keys."""
    _check_packed(qkv, "qkv", "(total, 3, H, D)", 3)
    return flash_dmattn_varlen_func(
        qkv[:, 0], qkv[:, 1], qkv[:, 2], attn_mask, attn_bias, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        softmax_scale, is_causal, softcap, deterministic, return_attn_probs, backend=backend)


@any_names
def flash_dmattn_varlen_kvpacked_func(query: Any, kv: Any, attn_mask: Any = None, attn_bias: Any = None,
                                      cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
                                      max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                                      softmax_scale: float | None = None, is_causal: bool | None = None,
                                      softcap: float | None = None, deterministic: bool | None = None,
                                      return_attn_probs: bool | None = None, *, backend: str | None = None) -> Any:
    """``flash_dmattn_varlen_func`` of ``query (total_q, H, D)`` and ``kv (total_k, 2, Hkv, D)``."""
    _check_packed(kv, "kv", "(total_k, 2, Hkv, D)", 2)
    return flash_dmattn_varlen_func(
        query, kv[:, 0], kv[:, 1], attn_mask, attn_bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, is_causal, softcap, deterministic, return_attn_probs, backend=backend)


def _check_packed(array: Any, name: str, meaning: str, count: int) -> None:
    operand = operand_of(array, name)
    if operand.ndim != meaning.count(",") + 1 or operand.shape[-3] != count:
        raise ValueError(f"{name} must have shape {meaning}, got {operand.shape}")


def bool_or(value: bool | None, name: str, default: bool = False) -> bool:
    """A boolean option of the original, where None stands for the default."""
    return default if value is None else checks.flag(value, name)
