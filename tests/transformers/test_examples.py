"""The transformers examples and docs page run, and their checks detect errors."""
import contextlib
import re

import pytest

from tests.project.pages import DOCS, run_page

pytestmark = pytest.mark.usefixtures("one_thread", "own_path")
SMALL = ["--layers", "1", "--width", "32", "--batch", "2", "--length", "48", "--window", "8"]


def test_doge(capsys):
    from examples import doge

    doge.main([*SMALL, "--steps", "60", "--tokens", "60"])
    said = capsys.readouterr().out
    first, last = map(float, re.search(r"loss: ([\d.]+) nats per byte at first, ([\d.]+) at the end", said).groups())
    assert last < first - 0.5
    (short, memory), (long, same) = re.findall(r"(\d+) tokens: .* the cache takes (\d+) KiB", said)
    assert (int(short), int(long)) == (4 + 6, 4 + 60) and memory == same


def test_conversion(tmp_path, capsys, monkeypatch):
    from examples import convert_and_finetune as example

    options = ["--length", "48", "--window", "8", "--recent", "8", "--batch", "2", "--before", "10", "--steps", "4",
               "--output", str(tmp_path / "model")]
    assert example.main(options) == 0
    said = capsys.readouterr().out
    dense, long, off = re.search(r"dense: loss ([\d.]+); converted, window 48: ([\d.]+), logits differ by ([\d.e+-]+)",
                                 said).groups()
    assert dense == long and float(off) < 1e-4
    trained, loaded = re.search(r"after 4 steps ([\d.]+)\nsaved .* loaded: loss ([\d.]+)", said).groups()
    assert trained == loaded

    original = example.dmt.convert
    monkeypatch.setattr(example.dmt, "convert", lambda model, window, **options: original(model, 5, **options))
    assert example.main(options) == 1


def test_replay(capsys, monkeypatch):
    from examples import replay as example

    options = ["--steps", "5", "--batch", "4", "--tokens", "16"]
    assert example.main(options) == 0
    said = capsys.readouterr().out
    first, last = map(float, re.search(r"even tokens: ([\d.]+)% at first, ([\d.]+)% at the end", said).groups())
    assert first < 65 < 70 < last
    off, without = map(float, re.search(r"sampler's by (\S+); without its cache's stops by (\S+)", said).groups())
    assert off < 1e-4 and without > 0.1

    monkeypatch.setattr(example.dmt, "replay", lambda model, stops: contextlib.nullcontext())
    assert example.main(options) == 1


def test_serve(capsys, monkeypatch):
    from examples import serve as example

    assert example.main([]) == 0
    said = capsys.readouterr().out
    done, asked = map(int, re.search(r"^(\d+) of (\d+) requests", said).groups())
    memory, first = re.search(r"takes (\d+) KiB, (\d+) at first", said).groups()
    assert (done, asked) == (11, 12) and memory == first and "the same tokens alone: yes" in said
    monkeypatch.setattr(example, "alone", lambda model, request: request.prompt_ids)
    assert example.main(["--requests", "4"]) == 1


def test_the_page_on_serving(capsys):
    names = run_page("serving.md", gpu=False)
    lines = capsys.readouterr().out.splitlines()
    page = (DOCS / "serving.md").read_text()
    assert lines[0] == "{'req_0': 20, 'req_1': 20, 'req_2': 20, 'req_3': 20}" and lines[0] in page
    assert lines[1] == "20 cancelled" and lines[2] in page
    assert names["cache"].layers[0].store.length.tolist() == [0, 0, 30, 0, 0, 0, 0, 0]


def test_the_page_of_the_docs(capsys):
    names = run_page("transformers.md", gpu=False)
    assert names["model"].config.dynamic_mask["recent"] == 16
    assert names["cache"].get_seq_length() == 40 + 20 + 5 + 20 - 1
    assert names["chosen"].shape == (2, 20, 1) and (names["chosen"] < 0).all()
