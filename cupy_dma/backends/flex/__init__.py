"""The flex backend: torch's FlexAttention with mask and bias applied as SPEC section 5 has them.

CUDA arrays run in compiled FlexAttention kernels; CPU arrays (torch or NumPy) in FlexAttention's unfused mathematics,
which holds the scores ``(B, H, Lq, Lk)`` in memory and is meant for tests. Mask and bias reach the kernel as
``mask_mod`` and ``score_mod`` that index the caller's arrays, with query ``i`` at position ``i + Lk - Lq``, and blocks
of 128 x 128 pairs that hold no visible pair are skipped. The backward pass computes the forward again.

Limits, of FlexAttention or of this use of it:

- Varlen calls are refused; pack the sequences with a documents mask.
- A NaN or infinity in a key or value that no query sees changes nothing, and none in a query that sees nothing. But one
  that *some* queries see may also reach others of its batch entry and head, because FlexAttention multiplies whole
  tiles, and 0 times NaN is NaN: a value ``out`` and ``dquery``, a key ``dquery`` (in ``out`` only where it is seen), a
  query ``dkey`` and ``dbias`` is spoiled by what is visible only. Finite arrays never meet this.
- Every new combination of shapes, types and options is compiled once on CUDA, which takes seconds.
- ``deterministic=True`` with a bias that broadcasts holds its gradient ``(B, H, Lq, Lk)`` in float32 before it is
  summed; without it FlexAttention adds to the bias gradient with atomic float32 additions.
- Finding the blocks reads a dense mask once more and takes ``Lq * Lk / 128`` bytes for an interval mask.

    problem.py            the call as tensors, what mask_mod and score_mod read, which blocks and keys are seen
    passes.py             forward and backward, compiled or not
    ../torch_common/scores_and_selection.py
    ../torch_common/arrays.py   operands as torch tensors, the caller's stream
"""
from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["attention", "attention_backward", "cache_extend", "key_scores", "key_scores_backward", "prefix_stop",
           "unavailable"]

_SCORES = "torch_common.scores_and_selection"
_MODULES = {"attention": "flex.passes", "attention_backward": "flex.passes", "key_scores": _SCORES,
            "key_scores_backward": _SCORES, "prefix_stop": _SCORES}


def unavailable() -> str | None:
    """Why this backend cannot run here; None if it can."""
    try:
        from torch.nn.attention import flex_attention  # noqa: F401
    except ImportError as error:
        return f"FlexAttention needs torch 2.6 or newer ({error})"
    return None


def cache_extend(state: Any, call: Any) -> Any:
    """The decode cache: not here."""
    raise NotImplementedError("backend='flex' has no DynamicCache; backend='cuda' and backend='numpy' have one")


def __getattr__(name: str) -> Any:
    """The functions of a backend. Their modules import torch, which may be missing, so they come late."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"cupy_dma.backends.{_MODULES[name]}"), name)
    return found
