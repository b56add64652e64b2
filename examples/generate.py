"""A language model that generates text in constant memory, and the same text without the cache for comparison.

    python examples/generate.py                                  100,000 tokens on a GPU
    python examples/generate.py --tokens 200 --device cpu        a few, anywhere

The model (``model.py``) is small and untrained. It writes nonsense, but attention is sharp and contributes a lot, so
the text depends on the kept keys.

Generation. Each layer has a ``DynamicCache``: ``window`` rows per kv head, however long the text gets. The prompt is
processed as one chunk, then tokens follow one by one; on a GPU one CUDA graph of a step is replayed for all of them.
Tokens are sampled by adding Gumbel noise to the logits. Rounding must not decide a token, or two computations of the
same model would soon disagree on the text. So each token has DRAWS draws of noise, and uses the draw whose best token
leads by the largest margin. The choice is recorded and reused whenever the text is computed again.

Comparison. Two computations without the cache, with the same weights and random numbers:

1. free run: keeps all keys and values, and selects the best ``window`` of them from scratch for every token. The run
   reads only its own tokens. Its memory and time grow, so it stops after --free tokens.
2. teacher forcing: one pass of the model over the generated text, up to --forced tokens, gives the token that it would
   have written at each position.

Every token must be the same, and memory must not have grown; otherwise the exit status is 1.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import torch
from torch import Tensor

from examples.model import BYTES, FullCache, Model

PROMPT = b"Every query attends to the keys with the highest scores among those before it. "
DRAWS = 16  # per token
TABLES = 1021, 1019  # sizes of two tables of random rows; both are primes, so sums of rows repeat after 1,040,399 draws


class Sampler:
    """Samples a token for each position. ``draw`` records which of the DRAWS draws was used."""

    def __init__(self, tokens: int, device: Any, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.tables = [torch.rand((rows, BYTES), generator=generator).to(device) for rows in TABLES]
        self.draw = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.numbers = torch.arange(DRAWS, device=device)

    def rows(self, positions: Tensor, draws: Tensor) -> Tensor:
        """Gumbel noise ``(n, BYTES)`` of the given draws at the given positions."""
        number = positions * DRAWS + draws
        first, second = (table[number % len(table)] for table in self.tables)
        uniform = ((first + second) % 1).clamp(1e-6, 1 - 1e-6)
        return -(-uniform.log()).log()

    def first(self, logits: Tensor, position: Tensor) -> Tensor:
        """The token ``(1,)`` at ``position (1,)``, from ``logits (1, BYTES)``; the draw is recorded."""
        noisy = logits + self.rows(position, self.numbers)
        two = noisy.topk(2, dim=-1).values
        clearest = (two[:, 0] - two[:, 1]).argmax(0, keepdim=True)
        self.draw.index_copy_(0, position, clearest)
        return noisy.index_select(0, clearest).argmax(-1)

    def again(self, logits: Tensor, positions: Tensor) -> Tensor:
        """``logits (n, BYTES)`` with the noise of the recorded draws; the largest is the token."""
        return logits + self.rows(positions, self.draw[positions])


@dataclass
class Curve:
    """Time and memory along a text, one entry for each block of tokens."""

    position: list[int] = field(default_factory=list)  # at the end of the block
    us: list[float] = field(default_factory=list)  # per token
    bytes: list[int] = field(default_factory=list)  # at the end of the block


def steps(count: int, first: int, block: int, step: Callable[[], Any], memory: Callable[[], int],
          wait: Callable[[], Any]) -> Curve:
    """Call ``step`` ``count`` times, ``block`` at a time; ``first`` is the position of the first token."""
    curve = Curve()
    wait()
    for begin in range(0, count, block):
        size = min(block, count - begin)
        started = time.perf_counter()
        for _ in range(size):
            step()
        wait()
        curve.us.append(1e6 * (time.perf_counter() - started) / size)
        curve.bytes.append(memory())
        curve.position.append(first + begin + size)
    return curve


class Text:
    """Tokens, and the position of the next one, on the device, because a CUDA graph reads it there."""

    def __init__(self, prompt: Tensor, count: int):
        self.tokens = torch.cat((prompt, prompt.new_zeros(count)))
        self.next = torch.full((1,), len(prompt), device=prompt.device)

    def append(self, token: Tensor) -> None:
        self.tokens.index_copy_(0, self.next, token)
        self.next += 1


def start(model: Model, pasts: list[Any], prompt: Tensor, count: int,
          sample: Callable[[Tensor, Tensor], Tensor]) -> tuple[Text, Callable[[], None]]:
    """Processes the prompt and writes one token; returns the text and a function that writes the next one."""
    text = Text(prompt, count)
    logits = model.extend(prompt, torch.arange(len(prompt), device=prompt.device), pasts)
    text.append(sample(logits[-1:], text.next))

    def step() -> None:
        last = text.next - 1
        logits = model.extend(text.tokens.index_select(0, last), last, pasts)
        text.append(sample(logits, text.next))

    return text, step


def generate(model: Model, sampler: Sampler, prompt: Tensor, count: int, block: int) -> tuple[Tensor, Curve, int]:
    """Generate ``count`` tokens after the prompt; returns the text, time and memory, and the size of the caches in
    bytes."""
    caches, cuda = model.caches(), prompt.is_cuda
    size = sum(cache.memory_bytes for cache in caches)
    text, step = start(model, caches, prompt, count, sampler.first)
    if not cuda:
        curve = steps(count - 1, len(prompt) + 1, block, step, lambda: sum(cache.memory_bytes for cache in caches),
                      lambda: None)
        return text.tokens, curve, size
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    warm = min(3, count - 1)
    with torch.cuda.stream(side):
        for _ in range(warm):  # generates real tokens and compiles kernels
            step()
    torch.cuda.current_stream().wait_stream(side)
    if warm == count - 1:
        return text.tokens, Curve(), size
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()  # captured, not run
    curve = steps(count - 1 - warm, len(prompt) + 1 + warm, block, graph.replay, torch.cuda.memory_allocated,
                  torch.cuda.synchronize)
    return text.tokens, curve, size


def free_run(model: Model, sampler: Sampler, prompt: Tensor, count: int, block: int) -> tuple[Tensor, Curve]:
    """The same with a full KV cache, for ``count`` tokens."""
    pasts = [FullCache(layer, len(prompt) + count) for layer in model.layers]
    text, step = start(model, pasts, prompt, count, lambda *x: sampler.again(*x).argmax(-1))

    def memory() -> int:
        return sum(x[:, :past.length].numel() * x.element_size() for past in pasts for x in (past.key, past.value))

    wait = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    return text.tokens, steps(count - 1, len(prompt) + 1, block, step, memory, wait)


def forced(model: Model, sampler: Sampler, tokens: Tensor, first: int) -> tuple[Tensor, float]:
    """The token that the model would have written at each position of ``tokens`` from ``first`` on, given all earlier
    tokens, and the smallest lead of a token over the next best."""
    positions = torch.arange(first, len(tokens), device=tokens.device)
    noisy = sampler.again(model(tokens[:-1])[first - 1:], positions)
    two = noisy.topk(2, dim=-1)
    return two.indices[:, 0], float((two.values[:, 0] - two.values[:, 1]).min())


def plot(path: str, cached: Curve, full: Curve, cache_bytes: int, row_bytes: int) -> str:
    """Plots time per token and memory along the text; returns a message for the user."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is missing (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(cached.position, cached.us, label="DynamicCache", color="tab:blue")
    left.plot(full.position, full.us, label="all keys kept, selected anew", color="tab:orange")
    left.set(xlabel="tokens", ylabel="microseconds per token", title="time")
    left.set_ylim(bottom=0)
    ends = 0, max(cached.position, default=1)
    right.plot(ends, [cache_bytes / 2**20] * 2, label="DynamicCache", color="tab:blue")
    right.plot(ends, [end * row_bytes / 2**20 for end in ends], label="all keys and values", color="tab:orange")
    if cached.bytes and cached.bytes[0] != cache_bytes:
        right.plot(cached.position, [size / 2**20 for size in cached.bytes], label="all that is allocated",
                   color="tab:green")
    right.set(xlabel="tokens", ylabel="MiB", title="memory")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        ax.grid(alpha=0.3)
        ax.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"wrote {path}"


def agreement(what: str, found: Tensor, written: Tensor) -> bool:
    """Print and return whether all tokens are the same."""
    same = found == written
    if bool(same.all()):
        print(f"{what}: all {len(same)} tokens are the same")
        return True
    print(f"{what}: {int((~same).sum())} of {len(same)} tokens DIFFER, the first at {int((~same).nonzero()[0, 0])}")
    return False


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--tokens", type=int, default=100_000, help="tokens to generate (default: 100000)")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dtype", choices=["bfloat16", "float16", "float32"],
                         help="default: bfloat16 on a GPU, float32 on a CPU")
    options.add_argument("--layers", type=int, default=3)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--heads", type=int, default=4)
    options.add_argument("--kv-heads", type=int, default=2)
    options.add_argument("--window", type=int, help="default: 256 on a GPU, 32 on a CPU")
    options.add_argument("--free", type=int, default=4096, help="tokens of the free run (default: 4096)")
    options.add_argument("--forced", type=int, default=2**18, help="tokens to compare by teacher forcing")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", default="generate.png", help="the plot")
    args = options.parse_args(arguments)
    for name in ("tokens", "free", "forced"):
        if getattr(args, name) < 1:
            options.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    cuda = torch.device(args.device).type == "cuda"
    kind = getattr(torch, args.dtype or ("bfloat16" if cuda else "float32"))
    torch.manual_seed(args.seed)
    model = Model(args.layers, args.width, args.heads, args.kv_heads, args.window or (256 if cuda else 32))
    model = model.to(args.device, kind).requires_grad_(False)
    prompt = torch.tensor(list(PROMPT), device=args.device)
    sampler = Sampler(len(prompt) + args.tokens, args.device, args.seed)
    block = max(1, min(1000, args.tokens // 10))
    print(f"{args.layers} layers, width {args.width}, {args.heads}/{args.kv_heads} heads, window {model.window}, "
          f"{kind}, on {args.device}; {len(prompt)} tokens of prompt, {args.tokens} to write", flush=True)

    written, cached, cache_bytes = generate(model, sampler, prompt, args.tokens, block)
    first, ok = len(prompt), True
    row_bytes = 2 * args.layers * args.kv_heads * (args.width // args.heads) * kind.itemsize
    if cached.us:
        part = max(1, len(cached.us) // 10)
        early, late = statistics.median(cached.us[:part]), statistics.median(cached.us[-part:])
        print(f"time per token: {early:.1f} us in the first tenth, {late:.1f} us in the last "
              f"({late / early:.2f} times that)")
        ok = cached.bytes[0] == cached.bytes[-1]
        print(f"memory: {cached.bytes[0] / 2**20:.2f} MiB at first, {cached.bytes[-1] / 2**20:.2f} MiB at the end"
              f"{'' if ok else ', IT GREW'}; caches {cache_bytes / 2**20:.2f} MiB, all keys and values would be "
              f"{len(written) * row_bytes / 2**20:.2f} MiB", flush=True)

    free = min(args.tokens, args.free)
    found, full = free_run(model, sampler, prompt, free, max(1, min(block, free // 10)))
    ok &= agreement(f"free run with all keys kept, the first {free} tokens", found[first:], written[first:first + free])
    several = written[:first + min(args.tokens, args.forced)]
    found, lead = forced(model, sampler, several, first)
    ok &= agreement(f"teacher forcing, one pass over {len(several)} tokens of {len(written)}", found, several[first:])
    print(f"smallest lead of a token over the next best: {lead:.2f} in logits")
    print(plot(args.output, cached, full, cache_bytes, row_bytes))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
