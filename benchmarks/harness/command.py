"""What all routines share around their measurements: options, records and the final messages of a run."""
import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import measure
from benchmarks.harness.folders import output, write
from benchmarks.harness.pages import report_of


class Refused(Exception):
    """Options that make no sense, or do not work on this machine."""


def at_least_1(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise Refused(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")


def listed(allowed: tuple[Any, ...] | None, kind: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """The type of an option that takes comma-separated values."""
    def parse(text: str) -> list[Any]:
        try:
            found = [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        wrong = [x for x in found if allowed is not None and x not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is not one of {', '.join(map(str, allowed or ()))}")
        return found

    return parse


def needs_hopper() -> None:
    if not measure.on_gpu():
        raise Refused("this needs a Hopper GPU")


def write_record(name: str, args: argparse.Namespace, method: str | None, ok: bool = True, **result: Any) -> Path:
    """Write a result with its method, machine and options to ``name`` in the folder of this run; if ``ok`` is false, to
    a file beside it. Returns the path."""
    options = {name: x for name, x in vars(args).items() if name not in ("out", "show", "update_docs")}
    record = {"method": method, **measure.machine(), "arguments": options, **result}
    record["commit"] = args.commit or record["commit"]
    path = output(args.out, record["device"]) / name
    path = path if ok else path.with_suffix(".failed.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, record)
    return path


def conclude(name: str, args: argparse.Namespace, method: str | None, ok: bool = True, file: str = "",
             whole: bool = True, **result: Any) -> int:
    """Write the record of a routine to ``file``, by default that of its report, in place of ``name.partial.json``. If
    it is not ``whole``, only print it."""
    if not whole:
        print(report_of(name).text({**measure.machine(), **result}))
        return 0 if ok else 1
    path = write_record(file or report_of(name).record, args, method, ok, **result)
    path.with_name(f"{name}.partial.json").unlink(missing_ok=True)
    return finished(name, path, ok)


def finished(name: str, path: Path, ok: bool = True) -> int:
    """Draw the chart of what was recorded, print it, and give the exit status."""
    report, result = report_of(name), json.loads(path.read_text())
    report.chart(result, path.with_suffix(".png"))
    print(f"{report.text(result)}\nwrote {path}")
    return 0 if ok else 1


def attempted(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a peer's call gives, or a note why it cannot run, which is a result too. Releases memory afterwards."""
    try:
        found = call()
    except Exception as error:
        found = {"ms": None, "note": why_not(error)}
    measure.free_memory()
    return found


def why_not(error: Exception) -> str:
    """The note for a peer that cannot run."""
    words = f"{type(error).__name__}: {error}"
    if "out of memory" in words.lower() or "OutOfMemory" in words:
        return "out of memory"
    return next(line for line in words.splitlines() if line.strip())[:200]
