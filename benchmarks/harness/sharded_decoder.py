"""Training steps of the decoder of the routine training with every sequence over several ranks, or on one."""
from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import decoder
from benchmarks.harness.shards import timed

NEAR = 5e-3  # nats by which the loss of a step may differ: bfloat16 in the order of another number of ranks


def steps(sizes: decoder.Sizes, batch: int, length: int, count: int, device: str, group: Any = None,
          everyone: Any = None, row: slice = slice(None)) -> dict[str, Any]:
    """``count`` steps (forward, backward, AdamW) of ``batch`` sequences of ``length`` tokens, after two that are not
    timed, each layer recomputed in the backward pass: times, losses and peak memory of this rank. ``group``: the ranks
    that share a sequence, ``everyone``: all that train, ``row``: the sequences of this rank; on one GPU None and
    all."""
    with decoder.decoder(sizes, "dma", compiled=False, checkpoint=True, device=device,
                         dtype=torch.bfloat16) as (model, _):
        model.share(group)
        forward = model if group is None else DistributedDataParallel(model, process_group=everyone)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
        batches = iter([decoder.batch_of(sizes, batch, length, i, device)[row] for i in range(2 + count)])
        losses = []

        def step() -> None:
            optimizer.zero_grad()
            loss = forward(next(batches))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        step()
        step()
        found = timed(step, count, device)
        return {**found, "losses": [loss.item() for loss in losses]}


def differ(ours: list[float], one: list[float]) -> tuple[float, float]:
    """The largest difference of a step's loss, and what is allowed."""
    return max(abs(a - b) for a, b in zip(ours, one)), NEAR
