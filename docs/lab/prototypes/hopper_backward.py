"""Launches the prototype of the Hopper backward: its gradients beside the portable ones, its times beside cuDNN's.

    PYTHONPATH=. python docs/lab/prototypes/hopper_backward.py          needs a Hopper GPU, CuPy and torch

Order of dq: 0 no dq, 1 added in any order, 2 added in a fixed order. See docs/lab/backward.md, version 39.
"""
from __future__ import annotations

import itertools
import re
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupy_dma as dma
from cupy_dma.arrays import library_named
from cupy_dma.backends import cuda
from cupy_dma.backends.cuda.attention import tma
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.lists import intervals
from cupy_dma.backends.cuda.runtime import jit, launch
from cupy_dma.backends.cuda.runtime.configs import BackwardReduceConfig
from cupy_dma.calls.attention import attention_call

SOURCE = Path(__file__).with_suffix(".cu")
BLOCK_N, STAGES, PRODUCER_REGISTERS = 128, 2, 40


@cache
def module(**macros: Any) -> Any:
    seen: set[str] = set()

    def inline(match: re.Match) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        text = (jit.kernels_directory() / match[1]).read_text().replace("#pragma once", "")
        return re.sub(r'#include "([^"]+)"', inline, text)

    text = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    text += re.sub(r'#include "([^"]+)"', inline, SOURCE.read_text())
    cubin, log = jit._run_nvrtc(text, SimpleNamespace(source=SOURCE.name), "sm_90a")
    print("   ", macros, jit._read_resources(log))
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    return cupy.RawModule(path=file.name)


class Run:
    """One call, its inputs drawn at random; ``window`` None: plain causal attention."""

    def __init__(self, batch: int, length: int, heads: int, kv_heads: int, head_dim: int, window: int | None):
        torch.manual_seed(0)
        self.shape = batch, length, heads, kv_heads, head_dim
        self.q, self.k, self.v, self.dout = (
            torch.randn(batch, length, h, head_dim, device="cuda", dtype=torch.bfloat16)
            for h in (heads, kv_heads, kv_heads, heads))
        self.causal = window is None
        self.bias = None if self.causal else torch.randn(batch, kv_heads, length, device="cuda")
        self.window = window
        self.mask = None if self.causal else dma.IntervalMask.top_w(self.bias, window)
        self.out, self.lse = dma.attention(self.q, self.k, self.v, mask=self.mask, bias=self.bias, causal=self.causal,
                                           return_lse=True)

    def prepare(self, order: int, block_q: int = 64, shift: bool = True, windows: int = 1) -> Run:
        """``windows``: queries of a super-tile, in windows."""
        batch, length, heads, kv_heads, head_dim = self.shape
        self.order, self.tiles, self.zeroed = order, -(-length // block_q), order == 1
        self.block_q = block_q
        call = attention_call(self.q, self.k, self.v, self.mask, self.bias, self.causal, None, 0.0, False)
        problem, self.stream = Problem(call), torch.cuda.current_stream().cuda_stream
        self.statistics = torch.empty(2, batch, heads, self.tiles * block_q, device="cuda")
        self.sums = torch.zeros(batch * heads * self.tiles * block_q * head_dim if order else 1, device="cuda")
        self.semaphores = torch.zeros(batch * heads * self.tiles * 2, dtype=torch.int32, device="cuda")
        self.dq, self.dk, self.dv = torch.empty_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.dbias = torch.zeros(batch, heads, length, device="cuda")
        fields: dict[str, Any] = {
            "lse": self.lse.data_ptr(), "dquery": self.dq.data_ptr(), "dkey": self.dk.data_ptr(),
            "dvalue": self.dv.data_ptr(), "dbias": self.dbias.data_ptr()}
        for name, x in (("dout", self.dout), ("out", self.out)):
            fields |= {name: x.data_ptr(), f"{name}_batch": x.stride(0), f"{name}_row": x.stride(1),
                       f"{name}_head": x.stride(2)}
        self.grid = batch * kv_heads * -(-length // BLOCK_N)
        if not self.causal:
            queries = max(256, -(-self.window // 128) * 128) * windows
            capacity = -(-(self.window + queries - 1) // BLOCK_N) * BLOCK_N
            supers = self.supers = intervals._build_supers(cuda.runtime, problem.mask, length, queries, capacity,
                                                           problem.causal, self.stream, None)
            entries = batch * kv_heads * supers.entries
            self.grid = entries // BLOCK_N
            self.partial = [torch.empty(entries * n, device="cuda") for n in (head_dim, head_dim, heads // kv_heads)]
            fields |= supers.fields | dict(zip(("partial_key", "partial_value", "partial_bias"),
                                               (x.data_ptr() for x in self.partial)))
            fields |= {"supers": supers.supers, "super_capacity": supers.capacity, "super_queries": supers.queries,
                       "super_entries": supers.entries}
        self.ranges = torch.zeros(2 * self.grid, dtype=torch.int32, device="cuda")
        self.params = problem.pack(None, **fields)
        describe = library_named("torch").describe
        packed = b"".join(tma.queries_map(describe(x, "rows"), block_q, 1) or b"" for x in (self.q, self.dout))
        packed += self.params + struct.pack(
            "@PPPPii", self.statistics.data_ptr(), self.sums.data_ptr(), self.semaphores.data_ptr(),
            self.ranges.data_ptr(), self.tiles * block_q, self.tiles)
        self.packed = packed + bytes(-len(packed) % 64)
        loaded = module(BLOCK_Q=block_q, SHIFT=int(shift and (order == 1 or not self.causal)),
                        MOST=1 if self.causal else -(-self.supers.capacity // 4096),
                        ELEMENT="__nv_bfloat16", HEAD_DIM=head_dim, STAGES=STAGES, LISTED=int(not self.causal),
                        CAUSAL=int(self.causal), BIAS=int(not self.causal), DQ=order,
                        PRODUCER_REGISTERS=PRODUCER_REGISTERS)
        shared = 2048 + 2 * (2 * BLOCK_N + 2 * STAGES * block_q) * head_dim + STAGES * (8 * block_q + 32) + 16 * BLOCK_N
        if order:
            shared += 2 * 2 * BLOCK_N * block_q + 2 * block_q * head_dim * 2
        self.launches = {}
        for name, size in (("prepare", 0), ("find_ranges", 0), ("backward_kv", shared), ("convert_dq", 0)):
            function = loaded.get_function(name)
            if size > 48 * 1024:
                function.max_dynamic_shared_size_bytes = size
            self.launches[name] = launch.Function(name, function.kernel.ptr, size, False, cupy.cuda.Device(0).use)
        self.keep = loaded
        return self

    def _launch(self, name: str, grid: int, threads: int) -> None:
        self.launches[name].launch(grid, threads, self.packed, self.stream, False)

    def kernel(self) -> None:
        if self.order == 2:
            self.semaphores.zero_()
            self._launch("find_ranges", self.grid, 128)
        self._launch("backward_kv", self.grid, 384)

    def all(self) -> None:
        batch, length, heads, kv_heads, head_dim = self.shape
        if self.zeroed:
            self.sums.zero_()
        self._launch("prepare", -(-batch * self.tiles * self.block_q * heads // 8), 256)
        self.kernel()
        if self.order:
            self._launch("convert_dq", batch * heads * self.tiles, 256)
        if not self.causal:
            config = BackwardReduceConfig(element="__nv_bfloat16", head_dim=head_dim, vector=True, causal=False,
                                          dkey=True, dvalue=True, dbias=True)
            cuda.runtime.load(config, "backward_reduce", 0).launch(batch * kv_heads * -(-length // 8), 256, self.params,
                                                                   self.stream)

    def portable(self) -> Any:
        return dma.backward.attention_backward(self.dout, self.q, self.k, self.v, self.out, self.lse, mask=self.mask,
                                               bias=self.bias, causal=self.causal)

    def check(self) -> None:
        expected = self.portable()
        self.all()
        pairs = {"dk": (self.dk, expected.key), "dv": (self.dv, expected.value)}
        if self.order:
            pairs["dq"] = self.dq, expected.query
        if self.bias is not None:
            batch, length, heads, kv_heads, _ = self.shape
            pairs["dbias"] = self.dbias.view(batch, kv_heads, heads // kv_heads, length).sum(2), expected.bias
        errors = {name: ((a.float() - b.float()).norm() / b.float().norm()).item() for name, (a, b) in pairs.items()}
        first, same = self.dq.clone(), True
        for _ in range(5):
            self.all()
            same &= torch.equal(first, self.dq)
        assert all(error < 1e-3 for error in errors.values()), errors
        print(f"{self.shape} order {self.order}: {errors}, equal bits: {same}")


def milliseconds(call: Callable[[], Any], repeats: int = 10) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def cudnn(batch: int, length: int, heads: int, kv_heads: int, head_dim: int) -> float:
    q, k, v = (torch.randn(batch, h, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for h in (heads, kv_heads, kv_heads))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    dout = torch.randn_like(out)
    return milliseconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))


def main() -> None:
    print(torch.cuda.get_device_name())
    for shape in ((1, 1000, 2, 1, 128, 200), (2, 2048, 4, 2, 128, 256), (1, 2048, 4, 4, 64, 256),
                  (1, 1000, 4, 2, 128, None), (1, 2048, 4, 2, 64, None)):
        for order, block_q in itertools.product((0, 1, 2), (64,) if shape[4] == 128 else (64, 128)):
            Run(*shape).prepare(order, block_q).check()
    for shape in ((1, 32768, 16, 8, 128, 1024), (1, 32768, 16, 8, 64, 1024), (1, 32768, 2, 1, 64, 1024),
                  (1, 16384, 16, 8, 128, None), (1, 16384, 16, 8, 64, None)):
        dense, run = cudnn(*shape[:5]), Run(*shape)
        print(f"{shape}: cuDNN {dense:.3f} ms, portable {milliseconds(run.portable):.3f}", flush=True)
        ways = itertools.product((0, 1, 2), (64,) if shape[4] == 128 else (64, 128), (False, True),
                                 (1, 2) if shape[5] is not None else (1,))
        for order, block_q, shift, windows in ways:
            if shift and order == 0:
                continue
            run.prepare(order, block_q, shift, windows)
            whole = milliseconds(run.all)
            print(f"  order {order}, {block_q} queries, shift {shift}, {windows} windows: "
                  f"kernel {milliseconds(run.kernel):.3f}, all {whole:.3f}, {dense / whole:.2f} times", flush=True)


if __name__ == "__main__":
    main()
