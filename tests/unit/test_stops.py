"""Recorded evictions of a cache: attention over the whole text with these stops gives the results of its calls."""
import pickle
from dataclasses import replace

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.masks.interval import NEVER
from tests.oracle import reference
from tests.oracle.cache_cases import History, packed
from tests.unit.test_cache import EXACT

RECORDED = {"options": {"record_stops": True}}
LENGTHS = [[1] * 40, [40], [13, 1, 1, 5, 20]]


def replayed(history, stops, convert=np.asarray):
    """Attention over the whole text under ``stops``: out and lse."""
    x = {name: convert(array) for name, array in history.data.items()}
    return [convert.back(y) if hasattr(convert, "back") else y for y in dma.attention(
        x["query"], x["key"], x["value"], mask=dma.IntervalMask.from_stop(stops), bias=x["scores"],
        bias_delay=history.bias_delay, return_lse=True)]


@pytest.mark.feature("cuda numpy forward", "DynamicCache", "stops, replayed")
@pytest.mark.parametrize("lengths", LENGTHS, ids=["steps", "whole", "pieces"])
@pytest.mark.parametrize("options", [
    {}, {"sinks": 2, "recent": 3}, {"window": (9, 3), "recent": 5}, {"bias_delay": 4, "scores": "hidden", "recent": 4},
    {"scores": "nan", "sinks": 1}, {"window": 50}, {"dtype": "bfloat16", "recent": 2}], ids=str)
def test_stops_match_what_queries_saw(options, lengths, convert):
    """Stops match the visible keys at every step, and a replay is as accurate as the calls (specification, section
    12)."""
    history = History(**options, **RECORDED)
    cache, done = history.cache(convert), 0
    results = []
    for n in lengths:
        results.append(history.run(cache, [n], convert, begin=done))
        done += n
        stops = convert.back(cache.stops())
        assert stops.dtype == np.int32 and stops.shape == (2, 2, done)
        seen = history.mask[:, :, :done, :done]
        last = np.where(seen, np.arange(done)[:, None] + 1, 0).max(2)  # one past the last position that sees a key
        expected = np.where(last == done, NEVER, np.where(last == 0, np.arange(done), last))
        np.testing.assert_array_equal(stops, expected)
    if history.scores != "nan":
        tf32 = convert.name in ("cupy", "torch-cuda")
        history.check(*replayed(history, cache.stops(), convert), tf32=tf32)
        history.check(*(np.concatenate(x, axis) for x, axis in zip(zip(*results), (1, 2))), tf32=tf32)


@pytest.mark.parametrize("form", ["lengths", "cu_seqlens"])
def test_sequences_of_different_lengths(form, convert):
    rng = np.random.default_rng(3)
    history = History(batch=3, length=40, head_dim=4, sinks=1, recent=2, **RECORDED)
    cache, done, x = history.cache(convert), np.zeros(3, int), history.data
    for most in (6, 1, 9, 1, 12, 3, 1):
        added = rng.integers(0, most + 1, 3)
        tokens = [np.full((3, most, *y.shape[2:]), np.nan, np.float32) for y in (x["query"], x["key"], x["value"])]
        tokens.append(np.full((3, 2, most), np.nan, np.float32))
        for b, n in enumerate(added):
            for y, name in zip(tokens, ("query", "key", "value")):
                y[b, :n] = x[name][b, done[b]:done[b] + n]
            tokens[3][b, :, :n] = x["scores"][b, :, done[b]:done[b] + n]
        if form == "lengths":
            cache.update(*(convert(y) for y in tokens[1:]), lengths=convert(added))
        else:
            rows, bounds = packed(tokens, added, behind=2)
            cache.update(*(convert(y) for y in rows[1:]), cu_seqlens=convert(bounds), tail_padding=True)
        done += added
        stops = convert.back(cache.stops())
        assert stops.shape[2] == done.max()
        for b, n in enumerate(done):
            alone = replace(history, batch=1).cache()
            alone.update(*(y[b:b + 1, :n] for y in (x["key"], x["value"])), x["scores"][b:b + 1, :, :n])
            np.testing.assert_array_equal(stops[b, :, :n], alone.stops()[0])
            assert (stops[b, :, n:] == np.arange(n, done.max())).all()


def test_copies_and_reordering(convert):
    """Sequences take their stops with them."""
    history = History(batch=3, recent=2, **RECORDED)
    order = [2, 0, 2]
    moved = replace(history)
    moved.__dict__["data"] = {name: np.concatenate((y[order][:, :, :17], y[:, :, 17:]), 2) if name == "scores" else
                              np.concatenate((y[order][:, :17], y[:, 17:]), 1) for name, y in history.data.items()}
    cache, tf32 = history.cache(convert), convert.name in ("cupy", "torch-cuda")
    history.run(cache, [10, 1, 6], convert)
    first = convert.back(cache.stops())
    again = history.cache(convert)
    again.load_state_dict({name: convert.back(y) if hasattr(y, "shape") else y
                           for name, y in cache.state_dict().items()})  # possibly of another library
    others = [cache.clone(), again, cache.select_batch(order), pickle.loads(pickle.dumps(cache))]
    cache.reorder(order)
    for found in others + [cache]:
        own = moved if found in (others[2], cache) else history
        np.testing.assert_array_equal(convert.back(found.stops()), first[order] if own is moved else first)
        own.check(*own.run(found, [1, 7, 15], convert, begin=17), begin=17, tf32=tf32)
        own.check(*replayed(own, found.stops(), convert), tf32=tf32)
    cache.reset()
    assert cache.stops().shape == (3, 2, 0)
    history.run(cache, [25], convert)
    assert cache.stops().shape == (3, 2, 25)


def test_a_call_that_fails_leaves_the_record(monkeypatch):
    history = replace(EXACT, **RECORDED)
    cache = history.cache()
    history.run(cache, [9])
    before = cache.stops()
    with monkeypatch.context() as changed:
        changed.setattr("cupy_dma.backends.numpy.dynamic_cache.extend_chunk", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            history.run(cache, [7], begin=3)
    np.testing.assert_array_equal(cache.stops(), before)
    history.run(cache, [1] * 6 + [9], begin=9)
    out, lse = replayed(history, cache.stops())
    (ref, _), (ref_lse, _) = history.oracle()
    reference.assert_matches_reference(out, ref, ref, out.dtype)
    reference.assert_matches_reference(lse, ref_lse, ref_lse, lse.dtype)


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
    assert recorded.memory_bytes == empty + 2 * 2 * 20 * 4
    with pytest.raises(TypeError, match="record_stops must be"):
        history.cache(record_stops="yes")
    nobody = replace(history, batch=0).cache(record_stops=True)
    assert nobody.stops().shape == (0, 2, 0)
