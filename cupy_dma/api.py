"""The public array functions: check the arguments, choose a backend, return arrays of the caller's library.

    s[i, j] = softcap(scale * q_i . k_j) + bias[i, j]        softcap(x) = c * tanh(x / c) for c > 0, otherwise x
    out_i   = sum over visible j of softmax_j(s[i, j]) * v_j
    lse_i   = log(sum over visible j of exp(s[i, j]))

Query ``i`` stands at key position ``p_i = i + Lk - Lq``. A query with no visible keys gets ``out = 0, lse = -inf``.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import backends
from cupy_dma.arrays import Array, Ints, PageTable, Windows, is_tensor
from cupy_dma.calls.attention import attention_call, dynamic_call
from cupy_dma.calls.layout import in_bhnd, is_bnhd
from cupy_dma.calls.mask import Mask
from cupy_dma.calls.options import Options, Packing, Selection
from cupy_dma.calls.run import run, run_dynamic
from cupy_dma.calls.scores import recipe_of
from cupy_dma.calls.varlen import varlen_call, varlen_dynamic_call
from cupy_dma.masks import IntervalMask


def attention(query: Array, key: Array, value: Array, *, mask: Mask | None = None, bias: Array | None = None,
              bias_delay: int = 0, causal: bool = False, scale: float | None = None, softcap: float = 0.0,
              sink_logits: Array | None = None, deterministic: bool = False, return_lse: bool = False,
              layout: str | None = None, backend: str | None = None) -> Any:
    """Attention over the visible keys, for arrays ``(B, L, H, D)``; ``layout="bhnd"`` takes SDPA's ``(B, H, L, D)``.

    Parameters
    ----------
    query : float array ``(B, Lq, H, D)``
    key, value : float array ``(B, Lk, Hkv, D)`` and ``(B, Lk, Hkv, Dv)``
        ``H`` is a multiple of ``Hkv``, ``D`` and ``Dv`` are 1 to 256, lengths may be 0. Any strides of B, L and head (a
        transposed BHSD tensor needs no copy); the last axis is contiguous. float16, bfloat16 or float32 on every
        backend, float64 on numpy and, for CPU arrays, on flex. Notes: the precision of float32. Most kernels need
        ``Dv == D`` (not those for few queries) and get a padded copy of the narrower arrays.
    mask : IntervalMask, or bool array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)`` or ``(Lq, Lk)``, or several in a tuple, optional
        True = visible. Pass a padding mask ``(B, Lk)`` as ``mask[:, None, None]``; a two-axis mask that could be
        either (``Lq == B``) raises. Several masks are intersected. A dense mask may be arbitrary but must be read in
        full; one that is the same for every query (``1`` in place of ``Lq``) costs no more than an interval mask.
    bias : float array ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)``, optional
        Added to the logits after scale and softcap, in natural-log units. ``(1|B, 1|Hkv|H, Lk)`` is a key bias, such
        as the scores; it may have any strides and is copied if its last axis is not contiguous.
    bias_delay : int
        In positions, 0 to ``2**30``; needs a key bias. Query ``i`` adds the bias of key ``j`` only if
        ``p_i - j >= bias_delay``,

            s[i, j] = softcap(scale * q_i . k_j) + (bias[j] if p_i - j >= bias_delay else 0)

        and the gradient of ``bias[j]`` sums over those queries only. With 0 every query adds it, even those before
        ``j``.
    causal
        Query ``i`` sees only keys ``j <= p_i``, in addition to the mask.
    scale
        Default ``1 / sqrt(D)``. At most ``2**127`` in magnitude, unless the arrays are float64.
    softcap
        0 means none; otherwise ``2**-126`` to ``2**127``, unless the arrays are float64.
    sink_logits : float array ``(H,)``, optional
        Learned sinks (GPT-OSS): one more term ``exp(sink_logits[h])`` in the softmax sum of every row, in natural-log
        units, after scale and softcap. Its value is zero: it takes probability and adds nothing to ``out``. -inf means
        no sink. The returned ``lse`` includes it.
    deterministic
        Make the backward pass bitwise reproducible too; the forward pass always is.
    return_lse
        Return ``(out, lse)``.
    layout
        ``"bhnd"``: query, key, value and ``out`` are ``(B, H, L, D)``, as views; mask, bias and ``lse`` keep their
        shapes. None means ``"bnhd"``, but warns if the shapes look like ``"bhnd"`` (more heads than positions).
    backend
        See ``cupy_dma.get_available_backends``. ``"numpy"`` with CUDA arrays copies to the host and back.

    Returns
    -------
    out : array ``(B, Lq, H, Dv)`` of query's library and type, contiguous
    lse : float32 array ``(B, H, Lq)``, natural log (float64 for float64), with ``return_lse``

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or device; nothing has been launched.
    NotImplementedError
        The backend does not support this combination.

    Examples
    --------
    >>> x = np.ones((1, 4, 2, 8), np.float32)
    >>> out, lse = dma.attention(x, x, x, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 4, 2, 8), (1, 2, 4))

    Notes
    -----
    The result is differentiable for torch tensors that require grad (``cupy_dma.torch``). For other libraries see
    ``cupy_dma.backward``.

    Accumulation, the softmax and ``lse`` are float32 for every type (float64 for float64). ``backend="numpy"``
    multiplies float32 arrays in full float32. The cuda backend multiplies them on TF32 tensor cores, forward and
    backward: every operand of an MMA (query and key, probabilities and value, and those of the gradients) is first
    rounded to 10 bits of mantissa, to nearest, so results have about three decimal digits. The triton backend splits
    each product into three TF32 products (3xTF32), which has about the precision of float32. Key scores and selection
    stay float32.
    """
    if not is_bnhd(layout):
        return in_bhnd(attention, (("query", query), ("key", key), ("value", value)), mask=mask, bias=bias,
                       bias_delay=bias_delay, causal=causal, scale=scale, softcap=softcap, sink_logits=sink_logits,
                       deterministic=deterministic, return_lse=return_lse, backend=backend)
    if is_tensor(query):
        from cupy_dma import torch

        return torch.attention(query, key, value, mask=mask, bias=bias, bias_delay=bias_delay, causal=causal,
                               scale=scale, softcap=softcap, sink_logits=sink_logits, deterministic=deterministic,
                               return_lse=return_lse, layout=layout, backend=backend)
    options = Options(causal, scale, softcap, deterministic, bias_delay, sink_logits)
    call = attention_call(query, key, value, mask, bias, options, layout)
    return run(call, return_lse, backends.choose(backend, (call.query,)))


def dynamic_mask_attention(query: Array, key: Array, value: Array, scores: Array | None = None, *, window: Windows,
                           dt_proj: Array | None = None, A: Array | None = None, dt_bias: Array | None = None,
                           form: str = "exp", keys: str = "prefix", padding: Array | None = None,
                           documents: Array | None = None, bias_delay: int = 0, causal: bool = True,
                           scale: float | None = None, softcap: float = 0.0, sink_logits: Array | None = None,
                           deterministic: bool = False, return_lse: bool = False, layout: str | None = None,
                           backend: str | None = None) -> Any:
    """Every query attends to its ``window`` highest-scored keys, with the scores as key bias.

    Arrays are ``(B, L, H, D)``; ``layout="bhnd"`` takes SDPA's ``(B, H, L, D)``. Equivalent to ``attention(query,
    key, value, mask=IntervalMask.top_w(scores, window), bias=scores, bias_delay=bias_delay)``.

    Parameters
    ----------
    query, key, value, scale, softcap, sink_logits, deterministic, return_lse, layout, backend
        As for ``attention``.
    scores : float array ``(B, Hkv, Lk)``
        Instead of scores you can pass ``dt_proj``, ``A`` and optionally ``dt_bias`` and ``form``, from which
        ``key_scores`` computes them. Any strides; copied (4 bytes per key and head) if the last axis is not contiguous.
    window : int, or a sequence or integer array of ``Hkv`` ints in host memory
        Keys kept per query, at least 1; several ints give each kv head its own.
    keys, padding, documents
        As for ``IntervalMask.top_w``.
    bias_delay
        As for ``attention``. It delays the bias only: a key is selected by its score from its own position on.
    causal
        Prefix masks are always causal; False is allowed only with ``keys="global"``.

    Returns
    -------
    As ``attention``.

    Raises
    ------
    As ``attention`` and ``IntervalMask.top_w``; also ValueError if both or neither of scores and dt_proj are given.

    Examples
    --------
    >>> x, scores = np.ones((1, 6, 2, 8), np.float32), np.arange(12.0).reshape(1, 2, 6)
    >>> dma.dynamic_mask_attention(x, x, x, scores, window=3).shape
    (1, 6, 2, 8)
    """
    if not is_bnhd(layout):
        return in_bhnd(dynamic_mask_attention, (("query", query), ("key", key), ("value", value)), scores,
                       window=window, dt_proj=dt_proj, A=A, dt_bias=dt_bias, form=form, keys=keys, padding=padding,
                       documents=documents, bias_delay=bias_delay, causal=causal, scale=scale, softcap=softcap,
                       sink_logits=sink_logits, deterministic=deterministic, return_lse=return_lse, backend=backend)
    if is_tensor(query):
        from cupy_dma import torch

        return torch.dynamic_mask_attention(
            query, key, value, scores, window=window, dt_proj=dt_proj, A=A, dt_bias=dt_bias, form=form, keys=keys,
            padding=padding, documents=documents, bias_delay=bias_delay, causal=causal, scale=scale, softcap=softcap,
            sink_logits=sink_logits, deterministic=deterministic, return_lse=return_lse, layout=layout,
            backend=backend)
    selection = Selection(scores, window, dt_proj, A, dt_bias, form, keys, padding, documents)
    options = Options(causal, scale, softcap, deterministic, bias_delay, sink_logits)
    call = dynamic_call(query, key, value, selection, options, layout)
    return run_dynamic(call, return_lse, backends.choose(backend, (call.attention.query,)))


def key_scores(value: Array, dt_proj: Array, A: Array, *, dt_bias: Array | None = None, form: str = "exp",
               layout: str | None = None, backend: str | None = None) -> Any:
    """Scores of all keys, by which ``IntervalMask.top_w`` ranks them, from a value ``(B, Lk, Hkv, D)``.

    Parameters
    ----------
    value : float array ``(B, Lk, Hkv, D)``
        Any strides, the last axis contiguous. float64 on the numpy backend only.
    dt_proj : float array ``(Hkv, Hkv * D)``
    A : float array ``(Hkv,)``
    dt_bias : float array ``(Hkv,)``, optional
        The parameters may have a different float type from ``value``.
    form
        ``"exp"``: ``exp(A * softplus(dt))``, the original definition (Hugging Face Doge); ``"linear"``:
        ``A * softplus(dt)``, the later, numerically better one. Both select the same keys but are different biases.
        ``dt = value @ dt_proj^T + dt_bias``, summed over all kv heads and ``D``.
    layout
        ``"bhnd"``: the value is ``(B, Hkv, Lk, D)``. None is ``"bnhd"``.
    backend
        See ``cupy_dma.get_available_backends``. ``"numpy"`` with CUDA arrays copies to the host and back.

    Returns
    -------
    float32 array ``(B, Hkv, Lk)`` of ``value``'s library (float64 if ``value`` is float64). ``dt`` is accumulated in
    that type. Differentiable as in ``attention``.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or device.

    Examples
    --------
    >>> value = np.array([1, -1], np.float32).reshape(1, 2, 1, 1)
    >>> dma.key_scores(value, np.ones((1, 1), np.float32), np.ones(1, np.float32), form="linear").round(2)
    array([[[1.31, 0.31]]], dtype=float32)
    """
    if not is_bnhd(layout):
        return in_bhnd(key_scores, (("value", value),), dt_proj, A, dt_bias=dt_bias, form=form, backend=backend)
    if is_tensor(value):
        from cupy_dma import torch

        return torch.key_scores(value, dt_proj, A, dt_bias=dt_bias, form=form, backend=backend)
    recipe = recipe_of(value, dt_proj, A, dt_bias, form)
    scores = backends.choose(backend, recipe[:1]).key_scores(*recipe)
    return recipe[0].library.export(scores)


def varlen_attention(query: Array, key: Array, value: Array, cu_seqlens_q: Ints, cu_seqlens_k: Ints | None, *,
                     mask: IntervalMask | None = None, bias: Array | None = None, bias_delay: int = 0,
                     causal: bool = False, scale: float | None = None, softcap: float = 0.0,
                     sink_logits: Array | None = None, deterministic: bool = False, return_lse: bool = False,
                     block_table: PageTable | None = None, seqused_k: Ints | None = None,
                     max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, tail_padding: bool = False,
                     backend: str | None = None) -> Any:
    """Attention within each of several packed sequences (varlen), for arrays ``(total, H, D)``.

    Parameters
    ----------
    query : float array ``(total_q, H, D)``
    key, value : float array ``(total_k, Hkv, D)`` and ``(total_k, Hkv, Dv)``
        Or a paged KV cache ``(num_pages, page_size, Hkv, D)`` with ``block_table``. Types and strides as for
        ``attention``.
    cu_seqlens_q, cu_seqlens_k : int32 or int64 array ``(B + 1,)``, or list of ints
        Cumulative lengths: start at 0, never decrease, end at ``total_q`` and ``total_k``. Copying a list to the device
        waits for it; pass an array to avoid that. ``cu_seqlens_k`` may be None with ``block_table`` and ``seqused_k``.
    mask : IntervalMask of shape ``(1, 1|Hkv|H, total_k)``, optional
        In packed key positions: query ``i`` of sequence ``b``, which has ``Lq_b`` queries and ``Lk_b`` keys, stands at
        ``cu_seqlens_k[b] + i + Lk_b - Lq_b``. Keys of other sequences are never visible, whatever the mask says. With
        ``block_table``: ``(1|B, 1|Hkv|H, max_pages * page_size)``, positions counted within the sequence.
    bias : float array ``(1|Hkv|H, total_k)``, optional
        One number per key, in natural-log units. With ``block_table``: ``(1|B, 1|Hkv|H, max_pages * page_size)``.
    bias_delay : int
        As for ``attention``, with positions counted within the sequence.
    causal, scale, softcap, sink_logits, deterministic, return_lse, backend
        As for ``attention``.
    block_table : int32 or int64 array ``(B, max_pages)``, or list, optional
        The page table: key ``j`` of sequence ``b`` is row ``j % page_size`` of page ``block_table[b, j // page_size]``.
        Entries past the keys in use are never read. Forward only: a paged KV cache gets no gradient.
    seqused_k : int32 or int64 array ``(B,)``, or list, optional
        How many of each sequence's keys are in use, counted from its first; by default all of ``cu_seqlens_k``.
    max_seqlen_q, max_seqlen_k : int, optional
        Not needed; accepted because other libraries require them.
    tail_padding
        Allow rows after the last sequence, as in arrays of a fixed size (CUDA graphs). Extra queries get ``out = 0``
        and ``lse = -inf``; extra keys are not read. If False, cumulative lengths that end early raise, provided this
        can be seen without waiting for a GPU: from lists and arrays in host memory, from one array for a query and key
        of different lengths, from ``max_seqlen_q`` and ``max_seqlen_k`` (with ``CUPY_DMA_CHECK=1``, always).

    Returns
    -------
    out : array ``(total_q, H, Dv)`` of query's library and type, contiguous
    lse : float32 array ``(H, total_q)``, natural log (float64 for float64), with ``return_lse``

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or device; nothing has been launched. Values of lengths and page tables
        are always checked in host memory, in GPU memory only with ``CUPY_DMA_CHECK=1``.
    NotImplementedError
        The backend does not support this combination; none supports dense masks or biases with a query axis.

    Examples
    --------
    Two sequences of 2 and 4 tokens:

    >>> x = np.ones((6, 2, 8), np.float32)
    >>> dma.varlen_attention(x, x, x, [0, 2, 6], [0, 2, 6], causal=True).shape
    (6, 2, 8)
    """
    if is_tensor(query):
        from cupy_dma import torch

        return torch.varlen_attention(
            query, key, value, cu_seqlens_q, cu_seqlens_k, mask=mask, bias=bias, bias_delay=bias_delay, causal=causal,
            scale=scale, softcap=softcap, sink_logits=sink_logits, deterministic=deterministic, return_lse=return_lse,
            block_table=block_table, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            tail_padding=tail_padding, backend=backend)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, max_seqlen_q, max_seqlen_k, tail_padding)
    options = Options(causal, scale, softcap, deterministic, bias_delay, sink_logits)
    call = varlen_call(query, key, value, packing, mask, bias, options)
    return run(call, return_lse, backends.choose(backend, (call.query,)))


def varlen_dynamic_mask_attention(query: Array, key: Array, value: Array, cu_seqlens_q: Ints, cu_seqlens_k: Ints | None,
                                  scores: Array | None = None, *, window: Windows, dt_proj: Array | None = None,
                                  A: Array | None = None, dt_bias: Array | None = None, form: str = "exp",
                                  keys: str = "prefix", bias_delay: int = 0, causal: bool = True,
                                  scale: float | None = None, softcap: float = 0.0, sink_logits: Array | None = None,
                                  deterministic: bool = False, return_lse: bool = False,
                                  block_table: PageTable | None = None, seqused_k: Ints | None = None,
                                  max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                                  tail_padding: bool = False, backend: str | None = None) -> Any:
    """Every query attends to the ``window`` highest-scored keys of its own sequence, with the scores as key bias.

    Arrays are ``(total, H, D)``, all sequences one after the other.

    Parameters
    ----------
    query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, max_seqlen_q, max_seqlen_k, tail_padding
        As for ``varlen_attention``.
    scores : float array ``(Hkv, total_k)``
        With ``block_table``: ``(B, Hkv, max_pages * page_size)``. Instead of scores you can pass ``dt_proj``, ``A`` and
        optionally ``dt_bias`` and ``form``, from which ``key_scores`` computes them (not with ``block_table``).
    window, keys, bias_delay, causal, scale, softcap, sink_logits, deterministic, return_lse, backend
        As for ``dynamic_mask_attention``.

    Returns
    -------
    As ``varlen_attention``.

    Raises
    ------
    As ``varlen_attention`` and ``dynamic_mask_attention``.
    """
    if is_tensor(query):
        from cupy_dma import torch

        return torch.varlen_dynamic_mask_attention(
            query, key, value, cu_seqlens_q, cu_seqlens_k, scores, window=window, dt_proj=dt_proj, A=A,
            dt_bias=dt_bias, form=form, keys=keys, bias_delay=bias_delay, causal=causal, scale=scale, softcap=softcap,
            sink_logits=sink_logits, deterministic=deterministic, return_lse=return_lse, block_table=block_table,
            seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, tail_padding=tail_padding,
            backend=backend)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, max_seqlen_q, max_seqlen_k, tail_padding)
    selection = Selection(scores, window, dt_proj, A, dt_bias, form, keys)
    options = Options(causal, scale, softcap, deterministic, bias_delay, sink_logits)
    call = varlen_dynamic_call(query, key, value, packing, selection, options)
    return run_dynamic(call, return_lse, backends.choose(backend, (call.attention.query,)))
