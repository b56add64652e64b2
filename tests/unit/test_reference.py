"""Tests of the oracle: small cases worked out by hand, and torch's own attention."""
import math

import ml_dtypes
import numpy as np
import pytest

from tests.oracle import reference


def test_key_scores_by_hand():
    value = np.array([[[[1.0, 2.0]], [[0.0, -1.0]]]])  # B=1, Lk=2, Hkv=1, D=2
    scores = reference.key_scores(value, [[0.5, 0.25]], [2.0], [-1.0])
    assert scores.shape == (1, 1, 2)
    assert scores[0, 0, 0] == pytest.approx((1 + math.exp(0.0)) ** 2)  # exp(2 log(1 + e^dt))
    assert scores[0, 0, 1] == pytest.approx((1 + math.exp(-1.25)) ** 2)
    linear = reference.key_scores(value, [[0.5, 0.25]], [2.0], [-1.0], form="linear")
    np.testing.assert_allclose(np.exp(linear), scores)


def test_selection_by_hand():
    dense = reference.top_w_dense([[[3.0, 1.0, 2.0, 2.0, np.nan]]], 2)[0, 0].astype(int).tolist()
    assert dense == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 1]]
    shared = reference.top_w_dense([[[3.0, 1.0, 2.0, 2.0, np.nan]]], 3, "global")[0, 0].astype(int)
    assert (shared == [1, 0, 0, 1, 1]).all()
    assert reference.prefix_stop([[[3.0, 1.0, 2.0, 2.0, np.nan]]], 2).tolist() == [[[reference.NEVER, 2, 3, 4,
                                                                                    reference.NEVER]]]


def test_equal_scores_are_a_sliding_window():
    p, j = np.arange(9)[:, None], np.arange(9)
    assert (reference.top_w_dense(np.zeros((1, 1, 9)), 4)[0, 0] == ((j <= p) & (j > p - 4))).all()


def test_documents_select_among_themselves():
    numbers = reference.document_numbers([0, 2, 2, 5], 5)
    assert numbers.tolist() == [[0, 0, 2, 2, 2]]
    assert reference.document_numbers(np.array([[7, 7, 1, 7, 7]]), 5).tolist() == [[0, 0, 1, 2, 2]]
    dense = reference.top_w_dense([[[9.0, 1.0, 0.0, 5.0, 4.0]]], 1, documents=[0, 2, 5])[0, 0].astype(int)
    assert dense.argmax(1).tolist() == [0, 0, 2, 3, 3] and (dense.sum(1) == 1).all()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_what_torch_computes(rng, causal, torch):
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 7, 4, 5), (2, 7, 2, 5), (2, 7, 2, 5)))
    out, lse = reference.attention(q, k, v, causal=causal)
    tq, tk, tv = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
    tk, tv = tk.repeat_interleave(2, 1), tv.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, is_causal=causal).transpose(1, 2)
    np.testing.assert_allclose(out, expected.numpy(), rtol=0, atol=1e-14)
    logits = (tq @ tk.transpose(2, 3)) / math.sqrt(5)
    if causal:
        logits = logits.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -math.inf)
    np.testing.assert_allclose(lse, torch.logsumexp(logits, -1).numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("bias_shape", "mask_shape", "softcap"), [
    ((2, 2, 6), (2, 2, 5, 6), 0.0), ((1, 1, 6), (1, 4, 5, 6), 1.5), ((2, 4, 5, 1), (1, 1, 5, 1), 0.0),
    ((1, 4, 5, 6), (2, 1, 5, 6), 0.7), ((1, 1, 1), (2, 4, 5, 6), 0.0)])
def test_gradients_are_finite_differences(rng, bias_shape, mask_shape, softcap):
    shapes = {"query": (2, 5, 4, 3), "key": (2, 6, 2, 3), "value": (2, 6, 2, 3), "bias": bias_shape}
    x = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    options = {"dense_mask": rng.random(mask_shape) < 0.6, "causal": True, "scale": 0.8, "softcap": softcap}
    dout, dlse = rng.standard_normal((2, 5, 4, 3)), rng.standard_normal((2, 4, 5))

    def loss():
        out, lse = reference.attention(**x, **options)
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    found = reference.attention_gradients(dout, **x, **options, dlse=dlse)
    for gradient, name in zip(found, shapes):
        np.testing.assert_allclose(gradient, _differences(loss, x[name]), rtol=0, atol=1e-8)
    terms = reference.attention_gradient_terms(dout, **x, **options, dlse=dlse)
    assert all(np.abs(gradient).max() <= term for gradient, term in zip(found, terms))


@pytest.mark.parametrize("form", ["exp", "linear"])
def test_score_gradients_are_finite_differences(rng, form):
    x = {name: rng.standard_normal(shape) for name, shape in (("value", (2, 4, 2, 3)), ("dt_proj", (2, 6)), ("A", 2),
                                                              ("dt_bias", 2))}
    dscores = rng.standard_normal((2, 2, 4))
    found = reference.key_scores_gradients(dscores, **x, form=form)
    for gradient, array in zip(found, x.values()):
        expected = _differences(lambda: (reference.key_scores(**x, form=form) * dscores).sum(), array)
        np.testing.assert_allclose(gradient, expected, rtol=1e-7, atol=1e-7)


def _differences(loss, array, step=1e-5) -> np.ndarray:
    """Central differences of ``loss()`` in every element of ``array``."""
    found = np.zeros(array.shape)
    for at in np.ndindex(array.shape):
        kept = array[at]
        above, below = (array.__setitem__(at, kept + sign * step) or loss() for sign in (1, -1))
        array[at] = kept
        found[at] = (above - below) / (2 * step)
    return found


def test_the_plain_computation_has_rounding_errors(rng):
    q, k, v = (rng.standard_normal((1, 40, 1, 32)).astype(np.float16) for _ in range(3))
    ref, plain = reference.attention(q, k, v)[0], reference.same_precision_attention(q, k, v)[0]
    assert plain.dtype == np.float16
    error = np.abs(plain - ref).max()
    assert 0 < error < 2e-3


def test_tf32_by_hand(rng):
    """10 bits of mantissa: spacing 2^-10 at 1, ties away from zero; infinities and NaN stay."""
    x = np.array([1 + 2**-11, 1 + 2**-11 - 2**-23, -1 - 3 * 2**-11, 3.4028235e38, np.inf, np.nan], np.float32)
    assert np.array_equal(reference.rounded_tf32(x), [1 + 2**-10, 1, -1 - 2**-9, np.inf, np.inf, np.nan],
                          equal_nan=True)
    many = rng.standard_normal(1000).astype(np.float32)
    assert np.abs(reference.rounded_tf32(many) / many - 1).max() <= 2**-11


def test_the_plain_computation_through_tf32(rng):
    """Its errors come from rounding operands, so TF32 operands give none; 16-bit types never use TF32.
    """
    q, k, v, dout = (rng.standard_normal((1, 40, 1, 32)).astype(np.float32) for _ in range(4))
    small = [x.astype(np.float16) for x in (q, k, v)]
    assert np.array_equal(reference.same_precision_attention(*small)[0],
                          reference.same_precision_attention(*small, tf32=True)[0])
    one_key = [q, k[:, :1], reference.rounded_tf32(v[:, :1])]
    assert np.array_equal(reference.same_precision_attention(*one_key, tf32=True)[0], one_key[2].repeat(40, axis=1))
    error, plain_error = (np.abs(reference.same_precision_attention(q, k, v, tf32=tf32)[0]
                                 - reference.attention(q, k, v)[0]).max() for tf32 in (True, False))
    assert 100 * plain_error < error < 2e-3
    ref = reference.attention_gradients(dout, q, k, v)
    for exact, plain in zip(ref[:3], reference.same_precision_attention_gradients(dout, q, k, v, tf32=True)):
        assert 2**-15 < np.abs(plain - exact).max() / np.abs(exact).max() < 2**-8


@pytest.mark.parametrize(("dtype", "value", "expected"), [
    (np.float16, 1.0, 2.0**-11), (np.float16, 1.999, 2.0**-11), (np.float16, 0.0, 2.0**-25),
    (np.float16, 1e-7, 2.0**-25),
    (ml_dtypes.bfloat16, 4.0, 2.0**-6), (np.float32, 1.0, 2.0**-24)])
def test_one_rounding(dtype, value, expected):
    assert reference.one_rounding(value, dtype) == expected


def test_the_tolerance_rejects_errors(rng):
    ref = rng.standard_normal((3, 4))
    out = ref.astype(np.float16)
    reference.assert_matches_reference(out, ref, out, np.float16)
    for error in (np.nan, np.inf, 5.0, out[0, 0] * np.float16(1.01)):
        wrong = out.copy()
        wrong[0, 0] = error
        with pytest.raises(AssertionError):
            reference.assert_matches_reference(wrong, ref, out, np.float16)
