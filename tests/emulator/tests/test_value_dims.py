"""Values with a different head dim from keys, on the CUDA kernels: kernels for few queries support them directly, and
repeated calls have no chain. The grid covers the rest."""
from unittest import mock

import numpy as np
import pytest

import cupy_dma as dma
from tests.oracle import reference

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

from cupy_dma.calls import run  # noqa: E402

N, D, DV = 600, 16, 24


@pytest.mark.parametrize("how", ["attention", "top_w"])
def test_few_queries_copy_no_keys(rng, how):
    q, k, v = (rng.standard_normal((1, n, 2, d)).astype(np.float16) for n, d in ((1, D), (N, D), (N, DV)))
    scores = rng.standard_normal((1, 2, N)).astype(np.float32)
    with mock.patch.object(run, "with_equal_dims", side_effect=AssertionError("copied")):
        if how == "attention":
            found, dense = dma.attention(q, k, v, bias=scores, return_lse=True, backend="emulator"), None
        else:
            found = dma.dynamic_mask_attention(q, k, v, scores, window=40, return_lse=True, backend="emulator")
            dense = reference.top_w_dense(scores, 40, query_length=1)
    reference.check_attention(found, q, k, v, dense_mask=dense, bias=scores)


@pytest.mark.parametrize("value_dim", [D, DV])
def test_calls_made_again(rng, value_dim):
    """With sinks, in the first call and in later ones."""
    shapes = (1, 40, 2, D), (1, 40, 1, D), (1, 40, 1, value_dim), (1, 1, 40), (2,)
    for _ in range(4):
        inputs = [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
        inputs[:3] = [x.half() for x in inputs[:3]]
        gradients = []
        for backend in ("emulator", "numpy"):
            own = [x.clone().requires_grad_() for x in inputs]
            out, lse = dma.dynamic_mask_attention(*own[:4], window=9, sink_logits=own[4], return_lse=True,
                                                  backend=backend)
            gradients.append(torch.autograd.grad(out.float().sin().sum() + lse.cos().sum(), own))
        for found, expected in zip(*gradients):
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
