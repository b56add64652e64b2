"""Where results lie, and which of them the docs show."""
from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from benchmarks.harness import folders


@pytest.mark.parametrize(("device", "folder"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA RTX 6000 Ada Generation", "rtx-6000"),
    ("NVIDIA Graphics", "graphics"),
    ("x86_64", "cpu"), ("", "cpu")])
def test_each_kind_of_gpu_has_a_folder(device, folder):
    assert folders.folder_of(device) == folder
    assert folders.output(None, device) == folders.RESULTS / folder


def test_the_newest_result_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RESULTS", tmp_path)
    assert folders.recorded("a.json") is None
    for name, date in (("h100", "2026-11-02T10:00:00Z"), ("h200", "2026-11-02T09:00:00Z")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_text(json.dumps({"date": date}))
    assert folders.recorded("a.json") == tmp_path / "h100" / "a.json"
    assert folders.recorded("a.json", str(tmp_path / "h200")) == tmp_path / "h200" / "a.json"
    assert folders.read("a.json") == {"date": "2026-11-02T10:00:00Z"} and len(folders.newest("*.json")) == 1
    with pytest.raises(SystemExit, match=r"b\.json is not recorded in"):
        folders.read("b.json")
    assert folders.recorded("a.json", str(tmp_path)) is None and folders.output("elsewhere").name == "elsewhere"


def test_every_result_lies_in_the_folder_of_its_device():
    for path in folders.RESULTS.glob("*/*.json"):
        result = json.loads(path.read_text())
        expected = "evidence" if path.parent == folders.EVIDENCE else folders.folder_of(result["device"])
        assert path.parent.name == expected, path
    assert not list(folders.RESULTS.glob("*.json"))


def test_git_ignores_no_result():
    """A page that links to a file which git ignores builds here and nowhere else."""
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=folders.RESULTS, capture_output=True).returncode

    if not shutil.which("git") or git("status"):
        pytest.skip("needs a git checkout")
    for name in ("compare.json", "model.png", "build/a.json"):
        assert git("check-ignore", "--no-index", f"h200/{name}") == 1, name
