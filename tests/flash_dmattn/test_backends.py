"""Every function of the drop-in on every backend, forward and backward, against the NumPy backend in float64, which
other tests in this folder compare with the oracle."""
import numpy as np
import pytest

from cupy_dma import backends, flash_dmattn

torch = pytest.importorskip("torch")

B, H, HKV, LQ, LK, D = 2, 4, 2, 6, 11, 64
CU_Q, CU_K = (np.array(bounds, np.int32) for bounds in ((0, 4, 4, 10, 11), (0, 7, 9, 20, 22)))  # up to Lq, Lk
LONGEST = 6, 11
TOTAL_Q, TOTAL_K = int(CU_Q[-1]), int(CU_K[-1])
BATCH = {"q": (B, LQ, H, D), "k": (B, LK, HKV, D), "v": (B, LK, HKV, D), "kv": (B, LK, 2, HKV, D),
         "qkv": (B, LK, 3, H, D), "bias": (B, HKV, LQ, LK), "own bias": (B, 1, LK, LK)}
HEADS_FIRST = {"q": (B, H, LQ, D), "k": (B, HKV, LK, D), "v": (B, HKV, LK, D), "dt_proj": (HKV, HKV * D), "A": (HKV,)}
PACKED = {"q": (TOTAL_Q, H, D), "k": (TOTAL_K, HKV, D), "v": (TOTAL_K, HKV, D), "kv": (TOTAL_K, 2, HKV, D),
          "qkv": (TOTAL_K, 3, H, D), "bias": (TOTAL_Q, HKV, LONGEST[1]), "own bias": (TOTAL_K, 1, LONGEST[1]),
          "key bias": (HKV, TOTAL_K), "own key bias": (1, TOTAL_K)}


# The arrays of each packed function, its bias last, and its lengths.
VARLEN = {
    "flash_dmattn_varlen_func": (("q", "k", "v", "bias"), (CU_Q, CU_K), LONGEST),
    "flash_dmattn_varlen_qkvpacked_func": (("qkv", "own bias"), (CU_K,), LONGEST[1:]),
    "flash_dmattn_varlen_kvpacked_func": (("q", "kv", "bias"), (CU_Q, CU_K), LONGEST),
}


def varlen(name, bias="bias"):
    arrays, lengths, longest = VARLEN[name]

    def run(*given, device, backend):
        *rows, bias = given
        bounds = [torch.from_numpy(x).to(device) for x in lengths]
        return getattr(flash_dmattn, name)(*rows, None, bias, *bounds, *longest, is_causal=True, backend=backend)

    return run, {array.replace("bias", bias): PACKED[array.replace("bias", bias)] for array in arrays}


def batch(name, arrays, **options):
    def run(*given, device, backend):
        *rows, bias = given
        found = getattr(flash_dmattn, name)(*rows, attn_bias=bias, is_causal=True, backend=backend, **options)
        return found[0] if name == "fwd" else found

    return run, {name: BATCH[name] for name in arrays}


def early(*given, device, backend):
    return flash_dmattn.apply_dynamic_mask_attention(*given, keep_window_size=3, backend=backend)


FUNCTIONS = {
    "flash_dmattn_func": batch("flash_dmattn_func", ("q", "k", "v", "bias"), softcap=3.0),
    "flash_dmattn_qkvpacked_func": batch("flash_dmattn_qkvpacked_func", ("qkv", "own bias")),
    "flash_dmattn_kvpacked_func": batch("flash_dmattn_kvpacked_func", ("q", "kv", "bias")),
    **{name: varlen(name) for name in VARLEN},
    "apply_dynamic_mask_attention": (early, HEADS_FIRST),
    "fwd": batch("fwd", ("q", "k", "v", "bias"), keep_window_size=4),
}
ALL = {**FUNCTIONS, **{f"{name}-per-key": varlen(name, "key bias") for name in VARLEN}}


def results(name, device, backend, dtype):
    """The output and the gradients of every argument, in float64 on the CPU."""
    function, shapes = ALL[name]
    rng = np.random.default_rng(0)
    drawn = [torch.from_numpy(rng.standard_normal(shape).astype(np.float16)) for shape in shapes.values()]
    if name == "apply_dynamic_mask_attention":
        drawn[3] /= 16  # scores of moderate size
    leaves = [x.to(device, dtype).requires_grad_() for x in drawn]
    out = function(*leaves, device=device, backend=backend)
    dout = torch.from_numpy(rng.standard_normal(tuple(out.shape)).astype(np.float16)).to(device, dtype)
    found = {"out": out, **dict(zip(shapes, torch.autograd.grad(out, leaves, dout)))}
    return {argument: x.detach().cpu().double() for argument, x in found.items()}


def check(name, device, backend):
    expected = results(name, "cpu", "numpy", torch.float64)
    for argument, found in results(name, device, backend, torch.float16).items():
        ref = expected[argument]
        assert ref.norm() > 0 and found.shape == ref.shape
        error = float((found - ref).norm() / ref.norm())
        print(f"{argument}: relative error {error:.1e}")
        # The gradient of A is a sum over keys with cancellation.
        assert error < (2e-2 if argument == "A" else 5e-3), argument


def pairs(*names):
    """The cases that a backend supports: triton and flex reject packed sequences with masks per key."""
    return [f"{backend}-{name}" for backend in names for name in ALL
            if backend in ("cuda", "numpy") or not name.endswith("per-key")]


@pytest.mark.feature("flex forward backward", "cupy_dma.flash_dmattn", "every case",
                     case="{backend}-{case}", but=("per-key",))
@pytest.mark.feature("numpy backward", "cupy_dma.flash_dmattn", "flash_dmattn_kvpacked_func",
                     "flash_dmattn_varlen_qkvpacked_func", "flash_dmattn_varlen_kvpacked_func", "fwd",
                     case="{backend}-{case}")
@pytest.mark.parametrize("case", pairs("numpy", "flex"))
def test_on_the_cpu(case):
    backend, name = case.split("-", 1)
    check(name, "cpu", backend)


@pytest.mark.feature("cuda forward backward", "cupy_dma.flash_dmattn", "every case", case="{backend}-{case}")
@pytest.mark.feature("triton flex forward backward", "cupy_dma.flash_dmattn", "every case",
                     case="{backend}-{case}", but=("per-key",))
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # warnings of torch's compiler
@pytest.mark.parametrize("case", pairs("cuda", "triton", "flex"))
def test_on_a_gpu(case):
    backend, name = case.split("-", 1)
    if backends.why_not(backend) is not None:
        pytest.skip(f"{backend}: {backends.why_not(backend)}")
    check(name, "cuda", backend)


@pytest.mark.parametrize("name", VARLEN)
@pytest.mark.parametrize("backend", ["flex", pytest.param("triton", marks=pytest.mark.gpu)])
def test_packed_sequences_per_key_are_refused(backend, name):
    if backends.why_not(backend) is not None:
        pytest.skip(f"{backend}: {backends.why_not(backend)}")
    with pytest.raises(NotImplementedError, match=f"^backend='{backend}' cannot do this: "):
        results(f"{name}-per-key", "cpu" if backend == "flex" else "cuda", backend, torch.float16)
