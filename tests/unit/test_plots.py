"""Pictures match the dense mask and the dense formula, and bad arguments raise errors."""
import builtins
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_dma import __main__ as cli
from cupy_dma.masks.plot_data import density
from tests.unit.test_masks import M, N, masks, quick


@given(masks(), st.integers(1, 2 * N), st.integers(1, 2 * N))
@quick
def test_density_is_the_mean_of_the_dense_mask(mask, query_length, max_size):
    found = density(mask, query_length, 0, 0, max_size)
    dense = mask.to_dense(query_length)[0, 0].astype(float)
    rows, columns = (np.linspace(0, size, min(size, max_size) + 1).astype(int) for size in (query_length, N))
    expected = [[dense[a:b, c:d].mean() for c, d in pairwise(columns)] for a, b in pairwise(rows)]
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_plot(tmp_path, convert):
    pytest.importorskip("matplotlib")
    mask = M.top_w(np.random.default_rng(0).standard_normal((2, 3, 3000)).astype(np.float32), 50)
    path = tmp_path / "mask.png"
    ax = mask.to(convert(np.zeros(1))).plot(path=path, batch=1, head=2, max_size=100)
    assert path.read_bytes().startswith(b"\x89PNG") and ax.get_xlabel() == "key"
    assert ax.images[0].get_array().shape == (100, 100)
    assert mask.plot(10, ax=ax) is ax
    with pytest.raises(ValueError, match=r"head must be below 3, got 3"):
        mask.plot(head=3)
    with pytest.raises(ValueError, match="query_length must be at least 1, got 0"):
        mask.plot(0)


def test_plot_without_matplotlib(monkeypatch):
    find = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"cupy-dma\[plot\]"):
        M.causal(4).plot()


@pytest.fixture
def drawn(rng):
    """Scores (2, 3, 200) and the mask of the best 20."""
    pytest.importorskip("matplotlib")
    scores = rng.standard_normal((2, 3, 200)).astype(np.float32)
    return scores, M.top_w(scores, 20)


def test_bars_are_the_intervals(drawn, convert, tmp_path):
    scores, mask = drawn
    there = mask.to(convert(np.zeros(1)))
    ax = there.plot_lifetimes(convert(scores), batch=1, head=2, path=tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    dense = mask.to_dense(200)[1, 2]
    (bars,) = ax.collections
    seen = np.flatnonzero(dense.any(0))
    assert [int(bar[0, 1]) for bar in bars.get_segments()] == seen.tolist()
    for bar, j in zip(bars.get_segments(), seen):
        assert np.array_equal(np.flatnonzero(dense[:, j]), np.arange(*bar[:, 0].astype(int)))
    assert np.array_equal(bars.get_array(), scores[1, 2, seen])
    assert ax.lines[0].get_xdata().tolist() == np.flatnonzero(~dense.any(0)).tolist()


def test_bars_of_a_long_mask_and_of_odd_scores(drawn):
    _, mask = drawn
    ax = mask.plot_lifetimes(max_keys=7)
    assert sum(len(part.get_segments()) for part in ax.collections) + len(ax.lines[0].get_xdata()) == 7
    assert "7 of 200 keys" in ax.get_title()
    odd = np.full(200, np.nan, np.float32)
    assert M.top_w(odd[None, None], 20).plot_lifetimes(odd).collections[0].get_array().mask.all()
    assert M.causal(1).plot_lifetimes(np.zeros(1)).collections[0].get_segments()[0].tolist() == [[0, 0], [1, 0]]


def test_pictures_of_tensors_with_gradients(drawn, torch):
    scores = torch.randn(1, 1, 40, dtype=torch.bfloat16, requires_grad=True)
    mask = M.top_w(scores, 5)
    query, key = torch.randn(1, 40, 2, 8, requires_grad=True), torch.randn(1, 40, 1, 8, requires_grad=True)
    for _ in range(2):
        mask.plot_lifetimes(scores)
        mask.plot_attention(query, key, bias=scores)
        torch.set_grad_enabled(False)
    torch.set_grad_enabled(True)


def test_survival_counts_every_key(drawn):
    _, mask = drawn
    lived = mask.to_dense(200)[0, 1].sum(0)
    ax = mask.plot_survival(head=1, bins=10)
    alive = mask.to_dense(200)[0, 1, -1].sum()
    assert f"{(lived == 0).sum()} never visible" in ax.get_title() and f"{alive} still visible" in ax.get_title()
    edges = [*(bar.get_x() for bar in ax.containers[0]), 201]
    counts = np.histogram(lived[lived > 0], edges)[0]
    assert len(counts) == 10 and counts.sum() == (lived > 0).sum()
    assert [round(bar.get_y() + bar.get_height()) for bar in ax.containers[1]] == counts.tolist()
    evicted = np.histogram(lived[(lived > 0) & ~mask.to_dense(200)[0, 1, -1]], edges)[0]
    assert [round(bar.get_height()) for bar in ax.containers[0]] == evicted.tolist()
    assert len(M.causal(1).plot_survival().containers[0]) == 1


def test_weights_are_those_of_the_dense_formula(drawn, convert, rng):
    scores, mask = drawn
    query = rng.standard_normal((2, 150, 6, 16)).astype(np.float32)
    key = rng.standard_normal((2, 200, 3, 16)).astype(np.float32)
    rows, head = [0, 77, 149], 5
    ax = mask.to(convert(np.zeros(1))).plot_attention(convert(query), convert(key), bias=convert(scores), rows=rows,
                                                      batch=1, head=head, softcap=3.0, scale=0.2)
    logits = 3 * np.tanh(0.2 * query[1, rows, head].astype(float) @ key[1, :, 2].T.astype(float) / 3) + scores[1, 2]
    visible = mask.to_dense(150)[1, 2, rows]
    p = np.where(visible, np.exp(logits), 0)
    shown = ax.images[0].get_array()
    assert np.array_equal(shown.mask, ~visible)
    np.testing.assert_allclose(shown.data[visible], np.maximum(p / p.sum(-1, keepdims=True), 1e-4)[visible], rtol=1e-5)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "77", "149"]
    coarse = mask.plot_attention(query, key, bias=scores, rows=rows, batch=1, head=head, softcap=3.0, scale=0.2,
                                 max_size=10).images[0].get_array()
    expected = shown.filled(0).reshape(3, 10, 20).max(-1)
    np.testing.assert_allclose(coarse.filled(0), expected)


def test_a_row_that_sees_nothing(drawn):
    x = np.ones((1, 12, 1, 4), np.float32)
    shown = M.sinks(12, 0).plot_attention(x, x).images[0].get_array()
    assert shown.shape == (8, 12) and shown.mask.all()


Q, K = np.zeros((2, 5, 6, 4)), np.zeros((2, 200, 3, 4))


@pytest.mark.parametrize(("draw", "message"), [
    (lambda mask: mask.plot_lifetimes(np.zeros(9)), r"scores must have shape \(Lk,\) or .* Lk = 200, got \(9,\)"),
    (lambda mask: mask.plot_lifetimes(np.zeros(200, int)), "scores must be float16 or .*, got int64"),
    (lambda mask: mask.plot_lifetimes(head=3), "head must be below 3, got 3"),
    (lambda mask: mask.plot_lifetimes(max_keys=0), "max_keys must be at least 1, got 0"),
    (lambda mask: mask.plot_survival(batch=2), "batch must be below 2, got 2"),
    (lambda mask: mask.plot_survival(bins=0), "bins must be at least 1, got 0"),
    (lambda mask: M.causal(0).plot_survival(), "mask must have at least one key"),
    (lambda mask: mask.plot_attention(Q[0], K), r"query must have shape \(B, len"),
    (lambda mask: mask.plot_attention(Q, K[:, :9]), r"key must have shape .* 200"),
    (lambda mask: mask.plot_attention(Q, K, rows=[5]), "query below 5"),
    (lambda mask: mask.plot_attention(Q, K, head=6), "head must be below 6"),
    (lambda mask: mask.plot_attention(Q[:, :, :4], K[:, :, :2]), "mask must have 1, 2 or 4 hea"),
    (lambda mask: mask.plot_attention(Q, K, bias=np.zeros((2, 2, 200))),
     "bias must have 1, 3 or 6 heads"),
])
def test_bad_arguments(drawn, draw, message):
    with pytest.raises((ValueError, TypeError), match=message):
        draw(drawn[1])


# ---- python -m cupy_dma plot ----
@pytest.mark.parametrize(("name", "shape", "panels"), [
    ("one.npy", (64,), ["mask", "lifetimes", "survival"]), ("heads.npy", (3, 64), ["survival"]),
    ("named.npz", (1, 3, 64), ["mask"])])
def test_plot_command(tmp_path, capsys, rng, name, shape, panels):
    pytest.importorskip("matplotlib")
    scores, path, output = rng.standard_normal(shape), tmp_path / name, tmp_path / "out.png"
    if name.endswith(".npz"):
        np.savez(path, scores=scores, other=np.zeros(3))
    else:
        np.save(path, scores)
    kinds = [] if len(panels) == 3 else ["--kind", *panels]
    head = ["--head", "2"] if len(shape) > 1 else []
    assert cli.main(["plot", str(path), "--window", "8", "--output", str(output), *kinds, *head]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{output}: {', '.join(panels)}\n"


@pytest.mark.parametrize(("make", "arguments", "message"), [
    (lambda path: None, [], "scores.npy: No such file"),
    (lambda path: path.write_bytes(b"text"), [], "FILE must be a .npy or .npz file of NumPy, got"),
    (lambda path: np.save(path, np.zeros((2, 2, 2, 2))), [], "the scores must be floats of shape"),
    (lambda path: np.save(path, np.zeros(4, int)), [], "got int64 (4,) in"),
    (lambda path: np.save(path, np.zeros(0)), [], "got float64 (0,) in"),
    (lambda path: np.save(path, np.zeros(4)), ["--array", "a"], "--array names an array of an .npz file"),
    (lambda path: np.save(path, np.zeros(4)), ["--output", "x.txt"], "--output x.txt: its name must end in one of"),
    (lambda path: np.save(path, np.zeros((2, 4))), ["--head", "2"], "head must be below 2, got 2"),
    (lambda path: np.savez(path.open("wb"), a=np.zeros(4), b=np.zeros(4)), [], "one of the arrays in"),
])
def test_plot_command_says_what_is_wrong(tmp_path, capsys, monkeypatch, make, arguments, message):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "scores.npy")
    assert cli.main(["plot", str(tmp_path / "scores.npy"), *arguments]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "plot.png").exists()
