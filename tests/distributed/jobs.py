"""What the ranks of ``ranks.py`` do: each function is called by every rank of ``group``."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cupy_dma.distributed import attention as door
from cupy_dma.distributed import context_parallel_attention
from tests.distributed.cases import Case

INPUTS = ("query", "key", "value", "scores")


def leaves(case: Case, rank: int) -> list[Tensor | None]:
    """This rank's query, key, value and scores, which require grad."""
    found = (case.shard(name, rank) for name in INPUTS)
    return [None if x is None else x.clone().requires_grad_() for x in found]


class Watch:
    """The exchanges of a block, and the bytes that this rank receives from others in each of their collectives."""

    def __init__(self, group: Any):
        self.exchanges: list[Any] = []
        self.moved: list[tuple[str, int]] = []
        self.world = dist.get_world_size(group)

    def __enter__(self) -> Watch:
        self.replaced = door.Exchange, door.Agreement.started
        watch, (exchange, started) = self, self.replaced

        class Watched(exchange):
            def __init__(self, *arguments: Any):
                super().__init__(*arguments)
                watch.exchanges.append(self)

        def counting(agreement: Any, collective: Any, output: Tensor, *arguments: Any, **options: Any) -> Any:
            name = "all-to-all" if "all_to_all" in collective.__name__ else "all-gather"
            own = output.nbytes // watch.world if name == "all-gather" else 0
            watch.moved.append((name, output.nbytes - own))
            return started(agreement, collective, output, *arguments, **options)

        door.Exchange, door.Agreement.started = Watched, counting
        return self

    def __exit__(self, *_: object) -> None:
        door.Exchange, door.Agreement.started = self.replaced


def attend(group: Any, case: Case) -> dict[str, Any]:
    """Outputs, gradients, what was selected and what was moved."""
    rank = dist.get_rank(group)
    inputs = leaves(case, rank)
    with Watch(group) as watch:
        out, lse = context_parallel_attention(
            *inputs, group=group, padding=case.shard("padding", rank), documents=case.shard("documents", rank),
            return_lse=True, **case.options)
        gradients = torch.autograd.grad(out, [x for x in inputs if x is not None], case.shard("dout", rank))
    exchange = watch.exchanges[0]
    front = exchange._front
    return {
        "out": out.detach(), "lse": lse.detach(), "gradients": [x.detach() for x in gradients], "moved": watch.moved,
        "seen": exchange.mask.to_dense(case.lengths[rank]),
        "sent": None if exchange._sent is None else exchange._sent.index,
        "front": None if front is None else (front.index, front.filled)}


# ---- calls that go wrong --------------------------------------------------------------------------------------------


def call(group: Any, changes: dict[int, dict[str, Any]], warm: bool = False) -> Tensor:
    """A usual call, with other arguments on some ranks; before it, if ``warm``, one with the same everywhere."""
    rank = dist.get_rank(group)

    def attended(changes: dict[str, Any]) -> Tensor:
        given: dict[str, Any] = {
            "query": torch.ones(2, 5, 4, 6), "key": torch.ones(2, 5, 2, 6), "value": torch.ones(2, 5, 2, 6),
            "scores": torch.ones(2, 2, 5), "window": 3, "group": group, **changes}
        return context_parallel_attention(*[given.pop(name) for name in INPUTS], **given)

    if warm:
        attended({})
    return attended(changes.get(rank, {}))


def missing(group: Any, rank: int, where: str) -> str:
    """One rank stays away from the forward or from the backward pass, or leaves between comparison and exchange."""
    here = dist.get_rank(group)
    x = torch.ones(1, 5, 2, 6, requires_grad=True)
    if where == "forward" and here == rank:
        return "stayed away"
    if where == "exchange" and here == rank:
        replaced, door.joined = door.joined, leave
        try:
            context_parallel_attention(x, x, x, window=3, group=group)
        finally:
            door.joined = replaced
    out = context_parallel_attention(x, x, x, window=3, group=group)
    if where == "backward" and here == rank:
        return "stayed away"
    out.sum().backward()
    return "came"


def leave(*_: Any) -> Any:
    raise KeyError("out of memory")


def twice(group: Any) -> Tensor:
    """After a call that one rank has got wrong, the group serves the next."""
    try:
        call(group, {1: {"window": 0}})
    except (ValueError, RuntimeError):
        return call(group, {})
    raise AssertionError("no error")


def demonstrate(group: Any, text: bytes, args: Any) -> dict[str, Any]:
    """What ``python -m cupy_dma demo --ranks`` does in each of its processes."""
    from cupy_dma.cli import demo_ranks

    return demo_ranks._attend(text, args, group)
