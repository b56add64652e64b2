"""Results of every backend against the float64 oracle, in every type.

tests/oracle/cases.py and tests/oracle/reference.py draw, lay out and answer each case. Named cases have several tiles;
the grid varies masks, biases, lengths, head dims, grouped heads, strides, softcap and scale. An error
``max|x - ref64|`` may be at most twice (gradients: three times) that of the plain same-precision computation, plus the
roundings that ``reference.error_and_allowed`` names. NaN and infinities must be where the oracle has them, and every
result must have the type and shape of its argument; otherwise its error counts as infinite. Every element is compared,
and nothing is averaged.

Each line shows the tensor closest to its limit; for the grid, it shows the worst error of each gradient relative to its
limit. A backend that cannot run here is listed with the reason, and so is a case that a backend refuses (in the grid
these are counted as not served). Writes forward_equivalence.json, backward_equivalence.json or grad_equivalence.json.
If any error exceeds its limit, the exit status is 1 and the file name ends with .failed.json.
"""
import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.harness.command import options_of, write_record
from cupy_dma.arrays import CPU, Device, library_named
from cupy_dma.backends import why_not
from tests.oracle import cases, reference
from tests.oracle.cases import Case

DTYPES = ("float16", "bfloat16", "float32")
BACKENDS = ("cuda", "numpy", "triton", "flex")
TYPES_OF = {"cuda": DTYPES}  # cuda raises TypeError for other types; the other backends support float64 too
GRADIENTS = ("query", "key", "value", "bias")
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


# ---- what is compared ----
class Suite(NamedTuple):
    file: str  # of the results
    dtypes: tuple[str, ...]
    factor: int  # allowed multiple of the plain error
    tf32: tuple[str, ...]  # backends that multiply float32 on tensor cores
    cases: Callable[[str, str], list[Case]]  # (type, start of the name)
    run: Callable[..., dict[str, Any]]  # (case, convert, backend, with_dlse)
    expected: Callable[..., Answer]  # (case, with_dlse, tf32)


def named(dtype: str, start: str = "") -> list[Case]:
    return [replace(case, dtype=dtype) for case in CASES if case.name.startswith(start)]


def grid(dtype: str, start: str = "") -> list[Case]:
    """Every different case of the tests in this type."""
    return list({replace(case, name="", dtype=dtype): replace(case, dtype=dtype) for case in cases.CASES
                 if case.name.startswith(start)}.values())


OF_FORWARD = (lambda case, convert, backend, _: dict(zip(("out", "lse"), cases.run(case, convert, backend=backend))),
              lambda case, _, tf32: cases.expected(case, tf32=tf32))
OF_BACKWARD = (lambda case, convert, backend, dlse: cases.run_backward(case, convert, with_dlse=dlse,
                                                                       backend=backend)._asdict(),
               lambda case, dlse, tf32: cases.expected_gradients(case, with_dlse=dlse, tf32=tf32))
SUITES = {
    "forward": Suite("forward_equivalence", DTYPES, 2, ("cuda", "triton"), named, *OF_FORWARD),
    "backward": Suite("backward_equivalence", DTYPES, 3, ("cuda", "triton"), named, *OF_BACKWARD),
    "grid": Suite("grad_equivalence", (*DTYPES, "float64"), 3, ("cuda",), grid, *OF_BACKWARD)}


# ---- comparing ----
@dataclass
class Row:
    """One case on one backend in one type."""

    backend: str
    dtype: str
    case: str
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # tensor -> error, allowed
    reason: str = ""  # why there is no result

    def ratio(self, name: str) -> float:
        """The error in units of what is allowed."""
        error, allowed = self.errors[name]
        return 0.0 if error == 0 else error / allowed if allowed else math.inf

    @property
    def worst(self) -> str:
        return max(self.errors, key=self.ratio)

    @property
    def ok(self) -> bool:
        return all(self.ratio(name) <= 1 for name in self.errors)

    def add(self, name: str, found: Any, expected: tuple[np.ndarray, np.ndarray, float] | None, factor: int) -> None:
        ref, plain, terms = expected or (None, None, 0.0)
        if found is None or ref is None or plain is None or (found.shape, found.dtype) != (
                ref.shape, plain.dtype) or reference.misplaced(found, ref):
            if found is not None or ref is not None:
                self.errors[name] = math.inf, 0.0
            return
        error, _, allowed = reference.error_and_allowed(found, ref, plain, found.dtype, factor, terms)
        self.errors[name] = error, allowed


def library_for(backend: str, suite: Suite) -> tuple[Any, Any]:
    """The library and device of a backend's arrays. flex runs on the GPU if there is one, except for the grid, where it
    would compile every case, for hours."""
    on_gpu = Device("cuda", 0)
    if backend == "flex" and suite.cases is named:
        return (library_named("torch"), on_gpu) if torch.cuda.is_available() else (library_named("numpy"), CPU)
    if backend == "triton":
        return library_named("torch"), on_gpu
    return (library_named("cupy"), on_gpu) if backend == "cuda" else (library_named("numpy"), CPU)


def compare(suite: Suite, backends: list[str], dtypes: list[str], names: str = "", dlse: bool = True) -> Iterator[Row]:
    reasons = {backend: why_not(backend) for backend in backends}
    yield from (Row(backend, "", "", reason=f"not available: {why}") for backend, why in reasons.items() if why)
    libraries = {backend: library_for(backend, suite) for backend, reason in reasons.items() if not reason}
    for case in tqdm([case for dtype in dtypes for case in suite.cases(dtype, names)], unit="case", disable=None):
        answers: dict[bool, Answer] = {}  # one for all backends, one for products through TF32
        for backend, (library, device) in libraries.items():
            row = Row(backend, case.dtype, case.name)
            if case.dtype not in TYPES_OF.get(backend, suite.dtypes):
                row.reason = f"{backend} does not take {case.dtype}"
                yield row
                continue

            def convert(array: np.ndarray, library: Any = library, device: Any = device) -> Any:
                return library.from_numpy(np.ascontiguousarray(array), device)

            try:
                found = suite.run(case, convert, backend, dlse)
            except NotImplementedError as error:
                row.reason = str(error) or "not served"
                yield row
                continue
            tf32 = case.dtype == "float32" and backend in suite.tf32
            if tf32 not in answers:
                answers[tf32] = suite.expected(case, dlse, tf32)
            for name, tensor in found.items():
                row.add(name, None if tensor is None else library.to_numpy(tensor), answers[tf32].get(name),
                        suite.factor)
            yield row


# ---- what is printed and recorded ----
def printed(rows: Iterator[Row]) -> Iterator[Row]:
    """Print each row when it is ready: compilers for a GPU take seconds per case."""
    print(f"{'backend':<9}{'type':<10}{'case':<22}{'tensor':<7}{'max error':>11}{'allowed':>11}  ok")
    for row in rows:
        start = f"{row.backend:<9}{row.dtype:<10}{row.case:<22}"
        if row.reason:
            print(f"{start}{row.reason}", flush=True)
        else:
            error, allowed = row.errors[row.worst]
            word = "yes" if row.ok else "EXCEEDS"
            print(f"{start}{row.worst:<7}{error:>11.3g}{allowed:>11.3g}  {word}", flush=True)
        yield row


def entry(row: Row) -> dict[str, Any]:
    return {"backend": row.backend, "dtype": row.dtype, "case": row.case, "reason": row.reason, "ok": row.ok,
            "tensors": {name: {"error": number(error), "allowed": allowed}
                        for name, (error, allowed) in row.errors.items()}}


def by_type(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows of the grid, one entry per backend and type."""
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.dtype in TYPES_OF.get(row.backend, (row.dtype,)) and row.dtype:
            grouped.setdefault((row.backend, row.dtype), []).append(row)
    found = []
    for (backend, dtype), of_type in grouped.items():
        served = [row for row in of_type if not row.reason]
        worst, case = dict.fromkeys(GRADIENTS, 0.0), {}
        for row in served:
            for name in row.errors:
                if row.ratio(name) > worst[name]:
                    worst[name], case[name] = row.ratio(name), row.case
        found.append({"backend": backend, "dtype": dtype, "cases": len(served),
                      "not_served": len(of_type) - len(served),
                      "worst_error_over_allowed": {name: number(ratio) for name, ratio in worst.items()},
                      "worst_case": case, "ok": all(row.ok for row in served)})
    return found


def table(lines: list[dict[str, Any]]) -> str:
    rows = [f"{'backend':<9}{'type':<10}{'cases':>6}{'not served':>12}" + "".join(f"{'d' + n:>9}" for n in GRADIENTS)]
    for found in lines:
        worst = found["worst_error_over_allowed"].values()
        rows.append(f"{found['backend']:<9}{found['dtype']:<10}{found['cases']:>6}{found['not_served']:>12}"
                    + "".join(f"{float(str(x).replace('infinite', 'inf')):>9.3f}" if found["cases"] else f"{'–':>9}"
                              for x in worst)
                    + ("" if found["ok"] else f"  EXCEEDS in {found['worst_case']}"))
    return "\n".join(rows)


def number(ratio: float) -> float | str:
    return ratio if math.isfinite(ratio) else "infinite"  # JSON has no infinity


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("what", choices=SUITES)
    options.add_argument("--backend", action="append", choices=BACKENDS, help="only this backend (may be repeated)")
    options.add_argument("--dtype", action="append", choices=SUITES["grid"].dtypes,
                         help="only this type (may be repeated)")
    options.add_argument("--cases", default="", help="only cases whose name starts with this")
    options.add_argument("--dlse", action="store_true", help="in the grid, also give a gradient of lse")


def run(args: argparse.Namespace) -> int:
    suite, is_grid = SUITES[args.what], args.what == "grid"
    started = time.monotonic()
    rows = compare(suite, args.backend or list(BACKENDS), args.dtype or list(suite.dtypes), args.cases,
                   args.dlse or not is_grid)
    found = list(rows if is_grid else printed(rows))
    ok = all(row.ok for row in found) and any(row.errors for row in found)
    entries = {"lines": by_type(found)} if is_grid else {"rows": [entry(row) for row in found]}
    if is_grid:
        print(table(entries["lines"]))
    seconds = time.monotonic() - started
    path = write_record(f"{suite.file}.json", args, __doc__, ok, arguments=options_of(args), seconds=seconds, **entries)
    print(f"wrote {path} after {seconds:.0f} s")
    return 0 if ok else 1
