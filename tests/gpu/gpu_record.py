"""The record of a GPU test run: a pytest plugin, and a check that the record still matches the sources.

    python -m pytest -m gpu -p tests.gpu.gpu_record --gpu-record tests/gpu_results.json     (make test-gpu)
    python -m tests.gpu.gpu_record                                                          (make check-record)

If a GPU is not available for long enough, N runs can each take a share of the tests. Their records are then joined;
they must have the same sources, device and versions:

    make test-gpu GPU_SHARE=1/2      (writes build/gpu_results-1-2.json)
    make test-gpu GPU_SHARE=2/2
    python -m tests.gpu.gpu_record --join build/gpu_results-*-2.json

Shares may be shared again: 1/4 is 1/8 and 5/8.

Continuous integration has no GPU, so the result of the last run on one is kept in the repository. ``source_digest``
ties it to the sources: sha256 over every .cu .cuh .py .h .hpp file below ``kernels`` and then below ``cupy_dma``, in
the order of their paths (relative to the root, with slashes): first the path in UTF-8, then the bytes of the file.
"""
import argparse
import datetime
import hashlib
import importlib
import itertools
import json
import math
import platform
import re
import sys
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "gpu_results.json"
OUTCOMES = ("passed", "failed", "skipped")
SUFFIXES = (".cu", ".cuh", ".py", ".h", ".hpp")


def source_digest(root: Path = ROOT) -> str:
    digest = hashlib.sha256()
    for folder in ("kernels", "cupy_dma"):
        paths = (p.relative_to(root).as_posix() for p in (root / folder).rglob("*") if p.is_file())
        for path in sorted(p for p in paths if p.endswith(SUFFIXES)):
            digest.update(path.encode())
            digest.update((root / path).read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("numpy", "cupy", "torch", "triton"):
        try:
            found[name] = importlib.import_module(name).__version__
        except Exception:  # not installed or broken: the run did not use it
            continue
    try:
        import cupy

        found["cuda_driver"] = str(cupy.cuda.runtime.driverGetVersion())
        found["cuda_runtime"] = str(cupy.cuda.runtime.runtimeGetVersion())
        found["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except Exception:
        pass
    return found


def device_name() -> str | None:
    """The name of the current GPU, None where there is none."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    except Exception:
        return None


class Recorder:
    """Counts the outcome of every test; an error outside the test itself counts as a failure."""

    def __init__(self, path: Path, digest: str, share: str | None = None):
        self.path = path
        self.digest = digest
        self.share = share
        self.outcome: dict[str, str] = {}

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.outcome[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self.outcome.setdefault(report.nodeid, report.outcome)

    def pytest_collectreport(self, report):
        if report.failed:
            self.outcome[report.nodeid] = "failed"

    def pytest_sessionfinish(self, session):
        outcomes = list(self.outcome.values())
        device = device_name()
        if device is None or "passed" not in outcomes and "failed" not in outcomes:
            print(f"\nno GPU test ran here: {self.path} is left as it was", file=sys.stderr)
            session.exitstatus = session.exitstatus or 1
            return
        write(self.path, {
            "source_digest": self.digest,
            **{outcome: outcomes.count(outcome) for outcome in OUTCOMES},
            "device": device,
            "versions": versions(),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            **({"share": self.share} if self.share else {}),
        })


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def share(text: str) -> str:
    """``text`` if it is I/N with I from 1 to N; otherwise raises ValueError, which pytest reports."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not found or int(found[1]) > int(found[2]):
        raise ValueError(f"a share is I/N with I from 1 to N, got {text!r}")
    return text


def pytest_addoption(parser):
    parser.addoption("--gpu-record", metavar="PATH", type=Path, help="write the result of this GPU test run to PATH")
    parser.addoption("--gpu-share", metavar="I/N", type=share, help="run one of N shares of the tests")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--gpu-share"):
        number, count = map(int, config.getoption("--gpu-share").split("/"))
        shares: list[list[Any]] = [[] for _ in range(count)]
        for item in items:
            shares[zlib.crc32(item.nodeid.encode()) % count].append(item)
        items[:] = shares.pop(number - 1)
        config.hook.pytest_deselected(items=[*itertools.chain(*shares)])


def pytest_configure(config):
    path = config.getoption("--gpu-record")
    if path is not None and not hasattr(config, "workerinput"):  # under xdist the controller counts for all workers
        # Digest of the sources at the start: the record must not cover edits made during the run.
        recorder = Recorder(config.rootpath / path, source_digest(), config.getoption("--gpu-share"))
        config.pluginmanager.register(recorder, "gpu-recorder")


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the records of all shares. Raises ValueError if one is missing or duplicate, or has other sources or another
    machine."""
    shares = [share(str(record.get("share"))) for record in records]
    parts = [tuple(map(int, text.split("/"))) for text in shares]
    count = math.lcm(*[of for _, of in parts])
    if sorted(i for number, of in parts for i in range(number, count + 1, of)) != [*range(1, count + 1)]:
        raise ValueError(f"these are not all shares, each once: {', '.join(sorted(shares))}")
    for key in ("source_digest", "device", "versions"):
        if any(record[key] != records[0][key] for record in records):
            raise ValueError(f"{key} is not the same in all shares")
    found = {key: value for key, value in records[0].items() if key != "share"}
    found |= {outcome: sum(record[outcome] for record in records) for outcome in OUTCOMES}
    return found | {"date": max(record["date"] for record in records)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.gpu_record", description="Checks the record.")
    parser.add_argument("--join", metavar="PATH", type=Path, nargs="+", help="make it of these shares' records first")
    options = parser.parse_args(arguments)
    if options.join:
        try:
            write(RECORD, joined([json.loads(path.read_text()) for path in options.join]))
        except (OSError, ValueError) as error:
            parser.error(str(error))
    if not RECORD.exists():
        print(f"{RECORD} does not exist: run make test-gpu on a machine with a GPU")
        return 1
    record = json.loads(RECORD.read_text())
    if record["failed"]:
        print(f"{record['failed']} GPU tests failed in the recorded run of {record['date']}")
        return 1
    if record["source_digest"] != source_digest():
        print(f"the recorded run of {record['date']} belongs to other sources: run make test-gpu again")
        return 1
    print(f"{record['passed']} GPU tests passed on {record['device']} ({record['date']}), with these sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
