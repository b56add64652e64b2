"""Where results lie: a folder for each kind of GPU in ``benchmarks/results``, ``cpu``, and ``evidence`` for what does
not depend on the machine. The docs show the newest of each."""
from __future__ import annotations

import json
import re
from pathlib import Path

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


def recorded(name: str, out: str | None = None) -> Path | None:
    """The file ``name`` in the folder ``out``, or the newest one of all folders of results."""
    found = [path for path in (RESULTS.glob(f"*/{name}") if out is None else [Path(out) / name]) if path.exists()]
    return max(found, key=lambda path: json.loads(path.read_text())["date"], default=None)
