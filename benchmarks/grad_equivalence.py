"""Gradients of every backend that can run here against the float64 oracle, in every type, over the tests' grid.

    python benchmarks/grad_equivalence.py                        all backends, all types
    python benchmarks/grad_equivalence.py --backend numpy --dtype bfloat16 --dlse

The grid is tests/oracle/cases.py (masks, biases, lengths, head dims, grouped heads, strides, softcap, scale), each case once
per type; the oracle and the rule are those of tests/oracle/reference.py: an error may be at most three times that of the plain
same-precision computation, plus the roundings written there. The table has a line per backend and type: how many cases
ran, how many the backend does not serve (it raised NotImplementedError), and for each gradient the worst error in units
of what is allowed. A gradient of a wrong type or shape, or with NaN or infinities in other places than the oracle's,
counts as infinitely wrong. Exits with 1 if anything exceeds 1; then the numbers are in grad_equivalence.failed.json.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import numpy as np

from benchmarks.harness.suite import RESULTS
from tests.oracle import cases, reference

DTYPES = ("float16", "bfloat16", "float32", "float64")
NAMES = ("query", "key", "value", "bias")
TYPES_OF = {"cuda": ("float16", "bfloat16", "float32")}  # it raises TypeError for others; the other backends take all


@dataclass
class Line:
    """What was found for one backend and type."""

    backend: str
    dtype: str
    cases: int = 0
    not_served: int = 0
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))  # error / allowed
    worst_case: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(ratio <= 1 for ratio in self.worst.values())

    def add(self, case: cases.Case, gradients: Any, expected: dict[str, Any]) -> None:
        self.cases += 1
        for name, found in zip(NAMES, gradients):
            if name not in expected:
                ratio = 0.0 if found is None else math.inf
            else:
                ratio = math.inf if found is None else self._ratio(found, *expected[name])
            if ratio > self.worst[name]:
                self.worst[name], self.worst_case[name] = ratio, case.name

    @staticmethod
    def _ratio(found: np.ndarray, ref: np.ndarray, plain: np.ndarray, terms: float) -> float:
        if found.shape != ref.shape or found.dtype != plain.dtype or reference.misplaced(found, ref):
            return math.inf
        error, _, allowed = reference.error_and_allowed(found, ref, plain, found.dtype, factor=3, terms=terms)
        if error <= allowed == 0:  # nothing but zeros
            return 0.0
        return error / allowed if allowed else math.inf


def grid(dtype: str, names: str = "") -> list[cases.Case]:
    """Every different case of the tests in this type, ``names`` the start of their names."""
    distinct = {replace(case, name="", dtype=dtype): replace(case, dtype=dtype) for case in cases.CASES
                if case.name.startswith(names)}
    return list(distinct.values())


def place_of(backend: str) -> tuple[Any, Any]:
    """The library and device whose arrays a backend takes. flex computes on the CPU here: on a GPU it would compile
    every case, for hours (forward_equivalence.py and backward_equivalence.py do that with fewer)."""
    from cupy_dma.arrays import CPU, Device, library_named

    if backend == "triton":
        return library_named("torch"), Device("cuda", 0)
    return (library_named("cupy"), Device("cuda", 0)) if backend == "cuda" else (library_named("numpy"), CPU)


def compare(backends: list[str], dtypes: list[str], *, names: str = "", with_dlse: bool = False) -> list[Line]:
    from tqdm import tqdm

    places = {backend: place_of(backend) for backend in backends}
    lines = {(backend, dtype): Line(backend, dtype) for backend in backends for dtype in dtypes
             if dtype in TYPES_OF.get(backend, DTYPES)}
    todo = [(dtype, case) for dtype in dtypes for case in grid(dtype, names)]
    for dtype, case in tqdm(todo, unit="case", disable=None):
        expected: dict[bool, Any] = {}  # the oracle's answer, one for all backends, one for products through TF32
        for backend, (place, device) in places.items():
            line = lines.get((backend, dtype))
            if line is None:
                continue

            def convert(array: np.ndarray, place: Any = place, device: Any = device) -> Any:
                return place.from_numpy(np.ascontiguousarray(array), device)

            try:
                found = cases.run_backward(case, convert, with_dlse=with_dlse, backend=backend)
            except NotImplementedError:
                line.not_served += 1
                continue
            tf32 = backend == "cuda" and dtype == "float32"
            if tf32 not in expected:
                expected[tf32] = cases.expected_gradients(case, with_dlse=with_dlse, tf32=tf32)
            line.add(case, [None if x is None else place.to_numpy(x) for x in found], expected[tf32])
    return list(lines.values())


def table(lines: list[Line]) -> str:
    rows = [f"{'backend':<9}{'type':<10}{'cases':>6}{'not served':>12}" + "".join(f"{'d' + n:>9}" for n in NAMES)]
    for line in lines:
        rows.append(f"{line.backend:<9}{line.dtype:<10}{line.cases:>6}{line.not_served:>12}"
                    + "".join(f"{line.worst[name]:>9.3f}" if line.cases else f"{'–':>9}" for name in NAMES)
                    + ("" if line.ok else f"  EXCEEDS in {line.worst_case}"))
    return "\n".join(rows)


def where(commit: str | None) -> dict[str, Any]:
    """Versions, device and commit of this run."""
    found: dict[str, Any] = {}
    if importlib.util.find_spec("torch"):  # measure.py needs it
        from benchmarks.harness import measure

        found = measure.machine()
    if commit:
        found["commit"] = commit
    return found


def number(ratio: float) -> float | str:
    return ratio if math.isfinite(ratio) else "infinite"  # JSON has no infinity


def record(lines: list[Line], seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"method": __doc__, "arguments": arguments, **where(arguments["commit"]), "seconds": seconds, "lines": [
        {"backend": line.backend, "dtype": line.dtype, "cases": line.cases, "not_served": line.not_served,
         "worst_error_over_allowed": {name: number(ratio) for name, ratio in line.worst.items()},
         "worst_case": line.worst_case, "ok": line.ok} for line in lines]}


def main(arguments: list[str] | None = None) -> int:
    from cupy_dma import get_available_backends

    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--backend", action="append", help="only this one (may be repeated)")
    options.add_argument("--dtype", action="append", choices=DTYPES, help="only this type (may be repeated)")
    options.add_argument("--cases", default="", help="only cases whose name starts with this")
    options.add_argument("--dlse", action="store_true", help="also with a gradient of lse")
    options.add_argument("--out", default=str(RESULTS), help="folder of the JSON")
    options.add_argument("--commit", help="recorded as the commit where the tree is a copy without its history")
    args = options.parse_args(arguments)
    started = time.monotonic()
    lines = compare(args.backend or get_available_backends(), args.dtype or list(DTYPES), names=args.cases,
                    with_dlse=args.dlse)
    ok = all(line.ok for line in lines) and any(line.cases for line in lines)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"grad_equivalence{'' if ok else '.failed'}.json"
    path.write_text(json.dumps(record(lines, time.monotonic() - started, vars(args)), indent=1) + "\n")
    print(table(lines))
    print(f"wrote {path} after {time.monotonic() - started:.0f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
