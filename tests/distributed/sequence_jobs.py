"""Jobs for the ranks of ``ranks.py`` in ``test_sequence.py``."""
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cupy_dma as dma
from cupy_dma.distributed import (
    document_ids,
    fill_cache,
    gather_sequence,
    shard_mean,
    shard_positions,
    shard_sequence,
)
from tests.distributed.cases import Case


def there_and_back(group: Any, total: int, dim: int) -> tuple[int, Tensor, Tensor]:
    """The shard's length, the gathered sequence, and the shard's gradient of a loss that differs between ranks."""
    whole = torch.arange(total * 6, dtype=torch.float32).reshape(2, total, 3).movedim(1, dim)
    shard = shard_sequence(whole, group, dim=dim).clone().requires_grad_()
    found = gather_sequence(shard, group, dim=dim)
    (found * whole * (dist.get_rank(group) + 1)).sum().backward()
    assert shard.grad is not None
    return shard.shape[dim], found.detach(), shard.grad


def uneven(group: Any, lengths: tuple[int, ...]) -> Tensor:
    rank = dist.get_rank(group)
    begin = sum(lengths[:rank])
    return gather_sequence(torch.arange(begin, begin + lengths[rank])[None], group)


def positions(group: Any, case: Case) -> Tensor:
    rank = dist.get_rank(group)
    return shard_positions(case.lengths[rank], group, padding=case.shard("padding", rank),
                           documents=case.shard("documents", rank))


def ids(group: Any, bounds: list[int]) -> Tensor:
    return shard_sequence(document_ids(bounds, bounds[-1]), group)


def mean(group: Any, counts: tuple[int, ...], gradients: str) -> tuple[Tensor, Tensor]:
    """The mean of the squares of 1, 2, ..., spread over ranks by ``counts``, times a weight, and its gradient."""
    rank = dist.get_rank(group)
    begin = sum(counts[:rank])
    weight = torch.ones((), requires_grad=True)
    numbers = torch.arange(begin, begin + counts[rank]).float() + 1
    found = shard_mean((weight * numbers.square()).sum(), counts[rank], group, gradients=gradients)
    found.backward()
    assert weight.grad is not None
    return found.detach(), weight.grad


def cached(group: Any, case: Case, steps: int) -> dict[str, Any]:
    """A cache filled from shards, and its outputs for ``steps`` more tokens, on every rank."""
    rank = dist.get_rank(group)
    key, value, scores = (case.shard(name, rank) for name in ("key", "value", "scores"))
    cache = dma.DynamicCache(case.batch, case.kv_heads, case.window, case.head_dim, like=key, sinks=case.sinks,
                             recent=case.recent)
    fill_cache(cache, key, value, scores, group, padding=case.shard("padding", rank))
    return {"kept": cache.kept(), "length": cache.length, "outs": decoded(cache, case, steps)}


def decoded(cache: dma.DynamicCache, case: Case, steps: int) -> Tensor:
    """Outputs of further tokens one by one; these repeat the first tokens of the case."""
    query, key, value, scores = (case.whole(name) for name in ("query", "key", "value", "scores"))
    assert query is not None and key is not None and value is not None and scores is not None
    return torch.cat([cache.extend(query[:, i:i + 1], key[:, i:i + 1], value[:, i:i + 1], scores[..., i:i + 1])
                      for i in range(steps)], 1)


def misfit(group: Any, case: Case) -> None:
    rank = dist.get_rank(group)
    key, value, scores = (case.shard(name, rank) for name in ("key", "value", "scores"))
    assert key is not None
    cache = dma.DynamicCache(case.batch, case.kv_heads - (rank == 1), case.window, case.head_dim, like=key)
    fill_cache(cache, key, value, scores, group)
