"""Short sequences and small logits on the numpy backend, computed together and without a running max, but each row only
from its visible keys."""
from unittest import mock

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends.numpy import forward, small
from tests.oracle import reference

B, N, H, HKV, D = 3, 60, 4, 2, 8


@pytest.fixture
def inputs(rng):
    q = rng.standard_normal((B, N, H, D)).astype(np.float32)
    k, v = rng.standard_normal((2, B, N, HKV, D)).astype(np.float32)
    return q, k, v, rng.standard_normal((B, HKV, N)).astype(np.float32)


@pytest.fixture
def paths():
    """Counts which path rows take: rows left by ``small.attend``, and calls of ``_attend_small``."""
    left = []

    def attend(*arguments):
        left.append(attended(*arguments))
        return left[-1]

    attended = small.attend
    with mock.patch.object(small, "attend", attend), \
            mock.patch.object(forward, "_attend_small", side_effect=forward._attend_small) as tiles:
        yield left, tiles


def attend(q, k, v, s, window=20, bias=None):
    mask = dma.IntervalMask.top_w(s, window)
    out, lse = dma.attention(q, k, v, mask=mask, bias=s if bias is None else bias, return_lse=True)
    return mask, out, lse


def check(inputs, mask, out, lse, bias=None):
    q, k, v, s = inputs
    bias = (s if bias is None else bias)[:, :, None]
    reference.check_attention((out, lse), q, k, v, dense_mask=mask.to_dense(N), bias=bias)


def test_all_rows_together(inputs, paths):
    check(inputs, *attend(*inputs))
    assert paths[0] == [[]] and not paths[1].called


def test_large_logits_go_their_own_way_and_change_no_other_bit(inputs, paths):
    _, before, lse = attend(*inputs)
    inputs[1][1, :, 1] *= 40
    mask, out, new = attend(*inputs)
    check(inputs, mask, out, new)
    assert paths[0] == [[], [(1, 1)]] and not paths[1].called
    same = np.ones((B, H), bool)
    same[1, 2:] = False
    for x, y in ((before.swapaxes(1, 2), out.swapaxes(1, 2)), (lse, new)):
        assert np.array_equal(x[same], y[same])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_nobody_sees_changes_neither_way_nor_bits(value, inputs, paths):
    _, k, v, s = inputs
    bias = s.copy()
    bias[:, :, 7] = -np.inf
    _, without, _ = attend(*inputs, bias=bias)
    k[:, 7], v[:, 7] = value, value
    _, out, _ = attend(*inputs, bias=bias)
    assert np.array_equal(without, out) and paths[0] == [[], []]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("heads", [1, HKV])
def test_queries_that_see_nothing_change_neither_way_nor_bits(heads, value, inputs, paths):
    """Both in tiles and computed together."""
    q, k, v, _ = (x[:1] for x in inputs)
    q, k, v = q[:, :, :2 * heads].copy(), k[:, :, :heads], v[:, :, :heads]
    padding = np.arange(N)[None] >= 9
    before = dma.attention(q, k, v, mask=dma.IntervalMask.padding(padding), causal=True, return_lse=True)
    q[:, 4] = value
    after = dma.attention(q, k, v, mask=dma.IntervalMask.padding(padding), causal=True, return_lse=True)
    assert all(map(np.array_equal, before, after))
    assert (paths[0], paths[1].call_count) == (([], 2) if heads == 1 else ([[], []], 0))


def test_a_value_too_large_for_sums_of_exponentials(inputs, paths):
    inputs[2][0, :, 0] *= 2.0**100
    check(inputs, *attend(*inputs))
    assert paths[0] == [[(0, 0)]]


def test_tiles_of_small_logits(inputs, paths):
    """One batch entry and kv head: in tiles, without a running max unless a visible key is large."""
    one = [x[:1, :, :1] if x.ndim == 4 else x[:1, :1] for x in inputs]
    one[0] = inputs[0][:1, :, :2]
    check(one, *attend(*one))
    assert paths[0] == [] and paths[1].call_count == 1
    one[1][0, 5] *= 100  # visible to the first 20 queries
    check(one, *attend(*one))
    assert paths[1].call_count == 1


def test_biases_that_exponentials_do_not_hold(inputs, paths):
    """All visible keys of a row may have a very low bias; without a running max, the row's probabilities would all be
    0."""
    low = np.full_like(inputs[3], -200.0)
    check(inputs, *attend(*inputs, bias=low), bias=low)
    assert len(paths[0][0]) == B * HKV
