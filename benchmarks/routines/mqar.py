"""Multi-query associative recall: can a model learn which keys to keep, and what happens if it may keep too few?

Task (harness/recall.py): pairs of a key and a value among random fillers in the first half of a sequence, every key
once more in the second half; the model names its value. Keeping only the row of each value needs one key per pair.

Models (harness/small_models.py): 2 layers of one head without MLP or positions, a causal convolution of 3 tokens before
query, key and value, as in the zoology papers; bfloat16 autocast, float32 parameters. All ``RATES`` and ``SEEDS`` train
at once as one stack. Models of one seed start with the same numbers and see the same sequences, drawn anew in every
step. AdamW without weight decay, gradients clipped to 1, ``WARM_UP`` steps of warm-up and a cosine decay to 0. Each
model sees 32768 tokens per step. Sequences grow: an eighth, a quarter and half of the length and of the pairs, for a
sixth of the steps each, then all; ``w`` stays. (At full length from the first step models hardly get beyond naming some
random value; two stacks of the parts small and starts show that.)

Parts. main: length 1024, 64 pairs, width 64; w from a quarter of the pairs to twice as many; every kind of attention.
Dynamic masks train as in the original (A = 0 at first), with ten times the learning rate for ``A`` and ``dt_proj``
(``chosen``), with A fixed at 1 and that rate (``held``), or, in the linear form, with the usual rate (``steady``).
starts: 64 keys; varies the initial A, whether it is trained, its rate, recent keys and sinks. small: the same with 16
keys for 8 pairs in 64 tokens. lengths: 512 to 4096 tokens with 32 to 256 pairs and as many keys. widths: 128 and 256.
frozen: scores stop training once the sequences have reached full length, at all lengths.

Accuracy: right answers to all questions of ``TESTED`` fresh sequences, the same for all models of a seed. A model's
accuracy is the best of its checks (every 100 steps), as in the zoology papers, which stop training once a model knows
the answers. The sequences that choose this check also measure it, so the number is slightly too high. The accuracy at
the end is shown too, because a model can lose a selection again. A stack ends early when some rate has ``ENOUGH`` for
every seed. Tables show the rate with the best average, as mean and range of the seeds. ``kept``: the share of questions
whose pair is still visible at the end, for each layer.

Cost: 114 stacks, 8 to 120 s each on an H100 shared by two processes.
"""
import argparse
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import measure
from benchmarks.harness.pages_evidence import named
from benchmarks.harness.recall import Batch, Recall
from benchmarks.harness.records import Clock, Row, Run, add_run_options, device_of, run_all
from benchmarks.harness.small_models import Adam, Attention, Models, Sizes, autocast

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
SEEDS = (0, 1, 2)
WARM_UP, CHECK, TESTED, ENOUGH = 100, 100, 128, 0.995
PARTS = ("small", "main", "starts", "lengths", "widths", "frozen")


@dataclass(frozen=True)
class Task:
    length: int = 1024
    pairs: int = 64
    width: int = 64
    layers: int = 2
    names: int = 512  # tokens of each kind: keys, values, fillers
    tokens: int = 32768  # of a step, for each model
    steps: int = 2000
    grow: bool = True  # an eighth of the length and of the pairs at first, all of them after half the steps
    frozen: bool = False  # stop training A and dt_proj after half the steps

    def at(self, step: int) -> tuple[int, int]:
        """Length and number of pairs in a training step."""
        less = 2**max(0, 3 - 6 * step // self.steps) if self.grow else 1
        less = min(less, self.pairs)
        return self.length // less, self.pairs // less


SMALL = Task(length=64, pairs=8, names=64, tokens=2048, steps=1200)
TINY = Task(length=32, pairs=4, width=16, names=16, tokens=64, steps=4)


def grid(part: str, task: Task) -> Iterator[tuple[Task, Attention, float]]:
    """What a part trains: tasks, kinds of attention, and the factor of the learning rate for ``A`` and ``dt_proj``."""
    def chosen(w: int, kind: str = "dynamic", **options: Any) -> tuple[Attention, float]:
        return Attention(kind, w, **options), 10.0

    def held(w: int, kind: str = "dynamic", **options: Any) -> tuple[Attention, float]:
        return chosen(w, kind, start=1.0, fixed=True, **options)

    def steady(w: int) -> tuple[Attention, float]:
        return Attention("dynamic", w, form="linear", start=1.0, fixed=True), 1.0

    found: list[tuple[Attention, float]] = []
    w = task.pairs
    if part == "main":
        found += [(Attention("full"), 1.0), held(0, "bias")]
        for keys in (w // 4, w // 2, w, 2 * w):
            found += [(Attention(kind, keys), 1.0) for kind in ("window", "random", "dynamic")]  # original last
            found += [(Attention("dynamic", keys, form="linear"), 1.0), (Attention("selection", keys, start=1.0), 1.0),
                      chosen(keys), chosen(keys, form="linear"), held(keys), held(keys, "global"), steady(keys)]
    elif part in ("small", "starts"):
        if part == "small":
            task, w = replace(SMALL, steps=min(task.steps, SMALL.steps)), 2 * SMALL.pairs
            found += [(Attention("full"), 1.0), (Attention("random", w), 1.0), (Attention("window", w), 1.0)]
        starts = ((0.0, False, False), (0.5, True, False), (1.0, False, False), (1.0, False, True))
        for form, (start, drawn, fixed), rate in itertools.product(("exp", "linear"), starts, (1.0, 10.0)):
            found.append((Attention("dynamic", w, form=form, start=start, drawn=drawn, fixed=fixed), rate))
        found += [(held(w)[0], 0.1), *(one(w - w // 4, recent=w // 4) for one in (chosen, held)),
                  held(w - w // 4 - 1, recent=w // 4, sinks=1)]
        for how, rate in ((Attention("full"), 1.0), held(w)):
            yield replace(task, grow=False), how, rate
    elif part == "lengths":
        for times in (0.5, 2, 4):
            other = replace(task, length=int(task.length * times), pairs=int(task.pairs * times))
            for how, rate in ((Attention("full"), 1.0), (Attention("dynamic", other.pairs), 1.0), chosen(other.pairs),
                              held(other.pairs), steady(other.pairs)):
                yield other, how, rate
    elif part == "frozen":
        for times in (0.5, 1, 2, 4):
            other = replace(task, length=int(task.length * times), pairs=int(task.pairs * times), frozen=True)
            yield other, *chosen(other.pairs)
        task = replace(task, frozen=True)
        found += [(Attention("dynamic", w), 1.0), chosen(w // 2), chosen(w, form="linear"), held(w)]
    else:
        for times in (2, 4):
            for how, rate in ((Attention("full"), 1.0), chosen(w), held(w), steady(w)):
                yield replace(task, width=times * task.width), how, rate
    yield from ((task, how, rate) for how, rate in found)


def settings(task: Task, how: Attention, scores_rate: float) -> list[dict[str, Any]]:
    """Settings of each model of a stack."""
    return [{**asdict(task), **asdict(how), "scores_rate": scores_rate, "rate": rate, "seed": seed}
            for rate, seed in itertools.product(RATES, SEEDS)]


def visible(models: Models, batch: Batch) -> list[Any]:
    """For each layer, ``(M,)``: the share of questions that see, in some head, the row of the value that answers
    them."""
    found = []
    for layer in models.layers:
        if layer.mask is None:
            continue
        batches, heads, n = layer.mask.shape
        stop = layer.mask.stop.expand(batches, heads, n).expand(batch.tokens[..., 0].numel(), heads, n)
        stop = stop.unflatten(0, batch.tokens.shape[:2])  # (M, B, Hkv, N)
        told = batch.told[:, :, None].expand(-1, -1, heads, -1)
        seen = (stop.gather(3, told) > batch.asked[:, :, None]).any(2)
        found.append(seen.float().mean((1, 2)))
    return found


def answered(models: Models, batch: Batch) -> Any:
    """Logits of the questions ``(M, B, pairs, vocabulary)``."""
    return models.logits(models(batch.tokens, batch.asked))


def train(task: Task, how: Attention, scores_rate: float, device: str, compiled: bool, clock: Clock) -> list[Row]:
    """Train a stack; the rows of its models."""
    measure.free_memory()
    own = settings(task, how, scores_rate)
    recall = Recall(task.length, task.pairs, task.names)  # for testing
    sizes = Sizes(recall.vocabulary, task.layers, task.width, 1, 1, conv=3, rope=None)
    models = Models([one["seed"] for one in own], sizes, how, device, compiled)
    torch.manual_seed(0)  # for random scores
    rates = torch.tensor([one["rate"] for one in own], device=device)
    optimizer = Adam(models, rates, torch.full_like(rates, scores_rate))

    def drawn(recall: Recall, generators: list[torch.Generator], count: int) -> Batch:
        """The same sequences for every rate."""
        return Batch(*(part.repeat(len(RATES), 1, 1) for part in recall.batch(count, generators)))

    training, testing = ([torch.Generator(device).manual_seed(first + seed) for seed in SEEDS] for first in (100, 200))
    test, count = drawn(recall, testing, TESTED), max(1, task.tokens // task.length)
    curves: list[list[float]] = []
    began, step = time.perf_counter(), 0

    @torch.no_grad()
    def accuracy() -> torch.Tensor:
        found = []
        for part in zip(*(x.split(count, 1) for x in test)):  # batches as large as in training
            with autocast(device):
                found.append(answered(models, Batch(*part)).argmax(-1) == part[2])
        return torch.cat(found, 1).float().mean((1, 2))

    for step in range(task.steps):
        clock.check()
        if task.frozen and step == task.steps // 2:
            for _, x in models.score_parameters():
                x.requires_grad_(False)
        length, pairs = task.at(step)
        batch = drawn(Recall(length, pairs, task.names), training, max(1, task.tokens // length))
        with autocast(device):
            logits = answered(models, batch)
        losses = F.cross_entropy(logits.float().flatten(0, -2), batch.answers.flatten(), reduction="sum")
        (losses / batch.answers[0].numel()).backward()
        optimizer.step(min((step + 1) / WARM_UP, (1 + math.cos(math.pi * step / task.steps)) / 2))
        if (step + 1) % CHECK == 0 or step + 1 == task.steps:
            curves.append([round(x, 4) for x in accuracy().tolist()])
            best = torch.tensor(curves).amax(0).view(len(RATES), len(SEEDS))
            if (best >= ENOUGH).all(1).any():
                break
    seconds = (time.perf_counter() - began) / len(own)
    with torch.no_grad(), autocast(device):
        last = Batch(*(x[:, :count] for x in test))
        answered(models, last)
        kept = [x.tolist() for x in visible(models, last)]
    A = [layer.A.abs().mean(1).tolist() for layer in models.layers if hasattr(layer, "A")]
    return [{"settings": one, "steps": step + 1, "seconds": round(seconds, 3),
             "curve": [accuracies[i] for accuracies in curves], "kept": [round(x[i], 4) for x in kept],
             "A": [round(x[i], 4) for x in A]} for i, one in enumerate(own)]


def runs(args: argparse.Namespace) -> list[Run]:
    """The stacks of the chosen parts, each once."""
    device, task = device_of(args), TINY if args.size == "tiny" else Task()
    chosen = dict.fromkeys(one for part in args.part or PARTS for one in grid(part, task))
    return [Run(f"{one[0].length}/{one[0].pairs} {named(settings(*one)[0])}", settings(*one),
                lambda clock, one=one: train(*one, device, args.compile, clock))
            for one in chosen]


def add_options(options: argparse.ArgumentParser) -> None:
    add_run_options(options, PARTS)


def run(args: argparse.Namespace) -> int:
    return run_all("mqar", args, __doc__, runs)
