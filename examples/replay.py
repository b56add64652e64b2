"""Reinforcement learning with a cache that drops keys: exact policy gradients of the sampler.

    python examples/replay.py                     seconds on a CPU, with a small new Llama
    python examples/replay.py --capacity 2        fewer open keys: the model without the cache is further off
    python examples/replay.py --device cuda --batch 256 --tokens 200

The sampler uses a ``GatedCache`` whose ``--capacity`` bounds the open keys, so its log-probabilities differ from those
of the model without the cache on the same text. Under ``replay``, one forward pass over all texts sees the same keys as
the cache did, token by token, and gives the sampler's log-probabilities, with gradients. Even tokens are rewarded. Each
step samples, replays, and follows the gradient of REINFORCE, (reward - mean reward) * log p(token). The exit status is
1 if a replay's log-probabilities differ from the sampler's.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import torch
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForCausalLM, LlamaConfig

import cupy_dma.transformers as dmt

VOCABULARY = 64


def build(args: argparse.Namespace) -> Any:
    """A small Llama with random gates, about half of them closed; normally ``cupy_dma.retrofit`` trains gates."""
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, bos_token_id=None,
                         eos_token_id=None, pad_token_id=None)
    model = dmt.convert(AutoModelForCausalLM.from_config(config), policy="gate", delay=args.delay, sinks=1,
                        trainable="all")
    for name, parameter in model.named_parameters():
        if name.endswith("retention_gate.proj.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval().to(args.device)  # open or closed gates, without noise


def sample(model: Any, prompt: Tensor, args: argparse.Namespace) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Texts ``(B, prompt + tokens)``, log-probabilities of the sampled tokens, and the cache's evictions."""
    cache = dmt.GatedCache(model.config, capacity=args.capacity, record_stops=True)
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.tokens, do_sample=True,
                           top_k=0, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
                           **{dmt.cache_argument(model): cache})
    return found.sequences, chosen(torch.stack(found.logits, 1), found.sequences), cache.stops()


def chosen(logits: Tensor, text: Tensor) -> Tensor:
    """Log-probabilities of the last tokens of ``text``, one for each of ``logits``."""
    return logits.log_softmax(-1).gather(2, text[:, -logits.shape[1]:, None])[..., 0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Policy gradients of a sampler whose cache drops keys.")
    parser.add_argument("--steps", type=int, default=10, help="policy-gradient steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="texts per step (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens sampled (default: %(default)s)")
    parser.add_argument("--capacity", type=int, default=4, help="open keys that the cache keeps (default: %(default)s)")
    parser.add_argument("--delay", type=int, default=4, help="newest keys, always kept (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of Adam (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = build(args)
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if "retention_gate" not in name], args.rate)
    rewards, off, without = [], 0.0, 0.0
    for _ in (bar := trange(args.steps, desc="policy gradient", disable=None)):
        prompt = torch.randint(VOCABULARY, (args.batch, args.prompt), device=args.device)
        text, sampled, stops = sample(model, prompt, args)
        with dmt.replay(model, stops):
            logits = model(input_ids=text, use_cache=False).logits
        replayed = chosen(logits[:, args.prompt - 1:-1], text)
        with torch.no_grad():
            alone = chosen(model(input_ids=text, use_cache=False).logits[:, args.prompt - 1:-1], text)
        off = max(off, (replayed - sampled).abs().max().item())
        without = max(without, (alone - sampled).abs().max().item())
        reward = (text[:, args.prompt:] % 2 == 0).float()
        optimizer.zero_grad()
        (-(reward - reward.mean()) * replayed).mean().backward()
        optimizer.step()
        rewards.append(reward.mean().item())
        bar.set_postfix(even=f"{rewards[-1]:.0%}")
    print(f"even tokens: {rewards[0]:.1%} at first, {rewards[-1]:.1%} at the end")
    print(f"log-probabilities differ from the sampler's by {off:.1e}; without its cache's stops by {without:.1e}")
    return int(off > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
