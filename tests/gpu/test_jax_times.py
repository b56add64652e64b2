"""jax on a GPU: what a warm call costs the host, and a training step beside torch's."""
from __future__ import annotations

import time

import numpy as np
import pytest

import cupy_dma as dma

jax = pytest.importorskip("jax", minversion="0.9")

import jax.numpy as jnp  # noqa: E402

import cupy_dma.jax as dj  # noqa: E402
from tests.gpu.test_jax import draw, dynamic, needs_a_gpu, parameters  # noqa: E402, F401 - a fixture

pytestmark = pytest.mark.gpu

MOST_HOST_TIME = 150e-6  # seconds, of a warm jitted call


def test_a_warm_call_costs_the_host_little():
    arguments = draw(n=256)
    step = jax.jit(dynamic)
    jax.block_until_ready(step(*arguments))
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(50):
            out = step(*arguments)
        out.block_until_ready()  # the GPU's part of a call this small is less than the host's
        times.append((time.perf_counter() - begin) / 50)
    print(f"host time of a warm jitted call: {1e6 * sorted(times)[10]:.0f} us")
    assert sorted(times)[10] <= MOST_HOST_TIME


def test_a_training_step_is_as_fast_as_torchs():
    """One layer at 32768 tokens, 16 and 8 heads, D=128, window=1024: within 10 % of torch."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    q, k, v, _ = draw(32768, 16, 8, 128)
    q, k, v = (x[:1] for x in (q, k, v))
    dt_proj, A = parameters(8, 128)

    def attend(q, k, v, dt_proj, A):
        return dj.dynamic_mask_attention(q, k, v, dt_proj=dt_proj, A=A, window=1024)

    @jax.jit
    def step(q, k, v, dt_proj, A, dout):
        _, pull = jax.vjp(attend, q, k, v, dt_proj, A)
        return pull(dout)

    dout = jnp.ones_like(q)
    tensors = [torch.tensor(np.asarray(x, np.float32), device="cuda").to(
        torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32).requires_grad_() for x in (q, k, v, dt_proj, A)]
    ones = torch.ones_like(tensors[0])

    def torch_step():
        out = dma.dynamic_mask_attention(*tensors[:3], dt_proj=tensors[3], A=tensors[4], window=1024)
        return torch.autograd.grad(out, tensors, ones)

    def seconds(run, wait):
        for _ in range(5):
            run()
        wait()
        begin = time.perf_counter()
        for _ in range(20):
            found = run()
        wait(found)
        return (time.perf_counter() - begin) / 20

    for _ in range(3):  # another process may take the GPU for a while
        ours = seconds(lambda: step(q, k, v, dt_proj, A, dout),
                       lambda found=None: jax.block_until_ready(found) if found is not None else jax.effects_barrier())
        theirs = seconds(torch_step, lambda found=None: torch.cuda.synchronize())
        print(f"a training step: jax {1e3 * ours:.2f} ms, torch {1e3 * theirs:.2f} ms")
        if ours <= 1.1 * theirs:
            return
    pytest.fail(f"jax took {ours / theirs:.2f} times as long as torch, three times over")
