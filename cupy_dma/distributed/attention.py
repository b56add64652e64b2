"""Dynamic mask attention of one sequence over several ranks."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupy_dma.arrays import Windows
from cupy_dma.distributed.agreement import Agreement
from cupy_dma.distributed.arguments import Arguments, process_group
from cupy_dma.distributed.exchange import Exchange, joined
from cupy_dma.distributed.rows import WORD, Row
from cupy_dma.distributed.survivors import HEADER, Keep, Own
from cupy_dma.masks.windows import window_of
from cupy_dma.torch.attention import attention
from cupy_dma.torch.registration import cast, wide
from cupy_dma.torch.scores import key_scores


@torch.compiler.disable
def context_parallel_attention(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None, *,
                               window: Windows, group: Any = None, sinks: int = 0, recent: int = 0,
                               dt_proj: Tensor | None = None, A: Tensor | None = None, dt_bias: Tensor | None = None,
                               form: str = "exp", padding: Tensor | None = None, documents: Tensor | None = None,
                               bias_delay: int = 0, scale: float | None = None, softcap: float = 0.0,
                               deterministic: bool = False, return_lse: bool = False, room: bool = False,
                               backend: str | None = None) -> Any:
    """``dynamic_mask_attention`` of a sequence whose consecutive shards are on the ranks of a process group.

    Every rank of the group calls it with its shard, rank 0 with the first tokens, and gets the rows of its own queries,
    as one process would compute them over the whole sequence. Shards may differ in length and may be empty.

    Parameters
    ----------
    query : float Tensor ``(B, n, H, D)``
    key, value : float Tensor ``(B, n, Hkv, D)``
        The shard: one query for each key. Types and strides as for ``attention``.
    scores : float Tensor ``(B, Hkv, n)``, optional
        Of the shard's keys. Or ``dt_proj``, ``A`` and optionally ``dt_bias`` and ``form``, as for ``key_scores``.
        Without either there is no bias and every query sees the last ``window`` keys: a sliding window.
    window : int, or one int per kv head
        Keys kept per query, at least 1.
    group : ProcessGroup or one-dimensional DeviceMesh, optional
        Default: the default group. Ranks are those within the group.
    sinks, recent : int
        First and last tokens of the sequence, or of each document, that are kept too; padding does not count.
    padding : bool Tensor ``(1|B, n)``, or integers 0 and 1, optional
        Of the shard: True or 1 = a real token.
    documents : int32 or int64 Tensor ``(1|B, n)``, optional
        Ids of the shard's tokens. Every change of id along the whole sequence begins a new document, which selects
        among its own keys; a document that continues in the next shard keeps its id. From cumulative lengths:
        ``shard_sequence(document_ids(cu_seqlens, total), group)``.
    bias_delay, scale, softcap, deterministic, return_lse, backend
        As for ``attention``: the scores are the bias, and distances are those in the whole sequence. Repeated runs with
        the same number of ranks give the same bits, with ``deterministic`` in the gradients too.
    room
        Key and value are each ``buffer[:, R:]`` of a buffer with ``R = window + sinks + recent`` extra rows (of the
        widest window; with a ``bias_delay`` ``R + min(bias_delay, R + n)``), as ``empty_with_room`` makes it. Received
        rows are written there; without room, key and value are copied behind them. Do not change the buffer before the
        backward pass.

    Returns
    -------
    out : Tensor ``(B, n, H, D)``
    lse : float32 Tensor ``(B, H, n)``, natural log (float64 for float64), with ``return_lse``

    Raises
    ------
    TypeError, ValueError
        An argument of this rank has the wrong type, shape or value; nothing has been sent.
    RankError
        Another rank has an invalid argument or one that differs from this rank's, or is missing; the message names the
        rank and the argument. ``agreement.py`` says what is compared when.

    Notes
    -----
    One all-gather of ``window + sinks + recent`` rows per kv head forward and one all-to-all of as many
    gradients backward (``exchanged_bytes``). If one rank runs the backward pass, all must: a rank without a loss of its
    own calls ``(out * 0).sum().backward()``. Under ``torch.compile`` this call is a graph break; the code around it is
    compiled.
    """
    group = process_group(group)
    query, key, value = cast(query, key, value)
    agreement = Agreement("context_parallel_attention", group, getattr(query, "device", torch.device("cpu")))
    call = Arguments(query, key, value, scores, window, sinks, recent, dt_proj, A, dt_bias, form, padding, documents,
                     bias_delay, scale, softcap, deterministic, room, backend)
    agreement.check(call.signature)
    if scores is None and dt_proj is not None:
        scores = key_scores(value, dt_proj, A, dt_bias=dt_bias, form=form, backend=backend)
    ranked = _ranked(scores, key)
    own = Own(ranked.detach(), *call.candidates(), backend)
    exchange = Exchange(own, call.keep(), Row(key.shape[3], key.dtype, ranked.dtype, bias_delay > 0), group,
                        agreement, room, bias_delay)
    key, value, ranked = joined(exchange, key, value, ranked)
    return attention(query, key, value, mask=exchange.mask, bias=None if scores is None else ranked,
                     bias_delay=exchange.delay, scale=scale, softcap=softcap, deterministic=deterministic,
                     return_lse=return_lse, layout="bnhd", backend=backend)


def exchanged_bytes(batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: Windows, *, world: int,
                    rank: int = 0, sinks: int = 0, recent: int = 0, bias_delay: int = 0) -> tuple[int, int]:
    """Bytes that a rank receives in the forward and in the backward pass of one call, whatever the lengths.

    Forward: one all-gather, from each of ``world - 1`` ranks ``window + sinks + recent`` rows per batch entry and kv
    head (8 bytes longer with a ``bias_delay``) and 40 bytes per batch entry. Backward: one all-to-all, as many gradient
    rows from each later rank. (Groups on the CPU also compare 8 bytes of every rank, see ``agreement.py``.)
    """
    row = Row(head_dim, dtype, torch.float64 if dtype == torch.float64 else torch.float32, bias_delay > 0)
    rows = batch * kv_heads * Keep(window_of(window, kv_heads), sinks, recent).rows
    return ((world - 1) * WORD * (rows * row.words(True) + batch * HEADER),
            (world - 1 - rank) * WORD * rows * row.words(False))


def _ranked(scores: Tensor | None, key: Tensor) -> Tensor:
    """The scores ``(B, Hkv, n)`` in the type that is ranked and sent; zeros if there are none, so that the newest key
    ranks highest."""
    if scores is None:
        return torch.zeros((key.shape[0], key.shape[2], key.shape[1]), dtype=wide(key), device=key.device)
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).contiguous()
