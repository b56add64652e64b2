"""Does a GPU wait for Python inside a training step? Pauses between kernels, eager and compiled into CUDA graphs.

A step is the forward pass and ``torch.autograd.grad`` of the output, for one sequence of 1024 tokens in bfloat16. It
runs the attention alone (``DynamicMaskAttention``, 16/8 heads, D 128), or four decoder layers of width 2048 around it
(harness/decoder.py, without embedding and loss). w = 512 selects and lists keys; with w = 1024 every key is visible.
SDPA (cuDNN) runs in the same place for comparison.

Modes. eager; graphs: ``torch.compile(fullgraph=True, mode="reduce-overhead")``, a CUDA graph for each direction;
captured: the eager step in one CUDA graph.

``STEPS`` steps are queued under torch's profiler, which makes short kernels and pauses longer. A pause is the time from
the end of all earlier kernels to the start of the next, within a step; a step lasts from its first kernel to its last.
Columns, as medians over all steps but the first: the longest pause, the sum of pauses, the step. Also: the longest
pause of all steps, and the two kernels between which the longest pause usually lies. For the attention alone, the
kernels of the last step are listed too.

Check: a compiled step's output and input gradients are within ``NEAR`` of the eager step's, relative to their norm
(roundings differ, and scores near the bound then select other keys); all gradients are finite.
"""
import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import decoder, measure
from benchmarks.harness.command import conclude
from benchmarks.harness.decoder import Sizes

WARM_UP, STEPS = 5, 30
NEAR = 0.1
PARTS = ("attention", "layers")


def pauses(events: list[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """Pauses between the GPU's kernels in ``steps`` equal steps, in microseconds; see the module docstring."""
    each, rest = divmod(len(events), steps)
    if rest or not each:
        raise ValueError(f"events must be the same for each of {steps} steps, got {len(events)} of them")
    longest, total, lengths = [], [], []
    for first in range(each, len(events), each):
        last, _, busy = events[first]
        found = [(0.0, last, last)]
        for name, begin, end in events[first + 1:first + each]:
            found.append((max(0.0, begin - busy), last, name))
            if end > busy:
                last, busy = name, end
        longest.append(max(found))
        total.append(sum(pause for pause, *_ in found))
        lengths.append(busy - events[first][1])
    between = statistics.mode((before[:60], after[:60]) for _, before, after in longest)
    return {"launches": each, "longest_us": statistics.median(pause for pause, *_ in longest),
            "worst_us": max(longest)[0], "between": list(between),
            "pauses_us": statistics.median(total), "step_us": statistics.median(lengths)}


def captured(run: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """``run`` as the replay of a CUDA graph; its results are overwritten by the next call."""
    results: list[Any] = []

    def keep() -> None:
        results[:] = run()

    replay, how = measure.captured(keep)
    if how != "graph":
        raise RuntimeError("the step cannot be captured in a CUDA graph")

    def step() -> tuple[Any, ...]:
        replay()
        return tuple(results)
    return step


def steps_of(module: Any, inputs: list[Any], dout: Any) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """A step in each mode that runs on this machine."""
    wanted = [*inputs, *module.parameters()]

    def step(call: Callable[..., Any]) -> Callable[[], tuple[Any, ...]]:
        def run() -> tuple[Any, ...]:
            out = call(*inputs)
            return (out, *torch.autograd.grad(out, wanted, dout))
        return run

    compiled = step(torch.compile(module, fullgraph=True, dynamic=False, mode="reduce-overhead",
                                  backend=decoder.COMPILER))

    def marked() -> tuple[Any, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled()

    steps = {"eager": step(module), "graphs": marked}
    return {**steps, "captured": captured(steps["eager"])} if measure.on_gpu() else steps


def checked(steps: dict[str, Callable[[], Any]], near: int) -> None:
    """Warm a step up. Raises if a result is not finite, or if the first ``near`` results differ from the eager
    step's."""
    expected: list[Any] = []
    for mode, run in steps.items():
        for _ in range(WARM_UP):
            found = [x.detach().clone() for x in run()]
        expected = expected or found
        if not all(bool(x.isfinite().all()) for x in found):
            raise AssertionError(f"{mode}: not finite")
        for a, b in zip(found[:near], expected):
            if not (a - b).norm() <= NEAR * b.norm():
                raise AssertionError(f"{mode}: {float((a - b).norm() / b.norm()):.3f} from the eager step")


def times(run: Callable[[], Any], with_kernels: bool) -> dict[str, Any]:
    """The pauses of ``STEPS`` steps, and the kernels of the last one; nothing without a GPU."""
    if not measure.on_gpu():
        return {}

    events = measure.gpu_events(lambda: [run() for _ in range(STEPS)])
    found = pauses(events, STEPS)
    if with_kernels:
        found["kernels"] = [[name[:60], round(end - begin, 1)] for name, begin, end in events[-found["launches"]:]]
    return found


def measured(part: str, peer: str, sizes: Sizes, length: int, device: str) -> list[dict[str, Any]]:
    torch.compiler.reset()
    with decoder.decoder(sizes, peer, compiled=False, checkpoint=False, device=device,
                         dtype=torch.bfloat16) as (made, note):
        module: Any = torch.nn.Sequential(*made.blocks)
        shapes: list[tuple[int, ...]] = [(1, length, sizes.width)]
        if part == "attention":
            module = made.blocks[0].attention.attention
            shapes = [(1, length, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
        generator = torch.Generator(device).manual_seed(0)
        *drawn, dout = (torch.randn(shape, device=device, generator=generator).to(torch.bfloat16)
                        for shape in (*shapes, shapes[0]))
        steps = steps_of(module, [x.requires_grad_() for x in drawn], dout)
        checked(steps, 1 + len(drawn))

        of_row = {"part": part, "peer": peer, "window": sizes.window if peer == "dma" else None, "note": note}
        return [{**of_row, "mode": mode, **times(run, part == "attention")} for mode, run in steps.items()]


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--length", type=int, default=1024, help="tokens (default: %(default)s)")
    options.add_argument("--model", choices=decoder.MODELS, default="1.7b", help="decoder (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    device, sizes = "cuda" if measure.on_gpu() else "cpu", decoder.MODELS[args.model]
    peers = ("dma", args.length // 2), ("dma", args.length), ("sdpa", args.length)
    rows = [row for part in PARTS for peer, window in peers
            for row in measured(part, peer, replace(sizes, window=window), args.length, device)]
    return conclude("gaps", args, __doc__, length=args.length, model=args.model, rows=rows)
