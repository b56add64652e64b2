"""Calls for some of a cache's sequences, and speculative tokens: ``attend``, then ``commit`` for some of them."""
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.cache import gated_cache
from tests.oracle.arrays import host
from tests.oracle.cache_cases import History, packed
from tests.oracle.slot_cases import COPIES, OPERATIONS, Slots
from tests.unit.test_gated_cache import Gates

CASES = [
    History(), History(dtype="float16", sinks=2, recent=3), History(dtype="bfloat16", window=3),
    History(scores="nan", heads=6, kv_heads=2), History(window=(9, 3), sinks=1, recent=1, value_dim=5),
    History(bias_delay=5, scores="hidden", recent=2), History(window=(3, 12), bias_delay=30, softcap=2.0),
    History(options={"record_stops": True}), History(window=(2, 6), recent=2, options={"record_stops": True}),
    History(dtype="bfloat16", recent=2, options={"storage": "fp8"}),
    History(window=(9, 3), sinks=1, recent=1, value_dim=5, options={"storage": "int8"}),
    Gates(dtype="float16", options={"storage": "int8", "record_stops": True}),
    *(History(scores=scores, window=window, sinks=sinks, recent=recent) for scores, window, sinks, recent in (
        ("zeros", 11, 0, 4), ("infinite", 4, 3, 0), ("increasing", 1, 2, 1), ("decreasing", 8, 4, 3))),
    Gates(), Gates(capacity=3), Gates(capacity=(1, 6), sinks=0, add_gates=False), Gates(dtype="float64", capacity=1),
    Gates(recent=1, sinks=3, values=(np.nan, -3.0, 0.0), add_gates=False), Gates(capacity=2, values=(0.0,))]


@pytest.mark.feature("cuda numpy forward", "DynamicCache", "slots, attend, commit", "update", "reorder")
@pytest.mark.feature("cuda numpy forward", "GatedCache", "slots, attend, commit")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_sequences_come_and_go(case, seed, convert):
    """Each sequence is as in its own cache, whatever the others do."""
    rooms = {"ROWS": 2, "SPARE": 1, "MULTIPLE": 1}  # makes a growing cache grow at nearly every token
    with mock.patch.multiple(gated_cache, **rooms):
        Slots(replace(case, batch=4, length=30, head_dim=4), np.random.default_rng(seed), convert,
              convert.gpu).run(30, OPERATIONS + COPIES)


@pytest.mark.feature("cuda numpy forward", "DynamicCache", "lengths, cu_seqlens")
@pytest.mark.parametrize("options", [
    {}, {"sinks": 2, "recent": 3}, {"bias_delay": 5}, {"bias_delay": 2**30},
    {"window": (9, 4), "bias_delay": 12, "sinks": 1}, {"options": {"record_stops": True}, "sinks": 1, "recent": 2}],
                         ids=str)
def test_sequences_of_different_lengths(options, convert):
    """Without slots."""
    calls = Slots(History(batch=3, length=60, head_dim=16, **options), np.random.default_rng(3), convert,
                  convert.gpu, most=12, named=False)
    calls.run(16, ("all",))


def stored(cache):
    """The bits of all arrays, except for rows of empty slots."""
    state = cache._state
    found = {name: np.array(host(getattr(state, name).array)) for name in state.arrays}
    for name in state.per_row:
        found[name][found["positions"] < 0] = 0
    return [x.tobytes() for x in found.values()]


def bits(found):
    return [np.array(host(x)).tobytes() for x in found]


WAYS = [History(batch=3, window=6, sinks=1, recent=2), History(batch=3, window=(3, 9), dtype="float16"),
        Gates(batch=3, capacity=(2, 5))]


@pytest.mark.parametrize("history", WAYS, ids=str)
@pytest.mark.parametrize("most", [1, 7])
def test_slots_are_the_same_computation(history, most, convert):
    """All sequences in another order: results and state equal those of the call without slots bit for bit."""
    rng = np.random.default_rng(0)
    cache, plain = history.cache(convert), history.cache(convert)
    for begin in range(0, 28, most):
        order, tokens = rng.permutation(3), history.tokens(begin, begin + most)
        lengths = rng.integers(0, most + 1, 3)
        expected = plain.extend(*map(convert, tokens), lengths=convert(lengths), return_lse=True)
        found = cache.extend(*[convert(x[order]) for x in tokens], lengths=convert(lengths[order]),
                             slots=convert(order), return_lse=True)
        assert bits(host(x)[order] for x in expected) == bits(found)
    assert stored(cache) == stored(plain)


@pytest.mark.parametrize("history", WAYS, ids=str)
@pytest.mark.parametrize("most", [1, 7])
@pytest.mark.parametrize("form", ["lengths", "cu_seqlens"])
def test_commit_appends_the_same_rows_as_extend(history, most, form, convert):
    """Rejected tokens leave no trace: the cache is bit for bit that of ``extend`` with the accepted ones."""
    rng = np.random.default_rng(1)
    cache, plain = history.cache(convert), history.cache(convert)
    # On a GPU, probabilities are rounded to TF32, up or down: 2^-10 of a value.
    tf32 = 2.0**-10 * abs(history.data["value"]).max()
    near = 1e-2 if history.dtype == "float16" else tf32 if convert.gpu else 1e-5
    for begin in range(0, 28, most):
        counts, tokens, before = rng.integers(0, most + 1, 3), history.tokens(begin, begin + most), stored(cache)
        arrays, how = tokens, {}
        if form == "cu_seqlens":
            arrays, bounds = packed(tokens, [most] * 3)
            how = {"cu_seqlens": convert(bounds)}
        arrays = [convert(np.array(x)) for x in arrays]
        for twice in range(2):  # the second replaces the first
            out = host(cache.attend(*arrays, **how))
            if not twice:
                for x in arrays:
                    x[...] = 0  # the cache has copied its arguments
                fresh = tokens if form == "lengths" else packed(tokens, [most] * 3)[0]
                arrays = [convert(np.array(x)) for x in fresh]
        assert stored(cache) == before
        cache.commit(convert(counts) if begin % 2 else counts.tolist())
        expected = host(plain.extend(*map(convert, tokens), lengths=convert(counts)))
        for b, n in enumerate(counts):
            own = out[b * most:][:n] if form == "cu_seqlens" else out[b, :n]
            np.testing.assert_allclose(own, expected[b, :n], rtol=0, atol=near)
        assert [x.tobytes() for x in map(np.array, map(host, cache.kept()))] == bits(plain.kept())
        if form == "lengths":
            assert stored(cache) == stored(plain)


def test_memory_stays_the_same():
    """Over many short texts nothing grows, not even the record of stops."""
    history = History(batch=2, length=12, options={"record_stops": True})
    cache, sizes = history.cache(), set()
    for text in range(60):
        slot = [text % 2]
        cache.reset(slot)
        for begin in range(0, 12, 3):
            tokens = [x[:1] for x in history.tokens(begin, begin + 3)]
            cache.attend(*tokens, slots=slot)
            cache.commit(3)
        if text >= 2:
            sizes.add(cache.memory_bytes)
    assert len(sizes) == 1


def test_rows_of_the_last_attend_are_kept():
    history = History()
    cache, other = history.cache(), history.cache()
    for n in (1, 9, 5):
        cache.attend(*history.tokens(0, n))
    other.attend(*history.tokens(0, 5))
    assert cache.memory_bytes == other.memory_bytes > history.cache().memory_bytes


@pytest.mark.parametrize("what", ["none", "commit", "extend", "update", "reset", "reset one", "reorder", "load"])
def test_commit_needs_an_attend(what):
    history = History()
    cache, tokens = history.cache(), history.tokens(0, 3)
    cache.extend(*history.tokens(3, 8))
    saved = cache.state_dict()
    if what != "none":
        cache.attend(*tokens)
    calls = {"none": lambda: None, "commit": lambda: cache.commit(1), "extend": lambda: cache.extend(*tokens),
             "update": lambda: cache.update(*tokens[1:]), "reset": cache.reset, "reset one": lambda: cache.reset([1]),
             "reorder": lambda: cache.reorder([1, 1]), "load": lambda: cache.load_state_dict(saved)}
    calls[what]()
    before = stored(cache)
    with pytest.raises(RuntimeError, match="commit needs an attend before it"):
        cache.commit(1)
    assert stored(cache) == before
    copy = cache.clone()
    cache.attend(*tokens)
    cache.length, cache.kept(), cache.state_dict(), cache.select_batch([1])  # look only
    with pytest.raises(RuntimeError, match="commit needs an attend"):
        copy.commit(1)
    cache.commit(1)


@pytest.mark.parametrize(("n", "kind", "message"), [
    (4, ValueError, "n must lie between 0 and L = 3, got 4"), (-1, ValueError, "n must be at least 0, got -1"),
    (True, TypeError, "n must be an int"), (1.0, TypeError, "n must be"),
    ([1, 4], ValueError, r"n must lie between 0 and L = 3, got \[1, 4\]"),
    (np.array([-1, 0]), ValueError, "n must lie between 0 and L = 3"),
    ([1], ValueError, r"n must have shape \(B,\) = \(2\), got"), (np.ones(2), TypeError, "n must be int32 or int64"),
])
def test_errors_of_commit(n, kind, message):
    history = History()
    cache = history.cache()
    cache.attend(*history.tokens(0, 3))
    before = stored(cache)
    with pytest.raises(kind, match=message):
        cache.commit(n)
    assert stored(cache) == before
    cache.commit(2)
    assert cache.length.tolist() == [2, 2]


@pytest.mark.parametrize(("slots", "kind", "message"), [
    ([0, 2], ValueError, r"slots must lie between -1 \(none\) and 1 \(the cache has a batch of 2\), got \[0, 2\]"),
    (np.array([-2, 0]), ValueError, "slots must lie between -1"),
    ([1, 1], ValueError, "slots must name no sequence twice"),
    ([0, 1, -1], ValueError, "slots must name each of the cache's 2 sequences at most once, got 3"),
    (np.ones(2), TypeError, "slots must be int32 or int64, got float64"),
    (np.zeros((1, 1), int), ValueError, r"slots must have shape \(n,\), got \(1, 1\)"),
    ([1], ValueError, r"key must have shape \(n, L, Hkv, D\) = \(1, 3, 2, 8\), got"),
])
@pytest.mark.parametrize("call", ["extend", "update", "attend", "reset"])
def test_errors_of_slots(call, slots, kind, message):
    history = History()
    cache, tokens = history.cache(), history.tokens(0, 3)
    cache.extend(*history.tokens(3, 8))
    before = stored(cache)
    if call == "reset":
        if "key" in message:
            return
        tokens = []
    with pytest.raises(kind, match=message):
        getattr(cache, call)(*tokens[call == "update":], slots=slots)
    assert stored(cache) == before


def test_errors_of_lengths_with_slots():
    history = History()
    cache, tokens = history.cache(), [x[:1] for x in history.tokens(0, 3)]
    with pytest.raises(ValueError, match=r"lengths must have shape \(n,\) = \(1\), got \(2,\)"):
        cache.extend(*tokens, slots=[1], lengths=[1, 1])
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape \(n \+ 1,\) = \(2\), got \(3,\)"):
        cache.extend(*[x[0] for x in tokens], slots=[1], cu_seqlens=[0, 1, 3])
    cache.attend(*tokens, slots=[1])
    with pytest.raises(ValueError, match=r"n must have shape \(n,\) = \(1\), got \(2,\)"):
        cache.commit([1, 1])


def test_a_cache_that_grows_attends_to_more_open_keys_than_it_has_rows_for():
    case = Gates(batch=1, length=300, values=(0.0,))
    cache = case.cache()
    out, lse = (host(x) for x in cache.attend(*case.tokens(0, 300), return_lse=True))
    case.check(out, lse)
    assert cache.length.tolist() == [0] and isinstance(cache, dma.GatedCache)
