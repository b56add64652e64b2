"""A user's file, for ``mypy --strict``: every public name with its types. It runs, too."""
from typing import Any

import numpy as np
import numpy.typing as npt

import cupy_dma as dma
from cupy_dma import DynamicCache, IntervalMask, attention, backward, get_available_backends

Array = npt.NDArray[np.float32]


def layer(query: Array, key: Array, value: Array, dt_proj: Array, A: Array, window: int) -> tuple[Array, Array]:
    scores: Array = dma.key_scores(value, dt_proj, A, form="exp")
    mask: IntervalMask = IntervalMask.top_w(scores, window, keys="prefix")
    mask = mask | IntervalMask.sinks(mask.key_length, 2) | IntervalMask.sliding_window(mask.key_length, 4)
    out: Array
    lse: Array
    out, lse = attention(query, key, value, mask=mask, bias=scores, return_lse=True)
    return out, lse


def main() -> None:
    rng = np.random.default_rng(0)
    query: Array = rng.standard_normal((1, 32, 4, 8), np.float32)
    key: Array = rng.standard_normal((1, 32, 2, 8), np.float32)
    dt_proj: Array = rng.standard_normal((2, 16), np.float32)
    A: Array = np.ones(2, np.float32)
    out, lse = layer(query, key, key, dt_proj, A, window=8)
    scores: Array = dma.key_scores(key, dt_proj, A)
    same: Array = dma.dynamic_mask_attention(query, key, key, scores, window=8)
    grads: backward.AttentionGradients = backward.attention_backward(
        np.ones_like(out), query, key, key, out, lse, bias=scores, needs=("query", "bias"))
    lengths = np.array([0, 12, 32], np.int32)
    packed: Array = dma.varlen_attention(query[0], key[0], key[0], lengths, lengths, causal=True)
    chosen: Array = dma.varlen_dynamic_mask_attention(query[0], key[0], key[0], lengths, lengths, scores[0], window=8)
    cache = DynamicCache(1, 2, 8, 8, dtype="float32")
    step: Array = cache.extend(query, key, key, scores)
    kept: int = cache.memory_bytes
    axes: Any = IntervalMask.from_stop(np.arange(32) + 4, window=4).to_dense(32)
    names: list[str] = get_available_backends()
    shapes: list[tuple[int, ...]] = [x.shape for x in (same, grads.query, grads.bias, packed, chosen, step, axes)]
    given: list[dma.Array] = [query, lengths]
    print(names, kept, shapes, len(given))


if __name__ == "__main__":
    main()
