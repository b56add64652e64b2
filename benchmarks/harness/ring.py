"""torch's own context parallel for SDPA, the peer of benchmarks/routines/context_parallel.py."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel


def prepared(problem: Any, inputs: list[Any]) -> tuple[list[Any], Callable[[], Any], str]:
    """Inputs, call and kernel of torch's ring attention. It has no GQA, so kv heads are repeated, outside of the
    timing; the shards count as cut by its load balancer."""
    query, key, value = (x.detach().transpose(1, 2) for x in inputs[:3])
    group, kernel = problem.heads // problem.kv_heads, SDPBackend.CUDNN_ATTENTION
    if problem.device == "cpu":
        kernel = SDPBackend.FLASH_ATTENTION
    given = [x.contiguous().requires_grad_(inputs[0].requires_grad)
             for x in (query, *(x.repeat_interleave(group, 1) for x in (key, value)))]

    def call() -> Any:
        with sdpa_kernel(kernel):
            return torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True).transpose(1, 2)

    return given, call, kernel.name.lower()


@functools.cache
def _mesh(kind: str, world: int) -> Any:
    return init_device_mesh(kind, (world,))


def patched(problem: Any) -> Any:
    """SDPA as ring attention."""
    from torch.distributed.tensor.experimental import context_parallel

    buffer = torch.empty(2 * problem.world, device=problem.device)  # it wants one
    return context_parallel(_mesh(problem.device.partition(":")[0], problem.world), buffers=[buffer],
                            buffer_seq_dims=[0], no_restore_buffers={buffer})
