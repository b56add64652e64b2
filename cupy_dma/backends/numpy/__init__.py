"""The NumPy backend: runs where there is no GPU, and implements every feature.

float16, bfloat16 and float32 are computed in float32, float64 in float64. Memory and work are proportional to the
visible pairs: attention loops over tiles of consecutive queries, gathers only the keys that some query of the tile
sees, and processes long key lists in chunks. No ``Lq x Lk`` array is ever allocated for interval masks, and dense masks
and biases are read in slices. Every sum has a fixed order, so results are bitwise reproducible.

A product of one tile is too small to share, so BLAS uses one thread meanwhile; the user's number is restored. For long
sequences, threads (as many as BLAS may have) each compute some batch entries and kv heads, with the same bits.

Invisible keys never contribute: the logit of an invisible key is replaced by -inf, and non-finite rows are added only
to queries that see them (in a matrix product even a weight of 0 would propagate a NaN).

    host.py           operands as NumPy arrays, and back
    threads.py        one BLAS thread for small products, and threads for long sequences
    scores.py         key scores and their gradients
    selection.py      prefix top-w
    tiles.py          query tiles, their keys and logits      (shared by forward and backward)
    forward.py        attention
    small.py          attention of short sequences, several in one operation
    backward.py       its gradients
    varlen.py         both, sequence by sequence
    dynamic_cache.py  the decode cache
"""
from cupy_dma.backends.numpy.dynamic_cache import cache_extend
from cupy_dma.backends.numpy.scores import key_scores, key_scores_backward
from cupy_dma.backends.numpy.selection import prefix_stop
from cupy_dma.backends.numpy.varlen import attention, attention_backward
from cupy_dma.calls.types import AttentionBackwardCall, AttentionCall

__all__ = ["attention", "attention_backward", "cache_extend", "key_scores", "key_scores_backward", "prefix_stop",
           "takes_value_dim", "unavailable"]


def unavailable() -> str | None:
    """Why this backend cannot run here: it always can."""
    return None


def takes_value_dim(call: AttentionCall | AttentionBackwardCall) -> bool:
    """Whether values may have another head dim than keys."""
    return True
