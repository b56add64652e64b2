"""The record of the last GPU run: its format, its digest, and that nothing failed. ``make check-record`` checks whether
it matches the current sources; this file does not, because sources change between GPU runs."""
import hashlib
import itertools
import json
from types import SimpleNamespace
from unittest.mock import Mock

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


@pytest.mark.parametrize("share", [None, "1/2"])
def test_recorder_counts_setup_errors_as_failures(share, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_record, "device_name", lambda: "a GPU")
    recorder = gpu_record.Recorder(tmp_path / "new" / "record.json", "00", share)
    for nodeid, call, teardown in [("a", "passed", "passed"), ("b", "passed", "failed"), ("c", "skipped", "passed")]:
        for when, outcome in [("setup", "passed"), ("call", call), ("teardown", teardown)]:
            recorder.pytest_runtest_logreport(SimpleNamespace(
                nodeid=nodeid, when=when, outcome=outcome, failed=outcome == "failed", skipped=outcome == "skipped"))
    recorder.pytest_sessionfinish(SimpleNamespace(exitstatus=0))
    record = json.loads((tmp_path / "new" / "record.json").read_text())
    assert (record["passed"], record["failed"], record["skipped"], record.get("share")) == (1, 1, 1, share)


def test_no_record_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_record, "device_name", lambda: None)
    session = SimpleNamespace(exitstatus=0)
    gpu_record.Recorder(tmp_path / "record.json", "00").pytest_sessionfinish(session)
    assert session.exitstatus == 1
    assert not (tmp_path / "record.json").exists()


def test_shares_are_joined(tmp_path, monkeypatch, capsys):
    def written(number, **changed):
        record = {"source_digest": "00", "passed": 10 * number, "failed": 0, "skipped": number, "device": "a GPU",
                  "versions": {"numpy": "2"}, "date": f"2026-01-0{number}", "share": f"{number}/2"}
        gpu_record.write(tmp_path / f"{number}.json", record | changed)
        return str(tmp_path / f"{number}.json")

    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(gpu_record, "source_digest", lambda: "00")
    first, second = written(1), written(2)
    assert gpu_record.main(["--join", first, second]) == 0
    assert json.loads((tmp_path / "record.json").read_text()) == {
        "source_digest": "00", "passed": 30, "failed": 0, "skipped": 3, "device": "a GPU", "versions": {"numpy": "2"},
        "date": "2026-01-02"}

    def refused(message, *paths):
        with pytest.raises(SystemExit):
            gpu_record.main(["--join", *paths])
        assert message in capsys.readouterr().err

    refused("these are not all shares, each once: 1/2\n", first)
    refused("these are not all shares, each once: 1/2, 1/2\n", first, first)
    third, fourth = written(3, share="1/4", passed=1), written(4, share="3/4", passed=2)
    assert gpu_record.main(["--join", third, fourth, second]) == 0
    assert json.loads((tmp_path / "record.json").read_text())["passed"] == 23
    refused("these are not all shares, each once: 1/2, 1/4, 2/2\n", first, third, second)
    refused("these are not all shares, each once: 1/4, 2/2\n", third, second)
    refused("No such file", first, str(tmp_path / "none.json"))
    for key in ("source_digest", "device", "versions"):
        refused(f"{key} is not the same in all shares", first, written(2, **{key: "another"}))


def test_each_test_is_in_one_share():
    def kept(share):
        items = [SimpleNamespace(nodeid=f"test_it[{i}]") for i in range(40)]
        config = Mock()
        config.getoption = {"--gpu-share": share}.get
        gpu_record.pytest_collection_modifyitems(config, items)
        return [item.nodeid for item in items]

    shares = [kept(f"{number}/3") for number in (1, 2, 3)]
    assert all(len(names) > 5 for names in shares)
    assert sorted(itertools.chain(*shares)) == sorted(kept(None))
    for wrong in ("3/2", "0/2", "1", "1/2/3"):
        with pytest.raises(ValueError, match=f"I/N with I from 1 to N, got '{wrong}'"):
            gpu_record.share(wrong)
