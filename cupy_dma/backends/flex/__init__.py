"""The flex backend: torch's FlexAttention with the mask and bias of SPEC section 5.

CUDA arrays run in compiled FlexAttention kernels; CPU arrays (torch or NumPy) in FlexAttention's unfused reference
implementation, which materializes the logits ``(B, H, Lq, Lk)`` and is meant for tests. Mask and bias are a
``mask_mod`` and a ``score_mod`` that index the caller's arrays, with query ``i`` at position ``i + Lk - Lq``. Blocks of
128 x 128 pairs without a visible pair are skipped. The backward pass recomputes the forward.

Limits of FlexAttention, or of this use of it:

- Varlen calls are rejected; pack the sequences with a documents mask.
- A NaN or infinity in a key or value that no query sees changes nothing, nor does one in a query with no visible keys.
  But one that *some* queries see may also propagate to other queries of its batch entry and head, because FlexAttention
  multiplies whole tiles, and 0 times NaN is NaN: from a value to ``out`` and ``dquery``, from a key to ``dquery`` (to
  ``out`` only where the key is visible), from a query to ``dkey``; ``dbias`` is affected by visible pairs only.
- Logits overflow below about -2e38, because they are multiplied by ``log2(e)``: a row whose visible keys all have such
  a bias (the lowest float32 or bfloat16) has ``lse = -inf``, no gradient and, on CUDA, undefined output.
- Every new combination of shapes, types and options is compiled once on CUDA, which takes seconds.
- ``deterministic=True`` with a bias that broadcasts materializes its gradient ``(B, H, Lq, Lk)`` in float32 before
  summing it; otherwise FlexAttention accumulates the bias gradient with atomic float32 additions.
- Building the block mask reads a dense mask once more; for an interval mask it takes ``Lq * Lk / 128`` bytes.

    problem.py            the call as tensors, what mask_mod and score_mod read, which blocks and keys are visible
    passes.py             forward and backward, compiled or not
    ../torch_common/scores_and_selection.py   key scores, their gradients, prefix selection
    ../torch_common/arrays.py                 operands as torch tensors, the caller's stream
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
    """This backend has no decode cache."""
    raise NotImplementedError("backend='flex' has no DynamicCache; backend='cuda' and backend='numpy' have one")


def __getattr__(name: str) -> Any:
    """The backend's functions. Their modules import torch, which may not be installed, so they are loaded lazily."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"cupy_dma.backends.{_MODULES[name]}"), name)
    return found
