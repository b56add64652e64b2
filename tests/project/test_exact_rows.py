"""The sampled-row check against brute force, and that it notices every kind of wrong result."""
import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_dma.cli.exact_rows import check_rows, exact_row, kept_keys


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.5, math.inf, -math.inf, math.nan]), max_size=30),
       st.integers(0, 31), st.integers(1, 32))
def test_kept_keys_are_the_heads_of_the_ranking(scores, position, window):
    scores = np.array(scores, np.float32)

    def rank(j):  # NaN above everything, then the score, then the newest
        return (math.isnan(scores[j]), 0.0 if math.isnan(scores[j]) else float(scores[j]), j)

    candidates = range(min(position + 1, len(scores)))
    assert kept_keys(scores, position, window).tolist() == sorted(heapq.nlargest(window, candidates, key=rank))


def problem(dtype=np.float32):
    """Two heads over one, six keys, all arrays as check_rows takes them, and the right results."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((6, heads, 8)).astype(dtype) for heads in (2, 1, 1))
    scores = rng.standard_normal((1, 6)).astype(np.float32)
    out, lse = np.zeros((6, 2, 8), dtype), np.zeros((2, 6), np.float32)
    visible = np.zeros((6, 6), bool)
    for i in range(6):
        kept = kept_keys(scores[0], i, 3)
        visible[i, kept] = True
        for h in range(2):
            out[i, h], lse[h, i] = exact_row(query[i, h], key[kept, 0], value[kept, 0], scores[0, kept], 8**-0.5)
    start = np.arange(6, dtype=np.int32)[None]
    stop = start + visible.sum(0, dtype=np.int32)
    return {"out": out, "lse": lse, "query": query, "key": key, "value": value, "scores": scores, "window": 3,
            "rows": range(6), "start": start, "stop": stop}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_right_results_pass(dtype):
    assert check_rows(**problem(dtype)).ok


@pytest.mark.parametrize(("name", "index", "wrong"), [
    ("out", (3, 1, 2), 0.5), ("out", (3, 1, 2), math.nan), ("lse", (1, 4), 0.5), ("lse", (1, 4), math.nan),
    ("stop", (0, 2), 0), ("start", (0, 5), 4)])
def test_wrong_results_do_not(name, index, wrong):
    given = problem()
    given[name][index] = wrong
    if name == "start":
        given["rows"] = [4]
    assert not check_rows(**given).ok


def test_tf32_is_allowed_its_error_and_no_more():
    given = problem()
    given["out"] = given["out"] * np.float32(1 + 2.0**-11)
    assert not check_rows(**given).ok and check_rows(**given, tf32=True).ok
    given["out"] = given["out"] * np.float32(1 + 2.0**-6)
    assert not check_rows(**given, tf32=True).ok


def test_rows_that_see_nothing():
    """More queries than keys: the first ones stand before every key."""
    given = problem()
    given["query"] = np.concatenate([given["query"][:2], given["query"]])
    given["out"] = np.concatenate([np.zeros((2, 2, 8), np.float32), given["out"]])
    given["lse"] = np.concatenate([np.full((2, 2), -np.inf, np.float32), given["lse"]], axis=1)
    given["rows"] = range(8)
    assert check_rows(**given).ok
    given["lse"][0, 0] = 0
    assert not check_rows(**given).ok
