"""Folders of results in ``benchmarks/results``: one per kind of GPU, ``cpu``, and ``evidence`` for results that do not
depend on the machine. The docs show the newest file of each name."""
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EVIDENCE = RESULTS / "evidence"


def folder_of(device: str) -> str:
    """``h100`` of ``NVIDIA H100 80GB HBM3``, ``rtx-4090`` of ``NVIDIA GeForce RTX 4090``, ``cpu`` of other names."""
    maker, *words = re.split(r"[ -]", device.replace("GeForce ", ""))
    if maker != "NVIDIA":
        return "cpu"
    model = next((i for i, word in enumerate(words) if any(map(str.isdigit, word))), len(words) - 1)
    return "-".join(words[:model + 1]).lower()


def output(out: str | None, device: str | None = None) -> Path:
    """The folder in which a run writes: ``out``, or that of ``device``, by default this machine's first GPU."""
    if out is not None:
        return Path(out)
    if device is None:
        from benchmarks.harness import measure

        device = measure.machine()["device"]
    return RESULTS / folder_of(device)


def newest(pattern: str, out: str | None = None) -> list[Path]:
    """The files of this name in the folder ``out``; without ``out``, the newest file of each name in all folders."""
    found = RESULTS.glob(f"*/{pattern}") if out is None else Path(out).glob(pattern)
    by_date = sorted(found, key=lambda path: json.loads(path.read_text())["date"])
    return list({path.name: path for path in by_date}.values())


def recorded(name: str, out: str | None = None) -> Path | None:
    return next(iter(newest(name, out)), None)


def rounded(x: Any) -> Any:
    """Every number rounded to eight digits, more than a clock gives."""
    if isinstance(x, dict):
        return {name: rounded(y) for name, y in x.items()}
    return [rounded(y) for y in x] if isinstance(x, (list, tuple)) else float(f"{x:.8g}") if type(x) is float else x


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, one line per entry and per element of a list of objects."""
    def line(value: Any) -> str:
        return json.dumps(rounded(value), separators=(",", ":"))

    def text(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n" + ",\n".join(map(line, value)) + "]"
        return line(value)

    entries = ",\n".join(f"{json.dumps(name)}:{text(value)}" for name, value in record.items())
    path.write_text(f"{{{entries}}}\n")


def read(name: str, out: str | None = None) -> dict[str, Any]:
    """Read the record ``name``; ends the script if there is none."""
    path = recorded(name, out)
    if path is None:
        raise SystemExit(f"{name} is not recorded in {out or RESULTS}")
    return json.loads(path.read_text())
