"""Train a small byte-level language model in JAX, with flax.nnx and ``cupy_dma.jax.DynamicMaskAttention``.

    python examples/train_jax.py                       seconds on a CPU: it learns what English looks like, no more
    python examples/train_jax.py --text book.txt --steps 300
    python examples/train_jax.py --device gpu --steps 2000 --batch 32 --length 1024 --width 256 --layers 4 --window 128

The text is a file of yours or the standard library's: the topics of Python's ``help()``. Its last tenth is held out.
A block is

    x += projected(attention(normed queries and keys, values)),  x += mlp(norm(x))

and a step, forward, backward and update, is one jitted function. On a GPU it needs jax for CUDA and CuPy
(``pip install ".[cuda13,jax]" "jax[cuda13]"``).
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cupy_dma.jax import DynamicMaskAttention

BYTES = 256
HELD_OUT = 0.1  # of the text


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, window: int, dtype: Any, rngs: nnx.Rngs):
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.q_norm, self.k_norm = nnx.RMSNorm(self.size, rngs=rngs), nnx.RMSNorm(self.size, rngs=rngs)
        self.qkv = nnx.Linear(width, (heads + 2 * kv_heads) * self.size, use_bias=False, dtype=dtype, rngs=rngs)
        self.attention = DynamicMaskAttention(kv_heads, self.size, window, form="linear", rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, dtype=dtype, rngs=rngs)
        self.up, self.down = (nnx.Linear(a, b, dtype=dtype, rngs=rngs) for a, b in
                              ((width, 4 * width), (4 * width, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        rows = self.qkv(self.norm(x)).reshape(batch, length, -1, self.size)
        q, k, v = jnp.split(rows, (self.heads, self.heads + self.kv_heads), axis=2)
        q, k = self.q_norm(q).astype(v.dtype), self.k_norm(k).astype(v.dtype)
        x = x + self.out(self.attention(q, k, v).reshape(batch, length, width))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        dtype = jnp.dtype(args.dtype)
        self.embed = nnx.Embed(BYTES, args.width, rngs=rngs)
        self.position = nnx.Embed(args.length, args.width, rngs=rngs)
        self.blocks = nnx.List([Block(args.width, args.heads, args.kv_heads, args.window, dtype, rngs)
                                for _ in range(args.layers)])
        self.head = nnx.Linear(args.width, BYTES, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits ``(B, N, BYTES)`` of the byte after each of ``tokens (B, N)``."""
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: Model, pieces: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of every byte of ``pieces (B, N + 1)`` but the first."""
    logits = model(pieces[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, pieces[:, 1:]).mean()


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, pieces: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, pieces)
    optimizer.update(model, gradients)
    return loss


def pieces_of(text: np.ndarray, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` pieces of ``length`` bytes from random places."""
    return text[rng.integers(0, len(text) - length + 1, count)[:, None] + np.arange(length)].astype(np.int32)


def train(args: argparse.Namespace) -> tuple[Model, list[float], float]:
    """The model, the loss of each step, and that of held-out text, in nats per byte."""
    text = np.frombuffer(Path(args.text).read_bytes() if args.text else "\n".join(topics.values()).encode(), np.uint8)
    held_out = max(args.length + 1, int(HELD_OUT * len(text)))
    if len(text) - held_out < args.length + 1:
        raise SystemExit(f"the text has {len(text)} bytes, too few for --length {args.length}")
    rng, model = np.random.default_rng(args.seed), Model(args, nnx.Rngs(args.seed))
    optimizer = nnx.Optimizer(model, optax.adamw(args.rate), wrt=nnx.Param)
    losses = []
    for i in range(args.steps):
        losses.append(step(model, optimizer, pieces_of(text[:-held_out], args.batch, args.length + 1, rng)))
        if (i + 1) % max(args.steps // 10, 1) == 0:
            print(f"step {i + 1:5d}: {float(losses[-1]):.3f} nats per byte")
    unseen = pieces_of(text[-held_out:], 8 * args.batch, args.length + 1, np.random.default_rng(args.seed))
    return model, [float(x) for x in losses], float(nnx.jit(loss_of)(model, unseen))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("steps", 60), ("batch", 8), ("length", 128), ("layers", 2), ("width", 64), ("heads", 4),
                          ("kv-heads", 2), ("window", 32), ("seed", 0)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    options.add_argument("--text", help="a file; by default the topics of Python's help()")
    options.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    options.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                         help="type of activations (default: float32 on a CPU, bfloat16 on a GPU)")
    return options


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    with jax.default_device(jax.devices(args.device)[0]):
        _, losses, unseen = train(args)
    print(f"{args.steps} steps on {args.device}: {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte, {unseen:.3f} on "
          f"text that was held out")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
