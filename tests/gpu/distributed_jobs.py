"""Jobs for the ranks of ``test_distributed.py``, each on its own GPU."""
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cupy_dma.distributed import context_parallel_attention
from tests.distributed.cases import Case
from tests.distributed.jobs import call, leaves


def problem(case: Case, group: Any) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """Leaves, dout and options of this rank's call."""
    rank = dist.get_rank(group)
    given = {name: x.cuda() for name in ("padding", "documents") if (x := case.shard(name, rank)) is not None}
    dout = case.shard("dout", rank)
    assert dout is not None
    inputs = [x for x in leaves(case, rank, "cuda") if x is not None]
    return inputs, dout.cuda(), {"group": group, "deterministic": True, **given, **case.options}


def step(inputs: list[Tensor], dout: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients."""
    out = context_parallel_attention(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def unsynchronized(group: Any, case: Case) -> bool:
    """A warm step under torch's check for host synchronisation, which raises."""
    given = problem(case, group)
    for _ in range(3):
        step(*given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def graphed(group: Any, case: Case) -> bool:
    """Compare a step captured with its collectives and replayed on other numbers with the same step without a graph."""
    inputs, dout, options = problem(case, group)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(inputs, dout, options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        static = step(inputs, dout, options)
    for _ in range(2):
        with torch.no_grad():
            for x in inputs:
                x.copy_(torch.randn_like(x))
        graph.replay()
        if not all(torch.equal(a, b) for a, b in zip(static, step(inputs, dout, options))):
            return False
    return True


def repeated(group: Any, case: Case, times: int) -> bool:
    """Whether all of ``times`` steps have the same bits."""
    given = problem(case, group)
    first = step(*given)
    return all(torch.equal(a, b) for _ in range(times) for a, b in zip(first, step(*given)))


def checked(group: Any) -> None:
    """``CUPY_DMA_CHECK=1`` also finds arguments that differ between ranks when each rank's were agreed on before."""
    for window in (3, 4):
        call(group, {rank: on_gpu({"window": window}) for rank in range(2)})
    os.environ["CUPY_DMA_CHECK"] = "1"
    try:
        call(group, {rank: on_gpu({"window": 3 + rank}) for rank in range(2)})
    finally:
        del os.environ["CUPY_DMA_CHECK"]


def cold(group: Any, changes: dict[str, Any]) -> None:
    call(group, {0: on_gpu({}), 1: on_gpu(changes)})


def on_gpu(changes: dict[str, Any]) -> dict[str, Any]:
    usual = {"query": torch.ones(2, 5, 4, 6), "key": torch.ones(2, 5, 2, 6), "value": torch.ones(2, 5, 2, 6),
             "scores": torch.ones(2, 2, 5)}
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in {**usual, **changes}.items()}
