"""Every Python block of the README runs without a warning, and its tables are those in the recorded results."""
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
BLOCKS = [(bool(gpu), code, README[:place].count("\n"))
          for gpu, code, place in ((m[1], m[2], m.start(2)) for m in
                                   re.finditer(r"(<!-- gpu -->\n)?```python\n(.*?)```", README, re.DOTALL))]


def run(folder, blocks, check):
    """Run blocks one after the other, as a reader would who takes every warning for an error; then ``check``."""
    lines = [""] * (README.count("\n") + 1)  # a traceback's lines are those of the README
    for _, code, line in blocks:
        if "import torch" not in code or find_spec("torch"):
            lines[line:line + code.count("\n")] = code.splitlines()
    lines[BLOCKS[0][2] + BLOCKS[0][1].count("\n")] = "first = out"
    (folder / "README.py").write_text("\n".join([*lines, f"assert {check}"]))
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", folder / "README.py"], cwd=folder,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # where warnings of destructors and of the end of the interpreter go


def test_python_blocks_run_without_a_gpu(tmp_path):
    blocks = [block for block in BLOCKS if not block[0]]
    run(tmp_path, blocks, "(same == first).all() and out.shape == (1, 4096, 4, 64)")  # two ways of the first block


@pytest.mark.gpu
def test_python_blocks_run_on_a_gpu(tmp_path):
    pytest.importorskip("cupy")
    run(tmp_path, BLOCKS, 'type(out).__module__.startswith("cupy")')


def test_there_are_blocks_of_both_kinds():
    assert {gpu for gpu, _, _ in BLOCKS} == {False, True}


@pytest.mark.parametrize("name", ["forward", "backward", "dense", "decode"])
def test_table_is_the_recorded_one(name):
    from benchmarks.harness import render, render_decode, render_dense

    report = {"forward": render.FORWARD, "backward": render.BACKWARD, "dense": render_dense.DENSE,
              "decode": render_decode.DECODE}[name]
    recorded = RESULTS / f"{name}_performance.json"
    shown = README.split(report.begin)[1].split(report.end)[0].strip()
    expected = report.table(json.loads(recorded.read_text())) if recorded.exists() else render.PENDING
    assert shown == expected, f"run: python {report.script} --update-readme"


def test_first_screen_holds_what_a_reader_needs_first():
    first = "\n".join(README.splitlines()[:60])
    for needed in ("pip install", "import cupy_dma as dma", "<!-- table:forward -->"):
        assert needed in first
