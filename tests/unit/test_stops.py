"""Recorded evictions of a cache: attention over the whole text with these stops gives the results of its calls."""
from dataclasses import replace

import numpy as np
import pytest

from cupy_dma.masks.interval import NEVER
from tests.oracle.cache_cases import History

LENGTHS = [[1] * 40, [40], [13, 1, 1, 5, 20]]


@pytest.mark.feature("cuda numpy forward", "DynamicCache", "stops, replayed")
@pytest.mark.parametrize("lengths", LENGTHS, ids=["steps", "whole", "pieces"])
@pytest.mark.parametrize("options", [
    {}, {"sinks": 2, "recent": 3}, {"window": (9, 3), "recent": 5}, {"bias_delay": 4, "scores": "hidden", "recent": 4},
    {"scores": "nan", "sinks": 1}, {"window": 50}, {"dtype": "bfloat16", "recent": 2}], ids=str)
def test_stops_match_what_queries_saw(options, lengths, convert):
    """Stops match the visible keys at every step, and a replay is as accurate as the calls (specification, section
    12)."""
    history = History(**options, options={"record_stops": True})
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
        tf32 = convert.gpu
        history.check_replay(cache, convert, tf32)
        history.check(*(np.concatenate(x, axis) for x, axis in zip(zip(*results), (1, 2))), tf32=tf32)


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
