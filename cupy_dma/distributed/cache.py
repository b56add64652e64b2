"""A decode cache from a sharded prompt: every rank gets the state after the last token."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupy_dma.cache import DynamicCache
from cupy_dma.cache.arguments import extend_call
from cupy_dma.distributed.agreement import Agreement
from cupy_dma.distributed.arguments import checked_candidates, process_group
from cupy_dma.distributed.exchange import Exchange
from cupy_dma.distributed.rows import Row
from cupy_dma.distributed.survivors import Keep, Own


@torch.compiler.disable
@torch.no_grad()
def fill_cache(cache: DynamicCache, key: Tensor, value: Tensor, scores: Tensor, group: Any = None, *,
               padding: Tensor | None = None) -> None:
    """Fill ``cache`` with a prompt whose consecutive shards are on the ranks of a process group.

    Every rank gets the same cache, as if it had been extended by the whole prompt, and can decode by itself. The
    cache's former contents are lost; of the prompt it keeps ``window + sinks + recent`` rows.

    Parameters
    ----------
    cache : DynamicCache
        Of this rank: torch tensors on key's device, values as wide as keys.
    key, value : Tensor ``(B, n, Hkv, D)`` of the cache's type
        The shard; lengths may differ between ranks.
    scores : float Tensor ``(B, Hkv, n)``
    group : ProcessGroup or one-dimensional DeviceMesh, optional
        Default: the default group.
    padding : bool Tensor ``(1|B, n)``, or integers 0 and 1, optional
        True or 1 = a real token; others do not count.

    Raises
    ------
    TypeError, ValueError, RankError
        As for ``DynamicCache.update`` and ``context_parallel_attention``.
    NotImplementedError
        Values are not as wide as keys, or the cache records its stops.

    Notes
    -----
    One all-gather, of the size of ``context_parallel_attention``'s. The host does not wait.
    """
    group = process_group(group)
    state = cache._state
    agreement = Agreement("fill_cache", group, getattr(key, "device", torch.device("cpu")))

    def signature() -> dict[str, Any]:
        if state.library.name != "torch":
            raise TypeError(f"cache must hold torch tensors, got {cache!r}: make it with like=key")
        if state.value_dim != state.head_dim:
            raise NotImplementedError(f"cache must have values as wide as keys, got head_dim={state.head_dim} and "
                                      f"value_dim={state.value_dim}")
        if cache._record is not None:
            raise NotImplementedError("cache must not record its stops: no rank has the scores of all tokens")
        call = extend_call(state, None, key.detach(), value.detach(), scores.detach(), None, 0.0, None, None, False,
                           None)
        checked_candidates(key, padding, None)
        return {"cache": repr(cache), "key": f"(B, Hkv, D) = ({key.shape[0]}, {key.shape[2]}, {key.shape[3]})",
                "scores": call.scores.dtype, "padding": padding is not None}

    agreement.check(signature)
    keep, kind = Keep(state.window, state.sinks, state.recent), getattr(torch, state.scores.dtype)
    own = Own(scores.to(kind).contiguous(), *checked_candidates(key, padding, None), cache._backend)
    exchange = Exchange(own, keep, Row(state.head_dim, key.dtype, kind), group, agreement)
    work, received = exchange.send(key, value)
    agreement.wait(work)
    found, rows = received.front(own, keep, exchange.row, exchange.world)
    keys, values = exchange.row.pair(rows)
    cache.load_state_dict({
        "key": keys.contiguous(), "value": values.contiguous(),
        "scores": torch.where(found.filled, exchange.row.scores(rows), 0.0),
        "positions": torch.where(found.filled, found.ordinal - 1, -1), "in_top": found.in_top.to(torch.uint8),
        "lengths": found.total.contiguous(), "window": state.window, "sinks": state.sinks, "recent": state.recent})
