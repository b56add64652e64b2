"""Byte-level language models with dynamic masks: loss by position, beside full attention and a sliding window.

Text (harness/text.py): the topics of Python's ``help()`` and the sources of the standard library, some 28 MB; a tenth
of the files is held out. The text depends on the version of Python, so each row records its checksum.

Models (harness/small_models.py): 6 layers of width 384, 6/3 heads of 64, MLP of 1536, rotary positions, 10 M
parameters; bfloat16 autocast. AdamW, weight decay 0.1 (not on the scores' parameters), gradients clipped to 1, a rate
of 1e-3 with 100 steps of warm-up and a cosine decay to a tenth, 1500 steps of 16384 bytes: less than one pass over the
text. Pieces have a sixteenth, an eighth, a quarter and half of the length for an eighth of the steps each, then the
full length: trained at full length from the first step, models learn so slowly that the loss rises with the number of
keys. The three seeds train at once as one stack; each sees the same pieces for every kind of attention.

Parts. main: 4096 bytes, w = 512, every kind of attention. windows: w = 256 and 1024. long: 8192 bytes, w = 512. rates:
half and twice the learning rate. w includes recent keys and sinks.

Loss: nats per byte over the beginnings of ``TESTED`` held-out files, in bins of the position. Lives: how long the keys
of the first half of one held-out file stay visible, by layer and kv head, at four times of the training.

Cost: 26 stacks, 75 to 115 s each on an H100 shared by two processes. Models are kept in ``--models``, for needle.
"""
import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import language, text
from benchmarks.harness.language import MODELS, Task
from benchmarks.harness.pages_evidence import named
from benchmarks.harness.records import Clock, Row, Run, add_run_options, device_of, run_all
from benchmarks.harness.small_models import Attention
from benchmarks.harness.text import Text

PARTS = ("main", "rates", "windows", "long")
TESTED = 64


def task_of(size: str) -> Task:
    return Task() if size == "full" else Task(length=128, tokens=128, steps=3, layers=2, width=16, heads=2, kv_heads=1,
                                              inner=16, grow=False)


def within(w: int, recent: int = 0, sinks: int = 0, **options: Any) -> Attention:
    """Dynamic mask attention that sees ``w`` keys, recent ones and sinks among them."""
    return Attention("dynamic", w - recent - sinks, recent, sinks, **options)


def chosen(w: int, **options: Any) -> Attention:
    """Half of the keys are recent, one is a sink, and ``A`` and ``dt_proj`` learn at ten times the rate."""
    return within(w, w // 2, 1, **options)


def grid(part: str, task: Task) -> Iterator[tuple[Task, Attention]]:
    w, fast = task.length // 8, replace(task, scores_rate=10.0)
    if part == "main":
        yield from ((task, Attention("full")), (task, Attention("window", w)))
        yield from ((task, within(w)), (fast, within(w)))  # the original, and a faster rate for the scores
        yield from ((fast, chosen(w)), (task, chosen(w)), (fast, chosen(w, form="linear")))
        yield from ((one, chosen(w, form="linear", start=1.0, fixed=True)) for one in (task, fast))
        yield from ((task, chosen(w, start=0.5, drawn=True)), (fast, within(w, 3 * w // 4, 1)))
        yield task, within(w, start=1.0, fixed=True)
    elif part == "rates":
        for other in (task.rate / 2, 2 * task.rate):
            yield from ((replace(task, rate=other), how) for how in (Attention("full"), Attention("window", w)))
            yield replace(fast, rate=other), chosen(w)
    elif part == "windows":
        for other in (w // 2, 2 * w):
            yield from ((task, Attention("window", other)), (fast, chosen(other)))
    else:
        task, fast = (replace(one, length=2 * one.length) for one in (task, fast))
        yield from ((task, Attention("full")), (task, Attention("window", w)), (task, within(w)), (fast, chosen(w)))


def train(task: Task, how: Attention, source: Text, device: str, args: argparse.Namespace, clock: Clock) -> list[Row]:
    found = language.train(task, how, source, device, args.compile, clock)
    language.save(args.models, task, how, found.models)
    rows = []
    positions = language.by_position(found.models, source, task.length, TESTED, device)
    for i, own in enumerate(language.settings(task, how)):
        A = [layer.A[i].tolist() for layer in found.models.layers if hasattr(layer, "A")]
        rows.append({"settings": own, "text": source.checksum, "by_position": positions[i],
                     "edges": language.edges(task.length), "seconds": round(found.seconds / len(positions), 3),
                     "training": [losses[i] for losses in found.losses], "A": A,
                     "lives": [{"step": one["step"], "counts": [[" ".join(map(str, head)) for head in layer]
                                                                for layer in one["lives"][i]]}
                               for one in found.lives]})
    return rows


def runs(args: argparse.Namespace) -> list[Run]:
    """The stacks of the chosen parts, each once."""
    source, device = text.standard_library(), device_of(args)
    chosen = dict.fromkeys(one for part in args.part or PARTS for one in grid(part, task_of(args.size)))
    return [Run(named(language.settings(*one)[0]), language.settings(*one),
                lambda clock, one=one: train(*one, source, device, args, clock)) for one in chosen]


def add_options(options: argparse.ArgumentParser) -> None:
    add_run_options(options, PARTS)
    options.add_argument("--models", type=Path, default=MODELS, help="folder of trained models")


def run(args: argparse.Namespace) -> int:
    return run_all("language_model", args, __doc__, runs)
