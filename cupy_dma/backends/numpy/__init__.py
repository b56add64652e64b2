"""The NumPy backend: what runs where there is no GPU, and a reference of every feature.

16-bit types are computed in float32, float32 in float32, float64 in float64. Memory and work follow the visible pairs:
attention walks over tiles of consecutive queries, gathers only the keys that some query of the tile sees, and works
through long key lists in chunks. No ``Lq x Lk`` array is ever made for interval masks, and dense masks and biases are
read in slices. Every sum has one order, so results are the same bits on every run.

Invisible keys are never multiplied in: a logit of an invisible key is replaced by -inf, and rows that are not finite
are added only where they are seen (in a matrix product even a weight of 0 would spread a NaN).

    host.py        operands as NumPy arrays, and back
    scores.py      key scores and their gradients
    selection.py   prefix top-w
    tiles.py       queries in tiles, the keys of each, their logits      (shared by forward and backward)
    forward.py     attention
    backward.py    its gradients
    varlen.py      both, sequence by sequence
    dynamic_cache.py  the decode cache
"""
from cupy_dma.backends.numpy.dynamic_cache import cache_extend
from cupy_dma.backends.numpy.scores import key_scores, key_scores_backward
from cupy_dma.backends.numpy.selection import prefix_stop
from cupy_dma.backends.numpy.varlen import attention, attention_backward

__all__ = ["attention", "attention_backward", "cache_extend", "key_scores", "key_scores_backward", "prefix_stop",
           "unavailable"]


def unavailable() -> str | None:
    """Why this backend cannot run here: it always can."""
    return None
