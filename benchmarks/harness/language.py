"""Training and testing of small byte-level language models, for language_model.py and needle.py.

A stack of models, one per seed, learns from pieces of ``length`` bytes from anywhere in the text. Held-out files are
read from their beginning, so that byte ``p`` of a piece has ``p`` bytes of its own file before it.
"""
import itertools
import math
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import measure, text
from benchmarks.harness.folders import ROOT
from benchmarks.harness.pages_evidence import LIVES
from benchmarks.harness.records import Clock, key_of
from benchmarks.harness.small_models import Adam, Attention, Models, Sizes, autocast
from cupy_dma import IntervalMask

SEEDS = (0, 1, 2)
MODELS = ROOT / "build" / "evidence"  # where models are kept
WARM_UP = 100  # steps
SHARE = 8  # one slot in so many begins a needle, in pieces with needles


@dataclass(frozen=True)
class Task:
    length: int = 4096
    tokens: int = 16384  # of a step, for each model
    steps: int = 1500
    rate: float = 1e-3
    scores_rate: float = 1.0  # factor of the rate for A and dt_proj
    planted: bool = False  # with needles in every piece
    grow: bool = True  # a sixteenth of the length at first, all of it after half the steps
    layers: int = 6
    width: int = 384
    heads: int = 6
    kv_heads: int = 3
    inner: int = 1536

    def at(self, step: int) -> int:
        """Length of the pieces in a training step."""
        return self.length // 2**max(0, 4 - 8 * step // self.steps) if self.grow else self.length

    @property
    def sizes(self) -> Sizes:
        return Sizes(256, self.layers, self.width, self.heads, self.kv_heads, inner=self.inner)


def settings(task: Task, how: Attention) -> list[dict[str, Any]]:
    """Settings of each model of a stack."""
    return [{**asdict(task), **asdict(how), "seed": seed} for seed in SEEDS]


def made(task: Task, how: Attention, device: str, compile: bool) -> Models:
    return Models(list(SEEDS), task.sizes, how, device, compile)


def losses_of(models: Models, tokens: Tensor) -> Tensor:
    """Nats per byte ``(M, B, N)`` of ``tokens (M, B, N + 1)``, all but the first."""
    logits = models.logits(models(tokens[..., :-1])).float()
    return F.cross_entropy(logits.flatten(0, -2), tokens[..., 1:].flatten(), reduction="none").view_as(tokens[..., 1:])


@dataclass
class Found:
    """The trained models and their history."""

    models: Models
    losses: list[list[float]]  # every 100 steps, for each model
    lives: list[dict[str, Any]]  # at a few steps
    seconds: float


def train(task: Task, how: Attention, source: text.Text, device: str, compile: bool, clock: Clock) -> Found:
    measure.free_memory()
    models = made(task, how, device, compile)
    torch.manual_seed(0)  # for random scores
    rates = torch.full((len(SEEDS),), task.rate, device=device)
    optimizer = Adam(models, rates, torch.full_like(rates, task.scores_rate), decay=0.1)
    generators = [torch.Generator(device).manual_seed(100 + seed) for seed in SEEDS]
    training = source.training.to(device)
    shown = text.first_bytes(source, task.length, 1).to(device)
    losses, lives, began = [], [], time.perf_counter()

    def look(step: int) -> None:
        if how.kind == "dynamic":
            lives.append({"step": step, "lives": lives_of(models, shown, device)})

    look(0)
    for step in range(task.steps):
        clock.check()
        length = task.at(step)
        drawn = [text.pieces(training, length + 1, max(1, task.tokens // length), generator)
                 for generator in generators]
        answers = None
        if task.planted:
            changed = [text.planted(part, max(1, length // text.SLOT // SHARE), generator)
                       for part, generator in zip(drawn, generators)]
            drawn, answers = [part for part, _ in changed], torch.stack([where for _, where in changed]).flatten(2)
        with autocast(device):
            loss = losses_of(models, torch.stack(drawn))
        total = loss.mean((1, 2))
        if answers is not None:  # the codes weigh as much as all other bytes
            total = total + loss.gather(2, answers - 1).mean((1, 2))
        total.sum().backward()
        optimizer.step(min((step + 1) / WARM_UP, 0.1 + 0.45 * (1 + math.cos(math.pi * step / task.steps))))
        if (step + 1) % 100 == 0 or step + 1 == task.steps:
            losses.append([round(x, 4) for x in loss.detach().mean((1, 2)).tolist()])
            if all(map(math.isnan, losses[-1])):
                break
        if step + 1 in (task.steps // 10, task.steps // 2, task.steps):
            look(step + 1)
    return Found(models, losses, lives, time.perf_counter() - began)


def edges(length: int) -> list[int]:
    """Edges of the bins of positions: 0, 64, 128, 256, ... up to the length."""
    return [0, *(64 * 2**i for i in range(32) if 64 * 2**i < length), length]


@torch.no_grad()
def by_position(models: Models, source: text.Text, length: int, count: int, device: str) -> list[list[float]]:
    """For each model, nats per byte in each bin of positions, over the beginnings of ``count`` held-out files."""
    total = torch.zeros(len(SEEDS), length, device=device)
    held_out = text.first_bytes(source, length + 1, count).to(device)
    for piece in held_out.split(4):
        with autocast(device):
            total += losses_of(models, piece.expand(len(SEEDS), -1, -1)).sum(1)
    marks = edges(length)
    return [[round(x[a:b].mean().item() / len(held_out), 4) for a, b in itertools.pairwise(marks)] for x in total]


def kept_until(mask: IntervalMask, batch: int) -> Tensor:
    """``stop (batch, Hkv, N)`` of a layer's mask."""
    return mask.stop.expand(*mask.shape).expand(batch, mask.shape[1], -1)


@torch.no_grad()
def lives_of(models: Models, tokens: Tensor, device: str) -> list[list[list[list[int]]]]:
    """Lifetimes of the keys in the first half of ``tokens (1, N)``, counted in the classes ``LIVES`` by model, layer
    and kv head. Lives of these keys can be followed for at least half of the length."""
    with autocast(device):
        models(tokens.expand(len(SEEDS), 1, -1))
    n = tokens.shape[1]
    half = torch.arange(n // 2, device=tokens.device)
    found = []
    for layer in models.layers:
        stop, w = kept_until(layer.mask, len(SEEDS))[..., :n // 2], layer.attention.budget
        life = stop - half
        kind = torch.stack([life > limit for limit in (0, w // 4, w, 4 * w)]).sum(0)
        kind = torch.where(stop < n, kind, len(LIVES) - 1)
        found.append(F.one_hot(kind, len(LIVES)).sum(2))  # (M, Hkv, 6)
    return torch.stack(found, 1).tolist()


# ---- models on disk -------------------------------------------------------------------------------------------------


def path_of(folder: Path, task: Task, how: Attention) -> Path:
    return folder / f"{how.kind}-{zlib.crc32(key_of({**asdict(task), **asdict(how)}).encode()):08x}.pt"


def save(folder: Path, task: Task, how: Attention, models: Models) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, task, how)
    torch.save(models.state_dict(), path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load(folder: Path, task: Task, how: Attention, device: str) -> Models | None:
    path = path_of(folder, task, how)
    if not path.exists():
        return None
    models = made(task, how, device, False)
    models.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    return models
