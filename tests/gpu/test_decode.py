"""Decoding on a GPU at sizes that fill it: a cache's step, and few queries over a long history, compared with float64
on the GPU; CUDA graphs; equal bits. Everything here is marked ``gpu``. Small odd shapes: test_cache.py and
test_emulator_decode.py."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.backends import cuda
from cupy_dma.backends.cuda.attention import flash_decode, last_queries
from cupy_dma.backends.cuda.decode import step
from cupy_dma.backends.cuda.runtime.program import fresh
from tests.oracle.cache_cases import History

pytestmark = pytest.mark.gpu


def draw(torch, batch, n, heads, kv_heads, size, queries=None, dtype="bfloat16"):
    make = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(batch, length, h, size, generator=make, device="cuda").to(getattr(torch, dtype))
               for length, h in ((queries or n, heads), (n, kv_heads), (n, kv_heads)))
    return q, k, v, torch.randn(batch, kv_heads, n, generator=make, device="cuda")


def visible(torch, scores, window, position, sinks=0, recent=0):
    """bool (B, Hkv, n): the keys that a position sees, by sorting."""
    ranked = scores[..., :position + 1].double().flip(-1)  # of equal scores the newest comes first
    best = position - torch.sort(ranked, descending=True, stable=True, dim=-1).indices[..., :window]
    seen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    seen[..., :min(sinks, position + 1)] = True
    seen[..., max(0, position + 1 - recent):position + 1] |= recent > 0
    return seen


def expected(torch, q, k, v, bias, seen):
    """out (B, H, D) and lse (B, H) of one query (B, H, D), in float64."""
    group = q.shape[1] // k.shape[2]

    def wide(x):
        return x.double().repeat_interleave(group, 1)

    s = torch.einsum("bhd,bhnd->bhn", q.double(), wide(k.transpose(1, 2))) * q.shape[2] ** -0.5 + wide(bias)
    s = s.masked_fill(~seen.repeat_interleave(group, 1), float("-inf"))
    return torch.einsum("bhn,bhnd->bhd", torch.softmax(s, -1), wide(v.transpose(1, 2))), torch.logsumexp(s, -1)


def bits(array):
    return array.cpu().reshape(-1).contiguous().view(__import__("torch").uint8)


def numbers(array):
    """The bits of an array, with all NaN made equal."""
    return bits(array.nan_to_num(nan=12345.0, posinf=float("inf"), neginf=-float("inf")))


@pytest.mark.parametrize(("shape", "window", "sinks", "recent", "dtype"), [
    ((1, 1400, 2, 1, 64), 1024, 0, 0, "bfloat16"), ((3, 900, 16, 8, 128), 500, 4, 60, "float16"),
    ((40, 400, 16, 8, 128), 300, 0, 3, "bfloat16"), ((2, 400, 40, 2, 64), 200, 2, 0, "bfloat16"),
    ((2, 300, 4, 2, 256), 100, 0, 0, "bfloat16"), ((2, 400, 4, 2, 128), 200, 0, 1, "float32")])
def test_steps_of_large_caches(torch, shape, window, sinks, recent, dtype):
    batch, n, _, kv_heads, size = shape
    q, k, v, scores = draw(torch, *shape, dtype=dtype)
    scores = torch.round(scores, decimals=1)
    cache = dma.DynamicCache(batch, kv_heads, window, size, dtype=dtype, like=q, sinks=sinks, recent=recent)
    first = n - 25
    for begin in range(0, first, 100):
        end = min(begin + 100, first)
        cache.update(k[:, begin:end], v[:, begin:end], scores[:, :, begin:end])
    for p in range(first, n):
        part = slice(p, p + 1)
        out, lse = cache.extend(q[:, part], k[:, part], v[:, part], scores[:, :, part], return_lse=True)
        seen = visible(torch, scores, window, p, sinks, recent)
        ref, ref_lse = expected(torch, q[:, p], k, v, scores, seen)
        assert (out[:, 0].double() - ref).abs().max() < (2e-3 if dtype != "bfloat16" else 1e-2)
        assert (lse[..., 0].double() - ref_lse).abs().max() < 2e-3
        kept = cache.kept().positions
        where = torch.where(seen, torch.arange(n, device="cuda"), n).sort(-1).values[..., :kept.shape[-1]]
        assert torch.equal(torch.where(where == n, -1, where), kept)


@pytest.fixture(params=[True, False], ids=["clusters", "tickets"])
def clusters(request, monkeypatch):
    """Inside the context, steps use clusters of blocks wherever possible, or never."""
    if request.param and not cuda.runtime.hopper(0):
        pytest.skip("no clusters of blocks on this GPU")
    monkeypatch.setattr(step, "clusters_pay", lambda *_: request.param)
    step.split.cache_clear()
    yield request.param
    step.split.cache_clear()


@pytest.mark.parametrize("case", [
    History(dtype="bfloat16", head_dim=64, window=100, recent=3, length=112, batch=1, heads=2, kv_heads=1),
    History(dtype="bfloat16", head_dim=128, window=300, length=320, batch=1, heads=16, kv_heads=1, sinks=2),
    History(dtype="float16", head_dim=16, value_dim=24, window=9, sinks=2, recent=3),
    History(dtype="float16", head_dim=5, value_dim=7, window=9, heads=3, kv_heads=1, softcap=3.0, scale=0.7),
    History(dtype="float32", head_dim=256, window=3, length=8, heads=8, kv_heads=1, batch=1, scale=-0.05),
    History(dtype="float32", head_dim=40, window=129, sinks=3, length=140), History(scores="nan", dtype="float16"),
    History(dtype="bfloat16", head_dim=64, window=(90, 30), recent=3, length=100, batch=1, bias_delay=20),
    History(dtype="float16", head_dim=128, window=(9, 200), length=220, batch=1, bias_delay=30, scores="hidden"),
    History(dtype="bfloat16", head_dim=128, window=300, length=320, heads=16, kv_heads=1, options={"storage": "fp8"}),
    History(dtype="float16", head_dim=64, window=(9, 200), recent=2, length=220, options={"storage": "int8"}),
    History(dtype="float32", head_dim=40, window=129, length=140, options={"storage": "fp8"}),
], ids=str)
def test_steps_in_clusters_and_with_tickets(case, clusters):
    cupy = pytest.importorskip("cupy")
    cache = case.cache(cupy.asarray)
    out, lse = case.run(cache, [1] * case.length, cupy.asarray)
    if case.scores != "nan":
        case.check(out, lse, tf32=True)
    case.check_kept(cache)
    if clusters and cache._state.segments is None:
        kept = cache._state.workspace["decode step", case.heads, case.batch, 1, False]
        assert kept["num_splits"] == step.CLUSTER


# Query heads per kv head, in brackets the tokens that one launch takes: 2 (8), 4 (4), 16 (1), 1 (8), long rows 2 (4).
@pytest.mark.parametrize("length", [2, 4, 8])
@pytest.mark.parametrize(("shape", "window", "sinks", "recent", "delay", "dtype"), [
    ((1, 1064, 2, 1, 64), 1000, 0, 2, 0, "bfloat16"), ((3, 364, 8, 2, 128), 300, 4, 60, 0, "float16"),
    ((2, 264, 16, 1, 64), 200, 0, 3, 0, "bfloat16"), ((32, 264, 8, 8, 128), 200, 2, 0, 0, "bfloat16"),
    ((2, 164, 4, 2, 256), 100, 0, 9, 0, "bfloat16"), ((2, 264, 6, 2, 64), (200, 70), 0, 1, 0, "float32"),
    ((1, 364, 16, 8, 128), 300, 0, 40, 50, "bfloat16")])
def test_several_tokens_have_the_bits_of_single_ones(torch, clusters, length, shape, window, sinks, recent, delay,
                                                     dtype):
    """Also with infinities and NaN in some keys and values, and with ``attend`` before ``commit``."""
    batch, n, _, kv_heads, size = shape
    q, k, v, scores = draw(torch, *shape, dtype=dtype)
    make = torch.Generator(device="cuda").manual_seed(1)
    for rows in (k, v):
        rows[torch.rand(rows.shape[:3], generator=make, device="cuda") < 0.001] = float("inf")
        rows[torch.rand(rows.shape[:3], generator=make, device="cuda") < 0.001] = float("nan")
    like = {"dtype": dtype, "like": q, "sinks": sinks, "recent": recent}
    caches = [dma.DynamicCache(batch, kv_heads, window, size, **like) for _ in range(3)]
    first = n - 64
    for cache in caches:
        cache.update(k[:, :first], v[:, :first], scores[..., :first])
    how = {"return_lse": True, "bias_delay": delay}
    for p in range(first, n, length):
        part = slice(p, p + length)
        tokens = q[:, part], k[:, part], v[:, part], scores[..., part]
        out, lse = caches[0].extend(*tokens, **how)
        drafted = caches[1].attend(*tokens, **how)
        assert torch.equal(numbers(out), numbers(drafted[0])) and torch.equal(numbers(lse), numbers(drafted[1]))
        caches[1].commit(length - 1)
        caches[1].update(*(x[:, -1:] for x in tokens[1:3]), tokens[3][..., -1:])
        for i in range(length):
            one, one_lse = caches[2].extend(*(x[:, i:i + 1] for x in tokens[:3]), tokens[3][..., i:i + 1], **how)
            assert torch.equal(numbers(out[:, i:i + 1]), numbers(one))
            assert torch.equal(numbers(lse[..., i:i + 1]), numbers(one_lse))
    saved = [cache.state_dict() for cache in caches]
    for name, array in saved[2].items():
        assert not torch.is_tensor(array) or all(torch.equal(bits(array), bits(x[name])) for x in saved[:2]), name


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("window", [300, (300, 90, 200, 7)], ids=["window", "windows"])
def test_steps_of_some_sequences(torch, clusters, window, length):
    """Each sequence gets the same bits as in a call for all sequences."""
    q, k, v, scores = draw(torch, 6, 400, 8, 4, 64)
    cache = dma.DynamicCache(6, 4, window, 64, like=q, recent=2)
    cache.update(k[:, :320], v[:, :320], scores[..., :320])
    alone = cache.clone()
    for p in range(320, 400, length):
        part, order = slice(p, p + length), torch.randperm(6, device="cuda")
        tokens = q[:, part], k[:, part], v[:, part], scores[..., part]
        lengths = torch.randint(0, length + 1, (6,), device="cuda")
        slots = torch.where(lengths > 0, order, -1)
        out, lse = cache.extend(*(x[order] for x in tokens), slots=slots, lengths=lengths, return_lse=True)
        own = torch.zeros_like(lengths).scatter_(0, order, lengths)
        other, other_lse = alone.extend(*tokens, lengths=own, return_lse=True)
        assert torch.equal(bits(out), bits(other[order])) and torch.equal(bits(lse), bits(other_lse[order]))
    found, expected = cache.state_dict(), alone.state_dict()
    for name, array in found.items():
        assert not torch.is_tensor(array) or torch.equal(bits(array), bits(expected[name])), name
    assert not cache._state.tickets.array.any()


@pytest.mark.parametrize("length", [1, 3])
def test_updates_in_clusters_and_with_tickets(length, clusters):
    """``update``, which has no queries."""
    cupy = pytest.importorskip("cupy")
    history = History(dtype="float16", window=200, length=240, sinks=1, recent=2)
    cache = history.cache(cupy.asarray)
    for begin in range(0, history.length, length):
        cache.update(*history.tokens(begin, begin + length, cupy.asarray)[1:])
    history.check_kept(cache)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("window", [150, (150, 9, 60, 20)], ids=["window", "windows"])
def test_a_graph_of_a_step_replays(torch, clusters, window, length):
    """One graph for every step, also while the cache fills, with the bits of eager calls."""
    q, k, v, scores = draw(torch, 2, 400, 8, 4, 64)
    cache = dma.DynamicCache(2, 4, window, 64, like=q, recent=2)
    q1, k1, v1, s1 = (x[:, :length].clone() for x in (q, k, v, scores.transpose(1, 2)))
    out = torch.empty_like(q1)

    def step():
        cache.extend(q1, k1, v1, s1.transpose(1, 2), out=out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    cache.reset()
    eager = cache.clone()
    for p in range(0, 400, length):
        part = slice(p, p + length)
        for static, x in ((q1, q), (k1, k), (v1, v), (s1, scores.transpose(1, 2))):
            static.copy_(x[:, part])
        graph.replay()
        other = eager.extend(q[:, part], k[:, part], v[:, part], scores[:, :, part])
        assert torch.equal(bits(out), bits(other)), p
    for name, array in cache.state_dict().items():
        assert not torch.is_tensor(array) or torch.equal(bits(array), bits(eager.state_dict()[name])), name


def test_many_steps_keep_the_right_keys(torch, clusters):
    """Against the NumPy backend, with steps in quick succession to expose races."""
    rng = np.random.default_rng(0)
    scores = np.round(rng.standard_normal((2, 3, 3000)), 1).astype(np.float32)
    for sinks, recent in ((0, 0), (2, 5)):
        caches = [dma.DynamicCache(2, 3, 200, 8, dtype="float16", like=like, sinks=sinks, recent=recent)
                  for like in (torch.empty(1, device="cuda"), None)]
        rows = [np.zeros((2, 1, 3, 8), np.float16), np.zeros((2, 3000, 3, 8), np.float16)]
        moved, device_scores = torch.from_numpy(rows[0]).cuda(), torch.from_numpy(scores).cuda()
        for p in range(3000):
            caches[0].update(moved, moved, device_scores[:, :, p:p + 1])
        caches[1].update(rows[1], rows[1], scores)
        for ours, theirs in zip(caches[0].kept(), caches[1].kept()):
            assert np.array_equal(ours.cpu().numpy(), theirs)


@pytest.mark.parametrize("kind", ["iid", "equal", "increasing", "decreasing", "ties"])
@pytest.mark.parametrize("queries", [1, 5])
def test_last_queries_of_long_histories(torch, kind, queries, calls_of):
    n, window = 300_000, 1000
    q, k, v, scores = draw(torch, 1, n, 4, 2, 64, queries)
    scores = {"iid": scores, "equal": torch.zeros_like(scores), "increasing": torch.sort(scores).values,
              "decreasing": torch.sort(scores, descending=True).values, "ties": torch.round(scores)}[kind].contiguous()
    used = calls_of(last_queries, "attend_last")
    results = [dma.dynamic_mask_attention(q, k, v, scores, window=window, return_lse=True) for _ in range(10)]
    assert len(used) == 10
    for i in range(queries):
        seen = visible(torch, scores, window, n - queries + i)
        ref, ref_lse = expected(torch, q[:, i], k, v, scores, seen)
        assert (results[0][0][:, i].double() - ref).abs().max() < 1e-2
        assert (results[0][1][..., i].double() - ref_lse).abs().max() < 2e-3
    for other in results[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(other, results[0]))


@pytest.mark.parametrize("mask", ["none", "causal", "window", "top_w"])
@pytest.mark.parametrize("queries", [1, 4])
def test_few_queries_against_many_keys(torch, mask, queries):
    n = 100_000
    q, k, v, scores = draw(torch, 2, n, 8, 2, 128, queries)
    masks = {"none": None, "causal": dma.IntervalMask.causal(n, like=q),
             "window": dma.IntervalMask.sliding_window(n, 5000, like=q), "top_w": dma.IntervalMask.top_w(scores, 700)}
    out, lse = dma.attention(q, k, v, mask=masks[mask], bias=scores, return_lse=True)
    j = torch.arange(n, device="cuda")
    for i in range(queries):
        p = n - queries + i
        seen = {"none": lambda: j >= 0, "causal": lambda p=p: j <= p, "window": lambda p=p: (j <= p) & (j > p - 5000),
                "top_w": lambda p=p: visible(torch, scores, 700, p)}[mask]().expand(2, 2, n)
        ref, ref_lse = expected(torch, q[:, i], k, v, scores, seen)
        assert (out[:, i].double() - ref).abs().max() < 1e-2
        assert (lse[..., i].double() - ref_lse).abs().max() < 2e-3


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "heads", "kv_heads", "head_dim"), [(264, 2, 1, 64), (65, 4, 4, 128),
                                                                         (30, 15, 3, 96)])
def test_hundreds_of_queries_against_many_keys(torch, calls_of, queries, heads, kv_heads, head_dim, causal, is_hopper):
    """So few queries would leave most of a GPU idle; Hopper's tiles are split along their keys."""
    if is_hopper and not cuda.runtime.hopper(0):
        pytest.skip("no Hopper GPU")
    n, served = 5000, calls_of(flash_decode, "attention")
    q, k, v, scores = draw(torch, 1, n, heads, kv_heads, head_dim, queries)
    with fresh(hopper=None if is_hopper else False):
        out, lse = dma.attention(q, k, v, bias=scores, causal=causal, return_lse=True)
    assert bool(served) != is_hopper
    for i in (0, 1, queries // 2, queries - 1):
        seen = (torch.arange(n, device="cuda") <= n - queries + i if causal else torch.ones(n, device="cuda") > 0)
        ref, ref_lse = expected(torch, q[:, i], k, v, scores, seen.expand(1, kv_heads, n))
        assert (out[:, i].double() - ref).abs().max() < 1e-2
        assert (lse[..., i].double() - ref_lse).abs().max() < 2e-3


def test_gradients_after_few_queries(torch):
    """The backward pass works from out and lse of the split-KV kernel."""
    q, k, v, scores = draw(torch, 1, 2000, 4, 2, 64, 3, "float16")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = dma.dynamic_mask_attention(q, k, v, scores, window=300)
    out.sum().backward()
    grads = [x.grad.clone() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    total = sum(expected(torch, wide[0][:, i], wide[1], wide[2], scores, visible(torch, scores, 300, 1997 + i))[0].sum()
                for i in range(3))
    for ours, theirs in zip(grads, torch.autograd.grad(total, wide)):
        assert (ours.double() - theirs).abs().max() < 2e-2 * theirs.abs().max().clamp_min(1.0)


SIZES = 50000, 24000, 50000, 35000, 50000  # 16/1 heads: shared memory above 48 KiB, each another size


def test_attention_of_one_query_in_any_order_of_sizes(torch):
    """All sizes share one function of the driver, which must allow the largest amount of shared memory."""
    for n in SIZES:
        q, k, v, _ = draw(torch, 1, n, 16, 1, 128, queries=1)
        seen = torch.arange(n, device="cuda").expand(1, 1, n) > 0
        out, lse = dma.attention(q, k, v, mask=dma.IntervalMask.sliding_window(n, n - 1, like=k), return_lse=True)
        exact, exact_lse = expected(torch, q[:, 0], k, v, torch.zeros(1, 1, n, device="cuda"), seen)
        torch.testing.assert_close(out[:, 0].double(), exact, rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(lse[..., 0].double(), exact_lse, rtol=1e-4, atol=1e-4)


def test_steps_of_caches_in_any_order_of_sizes(torch):
    caches = {n: dma.DynamicCache(1, 1, n, 128, dtype="bfloat16", like=torch.empty(1, device="cuda"))
              for n in SIZES}
    histories = {n: [] for n in SIZES}
    q, k, v, s = draw(torch, 1, len(SIZES), 16, 1, 128)
    for i, n in enumerate(SIZES):
        histories[n].append(i)
        out = caches[n].extend(q[:, i:i + 1], k[:, i:i + 1], v[:, i:i + 1], s[..., i:i + 1])
        own = histories[n]
        exact, _ = expected(torch, q[:, i], k[:, own], v[:, own], s[..., own], torch.ones_like(s[..., own]) > 0)
        torch.testing.assert_close(out[:, 0].double(), exact, rtol=2**-7, atol=2**-9)
