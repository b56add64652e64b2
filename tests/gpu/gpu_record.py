"""The record of a GPU test run: a pytest plugin, and a check that the record still belongs to the sources.

    python -m pytest -m gpu -p tests.gpu.gpu_record --gpu-record tests/gpu_results.json     (make test-gpu)
    python -m tests.gpu.gpu_record                                                          (make check-record)

Continuous integration has no GPU, so the result of the last run on one is kept in the repository. ``source_digest``
ties it to the sources: sha256 over every .cu .cuh .py .h .hpp file below ``kernels`` and then below ``cupy_dma``, in
the order of their paths (relative to the root, with slashes): first the path in UTF-8, then the bytes of the file.
"""
from __future__ import annotations

import datetime
import hashlib
import importlib
import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "gpu_results.json"
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
        except Exception:  # not installed, or installed and broken: either way it took no part in the run
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

    def __init__(self, path: Path, digest: str):
        self.path = path
        self.digest = digest
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
        self.path.write_text(json.dumps({
            "source_digest": self.digest,
            "passed": outcomes.count("passed"),
            "failed": outcomes.count("failed"),
            "skipped": outcomes.count("skipped"),
            "device": device,
            "versions": versions(),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }, indent=2) + "\n")


def pytest_addoption(parser):
    parser.addoption("--gpu-record", metavar="PATH", type=Path, help="write the result of this GPU test run to PATH")


def pytest_configure(config):
    path = config.getoption("--gpu-record")
    if path is not None and not hasattr(config, "workerinput"):  # under xdist the controller counts for all workers
        # The digest of the sources that the run starts with: an edit during the run must not be vouched for.
        config.pluginmanager.register(Recorder(config.rootpath / path, source_digest()), "gpu-recorder")


def main() -> int:
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
