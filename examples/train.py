"""Train a small byte-level language model with DynamicMaskSelfAttention, save it, load it and generate text.

    python examples/train.py                          seconds on a CPU: it learns what English looks like, no more
    python examples/train.py --text book.txt --attention dense          the same model with attention to all bytes
    python examples/train.py --resume model.pt        continues an interrupted run from its last checkpoint
    python examples/train.py --device cuda --steps 3000 --batch 32 --length 512 --layers 4 --width 256 --window 128
    torchrun --nproc_per_node 2 examples/train.py --context-parallel --length 65536 --batch 1   each piece over two GPUs

The text is a file of yours or the standard library's: the topics of Python's ``help()``. Its last tenth is held out for
validation. A block is

    x += attention(norm(x)),  x += mlp(norm(x))

Training sees whole pieces of text at once. For generation, every layer has a ``DynamicCache``: one call for the prompt,
then one per byte, in constant memory however long the text gets. With dense attention, included for comparison
(``compare.py``), every byte takes a pass over the whole text.

With ``--context-parallel`` every rank has the same pieces, computes its shard of each, and receives ``window`` keys
from earlier shards; the loss is that of one process.

A run writes ``--output``, the model with everything needed to resume, and a picture of its losses beside it.
"""
from __future__ import annotations

import argparse
import math
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import trange

from cupy_dma.distributed import shard_mean, shard_sequence
from cupy_dma.torch import DynamicMaskSelfAttention

BYTES = 256
KINDS = ("dynamic", "dense", "window")
SIZES = ("layers", "width", "heads", "kv_heads", "window", "recent", "attention")
FIXED = (*SIZES, "seed", "batch", "length", "steps", "rate", "text")  # fixed once a run has started
SAVED = (*FIXED, "validate", "pieces", "save", "autocast", "compile")  # options stored in a checkpoint
HELD_OUT = 0.1  # of the text


class DenseAttention(nn.Module):
    """Causal attention over all bytes in place of a layer's core, ``layer.attention``."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, window: int, recent: int, attention: str):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention = DynamicMaskSelfAttention(width, heads, kv_heads, window, qk_norm=True, form="linear", sinks=1,
                                                  recent=recent)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        if attention == "dense":  # last, so that everything else starts with the same numbers
            self.attention.attention = DenseAttention()
        elif attention == "window":  # A stays 0: a sliding window
            self.attention.attention.requires_grad_(False)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        x = x + self.attention(self.norm(x), cache=cache)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, window: int, recent: int = 0,
                 attention: str = "dynamic"):
        super().__init__()
        self.attention = attention
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, window, recent, attention) for _ in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, BYTES))

    def forward(self, tokens: Tensor, caches: list[Any] | None = None) -> Tensor:
        """Logits ``(B, N, BYTES)`` of the byte after each of ``tokens (B, N)``. With caches, which are extended,
        ``tokens`` continue the text in them."""
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, cache)
        return self.head(x)

    def make_caches(self, batch: int) -> list[Any]:
        return [block.attention.make_cache(batch) for block in self.blocks]


# ---- training -------------------------------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """AdamW, without weight decay for the parameters of the key scores."""
    scores = [x for name, x in model.named_parameters() if name.endswith((".A", ".dt_proj.weight"))]
    others = [x for x in model.parameters() if all(x is not y for y in scores)]
    groups: list[dict[str, Any]] = [{"params": others}]
    if scores:
        groups.append({"params": scores, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=rate)


class Run:
    """A training run: model, data and progress. ``group``: the ranks that share every piece; the first one saves."""

    def __init__(self, args: argparse.Namespace, text: Tensor, group: Any = None):
        torch.manual_seed(args.seed)
        self.args, self.group, self.first = args, group, group is None or dist.get_rank(group) == 0
        self.model = Model(**{name: getattr(args, name) for name in SIZES}).to(args.device)
        self.optimizer = optimizer_of(self.model, args.rate)
        self.pieces = torch.Generator().manual_seed(args.seed)  # draws pieces
        self.losses: list[float] = []  # of each step
        self.validation: list[tuple[int, float]] = []  # steps done, nats per byte
        held_out = max(args.length + 1, int(HELD_OUT * len(text)))
        self.text, self.held_out = text[:-held_out].to(args.device), text[-held_out:].to(args.device)
        for block in self.model.blocks if group is not None else ():
            block.attention.process_group = group
        self.forward: Callable[..., Tensor] = self.model
        if args.compile:  # the exchange between ranks breaks the graph
            self.forward = torch.compile(self.model, fullgraph=group is None)
        if group is not None:
            self.forward = DistributedDataParallel(self.forward, process_group=group)

    def loss_of(self, pieces: Tensor) -> Tensor:
        """Mean cross-entropy in nats of every byte of ``pieces (B, N)`` except the first."""
        ids, targets = pieces[:, :-1], pieces[:, 1:]
        if self.group is not None:
            ids, targets = shard_sequence(ids, self.group), shard_sequence(targets, self.group)
        with torch.autocast(torch.device(self.args.device).type, torch.bfloat16, enabled=self.args.autocast):
            logits = self.forward(ids)
        total = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return total / targets.numel() if self.group is None else shard_mean(total, targets.numel(), self.group)

    def step(self) -> float:
        args, done = self.args, len(self.losses)
        for group in self.optimizer.param_groups:  # warm-up, then decay to 0
            group["lr"] = args.rate * min((done + 1) / 10, (1 + math.cos(math.pi * done / args.steps)) / 2)
        first = torch.randint(len(self.text) - args.length, (args.batch, 1), generator=self.pieces)
        self.optimizer.zero_grad()
        loss = self.loss_of(self.text[(first + torch.arange(args.length + 1)).to(args.device)])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of consecutive pieces of the held-out text, at most ``--pieces`` of them."""
        length, batch = self.args.length, self.args.batch
        count = min((len(self.held_out) - 1) // length, self.args.pieces)
        pieces = self.held_out[torch.arange(count)[:, None] * length + torch.arange(length + 1)]
        losses = [self.loss_of(part) * len(part) for part in pieces.split(batch)]
        return float(torch.stack(losses).sum()) / count

    def train(self) -> None:
        """Run the remaining steps, with a checkpoint every ``--save`` steps."""
        args = self.args
        bar = trange(len(self.losses), args.steps, initial=len(self.losses), total=args.steps, desc="training",
                     unit="step", disable=None if self.first else True)
        for i in bar:
            self.losses.append(self.step())
            if (i + 1) % args.validate == 0 or i + 1 == args.steps:
                self.validation.append((i + 1, self.validate()))
            shown = {"validation": f"{self.validation[-1][1]:.3f}"} if self.validation else {}
            bar.set_postfix(loss=f"{self.losses[-1]:.3f}", **shown)
            if args.output is not None and self.first and ((i + 1) % args.save == 0 or i + 1 == args.steps):
                self.save(args.output)

    def save(self, path: Path) -> None:
        options = {name: getattr(self.args, name) for name in SAVED}
        save(path, self.model, {name: options[name] for name in SIZES}, run={
            "options": options, "optimizer": self.optimizer.state_dict(), "pieces": self.pieces.get_state(),
            "losses": self.losses, "validation": self.validation})

    def resume(self, saved: dict[str, Any]) -> None:
        run = saved["run"]
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(run["optimizer"])
        self.pieces.set_state(run["pieces"].cpu())
        self.losses, self.validation = run["losses"], [tuple(x) for x in run["validation"]]


def draw(path: Path, run: Run) -> None:
    """Plot the losses, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no picture of the losses: matplotlib is missing (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    ax.plot(range(1, len(run.losses) + 1), run.losses, linewidth=0.8, label="training")
    ax.plot(*zip(*run.validation), marker="o", markersize=3, label="validation")
    ax.set_xlabel("steps")
    ax.set_ylabel("nats per byte")
    ax.set_title(f"{run.args.attention} attention, {run.args.length} bytes, seed {run.args.seed}", fontsize=10)
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---- what was trained -----------------------------------------------------------------------------------------------


@torch.no_grad()
def write(model: Model, prompt: Tensor, count: int, temperature: float) -> Tensor:
    """``prompt (B, N)`` and ``count`` bytes after it."""
    caches, text = None if model.attention == "dense" else model.make_caches(len(prompt)), prompt
    logits = model(prompt, caches)
    for _ in range(count):
        drawn = torch.multinomial((logits[:, -1].float() / temperature).softmax(-1), 1)
        text = torch.cat((text, drawn), 1)
        logits = model(text if caches is None else drawn, caches)
    return text


def save(path: Path, model: Model, sizes: dict[str, Any], run: dict[str, Any] | None = None) -> None:
    """Save atomically: an interrupted run leaves the previous checkpoint."""
    new = path.with_name(path.name + ".new")
    torch.save({"sizes": sizes, "model": model.state_dict(), "run": run}, new)
    new.replace(path)


def load(path: Path, device: Any) -> Model:
    saved = torch.load(path, map_location=device, weights_only=True)
    model = Model(**saved["sizes"]).to(device)
    model.load_state_dict(saved["model"])
    return model


def text_of(parser: argparse.ArgumentParser, path: str) -> bytes:
    try:
        return Path(path).read_bytes() if path else "\n".join(topics.values()).encode()
    except OSError as error:
        parser.error(f"--text {path}: {error.strerror}")


def parser_of(description: str, text: str) -> argparse.ArgumentParser:
    """The options of a run; ``text`` is the default text."""
    parser = argparse.ArgumentParser(description=description)
    for name, usual, meaning in (
            ("steps", 100, "training steps"), ("batch", 4, "pieces of text in a step"), ("length", 128, "bytes in a "
             "piece"), ("layers", 2, ""), ("width", 64, ""), ("heads", 4, ""), ("kv-heads", 2, ""),
            ("window", 32, "keys that a query keeps"), ("recent", 8, "last bytes that are kept as well"),
            ("validate", 50, "steps from one validation to the next"),
            ("pieces", 64, "of the held-out text in a validation, at most")):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"{meaning} (default: %(default)s)".strip())
    parser.add_argument("--rate", type=float, default=5e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--text", default="", metavar="FILE", help=f"training text (default: {text})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu, cuda or cuda:1 (default: %(default)s)")
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=False,
                        help="compute in bfloat16, parameters in float32 (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--output", type=Path, default=Path("model.pt"), help="file to write (default: %(default)s)")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, text: bytes) -> None:
    for name in ("steps", "batch", "length", "validate", "pieces", "save"):
        if getattr(args, name, 1) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        parser.error(f"--device must be cpu, cuda or cuda:N of this machine, got {args.device}: "
                     f"{str(error).splitlines()[0]:.80}")
    if not args.output.parent.is_dir() or args.output.is_dir():
        parser.error(f"--output must be a file in a folder that exists, got {args.output}")
    if len(text) < 4 * (args.length + 1):
        parser.error(f"--text must have at least 4 pieces of --length {args.length}, got {len(text)} bytes")


def parsed(arguments: list[str] | None) -> tuple[argparse.Namespace, bytes, dict[str, Any] | None]:
    """The options, the text, and the checkpoint to resume from, which supplies the options of its run."""
    parser = parser_of((__doc__ or "").splitlines()[0], "the topics of help()")
    parser.add_argument("--attention", choices=KINDS, default="dynamic",
                        help="window: dynamic with untrained scores (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--save", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="checkpoint to resume from, with its options")
    parser.add_argument("--context-parallel", action="store_true", help="share every piece among torchrun's processes")
    parser.add_argument("--count", type=int, default=200, help="bytes to write (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.7, help="sampling temperature (default: 0.7)")
    parser.add_argument("--prompt", default="The statement ")
    args, saved = parser.parse_args(arguments), None
    if args.count < 1:
        parser.error(f"--count must be at least 1, got {args.count}")
    if args.temperature <= 0:
        parser.error(f"--temperature must be above 0, got {args.temperature}")
    if args.context_parallel and (args.attention == "dense" or "WORLD_SIZE" not in os.environ):
        parser.error("--context-parallel needs torchrun, and not --attention dense")
    if not args.prompt:
        parser.error("--prompt must not be empty")
    if args.resume is not None:
        try:
            saved = torch.load(args.resume, map_location="cpu", weights_only=True)
            options = saved["run"]["options"]
        except OSError as error:
            parser.error(f"--resume {args.resume}: {error.strerror}")
        except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError):
            parser.error(f"--resume {args.resume} is no checkpoint of this script")
        parser.set_defaults(output=args.resume, **options)
        args = parser.parse_args(arguments)
        for name in FIXED:
            if getattr(args, name) != options[name]:
                parser.error(f"--{name.replace('_', '-')} was {options[name]} when the run began, got "
                             f"{getattr(args, name)}")
    text = text_of(parser, args.text)
    check(parser, args, text)
    return args, text, saved


def main(arguments: list[str] | None = None) -> None:
    args, text, saved = parsed(arguments)
    if args.context_parallel:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    run = Run(args, torch.tensor(list(text)), dist.group.WORLD if args.context_parallel else None)
    if saved is not None:
        run.resume(saved)
        print(f"{args.resume} has done {len(run.losses)} of {args.steps} steps")
    run.train()
    if args.context_parallel:
        dist.destroy_process_group()
    if not run.first:
        return
    draw(args.output.with_suffix(".png"), run)
    first, last = run.losses[0], run.losses[-10:]
    print(f"{len(text)} bytes of text; nats per byte: {first:.2f} at first, {sum(last) / len(last):.2f} in the last "
          f"{len(last)} steps, {run.validation[-1][1]:.3f} on held-out text")
    model = load(args.output, args.device)
    print(f"wrote {args.output} and loaded it")

    prompt = torch.tensor([list(args.prompt.encode())], device=args.device)
    written = write(model, prompt, args.count, args.temperature)
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
