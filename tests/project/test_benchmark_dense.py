"""The benchmark dense in parts that need no GPU."""
import pytest

import cupy_dma as dma
from benchmarks.harness import dense_varlen, render_dense
from benchmarks.routines import dense
from tests.project import benchmark_runs as runs
from tests.project.benchmark_runs import small

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return runs.smoke_run(dense, "dense_performance", tmp_path_factory)


def test_smoke_run(result):
    assert [case["set"] for case in result["cases"]] == list(dense.CLASSES)
    for case in result["cases"]:
        for row in case["rows"]:
            assert row["ms"] is not None or "varlen" in row["note"], row
    random = result["cases"][0]
    assert {(row["who"], row["stage"]) for row in random["rows"] if row["note"].endswith("right")} == {
        ("flex", "forward"), ("sdpa", "forward"), ("sdpa", "backward")}
    assert random["check"]["stages"].keys() == {"forward", "backward"}
    plain = result["cases"][-1]
    assert len(plain["check"]["stages"]) == 4
    assert {row["stage"] for row in plain["rows"] if row["note"].endswith("right")} == {
        "forward all keys", "forward causal"}


def test_tables_and_readme(result, tmp_path):
    runs.check_tables(render_dense.DENSE, result, tmp_path,
                      "| 1/8 of the tiles visible, mask shared, forward, against all visible |", "interval H4/2")
    render_dense.DENSE.chart(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_goals():
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
    for few in (False, True):
        drawn = dense_varlen.lengths(few)
        assert min(drawn) >= dense_varlen.SHORTEST
        assert max(drawn) <= dense_varlen.LONGEST
        assert sum(drawn) % len(drawn) == 0
    assert len(dense_varlen.lengths(False)) == dense_varlen.SEQUENCES


@pytest.mark.parametrize("key_bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_check(dtype, key_bias):
    """Right outputs and gradients pass; each kind of wrong one fails."""
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
