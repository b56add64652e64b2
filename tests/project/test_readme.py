"""Every Python block of the README runs, and its tables are those in the recorded results."""
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
BLOCKS = [(bool(gpu), code, README[:place].count("\n"))
          for gpu, code, place in ((m[1], m[2], m.start(2)) for m in
                                   re.finditer(r"(<!-- gpu -->\n)?```python\n(.*?)```", README, re.DOTALL))]


def run(blocks):
    """Run blocks one after the other in one namespace, as a reader would."""
    names = {"__name__": "readme"}
    for _, code, line in blocks:
        if "import torch" in code and find_spec("torch") is None:
            continue
        exec(compile("\n" * line + code, "README.md", "exec"), names)
    return names


def test_python_blocks_run_without_a_gpu(capsys):
    names = run(block for block in BLOCKS if not block[0])
    assert (names["same"] == run(BLOCKS[:1])["out"]).all()  # the two ways of the first block agree
    assert names["out"].shape == (1, 4096, 4, 64)


@pytest.mark.gpu
def test_python_blocks_run_on_a_gpu(capsys):
    pytest.importorskip("cupy")
    names = run(BLOCKS)
    assert type(names["out"]).__module__.startswith("cupy")


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
