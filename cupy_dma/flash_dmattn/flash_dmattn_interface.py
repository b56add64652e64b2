"""The six functions of the original's interface, by its names and in its order of arguments.

    out = softmax(softcap(softmax_scale * query @ key^T) + attn_bias, over what attn_mask and is_causal leave) @ value

Fixed lengths go to ``cupy_dma.attention``, packed sequences to ``cupy_dma.varlen_attention``. Older spellings of an
argument are in ``spellings.py``; None stands for the default of every option, as it did.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import attention, checks
from cupy_dma.flash_dmattn.argument_names import in_either_order, spelled
from cupy_dma.flash_dmattn.arguments import added, rows, seen_as, visible
from cupy_dma.flash_dmattn.choice import serving
from cupy_dma.flash_dmattn.probabilities import probabilities
from cupy_dma.flash_dmattn.varlen import VarlenCall


@spelled
def flash_dmattn_func(query: Any, key: Any, value: Any, attn_mask: Any = None, attn_bias: Any = None,
                      softmax_scale: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
                      deterministic: bool | None = None, return_attn_probs: bool | None = None, *,
                      backend: str | None = None) -> Any:
    """Attention over the keys that ``attn_mask`` shows.

    Parameters
    ----------
    query : float array ``(B, Lq, H, D)``
    key, value : float array ``(B, Lk, Hkv, D)``
        ``H`` a multiple of ``Hkv``. A last axis that is not contiguous is copied.
    attn_mask : array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` or ``(1|B, 1|Hkv|H, 1|Lk)``, or IntervalMask, optional
        True or 1 = visible, False or 0 = hidden; or additive, 0 = visible and -inf or a type's lowest number = hidden.
        A float mask with a negative entry is additive. A tuple of masks shows what all of them show.
    attn_bias : float array of such a shape, optional
        Added after scale and softcap. An expanded key bias is used as the key bias that it is.
    softmax_scale
        Default ``1 / sqrt(D)``.
    is_causal
        Query ``i`` sees only keys ``j <= i + Lk - Lq``, in addition to the mask. Default False.
    softcap
        0 or None means none.
    deterministic
        The same bits on every run also in the backward pass. Default False.
    return_attn_probs
        Return ``(out, softmax_lse, S_dmask)``. S_dmask takes ``O(Lq * Lk)`` memory: it is for looking at.
    backend
        Default: cuda, triton or flex for CUDA arrays, numpy for arrays on the CPU.

    Returns
    -------
    out : array ``(B, Lq, H, D)``
        0 where a query sees nothing.
    softmax_lse : float32 array ``(B, H, Lq)``
    S_dmask : array ``(B, H, Lq, Lk)`` of query's type
        The probabilities, 0 at hidden keys. It has no gradient.

    Raises
    ------
    As ``cupy_dma.attention``; TypeError also for an argument given under two names.
    """
    everything = bool_or(return_attn_probs, "return_attn_probs")
    found = attend(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic, backend,
                   3 if everything else 1)
    return found if everything else found[0]


def attend(query: Any, key: Any, value: Any, attn_mask: Any, attn_bias: Any, softmax_scale: float | None,
           is_causal: bool | None, softcap: float | None, deterministic: bool | None, backend: str | None,
           results: int) -> tuple[Any, ...]:
    """The first ``results`` of out, softmax_lse and S_dmask."""
    operand = seen_as(key, "key")
    length = operand.shape[1] if operand.ndim == 4 else 0
    query, key, value = rows(query, "query"), rows(key, "key"), rows(value, "value")
    options: dict[str, Any] = {
        "mask": visible(attn_mask, length), "bias": added(attn_bias, length),
        "causal": bool_or(is_causal, "is_causal"), "scale": softmax_scale, "softcap": softcap or 0.0}
    running: dict[str, Any] = {"deterministic": bool_or(deterministic, "deterministic"),
                               "backend": serving(backend, query)}
    if results == 1:
        return (attention(query, key, value, **options, **running),)
    out, lse = attention(query, key, value, **options, **running, return_lse=True)
    if results == 2:
        return out, lse
    return out, lse, probabilities(query, key, lse, **options)


@spelled
def flash_dmattn_qkvpacked_func(qkv: Any, attn_mask: Any = None, attn_bias: Any = None, is_causal: bool | None = None,
                                softmax_scale: float | None = None, softcap: float | None = None,
                                deterministic: bool | None = None, return_attn_probs: bool | None = None, *,
                                backend: str | None = None) -> Any:
    """``flash_dmattn_func`` of ``qkv (B, L, 3, H, D)``. Here ``is_causal`` comes before the scale, as it did."""
    _packed(qkv, "qkv", "(B, L, 3, H, D)", 3)
    return flash_dmattn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], attn_mask, attn_bias, softmax_scale, is_causal,
                             softcap, deterministic, return_attn_probs, backend=backend)


@spelled
def flash_dmattn_kvpacked_func(query: Any, kv: Any, attn_mask: Any = None, attn_bias: Any = None,
                               softmax_scale: float | None = None, is_causal: bool | None = None,
                               softcap: float | None = None, deterministic: bool | None = None,
                               return_attn_probs: bool | None = None, *, backend: str | None = None) -> Any:
    """``flash_dmattn_func`` of ``query (B, Lq, H, D)`` and ``kv (B, Lk, 2, Hkv, D)``."""
    _packed(kv, "kv", "(B, Lk, 2, Hkv, D)", 2)
    return flash_dmattn_func(query, kv[:, :, 0], kv[:, :, 1], attn_mask, attn_bias, softmax_scale, is_causal, softcap,
                             deterministic, return_attn_probs, backend=backend)


@in_either_order
@spelled
def flash_dmattn_varlen_func(query: Any, key: Any, value: Any, attn_mask: Any = None, attn_bias: Any = None,
                             cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
                             max_seqlen_k: int | None = None, softmax_scale: float | None = None,
                             is_causal: bool | None = None, softcap: float | None = None,
                             deterministic: bool | None = None, return_attn_probs: bool | None = None,
                             block_table: Any = None, *, seqused_k: Any = None, backend: str | None = None) -> Any:
    """Attention within sequences that lie one after the other.

    Both orders of the arguments after ``value`` are understood: ``attn_mask, attn_bias, cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q, max_seqlen_k, ...`` (to 1.0) and ``cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ...``
    (1.2). The rest is ``softmax_scale, is_causal, softcap, deterministic, return_attn_probs, block_table``.

    Parameters
    ----------
    query : float array ``(total_q, H, D)``
    key, value : float array ``(total_k, Hkv, D)``, or pages ``(pages, page_size, Hkv, D)`` with ``block_table``
    cu_seqlens_q, cu_seqlens_k : integer array ``(B + 1,)``
        First row of every sequence, and the end. Each sequence is aligned at its last query and last key.
    max_seqlen_q, max_seqlen_k : int, optional
        Longest sequence. With a mask or bias per query they save a wait for the GPU.
    attn_mask, attn_bias
        Per key ``(1|Hkv|H, total_k)``, which costs nothing; per query and key of its sequence
        ``(total_q, 1|Hkv|H, max_seqlen_k)``; or ``(1|B, 1|Hkv|H, 1|max_seqlen_q, 1|max_seqlen_k)``. The last two
        compute padded sequences, like their own memory. The mask also as an IntervalMask in packed positions, see
        ``cupy_dma.varlen_attention``. Numbers mean what they mean in ``flash_dmattn_func``.
        With ``block_table`` only per key, ``(B, 1|Hkv|H, max_pages * page_size)``.
    block_table : int32 array ``(B, max_pages)``, optional
    seqused_k : int32 array ``(B,)``, optional
        Lengths of paged sequences, instead of ``cu_seqlens_k``.

    Returns
    -------
    out : array ``(total_q, H, D)``
    softmax_lse : float32 array ``(H, total_q)``
    S_dmask : array ``(B, H, max_seqlen_q, max_seqlen_k)``, 0 beyond a sequence; None with ``block_table``
        Both only with ``return_attn_probs``.
    """
    call = VarlenCall(
        rows(query, "query"), rows(key, "key"), rows(value, "value"), cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, bool_or(is_causal, "is_causal"), softmax_scale, softcap or 0.0,
        bool_or(deterministic, "deterministic"), block_table, seqused_k, serving(backend, query))
    return call.run(attn_mask, attn_bias, bool_or(return_attn_probs, "return_attn_probs"))


@spelled
def flash_dmattn_varlen_qkvpacked_func(qkv: Any, attn_mask: Any = None, attn_bias: Any = None, cu_seqlens: Any = None,
                                       max_seqlen: int | None = None, softmax_scale: float | None = None,
                                       is_causal: bool | None = None, softcap: float | None = None,
                                       deterministic: bool | None = None, return_attn_probs: bool | None = None, *,
                                       backend: str | None = None) -> Any:
    """``flash_dmattn_varlen_func`` of ``qkv (total, 3, H, D)``, ``cu_seqlens (B + 1,)`` for queries and keys."""
    _packed(qkv, "qkv", "(total, 3, H, D)", 3)
    return flash_dmattn_varlen_func(
        qkv[:, 0], qkv[:, 1], qkv[:, 2], attn_mask, attn_bias, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        softmax_scale, is_causal, softcap, deterministic, return_attn_probs, backend=backend)


@spelled
def flash_dmattn_varlen_kvpacked_func(query: Any, kv: Any, attn_mask: Any = None, attn_bias: Any = None,
                                      cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
                                      max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                                      softmax_scale: float | None = None, is_causal: bool | None = None,
                                      softcap: float | None = None, deterministic: bool | None = None,
                                      return_attn_probs: bool | None = None, *, backend: str | None = None) -> Any:
    """``flash_dmattn_varlen_func`` of ``query (total_q, H, D)`` and ``kv (total_k, 2, Hkv, D)``."""
    _packed(kv, "kv", "(total_k, 2, Hkv, D)", 2)
    return flash_dmattn_varlen_func(
        query, kv[:, 0], kv[:, 1], attn_mask, attn_bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, is_causal, softcap, deterministic, return_attn_probs, backend=backend)


def _packed(array: Any, name: str, meaning: str, parts: int) -> None:
    operand = seen_as(array, name)
    if operand.ndim != meaning.count(",") + 1 or operand.shape[-3] != parts:
        raise ValueError(f"{name} must have shape {meaning}, got {operand.shape}")


def bool_or(value: bool | None, name: str, default: bool = False) -> bool:
    """An option of the original, where None is the default."""
    return default if value is None else checks.flag(value, name)
