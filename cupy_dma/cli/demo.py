"""The main job on real input: dynamic mask attention over a long text.

    bytes --embed--> q, k, v --key_scores--> scores --top_w--> mask --attention--> out --> check, picture

There is no training here: the projections are fixed and seeded, but they keep what makes the task real. A byte is
embedded together with the bytes before it, queries and keys share most of their projection (so a query finds places
where the text read alike), rotary positions let nearness count, and the key scores come from the values as the
definition has it. The last kv head has A = 0 (unless it is the only one): all its keys tie and the newest win, so it
is a sliding window.
"""
from __future__ import annotations

import math
import time
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.cli import picture
from cupy_dma.cli.devices import HostDevice, choose_device
from cupy_dma.cli.exact_rows import RowCheck, check_rows
from cupy_dma.cli.exit import FAILED, complain

CONTEXTS = (1, 2, 3)  # how many bytes, up to the present one, each embedding table sees
BUCKETS = 4096  # rows of an embedding table; longer contexts are hashed into it
WIDTH = 128  # of the embedding
CHECKED_ROWS = 48
DENSE_QUERIES = 512  # that speak for all of dense attention on the CPU


def default_text() -> bytes:
    """The documentation topics of the standard library: half a megabyte of English that every Python has."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def read_text(path: str | None, length: int) -> tuple[bytes, str]:
    """The first ``length`` bytes of the file (or of the default text), and what to call it."""
    if path is None:
        return default_text()[:length], "the standard library's documentation topics"
    with open(path, "rb") as file:
        text = file.read(length)
    if not text:
        raise ValueError(f"--file {path} is empty")
    return text, path


@dataclass
class Problem:
    """The tensors of one run, on the device they are used on."""

    query: Any  # (1, N, H, D)
    key: Any  # (1, N, Hkv, D)
    value: Any  # (1, N, Hkv, D)
    dt_proj: Any  # (Hkv, Hkv * D)
    A: Any  # (Hkv,)


def rotate(x: Any, positions: Any, xp: Any) -> Any:
    """Rotary positions: (N, heads, D) float32 to the same; the last D - 2*(D//2) components stay."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-xp.arange(half, dtype=xp.float64) / max(half, 1))
    angle = positions[:, None] * frequency
    cos, sin = xp.cos(angle).astype(xp.float32)[:, None], xp.sin(angle).astype(xp.float32)[:, None]
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return xp.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)


def embed(text: bytes, heads: int, kv_heads: int, head_dim: int, dtype: str, seed: int, xp: Any) -> Problem:
    """q, k, v, dt_proj and A of a text. ``xp`` is numpy or cupy; the same seed gives the same tensors on both, up to
    rounding."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return xp.asarray(rng.standard_normal(shape, dtype=np.float32))

    tables = [normal(BUCKETS, WIDTH) for _ in CONTEXTS]
    shared = normal(WIDTH, kv_heads * head_dim)
    own = normal(WIDTH, heads * head_dim)
    to_value = normal(WIDTH, kv_heads * head_dim)
    dt_proj = normal(kv_heads, kv_heads * head_dim) / math.sqrt(kv_heads * head_dim)
    A = xp.linspace(1.0, 0.0, kv_heads, dtype=xp.float32)

    codes = xp.asarray(np.frombuffer(text, np.uint8).astype(np.int64))
    features = xp.zeros((len(text), WIDTH), xp.float32)
    for table, context in zip(tables, CONTEXTS):
        bucket = codes.copy()
        for back in range(1, context):
            bucket[back:] += codes[:max(len(text) - back, 0)] * 257**back
        features += table[bucket % BUCKETS]
    features /= xp.linalg.norm(features, axis=-1, keepdims=True)

    # A context that occurs again has |k|^2 = |q|^2 = 4 sqrt(D): a logit of about 4 over a background of unit size.
    sharpness = math.sqrt(4 / math.sqrt(head_dim))
    positions = xp.arange(len(text), dtype=xp.float64)
    key = sharpness * (features @ shared).reshape(len(text), kv_heads, head_dim)
    of_query = xp.repeat(shared.reshape(WIDTH, kv_heads, head_dim), heads // kv_heads, axis=1)
    query = sharpness * (features @ (of_query.reshape(WIDTH, -1) + 0.5 * own)).reshape(len(text), heads, head_dim)
    value = (features @ to_value).reshape(len(text), kv_heads, head_dim)
    kind = numpy_dtype(dtype)
    query, key, value = (x[None].astype(kind)
                         for x in (rotate(query, positions, xp), rotate(key, positions, xp), value))
    return Problem(query, key, value, dt_proj.astype(kind), A)


@dataclass
class Result:
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    dense_seconds: float = 0.0  # of attention over all keys
    dense_queries: int = 0  # that were timed for that
    kept_pairs: int = 0  # visible (query, key) pairs, summed over kv heads
    causal_pairs: int = 0
    peak_bytes: int = 0  # largest extra memory of selection and attention, results included
    check: RowCheck | None = None
    figure: Any = None  # of matplotlib, if asked for


def run(text: bytes, device: HostDevice, *, window: int, heads: int, kv_heads: int, head_dim: int, dtype: str,
        seed: int, title: str = "", progress: bool = True) -> Result:
    """All stages, timed; with a ``title`` also a picture. On CUDA the chain runs once before, so that compilation is a
    stage of its own."""
    from tqdm import tqdm

    backend = device.name
    group = heads // kv_heads
    # NumPy takes seconds, so it goes one kv head at a time and the bar shows it; on a GPU one call does all.
    parts = [slice(g, g + 1) for g in range(kv_heads)] if backend == "numpy" else [slice(0, kv_heads)]
    result = Result()
    peaks: list[int] = []
    bar = tqdm(total=4 + 2 * len(parts) + (backend == "cuda") + bool(title), disable=None if progress else True,
               leave=False, bar_format="{desc:<20}{bar:30} {n_fmt}/{total_fmt}  {elapsed}")

    @contextmanager
    def stage(name: str, timed: bool = True):
        bar.set_description_str(name)
        started = time.perf_counter()
        yield
        device.wait()
        if timed:
            result.seconds[name] = result.seconds.get(name, 0.0) + time.perf_counter() - started
        bar.update()

    def attend(mask: Any, part: slice) -> tuple[Any, Any]:
        of_query = slice(part.start * group, part.stop * group)
        return dma.attention(problem.query[:, :, of_query], problem.key[:, :, part], problem.value[:, :, part],
                             mask=mask, bias=scores[:, part], return_lse=True, backend=backend)

    with bar:
        with stage("embed the text"):
            problem = embed(text, heads, kv_heads, head_dim, dtype, seed, device.xp)
        if backend == "cuda":
            with stage("first call, compiles"):
                scores = dma.key_scores(problem.value, problem.dt_proj, problem.A, form="exp")
                attend(dma.IntervalMask.top_w(scores, window=window), parts[0])
                dense_attention(problem, device)
        with stage("key scores"):
            scores = dma.key_scores(problem.value, problem.dt_proj, problem.A, form="exp")
        masks, outs, lses = [], [], []
        with device.peak_memory(peaks):
            for part in parts:
                with stage("selection"):
                    masks.append(dma.IntervalMask.top_w(scores[:, part], window=window))
                with stage("attention"):
                    out, lse = attend(masks[-1], part)
                outs.append(out)
                lses.append(lse)
        with stage("dense attention", timed=False), device.peak_memory([]):  # measured as ours is
            result.dense_seconds, result.dense_queries = dense_attention(problem, device)
        with stage("check"):
            def on_host(arrays: list[Any], axis: int) -> np.ndarray:
                return np.concatenate([device.to_host(array) for array in arrays], axis=axis)[0]

            start = on_host([device.xp.broadcast_to(mask.start, mask.shape) for mask in masks], 1)
            stop = on_host([device.xp.broadcast_to(mask.stop, mask.shape) for mask in masks], 1)
            query, key, value, bias = (device.to_host(x)[0]
                                       for x in (problem.query, problem.key, problem.value, scores))
            result.check = check_rows(on_host(outs, 2), on_host(lses, 1), query, key, value, bias, window,
                                      sample_rows(len(text), seed), start=start, stop=stop,
                                      tf32=device.name == "cuda")
        if title:
            with stage("picture"):
                sliding = (device.to_host(problem.A) == 0).tolist()
                result.figure = picture.make(masks, sliding, len(text), window, title)

    result.peak_bytes = max(peaks)
    result.kept_pairs = sum(int(mask.count(len(text)).sum()) for mask in masks)
    result.causal_pairs = kv_heads * len(text) * (len(text) + 1) // 2
    return result


def dense_attention(problem: Problem, device: HostDevice) -> tuple[float, int]:
    """The seconds that causal attention over all keys takes, and how many queries were timed for that: on the CPU those
    in the middle, which see as many keys as queries do on average."""
    length = problem.query.shape[1]
    timed = length if device.name == "cuda" else min(length, DENSE_QUERIES)
    first = (length - timed) // 2
    last = first + timed
    started = time.perf_counter()
    dma.attention(problem.query[:, first:last], problem.key[:, :last], problem.value[:, :last], causal=True,
                  return_lse=True, backend=device.name)
    device.wait()
    seconds = time.perf_counter() - started
    return seconds * length * (length + 1) / (timed * (first + 1 + last)), timed


def sample_rows(length: int, seed: int) -> list[int]:
    """The first and the last rows and random ones between them."""
    edge = [row for row in (0, 1, length // 2, length - 2, length - 1) if 0 <= row < length]
    drawn = np.random.default_rng(seed + 1).integers(0, length, CHECKED_ROWS - len(edge))
    return sorted({*edge, *drawn.tolist()})


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def report(result: Result, length: int, name: str, args: Namespace, backend: str, dtype: str, drawn: str) -> str:
    """The table that the command prints. ``drawn``: what became of the picture."""
    check = result.check
    assert check is not None
    own = sum(result.seconds[stage] for stage in ("key scores", "selection", "attention"))
    estimated = f", estimated from {result.dense_queries} queries" if result.dense_queries < length else ""
    lines = [
        f"text        {length:,} bytes of {name}",
        f"attention   backend {backend}, {dtype}, {args.heads} heads over {args.kv_heads}, head dim {args.head_dim}, "
        f"window {args.window}",
        "",
        "stage                     seconds",
        *(f"  {stage:<22}{seconds:>9.4f}" for stage, seconds in result.seconds.items()),
        "",
        f"time        {own:.4f} s for key scores, selection and attention; dense attention, causal over all keys, "
        f"takes {result.dense_seconds:.4f} s{estimated}: {result.dense_seconds / own:.1f} times as long",
        f"pairs       {result.kept_pairs:,} kept of {result.causal_pairs:,} causal "
        f"({100 * result.kept_pairs / result.causal_pairs:.2f} %), over the kv heads",
        f"memory      {size(result.peak_bytes)} extra at the peak, results included; "
        f"one dense mask of all kv heads would take {size(args.kv_heads * length**2)}",
        f"output      error {check.error:.2e}, allowed {check.allowed:.2e} (float64 check of {check.rows} rows)",
        f"lse         error {check.lse_error:.2e}, allowed {check.lse_allowed:.2e}",
        f"selection   {'exact' if check.wrong_rows == 0 else f'WRONG in {check.wrong_rows} rows'}",
        f"picture     {drawn}",
        f"check       {'passed' if check.ok else 'FAILED'}",
    ]
    return "\n".join(lines)


def main(args: Namespace) -> int:
    """``python -m cupy_dma demo``. 0 if the check passes, 1 if it fails or the picture cannot be written, 2 if the demo
    cannot run as asked."""
    output = args.output or "mask.png"
    undrawn = picture.why_not(output)
    try:
        if args.heads % args.kv_heads:
            raise ValueError(f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}")
        if undrawn and (args.output or undrawn != picture.NEEDED):
            raise ValueError(f"--output {output}: {undrawn}")
        device = choose_device(args.backend)
        length = args.length or (131072 if device.name == "cuda" else 16384)
        dtype = args.dtype or ("bfloat16" if device.name == "cuda" else "float32")
        text, name = read_text(args.file, length)
    except (ValueError, OSError, RuntimeError) as problem:
        return complain(str(problem))
    title = f"Which keys each query attends to: {len(text):,} bytes of {name}"
    try:
        result = run(text, device, window=args.window, heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim,
                     dtype=dtype, seed=args.seed, title="" if undrawn else title)
    except (ValueError, NotImplementedError, TypeError) as problem:  # what the backend cannot do, in its own words
        return complain(str(problem))
    if result.figure is not None:
        try:
            result.figure.savefig(output, dpi=120)
        except OSError as error:  # a disk that is full
            undrawn = f"{output}: {error.strerror or error}"
    print(report(result, len(text), name, args, device.name, dtype, f"not drawn: {undrawn}" if undrawn else output))
    if result.figure is not None and undrawn:
        return complain(f"cannot write the picture {undrawn}", FAILED)
    return 0 if result.check is not None and result.check.ok else FAILED
