"""Gradients of every backend against the float64 oracle, in every type, over named cases, with a gradient of lse.

    python benchmarks/backward_equivalence.py                    all backends, all types
    python benchmarks/backward_equivalence.py --backend numpy --cases dense

Cases and rule: equivalence.py. A line per backend, type and case, with the tensor that comes closest to its limit.
Exits with 1 if any error exceeds what is allowed; then the numbers are in backward_equivalence.failed.json. The same
for the tests' whole grid, in one line per backend and type: grad_equivalence.py.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

from benchmarks import accuracy
from tests.oracle import cases


def run(case: cases.Case, convert: Any, backend: str) -> dict[str, Any]:
    return cases.run_backward(case, convert, with_dlse=True, backend=backend)._asdict()


def expected(case: cases.Case, **options: Any) -> accuracy.Answer:
    return cases.expected_gradients(case, with_dlse=True, **options)


SUITE = accuracy.Suite("backward", __doc__ or "", run, expected, factor=3)


def main(arguments: list[str] | None = None) -> int:
    return accuracy.main(SUITE, arguments)


if __name__ == "__main__":
    sys.exit(main())
