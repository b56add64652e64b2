"""The record of the last GPU run: its format, its digest, and that nothing failed. That it belongs to the present
sources is checked by ``make check-record`` and not here, since sources change between two runs on a GPU."""
import hashlib
import json

import pytest

from tests.gpu import gpu_record


def test_digest_is_over_paths_and_bytes_in_path_order(tmp_path):
    files = {"cupy_dma/b.py": b"one", "kernels/sm90/x.cuh": b"two", "kernels/a.cu": b"three"}
    for path, content in {**files, "kernels/notes.md": b"not a source", "tests/t.py": b"neither"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    text = b"kernels/a.cu" + b"three" + b"kernels/sm90/x.cuh" + b"two" + b"cupy_dma/b.py" + b"one"
    assert gpu_record.source_digest(tmp_path) == hashlib.sha256(text).hexdigest()


def test_record_of_the_last_gpu_run():
    if not gpu_record.RECORD.exists():
        pytest.skip("no GPU run has been recorded yet")
    record = json.loads(gpu_record.RECORD.read_text())
    assert set(record) == {"source_digest", "passed", "failed", "skipped", "device", "versions", "date"}
    assert len(bytes.fromhex(record["source_digest"])) == 32
    assert record["failed"] == 0
    assert record["passed"] > 0


def test_recorder_counts_setup_errors_as_failures(tmp_path, monkeypatch):
    class Report:
        def __init__(self, nodeid, when, outcome):
            self.nodeid, self.when, self.outcome = nodeid, when, outcome
            self.failed, self.skipped = outcome == "failed", outcome == "skipped"

    class Session:
        exitstatus = 0

    monkeypatch.setattr(gpu_record, "device_name", lambda: "a GPU")
    recorder = gpu_record.Recorder(tmp_path / "record.json", "00")
    for nodeid, call, teardown in [("a", "passed", "passed"), ("b", "passed", "failed"), ("c", "skipped", "passed")]:
        for when, outcome in [("setup", "passed"), ("call", call), ("teardown", teardown)]:
            recorder.pytest_runtest_logreport(Report(nodeid, when, outcome))
    recorder.pytest_sessionfinish(Session())
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["passed"], record["failed"], record["skipped"]) == (1, 1, 1)


def test_no_record_without_a_gpu(tmp_path, monkeypatch, capsys):
    class Session:
        exitstatus = 0

    monkeypatch.setattr(gpu_record, "device_name", lambda: None)
    session = Session()
    gpu_record.Recorder(tmp_path / "record.json", "00").pytest_sessionfinish(session)
    assert session.exitstatus == 1
    assert not (tmp_path / "record.json").exists()
