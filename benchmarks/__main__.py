"""The benchmarks: ``python -m benchmarks ROUTINE``.

A routine is a module of benchmarks/routines, and its docstring is its method; the first line stands in this list.
"""
from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "routines"


def routines() -> dict[str, str]:
    """The name of each routine and what it measures. Imports none: each needs libraries of its own."""
    return {path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            for path in sorted(FOLDER.glob("[a-z]*.py"))}


def main(arguments: list[str] | None = None) -> int:
    found = routines()
    width = max(map(len, found)) + 2
    options = argparse.ArgumentParser(
        prog="python -m benchmarks", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a benchmark, show what it has recorded, or put that into the docs.",
        epilog="routines:\n" + "\n".join(f"  {name:{width}}{what}" for name, what in found.items())
               + "\n\npython -m benchmarks ROUTINE --help shows a routine's method and options.")
    options.add_argument("routine", choices=found, metavar="ROUTINE", help="one of those below")
    options.add_argument("options", nargs=argparse.REMAINDER, help="of the routine")
    args = options.parse_args(arguments)
    try:
        routine = importlib.import_module(f"benchmarks.routines.{args.routine}")
    except ImportError as error:
        options.error(f"{args.routine} cannot run here: {error}")
    return routine.main(args.options)


if __name__ == "__main__":
    sys.exit(main())
