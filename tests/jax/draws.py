"""Inputs of the tests of ``cupy_dma.jax``: small, float32 unless said otherwise."""
from typing import Any

import jax.numpy as jnp
import numpy as np

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
    """Bit for bit, NaN included, and of one type."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
