"""``python -m cupy_dma bench``: what this library takes on this machine for one shape, beside torch's SDPA.

    forward, from scores   selection, key lists and attention        SDPA: causal attention over all keys
    forward, mask given    key lists and attention
    backward               gradients of query, key, value and bias   SDPA: of query, key and value
    decode                 one token with a DynamicCache             SDPA: one query over all keys

Inputs are seeded and independent normal. Each call is repeated after a first one that compiles, until its share of the
time is over; the number is the median. On a GPU it is the time between two events around the call, as made from Python:
a short call takes what the host takes. Inputs may be in the L2 cache. The forward output is checked against float64.
"""
from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.cli import picture
from cupy_dma.cli.devices import HostDevice, choose_device
from cupy_dma.cli.exact_rows import RowCheck, check_rows
from cupy_dma.cli.exit import FAILED, complain

OURS, SDPA = "cupy_dma", "torch SDPA"
SCORES, MASK, BACKWARD, DECODE = "forward, from scores", "forward, mask given", "backward", "decode"
MAX_REPEATS, CHECKED_ROWS = 200, 8


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    dtype: str

    def __str__(self) -> str:
        return (f"batch {self.batch}, {self.length:,} tokens, {self.heads} heads over {self.kv_heads}, head dim "
                f"{self.head_dim}, window {self.window}, {self.dtype}")


DEFAULTS = {"cuda": Shape(1, 32768, 16, 8, 128, 1024, "bfloat16"), "numpy": Shape(1, 2048, 4, 2, 64, 256, "float32")}


class Arrays:
    """Where the arrays of a run live: in torch where it reaches the device, otherwise in NumPy or CuPy."""

    def __init__(self, device: HostDevice):
        self.device, self.torch = device, None
        try:
            import torch
        except ImportError:
            return
        if device.name == "numpy" or torch.cuda.is_available():
            self.torch = torch

    def make(self, x: np.ndarray, dtype: str) -> Any:
        if self.torch is None:
            return self.device.xp.asarray(x).astype(numpy_dtype(dtype))
        return self.torch.from_numpy(x).to("cuda" if self.device.name == "cuda" else "cpu",
                                           getattr(self.torch, dtype))

    def to_host(self, x: Any) -> np.ndarray:
        return self.device.to_host(x) if self.torch is None else x.detach().float().cpu().numpy()


def milliseconds(call: Callable[[], Any], seconds: float, device: HostDevice) -> float:
    """The median time of a call."""
    call()  # compiles
    device.wait()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 3 or (len(times) < MAX_REPEATS and time.perf_counter() - started < seconds):
        if device.name == "cuda":
            event = device.xp.cuda.Event
            begin, end = event(), event()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(device.xp.cuda.get_elapsed_time(begin, end))
        else:
            before = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - before))
    return statistics.median(times)


class Problem:
    """The inputs of a shape, and the calls to time."""

    def __init__(self, shape: Shape, arrays: Arrays):
        self.shape, self.arrays = shape, arrays
        rng, b, n = np.random.default_rng(0), shape.batch, shape.length

        def normal(heads: int) -> Any:
            return arrays.make(rng.standard_normal((b, n, heads, shape.head_dim), np.float32), shape.dtype)

        self.query, self.dout = normal(shape.heads), normal(shape.heads)
        self.key, self.value = normal(shape.kv_heads), normal(shape.kv_heads)
        self.scores = arrays.make(rng.standard_normal((b, shape.kv_heads, n), np.float32), "float32")
        self.mask = dma.IntervalMask.top_w(self.scores, shape.window)
        self.out, self.lse = dma.attention(self.query, self.key, self.value, mask=self.mask, bias=self.scores,
                                           return_lse=True)

    def calls(self) -> Iterator[tuple[str, tuple[str, ...], Callable[[], Any]]]:
        """A column, the rows of it that a call fills, and the call."""
        q, k, v, scores = self.query, self.key, self.value, self.scores
        yield OURS, (SCORES,), lambda: dma.dynamic_mask_attention(q, k, v, scores, window=self.shape.window)
        yield OURS, (MASK,), lambda: dma.attention(q, k, v, mask=self.mask, bias=scores)
        yield OURS, (BACKWARD,), lambda: dma.backward.attention_backward(
            self.dout, q, k, v, self.out, self.lse, mask=self.mask, bias=scores)
        cache = dma.DynamicCache(self.shape.batch, self.shape.kv_heads, self.shape.window, self.shape.head_dim, like=k)
        cache.update(k, v, scores)
        last = slice(self.shape.length - 1, None)
        yield OURS, (DECODE,), lambda: cache.extend(q[:, last], k[:, last], v[:, last], scores[:, :, last])
        if self.arrays.torch is None:
            return
        sdpa, grad = self.arrays.torch.nn.functional.scaled_dot_product_attention, self.arrays.torch.autograd.grad
        query, key, value, dout = (x.transpose(1, 2) for x in (q, k, v, self.dout))
        yield SDPA, (SCORES, MASK), lambda: sdpa(query, key, value, is_causal=True, enable_gqa=True)
        yield SDPA, (DECODE,), lambda: sdpa(query[:, :, last], key, value, enable_gqa=True)
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        kept: list[Any] = []  # the output, whose graph the gradients go back through

        def backward() -> Any:
            if not kept:
                kept.append(sdpa(*inputs, is_causal=True, enable_gqa=True))
            return grad(kept[0], inputs, dout, retain_graph=True)

        yield SDPA, (BACKWARD,), backward

    def check(self) -> RowCheck:
        """Rows of the first batch entry against float64."""
        host = self.arrays.to_host
        rows = np.unique(np.linspace(0, self.shape.length - 1, CHECKED_ROWS).astype(int)).tolist()
        out, query, key, value = (host(x)[0].astype(numpy_dtype(self.shape.dtype))
                                  for x in (self.out, self.query, self.key, self.value))
        return check_rows(out, host(self.lse)[0], query, key, value, host(self.scores)[0], self.shape.window, rows,
                          tf32=self.arrays.device.name == "cuda")


def run(shape: Shape, arrays: Arrays, seconds: float) -> tuple[dict[str, dict[str, float | None]], RowCheck]:
    """Milliseconds of each row and column (None: it could not run here), and the check of the output."""
    from tqdm import tqdm

    problem = Problem(shape, arrays)
    found: dict[str, dict[str, float | None]] = {row: {} for row in (SCORES, MASK, BACKWARD, DECODE)}
    for column, rows, call in tqdm(problem.calls(), total=4 if arrays.torch is None else 7, leave=False, disable=None):
        ms = None
        try:
            ms = milliseconds(call, seconds / 7, arrays.device)
        except RuntimeError as error:  # no memory, or no kernel of torch's for this
            if column == OURS:
                raise
            print(f"{column}, {rows[0]}: {str(error).splitlines()[0]}")
        for row in rows:
            found[row][column] = ms
    return found, problem.check()


def table(found: dict[str, dict[str, float | None]]) -> str:
    lines = [f"{'milliseconds':<24}{OURS:>12}{SDPA:>14}{'times as fast':>16}"]
    for row, times in found.items():
        ours, peer = times[OURS], times.get(SDPA)
        assert ours is not None
        lines.append(f"{row:<24}{ours:>12.4g}"
                     + (f"{peer:>14.4g}{peer / ours:>15.3g}x" if peer else f"{'-':>14}{'-':>16}"))
    return "\n".join(lines)


def chart(found: dict[str, dict[str, float | None]], title: str) -> Any:
    """The matplotlib Figure of the table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    ax = figure.subplots()
    for i, column in enumerate((OURS, SDPA)):
        times = [row.get(column) or np.nan for row in found.values()]
        bars = ax.barh(np.arange(len(times)) + 0.2 - 0.4 * i, times, 0.38, label=column)
        ax.bar_label(bars, [f"{ms:.3g}" if ms == ms else "" for ms in times], padding=3)
    ax.set_yticks(range(len(found)), list(found))
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.margins(x=0.15)
    ax.set_xlabel("milliseconds, less is better")
    ax.legend()
    figure.suptitle(title, fontsize="medium", wrap=True)
    return figure


def main(args: Namespace) -> int:
    """0, or 1 if the output is wrong or the chart cannot be written, 2 if the shape cannot run."""
    undrawn = picture.why_not(args.output or "bench.png")
    try:
        device = choose_device(args.backend)
        given = {name: getattr(args, name) for name in Shape.__dataclass_fields__}
        shape = replace(DEFAULTS[device.name], **{name: value for name, value in given.items() if value is not None})
        if shape.heads % shape.kv_heads:
            raise ValueError(f"--heads must be a multiple of --kv-heads, got {shape.heads} and {shape.kv_heads}")
        if undrawn and args.output:
            raise ValueError(f"--output {args.output}: {undrawn}")
        arrays = Arrays(device)
        where = _name_of(device)
        print(f"{shape}\non {where}" + ("" if arrays.torch is not None else "; no torch that reaches it, so no SDPA"))
        if device.name == "numpy":
            print("without a GPU: a small shape on the NumPy backend, which says nothing about the CUDA kernels")
        found, check = run(shape, arrays, args.seconds)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as problem:
        return complain(str(problem))
    print(f"\n{table(found)}\n")
    print(f"check       {'passed' if check.ok else 'FAILED'}: error {check.error:.1e}, allowed {check.allowed:.1e} "
          f"({check.rows} rows against float64)")
    if not undrawn:
        chart(found, f"{shape}, on {where}").savefig(args.output or "bench.png", dpi=120)
    print(f"chart       {'not drawn: ' + undrawn if undrawn else args.output or 'bench.png'}")
    return 0 if check.ok else FAILED


def _name_of(device: HostDevice) -> str:
    if device.name == "numpy":
        return "the CPU (NumPy backend)"
    cupy = device.xp
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
