"""A Doge model of transformers with ``attn_implementation="cupy_dma"``, beside its own eager and sdpa attention.

Model: 8 layers of width 1024, 8/4 heads of 128, w = 1024, MLP of 2048, vocabulary 32768, bfloat16, random weights, A
drawn with a deviation of 0.3, so scores differ. Tokens are random permutations of the vocabulary, so hardly any repeat:
repeated tokens tie in layer 0, and eager breaks ties arbitrarily.

prefill: a forward pass of one sequence as ``generate`` runs it, logits of the last token alone. train: forward, loss,
backward and AdamW (fused), with activation checkpointing for all peers (without it the masks of 8 layers do not fit).
decode: time of a new token after a history, as eager forward passes and as a CUDA graph of one pass (``DecodingStep``)
on a ``DynamicMaskCache``; sdpa uses transformers' full cache.

Timing and memory: benchmarks/harness/generation.py.

Check: prefill: the final hidden states of the last 256 tokens are compared with those of the float32 model with
cupy_dma; their relative distance is at most 0.1, and at most eager's where eager fits. train: losses agree with eager's
within 0.05, so eager has to run. decode: the graph's tokens equal those of the eager passes. sdpa is not a reference:
on the GPUs tried its hidden states differ from eager's with the same weights, as the rows show; on a CPU they agree.
"""
import argparse
import copy
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness import generation
from benchmarks.harness.command import Refused, at_least_1, attempted, conclude, listed, write_record
from benchmarks.harness.report import line

CHECKED = 256
PARTS = ("prefill", "train", "decode")
PEERS = ("cupy_dma", "sdpa", "eager")
LENGTHS = {"prefill": (16384, 32768), "train": (16384,), "decode": (4096, 131072)}
SIZES: dict[str, dict[str, int]] = {
    "doge": {"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
             "head_dim": 128, "intermediate_size": 2048, "vocab_size": 32768, "keep_window_size": 1024},
    "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 64, "vocab_size": 600, "keep_window_size": 64}}


class Doge:
    """The model and its measurements."""

    def __init__(self, size: str, device: str):
        import transformers

        import cupy_dma.transformers as dmt

        dmt.register()
        torch.manual_seed(0)
        config = transformers.DogeConfig(**SIZES[size], max_position_embeddings=2**18, bos_token_id=None,
                                         eos_token_id=None, pad_token_id=None)
        self.model = transformers.AutoModelForCausalLM.from_config(config).to(device, torch.bfloat16).eval()
        for layer in self.model.model.layers:
            torch.nn.init.normal_(layer.self_attn.A, std=0.3)
        self.device, self.vocabulary = device, config.vocab_size

    def ids(self, length: int, seed: int = 1) -> Any:
        generator = torch.Generator().manual_seed(seed)
        rows = -(-length // self.vocabulary)
        order = torch.rand(rows, self.vocabulary, generator=generator).argsort(1)
        return order.flatten()[None, :length].to(self.device)

    def hidden(self, model: Any, length: int) -> Any:
        with torch.no_grad():
            return model.model(input_ids=self.ids(length), use_cache=False).last_hidden_state[0, -CHECKED:].float()

    def prefill(self, peer: str, length: int, repeats: int) -> dict[str, Any]:
        self.model.set_attn_implementation(peer)
        found = generation.prefill(self.model, self.ids(length), repeats)
        truth = copy.deepcopy(self.model).float()
        truth.set_attn_implementation("cupy_dma")
        expected = self.hidden(truth, length)
        del truth
        off = (self.hidden(self.model, length) - expected).norm() / expected.norm()
        return {**found, "error": off.item()}

    def train(self, peer: str, length: int, repeats: int) -> dict[str, Any]:
        model = copy.deepcopy(self.model).train()
        model.set_attn_implementation(peer)
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        step, losses = generation.trainer(model, self.ids(length), 1e-4, decay=0.01)
        return {**generation.timed(step, repeats, self.device), "losses": [loss.item() for loss in losses]}

    def decode(self, peer: str, length: int, repeats: int) -> dict[str, Any]:
        import transformers

        from cupy_dma.transformers import DynamicMaskCache

        ours = peer != "sdpa"
        self.model.set_attn_implementation("cupy_dma" if ours else peer)
        cache = (DynamicMaskCache(self.model.config) if ours
                 else transformers.DynamicCache(config=self.model.config))
        latest = generation.filled(self.model, self.ids(length), cache, 16384 if ours else 2048)
        return generation.decode(self.model, cache, latest, peer == "cupy_dma graph", repeats)


def check(rows: list[dict[str, Any]]) -> bool:
    """Whether the rows of one part and length are right; each says so."""
    by = {row["peer"]: row for row in rows if row["ms"] is not None}
    if "cupy_dma" not in by or any(row["ms"] is None for row in rows if row["peer"].startswith("cupy_dma")):
        return False  # a failed graph fails too: the check of decode needs both
    ours, part = by["cupy_dma"], rows[0]["part"]
    if part == "prefill":
        ours["ok"] = ours["error"] <= min(0.1, by["eager"]["error"] + 2**-8 if "eager" in by else 0.1)
    elif part == "train":
        ours["ok"] = "eager" in by and all(
            abs(a - b) <= 0.05 for a, b in zip(ours["losses"], by["eager"]["losses"]))
    else:
        ours["ok"] = "cupy_dma graph" not in by or ours["tokens"] == by["cupy_dma graph"]["tokens"]
    return ours["ok"]


def run(args: argparse.Namespace) -> int:
    at_least_1(args, "repeats")
    if "cupy_dma" not in args.peers:
        raise Refused("--peers must name cupy_dma")
    import transformers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    doge, rows, ok = Doge(args.size, device), [], True
    for part in args.parts:
        for length in args.lengths or LENGTHS[part]:
            peers = args.peers if part != "decode" else ["cupy_dma", *(["cupy_dma graph"] if device == "cuda" else []),
                                                         *(p for p in args.peers if p == "sdpa")]
            group = [{"part": part, "length": length, "peer": peer,
                      **attempted(partial(getattr(doge, part), peer, length, args.repeats))} for peer in peers]
            for row in group:
                tqdm.write(line(row))
            ok &= check(group)
            rows += group
            write_record("transformers_models.partial.json", args, __doc__, rows=rows,
                         transformers=transformers.__version__)
    return conclude("transformers_models", args, __doc__, ok, rows=rows, transformers=transformers.__version__)


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--size", choices=SIZES, default="doge")
    options.add_argument("--parts", type=listed(PARTS), default=list(PARTS))
    options.add_argument("--lengths", type=listed(None, int), help=f"default: {LENGTHS}")
    options.add_argument("--peers", type=listed(PEERS), default=list(PEERS))
    options.add_argument("--repeats", type=int, default=5)
