"""The benchmarks: ``python -m benchmarks ROUTINE``.

A routine is a module of benchmarks/routines. Its docstring describes the method, and its first line appears in the list
of routines. It has ``run(args)``, which returns the exit status, and usually ``add_options(parser)``.
"""
import argparse
import ast
import importlib
import sys
from pathlib import Path

from benchmarks.harness.pages import REPORTS

FOLDER = Path(__file__).parent / "routines"
SHARED = """
python -m benchmarks ROUTINE --help shows a routine's options and method. In all of them, times are medians of CUDA
events around graphs with an empty L2 cache, see benchmarks/harness/measure.py; outputs are checked in the same run, and
if a check fails, the exit status is 1 and the result lies beside the recorded one as .failed.json; a peer that cannot
run, or finds no time within --seconds, is a row that says why. --set smoke and --size tiny run without a GPU."""


def methods() -> dict[str, str]:
    """The docstring of each routine, by name. Imports no routine, because each needs its own libraries."""
    return {path.stem: ast.get_docstring(ast.parse(path.read_text())) or ""
            for path in sorted(FOLDER.glob("[a-z]*.py"))}


def shared_options(name: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--out", help="folder for results (default: the GPU's folder in benchmarks/results)")
    options.add_argument("--commit", help="commit to record if this copy of the tree has no git history")
    if name in REPORTS:
        options.add_argument("--show", action="store_true", help="print the recorded results")
        if pages := " and ".join(piece.page for piece in REPORTS[name].pieces):
            options.add_argument("--update-docs", action="store_true", help=f"write the recorded results into {pages}")
    return options


def run(name: str, arguments: list[str]) -> int | None:
    """Run a routine, or show its recorded results, which needs none of its libraries."""
    shared = shared_options(name)
    given, _ = shared.parse_known_args(arguments)
    first, _, method = methods()[name].partition("\n")
    options = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", parents=[shared], description=first,
                                      epilog=method.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    if getattr(given, "update_docs", False):
        return REPORTS[name].update(given.out)
    if getattr(given, "show", False):
        return REPORTS[name].show(given.out)
    try:
        routine = importlib.import_module(f"benchmarks.routines.{name}")
    except ImportError as error:
        options.error(f"cannot run here: {error}")
    from benchmarks.harness.command import Refused

    getattr(routine, "add_options", lambda options: None)(options)
    try:
        return routine.run(options.parse_args(arguments))
    except Refused as error:
        options.error(str(error))


def main(arguments: list[str] | None = None) -> int | None:
    found = methods()
    width = max(map(len, found)) + 2
    lines = (f"  {name:{width}}{method.partition(chr(10))[0]}" for name, method in found.items())
    options = argparse.ArgumentParser(
        prog="python -m benchmarks", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a benchmark, show what it has recorded, or put that into the docs.",
        epilog="\n".join(["routines:", *lines, SHARED]))
    options.add_argument("routine", choices=found, metavar="ROUTINE", help="one of the routines below")
    options.add_argument("options", nargs=argparse.REMAINDER, help="options of the routine")
    args = options.parse_args(arguments)
    return run(args.routine, args.options)


if __name__ == "__main__":
    sys.exit(main())
