"""Doge from transformers with attention in O(N): build, train briefly, save, load, and generate text of any length.

    python examples/doge.py                              a minute on a CPU: it learns what English looks like, no more
    python examples/doge.py --device cuda --steps 2000 --width 256 --layers 4 --window 128 --tokens 100000

The text is the standard library's: the topics of Python's ``help()``, as bytes. With ``attn_implementation="cupy_dma"``
a Doge model computes the same function in O(N): every layer keeps the ``window`` best keys, and ``generate`` stores
only those. The last lines show it: memory and time per token, at the beginning and at the end of the generated text.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import torch
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForCausalLM, DogeConfig

import cupy_dma.transformers as dmt

BYTES = 256


def build(args: argparse.Namespace) -> Any:
    dmt.register()  # registers attn_implementation="cupy_dma"
    config = DogeConfig(vocab_size=BYTES, hidden_size=args.width, intermediate_size=2 * args.width,
                        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=2,
                        keep_window_size=args.window, max_position_embeddings=2**20, bos_token_id=None,
                        eos_token_id=None, pad_token_id=None)
    return AutoModelForCausalLM.from_config(config, attn_implementation="cupy_dma").to(args.device)


def train(model: Any, text: Tensor, args: argparse.Namespace) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.0)
    losses = []
    for _ in (bar := trange(args.steps, desc="training", disable=None)):
        begins = torch.randint(len(text) - args.length, (args.batch, 1))
        ids = text[begins + torch.arange(args.length)].to(args.device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.2f}")
    return losses


def write(model: Any, prompt: str, tokens: int) -> str:
    """Generate text after ``prompt`` in two calls on one cache, the first for a tenth of it; returns time and memory of
    each."""
    ids = torch.tensor([list(prompt.encode())], device=model.device)
    cache = dmt.DynamicMaskCache(model.config)
    for count in (tokens - tokens * 9 // 10, tokens * 9 // 10):
        if not count:
            break
        started = time.perf_counter()
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=True,
                             temperature=0.8, **{dmt.cache_argument(model): cache})
        each = 1e3 * (time.perf_counter() - started) / count
        print(f"{ids.shape[1]:>7} tokens: {each:.2f} ms a token, the cache takes {cache.memory_bytes / 1024:.0f} KiB")
    return bytes(ids[0].tolist()).decode(errors="replace")


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--window", type=int, default=64, help="keys that a query sees (default: 64)")
    options.add_argument("--length", type=int, default=128, help="bytes of a training piece")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--rate", type=float, default=3e-3)
    options.add_argument("--tokens", type=int, default=1000, help="tokens to generate at the end")
    args = options.parse_args(arguments)
    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode()))

    model = build(args)
    losses = train(model, text, args)
    last = sum(losses[-10:]) / len(losses[-10:])
    print(f"loss: {losses[0]:.2f} nats per byte at first, {last:.2f} at the end")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="cupy_dma").to(args.device)
    print(write(model, "The ", args.tokens)[:400])


if __name__ == "__main__":
    main()
