"""Mutants made mechanically, beside the hand-made faults: each deletes a synchronisation or swaps two strides.

    python -m tests.emulator.mutations.generated [PLACE ...] [--share I/N]

``PLACE`` is how a mutant's name begins: a folder, a file of ``kernels/`` or one of its lines (``sm90/forward.cu:182``).
A mutant is tried with checks of the hand-made faults nearest to it and with those of ``FURTHER``, until one fails. Each
runs in a process of its own, so one that crashes it, or never ends, counts as caught. Those known not to show
(``FENCES``, ``UNSEEN``) are counted and not tried.
"""
import argparse
import contextlib
import io
import itertools
import multiprocessing
import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from tqdm import tqdm

from cupy_dma.backends.cuda.runtime import jit
from tests import emulator, slow
from tests.emulator.mutations.checks import CHECKS
from tests.emulator.mutations.test_mutations import FAULTS

# Whole statements, and votes of a CTA, which become the thread's own.
STATEMENTS = ("__syncthreads", "__syncwarp", "wait_for_earlier_kernels", "copy_async_commit", "copy_async_wait",
              "bulk_commit", "bulk_wait", "bulk_wait_read", "barrier_wait", "barrier_arrive", "barrier_expect",
              "barrier_arrive_after_copies", "barrier_init_fence", "named_barrier", "named_barrier_arrive",
              "ping_pong_wait", "ping_pong_arrive", "shared_write_fence", "wgmma_fence", "wgmma_commit", "wgmma_wait",
              "cluster_arrive", "cluster_arrive_running", "cluster_wait")
STATEMENT = re.compile(rf"(?<!void )\b(?:\w+\.)?({'|'.join(STATEMENTS)})(?:<[^;{{}}]*?>)?\([^;{{}}]*\);")
VOTE = re.compile(r"\b(__syncthreads_(?:or|and|count))\b")
STRIDE = re.compile(r"(?<=\bp\.)(\w+)_(batch|group|head|row|query|key)\b")
END_SECONDS = 90.0  # of a check; the longest take 20
# By folder: checks of a second each that catch mutants where no hand-made fault is near.
_PORTABLE = ("test_intervals", "test_forward_grid[mask-window]", "test_backward_grid[float32-D16]", "test_a_bad_key",
             "test_dense_strides", "test_forward_grid[dense-both-per_batch+dense=1gqk-bgqk]",
             "varlen backward[bfloat16-none]", "test_dense_masks_with_gaps", "sm90 stored")
FURTHER: dict[str, tuple[str, ...]] = {
    "common": _PORTABLE, "lists": _PORTABLE, "sm80": _PORTABLE,
    "decode": ("decoding[clusters]", "decoding[sets]", "few_queries[mask-global_documents]",
               "few_queries[float16-D3]"),
    "sm90": ("test_intervals[Hopper]", "sm90[short tiles]", "sm90[cut tiles]", "sm90[non-finite]",
             "sm90[splits, non-finite]", "sm90[lists, queries without TMA]", "sm90 stored[batch]",
             "test_forward_grid[Hopper, dense]", "test_dense_strides[Hopper]", "test_forward_grid[Hopper, heads-6/2]",
             "test_low_biases[Hopper, dense]")}
FENCES = ("no shared_write_fence", "no barrier_init_fence", "no wgmma_fence")  # the emulator has none
# Mutants that nothing catches: why (equivalent code, not modelled by the emulator, or open: no check yet), the file,
# the text in which the mutant begins, and the reason.
UNSEEN = [
    ("equivalent", "common/key_tile.cuh", "t.list = p.list + ((long long)t.batch * p.mask_batch + t.group * p.mask",
     "the same keys in another order"),
    ("not modelled", "sm80/backward_dkv.cu", "copy_async_wait<0>();  // for the key rows",
     "a CTA ends with copies in flight that nothing uses"),
    ("equivalent", "sm90/backward_dkv_narrow.cuh", "named_barrier(TURN_BARRIER + half,", "turns only save time"),
    ("equivalent", "sm90/consumer.cuh", "named_barrier(PING_PONG_BARRIER + warpgroup(),", "turns only save time"),
    ("equivalent", "sm90/logits.cuh", "__syncwarp();  // keeps the assembler", "it saves registers"),
    ("not modelled", "sm90/consumer.cuh", "bulk_wait();\n#endif\n    }", "a store that has been read is written"),
]


class Mutant(NamedTuple):
    """An edit of one place of one kernel file."""

    name: str  # file:line kind
    file: str
    start: int
    stop: int
    new: str
    unseen: str  # why it is not tried: as in UNSEEN, with the reason; "" if it is

    def applied_to(self, text: str) -> str:
        return text[:self.start] + self.new + text[self.stop:]


def edits(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Start, stop, replacement and kind of every edit of a file's text, in their order by kind."""
    code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)
    for found in STATEMENT.finditer(code):
        yield found.start(), found.end(), ";", f"no {found[1]}"
    for found in VOTE.finditer(code):
        yield found.start(), found.end(), "", f"no {found[1]}"
    for statement in re.finditer(r"[^;{}]+", code):
        strides = defaultdict(list)
        for found in STRIDE.finditer(code, statement.start(), statement.end()):
            strides[found[1]].append(found)
        for of_one in strides.values():
            for a, b in itertools.pairwise(of_one):
                if a[0] != b[0]:
                    new = b[0] + text[a.end():b.start()] + a[0]
                    yield a.start(), b.end(), new, f"{a[0]} <-> {b[0]}"


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file of ``kernels/``. Two of a kind on a line are numbered."""
    text = (jit.kernels_directory() / file).read_text()
    places = [(text.find(old), len(old), f"{why}: {reason}") for why, own, old, reason in UNSEEN if own == file]
    found, names = [], Counter[str]()
    for start, stop, new, kind in edits(text):
        unseen = "not modelled: fences" if kind in FENCES else next(
            (why for place, size, why in places if place <= start < place + size), "")
        name = f"{file}:{text.count(chr(10), 0, start) + 1} {kind}"
        names[name] += 1
        found.append(Mutant(name + (f" ({names[name]})" if names[name] > 1 else ""), file, start, stop, new,
                            unseen))
    return found


def everything() -> list[Mutant]:
    folder = jit.kernels_directory()
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.cu*"))
    return [mutant for file in files for mutant in mutants(file)]


def checks_of(mutant: Mutant) -> list[str]:
    """The checks of the three hand-made faults of the file that are nearest, the further ones of its folder, and five
    more of its own faults or of those of files that include it. If there are none, a call of attention, which begins
    with a look at the layout of fragments."""
    folder = jit.kernels_directory()
    texts = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.cu*")}
    own = sorted((abs(texts[mutant.file].index(fault.old) - mutant.start), fault.caught_by)
                 for fault in FAULTS if fault.file == mutant.file)
    including = slow.including({mutant.file}, texts)
    others = Counter(fault.caught_by for fault in FAULTS if fault.file in including)
    near = [*dict.fromkeys([check for _, check in own] + [check for check, _ in others.most_common()])]
    further = FURTHER.get(mutant.file.split("/")[0], ())
    return [*dict.fromkeys([*near[:3], *further, *near[3:8]])] or ["test_forward_grid[mask-none]"]


def _run(folder: Path, checks: Sequence[str], results: Connection) -> None:
    jit.source_text.cache_clear()
    with mock.patch.object(jit, "kernels_directory", lambda: folder), contextlib.redirect_stdout(io.StringIO()):
        for check in checks:
            try:
                with emulator.using():
                    CHECKS[check]()
                results.send("")
            except jit.CompileError:
                results.send("not compiled")
            except pytest.skip.Exception:
                results.send("")
            except (emulator.EmulatorError, AssertionError, pytest.fail.Exception):
                results.send("caught")
            except BaseException as error:  # of the check itself
                results.send(f"error in {check}: {error!r}")


def verdict(mutant: Mutant, checks: Sequence[str]) -> str:
    """``caught``, ``not compiled``, ``survived``, or the error of a check."""
    processes = multiprocessing.get_context("forkserver")  # a fork of this process would have the threads of JAX
    processes.set_forkserver_preload(["tests.emulator.mutations.checks"])
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "kernels"
        shutil.copytree(jit.kernels_directory(), folder)
        (folder / mutant.file).write_text(mutant.applied_to((folder / mutant.file).read_text()))
        results, own_end = processes.Pipe(duplex=False)
        process = processes.Process(target=_run, args=(folder, checks, own_end))
        process.start()
        own_end.close()
        try:
            for _ in checks:
                found = results.recv() if results.poll(END_SECONDS) else "caught"
                if found:
                    return found
            return "survived"
        except EOFError:  # it crashed
            return "caught"
        finally:
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", metavar="PLACE", nargs="*", default=[""])
    parser.add_argument("--share", default="1/1", help="every N-th mutant, from the I-th")
    given = parser.parse_args()
    part, count = map(int, given.share.split("/"))
    chosen = [m for m in everything() if m.name.startswith(tuple(given.places))][part - 1::count]
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in tqdm(chosen):
        found = mutant.unseen.split(":")[0] or verdict(mutant, checks_of(mutant))
        totals[mutant.file][found.split(" ")[0] if found.startswith("error") else found] += 1
        if found != "caught":
            tqdm.write(f"{mutant.name}: {mutant.unseen or found}")
    columns = "caught", "not compiled", "equivalent", "not modelled", "open", "survived", "error"
    print("| file | mutants | " + " | ".join(columns) + " |")
    for file, of_file in {**totals, "all": sum(totals.values(), Counter())}.items():
        print(f"| `{file}` | {of_file.total()} | " + " | ".join(str(of_file[name]) for name in columns) + " |")


if __name__ == "__main__":
    main()
