"""The README fits on few screens, its code prints the output shown, and its chart matches the recorded results. Every
Python block of docs/usage.md runs without a warning, and the tables of docs/performance.md match the recorded
results."""
import importlib.util
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
USAGE = (ROOT / "docs" / "usage.md").read_text()
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
BLOCKS = [(bool(gpu), code, USAGE[:place].count("\n"))
          for gpu, code, place in ((m[1], m[2], m.start(2)) for m in
                                   re.finditer(r"(<!-- gpu -->\n)?```python\n(.*?)```", USAGE, re.DOTALL))]


def python(folder, text):
    """Run a script with warnings as errors and return its output."""
    (folder / "page.py").write_text(text)
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", folder / "page.py"], cwd=folder,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # warnings of destructors and of interpreter shutdown go there
    return done.stdout


def run(folder, blocks, check):
    """Run blocks one after the other, as a reader would; then ``check``."""
    lines = [""] * (USAGE.count("\n") + 1)  # so line numbers in tracebacks are those of the page
    for _, code, line in blocks:
        if "import torch" not in code or find_spec("torch"):
            lines[line:line + code.count("\n")] = code.splitlines()
    lines[BLOCKS[0][2] + BLOCKS[0][1].count("\n")] = "first = out"
    python(folder, "\n".join([*lines, f"assert {check}"]))


def test_python_blocks_run_without_a_gpu(tmp_path):
    blocks = [block for block in BLOCKS if not block[0]]
    run(tmp_path, blocks, "(same == first).all() and out.shape == (1, 4096, 4, 64)")  # two ways of the first block


@pytest.mark.gpu
def test_python_blocks_run_on_a_gpu(tmp_path):
    pytest.importorskip("cupy")
    run(tmp_path, BLOCKS, 'type(out).__module__.startswith("cupy")')


def test_there_are_blocks_of_both_kinds():
    assert {gpu for gpu, _, _ in BLOCKS} == {False, True}


def test_the_readme_prints_what_it_says(tmp_path):
    shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert python(tmp_path, shown[1]) == shown[2]


def test_the_training_step_of_the_readme(tmp_path):
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2 and "optimizer.step()" in blocks[1]
    python(tmp_path, blocks[1] + "assert layer.attention.A.abs().max() > 0  # the scores have begun to differ")


def test_first_screen_holds_what_a_reader_needs_first():
    assert README.count("\n") <= 150
    first = "\n".join(README.splitlines()[:60])
    for needed in ("readme-intervals.png", "pip install", "import cupy_dma as dma", "readme-speed.png", "use it when",
                   "do not use it when", "torch", "transformers", "JAX", "several GPUs", "flash-dmattn", "bench"):
        assert needed in first, needed
    assert "2508.02124" in README and "BSD-3-Clause" in README


def test_every_file_that_the_readme_names_is_there():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert target.startswith("https:") or (ROOT / target).exists(), target


@pytest.fixture
def pictures():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("readme_pictures", ROOT / "docs" / "site" / "readme_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_is_of_the_recorded_results(pictures):
    chart = (ROOT / "docs" / "assets" / "readme-speed.png").read_bytes()
    assert pictures.digest().encode() in chart, "run: python docs/site/readme_pictures.py"


def test_the_chart_says_what_was_measured(pictures):
    results = pictures.recorded()
    figure = pictures.speed(results)
    assert "bfloat16" in figure.get_suptitle()
    for ax, (name, stage) in zip(figure.axes, (("forward", "total"), ("backward", "forward+backward"))):
        result = results[name]
        assert result["device"] in ax.get_title() and result["date"][:10] in ax.get_title()
        assert ax.get_xlabel() == "tokens" and ax.get_ylabel() == "milliseconds"
        shown = {(line.get_label(), n): ms for line in ax.lines for n, ms in zip(*line.get_data())}
        case = next(case for case in result["cases"] if case["name"] == "model H16/8 D128 N32768 w1024")
        times = {(row["who"], row["stage"]): row["ms"] for row in case["rows"] if row.get("ms")}
        assert shown["cupy_dma, window 1024", 32768] == times["cupy_dma", stage]
        assert len(shown) >= 9


def test_the_picture_of_the_intervals(pictures):
    ax = pictures.intervals().axes[0]
    crossed = [bar for bar in ax.collections[0].get_segments() if bar[0][0] <= pictures.QUERY < bar[1][0]]
    assert len(crossed) == pictures.WINDOW
