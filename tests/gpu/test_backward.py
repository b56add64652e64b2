"""Gradients of the CUDA backend on a GPU: the grid against the oracle, long sequences against float64 autograd,
reproducible bits, and values that must not influence them. Everything here is marked ``gpu``."""
import pytest

import cupy_dma as dma
from cupy_dma.backends.cuda.attention import backward_chunks, sm90_backward, sm90_stored
from cupy_dma.backends.cuda.runtime.program import fresh
from cupy_dma.backward import attention_backward, dynamic_mask_attention_backward, key_scores_backward
from tests.gpu.sm90_tiles import portable
from tests.gpu.test_forward import BY_TURNS, FORWARD, converter, draw, draw_scores
from tests.oracle import cases, score_cases

pytestmark = pytest.mark.gpu


# ---- correctness ----
@pytest.mark.feature("cuda backward", "attention", "every case", but=("delay-", "float64-D"))
@BY_TURNS
def test_backward_grid(case, name):
    pytest.importorskip(name)
    with_dlse = case.name.startswith(("heads-", "mask-"))
    found = cases.run_backward(case, converter(name), with_dlse=with_dlse)
    cases.check_backward(case, found, with_dlse=with_dlse, tf32=True)


@pytest.mark.parametrize("case", [c for c in FORWARD if c.dtype != "float32"], ids=str)
def test_backward_grid_in_portable_kernels(case):
    """Cases that a Hopper GPU would run in its own kernel."""
    with portable():
        cases.check_backward(case, cases.run_backward(case, converter("cupy")))


@pytest.mark.parametrize("case", [c for c in FORWARD if c.name.startswith(("bfloat16-D", "float32-D", "mask-",
                                                                           "heads-"))], ids=str)
@pytest.mark.parametrize("limit", [99, 163])
def test_tiles_of_smaller_gpus(case, limit):
    with portable(shared_memory=limit * 1024):
        cases.check_backward(case, cases.run_backward(case, converter("cupy")), tf32=True)


def dense_gradients(torch, dout, query, key, value, scores, mask, dtype, softcap=0.0, bias_delay=0):
    """Autograd through the dense definition in ``dtype``."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (query, key, value))
    bias = scores.to(dtype).requires_grad_()
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v, wide_bias = (x.repeat_interleave(group, dim) for x, dim in ((k, 2), (v, 2), (bias, 1)))
    s = torch.einsum("bihd,bjhd->bhij", q, wide_k) * q.shape[3] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    position = torch.arange(q.shape[1], device=s.device)[:, None] + k.shape[1] - q.shape[1]
    far = position - torch.arange(k.shape[1], device=s.device) >= bias_delay
    s = torch.where(far | (bias_delay == 0), s + wide_bias[:, :, None], s)
    seen = mask.to_dense(q.shape[1]).repeat_interleave(group, 1)
    p = torch.where(seen, torch.softmax(s.masked_fill(~seen, float("-inf")), -1), 0)  # 0 in a row without visible keys
    out = torch.einsum("bhij,bjhd->bihd", p, wide_v)
    return torch.autograd.grad(out, (q, k, v, bias), dout.to(dtype))


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (80, "bfloat16"),
                                                 (256, "bfloat16"), (64, "float32"), (128, "float32"),
                                                 (250, "float32")])
@pytest.mark.parametrize("kind", ["iid", "recency", "increasing", "global"])
def test_long_sequences(torch, kind, head_dim, dtype):
    """Several super-tiles, with keys visible in many of them, against float64."""
    n, window = 3000, 300
    q, k, v = draw(torch, n, n, 4, 2, head_dim, dtype=getattr(torch, dtype))
    scores = draw_scores(torch, 1, 2, n)
    if kind == "recency":
        scores += 6 * torch.arange(n, device="cuda") / n
    if kind == "increasing":
        scores = scores.sort(-1).values
    mask = dma.IntervalMask.top_w(scores, window, keys="global" if kind == "global" else "prefix")
    if kind == "global":
        mask = mask & dma.IntervalMask.causal(n, like=q)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    dout = torch.randn_like(out)
    found = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores)
    expected = dense_gradients(torch, dout, q, k, v, scores, mask, torch.float64)
    for name, g, ref in zip(("query", "key", "value", "bias"), found, expected):
        error = (g.double() - ref).norm() / ref.norm()
        print(f"d{name}: relative error {error:.2e}")
        assert error < (2e-3 if name == "bias" or dtype == "float32" else 6e-3), name
        dead = ~(mask.start < mask.stop).expand(1, 2, n)
        if name in ("key", "value"):
            assert not g.transpose(1, 2)[dead].any()


@pytest.mark.feature("cuda backward", "Scores and selection", "key_scores")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("shape", [(2, 333, 1, 64), (1, 1000, 8, 128), (2, 77, 3, 33), (1, 100, 20, 64), (1, 0, 2, 8)])
def test_key_scores_backward(dtype, form, shape):
    score_cases.check_backward(shape, dtype, form, converter("cupy"))


@pytest.mark.feature("cuda forward backward", "dynamic_mask_attention", "from scores or values")
def test_the_whole_chain(torch):
    """dynamic_mask_attention_backward against its stages, with both contributions to dvalue."""
    q, k, v = draw(torch, 500, 500, 4, 2, 64)
    weight, a = torch.randn(2, 128, device="cuda") / 11, torch.ones(2, device="cuda")
    scores = dma.key_scores(v, weight, a)
    mask = dma.IntervalMask.top_w(scores, 60)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    dout = torch.randn_like(out)
    parts = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, deterministic=True)
    whole = dynamic_mask_attention_backward(dout, q, k, v, out, lse, window=60, dt_proj=weight, A=a, deterministic=True)
    chained = key_scores_backward(parts.bias, v, weight, a)
    assert torch.equal(whole.query, parts.query) and torch.equal(whole.key, parts.key)
    assert torch.equal(whole.dt_proj, chained.dt_proj) and torch.equal(whole.A, chained.A)
    both = parts.value.float() + chained.value.float()
    assert (whole.value.float() - both).abs().max() <= 2**-7 * both.abs().max()


# ---- the same bits ----
@pytest.mark.feature("cuda backward", "attention", "bitwise")
@pytest.mark.parametrize(("n", "heads", "batch", "head_dim", "dtype", "window", "repeats"), [
    *((2000, (4, 2), 1, *kind, 300, 50) for kind in ((64, "bfloat16"), (128, "bfloat16"), (64, "float32"),
                                                     (128, "float32"))),
    (8192, (8, 4), 2, 16, "bfloat16", 128, 200)])
def test_the_same_bits_every_time(torch, n, heads, batch, head_dim, dtype, window, repeats):
    """Lists are rebuilt each time, every second time on another stream; finally a small head dim with many blocks."""
    q, k, v = draw(torch, n, n, *heads, head_dim, batch=batch, dtype=getattr(torch, dtype))
    scores = draw_scores(torch, batch, heads[1], n)
    mask = dma.IntervalMask.top_w(scores, window)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    dout, stream = torch.randn_like(out), torch.cuda.Stream()
    first = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, deterministic=True)
    torch.cuda.synchronize()
    for i in range(repeats):
        mask._cache.clear()
        with torch.cuda.stream(stream if i % 2 else torch.cuda.current_stream()):
            again = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, deterministic=True)
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(first, again)), i


def test_heads_and_batch_can_be_permuted(torch):
    q, k, v = draw(torch, 300, 300, 4, 4, 64, batch=3)
    scores = draw_scores(torch, 3, 4, 300)

    def gradients(q, k, v, scores, dout=None):
        mask = dma.IntervalMask.top_w(scores, 50)
        out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
        return attention_backward(out if dout is None else dout, q, k, v, out, lse, mask=mask, bias=scores,
                                  deterministic=True)

    b, h = [2, 0, 1], [3, 1, 0, 2]
    straight = gradients(q, k, v, scores)
    moved = gradients(*(x[b][:, :, h] for x in (q, k, v)), scores[b][:, h])
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(straight, name)[b][:, :, h], getattr(moved, name))
    assert torch.equal(straight.bias[b][:, h], moved.bias)


# ---- invisible values, and gradients that were not requested ----
@pytest.mark.feature("cuda backward", "attention", "keys that no query sees")
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_what_nobody_sees_changes_no_bit(torch, softcap):
    n = 600
    q, k, v = draw(torch, n, n, 2, 1, 64)
    scores = draw_scores(torch, 1, 1, n)
    real = torch.rand(1, n, device="cuda") < 0.7
    for mask in (dma.IntervalMask.top_w(scores, 60, padding=real), dma.IntervalMask.padding(real)):
        out, lse = dma.attention(q, k, v, mask=mask, bias=scores, softcap=softcap, return_lse=True)
        dout = torch.randn_like(out)
        first = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, softcap=softcap, deterministic=True)
        k2, v2 = k.clone(), v.clone()
        k2[:, ~real[0]], v2[:, ~real[0]] = float("nan"), float("inf")
        again = attention_backward(dout, q, k2, v2, out, lse, mask=mask, bias=scores, softcap=softcap,
                                   deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again))
        for g in (first.key, first.value):
            assert not g[:, ~real[0]].any()


def dense_masks(torch, n):
    """Dense masks by name, (1, 1|2|4, n, n), each with its options, over one or several super-tiles."""
    columns = torch.rand(1, 1, 1, n, device="cuda") < 0.06
    tiles = torch.rand(1, 2, -(-n // 128), -(-n // 128), device="cuda") < 0.125
    blocks = tiles.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :n, :n]
    return {"columns": columns.expand(1, 1, n, n).contiguous(),
            "holes in columns": columns & (torch.rand(1, 4, n, n, device="cuda") < 0.5),
            "top-w": dma.IntervalMask.top_w(draw_scores(torch, 1, 2, n), n // 8).to_dense(n),
            "tiles": blocks.contiguous(), "all": torch.ones(1, 1, n, n, dtype=torch.bool, device="cuda")}


@pytest.mark.parametrize("kind", ["columns", "holes in columns", "top-w", "tiles", "all"])
@pytest.mark.parametrize(("head_dim", "dtype", "bias_heads"), [(128, "bfloat16", 0), (64, "float16", 4),
                                                               (128, "bfloat16", 1), (80, "float32", 2)])
def test_listed_keys_under_dense_masks(torch, kind, head_dim, dtype, bias_heads):
    """Gradients over several super-tiles against float64 autograd, the same bits every time, NaN in unseen keys."""
    n = 2500
    q, k, v = draw(torch, n, n, 4, 2, head_dim, dtype=getattr(torch, dtype))
    mask = dense_masks(torch, n)[kind]
    bias = torch.randn(1, bias_heads, n, n, device="cuda", dtype=q.dtype) if bias_heads else None
    out, lse = dma.attention(q, k, v, mask=mask, bias=bias, return_lse=True)
    dout = torch.randn_like(out)
    first = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=bias, deterministic=True)
    for _ in range(20):
        again = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=bias, deterministic=True)
        assert all(x is None or torch.equal(x, y) for x, y in zip(first, again))

    wide = mask.repeat_interleave(4 // mask.shape[1], 1)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    s = torch.einsum("bihd,bjhd->bhij", inputs[0], inputs[1].repeat_interleave(2, 2)) * head_dim**-0.5
    if bias is not None:
        s = s + bias.double().repeat_interleave(4 // bias_heads, 1)
    p = torch.where(wide, torch.softmax(s.masked_fill(~wide, float("-inf")), -1), 0)
    dense = torch.einsum("bhij,bjhd->bihd", p, inputs[2].repeat_interleave(2, 2))
    for name, g, ref in zip(("query", "key", "value"), first, torch.autograd.grad(dense, inputs, dout.double())):
        error = (g.double() - ref).norm() / ref.norm()
        print(f"d{name}: relative error {error:.2e}")
        assert error < (2e-3 if dtype == "float32" else 6e-3), name

    unseen = ~mask.any(2).repeat_interleave(2 // min(mask.shape[1], 2), 1)[0]
    unseen = unseen.unflatten(0, (2, -1)).all(1)  # (kv heads, keys)
    k[0].transpose(0, 1)[unseen], v[0].transpose(0, 1)[unseen] = float("nan"), float("inf")
    again = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=bias, deterministic=True)
    assert all(x is None or torch.equal(x, y) for x, y in zip(first, again))
    assert not first.key[0].transpose(0, 1)[unseen].any() and not first.value[0].transpose(0, 1)[unseen].any()


def test_partial_sums_of_dense_masks_are_linear_in_memory(torch):
    """Apart from the mask itself and its bits, memory for a mask with few visible columns grows with N."""
    def extra(n):
        q, k, v = draw(torch, n, n, 16, 8, 128)
        mask = (torch.rand(1, 1, 1, n, device="cuda") < 0.06).expand(1, 1, n, n).contiguous()
        out, lse = dma.attention(q, k, v, mask=mask, return_lse=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention_backward(out, q, k, v, out, lse, mask=mask)
        return torch.cuda.max_memory_allocated() - before - n * n // 4  # bits and lists of the query pass

    half, whole = extra(8192), extra(16384)
    print(f"{half / 2**20:.0f} MiB at 8192, {whole / 2**20:.0f} MiB at 16384")
    assert whole < 2.2 * half and whole < 2**30


def test_rows_that_see_nothing(torch):
    """With more queries than keys, the first rows see no key: their gradients are 0, and their values influence
    nothing."""
    q, k, v = draw(torch, 200, 120, 2, 1, 64)
    scores = draw_scores(torch, 1, 1, 120)
    mask = dma.IntervalMask.top_w(scores, 30)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    dout = torch.randn_like(out)
    first = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, deterministic=True)
    assert not first.query[:, :80].any() and first.query[:, 80:].any()
    q[:, :80], dout[:, :80] = float("nan"), float("inf")
    again = attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, deterministic=True)
    assert torch.equal(first.key, again.key) and torch.equal(first.value, again.value)
    assert torch.equal(first.bias, again.bias) and torch.equal(first.query[:, 80:], again.query[:, 80:])


@pytest.mark.parametrize("stored", [False, None])
def test_memory_is_linear(torch, stored):
    """Forward and backward at H16/8, D128, w=2048: extra memory is linear in N, at N=131072 at most 4 GiB with the
    query pass, and by default that plus dS."""
    def extra(n):
        q, k, v = draw(torch, n, n, 16, 8, 128)
        scores = draw_scores(torch, 1, 8, n)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mask = dma.IntervalMask.top_w(scores, 2048)
        out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
        attention_backward(out, q, k, v, out, lse, mask=mask, bias=scores)
        return torch.cuda.max_memory_allocated() - before

    with fresh(stored=stored):
        half, whole = extra(65536), extra(131072)
    print(f"{half / 2**20:.0f} MiB at 65536, {whole / 2**20:.0f} MiB at 131072")
    assert whole <= 4 * 2**30 + (0 if stored is False else sm90_stored.max_stored()) and whole < 2.2 * half


@pytest.mark.parametrize("batch", [1, 3])
def test_in_chunks(torch, batch, monkeypatch):
    """A backward pass in chunks, through autograd. With fewer tiles the key lists, and so the sums in dq, may have
    another order: dq agrees within roundings and is reproducible; all other gradients have the bits of the unchunked
    pass."""
    from cupy_dma.torch import entry

    monkeypatch.setattr(sm90_backward, "MIN_TILES", 0.0)  # otherwise small chunks use other kernels
    monkeypatch.setattr(sm90_backward, "LISTED_STEPS", 0.0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, 3000, heads, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
               for heads in (8, 4, 4))
    scores = torch.randn(batch, 4, 3000, device="cuda").requires_grad_()
    dout, found = torch.randn_like(q), []
    for most in (backward_chunks.MAX_SUMS, 1 << 20):
        monkeypatch.setattr(backward_chunks, "MAX_SUMS", most)
        monkeypatch.setattr(entry, "_known", {})
        with fresh():  # earlier programs have no chunks
            found.append(torch.autograd.grad(dma.dynamic_mask_attention(q, k, v, scores, window=300), (q, k, v, scores),
                                             dout))
    for _ in range(3):
        out = dma.dynamic_mask_attention(q, k, v, scores, window=300)
        found.append(torch.autograd.grad(out, (q, k, v, scores), dout))
    whole, *chunked = found
    for gradients in chunked:
        assert all(torch.equal(a, b) for a, b in zip(gradients[1:], whole[1:]))
        assert torch.equal(gradients[0], chunked[0][0])
        assert (gradients[0].float() - whole[0].float()).norm() <= 1e-3 * whole[0].float().norm()
