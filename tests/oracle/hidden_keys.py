"""Keys hidden by a bias of -inf, with NaN and infinities, change nothing; rows with only such keys give 0."""
from typing import Any, NamedTuple

import numpy as np

import cupy_dma as dma
from tests.oracle import reference


class Case(NamedTuple):
    name: str
    mask: str = "causal"  # none causal window dense
    bias: str = "key"  # key key_per_head full
    dtype: str = "float16"
    head_dim: int = 16
    query_length: int = 70
    key_length: int = 70
    softcap: float = 0.0

    def __str__(self) -> str:
        return self.name


CASES = [Case(f"{mask}-{bias}-{softcap:g}", mask, bias, softcap=softcap)
         for mask in ("none", "causal", "window", "dense")
         for bias, softcap in (("key", 0.0), ("key_per_head", 0.0), ("full", 0.0), ("key", 2.0), ("full", 2.0))]
FEW = [Case(f"few-{mask}", mask, query_length=2, key_length=600) for mask in ("none", "causal", "window")]


def run(case: Case, convert: Any = np.asarray, back: Any = np.asarray, forward: str | None = None,
        **options: Any) -> None:
    """Run and check forward and backward of the case. ``forward``: the backend of the forward, if different."""
    rng = np.random.default_rng(7)
    heads, lq, lk = 4, case.query_length, case.key_length
    q, k, v, dout = (rng.standard_normal((1, n, h, case.head_dim)).astype(case.dtype)
                     for n, h in ((lq, heads), (lk, 2), (lk, 2), (lq, heads)))
    shape = {"key": (1, 2, 1, lk), "key_per_head": (1, heads, 1, lk), "full": (1, heads, lq, lk)}[case.bias]
    bias = rng.standard_normal(shape).astype(np.float32 if "key" in case.bias else case.dtype)
    hidden = rng.random(lk) < 0.3
    hidden[[0, 1, 2, 20, 21, 22, lk - 2]] = True
    bias[..., hidden] = -np.inf
    k[:, hidden], v[:, hidden] = np.nan, np.inf
    k[:, 20], v[:, 0] = 1, np.nan
    p, j = np.arange(lq)[:, None] + lk - lq, np.arange(lk)
    dense = {"none": None, "causal": j <= p, "window": (j <= p) & (j > p - 3),
             "dense": (rng.random((lq, lk)) < 0.5) & (j <= p)}[case.mask]
    mask = {"window": lambda: dma.IntervalMask.sliding_window(lk, 3, like=convert(q)),
            "dense": lambda: convert(dense)}.get(case.mask, lambda: None)()
    given = [convert(x) for x in (q, k, v)]
    named = {"mask": mask, "bias": convert(bias), "causal": case.mask != "none", "softcap": case.softcap}
    oracle = {"dense_mask": None if dense is None else dense[None, None], "bias": bias, "softcap": case.softcap}
    out, lse = dma.attention(*given, **named, return_lse=True, **(options if forward is None else {"backend": forward}))
    reference.check_attention((back(out), back(lse)), q, k, v, **oracle)
    assert np.isfinite(back(out)).all() and (case.mask == "none" or lq < lk or not back(out)[0, :3].any())
    for deterministic in (False, True):
        gradients = dma.backward.attention_backward(convert(dout), *given, out, lse, **named,
                                                    deterministic=deterministic, **options)
        dq, dk, dv, dbias = map(back, gradients)
        reference.check_attention_gradients((dq, dk, dv, dbias), dout, q, k, v, **oracle)
        assert not (dk[:, hidden].any() or dv[:, hidden].any() or dbias[..., hidden].any())
