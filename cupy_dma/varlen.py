"""Attention over sequences of different lengths packed in one row, and over paged keys (SPEC section 8).

Sequence ``b`` has the queries ``cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1]`` and the keys ``cu_seqlens_k[b] <= j <
cu_seqlens_k[b + 1]`` (with ``seqused_k`` the first ``seqused_k[b]`` of them), and is bottom-right aligned: its last
query stands at its last key. Everything else is as in ``cupy_dma.attention``, sequence by sequence.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupy_dma import backends, checks
from cupy_dma import scores as scores_module
from cupy_dma.arrays import Operand, belongs_to_torch, describe
from cupy_dma.calls import AttentionCall, key_bias, options
from cupy_dma.documents import runs_between
from cupy_dma.masks import EVER, NEVER, Hints, IntervalMask
from cupy_dma.selection import Candidates, select
from cupy_dma.sequences import Sequences, packed_mask, packed_rows, sequences_of


def varlen_attention(query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *, mask: Any = None,
                     bias: Any = None, causal: bool = False, scale: float | None = None, softcap: float = 0.0,
                     deterministic: bool = False, return_lse: bool = False, block_table: Any = None,
                     seqused_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                     backend: str | None = None) -> Any:
    """Attention within each of several sequences.

    Parameters
    ----------
    query : float array ``(total_q, H, D)``
    key, value : float array ``(total_k, Hkv, D)``
        Or pages ``(num_pages, page_size, Hkv, D)`` with ``block_table``. Types and strides as for ``attention``.
    cu_seqlens_q, cu_seqlens_k : int32 or int64 array ``(B + 1,)``
        Cumulative lengths: start at 0, never fall. Rows of query behind the last sequence get ``out = 0, lse = -inf``.
        ``cu_seqlens_k`` may be None with ``block_table`` and ``seqused_k``.
    mask : IntervalMask of shape ``(1, 1|Hkv|H, total_k)``, optional
        In packed key positions: query ``i`` of sequence ``b``, which has ``Lq_b`` queries and ``Lk_b`` keys, stands at
        ``cu_seqlens_k[b] + i + Lk_b - Lq_b``. Keys of other sequences are never visible, whatever the mask says. With
        ``block_table``: ``(1|B, 1|Hkv|H, max_pages * page_size)``, positions counted within the sequence.
    bias : float array ``(1|Hkv|H, total_k)``, optional
        One number per key, natural-log units. With ``block_table``: ``(1|B, 1|Hkv|H, max_pages * page_size)``.
    causal, scale, softcap, deterministic, return_lse, backend
        As for ``attention``.
    block_table : int32 or int64 array ``(B, max_pages)``, optional
        Key ``j`` of sequence ``b`` is row ``j % page_size`` of page ``block_table[b, j // page_size]``. Entries behind
        the keys in use are never read. Forward only: there is no gradient through pages.
    seqused_k : int32 or int64 array ``(B,)``, optional
        Keys in use of each sequence, the first ones; by default all of ``cu_seqlens_k``.
    max_seqlen_q, max_seqlen_k : int, optional
        Not needed; taken because other libraries ask for them.

    Returns
    -------
    out : array ``(total_q, H, D)`` of query's library and type, contiguous
    lse : float32 array ``(H, total_q)``, natural log (float64 for float64), with ``return_lse``

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, shape or place; nothing has been launched. Values of lengths and page tables are
        checked on the CPU always, on a device when ``CUPY_DMA_CHECK=1``.
    NotImplementedError
        The backend does not serve this combination; dense masks and biases with a query axis never are.

    Notes
    -----
    Torch tensors that require grad get it (``cupy_dma.torch``). For other libraries see
    ``cupy_dma.backward.varlen_attention_backward``.
    """
    if belongs_to_torch(query, key, value, bias):
        from cupy_dma.torch import varlen

        return varlen.varlen_attention(
            query, key, value, cu_seqlens_q, cu_seqlens_k, mask=mask, bias=bias, causal=causal, scale=scale,
            softcap=softcap, deterministic=deterministic, return_lse=return_lse, block_table=block_table,
            seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, backend=backend)
    call = varlen_call(query, key, value, cu_seqlens_q, cu_seqlens_k, mask, bias, causal, scale, softcap,
                       deterministic, block_table, seqused_k, max_seqlen_q, max_seqlen_k)
    return run_varlen(call, return_lse, backends.choose(backend, (call.query,)))


def varlen_dynamic_mask_attention(query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
                                  scores: Any = None, *, window: int, dt_proj: Any = None, A: Any = None,
                                  dt_bias: Any = None, form: str = "exp", keys: str = "prefix", causal: bool = True,
                                  scale: float | None = None, softcap: float = 0.0, deterministic: bool = False,
                                  return_lse: bool = False, block_table: Any = None, seqused_k: Any = None,
                                  max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                                  backend: str | None = None) -> Any:
    """Every query attends to the ``window`` highest-scored keys of its own sequence, with the scores as key bias.

    Parameters
    ----------
    query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, max_seqlen_q, max_seqlen_k
        As for ``varlen_attention``.
    scores : float array ``(Hkv, total_k)``
        With ``block_table``: ``(B, Hkv, max_pages * page_size)``. Or instead ``dt_proj``, ``A`` and maybe ``dt_bias``
        and ``form``, from which ``key_scores`` makes them (not with ``block_table``).
    window, keys, causal, scale, softcap, deterministic, return_lse, backend
        As for ``dynamic_mask_attention``.

    Returns
    -------
    As ``varlen_attention``.

    Raises
    ------
    As ``varlen_attention`` and ``dynamic_mask_attention``.
    """
    if belongs_to_torch(query, key, value, scores, dt_proj, A, dt_bias):
        from cupy_dma.torch import varlen

        return varlen.varlen_dynamic_mask_attention(
            query, key, value, cu_seqlens_q, cu_seqlens_k, scores, window=window, dt_proj=dt_proj, A=A,
            dt_bias=dt_bias, form=form, keys=keys, causal=causal, scale=scale, softcap=softcap,
            deterministic=deterministic, return_lse=return_lse, block_table=block_table, seqused_k=seqused_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, backend=backend)
    causal = check_dynamic(window, keys, causal, scores, dt_proj, A, dt_bias, block_table)
    call = varlen_call(query, key, value, cu_seqlens_q, cu_seqlens_k, None, None, causal and keys == "global", scale,
                       softcap, deterministic, block_table, seqused_k, max_seqlen_q, max_seqlen_k)
    module = backends.choose(backend, (call.query,))
    if scores is None:
        recipe = scores_module.prepare(call.value.array[None], dt_proj, A, dt_bias, form)
        checks.require_same_place((call.query, recipe[1]))
        ranked = replace(describe(module.key_scores(*recipe), "scores"), library=call.query.library)
        call.bias = key_bias(ranked)
    else:
        ranked, call.bias = scores_and_bias(scores, call)
    call.mask = _visible(select_keys(ranked, window, keys, call, module), call)
    return run_varlen(call, return_lse, module)


def run_varlen(call: AttentionCall, return_lse: bool, module: Any) -> Any:
    """``out (total_q, H, D)``, or ``(out, lse)``, of a checked call on the backend ``module``."""
    out, lse = module.attention(call)
    export = call.query.library.export
    return (export(out[0]), export(lse[0])) if return_lse else export(out[0])


# ---- arguments ------------------------------------------------------------------------------------------------------


def varlen_call(query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, mask: Any, bias: Any,
                causal: bool, scale: float | None, softcap: float, deterministic: bool, block_table: Any,
                seqused_k: Any, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None) -> AttentionCall:
    """The arguments of ``varlen_attention``, checked, as a call of B = 1. Raises what it documents."""
    q, k, v = _describe_qkv(query, key, value, block_table is not None)
    scale, softcap, causal, deterministic = options(q, scale, softcap, causal, deterministic)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length is not None:
            checks.whole(length, name, 0)
    sequences = sequences_of(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    call = AttentionCall(q, k, v, None, None, None, causal, scale, softcap, deterministic, sequences=sequences)
    if mask is not None:
        call.mask = _visible(mask, call)
    if bias is not None:
        call.bias = scores_and_bias(bias, call, "bias")[1]
    return call


def check_dynamic(window: int, keys: str, causal: bool, scores: Any, dt_proj: Any, A: Any, dt_bias: Any,
                  block_table: Any) -> bool:
    """Checks of ``varlen_dynamic_mask_attention`` that need no shapes; ``causal`` as a bool."""
    checks.whole(window, "window", 1)
    checks.choice(keys, "keys", ("prefix", "global"))
    cut = checks.flag(causal, "causal")
    if keys == "prefix" and not cut:
        raise ValueError("causal=False needs keys='global', got keys='prefix', which is causal by construction")
    if (scores is None) == (dt_proj is None):
        raise ValueError(f"give either scores or dt_proj and A, got {'neither' if scores is None else 'both'}")
    if scores is None and A is None:
        raise ValueError("A must be given with dt_proj, got None")
    if scores is None and block_table is not None:
        raise ValueError("scores (B, Hkv, max_pages * page_size) must be given with block_table, got dt_proj")
    extra = [name for name, argument in (("A", A), ("dt_bias", dt_bias)) if argument is not None]
    if scores is not None and extra:
        raise ValueError(f"{' and '.join(extra)} must come with dt_proj, got scores")
    return cut


def _describe_qkv(query: Any, key: Any, value: Any, paged: bool) -> tuple[Operand, Operand, Operand]:
    """query, key and value of B = 1; pages as they are."""
    q, k, v = describe(query, "query"), describe(key, "key"), describe(value, "value")
    keys = "(num_pages, page_size, Hkv, D)" if paged else "(total_k, Hkv, D)"
    for operand, meaning in ((q, "(total_q, H, D)"), (k, keys), (v, keys)):
        if len(operand.shape) != meaning.count(",") + 1:
            raise ValueError(f"{operand.name} must have shape {meaning}, got {operand.shape}")
        checks.rows_contiguous(operand)
    checks.one_of_types(q)
    for operand in (k, v):
        if operand.dtype != q.dtype:
            raise TypeError(f"{operand.name} must have query's type {q.dtype}, got {operand.dtype}")
    _, heads, size = q.shape
    if not 1 <= size <= 256:
        raise ValueError(f"query must have a head dim D (last axis) of 1 to 256, got shape {q.shape}")
    if k.shape[-1] != size:
        raise ValueError(f"key must have query's head dim, {keys} with D={size}, got {k.shape}")
    if v.shape != k.shape:
        raise ValueError(f"value must have key's shape {k.shape}, got {v.shape}")
    kv_heads = k.shape[-2]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"query must have a multiple of key's heads (H % Hkv == 0), got {heads} query heads and "
                         f"{kv_heads} kv heads")
    if paged and k.shape[1] < 1:
        raise ValueError(f"key must have pages of at least one row, {keys}, got {k.shape}")
    checks.require_same_place((q, k, v))
    return checks.with_axes(q, 4), k if paged else checks.with_axes(k, 4), v if paged else checks.with_axes(v, 4)


def _shape_of_keys(call: AttentionCall) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """What a mask may have as its shape: in words, and the sizes of its axes."""
    sequences, heads = call.sequences, (1, call.kv_heads, call.heads)
    assert sequences is not None
    if sequences.pages is None:
        return "(1, 1|Hkv|H, total_k)", ((1,), heads, (sequences.key_length,))
    capacity = sequences.pages.shape[1] * sequences.page_size
    return "(1|B, 1|Hkv|H, max_pages * page_size)", ((1, sequences.batch), heads, (capacity,))


def _visible(mask: Any, call: AttentionCall) -> IntervalMask:
    """The mask in packed positions."""
    q, sequences = call.query, call.sequences
    assert sequences is not None
    if not isinstance(mask, IntervalMask):
        describe(mask, "mask")
        raise NotImplementedError("mask must be an IntervalMask or None, got a dense array: a packed batch has no "
                                  "rectangle of queries and keys; give every sequence to attention() by itself")
    meaning, allowed = _shape_of_keys(call)
    if any(size not in sizes for size, sizes in zip(mask.shape, allowed)):
        wanted = ", ".join(" or ".join(map(str, dict.fromkeys(sizes))) for sizes in allowed)
        raise ValueError(f"mask must have shape {meaning} = ({wanted}), got {mask.shape}")
    if mask.device != q.device or mask.library.name != q.library.name:
        raise ValueError(f"mask must be of query's library and device, {q.library.name} on {q.device}, got "
                         f"{mask!r}; move it with mask.to(query)")
    return mask if sequences.pages is None else packed_mask(mask, sequences.batch)


def scores_and_bias(array: Any, call: AttentionCall, name: str = "scores") -> tuple[Operand, Operand]:
    """One number per key: as an operand of three axes, and as a bias ``(1, heads, 1, packed keys)``."""
    sequences, place, operand = call.sequences, call.query.library, describe(array, name)
    assert sequences is not None
    checks.one_of_types(operand)
    meaning, allowed = _shape_of_keys(call)
    if sequences.pages is None:
        meaning, allowed = "(1|Hkv|H, total_k)", allowed[1:]
    if name == "scores":
        meaning = meaning.replace("1|", "")
        allowed = (*((sizes[-1],) for sizes in allowed[:-2]), allowed[-2][1:], allowed[-1])
    if len(operand.shape) == 4 or (len(operand.shape) == 3 and sequences.pages is None):
        raise NotImplementedError(f"{name} must be one number per key, {meaning}, got shape {operand.shape}: a packed "
                                  f"batch has no rectangle of queries and keys")
    checks.has_shape(operand, meaning, allowed)
    checks.rows_contiguous(operand)
    checks.require_same_place((call.query, operand))
    if sequences.pages is None:
        operand = checks.with_axes(replace(place.describe(operand.array[None], name), library=place), 3)
        return operand, key_bias(operand)
    with place.on(call.query.device):
        packed = place.contiguous(packed_rows(operand.array, sequences.batch, place.xp))
    return operand, key_bias(replace(place.describe(packed, name), library=place))


# ---- the selection --------------------------------------------------------------------------------------------------


def select_keys(scores: Operand, window: int, keys: str, call: AttentionCall, module: Any) -> IntervalMask:
    """The mask, as ``varlen_attention`` takes it, of the ``window`` best keys within each sequence: of ``scores (1,
    heads, total_k)``, or of pages ``(B, heads, capacity)``."""
    sequences = call.sequences
    assert sequences is not None
    kind = _top_w_of_sequences if sequences.pages is None else _top_w_of_pages
    return kind(scores, window, keys, sequences, module)


def _top_w_of_sequences(scores: Operand, window: int, keys: str, sequences: Sequences, module: Any) -> IntervalMask:
    """The mask of the ``window`` best keys within each sequence, of ``scores (1, heads, total_k)``.

    As ``IntervalMask.top_w`` with documents, except that a key of the ``"global"`` selection is visible from every
    position of its own sequence: keys of other sequences need not be told apart.
    """
    place, device, n = scores.library, scores.device, scores.shape[2]
    if checks.wants_values_checked() and not bool(place.xp.isfinite(scores.array).all()):
        raise ValueError("scores must be finite (CUPY_DMA_CHECK=1), got NaN or infinity")
    if scores.dtype in ("float16", "bfloat16"):
        wide = place.astype(scores.array, "float32")
        scores = checks.with_axes(replace(place.describe(wide, "scores"), library=place), 3)
    prefix, w = keys == "prefix", min(window, max(n, 1))
    hints = Hints("key", (w, 1), window >= n) if prefix else Hints("open", (w, 0))
    if prefix and window >= n:
        return IntervalMask._make(place, place.arange(0, n, device), place.full((1, 1, n), NEVER, "int32", device),
                                  hints)
    with place.on(device):
        bounds = sequences.bounds.array
        runs = runs_between(place, device, bounds[2], n)

        def operand(array: Any, name: str) -> Operand:
            return checks.with_axes(replace(place.describe(array, name), library=place), 2)

        document = operand(runs.first, "cu_seqlens_k")
        if prefix:
            return IntervalMask._make(place, runs.keys, module.prefix_stop(scores, w, None, document), hints)
        number = place.search_right(bounds[2], runs.keys) - 1
        real = (runs.keys < bounds[3][number])[None]
        stop = module.prefix_stop(scores, w, operand(real, "seqused_k"), document)
        ever = place.full((1, 1, n), EVER, "int32", device)
        kept = (stop >= runs.end[:, None]) & real[:, None]
        stop = place.xp.where(kept, place.full((1, 1, n), NEVER, "int32", device), ever)
    return IntervalMask._make(place, ever, stop, hints)


def _top_w_of_pages(scores: Operand, window: int, keys: str, sequences: Sequences, module: Any) -> IntervalMask:
    """The same of ``scores (1|B, heads, capacity)``, each sequence a batch entry."""
    place, device, capacity = scores.library, scores.device, scores.shape[2]
    candidates = Candidates(None, None)
    if keys == "global":
        with place.on(device):
            used = (sequences.bounds.array[3] - sequences.bounds.array[2])[:-1]
            real = place.arange(0, capacity, device)[None] < used[:, None]
        candidates = Candidates(replace(place.describe(real, "seqused_k"), library=place), None)
    return select(scores, window, keys, candidates, module)
