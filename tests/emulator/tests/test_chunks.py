"""Chunks of tokens for a cache: the kernels leave the bits that array code leaves (cache/chunked_prefill.py)."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupy_dma.arrays import describe
from cupy_dma.backends.cuda.decode import chunk
from cupy_dma.cache.arguments import extend_call
from cupy_dma.cache.chunked_prefill import extend_chunk
from tests.emulator import BACKEND
from tests.emulator.tests.test_several_tokens import filled, replace_batch
from tests.oracle.cache_cases import History, packed
from tests.unit.test_gated_cache import Gates

# Rows in units of 2, 4 and 16 bytes; heads with windows and rows of their own; thresholds; NaN and equal scores.
CASES = [
    History(dtype="float16", head_dim=16, window=7, sinks=2, recent=3, length=60, batch=3),
    History(dtype="float32", head_dim=5, window=(9, 4), sinks=1, scores="nan", length=60, batch=3),
    History(dtype="bfloat16", head_dim=6, window=70, recent=2, length=90, batch=3, scores="hidden", softcap=3.0),
    History(dtype="float16", head_dim=8, window=5, recent=40, length=60, batch=3),
    Gates(dtype="float16", head_dim=16, length=60, batch=3, capacity=3),
    Gates(dtype="float16", head_dim=16, length=60, batch=3, capacity=(70, 2), seed=1),
    Gates(dtype="float16", head_dim=16, length=60, batch=3, capacity=5, add_gates=False),
    # 8-bit rows, in units of 1, 4 and 16 bytes.
    History(dtype="float32", head_dim=5, window=9, sinks=1, length=60, batch=3, options={"storage": "int8"}),
    History(dtype="float16", head_dim=12, window=9, recent=2, length=60, batch=3, options={"storage": "fp8"}),
    Gates(dtype="bfloat16", head_dim=16, length=60, batch=3, capacity=(9, 2), options={"storage": "fp8"}),
]


def stored(cache) -> dict[str, np.ndarray]:
    """All bits, but for what is undefined."""
    found = {name: np.array(getattr(cache._state, name).array) for name in cache._state.arrays}
    found["lowest_score"][found["lowest"] < 0] = 0
    return found


def chunk_call(case, cache, tokens, lengths=None, slots=None, bounds=None, query=True, commits=True):
    query_rows, *rows = tokens
    biased = not isinstance(case, Gates) or case.add_gates
    batch = rows[0].shape[0] if bounds is None else len(bounds) - 1
    call = extend_call(replace_batch(cache._state, batch), query_rows if query else None, *rows, case.scale,
                       case.softcap, None, bounds, query, None, True, 0)
    return replace(call, commits=commits, is_biased=biased,  # lengths of packed tokens: as in a commit
                   lengths=None if lengths is None else describe(lengths, "lengths"),
                   slots=None if slots is None else describe(np.int32(slots), "slots"))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", ["lengths", "packed"])
def test_bits_are_those_of_array_code(case, form):
    rng = np.random.default_rng(2)
    ours, theirs = filled(case, 3), filled(case, 3)
    for count in (10, 17, 9, 21, 9, 9, 12):
        begin = int(rng.integers(0, case.length - count))
        n = int(rng.integers(1, 4))
        slots = np.where(rng.random(n) < 0.3, -1, rng.permutation(3)[:n]) if rng.random() < 0.7 else None
        n, kind = 3 if slots is None else n, rng.choice(["int32", "int64"])
        tokens, how = [x[:n] for x in case.tokens(begin, begin + count)], {"slots": slots}
        if rng.random() < 0.6:
            how["lengths"] = rng.integers(0, rng.choice([4, count + 1]), n).astype(kind)
        if form == "packed":
            tokens, bounds = packed(tokens, rng.integers(0, count + 1, n), int(rng.integers(1, 12)))
            how["bounds"] = bounds.astype(kind)
        for options in ({"commits": False}, {"query": False} if rng.random() < 0.3 else {}):
            calls = [chunk_call(case, cache, tokens, **how, **options) for cache in (ours, theirs)]
            assert chunk.serves(ours._state, calls[0])
            found = ours._module.cache_extend(ours._state, calls[0])
            expected = extend_chunk(BACKEND.prefix_stop, BACKEND.attention, theirs._state, calls[1])
            for x, y in zip(found, expected):
                assert (x is None and y is None) or np.array_equal(x, y, equal_nan=True)
            for (name, x), y in zip(stored(ours).items(), stored(theirs).values()):
                assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name


@pytest.mark.parametrize("window", [40, 1500])
def test_long_chunks(window):
    """More slots than a block of the first kernel reads at a time, more tokens than a block of the last one."""
    case = History(dtype="float16", head_dim=8, window=window, recent=20, length=4700, batch=1, heads=2, kv_heads=1)
    ours, theirs = filled(case, 2000), filled(case, 2000)
    for begin, end in ((2000, 3100), (3100, 4700)):
        tokens = case.tokens(begin, end)
        calls = [chunk_call(case, cache, tokens, query=False) for cache in (ours, theirs)]
        ours._module.cache_extend(ours._state, calls[0])
        extend_chunk(BACKEND.prefix_stop, BACKEND.attention, theirs._state, calls[1])
        for (name, x), y in zip(stored(ours).items(), stored(theirs).values()):
            assert np.array_equal(x, y), name


@pytest.mark.parametrize("change", [{"value_dim": 4}, {"bias_delay": 5}], ids=str)
def test_what_array_code_does(change):
    case = replace(CASES[0], **change)
    cache = case.cache(backend="emulator")
    query_rows, *rows = case.tokens(0, 12)
    call = extend_call(cache._state, query_rows, *rows, None, 0.0, None, None, True, None, False, case.bias_delay)
    assert not chunk.serves(cache._state, call)
    assert chunk.serves(cache._state, replace(call, query=None))
