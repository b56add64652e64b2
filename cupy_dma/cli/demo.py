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
import tracemalloc
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends import why_not
from cupy_dma.cli.exact_rows import RowCheck, check_rows
from cupy_dma.cli.exit import complain

CONTEXTS = (1, 2, 3)  # how many bytes, up to the present one, each embedding table sees
BUCKETS = 4096  # rows of an embedding table; longer contexts are hashed into it
WIDTH = 128  # of the embedding
CHECKED_ROWS = 48


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


class HostDevice:
    """What the work runs on: the array module, waiting for the device, and the peak of extra memory."""

    name = "numpy"
    xp: Any = np

    def wait(self) -> None:
        pass

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    @contextmanager
    def peak_memory(self, sink: list[int]):
        """Append the largest number of extra bytes that was allocated at once inside the block."""
        tracemalloc.start()
        try:
            yield
        finally:
            sink.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()


class CudaDevice(HostDevice):
    name = "cuda"

    def __init__(self) -> None:
        import cupy

        self.xp = cupy

    def wait(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def to_host(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)

    @contextmanager
    def peak_memory(self, sink: list[int]):
        class Peak(self.xp.cuda.MemoryHook):  # type: ignore[name-defined]
            name = "cupy_dma peak"
            peak = 0

            def __init__(self):
                self.held: dict[int, int] = {}  # bytes of each block that was allocated since, by its id

            def malloc_postprocess(self, device_id, size, mem_size, mem_ptr, pmem_id):
                self.held[pmem_id] = mem_size
                self.peak = max(self.peak, sum(self.held.values()))

            def free_postprocess(self, device_id, mem_size, mem_ptr, pmem_id):
                self.held.pop(pmem_id, None)

        with Peak() as hook:
            yield
        sink.append(hook.peak)


@dataclass
class Result:
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    kept_pairs: int = 0  # visible (query, key) pairs, summed over kv heads
    causal_pairs: int = 0
    peak_bytes: int = 0  # largest extra memory of selection and attention, results included
    check: RowCheck | None = None
    picture: str = ""


def choose_device(backend: str | None) -> HostDevice:
    """cuda where there is a GPU, numpy otherwise; an explicit choice that cannot run raises."""
    if backend is None:
        backend = "numpy" if why_not("cuda") else "cuda"
    reason = why_not(backend)
    if reason:
        raise RuntimeError(f"--backend {backend} cannot run here: {reason}")
    return HostDevice() if backend == "numpy" else CudaDevice()


def run(text: bytes, device: HostDevice, *, window: int, heads: int, kv_heads: int, head_dim: int, dtype: str,
        seed: int, output: str, progress: bool = True) -> Result:
    """All stages, timed. On CUDA the chain runs once before, so that compilation is a stage of its own."""
    from tqdm import tqdm

    backend = device.name
    group = heads // kv_heads
    # NumPy takes seconds, so it goes one kv head at a time and the bar shows it; on a GPU one call does all.
    parts = [slice(g, g + 1) for g in range(kv_heads)] if backend == "numpy" else [slice(0, kv_heads)]
    result = Result()
    peaks: list[int] = []
    bar = tqdm(total=4 + 2 * len(parts) + (backend == "cuda"), disable=None if progress else True, leave=False,
               bar_format="{desc:<20}{bar:30} {n_fmt}/{total_fmt}  {elapsed}")

    @contextmanager
    def stage(name: str):
        bar.set_description_str(name)
        started = time.perf_counter()
        yield
        device.wait()
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
        with stage("picture"):
            result.picture = draw(masks, kv_heads, len(text), output)

    result.peak_bytes = max(peaks)
    result.kept_pairs = sum(int(mask.count(len(text)).sum()) for mask in masks)
    result.causal_pairs = kv_heads * len(text) * (len(text) + 1) // 2
    return result


def sample_rows(length: int, seed: int) -> list[int]:
    """The first and the last rows and random ones between them."""
    edge = [row for row in (0, 1, length // 2, length - 2, length - 1) if 0 <= row < length]
    drawn = np.random.default_rng(seed + 1).integers(0, length, CHECKED_ROWS - len(edge))
    return sorted({*edge, *drawn.tolist()})


def draw(masks: list[Any], kv_heads: int, length: int, output: str) -> str:
    """Write a picture of the mask of each kv head (at most four); returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return "not drawn: matplotlib is missing (pip install matplotlib, or the extra cupy_dma[plot])"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = min(kv_heads, 4)
    figure, axes = plt.subplots(1, shown, figsize=(5.5 * shown, 5.5), squeeze=False, layout="constrained")
    for g, ax in enumerate(axes[0]):
        mask, head = (masks[g], 0) if len(masks) == kv_heads else (masks[0], g)
        mask.plot(length, head=head, ax=ax)
        ax.set_title(f"kv head {g}")
    try:
        figure.savefig(output, dpi=120)
    except (OSError, ValueError) as error:  # no such folder, no right to write, no such format
        return f"not drawn: {error}"
    finally:
        plt.close(figure)
    return output


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def report(result: Result, length: int, name: str, args: Namespace, backend: str, dtype: str) -> str:
    """The table that the command prints."""
    check = result.check
    assert check is not None
    lines = [
        f"text        {length:,} bytes of {name}",
        f"attention   backend {backend}, {dtype}, {args.heads} heads over {args.kv_heads}, head dim {args.head_dim}, "
        f"window {args.window}",
        "",
        "stage                     seconds",
        *(f"  {stage:<22}{seconds:>9.4f}" for stage, seconds in result.seconds.items()),
        "",
        f"pairs       {result.kept_pairs:,} kept of {result.causal_pairs:,} causal "
        f"({100 * result.kept_pairs / result.causal_pairs:.2f} %), over the kv heads",
        f"memory      {size(result.peak_bytes)} extra at the peak, results included; "
        f"one dense mask of all kv heads would take {size(args.kv_heads * length**2)}",
        f"output      error {check.error:.2e}, allowed {check.allowed:.2e} (float64 check of {check.rows} rows)",
        f"lse         error {check.lse_error:.2e}, allowed {check.lse_allowed:.2e}",
        f"selection   {'exact' if check.wrong_rows == 0 else f'WRONG in {check.wrong_rows} rows'}",
        f"picture     {result.picture}",
        f"check       {'passed' if check.ok else 'FAILED'}",
    ]
    return "\n".join(lines)


def main(args: Namespace) -> int:
    """``python -m cupy_dma demo``. 0 if the check passes, 1 if it fails, 2 if the demo cannot run as asked."""
    try:
        for name in ("window", "heads", "kv_heads", "head_dim"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
        if args.length is not None and args.length < 1:
            raise ValueError(f"--length must be at least 1, got {args.length}")
        if args.heads % args.kv_heads:
            raise ValueError(f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}")
        device = choose_device(args.backend)
        length = args.length or (131072 if device.name == "cuda" else 16384)
        dtype = args.dtype or ("bfloat16" if device.name == "cuda" else "float32")
        text, name = read_text(args.file, length)
    except (ValueError, OSError, RuntimeError) as problem:
        return complain(str(problem))
    try:
        result = run(text, device, window=args.window, heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim,
                     dtype=dtype, seed=args.seed, output=args.output)
    except (ValueError, NotImplementedError, TypeError) as problem:  # what the backend cannot do, in its own words
        return complain(str(problem))
    print(report(result, len(text), name, args, device.name, dtype))
    return 0 if result.check is not None and result.check.ok else 1
