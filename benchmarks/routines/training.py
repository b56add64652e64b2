"""Training steps of a decoder with dynamic mask attention, beside the same model with dense and with FlexAttention.

Models (harness/decoder.py), bfloat16 with a fused AdamW of the same type, weight decay 0.1. 80m: the shape of the
original paper's model, 12 layers of width 768, 6/3 heads, D 128, w = 1024, MLP of 1536, vocabulary 32768, rate 3e-4.
1.7b: 4 layers of a 1.7B model, width 2048, 16/8 heads, D 128, w = 1024, MLP of 6144, rate 5e-5 (at 3e-4 without warm-up
it diverges, with dense attention too). A starts at 0.1, so scores differ. Every step draws new tokens, the r-th 1/r
times as often as the first, the same for all peers.

Peers. dma: cupy_dma. sdpa: causal scaled_dot_product_attention over all keys (more work), by cuDNN where it provides
gradients. flex: the same selection with compiled FlexAttention; every step builds the block mask. none: query + key +
value in place of attention. The rest of the model is the same, and shared parameters start with the same values.

Modes. eager; compile: each layer and the loss in one graph each (flex compiles its core separately); checkpoint and
compile+checkpoint: with each layer recomputed in the backward pass. The logits are always recomputed.

A step has at least ``--tokens`` tokens in sequences of one length. ``WARM_UP`` steps compile the kernels, then
``--steps`` steps are queued without waiting, with CUDA events between them; the median counts. Peak memory includes
model and optimizer. Share of attention: 1 - t(none) / t(peer), in the same mode.

Check: all losses are finite, and each is at most ``NEAR`` nats from the median of the rows, in any mode, that compute
the same attention; dma and flex do. The table shows no numbers of a failed row, and the run fails unless that row is
flex's.
"""
import argparse
import itertools
import math
import statistics
import time
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness import decoder, measure
from benchmarks.harness.command import Refused, at_least_1, attempted, conclude, listed, write_record
from benchmarks.harness.decoder import Sizes
from benchmarks.harness.report import line

LENGTHS = (2048, 8192, 32768, 131072)
PEERS = ("none", "dma", "sdpa", "flex")
MODES = ("eager", "compile", "checkpoint", "compile+checkpoint")
WARM_UP = 2
NEAR = 0.02  # nats


def trained(sizes: Sizes, peer: str, mode: str, batch: int, length: int, steps: int, device: str) -> dict[str, Any]:
    """Train one peer for a few steps; its row."""
    options = {"compiled": mode.startswith("compile"), "checkpoint": mode.endswith("checkpoint")}
    with decoder.decoder(sizes, peer, device=device, dtype=torch.bfloat16, **options) as (model, note):
        upcoming = iter([decoder.batch_of(sizes, batch, length, i, device) for i in range(WARM_UP + steps)])
        step, losses = decoder.trainer(lambda: model(next(upcoming)), model.parameters(), sizes.learning_rate)
        started = time.perf_counter()
        for _ in range(WARM_UP):
            step()
        losses[-1].item()  # waits
        warm_up = time.perf_counter() - started
        found = measure.timed(step, steps, device)
        return {**found, "tokens_per_second": 1e3 * batch * length / found["ms"], "warm_up_s": warm_up,
                "peak_bytes": found["peak_bytes"] or None,
                "losses": [loss.item() for loss in losses], "note": note,
                "parameters": sum(x.numel() for x in model.parameters())}


def check(rows: list[dict[str, Any]]) -> bool:
    """Mark rows whose losses differ from other rows of the same model and length. Returns whether all rows but flex's
    are right."""
    for row in rows:
        if row["ms"] is None:
            continue
        same = [other["losses"] for other in rows if other["ms"] is not None and like(other) == like(row)]
        for loss, *others in zip(row["losses"], *same):
            row["ok"] = abs(loss - statistics.median([x for x in others if math.isfinite(x)] or [loss])) <= NEAR
            if not row["ok"]:
                row["note"] = f"wrong loss {loss:.3f}" + (f", {row['note']}" if row["note"] else "")
                break
    return all(row.get("ok", True) for row in rows if row["peer"] != "flex")


def like(row: dict[str, Any]) -> tuple[Any, ...]:
    """Model, length and what the attention computes."""
    return row["model"], row["length"], "dma" if row["peer"] == "flex" else row["peer"]


def add_shares(rows: list[dict[str, Any]]) -> None:
    """Add the share of attention in the step."""
    rest = {row["mode"]: row["ms"] for row in rows if row["peer"] == "none"}
    for row in rows:
        without = rest.get(row["mode"])
        if row["ms"] and without and row["peer"] != "none":
            row["attention_share"] = 1 - without / row["ms"]


def run(args: argparse.Namespace) -> int:
    wrong = [n for n in args.lengths if n < 128 or n % 128]
    if wrong:
        raise Refused(f"--lengths must be multiples of 128, got {wrong[0]}")
    at_least_1(args, "steps", "tokens")
    deadline, ok = time.monotonic() + args.seconds, True
    rows: list[dict[str, Any]] = []
    for name, length in (bar := tqdm(list(itertools.product(args.models, args.lengths)), unit="case", disable=None)):
        batch, sizes = max(1, args.tokens // length), decoder.MODELS[name]
        group = []
        for mode, peer in itertools.product(args.modes, args.peers):
            bar.set_postfix_str(f"{name} {length} {mode} {peer}")
            found = {"ms": None, "note": "no time left"}
            if time.monotonic() <= deadline:
                torch.compiler.reset()
                found = attempted(partial(trained, sizes, peer, mode, batch, length, args.steps, args.device))
            group.append({"model": name, "length": length, "batch": batch, "peer": peer, "mode": mode, **found})
            tqdm.write(line(group[-1]))
        ok &= check(group)
        add_shares(group)
        rows += group
        write_record("training.partial.json", args, __doc__, rows=rows)
    return conclude("training", args, __doc__, ok, rows=rows)


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--models", type=listed(tuple(decoder.MODELS)), default=["80m", "1.7b"])
    options.add_argument("--lengths", type=listed(None, int), default=list(LENGTHS), help="multiples of 128")
    options.add_argument("--peers", type=listed(PEERS), default=list(PEERS), help="shares need the peer none")
    options.add_argument("--modes", type=listed(MODES), default=list(MODES))
    options.add_argument("--steps", type=int, default=5, help="measured steps (default: 5)")
    options.add_argument("--tokens", type=int, default=65536, help="at least this many tokens a step")
    options.add_argument("--seconds", type=float, default=3600, help="start nothing after this time")
    options.add_argument("--device", default="cuda")
