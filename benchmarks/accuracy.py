"""What forward_equivalence.py and backward_equivalence.py share: named cases, every backend, the strict rule, a table.

Each case is drawn, laid out and answered by tests/oracle/cases.py and tests/oracle/reference.py, in sizes of several tiles. An error
``max|x - ref64|`` may be at most twice (gradients: three times) that of the plain same-precision computation, plus the
roundings that ``reference.error_and_allowed`` names; NaN and infinities must stand where the oracle has them, and every
result must have the type and shape of its argument. Nothing is averaged and nothing may be left out of a tensor.

A backend that cannot run here stands in the table with the reason, and so does a case that it refuses.
"""
from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grad_equivalence import TYPES_OF, number, place_of, where
from benchmarks.harness.suite import RESULTS
from tests.oracle import reference
from tests.oracle.cases import Case

DTYPES = ("float16", "bfloat16", "float32")
BACKENDS = ("cuda", "numpy", "triton", "flex")
TF32 = ("cuda", "triton")  # these multiply float32 by tensor cores, if they take it
_SIZES = {"batch": 2, "query_length": 260, "key_length": 260, "heads": 4, "kv_heads": 2, "head_dim": 64, "window": 64}

CASES = [Case(name, **{**_SIZES, **changes}) for name, changes in {
    "no mask": {"mask": "none", "bias": "none"},
    "causal": {"mask": "none", "bias": "none", "causal": True},
    "top-w, key bias": {},
    "sliding window": {"mask": "window", "bias": "none"},
    "padding": {"mask": "padding", "bias": "none"},
    "documents": {"mask": "documents", "bias": "none"},
    "dense mask": {"mask": "dense", "bias": "none"},
    "dense bias": {"mask": "none", "bias": "full_per_head"},
    "dense mask and bias": {"mask": "dense_per_head", "bias": "full", "causal": True},
    "softcap": {"softcap": 3.0, "scale": 1.0},
    "groups of 4 heads": {"heads": 8, "head_dim": 128},
    "odd sizes": {"query_length": 129, "key_length": 203, "head_dim": 41, "heads": 3, "kv_heads": 1},
    "empty rows": {"mask": "none", "causal": True, "query_length": 260, "key_length": 190},
}.items()]

Answer = dict[str, tuple[np.ndarray, np.ndarray, float]]  # name -> float64, plain, size of the terms


@dataclass
class Row:
    """One case on one backend in one type."""

    backend: str
    dtype: str
    case: str
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # tensor -> error, allowed
    reason: str = ""  # why there is nothing

    @property
    def worst(self) -> str:
        """The tensor with the largest error in units of what is allowed."""
        return max(self.errors, key=lambda name: _ratio(*self.errors[name]))

    @property
    def ok(self) -> bool:
        return all(_ratio(*pair) <= 1 for pair in self.errors.values())

    def add(self, name: str, found: Any, ref: np.ndarray, plain: np.ndarray, terms: float, factor: int) -> None:
        if found is None or found.shape != ref.shape or found.dtype != plain.dtype or reference.misplaced(found, ref):
            self.errors[name] = math.inf, 0.0
            return
        error, _, allowed = reference.error_and_allowed(found, ref, plain, found.dtype, factor, terms)
        self.errors[name] = error, allowed


def _ratio(error: float, allowed: float) -> float:
    return 0.0 if error == 0 else error / allowed if allowed else math.inf


@dataclass(frozen=True)
class Suite:
    """What is compared: ``run(case, convert, backend)`` gives the tensors, ``expected(case, **options)`` the answer."""

    name: str
    method: str
    run: Callable[[Case, Callable[[np.ndarray], Any], str], dict[str, Any]]
    expected: Callable[..., Answer]
    factor: int


def place_for(backend: str) -> tuple[Any, Any]:
    """Where a backend's arrays lie: as for the gradients of the whole grid, but flex on the GPU if there is one."""
    if backend == "flex":
        import torch

        from cupy_dma.arrays import Device, library_named

        if torch.cuda.is_available():
            return library_named("torch"), Device("cuda", 0)
    return place_of(backend)


def compare(suite: Suite, backends: list[str], dtypes: list[str], names: str = "") -> Iterator[Row]:
    from tqdm import tqdm

    from cupy_dma.backends import why_not

    reasons = {backend: why_not(backend) for backend in backends}
    yield from (Row(backend, "", "", reason=f"not available: {why}") for backend, why in reasons.items() if why)
    places = {backend: place_for(backend) for backend, reason in reasons.items() if not reason}
    todo = [replace(case, dtype=dtype) for dtype in dtypes for case in CASES if case.name.startswith(names)]
    for case in tqdm(todo, unit="case", disable=None):
        answers: dict[bool, Answer] = {}
        for backend, (place, device) in places.items():
            row = Row(backend, case.dtype, case.name)
            if case.dtype not in TYPES_OF.get(backend, DTYPES):
                row.reason = f"{backend} does not take {case.dtype}"
                yield row
                continue

            def convert(array: np.ndarray, place: Any = place, device: Any = device) -> Any:
                return place.from_numpy(np.ascontiguousarray(array), device)

            try:
                found = suite.run(case, convert, backend)
            except NotImplementedError as error:
                row.reason = str(error)
                yield row
                continue
            tf32 = case.dtype == "float32" and backend in TF32
            if tf32 not in answers:
                answers[tf32] = suite.expected(case, **({"tf32": True} if tf32 else {}))
            for name, expected in answers[tf32].items():
                tensor = found.get(name)
                row.add(name, None if tensor is None else place.to_numpy(tensor), *expected, suite.factor)
            yield row


HEADER = f"{'backend':<9}{'type':<10}{'case':<22}{'tensor':<7}{'max error':>11}{'allowed':>11}  ok"


def line(row: Row) -> str:
    start = f"{row.backend:<9}{row.dtype:<10}{row.case:<22}"
    if row.reason:
        return f"{start}{row.reason}"
    error, allowed = row.errors[row.worst]
    return f"{start}{row.worst:<7}{error:>11.3g}{allowed:>11.3g}  {'yes' if row.ok else 'EXCEEDS'}"


def printed(rows: Iterator[Row]) -> list[Row]:
    """The rows, each of which has been printed as it came: a GPU's compilers take seconds for a case."""
    print(HEADER)
    found = []
    for row in rows:
        print(line(row), flush=True)
        found.append(row)
    return found


def record(suite: Suite, rows: list[Row], seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"method": f"{suite.method}\n{__doc__}", "arguments": arguments, **where(arguments["commit"]),
            "seconds": seconds, "rows": [
                {"backend": row.backend, "dtype": row.dtype, "case": row.case, "reason": row.reason, "ok": row.ok,
                 "tensors": {name: {"error": number(error), "allowed": allowed}
                             for name, (error, allowed) in row.errors.items()}} for row in rows]}


def main(suite: Suite, arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=suite.method.splitlines()[0])
    options.add_argument("--backend", action="append", choices=BACKENDS, help="only this one (may be repeated)")
    options.add_argument("--dtype", action="append", choices=DTYPES, help="only this type (may be repeated)")
    options.add_argument("--cases", default="", help="only cases whose name starts with this")
    options.add_argument("--out", default=str(RESULTS), help="folder of the JSON")
    options.add_argument("--commit", help="recorded as the commit where the tree is a copy without its history")
    args = options.parse_args(arguments)
    started = time.monotonic()
    rows = printed(compare(suite, args.backend or list(BACKENDS), args.dtype or list(DTYPES), args.cases))
    ok = all(row.ok for row in rows) and any(row.errors for row in rows)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{suite.name}_equivalence{'' if ok else '.failed'}.json"
    path.write_text(json.dumps(record(suite, rows, time.monotonic() - started, vars(args)), indent=1) + "\n")
    print(f"wrote {path} after {time.monotonic() - started:.0f} s")
    return 0 if ok else 1
