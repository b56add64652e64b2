"""Convert a trained model to dynamic masks: outputs do not change at first; then train it with a small window.

    python examples/convert_and_finetune.py                  a minute on a CPU, with a small new Llama
    python examples/convert_and_finetune.py --model DIR --device cuda --length 4096 --window 512 --recent 512

1. A model with dense attention: ``--model``, a folder or name for ``AutoModelForCausalLM``, or a small Llama on bytes
   that is trained first.
2. ``convert`` with a window of at least the length: the logits do not change.
3. ``convert`` with a small ``--window`` and the last ``--recent`` keys: queries no longer see everything. Recent keys
   matter: at first all scores are equal and the newest keys are kept, but training moves the scores and then keeps
   others. Without ``recent`` the loss rises then (try ``--window 32 --recent 0``).
4. Train further, including the scores. The result is saved, and loads like any other model.

The text is the standard library's: the topics of Python's ``help()``, as bytes or in the model's own tokens.
"""
from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import torch
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import cupy_dma.transformers as dmt


def load(args: argparse.Namespace) -> tuple[Any, Tensor]:
    """The model and the tokens of the text."""
    text = "\n".join(topics.values())
    if args.model:
        ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[0]
        return AutoModelForCausalLM.from_pretrained(args.model).to(args.device), ids
    config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
    return AutoModelForCausalLM.from_config(config).to(args.device), torch.tensor(list(text.encode()))


def pieces(ids: Tensor, args: argparse.Namespace, count: int, seed: int) -> Tensor:
    begins = torch.randint(len(ids) - args.length, (count, 1), generator=torch.Generator().manual_seed(seed))
    return ids[begins + torch.arange(args.length)].to(args.device)


def train(model: Any, ids: Tensor, args: argparse.Namespace, steps: int, rate: float, title: str,
          first: int = 1) -> None:
    """Train with AdamW on the pieces from number ``first`` on. Parameters of the scores, which start untrained, learn
    ten times as fast."""
    scores = [p for name, p in model.named_parameters() if name.endswith((".A", ".dt_proj.weight"))]
    known = {id(p) for p in scores}
    groups = [{"params": [p for p in model.parameters() if id(p) not in known], "lr": rate},
              {"params": scores, "lr": 10 * rate}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)
    model.train()
    for step in (bar := trange(steps, desc=title, disable=None)):
        batch = pieces(ids, args, args.batch, first + step)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    model.eval()


@torch.no_grad()
def loss_of(model: Any, batch: Tensor) -> float:
    return model.eval()(input_ids=batch, labels=batch, use_cache=False).loss.item()


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--model", help="a folder or name for from_pretrained; default: a small Llama")
    options.add_argument("--device", default="cpu")
    options.add_argument("--length", type=int, default=128)
    options.add_argument("--window", type=int, default=16, help="best keys that a query sees (default: 16)")
    options.add_argument("--recent", type=int, default=16, help="newest keys that it also sees (default: 16)")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--steps", type=int, default=60, help="training steps after conversion")
    options.add_argument("--before", type=int, default=100, help="training steps of the small Llama")
    options.add_argument("--rate", type=float, default=5e-4, help="learning rate after conversion")
    options.add_argument("--output", default="converted", help="folder of the result")
    args = options.parse_args(arguments)
    torch.manual_seed(0)
    dense, ids = load(args)
    if not args.model:
        train(dense, ids, args, args.before, 3e-3, "dense")
    held_out = pieces(ids, args, 4 * args.batch, 0)
    with torch.no_grad():
        expected = dense(input_ids=held_out[:1], use_cache=False).logits
        same = dmt.convert(copy.deepcopy(dense), window=args.length)
        off = (same(input_ids=held_out[:1], use_cache=False).logits - expected).abs().max().item()
    dense_loss = loss_of(dense, held_out)
    print(f"dense: loss {dense_loss:.3f}; converted, window {args.length}: {loss_of(same, held_out):.3f}, logits "
          f"differ by {off:.1e} at most")

    model = dmt.convert(dense, window=args.window, sinks=1, recent=args.recent)
    cut, title = loss_of(model, held_out), f"the best {args.window} and last {args.recent} keys"
    train(model, ids, args, args.steps, args.rate, title, 1 + args.before)
    trained = loss_of(model, held_out)
    print(f"{title}: loss {cut:.3f}, after {args.steps} steps {trained:.3f}")

    model.save_pretrained(args.output)
    loaded = AutoModelForCausalLM.from_pretrained(args.output).to(args.device)
    print(f"saved to {args.output}; loaded: loss {loss_of(loaded, held_out):.3f}")
    return 0 if off < 1e-2 * expected.abs().max().item() else 1


if __name__ == "__main__":
    sys.exit(main())
