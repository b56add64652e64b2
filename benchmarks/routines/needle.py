"""A needle in a long text: is it found, and if not, was its key dropped from the mask or only not read?

A needle is a line ``# the code of wkzr is 40722`` at a depth of 0 to 1 of held-out text, whose length is 1 to 8 times
that of training. The text ends with ``# the code of wkzr is``. The needle is found if each of the next five digits is
the most probable byte; by chance that happens once in 100 000 times.

It survives if all five digits are visible to the question in some head of some layer; the masks of the same pass show
this. A needle that did not survive cannot be found; one that survived and was not found was not read.

Models: those of language_model.py, part main (full attention, window, the original's defaults, and ten times the
learning rate for the scores, with and without recent keys). text: trained on text alone, loaded from ``--models`` or
trained if missing. trained: the same with needles in every piece of text (an eighth of its 32-byte slots holds one,
another eighth repeats them); the loss gives their codes the same weight as all other bytes together.

A row has ``COUNT`` needles of one seed for each length and depth. Rotary positions beyond the length of training are
new to all models; full attention shows the effect of that alone.

Cost: 10 stacks, of which this routine trains 5, as long as those of language_model.py; 10 s for testing on an H100.
"""
import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import language, text
from benchmarks.harness.language import MODELS, Task
from benchmarks.harness.pages_evidence import named
from benchmarks.harness.records import Clock, Row, Run, add_run_options, device_of, run_all
from benchmarks.harness.small_models import Attention, Models, autocast
from benchmarks.harness.text import Text
from benchmarks.routines.language_model import chosen, task_of, within

PARTS = ("text", "trained")
TIMES, DEPTHS, COUNT = (1, 2, 4, 8), (0.0, 0.25, 0.5, 0.75, 1.0), 16


def attentions(task: Task) -> Iterator[tuple[Task, Attention]]:
    w, fast = task.length // 8, replace(task, scores_rate=10.0)
    yield from ((task, Attention("full")), (task, Attention("window", w)), (task, within(w)), (fast, within(w)),
                (fast, chosen(w)))


def settings(task: Task, how: Attention) -> list[dict[str, Any]]:
    return [{**own, "needles": COUNT, "times": list(TIMES), "depths": list(DEPTHS)}
            for own in language.settings(task, how)]


def contexts(source: Text, length: int, depth: float, seed: int, count: int = COUNT) -> tuple[Tensor, int, int]:
    """``count`` contexts ``(count, length + 5)``, whose last 5 bytes are the second code, the answer; the position of
    the first code; and the size of a code in bytes."""
    generator = torch.Generator().manual_seed(seed)
    said = text.lines((count,), generator)
    end = text.CODE.start  # bytes of the line before the code
    size = text.CODE.stop - end
    hay = text.pieces(torch.cat(source.held_out), length + size, count, generator)
    first = round(depth * (length - end - text.SLOT))
    hay[:, first:first + text.SLOT] = said
    hay[:, length - end:] = said[:, :text.CODE.stop]
    return hay, first + end, size


def survival(models: Models, where: int, size: int, position: int, batch: int) -> list[Any]:
    """For each layer with a mask, bool ``(batch, Hkv)``: whether all keys ``where`` to ``where + size`` are visible at
    ``position``."""
    return [(language.kept_until(layer.mask, batch)[..., where:where + size] > position).all(-1)
            for layer in models.layers if layer.mask is not None]


def tested(models: Models, source: Text, length: int, depth: float, device: str) -> list[dict[str, Any]]:
    """For each model: how many of ``COUNT`` needles were found, survived, and both; and survivors by layer and head."""
    count = len(models.seeds)
    hay, where, size = contexts(source, length, depth, seed=length + round(1000 * depth))
    right, kept = [], []
    for one in hay.to(device).split(max(1, 65536 // length)):
        with torch.no_grad(), autocast(device):
            hidden = models(one[:, :-1].expand(count, -1, -1))
            answers = models.logits(hidden[:, :, length - 1:]).argmax(-1)  # (M, b, size)
        right.append((answers == one[:, length:]).all(-1))
        layers = survival(models, where, size, length - 1, count * len(one))
        if layers:
            kept.append(torch.stack(layers, 1).unflatten(0, (count, -1)))  # (M, b, layers, Hkv)
    found = torch.cat(right, 1)
    if not kept:  # full attention drops nothing
        alive, by = torch.ones_like(found), [None] * count
    else:
        seen = torch.cat(kept, 1)
        alive, by = seen.flatten(2).any(2), seen.sum(1).tolist()
    return [{"length": length, "depth": depth, "found": int(found[i].sum()), "survived": int(alive[i].sum()),
             "both": int((found[i] & alive[i]).sum()), "by_head": None if by[i] is None else
             [" ".join(map(str, heads)) for heads in by[i]]} for i in range(count)]


def test(task: Task, how: Attention, source: Text, device: str, args: argparse.Namespace, clock: Clock) -> list[Row]:
    models = language.load(args.models, task, how, device)
    began = time.perf_counter()
    if models is None:
        models = language.train(task, how, source, device, args.compile, clock).models
        language.save(args.models, task, how, models)
    cells: list[list[dict[str, Any]]] = [[] for _ in language.SEEDS]
    for times in TIMES:
        for depth in DEPTHS:
            clock.check()
            for own, cell in zip(cells, tested(models, source, times * task.length, depth, device)):
                own.append(cell)
    seconds = round((time.perf_counter() - began) / len(cells), 3)
    return [{"settings": own, "text": source.checksum, "seconds": seconds, "cells": cells[i]}
            for i, own in enumerate(settings(task, how))]


def runs(args: argparse.Namespace) -> list[Run]:
    source, device, task = text.standard_library(), device_of(args), task_of(args.size)
    found = [one for part in args.part or PARTS for one in attentions(replace(task, planted=part == "trained"))]
    return [Run(named(settings(own, how)[0]), settings(own, how),
                lambda clock, one=(own, how): test(*one, source, device, args, clock)) for own, how in found]


def add_options(options: argparse.ArgumentParser) -> None:
    add_run_options(options, PARTS)
    options.add_argument("--models", type=Path, default=MODELS, help="folder of trained models")


def run(args: argparse.Namespace) -> int:
    return run_all("needle", args, __doc__, runs)
