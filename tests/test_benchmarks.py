"""The benchmark's parts that need no GPU: cases, peers' masks, tables, and a tiny run from end to end."""
import json

import numpy as np
import pytest

from benchmarks import forward_performance, render
from cupy_dma import IntervalMask


@pytest.mark.parametrize("which", ["table", "model", "all", "smoke"])
@pytest.mark.parametrize("quick", [False, True])
def test_cases_have_names_of_their_own(which, quick):
    names = [case.name for case in forward_performance.cases(which, quick)]
    assert len(set(names)) == len(names) > 0


def test_pairs_are_counted_as_the_mask_counts_them():
    case = forward_performance.Case("smoke", 4, 2, 32, 300, 300, 64)
    mask = IntervalMask.top_w(np.random.default_rng(0).standard_normal((1, 2, 300)).astype(np.float32), 64)
    assert case.kept_pairs == 2 * int(mask.count(300).sum())


def test_dense_mask_of_the_peers_is_the_same_mask():
    torch = pytest.importorskip("torch")
    from benchmarks import peers

    scores = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0))
    dense = peers.dense_mask(scores, 50, 7, torch.float32, group=2)
    mask = IntervalMask.top_w(scores, window=7).to_dense(50).repeat_interleave(2, dim=1)
    assert torch.equal(dense > float("-inf"), mask)
    assert torch.equal(dense[mask], scores.repeat_interleave(2, dim=1)[:, :, None].expand_as(dense)[mask])


def test_blocks_of_an_interval_mask():
    torch = pytest.importorskip("torch")
    from benchmarks import peers

    scores = torch.randn(1, 2, 96, generator=torch.Generator().manual_seed(0))
    mask = IntervalMask.top_w(scores, window=40)
    seen, full = peers.interval_blocks(mask.start.expand(1, 2, 96), mask.stop, 96, 16)
    dense = mask.to_dense(96).reshape(1, 2, 6, 16, 6, 16)
    assert torch.equal(seen, dense.any(5).any(3))
    assert torch.equal(full, dense.all(5).all(3))
    assert full.any()
    assert not full.all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_block_mask_is_the_same_mask():
    """The peer's result, uncompiled, against this library's."""
    torch = pytest.importorskip("torch")
    from benchmarks import peers

    q, k, v = (torch.randn(1, 256, heads, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2))
    scores = torch.randn(1, 2, 256, generator=torch.Generator().manual_seed(0))
    mask = IntervalMask.top_w(scores, window=40)
    import cupy_dma as dma

    call = peers.flex(q, k, v, mask.start.expand(1, 2, 256), mask.stop, scores, compiled=False)
    ours = dma.attention(q, k, v, mask=mask, bias=scores)
    assert torch.allclose(call().transpose(1, 2), ours, atol=2e-5)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A run of the smoke set."""
    pytest.importorskip("torch")
    place = tmp_path_factory.mktemp("results")
    assert forward_performance.main(["--set", "smoke", "--out", str(place)]) == 0
    return json.loads((place / "forward_performance.json").read_text())


def test_smoke_run(result):
    assert {"method", "device", "versions", "commit", "date", "cases", "host_us"} <= set(result)
    for case in result["cases"]:
        assert case["check"]["ok"]
        for stage in ("key_scores", "selection", "lists", "attention", "lists+attention", "total"):
            assert render.value(case, "cupy_dma", stage) is not None
        assert render.value(case, "masked+build", "attention") is not None


def test_tables_and_readme(result, tmp_path):
    result["cases"][0] |= {"set": "model", "heads": 16}
    table = render.markdown_table(result)
    assert "| 300, 16/2 heads, D 32, w 64 |" in table
    assert "smoke H2/1" in render.text_table(result)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n")
    render.update_readme(readme, result)
    assert readme.read_text() == f"before\n{render.BEGIN}\n{table}\n{render.END}\nafter\n"


def test_failed_check_leaves_the_results_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(forward_performance.Benchmark, "check", lambda self: {"ok": False})
    assert forward_performance.main(["--set", "smoke", "--out", str(tmp_path)]) == 1
    assert not (tmp_path / "forward_performance.json").exists()
    assert (tmp_path / "forward_performance.failed.json").exists()


@pytest.mark.parametrize(("ms", "shown"), [
    (None, "–"), (0.0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (141.2, "141"), (1412.0, "1412")])
def test_three_digits(ms, shown):
    assert render.milliseconds(ms) == shown
