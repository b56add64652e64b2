"""Non-finite rows of keys and values: they reach only the queries that see them."""
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from tests.oracle.arrays import host


def problem(kind: str, name: str, bad: float, dtype: str = "float16", n: int = 150, heads: tuple[int, int] = (2, 2),
            head_dim: int = 16) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Any, np.ndarray]:
    """Arguments with one bad row in the first kv head, clean arguments, the mask, and which queries see the row."""
    rng, where = np.random.default_rng(0), n // 2
    clean = {part: rng.standard_normal((1, n, heads[part != "query"], head_dim)).astype(numpy_dtype(dtype))
             for part in ("query", "key", "value")}
    dirty = {part: array.copy() for part, array in clean.items()}
    dirty[name][0, where, 0, 5] = bad
    scores = rng.standard_normal((1, heads[1], n)).astype(np.float32)
    scores[0, 0, where] = 1.2  # kept only for a while
    mask: Any = {"causal": lambda: dma.IntervalMask.causal(n), "window": lambda: dma.IntervalMask.sliding_window(n, 30),
                 "top_w": lambda: dma.IntervalMask.top_w(scores, n * 2 // 15),
                 "dense": lambda: rng.random((1, heads[1], n, n)) < 0.3}[kind]()
    dense = mask if kind == "dense" else mask.to_dense(n)
    return dirty, clean, mask, np.broadcast_to(dense, (1, heads[1], n, n))[0, 0, :, where]


def check(kind: str, name: str, bad: float, convert: Any = np.asarray,
          backend: str | None = None, **sizes: Any) -> None:
    """Outputs of other queries, and of other kv heads, keep all their bits."""
    dirty, clean, mask, sees = problem(kind, name, bad, **sizes)
    assert sees.any() and not sees.all()
    mask = convert(mask) if kind == "dense" else mask.to(convert(np.zeros(1, np.float32)))
    out, good = (host(dma.attention(*map(convert, x.values()), mask=mask, backend=backend)) for x in (dirty, clean))
    group = clean["query"].shape[2] // clean["key"].shape[2]
    assert np.array_equal(out[0, ~sees, :group], good[0, ~sees, :group])
    assert np.array_equal(out[:, :, group:], good[:, :, group:])
    if name == "value":
        assert not np.isfinite(out[0, sees, :group, 5].astype(np.float32)).any()
