"""The benchmarks' parts that need no GPU: cases, peers, checks, tables, and tiny runs from end to end."""
import json
import shutil
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_dma as dma
from benchmarks import (
    accuracy,
    backward,
    backward_equivalence,
    decode,
    dense,
    dense_varlen,
    forward,
    forward_equivalence,
    grad_equivalence,
    tune_sm90,
)
from benchmarks.harness import render, render_decode, render_dense
from cupy_dma import backends
from cupy_dma.masks.interval import IntervalMask


@pytest.mark.parametrize("which", ["table", "model", "all", "smoke"])
@pytest.mark.parametrize("quick", [False, True])
def test_cases_have_names_of_their_own(which, quick):
    names = [case.name for case in forward.cases(which, quick)]
    assert len(set(names)) == len(names) > 0


def test_pairs_are_counted_as_the_mask_counts_them():
    case = forward.Case("smoke", 4, 2, 32, 300, 300, 64)
    mask = IntervalMask.top_w(np.random.default_rng(0).standard_normal((1, 2, 300)).astype(np.float32), 64)
    assert case.kept_pairs == 2 * int(mask.count(300).sum())


def test_dense_mask_of_the_peers_is_the_same_mask():
    torch = pytest.importorskip("torch")
    from benchmarks.harness import peers

    scores = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0))
    dense = peers.dense_mask(scores, 50, 7, torch.float32, group=2)
    mask = IntervalMask.top_w(scores, window=7).to_dense(50).repeat_interleave(2, dim=1)
    assert torch.equal(dense > float("-inf"), mask)
    assert torch.equal(dense[mask], scores.repeat_interleave(2, dim=1)[:, :, None].expand_as(dense)[mask])


def test_blocks_of_an_interval_mask():
    torch = pytest.importorskip("torch")
    from benchmarks.harness import peers

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
    from benchmarks.harness import peers

    q, k, v = (torch.randn(1, 256, heads, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2))
    scores = torch.randn(1, 2, 256, generator=torch.Generator().manual_seed(0))
    mask = IntervalMask.top_w(scores, window=40)
    call = peers.flex(q, k, v, mask.start.expand(1, 2, 256), mask.stop, scores, compiled=False)
    ours = dma.attention(q, k, v, mask=mask, bias=scores)
    assert torch.allclose(call().transpose(1, 2), ours, atol=2e-5)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A run of the smoke set."""
    pytest.importorskip("torch")
    place = tmp_path_factory.mktemp("results")
    assert forward.main(["--set", "smoke", "--out", str(place)]) == 0
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
    table = render.FORWARD.table(result)
    assert "| 300, 16/2 heads, D 32, w 64 |" in table
    assert "smoke H2/1" in render.FORWARD.text(result)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{render.FORWARD.begin}\nold\n{render.FORWARD.end}\nafter\n")
    render.FORWARD.update_readme(readme, result)
    assert readme.read_text() == f"before\n{render.FORWARD.begin}\n{table}\n{render.FORWARD.end}\nafter\n"


def test_failed_check_leaves_the_results_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(forward.Benchmark, "check", lambda self: {"ok": False})
    assert forward.main(["--set", "smoke", "--out", str(tmp_path)]) == 1
    assert not (tmp_path / "forward_performance.json").exists()
    assert (tmp_path / "forward_performance.failed.json").exists()


@pytest.mark.parametrize(("ms", "shown"), [
    (None, "–"), (0.0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (141.2, "141"), (1412.0, "1412")])
def test_three_digits(ms, shown):
    assert render.milliseconds(ms) == shown


# ---- the backward benchmark ----
@pytest.mark.parametrize("which", ["table", "model", "all", "smoke"])
@pytest.mark.parametrize("quick", [False, True])
def test_backward_cases(which, quick):
    chosen = backward.cases(which, quick)
    assert len({case.name for case in chosen}) == len(chosen) > 0
    assert all(case.query_length == case.key_length <= 131072 for case in chosen)
    assert sum(case.flex for case in backward.cases("all")) == 3


def small(torch, heads=4, kv_heads=2, n=256, dtype=None, window=40):
    """dout, query, key, value, scores, mask."""
    generator = torch.Generator().manual_seed(1)
    do, q, k, v = (torch.randn(1, n, h, 16, generator=generator, dtype=dtype) for h in
                   (heads, heads, kv_heads, kv_heads))
    scores = torch.randn(1, kv_heads, n, generator=generator)
    return do, q, k, v, scores, IntervalMask.top_w(scores, window=window)


def gradients_of(do, q, k, v, scores, mask):
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    return out, lse, dma.backward.attention_backward(do, q, k, v, out, lse, mask=mask, bias=scores)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_gradients_are_those_of_the_same_mask(monkeypatch):
    """The peer's gradients, uncompiled, against this library's. torch refuses them on the CPU, although it can."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention import flex_attention

    from benchmarks.harness import peers

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None, raising=False)
    do, q, k, v, scores, mask = small(torch)
    call, note = peers.flex_backward(q, k, v, do, mask.start.expand(1, 2, 256).contiguous(), mask.stop, scores,
                                     compiled=False)
    ours = gradients_of(do, q, k, v, scores, mask)[2]
    *theirs, bias = call()
    assert note == ""
    for x, y in zip(theirs, ours):
        assert torch.allclose(x.transpose(1, 2), y, atol=1e-4)
    assert torch.allclose(bias, ours.bias, atol=1e-4)


@pytest.mark.parametrize("forward", [False, True])
def test_dense_gradients(forward):
    torch = pytest.importorskip("torch")
    from benchmarks.harness import peers

    do, q, k, v, _, _ = small(torch)
    call, note = peers.dense_backward(None, q, k, v, do, forward=forward)
    out, lse = dma.attention(q, k, v, causal=True, return_lse=True)
    ours = dma.backward.attention_backward(do, q, k, v, out, lse, causal=True)
    assert note == ""
    for _ in range(2):  # the forward pass is retained
        for x, y in zip(call(), ours):
            assert torch.allclose(x.transpose(1, 2), y, atol=1e-4)


def test_peers_expand_heads_where_groups_are_not_served():
    torch = pytest.importorskip("torch")
    from benchmarks.harness import peers

    def make(k, v):
        def call():
            if k.shape[1] != 4:
                raise RuntimeError("no groups")
            return k, v

        return call

    k, v = torch.zeros(2, 1, 2, 8, 16)
    call, note = peers.expanded_if_needed(make, k, v, group=2)
    assert call()[0].shape == (1, 4, 8, 16)
    assert "expanded" in note
    with pytest.raises(RuntimeError, match="no groups"):
        peers.expanded_if_needed(make, k, v, group=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradient_check(dtype):
    """Right gradients pass; each kind of wrong one fails."""
    torch = pytest.importorskip("torch")
    from benchmarks.harness.gradient_check import check_gradients

    do, q, k, v, scores, mask = small(torch, n=500, dtype=getattr(torch, dtype))
    out, lse, found = gradients_of(do, q, k, v, scores, mask)
    start, stop = mask.start.expand(1, 2, 500), mask.stop.expand(1, 2, 500)

    def check(**wrong):
        return check_gradients(found._replace(**wrong), do, q, k, v, out, lse, scores, start, stop)

    right = check()
    assert right.ok, right
    assert right.unseen_keys > 0
    assert right.keys > 4
    for name, gradient in found._asdict().items():
        assert not check(**{name: gradient * 1.05}).ok, name
        assert not check(**{name: torch.full_like(gradient, float("nan"))}).ok, name
    g, j = (stop[0] <= start[0]).nonzero()[0].tolist()
    for name, place in (("key", (0, j, g)), ("value", (0, j, g)), ("bias", (0, g, j))):
        leak = getattr(found, name).clone()
        leak[place] = 1e-6
        assert not check(**{name: leak}).unseen_are_zero


@pytest.fixture(scope="module")
def backward_result(tmp_path_factory):
    """A run of the smoke set."""
    pytest.importorskip("torch")
    place = tmp_path_factory.mktemp("results")
    assert backward.main(["--set", "smoke", "--out", str(place), "--commit", "abc"]) == 0
    return json.loads((place / "backward_performance.json").read_text())


def test_backward_smoke_run(backward_result):
    assert {"method", "device", "versions", "date", "cases"} <= set(backward_result)
    assert backward_result["commit"] == "abc"
    for case in backward_result["cases"]:
        assert case["check"]["ok"]
        for stage in ("backward", "backward+lists", "backward deterministic", "forward+backward"):
            assert render.value(case, "cupy_dma", stage, "effective_tflops") > 0
        for stage in ("backward", "forward+backward"):
            assert render.value(case, "dense", stage) is not None
    assert backward_result["cases"][0]["check"]["unseen_keys"] > 0


def test_backward_tables_and_readme(backward_result, tmp_path):
    backward_result["cases"][0] |= {"set": "model", "heads": 16}
    table = render.BACKWARD.table(backward_result)
    assert "| 300, 16/2 heads, D 32, w 64 |" in table
    assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1
    assert "smoke H2/1" in render.BACKWARD.text(backward_result)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{render.BACKWARD.begin}\nold\n{render.BACKWARD.end}\nafter\n")
    render.BACKWARD.update_readme(readme, backward_result)
    assert readme.read_text() == f"before\n{render.BACKWARD.begin}\n{table}\n{render.BACKWARD.end}\nafter\n"


def test_wrong_gradients_leave_the_results_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    right = backward.Benchmark.backward

    def wrong(self, deterministic=False):
        found = right(self, deterministic)
        return found._replace(key=found.key * 1.1)

    monkeypatch.setattr(backward.Benchmark, "backward", wrong)
    assert backward.main(["--set", "smoke", "--seconds", "0", "--out", str(tmp_path)]) == 1
    assert not (tmp_path / "backward_performance.json").exists()
    failed = json.loads((tmp_path / "backward_performance.failed.json").read_text())
    assert failed["cases"][0]["check"]["worst"] > 1


# ---- equivalence of gradients ----
def test_equivalence_of_some_cases(tmp_path, capsys):
    arguments = ["--backend", "numpy", "--cases", "softcap-40.0", "--dlse", "--out", str(tmp_path)]
    assert grad_equivalence.main(arguments) == 0
    lines = json.loads((tmp_path / "grad_equivalence.json").read_text())["lines"]
    assert [(line["backend"], line["dtype"], line["cases"]) for line in lines] == [
        ("numpy", dtype, 2) for dtype in grad_equivalence.DTYPES]
    assert all(0 < ratio <= 1 for line in lines for ratio in line["worst_error_over_allowed"].values())
    assert "numpy" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [lambda x: x * 1.1, lambda x: x * np.nan, lambda x: x[:, :1], lambda x: None])
def test_equivalence_fails_for_wrong_gradients(tmp_path, monkeypatch, capsys, wrong):
    right = grad_equivalence.cases.run_backward

    def broken(*arguments, **options):
        found = right(*arguments, **options)
        return found._replace(value=wrong(found.value))

    monkeypatch.setattr(grad_equivalence.cases, "run_backward", broken)
    arguments = ["--backend", "numpy", "--cases", "scale", "--dtype", "float32", "--out", str(tmp_path)]
    assert grad_equivalence.main(arguments) == 1
    assert not (tmp_path / "grad_equivalence.json").exists()
    assert "EXCEEDS" in capsys.readouterr().out


def test_equivalence_leaves_out_what_a_backend_does_not_serve(monkeypatch):
    """As on a GPU: CUDA has no line for types that it does not take, and counts cases that raise."""
    def raising(*arguments, backend, **options):
        raise NotImplementedError

    monkeypatch.setattr(grad_equivalence.cases, "run_backward", raising)
    monkeypatch.setattr(grad_equivalence, "place_of", lambda backend: (None, None))
    lines = grad_equivalence.compare(["cuda"], list(grad_equivalence.DTYPES), names="scale")
    assert [(line.dtype, line.cases, line.not_served) for line in lines] == [
        ("float16", 0, 3), ("bfloat16", 0, 3), ("float32", 0, 3)]
    assert "–" in grad_equivalence.table(lines)


def test_equivalence_grid_has_every_case_once_in_every_type():
    for dtype in grad_equivalence.DTYPES:
        chosen = grad_equivalence.grid(dtype)
        assert {case.dtype for case in chosen} == {dtype}
        assert len({replace(case, name="") for case in chosen}) == len(chosen) > 100


# ---- equivalence of named cases ----
@pytest.mark.parametrize(("script", "tensors"), [
    (forward_equivalence, {"out", "lse"}), (backward_equivalence, {"query", "key", "value", "bias"})])
def test_named_equivalence(script, tensors, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(backends._registered, "triton", SimpleNamespace(unavailable=lambda: "not today"))
    monkeypatch.delitem(backends._loaded, "triton", raising=False)
    arguments = ["--backend", "numpy", "--backend", "triton", "--cases", "odd", "--out", str(tmp_path)]
    assert script.main(arguments) == 0
    rows = json.loads((tmp_path / f"{script.SUITE.name}_equivalence.json").read_text())["rows"]
    assert [(row["backend"], row["dtype"], row["reason"]) for row in rows] == [
        ("triton", "", "not available: not today"), *(("numpy", dtype, "") for dtype in accuracy.DTYPES)]
    for row in rows[1:]:
        assert row["tensors"].keys() == tensors
        assert row["ok"]
        assert any(0 < tensor["error"] <= tensor["allowed"] for tensor in row["tensors"].values())
    assert "not today" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [lambda x: x * 1.1, lambda x: x * np.nan, lambda x: x[:, :1], lambda x: None,
                                   lambda x: x.astype(np.float64)])
def test_named_equivalence_fails_for_wrong_results(tmp_path, monkeypatch, capsys, wrong):
    right = forward_equivalence.cases.run

    def broken(*arguments, **options):
        out, lse = right(*arguments, **options)
        return wrong(out), lse

    monkeypatch.setattr(forward_equivalence.cases, "run", broken)
    arguments = ["--backend", "numpy", "--dtype", "float16", "--cases", "odd", "--out", str(tmp_path)]
    assert forward_equivalence.main(arguments) == 1
    assert not (tmp_path / "forward_equivalence.json").exists()
    assert (tmp_path / "forward_equivalence.failed.json").exists()
    assert "EXCEEDS" in capsys.readouterr().out


def test_named_equivalence_says_what_is_not_served(tmp_path, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise NotImplementedError("backend='numpy' cannot do this: it is Sunday")

    monkeypatch.setattr(forward_equivalence.cases, "run", refuse)
    assert forward_equivalence.main(["--backend", "numpy", "--cases", "odd", "--out", str(tmp_path)]) == 1
    assert "it is Sunday" in capsys.readouterr().out


def test_named_cases():
    assert len({case.name for case in accuracy.CASES}) == len(accuracy.CASES)
    empty = accuracy.CASES[-1]
    assert empty.causal
    assert empty.query_length > empty.key_length


def smoke_result(benchmark, name, tmp_path_factory):
    """What a run of the smoke set records."""
    pytest.importorskip("torch")
    place = tmp_path_factory.mktemp("results")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"flex_attention called without torch.compile")  # given once a process
        assert benchmark.main(["--set", "smoke", "--out", str(place)]) == 0
    return json.loads((place / f"{name}.json").read_text())


# ---- dense masks and biases ----
@pytest.fixture(scope="module")
def dense_result(tmp_path_factory):
    return smoke_result(dense, "dense_performance", tmp_path_factory)


def test_dense_smoke_run(dense_result):
    assert {"method", "device", "versions", "commit", "date", "cases"} <= set(dense_result)
    assert [case["set"] for case in dense_result["cases"]] == list(dense.CLASSES)
    for case in dense_result["cases"]:
        assert case["check"]["ok"]
        for row in case["rows"]:
            assert row["ms"] is not None or "varlen" in row["note"], row
    random = dense_result["cases"][0]
    assert {(row["who"], row["stage"]) for row in random["rows"] if row["note"].endswith("right")} == {
        ("flex", "forward"), ("sdpa", "forward"), ("sdpa", "backward")}
    assert random["check"]["stages"].keys() == {"forward", "backward"}
    plain = dense_result["cases"][-1]
    assert len(plain["check"]["stages"]) == 4
    assert {row["stage"] for row in plain["rows"] if row["note"].endswith("right")} == {
        "forward all keys", "forward causal"}


def test_dense_tables_and_readme(dense_result, tmp_path):
    table = render_dense.DENSE.table(dense_result)
    assert "| 1/8 of the tiles visible, mask shared, forward, against all visible |" in table
    assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1
    assert "interval H4/2" in render_dense.DENSE.text(dense_result)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{render_dense.DENSE.begin}\nold\n{render_dense.DENSE.end}\nafter\n")
    render_dense.DENSE.update_readme(readme, dense_result)
    assert table in readme.read_text()
    render_dense.DENSE.chart(dense_result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_tiles_of_a_peer_that_do_not_fit():
    pytest.importorskip("torch")
    from benchmarks.harness.peers_dense import first_or_fastest

    class Call:
        def __init__(self, milliseconds):
            self.milliseconds = milliseconds

        def __call__(self):
            if self.milliseconds is None:
                raise ValueError("out of resource")

    def choose(*times):
        made = []

        def make(options):
            made.append(options["bwd_x"])
            return Call(times[options["bwd_x"]])

        call, note = first_or_fastest(make, lambda call: call.milliseconds, tuple({"bwd_x": i} for i in range(3)))
        return call.milliseconds, note, made

    assert choose(3.0, 1.0, 2.0) == (3.0, "", [0])
    best, note, made = choose(None, 2.0, 1.0)
    assert best == 1.0 and "x 2" in note and made == [0, 1, 2]
    assert choose(None, None, 5.0)[0] == 5.0
    with pytest.raises(RuntimeError, match="ValueError: out of resource"):
        choose(None, None, None)


@pytest.mark.gpu
def test_flex_with_a_learned_bias():
    """The peer at the head dim at which torch's tiles did not fit, against autograd through the definition."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from benchmarks.harness import peers_dense

    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 256, heads, 128, device="cuda").bfloat16() for heads in (2, 1, 1, 2))
    mask = torch.rand(1, 2, 256, 256, device="cuda") < 0.5
    bias = torch.randn(1, 2, 256, 256, device="cuda").bfloat16()
    blocks = peers_dense.block_mask(mask, True)
    call, note = peers_dense.flex_backward(q, k, v, do, mask, bias, blocks)
    print(note or "torch's own tiles")
    inputs = [x.float().requires_grad_() for x in (q, k, v, bias)]
    s = inputs[0].transpose(1, 2) @ inputs[1].permute(0, 2, 3, 1) * 128**-0.5 + inputs[3]
    out = s.masked_fill(~mask, float("-inf")).softmax(-1) @ inputs[2].transpose(1, 2)
    expected = torch.autograd.grad(out, inputs, do.float().transpose(1, 2))
    for found, wanted in zip(call(), (*(x.transpose(1, 2) for x in expected[:3]), expected[3])):
        assert (found.float() - wanted).norm() < 2e-2 * wanted.norm()


def test_dense_goals():
    def case(name, **rows):
        return {"set": name, "head_dim": 64, "key_length": 8192,
                "rows": [{"who": who, "stage": stage, "ms": ms, "pairs": pairs}
                         for (who, stage, pairs), ms in rows["rows"].items()]}

    us = "cupy_dma"
    result = {"cases": [
        case("random", rows={(us, "forward", 0): 3.0, ("flex", "forward", 0): 2.0}),
        case("interval", rows={(us, "forward dense", 0): 2.0, (us, "forward interval", 0): 1.0,
                               ("torch", "read", 0): 0.6}),
        case("varlen causal", rows={(us, "forward unequal", 300): 6.6, (us, "forward equal, batch", 200): 4.0}),
        case("plain", rows={(us, "forward causal", 0): 1.0, (us, "forward causal, bias of keys and softcap", 0): 1.3,
                            ("cudnn", "forward causal", 0): 2.0})]}
    found = {goal["name"]: goal for goal in render_dense.goals(result)}
    ratios = {name: goal["ratio"] for name, goal in found.items() if goal["ratio"] is not None}
    assert [pytest.approx(ratio) for ratio in ratios.values()] == [1.5, 1.25, 1.1, 0.5, 0.65]
    assert all("forward" in name for name in ratios)


def test_unequal_lengths():
    for small in (False, True):
        drawn = dense_varlen.lengths(small)
        assert min(drawn) >= dense_varlen.SHORTEST
        assert max(drawn) <= dense_varlen.LONGEST
        assert sum(drawn) % len(drawn) == 0
    assert len(dense_varlen.lengths(False)) == dense_varlen.SEQUENCES


@pytest.mark.parametrize("key_bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dense_check(dtype, key_bias):
    """Right outputs and gradients pass; each kind of wrong one fails."""
    torch = pytest.importorskip("torch")
    from benchmarks.harness.check import Given, Problem, check_backward, check_forward, sample

    do, q, k, v, scores, _ = small(torch, n=200, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(1, 2, 200, 200, generator=generator) < 0.5
    mask[:, :, 100] = False  # a query that sees nothing
    bias = scores if key_bias else torch.randn(1, 4, 200, 200, generator=generator, dtype=getattr(torch, dtype))
    out, lse = dma.attention(q, k, v, mask=mask, bias=bias, return_lse=True)
    found = dma.backward.attention_backward(do, q, k, v, out, lse, mask=mask, bias=bias)
    problem = Problem(q[0], k[0], v[0], lambda i, j: mask[0][:, i][:, :, j], bias[0][:, None] if key_bias else bias[0])
    rows = sample(200, 0)
    assert 100 in rows

    def forward(out, lse):
        return check_forward(problem, out[0], lse[0], rows)["ok"]

    assert forward(out, lse)
    for wrong in (lambda x: x * 1.05, lambda x: x * float("nan"), lambda x: x + 0.1):
        assert not forward(wrong(out), lse)
        assert not forward(out, wrong(lse))

    def backward(**wrong):
        gradients = [x[0] for x in found._replace(**wrong)]
        if key_bias:
            gradients[3] = gradients[3][:, None]
        return check_backward(Given(problem, do[0], out[0], lse[0]), gradients, rows, rows)["ok"]

    assert backward()
    for name, gradient in found._asdict().items():
        assert not backward(**{name: gradient * 1.05}), name
        assert not backward(**{name: torch.full_like(gradient, float("nan"))}), name


# ---- decoding ----
@pytest.mark.parametrize("which", ["table", "model", "all", "smoke"])
@pytest.mark.parametrize("quick", [False, True])
def test_decode_cases(which, quick):
    chosen = decode.cases(which, quick)
    assert len({case.name for case in chosen}) == len(chosen) > 0
    assert all(case.query_length == 1 for case in chosen)
    assert sum(case.flex for case in decode.cases("all")) == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_answers_one_query():
    torch = pytest.importorskip("torch")
    from benchmarks.harness import peers

    _, q, k, v, scores, _ = small(torch)
    mask = IntervalMask.top_w(scores, window=40)
    call = peers.flex(q[:, -1:], k, v, mask.start.expand(1, 2, 256), mask.stop, scores, compiled=False)
    ours = dma.dynamic_mask_attention(q[:, -1:], k, v, scores, window=40)
    assert torch.allclose(call().transpose(1, 2), ours, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("window", [None, 40])
def test_decode_check(dtype, window):
    """Right outputs and kept keys pass; each kind of wrong one fails."""
    torch = pytest.importorskip("torch")
    from benchmarks.harness.decode_check import TokenCheck, best_keys

    _, q, k, v, scores, _ = small(torch, n=200, dtype=getattr(torch, dtype))
    scores = (4 * scores).round() / 4  # ties
    q = q[:, -1:]
    kept = None if window is None else best_keys(scores[0], window)
    mask = None if window is None else IntervalMask.top_w(scores, window=window)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)

    def check(out, lse, positions=None):
        found = TokenCheck()
        found.compare(out[0, 0], lse[0, :, 0], q[0, 0], k[0], v[0], scores[0], kept)
        if positions is not None:
            found.compare_kept(positions, kept)
        return found.result()["ok"]

    assert check(out, lse)
    for wrong in (lambda x: x * 1.05, lambda x: x * float("nan"), lambda x: x + 0.1):
        assert not check(wrong(out), lse)
        assert not check(out, wrong(lse))
    if window is not None:
        cache = dma.DynamicCache(1, 2, window, 16, dtype=q.dtype, like=q)
        cache.update(k, v, scores)
        positions = cache.positions[0]
        assert check(out, lse, positions)
        positions[1, 7] = -1
        assert not check(out, lse, positions)


@pytest.fixture(scope="module")
def decode_result(tmp_path_factory):
    return smoke_result(decode, "decode_performance", tmp_path_factory)


def test_decode_smoke_run(decode_result):
    assert {"method", "device", "versions", "commit", "date", "cases"} <= set(decode_result)
    assert decode_result["copy_tb_s"] > 0 and decode_result["empty_replay_us"] > 0
    full, short, serving = decode_result["cases"]
    for case in decode_result["cases"]:
        assert case["check"]["ok"]
        assert all(row["ms"] is not None for row in case["rows"]), case["rows"]
    stages = {"step w100", "step w100, cpu clock", "stateless", "prepared"}
    assert full["check"]["stages"].keys() == short["check"]["stages"].keys() == stages
    assert {row["who"] for row in full["rows"] if row["note"] == "right"} == {"sdpa", "masked", "masked+build", "flex"}
    assert render.value(full, "cupy_dma", "step w100 replay", "queued_ms") > 0
    assert render.value(serving, "cupy_dma", "step w16", "kept_bytes") == 3 * 2 * 16 * 2 * 16 * 2
    assert render.value(serving, "sdpa", "dense", "cache_bytes") == render_decode.history_bytes(serving)


def test_decode_tables_and_readme(decode_result, tmp_path):
    table = render_decode.DECODE.table(decode_result)
    assert "| 3, 4/2, 70 |" in table
    for part in table.split("\n\n")[:3]:
        assert len({line.count("|") for line in part.splitlines()}) == 1
    assert "original H2/1" in render_decode.DECODE.text(decode_result)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{render_decode.DECODE.begin}\nold\n{render_decode.DECODE.end}\nafter\n")
    render_decode.DECODE.update_readme(readme, decode_result)
    assert table in readme.read_text()
    render_decode.DECODE.chart(decode_result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_decode_goals():
    def case(name, batch, heads, keys, window, rows):
        return {"set": name, "batch": batch, "heads": heads, "kv_heads": 8, "head_dim": 128, "key_length": keys,
                "window": window, "rows": [{"who": who, "stage": stage, **row} for (who, stage), row in rows.items()]}

    us, step = "cupy_dma", ("cupy_dma", "step w2048")
    result = {"copy_tb_s": 4.0, "cases": [
        case("original", 1, 2, 256, 1024, {(us, "step w1024"): {"ms": 1.0}}),  # not full: does not count
        case("original", 1, 2, 4096, 1024, {(us, "step w1024"): {"ms": 0.008}, (us, "stateless"): {"ms": 0.02}}),
        case("original", 1, 2, 524288, 1024, {
            (us, "step w1024"): {"ms": 0.009, "cold_ms": 0.012},
            (us, "step w1024 replay"): {"ms": 0.016, "queued_ms": 0.01},
            (us, "stateless"): {"ms": 0.03}}),
        case("serving", 32, 16, 4096, 2048, {step: {"ms": 0.1, "kept_bytes": 2.4e8}}),
        case("serving", 32, 16, 32768, 2048, {step: {"ms": 0.1, "kept_bytes": 3e8}}),
        case("serving", 8, 32, 131072, 2048, {step: {"ms": 0.03, "kept_bytes": 2**26}, ("cudnn", "dense"): {"ms": 0.9},
                                              ("flash", "dense"): {"ms": 0.75}})]}
    found = render_decode.goals(result)
    assert [goal["found"] for goal in found] == pytest.approx([9, 12, 10, 16, 30, 0.6, 25, 1 / 64])
    assert [goal["ok"] for goal in found] == [True, True, True, False, True, False, True, True]
    assert [goal["found"] for goal in render_decode.goals({"copy_tb_s": 4.0, "cases": []})] == [None] * 8


def test_decode_leaves_out_what_does_not_fit(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from benchmarks.harness import measure

    monkeypatch.setattr(measure, "free_bytes", lambda: 0)
    assert decode.main(["--set", "smoke", "--out", str(tmp_path)]) == 0
    cases = json.loads((tmp_path / "decode_performance.json").read_text())["cases"]
    assert all("do not fit" in row["note"] for case in cases for row in case["rows"])


def test_wrong_steps_leave_the_results_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    right = decode.Benchmark.result

    def wrong(self, cache, token):
        out, lse = right(self, cache, token)
        return out * 1.1, lse

    monkeypatch.setattr(decode.Benchmark, "result", wrong)
    assert decode.main(["--set", "smoke", "--seconds", "0", "--out", str(tmp_path)]) == 1
    assert not (tmp_path / "decode_performance.json").exists()
    failed = json.loads((tmp_path / "decode_performance.failed.json").read_text())
    assert failed["cases"][0]["check"]["worst"] > 1


# ---- tile shapes of the Hopper forward ----
def test_tuned_tiles_fit():
    from cupy_dma.backends.cuda.attention import sm90, sm90_schedule

    found = tune_sm90.cases(list(tune_sm90.KINDS), [64, 96, 128, 192, 256])
    assert len({str(case) for case in found}) == len(found)
    for case in found:
        candidates = tune_sm90.tiles(case)
        assert set(sm90_schedule.tiles_of(case.kind, case.head_dim)) <= set(candidates)
        for tile in candidates:
            config = sm90.HopperForwardConfig(
                "__nv_bfloat16", case.head_dim, 2, *tile, "KEYS_LISTED", case.causal, 1, False, case.kind == "bits",
                "float", False, False, True, False)
            assert config.shared_bytes <= 227 * 1024


def test_tuned_tiles_are_forced_and_given_back():
    from cupy_dma.backends.cuda.attention import sm90

    before = sm90.tile_shape, sm90._pays
    tile = tune_sm90.CANDIDATES[64][1]
    for forced in (tile, None):
        with pytest.raises(ZeroDivisionError), tune_sm90.forced(forced):
            assert sm90.tile_shape(None, 132) == forced
            assert sm90._pays(None, None) == (forced is not None)
            _ = 1 / 0
        assert (sm90.tile_shape, sm90._pays) == before


def test_kernels_of_another_folder_are_taken_and_given_back(tmp_path):
    from cupy_dma.backends.cuda.runtime import jit

    own = jit.source_text("common/check_fragment_layout.cu")
    folder = tmp_path / "kernels"
    shutil.copytree(jit.kernels_directory(), folder)
    (folder / "common/check_fragment_layout.cu").write_text("// another\n" + (folder / "common/check_fragment_layout.cu").read_text())
    with pytest.raises(ZeroDivisionError), tune_sm90.kernels_of(folder):
        assert "// another\n" in jit.source_text("common/check_fragment_layout.cu") != own
        _ = 1 / 0
    assert jit.source_text("common/check_fragment_layout.cu") == own
    with tune_sm90.kernels_of(None):
        assert jit.source_text("common/check_fragment_layout.cu") == own


def test_kernels_of_another_folder_are_loaded_anew():
    """Those of every step, also where only the first call asks for them."""
    from cupy_dma.backends.cuda.attention import forward
    from cupy_dma.backends.cuda.lists import intervals
    from cupy_dma.backends.cuda.runtime import configs, jit
    from cupy_dma.backends.cuda.select import prefix

    asked = []

    class Runtime:
        def load(self, config, entry, *more):
            asked.append(entry)

        def check_layout(self, index):
            pass

    runtime = Runtime()

    def ask():
        intervals._kernel(runtime, 0, False, 64, False, "tile_lists")
        prefix._kernel(runtime, 0, False, False, "local_top")
        forward.load_kernel(runtime, configs.ListConfig, "summarize", 0, False, 64, False)

    ask()
    with tune_sm90.kernels_of(jit.kernels_directory()):
        ask()
        ask()
    ask()
    assert asked == ["tile_lists", "local_top", "summarize"] * 3


@pytest.mark.parametrize(("arguments", "message"), [
    (["--head-dim", "300"], "--head-dim must be 1 to 256, got"),
    (["--kernels", "tests"], "--kernels must be folders like kernels/, got tests, which has no arch.cuh"),
    (["--case", "17/8"],
     "--case must be part of a case's name, such as short intervals, D64 2/1 N2048 w128; got 17/8")])
def test_tuning_refuses_what_it_cannot_do(arguments, message, capsys):
    with pytest.raises(SystemExit):
        tune_sm90.main(arguments)
    assert message in capsys.readouterr().err


def test_table_of_tuned_tiles():
    rows = [{"tile": "portable", "ms": 2.0, "right": True}, {"tile": "a", "ms": 1.0, "right": True, "in_use": False},
            {"tile": "b", "ms": 0.5, "right": False, "in_use": True}]
    lines = tune_sm90.table({"cases": [{"name": "a case", "rows": rows}]}).splitlines()
    assert [line.split()[-1] for line in lines] == ["case", "ms", "fastest", "WRONG"] and "in use" in lines[3]
