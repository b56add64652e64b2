"""Prefill of caches on the cuda backend, on the CPU emulator."""
from dataclasses import replace

import numpy as np
import pytest

from cupy_dma.cache import gated_cache
from tests.oracle.cache_cases import History, packed
from tests.oracle.slot_cases import Slots
from tests.unit.test_gated_cache import Gates


@pytest.fixture
def small_steps(monkeypatch):
    """Without a capacity, rows of gated caches grow at nearly every token."""
    for name, value in (("ROWS", 2), ("SPARE", 1), ("MULTIPLE", 1)):
        monkeypatch.setattr(gated_cache, name, value)


@pytest.mark.feature("cuda forward", "DynamicCache", "extend, pieces")
@pytest.mark.parametrize("history", [
    History(length=31, window=6), History(length=31, window=6, sinks=2, recent=3, dtype="bfloat16", head_dim=16),
    History(length=31, window=9, value_dim=4, scores="nan"), History(length=31, window=(9, 3), sinks=1),
    History(length=31, window=9, bias_delay=5, scores="hidden", dtype="float16", head_dim=16),
    History(length=31, window=(4, 9), bias_delay=30, recent=2)], ids=str)
def test_chunks(history, lengths=(12, 9, 10)):
    cache = history.cache(backend="emulator")
    history.check(*history.run(cache, lengths), tf32=True)
    history.check_kept(cache)


@pytest.mark.feature("cuda forward", "GatedCache", "extend, stops, replayed")
@pytest.mark.parametrize("lengths", [[1] * 24, [11, 1, 12]], ids=["steps", "pieces"])
@pytest.mark.parametrize("options", [{"capacity": (3, 5)}, {"add_gates": False}, {"batch": 2, "seed": 1}], ids=str)
def test_gates(options, lengths, small_steps):
    """Without a capacity, rows grow at different tokens for each sequence and head."""
    case = Gates(**{"dtype": "float16", "head_dim": 16, "batch": 1, "length": 24, **options})
    cache = case.cache(backend="emulator")
    case.check(*case.run(cache, lengths))
    case.check_kept(cache)
    case.check_replay(cache)
    assert "capacity" in options or len({*cache._state.segments.sizes}) > 1


@pytest.mark.parametrize("capacity", [None, (2, 70)])
@pytest.mark.parametrize("seed", range(2))
def test_any_appends_and_batches(seed, capacity, small_steps):
    """Against the numpy backend: steps and chunks, with sequences that are selected, reordered, copied and saved, and
    whose numbers of rows differ."""
    case = Gates(dtype="float16", head_dim=8, batch=3, length=120, seed=seed, capacity=capacity)
    rng, begin = np.random.default_rng(seed), 0
    caches = [case.cache(backend=name) for name in ("emulator", "numpy")]
    for what in "chunk select step save step few reorder step pieces select step step".split():
        if what in ("select", "reorder"):
            rows = rng.integers(0, 3, 3).tolist()
            if what == "select":
                caches = [cache.select_batch(rows) for cache in caches]
            else:
                for cache in caches:
                    cache.reorder(rows)
            continue
        if what == "save":
            copies = [case.cache(backend=name) for name in ("emulator", "numpy")]
            for copy, cache in zip(copies, caches):
                copy.load_state_dict(cache.state_dict())
            caches = copies
            continue
        n = {"step": 1, "few": 3}.get(what, 12)
        lengths = rng.integers(0, n + 1, 3) if what in ("few", "pieces") else np.full(3, n)
        found = [cache.extend(*case.tokens(begin, begin + n), lengths=lengths, return_lse=True) for cache in caches]
        for ours, theirs in zip(*found):
            np.testing.assert_allclose(ours.astype("f4"), theirs.astype("f4"), rtol=0, atol=4e-3)
        for ours, theirs in zip((*caches[0].kept(), caches[0].length), (*caches[1].kept(), caches[1].length)):
            assert np.array_equal(ours, theirs)
        begin += n
    assert np.array_equal(caches[0].stops(), caches[1].stops())
    assert caches[0]._state.segments.sizes == caches[1]._state.segments.sizes


def test_a_long_chunk_sees_more_sinks_and_recent_keys_than_best_ones():
    """The lists of its tiles have room for all these keys."""
    test_chunks(History(length=330, window=6, sinks=40, recent=60, dtype="bfloat16", head_dim=16, batch=1), (110, 220))


@pytest.mark.feature("cuda forward", "DynamicCache", "lengths, cu_seqlens")
@pytest.mark.parametrize("options", [{}, {"bias_delay": 8, "window": (6, 3)}], ids=str)
def test_packed_chunks(options):
    """Two sequences of 9 and 12 tokens at first, then of 12 and 9."""
    history = History(**{"length": 21, "window": 6, "sinks": 1, "recent": 2, "dtype": "bfloat16", "head_dim": 16,
                         **options})
    cache = history.cache(backend="emulator")
    x, done, outs = history.data, np.zeros(2, int), [[], []]
    for added in ((9, 12), (12, 9)):
        tokens = [np.stack([np.resize(x[name][b, at:at + n], (12, *x[name].shape[2:]))
                            for b, (at, n) in enumerate(zip(done, added))]) for name in ("query", "key", "value")]
        tokens.append(np.stack([np.resize(x["scores"][b, :, at:at + n].T, (12, 2)).T
                                for b, (at, n) in enumerate(zip(done, added))]))
        rows, bounds = packed(tokens, added)
        out, lse = cache.extend(*rows, cu_seqlens=bounds, return_lse=True, bias_delay=history.bias_delay)
        for b, (begin, end) in enumerate(((0, added[0]), (added[0], 21))):
            outs[b].append((out[begin:end], lse[:, begin:end]))
        done += added
    history.check(np.stack([np.concatenate([out for out, _ in parts]) for parts in outs]),
                  np.stack([np.concatenate([lse for _, lse in parts], 1) for parts in outs]), tf32=True)
    history.check_kept(cache)


@pytest.mark.feature("cuda forward", "DynamicCache", "slots, attend, commit")
@pytest.mark.feature("cuda forward", "GatedCache", "slots, attend, commit")
@pytest.mark.parametrize("case", [
    History(sinks=1, recent=2), History(window=(9, 3), dtype="float16", scores="nan"), Gates(dtype="float16"),
    History(window=(9, 3), recent=2, dtype="bfloat16", options={"storage": "fp8"}),
    Gates(dtype="float16", capacity=(3, 5))], ids=str)
def test_sequences_come_and_go(case, small_steps):
    Slots(replace(case, batch=3, length=24, head_dim=16), np.random.default_rng(0), tf32=True,
          options={"backend": "emulator"}).run(16)
