"""The example and the page on retrofit."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.project.pages import run_page

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("one_thread", "own_path")


def test_the_example(tmp_path, capsys):
    from examples import retrofit as example

    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    folder = tmp_path / "gated"
    options = [str(text), "--length", "64", "--delay", "8", "--sinks", "2", "--steps", "30", "--every", "15", "--ratio",
               "3", "--held-out", "2", "--output", str(folder)]
    example.main(options)
    said = capsys.readouterr().out
    kept, target = map(float, re.search(r"30 steps, 3840 tokens: .* kept ([\d.]+)% of a target of ([\d.]+)%",
                                        said).groups())
    assert kept < 60 and 33 < target < 36
    full, hard, narrow = map(float, re.search(r"([\d.]+) with all keys, ([\d.]+) with gates .*, ([\d.]+) with the last",
                                              said).groups())
    assert all(abs(x - full) < 0.1 for x in (hard, narrow)) and not full == hard == narrow
    assert (folder / "curves.png").stat().st_size > 10000

    loaded = example.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.dynamic_mask["delay"] == 8
    example.main([*options, "--resume"])
    assert re.search(r"30 steps, 3840 tokens: .*", capsys.readouterr().out)[0] in said
    again = example.AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in loaded.state_dict().items())


@pytest.mark.slow
def test_the_example_on_two_ranks(tmp_path):
    """With torchrun on a CPU: one report, counting the tokens of both ranks."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    options = [text, "--length", "48", "--delay", "8", "--steps", "4", "--every", "2", "--ratio", "2", "--held-out",
               "1", "--output", tmp_path / "gated"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               ROOT / "examples" / "retrofit.py", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"4 steps, (\d+) tokens", done.stdout) == [str(2 * 4 * 2 * 48)]
    assert done.stdout.count("held out") == done.stdout.count("saved to") == 1
    assert (tmp_path / "gated" / "state.pt").exists() and (tmp_path / "gated" / "config.json").exists()


def test_too_little_text(tmp_path):
    from examples import retrofit as example

    text = tmp_path / "text.txt"
    text.write_text("too short")
    with pytest.raises(SystemExit, match="must have more than --length 64 tokens"):
        example.main([str(text), "--length", "64", "--output", str(tmp_path)])


def test_the_page(capsys):
    names = run_page("retrofit.md", gpu=False)
    said = capsys.readouterr().out
    assert said.strip() == str(sorted(names["history"][-1])) and names["full"].shape == (1, 96, 256)
