"""The charts of the recorded results: a line has one point per length, and a page's pictures follow its colours."""
import re

import pytest

from benchmarks.harness import charts
from benchmarks.harness.pages import REPORTS


@pytest.fixture(scope="module")
def panels():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    made = []
    for name in ("forward", "backward", "decode", "training"):
        result, = REPORTS[name].results()
        for panel in REPORTS[name].panels(result):
            panel.draw(ax := Figure().subplots())
            made.append((f"{name}: {panel.title}", ax))
    return made


def test_no_line_runs_upright(panels):
    assert len(panels) > 15
    for title, ax in panels:
        assert ax.lines, title
        for line in ax.lines:
            sizes = list(line.get_xdata())
            assert sizes == sorted(set(sizes)), (title, line.get_label())


def test_lengths_are_written_as_2k():
    assert [charts.size_of(n) for n in (32, 1024, 2048, 1536, 2**20)] == ["32", "1K", "2K", "1.5K", "1M"]


def test_pictures_of_a_page_take_its_colours():
    pytest.importorskip("matplotlib")
    drawn = charts.Panel("two points", lambda ax: ax.plot([1, 2], [3, 4], color="tab:red", label="a line"))
    first, second = charts.svgs([drawn, drawn])
    assert "currentColor" in first and "#000000" not in first and "a line" in first and "two points" in first
    assert "width=" not in first.partition(">")[0]  # as wide as its column
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0] and not ids[0] & ids[1]  # two in one page
