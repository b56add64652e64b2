"""Shards of a batch, positions, losses and decode caches over gloo ranks, against one process."""
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cupy_dma as dma  # noqa: E402
from cupy_dma.distributed import RankError, document_ids, shard_lengths  # noqa: E402
from tests.distributed import sequence_jobs as jobs  # noqa: E402
from tests.distributed.cases import CASES, Case  # noqa: E402
from tests.oracle import reference  # noqa: E402


@pytest.mark.parametrize(("total", "world", "expected"), [(10, 4, [3, 3, 2, 2]), (2, 4, [1, 1, 0, 0]), (8, 1, [8])])
def test_lengths(total, world, expected):
    assert shard_lengths(total, world) == expected


@pytest.mark.parametrize(("world", "total", "dim"), [(1, 5, 1), (2, 9, 1), (3, 9, 0), (4, 3, -1), (4, 0, 1)])
def test_sharding_and_gathering(ranks, world, total, dim):
    found = ranks.run(world, jobs.there_and_back, total, dim)
    whole = torch.arange(total * 6, dtype=torch.float32).reshape(2, total, 3).movedim(1, dim)
    assert [length for length, _, _ in found] == shard_lengths(total, world)
    assert all(torch.equal(gathered, whole) for _, gathered, _ in found)
    weights = sum(range(1, world + 1))
    assert torch.equal(torch.cat([gradient for *_, gradient in found], dim), whole * weights)


def test_uneven_shards(ranks):
    for found in ranks.run(4, jobs.uneven, (3, 0, 7, 1)):
        assert found.tolist() == [list(range(11))]


@pytest.mark.parametrize("case", [case for case in CASES if case.name.startswith((
    "3-ranks", "lengths-5-0", "padding", "documents", "both")) and "-sinks" not in case.name], ids=str)
def test_positions(ranks, case):
    found = ranks.run(case.world, jobs.positions, case)
    real, ids = case.whole("padding"), case.whole("documents")
    if real is None and ids is None:
        assert torch.cat(found).tolist() == list(range(case.n))
        return
    rows = max(len(x) for x in (real, ids) if x is not None)
    every = np.ones((rows, case.n), bool) if real is None else np.broadcast_to(real.numpy(), (rows, case.n))
    number = np.zeros((rows, case.n)) if ids is None else np.broadcast_to(
        reference.document_numbers(ids.numpy(), case.n), (rows, case.n))
    expected = [[max(sum(every[b, i] and number[b, i] == number[b, p] for i in range(p + 1)) - 1, 0)
                 for p in range(case.n)] for b in range(rows)]
    assert torch.cat(found, 1).tolist() == expected


def test_documents_of_cumulative_lengths(ranks):
    bounds = [0, 4, 4, 5, 13]
    joined = torch.cat(ranks.run(3, jobs.ids, bounds), 1)
    assert dma.IntervalMask.documents(joined) == dma.IntervalMask.documents(torch.tensor(bounds))


@pytest.mark.parametrize(("given", "message"), [
    (([0, 3, 2], 2), "never decrease"), (([1, 3], 3), "start at 0"), (([0, 3], 4), "end at total = 4"),
    (([0.0, 3.0], 3), "integers"), (([[0, 3]], 3), r"\(documents \+ 1,\)")])
def test_wrong_cumulative_lengths(given, message):
    with pytest.raises(ValueError, match=message):
        document_ids(*given)


@pytest.mark.parametrize(("gradients", "combine"), [("mean", lambda x: sum(x) / len(x)), ("sum", sum)])
@pytest.mark.parametrize("counts", [(5, 3), (1, 0, 6), (2, 2, 2, 2)], ids=str)
def test_the_mean_over_shards(ranks, counts, gradients, combine):
    found = ranks.run(len(counts), jobs.mean, counts, gradients)
    expected = sum(i * i for i in range(1, sum(counts) + 1)) / sum(counts)
    assert all(float(value) == pytest.approx(expected) for value, _ in found)
    assert float(combine([gradient for _, gradient in found])) == pytest.approx(expected)


CACHES = [Case("3-ranks", lengths=(14, 5, 20)), Case("short", lengths=(2, 1, 1), window=9, recent=2),
          Case("besides", lengths=(9, 0, 3, 14), sinks=3, recent=4, scores="ties"),
          Case("padding", lengths=(9, 11, 3), padding="some", sinks=2, recent=12),
          Case("bfloat16", lengths=(9, 11), dtype="bfloat16", head_dim=5), Case("one", lengths=(12,), recent=1)]


@pytest.mark.feature("numpy forward", "distributed", "fill_cache, prefill")
@pytest.mark.parametrize("case", CACHES, ids=str)
def test_a_cache_of_shards_is_that_of_the_whole(ranks, case):
    """Its contents and the outputs of further tokens are equal bit for bit, on every rank."""
    steps = min(case.n, 9)
    key, value, scores, padding = (case.whole(name) for name in ("key", "value", "scores", "padding"))
    cache = dma.DynamicCache(case.batch, case.kv_heads, case.window, case.head_dim, like=key, sinks=case.sinks,
                             recent=case.recent)
    if padding is None:
        cache.update(key, value, scores)
    else:  # real tokens first
        order = padding.logical_not().long().argsort(dim=1, stable=True)
        first = [torch.stack([x[b].movedim(axis, 0)[order[b]].movedim(0, axis) for b in range(case.batch)])
                 for x, axis in ((key, 0), (value, 0), (scores, 1))]
        cache.update(*first, lengths=padding.sum(1))
    length, kept = cache.length, cache.kept()
    outs = jobs.decoded(cache, case, steps)
    for found in ranks.run(case.world, jobs.cached, case, steps):
        assert torch.equal(found["length"], length) and torch.equal(found["kept"].positions, kept.positions)
        assert torch.equal(found["kept"].scores, kept.scores)
        torch.testing.assert_close(found["outs"], outs, rtol=0, atol=1e-2 if case.dtype == "bfloat16" else 1e-12)


def test_a_cache_that_does_not_fit_is_told_to_all(ranks):
    case = replace(CACHES[0], name="other", kv_heads=4)
    found = ranks.outcomes(3, jobs.misfit, case)
    assert isinstance(found[1], ValueError) and "key must have shape" in str(found[1])
    assert all(isinstance(x, RankError) and "rank 1 failed: ValueError: key must" in str(x) for x in found[::2])
