"""Jobs for the ranks of ``ranks.py``: every rank of ``group`` calls them."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cupy_dma.distributed import attention as door
from cupy_dma.distributed import context_parallel_attention, empty_with_room
from tests.distributed.cases import Case

INPUTS = ("query", "key", "value", "scores")


def leaves(case: Case, rank: int, device: str = "cpu", room: bool = False) -> list[Tensor | None]:
    """This rank's query, key, value and scores, which require grad."""
    def leaf(name: str) -> Tensor | None:
        x = case.shard(name, rank)
        if x is not None and room and name in ("key", "value"):
            room_of = empty_with_room(*x.shape, case.rows_ahead(rank), dtype=x.dtype, device=device)
            return room_of.copy_(x).requires_grad_()
        return None if x is None else x.clone().to(device).requires_grad_()

    return [leaf(name) for name in INPUTS]


class Watch:
    """Records the exchanges in a ``with`` block, and the bytes that this rank receives in each of their collectives."""

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

            def join(self, *arguments: Any) -> Any:
                self.history = super().join(*arguments)
                return self.history

        def counting(agreement: Any, collective: Any, output: Tensor, *arguments: Any, **options: Any) -> Any:
            name = "all-to-all" if "all_to_all" in collective.__name__ else "all-gather"
            own = output.nbytes // watch.world if name == "all-gather" else 0
            watch.moved.append((name, output.nbytes - own))
            return started(agreement, collective, output, *arguments, **options)

        door.Exchange, door.Agreement.started = Watched, counting
        return self

    def __exit__(self, *_: object) -> None:
        door.Exchange, door.Agreement.started = self.replaced


def attend(group: Any, case: Case, device: str = "cpu", room: bool = False) -> dict[str, Any]:
    """Outputs, gradients, the selection and the exchanged bytes."""
    rank = dist.get_rank(group)
    inputs = leaves(case, rank, device, room)
    shards = ((name, case.shard(name, rank)) for name in ("padding", "documents", "dout"))
    given = {name: x.to(device) for name, x in shards if x is not None}
    dout = given.pop("dout")
    with Watch(group) as watch:
        out, lse = context_parallel_attention(*inputs, group=group, return_lse=True, room=room, **given, **case.options)
        gradients = torch.autograd.grad(out, [x for x in inputs if x is not None], dout)
    exchange = watch.exchanges[0]
    front, sent = exchange._front, exchange._sent
    return {
        "out": out.detach().cpu(), "lse": lse.detach().cpu(), "gradients": [x.cpu() for x in gradients],
        "moved": watch.moved, "copied": [x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
                                         for x, y in zip(exchange.history[:2], inputs[1:3])],
        "seen": exchange.mask.to_dense(case.lengths[rank]).cpu(),
        "sent": None if sent is None else sent.index.cpu(),
        "front": None if front is None else (front.index.cpu(), front.filled.cpu())}


# ---- calls that go wrong ----
def call(group: Any, changes: dict[int, dict[str, Any]], warm: bool = False) -> Tensor:
    """A call with other arguments on some ranks; if ``warm``, after a call with the same arguments on all."""
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
    """One rank skips the forward or the backward pass, or leaves between comparison and exchange."""
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


def demonstrate(group: Any, text: bytes, args: Any) -> dict[str, Any]:
    """The work of each process of ``python -m cupy_dma demo --ranks``."""
    from cupy_dma.cli import demo_ranks

    return demo_ranks._attend(text, args, group)
