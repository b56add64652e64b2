"""Several tokens in one launch of the decode step: results and state have the bits of single tokens. Also sequences in
slots, and calls that change nothing."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupy_dma.arrays import describe
from cupy_dma.backends.cuda.attention import split
from cupy_dma.backends.cuda.decode import step
from cupy_dma.cache.arguments import extend_call
from tests.emulator import Order
from tests.oracle.cache_cases import SCORES, History
from tests.unit.test_gated_cache import Gates

# Query heads per kv head, in brackets the tokens that fit into one launch: 1 (8), 2 (8), 3 (4), 5 (2), 20 (1); with
# long rows 3 (2), with the longest 2 (1). One split and several, a window per head, both ways to load rows.
CASES = [
    History(dtype="float16", head_dim=16, window=7, heads=2),
    History(dtype="float16", head_dim=16, value_dim=24, window=9, sinks=2, recent=3),
    History(dtype="bfloat16", head_dim=64, window=100, recent=2, length=116, batch=1, heads=2, kv_heads=1),
    History(dtype="float16", head_dim=5, value_dim=7, window=9, heads=3, kv_heads=1, softcap=3.0, scale=0.7),
    History(dtype="float32", head_dim=8, window=(9, 4), sinks=1, recent=2, scores="nan"),
    History(dtype="float32", head_dim=7, window=70, length=78, batch=1, recent=1, heads=5, kv_heads=1),
    History(dtype="float32", head_dim=72, window=6, length=16, recent=9, heads=3, kv_heads=1, batch=1),
    History(dtype="float16", head_dim=8, window=(66, 3), sinks=1, length=80, heads=20, batch=1, scores="distinct"),
    History(dtype="bfloat16", head_dim=24, window=9, bias_delay=4, recent=6, scores="hidden"),
    Gates(dtype="float16", head_dim=16, length=24, batch=2, capacity=3),
    Gates(dtype="float16", head_dim=8, length=40, batch=1, capacity=(70, 2), seed=1),
    History(dtype="float32", head_dim=136, window=6, length=16, batch=1, heads=2, kv_heads=1),
    # Steps of a warp in which no token takes a slot, while keys are evicted or get their bias.
    History(dtype="float16", head_dim=8, window=40, recent=24, bias_delay=10, length=96, batch=1, scores="distinct"),
    # 8-bit rows.
    History(dtype="float16", head_dim=16, value_dim=24, window=9, sinks=2, recent=3, options={"storage": "fp8"}),
    History(dtype="float32", head_dim=8, window=(9, 4), sinks=1, recent=2, scores="nan", options={"storage": "int8"}),
    History(dtype="bfloat16", head_dim=5, value_dim=7, window=9, heads=3, kv_heads=1, options={"storage": "int8"}),
    Gates(dtype="bfloat16", head_dim=16, length=24, batch=2, capacity=3, options={"storage": "fp8"}),
]


def bits(cache) -> dict[str, bytes]:
    """All stored bits; checks that counters are at rest."""
    assert not np.array(cache._state.tickets.array).any()
    return {name: np.array(getattr(cache._state, name).array).tobytes() for name in cache._state.arrays}


def filled(case: History, tokens: int):
    """A cache with the first tokens, in one call."""
    cache = case.cache(backend="emulator")
    cache.update(*case.tokens(0, tokens)[1:])
    return cache


def attended(case: History, cache, tokens, *, lengths=None, slots=None, commits=True, query=True):
    """out and lse of a call of the backend."""
    query_rows, *rows = tokens
    state, batch = cache._state, rows[0].shape[0]
    like = replace_batch(state, batch)
    call = extend_call(like, query_rows if query else None, *rows, case.scale, case.softcap, lengths, None, query, None,
                       False, case.bias_delay or getattr(cache, "delay", 0))
    call = replace(call, commits=commits, slots=slots if slots is None else describe(np.int32(slots), "slots"))
    assert step.serves(state, call)
    return cache._module.cache_extend(state, call)


def replace_batch(state, batch: int):
    """Give the cache as many sequences as the call has, to pass its checks."""
    return state.having({"lowest": describe(np.zeros((batch, state.kv_heads), np.int32), "lowest")})


def one_by_one(case: History, cache, tokens, lengths=None, slots=None):
    """The same with one call per token."""
    found, length = [], tokens[1].shape[1]
    for t in range(length):
        own = [x[:, t:t + 1] for x in tokens[:3]] + [tokens[3][:, :, t:t + 1]]
        real = None if lengths is None else np.int32(np.array(lengths) > t)
        found.append(attended(case, cache, own, lengths=real, slots=slots))
    return [np.concatenate(x, axis) for x, axis in zip(zip(*found), (1, 2))]


def equal(found, expected) -> bool:
    return all(np.array(x).tobytes() == np.array(y).tobytes() for x, y in zip(found, expected))


def checked(case: History, several, single, first: int, end: int, lengths=None):
    """out and lse of a call, whose bits and stored bits are those of single tokens."""
    tokens = case.tokens(first, end)
    found = attended(case, several, tokens, lengths=lengths)
    assert equal(found, one_by_one(case, single, tokens, lengths))
    assert bits(several) == bits(single)
    return found


@pytest.mark.feature("cuda forward", "DynamicCache", "extend, pieces")
@pytest.mark.parametrize("length", [2, 3, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_tokens_one_by_one(case, length):
    begin = case.length % length if length < 8 else case.length - 16
    several, single = filled(case, begin), filled(case, begin)
    for first in range(begin, case.length, length):
        checked(case, several, single, first, first + length)
    case.check_kept(several)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 0), (0, 1), (2, 3)])
@pytest.mark.parametrize("scores", [*SCORES, "infinite"])
def test_every_kind_of_scores(scores, sinks, recent, device):
    """From the first token on, also without queries, and in different orders of blocks and threads."""
    case = History(scores=scores, sinks=sinks, recent=recent, length=21, dtype="float16", head_dim=8, window=5)
    caches = [case.cache(backend="emulator") for _ in range(3)]
    for seed, first in enumerate(range(0, 21, 7)):
        tokens = case.tokens(first, first + 7)
        expected = one_by_one(case, caches[0], tokens)
        device.order = Order("random", "random", seed)
        assert equal(attended(case, caches[1], tokens), expected)
        attended(case, caches[2], tokens, query=False)
        device.order = Order()
        assert bits(caches[0]) == bits(caches[1]) == bits(caches[2])


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nonfinite_keys_reach_only_queries_that_see_them(where, dtype):
    """Non-finite keys arrive, are visible to some tokens of a call, and are evicted."""
    case = History(dtype=dtype, head_dim=8, window=6, recent=2, length=40, batch=1, scores="distinct")
    rng = np.random.default_rng(0)
    rows = case.data[where]
    rows[rng.random(rows.shape[:3]) < 0.1] = np.nan
    rows[rng.random(rows.shape[:3]) < 0.1] = np.inf
    several, single = filled(case, 0), filled(case, 0)
    finite = 0
    for first in range(0, 40, 8):
        tokens = case.tokens(first, first + 8)
        found, expected = attended(case, several, tokens), one_by_one(case, single, tokens)
        for ours, theirs in zip(found, expected):
            np.testing.assert_array_equal(ours, theirs)
        finite += np.isfinite(found[0]).all(-1).sum()
    assert bits(several) == bits(single)
    assert 0 < finite < 160


@pytest.mark.feature("cuda forward", "DynamicCache", "slots, attend, commit")
@pytest.mark.parametrize("case", [CASES[i] for i in (1, 2, 3, 6, 7, 8, 10, 11)], ids=str)
def test_speculation(case):
    """A call that does not commit changes nothing; the first n of its tokens may then be appended."""
    begin, rng = case.length - 16, np.random.default_rng(0)
    cache, single = filled(case, begin), filled(case, begin)
    for _ in range(3):
        tokens = case.tokens(begin, begin + 8)
        before = bits(cache)
        found = attended(case, cache, tokens, commits=False)
        assert bits(cache) == before
        n = rng.integers(1, 4, case.batch)
        n[:] = n[0]
        first = [x[:, :n[0]] for x in tokens[:3]] + [tokens[3][:, :, :n[0]]]
        attended(case, cache, tokens, query=False, lengths=n)
        expected = one_by_one(case, single, first)
        assert equal([found[0][:, :n[0]], np.ascontiguousarray(found[1][:, :, :n[0]])], expected)
        assert bits(cache) == bits(single)
        begin += int(n[0])
    one = [x[:, :1] for x in tokens[:3]] + [tokens[3][:, :, :1]]
    before = bits(cache)
    assert equal(attended(case, cache, one, commits=False), attended(case, single, one))
    assert bits(cache) == before


@pytest.mark.parametrize("heads", [4, 6, 40])
def test_sequences_with_fewer_tokens(heads):
    """In one launch, in several, and in one per token."""
    case = History(dtype="float16", head_dim=8, window=6, length=40, batch=4, heads=heads, sinks=1, recent=2)
    several, single = filled(case, 12), filled(case, 12)
    for lengths in ([8, 0, 3, 5], [4, 5, 0, 1], [0, 0, 0, 0]):
        found = checked(case, several, single, 12, 20, lengths)
        for b, n in enumerate(lengths):
            assert not found[0][b, n:].any() and (found[1][b, :, n:] == -np.inf).all()


@pytest.mark.feature("cuda forward", "DynamicCache", "slots, attend, commit")
@pytest.mark.parametrize("queries", [True, False])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("case", [replace(CASES[0], batch=4), replace(CASES[4], batch=4, scores="ties"),
                                  Gates(dtype="float16", head_dim=16, length=24, batch=4, capacity=3),
                                  History(dtype="float16", head_dim=8, window=70, length=80, heads=20, batch=4)],
                         ids=str)
def test_slots(case, length, queries):
    """Some of the cache's sequences, in any order, with idle ones between them."""
    begin, slots, order = 12, [2, -1, 0], [2, 3, 0]
    cache, other = filled(case, begin), filled(case, begin)
    tokens = [x[:3] for x in case.tokens(begin, begin + length)]
    lengths = [length, length, min(length, 3)]
    found = attended(case, cache, tokens, slots=slots, lengths=lengths, query=queries)
    # The same call on a cache with only these sequences; the second takes no step.
    chosen = other.select_batch(order)
    expected = attended(case, chosen, tokens, lengths=[length, 0, min(length, 3)], query=queries)
    if queries:
        assert equal(found, expected)
    for name in cache._state.arrays:
        if cache._state.segments is not None and name in cache._state.per_row:
            continue  # compared by what they keep
        ours, theirs, before = (np.array(getattr(x._state, name).array) for x in (cache, chosen, other))
        assert ours[[2, 0]].tobytes() == theirs[[0, 2]].tobytes() and ours[[1, 3]].tobytes() == before[[1, 3]].tobytes()
    for ours, theirs, before in zip(cache.kept(), chosen.kept(), other.kept()):
        assert np.array_equal(ours[[2, 0]], theirs[[0, 2]]) and np.array_equal(ours[[1, 3]], before[[1, 3]])
    assert not np.array(cache._state.tickets.array).any()


def test_slots_without_any():
    """Nothing changes, results are empty."""
    case = replace(CASES[0], batch=2)
    for each, tokens in ((1, case.tokens(8, 9)), (4, case.tokens(8, 12))):
        cache = filled(case, 8)
        before = bits(cache)
        out, lse = attended(case, cache, tokens, slots=[-1, -1])
        assert bits(cache) == before and out.shape[1] == each
        assert not out.any() and (lse == -np.inf).all()


def test_one_split_and_many(monkeypatch):
    """A call uses as many blocks as for a single token."""
    case = CASES[2]
    results = []
    for most in (1, 2, 512):
        monkeypatch.setattr(split, "MAX_SPLITS", most)
        step.split.cache_clear()
        results.append(checked(case, filled(case, 100), filled(case, 100), 100, 108))
    assert not equal(results[0], results[1])


def test_more_slots_than_a_plan_keeps_in_registers():
    """The first keys are the best; all others come and go in the last slots."""
    case = History(dtype="float16", head_dim=8, window=3300, recent=20, length=3348, batch=1, heads=2, kv_heads=1,
                   scores="decreasing")
    several, single = filled(case, 3332), filled(case, 3332)
    for first in (3332, 3340):
        checked(case, several, single, first, first + 8)


@pytest.mark.parametrize(("rows", "length", "expected"), [
    (1, 2, 2), (1, 3, 4), (1, 8, 8), (2, 8, 8), (3, 8, 4), (4, 3, 4), (5, 8, 2), (8, 8, 2), (9, 8, 1), (16, 2, 1),
    (2, 1, 1)])
def test_tokens_of_a_launch(rows, length, expected):
    state = History(dtype="float16", head_dim=64).cache(backend="emulator")._state
    assert step.tokens_of_launch(length, rows, 1, state) == expected
    assert step.tokens_of_launch(length, rows, 2, state) == 1
