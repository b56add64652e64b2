"""The decode cache against the oracle on the full history (SPEC section 7), and its contract with callers."""
import bisect
import pickle
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.cache.segments import rectangular
from cupy_dma.masks.windows import each_head
from tests.oracle import reference
from tests.oracle.cache_cases import SCORES, History, draw_scores, packed
from tests.project.pages import run_page
from tests.unit.test_argument_types import copies
from tests.unit.test_arrays import Producer
from tests.unit.test_gated_cache import Gates

EIGHT_BITS = [History(dtype=dtype, sinks=1, recent=2, value_dim=12, window=window, options={"storage": storage})
              for dtype, window in (("float16", 6), ("bfloat16", (3, 9)), ("float32", 6))
              for storage in ("int8", "fp8")]
# Delays near the window, the pieces and the whole history; scores of -inf hide keys only from far queries.
DELAYED = [History(bias_delay=delay, sinks=1, recent=2, scores=scores)
           for delay in (1, 4, 9, 12, 13, 20, 39, 40, 2**30) for scores in ("distinct", "hidden")] + [
           History(bias_delay=6, softcap=2.0, value_dim=5), History(bias_delay=6, dtype="bfloat16", window=3)]
RECORDED = [replace(history, options={"record_stops": True}) for history in (
    History(), History(sinks=2, recent=3), History(window=(9, 3), recent=5), History(scores="nan", sinks=1),
    History(bias_delay=4, scores="hidden", recent=4), History(window=50), History(dtype="bfloat16", recent=2))]
GATED = [Gates(length=40, **options) for options in (
    {}, {"capacity": 3}, {"capacity": (1, 6), "sinks": 0}, {"recent": 1, "capacity": 5}, {"add_gates": False},
    {"add_gates": False, "capacity": 2, "value_dim": 5}, {"dtype": "bfloat16", "capacity": 4}, {"values": (0.0,)},
    {"values": (-np.inf,)}, {"softcap": 2.0, "scale": 1.5, "recent": 50})]


# ---- the full history ----
def check_invariants(state, position):
    """The invariants of ``lowest`` and ``free`` at the next position, as documented in cupy_dma/cache/state.py."""
    state = rectangular(state)
    where, top, scores = (operand.array for operand in (state.positions, state.in_top, state.scores))
    windows = np.array(each_head(state.window, state.kv_heads))
    assert (top.sum(-1) == np.minimum(windows, position)).all() and not top[where < 0].any()
    for b, g in np.ndindex(state.batch, state.kv_heads):
        used = (top[b, g] != 0) | ((where[b, g] >= 0) & (where[b, g] < state.sinks))
        used |= (where[b, g] >= 0) & (where[b, g] > position - state.recent)
        used |= np.arange(len(used)) >= windows[g] + state.sinks + state.recent  # another head's rows
        free, lowest = state.free.array[b, g], state.lowest.array[b, g]
        assert (free == -1 and used.all()) or not used[free]
        ranks = [(scores[b, g, r], where[b, g, r], r) for r in np.flatnonzero(top[b, g])]
        assert lowest == (min(ranks)[2] if position >= windows[g] else position - windows[g])
        assert lowest < 0 or state.lowest_score.array[b, g] == scores[b, g, lowest]
        assert free >= 0 or (state.recent == 0 and where[b, g, lowest] >= state.sinks)


@pytest.mark.feature("cuda numpy forward", "DynamicCache", "extend, one", "extend, pieces", "extend, every",
                     "stops, replayed")
@pytest.mark.feature("cuda numpy forward", "GatedCache", "extend, stops, replayed")
@pytest.mark.parametrize("case", [
    History(dtype="float16"), History(dtype="bfloat16"), History(dtype="float64", sinks=1, recent=2),
    History(heads=2), History(heads=6, kv_heads=2), History(heads=8, kv_heads=1), History(heads=1, kv_heads=1),
    History(softcap=2.0, scale=1.5), History(scale=-0.3), History(value_dim=5, sinks=1), History(value_dim=12),
    History(head_dim=1), History(head_dim=64, dtype="bfloat16", value_dim=32), History(window=1),
    History(window=1, recent=1), History(window=39), History(window=40),
    History(window=100, sinks=50, recent=50), *DELAYED,
    History(window=(3, 9)), History(window=(12, 1), sinks=2, recent=3), History(window=(40, 5), scores="nan"),
    History(window=(9, 2), bias_delay=3, scores="hidden"), *EIGHT_BITS, *RECORDED, *GATED,
    *(History(scores=scores, sinks=sinks, recent=recent) for scores in SCORES for sinks, recent in (
        (0, 0), (2, 0), (0, 3), (2, 3)))], ids=str)
@pytest.mark.parametrize("lengths", [[1] * 40, [40], [13, 1, 1, 5, 20]], ids=["steps", "whole", "pieces"])
def test_against_the_oracle(case, lengths, convert):
    if case.dtype == "float64" and convert.gpu:
        pytest.skip("float64 is refused on CUDA")
    cache, done, found = case.cache(convert), 0, []
    for n in lengths:
        found.append(case.run(cache, [n], convert, begin=done))
        done += n
        case.check_kept(cache, done - 1)
        if convert.name == "numpy" and "nan" not in case.scores and case not in GATED:
            check_invariants(cache._state, done)
    outs, lses = zip(*found)
    case.check(np.concatenate(outs, 1), np.concatenate(lses, 2), tf32=convert.gpu)
    if cache._record is not None:
        case.check_replay(cache, convert, convert.gpu)


@pytest.mark.parametrize("lengths", [[1] * 24, [24], [5, 6, 1, 12]], ids=["steps", "whole", "pieces"])
def test_nan_values_reach_only_queries_that_see_them(lengths, convert):
    """A NaN in a value propagates to queries that see it, and to none after it was evicted or removed."""
    history = History(length=24, sinks=1, recent=3, window=4)
    history.data["value"][:, 9, 0, 3] = np.nan
    history.data["scores"][:, :, 9] = -9  # visible only while it is recent
    cache, tf32 = history.cache(convert), convert.gpu
    out, lse = history.run(cache, lengths, convert)
    history.check(out, lse, tf32=tf32)
    assert np.isnan(out[:, 9:12]).any() and np.isfinite(out[:, 12:]).all()
    cache._state.value.array[...] = float("nan")
    cache.reset()
    history.data["value"][:, 9] = 1
    history.check(*history.run(cache, lengths, convert), tf32=tf32)


def test_the_record_is_asked_for():
    history = History(length=20)
    cache = history.cache()
    history.run(cache, [20])
    with pytest.raises(RuntimeError, match="make it with record_stops=True"):
        cache.stops()
    recorded = history.cache(record_stops=True)
    with pytest.raises(KeyError, match="must contain recorded"):
        recorded.load_state_dict(cache.state_dict())
    empty = recorded.memory_bytes
    history.run(recorded, [20])
    stops = recorded.stops()
    assert stops.dtype == np.int32 and stops.shape == (2, 2, 20)
    assert recorded.memory_bytes == empty + 2 * 2 * 20 * 4
    with pytest.raises(TypeError, match="record_stops must be"):
        history.cache(record_stops="yes")
    nobody = replace(history, batch=0).cache(record_stops=True)
    assert nobody.stops().shape == (0, 2, 0)


# ---- unbounded decoding ----
@pytest.mark.feature("numpy forward", "DynamicCache", "10^4 steps")
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 3)])
def test_the_kept_set_does_not_drift(sinks, recent):
    """10^4 steps against a sorted list; tests/gpu/test_cache.py does 10^5."""
    n, w = 10_000, 9
    scores = draw_scores("ties", (1, 1, n), np.random.default_rng(0))
    cache = dma.DynamicCache(1, 1, w, 1, dtype="float32", sinks=sinks, recent=recent)
    row, best, memory = np.ones((1, 1, 1, 1), np.float32), [], cache.memory_bytes
    for p, score in enumerate(scores[0, 0].tolist()):
        cache.update(row * p, row, scores[:, :, p:p + 1])
        bisect.insort(best, (score, p))
        del best[:-w]
        if p % 97 == 0 or p == n - 1:
            others = {*range(min(sinks, p + 1)), *range(max(p + 1 - recent, 0), p + 1)}
            wanted = sorted({j for _, j in best} | others)
            found = cache.kept().positions[0, 0]
            assert found[found >= 0].tolist() == wanted
            slots = cache.positions[0, 0]
            np.testing.assert_array_equal(cache._state.key.array[0, 0, slots >= 0, 0], slots[slots >= 0])
    assert cache.memory_bytes == memory


# ---- whole sequences ----
@pytest.mark.parametrize("options", [
    {}, {"dtype": "bfloat16"}, {"window": (9, 3)}, {"window": (2, 7), "dtype": "bfloat16"},
    *({"window": window, "options": {"record_stops": True}} for window in (7, (2, 7))),
    *({"window": (7, 3), "dtype": "float16", "options": {"storage": storage}} for storage in ("int8", "fp8"))], ids=str)
def test_copies_in_the_middle(options, convert):
    """Each copy goes on as it would alone, also after the cache that it was copied from has advanced."""
    history, tf32 = History(batch=3, length=30, sinks=1, recent=2, **options), convert.gpu

    def goes_on(cache):
        history.check(*history.run(cache, [1, 1, 6, 1, 4], convert, begin=17), begin=17, tf32=tf32)
        history.check_kept(cache)
        if cache._record is not None:
            history.check_replay(cache, convert, tf32)

    cache, restored = history.cache(convert), history.cache(convert)
    history.run(cache, [10, 1, 1, 5], convert)
    saved, twins = cache.state_dict(), [cache.clone(), *copies(cache)]
    restored.load_state_dict(saved)
    for twin in (cache, restored, *twins):
        assert repr(twin) == repr(cache)
        goes_on(twin)
    cache.load_state_dict({name: convert.back(y) if name not in ("window", "sinks", "recent", "rows") else y
                           for name, y in saved.items()})  # possibly of another library
    goes_on(cache)
    cache.reset()
    history.check_kept(cache, -1)
    history.check(*history.run(cache, [17], convert), tf32=tf32)


def test_a_step_reads_only_occupied_slots(monkeypatch):
    """A step of the numpy backend reads only slots that may be occupied, however long the window is."""
    from cupy_dma.backends.numpy import dynamic_cache

    seen, attention = [], dynamic_cache.attention
    monkeypatch.setattr(dynamic_cache, "attention", lambda call: seen.append(call.key_length) or attention(call))
    history = History(length=20, window=5000, sinks=1, recent=2)
    cache = history.cache()
    out, lse = history.run(cache, [1] * 8)
    history.check(out, lse)
    assert seen == [n + 2 for n in range(8)]
    history.run(cache, [4], begin=8)
    history.run(cache, [1] * 3, begin=12)
    assert seen[-3:] == [14, 15, 16]
    cache.reset()
    history.check(*history.run(cache, [1] * 20))
    assert seen[-20:] == [n + 2 for n in range(20)]
    history.check_kept(cache)


@pytest.mark.parametrize("shift", [1, 4, 9])
def test_keys_may_lie_in_any_slot(shift, convert):
    """Loads saved states whose empty slots come first, as ``fill_cache`` makes them, or in between."""
    history = History(length=30, window=8, sinks=1, recent=3)
    cache, other = history.cache(convert), history.cache(convert)
    history.run(cache, [1, 4], convert)
    saved = cache.state_dict()
    moved = {name: convert(np.roll(convert.back(x), shift, 2)) if getattr(x, "ndim", 0) > 2 else x
             for name, x in saved.items()}
    history.run(other, [1] * 2, convert)
    other.load_state_dict(moved)
    history.check(*history.run(other, [1] * 10 + [5] + [1] * 10, convert, begin=5), begin=5,
                  tf32=convert.gpu)
    history.check_kept(other)


# ---- arrays ----
def test_any_strides_and_score_types(convert):
    """BHSD views, and 16-bit scores (few distinct values, exact in any type)."""
    history = History(length=12)
    cache = history.cache(convert)
    outs = []
    for begin, end in ((0, 7), (7, 8), (8, 12)):
        *qkv, s = history.tokens(begin, end)
        views = (convert(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)
                 for x in (*qkv, s.astype(np.float16)))
        outs.append(convert.back(cache.extend(*views)))
    (ref, plain), _ = history.oracle(tf32=convert.gpu)
    reference.assert_matches_reference(np.concatenate(outs, 1), ref, plain, np.float32)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_results_are_written_to_out(n, convert):
    history = History(length=8, value_dim=5)
    cache, other = history.cache(convert), history.cache(convert)
    history.run(cache, [3], convert)
    history.run(other, [3], convert)
    tokens = history.tokens(3, 3 + n, convert)
    expected, expected_lse = other.clone().extend(*tokens, return_lse=True)
    out, lse = (convert(np.full(x.shape, 7, np.float32)) for x in (expected, expected_lse))
    pair = cache.extend(*tokens, return_lse=True, out=(out, lse))
    assert pair[0] is out and pair[1] is lse
    assert other.extend(*tokens, out=convert(np.empty(expected.shape, np.float32))).shape == expected.shape
    np.testing.assert_array_equal(convert.back(out), convert.back(expected))
    np.testing.assert_array_equal(convert.back(lse), convert.back(expected_lse))
    rows, bounds = packed([convert.back(x) for x in tokens], [n, n])
    out = convert(np.full((2 * n, *expected.shape[2:]), 7, np.float32))
    cache.reset()
    assert cache.extend(*(convert(x) for x in rows), cu_seqlens=convert(bounds), out=out) is out
    assert not (convert.back(out) == 7).any()


def test_arrays_of_any_producer():
    history = History(length=10)
    plain, foreign = history.cache(), history.cache(Producer)
    for begin, end in ((0, 6), (6, 7), (7, 10)):
        expected = plain.extend(*history.tokens(begin, end))
        found = foreign.extend(*history.tokens(begin, end, Producer))
        np.testing.assert_array_equal(np.from_dlpack(found), expected)
    np.testing.assert_array_equal(np.from_dlpack(foreign.kept().positions), plain.kept().positions)
    assert foreign.state_dict().keys() == plain.state_dict().keys()


def test_no_sequences(convert):
    history = replace(History(length=4), batch=0)
    cache = history.cache(convert)
    out, lse = cache.extend(*history.tokens(0, 4, convert), return_lse=True)
    assert tuple(out.shape) == (0, 4, 4, 8) and tuple(lse.shape) == (0, 4, 4)
    assert tuple(pickle.loads(pickle.dumps(cache)).kept().positions.shape) == (0, 2, 7)


def test_the_documentation_runs():
    """Every Python block of docs/decoding.md runs; those that need a GPU run in tests/gpu/test_cache.py."""
    names = run_page("decoding.md", gpu=False)
    assert names["out"].shape == (10, 4, 64)
    assert [names[name].length.tolist() for name in ("cache", "fork", "one")] == [[0, 0], [619, 619], [619]]


# ---- errors ----
def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(("changes", "kind", "message"), [
    ({"query": None}, TypeError, "query must be an array, got None"),
    ({"query": [1]}, TypeError, "query must be a numpy"),
    ({"value": ones(2, 3, 2, 8, dtype=np.float64)}, TypeError, "value must have the cache's type"),
    ({"scores": ones(2, 2, 3, dtype=np.int32)}, TypeError, "scores must be .*got int32"),
    ({"key": ones(2, 3, 2, 16)[..., ::2]}, ValueError, "key must be contiguous in its last axis"),
    ({"softcap": 1e-46}, ValueError, r"softcap must be 0 \(none\) or at least 2\*\*-126"),
    ({"scale": "1"}, TypeError, "scale must be a real number"),
    ({"lengths": "12"}, TypeError, "lengths must be a numpy"),
    ({"query": ones(2, 3, 4)}, ValueError, r"query must have shape \(B, L, H, D\), got \(2, 3, 4\)"),
    ({"query": ones(2, 3, 3, 8)}, ValueError, "3 query heads and 2 kv heads"),
    ({"query": ones(2, 3, 0, 8)}, ValueError, "0 query heads"),
    ({"query": ones(2, 2, 4, 8)}, ValueError, r"query must have shape \(B, L, H, D\) = \(2, 3, 4, 8\), got"),
    ({"query": ones(2, 3, 4, 8, dtype=np.float16)}, TypeError, "query must have the cache's type float32, got float16"),
    ({"query": ones(2, 3, 4, 16)[..., ::2]}, ValueError, "query must be contiguous in its last axis"),
    ({"key": ones(3, 3, 2, 8)}, ValueError, r"key must have shape \(B, L, Hkv, D\) = \(2, 3, 2, 8\), got \(3,"),
    ({"key": ones(2, 3, 2)}, ValueError, r"key must have shape \(B, L, Hkv, D\), got \(2, 3, 2\)"),
    ({"key": ones(2, 3, 2, 8, dtype=np.float64)}, TypeError, "key must have the cache's type float32, got float64"),
    ({"value": ones(2, 3, 2, 7)}, ValueError, r"value must have shape \(B, L, Hkv, Dv\) = \(2, 3, 2, 8\), got"),
    ({"scores": ones(2, 2, 4)}, ValueError, r"scores must have shape \(B, Hkv, L\) = \(2, 2, 3\), got"),
    ({"scores": ones(2, 2, 3, dtype=np.float64)}, TypeError, "scores must be float16 or .*, got float64"),
    ({"scale": 1e39}, ValueError, r"scale must be at most 2\*\*127"),
    ({"softcap": -1.0}, ValueError, "softcap must be a finite number of at least 0"),
    ({"return_lse": 1}, TypeError, "return_lse must be True or False"),
    ({"lengths": ones(2)}, TypeError, "lengths must be int32 or int64, got float32"),
    ({"lengths": [1, 2.5]}, TypeError, "lengths must be an integer array or a list of ints"),
    ({"lengths": ones(3, dtype=np.int32)}, ValueError, r"lengths must have shape \(B,\) = \(2\), got"),
    ({"lengths": np.array([0, 4])}, ValueError, r"lengths must lie between 0 and L = 3, got \[0, 4\]"),
    ({"lengths": np.array([-1, 2])}, ValueError, "lengths must lie between 0 and L = 3"),
    ({"lengths": np.array([1, 2]), "cu_seqlens": np.array([0, 1, 2])}, ValueError, "lengths .* got both"),
    ({"cu_seqlens": np.array([0, 1, 2])}, ValueError, r"key must have shape \(total, Hkv, D\), got"),
    ({"out": ones(2, 3, 4, 7)}, ValueError, "out must have shape of the result"),
    ({"out": ones(2, 3, 4, 8, dtype=np.float64)}, TypeError, "out must have the result's type float32, got float64"),
    ({"out": ones(2, 3, 8, 8)[:, :, ::2]}, ValueError, "out must be contiguous, got strides"),
    ({"out": (ones(2, 3, 4, 8), ones(2, 4, 3))}, TypeError, "out must be one array with return_lse=False, got tuple"),
    ({"out": ones(2, 3, 4, 8), "return_lse": True}, TypeError, r"out must be a pair \(out, lse\)"),
    ({"out": (ones(2, 3, 4, 8), ones(2, 4, 4)), "return_lse": True}, ValueError, r"out\[1\] \(lse\) must have shape"),
])
def test_errors_of_extend(changes, kind, message):
    history = History(length=3)
    cache, tokens = history.cache(), dict(zip(("query", "key", "value", "scores"), history.tokens(0, 3)))
    before = cache.state_dict()
    with pytest.raises(kind, match=message):
        cache.extend(**tokens | changes)
    for name, x in cache.state_dict().items():
        np.testing.assert_array_equal(x, before[name])


@pytest.mark.parametrize(("bounds", "message"), [
    ([0, 2], r"cu_seqlens must have shape \(B \+ 1,\) = \(3\), got \(2,\)"),
    ([1, 2, 3], "cu_seqlens must be cumulative lengths"), ([0, 3, 2], "never decrease"),
    ([0, 3, 7], "end at the total length 6, got"),
    ([0, 3, 5], "cu_seqlens must end at the total length 6, got .*rows 5 to 5 belong to no sequence"),
])
def test_errors_of_packed_tokens(bounds, message):
    history = History(length=3)
    rows, _ = packed(history.tokens(0, 3), [3, 3])
    with pytest.raises(ValueError, match=message):
        history.cache().extend(*rows, cu_seqlens=np.array(bounds))
    with pytest.raises(ValueError, match=r"scores must have shape \(Hkv, total\) = \(2, 6\), got"):
        history.cache().update(rows[1], rows[2], rows[3][:, :5], cu_seqlens=np.array([0, 3, 6]))


@pytest.mark.parametrize(("arguments", "options", "kind", "message"), [
    ((-1, 1, 4, 8), {}, ValueError, "batch must be at least 0, got -1"),
    ((1, 0, 4, 8), {}, ValueError, "kv_heads must be at least 1"),
    ((1, 1, 0, 8), {}, ValueError, "window must be at least 1"),
    ((1, 1, 4, 0), {}, ValueError, "head_dim must be at least 1"),
    ((1, 1, 4, 257), {}, ValueError, "head_dim must be 1 to 256, got 257"),
    ((1, 1, 4.0, 8), {}, TypeError, "window must be an int, got float"),
    ((1, 1, 4, 8, 257), {}, ValueError, "value_dim must be 1 to 256, got 257"),
    ((1, 1, 4, 8, 8, 3), {}, TypeError, "dtype must be .*got 3"),
    ((1, 1, 4, 8), {"recent": True}, TypeError, "recent must be an int"),
    ((1, 1, 4, 8, 8, "int8"), {}, TypeError, "dtype must be .*got 'int8'"),
    ((1, 1, 4, 8), {"sinks": -1}, ValueError, "sinks must be at least 0"),
    ((1, 1, 2**31, 8), {}, ValueError, r"window \+ sinks \+ recent must be below 2\*\*31"),
    ((1, 1, 4, 8), {"like": 3}, TypeError, "like must be a numpy"),
    ((1, 1, 4, 8), {"backend": "cpu"}, ValueError, "backend must be one of"),
])
def test_errors_of_the_constructor(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        dma.DynamicCache(*arguments, **options)


@pytest.mark.parametrize(("indices", "kind", "message"), [
    ([0], ValueError, "indices must name 2 rows, one for each of the batch, got 1"),
    ([0, 2], ValueError, r"indices must lie between 0 and 1 .*got \[0, 2\]"),
    (np.array([0, -1]), ValueError, "indices must lie between 0 and 1"),
    ([0, 1.5], TypeError, r"indices\[1\] must be an int"),
    (np.array([[0, 1]]), ValueError, r"indices must have shape \(n,\), got \(1, 2\)"),
    (np.array([0.0, 1.0]), TypeError, "indices must be int32 or int64"),
])
def test_errors_of_reorder(indices, kind, message):
    with pytest.raises(kind, match=message):
        History(length=1).cache().reorder(indices)


@pytest.mark.parametrize(("change", "kind", "message"), [
    (lambda s: s.pop("key"), KeyError, "missing: key"),
    (lambda s: s.update(window=8), ValueError, "saved must be of a cache with window=7, got 8"),
    (lambda s: s.update(key=s["key"][:1]), ValueError, r"saved\['key'\] must have shape of this cache"),
    (lambda s: s.update(value=s["value"].astype(np.float64)), TypeError, r"saved\['value'\] must be float32"),
])
def test_errors_of_load_state_dict(change, kind, message):
    history = History(length=9)
    cache = history.cache()
    saved = cache.state_dict()
    change(saved)
    history.run(cache, [9])
    with pytest.raises(kind, match=message):
        cache.load_state_dict(saved)
    history.check_kept(cache)


def test_backends_without_a_cache():
    history = History(length=3)
    for name in ("triton", "flex"):
        with pytest.raises(NotImplementedError, match=f"backend='{name}' has no DynamicCache"):
            import_module(f"cupy_dma.backends.{name}").cache_extend(None, None)
    with pytest.raises((ValueError, RuntimeError), match=r"backend='cuda' (takes CUDA arrays|cannot run here)"):
        history.cache(backend="cuda")


def test_values_are_checked_on_request(monkeypatch):
    history = History(length=3, scores="all_nan")
    monkeypatch.setenv("CUPY_DMA_CHECK", "1")
    with pytest.raises(ValueError, match="scores must be finite"):
        history.cache().extend(*history.tokens(0, 3))


def test_a_cache_carries_no_gradient():
    torch = pytest.importorskip("torch")
    history = History(length=4)
    cache = history.cache(torch.from_numpy)
    tokens = history.tokens(0, 4, torch.from_numpy)
    for i, name in enumerate(("query", "key", "value", "scores")):
        wanted = [x.clone().requires_grad_(i == j) for j, x in enumerate(tokens)]
        with pytest.raises(NotImplementedError, match=f"{name} requires grad, but a cache carries no gradient"):
            cache.extend(*wanted)
        with torch.no_grad():
            assert not cache.clone().extend(*wanted).requires_grad
    with pytest.raises(NotImplementedError, match="out requires grad"):
        cache.extend(*tokens, out=torch.empty(2, 4, 4, 8, requires_grad=True))
    with pytest.raises(TypeError, match="all arrays must be of one library"):
        cache.extend(*history.tokens(0, 4))
