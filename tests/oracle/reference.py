"""The oracle: float64, dense, slow and obvious, straight from sections 1 to 6, 12 and 16 of the specification.

Written independently of the backends: selection ranks the candidates of every position from scratch, and attention
loops over queries and reads only visible keys. Letters: ``B`` batch, ``H`` heads, ``Hkv`` kv heads, ``Lq``, ``Lk``
lengths, ``D`` head dim; query ``i`` is at position ``p_i = i + Lk - Lq``.
"""
import math
from typing import Any

import ml_dtypes
import numpy as np

NEVER = 2**31 - 1
TF32 = "tf32"  # the type to which the tensor cores round float32 operands


def _f64(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def key_scores(value, dt_proj, A, dt_bias=None, form="exp") -> np.ndarray:
    """float64 ``(B, Hkv, Lk)`` of ``value (B, Lk, Hkv, D)``, ``dt_proj (Hkv, Hkv*D)``, ``A (Hkv,)``."""
    value, dt_proj, A = _f64(value), _f64(dt_proj), _f64(A)
    batch, length, heads, size = value.shape
    scores = np.zeros((batch, heads, length))
    for b in range(batch):
        for j in range(length):
            for g in range(heads):
                dt = float(np.dot(dt_proj[g], value[b, j].reshape(heads * size)))
                if dt_bias is not None:
                    dt += float(dt_bias[g])
                softplus = max(dt, 0.0) + math.log1p(math.exp(-abs(dt)))
                scores[b, g, j] = math.exp(A[g] * softplus) if form == "exp" else A[g] * softplus
    return scores


# ---- selection ----
def _ranks(scores) -> list[tuple[bool, float, int]]:
    """Comparable ranks of one row: NaN above everything, then the score (-0 == +0), then the newest."""
    return [(math.isnan(s), 0.0 if math.isnan(s) else s, j) for j, s in enumerate(_f64(scores).tolist())]


def document_numbers(documents, key_length: int) -> np.ndarray:
    """The number of every key's document, ``(1|B, Lk)``, from cumulative lengths ``(n + 1,)`` or ids ``(B, Lk)``."""
    documents = np.asarray(documents)
    if documents.ndim == 1:
        row = [n for n in range(len(documents) - 1) for _ in range(documents[n + 1] - documents[n])]
        assert len(row) == key_length
        return np.array([row], dtype=np.int64).reshape(1, key_length)
    numbers = np.zeros(documents.shape, np.int64)
    for b in range(documents.shape[0]):
        for j in range(1, key_length):
            numbers[b, j] = numbers[b, j - 1] + int(documents[b, j] != documents[b, j - 1])
    return numbers


def top_w_dense(scores, window, keys="prefix", padding=None, documents=None, query_length=None) -> np.ndarray:
    """bool ``(B, Hkv, Lq, Lk)``: the definition of section 3, position by position (``Lq`` defaults to ``Lk``).
    ``window``: an int, or one per head."""
    scores = np.asarray(scores)
    batch, heads, n = scores.shape
    query_length = n if query_length is None else query_length
    windows = np.broadcast_to(window, heads)
    numbers = np.zeros((1, n), np.int64) if documents is None else document_numbers(documents, n)
    padding = np.ones((1, n), bool) if padding is None else np.asarray(padding)
    dense = np.zeros((batch, heads, query_length, n), bool)
    for b in range(batch):
        real = padding[b % len(padding)].tolist()
        number = numbers[b % len(numbers)].tolist()
        for h in range(heads):
            rank = _ranks(scores[b, h])
            for i in range(query_length):
                p = i + n - query_length
                own = number[max(p, 0)] if n else 0  # positions before the first key belong to the first document
                candidates = [j for j in range(n) if real[j] and number[j] == own and (j <= p or keys == "global")]
                kept = sorted(candidates, key=lambda j: rank[j], reverse=True)[:windows[h]]
                dense[b, h, i, kept] = True
    return dense


def prefix_stop(scores, window, padding=None, document=None) -> np.ndarray:
    """int64 ``(B, Hkv, Lk)``: first position at which ``window`` keys of higher rank (document, score, j) exist.

    ``NEVER`` if there is none, ``j`` for a key hidden by padding. ``document (1|B, Lk)``: first key of the document.
    """
    scores = np.asarray(scores)
    batch, heads, n = scores.shape
    windows, stop = np.broadcast_to(window, heads), np.full(scores.shape, NEVER, np.int64)
    for b in range(batch):
        real = [True] * n if padding is None else padding[b % len(padding)].tolist()
        group = [0] * n if document is None else document[b % len(document)].tolist()
        for h in range(heads):
            rank = list(zip(group, _ranks(scores[b, h])))
            for j in range(n):
                better = [m for m in range(n) if real[m] and rank[m] > rank[j]]
                if not real[j]:
                    stop[b, h, j] = j
                elif len(better) >= windows[h]:
                    stop[b, h, j] = max(j, sorted(better)[windows[h] - 1])
    return stop


# ---- attention ----
def visible_pairs(shape, dense_mask=None, causal=False) -> np.ndarray:
    """Visible pairs, bool ``(B, H, Lq, Lk)``, of a mask ``(1|B, 1|Hkv|H, 1|Lq, 1|Lk)``, and of causality if
    requested."""
    lq, lk = shape[2:]
    seen = np.ones(shape, bool) if dense_mask is None else per_head(np.asarray(dense_mask), shape)
    if causal:
        seen = seen & (np.arange(lk) <= np.arange(lq)[:, None] + lk - lq)
    return seen


def per_head(array, shape) -> np.ndarray:
    """Broadcast ``({1|B}, {1|Hkv|H}, {1|Lq}, {1|Lk})``, or a key bias of three axes, to ``(B, H, Lq, Lk)``."""
    array = array[:, :, None] if array.ndim == 3 else array
    if 1 < array.shape[1] < shape[1]:
        array = np.repeat(array, shape[1] // array.shape[1], axis=1)
    return np.broadcast_to(array, shape)


def far_pairs(lq, lk, bias_delay=0) -> np.ndarray:
    """bool ``(Lq, Lk)``: the pairs to which a delayed bias applies (section 16); without a delay, all pairs."""
    distance = np.arange(lq)[:, None] + lk - lq - np.arange(lk)
    return (distance >= bias_delay) | (bias_delay == 0)


def _seen_and_added(shape, dense_mask, bias, causal, bias_delay) -> tuple[np.ndarray, np.ndarray | None]:
    """The visible pairs and what is added to their logits, both ``(B, H, Lq, Lk)``."""
    seen = visible_pairs(shape, dense_mask, causal)
    if bias is None:
        return seen, None
    added = per_head(np.asarray(bias), shape)
    added = np.where(far_pairs(*shape[2:], bias_delay), added, added.dtype.type(0))
    return seen & (added != -np.inf), added


def attention(query, key, value, dense_mask=None, bias=None, causal=False, scale=None, softcap=0.0,
              sinks=None, bias_delay=0) -> tuple[np.ndarray, np.ndarray]:
    """out ``(B, Lq, H, Dv)`` and lse ``(B, H, Lq)``, float64."""
    return _softmax_rows(query, key, value, dense_mask, bias, causal, scale, softcap, sinks, bias_delay, np.float64,
                         np.float64)


def rounded_tf32(array) -> np.ndarray:
    """float32 with 10 bits of mantissa instead of 23, rounded to nearest, ties away from zero."""
    array = np.ascontiguousarray(array, np.float32)
    bits = array.view(np.uint32)
    return np.where(np.isfinite(array), (bits + np.uint32(0x1000)) & np.uint32(0xffffe000), bits).view(np.float32)


def _operand(array, kind, wide) -> np.ndarray:
    """A factor of a matrix product, rounded to ``kind``, for a product in ``wide``."""
    return rounded_tf32(array) if kind is TF32 else array.astype(kind).astype(wide)


def same_precision_attention(query, key, value, dense_mask=None, bias=None, causal=False, scale=None,
                             softcap=0.0, sinks=None, bias_delay=0, *,
                             tf32=False) -> tuple[np.ndarray, np.ndarray]:
    """The plain same-precision computation of section 12: accumulated in float32, probabilities rounded to the type of
    the input before the second product, the output rounded to it (float64 for float64).

    ``tf32``: float32 inputs are multiplied on tensor cores. Section 12 for 16-bit types then applies with TF32: the
    factors of both products (query and key, probabilities and value) are rounded to TF32 once, to nearest. Sums,
    softmax and output are float32.
    """
    kind = np.asarray(query).dtype
    wide = np.float64 if kind == np.float64 else np.float32
    rounded = TF32 if tf32 and kind == np.float32 else kind
    out, lse = _softmax_rows(query, key, value, dense_mask, bias, causal, scale, softcap, sinks, bias_delay, wide,
                             rounded)
    with np.errstate(all="ignore"):
        return out.astype(kind), lse


def _softmax_rows(query, key, value, dense_mask, bias, causal, scale, softcap, sinks, bias_delay, wide, rounded):
    batch, lq, heads, size = query.shape
    lk, kv_heads = key.shape[1:3]
    shape = (batch, heads, lq, lk)
    seen, added = _seen_and_added(shape, dense_mask, bias, causal, bias_delay)
    scale = wide(1 / math.sqrt(size) if scale is None else scale)
    out, lse = np.zeros((batch, lq, heads, value.shape[3]), wide), np.full((batch, heads, lq), -np.inf, wide)
    sinks = np.full(heads, -np.inf, wide) if sinks is None else np.asarray(sinks).astype(wide)
    with np.errstate(all="ignore"):
        for b in range(batch):
            for h in range(heads):
                g = h // (heads // kv_heads)
                q, k, v = (_operand(x, rounded, wide) for x in (query[b, :, h], key[b, :, g], value[b, :, g]))
                for i in range(lq):
                    js = np.flatnonzero(seen[b, h, i])
                    s = scale * (k[js] @ q[i])
                    if softcap > 0:
                        s = wide(softcap) * np.tanh(s / wide(softcap))
                    if added is not None:
                        s = s + added[b, h, i, js].astype(wide)
                    m = np.append(s, sinks[h]).max()
                    if m == -np.inf:
                        continue  # no visible key, or none with any weight: out 0, lse -inf
                    p = np.exp(s - m)
                    total = p.sum() + np.exp(sinks[h] - m)
                    out[b, i, h] = (_operand(p, rounded, wide) @ v[js]) / total
                    lse[b, h, i] = m + np.log(total)
    return out, lse


# ---- gradients ----
def attention_gradients(dout, query, key, value, dense_mask=None, bias=None, causal=False, scale=None, softcap=0.0,
                        dlse=None, sinks=None, bias_delay=0) -> tuple[np.ndarray, ...]:
    """dquery, dkey, dvalue, dbias of section 6 in float64 (dbias None without a bias), and dsinks with sinks."""
    return _gradients(dout, query, key, value, dense_mask, bias, causal, scale, softcap, dlse, sinks, bias_delay)


def same_precision_attention_gradients(dout, query, key, value, dense_mask=None, bias=None, causal=False, scale=None,
                                       softcap=0.0, dlse=None, sinks=None, bias_delay=0, *,
                                       tf32=False) -> tuple[np.ndarray, ...]:
    """The plain same-precision computation: from the rounded ``out``, accumulated in float32, ``p`` and ``dx`` rounded
    to the type of the input before they are multiplied, every gradient rounded once.

    ``tf32``: as in ``same_precision_attention``, for all five products. ``delta`` is no matrix product: float32.
    """
    kind = np.asarray(query).dtype
    wide = np.float64 if kind == np.float64 else np.float32
    rounded = TF32 if tf32 and kind == np.float32 else kind
    found = _gradients(dout, query, key, value, dense_mask, bias, causal, scale, softcap, dlse, sinks, bias_delay, wide,
                       rounded)
    with np.errstate(all="ignore"):
        return tuple(None if x is None else x.astype(np.asarray(like).dtype)
                     for x, like in zip(found, (query, key, value, bias, sinks)))


def attention_gradient_terms(*arguments, **options) -> list[float]:
    """For each gradient, the largest sum of absolute terms of an entry, which limits cancellation. For example, ``dout
    . v - delta`` is exactly 0 if a query sees one key."""
    found = _gradients(*arguments, **options, absolute=True)
    return [0.0 if x is None else _largest(x) for x in found]


def _gradients(dout, query, key, value, dense_mask=None, bias=None, causal=False, scale=None, softcap=0.0, dlse=None,
               sinks=None, bias_delay=0, wide=np.float64, rounded=np.float64, absolute=False):
    """``absolute``: every sum of signed terms becomes the sum of their absolute values."""
    batch, lq, heads, size = query.shape
    lk, kv_heads = key.shape[1:3]
    shape = (batch, heads, lq, lk)
    seen, added = _seen_and_added(shape, dense_mask, bias, causal, bias_delay)
    scale = wide(1 / math.sqrt(size) if scale is None else scale)
    outs, lses = _softmax_rows(query, key, value, dense_mask, bias, causal, scale, softcap, sinks, bias_delay, wide,
                               rounded)
    dq, dk, dv = (np.zeros(x.shape, wide) for x in (query, key, value))
    dsinks = None if sinks is None else np.zeros(heads, wide)
    ds_all = np.zeros(shape, wide)
    with np.errstate(all="ignore"):
        for b, h, i in np.ndindex(batch, heads, lq):
            js, g = np.flatnonzero(seen[b, h, i]), h // (heads // kv_heads)
            if lses[b, h, i] == -np.inf:
                continue
            exact = wide if rounded is TF32 else rounded  # the type of out and dout
            do, o = (x[b, i, h].astype(exact).astype(wide) for x in (dout, outs))
            delta = do @ o - (0 if dlse is None else wide(dlse[b, h, i]))
            q, do, k, v = (_operand(x, rounded, wide)
                           for x in (query[b, i, h], dout[b, i, h], key[b, js, g], value[b, js, g]))
            x = scale * (k @ q)
            slope = 1.0 if softcap == 0 else 1 - np.tanh(x / wide(softcap)) ** 2
            s = wide(softcap) * np.tanh(x / wide(softcap)) if softcap > 0 else x
            if added is not None:
                s = s + added[b, h, i, js].astype(wide)
            p = np.exp(s - lses[b, h, i])
            if absolute:
                q, do, k, v = (np.abs(a) for a in (q, do, k, v))
                delta = -(do @ np.abs(o) + (0 if dlse is None else abs(dlse[b, h, i])))
            ds = p * (v @ do - delta)
            if sinks is not None:
                dsinks[h] -= np.exp(wide(sinks[h]) - lses[b, h, i]) * delta
            p, dx = (_operand(weights, rounded, wide) for weights in (p, ds * slope))
            dv[b, js, g] += np.outer(p, do)
            dq[b, i, h] = dx @ k
            dk[b, js, g] += np.outer(dx, q)
            ds_all[b, h, i, js] = ds
        scale = abs(scale) if absolute else scale
        dbias = None if bias is None else summed_like(np.where(far_pairs(lq, lk, bias_delay), ds_all, 0),
                                                      np.asarray(bias).shape)
        return (scale * dq, scale * dk, dv, dbias, *([] if sinks is None else [dsinks]))


def summed_like(array, shape) -> np.ndarray:
    """``(B, H, Lq, Lk)`` summed over the axes along which something of this shape was broadcast (see ``per_head``)."""
    target = (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape
    if 1 < target[1] < array.shape[1]:
        b, h, lq, lk = array.shape
        array = array.reshape(b, target[1], h // target[1], lq, lk).sum(2)
    for axis in range(4):
        if target[axis] == 1:
            array = array.sum(axis, keepdims=True)
    return array.reshape(shape)


def key_scores_gradients(dscores, value, dt_proj, A, dt_bias=None, form="exp", wide=np.float64) -> list[np.ndarray]:
    """dvalue, ddt_proj, dA, ddt_bias, accumulated in ``wide``."""
    dscores, value, dt_proj, A = (np.asarray(x).astype(wide) for x in (dscores, value, dt_proj, A))
    batch, length, heads, size = value.shape
    rows = value.reshape(batch, length, heads * size)
    dt = np.einsum("bjx,gx->bgj", rows, dt_proj) + (0 if dt_bias is None else np.asarray(dt_bias, wide)[:, None])
    softplus, slope = np.logaddexp(0, dt).astype(wide), 1 / (1 + np.exp(-dt))
    dstate = dscores * np.exp(A[:, None] * softplus) if form == "exp" else dscores
    ddt = dstate * A[:, None] * slope
    return [np.einsum("bgj,gx->bjx", ddt, dt_proj).reshape(value.shape), np.einsum("bgj,bjx->gx", ddt, rows),
            (dstate * softplus).sum((0, 2)), ddt.sum((0, 2))]


# ---- tolerances ----
def _largest(array) -> float:
    return float(np.max(np.abs(array[np.isfinite(array)]), initial=0.0))


def check_norm(found: np.ndarray, expected: np.ndarray, bound: float = 1e-2) -> None:
    """Check the norm of the error, relative to that of the expected array."""
    x, y = found.astype(np.float64), expected.astype(np.float64)
    assert np.isfinite(x).all() and np.linalg.norm(x - y) <= bound * np.linalg.norm(y)


def one_rounding(largest: float, dtype) -> float:
    """Half the spacing of ``dtype`` at ``largest``: the largest rounding error of a result of this size."""
    info = ml_dtypes.finfo(dtype)
    smallest = float(info.smallest_subnormal)
    if largest == 0:
        return smallest / 2
    return max(2.0 ** math.floor(math.log2(largest)) * float(info.eps), smallest) / 2


def error_and_allowed(out, reference, plain, dtype, factor=2, terms=0.0) -> tuple[float, float, float]:
    """``max|out - ref|``, ``max|plain - ref|``, and the limit of section 12: ``2 max|plain - ref| + one rounding of the
    output`` for 16-bit types; for gradients, ``factor=3`` times the error of the plain computation.

    ``terms``: the largest sum of absolute terms, if much of a sum may cancel. A float32 sum (float64 for float64) has
    an error of some roundings of that size in any order; 16 are allowed.

    For float32 and float64 the output is rounded no more coarsely than every step of the accumulation, so the order of
    a sum, which is free, moves the result by several roundings: 16 are allowed. (Where float32 went through
    TF32 the plain error, some 2^13 roundings of float32, decides.) Only finite entries are compared.
    """
    out, plain, reference = _f64(out), _f64(plain), _f64(reference)
    finite = np.isfinite(reference)
    error, error_plain = _largest(np.where(finite, out, 0) - np.where(finite, reference, 0)), _largest(
        np.where(finite, plain, 0) - np.where(finite, reference, 0))
    roundings = 1 if np.dtype(dtype).itemsize == 2 else 16
    allowed = factor * error_plain + roundings * one_rounding(_largest(reference), dtype)
    if terms:
        allowed += 16 * one_rounding(terms, np.float64 if np.dtype(dtype) == np.float64 else np.float32)
    return error, error_plain, allowed


def misplaced(out, reference) -> str:
    """A message that says where NaN and infinities do not match; empty if they do."""
    out, reference = _f64(out), _f64(reference)
    for name, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(out) != test(reference))
        if len(wrong):
            return f"{name} differs in {len(wrong)} entries, first {wrong[0]}"
    return ""


def assert_matches_reference(out, reference, plain, dtype, factor=2, terms=0.0) -> None:
    """Section 12, see ``error_and_allowed``; NaN and infinities must be in the same entries."""
    assert np.shape(out) == np.shape(reference)
    wrong = misplaced(out, reference)
    assert not wrong, wrong
    error, error_plain, allowed = error_and_allowed(out, reference, plain, dtype, factor, terms)
    print(f"error {error:.3g}, plain {error_plain:.3g}, allowed {allowed:.3g}")
    assert error <= allowed, f"error {error:.3g} exceeds {allowed:.3g} (plain same-precision error {error_plain:.3g})"


def check_attention(found: Any, query, key, value, *, tf32: bool = False, **options: Any) -> None:
    """``found``: ``out``, or ``(out, lse)``. ``options``: those of ``attention``."""
    rows, found = (query, key, value), found if isinstance(found, tuple) else (found,)
    for ours, exact, plain in zip(found, attention(*rows, **options),
                                  same_precision_attention(*rows, tf32=tf32, **options)):
        assert_matches_reference(ours, exact, plain, ours.dtype)


def check_attention_gradients(found: Any, dout, query, key, value, *, tf32: bool = False, **options: Any) -> None:
    """``found``: gradients of query, key, value and bias; those that are None are not checked."""
    given = dout, query, key, value
    for ours, exact, plain, terms in zip(found, attention_gradients(*given, **options),
                                         same_precision_attention_gradients(*given, tf32=tf32, **options),
                                         attention_gradient_terms(*given, **options)):
        if ours is not None:
            assert_matches_reference(ours.reshape(exact.shape), exact, plain, ours.dtype, factor=3, terms=terms)
