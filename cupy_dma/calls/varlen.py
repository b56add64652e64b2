"""Attention over sequences of different lengths packed in one row, and over paged keys (SPEC section 8).

Sequence ``b`` has the queries ``cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1]`` and the keys ``cu_seqlens_k[b] <= j <
cu_seqlens_k[b + 1]`` (with ``seqused_k`` the first ``seqused_k[b]`` of them), and is bottom-right aligned: its last
query stands at its last key. Everything else is as in ``cupy_dma.attention``, sequence by sequence.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.calls.attention import options
from cupy_dma.calls.sequences import Sequences, packed_mask, packed_rows, sequences_of
from cupy_dma.calls.types import AttentionCall, key_bias
from cupy_dma.masks.documents import runs_between
from cupy_dma.masks.interval import EVER, NEVER, Hints, IntervalMask
from cupy_dma.masks.selection import Candidates, select

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
        call.mask = visible_keys(mask, call)
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
    checks.require_same_device((q, k, v))
    return checks.with_axes(q, 4), k if paged else checks.with_axes(k, 4), v if paged else checks.with_axes(v, 4)


def _shape_of_keys(call: AttentionCall) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """What a mask may have as its shape: in words, and the sizes of its axes."""
    sequences, heads = call.sequences, (1, call.kv_heads, call.heads)
    assert sequences is not None
    if sequences.pages is None:
        return "(1, 1|Hkv|H, total_k)", ((1,), heads, (sequences.key_length,))
    capacity = sequences.pages.shape[1] * sequences.page_size
    return "(1|B, 1|Hkv|H, max_pages * page_size)", ((1, sequences.batch), heads, (capacity,))


def visible_keys(mask: Any, call: AttentionCall) -> IntervalMask:
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
    sequences, library, operand = call.sequences, call.query.library, describe(array, name)
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
    checks.require_same_device((call.query, operand))
    if sequences.pages is None:
        operand = checks.with_axes(replace(library.describe(operand.array[None], name), library=library), 3)
        return operand, key_bias(operand)
    with library.on(call.query.device):
        packed = library.contiguous(packed_rows(operand.array, sequences.batch, library.xp))
    return operand, key_bias(replace(library.describe(packed, name), library=library))


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
    library, device, n = scores.library, scores.device, scores.shape[2]
    if checks.wants_values_checked() and not bool(library.xp.isfinite(scores.array).all()):
        raise ValueError("scores must be finite (CUPY_DMA_CHECK=1), got NaN or infinity")
    if scores.dtype in ("float16", "bfloat16"):
        wide = library.astype(scores.array, "float32")
        scores = checks.with_axes(replace(library.describe(wide, "scores"), library=library), 3)
    prefix, w = keys == "prefix", min(window, max(n, 1))
    hints = Hints("key", (w, 1), window >= n) if prefix else Hints("open", (w, 0))
    if prefix and window >= n:
        return IntervalMask._make(library, library.arange(0, n, device), library.full((1, 1, n), NEVER, "int32", device),
                                  hints)
    with library.on(device):
        bounds = sequences.bounds.array
        runs = runs_between(library, device, bounds[2], n)

        def operand(array: Any, name: str) -> Operand:
            return checks.with_axes(replace(library.describe(array, name), library=library), 2)

        document = operand(runs.first, "cu_seqlens_k")
        if prefix:
            return IntervalMask._make(library, runs.keys, module.prefix_stop(scores, w, None, document), hints)
        number = library.search_right(bounds[2], runs.keys) - 1
        real = (runs.keys < bounds[3][number])[None]
        stop = module.prefix_stop(scores, w, operand(real, "seqused_k"), document)
        ever = library.full((1, 1, n), EVER, "int32", device)
        kept = (stop >= runs.end[:, None]) & real[:, None]
        stop = library.xp.where(kept, library.full((1, 1, n), NEVER, "int32", device), ever)
    return IntervalMask._make(library, ever, stop, hints)


def _top_w_of_pages(scores: Operand, window: int, keys: str, sequences: Sequences, module: Any) -> IntervalMask:
    """The same of ``scores (1|B, heads, capacity)``, each sequence a batch entry."""
    library, device, capacity = scores.library, scores.device, scores.shape[2]
    candidates = Candidates(None, None)
    if keys == "global":
        with library.on(device):
            used = (sequences.bounds.array[3] - sequences.bounds.array[2])[:-1]
            real = library.arange(0, capacity, device)[None] < used[:, None]
        candidates = Candidates(replace(library.describe(real, "seqused_k"), library=library), None)
    return select(scores, window, keys, candidates, module)
