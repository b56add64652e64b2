"""out and lse of every backend against the float64 oracle, in every type, over named cases.

    python benchmarks/forward_equivalence.py                     all backends, all types
    python benchmarks/forward_equivalence.py --backend flex --dtype bfloat16 --cases dense

Cases and rule: equivalence.py. A line per backend, type and case, with the tensor that comes closest to its limit.
Exits with 1 if any error exceeds what is allowed; then the numbers are in forward_equivalence.failed.json.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

from benchmarks import accuracy
from tests.oracle import cases


def run(case: cases.Case, convert: Any, backend: str) -> dict[str, Any]:
    return dict(zip(("out", "lse"), cases.run(case, convert, backend=backend)))


SUITE = accuracy.Suite("forward", __doc__ or "", run, cases.expected, factor=2)


def main(arguments: list[str] | None = None) -> int:
    return accuracy.main(SUITE, arguments)


if __name__ == "__main__":
    sys.exit(main())
