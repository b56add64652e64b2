"""Train the gates of a pretrained model, so that it keeps fewer keys and predicts what it did.

    python examples/retrofit.py                                    a minute on a CPU: a small random model, on bytes
    python examples/retrofit.py --model DIR notes.txt book.txt --device cuda --dtype bfloat16 --length 8192 --batch 1 \
        --steps 500 --ratio 8 --delay 256 --output gated
    python examples/retrofit.py --model smollm2.gguf *.py --device cuda --length 4096 --output gated
    python examples/retrofit.py --model DIR ... --output gated --resume         after an interruption
    torchrun --nproc-per-node 8 examples/retrofit.py --model DIR ... --device cuda        each with texts of its own

1. A model: ``--model``, a folder or name for ``AutoModelForCausalLM``, or a GGUF file (with the packages gguf and
   accelerate). Without one, a small random Llama on bytes, which shows that everything runs and nothing about quality.
2. ``convert(model, policy="gate")``: the same function at first.
3. ``retrofit.train``: the gates learn, by the predictions of the model without gates, which keys it can do without,
   while the share that they keep falls to ``1 / ratio`` and stays there for the last quarter. The base is frozen.
4. The result is saved in ``--output``, beside ``curves.png`` (divergence and kept share) and the state to resume from.
5. Losses on text held out: all keys, hard gates, and sinks and a window that show as many pairs of query and key.

The text is that of the files, or of Python's ``help()``. Its last tenth is held out.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import matplotlib
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import cupy_dma.transformers as dmt
from cupy_dma import retrofit


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model, in float32 unless asked otherwise, and its tokenizer (None: bytes)."""
    if not args.model:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
        return AutoModelForCausalLM.from_config(config).to(args.device), None
    path, kind = Path(args.model), getattr(torch, args.dtype)
    if path.suffix != ".gguf":
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=kind)
        return model.to(args.device), AutoTokenizer.from_pretrained(args.model)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)} \
        if hasattr(transformers, "GgufConfig") else {}
    model = AutoModelForCausalLM.from_pretrained(**where, **unpacked, dtype=kind)
    if getattr(model, "hf_quantizer", None) is not None:  # its weights are numbers now, to be saved as any others
        model.hf_quantizer.remove_quantization_config(model)
    return model.to(args.device), AutoTokenizer.from_pretrained(**where)


def read(args: argparse.Namespace, tokenizer: Any) -> Tensor:
    """The tokens of all texts, one after the other."""
    texts = [Path(name).read_text(errors="replace") for name in args.texts] or list(topics.values())
    if tokenizer is None:
        return torch.tensor(list("\n".join(texts).encode()))
    return torch.cat([tokenizer(text, return_tensors="pt", verbose=False).input_ids[0] for text in texts])


def pieces(ids: Tensor, args: argparse.Namespace, steps: int, rank: int = 0, ranks: int = 1) -> Iterator[Tensor]:
    """A batch a step, another one on every rank, and the same ones in every run, so that a run can be resumed."""
    if len(ids) <= args.length:
        raise SystemExit(f"the texts must have more than --length {args.length} tokens in both parts, got {len(ids)}")
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * ranks + rank)
        begins = torch.randint(len(ids) - args.length, (args.batch, 1), generator=generator)
        yield ids[begins + torch.arange(args.length)].to(args.device)


@torch.no_grad()
def loss_of(model: Any, ids: Tensor, args: argparse.Namespace) -> float:
    """Nats per token, of the batches of ``--held-out`` steps."""
    losses = [model(input_ids=batch, labels=batch, use_cache=False).loss for batch in pieces(ids, args, args.held_out)]
    return torch.stack(losses).mean().item()


def draw(history: list[dict[str, Any]], path: Path) -> None:
    """Divergence and kept share, step by step."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    steps = [log["step"] for log in history]
    above.plot(steps, [log["kl"] for log in history])
    above.set(ylabel="divergence from the teacher (nats)", yscale="log")
    below.plot(steps, [log["kept"] for log in history], label="mean gate")
    below.plot(steps, [log["target"] for log in history], "--", label="target")
    layers = list(zip(*(log["kept_by_layer"] for log in history)))
    below.fill_between(steps, [min(at) for at in zip(*layers)], [max(at) for at in zip(*layers)], alpha=0.2,
                       label="least and most of a layer")
    below.set(xlabel="step", ylabel="share of keys kept", ylim=(0, 1.02))
    below.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(model: Any, ids: Tensor, args: argparse.Namespace) -> None:
    """Losses on text held out: all keys, those that gates keep, and a window with as many pairs of query and key."""
    gates = retrofit.gates_of(model)
    kept: list[Tensor] = []
    hooks = [gate.register_forward_hook(lambda _, given, found: kept.append(found.kept)) for gate in gates.values()]
    hard = loss_of(model, ids, args)
    for hook in hooks:
        hook.remove()
    share = torch.cat(kept).mean().item()
    with retrofit.open_gates(model):
        full = loss_of(model, ids, args)
    seen = torch.arange(1, args.length + 1)
    pairs = (seen.clamp(max=args.delay) + share * (seen - args.delay).clamp(min=0)).sum()
    window = next(w for w in range(1, args.length + 1) if seen.clamp(max=w).sum() >= pairs or w == args.length)
    control = dmt.convert(load(args)[0].eval(), policy="window", window=window, sinks=args.sinks)
    narrow = loss_of(control, ids, args)
    print(f"held out, {args.length} tokens, nats per token: {full:.4f} with all keys, {hard:.4f} with gates that keep "
          f"{share:.1%} beyond the last {args.delay}, {narrow:.4f} with the last {window} and {args.sinks} first keys")


def joined(args: argparse.Namespace) -> Any:
    """The process group that torchrun asks for, on whose GPU ``args.device`` then is; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    return dist.group.WORLD


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("texts", nargs="*", help="text files; default: the topics of Python's help()")
    options.add_argument("--model", help="a folder or name for from_pretrained, or a GGUF file; default: a small Llama")
    options.add_argument("--output", default="gated", help="folder of the results")
    options.add_argument("--device", default="cpu")
    options.add_argument("--dtype", default="float32", help="of the frozen model; gates are float32")
    options.add_argument("--length", type=int, default=256)
    options.add_argument("--batch", type=int, default=2)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--shrink", type=int, help="steps until the share is 1 / ratio; default: three quarters")
    options.add_argument("--ratio", type=float, default=4.0)
    options.add_argument("--delay", type=int, default=32)
    options.add_argument("--sinks", type=int, default=4)
    options.add_argument("--hidden", type=int, help="width of the gates' hidden layer; default: linear gates")
    options.add_argument("--rate", type=float, help="of learning; default: 3e-5, and 1e-3 for the small Llama")
    options.add_argument("--weight", type=float, default=4.0, help="of the budget loss")
    options.add_argument("--every", type=int, default=50, help="steps between checkpoints and pictures")
    options.add_argument("--held-out", type=int, default=4, help="batches of text held out")
    options.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    args = options.parse_args(arguments)
    group = joined(args)
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)

    model, tokenizer = load(args)
    ids = read(args, tokenizer)
    learned, held_out = ids[:len(ids) * 9 // 10], ids[len(ids) * 9 // 10:]
    dmt.convert(model, policy="gate", delay=args.delay, sinks=args.sinks, hidden=args.hidden)
    history: list[dict[str, Any]] = []

    def note(log: dict[str, Any]) -> None:
        history.append(log)
        if len(history) % args.every == 0 and rank == 0:
            draw(history, folder / "curves.png")

    torch.manual_seed(rank)  # the gates' noise
    history[:] = retrofit.train(
        model, pieces(learned, args, args.steps, rank, ranks), steps=args.steps, shrink=args.shrink, ratio=args.ratio,
        rate=args.rate or (3e-5 if args.model else 1e-3), weight=args.weight, checkpoint=folder / "state.pt",
        every=args.every, resume=args.resume, callback=note, process_group=group)
    if group is not None:
        dist.destroy_process_group()
        if rank:
            return
    draw(history, folder / "curves.png")
    last = history[-1]
    tokens = ranks * sum(log["tokens"] for log in history)
    print(f"{len(history)} steps, {tokens} tokens: divergence {last['kl']:.4f} nats, "
          f"kept {last['kept']:.1%} of a target of {last['target']:.1%}")
    report(model, held_out, args)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    print(f"saved to {folder}: AutoModelForCausalLM.from_pretrained loads it after cupy_dma.transformers.register()")


if __name__ == "__main__":
    main()
