"""Host time of a jitted call of cupy_dma.jax, and a training step of one layer beside torch's.

host: dynamic_mask_attention from given scores (B2, 256 tokens, 4/2 heads, D 64, w 50), so small that the host is slower
than the GPU. ``CALLS`` jitted calls are queued without waiting; reports wall time per call, the fastest and the median
of ``ROUNDS`` rounds, beside a jitted ``query + 1``.

step: dynamic_mask_attention from values (B1, 32768 tokens, 16/8 heads, D 128, w 1024) and the gradients of query, key,
value, dt_proj and A, jitted, alternating with the same step in torch in one process. Enough steps to fill a tenth of a
second are queued; reports wall time, the median of ``ROUNDS`` rounds.

Check: outputs and gradients of both agree in relative norm within ``NEAR``.
"""
import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cupy_dma as dma
from benchmarks.harness.command import conclude

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the GPU in this process

import jax
import jax.numpy as jnp

import cupy_dma.jax as dj

CALLS, ROUNDS, NEAR = 50, 20, 0.02
SIZES = {"layer": {"length": 32768, "heads": 16, "kv_heads": 8, "head_dim": 128, "window": 1024},
         "tiny": {"length": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "window": 32}}
NAMES = ("out", "query", "key", "value", "dt_proj", "A")


def host_us(step: Callable[..., Any], arguments: Any) -> dict[str, float]:
    """Host microseconds per call: of the fastest and of the median round."""
    jax.block_until_ready(step(*arguments))
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            out = step(*arguments)
        jax.block_until_ready(out)  # the GPU needs less time than the host
        found.append(1e6 * (time.perf_counter() - begin) / CALLS)
    return {"fastest_us": min(found), "median_us": statistics.median(found)}


def host() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = [jnp.asarray(rng.standard_normal((2, 256, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2)]
    scores = jnp.asarray(rng.standard_normal((2, 2, 256)), jnp.float32)
    calls = {"jit(query + 1)": (jax.jit(lambda q: q + 1), rows[:1]),
             "jit(dynamic_mask_attention)": (
                 jax.jit(lambda *x: dj.dynamic_mask_attention(*x, window=50)), [*rows, scores])}
    return [{"part": "host", "name": name, **host_us(*call)} for name, call in calls.items()]


def steps(size: dict[str, int]) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[Any], None]]]:
    """A training step in jax and in torch on the same numbers, each returning ``NAMES``, and a function that waits for
    it."""
    rng = np.random.default_rng(0)
    length, heads, kv_heads, head_dim, window = size.values()
    drawn = [rng.standard_normal((1, length, h, head_dim), np.float32) for h in (heads, kv_heads, kv_heads, heads)]
    parameters = [rng.standard_normal((kv_heads, kv_heads * head_dim), np.float32) / np.sqrt(kv_heads * head_dim),
                  np.ones(kv_heads, np.float32)]
    *inputs, dout = [jnp.asarray(x, jnp.bfloat16) for x in drawn]
    inputs += [jnp.asarray(x, jnp.float32) for x in parameters]
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    *tensors, upstream = [torch.tensor(x, device=device).bfloat16() for x in drawn]
    tensors = [x.requires_grad_() for x in (*tensors, *(torch.tensor(x, device=device) for x in parameters))]

    @jax.jit
    def in_jax(dout: Any, *inputs: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, dt_proj: Any, A: Any) -> Any:
            return dj.dynamic_mask_attention(q, k, v, dt_proj=dt_proj, A=A, window=window)

        out, pull = jax.vjp(attend, *inputs)
        return out, *pull(dout)

    def in_torch() -> Any:
        out = dma.dynamic_mask_attention(*tensors[:3], dt_proj=tensors[3], A=tensors[4], window=window)
        return out.detach(), *torch.autograd.grad(out, tensors, upstream)

    def wait(_: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    return ({"jax": lambda: in_jax(dout, *inputs), "torch": in_torch},
            {"jax": jax.block_until_ready, "torch": wait})


def training(size: dict[str, int]) -> list[dict[str, Any]]:
    calls, waits = steps(size)
    found: dict[str, list[float]] = {name: [] for name in calls}
    results = {}

    def seconds(name: str, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            results[name] = calls[name]()
        waits[name](results[name])
        return (time.perf_counter() - begin) / count

    for name in calls:  # compile kernels and programs
        seconds(name, 3)
    count = max(1, round(0.1 / seconds("torch", 3)))
    for _ in range(ROUNDS):
        for name in calls:
            found[name].append(1e3 * seconds(name, count))
    apart = {}
    for name, ours, theirs in zip(NAMES, results["jax"], results["torch"]):
        a, b = np.asarray(ours, np.float64), theirs.double().cpu().numpy()
        apart[name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return [{"part": "step", "name": name, "ms": statistics.median(times), "all_ms": times, "apart": apart}
            for name, times in found.items()]


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--size", choices=SIZES, default="layer")


def run(args: argparse.Namespace) -> int:
    rows = host() + training(SIZES[args.size])
    print(rows[-1]["apart"])
    return conclude("jax_steps", args, __doc__, max(rows[-1]["apart"].values()) <= NEAR, size=SIZES[args.size],
                    jax=jax.__version__, rows=rows)
