"""The flex backend on the CPU: the grid forward and backward, isolation of non-finite values, blocks, the path of
compiled kernels (traced, without its compiler), and the torch operations for scores and selection. On a GPU:
tests/gpu/test_flex.py."""
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

import cupy_dma as dma
from cupy_dma.arrays import describe
from cupy_dma.calls.attention import attention_call
from cupy_dma.calls.options import Options
from tests.oracle import cases, delay_cases, hidden_keys, reference, selection_cases
from tests.oracle.cases import CASES
from tests.unit.test_attention import draw
from tests.unit.test_selection import problems

torch = pytest.importorskip("torch")
pytest.importorskip("torch.nn.attention.flex_attention")
from cupy_dma.backends.flex import passes  # noqa: E402
from cupy_dma.backends.flex.problem import BLOCK, Problem  # noqa: E402
from cupy_dma.backends.torch_common import scores_and_selection as torch_math  # noqa: E402  needs torch

NAMES = "query", "key", "value", "bias"
FEW_DELAYS = [case for case in delay_cases.CASES if case.name in delay_cases.FEW]
MASKED = [case for case in CASES if case.name.startswith(("mask-", "causal-and-", "bias-", "softcap"))]


# ---- the grid ----
@pytest.mark.feature("flex forward", "attention", "every case")
@pytest.mark.parametrize("case", CASES + FEW_DELAYS, ids=str)
def test_forward_grid(case):
    cases.check(case, *cases.run(case, backend="flex"))


@pytest.mark.feature("flex backward", "attention", "every case")
@pytest.mark.parametrize("case", CASES + FEW_DELAYS, ids=str)
def test_backward_grid(case):
    cases.check_backward(case, cases.run_backward(case, backend="flex", with_dlse=True), with_dlse=True)


@pytest.mark.parametrize("case", hidden_keys.CASES, ids=str)
def test_what_a_bias_of_minus_infinity_hides(case):
    hidden_keys.run(case, backend="flex")


@pytest.mark.feature("flex forward backward", "attention", "bitwise")
@pytest.mark.parametrize("case", [case for case in CASES if case.name.startswith(("bias-", "dense-both-"))], ids=str)
def test_deterministic_gradients(case):
    first, again = (cases.run_backward(case, backend="flex", deterministic=True) for _ in range(2))
    cases.check_backward(case, first)
    assert all(x is y is None or np.array_equal(x, y) for x, y in zip(first, again))


@pytest.mark.parametrize("needs", NAMES)
def test_only_what_is_needed(needs):
    case = next(case for case in CASES if case.name == "bias-full-top_w")
    found = cases.run_backward(case, backend="flex", needs=needs)
    assert [name for name, x in zip(NAMES, found) if x is not None] == [needs]
    cases.check_backward(case, found)


# ---- isolation of non-finite values ----
def hidden_case(rng):
    """A call in which no query sees keys 7, 8 and 30, and queries 0 to 9 have no visible keys."""
    q, k, v = draw(rng, lq=70)
    padding = np.ones((1, 60), bool)
    padding[0, [7, 8, 30]] = False
    return q, k, v, rng.standard_normal((1, 1, 60)).astype(np.float32), dma.IntervalMask.padding(padding)


@pytest.mark.feature("flex forward backward", "attention", "keys that no query sees")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dense", [False, True])
def test_what_nobody_sees_changes_no_bit(rng, bad, dense):
    q, k, v, bias, mask = hidden_case(rng)
    do = rng.standard_normal(q.shape).astype(np.float32)
    dlse = rng.standard_normal((1, 2, 70)).astype(np.float32)

    def everything():
        options = {"mask": np.broadcast_to(mask.to_dense(70), (1, 1, 70, 60)).copy() if dense else mask,
                   "bias": bias, "causal": True, "softcap": 3.0, "backend": "flex"}
        out, lse = dma.attention(q, k, v, return_lse=True, **options)
        return out, lse, *dma.backward.attention_backward(do, q, k, v, out, lse, dlse=dlse, **options)

    clean = everything()
    k[0, 7], v[0, 8], bias[0, 0, 30], q[0, 3], do[0, 4], dlse[0, 0, 5] = (bad,) * 6
    for a, b in zip(clean, everything()):
        assert np.array_equal(a, b)
    out, lse, dq, dk, dv, db = clean
    assert (out[:, :10] == 0).all() and np.isneginf(lse[..., :10]).all() and np.isfinite(lse[..., 10:]).all()
    assert (dq[:, :10] == 0).all() and (dk[0, [7, 8, 30]] == 0).all() and (dv[0, [7, 8, 30]] == 0).all()
    assert (db[0, 0, [7, 8, 30]] == 0).all() and all(np.isfinite(x).all() for x in (dq, dk, dv, db))


def test_rows_that_see_nothing(rng):
    q, k, v = draw(rng)
    for options in ({"mask": np.zeros((60, 60), bool)}, {"mask": dma.IntervalMask.sinks(60, 0)},
                    {"bias": np.full((1, 1, 60), -np.inf, np.float32)}):
        out, lse = dma.attention(q, k, v, return_lse=True, backend="flex", **options)
        found = dma.backward.attention_backward(np.ones_like(q), q, k, v, out, lse, backend="flex", **options)
        assert (out == 0).all() and np.isneginf(lse).all()
        assert all((x == 0).all() for x in found if x is not None)


def test_rows_of_the_lowest_biases(rng):
    """A limit of FlexAttention: lse overflows if every visible bias is the lowest float32; on a CPU out is still
    right."""
    q, k, v = draw(rng)
    bias = np.zeros((1, 1, 60), np.float32)
    bias[..., :5] = np.finfo(np.float32).min
    (out, lse), (expected, expected_lse) = (dma.attention(q, k, v, bias=bias, causal=True, return_lse=True, backend=b)
                                            for b in ("flex", "numpy"))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.isneginf(lse[..., :5]).all() and np.isfinite(expected_lse).all()
    np.testing.assert_allclose(lse[..., 5:], expected_lse[..., 5:], atol=1e-5)


def test_a_bad_key_that_some_see(rng):
    """The documented limit: a non-finite key is isolated in the forward, a non-finite value is not."""
    q, k, v = draw(rng)
    mask = dma.IntervalMask.sliding_window(60, 5)
    clean = dma.attention(q, k, v, mask=mask)
    bad = k.copy()
    bad[0, 20, 0, 3] = np.nan
    out = dma.attention(q, bad, v, mask=mask, backend="flex")
    assert np.isnan(out[:, 20:25]).all()
    np.testing.assert_allclose(np.delete(out, np.s_[20:25], 1), np.delete(clean, np.s_[20:25], 1), atol=1e-6)
    bad = v.copy()
    bad[0, 20, 0, 3] = np.nan
    out = dma.attention(q, k, bad, mask=mask, backend="flex")
    assert np.isnan(out[:, 20:25, :, 3]).all()
    np.testing.assert_allclose(np.delete(out, 3, 3), np.delete(clean, 3, 3), atol=1e-6)  # no other column of D


# ---- blocks ----
@pytest.mark.parametrize("case", [case for case in MASKED if case.mask != "none" or case.causal], ids=str)
@pytest.mark.parametrize("lengths", [(70, 70), (300, 270), (128, 384)])
def test_blocks_and_keys_are_those_of_the_dense_mask(case, lengths, monkeypatch):
    """No block that holds a visible pair is skipped, and only blocks without a hidden pair count as full."""
    monkeypatch.setattr("cupy_dma.backends.flex.problem.PAIRS_AT_A_TIME", 2**14)
    lq, lk = lengths
    case = replace(case, query_length=lq, key_length=lk, window=50, head_dim=1)
    arguments, named = cases.arguments(case, np.asarray)
    call = attention_call(*arguments, named["mask"], None, Options(named["causal"]))
    problem = Problem.of(call, torch.device("cpu"))
    some, full, keys = (x.numpy() for x in problem.survey())
    dense = reference.visible_pairs((case.batch, case.heads, lq, lk), cases.dense_mask(case), case.causal)
    rows, columns = -(-lq // BLOCK), -(-lk // BLOCK)
    padded = np.zeros((case.batch, case.heads, rows * BLOCK, columns * BLOCK), bool)
    padded[:, :, :lq, :lk] = dense
    blocks = padded.reshape(case.batch, case.heads, rows, BLOCK, columns, BLOCK)

    def spread(x, heads):
        return np.broadcast_to(x if x.shape[1] in (1, heads) else x.repeat(heads // x.shape[1], 1),
                               (case.batch, heads, *x.shape[2:]))

    assert np.array_equal(spread(some, case.heads), blocks.any((3, 5)))
    assert np.array_equal(spread(full, case.heads), blocks.all((3, 5)))
    seen = dense.any(2).reshape(case.batch, case.kv_heads, -1, lk).any(2)
    assert np.array_equal(spread(keys, case.kv_heads), seen)
    listed = problem.block_mask(*(torch.from_numpy(x) for x in (some, full)), problem.visible())
    assert np.array_equal(spread(listed.to_dense().numpy().astype(bool), case.heads), blocks.any((3, 5)))


# ---- the path of compiled kernels ----
@pytest.fixture
def traced(monkeypatch):
    """CPU arrays take the path of CUDA arrays, with torch's tracer but without its compiler."""
    monkeypatch.setattr(passes._Prepared, "is_compiled", True)
    monkeypatch.setattr(passes, "COMPILER", "aot_eager")
    monkeypatch.setattr(passes, "_programs", {})
    monkeypatch.setattr(passes.flex, "_validate_device", lambda *tensors: None)  # refuses gradients on CPUs
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["mask-top_w_padding", "causal-and-dense", "mask-per_batch", "bias-full-none",
                                  "bias-row-none", "bias-key_per_head-top_w", "softcap-full", "layout-head_slice",
                                  "bfloat16-D3", "batch-0", "delay-65-survivors+dense=1gqk",
                                  "delay-1-softcap-survivors"])
def test_traced_path(traced, name):
    case = replace(next(case for case in CASES + FEW_DELAYS if case.name == name), dtype="float32")
    cases.check(case, *cases.run(case, backend="flex"))
    cases.check_backward(case, cases.run_backward(case, backend="flex", with_dlse=True), with_dlse=True)


@pytest.mark.parametrize(("dtype", "size", "mask_of_pairs", "bias_shape", "one"), [
    ("float16", 128, False, (1, 1, 1, 40), False), ("float16", 128, False, (1, 1, 40, 1), False),
    ("float16", 64, False, (1, 1, 40, 40), True), ("float16", 64, True, None, True),
    ("float32", 60, False, None, False), ("float32", 65, False, None, True)])
def test_one_step_at_a_time_where_shared_memory_is_short(traced, monkeypatch, rng, dtype, size, mask_of_pairs,
                                                         bias_shape, one):
    told = []
    monkeypatch.setattr(passes, "_attend", lambda q, k, v, *_: (told.append(_[-1]) or q, q[..., 0].float()))
    monkeypatch.setattr(passes, "_program", lambda number: passes._attend)
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in draw(rng, lq=40, lk=40, d=size))
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool) if mask_of_pairs else None
    bias = None if bias_shape is None else torch.zeros(bias_shape)
    dma.attention(q, k, v, mask=mask, bias=bias, causal=True, backend="flex")
    assert told == [{"FORCE_USE_FLEX_ATTENTION": True, **({"num_stages": 1} if one else {})}]


def test_one_program_a_configuration(traced, rng):
    """New numbers, masks and biases of known shapes reuse a program; new shapes and delays compile another. torch stops
    compiling a function after a few variants; here every configuration is its own function."""
    for n, delay, programs in ((60, 0, 1), (60, 0, 1), (61, 0, 2), (60, 0, 2), (60, 7, 3), (60, 8, 4), (60, 7, 4),
                               *((n, 0, n - 15) for n in range(20, 29))):
        q, k, v = draw(rng, lq=n, lk=n)
        scores = rng.standard_normal((1, 1, n)).astype(np.float32)
        mask = dma.IntervalMask.top_w(scores, int(rng.integers(3, 9)))
        given = {"mask": mask, "bias": scores, "bias_delay": delay}
        np.testing.assert_allclose(dma.attention(q, k, v, **given, backend="flex"), dma.attention(q, k, v, **given),
                                   atol=1e-5)
        assert len(passes._programs) == programs


# ---- torch ----
@pytest.mark.feature("flex forward", "torch", "autocast")
@pytest.mark.feature("flex forward backward", "torch", "autograd", "torch.compile")
@pytest.mark.parametrize("compiled", [False, True])
def test_torch_gradients(rng, compiled):
    """Through autograd, and through an operator below which the dispatcher has no autograd and no vmap."""
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in draw(rng))
    bias = torch.from_numpy(rng.standard_normal((1, 1, 60)).astype(np.float32)).requires_grad_()
    mask = dma.IntervalMask.sliding_window(60, 9, like=q)

    def loss(backend):
        return dma.attention(q, k, v, mask=mask, bias=bias, backend=backend).sin().sum()

    run = torch.compile(loss, backend="aot_eager") if compiled else loss
    theirs, ours = (torch.autograd.grad(run(backend), [q, k, v, bias]) for backend in ("numpy", "flex"))
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(theirs, ours))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dma.attention(q, k, v, backend="flex").dtype == torch.bfloat16


def test_read_only_and_reversed_arrays(rng):
    q, k, v = draw(rng)
    expected = dma.attention(q, k[:, ::-1], v[:, ::-1])
    q.flags.writeable = False
    np.testing.assert_allclose(dma.attention(q, k[:, ::-1], v[:, ::-1], backend="flex"), expected, atol=1e-6)


def test_varlen_is_refused(rng):
    call = attention_call(*draw(rng), None, None, Options())
    with pytest.raises(NotImplementedError, match=r"^backend='flex' cannot do this: .*varlen"):
        passes.attention(SimpleNamespace(sequences=object(), query=call.query))


# ---- scores and selection ----
@pytest.mark.feature("flex forward", "Scores and selection", "IntervalMask.top_w", "a window per kv head")
@given(problems())
@settings(max_examples=80, deadline=None)
def test_selection(problem):
    scores, window, padding, documents = problem
    for keys in ("prefix", "global"):
        selection_cases.check(scores, window, backend="flex", keys=keys, padding=padding, documents=documents)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 64, 65])
def test_prefix_stop_is_the_definition(rng, dtype, n):
    scores = (rng.integers(-3, 3, (2, 2, n)) / 2).astype(dtype)
    for window in sorted({1, min(2, n), max(1, n - 1), n}):
        found = torch_math.prefix_stop(describe(scores, "scores"), window, None, None)
        assert found.dtype == np.int32 and np.array_equal(found, reference.prefix_stop(scores, window))


def test_a_long_selection(rng):
    scores = rng.standard_normal((1, 2, 20000)).astype(np.float32)
    selection_cases.check(scores, 700, backend="flex")


@pytest.mark.feature("flex forward backward", "Scores and selection", "key_scores")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("form", ["exp", "linear"])
def test_scores_and_their_gradients(rng, dtype, form):
    kind = cases.numpy_dtype(dtype)
    value = rng.standard_normal((2, 50, 3, 8)).astype(kind)
    dt_proj, A, dt_bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 24), 3, 3))
    A /= 10
    dscores = rng.standard_normal((2, 3, 50)).astype(np.float32)
    options = {"dt_bias": dt_bias, "form": form}
    ours, theirs = (dma.key_scores(value, dt_proj, A, backend=backend, **options) for backend in ("flex", "numpy"))
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    ours, theirs = (dma.backward.key_scores_backward(dscores, value, dt_proj, A, backend=backend, **options)
                    for backend in ("flex", "numpy"))
    for x, y in zip(ours, theirs):
        assert x.dtype == y.dtype
        assert np.abs(x.astype(float) - y.astype(float)).max() <= 2**-7 * np.abs(y.astype(float)).max()


def test_gradients_of_scores_that_nobody_uses(rng):
    """A NaN in a value whose score only one head uses propagates to that head's row of ddt_proj, and to no other."""
    value = rng.standard_normal((1, 50, 2, 8)).astype(np.float32)
    dt_proj, A = rng.standard_normal((2, 16)).astype(np.float32), np.float32([0.3, -0.2])
    dscores = rng.standard_normal((1, 2, 50)).astype(np.float32)
    dscores[0, 1, 7] = dscores[0, :, 9] = 0
    value[0, 7, 0, 3] = value[0, 9, 0, 3] = np.nan
    ours, theirs = (dma.backward.key_scores_backward(dscores, value, dt_proj, A, backend=backend)
                    for backend in ("flex", "numpy"))
    assert np.isnan(ours.dt_proj[0]).any() and np.isfinite(ours.dt_proj[1]).all()
    for x, y in zip(ours[:3], theirs):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.feature("flex forward backward", "dynamic_mask_attention", "from scores or values")
def test_the_whole_chain(rng):
    q, k, v = draw(rng, b=2, h=4, g=2)
    dt_proj, A = rng.standard_normal((2, 32)).astype(np.float32), np.float32([0.2, 0.1])
    made = {"dt_proj": dt_proj, "A": A, "window": 7, "form": "linear"}
    found = []
    for backend in ("flex", "numpy"):
        out, lse = dma.dynamic_mask_attention(q, k, v, return_lse=True, backend=backend, **made)
        found.append((out, lse, *dma.backward.dynamic_mask_attention_backward(np.ones_like(q), q, k, v, out, lse,
                                                                              backend=backend, **made)))
    for ours, theirs in zip(*found):
        assert (ours is None and theirs is None) or np.allclose(ours, theirs, atol=1e-4)
