"""Host time of a training step of one attention layer, beside scaled_dot_product_attention's in the same process.

Inputs are small (B1, 512 tokens, 4/2 heads, D 64, w = 128, bfloat16), so the host is slower than the GPU. Each row is a
call, with or without ``torch.autograd.grad`` of its output, queued ``CALLS`` times without waiting. Rows take turns,
and the fastest of ``ROUNDS`` rounds counts, because a shared host has phases in which everything takes 1.5 times as
long. Ratios are to SDPA (flash) with or without gradients.

Rows: attention with a prepared interval mask and a key bias; dynamic_mask_attention from given scores; the layer
``DynamicMaskAttention``; SDPA. Each runs eagerly and under ``torch.compile`` with its defaults; a block of projections
around SDPA or the layer runs compiled. Launches and GPU time of one step come from torch's profiler.

Check: the gradients of every step are finite and not all zero; the layer's output equals that of the functions.
"""
import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import cupy_dma as dma
from benchmarks.harness import measure
from benchmarks.harness.command import conclude
from cupy_dma.torch import DynamicMaskAttention

LENGTH, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 512, 4, 2, 64, 128
ROUNDS, CALLS = 20, 30


def calls(device: str) -> dict[str, Callable[[], Any]]:
    """The measured calls, by name."""
    torch.manual_seed(0)

    def normal(heads: int) -> Any:
        return torch.randn(1, LENGTH, heads, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)

    q, k, v = normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)
    dense = [torch.randn(1, HEADS, LENGTH, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
             for _ in range(3)]
    scores = torch.randn(1, KV_HEADS, LENGTH, device=device, requires_grad=True)
    mask = dma.IntervalMask.top_w(scores.detach(), WINDOW)
    layer = DynamicMaskAttention(KV_HEADS, HEAD_DIM, WINDOW, device=device, dtype=torch.bfloat16)
    torch.nn.init.constant_(layer.A, 0.1)
    dout = torch.randn_like(q)

    def sdpa() -> Any:
        return scaled_dot_product_attention(*dense, is_causal=True)

    def prepared() -> Any:
        return dma.attention(q, k, v, mask=mask, bias=scores)

    def from_scores() -> Any:
        return dma.dynamic_mask_attention(q, k, v, scores, window=WINDOW)

    def by_layer() -> Any:
        return layer(q, k, v)

    def forward(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                return call()
        return run

    def step(call: Callable[[], Any], *inputs: Any) -> Callable[[], Any]:
        def run() -> Any:
            out = call()
            return torch.autograd.grad(out, inputs, dout if out.shape == dout.shape else dout.transpose(1, 2))
        return run

    class Block(torch.nn.Module):
        """Attention between projections of ``x (1, L, H * D)``."""

        def __init__(self, attend: Callable[..., Any]) -> None:
            super().__init__()
            self.attend = attend
            self.qkv = torch.nn.Linear(HEADS * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
            self.out = torch.nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM)

        def forward(self, x: Any) -> Any:
            rows = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), 2)
            return self.out(self.attend(*rows).flatten(2))

    def dense_block(q: Any, k: Any, v: Any) -> Any:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)

    def block(attend: Callable[..., Any]) -> Callable[[], Any]:
        module = Block(attend).to(device, torch.bfloat16)
        x = torch.randn(1, LENGTH, HEADS * HEAD_DIM, device=device, dtype=torch.bfloat16)
        compiled, upstream = torch.compile(module, dynamic=False), torch.randn_like(x)
        return lambda: torch.autograd.grad(compiled(x), tuple(module.parameters()), upstream)

    assert torch.equal(by_layer(), dma.dynamic_mask_attention(q, k, v, window=WINDOW, A=layer.A,
                                                              dt_proj=layer.dt_proj.weight))
    kinds = {"prepared mask": (prepared, (q, k, v, scores)), "from scores": (from_scores, (q, k, v, scores)),
             "layer": (by_layer, (q, k, v, *layer.parameters()))}
    found = {}
    for name, (call, inputs) in {"SDPA": (sdpa, dense), **kinds}.items():
        found |= {f"{name}, forward": forward(call), f"{name}, step": step(call, *inputs),
                  f"{name}, compiled step": step(torch.compile(call, dynamic=False), *inputs)}
    return found | {"SDPA, compiled block": block(dense_block), "layer, compiled block": block(layer)}


def check(found: dict[str, Callable[[], Any]]) -> None:
    """Raises if a step's gradients are not finite, or zero."""
    for name, call in found.items():
        for x in (call(),) if name.endswith("forward") else call():
            assert bool(x.isfinite().all()) and bool((x != 0).any()), name


def on_gpu(call: Callable[[], Any]) -> dict[str, Any]:
    """Launches and GPU microseconds of one call, kernel by kernel."""
    if not measure.on_gpu():
        return {}
    kernels = [[name[:60], round(end - begin, 1)] for name, begin, end in measure.gpu_events(call)]
    return {"launches": len(kernels), "gpu_us": sum(us for _, us in kernels), "kernels": kernels}


def run(args: argparse.Namespace) -> int:
    # Selects the peer globally, because a context manager around each call would cost as much as the call.
    if measure.on_gpu():
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    found = calls("cuda" if measure.on_gpu() else "cpu")
    check(found)
    times = {name: min(turns) for name, turns in measure.by_turns(
        found, ROUNDS, lambda call: measure.host_us(call, CALLS, rounds=1)).items()}
    rows = [{"name": name, "host_us": spent, "times_sdpa": spent / times[f"SDPA, {name.rpartition(', ')[2]}"],
             **on_gpu(found[name])} for name, spent in times.items()]
    return conclude("host", args, __doc__, rows=rows)
