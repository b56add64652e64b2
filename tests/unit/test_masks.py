"""Masks: constructors against their definitions, laws of composition, and counts."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_dma as dma
from cupy_dma.masks.interval import EVER, NEVER, Hints

M = dma.IntervalMask
N = 9
quick = settings(max_examples=150, deadline=None)
P, J = np.arange(N)[:, None], np.arange(N)


def dense_of(start, stop, query_length):
    """The definition: ``start <= p < stop`` with ``p_i = i + Lk - Lq``."""
    start, stop = np.broadcast_arrays(np.asarray(start, np.int64), np.asarray(stop, np.int64))
    p = np.arange(query_length)[:, None] + start.shape[-1] - query_length
    return (start[..., None, :] <= p) & (p < stop[..., None, :])


@st.composite
def run_arrays(draw, shape):
    ends = st.one_of(st.integers(-4, N + 4), st.sampled_from([EVER, NEVER, -N, 0, N]))
    size = int(np.prod(shape))
    return np.array(draw(st.lists(ends, min_size=size, max_size=size)), np.int32).reshape(shape)


@st.composite
def masks(draw):
    """Any mask of N keys: arbitrary runs, or one of the constructors."""
    shape = draw(st.sampled_from([(1, 1, N), (2, 1, N), (1, 3, N), (2, 3, N)]))
    if draw(st.booleans()):
        maker = draw(st.sampled_from(["causal", "window", "sinks", "top_w", "documents"]))
        w = draw(st.integers(1, N + 1))
        scores = np.array(draw(st.lists(st.integers(0, 3), min_size=N, max_size=N)), np.float32)
        return {"causal": lambda: M.causal(N), "window": lambda: M.sliding_window(N, w),
                "sinks": lambda: M.sinks(N, w - 1), "documents": lambda: M.documents(np.array([0, w - 1, N])),
                "top_w": lambda: M.top_w(np.broadcast_to(scores, shape), w)}[maker]()
    if draw(st.booleans()):
        return M.padding(np.array(draw(st.lists(st.booleans(), min_size=N, max_size=N)))[None])
    return M(draw(run_arrays(shape)), draw(run_arrays(draw(st.sampled_from([shape, (1, 1, N)])))))


def union(a, b):
    """a | b, or None if the runs do not touch."""
    try:
        return a | b
    except ValueError as error:
        assert "touch or overlap" in str(error)
        return None


# ---- constructors ----
@pytest.mark.parametrize("query_length", [0, 1, 5, N, N + 4])
@pytest.mark.parametrize(("name", "make", "rule"), [
    ("causal", lambda like: M.causal(N, like=like), lambda p, j: j <= p),
    ("window 1", lambda like: M.sliding_window(N, 1, like=like), lambda p, j: j == p),
    ("window 3", lambda like: M.sliding_window(N, 3, like=like), lambda p, j: (j <= p) & (j > p - 3)),
    ("window huge", lambda like: M.sliding_window(N, 2**40, like=like), lambda p, j: j <= p),
    ("sinks 0", lambda like: M.sinks(N, 0, like=like), lambda p, j: (j < 0) & (p < 0)),
    ("sinks 2", lambda like: M.sinks(N, 2, like=like), lambda p, j: (j < 2) & (j <= p)),
    ("prefix 4", lambda like: M.prefix_lm(N, 4, like=like), lambda p, j: (j < 4) | (j <= p)),
    ("prefix all", lambda like: M.prefix_lm(N, N, like=like), lambda p, j: (j <= N) & (p <= N)),
])
def test_constructors(convert, name, make, rule, query_length):
    mask = make(convert(np.zeros(1, np.float32)))
    assert mask.library.name == convert.name.removesuffix("-cuda") and mask.shape == (1, 1, N)
    p = np.arange(query_length)[:, None] + N - query_length
    dense = convert.back(mask.to_dense(query_length))
    assert dense.dtype == bool and np.array_equal(dense, rule(p, J)[None, None])


@pytest.mark.parametrize("size", [0, 1, N - 1, N, N + 1])
def test_sizes_around_all_keys(size):
    """Sizes of n - 1, n and n + 1: hints are true, and claim no more than that."""
    scores, real = np.zeros((1, 1, N), np.float32), np.arange(N)[None] > 0
    own, mixed = np.array([0, min(size, N), N]), np.zeros((1, N), np.int32)
    rules = [(M.sinks(N, size), (J < size) & (J <= P)), (M.prefix_lm(N, size), (J < size) | (J <= P)),
             (M.documents(own), (J <= P) & ((size > J) == (size > P))), (M.causal(N), J <= P)]
    if size:
        recent, others = (J <= P) & (J > P - size), J > N - 1 - size
        rules += [(M.sliding_window(N, size), recent), (M.top_w(scores, size), recent),
                  (M.from_stop(np.arange(N, dtype=np.int32) + size, window=size), recent),
                  (M.top_w(scores, size, documents=mixed), recent), (M.top_w(scores, size, keys="global"), others),
                  (M.top_w(scores, size, padding=real), recent & real),
                  (M.top_w(scores, size, keys="global", padding=real), others & real)]
    for mask, rule in rules:
        assert np.array_equal(mask.to_dense(N)[0, 0], np.broadcast_to(rule, (N, N)))
        assert not mask._causal_only or np.array_equal(rule, J <= P)
        assert mask._starts != "key" or (np.broadcast_to(mask.start, mask.shape) == J).all()
        assert_bound(mask)
    for a, _ in rules:
        for b, _ in rules:
            for both in (a & b, union(a, b)):
                if both is not None:
                    assert not both._causal_only or both == M.causal(N)
                    assert_bound(both)


def assert_bound(mask):
    """No run of positions sees more keys than the hint says."""
    if mask._bound is None:
        return
    base, slope = mask._bound
    dense = mask.to_dense(N)
    for length in (1, 2, 4, N):
        for first in range(N - length + 1):
            assert (dense[:, :, first:first + length].any(2).sum(2) <= base + slope * (length - 1)).all()


def test_the_bound_of_a_global_selection_in_documents():
    """Positions in two documents see the best keys of both, and of documents in between."""
    scores = np.zeros((1, 1, N), np.float32)
    for bounds in ([0, 4, N], [0, 4, 5, N], [0, 3, 4, 5, N]):
        for window in (1, 2, 4):
            assert_bound(M.top_w(scores, window, keys="global", documents=np.array(bounds)))


def test_prefix_lm_per_sequence(convert):
    lengths = convert(np.array([0, 4, N], np.int64))
    dense = convert.back(M.prefix_lm(N, lengths).to_dense(N))
    assert dense.shape == (3, 1, N, N)
    for row, length in zip(dense, (0, 4, N)):
        assert np.array_equal(row[0], (length > J) | (J <= P))


def test_padding(convert):
    real = np.random.default_rng(0).random((3, N)) < 0.5
    dense = convert.back(M.padding(convert(real)).to_dense(N + 3))
    assert np.array_equal(dense, np.broadcast_to(real[:, None, None], (3, 1, N + 3, N)))


@pytest.mark.parametrize("causal", [False, True])
def test_documents(convert, causal):
    ids = np.array([[0, 0, 0, 1, 1, 2, 0, 0, 0], [5] * N], np.int32)
    lengths = np.array([0, 3, 3, 5, 6, N], np.int64)  # the third document is empty
    same = np.array([[0, 0, 0, 1, 1, 2, 3, 3, 3], [0] * N])
    rule = same[:, None, :, None] == same[:, None, None, :]
    if causal:
        rule = rule & (J <= P)
    from_ids = M.documents(convert(ids), causal=causal)
    assert np.array_equal(convert.back(from_ids.to_dense(N)), rule)
    for options in ({}, {"key_length": N}):
        from_lengths = M.documents(convert(lengths), causal=causal, **options)
        assert np.array_equal(convert.back(from_lengths.to_dense(N)), rule[:1])
    one = M.documents(convert(np.array([0, N], np.int32)), causal=causal)
    assert convert.back(one.to_dense(N + 2)).sum() == (N * (N + 1) // 2 if causal else N * (N + 2))


def test_masks_without_keys():
    assert M.documents(np.array([0])).shape == (1, 1, 0)
    assert M.documents(np.zeros((2, 0), np.int32)).shape == (2, 1, 0)
    assert M.from_stop(np.zeros((2, 3, 0), int), window=1).shape == (2, 3, 0)


def test_user_made_runs_take_any_leading_axes(convert):
    start, stop = np.arange(N, dtype=np.int32), np.arange(3, N + 3, dtype=np.int32)
    plain = M(convert(start), convert(stop))
    assert plain.shape == (1, 1, N) and plain == M.sliding_window(N, 3, like=convert(start))
    per_head = M(convert(start), convert(np.stack([stop, stop + 1])))
    assert per_head.shape == (1, 2, N) and per_head.start.shape == (1, 1, N) and per_head.stop.shape == (1, 2, N)
    per_batch = M(convert(start), convert(np.stack([stop, stop + 1])[:, None]))
    assert per_batch.shape == (2, 1, N)
    assert per_batch._start.strides == (0, 0, 1) and per_batch._start.shape == (2, 1, N)
    assert per_batch._stop.strides == (N, 0, 1)


def test_moving_a_mask(convert):
    mask = M.top_w(np.random.default_rng(0).standard_normal((2, 3, N)).astype(np.float32), 2)
    there = mask.to(convert(np.zeros(1)))
    assert there.library.name == convert.name.removesuffix("-cuda")
    assert (there._bound, there._starts, there._causal_only) == (mask._bound, "key", False)
    assert there.to(np.zeros(1)) == mask and mask.to(np.zeros(1)) is mask


# ---- composition ----
@given(masks(), masks())
@quick
def test_the_intersection_is_the_intersection(a, b):
    for n in (0, 4, N, N + 3):
        assert np.array_equal((a & b).to_dense(n), a.to_dense(n) & b.to_dense(n))


@given(masks(), masks())
@quick
def test_the_union_is_the_union_or_an_error(a, b):
    both = union(a, b)
    assert a | a == a
    runs = [(np.broadcast_to(m.start, (2, 3, N)), np.broadcast_to(m.stop, (2, 3, N))) for m in (a, b)]
    (a0, a1), (b0, b1) = runs
    apart = (a0 < a1) & (b0 < b1) & (np.maximum(a0, b0) > np.minimum(a1, b1))  # a gap between two runs
    assert (both is None) == apart.any()
    if both is None:
        return
    assert both == union(b, a)
    for n in (0, 4, N, N + 3):
        assert np.array_equal(both.to_dense(n), a.to_dense(n) | b.to_dense(n))


@given(masks(), masks())
@quick
def test_equality_is_equal_visibility_at_every_position(a, b):
    """Visibility changes only at starts and stops, so these and their neighbours represent all positions below N."""
    ends = np.concatenate([np.ravel(run).astype(np.int64) for m in (a, b) for run in (m.start, m.stop)])
    positions = np.unique(np.clip(np.concatenate((ends - 1, ends, ends + 1)), EVER, N - 1))
    seen = [(m.start[..., None] <= positions) & (positions < m.stop[..., None]) for m in (a, b)]
    assert (a == b) == np.array_equal(*np.broadcast_arrays(*seen))
    assert (a != b) == (not a == b)


@given(masks(), masks())
@quick
def test_hints_hold_after_composition(a, b):
    for mask in [m for m in (a, b, a & b, union(a, b)) if m is not None]:
        start = np.broadcast_to(mask.start, mask.shape)
        if mask._starts == "key":
            assert (start == J).all()
        if mask._starts == "open":
            assert (start == EVER).all()
        if mask._causal_only:
            assert mask == M.causal(N)
        assert_bound(mask)
    if a._starts == b._starts == "key":
        assert (a | b)._starts == (a & b)._starts == "key"  # they touch, so their union is a mask


@given(masks(), st.integers(0, 2 * N))
@quick
def test_count_is_the_sum_of_the_dense_mask(mask, query_length):
    count = mask.count(query_length)
    assert count.dtype == np.int64 and np.array_equal(count, mask.to_dense(query_length).sum(axis=(2, 3)))


@given(run_arrays((2, 3, N)), run_arrays((2, 3, N)), st.integers(0, 2 * N))
@quick
def test_dense_is_the_definition(start, stop, query_length):
    assert np.array_equal(M(start, stop).to_dense(query_length), dense_of(start, stop, query_length))


def test_composition_in_every_library(convert):
    like = convert(np.zeros(1, np.float32))
    scores = np.random.default_rng(0).standard_normal((2, 2, N)).astype(np.float32)
    real = np.random.default_rng(1).random((2, N)) < 0.7
    here = [M.top_w(scores, 2), M.sliding_window(N, 2), M.padding(real), M.prefix_lm(N, 3)]
    top_w = M.top_w(scores, 2).to(like)
    there = [top_w, M.sliding_window(N, 2, like=like), M.padding(convert(real)), M.prefix_lm(N, 3, like=like)]
    for a, x in zip(here, there):
        assert np.array_equal(a.count(N), convert.back(x.count(N)))
        for b, y in zip(here, there):
            assert x & y == (a & b).to(like) and (x == y) == (a == b)
            if union(a, b) is not None:
                assert x | y == (a | b).to(like)


def test_masks_compare_only_with_masks():
    assert M.causal(N) != M.causal(N + 1)
    assert M.padding(np.ones((2, N), bool)) != M.padding(np.ones((3, N), bool))
    with pytest.raises(TypeError):
        hash(M.causal(N))


def test_masks_of_a_million_keys_count_exactly():
    n = 2**20
    assert M.causal(n).count(n).item() == n * (n + 1) // 2


@pytest.mark.parametrize("dtypes", [(np.int64, np.int64), (np.int32, np.int64)])
def test_runs_of_int64(convert, dtypes, rng):
    start, stop = (rng.integers(-3, N + 3, (2, N)).astype(dtype) for dtype in dtypes)
    mask = M(convert(start), convert(stop))
    assert np.array_equal(convert.back(mask.to_dense(N)), dense_of(start[None], stop[None], N))
    assert all(convert.back(run).dtype == np.int32 for run in (mask.start, mask.stop))


def test_huge_positions_are_open_ends():
    mask = M(np.array([-2**40, 0]), np.array([2**40, 2**31]))
    assert mask.start.ravel().tolist() == [EVER, 0] and mask.stop.ravel().tolist() == [NEVER, NEVER]


# ---- masks of any eviction policy ----
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(N,), (3, N), (2, 1, N)])
def test_from_stop(convert, shape, dtype, rng):
    stop = rng.integers(-3, N + 5, shape).astype(dtype)
    mask = M.from_stop(convert(stop))
    assert mask.shape == (1, 1, 1, *shape)[-3:] and mask.library.name == convert.name.removesuffix("-cuda")
    for query_length in (1, 4, N, N + 2):
        expected = dense_of(np.arange(N), stop.reshape(mask.shape), query_length)
        assert np.array_equal(convert.back(mask.to_dense(query_length)), expected)


def test_the_stops_of_a_selection_make_the_same_mask(convert, rng):
    scores = rng.standard_normal((2, 3, 64)).astype(np.float32)
    selected = M.top_w(convert(scores), 8)
    again = M.from_stop(selected.stop, window=8)
    assert again == selected and again._bound == selected._bound == (8, 1)
    with pytest.raises(ValueError, match=r"window must be at least the number of keys .*, 8 at position 7, got 7"):
        M.from_stop(convert.back(selected.stop), window=7)


@pytest.mark.parametrize(("name", "array", "options", "error", "message"), [
    ("stop", np.zeros(4, np.float32), {}, TypeError, "stop must be int32 or int64, got float32"),
    ("stop", np.zeros((1, 1, 1, 4), int), {}, ValueError,
     r"stop must have 1 to 3 axes \(B, H, Lk\), got shape \(1, 1, 1, 4\)"),
    ("stop", np.array(3), {}, ValueError, r"stop must have 1 to 3 axes"),
    ("stop", np.zeros(4, int), {"window": 0}, ValueError, "window must be at least 1, got 0"),
    ("stop", np.full(4, 9), {"window": 3}, ValueError, "that any position sees, 4 at position 3, got 3"),
    ("gate", np.zeros(4, int), {}, TypeError, "bias must be .*, got int64"),
    ("gate", np.zeros((1, 1, 1, 4)), {}, ValueError,
     r"bias must have 1 to 3 axes \(B, H, Lk\), got shape \(1, 1, 1, 4\)"),
    ("gate", np.zeros(4), {"delay": 0}, ValueError, "delay must be at least 1, got 0"),
    ("gate", np.zeros(4), {"threshold": np.nan}, ValueError, "threshold must be a finite number, got nan"),
    ("gate", np.zeros(4), {"sinks": -1}, ValueError, "sinks must be at least 0, got -1"),
])
def test_bad_stops_and_gates(name, array, options, error, message):
    usual = {"delay": 1, "threshold": 0.0} if name == "gate" else {}
    with pytest.raises(error, match=message):
        getattr(M, f"from_{name}")(array, **usual | options)


@pytest.mark.parametrize("stop", [-2**63, -2**40, -2**31 - 1, 2**31, 2**40, 2**63 - 1])
def test_stops_that_are_no_int32(stop):
    mask = M.from_stop(np.array([3, stop, 3], np.int64))
    seen = (np.arange(3) <= np.arange(3)[:, None]) & (np.array([3, stop, 3]) > np.arange(3)[:, None])
    assert np.array_equal(mask.to_dense(3)[0, 0], seen)


# ---- learned eviction, FlashMask ----
@pytest.mark.parametrize("shape", [(N,), (3, N), (2, 1, N), (2, 3, 0)])
@pytest.mark.parametrize(("delay", "sinks"), [(1, 0), (3, 2), (2**40, 0), (2, 2**40)])
def test_from_gate(convert, shape, delay, sinks, rng):
    bias = rng.standard_normal(shape).astype(np.float32)
    for key, number in ((2, np.nan), (4, -np.inf), (5, 0.25), (7, np.inf)):
        bias[..., key:key + 1] = number
    mask = M.from_gate(convert(bias), delay=delay, threshold=0.25, sinks=sinks)
    assert mask.shape == (1, 1, *shape)[-3:] and mask._hints == Hints("key")
    position, key = np.arange(shape[-1])[:, None], np.arange(shape[-1])
    seen = (key <= position) & ((position - key < delay) | ~(bias < 0.25)[..., None, :] | (key < sinks))
    assert np.array_equal(convert.back(mask.to_dense(shape[-1])), seen.reshape(*mask.shape[:2], *seen.shape[-2:]))


def seen_in_columns(columns: np.ndarray, causal: bool) -> np.ndarray:
    """FlashMask's definition: which rows see which keys."""
    n = columns.shape[2]
    row, key = np.arange(n)[:, None], np.arange(n)
    first, last = columns[..., None, :, 0], columns[..., None, :, -1]
    if not causal:
        return ~(row >= first) & ~(row < last)
    hidden = (row >= first) if columns.shape[-1] == 1 else (row >= first) & (row < last)
    return (key <= row) & ~hidden


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("count", "causal"), [(1, True), (2, True), (2, False)])
def test_from_startend(convert, count, causal, dtype, rng):
    columns = rng.integers(-2, N + 3, (2, 3, N, count)).astype(dtype)
    if causal and count == 2:
        columns[..., 1] = N  # no key is seen again
    mask = M.from_startend(convert(columns), causal=causal)
    assert np.array_equal(convert.back(mask.to_dense(N)), seen_in_columns(columns, causal))


@given(st.integers(1, 9), st.sampled_from([(1, True), (2, True), (2, False)]), st.data())
@settings(max_examples=200, deadline=None)
def test_from_startend_is_the_definition(n, kind, data):
    """Indices with one run of visible rows per key give that mask; all others raise."""
    count, causal = kind
    rows = st.integers(-1, n + 1)
    drawn = data.draw(st.lists(rows, min_size=n * count, max_size=n * count))
    columns = np.array(drawn, np.int32).reshape(1, 1, n, count)
    seen = seen_in_columns(columns, causal)
    changes = np.diff(seen, axis=2, prepend=False)[0, 0]
    if (changes.sum(0) > 2).any():
        with pytest.raises(ValueError, match="one run of rows"):
            M.from_startend(columns, causal=causal)
    else:
        assert np.array_equal(M.from_startend(columns, causal=causal).to_dense(n), seen)


def test_a_key_that_is_seen_again_is_refused(convert):
    columns = np.tile(np.array([N, N]), (1, 1, N, 1))
    columns[0, 0, 1] = 3, 5  # visible to rows 1, 2 and from 5 on
    with pytest.raises(ValueError, match="startend_row_indices must let each key be seen in one run of rows"):
        M.from_startend(convert(columns))
    assert np.array_equal(convert.back(M.from_startend(convert(columns), check=False).stop)[0, 0, :2], [2**31 - 1, 3])


@pytest.mark.parametrize(("shape", "causal", "error", "message"), [
    ((N, 1), True, ValueError, r"must have shape \(1\|B, 1\|Hkv\|H, Lk, 1\|2\) with causal=True, got \(7, 1\)"),
    ((1, 1, N, 4), True, ValueError, r"Lk, 1\|2\) with causal=True, got \(1, 1, 7, 4\)"),
    ((1, 1, N, 1), False, ValueError, r"Lk, 2\) with causal=False, got \(1, 1, 7, 1\)"),
    ((1, 1, N, 4), False, NotImplementedError, "at most 2 columns, got shape"),
])
def test_bad_columns(shape, causal, error, message):
    with pytest.raises(error, match=message.replace("7", str(N))):
        M.from_startend(np.zeros(shape, np.int32), causal=causal)
