"""Time, memory and the record of the machine, for every benchmark.

GPU time: the call is captured in a CUDA graph after three warm-up calls, so that host time plays no part; before each
replay a 256 MiB buffer is overwritten, which empties the L2 cache; CUDA events stand around the replay alone; the
result is the median. A call that cannot be captured is timed without a graph, and the row says so. Replays fill
``BUDGET_MS``, but number at least 5 and at most 30. All are queued behind two milliseconds of work, so a delayed host
(a shared one may pause for seconds) does not add time between two events.

Decode steps take microseconds, so several steps, each on its own arrays, run in one graph between two events; the L2
cache holds what earlier steps left in it (``steps_ms``).

Host time: wall time of many calls that are queued without waiting, divided by their number; the fastest of twenty
rounds, because a shared host has phases of seconds in which everything takes 1.5 times as long.
End to end: wall time from one call until it has finished, median of 50.

Peak memory: the largest ``torch.cuda.max_memory_allocated`` over one call, less what was allocated before it, results
included.

Without a GPU everything runs on the CPU with a plain clock, only to try the scripts out.
"""
import datetime
import gc
import importlib
import itertools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cupy_dma.torch.capture import uncollected

Call = Callable[[], Any]
ROOT = Path(__file__).resolve().parents[2]
BUDGET_MS = 60.0  # per measurement
FLUSH_BYTES = 256 * 2**20
LEAD_FLUSHES = 20  # two milliseconds on an H100


def on_gpu() -> bool:
    return torch.cuda.is_available()


def synchronize() -> None:
    if on_gpu():
        torch.cuda.synchronize()


_flush: list[Any] = []


def flush_l2() -> None:
    if not _flush:
        _flush.append(torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda"))
    _flush[0].zero_()


def gpu_ms(call: Callable[[], Any], setup: Callable[[], Any] | None = None) -> tuple[float, str]:
    """Median milliseconds of ``call`` and how they were measured ("graph", "events" or "cpu clock").

    ``setup`` runs, untimed, before every recorded execution of ``call``. With a graph it runs once, before the capture,
    so it may only change what the host does (such as discarding a cached result).
    """
    setup = setup or (lambda: None)
    if not on_gpu():
        samples = []
        for _ in range(3):
            setup()
            samples.append(wall_ms(call))
        return statistics.median(samples), "cpu clock"

    run, how = captured(call, setup)
    return _median_ms(run), how


def steps_ms(calls: Sequence[Callable[[], Any]]) -> tuple[float, str]:
    """Median milliseconds of one of ``calls``, which run one after the other in one graph, and how it was measured.

    For calls of microseconds, which are short beside a replay of their own. The L2 cache is not emptied in between:
    each of ``calls`` should use its own arrays, together larger than the cache.
    """
    def run() -> None:
        for call in calls:
            call()

    if not on_gpu():
        ms, how = gpu_ms(run)
    else:
        replay, how = captured(run)
        ms = _median_ms(replay, flush=False)
    return ms / len(calls), how


def captured(call: Callable[[], Any], setup: Callable[[], Any] = lambda: None) -> tuple[Callable[[], Any], str]:
    """Warm ``call`` up and return the replay of its CUDA graph and "graph", or ``call`` itself and "events" or "cpu
    clock"."""
    if not on_gpu():
        return call, "cpu clock"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            setup()
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    # Later compilation frees cuBLAS workspaces, so the graph gets its own, which live as long as the graph.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        setup()
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph, stream=side):
            kept = call()
    except Exception as error:
        torch.cuda.synchronize()
        print(f"    (not captured: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")

        def run() -> None:
            setup()
            call()

        return run, "events"

    def replay(keep: Any = kept) -> None:  # the graph's outputs live as long as this function
        graph.replay()

    return replay, "graph"


def _median_ms(run: Callable[[], Any], flush: bool = True) -> float:
    run()
    first, = _event_ms(run, 1, flush)
    count = max(5, min(30, int(BUDGET_MS / max(first, 1e-3))))
    if first > 200:
        count = 2
    return statistics.median(_event_ms(run, count, flush))


def _event_ms(run: Callable[[], Any], count: int, flush: bool) -> list[float]:
    for _ in range(LEAD_FLUSHES):
        flush_l2()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        if flush:
            flush_l2()
        start.record()
        run()
        end.record()
    synchronize()
    return [start.elapsed_time(end) for start, end in events]


def host_us(call: Callable[[], Any], calls: int = 100, rounds: int = 20) -> float:
    """Microseconds of host time per call, without waiting for the GPU."""
    for _ in range(10):
        call()
    found = []
    for _ in range(rounds):
        synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - started) / calls)
    synchronize()
    return min(found)


def by_turns(calls: dict[str, Call], turns: int, time_of: Callable[[Call], float]) -> dict[str, list[float]]:
    """``time_of`` each call in each turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            found[name].append(time_of(call))
    return found


def wall_ms(call: Call) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def step_times(step: Callable[[], Any], steps: int, device: str) -> list[float]:
    """Milliseconds of each of ``steps`` calls; on a GPU, between events in the stream, without waiting."""
    if not device.startswith("cuda"):
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def timed(step: Callable[[], Any], steps: int, device: str, beyond: bool = False) -> dict[str, Any]:
    """``step_times``, their median and their peak memory (0 without a GPU). ``beyond``: subtract what was allocated
    before."""
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_cuda and beyond else 0
    found = step_times(step, steps, device)
    peak = torch.cuda.max_memory_allocated() - before if on_cuda else 0
    return {"ms": statistics.median(found), "all_ms": found, "peak_bytes": peak}


def gpu_events(call: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of each kernel that ``call`` runs, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        synchronize()
    found = [e for e in seen.events() if str(e.device_type).endswith("CUDA")]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in found), key=lambda event: event[1])


def waited_us(call: Callable[[], Any], calls: int = 50) -> float:
    """Median microseconds from the start of ``call`` until its results are ready."""
    samples = []
    # Synchronizing the device or asking for the current stream would add microseconds.
    wait = torch.cuda.current_stream().synchronize if on_gpu() else synchronize
    for _ in range(3 + calls):
        synchronize()
        started = time.perf_counter()
        call()
        wait()
        samples.append(1e6 * (time.perf_counter() - started))
    return statistics.median(samples[3:])


def peak_bytes(call: Callable[[], Any]) -> int:
    """Largest extra device memory during ``call``, results included; 0 without a GPU."""
    if not on_gpu():
        call()
        return 0
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def free_memory() -> None:
    """Release cached memory of the GPU."""
    if on_gpu():
        gc.collect()
        torch.cuda.empty_cache()


def free_bytes() -> float:
    """Free memory of the GPU; without one there is always enough."""
    return torch.cuda.mem_get_info()[0] if on_gpu() else float("inf")


def machine() -> dict[str, Any]:
    """Versions, device, clocks, commit and date, without which a number means nothing."""
    versions = {"python": platform.python_version()}
    for name in ("numpy", "torch", "cupy", "triton"):
        try:
            versions[name] = importlib.import_module(name).__version__
        except ImportError:
            continue
    versions["torch_cuda"] = str(torch.version.cuda)
    device = platform.processor() or platform.machine()
    if on_gpu():
        device = torch.cuda.get_device_name()
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return {"device": device, "versions": versions, "driver": _query("driver_version"),
            "clocks_mhz": _query("clocks.sm,clocks.mem,clocks.max.sm"), "commit": commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}


def _query(fields: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", "0"],
                              capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str:
    """The commit of the tree, marked if files were changed since; empty outside a repository."""
    try:
        def git(*words: str) -> str:
            return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True,
                                  timeout=20).stdout.strip()

        changed = git("status", "--porcelain", "--untracked-files=no", "--", "kernels", "cupy_dma")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""
