"""Small inputs for the tests of ``cupy_dma.jax``, float32 by default, and a check for cases of the grid."""
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cupy_dma.jax as dj
from tests.oracle import cases

B, N, H, HKV, D = 2, 24, 4, 2, 8


def draw(seed: int = 0, dtype: Any = jnp.float32, n: int = N) -> list[Any]:
    """query, key, value, scores."""
    rng = np.random.default_rng(seed)
    shapes = (B, n, H, D), (B, n, HKV, D), (B, n, HKV, D)
    rows = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return [*rows, jnp.asarray(rng.standard_normal((B, HKV, n)), jnp.float32)]


def recipe(seed: int = 1, dtype: Any = jnp.float32) -> list[Any]:
    """dt_proj, A, dt_bias."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape) / 3, dtype) for shape in ((HKV, HKV * D), (HKV,), (HKV,))]


def same(a: Any, b: Any) -> bool:
    """Whether two arrays are equal bit for bit, including NaN and type."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_case(case: cases.Case, **tolerance: Any) -> None:
    """Check forward and backward of one jitted function, through out and lse, against the oracle."""
    (q, k, v), named = cases.arguments(case, np.asarray)
    mask, more = named.pop("mask"), {name: named.pop(name, None) for name in ("bias", "sink_logits")}
    more = {name: jnp.asarray(x) for name, x in more.items() if x is not None}

    @jax.jit
    def both(floats: Any, more: Any, dout: Any, dlse: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, more: Any) -> Any:
            return dj.attention(q, k, v, mask=mask, **more, **named, return_lse=True)

        (out, lse), pull = jax.vjp(forward, *floats, more)
        return out, lse, pull((dout, dlse.astype(lse.dtype)))

    upstream = (jnp.asarray(cases._drawn(case)[name]) for name in ("dout", "dlse"))
    out, lse, (*gradients, of_more) = both([jnp.asarray(x) for x in (q, k, v)], more, *upstream)
    cases.check(case, np.asarray(out), np.asarray(lse), **tolerance)
    found = [*map(np.asarray, gradients), *(np.asarray(of_more[name]) if name in more else None
                                            for name in ("bias", "sink_logits"))]
    cases.check_backward(case, found, with_dlse=True, **tolerance)
