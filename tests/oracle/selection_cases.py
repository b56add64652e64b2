"""The two algorithms of prefix selection on CUDA (kernels/select/prefix_top_w.cu), and scores that are hard to
select."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.cuda.runtime.program import fresh
from tests.oracle import reference
from tests.oracle.arrays import host


@contextmanager
def counting(counted: bool) -> Iterator[None]:
    """Inside the context, one kernel compares each key with all others, however many there are; otherwise keys are
    selected chunk by chunk."""
    with fresh(counted=counted):
        yield


def awkward_scores(kind: str, heads: int, n: int) -> np.ndarray:
    """float32 ``(1, heads, n)``."""
    rng = np.random.default_rng(n)
    s = rng.standard_normal((1, heads, n)).astype(np.float32)
    match kind:
        case "equal":
            return np.zeros_like(s)
        case "increasing":
            return np.sort(s)
        case "decreasing":
            return np.ascontiguousarray(np.sort(s)[..., ::-1])
        case "ties":
            return np.round(s)
        case "recency":
            return s + (12 * np.arange(n) / n).astype(np.float32)
        case "bursty":
            return s + np.repeat(rng.standard_normal((1, heads, -(-n // 50))) * 3, 50, axis=-1)[..., :n].astype("f4")
        case "rounded":
            return s.astype(numpy_dtype("bfloat16")).astype(np.float32)
        case "relu":
            return np.maximum(s, 0) * np.where(rng.random(s.shape) < 0.5, 1, -1).astype(np.float32)
        case "special":
            for share, value in ((0.02, np.nan), (0.02, -np.nan), (0.02, np.inf), (0.3, -np.inf), (0.3, 0.0),
                                 (0.3, -0.0)):
                s[rng.random(s.shape) < share] = value
    return s


def options_of(length: int) -> list[dict[str, np.ndarray]]:
    """Padding, documents, both and neither."""
    rng = np.random.default_rng(length)
    padding = {"padding": rng.random((1, length)) < 0.8}
    documents = {"documents": np.cumsum(rng.random((1, length)) < 5 / length, axis=-1).astype(np.int32)}
    return [{}, padding, documents, padding | documents]


def check(scores: np.ndarray, window: Any, convert: Any = np.asarray,
          backend: str | None = None, **options: Any) -> None:
    """Check against the heap of the NumPy backend, which is itself tested against the definition."""
    moved = {name: convert(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    mask = dma.IntervalMask.top_w(convert(scores), window, **moved, backend=backend)
    expected = dma.IntervalMask.top_w(scores, window, **options, backend="numpy")
    assert np.array_equal(host(mask.start), expected.start) and np.array_equal(host(mask.stop), expected.stop)


def check_definition(problem: tuple[Any, ...], convert: Any = np.asarray,
                     backend: str | None = None) -> None:
    """``problem``: one from tests/unit/test_selection.py."""
    scores, window, padding, documents = problem
    moved = [None if x is None else convert(x) for x in (scores, padding, documents)]
    mask = dma.IntervalMask.top_w(moved[0], window, padding=moved[1], documents=moved[2], backend=backend)
    expected = reference.top_w_dense(scores, window, "prefix", padding, documents, scores.shape[2])
    assert np.array_equal(np.broadcast_to(host(mask.to_dense(scores.shape[2])), expected.shape), expected)
