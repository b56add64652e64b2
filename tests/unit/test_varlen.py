"""Packed sequences and paged KV caches on the NumPy backend and through torch, against the oracle of each sequence."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import CPU, library_named
from tests.oracle import delay_cases
from tests.oracle import varlen_cases as cases
from tests.oracle.refusals import check_refused


@pytest.mark.feature("numpy forward", "varlen and paged", "float64", case="float64-")
@pytest.mark.feature("numpy forward", "varlen and paged", "varlen_attention")
@pytest.mark.feature("numpy forward", "varlen and paged", "block_table", case="pages-")
@pytest.mark.feature("numpy forward", "varlen and paged", "varlen_dynamic_mask_attention", case="bfloat16-top_w")
@pytest.mark.parametrize("case", cases.CASES + cases.PAGES + delay_cases.PACKED + delay_cases.PAGES, ids=str)
def test_forward(case):
    cases.check(case, *cases.run(case, backend="numpy"))


@pytest.mark.feature("numpy backward", "varlen and paged", "float64", case="float64-")
@pytest.mark.feature("numpy backward", "varlen and paged", "varlen_attention")
@pytest.mark.parametrize("case", cases.CASES + delay_cases.PACKED, ids=str)
def test_backward(case):
    cases.check_backward(case, cases.run_backward(case, backend="numpy"))


@pytest.mark.parametrize("name", ["bfloat16-top_w", "used-global", "tail-none", "mask-per_head"])
def test_lengths_of_int64_give_the_same_bits(name):
    case = next(c for c in cases.CASES if c.name == name)
    expected = cases.run(case, backend="numpy")

    def convert(array):
        return array.astype(np.int64) if array.dtype == np.int32 and array.ndim == 1 else array

    got = cases.run(case, convert, backend="numpy")
    assert all(np.array_equal(a.view("u1"), b.view("u1")) for a, b in zip(got, expected))


def tokens(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


Q, K, V = tokens(12, 4, 8), tokens(15, 2, 8, seed=1), tokens(15, 2, 8, seed=2)
CU_Q, CU_K = np.array([0, 4, 12], np.int32), np.array([0, 5, 15], np.int32)


def attend(query=Q, key=K, value=V, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **options):
    return dma.varlen_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, **options)


def test_scores_from_values():
    weight, A, offset = tokens(2, 16, seed=3), tokens(2, seed=4), tokens(2, seed=5)
    recipe = {"dt_proj": weight, "A": A, "dt_bias": offset, "form": "linear"}
    scores = dma.key_scores(V[None], weight, A, dt_bias=offset, form="linear")[0]
    got = dma.varlen_dynamic_mask_attention(Q, K, V, CU_Q, CU_K, window=3, **recipe)
    assert np.array_equal(got, dma.varlen_dynamic_mask_attention(Q, K, V, CU_Q, CU_K, scores, window=3))


def test_paged_lengths_from_cu_seqlens():
    pages = tokens(6, 4, 2, 8)
    table = np.array([[3, 1, 0], [2, 5, 4]], np.int32)
    expected = attend(Q, pages, pages, cu_seqlens_k=None, block_table=table, seqused_k=np.array([5, 10], np.int32))
    assert np.array_equal(attend(Q, pages, pages, block_table=table), expected)


def test_needs_and_max_lengths():
    out, lse = attend(return_lse=True, max_seqlen_q=8, max_seqlen_k=10)
    found = dma.backward.varlen_attention_backward(Q, Q, K, V, out, lse, CU_Q, CU_K, needs=("value",))
    assert found.query is None and found.value.shape == V.shape


PAGES = tokens(3, 4, 2, 8)
TABLE = np.array([[0, 1], [2, 0]], np.int32)
USED = np.array([8, 3], np.int32)
M = dma.IntervalMask


def dynamic(scores=None, **options):
    return dma.varlen_dynamic_mask_attention(Q, K, V, CU_Q, CU_K, scores, **{"window": 3, **options})


def paged(block_table=TABLE, seqused_k=USED, key=PAGES, **options):
    return attend(Q, key, key, cu_seqlens_k=options.pop("cu_seqlens_k", None), block_table=block_table,
                  seqused_k=seqused_k, **options)


def int32(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(("call", "error", "words"), [
    *[(lambda delay=delay: attend(bias=tokens(2, 15), bias_delay=delay), error, ["bias_delay", words])
      for delay, error, words in ((-1, ValueError, "at least 0, got -1"), (1.5, TypeError, "an int, got"))],
    (lambda: attend(query=Q[:, :3]), ValueError, ["query", "H % Hkv", "3 query heads"]),
    (lambda: attend(value=V.astype(np.float16)), TypeError, ["value", "float32", "float16"]),
    (lambda: attend(query=Q.astype(np.int32)), TypeError, ["query", "int32"]),
    (lambda: attend(cu_seqlens_q="0 12"), TypeError, ["cu_seqlens_q", "str"]),
    (lambda: attend(cu_seqlens_q=[0, 4, 13]), ValueError, ["cu_seqlens_q", "length 12", "13"]),
    (lambda: attend(causal=1), TypeError, ["causal", "1"]),
    (lambda: attend(softcap=-1), ValueError, ["softcap", "-1"]),
    (lambda: dynamic(), ValueError, ["scores", "dt_proj", "neither"]),
    (lambda: dynamic(tokens(2, 15), window=0), ValueError, ["window", "0"]),
    (lambda: dynamic(tokens(2, 15), keys="last"), ValueError, ["keys", "'last'", "'prefix'"]),
    (lambda: dynamic(tokens(2, 15), A=tokens(2)), ValueError, ["A", "dt_proj"]),
    (lambda: dynamic(dt_proj=tokens(2, 16)), ValueError, ["A", "None"]),
    (lambda: attend(query=Q[None]), ValueError, ["query", "(total_q, H, D)", "(1, 12, 4, 8)"]),
    (lambda: attend(key=K[:, :, :4]), ValueError, ["key", "D=8", "(15, 2, 4)"]),
    (lambda: attend(value=V[:3]), ValueError, ["value", "(15, 2, 8)", "(3, 2, 8)"]),
    (lambda: attend(key=PAGES, value=PAGES), ValueError, ["key", "(total_k, Hkv, D)", "(3, 4, 2, 8)"]),
    (lambda: attend(cu_seqlens_q=[0, 4.5, 12]), TypeError, ["cu_seqlens_q", "[0, 4.5, 12]", "list of ints"]),
    (lambda: attend(cu_seqlens_q=int32(0, 4, 10)), ValueError,
     ["cu_seqlens_q", "end at query's length 12", "[0, 4, 10]", "rows 10 to 11", "tail_padding=True"]),
    (lambda: attend(cu_seqlens_k=[0, 5, 14]), ValueError,
     ["cu_seqlens_k", "end at key's length 15", "[0, 5, 14]", "rows 14 to 14", "tail_padding=True"]),
    (lambda: attend(Q, K[:11], V[:11], CU_Q, CU_Q), ValueError, ["cu_seqlens_k", "total_q=12", "total_k=11"]),
    (lambda: attend(max_seqlen_q=5), ValueError, ["max_seqlen_q", "5", "2 sequences", "12 rows", "tail_padding"]),
    (lambda: attend(max_seqlen_k=7), ValueError, ["max_seqlen_k", "7", "15 rows"]),
    (lambda: attend(tail_padding=1), TypeError, ["tail_padding", "1", "True or False"]),
    (lambda: attend(cu_seqlens_q=CU_Q.astype(np.float32)), TypeError, ["cu_seqlens_q", "int32", "float32"]),
    (lambda: attend(cu_seqlens_q=CU_Q[None]), ValueError, ["cu_seqlens_q", "(B + 1,)", "(1, 3)"]),
    (lambda: attend(cu_seqlens_q=CU_Q[:0]), ValueError, ["cu_seqlens_q", "(B + 1,)", "(0,)"]),
    (lambda: attend(cu_seqlens_k=CU_K[:2]), ValueError, ["cu_seqlens_k", "(B + 1,)", "(2,)"]),
    (lambda: attend(cu_seqlens_k=None), TypeError, ["cu_seqlens_k", "None", "block_table"]),
    (lambda: attend(cu_seqlens_q=int32(1, 4, 12)), ValueError, ["cu_seqlens_q", "start at 0", "[1, 4, 12]"]),
    (lambda: attend(cu_seqlens_q=int32(0, 5, 4)), ValueError, ["cu_seqlens_q", "never decrease", "[0, 5, 4]"]),
    (lambda: attend(cu_seqlens_q=int32(0, 4, 13)), ValueError, ["cu_seqlens_q", "length 12", "13"]),
    (lambda: attend(cu_seqlens_k=int32(0, 5, 16)), ValueError, ["cu_seqlens_k", "length 15", "16"]),
    (lambda: attend(seqused_k=int32(5)), ValueError, ["seqused_k", "(2)", "(1,)"]),
    (lambda: attend(seqused_k=int32(6, 1)), ValueError, ["seqused_k", "[5, 10]", "[6, 1]"]),
    (lambda: attend(seqused_k=int32(-1, 1)), ValueError, ["seqused_k", "[-1, 1]"]),
    (lambda: attend(max_seqlen_q=-1), ValueError, ["max_seqlen_q", "-1"]),
    (lambda: attend(max_seqlen_k=1.5), TypeError, ["max_seqlen_k", "1.5"]),
    # masks and biases
    (lambda: attend(mask=M.causal(14)), ValueError, ["mask", "(1, 1|Hkv|H, total_k)", "15", "(1, 1, 14)"]),
    (lambda: attend(mask=np.ones((1, 1, 12, 15), bool)), NotImplementedError, ["mask", "IntervalMask", "dense"]),
    (lambda: attend(mask=3), TypeError, ["mask", "int"]),
    (lambda: attend(bias=tokens(3, 15)), ValueError, ["bias", "(1|Hkv|H, total_k)", "(3, 15)"]),
    (lambda: attend(bias=tokens(1, 2, 15)), NotImplementedError, ["bias", "(1|Hkv|H, total_k)", "(1, 2, 15)"]),
    (lambda: attend(bias=np.ones((2, 15), np.int32)), TypeError, ["bias", "int32"]),
    # paged KV cache
    (lambda: paged(key=K), ValueError, ["key", "(num_pages, page_size, Hkv, D)", "(15, 2, 8)"]),
    (lambda: paged(key=PAGES[:, :0]), ValueError, ["key", "at least one row"]),
    (lambda: paged(block_table=TABLE[0]), ValueError, ["block_table", "(B, max_pages)", "(2,)"]),
    (lambda: paged(block_table=TABLE[:1]), ValueError, ["block_table", "(B, max_pages)", "(1, 2)"]),
    (lambda: paged(block_table=TABLE.astype(np.float32)), TypeError, ["block_table", "float32"]),
    (lambda: paged(block_table=TABLE + 1), ValueError, ["block_table", "0 to 2", "[3]", "sequence 1"]),
    (lambda: paged(block_table=TABLE - 1), ValueError, ["block_table", "0 to 2", "-1"]),
    (lambda: paged(seqused_k=None), TypeError, ["seqused_k", "cu_seqlens_k", "block_table"]),
    (lambda: paged(seqused_k=int32(9, 1)), ValueError, ["seqused_k", "8", "[9, 1]"]),
    (lambda: paged(mask=M.causal(15)), ValueError, ["mask", "max_pages * page_size", "8", "(1, 1, 15)"]),
    (lambda: paged(bias=tokens(2, 8)), ValueError, ["bias", "max_pages * page_size", "(2, 8)"]),
    # selections
    (lambda: dynamic(tokens(2, 15), causal=False), ValueError, ["causal", "global"]),
    (lambda: dynamic(tokens(1, 15)), ValueError, ["scores", "(Hkv|H, total_k)", "(1, 15)"]),
    (lambda: dynamic(tokens(2, 14)), ValueError, ["scores", "15", "(2, 14)"]),
    (lambda: dynamic(dt_proj=tokens(2, 16), A=tokens(2), block_table=TABLE), ValueError, ["scores", "block_table"]),
])
def test_errors(call, error, words):
    check_refused(error, words, call)


def test_lists_of_lengths_and_pages():
    expected = attend(return_lse=True)
    for a, b in zip(attend(cu_seqlens_q=[0, 4, 12], cu_seqlens_k=(0, 5, 15), return_lse=True), expected):
        assert np.array_equal(a, b)
    assert np.array_equal(attend(seqused_k=[4, 9]), attend(seqused_k=int32(4, 9)))
    assert np.array_equal(paged(block_table=TABLE.tolist(), seqused_k=USED.tolist()), paged())
    scores = tokens(2, 15)
    assert np.array_equal(dma.varlen_dynamic_mask_attention(Q, K, V, [0, 4, 12], [0, 5, 15], scores, window=3),
                          dynamic(scores))


def test_rows_after_the_last_sequence_are_allowed_on_request():
    for cu_q, cu_k in (([0, 4, 10], CU_K), (CU_Q, [0, 5, 14]), ([0, 4, 10], [0, 5, 14])):
        out, lse = attend(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, tail_padding=True, return_lse=True)
        same = attend(Q[:cu_q[-1]], K[:cu_k[-1]], V[:cu_k[-1]], cu_q, cu_k)
        np.testing.assert_allclose(out[:cu_q[-1]], same, atol=1e-6)
        assert not out[cu_q[-1]:].any() and np.isneginf(lse[:, cu_q[-1]:]).all()
    assert not attend(Q, K[:11], V[:11], [0, 4, 11], [0, 4, 11], max_seqlen_q=5, tail_padding=True)[11].any()


def test_scores_and_biases_of_any_strides():
    scores = tokens(15, 2)
    assert np.array_equal(dynamic(scores.T), dynamic(np.ascontiguousarray(scores.T)))
    assert np.array_equal(attend(bias=scores.T), attend(bias=np.ascontiguousarray(scores.T)))


def test_a_paged_kv_cache_has_no_gradient():
    with pytest.raises(NotImplementedError, match="block_table"):
        dma.backward.varlen_attention_backward(Q, Q, PAGES, PAGES, Q, tokens(4, 12), CU_Q, None, block_table=TABLE,
                                               seqused_k=int32(8, 3))


# ---- torch ----
torch = pytest.importorskip("torch")


def as_tensor(array):
    return library_named("torch").from_numpy(np.ascontiguousarray(array), CPU)


@pytest.mark.parametrize("case", [c for c in cases.CASES + cases.PAGES if c.name.startswith(
    ("bfloat16-", "used-", "tail-", "pages-16", "pages-global"))], ids=str)
def test_torch_gives_the_same_bits(case):
    for a, b in zip(cases.run(case, as_tensor), cases.run(case)):
        assert np.array_equal(library_named("torch").to_numpy(a).view("u1"), b.view("u1"))


def leaves(*arrays):
    return [torch.from_numpy(x).double().requires_grad_() for x in arrays]


CU = torch.from_numpy(CU_Q), torch.from_numpy(CU_K)
SCORES, WEIGHT, DECAY = tokens(2, 15, seed=6), 0.2 * tokens(2, 16, seed=7), tokens(2, seed=8)


def by_scores(q, k, v, s):
    return dma.varlen_dynamic_mask_attention(q, k, v, *CU, s, window=3, softcap=2.0, return_lse=True)


def by_recipe(q, k, v, w, a):
    return dma.varlen_dynamic_mask_attention(q, k, v, *CU, window=4, dt_proj=w, A=a, return_lse=True)


def global_used(q, k, v, s):
    used = torch.tensor([4, 9], dtype=torch.int32)
    return dma.varlen_dynamic_mask_attention(q, k, v, *CU, s, window=3, keys="global", seqused_k=used, return_lse=True)


def masked(q, k, v, s):
    return dma.varlen_attention(q, k, v, *CU, mask=M.sliding_window(15, 3, like=q), bias=s, return_lse=True)


FUNCTIONS = [(by_scores, (Q, K, V, SCORES)), (by_recipe, (Q, K, V, WEIGHT, DECAY)), (global_used, (Q, K, V, SCORES)),
             (masked, (Q, K, V, SCORES))]


@pytest.mark.feature("numpy backward", "varlen and paged", "varlen_dynamic_mask_attention")
@pytest.mark.parametrize(("function", "arrays"), FUNCTIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_gradients_are_derivatives(function, arrays):
    """Directional derivatives over all elements; element by element would take a minute and a half."""
    assert torch.autograd.gradcheck(lambda *x: tuple(y.nan_to_num(neginf=0) for y in function(*x)), leaves(*arrays),
                                    eps=1e-6, atol=1e-5, fast_mode=True)


@pytest.mark.feature("numpy forward backward", "varlen and paged", "torch.compile")
@pytest.mark.parametrize(("function", "arrays"), FUNCTIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_compile_in_one_graph(function, arrays):
    def gradients(run):
        inputs = leaves(*arrays)
        out, lse = run(*inputs)
        return [out, lse, *torch.autograd.grad(out.sin().sum() + lse[:, :4].sum(), inputs)]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(function), gradients(compiled)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("function", "arrays"), FUNCTIONS[:3], ids=lambda x: getattr(x, "__name__", ""))
def test_a_compiled_dynamic_call_is_two_operators(function, arrays):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    found: list[str] = []

    def keep(graph, inputs):
        found.extend(str(node.target) for node in graph.graph.nodes if "cupy_dma" in str(node.target))
        return make_boxed_func(graph)

    function(*leaves(*arrays))  # load backends now, because the compiler would trace the first load
    compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    inputs = leaves(*arrays)
    torch.autograd.grad(compiled(*inputs)[0].sum(), inputs)
    assert found == [f"cupy_dma.dynamic_attention{part}.default" for part in ("", "_backward")]


def test_operators_are_consistent():
    q, k, v, s = leaves(Q, K, V, SCORES)
    mask = M.top_w(s.detach()[None], 3, documents=CU[1])
    interval, options = (mask.start, mask.stop, "key", [3, 1], False), (False, None, 0.0, False, 4, None, True)
    torch.library.opcheck(torch.ops.cupy_dma.attention, (q, k, v, *interval, None, s, *CU, None, None, *options))
    given, sequences, options = (s, None, None, None), (None, None, *CU, None, None), (None, 0.0, False, 0, None, True)
    torch.library.opcheck(torch.ops.cupy_dma.dynamic_attention,
                          (q, k, v, *given, *sequences, [0, 3, 5], "exp", "global", False, *options))
    given = (None, *leaves(WEIGHT, DECAY), None)
    torch.library.opcheck(torch.ops.cupy_dma.dynamic_attention,
                          (q, k, v, *given, *sequences, [4], "linear", "prefix", True, *options))


def test_a_paged_kv_cache_has_no_gradient_in_torch():
    pages = torch.from_numpy(PAGES).double().requires_grad_()
    out = dma.varlen_attention(torch.from_numpy(Q).double(), pages, pages, CU[0], None,
                               block_table=torch.from_numpy(TABLE), seqused_k=torch.tensor([8, 3]))
    with pytest.raises(NotImplementedError, match="block_table"):
        out.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_takes_lists_and_scores_of_any_strides(compiled):
    def run(q, k, v, s):
        return dma.varlen_dynamic_mask_attention(q, k, v, [0, 4, 12], [0, 5, 15], s.T, window=3)

    def expected(q, k, v, s):
        return dma.varlen_dynamic_mask_attention(q, k, v, *CU, s.T.contiguous(), window=3)

    inputs = leaves(Q, K, V, np.ascontiguousarray(SCORES.T))
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    found, same = run(*inputs), expected(*inputs)
    assert torch.equal(found, same)
    for a, b in zip(torch.autograd.grad(found.sin().sum(), inputs), torch.autograd.grad(same.sin().sum(), inputs)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_torch_errors_name_the_argument():
    q, k, v = leaves(Q, K, V)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must end at query's length 12.*tail_padding=True"):
        dma.varlen_attention(q, k, v, CU[0].clamp(max=10), CU[1])
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        dma.varlen_attention(q, k, v, CU_Q, CU_K)
    with pytest.raises(NotImplementedError, match="mask"):
        dma.varlen_attention(q, k, v, *CU, mask=torch.ones(12, 15, dtype=torch.bool))
