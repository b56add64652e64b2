"""Results that grow: a run adds rows to a file, and recorded rows are not run again.

``settings`` identify a row: all that its numbers depend on apart from the machine. The row also holds the results, the
device, the commit, the date and the seconds. The file is written after every run, so an interruption loses one run at
most; a ``Clock`` ends a run when the time is up. Several processes may share a file, each with its own GPU
and its ``--share`` of the runs.
"""
from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.harness import measure
from benchmarks.harness.command import finished
from benchmarks.harness.folders import EVIDENCE, write

Row = dict[str, Any]


class Run(NamedTuple):
    name: str
    settings: list[dict[str, Any]]  # of its rows
    make: Callable[[Clock], list[Row]]


def key_of(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


class OutOfTime(Exception):
    """A run would not finish in time."""


class Clock:
    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def late(self) -> bool:
        return time.monotonic() >= self._end

    def check(self) -> None:
        if self.late:
            raise OutOfTime


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock that all processes writing to this folder take."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class Record:
    """The rows of ``name.json`` in the folder ``args.out``, by default that of evidence from any machine."""

    def __init__(self, name: str, args: argparse.Namespace, method: str | None):
        self.name, self.args, self.method = name, args, method
        self.path = Path(args.out or EVIDENCE) / f"{name}.json"
        self.rows = self._written()

    def _written(self) -> dict[str, Row]:
        if not self.path.exists():
            return {}
        return {key_of(row["settings"]): row for row in json.loads(self.path.read_text())["rows"]}

    def has(self, settings: Iterable[dict[str, Any]]) -> bool:
        return all(key_of(one) in self.rows for one in settings)

    def add(self, rows: Iterable[Row]) -> None:
        machine = measure.machine()
        machine["commit"] = self.args.commit or machine["commit"]
        about = {name: machine[name] for name in ("device", "commit", "date")}
        found = {key_of(row["settings"]): {**row, **about} for row in rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent):  # other processes add rows too
            self.rows = {**self.rows, **self._written(), **found}
            new = self.path.with_suffix(".new")
            write(new, {"method": self.method, **machine, "rows": list(self.rows.values())})
            new.replace(self.path)


def run_all(name: str, args: argparse.Namespace, method: str | None,
            runs: Callable[[argparse.Namespace], list[Run]]) -> int:
    """Do each run whose rows are not recorded yet. Returns 0 if all rows are recorded at the end, 3 if time ran out."""
    first, every = args.share
    record = Record(name, args, method)
    status = train_all(record, runs(args)[first - 1::every], args.seconds)
    return finished(name, record.path) or status if record.path.exists() else status


def train_all(record: Record, runs: list[Run], seconds: float) -> int:
    clock = Clock(seconds)
    left = [run for run in runs if not record.has(run.settings)]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are recorded in {record.path}")
    done = 0
    with tqdm(total=len(left), unit="run", disable=None) as bar:
        for run in left:
            bar.set_postfix_str(run.name)
            if clock.late:
                break
            try:
                record.add(run.make(clock))
            except OutOfTime:
                break
            done += 1
            bar.update()
    if done < len(left):
        print(f"time is up with {len(left) - done} runs left: run this again to continue")
        return 3
    return 0


def add_run_options(options: argparse.ArgumentParser, parts: Iterable[str]) -> None:
    """Add the options shared by the routines that train."""
    parts = list(parts)
    options.add_argument("--part", choices=parts, action="append",
                         help=f"part to run, may be repeated (default: all): {', '.join(parts)}")
    options.add_argument("--size", choices=("full", "tiny"), default="full",
                         help="tiny: takes a minute on a CPU, to try the routine out")
    options.add_argument("--seconds", type=float, default=3600,
                         help="stop before this time; the next run continues, unless the record is deleted")
    options.add_argument("--share", type=_share, default=(1, 1), metavar="I/N",
                         help="every N-th run from the I-th on: several processes, each with its GPU, share one --out")
    options.add_argument("--device", default=None, help="default: cuda if available")
    options.add_argument("--compile", action="store_true", help="compile everything between the matrix products")


def _share(words: str) -> tuple[int, int]:
    first, _, every = words.partition("/")
    if not (first.isdigit() and every.isdigit() and 1 <= int(first) <= int(every)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, got {words!r}")
    return int(first), int(every)


def device_of(args: argparse.Namespace) -> str:
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")
