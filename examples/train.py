"""Train a small byte-level language model with DynamicMaskSelfAttention, save it, load it, and let it write.

    python examples/train.py                          seconds on a CPU: it learns what English looks like, no more
    python examples/train.py --device cuda --steps 3000 --batch 32 --length 512 --layers 4 --width 256 --window 128

The text is the standard library's: the topics of Python's ``help()``. A block is

    x += attention(norm(x)),  x += mlp(norm(x))

Training sees whole pieces of text at once. For writing, every layer has a ``DynamicCache``: the prompt is one call,
then each byte is one, in constant memory however long the text gets.
"""
from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import torch
from torch import Tensor, nn
from tqdm import trange

from cupy_dma.torch import DynamicMaskSelfAttention

BYTES = 256
SIZES = ("layers", "width", "heads", "kv_heads", "window")


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, window: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention = DynamicMaskSelfAttention(width, heads, kv_heads, window, qk_norm=True, form="linear", sinks=1)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        x = x + self.attention(self.norm(x), cache=cache)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, window: int):
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, window) for _ in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, BYTES))

    def forward(self, tokens: Tensor, caches: list[Any] | None = None) -> Tensor:
        """Logits ``(B, N, BYTES)`` of the byte after each of ``tokens (B, N)``; with caches, which are extended, after
        all tokens that they have seen before."""
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, cache)
        return self.head(x)

    def make_caches(self, batch: int) -> list[Any]:
        return [block.attention.make_cache(batch) for block in self.blocks]


def loss_of(model: Model, pieces: Tensor) -> Tensor:
    """Mean cross-entropy in nats of every byte of ``pieces (B, N)`` but the first."""
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def train(model: Model, text: Tensor, steps: int, batch: int, length: int, rate: float) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for step in (bar := trange(steps, desc="training", unit="step", disable=None)):
        for group in optimizer.param_groups:  # warm up, then down to 0
            group["lr"] = rate * min((step + 1) / 10, (1 + math.cos(math.pi * step / steps)) / 2)
        first = torch.randint(len(text) - length, (batch, 1))
        pieces = text[(first + torch.arange(length + 1)).to(text.device)]
        optimizer.zero_grad()
        loss = loss_of(model, pieces)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


@torch.no_grad()
def write(model: Model, prompt: Tensor, count: int, temperature: float) -> Tensor:
    """``prompt (B, N)`` and ``count`` bytes after it."""
    caches, text = model.make_caches(len(prompt)), prompt
    logits = model(prompt, caches)
    for _ in range(count):
        drawn = torch.multinomial((logits[:, -1].float() / temperature).softmax(-1), 1)
        text = torch.cat((text, drawn), 1)
        logits = model(drawn, caches)
    return text


def save(path: Path, model: Model, sizes: dict[str, int]) -> None:
    torch.save({"sizes": sizes, "model": model.state_dict()}, path)


def load(path: Path, device: Any) -> Model:
    saved = torch.load(path, map_location=device, weights_only=True)
    model = Model(**saved["sizes"]).to(device)
    model.load_state_dict(saved["model"])
    return model


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, usual, meaning in (
            ("steps", 100, "training steps"), ("batch", 4, "pieces of text in a step"), ("length", 128, "bytes in a "
             "piece"), ("layers", 2, ""), ("width", 64, ""), ("heads", 4, ""), ("kv-heads", 2, ""),
            ("window", 32, "keys that a query keeps"), ("count", 200, "bytes to write")):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"{meaning} (default: {usual})".strip())
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate at its highest (default: 0.005)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the writing (default: 0.7)")
    parser.add_argument("--prompt", default="The statement ")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("model.pt"), help="where to save the model")
    args = parser.parse_args(arguments)
    for name in ("steps", "batch", "length", "count"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.temperature <= 0:
        parser.error(f"--temperature must be above 0, got {args.temperature}")
    if not args.prompt:
        parser.error("--prompt must not be empty")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    torch.manual_seed(args.seed)
    sizes = {name: getattr(args, name) for name in SIZES}
    model = Model(**sizes).to(args.device)
    text = torch.tensor(list("\n".join(topics.values()).encode()), device=args.device)
    losses = train(model, text, args.steps, args.batch, args.length, args.rate)
    last = losses[-10:]
    print(f"{len(text)} bytes of text; nats per byte: {losses[0]:.2f} at first, {sum(last) / len(last):.2f} in the "
          f"last {len(last)} steps")
    save(args.output, model, sizes)
    model = load(args.output, args.device)
    print(f"wrote {args.output} and loaded it")

    prompt = torch.tensor([list(args.prompt.encode())], device=args.device)
    written = write(model, prompt, args.count, args.temperature)
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
