"""A window per kv head gives the same as a call per head with its own window (SPEC section 17)."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_dma as dma
from cupy_dma.cache import DynamicCache
from cupy_dma.cache.segments import rectangular
from cupy_dma.cache.state import PER_ROW
from cupy_dma.masks.windows import window_of

M = dma.IntervalMask
B, N, H, HKV, D = 2, 40, 4, 2, 8
WINDOWS = (3, 17)


def draw(dtype=np.float64):
    """query, key, value, scores, dout."""
    rng = np.random.default_rng(0)
    shapes = (B, N, H, D), (B, N, HKV, D), (B, N, HKV, D), (B, HKV, N), (B, N, H, D)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def own(head, query, key, value, scores, *more):
    """The arguments of one kv head; ``more`` are of the query's shape."""
    rows = slice(H // HKV * head, H // HKV * (head + 1))
    mine = slice(head, head + 1)
    return [query[..., rows, :], key[..., mine, :], value[..., mine, :], scores[..., mine, :],
            *(x[..., rows, :] for x in more)]


@pytest.mark.feature("numpy forward", "Scores and selection", "a window per kv head")
@pytest.mark.parametrize("windows", [WINDOWS, list(WINDOWS), np.array(WINDOWS), np.array(WINDOWS, np.int16)], ids=type)
@pytest.mark.parametrize("keys", ["prefix", "global"])
def test_masks(windows, keys, convert):
    scores = draw(np.float32)[3]
    mask = M.top_w(convert(scores), windows, keys=keys)
    window = M.sliding_window(N, windows, like=convert(scores))
    assert window.shape == (1, HKV, N) and mask._bound[0] == max(WINDOWS) == window._bound[0]
    for head, size in enumerate(WINDOWS):
        alone = M.top_w(scores[:, head:head + 1], size, keys=keys).to_dense(N)[:, 0]
        assert np.array_equal(convert.back(mask.to_dense(N))[:, head], alone)
        assert np.array_equal(convert.back(window.to_dense(N))[0, head], M.sliding_window(N, size).to_dense(N)[0, 0])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 24))
@settings(max_examples=60, deadline=None)
def test_sliding_windows(windows, n):
    position, key = np.arange(n)[:, None], np.arange(n)
    seen = (key <= position) & (position - key < np.array(windows)[:, None, None])
    mask = M.sliding_window(n, windows)
    assert np.array_equal(mask.to_dense(n)[0], seen) and mask._causal_only == (min(windows) >= n)


def test_equal_windows_are_one():
    scores = draw(np.float32)[3]
    assert M.top_w(scores, [5, 5])._hints == M.top_w(scores, 5)._hints
    assert window_of([5, 5], 2) == 5 and window_of((N, N + 1), 2) == (N, N + 1)
    assert M.top_w(scores, [N, N + 1])._causal_only  # every head sees all keys
    assert not M.top_w(scores, [N - 1, N])._causal_only
    assert M.sliding_window(N, [2**40, 3]).count(N).tolist() == [[N * (N + 1) // 2, 3 * N - 3]]


@pytest.mark.parametrize("options", [{}, {"keys": "global"}, {"padding": np.arange(N)[None] % 7 != 3}],
                         ids=["prefix", "global", "padding"])
def test_attention_and_its_gradients(options):
    *inputs, dout = draw()
    out, lse = dma.dynamic_mask_attention(*inputs, window=WINDOWS, return_lse=True, **options)
    found = dma.backward.dynamic_mask_attention_backward(dout, *inputs[:3], out, lse, inputs[3], window=WINDOWS,
                                                         **options)
    for head, window in enumerate(WINDOWS):
        *mine, mine_dout = own(head, *inputs, dout)
        alone, alone_lse = dma.dynamic_mask_attention(*mine, window=window, return_lse=True, **options)
        np.testing.assert_allclose(out[:, :, 2 * head:2 * head + 2], alone, rtol=1e-12, atol=1e-12)
        expected = dma.backward.dynamic_mask_attention_backward(mine_dout, *mine[:3], alone, alone_lse, mine[3],
                                                                window=window, **options)
        for name, got in zip(("query", "key", "value", "scores"),
                             own(head, found.query, found.key, found.value, found.scores)):
            np.testing.assert_allclose(got, getattr(expected, name), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("keys", ["prefix", "global"])
def test_packed_sequences(keys):
    inputs = [x[0] for x in draw()[:4]]
    options = {"cu_seqlens_q": [0, 13, N], "cu_seqlens_k": [0, 13, N], "keys": keys}
    out = dma.varlen_dynamic_mask_attention(*inputs[:3], scores=inputs[3], window=WINDOWS, **options)
    for head, window in enumerate(WINDOWS):
        *mine, scores = own(head, *inputs)
        alone = dma.varlen_dynamic_mask_attention(*mine, scores=scores, window=window, **options)
        np.testing.assert_allclose(out[:, 2 * head:2 * head + 2], alone, rtol=1e-12, atol=1e-12)


def test_scores_of_a_recipe_and_of_query_heads():
    rng, (query, key, value, scores, _) = np.random.default_rng(1), draw()
    recipe = {"dt_proj": rng.standard_normal((HKV, HKV * D)), "A": rng.standard_normal(HKV)}
    computed = dma.key_scores(value, **recipe)
    assert np.array_equal(dma.dynamic_mask_attention(query, key, value, window=WINDOWS, **recipe),
                          dma.dynamic_mask_attention(query, key, value, computed, window=WINDOWS))
    # Other groups of heads use other matrix products.
    np.testing.assert_allclose(dma.dynamic_mask_attention(query, key, value, scores, window=WINDOWS),
                               dma.dynamic_mask_attention(query, key, value, scores.repeat(2, 1),
                                                          window=np.repeat(WINDOWS, 2)), rtol=1e-12, atol=1e-13)


WRONG = [([3], ValueError, "window must be an int, or one int for each of 2 kv heads, got 1 of them"),
         ((3, 4, 5), ValueError, "window must be an int, or one int for each of 2 kv heads, got 3 of them"),
         ([], ValueError, "window must be an int, or one int"),
         ([3, 0], ValueError, r"window\[1\] must be at least 1, got 0"),
         ([-1, 3], ValueError, r"window\[0\] must be at least 1, got -1"),
         ([True, 3], TypeError, r"window\[0\] must be an int, got bool True"),
         ([3, 2.0], TypeError, r"window\[1\] must be an int, got float 2.0"),
         (np.array([3.0, 4.0]), TypeError, r"window\[0\] must be an int, got float 3.0"),
         (np.array([[3, 4]]), TypeError, r"window must be an int, or ints in host memory.*shape \(1, 2\)"),
         ("34", TypeError, "window must be an int, got str '34'")]


@pytest.mark.parametrize(("window", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_windows(window, error, message):
    query, key, value, scores, _ = draw()
    with pytest.raises(error, match=message):
        dma.dynamic_mask_attention(query, key, value, scores, window=window)
    with pytest.raises(error, match=message):
        M.top_w(scores, window)
    with pytest.raises(error, match=message):
        dma.varlen_dynamic_mask_attention(query[0], key[0], value[0], [0, N], [0, N], scores[0], window=window)


def test_caches():
    """test_cache.py checks what they keep."""
    key = draw(np.float32)[1]
    cache = DynamicCache(B, HKV, list(WINDOWS), D, like=key)
    assert cache.window == WINDOWS and cache.positions.shape == (B, HKV, max(WINDOWS))
    row, pair = 2 * 4 * D + 4 + 8 + 1, 3 * 4 + 4 + 2 * 8  # bytes: of a row, and of a sequence's head; then of lengths
    assert cache.memory_bytes == B * (sum(WINDOWS) * row + HKV * pair + 8)
    assert DynamicCache(B, HKV, 17, D, like=key).memory_bytes == B * (HKV * 17 * row + HKV * 3 * 4 + 8)
    assert DynamicCache(1, HKV, [3, 3], D).window == 3
    saved = cache.state_dict()
    cache.load_state_dict({**saved, "window": list(WINDOWS)})  # as JSON has it
    with pytest.raises(ValueError, match=r"saved must be of a cache with window=\(3, 17\), got \(17, 3\)"):
        cache.load_state_dict({**saved, "window": (17, 3)})
    with pytest.raises(ValueError, match=r"saved must be of a cache with as many rows .*got .*9"):
        cache.load_state_dict({**saved, "rows": [[3, 9], [3, 17]]})
    with pytest.raises(ValueError, match="window must be an int, or one int for each of 2 kv heads, got 3 of them"):
        DynamicCache(1, HKV, (1, 2, 3), D)


def test_states_with_the_rows_of_the_widest_head():
    """States saved by version 0.1.0: keys in any slots, including slots that a narrow head no longer has, and unneeded
    keys."""
    query, key, value, scores, _ = draw(np.float32)
    cache, expected = (DynamicCache(B, HKV, list(WINDOWS), D, like=key, sinks=1, recent=2) for _ in range(2))
    expected.extend(query[:, :30], key[:, :30], value[:, :30], scores[:, :, :30])
    wide = rectangular(expected._state)
    saved = {name: np.roll(getattr(wide, name).array, 7, 2) for name in PER_ROW}
    stale = (saved["positions"] < 0) & (np.arange(20) % 3 == 0)  # an evicted key that is still stored
    saved["positions"][stale], saved["scores"][stale] = 5, -np.inf
    saved |= {name: x for name, x in expected.state_dict().items() if name not in (*PER_ROW, "rows")}
    cache.load_state_dict(saved)
    for tokens in (slice(30, 31), slice(31, 38), slice(38, 39), slice(39, 40)):
        outs = [each.extend(query[:, tokens], key[:, tokens], value[:, tokens], scores[:, :, tokens])
                for each in (cache, expected)]
        np.testing.assert_allclose(*outs, rtol=0, atol=1e-6)
    assert all(map(np.array_equal, cache.kept(), expected.kept()))
    with pytest.raises(ValueError, match=r"saved\['key'\] must have shape of this cache = \(2, 2, 20, 8\), got"):
        cache.load_state_dict({**saved, "key": saved["key"][:, :, 1:]})
