"""Sharded sequences outside attention: shards, positions, losses.

    ids  = shard_sequence(ids, group)                        # (B, N) -> this rank's (B, n)
    at   = shard_positions(n, group)                         # for rotary embeddings
    loss = shard_mean(losses.sum(), losses.numel(), group)   # of all tokens, on every rank
    full = gather_sequence(x, group)                         # (B, n, ...) -> (B, N, ...) on every rank

The batch to cut must be the same on all ranks of the group. Shift targets before cutting: ``shard_sequence(ids[:,
:-1])`` and ``shard_sequence(ids[:, 1:])`` belong together, and no token is lost between shards.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cupy_dma import checks
from cupy_dma.distributed.agreement import Agreement, all_gather
from cupy_dma.distributed.arguments import process_group
from cupy_dma.distributed.survivors import HEADER, open_document, open_tokens, ordinals


def shard_lengths(total: int, world: int) -> list[int]:
    """The lengths of the shards of ``total`` tokens: as equal as possible, longer ones first."""
    each, more = divmod(checks.whole(total, "total", 0), checks.whole(world, "world", 1))
    return [each + (rank < more) for rank in range(world)]


def shard_sequence(x: Tensor, group: Any = None, *, dim: int = 1) -> Tensor:
    """This rank's shard of a whole sequence, a view. Nothing is sent.

    Parameters
    ----------
    x : Tensor
        The same on all ranks.
    group : ProcessGroup or one-dimensional DeviceMesh, optional
        Default: the default group.
    dim : int
        The axis of the tokens.

    Returns
    -------
    Tensor
        ``shard_lengths(N, world)[rank]`` of the ``N`` tokens: lengths differ by at most 1.

    Raises
    ------
    TypeError, ValueError
        ``x`` is not a tensor with that axis, or there is no group.
    """
    group, dim = process_group(group), _axis(x, dim)
    rank, lengths = dist.get_rank(group), shard_lengths(x.shape[dim], dist.get_world_size(group))
    return x.narrow(dim, sum(lengths[:rank]), lengths[rank])


def gather_sequence(x: Tensor, group: Any = None, *, dim: int = 1) -> Tensor:
    """The whole sequence on every rank, from its shards, which may differ in length.

    The gradient of a shard is the sum over all ranks, in their order. If every rank computes the same loss from the
    result, scale the loss by ``1 / world``.

    Parameters
    ----------
    x : Tensor
        This rank's shard; other ranks' may differ in axis ``dim`` alone.
    group, dim
        As for ``shard_sequence``.

    Returns
    -------
    Tensor
        Shards concatenated along ``dim`` in the order of ranks.

    Raises
    ------
    TypeError, ValueError
        As for ``shard_sequence``.
    RankError
        As for ``context_parallel_attention``.

    Notes
    -----
    The result's shape depends on lengths known only to the ranks: two collectives, and the host waits for the first.
    """
    group = process_group(group)
    agreement = Agreement("gather_sequence", group, getattr(x, "device", torch.device("cpu")))

    def signature() -> dict[str, Any]:
        axis = _axis(x, dim)
        return {"dim": axis, "x": f"{(*x.shape[:axis], 'any', *x.shape[axis + 1:])} of {x.dtype}",
                "requires_grad of x": torch.is_grad_enabled() and x.requires_grad}

    agreement.check(signature)
    found: Tensor = _Gather.apply(x.movedim(dim, 0), agreement)
    return found.movedim(0, dim)


class _Gather(torch.autograd.Function):
    """Gather along the first axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, agreement: Agreement) -> Tensor:
        ctx.agreement, world = agreement, agreement.world
        every = torch.empty(world, dtype=torch.int64, device=x.device)
        agreement.wait(agreement.started(all_gather, every, every.new_tensor([len(x)]), group=agreement.group))
        ctx.lengths = lengths = every.tolist()
        most = max(lengths)
        padded = x.new_zeros((most, *x.shape[1:]))
        padded[:len(x)] = x
        taken = x.new_empty((world * most, *x.shape[1:]))
        agreement.wait(agreement.started(all_gather, taken, padded, group=agreement.group))
        return torch.cat([part[:n] for part, n in zip(taken.unflatten(0, (world, most)), lengths)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        agreement, own = ctx.agreement, ctx.lengths[ctx.agreement.rank]
        taken = gradient.new_empty((agreement.world * own, *gradient.shape[1:]))
        agreement.wait(agreement.started(dist.all_to_all_single, taken, gradient.contiguous(), [own] * agreement.world,
                                         ctx.lengths, group=agreement.group))
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        first, *others = taken.unflatten(0, (agreement.world, own)).unbind(0)
        total = first.to(wide)
        for part in others:
            total = total + part
        return total.to(gradient.dtype), None


def document_ids(cu_seqlens: Any, total: int, *, device: Any = None) -> Tensor:
    """Ids ``(1, total)`` of packed documents, int32, from their cumulative lengths ``(documents + 1,)``, which start at
    0 and end at ``total``. Cut them with ``shard_sequence`` into the ``documents`` of each rank."""
    bounds = torch.as_tensor(cu_seqlens, device=device)
    if bounds.ndim != 1 or not len(bounds) or bounds.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be integers of shape (documents + 1,), got {tuple(bounds.shape)} of "
                         f"{bounds.dtype}")
    checks.whole(total, "total", 0)
    if bounds.device.type == "cpu" or checks.wants_values_checked():
        values = bounds.tolist()
        if values[0] != 0 or values != sorted(values) or values[-1] != total:
            raise ValueError(f"cu_seqlens must be cumulative lengths that start at 0, never decrease and end at "
                             f"total = {total}, got {values[:16]}{' ...' if len(values) > 16 else ''}")
    place = torch.arange(total, device=bounds.device)
    return torch.searchsorted(bounds.long(), place, right=True)[None].int()


@torch.compiler.disable
def shard_positions(length: int, group: Any = None, *, padding: Tensor | None = None, documents: Tensor | None = None,
                    device: Any = None) -> Tensor:
    """The positions of this rank's tokens in the sequence, for rotary embeddings: one small all-gather, no waiting.

    Parameters
    ----------
    length : int
        ``n``, of this rank's shard; other ranks' may differ.
    group
        As for ``shard_sequence``.
    padding : bool Tensor ``(B, n)``, optional
        True = a real token. Positions count real tokens.
    documents : int Tensor ``(1|B, n)``, optional
        Ids, as for ``context_parallel_attention``: positions count from 0 in each document.
    device
        Default: that of padding or documents, else the CPU.

    Returns
    -------
    int64 Tensor ``(n,)``; ``(B, n)`` with padding or documents (B = 1 if both are shared by all rows)

    Raises
    ------
    TypeError, ValueError, RankError
        As for ``context_parallel_attention``.
    """
    group = process_group(group)
    given = [x for x in (padding, documents) if x is not None]
    device = torch.device(device if device is not None else given[0].device if given else "cpu")
    batch = max([len(x) for x in given], default=1)
    agreement = Agreement("shard_positions", group, device)

    def signature() -> dict[str, Any]:
        n = checks.whole(length, "length", 0)
        for x, name in ((padding, "padding"), (documents, "documents")):
            if x is not None and tuple(x.shape) not in ((1, n), (batch, n)):
                raise ValueError(f"{name} must have shape (1|B, n) = (1 or {batch}, {n}), got {tuple(x.shape)}")
        return {"batch": batch, "padding": padding is not None, "documents": documents is not None}

    agreement.check(signature)
    header = open_document(batch, length, padding, documents, device).header
    every = header.new_empty((agreement.world * batch, HEADER))
    agreement.wait(agreement.started(all_gather, every, header, group=group))
    before = header.new_zeros(batch)
    if agreement.rank:
        first = documents[:, 0].long().expand(batch) if documents is not None and length else None
        before = open_tokens(every.unflatten(0, (agreement.world, batch))[:agreement.rank], first)[1].sum(0)
    real = torch.ones((1, length), dtype=torch.bool, device=device) if padding is None else padding
    positions = (ordinals(real.expand(batch, length), documents, before) - 1).clamp(min=0)
    return positions if given else positions[0]


def shard_mean(total: Tensor, count: Any, group: Any = None, *, gradients: str = "mean") -> Tensor:
    """The mean over the tokens of all ranks, for example of the loss, from each rank's sum and count.

    Parameters
    ----------
    total : float Tensor ``()``
        This rank's sum, with its gradient.
    count : int or Tensor ``()``
        How many tokens are in it; 0 is allowed.
    group
        As for ``shard_sequence``.
    gradients
        ``"mean"``: the parameters' gradients will be averaged over ranks, as by DistributedDataParallel and FSDP, over
        this group or a larger one that contains it. ``"sum"``: they will be summed.

    Returns
    -------
    Tensor ``()``
        The same number on all ranks; NaN if all counts are 0. Calling ``backward`` on every rank and then averaging (or
        summing) over the group gives the gradient of the mean over all tokens.

    Raises
    ------
    TypeError, ValueError, RankError
        As for ``context_parallel_attention``.
    """
    group = process_group(group)
    agreement = Agreement("shard_mean", group, getattr(total, "device", torch.device("cpu")))

    def signature() -> dict[str, Any]:
        checks.choice(gradients, "gradients", ("mean", "sum"))
        if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point():
            raise ValueError(f"total must be a float tensor of shape (), got "
                             f"{tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__}")
        return {"total": str(total.dtype), "gradients": gradients}

    agreement.check(signature)
    if not isinstance(count, Tensor):
        count = torch.full((), count, dtype=torch.int64, device=total.device)
    return _Mean.apply(total, count, agreement, gradients)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, agreement: Agreement, gradients: str) -> Tensor:
        wide = torch.float64 if total.dtype == torch.float64 else torch.float32
        mine = torch.stack((total.to(wide), count.to(wide)))
        every = mine.new_empty(2 * agreement.world)
        agreement.wait(agreement.started(all_gather, every, mine, group=agreement.group))
        sums, counts = every.view(-1, 2).unbind(1)
        ctx.save_for_backward((agreement.world if gradients == "mean" else 1) / counts.sum())
        return (sums.sum() / counts.sum()).to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        return (gradient * factor).to(gradient.dtype), None, None, None


def _axis(x: Any, dim: Any) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch tensor, got {type(x).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be an axis of x, which has {x.ndim}, got {dim!r}")
    return dim % x.ndim
